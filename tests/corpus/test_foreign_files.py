"""Preparation in a folder where files of someone else lie: they stay as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from overnight.errors import DataError
from tests.corpus.folders import prepared_folder, texts


class _StopError(Exception):
    pass


def prepared(place: Path) -> Path:
    return prepared_folder(place, {"a.jsonl": texts(8)})


@pytest.mark.parametrize("theirs", ["report.html", "vocab.txt", "work/thesis.tex"])
def test_a_folder_with_files_of_the_names_of_ours_is_refused(theirs: str, tmp_path: Path) -> None:
    path = tmp_path / "data" / theirs
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    with pytest.raises(DataError, match=rf"holds {Path(theirs).parts[0]}, which no preparation left there"):
        prepared(tmp_path)
    assert path.read_text() == "mine" and [each for each in (tmp_path / "data").rglob("*") if each.is_file() and each.name != ".lock"] == [
        path
    ]


def test_what_someone_puts_beside_the_shards_stays(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    theirs = [folder / "notes.tmp", folder / "drafts.tmp" / "one", folder / "work" / "thesis.tex"]
    for path in theirs:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    assert prepared(tmp_path) == folder
    assert all(path.read_text() == "mine" for path in theirs)


def test_what_a_process_left_that_was_killed_before_it_began_is_no_file_of_someone_else(tmp_path: Path) -> None:
    (tmp_path / "data" / "work").mkdir(parents=True)
    (tmp_path / "data" / "work" / "state.json.77-0a1b2c3d.tmp").write_text("half")
    assert not (prepared(tmp_path) / "work").exists()


def test_intermediate_files_go_though_clearing_them_away_was_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, gone = Path.unlink, list[Path]()

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == "work" and len(gone) == 2:
            raise _StopError
        gone.extend([path] * (path.parent.name == "work"))
        real(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        with pytest.raises(_StopError):
            prepared(tmp_path)
    assert len(list((tmp_path / "data" / "work").iterdir())) > 1
    assert not (prepared(tmp_path) / "work").exists()
