"""What is done for the first time may be compiled for minutes, on a GPU and wherever layers are: no estimate of a budget takes that for its speed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from overnight.byte_lm import rehearsal as probe
from overnight.config import Run
from overnight.engine import validator
from overnight.evaluation import rehearsal as evaluation
from overnight.finetune import rehearsal as finetuning
from overnight.finetune.encoded_examples import EncodedExamples
from tests.engine.fake_clock import FakeClock
from tests.engine.test_planner import LESS, WSD, clock, record_of, train

__all__ = ["clock"]

Make = Callable[..., Run]
COMPILED = 100.0


class Watch:
    """A clock that a computation moves: by `COMPILED` and a second for what it has not seen, by a second for what it has."""

    def __init__(self) -> None:
        self.now, self.seen = 0.0, set[Any]()

    def perf_counter(self) -> float:
        return self.now

    def take(self, shape: Any) -> None:
        self.now += 1.0 + COMPILED * (shape not in self.seen)
        self.seen.add(shape)


def test_a_scoring_of_a_task_is_timed_when_all_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch()
    monkeypatch.setattr(finetuning, "time", watch)
    monkeypatch.setattr(finetuning, "outputs", lambda *given: watch.take("any"))
    examples = EncodedExamples([[0] * 10] * 200, [[0] * 10] * 200, {"label": np.zeros(200)})
    seconds = finetuning._scoring_seconds(SimpleNamespace(model=None), examples, 5, torch.float32, torch.device("cpu"))  # type: ignore[arg-type]
    assert seconds == 200 / (5 * 8)


@pytest.mark.parametrize("sequences", [2, 1000])
def test_a_measuring_at_the_end_is_timed_by_batches_that_are_compiled(sequences: int, tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, real, tokens = Watch(), evaluation.BertWorkload, list[int]()

    def workload(*given: Any) -> Any:
        made = real(*given)

        def losses(batch: Any, dtype: Any) -> Any:
            watch.take(batch.lengths)
            tokens.append(sum(batch.lengths))
            return {"mlm": torch.zeros(())}, {}

        monkeypatch.setattr(made.model, "losses", losses)
        return made

    monkeypatch.setattr(evaluation, "time", watch)
    monkeypatch.setattr(evaluation, "BertWorkload", workload)
    monkeypatch.setattr(evaluation, "_SEQUENCES", sequences)
    seconds = evaluation.evaluation_seconds(tiny())  # type: ignore[arg-type]
    valid = evaluation.load_manifest(tiny().data_dir).count("valid", "tokens")
    assert seconds * tokens[-1] == pytest.approx(evaluation.READINGS * valid, rel=0.05)


def test_a_linear_probe_is_timed_when_all_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, documents = Watch(), [b"abcdefgh"] * 640
    task = SimpleNamespace(documents=documents, parts={})
    monkeypatch.setattr(probe, "time", watch)
    monkeypatch.setattr(probe, "read_probe_task", lambda spec: task)
    monkeypatch.setattr(probe, "set_up_machine", lambda run: torch.device("cpu"))
    monkeypatch.setattr(probe, "byte_model", lambda model: torch.nn.Linear(1, 1))
    monkeypatch.setattr(probe, "extract_features", lambda model, texts, *rest: watch.take("any"))
    run: Any = SimpleNamespace(linear_probe={"x": SimpleNamespace(features="cell", seeds=[0, 1])}, model=None, precision="fp32")
    assert probe.probe_seconds(run, "x") == 3 * 640 / 128


def test_the_first_evaluation_of_a_phase_is_none_that_a_budget_expects_again(
    tiny: Make, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real, steps = validator.evaluate, {}
    monkeypatch.setattr(validator, "compiles_layers", lambda run, device: True)
    for compiled in (0.0, 20.0):
        left = [compiled]

        def evaluate(*given: Any, left: list[float] = left) -> dict[str, float]:
            clock.now += left.pop() if left else 0.0
            return real(*given)

        monkeypatch.setattr(validator, "evaluate", evaluate)
        # As much time for the steps of both.
        run = tiny(**WSD, **LESS, budget=f"{100 + 2 * compiled:g}s", out=str(tmp_path / str(compiled)))
        train(run)
        record = record_of(run)
        assert record.done is not None and record.done <= record.deadline
        steps[compiled] = [record.of(phase)[-1].steps for phase in ("short", "long")]
    assert steps[20.0][0] == pytest.approx(steps[0.0][0], rel=0.05)


def test_a_validation_that_does_not_fit_beforehand_is_left_to_the_steps(
    tiny: Make, monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    real, errors = validator.evaluate, [RuntimeError("CUDA error: out of memory")]

    def evaluate(*given: Any) -> dict[str, float]:
        if errors:
            raise errors.pop()
        return real(*given)

    monkeypatch.setattr(validator, "compiles_layers", lambda run, device: True)
    monkeypatch.setattr(validator, "evaluate", evaluate)
    run = tiny(**WSD, **LESS, budget="30s")
    train(run)
    assert not errors and record_of(run).done is not None
