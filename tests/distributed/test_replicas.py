"""Processes that are not alike are found: by a bit, by their speed, by their data; and no fault of one leaves the others waiting."""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overnight.checkpoint import reader
from overnight.config import Run
from overnight.corpus.pipeline import prepare
from overnight.distributed import replicas, stragglers
from overnight.distributed.replicas import ReplicaMismatch, checksums, compare_replicas
from overnight.distributed.stragglers import StragglerMonitor
from overnight.distributed.world import World
from overnight.engine import loop
from overnight.errors import DataError
from overnight.run_dir import lock as lock_module
from overnight.state_files import SEAL
from tests.conftest import CLOCK
from tests.distributed.test_parallel import KINDS, Runs, distance, newest
from tests.engine.planted_faults import spike
from tests.engine.test_nonfinite import lines
from tests.engine.test_pretrain import finish

Make = Callable[..., Run]
KINDS_OF_NUMBER = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8)


@given(st.sampled_from(KINDS_OF_NUMBER), st.integers(1, 2000), st.data())
def test_any_bit_changes_the_checksum(kind: torch.dtype, size: int, data: st.DataObject) -> None:
    drawn = np.random.default_rng(size).integers(0, 256, size * kind.itemsize, dtype=np.uint8)
    whole = torch.from_numpy(drawn.copy()).view(kind)
    other = drawn.copy()
    other[data.draw(st.integers(0, len(other) - 1))] ^= np.uint8(1 << data.draw(st.integers(0, 7)))
    a, b, c = checksums([whole, whole.clone(), torch.from_numpy(other).view(kind)]).tolist()
    assert a == b != c
    wide = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[kind.itemsize]
    exact = sum(int(x) for x in drawn.view(wide))
    assert (a - exact) % 2**64 == 0


CHANGES: dict[str, Any] = {"logging.eval_every": 100, "checkpoint.save_every": 4, "stability.spike_threshold": 30.0}
PHASE = {"steps": 7, "micro_batch_size": 2}


@pytest.fixture(scope="module")
def runs(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Runs, dict[str, list[tuple[int, str]]]]:
    """Jobs on 2 processes, and what each process said, by name."""
    runs = Runs(tmp_path_factory.mktemp("ranks"), tiny_data)

    def job(name: str, plant: dict[str, Any], phase: dict[str, Any] = PHASE, **settings: Any) -> dict[str, Any]:
        return {"recipe": runs.recipe(name, phase=phase, settings={**CHANGES, **settings}), "plant": plant}

    shutil.copytree(tiny_data, runs.folder / "other")
    other = runs.make("other-data", phase=PHASE)
    manifest = json.loads((runs.folder / "other" / "manifest.json").read_text())
    manifest["shards"].reverse()  # the same shards, but not the same corpus
    del manifest[SEAL]
    (runs.folder / "other" / "manifest.json").write_text(json.dumps(manifest))
    elsewhere = runs.recipe("elsewhere", phase=PHASE)
    Path(elsewhere).write_text(Path(elsewhere).read_text().replace(str(other.data.dir), str(runs.folder / "other")))

    plants = spike(other, 5, world=2)
    two: dict[str, dict[str, Any]] = {"other data": {"recipe": [runs.recipe("other-data", phase=PHASE), elsewhere]}}
    for kind in KINDS:
        two[f"{kind}-rollback"] = job(f"{kind}-rollback", plants, **{"stability.on_spike": "rollback", "distributed.strategy": kind})
    two["plain"] = job("plain", {})
    always, never = {"stability.replica_check_every": 1}, {"stability.replica_check_every": 0}
    rollback, fsdp = {"stability.on_replica_mismatch": "rollback", **always}, {"distributed.strategy": "fsdp", **always}
    two["flip-back"] = job("flip-back", {"flip": [1, 6, "pooler.weight"]}, **rollback)
    two["flip-fsdp"] = job("flip-fsdp", {"flip": [1, 3, "pooler.weight/step"]}, **fsdp)
    two["flip-unseen"] = job("flip-unseen", {"flip": [1, 2, "pooler.weight"]}, {"steps": 3, "micro_batch_size": 4}, **never)
    two["nan"] = job("nan", {"nan": [1, 4, "pooler.weight"]})
    two["nan-unseen"] = job("nan-unseen", {"nan": [1, 4, "pooler.weight"]}, **never)
    two["slow"] = job("slow", {"late": [1, 60.0]}, {"steps": 4, "micro_batch_size": 4})
    two["flip-late"] = job("flip-late", {"flip": [1, 7, "encoder.layers.0.qkv.weight/exp_avg_sq"]})
    two["too many"] = {"recipe": runs.recipe("too-many", phase={"global_batch_size": 1})}
    two["loader"] = job("loader", {"loader": [1, 2]})
    return runs, dict(zip(two, runs.on(2, *two.values()), strict=True))


