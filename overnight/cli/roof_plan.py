"""What `overnight plan --roof FILE` says: the least time of a step by what the machine was measured to sustain, and the time that is to be expected."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overnight.batches.packing import Sizes
from overnight.config import BertConfig, BertRun, Run
from overnight.console import table
from overnight.display import duration
from overnight.errors import ConfigError, DataError
from overnight.models.roofline import Rates, micro_batch, optimizer_step
from overnight.state_files import read_mapping

_REMEDY = "make it with `overnight bench roof --json FILE`"
# Bytes of an activation, by the precisions that can be measured.
_ELEMENT = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Roof:
    """What a machine was measured to do."""

    precision: str
    """Of its products, and of the activations of the passes."""
    rates: Rates
    passes: float
    """Least time of forward and backward passes as a share of that measured."""
    optimizer: float
    """The same of the optimizer."""


@dataclass(frozen=True)
class StepTime:
    """Times of a step of full sequences in a phase (s)."""

    phase: str
    components: dict[str, float]
    """Least time of each."""
    least: float
    expected: float
    """If this network is as far from the floor as the measured one."""
    steps: int


def read_roof(path: Path) -> Roof:
    """Read the JSON of `overnight bench roof`.

    Raises:
        DataError: when it is missing, or of something else.
    """
    found: dict[str, Any] = read_mapping(path, _REMEDY)
    try:
        rows = {row["name"]: float(row["value"]) for row in found["rows"] if found["what"] == "roof"}
        on_gpu = bool(found["environment"]["gpus"])
        if on_gpu and "products" in rows:  # measured before a precision could be chosen
            rows["products bf16"] = rows["products"]
        precision = next(each for each in _ELEMENT if f"products {each}" in rows)
        rates = Rates(rows[f"products {precision}"] * 1e12, rows["copy" if on_gpu else "memory"] * 1e9)
        shares = [rows[f"{name}, share of the floor"] / 100 for name in ("micro-batch", "optimizer")]
        if not all(math.isfinite(value) and value > 0 for value in (*shares, rates.products, rates.copy)):
            raise ValueError
    except (KeyError, TypeError, ValueError, StopIteration):
        raise DataError(f"{path}: is not the result of `overnight bench roof`; {_REMEDY}") from None
    return Roof(precision, rates, shares[0], shares[1])


def roof_for(run: Run, path: Path) -> Roof:
    """Return the roof by which the steps of a run are told.

    Raises:
        ConfigError: for a network other than BERT, or another precision than the measured one.
        DataError: as :func:`read_roof`.
    """
    if not isinstance(run.model, BertConfig):
        raise ConfigError(f"--roof: works only for model.kind=bert, and model.kind is {run.model.kind}; leave it out")
    if (measured := (roof := read_roof(path)).precision) != run.precision:
        other = (
            f"measure that with `overnight bench roof --precision={run.precision} --json FILE`, or " if run.precision in _ELEMENT else ""
        )
        raise ConfigError(
            f"--roof={path}: was measured in {measured}, and precision is {run.precision}; {other}plan for that machine with --precision={measured}"
        )
    return roof


def step_times(run: Run, vocabulary: int, roof: Roof) -> list[StepTime]:
    """Return the times of a step of each phase on one device, of full sequences.

    Args:
        run: of BERT, in the precision of the roof, its phases with the steps that are planned.
        vocabulary: tokens of the vocabulary.
    """
    assert isinstance(run, BertRun) and isinstance(run.model, BertConfig), "see roof_for"
    model, element, found = run.model, _ELEMENT[roof.precision], []
    for name, phase in run.phases.items():
        count, length = phase.global_batch_size, phase.seq_len
        masked = min(round(phase.mlm_probability * length), phase.max_predictions_per_seq or length)
        predicted = length if phase.objective == "causal" else masked
        sizes = Sizes(count * length, count * length**2, count * predicted, count * phase.nsp)
        micro = max(1, count // phase.micro_batch_size) if phase.micro_batch_size else 1
        # Each micro-batch makes the gradient of the whole table: its bytes are not those of one of the whole step.
        one = micro_batch(model, vocabulary, Sizes(*(size / micro for size in sizes)), element)
        passes = {part.name: part.seconds(roof.rates) * micro for part in one}
        step = {part.name: part.seconds(roof.rates) for part in optimizer_step(model, vocabulary, micro, element, phase.optim.name)}
        expected = sum(passes.values()) / roof.passes + sum(step.values()) / roof.optimizer
        found.append(StepTime(name, passes | step, sum(passes.values()) + sum(step.values()), expected, phase.steps))
    return found


def roof_text(times: list[StepTime]) -> str:
    """Return the times for people."""
    blocks = []
    for time in times:
        rows = [("of a step (s)", "at least", "share")]
        rows += [(name, f"{seconds:.4g}", f"{100 * seconds / time.least:.0f} %") for name, seconds in time.components.items()]
        blocks.append(
            f"roof of phase {time.phase}, one device and full sequences: a step takes at least {time.least:.4g} s, and about {time.expected:.4g} s "
            f"where this network is as far from the floor as the measured one; {time.steps:,} steps are {duration(time.expected * time.steps)}\n{table(rows)}"
        )
    return "\n\n".join(blocks)
