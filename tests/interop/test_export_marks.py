"""An export replaces an earlier one of the same run and task, and no other model."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from overnight.cli.main import main
from overnight.config import Run
from overnight.errors import ConfigError, UserError
from overnight.interop.export_marks import check_names, check_target, export_marks, marked

Captured = pytest.CaptureFixture[str]


def exported(out: Path, marks: dict[str, str] | None = None) -> Path:
    """A folder with weights that say what they are of."""
    out.mkdir(parents=True)
    weights = save({"word": np.zeros((2, 2), np.float32)}, metadata={"format": "pt"})
    (out / "model.safetensors").write_bytes(b"".join(marked(weights, marks or {})))
    (out / "config.json").write_text("{}")
    return out


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text("name: mine\n")
    return folder


@pytest.mark.parametrize("task", [None, "genres"])
def test_an_export_of_the_same_run_and_task_may_be_replaced(task: str | None, run: Path, tmp_path: Path) -> None:
    check_target(tmp_path / "new", run, task)
    check_target(exported(tmp_path / "out", export_marks(run, task)), run, task)


@pytest.mark.parametrize(
    ("marks", "said"),
    [
        ({"overnight_run": "mine", "overnight_task": "genres"}, "an export of the task genres of the run mine"),
        ({"overnight_run": "yours", "overnight_task": ""}, "an export of the pretrained model of the run yours"),
        (None, r"a model\.safetensors that no export of a run wrote"),
    ],
)
def test_another_model_is_not_replaced_by_an_export(marks: dict[str, str] | None, said: str, run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"out: holds {said}; name another folder, or delete it"):
        check_target(exported(tmp_path / "out", marks), run, None)


def test_the_export_of_a_run_folder_is_that_of_its_pretrained_model_whatever_the_folder_was_called(run: Path, tmp_path: Path) -> None:
    check_target(exported(run / "export", {"overnight_run": "before", "overnight_task": ""}), run, None)
    other = run.parent / "other"
    for of, task in ((run, "genres"), (other, None)):
        with pytest.raises(ConfigError, match="is where `overnight run` exports the pretrained model of mine"):
            check_target(run / "export", of, task)


def test_the_command_replaces_its_own_export_alone(pretrained: Run, tmp_path: Path, capsys: Captured) -> None:
    for name in ("one", "two"):
        shutil.copytree(pretrained.run_dir, tmp_path / name)
    to = ["--to", str(tmp_path / "out")]
    assert main(["export", "--from", str(tmp_path / "one"), *to]) == main(["export", "--from", str(tmp_path / "one"), *to]) == 0
    assert main(["export", "--from", str(tmp_path / "two"), *to]) == 2
    assert "out: holds an export of the pretrained model of the run one;" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text('{"a": 1}')
    assert main(["export", "--from", str(tmp_path / "one"), *to]) == 2
    assert "out: holds a config.json that no export of a run wrote;" in capsys.readouterr().err
    assert (tmp_path / "out" / "config.json").read_text() == '{"a": 1}'


@pytest.mark.parametrize("left", ["README.md", "vocab.txt"])
def test_a_part_of_an_export_is_replaced_in_the_run_folder_alone(left: str, pretrained: Run, tmp_path: Path, capsys: Captured) -> None:
    run, out = shutil.copytree(pretrained.run_dir, tmp_path / "run"), tmp_path / "out"
    for folder in (run / "export", out):
        folder.mkdir()
        (folder / left).write_text("left")
    assert main(["export", "--from", str(run), "--to", str(run / "export")]) == 0
    assert (run / "export" / "config.json").is_file() and (run / "export" / left).read_text() != "left"
    assert main(["export", "--from", str(run), "--to", str(out)]) == 1
    said = {
        "README.md": "exists and holds 'README.md', which no export wrote; name another folder",
        "vocab.txt": "holds part of an export (no config.json); delete the folder or name another",
    }
    assert f"out: {said[left]}\n" in capsys.readouterr().err
    assert (out / left).read_text() == "left"


def test_what_no_export_writes_is_kept_in_the_run_folder_too(run: Path) -> None:
    (run / "export").mkdir()
    (run / "export" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"export: exists and holds 'thesis\.txt', which no export wrote"):
        check_names(run / "export", ("config.json", "vocab.txt"), needed="config.json")


@given(st.text(max_size=9), st.text(max_size=9))
def test_marks_change_no_tensor_and_are_the_same_bytes_each_time(run: str, task: str) -> None:
    tensors = {"word": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.ones(1, np.float16)}
    marks = {"overnight_run": run, "overnight_task": task}
    one, other = (b"".join(marked(save(tensors, metadata={"format": "pt"}), marks)) for _ in range(2))
    assert one == other
    assert {name: array.tolist() for name, array in load(one).items()} == {name: array.tolist() for name, array in tensors.items()}
