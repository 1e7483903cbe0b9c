"""Fine-tuning: a pretrained encoder and a labelled task to a model, its predictions and its score, seed by seed."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as serialize
from torch import Tensor, nn

from overnight.batches.order import key, order
from overnight.batches.packing import Batch, StepBatches, deal
from overnight.config import Finetune, Optim, Run, Schedule, environment_path
from overnight.corpus.files import write_json, write_whole
from overnight.corpus.shards import load_manifest
from overnight.corpus.tokenizer import Vocabulary, load_tokenizer, load_vocabulary
from overnight.errors import DataError
from overnight.models.heads import Classifier, SpanReader
from overnight.optim.groups import build_optimizer
from overnight.optim.schedules import factor
from overnight.tasks import metrics, spans
from overnight.tasks.encode import encode_rows
from overnight.tasks.log import append, lines_of
from overnight.tasks.rows import Row
from overnight.train import checkpoint
from overnight.train.folder import same_corpus
from overnight.train.lock import hold
from overnight.train.loop import Settings, optimise
from overnight.train.monitor import Line, duration
from overnight.train.precision import DTYPES, LossScale
from overnight.train.pretrain import set_up_machine

# Sub-streams of a task's seed.
_INIT, _ORDER, _DROPOUT = 1, 2, 3


@dataclass(frozen=True)
class Examples:
    """Token sequences with their targets, ready to be batched."""

    ids: list[np.ndarray]
    segments: list[np.ndarray]
    targets: dict[str, np.ndarray]
    """One value a sequence, by name; empty where they are not known."""

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, index: np.ndarray) -> Batch:
        """The flat batch of some sequences, in the order given."""
        lengths = [len(self.ids[i]) for i in index]
        starts = np.concatenate([[0], np.cumsum(lengths)])
        return Batch(
            ids_N=torch.from_numpy(np.concatenate([self.ids[i] for i in index]).astype(np.int64)),
            positions_N=torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])),
            segments_N=torch.from_numpy(np.concatenate([self.segments[i] for i in index]).astype(np.int64)),
            starts=torch.from_numpy(starts.astype(np.int32)),
            lengths=tuple(lengths),
            targets={name: torch.from_numpy(values[index]) for name, values in self.targets.items()},
        )

    def step(self, step: int, batch: int, micro_batch: int, seed: tuple[int, ...]) -> StepBatches:
        """The micro-batches of a step: `batch` rows of an endless stream of shuffled epochs."""
        positions = np.arange(step * batch, (step + 1) * batch)
        epochs, index = positions // len(self), positions % len(self)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            index[here] = order(index[here], len(self), key(*seed, int(epoch)))
        lengths = [len(self.ids[i]) for i in index]
        bins = deal(lengths, batch // micro_batch)
        return StepBatches(tuple(self.batch(index[rows]) for rows in bins), sum(lengths), batch)

    def in_order(self, size: int) -> list[tuple[np.ndarray, Batch]]:
        """All sequences once, longest first in batches of `size`, each with the indices of its sequences."""
        longest_first = np.argsort([-len(x) for x in self.ids], kind="stable")
        return [(index, self.batch(index)) for index in np.split(longest_first, range(size, len(self), size))]


@dataclass(frozen=True)
class Problem:
    """A task, read and encoded: what to train on, and how to judge the outputs of the network."""

    name: str
    kind: str
    """classification, regression or spans."""
    labels: tuple[str, ...]
    metric: str
    train: Examples
    dev: Examples
    judge: Callable[[list[np.ndarray]], tuple[dict[str, float], dict[str, Any]]]
    """Outputs of the network for every dev sequence → metrics by name, and files to write by name (JSON values)."""
    test: dict[str, tuple[Examples, list[Row]]]
    """Further splits to predict, by file name."""
    notes: tuple[str, ...]
    baselines: dict[str, float]
    """Scores of simple rules on the same dev rows."""


def read_problem(spec: Finetune, folder: Path, vocabulary: Vocabulary) -> Problem:
    """Read and encode a task.

    Args:
        spec: which task, where, how long.
        folder: holds the tokenizer.

    Raises:
        DataError: when a file is missing or a row cannot be used.
    """
    tokenizer = load_tokenizer(folder)
    if spec.task == "squad":
        return _read_squad(spec, tokenizer, vocabulary)
    if spec.task == "docnames":
        from overnight.tasks.docnames import load_docnames, overlap_baseline

        task = load_docnames()
        baselines = {"word overlap": overlap_baseline(task)}
    else:
        from overnight.tasks.classification import load_task

        task, baselines = load_task(spec.task, environment_path(spec.path, "finetune.path")), {}

    # A metric that lacks its package says so here, before any training.
    metrics.score(task.name, task.kind, *[[0.0, 1.0] if task.kind == "regression" else ["0", "1"]] * 2)

    def encoded(rows: list[Row]) -> Examples:
        sequences = encode_rows(tokenizer, vocabulary, rows, spec.length)
        targets = {}
        if rows and all(row.label is not None for row in rows):
            if task.kind == "regression":
                targets["label"] = np.array([float(row.label or 0) for row in rows], np.float32)
            else:
                number = {label: i for i, label in enumerate(task.labels)}
                targets["label"] = np.array([number[str(row.label)] for row in rows], np.int64)
        return Examples([e.ids for e in sequences], [e.segments for e in sequences], targets)

    def answers(outputs: list[np.ndarray]) -> list[str | float]:
        return [float(o[0]) if task.kind == "regression" else task.labels[int(o.argmax())] for o in outputs]

    def judge(outputs: list[np.ndarray]) -> tuple[dict[str, float], dict[str, Any]]:
        given = answers(outputs)
        right = [row.label for row in task.dev if row.label is not None]
        files = {"predictions.json": {row.id: answer for row, answer in zip(task.dev, given, strict=True)}}
        return metrics.score(task.name, task.kind, right, given), files

    train = task.train[: spec.max_rows] if spec.max_rows else task.train
    tests = {"test": task.test, **task.extra}
    return Problem(
        name=task.name,
        kind=task.kind,
        labels=task.labels,
        metric=task.main_metric,
        train=encoded(train),
        dev=encoded(task.dev),
        judge=judge,
        test={name: (encoded(rows), rows) for name, rows in tests.items() if rows},
        notes=task.notes,
        baselines=baselines,
    )


def _read_squad(spec: Finetune, tokenizer: Any, vocabulary: Vocabulary) -> Problem:
    from overnight.tasks.squad import load_squad

    data = load_squad(environment_path(spec.path, "finetune.path"))
    # A question whose answers do not stand where its file says has nothing to learn from.
    placed = [q for q in data.train if any(answer.start >= 0 for answer in q.answers)]
    cut = {
        "train": spans.windows(tokenizer, vocabulary, placed[: spec.max_rows or None], spec.length, spec.stride),
        "dev": spans.windows(tokenizer, vocabulary, data.dev, spec.length, spec.stride),
    }

    def judge(outputs: list[np.ndarray]) -> tuple[dict[str, float], dict[str, Any]]:
        starts, ends = [o[:, 0] for o in outputs], [o[:, 1] for o in outputs]
        predictions, nbest = spans.best_answers(cut["dev"], starts, ends, max_answer=spec.max_answer)
        scores = metrics.squad_scores({q.id: [a.text for a in q.answers] for q in data.dev}, predictions)
        return scores, {"predictions.json": predictions, "nbest_predictions.json": nbest}

    examples = {
        # As in run_squad.py, a window without the answer points at [CLS].
        split: Examples(
            [w.ids for w in windows],
            [w.segments for w in windows],
            {name: np.array([getattr(w, name) or 0 for w in windows], np.int64) for name in ("start", "end")},
        )
        for split, windows in cut.items()
    }
    return Problem("squad", "spans", (), "f1", examples["train"], examples["dev"], judge, {}, data.notes, {})


def new_head(problem_kind: str, labels: int, run: Run, vocab_size: int) -> Classifier | SpanReader:
    """The untrained network of a task, with the encoder of a run."""
    if problem_kind == "spans":
        return SpanReader(run.model, vocab_size)
    return Classifier(run.model, vocab_size, labels if problem_kind == "classification" else 1)


@torch.no_grad()
def outputs(model: nn.Module, examples: Examples, size: int, dtype: torch.dtype, device: torch.device) -> list[np.ndarray]:
    """The network's outputs for every sequence, in the order of the examples.

    Args:
        size: sequences at once.
    """
    model.eval()
    out: list[np.ndarray] = [np.empty(0)] * len(examples)
    for index, batch in examples.in_order(size):
        for i, row in zip(index, model(batch.to(device), dtype).cpu().numpy(), strict=True):
            out[i] = row
    return out


def finetune(run: Run, name: str, line: Line | None = None) -> list[dict[str, Any]]:
    """Fine-tune one task of a run with every seed, and, if asked, the same network from scratch.

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
    source = checkpoint.newest(run.run_dir / "checkpoints")
    if source is None:
        raise DataError(f"{run.run_dir} has no checkpoint to fine-tune; run `overnight pretrain` first")
    with hold(run.run_dir):
        return _finetune(run, name, source, line or Line())


