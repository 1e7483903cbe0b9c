"""Does a layer-wise optimizer keep its accuracy when the batch grows and the epochs stay the same?

    python -m benchmarks.large_batch                  # both problems, two processes of one thread; resumes where it stopped
    python -m benchmarks.large_batch --only digits
    python -m benchmarks.large_batch --tiny           # seconds: only shows that it works
    python -m benchmarks.large_batch --draw --out DIR  # only the pictures, from the trials that are there

Two problems (`large_batch_problems.py`): a convolutional network on scikit-learn's digits, and a small BERT on the documentation inside
this Python environment. (`batch_rules.py` is the study of the byte model.) Each optimizer is tuned anew at each batch, with the same budget: its learning rate on a grid of 8 powers of 2, by the loss on validation examples that are not the reported
ones, with seeds that are not reported (two for the digits, one for the BERT). Where the best is at an edge of the grid, the grid grows
there, 4 times at most; the report says how many were tried. All else is fixed and the same for all batches: linear warm-up over a fifth
of the steps, linear decay to 0, decay 0.01 (1e-4 for SGD and LARS, where it is part of the gradient), none for biases and norms, which
are not adapted either; beta 0.9 and 0.999, eps 1e-6, momentum 0.9 (Muon 0.95); gradients of the BERT clipped at norm 1 (not for LANS,
which normalizes them). SGD has Nesterov's momentum. Muon takes the matrices of two dimensions; tables of words, kernels of convolutions
and vectors go to AdamW.

Nado et al. 2021 (arXiv 2102.06356) found that Nesterov and Adam, tuned as well, match LARS and LAMB. What comes out here is printed as is.

Into --out go trials.jsonl (a line a training), summary.json and a picture a problem.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.large_batch_problems import Digits, MaskedLM, Problem
from benchmarks.plots import Spread, study_figure
from overnight.config import OPTIMIZERS, LambConfig, Schedule
from overnight.engine.loop import clip_and_step
from overnight.optim.groups import build_optimizer, parameter_groups
from overnight.optim.schedules import factor
from overnight.run_dir.environment import environment

NAMES = {"lars": "LARS", "lamb": "LAMB", "lans": "LANS", "adamw": "AdamW", "sgd": "SGD", "muon": "Muon"}
SCHEDULE = Schedule(name="linear", warmup_ratio=0.2)
GRID, GROWTH = 8, 4
"""Learning rates tried, and how many more where the best is at an edge."""


@dataclass(frozen=True)
class Trial:
    """One training and what it reached."""

    problem: str
    optimizer: str
    batch: int
    steps: int
    lr: float
    seed: int
    valid_loss: float | None
    """What tuning goes by; None after a loss that is not finite, with which a training ends."""
    loss: float | None
    accuracy: float
    train_loss: float | None
    """Mean over the last tenth of the steps."""
    seconds: float

    @property
    def key(self) -> tuple[Any, ...]:
        """What it is the result of."""
        return self.problem, self.optimizer, self.batch, self.steps, self.lr, self.seed


def problems(data: Path, tiny: bool) -> dict[str, Problem]:
    """The problems by name.

    Args:
        data: folder of the prepared text.
        tiny: the same at sizes that take seconds.
    """
    digits, masked = Digits(), MaskedLM(data)
    if tiny:
        digits = Digits(epochs=1, batches=(64, 512), tuning=(0,), seeds=(1, 2))
        masked = MaskedLM(data, examples=128, batches=(32, 64), seeds=(1, 2), validation=(64, 64))
    return {"digits": digits, "mlm": masked}


def optimizer_of(name: str, network: nn.Module, lr: float, max_grad_norm: float) -> torch.optim.Optimizer:
    """An optimizer over the groups of :func:`overnight.optim.groups.parameter_groups`: vectors are neither decayed nor adapted."""
    settings: dict[str, Any] = {"lr": lr, "weight_decay": 1e-4 if name in ("sgd", "lars") else 0.01}
    if name == "sgd":
        groups = [{key: group[key] for key in ("params", "weight_decay")} for group in parameter_groups(network, LambConfig(**settings))]
        return torch.optim.SGD(groups, lr=lr, momentum=0.9, nesterov=True)
    if name != "lans":  # which never clips
        settings["max_grad_norm"] = max_grad_norm
    if name == "muon":
        settings["momentum"] = 0.95
    return build_optimizer(network, OPTIMIZERS[name](**settings))


def train(problem: Problem, name: str, optimizer_name: str, batch: int, lr: float, seed: int) -> Trial:
    """Train once and measure; a training whose loss is not finite ends there."""
    start, steps = time.perf_counter(), problem.examples // batch
    torch.manual_seed(seed)
    network = problem.network()
    optimizer = optimizer_of(optimizer_name, network, lr, problem.max_grad_norm)
    losses: list[float] = []
    for loss in problem.steps(network, batch, seed):
        if not math.isfinite(loss):
            break
        for group in optimizer.param_groups:
            group["lr"] = lr * factor(SCHEDULE, len(losses), steps)
        clip_and_step(optimizer, problem.max_grad_norm)
        optimizer.zero_grad()
        losses.append(loss)
    valid, test = problem.measure(network, "valid"), problem.measure(network, "test")
    scores = {
        "valid_loss": valid["loss"],
        "loss": test["loss"],
        "train_loss": statistics.fmean(losses[-max(1, steps // 10) :] or [math.inf]),
    }
    finite = len(losses) == steps and all(map(math.isfinite, scores.values()))
    told = {key: float(f"{score:.6g}") if finite else None for key, score in scores.items()}
    accuracy, seconds = round(test["accuracy"], 6), round(time.perf_counter() - start, 2)
    return Trial(name, optimizer_name, batch, steps, lr, seed, **told, accuracy=accuracy, seconds=seconds)


def tune(score: Callable[[int], float], lowest: int) -> tuple[int, list[int]]:
    """The best of a grid of exponents, which grows by one at a time while the best is at an edge; and all that were tried.

    Args:
        score: less is better.
        lowest: the first of the grid.
    """
    scores = {e: score(e) for e in range(lowest, lowest + GRID)}
    while (edge := at_edge(best := lowest_of(scores), scores)) and len(scores) < GRID + GROWTH:
        scores[best + edge] = score(best + edge)
    return best, sorted(scores)


def lowest_of(scores: Mapping[int, float]) -> int:
    """The exponent with the lowest score; of equal ones the lowest, so that the grid grows down where all diverge."""
    return min(scores, key=lambda exponent: (scores[exponent], exponent), default=0)


def at_edge(best: int, tried: Iterable[int]) -> int:
    """-1 where the best is the lowest of those tried, 1 where it is the highest, else 0."""
    tried = list(tried)
    return -1 if best == min(tried) else int(best == max(tried))


@cache
def _problem(data: Path, tiny: bool, name: str) -> Problem:
    return problems(data, tiny)[name]


def cell(out: Path, data: Path, tiny: bool, name: str, optimizer: str, batch: int) -> str:
    """Tune one optimizer at one batch and train it with the reported seeds; what is in trials.jsonl already is not done again.

    Returns:
        a line that says what came out.
    """
    problem, known = _problem(data, tiny, name), {trial.key: trial for trial in read(out)}

    def result(exponent: int, seed: int) -> Trial:
        lr = 2.0**exponent
        key = (name, optimizer, batch, problem.examples // batch, lr, seed)
        if key not in known:
            known[key] = train(problem, name, optimizer, batch, lr, seed)
            with open(out / "trials.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(known[key])) + "\n")
        return known[key]

    def score(exponent: int) -> float:
        return statistics.fmean(finite(result(exponent, seed).valid_loss) for seed in problem.tuning)

    best, tried = tune(score, problem.lowest[optimizer])
    found = [result(best, seed) for seed in problem.seeds]
    loss, accuracy = (statistics.median(values) for values in ([finite(t.loss) for t in found], [t.accuracy for t in found]))
    return f"{name} {NAMES[optimizer]} at {batch}: loss {loss:.4f}, accuracy {accuracy:.2%}, lr 2^{best} of {len(tried)} tried"


def done(jobs: Sequence[tuple[Any, ...]], workers: int) -> Iterator[str]:
    """What :func:`cell` says of each job, in order; one worker is this process."""
    if workers == 1:
        yield from (cell(*job) for job in jobs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, torch.set_num_threads, (1,)) as pool:
        yield from pool.map(cell, *zip(*jobs, strict=True))


def read(out: Path) -> list[Trial]:
    """The trials of a study so far."""
    path = out / "trials.jsonl"
    return [Trial(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def finite(value: float | None) -> float:
    """A loss, infinite where the training did not end."""
    return math.inf if value is None else value


@dataclass(frozen=True)
class Cell:
    """What one optimizer reached at one batch."""

    lr: float
    tried: int
    """Learning rates."""
    bracketed: bool
    """Whether the best learning rate has worse ones on both sides."""
    accuracy: Spread
    loss: Spread
    train_loss: Spread
    seconds: float
    """Of one training, median."""


Cells = dict[str, dict[int, Cell]]
"""By optimizer and batch."""


def cells(problem: Problem, name: str, trials: Sequence[Trial]) -> Cells:
    """What each optimizer reached at each batch; those that are not done are left out."""
    found: Cells = {}
    for optimizer in NAMES:
        for batch in problem.batches:
            here = [t for t in trials if t.key[:4] == (name, optimizer, batch, problem.examples // batch)]
            tuning: dict[int, list[float]] = {}
            for t in here:
                if t.seed in problem.tuning:
                    tuning.setdefault(round(math.log2(t.lr)), []).append(finite(t.valid_loss))
            scores = {e: statistics.fmean(losses) for e, losses in tuning.items() if len(losses) == len(problem.tuning)}
            best = lowest_of(scores)
            reported = [t for t in here if t.seed in problem.seeds and t.lr == 2.0**best]
            if len(reported) < len(problem.seeds):
                continue
            found.setdefault(optimizer, {})[batch] = Cell(
                lr=2.0**best,
                tried=len(scores),
                bracketed=not at_edge(best, scores),
                accuracy=Spread.of([t.accuracy for t in reported]),
                loss=Spread.of([finite(t.loss) for t in reported]),
                train_loss=Spread.of([finite(t.train_loss) for t in reported]),
                seconds=statistics.median(t.seconds for t in reported),
            )
    return found


def cost(problem: Problem, cell: Cell) -> tuple[float, float, float]:
    """Median, lowest and highest of the measure that counts, less being better."""
    found = cell.loss if problem.metric == "loss" else Spread(-cell.accuracy.median, -cell.accuracy.high, -cell.accuracy.low)
    return found.median, found.low, found.high


def keeps_to(problem: Problem, row: dict[int, Cell]) -> int:
    """The largest batch up to which the median is no worse than at the smallest by more than the spread (highest - lowest) there."""
    smallest = min(row)
    median, low, high = cost(problem, row[smallest])
    kept = smallest
    for batch in sorted(row):
        if cost(problem, row[batch])[0] > median + (high - low):
            break
        kept = batch
    return kept


def lr_power(row: dict[int, Cell]) -> float:
    """p in best lr ~ batch^p, by least squares on a doubly logarithmic scale: 1 is the linear rule, 0.5 the square root."""
    points = [(math.log2(batch), math.log2(cell.lr)) for batch, cell in row.items()]
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def number(problem: Problem, value: float) -> str:
    """The measure that counts: a loss, or an accuracy in per cent."""
    return f"{value:.3f}" if problem.metric == "loss" else f"{100 * value:.1f}"


def shown(problem: Problem, cell: Cell) -> str:
    """The measure that counts, as `median (lowest–highest)`."""
    s = cell.loss if problem.metric == "loss" else cell.accuracy
    return f"{number(problem, s.median)} ({number(problem, s.low)}–{number(problem, s.high)})"


def report(problem: Problem, found: Cells) -> list[str]:
    """A table of one problem and what it says, all computed from the trials."""
    unit = "loss" if problem.metric == "loss" else "accuracy, %"
    seeds, examples = len(problem.seeds), f"{problem.examples:,} {problem.unit}"
    title = f"{problem.title}: test {unit}, median of {seeds} seeds (lowest–highest), {examples} at every batch"
    head = ["batch", *map(str, problem.batches), "keeps its result to", "best lr ~ batch^p, p ="]
    rows = [["steps", *(str(problem.examples // batch) for batch in problem.batches), "", ""]]
    for name, row in found.items():
        whole = len(row) == len(problem.batches)
        told = [str(keeps_to(problem, row)), f"{lr_power(row):.2f}"] if whole else ["", ""]
        rows.append([NAMES[name], *(shown(problem, row[b]) if b in row else "-" for b in problem.batches), *told])
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    table = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in (head, *rows)]
    return [title, *table, *verdicts(problem, found)]


def verdicts(problem: Problem, found: Cells) -> list[str]:
    """At each batch: the best optimizer, those whose range meets its own, and the best of the layer-wise beside the best of the others."""
    lines = []
    for batch in problem.batches:
        here = {name: cost(problem, row[batch]) for name, row in found.items() if batch in row}
        if len(here) < len(NAMES):
            continue
        order = sorted(here, key=here.__getitem__)
        best = order[0]
        level = [NAMES[name] for name in order[1:] if here[name][1] <= here[best][2]]
        beside = f", its range meets {', '.join(level)}" if level else ", apart from all others"
        layerwise, other = (next(n for n in order if (n in ("lars", "lamb", "lans")) == kind) for kind in (True, False))
        first, second = (f"{NAMES[name]} {shown(problem, found[name][batch])}" for name in (layerwise, other))
        pair = f"best layer-wise {first}, best other {second}"
        lines.append(f"at {batch}: {NAMES[best]} is best{beside}; {pair}")
    edges = [f"{NAMES[name]} at {batch}" for name, row in found.items() for batch, cell in row.items() if not cell.bracketed]
    budget = sorted({cell.tried for row in found.values() for cell in row.values()})
    lines.append(f"knowing only how frequent each answer is: {number(problem, problem.blind()[problem.metric])}")
    lines.append(f"learning rates tried in a cell: {', '.join(map(str, budget))}; best not bracketed: {', '.join(edges) or 'none'}")
    return lines


def write(out: Path, study: dict[str, Problem]) -> None:
    """Write summary.json and the pictures, and print the tables."""
    trials = read(out)
    tree: dict[str, Any] = {
        "environment": environment(),
        "trials": len(trials),
        "seconds": round(sum(t.seconds for t in trials)),
        "problems": {},
    }
    for name, problem in study.items():
        found = cells(problem, name, trials)
        lines = report(problem, found)
        print("\n".join(["", *lines]), flush=True)
        plain = {optimizer: {str(batch): _plain(asdict(c)) for batch, c in row.items()} for optimizer, row in found.items()}
        tree["problems"][name] = {"examples": problem.examples, "batches": problem.batches, "cells": plain, "report": lines}
    draw(out, study)
    (out / "summary.json").write_text(json.dumps(tree, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def draw(out: Path, study: dict[str, Problem]) -> None:
    """Draw the problems that have trials."""
    for name, problem in study.items():
        if found := cells(problem, name, read(out)):
            (out / f"{name}.svg").write_text(drawing(problem, found), encoding="utf-8")


def drawing(problem: Problem, found: Cells) -> str:
    """Return the picture of a problem as SVG."""

    def lines(of: Callable[[Cell], Spread]) -> dict[str, dict[int, Spread]]:
        return {NAMES[name]: {batch: of(cell) for batch, cell in row.items()} for name, row in found.items()}

    accuracy = lines(lambda c: c.accuracy.times(100))
    title = f"{problem.title}: {problem.examples:,} {problem.unit} at every batch, median and range of {len(problem.seeds)} seeds"
    return study_figure(title, problem.unit, problem.batches, accuracy, lines(lambda c: c.loss), lines(lambda c: Spread.of([c.lr])))


def _plain(value: Any) -> Any:
    """JSON has no infinity: null."""
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is not done, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["digits", "mlm"], help="one problem")
    parser.add_argument("--tiny", action="store_true", help="sizes that take seconds, in --out/tiny")
    parser.add_argument("--draw", action="store_true", help="only draw the pictures of --out again")
    parser.add_argument("--workers", type=int, default=2, help="processes, each of one thread")
    parser.add_argument("--data", type=Path, default=Path("data/large-batch"), help="folder of the prepared text")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / f"{date.today()}-cpu{os.cpu_count()}-large-batch")
    options = parser.parse_args(arguments)
    out = options.out / "tiny" if options.tiny else options.out
    out.mkdir(parents=True, exist_ok=True)
    study = {name: problem for name, problem in problems(options.data, options.tiny).items() if options.only in (None, name)}
    if options.draw:
        return draw(out, study)
    for problem in study.values():
        if isinstance(problem, MaskedLM):
            problem.prepare()
    torch.set_num_threads(1)
    jobs = [(name, optimizer, batch) for name, problem in study.items() for batch in problem.batches for optimizer in NAMES]
    for line in done([(out, options.data, options.tiny, *job) for job in jobs], options.workers):
        print(line, flush=True)
    write(out, study)


if __name__ == "__main__":
    main()
