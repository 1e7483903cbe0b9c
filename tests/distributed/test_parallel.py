"""Training on 2 and 4 processes is training on one: DDP and FSDP2, interruptions, errors, and what is written."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from overnight import config
from overnight.checkpoint import reader
from overnight.cli import main as cli
from overnight.config import BertRun, Run
from overnight.console import Line
from overnight.distributed import world
from overnight.engine.pretrain import pretrain
from overnight.errors import ConfigError, DataError, UserError
from overnight.finetune.beginning import open_beginning
from tests.conftest import CLOCK, ROOT, tiny_tree
from tests.distributed import parallel_worker
from tests.processes import HANG, Process, wait_until
from tests.recipe import change

KINDS = ("ddp", "fsdp")
Said = list[list[tuple[int, str]]]


class Runs:
    """Runs of one recipe in folders of their own, on any number of processes."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder, self._data = folder, data

    def make(self, name: str, **changes: Any) -> Run:
        """10 steps of 8 sequences in two phases, one sequence a micro-batch, without dropout."""
        tree = tiny_tree(self.folder, self._data.parent / "topics.jsonl")
        tree["out"], tree["data"]["dir"] = str(self.folder / name), str(self._data)
        model = changes.get("model", {})
        tree["model"] |= model if "kind" in model else {"dropout": 0.0, "attention_dropout": 0.0, **model}
        change(tree, {"checkpoint.save_every": 6, "logging.eval_every": 4, "logging.eval_examples": 10})
        for phase, steps in (("short", 6), ("long", 4)):
            tree["phases"][phase] = {**tree["phases"][phase], "steps": steps, "micro_batch_size": 1, **changes.get("phase", {})}
        run = config.build_run(change(tree, changes.get("settings", {})))
        (self.folder / f"{name}.yaml").write_text(config.run_yaml(run))
        return run

    def recipe(self, name: str, **changes: Any) -> str:
        """A recipe as a file."""
        self.make(name, **changes)
        return str(self.folder / f"{name}.yaml")

    def on(self, world: int, *jobs: dict[str, Any], on_warning: str = "error") -> Said:
        """Do jobs one after another on so many processes; for each, the exit code and the message of every process."""
        path = self.folder / f"jobs-{world}.json"
        path.write_text(json.dumps(jobs))
        # What others met by, who have gone, is waited at for ever.
        Path(f"{path}.rendezvous").unlink(missing_ok=True)
        with ExitStack() as running:
            ranks = [running.enter_context(Process(parallel_worker.work, rank, world, path, on_warning)) for rank in range(world)]
            codes, outputs = zip(*(rank.end() for rank in ranks), strict=True)
        assert codes == (0,) * world, "\n".join(outputs)[-3000:]
        return list(zip(*(map(tuple, json.loads(out.splitlines()[-1])) for out in outputs), strict=True))  # type: ignore[arg-type]


def newest(run: Path) -> dict[str, torch.Tensor]:
    place = reader.newest_checkpoint(run / "checkpoints")
    assert place is not None
    _, model, optimizer = reader.read_checkpoint(place)
    return {**model, **{f"optimizer {k}": v for k, v in optimizer.items()}}


def distance(run: Path, reference: Path) -> float:
    """Of the newest parameters, as one vector, relative to the reference."""
    ours, theirs = newest(run), newest(reference)
    assert ours.keys() == theirs.keys()
    names = [name for name in theirs if not name.startswith("optimizer ")]
    a, b = (torch.cat([tensors[name].double().flatten() for name in names]) for tensors in (ours, theirs))
    return float((a - b).norm() / b.norm())


def lines(run: Path, *kinds: str) -> list[dict[str, Any]]:
    found = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in CLOCK} for line in found if line["kind"] in kinds]


def assert_same_curve(run: Path, reference: Path) -> None:
    """The same lines, with counts that are equal and numbers that are so to rounding."""
    ours, theirs = lines(run, "train", "eval", "phase"), lines(reference, "train", "eval", "phase")
    assert [list(line) for line in ours] == [list(line) for line in theirs]
    for a, b in zip(ours, theirs, strict=True):
        assert a == {k: pytest.approx(v, rel=2e-5, abs=1e-6) if isinstance(v, float) else v for k, v in b.items()}


OTHER = {
    "phase": {"steps": 4, "nsp": False, "whole_word": True, "optim": {"name": "adamw", "lr": 1e-3, "max_grad_norm": 0.5}},
    "settings": {"logging.tensor_norms_every": 2},
}
"""What the first recipe does not have: a clipped AdamW, parameters without gradient, target counts that only masking knows, telemetry."""

