"""A run with a budget ends on time and with the bits that its decisions imply, wherever it was stopped; what cannot be kept to is said."""

from __future__ import annotations

import dataclasses
import io
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from overnight import config
from overnight.batches.loader import Samples
from overnight.batches.packing import Sizes
from overnight.config import Run
from overnight.console import Line
from overnight.corpus.pipeline import prepare
from overnight.distributed.world import World
from overnight.engine import budget_record, loop, planner, pretrain, run_clock, trainer
from overnight.engine.budget_record import BudgetRecord, close_record, read_record, write_record
from overnight.engine.validator import Validator
from overnight.engine.workload import BertWorkload
from overnight.errors import ConfigError, DataError
from overnight.models.flops import training_flops
from tests.engine.fake_clock import FakeClock
from tests.engine.test_pretrain import Stop, assert_same_run, parameters

Make = Callable[..., Run]
SCHEDULE = {"name": "wsd", "warmup_ratio": 0.1, "stable_ratio": 0.5}
WSD = {f"phases.{name}.optim.schedule": SCHEDULE for name in ("short", "long")}
FALLING = {"phases.short.final_mlm_probability": 0.05, "phases.short.max_predictions_per_seq": 0}
LESS = {"logging.eval_every": 10, "checkpoint.save_every": 5, "phases.short.micro_batch_size": 8, "phases.long.micro_batch_size": 8}
HALVES = LESS | {f"phases.{name}.micro_batch_size": 4 for name in ("short", "long")}
"""The same with two micro-batches in a step, which take twice the time."""


