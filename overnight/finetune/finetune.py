"""Fine-tuning: a pretrained encoder and a labeled task to a model, its predictions and its score, seed by seed."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as serialize
from torch import Tensor, nn

from overnight.batches.order import key
from overnight.checkpoint import reader
from overnight.checkpoint.run_corpus import assert_same_corpus, kept_vocabulary
from overnight.checkpoint.task_folder import read_facts, write_facts
from overnight.config import AdamWConfig, BertRun, Finetune, Schedule
from overnight.console import Line
from overnight.corpus.shards import load_manifest
from overnight.corpus.tokenizer import Vocabulary, copy_tokenizer
from overnight.display import duration, measures, number, scale_of
from overnight.engine.loop import LoopConfig, training_steps
from overnight.engine.precision import DTYPES, LossScale
from overnight.engine.pretrain import set_up_machine
from overnight.errors import DataError
from overnight.finetune.encoded_task import EncodedExamples, EncodedTask, encode_task
from overnight.models.heads import BertForQuestionAnswering, Classifier
from overnight.optim.groups import build_optimizer
from overnight.optim.schedules import factor
from overnight.run_dir.atomic import write_json, write_whole
from overnight.run_dir.lock import run_lock
from overnight.run_dir.task_results import append_result, results_of

# Sub-streams of a task's seed.
_INIT, _ORDER, _DROPOUT = 1, 2, 3


def task_model(task_kind: str, labels: int, run: BertRun, vocab_size: int) -> Classifier | BertForQuestionAnswering:
    """Return the untrained network of a task, with the encoder of a run."""
    if task_kind == "spans":
        return BertForQuestionAnswering(run.model, vocab_size)
    return Classifier(run.model, vocab_size, labels if task_kind == "classification" else 1)


@torch.no_grad()
def outputs(
    model: nn.Module,
    examples: EncodedExamples,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    report_progress: Callable[[int, float], None] | None = None,
) -> list[np.ndarray]:
    """Return the network's outputs for every sequence, in the order of the examples.

    Args:
        size: sequences at once.
        report_progress: called with the sequences read and their share of all tokens, after each batch.
    """
    model.eval()
    out: list[np.ndarray] = [np.empty(0)] * len(examples)
    done, tokens, total = 0, 0, sum(map(len, examples.ids))
    for index, batch in examples.in_order(size):
        for i, output in zip(index, model(batch.to(device), dtype).cpu().numpy(), strict=True):
            out[i] = output
        done, tokens = done + len(index), tokens + sum(batch.lengths)
        if report_progress:
            report_progress(done, tokens / total)
    return out


def finetune(run: BertRun, name: str, line: Line | None = None) -> list[dict[str, Any]]:
    """Fine-tune one task of a run with every seed, and, if asked, the same network from random init.

    What is done already, with the same settings from the same checkpoint, is not done again. The best model by dev score goes
    to `finetune/NAME/` in the run folder, with its predictions.

    Args:
        run: a run whose pretraining has a checkpoint.
        name: key in `run.finetune`.

    Returns:
        the lines of `tasks.jsonl` of this task.

    Raises:
        UserError: when another process is writing the run folder.
    """
    source = reader.newest_checkpoint(run.run_dir / "checkpoints")
    if source is None:
        raise DataError(f"{run.run_dir} has no checkpoint to fine-tune; run `overnight pretrain` first")
    with run_lock(run.run_dir), line or Line() as line:
        return _finetune(run, name, source, line)


def _finetune(run: BertRun, name: str, source: Path, line: Line) -> list[dict[str, Any]]:
    spec, device = run.finetune[name], set_up_machine(run)
    progress, state, _ = reader.read_checkpoint(source)
    corpus, vocabulary = kept_vocabulary(run)
    assert_same_corpus(progress, load_manifest(corpus), corpus, run)
    pretrained = {k: v for k, v in state.items() if k.startswith(("encoder.", "pooler."))}
    log = run.run_dir / "tasks.jsonl"
    facts = json.dumps([asdict(spec) | {"seeds": [], "random_init_baseline": False, "micro_batch_size": 0}, source.name, run.precision])
    config_hash = hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()
    jobs = [(init, seed) for init in (["pretrained", "random"] if spec.random_init_baseline else ["pretrained"]) for seed in spec.seeds]
    # The folder holds one model: what was done with other settings since is not what it holds, so all is done again.
    mine = results_of(log, name, config_hash) if _kept_config_hash(run.run_dir / "finetune" / name) == config_hash else []
    missing = [job for job in jobs if job not in {(e.get("init"), e.get("seed")) for e in mine}]
    if not missing:
        if not (run.run_dir / "finetune" / name / "vocab.txt").exists():  # an older version left it with the prepared data
            copy_tokenizer(corpus, run.run_dir / "finetune" / name)
        line.print(f"{name}: done already")
        return mine
    task = encode_task(spec, corpus, vocabulary)
    for note in task.notes:
        line.print(f"{name}: {note}")
    for what, value in task.baselines.items():
        if not any(e["kind"] == "baseline" for e in mine):
            mine.append(
                append_result(
                    log,
                    {"kind": "baseline", "name": name, "config_hash": config_hash, "method": what, "metric": task.metric, "value": value},
                )
            )
            line.print(f"{name}: {what}  {measures({task.metric: value})}")
    for init, seed in missing:
        entry = _one(run, spec, name, task, pretrained if init == "pretrained" else None, seed, vocabulary, device, line)
        entry["config_hash"] = config_hash
        best = max((e["value"] for e in mine if e.get("init") == "pretrained"), default=None)
        model, files = entry.pop("model"), entry.pop("files")
        if init == "pretrained" and (best is None or entry["value"] > best):
            _keep(run, name, spec, task, model, files, entry, vocabulary, device, line)
        mine.append(append_result(log, entry))
        line.print(f"{name}: seed {seed} {init}  " + measures(entry["metrics"], scale_of(spec.task)))
    return mine


def _one(
    run: BertRun,
    spec: Finetune,
    name: str,
    task: EncodedTask,
    pretrained: dict[str, Tensor] | None,
    seed: int,
    vocabulary: Vocabulary,
    device: torch.device,
    line: Line,
) -> dict[str, Any]:
    start = time.perf_counter()
    torch.manual_seed(key(seed, _INIT) >> 1)
    model = task_model(task.kind, len(task.labels), run, vocabulary.size).to(device)
    if pretrained is not None:
        own = model.state_dict()
        reader.fill(model, {**own, **{k: v for k, v in pretrained.items() if k in own}}, run.run_dir / "checkpoints")
    batch = min(spec.global_batch_size, len(task.train))
    micro = next(size for size in range(min(spec.micro_batch_size, batch), 0, -1) if batch % size == 0)
    steps = max(1, round(spec.epochs * len(task.train) / batch))
    schedule = Schedule(warmup_ratio=spec.warmup_ratio)
    settings = LoopConfig(
        steps=steps,
        lr=lambda step: spec.lr * factor(schedule, step, steps),
        max_grad_norm=1.0,
        dtype=DTYPES[run.precision],
        device=device,
        seed=(seed, _DROPOUT),
        # It has no checkpoints to go back to.
        on_nonfinite="skip" if run.stability.on_nonfinite == "skip" else "stop",
    )
    scale = LossScale() if run.precision == "fp16" else None
    optimizer = build_optimizer(model, AdamWConfig(lr=spec.lr, weight_decay=spec.weight_decay))
    loss = 0.0
    init = "random" if pretrained is None else "pretrained"
    batches = partial(task.train.step, batch=batch, micro_batch=micro, seed=(seed, _ORDER))
    for step in training_steps(model, model.losses, optimizer, batches, settings, scale=scale):
        now = sum(float(x) for x in step.losses.values())
        loss = now if step.step == 1 else 0.98 * loss + 0.02 * now
        left = (time.perf_counter() - start) / step.step * (steps - step.step)
        line.update(f"{name} seed {seed} {init}  {step.step:,}/{steps:,}  loss {number(loss, 3)}  lr {step.lr:.3g}  left {duration(left)}")

    def scored(examples: EncodedExamples) -> list[np.ndarray]:
        report_progress = _scoring(line, f"{name} seed {seed} {init}", len(examples))
        return outputs(model, examples, spec.micro_batch_size, settings.dtype, device, report_progress)

    results, files = task.evaluate(scored(task.dev))
    for split, evaluate_split in task.extra_metrics.items():
        results |= evaluate_split(scored(task.test[split][0]))
    return {
        "kind": "finetune",
        "name": name,
        "task": spec.task,
        "seed": seed,
        "init": init,
        "metric": task.metric,
        "value": results[task.metric],
        "metrics": results,
        "rows": len(task.train),
        "seconds": round(time.perf_counter() - start, 2),
        "model": model,
        "files": files,
    }


def _scoring(line: Line, what: str, total: int) -> Callable[[int, float], None]:
    """Return what :func:`outputs` tells its progress, to show it: the longest sequences come first, so time goes by tokens."""
    start = time.perf_counter()

    def report_progress(done: int, share: float) -> None:
        left = (time.perf_counter() - start) * (1 - share) / share
        line.update(f"{what}  scored {done:,}/{total:,}  left {duration(left)}")

    return report_progress


def _keep(
    run: BertRun,
    name: str,
    spec: Finetune,
    task: EncodedTask,
    model: nn.Module,
    files: dict[str, Any],
    entry: dict[str, Any],
    vocabulary: Vocabulary,
    device: torch.device,
    line: Line,
) -> None:
    """Write the model, what it predicts, and what is needed to load it, as one folder that is there whole or not at all."""
    place, beside = run.run_dir / "finetune" / name, run.run_dir / "finetune" / f".{name}.tmp"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    weights = {k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()}
    write_whole(beside / "model.safetensors", [serialize(weights)])
    copy_tokenizer(kept_vocabulary(run)[0], beside)
    facts = {
        "kind": task.kind,
        "labels": task.labels,
        "pairs": task.pairs,
        "vocab_size": vocabulary.size,
        "tokenizer": vocabulary.hash,
        "spec": asdict(spec),
        "result": entry,
    }
    for file, content in files.items():
        write_json(beside / file, content)
    write_facts(beside, facts)
    for split, (encoded, examples) in task.test.items():
        given = outputs(
            model,
            encoded,
            spec.micro_batch_size,
            DTYPES[run.precision],
            device,
            _scoring(line, f"{name} {split}", len(examples)),
        )
        answers = [f"{o[0]:.4f}" if task.kind == "regression" else task.labels[int(o.argmax())] for o in given]
        table = "index\tprediction\n" + "".join(f"{example.id}\t{answer}\n" for example, answer in zip(examples, answers, strict=True))
        write_whole(beside / f"{split}.tsv", [table.encode()])
    shutil.rmtree(place, ignore_errors=True)
    beside.rename(place)


def _kept_config_hash(folder: Path) -> str | None:
    """Return the settings with which the model in a task's folder was made."""
    return read_facts(folder)["result"].get("config_hash") if (folder / "task.json").exists() else None