LONG = {"phases.short.steps": 30, "phases.long.steps": 20}

MODERN = {
    "model": {"kind": "modernbert", "num_layers": 2, "local_attention": 8, "global_attention_every": 2},
    "phase": {"steps": 4, "nsp": False, "token_matching": 0.5},
    "settings": {"phases.short.objective": "causal", "phases.short.token_matching": 0.0},
}
"""Its first phase predicts the next token, so its other heads have no gradient there."""


@pytest.fixture(scope="module")
def runs(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """All runs that end well, by name: kind-processes; `one` is of a single process."""
    runs = Runs(tmp_path_factory.mktemp("parallel"), tiny_data)
    for run in (runs.make("one"), runs.make("other-one", **OTHER), runs.make("modern-one", **MODERN)):
        pretrain(run, Line(io.StringIO()))
    jobs: list[dict[str, Any]] = []
    for kind in KINDS:
        settings = {"distributed.strategy": kind}
        jobs.append({"recipe": runs.recipe(f"{kind}-2", settings={**settings, "checkpoint.save_every": 5, "checkpoint.keep_latest_k": 3})})
        jobs.append({"recipe": runs.recipe(f"other-{kind}-2", **{**OTHER, "settings": {**OTHER["settings"], **settings}})})
        jobs.append({"recipe": runs.recipe(f"modern-{kind}-2", **{**MODERN, "settings": {**MODERN["settings"], **settings}})})
        jobs.append({"recipe": runs.recipe(f"{kind}-cut", settings=settings), "signal": [1, 5]})
    said = runs.on(2, *jobs)
    assert [codes[0][0] for codes in said] == [0, 0, 0, 143] * 2, said
    for kind in KINDS:
        for name in (f"{kind}-cut-to-1", f"{kind}-cut-to-4"):
            shutil.copytree(runs.folder / f"{kind}-cut", runs.folder / name)
    for kind in KINDS:
        pretrain(runs.make(f"{kind}-cut-to-1"), Line(io.StringIO()))
    again = runs.recipe("ddp-4-cut", settings={"distributed.strategy": "ddp"})
    on_four(runs, "ddp", {"recipe": again, "signal": [2, 5]}, {"recipe": again})
    return runs


def on_four(runs: Runs, kind: str, *others: dict[str, Any]) -> None:
    """Add the runs of four processes: whole ones of a kind, and what two of that kind began, in the other kind."""
    other = next(name for name in KINDS if name != kind)
    names = {f"{kind}-4": kind, f"{kind}-cut-to-4": other}
    jobs = [{"recipe": runs.recipe(name, settings={"distributed.strategy": strategy})} for name, strategy in names.items()]
    said = runs.on(4, *jobs, *others)
    assert [{code for code, _ in job} for job in said] == [{0}] * 2 + [{143}, {0}][: len(others)], said


@pytest.fixture(scope="module")
def more_runs(runs: Runs) -> Runs:
    """Also those on four processes that began in FSDP2."""
    on_four(runs, "fsdp")
    return runs


@pytest.mark.heavy
def test_fsdp_on_four_processes_whole_and_gone_on_with_in_ddp_is_the_same_too(more_runs: Runs) -> None:
    for name in ("fsdp-4", "fsdp-cut-to-4"):
        assert distance(more_runs.folder / name, more_runs.folder / "one") <= 1e-6
        assert_same_curve(more_runs.folder / name, more_runs.folder / "one")


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("fsdp", 2), ("ddp", 4)])
def test_8_micro_batches_are_2_times_4_and_4_times_2(kind: str, world: int, runs: Runs) -> None:
    run, reference = runs.folder / f"{kind}-{world}", runs.folder / "one"
    # What is left is the rounding of gradients that were added in another order.
    assert distance(run, reference) <= 1e-6
    assert_same_curve(run, reference)


@pytest.mark.parametrize("kind", KINDS)
def test_adamw_unused_parameters_whole_words_and_telemetry_are_the_same_too(kind: str, runs: Runs) -> None:
    run, reference = runs.folder / f"other-{kind}-2", runs.folder / "other-one"
    assert distance(run, reference) <= 1e-6
    assert_same_curve(run, reference)
    ours, theirs = lines(run, "tensor_norms"), lines(reference, "tensor_norms")
    assert len(ours) == len(theirs) == 4
    for a, b in zip(ours, theirs, strict=True):
        assert a["tensor_norms"].keys() == b["tensor_norms"].keys()
        for name, row in b["tensor_norms"].items():
            assert a["tensor_norms"][name] == [None if v is None else pytest.approx(v, rel=2e-2, abs=1e-6) for v in row]


