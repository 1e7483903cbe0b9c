"""Several processes and one data folder: what another one is making, or has just made, is left to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from overnight.config import Data
from overnight.corpus import pipeline
from overnight.corpus.pipeline import prepare
from overnight.corpus.shards import Manifest
from overnight.errors import DataError
from tests.corpus.folders import texts


class _StopError(Exception):
    pass


def silent(line: str) -> None:
    pass


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(30)))
    return path


def settings(corpus: Path) -> Data:
    return Data(paths=[str(corpus)], tokenizer="bytes", valid_fraction=0.2, workers=1)


def test_two_at_once_in_one_folder_are_refused(corpus: Path, tmp_path: Path) -> None:
    refused: list[str] = []

    def log(line: str) -> None:
        if not refused:
            with pytest.raises(DataError, match="another process is preparing") as error:
                prepare(settings(corpus), tmp_path / "out", silent)
            refused.append(str(error.value))

    prepare(settings(corpus), tmp_path / "out", log)
    assert refused


def test_what_a_process_left_that_was_killed_while_it_wrote_is_cleared_away(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "train-00000.arrow.77-0a1b2c3d.tmp").write_bytes(b"half")
    prepare(settings(corpus), tmp_path, silent, shard_tokens=4000)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_folder_that_another_process_is_about_to_finish_is_used_and_left_to_it(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker, found = tmp_path / "out/work/state.json", list[Manifest]()

    def behind_the_manifest(workers: object) -> None:
        found.append(prepare(settings(corpus), tmp_path / "out", silent))
        assert marker.exists()

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "settle", behind_the_manifest)
        assert prepare(settings(corpus), tmp_path / "out", silent) == found[0]
    assert not marker.parent.exists()


def test_what_was_killed_behind_its_manifest_is_cleared_away_by_the_next(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(workers: object) -> None:
        raise _StopError

    with monkeypatch.context() as patch, pytest.raises(_StopError):
        patch.setattr(pipeline, "settle", killed)
        prepare(settings(corpus), tmp_path / "out", silent)
    assert (tmp_path / "out/work/state.json").exists()
    prepare(settings(corpus), tmp_path / "out", silent)
    assert not (tmp_path / "out/work").exists()


def test_what_another_process_has_prepared_meanwhile_is_not_made_again(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, said = pipeline.start_reading, list[str]()

    def meanwhile(*arguments: Any) -> Any:
        monkeypatch.setattr(pipeline, "start_reading", real)
        prepare(settings(corpus), tmp_path / "out", silent)
        return real(*arguments)

    monkeypatch.setattr(pipeline, "start_reading", meanwhile)
    found = prepare(settings(corpus), tmp_path / "out", said.append)
    assert found.count("train", "documents") and said == []