Done = tuple[Runs, dict[str, list[tuple[int, str]]]]


def events(runs: Runs, name: str, what: str) -> list[dict[str, Any]]:
    found = [json.loads(text) for text in (runs.folder / name / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == "event" and line["event"] == what]


def test_all_processes_roll_back_together_under_ddp_and_fsdp(runs: Done) -> None:
    folder, said = runs
    for kind in KINDS:
        assert [code for code, _ in said[f"{kind}-rollback"]] == [0, 0], said
        (event,) = events(folder, f"{kind}-rollback", "rolled_back")
        assert (event["from_step"], event["to_step"], event["batches_skipped"], event["cause"]) == (6, 4, 2, "spike")
    ddp, fsdp, plain = (folder.folder / name for name in ("ddp-rollback", "fsdp-rollback", "plain"))
    assert distance(fsdp, ddp) < 1e-6 < 1e-3 < distance(plain, ddp)


def test_a_flipped_bit_is_found_and_the_way_back_is_exact(runs: Done) -> None:
    folder, said = runs
    assert [code for code, _ in said["flip-back"]] == [0, 0], said
    (event,) = events(folder, "flip-back", "rolled_back")
    assert (event["from_step"], event["to_step"], event["batches_skipped"], event["cause"]) == (6, 4, 0, "replica_mismatch")
    assert (
        "process 1 of 2 (" in event["message"] and "): values differ from those of the other processes: pooler.weight" in event["message"]
    )
    ours, theirs = (newest(folder.folder / name) for name in ("flip-back", "plain"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_checkpoint_is_not_taken_of_processes_that_differ(runs: Done) -> None:
    folder, said = runs
    assert [code for code, _ in said["flip-late"]] == [1, 1]
    (told,) = (message for _, message in said["flip-late"] if message)
    assert "phase short, step 7: process 1 of 2 (" in told and "encoder.layers.0.qkv.weight/exp_avg_sq" in told
    place = reader.newest_checkpoint(folder.folder / "flip-late" / "checkpoints")
    assert place is not None and place.name == "step-0000004"
    assert len(events(folder, "flip-late", "replica_mismatch")) == 1


@pytest.mark.parametrize(
    ("sums", "who"),
    [
        ([[5, 1], [7, 1], [7, 1], [7, 1]], "process 0 of 4 (a): values"),
        ([[5, 1], [7, 1], [5, 1], [7, 2]], "processes 1, 3 of 4 (b, d): values"),
    ],
)
def test_who_differs_from_most_is_named_and_at_a_tie_from_the_first(
    sums: list[list[int]], who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(2, 2)
    monkeypatch.setattr(replicas, "all_gather", lambda row, world: torch.tensor(sums))
    monkeypatch.setattr(replicas, "host_names", lambda world: ["a", "b", "c", "d"])
    optimizer = torch.optim.SGD(model.named_parameters())
    with pytest.raises(ReplicaMismatch, match=re.escape(who)) as caught:
        compare_replicas(model, optimizer, World(size=4))
    assert ("weight, bias" in str(caught.value)) == who.startswith("processes")


def test_under_fsdp_what_is_not_cut_is_compared_and_off_nothing_is(runs: Done) -> None:
    _, said = runs
    assert [code for code, _ in said["flip-fsdp"]] == [1, 1] and "step 3: process 1 of 2" in "".join(text for _, text in said["flip-fsdp"])
    assert [code for code, _ in said["flip-unseen"]] == [0, 0]


def test_weights_that_are_not_finite_in_one_process_alone_end_all_before_a_checkpoint(runs: Done) -> None:
    folder, said = runs
    for name, words in (
        ("nan", "step 4: process 1 of 2 ("),
        ("nan-unseen", "step 4, or one since the last line of metrics: the losses are finite"),
    ):
        assert [code for code, _ in said[name]] == [1, 1], said[name]
        assert [words in text for _, text in said[name]] == [True, False], said[name]
        assert reader.newest_checkpoint(folder.folder / name / "checkpoints") is None
    assert "weights of another process are not finite" in said["nan-unseen"][0][1]


def test_a_slow_process_is_named_once(runs: Done) -> None:
    folder, said = runs
    assert [code for code, _ in said["slow"]] == [0, 0]
    assert ["process 1 on " in event["message"] for event in events(folder, "slow", "slow_process")] == [True, True]  # in each phase
    assert not events(folder, "plain", "slow_process")


def test_other_data_too_many_processes_and_a_broken_loader_end_all(runs: Done) -> None:
    _, said = runs
    for name, codes, words in (
        ("other data", [2, 2], "process 1 does not have what process 0 has:\n  data: "),
        ("too many", [2, 2], "global_batch_size = 1: cannot be split for 2 processes"),
        ("loader", [1, 1], "shard train-00000.arrow cannot be read"),
    ):
        assert [code for code, _ in said[name]] == codes, said[name]
        assert sum(words in text for _, text in said[name]) == 1, said[name]


def test_lag_is_said_after_three_lines_and_rarely_again(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = StragglerMonitor(World())
    alone.note(1.0, (0.0, 1.0))
    assert alone.line() == ({}, "")
    own = [1.0, 1.0, 2.0, 1.0]
    monkeypatch.setattr(stragglers, "all_gather", lambda row, world: torch.tensor(own))
    monkeypatch.setattr(stragglers, "host_names", lambda world: ["a", "a", "b", "b"])
    pace = StragglerMonitor(World(size=4))
    said = [pace.line() for _ in range(110)]
    assert [at for at, (_, text) in enumerate(said) if text] == [2, 102]
    assert said[0][0] == {"straggler_wait_fraction": 0.375}
    assert said[2][1] == "process 2 on b takes 2.0 times as long as the median for its own work; the others wait"
    own[2] = 1.4  # no longer
    assert pace.line()[1] == "" and pace.lines == {}
    own[:] = [0.001, 0.001, 0.09, 0.001]  # too little to matter
    assert [pace.line()[1] for _ in range(5)] == [""] * 5
    own[:] = [0.0] * 4  # no step since the last line
    assert pace.line() == ({"straggler_wait_fraction": 0.0}, "")


def test_a_clock_that_jumps_by_days_disturbs_nothing(tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, run = (tiny(out=str(tmp_path / name)) for name in ("reference", "run"))
    finish(reference)
    real, count = time.time, 0

    def jumping() -> float:
        nonlocal count
        count += 1
        return real() + (86_400 if count % 2 else -86_400)

    monkeypatch.setattr(lock_module, "_BEAT_EVERY", 0.0)
    monkeypatch.setattr(time, "time", jumping)
    finish(run)
    assert count >= 10  # heartbeats at least
    assert json.loads((run.run_dir / "heartbeat.json").read_text())["step"] == 4
    train = lines(run, "train")
    assert [line["global_step"] for line in train] == list(range(1, 11))
    seconds = [line["seconds"] for line in train]
    assert seconds == sorted(seconds) and 0 < seconds[-1] < 600
    assert all(line[name] >= 0 for line in train for name in CLOCK if name in line)
    assert all(math.isfinite(line["tokens_per_s"]) for line in train)
    ours, theirs = (newest(r.run_dir) for r in (run, reference))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_data_that_is_prepared_anew_under_the_run_stops_it_before_the_next_checkpoint(tiny: Make, tmp_path: Path, tiny_data: Path) -> None:
    run = tiny(**{"data.dir": str(tmp_path / "data"), "data.min_chars": 100})
    shutil.copytree(tiny_data, run.data_dir)
    real, count = loop.clip_and_step, 0

    def step(*args: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        if count == 3:
            shutil.rmtree(run.data_dir)
            changed = tiny(**{"data.dir": str(run.data_dir), "data.min_chars": 3000}).data
            prepare(changed, run.data_dir, log=lambda text: None)
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "clip_and_step", step)
        with pytest.raises(DataError, match=r"holds other data than the checkpoints in .* were trained on: it was prepared anew since"):
            finish(run)
    assert count == 4
    assert [p.name for p in sorted((run.run_dir / "checkpoints").glob("step-*"))] == ["step-0000002"]


@pytest.mark.parametrize("error", [DataError("shard train-00000.arrow cannot be read"), MemoryError("no room"), SystemExit(3)])
def test_whatever_ends_the_loader_thread_is_raised_in_the_step_that_needed_it(error: BaseException, tiny: Make) -> None:
    from overnight.batches.prefetch import prefetch

    def make(step: int) -> int:
        if step == 3:
            raise error
        return step

    got = []
    with pytest.raises(type(error)) as caught:
        for item in prefetch(make, 0, 9):
            got.append(item)
    assert got == [0, 1, 2] and caught.value is error