@pytest.mark.parametrize("kind", KINDS)
def test_modernbert_is_the_same_too(kind: str, runs: Runs) -> None:
    run, reference = runs.folder / f"modern-{kind}-2", runs.folder / "modern-one"
    assert distance(run, reference) <= 1e-6
    assert_same_curve(run, reference)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_processes_give_the_same_bits(kind: str, runs: Runs) -> None:
    whole, cut = runs.folder / f"{kind}-2", runs.folder / f"{kind}-cut"
    _, *theirs = reader.read_checkpoint(whole / "checkpoints" / "step-0000005")
    _, *ours = reader.read_checkpoint(cut / "checkpoints" / "step-0000005")
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    found = lines(cut, "train", "eval")
    assert len(found) > 5 and found == lines(whole, "train", "eval")[: len(found)]


def test_four_processes_that_were_stopped_add_gradients_up_in_the_order_of_those_that_were_not(runs: Runs) -> None:
    # The order follows from DDP's buckets, which it deals anew behind the first step; of two numbers it does not matter.
    ours, theirs = newest(runs.folder / "ddp-4-cut"), newest(runs.folder / "ddp-4")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_signal_to_one_process_stops_all_after_the_same_step(kind: str, runs: Runs) -> None:
    place = reader.newest_checkpoint(runs.folder / f"{kind}-cut" / "checkpoints")
    assert place is not None and place.name == "step-0000005"


@pytest.mark.parametrize("name", ["ddp-cut-to-1", "fsdp-cut-to-1", "ddp-cut-to-4"])
def test_a_run_begun_by_2_processes_goes_on_with_1_and_with_4(name: str, runs: Runs) -> None:
    assert distance(runs.folder / name, runs.folder / "one") <= 1e-6
    assert_same_curve(runs.folder / name, runs.folder / "one")
    of_the_machine = ("checkpoint_saved", "memory", "busy_cores", "slow_process")
    assert [line["event"] for line in lines(runs.folder / name, "event") if line["event"] not in of_the_machine] == ["resumed"]


