"""`overnight launch`: exit codes and restarts of real processes, the Slurm script run for real with stand-ins, wrong options."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from overnight.checkpoint import reader
from overnight.cli.main import main
from overnight.distributed.elastic import after_signal
from overnight.distributed.launch import Job, check_job, time_limit
from overnight.distributed.leader import Failure, verdict
from tests.conftest import ROOT, tiny_tree
from tests.processes import HANG, wait_until
from tests.recipe import change

Captured = pytest.CaptureFixture[str]
STEPS = 80

# Stand-ins for Slurm's commands. srun starts its tasks here, and on a signal gives it to all their processes, as Slurm gives it to a step.
SCONTROL = '#!/bin/bash\nif [ "$1" = show ]; then echo localhost; else echo "$@" >> "$FAKE/requeued"; fi\n'
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys, psutil
words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
tasks = [subprocess.Popen(words) for _ in range(int(os.environ["SLURM_NNODES"]))]
def forward(number, frame):
    for process in psutil.Process().children(recursive=True):
        process.send_signal(number)
signal.signal(signal.SIGUSR1, forward)
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Callable[..., Path]:
    """Writes a tiny recipe on the prepared corpus into a folder of its own; returns the file."""

    def make(name: str, **settings: Any) -> Path:
        folder = tmp_path_factory.mktemp(name)
        tree = tiny_tree(folder, tiny_data.parent / "topics.jsonl")
        tree["data"]["dir"] = str(tiny_data)
        change(tree, {"checkpoint.save_every": 10, "logging.eval_every": 40, "logging.log_every": 5, **settings})
        for phase in tree["phases"].values():
            phase |= {"steps": STEPS, "micro_batch_size": 2}
        (folder / "recipe.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
        return folder / "recipe.yaml"

    return make


@pytest.fixture
def recipe(make: Callable[..., Path]) -> Path:
    return make("recipe")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on PATH for stand-ins of Slurm's commands, which write into it what they were given."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("FAKE", str(folder))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for name, value in (("SLURM_JOB_ID", "41"), ("SLURM_JOB_NODELIST", "node[1-2]"), ("SLURM_NNODES", "2")):
        monkeypatch.setenv(name, value)
    put(folder, "scontrol", SCONTROL)
    return folder


def put(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


def launched(*argv: str | Path) -> subprocess.Popen[str]:
    """`overnight launch` as a process, its two outputs in one."""
    return spawned([sys.executable, "-m", "overnight", "launch", *map(str, argv)])


def spawned(command: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def trained(recipe: Path, process: subprocess.Popen[str], event: str = "") -> None:
    """Wait for the first checkpoint, and for an event in the metrics."""
    run = recipe.parent / "run"
    wait_until(lambda: reader.newest_checkpoint(run / "checkpoints") and event in (run / "metrics.jsonl").read_text(), process)


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code and the output of a process; none of its children is left."""
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    try:
        output, _ = process.communicate(timeout=HANG)
    finally:
        for one in (process, *children):
            try:
                one.kill()
            except psutil.NoSuchProcess:
                continue
    return process.returncode, output


def state(recipe: Path) -> dict[str, torch.Tensor]:
    place = reader.newest_checkpoint(recipe.parent / "run" / "checkpoints")
    assert place is not None and place.name == f"step-{2 * STEPS:07}"
    _, model, optimizer = reader.read_checkpoint(place)
    return model | optimizer


def losses(recipe: Path) -> list[tuple[int, float]]:
    found = [json.loads(line) for line in (recipe.parent / "run" / "metrics.jsonl").read_text().splitlines()]
    return [(line["global_step"], line["loss"]) for line in found if line["kind"] == "train"]


def assert_same(recipe: Path, reference: Path) -> None:
    ours, theirs = state(recipe), state(reference)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert losses(recipe) == losses(reference)


@pytest.fixture(scope="module")
def undisturbed(make: Callable[..., Path]) -> Path:
    """The recipe of a run of two processes that nothing disturbed."""
    recipe = make("undisturbed")
    code, output = end(launched(recipe, "--processes=2"))
    assert code == 0, output
    return recipe


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to", "number", "expected"),
    [
        ("launcher", signal.SIGUSR1, 138),
        pytest.param("launcher", signal.SIGINT, 130, marks=pytest.mark.heavy),
        pytest.param("launcher", signal.SIGHUP, 143, marks=pytest.mark.heavy),
        pytest.param("process", signal.SIGTERM, 143, marks=pytest.mark.heavy),
    ],
)
def test_a_signal_to_the_launcher_or_a_process_gives_a_checkpoint_and_its_exit_code(
    to: str, number: int, expected: int, recipe: Path
) -> None:
    job = launched(recipe, "--processes=2", "--restarts=2")
    trained(recipe, job)
    os.kill(job.pid if to == "launcher" else psutil.Process(job.pid).children()[1].pid, number)
    code, output = end(job)
    assert code == expected, output
    assert output.count("a checkpoint is written, the same command continues") == 1 and "Traceback" not in output