def machine(patch: pytest.MonkeyPatch) -> FakeClock:
    """A machine whose steps take as long as the test says, and which may be killed in one."""
    fake, real = FakeClock(), loop.clip_and_step

    def step(*args: Any, **kwargs: Any) -> torch.Tensor:
        fake.steps += 1
        fake.now += fake.slow.get(fake.steps, fake.step_seconds)
        if fake.steps == fake.stop_at:
            raise Stop
        return real(*args, **kwargs)

    patch.setattr(run_clock, "CLOCK", fake)
    patch.setattr(loop, "clip_and_step", step)
    return fake


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Such a machine, until the end of the test."""
    return machine(monkeypatch)


def train(run: Run) -> str:
    out = io.StringIO()
    pretrain.pretrain(run, Line(out))
    return out.getvalue()


def record_of(run: Run) -> BudgetRecord:
    record = read_record(run)
    assert record is not None
    return record


def events(run: Run) -> list[dict[str, Any]]:
    lines = [json.loads(text) for text in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "event"]


def replayed(run: Run, again: Run) -> Run:
    """The same recipe trained without a disturbance by the decisions of a run that is done."""
    write_record(again, record_of(run))
    train(again)
    return again


def samples_of(run: Run) -> Samples:
    return BertWorkload(run, World(device=torch.device("cpu"))).samples(run.phases["short"], 0, "train")  # type: ignore[arg-type]


@pytest.mark.parametrize(("rate", "most", "nsp"), [(0.1, 3, True), (0.5, 0, True), (0.5, 0, False)])
def test_the_work_of_a_step_is_that_of_full_sequences_as_the_loader_makes_them(tiny: Make, rate: float, most: int, nsp: bool) -> None:
    settings = {"mlm_probability": rate, "max_predictions_per_seq": most, "nsp": nsp, "short_seq_prob": 0.0}
    run = tiny(**WSD, **{f"phases.short.{key}": value for key, value in settings.items()})
    phase = run.phases["short"]
    full = samples_of(run).longest(phase.global_batch_size)
    assert full.predicted_M is not None
    predicted, batch = int((full.targets["mlm"] >= 0).sum()), phase.global_batch_size
    sizes = Sizes(batch * phase.seq_len, batch * phase.seq_len**2, predicted, batch * nsp)
    assert planner.shares(run)[0].flops == training_flops(run.model, run.data.vocab_size, sizes)


def test_a_batch_that_grows_is_counted_by_its_sequences_and_has_the_bits_of_its_decisions(
    tiny: Make, clock: FakeClock, tmp_path: Path
) -> None:
    growing = {"phases.short.batch_warmup": {"initial_batch_size": 2, "steps": 4}}
    run = tiny(budget="50s", **WSD, **HALVES, **growing, out=str(tmp_path / "first"))
    share, batch = planner.shares(run)[0], run.phases["short"].global_batch_size
    assert batch > 2 and [share.work(steps) * batch for steps in (1, 2)] == [2, 4]
    said = train(run)
    again = replayed(run, tiny(budget="50s", **WSD, **HALVES, **growing, out=str(tmp_path / "again")))
    assert_same_run(run, again)
    assert "it never reaches" not in said
    clock.step_seconds = 0.5
    endless = tiny(
        budget="40s",
        **WSD,
        **LESS,
        **{"phases.short.batch_warmup": {"initial_batch_size": 2, "steps": 5000}},
        out=str(tmp_path / "endless"),
    )
    assert f"its batch grows for 5,000 (batch_warmup.steps): it never reaches {batch} sequences" in train(endless)


def test_it_ends_on_time_says_what_it_does_and_is_done(tiny: Make, clock: FakeClock) -> None:
    run = tiny(**WSD, **LESS, budget="50s")
    out = train(run)
    record = record_of(run)
    assert record.done is not None and abs(record.done - record.deadline) <= 1.5
    assert "budget 50s: ends at " in out and re.search(r"of 1\.0\d s, long about", out) and "its rate decays from step" in out
    assert "budget 50s: done at " in out
    # What is said to be left is that of the budget, whose steps are fitted to it later, not that of the steps as they are planned.
    left = [int(seconds) for seconds in re.findall(r"\(all phases (\d+) s\)", out)]
    assert left[0] > 35 and left[-1] < 30 and left == sorted(left, reverse=True)
    short, long = record.of("short"), record.of("long")
    # Six parts to four in a recipe whose long steps take longer by their operations, not on this machine.
    assert 22 < short[-1].steps < 38 and short[-1].steps + long[-1].steps == clock.steps
    told = [event for event in events(run) if event["event"] == "budget"]
    assert [event["steps"] for event in told] == [d.steps for d in record.decisions if d.at]
    rates = [line["lr"] for line in map(json.loads, (run.run_dir / "metrics.jsonl").read_text().splitlines()) if line["kind"] == "train"]
    assert max(rates) == 0.01 and rates[-1] < 0.0015
    before, lines = parameters(run), (run.run_dir / "metrics.jsonl").read_bytes()
    assert "all phases are done" in train(run)
    assert all(torch.equal(before[name], tensor) for name, tensor in parameters(run).items())
    assert record_of(run) == record and (run.run_dir / "metrics.jsonl").read_bytes() == lines


@pytest.mark.parametrize(("slow", "seconds"), [pytest.param(1, 6.0, marks=pytest.mark.heavy), (2, 40.0)])
def test_one_slow_early_step_leaves_the_rest_of_the_time_to_those_after_it(
    slow: int, seconds: float, tiny: Make, clock: FakeClock, tmp_path: Path
) -> None:
    # An evaluation of more examples than there are, and before the first one its time is a guess.
    many = WSD | LESS | {"logging.eval_examples": 100_000, "logging.eval_every": 1000}
    run = tiny(**many, budget="60s", out=str(tmp_path / "first"))
    clock.slow[slow] = seconds
    train(run)
    record = record_of(run)
    assert record.done is not None and abs(record.done - record.deadline) <= 2.0
    assert clock.steps > 60 - seconds - 4
    decays = [next(d for d in record.of(name) if d.decay_begins is not None) for name in ("short", "long")]
    assert all(decay.seconds_per_step < 2 for decay in decays)
    clock.step_seconds = 7.0
    assert_same_run(run, replayed(run, tiny(**many, budget="60s", out=str(tmp_path / "again"))))


@pytest.mark.parametrize("killed", [20])
def test_a_slow_first_step_after_it_was_resumed_is_not_the_speed_of_the_rest(killed: int, tiny: Make, clock: FakeClock) -> None:
    run = tiny(**WSD, **LESS, budget="80s")
    clock.stop_at = killed
    with pytest.raises(Stop):
        train(run)
    known = record_of(run).decisions
    clock.stop_at, clock.slow[killed + 1] = -1, 15.0
    train(run)
    record = record_of(run)
    assert record.done is not None and abs(record.done - record.deadline) <= 2.0
    assert all(decision.seconds_per_step < 2 for decision in record.decisions[len(known) :])


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.heavy) for seed in (1, 2))])
def test_killed_anywhere_it_has_the_bits_of_its_decisions_and_ends_at_the_same_time(
    seed: int, tiny: Make, clock: FakeClock, tmp_path: Path
) -> None:
    run, draw = tiny(**WSD, **HALVES, **FALLING, budget="50s"), random.Random(seed)
    known: list[Any] = []
    for _ in range(4):
        clock.stop_at = clock.steps + draw.randint(1, 15)
        clock.step_seconds = draw.choice([0.6, 1.0, 1.6])
        try:
            train(run)
        except Stop:
            clock.now += 2.0  # until it is started again
        decisions = record_of(run).decisions
        assert decisions[: len(known)] == known, "what was decided stays"
        known = decisions
    clock.stop_at = -1
    train(run)
    record = record_of(run)
    assert record.done is not None and abs(record.done - record.deadline) <= 4
    clock.step_seconds = 7.0  # The machine of the second run does not decide anything.
    assert_same_run(run, replayed(run, tiny(**WSD, **HALVES, **FALLING, budget="50s", out=str(tmp_path / "again"))))


def test_a_decision_after_the_checkpoint_is_obeyed_at_its_step(tiny: Make, clock: FakeClock, tmp_path: Path) -> None:
    run = tiny(**WSD, **LESS | {"checkpoint.save_every": 1000}, budget="50s")
    clock.stop_at = 22
    with pytest.raises(Stop):
        train(run)
    decided = record_of(run).decisions
    assert decided[-1].decay_begins is not None
    # Without a checkpoint the folder is as that of a run that has its decisions from another.
    shutil.rmtree(run.run_dir / "checkpoints")
    clock.stop_at, clock.now = -1, clock.now - 22
    train(run)
    assert record_of(run).decisions[: len(decided)] == decided
    told = [(event["phase"], event["step"]) for event in events(run) if event["event"] == "budget"]
    assert told == [(d.phase, d.at) for d in record_of(run).decisions if d.at]
    assert_same_run(run, replayed(run, tiny(**WSD, **LESS | {"checkpoint.save_every": 1000}, budget="50s", out=str(tmp_path / "again"))))


def test_started_again_after_its_deadline_it_makes_the_rest_short_and_says_so(tiny: Make, clock: FakeClock) -> None:
    run = tiny(**WSD, **LESS, budget="50s")
    clock.stop_at = 30
    with pytest.raises(Stop):
        train(run)
    clock.stop_at, clock.now = -1, clock.now + 3600
    out = train(run)
    record = record_of(run)
    assert "budget 50s: ended at" in out and "as short as possible" in out
    assert " late" in out and record.done is not None
    assert record.of("short")[-1].steps < 40 and record.of("long")[-1].steps < 10
    assert "after the deadline" in out


def test_a_slower_machine_shortens_the_run_and_is_named(tiny: Make, clock: FakeClock) -> None:
    run = tiny(**WSD, **LESS, budget="100s")
    clock.stop_at = 45
    with pytest.raises(Stop):
        train(run)
    clock.stop_at, clock.step_seconds = -1, 3.0
    out = train(run)
    assert "budget 100s: ends at" in out and ", in 55 s" in out
    # Until the first evaluation, its share of a step is estimated.
    assert re.search(r"at 3\.[0-3]\d s a step \(1\.00 s before\) it would end .* late: its decay is made shorter", out), out
    record = record_of(run)
    assert record.done is not None and abs(record.done - record.deadline) <= 5


def test_an_evaluation_of_longer_sequences_is_known_to_take_longer_before_it_was_seen(
    tiny: Make, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, real = tiny(**WSD, **LESS | {"logging.eval_every": 1000}, budget="90s"), Validator.evaluate
    each = [share.flops / phase.global_batch_size for share, phase in zip(planner.shares(run), run.phases.values(), strict=True)]
    assert each[1] > 1.3 * each[0]

    def evaluate(self: Validator, done: Any) -> None:
        clock.now += 8 * each[list(run.phases).index(self.logger.name)] / each[0]
        real(self, done)

    monkeypatch.setattr(Validator, "evaluate", evaluate)
    train(run)
    record = record_of(run)
    assert record.done is not None and abs(record.done - record.deadline) <= 1.5


def test_what_begins_the_first_phase_is_kept_free_for_the_second(tiny: Make, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    real = trainer.schedule_of

    def schedule_of(*args: Any) -> Any:
        clock.now += 12.0  # trials of micro-batches
        clock.slow[clock.steps + 1] = 8.0  # what is compiled in the first step
        return real(*args)

    monkeypatch.setattr(trainer, "schedule_of", schedule_of)
    run = tiny(**WSD, **LESS, budget="120s")
    train(run)
    record = record_of(run)
    assert record.done is not None and abs(record.done - record.deadline) <= 2.5
    # Six steps to four by the operations of their recipe; here long ones take no longer than short ones, so they become half as many again.
    short, long = record.of("short")[-1], record.of("long")[-1]
    assert long.steps / short.steps == pytest.approx(1.5 * 4 / 6, rel=0.1)


def test_the_time_left_of_a_phase_is_that_of_the_steps_that_the_next_one_is_expected_to_have(tiny: Make, clock: FakeClock) -> None:
    out = train(tiny(**WSD, **LESS, **{"logging.log_every": 1}, budget="50s"))
    phase, both = map(int, next(iter(re.findall(r"left (\d+) s \(all phases (\d+) s\)", out))))
    # Six steps to four, the long ones half as long again, when few of them are done.
    assert both > 35 and phase / both == pytest.approx(0.5, abs=0.1)


def test_a_text_that_would_be_read_often_is_a_warning(tiny: Make, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "_EPOCHS", 0)
    run = tiny(**WSD, **LESS, budget="20s")
    assert "after about 0 passes more of them help little" in train(run)
    assert [event["phase"] for event in events(run) if event["event"] == "repeats"] == ["short", "long"]


def test_another_budget_none_and_a_first_one_are_refused(tiny: Make, clock: FakeClock) -> None:
    run = tiny(**WSD, **LESS, budget="20s")
    train(run)
    for other, said in (("30s", "'30s'"), ("", "null")):
        with pytest.raises(ConfigError, match=rf"^budget = {said}: .* was begun with budget = '20s'.*--out"):
            train(tiny(**WSD, **LESS, budget=other))
    shutil.rmtree(run.run_dir)
    train(tiny(**WSD, **LESS))
    with pytest.raises(ConfigError, match=r"was begun without a budget"):
        train(run)


def test_a_record_that_is_gone_or_was_changed_is_an_error(tiny: Make, clock: FakeClock) -> None:
    run = tiny(**WSD, **LESS, budget="20s")
    train(run)
    path = run.run_dir / "budget.json"
    content = path.read_text()
    path.unlink()
    with pytest.raises(DataError, match=r"budget.json: is missing, and .* has checkpoints"):
        train(run)
    path.write_text(content.replace('"at": 0', '"at": 1'))
    with pytest.raises(DataError, match=r"budget.json: was changed since it was written"):
        train(run)
    path.write_text(content)
    assert "all phases are done" in train(run)


def test_a_budget_shorter_than_what_follows_says_the_least_also_when_it_is_over(tiny: Make, clock: FakeClock) -> None:
    run = tiny(**WSD, budget="10m")
    record = budget_record.begin_record(run)
    write_record(run, dataclasses.replace(record, after={"opinion": 900.0}))
    with pytest.raises(ConfigError, match=r"budget = '10m': is too short.*estimated at 15 min 00 s; the least .* is 19 min 00 s"):
        train(run)
    assert not (run.run_dir / "run.yaml").exists()
    clock.now += 700
    with pytest.raises(ConfigError, match=r"budget = '10m': is too short. 11 min 40 s have passed,.*; the least .* is 19 min 00 s"):
        train(run)
    write_record(run, dataclasses.replace(record, after={"opinion": 90.0}))
    with pytest.raises(ConfigError, match=r"before any training began; delete .*budget.json"):
        train(run)


def test_the_time_after_pretraining_is_kept_free_and_compared(tiny: Make, clock: FakeClock) -> None:
    run = tiny(**WSD, **LESS, budget="60s")
    write_record(run, dataclasses.replace(budget_record.begin_record(run), after={"opinion": 20.0}))
    out = train(run)
    record = record_of(run)
    assert "what follows is estimated at opinion 20 s" in out and record.done is None
    assert record.trained == pytest.approx(record.deadline - 22, abs=1.5)
    clock.now += 15
    assert "took 15 s (estimated: 20 s)" in close_record(run)
    assert record_of(run).done == clock.wall()


def test_a_model_that_carries_a_state_has_the_bits_of_its_decisions_too(tiny_data: Path, clock: FakeClock, tmp_path: Path) -> None:
    optim = {"name": "adamw", "lr": 0.01, "schedule": {**SCHEDULE, "decay": "sqrt"}}
    tree: dict[str, Any] = {
        "name": "bytes",
        "budget": "40s",
        "data": {
            "paths": [str(tiny_data.parent / "topics.jsonl")],
            "dir": str(tmp_path / "data"),
            "tokenizer": "bytes",
            "valid_fraction": 0.1,
            "workers": 1,
        },
        "model": {"kind": "mlstm", "num_layers": 1, "hidden_size": 16, "embedding_size": 8},
        "phases": {"only": {"steps": 1, "global_batch_size": 4, "seq_len": 16, "num_document_groups": 8, "optim": optim}},
        "compute": {"threads": 1, "device": "cpu"},
        "logging": {"eval_every": 20, "eval_examples": 8, "log_every": 1},
        "checkpoint": {"save_every": 7},
    }
    run, again = (config.build_run({**tree, "out": str(tmp_path / name)}) for name in ("run", "again"))
    prepare(run.data, run.data_dir, log=lambda text: None)
    clock.stop_at = 33
    with pytest.raises(Stop):
        train(run)
    clock.stop_at = -1
    train(run)
    assert len(record_of(run).decisions) >= 3
    assert_same_run(run, replayed(run, again))
