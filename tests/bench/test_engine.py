"""`bench loop` and `bench scaling` measure what they say, at the smallest size."""

from __future__ import annotations

import json
import time
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from overnight.batches.packing import Batch
from overnight.bench import loop, scaling
from overnight.bench.scaling import Times
from overnight.bench.sizes import training_dtype
from overnight.checkpoint import reader
from overnight.config import Run
from overnight.console import Line
from overnight.corpus.pipeline import prepare
from overnight.distributed.world import World
from overnight.errors import UserError
from overnight.models.bert import BertForPretraining


def test_the_hidden_share_of_communication_is_what_the_step_does_not_show() -> None:
    assert Times(work=1.0, reduce=0.5, both=1.5).hidden == pytest.approx(0)
    assert Times(work=1.0, reduce=0.5, both=1.1).hidden == pytest.approx(0.8)
    assert Times(work=1.0, reduce=0.5, both=0.9).hidden == 1 and Times(1.0, 0.5, 9.0).hidden == 0
    assert Times(work=1.0, reduce=0.0, both=1.0).hidden == 1


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench loop` on a small vocabulary and few short sequences."""
    for name, value in {"VOCABULARY": 2000, "_LENGTH": 32, "_BATCH": 8}.items():
        monkeypatch.setattr(loop, name, value)


@pytest.mark.usefixtures("small")
def test_the_bare_loop_trains_on_the_engine_s_batches_to_the_engine_s_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same work on both sides of the comparison, dropout apart."""
    nets, real = [], loop.TrainingRun

    class Kept(real):  # type: ignore[misc, valid-type]
        def __init__(self, run: Run, *args: object) -> None:
            super().__init__(run, *args)
            nets.append(self.model)

    monkeypatch.setattr(loop, "TrainingRun", Kept)
    quiet = loop.recipe

    def recipe(folder: Path, model: str, steps: int) -> Run:
        from dataclasses import replace

        run = quiet(folder, model, steps)
        return replace(run, model=replace(run.model, dropout=0.0, attention_dropout=0.0))

    monkeypatch.setattr(loop, "recipe", recipe)
    monkeypatch.setattr(loop, "_TURN", 2)
    row = loop.measure_loop(tmp_path, "bert-tiny", turns=3)
    assert row.name == "against bare loop" and row.peer == "bare loop" and row.value > 0
    place = reader.newest_checkpoint(tmp_path / "run" / "checkpoints")
    assert place is not None
    engine, (bare,) = reader.read_checkpoint(place)[1], nets
    untrained = real(loop.recipe(tmp_path, "bert-tiny", 6), Line(StringIO())).model
    for (name, p), start in zip(bare.named_parameters(), untrained.parameters(), strict=True):
        moved = (p - start).detach()
        torch.testing.assert_close(engine[name] - start.detach(), moved, rtol=0, atol=0.02 * moved.abs().max().item(), msg=name)


@pytest.mark.usefixtures("small")
def test_a_turn_of_the_bare_loop_lasts_until_a_gpu_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, waits, real = SimpleNamespace(type="cuda"), [], loop.TrainingRun

    class OnGpu(real):  # type: ignore[misc, valid-type]
        def __init__(self, run: Run, *args: object) -> None:
            super().__init__(run, *args)
            self.device = gpu

    monkeypatch.setattr(loop, "TrainingRun", OnGpu)
    monkeypatch.setattr(loop, "_TURN", 1)
    monkeypatch.setattr(Batch, "to", lambda batch, device: batch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: (waits.append(device), time.sleep(0.5)))
    run = loop.recipe(tmp_path, "bert-tiny", 1)
    prepare(run.data, run.data_dir, log=lambda text: None)
    assert loop.bare_loop(run)(0) > 0.5 and waits == [gpu]


@pytest.mark.slow
def test_scaling_says_rate_efficiency_and_overlap_of_every_number_of_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = {1: Times(1.0, 0.0, 1.0), 2: Times(1.0, 0.5, 1.25), 4: Times(2.0, 0.5, 2.5)}
    monkeypatch.setattr(scaling, "measured", lambda world, model, repeats: times[world])
    scaling.run(tiny=True)
    rows = {row["name"]: row["value"] for row in json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]}
    assert rows["1 processes"] == 8 and rows["2 processes"] == pytest.approx(12.8) and rows["4 processes"] == pytest.approx(12.8)
    assert rows["2 processes, efficiency"] == pytest.approx(80) and rows["4 processes, efficiency"] == pytest.approx(40)
    assert rows["2 processes, communication hidden"] == pytest.approx(50) and rows["4 processes, communication hidden"] == 0


@pytest.mark.heavy
def test_two_processes_measure_each_other() -> None:
    found = scaling.measured(2, "bert-tiny", 1)
    assert found.work > 0 and found.reduce > 0 and found.both > 0


def test_processes_compute_in_the_type_in_which_their_device_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []
    real = BertForPretraining.losses
    monkeypatch.setattr(scaling, "training_dtype", lambda device: torch.bfloat16)
    monkeypatch.setattr(BertForPretraining, "losses", lambda net, batch, dtype: (seen.append(dtype), real(net, batch, torch.float32))[1])
    scaling.work("bert-tiny", 1, World())
    assert set(seen) == {torch.bfloat16}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    assert (training_dtype(torch.device("cuda")), training_dtype(torch.device("cpu"))) == (torch.float16, torch.float32)


def programs(folder: Path, text: str) -> str:
    """A program that stands for the processes of `bench scaling`, of which $3 is the folder and $7 the number."""
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_where_one_process_fails_the_others_are_ended_and_the_command_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling.sys, "executable", programs(tmp_path, f'[ "$7" = 1 ] && exit 3; echo $$ > {tmp_path}/waits; exec sleep 60'))
    with pytest.raises(UserError, match="process 1 of 2 ended with 3"):
        scaling.measured(2, "bert-tiny", 1)
    waits = tmp_path / "waits"
    assert not waits.exists() or not psutil.pid_exists(int(waits.read_text()))


def test_what_a_library_prints_in_a_process_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = '{"work": 1.0, "reduce": 0.5, "both": 1.2}'
    monkeypatch.setattr(scaling.sys, "executable", programs(tmp_path, f"echo NCCL version 2.28; echo '{times}' > $3/times.json"))
    assert scaling.measured(1, "bert-tiny", 1) == Times(1.0, 0.5, 1.2)