@pytest.mark.heavy
def test_a_killed_process_is_named_and_with_restarts_the_job_goes_on_to_the_same_bits(recipe: Path, undisturbed: Path) -> None:
    for restarts in (0, 1):
        job = launched(recipe, "--processes=2", f"--restarts={restarts}")
        # The second time, once it has resumed.
        trained(recipe, job, "resumed" if restarts else "")
        psutil.Process(job.pid).children()[1].kill()
        code, output = end(job)
        if not restarts:
            assert code == 1 and output.count("process 1 was killed by SIGKILL") == 1 and "Traceback" not in output
    assert code == 0, output
    assert output.count("continuing at step") == 2
    assert_same(recipe, undisturbed)


@pytest.mark.slow
def test_a_wrong_recipe_is_said_once_and_not_tried_again(recipe: Path) -> None:
    code, output = end(launched(recipe, "--processes=2", "--restarts=3", "--logging.grad_noise_every=1"))
    assert (code, output.count("noise is measured in one process only")) == (2, 1), output


@pytest.mark.heavy
def test_a_job_of_slurm_that_runs_out_of_time_puts_itself_back_and_ends_like_the_undisturbed_one(
    recipe: Path, undisturbed: Path, fake: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    put(fake, "srun", SRUN)
    put(fake, "sbatch", '#!/bin/bash\ncat > "$FAKE/job.sh"\n')
    assert main(["launch", str(recipe), "--nodes=2", "--processes=1", "--slurm", "--submit"]) == 0
    job = spawned(["bash", str(fake / "job.sh")])
    trained(recipe, job)
    next(one for one in psutil.Process(job.pid).children() if str(fake / "srun") in one.cmdline()).send_signal(signal.SIGUSR1)
    code, output = end(job)
    assert code == 138, output
    assert (fake / "requeued").read_text() == "requeue 41\n"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    code, output = end(spawned(["bash", str(fake / "job.sh")]))
    assert code == 0 and "continuing at step" in output, output
    assert (fake / "requeued").read_text() == "requeue 41\n"
    assert_same(recipe, undisturbed)


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (1, False), (2, False), (130, False), (138, True), (143, False)])
def test_the_script_puts_the_job_back_only_after_sigusr1(code: int, requeued: bool, recipe: Path, fake: Path, capsys: Captured) -> None:
    assert main(["launch", str(recipe), "--processes=1", "--slurm"]) == 0
    put(fake, "srun", f"#!/bin/bash\nexit {code}\n")
    assert subprocess.run(["bash"], input=capsys.readouterr().out, text=True, check=False).returncode == code
    assert (fake / "requeued").exists() == requeued


def test_the_script_says_to_slurm_what_was_asked_and_quotes_every_word(recipe: Path, fake: Path, capsys: Captured) -> None:
    hostile = ["x\n#SBATCH --uid=0", 'it\'s "here"', "$(touch gone)", "`touch gone`; touch gone", "a\nb", "@command@", "\\", "ü"]
    overrides = [f"--data.paths=[{json.dumps(word)}]" for word in hostile] + ["--data.dir=a\n#SBATCH --uid=0"]
    options = ["--nodes=4", "--processes=2", "--restarts=1", "--time=2-12", "--partition=gpu", "--account=a.b", "--cpus=9"]
    argv = [str(recipe), "--slurm", "--signal-before=120", "--name=" + json.dumps("a b\n#SBATCH --uid=0"), *options, *overrides]
    assert main(["launch", *argv]) == 0
    script = capsys.readouterr().out
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    # sbatch reads no further than the first command.
    head = itertools.takewhile(lambda line: line.startswith("#") or not line.strip(), script.splitlines())
    assert [line.removeprefix("#SBATCH --") for line in head if line.startswith("#SBATCH")] == [
        "job-name=a-b-SBATCH---uid-0", "nodes=4", "ntasks-per-node=1", "cpus-per-task=9", "partition=gpu", "account=a.b", "time=2-12",
        "signal=USR1@120", "requeue", "open-mode=append", "output=%x-%j.out",
    ]  # fmt: skip
    put(fake, "srun", f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps(sys.argv[1:]))\n")
    done = subprocess.run(["bash"], input=script, text=True, capture_output=True, check=True, cwd=fake)
    words = json.loads(done.stdout)
    at = words.index(sys.executable)
    assert words[:at] == ["--kill-on-bad-exit=0", "--wait=60"]
    ours = ["--nodes=4", "--processes=2", "--restarts=1", "--signal-before=120", "--rendezvous=localhost:20041"]
    assert words[at:] == [
        sys.executable, "-m", "overnight", "launch", str(recipe), *ours, "--name=" + json.dumps("a b\n#SBATCH --uid=0"), *overrides,
    ]  # fmt: skip
    assert not (fake / "gone").exists()