def _finetune(run: Run, name: str, source: Path, line: Line) -> list[dict[str, Any]]:
    spec, device = run.finetune[name], set_up_machine(run)
    progress, state, _ = checkpoint.read(source)
    same_corpus(progress, load_manifest(run.data_dir), run)
    pretrained = {k: v for k, v in state.items() if k.startswith(("encoder.", "pooler."))}
    vocabulary = load_vocabulary(run.data_dir)
    log = run.run_dir / "tasks.jsonl"
    facts = json.dumps([asdict(spec) | {"seeds": [], "baseline": False, "micro_batch": 0}, source.name, run.train.precision])
    tag = hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()
    jobs = [(init, seed) for init in (["pretrained", "scratch"] if spec.baseline else ["pretrained"]) for seed in spec.seeds]
    # The folder holds one model: what was done with other settings since is not what it holds, so all is done again.
    mine = lines_of(log, name, tag) if _kept_tag(run.run_dir / "finetune" / name) == tag else []
    missing = [job for job in jobs if job not in {(e.get("init"), e.get("seed")) for e in mine}]
    if not missing:
        line.say(f"{name}: done already")
        return mine
    problem = read_problem(spec, run.data_dir, vocabulary)
    for note in problem.notes:
        line.say(f"{name}: {note}")
    for what, value in problem.baselines.items():
        if not any(e["kind"] == "baseline" for e in mine):
            mine.append(append(log, {"kind": "baseline", "name": name, "tag": tag, "what": what, "metric": problem.metric, "value": value}))
            line.say(f"{name}: {problem.metric} of {what} {value:.4f}")
    for init, seed in missing:
        entry = _one(run, spec, name, problem, pretrained if init == "pretrained" else None, seed, vocabulary, device, line)
        entry["tag"] = tag
        best = max((e["value"] for e in mine if e.get("init") == "pretrained"), default=None)
        model, files = entry.pop("model"), entry.pop("files")
        if init == "pretrained" and (best is None or entry["value"] > best):
            _keep(run, name, spec, problem, model, files, entry, vocabulary, device)
        mine.append(append(log, entry))
        line.say(f"{name}: seed {seed} {init}  " + "  ".join(f"{k} {v:.4f}" for k, v in entry["metrics"].items()))
    return mine


