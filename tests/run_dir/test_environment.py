"""The environment is plain, true and available everywhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

import overnight
from overnight.run_dir import environment as env


def test_the_environment_is_plain_json_and_names_what_runs_here() -> None:
    found = env.environment()
    assert json.loads(json.dumps(found)) == found
    assert found["overnight"] == overnight.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["packages"]["numpy"] == numpy.__version__
    # A package of torch for CUDA does not name its build as torch itself does.
    assert found["packages"]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert found["threads"] == torch.get_num_threads()
    assert len(found["gpus"]) == torch.cuda.device_count()
    assert 1 <= found["cpu"]["cores"] <= (os.cpu_count() or 1)
    assert 0.1 < found["memory_gb"] < 1e5


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *who, "-C", str(folder), *arguments], capture_output=True, text=True, check=True).stdout.strip()


def test_the_commit_is_named_with_whether_files_differ_from_it(tmp_path: Path) -> None:
    assert env.git_commit(tmp_path) is None
    git(tmp_path, "init")
    assert env.git_commit(tmp_path) is None, "no commit yet"
    (tmp_path / "a").write_text("1", encoding="utf-8")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-m", "a")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert env.git_commit(tmp_path) == commit
    (tmp_path / "a").write_text("2", encoding="utf-8")
    assert env.git_commit(tmp_path) == f"{commit}+changes"


def test_a_process_asks_git_for_its_commit_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path | None] = []
    monkeypatch.setattr(env, "git_commit", lambda folder=None: asked.append(folder) or "abc")
    env._commit.cache_clear()
    try:
        assert [env.environment()["commit"] for _ in range(3)] == ["abc"] * 3 and len(asked) == 1
    finally:
        env._commit.cache_clear()


def test_without_git_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert env.git_commit(tmp_path) is None


def test_what_a_command_prints_may_be_in_any_encoding() -> None:
    assert env._output("printf", r"caf\351") == "caf\N{REPLACEMENT CHARACTER}"


def test_no_variable_but_the_known_ones_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "do-not-write-me")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = env.environment()
    assert found["variables"]["OMP_NUM_THREADS"] == "3"
    assert "do-not-write-me" not in json.dumps(found)


def test_a_machine_without_torch_is_described_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env.importlib.util, "find_spec", lambda name: None)
    found = env.environment()
    assert found["threads"] is None and found["gpus"] == []
