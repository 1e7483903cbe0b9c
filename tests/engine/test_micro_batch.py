"""The micro-batch that is found is the right one, in one process and in many, and no process waits for one that has no memory."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from overnight.batches.batch_size import micro_batch_sizes
from overnight.config import BertPhase, ModernBertConfig
from overnight.distributed.world import World
from overnight.engine import micro_batch_trials
from overnight.engine.memory import MemoryBudget, OutOfMemory
from overnight.engine.micro_batch_trials import Trial, expected, search
from overnight.errors import UserError
from tests.distributed.test_parallel import Runs, newest

LINES = {"base": st.integers(0, 1000), "slope": st.integers(1, 50), "share": st.integers(1, 400), "limit": st.integers(1, 20_000)}


def line(base: int, slope: int, tried: list[int], most: int | None = None) -> Any:
    """Memory that grows on a line, of which a micro-batch above `most` finds none; each takes a second for a sequence."""

    def measure(count: int) -> Trial | None:
        tried.append(count)
        return None if most is not None and count > most else Trial(count, base + slope * count, float(count))

    return measure


@given(**LINES)
def test_the_largest_that_fits_is_found_and_none_far_over_the_limit_is_tried(base: int, slope: int, share: int, limit: int) -> None:
    choices, tried = micro_batch_sizes(BertPhase(1, share)), []
    fitting = [count for count in choices if base + slope * count <= limit]
    if not fitting:
        with pytest.raises(OutOfMemory, match=r"the smallest micro-batch, 1, does not fit .*memory\.activation_checkpointing"):
            search(choices, line(base, slope, tried), MemoryBudget(base, limit, limit))
        return
    found, _ = search(choices, line(base, slope, tried), MemoryBudget(base, limit, limit))
    assert found == fitting[-1]
    # Two small trials tell the line; no other is made in vain.
    assert [count for count in tried if base + slope * count > limit and count > 4] == []


@given(**LINES, most=st.integers(1, 400))
def test_what_finds_no_memory_is_passed_over(base: int, slope: int, share: int, limit: int, most: int) -> None:
    choices = micro_batch_sizes(BertPhase(1, share))
    fitting = [count for count in choices if base + slope * count <= limit and count <= most]
    if fitting:
        found, _ = search(choices, line(base, slope, [], most), MemoryBudget(base, limit, limit))
        assert found == fitting[-1]


@given(**LINES, most=st.integers(1, 400), first=st.integers(1, 500))
def test_it_may_begin_anywhere(base: int, slope: int, share: int, limit: int, most: int, first: int) -> None:
    choices, tried = micro_batch_sizes(BertPhase(1, share)), []
    fitting = [count for count in choices if base + slope * count <= limit and count <= most]
    if not fitting:
        with pytest.raises(OutOfMemory, match="the smallest micro-batch, 1, does not fit"):
            search(choices, line(base, slope, tried, most), MemoryBudget(base, limit, limit), first=first)
        return
    found, trials = search(choices, line(base, slope, tried, most), MemoryBudget(base, limit, limit), first=first)
    assert found == fitting[-1] == trials[-1].micro_batch and len(set(tried)) == len(tried)


@given(firsts=st.tuples(st.integers(1, 5000), st.integers(1, 5000)), limits=st.tuples(st.integers(1, 5000), st.integers(1, 5000)))
def test_processes_with_unlike_memory_try_the_same_and_find_the_same(firsts: tuple[int, int], limits: tuple[int, int]) -> None:
    numbers, meeting = [0, 0], threading.Barrier(2, timeout=60)

    def greatest(number: int, world: World) -> int:
        numbers[world.rank] = number
        meeting.wait()
        found = max(numbers)
        meeting.wait()
        return found

    def process(rank: int) -> tuple[int, list[int]]:
        tried: list[int] = []
        space, world = MemoryBudget(0, limits[rank], limits[rank]), World(rank, size=2)
        found, _ = search(micro_batch_sizes(BertPhase(1, 4096)), line(0, 1, tried), space, None, world, firsts[rank])
        return found, tried

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(micro_batch_trials, "all_reduce_max", greatest)
        one, other = pool.map(process, (0, 1))
    assert one == other and one[0] <= min(limits)


def test_begun_high_a_whole_batch_is_one_trial_and_what_does_not_fit_is_halved() -> None:
    for share, most, wanted in ((256, 300, [256]), (1024, 2000, [256, 512, 1024]), (256, 60, [256, 128, 64, 32]), (96, 300, [96])):
        tried: list[int] = []
        search(micro_batch_sizes(BertPhase(1, share)), line(0, 1, tried, most), MemoryBudget(0, 9999, 9999), first=256)
        assert tried == wanted


@pytest.mark.parametrize(
    ("device", "compiled", "sharded", "first"),
    [("cuda", True, False, 256), ("cuda", False, False, 1), ("cuda", True, True, 1), ("cpu", True, False, 1)],
)
def test_trials_begin_high_only_on_a_gpu_that_compiles(
    device: str, compiled: bool, sharded: bool, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(micro_batch_trials, "compiles_layers", lambda run, device: compiled)
    monkeypatch.setattr(micro_batch_trials, "memory_budget", lambda device: SimpleNamespace(limit=16e9))
    objective = SimpleNamespace(**{"set_requires_gradient_sync": None} if sharded else {})
    run, samples = SimpleNamespace(model=None), SimpleNamespace(phase=BertPhase(1, 1024))
    finder: Any = micro_batch_trials.BatchSizeFinder(*[None] * 6)  # type: ignore[arg-type]
    finder = dataclasses.replace(
        finder, run=run, samples=samples, objective=objective, dtype=torch.bfloat16, world=World(device=torch.device(device))
    )
    assert finder._first() == first


def test_the_more_memory_a_gpu_has_the_higher_trials_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    run = SimpleNamespace(model=ModernBertConfig(num_layers=12, hidden_size=768, num_heads=12))
    samples, world = SimpleNamespace(phase=BertPhase(1, 1 << 20)), World(device=torch.device("cuda"))
    finder: Any = micro_batch_trials.BatchSizeFinder(*[None] * 6)  # type: ignore[arg-type]
    finder = dataclasses.replace(finder, run=run, samples=samples, dtype=torch.bfloat16, world=world)
    monkeypatch.setattr(micro_batch_trials, "compiles_layers", lambda run, device: True)
    found = []
    for memory in (40e9, 80e9, 160e9):
        monkeypatch.setattr(micro_batch_trials, "memory_budget", lambda device, memory=memory: SimpleNamespace(limit=memory))
        found.append(finder._first())
    assert found[0] > 256 and found[1] == pytest.approx(2 * found[0], abs=1) and found[2] == pytest.approx(4 * found[0], abs=2)
    in_fp32 = dataclasses.replace(finder, dtype=torch.float32)._first()
    assert in_fp32 == pytest.approx(found[2] / 2, abs=1), "numbers of twice as many bytes"


@given(seconds=st.lists(st.floats(0.1, 10), min_size=9, max_size=9))
def test_by_speed_it_is_the_smallest_that_is_as_good_as_the_best_that_was_tried(seconds: list[float]) -> None:
    times = {2**i: second for i, second in enumerate(seconds)}
    found, tried = search(
        micro_batch_sizes(BertPhase(1, 256)),
        lambda n: Trial(n, 100 + n, times[n] * n),
        MemoryBudget(0, 10_000, 10_000),
        time_passes=lambda n, passes: passes * n * times[n],
    )
    rates = {trial.micro_batch: trial.rate for trial in tried}
    assert rates[found] >= 0.97 * max(rates.values())
    assert all(rate < 0.97 * max(rates.values()) for count, rate in rates.items() if count < found)


def test_by_speed_it_stops_where_more_brings_nothing() -> None:
    tried: list[int] = []

    def seconds(count: int) -> float:
        return 0.1 + count * (1 if count <= 8 else 1.2)

    def measure(count: int) -> Trial:
        tried.append(count)
        return Trial(count, count, seconds(count))

    space = MemoryBudget(0, 1 << 40, 1 << 40)
    found, _ = search(micro_batch_sizes(BertPhase(1, 1 << 20)), measure, space, time_passes=lambda n, passes: passes * seconds(n))
    assert (found, tried) == (4, [1, 2, 4, 8, 16])


@given(fast=st.integers(1, 3), slowdown=st.floats(1.5, 3))
def test_a_machine_that_was_fast_for_the_first_trials_alone_does_not_mislead(fast: int, slowdown: float) -> None:
    """The machine has its full speed for the first trials, and a part of it from then on."""
    made: list[int] = []

    def per_sequence(count: int) -> float:
        return 1 + 1 / count

    def measure(count: int) -> Trial:
        made.append(count)
        return Trial(count, count, count * per_sequence(count) * (1 if len(made) <= fast else slowdown))

    space = MemoryBudget(0, 1 << 40, 1 << 40)
    found, tried = search([1, 2, 4, 8], measure, space, time_passes=lambda n, passes: passes * n * slowdown * per_sequence(n))
    assert per_sequence(found) <= per_sequence(max(trial.micro_batch for trial in tried)) / 0.97


def test_one_slow_turn_of_three_changes_nothing() -> None:
    for slow in range(6):
        turns: list[int] = []

        def seconds(count: int, passes: int, turns: list[int] = turns, slow: int = slow) -> float:
            turns.append(count)
            return passes * count * (2.0 if len(turns) - 1 == slow else 1.0) * (1.5 if count < 4 else 1.0)

        # By the trials one sequence is as fast as any.
        found, _ = search([1, 2, 4], lambda n: Trial(n, n, float(n)), MemoryBudget(0, 99, 99), time_passes=seconds)
        assert (found, turns) == (4, [1, 4, 4, 1, 1, 4])


def test_a_line_is_drawn_through_the_smallest_and_the_largest_trial() -> None:
    trials = [Trial(1, 130, 1), Trial(2, 160, 1), Trial(4, 220, 1)]
    assert expected(trials, 8, used=50) == 340 and expected(trials[:1], 2, 50) == 130 and expected(trials[:1], 11, 50) == 930
    assert expected([], 8, 50) == 0


KINDS = ("ddp", "fsdp")
Said = list[tuple[int, str]]


def recipe(runs: Runs, name: str, kind: str, micro: tuple[int, int] = (2, 2), **settings: Any) -> str:
    """A recipe with dropout, of three steps and one."""
    runs.make(name, settings={"distributed.strategy": kind, "checkpoint.save_every": 1, **settings})
    path = runs.folder / f"{name}.yaml"
    tree = yaml.safe_load(path.read_text())
    tree["model"] |= {"dropout": 0.1, "attention_dropout": 0.1}
    for phase, steps, count in zip(("short", "long"), (3, 1), micro, strict=True):
        tree["phases"][phase] |= {"steps": steps, "micro_batch_size": count}
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return str(path)


def since(runs: Runs, name: str, phase: str = "short") -> list[tuple[int, int]]:
    found = json.loads((runs.folder / name / "memory.json").read_text())[phase]["since"]
    return [(first, count) for first, count in found]


@pytest.fixture(scope="module")
def two(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Runs, dict[str, Said]]:
    """Runs of two processes, by name, and what is said by those in which one finds no memory: the last job of a launch."""
    runs = Runs(tmp_path_factory.mktemp("cuts"), tiny_data)
    jobs = [
        {"recipe": recipe(runs, f"{kind}-{how}", kind, **{"memory.activation_checkpointing": how})}
        for kind in KINDS
        for how in ("none", "selective", "full")
    ]
    jobs += [{"recipe": recipe(runs, f"{kind}-automatic", kind, (0, 0))} for kind in KINDS]
    # The fourth micro-batch of 2 sequences is the last of the second step: the others wait for its gradients.
    *well, first = runs.on(2, *jobs, {"recipe": recipe(runs, "ddp-out", "ddp"), "plant": {"memory": [1, 4, 1]}})
    assert {code for job in well for code, _ in job} == {0}, well

    jobs = []
    for kind in KINDS:
        short, long = (since(runs, f"{kind}-automatic", phase)[0][1] for phase in ("short", "long"))
        jobs.append({"recipe": recipe(runs, f"{kind}-given", kind, (short, long))})
    *well, second = runs.on(2, *jobs, *restarted(runs, "ddp"), {"recipe": recipe(runs, "fsdp-out", "fsdp"), "plant": {"memory": [0, 3, 1]}})
    well += runs.on(2, *restarted(runs, "fsdp"))
    assert {code for job in well for code, _ in job} == {0}, well
    return runs, {"ddp": first, "fsdp": second}


def restarted(runs: Runs, kind: str) -> list[dict[str, Any]]:
    """Jobs: the run that found no memory continues, and one is told its micro-batches from the start."""
    (runs.folder / f"{kind}-told").mkdir()
    shutil.copy(runs.folder / f"{kind}-out" / "memory.json", runs.folder / f"{kind}-told")
    (runs.folder / "jobs-2.json.rendezvous").unlink(missing_ok=True)  # where a process that was lost has left its mark
    return [{"recipe": recipe(runs, f"{kind}-{name}", kind)} for name in ("out", "told")]


def assert_same(runs: Runs, name: str, reference: str) -> None:
    ours, theirs = newest(runs.folder / name), newest(runs.folder / reference)
    assert ours.keys() == theirs.keys() and [key for key in ours if not torch.equal(ours[key], theirs[key])] == []


@pytest.mark.heavy
@pytest.mark.parametrize("how", ["selective", "full"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_computed_again_is_the_same_bits_on_two_processes(kind: str, how: str, two: tuple[Runs, dict[str, Said]]) -> None:
    assert_same(two[0], f"{kind}-{how}", f"{kind}-none")


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_find_one_micro_batch_and_the_run_is_that_of_the_same_number_given(
    kind: str, two: tuple[Runs, dict[str, Said]]
) -> None:
    assert since(two[0], f"{kind}-automatic")[0][1] in (1, 2, 4)
    assert_same(two[0], f"{kind}-automatic", f"{kind}-given")


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
def test_a_process_without_memory_ends_all_and_a_restart_goes_on_with_half(kind: str, two: tuple[Runs, dict[str, Said]]) -> None:
    runs, said = two
    rank = {"ddp": 1, "fsdp": 0}[kind]
    (code, mine), (other_code, other) = said[kind][rank], said[kind][1 - rank]
    assert code == other_code == 1
    assert f"process {rank}, phase short, step 2 ran out of memory" in mine and "now says 1, with which the same command" in mine
    assert f"process {1 - rank} lost another process" in other
    assert since(runs, f"{kind}-out") == [(0, 2), (1, 1)]


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
def test_the_restart_ends_as_a_run_of_those_micro_batches_does(kind: str, two: tuple[Runs, dict[str, Said]]) -> None:
    assert_same(two[0], f"{kind}-out", f"{kind}-told")
    assert not torch.equal(*(newest(two[0].folder / name)["encoder.norm.weight"] for name in (f"{kind}-out", f"{kind}-none")))


def test_all_processes_hear_that_nothing_fits() -> None:
    with pytest.raises(UserError, match="does not fit"):
        search([1, 2], lambda count: None, MemoryBudget(0, 10, 10), time_passes=lambda count, passes: 1.0, world=World())


def test_no_memory_before_the_first_step_of_a_later_phase_ends_all_and_keeps_the_half(tiny_data: Path, tmp_path: Path) -> None:
    runs = Runs(tmp_path, tiny_data)
    # Of the first phase each process has six micro-batches; the seventh is the pass by which sums come in the order of a run that was not stopped.
    (said,) = runs.on(2, {"recipe": recipe(runs, "out", "ddp"), "plant": {"memory": [1, 7, 1]}})
    assert [code for code, _ in said] != [0, 0]
    told = "".join(text for _, text in said)
    assert "process 1, phase long, step 1 ran out of memory" in told and "memory.json now says 1" in told
    assert since(runs, "out", "long")[-1] == (0, 1)