def _one(
    run: Run,
    spec: Finetune,
    name: str,
    problem: Problem,
    pretrained: dict[str, Tensor] | None,
    seed: int,
    vocabulary: Vocabulary,
    device: torch.device,
    line: Line,
) -> dict[str, Any]:
    start = time.perf_counter()
    torch.manual_seed(key(seed, _INIT) >> 1)
    model = new_head(problem.kind, len(problem.labels), run, vocabulary.size).to(device)
    if pretrained is not None:
        own = model.state_dict()
        model.load_state_dict({**own, **{k: v for k, v in pretrained.items() if k in own}})
    batch = min(spec.batch, len(problem.train))
    micro = next(size for size in range(min(spec.micro_batch, batch), 0, -1) if batch % size == 0)
    steps = max(1, round(spec.epochs * len(problem.train) / batch))
    schedule = Schedule(warmup=spec.warmup)
    settings = Settings(
        steps=steps,
        lr=lambda step: spec.lr * factor(schedule, step, steps),
        max_grad_norm=1.0,
        dtype=DTYPES[run.train.precision],
        device=device,
        seed=(seed, _DROPOUT),
        # It has no checkpoints to go back to.
        on_nonfinite="skip" if run.train.on_nonfinite == "skip" else "stop",
    )
    # Small batches, few steps: the start that is usual for them overflows less often at first.
    scale = LossScale(2.0**16) if run.train.precision == "fp16" else None
    optimizer = build_optimizer(model, Optim(name="adamw", lr=spec.lr, weight_decay=spec.weight_decay))
    loss = 0.0
    init = "scratch" if pretrained is None else "pretrained"
    work = partial(problem.train.step, batch=batch, micro_batch=micro, seed=(seed, _ORDER))
    for step in optimise(model, model.losses, optimizer, work, settings, scale=scale):
        now = sum(float(x) for x in step.losses.values())
        loss = now if step.step == 1 else 0.98 * loss + 0.02 * now
        left = (time.perf_counter() - start) / step.step * (steps - step.step)
        line.show(f"{name} seed {seed} {init}  {step.step}/{steps}  loss {loss:.4f}  lr {step.lr:.2e}  left {duration(left)}")
    results, files = problem.judge(outputs(model, problem.dev, spec.micro_batch, settings.dtype, device))
    return {
        "kind": "finetune",
        "name": name,
        "task": spec.task,
        "seed": seed,
        "init": init,
        "metric": problem.metric,
        "value": results[problem.metric],
        "metrics": results,
        "rows": len(problem.train),
        "seconds": round(time.perf_counter() - start, 2),
        "model": model,
        "files": files,
    }


