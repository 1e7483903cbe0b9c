"""What a preparation takes for its source files: never what the program itself writes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from overnight.cli.main import main
from overnight.config import Data
from overnight.corpus import pipeline
from overnight.corpus.pipeline import prepare
from overnight.corpus.shards import load_manifest
from overnight.errors import DataError
from tests.corpus.folders import texts

OWN, RUN = Path("data/mine"), Path("runs/mine")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: texts, and below `runs/mine` what a run may have left."""
    monkeypatch.chdir(tmp_path)
    for number, text in enumerate(texts(40)):
        (tmp_path / f"{number:02d}.txt").write_text(text)
    (tmp_path / "runs/mine/checkpoints").mkdir(parents=True)
    (tmp_path / "runs/mine/events.json").write_text("[]")
    (tmp_path / "runs/mine/checkpoints/notes.txt").write_text("Not a text to train on, " * 20)
    return tmp_path


def settings(path: str, **changes: Any) -> Data:
    return dataclasses.replace(Data(paths=[path], tokenizer="bytes", valid_fraction=0.2, workers=1), **changes)


def prepared(path: str, **changes: Any) -> list[str]:
    """Prepare as the command does; returns what it said."""
    said: list[str] = []
    prepare(settings(path, **changes), OWN, said.append, leave_out=[RUN])
    return said


@pytest.mark.parametrize("kind", ["auto", "text"])
@pytest.mark.parametrize("path", [".", "*", "**", "**/*", "../{here}", "../{here}-links"])
def test_what_a_preparation_and_its_run_write_is_no_text_of_theirs(
    here: Path, path: str, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here.parent / f"{here.name}-links").mkdir()
    (here.parent / f"{here.name}-links" / "link").symlink_to(here)
    source = path.format(here=here.name)

    def stop(*arguments: Any) -> None:
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "_tokenize", stop)
        with pytest.raises(InterruptedError):
            prepared(source, format=kind)
    assert "continuing" in prepared(source, format=kind)[0]
    found = load_manifest(OWN).sources[0]
    assert found.files == found.documents == 40
    assert prepared(source, format=kind) == []


def test_the_command_reads_the_folder_it_works_in_again_and_again(here: Path) -> None:
    (here / "runs/demo").mkdir()
    (here / "runs/demo/run.json").write_text("[]")
    command = ["prepare", "demo", '--data.paths=["."]', "--data.valid_fraction=0.2", "--data.vocab_size=300", "--data.workers=1"]
    (here / "runs/mine/events.json").unlink()
    for _ in range(2):
        assert main(command) == 0
    assert load_manifest(here / "data/demo").sources[0].documents == 41


def test_what_is_named_itself_is_read_wherever_it_lies(here: Path) -> None:
    (here / "data/mine/text").mkdir(parents=True)
    for number in range(20):
        (here / f"{number:02d}.txt").rename(here / f"data/mine/text/{number:02d}.txt")
    for path in ("data/mine/text", "data/mine/text/*.txt", "data/mine/*/*.txt"):
        prepared(path)
        assert load_manifest(OWN).sources[0].documents == 20
        (OWN / "manifest.json").unlink()
        for file in OWN.glob("*.*"):
            file.unlink()
    with pytest.raises(
        DataError, match=r"data/mine: is the folder of the prepared data or of the run \(data\.dir, out\).*correct data\.paths"
    ):
        prepared("data/mine")
    with pytest.raises(DataError, match="runs/mine: is the folder of the prepared data or of the run"):
        prepared("runs/mine")
