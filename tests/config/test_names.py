"""The names that a recipe gives its phases, tasks and sources are text, and its folders may begin with the home folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from overnight import config
from tests.recipe import message, tree

PHASES = "phases: {a: {steps: 3, global_batch_size: 4}}"


@pytest.mark.parametrize(
    ("key", "text", "name"),
    [
        ("phases", "phases: {1: {steps: 3, global_batch_size: 4}}", "1"),
        ("phases", "phases: {on: {steps: 3, global_batch_size: 4}}", "True"),
        ("finetune", f"{PHASES}\nfinetune: {{2024-01-01: {{}}}}", "2024-01-01"),
        ("data.sources", f"{PHASES}\ndata: {{sources: {{~: {{paths: [x]}}}}}}", "None"),
    ],
)
def test_a_name_that_yaml_takes_for_something_else_than_text_is_refused(tmp_path: Path, key: str, text: str, name: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"name: x\n{text}\n")
    said = message(lambda: config.load_run(str(path)))
    assert said.startswith(f"{key}.{name}: YAML does not read ") and said.endswith("; put it in quotes")


def test_run_and_data_folders_begin_at_home_where_the_shell_left_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    run = config.build_run(tree(out="~/runs/{name}", data__dir="~/data"))
    assert (run.run_dir, run.data_dir) == (tmp_path / "runs" / "x", tmp_path / "data")
    other = config.build_run(tree(out="runs/~{name}"))
    assert (other.run_dir, other.data_dir) == (Path("runs/~x"), Path("data/x"))


def test_an_empty_name_of_a_folder_is_not_the_working_directory() -> None:
    assert message(lambda: config.build_run(tree(out="", data__dir=""))) == "out = '': name a folder\ndata.dir = '': name a folder"
    assert config.build_run(tree(out=".")).run_dir == Path()
