"""What a preparation takes for its source files: never what the program itself writes, and it knows when they have changed since."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from overnight.cli.main import main
from overnight.config import Data, TextSource
from overnight.corpus import pipeline
from overnight.corpus.data_paths import expand
from overnight.corpus.pipeline import prepare
from overnight.corpus.readers import documents, start_reading
from overnight.corpus.shards import load_manifest, save_manifest
from overnight.errors import DataError
from tests.corpus.folders import contents, texts, unreadable

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


def test_the_command_reads_the_folder_it_works_in_again_and_again(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "runs/demo").mkdir()
    (here / "runs/demo/run.json").write_text("[]")
    command = ["prepare", "demo", '--data.paths=["."]', "--data.valid_fraction=0.2", "--data.vocab_size=300", "--data.workers=1"]
    (here / "runs/mine/events.json").unlink()
    for _ in range(2):
        assert main(command) == 0
    assert load_manifest(here / "data/demo").sources[0].documents == 41
    assert "warning: the source files" not in capsys.readouterr().out


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


def test_a_cut_file_whose_name_is_no_utf8_is_kept_as_its_name_is_stored(here: Path) -> None:
    (here / os.fsdecode(b"caf\xe9.gz")).write_bytes(gzip.compress(os.urandom(3000).hex().encode())[:-900])
    prepared(".", on_truncated_file="keep")
    assert load_manifest(OWN).sources[0].truncated == [r"caf\udce9.gz"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda here: (here / "new.txt").write_text("one more"), "now 41 files of {more:,} bytes, before 40 of {bytes:,}"),
        (lambda here: (here / "00.txt").write_text("shorter."), "now 40 files of "),
        (lambda here: (here / "00.txt").rename(here / "zz.txt"), "now 40 files of {bytes:,} bytes, before 40 of {bytes:,}"),
        (lambda here: (here / "00.txt").unlink(), "now 39 files of "),
    ],
)
def test_source_files_that_have_changed_since_are_warned_of_in_one_line(here: Path, change: Any, said: str) -> None:
    size = sum(file.stat().st_size for file in here.glob("*.txt"))
    prepared(".")
    before = (OWN / "manifest.json").read_bytes()
    assert prepared(".") == []
    change(here)
    (line,) = prepared(".")
    assert (
        line.startswith("warning: the source files have other names or sizes than when data/mine was prepared (") and "(data.dir)" in line
    )
    assert said.format(bytes=size, more=size + 8) in line
    assert (OWN / "manifest.json").read_bytes() == before


def test_no_warning_is_given_where_it_is_not_known_what_was_read_or_there_is_none_of_it(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEXTS", str(here))
    prepared("$TEXTS/*.txt")
    (here / "elsewhere").mkdir()
    for file in here.glob("*.txt"):
        file.rename(here / "elsewhere" / file.name)
    assert prepared("$TEXTS/*.txt") == []  # gone, as where only the shards were copied
    monkeypatch.setenv("TEXTS", str(here / "elsewhere"))
    assert prepared("$TEXTS/*.txt") == []  # the same files at another place
    (here / "elsewhere/new.txt").write_text("one more")
    assert len(prepared("$TEXTS/*.txt")) == 1
    save_manifest(OWN, dataclasses.replace(load_manifest(OWN), source_files=None))
    tree = json.loads((OWN / "manifest.json").read_text())
    assert tree["source_files"] is None
    assert prepared("$TEXTS/*.txt") == []


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("absent", r"correct data\.sources\.mine\.paths$"),
        ("empty.txt", r"holds no text; correct data\.sources\.mine\.paths or data\.sources\.mine\.format$"),
        ("builtin:nothing", r"^data\.sources\.mine\.paths: 'builtin:nothing' is not built in"),
    ],
)
def test_a_bad_path_of_a_named_source_is_told_with_the_key_of_that_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    with pytest.raises(DataError, match=message):
        prepare(settings("", paths=[], sources={"mine": TextSource(paths=[path])}), tmp_path / "out", lambda line: None)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("change", ["grows", "shrinks", "is written anew"])
def test_a_file_that_changes_while_it_is_read_is_refused(here: Path, change: str, packed: bool) -> None:
    line = "event " * 999 + "event"
    content = f"{line}\n".encode() * 500
    path = here / "log.txt"
    path.write_bytes(gzip.compress(content) if packed else content)
    found = documents(data := Data(paths=[str(path)], documents="line", min_chars=0), start_reading(data))
    assert next(found).text == line
    if change == "is written anew":
        os.utime(path, ns=(0, 1_000_000_000))
    else:
        os.truncate(path, path.stat().st_size + (100 if change == "grows" else -100))
    with pytest.raises(DataError, match=r"log\.txt: has changed while it was read; run the same command again once it is complete"):
        list(found)


def test_a_pipe_is_refused_as_what_can_be_read_once_only(here: Path) -> None:
    os.mkfifo(here / "pipe")
    with pytest.raises(DataError, match="pipe: is a pipe or a device, and text is read more than once; write it into a file"):
        prepared("pipe")


@pytest.mark.parametrize("path", ["text", "text/", "text/closed", "t*", "text/*", "text/**", "**/*.txt", "text/*/*.txt", "text/*/[a]*.txt"])
def test_a_folder_that_cannot_be_read_is_an_error_and_no_folder_without_texts(
    here: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    (here / "text" / "closed").mkdir(parents=True)
    for folder in ("text", "text/closed"):
        (here / folder / "a.txt").write_text("A text.")
    (here / "text" / "closed" / "loop").symlink_to(here / "text")
    unreadable(monkeypatch, "closed")
    message = r"^(\S+/)?text/closed/?: cannot be read \(Permission denied\); make it readable, or leave it out of data\.paths$"
    with pytest.raises(DataError, match=message):
        expand(path)


@pytest.mark.parametrize("path", ["*.txt", "text/*.txt", "text/closed/a.txt", "text/a*"])
def test_what_lies_beside_a_folder_that_cannot_be_read_is_read(here: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    (here / "text" / "closed").mkdir(parents=True)
    for folder in ("text", "text/closed"):
        (here / folder / "a.txt").write_text("A text.")
    unreadable(monkeypatch, "closed")
    assert expand(path)


@pytest.mark.parametrize("lost", ["train-00000.arrow", "documents.arrow"])
def test_a_corpus_that_lacks_a_file_is_not_replaced_by_one_of_other_source_files(here: Path, lost: str) -> None:
    prepared(".")
    (OWN / lost).unlink()
    (here / "new.txt").write_text("one more")
    before = contents(OWN)
    with pytest.raises(
        DataError,
        match=rf"^data/mine: lacks {lost}, and the source files .*\(now 41 files of .* before 40 of .*\); put back .*\(data\.dir\), or delete",
    ):
        prepared(".")
    assert contents(OWN) == before
    (here / "new.txt").unlink()
    assert prepared(".")[0] == f"prepare: data/mine lacks {lost}; preparing it again"
    assert (OWN / lost).exists()
