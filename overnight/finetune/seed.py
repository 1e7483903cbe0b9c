"""One seed of a task: trained by the engine, scored on the way where a state is chosen, and stopped early where that is asked for."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from overnight.checkpoint import reader
from overnight.config import BertRun, Finetune
from overnight.console import Line
from overnight.display import duration, measures, plural, scale_of
from overnight.distributed.collectives import all_gather, raise_on_all_ranks
from overnight.distributed.world import World
from overnight.distributed.wrap import full_tensor_cpu
from overnight.engine.precision import DTYPES
from overnight.engine.training_run import TrainingRun
from overnight.errors import TrainingError
from overnight.finetune.encoded_examples import EncodedExamples
from overnight.finetune.encoded_task import EncodedTask
from overnight.finetune.workload import FinetuneWorkload
from overnight.models.heads import Classifier
from overnight.run_dir.task_results import append_result, read_results
from overnight.state_files import read_lines


def seconds_before(folder: Path) -> float:
    """Return how long a training that was cut off has taken so far, by the last line of its metrics; 0 where it has not begun."""
    path = folder / "metrics.jsonl"
    lines = read_lines(path, f"delete {folder}, and the training begins anew") if path.exists() else ()
    return max((float(line["seconds"]) for _, line in lines if line and "seconds" in line), default=0.0)


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


def shown_outputs(model: nn.Module, examples: EncodedExamples, run: BertRun, spec: Finetune, line: Line, what: str) -> list[np.ndarray]:
    """Return :func:`outputs`, and show how far it is: the longest come first, so time goes by tokens.

    Raises:
        TrainingError: they are not finite, as after a last step that was too large.
    """
    start, total = time.perf_counter(), len(examples)

    def report_progress(done: int, share: float) -> None:
        left = (time.perf_counter() - start) * (1 - share) / share
        line.update(f"{what}  scored {done:,}/{total:,}  left {duration(left)}")

    device = next(model.parameters()).device
    found = outputs(model, examples, spec.micro_batch_size, DTYPES[run.precision], device, report_progress)
    # Behind the tokens of a sequence is what fills it up.
    if not all(
        np.isfinite(output if output.ndim == 1 else output[: len(ids)]).all() for output, ids in zip(found, examples.ids, strict=True)
    ):
        raise TrainingError(f"{what}: the network computes numbers that are not finite: training diverged; lower the learning rate")
    return found


@dataclass(frozen=True)
class TrainedSeed:
    """A seed that is trained."""

    model: nn.Module
    """The network in the state that is kept."""
    epochs: float
    """Passes over the training rows that were made."""
    epoch: float
    """Passes after which the state that is kept was reached."""
    value: float | None
    """Score of that state on the rows that it was chosen by; None where nothing was chosen."""


def scoring_steps(spec: Finetune, examples: int, batch: int, steps: int) -> list[int]:
    """Return the steps after which a seed is scored to choose a state, ascending; where none is chosen the last one alone.

    Args:
        examples: to train on.
        batch: examples of a step.
        steps: of all epochs.
    """
    if not spec.selects_epoch:
        return [steps]
    every = spec.eval_every * examples / batch
    return sorted({*(max(1, round(i * every)) for i in range(1, int(steps / every) + 1)), steps})


def is_patience_spent(values: list[float], patience: int) -> bool:
    """Return whether as many scorings as `patience` (0: never) came since the best one, the first of equals."""
    return bool(patience and values) and len(values) - 1 - values.index(max(values)) >= patience


def train_seed(
    run: BertRun,
    spec: Finetune,
    task: EncodedTask,
    workload: Callable[[World], FinetuneWorkload],
    line: Line,
    world: World,
    announces: bool,
) -> TrainedSeed:
    """Train a seed from its newest checkpoint, to its end or until it gets no better.

    Between two scorings the training is one that resumes, so that a seed scored on the way takes the same steps, bit by bit, as one
    that is not. What was scored stays in `scores.jsonl` of its folder; it counts only while the state that was best lies there too.

    Args:
        run: of :func:`overnight.finetune.workload.seed_run`, with all steps.
        workload: data and network.
        announces: whether to print what will be done.
    """
    ((what, phase),) = run.phases.items()
    per_epoch = len(task.train) / phase.global_batch_size
    folder, log = run.run_dir / "checkpoints", run.run_dir / "scores.jsonl"
    with raise_on_all_ranks(world):
        scores = _standing_scores(log, folder, world)
    examples, evaluate = task.selection or (task.dev, task.evaluate)
    model: nn.Module | None = None
    for end in scoring_steps(spec, len(task.train), phase.global_batch_size, phase.steps):
        if end in (entry["step"] for entry in scores):
            continue
        if is_patience_spent([entry["value"] for entry in scores], spec.patience):
            break
        training = TrainingRun(_until(run, end), line, world, workload, announces)
        training.go()
        announces = False
        model = model or training.workload.untrained(world.device)  # type: ignore[assignment]
        model.load_state_dict(_in_labels(model, {name: full_tensor_cpu(tensor) for name, tensor in training.model.state_dict().items()}))
        del training  # its weights and moments, before there are others
        if not spec.selects:
            return TrainedSeed(model, round(end / per_epoch, 2), round(end / per_epoch, 2), None)
        results, _ = evaluate(shown_outputs(model, examples, run, spec, line, what))
        # That of the first process, so that all decide alike.
        value = float(all_gather(torch.tensor(results[task.metric], dtype=torch.float64), world)[0])
        epoch = round(end / per_epoch, 2)
        entry = {"kind": "selection", "name": what, "value": value, "step": end, "epoch": epoch, "metrics": results}
        scores.append(append_result(log, entry) if world.main else entry)
        line.print(f"{what}  epoch {epoch:g}  {measures(results, scale_of(spec.task))}")
        if world.main:
            _keep_only(folder, {_best(scores)["step"], end})
    best, last = _best(scores), scores[-1]
    if last["step"] < phase.steps:
        said = f"no better {task.metric} in {plural(spec.patience, 'scoring')}; epoch {best['epoch']:g} is kept"
        line.print(f"{what}  stopped after epoch {last['epoch']:g} of {spec.epochs:g}: {said}")
    model = model or workload(world).untrained(world.device)
    place = folder / reader.checkpoint_name(best["step"])
    with raise_on_all_ranks(world):  # All have read it before the first process may remove it.
        reader.fill(model, _in_labels(model, reader.read_checkpoint(place)[1]), place)
    return TrainedSeed(model, last["epoch"], best["epoch"], best["value"])


def _in_labels(model: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of a trained network as they answer; a network of numbers learns them with mean 0 and deviation 1."""
    return model.in_labels(state) if isinstance(model, Classifier) and model.unit != (0.0, 1.0) else state