def test_the_option_to_extend_reaches_the_processes(recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setattr("overnight.distributed.elastic.run_agent", lambda command, *_: print(*command) or 0)
    for options in (["--slurm"], []):
        assert main(["launch", str(recipe), "--processes=1", *options, "--extend"]) == 0
        assert f"{recipe} " in (out := capsys.readouterr().out) and " --extend" in out


def test_what_auto_means_is_decided_once_for_all_processes_of_a_machine(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("overnight.distributed.elastic.run_agent", lambda command, *_: print(*command) or 0)
    for found in ("bf16", "fp32"):
        monkeypatch.setattr("overnight.config.load.usual_precision", lambda device, found=found: found)
        assert main(["launch", str(recipe), "--processes=2", "--precision=auto"]) == 0
        assert capsys.readouterr().out.split()[-1] == f"--precision={found}"
    # The machine that writes a script is not one of those that run it.
    assert main(["launch", str(recipe), "--processes=2", "--precision=auto", "--slurm"]) == 0
    assert "--precision=auto" in (script := capsys.readouterr().out) and "--precision=fp32" not in script


def test_gpus_are_asked_for_unless_the_recipe_trains_on_the_cpu(recipe: Path, capsys: Captured) -> None:
    for device, asked in (("cpu", False), ("auto", True)):
        assert main(["launch", str(recipe), "--processes=4", "--slurm", f"--compute.device={device}"]) == 0
        assert ("#SBATCH --gpus-per-node=4\n" in capsys.readouterr().out) == asked


@pytest.mark.parametrize("code", [0, 3])
def test_submit_gives_the_script_to_sbatch_and_ends_with_its_exit_code(code: int, recipe: Path, fake: Path, capsys: Captured) -> None:
    put(fake, "sbatch", f'#!/bin/bash\ncat > "$FAKE/job.sh"; exit {code}\n')
    assert main(["launch", str(recipe), "--processes=1", "--slurm"]) == 0
    script = capsys.readouterr().out
    assert main(["launch", str(recipe), "--processes=1", "--slurm", "--submit"]) == code
    assert (fake / "job.sh").read_text() == script


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--nodes=0", "--nodes=0: must be a number above 0"),
        ("--nodes=-1", "--nodes=-1: must be a number above 0"),
        ("--nodes=3:2", "--nodes=3:2: must be a number above 0, or MIN:MAX"),
        ("--nodes=2", "--nodes=2: needs --rendezvous=HOST:PORT"),
        ("--nodes=2 --rendezvous=first", "--rendezvous=first: must be HOST:PORT"),
        ("--nodes=2 --processes=1 --rendezvous=first:99999", "--rendezvous=first:99999: must be HOST:PORT"),
        ("--nodes=2 --processes=1 --rendezvous=first:0", "--rendezvous=first:0: must be HOST:PORT"),
        ("--nodes=2 --processes=1 --rendezvous=first..two:29500", "--rendezvous=first..two:29500: must be HOST:PORT"),
        ("--processes=0", "--processes=0: must be above 0"),
        ("--processes=two", "argument --processes: invalid int value: 'two'"),
        ("--processes=16", "phases.short.global_batch_size = 8: cannot be split for 16 processes into micro-batches of 1"),
        (
            "--nodes=1:3 --processes=1 --rendezvous=a:1",
            "cannot be split for 3 processes into micro-batches of 2; it must divide (--nodes=3",
        ),
        ("--restarts=-1", "--restarts=-1: must be 0 or more"),
        ("--signal-before=0", "--signal-before=0: must be 1 to 65535 seconds"),
        ("--submit", "--submit: needs --slurm"),
        ("--time=3", "--time: needs --slurm"),
        ("--slurm", "--slurm: needs --processes"),
        ("--slurm --processes=1 --time=noon", "--time=noon: must be as Slurm writes it"),
        ("--slurm --processes=1 --time=0", "--time=0: must be as Slurm writes it"),
        ("--slurm --processes=1 --time=5", "--signal-before=300: must be below the time of the job, 300 s"),
        ("--slurm --processes=1 --partition=a;b", "--partition='a;b': must be of letters"),
        ("--slurm --processes=1 --account=", "--account='': must be of letters"),
        ("--slurm --processes=1 --nodes=1:2", "--nodes=1:2: Slurm gives a fixed number of machines"),
        ("--slurm --processes=1 --rendezvous=a:1", "--rendezvous=a:1: the job meets at its first machine"),
        ("--slrm=1", "slrm = 1: unknown key"),
        ("--fast", "'--fast': has no value"),
    ],
)
def test_wrong_options_are_named_before_anything_starts(options: str, says: str, recipe: Path, capsys: Captured) -> None:
    assert main(["launch", str(recipe), *options.split()]) == 2
    captured = capsys.readouterr()
    assert says in captured.err and captured.out == ""
    assert not (recipe.parent / "run").exists()