def _keep(
    run: Run,
    name: str,
    spec: Finetune,
    problem: Problem,
    model: nn.Module,
    files: dict[str, Any],
    entry: dict[str, Any],
    vocabulary: Vocabulary,
    device: torch.device,
) -> None:
    """Write the model, what it predicts, and what is needed to load it, as one folder that is there whole or not at all."""
    place, beside = run.run_dir / "finetune" / name, run.run_dir / "finetune" / f".{name}.tmp"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    weights = {k: v.detach().cpu().contiguous() for k, v in model.state_dict().items()}
    write_whole(beside / "model.safetensors", [serialize(weights)])
    facts = {"kind": problem.kind, "labels": problem.labels, "vocab_size": vocabulary.size, "spec": asdict(spec), "result": entry}
    for file, content in {**files, "task.json": facts}.items():
        write_json(beside / file, content)
    for split, (examples, rows) in problem.test.items():
        given = outputs(model, examples, spec.micro_batch, DTYPES[run.train.precision], device)
        answers = [f"{o[0]:.4f}" if problem.kind == "regression" else problem.labels[int(o.argmax())] for o in given]
        table = "index\tprediction\n" + "".join(f"{row.id}\t{answer}\n" for row, answer in zip(rows, answers, strict=True))
        write_whole(beside / f"{split}.tsv", [table.encode()])
    shutil.rmtree(place, ignore_errors=True)
    beside.rename(place)


def _kept_tag(folder: Path) -> str | None:
    """The settings with which the model in a task's folder was made."""
    try:
        return str(json.loads((folder / "task.json").read_text(encoding="utf-8"))["result"]["tag"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
