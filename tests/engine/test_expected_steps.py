"""What a run with a budget does is not decided by the number of steps that a phase is only expected to have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from overnight.config import Run
from tests.conftest import modern_settings
from tests.engine.test_budget_of_pairs import PAIRS
from tests.engine.test_planner import LESS, WSD, FakeClock, clock, events, record_of, replayed, train  # noqa: F401
from tests.engine.test_pretrain import assert_same_run

Make = Callable[..., Run]


def test_a_growing_batch_is_filled_up_alike_however_many_steps_are_expected(tiny: Make, clock: FakeClock, tmp_path: Path) -> None:  # noqa: F811
    # So large that a micro-batch of the global batch is filled up to more tokens than one of the first.
    sizes = {"global_batch_size": 256, "micro_batch_size": 256, "seq_len": 48, "batch_warmup": {"initial_batch_size": 2, "steps": 5000}}
    # What is dropped depends on how many tokens there are.
    settings = WSD | LESS | {"model.dropout": 0.1} | {f"phases.short.{key}": value for key, value in sizes.items()}
    run = tiny(budget="40s", **settings, out=str(tmp_path / "first"))
    assert "it never reaches 256 sequences" in train(run)
    assert_same_run(run, replayed(run, tiny(budget="40s", **settings, out=str(tmp_path / "again"))))


def test_pairs_that_were_made_are_said_to_be_unlearned_also_where_the_phase_became_shorter(tiny: Make, clock: FakeClock) -> None:  # noqa: F811
    run = tiny(**modern_settings(), **WSD, **LESS, **{**PAIRS, "phases.short.token_matching_steps": 5}, budget="50s")
    clock.slow = dict.fromkeys(range(12, 100), 5.0)
    assert "too few for token matching" not in train(run)
    decisions = record_of(run).of("short")
    assert decisions[1].steps >= 20 > decisions[-1].steps
    said = [event["message"] for event in events(run) if event["event"] == "token_matching"]
    assert said and said[-1].startswith(f"token matching is not learned after {decisions[-1].steps} steps")