def _until(run: BertRun, end: int) -> BertRun:
    """Return a run that stops at a step, with the learning rates of the whole."""
    ((what, phase),) = run.phases.items()
    schedule = replace(phase.optim.schedule, total_steps=phase.steps)
    return replace(run, phases={what: replace(phase, steps=end, optim=replace(phase.optim, schedule=schedule))})


def _standing_scores(log: Path, folder: Path, world: World) -> list[dict[str, Any]]:
    """Return what was scored of a seed that is not finished.

    The checkpoints of one that is are deleted; where it is trained once more, because its result was deleted too, it begins afresh.
    """
    scores = read_results(log)
    if not scores or (folder / reader.checkpoint_name(_best(scores)["step"])).is_dir():
        return scores
    if world.main:
        shutil.rmtree(folder, ignore_errors=True)
        log.unlink(missing_ok=True)
    return []


def _best(scores: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the entry with the best score, the first of equals."""
    return max(scores, key=lambda entry: entry["value"])


def _keep_only(folder: Path, steps: set[int]) -> None:
    """Remove the checkpoints of other steps: neither is the training resumed from them, nor are they the best."""
    for place in reader.list_checkpoints(folder):
        if place.is_dir() and reader.step_of(place) not in steps:
            shutil.rmtree(place)