def test_errors_stop_all_processes_and_one_says_them(tiny_data: Path, tmp_path: Path) -> None:
    runs = Runs(tmp_path, tiny_data)
    seeds = [runs.recipe(f"rate-{rate}", settings={"logging.eval_every": rate}) for rate in (3, 4)]
    for name in ("blocked-ddp", "blocked-fsdp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoints").write_text("a file where the folder should be")
    said = runs.on(
        2,
        {"recipe": seeds},
        {"recipe": runs.recipe("noise", settings={"logging.grad_noise_every": 1})},
        {"recipe": runs.recipe("uneven", phase={"global_batch_size": 3})},
        *(
            {"recipe": runs.recipe(f"blocked-{kind}", settings={"distributed.strategy": kind, "checkpoint.save_every": 1})}
            for kind in KINDS
        ),
    )
    told = [[message for _, message in job if message] for job in said]
    assert [[code for code, _ in job] for job in said] == [[2, 2], [2, 2], [2, 2], [1, 1], [1, 1]]
    assert [len(messages) for messages in told] == [1] * 5, told
    assert "process 1 does not have what process 0 has:\n  recipe.logging.eval_every: 3 there, 4 here" in told[0][0]
    assert "noise is measured in one process only" in told[1][0]
    assert "global_batch_size = 3: cannot be split for 2 processes" in told[2][0]
    assert "could not be written" in told[3][0] and "could not be written" in told[4][0]
    assert not (tmp_path / "rate-3").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_whose_others_do_not_come_waits_no_longer_than_it_says(
    rank: int, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(world, "JOIN", timedelta(seconds=1))
    said = f"process {rank} of 2 did not find all others at 127.0.0.1:{place['MASTER_PORT']} within "
    with pytest.raises(UserError, match=said), world.process_group(config.build_run(tiny_tree(tiny_data, tmp_path))):
        pass


def test_muon_cannot_be_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = tiny_tree(tmp_path / "data", tmp_path)
    muon = {"name": "muon", "lr": 1e-3}
    change(tree, {"phases.short.optim": muon, "phases.long.optim": muon, "distributed.strategy": "fsdp"})
    with pytest.raises(ConfigError, match=r"Muon needs whole matrices \(phases.short.optim.name = muon\)"):
        pretrain(config.build_run(tree))
    (tmp_path / "recipe.yaml").write_text(json.dumps(tree))
    for command in ("run", "prepare", "pretrain", "launch", "plan"):
        assert cli.main([command, str(tmp_path / "recipe.yaml")]) == 2
        assert "Muon needs whole matrices (phases.short.optim.name = muon); set it to ddp" in capsys.readouterr().err


@pytest.mark.parametrize("pretrained_by", ["muon", "lamb"])
def test_a_task_is_sharded_by_its_own_optimizer_whatever_pretrained_its_run(pretrained_by: str, tmp_path: Path) -> None:
    tree = tiny_tree(tmp_path / "data", tmp_path)
    task = {"task": "sst2", "path": "x", "seq_len": 16}
    optim = {"name": pretrained_by, "lr": 1e-3}
    change(tree, {"phases.short.optim": optim, "phases.long.optim": optim, "distributed.strategy": "fsdp"})
    change(tree, {"finetune": {"own": task, "whole": {**task, "optimizer": "muon"}}})
    run, two = config.build_run(tree), world.World(size=2)
    assert isinstance(run, BertRun)
    with pytest.raises(ConfigError, match=r"Muon needs whole matrices \(finetune.whole.optimizer = muon\)"):
        open_beginning(run, "whole", tmp_path / "none", Line(io.StringIO()), two)
    for name, processes in (("own", two), ("whole", world.World())):
        with pytest.raises(DataError, match="none"):  # there is no checkpoint
            open_beginning(run, name, tmp_path / "none", Line(io.StringIO()), processes)


def test_only_pretraining_runs_in_many_processes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, count in (("0", 1), ("1", 0)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert cli.main(["run", "demo"]) == 2
        assert capsys.readouterr().err.count("`overnight run` works in one process") == count
    assert cli.main(["pretrain", "demo"]) == 2


@pytest.mark.heavy
def test_a_killed_process_ends_the_job_and_leaves_a_whole_checkpoint(tiny_data: Path, tmp_path: Path) -> None:
    runs = Runs(tmp_path, tiny_data)
    recipe = runs.recipe("run", phase={"steps": 4000})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "overnight", "pretrain"]
    job = subprocess.Popen([*command, recipe], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_until(lambda: reader.newest_checkpoint(tmp_path / "run" / "checkpoints"), job)
        os.kill(json.loads((tmp_path / "run" / "lock").read_text())["pid"], signal.SIGKILL)
        output, _ = job.communicate(timeout=HANG)
    finally:
        job.kill()
    assert job.returncode not in (0, None)
    assert "SIGKILL" in output
    before = reader.newest_checkpoint(tmp_path / "run" / "checkpoints")
    assert before is not None
    reader.read_checkpoint(before)


@pytest.mark.heavy
def test_after_50_steps_they_still_agree(tiny_data: Path, tmp_path: Path) -> None:
    runs = Runs(tmp_path, tiny_data)
    pretrain(runs.make("one", settings=LONG), Line(io.StringIO()))
    for count in (2, 4):
        jobs = [{"recipe": runs.recipe(f"{kind}-{count}", settings={**LONG, "distributed.strategy": kind})} for kind in KINDS]
        assert {code for job in runs.on(count, *jobs) for code, _ in job} == {0}
        for kind in KINDS:
            assert distance(tmp_path / f"{kind}-{count}", tmp_path / "one") <= 1e-6
            assert_same_curve(tmp_path / f"{kind}-{count}", tmp_path / "one")


@pytest.mark.heavy
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_layers_on_2_processes_train_as_eager_ones_and_resume_to_the_same_bits(kind: str, tiny_data: Path, tmp_path: Path) -> None:
    runs = Runs(tmp_path, tiny_data)
    settings, dropout = (
        {**LONG, "distributed.strategy": kind, "compute.torch_compile": True},
        {"model": {"dropout": 0.1, "attention_dropout": 0.1}},
    )
    eager, compiled = runs.recipe("eager", settings={**LONG, "distributed.strategy": kind}), runs.recipe("compiled", settings=settings)
    whole, cut = runs.recipe("whole", settings=settings, **dropout), runs.recipe("cut", settings=settings, **dropout)
    jobs = [{"recipe": eager}, {"recipe": compiled}, {"recipe": whole}, {"recipe": cut, "signal": [1, 7]}, {"recipe": cut}]
    said = runs.on(2, *jobs, on_warning="ignore")  # the compiler has some of its own
    assert [[code for code, _ in job] for job in said] == [[0, 0], [0, 0], [0, 0], [143, 143], [0, 0]], said
    assert distance(tmp_path / "compiled", tmp_path / "eager") <= 1e-6
    ours, theirs = newest(tmp_path / "cut"), newest(tmp_path / "whole")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert distance(tmp_path / "whole", tmp_path / "compiled") > 1e-3, "dropout was on"