def test_all_wrong_options_are_named_at_once() -> None:
    assert len(list(check_job(Job("x", processes=0, restarts=-1, submit=True, cpus=3)))) == 4


def test_submit_without_sbatch_says_what_to_do(recipe: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["launch", str(recipe), "--processes=1", "--slurm", "--submit"]) == 1
    assert "sbatch: not found; submit from a machine of the cluster, or leave out --submit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE = 2: without RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE = 'two': must be the number of processes"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE = '0': must be the number of processes"),
    ],
)
def test_a_broken_environment_is_named(
    environment: dict[str, str], says: str, recipe: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["pretrain", str(recipe)]) == 2
    assert says in capsys.readouterr().err


def test_the_help_lists_every_option_and_the_keys_of_a_recipe(capsys: Captured) -> None:
    assert main(["launch", "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: overnight launch RECIPE ")
    assert all(f"  --{name}" in out for name in ("nodes=N", "slurm ", "signal-before=SECONDS", "cpus=C", "compute.device="))


@given(st.integers(0, 400), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))
def test_a_time_is_read_as_slurm_reads_it(days: int, hours: int, minutes: int, seconds: int) -> None:
    def whole(*parts: int) -> int | None:
        return sum(n * unit for n, unit in zip(parts, (86400, 3600, 60, 1), strict=True)) or None

    assert time_limit(f"{days}-{hours}:{minutes:02}:{seconds:02}") == whole(days, hours, minutes, seconds)
    assert time_limit(f"{days}-{hours}:{minutes:02}") == whole(days, hours, minutes, 0)
    assert time_limit(f"{days}-{hours}") == whole(days, hours, 0, 0)
    assert time_limit(f"{hours}:{minutes:02}:{seconds:02}") == whole(0, hours, minutes, seconds)
    assert time_limit(f"{minutes}:{seconds:02}") == whole(0, 0, minutes, seconds)
    assert time_limit(f"{minutes}") == whole(0, 0, minutes, 0)


@given(st.text("0123456789:-x \n", max_size=12))
def test_what_is_no_time_is_none(text: str) -> None:
    assert time_limit(text) is None or re.fullmatch("[0-9:-]+", text)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([2, 2], (2, "")),
        ([1, -9], (1, "process 1 was killed by SIGKILL: by kill -9, or by the system where memory ran out; the same command continues")),
        ([143, 1], (143, "")),
        ([1, -15], (1, "")),  # stopped since
        ([-11, 1], (1, "process 0 was killed by SIGSEGV; the same command continues")),
        ([-10, 1], (138, "")),  # before it could listen to signals
        ([-15], (143, "")),
    ],
)
def test_the_cause_is_the_process_that_was_killed_else_the_one_that_failed_first(codes: list[int], expected: tuple[int, str]) -> None:
    assert verdict([Failure(0.0, code, "here", rank) for rank, code in enumerate(codes)], several=False) == expected


def test_the_exit_code_of_a_job_that_was_asked_to_stop_is_that_of_its_processes(capsys: Captured) -> None:
    # Stopped, started too late to listen, failed on the way.
    assert [after_signal(10, codes, 300) for codes in ([138, 138], [-10, 138], [1, 138])] == [138, 138, 1]
    assert capsys.readouterr().err == ""
    assert after_signal(10, [-9, 138], 300) == 138
    assert "not all processes ended within 300 s; the run resumes from its newest checkpoint" in capsys.readouterr().err
