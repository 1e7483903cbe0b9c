"""The hash of the files of a task."""

from __future__ import annotations

from pathlib import Path

import pytest

from overnight.tasks.data_hash import data_hash, hashed_paths
from tests.corpus.folders import unreadable


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train" / "pos").mkdir(parents=True)
    (tmp_path / "train" / "pos" / "0_9.txt").write_text("good")
    (tmp_path / "train.csv").write_text("text,label\na,b\n")
    (tmp_path / "dev.csv").write_text("text,label\nc,d\n")
    return tmp_path


def test_what_the_files_of_a_split_hold_and_how_they_are_called_counts(folder: Path) -> None:
    found = [data_hash(folder)]
    (folder / "dev.csv").write_text("text,label\nc,e\n")
    found += [data_hash(folder), data_hash(folder / "dev.csv"), data_hash(folder / "train.csv", folder / "dev.csv")]
    (folder / "dev.csv").rename(folder / "test.csv")
    found.append(data_hash(folder))
    (folder / "train" / "pos" / "0_9.txt").write_text("better")
    found.append(data_hash(folder))
    assert len(set(found)) == len(found) and all(len(each) == 16 for each in found)


def test_what_else_lies_in_the_folder_and_where_it_lies_do_not(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    before = data_hash(folder)
    (folder / "predictions.json").write_text("{}")
    (folder / "runs").mkdir()
    (folder / "runs" / "train.log").write_text("more")
    assert data_hash(folder) == before
    assert data_hash(folder.rename(tmp_path_factory.mktemp("other") / "place")) == before


_READ = {
    "tables": ["train.csv", "valid.tsv", "test.parquet"],
    "GLUE": ["train.tsv", "dev.tsv", "test.tsv", "msr_paraphrase_train.txt", "msr_paraphrase_test.txt", "dev_ids.tsv"],
    "MNLI": ["train.tsv", "dev_matched.tsv", "dev_mismatched.tsv", "test_matched.tsv", "test_mismatched.tsv"],
    "SST": ["train_binary_sent.csv", "dev_binary_sent.csv", "test_binary_sent.csv"],
    "CoNLL": ["eng.train", "eng.testa", "eng.testb"],
    "words": ["train.txt", "validation.conllu", "testb.iob2"],
    "SQuAD": ["train-v1.1.json", "dev-v1.1.json", "train-v2.0.json", "dev-v2.0.json", "train-v2.0-10articles.json"],
    "questions": ["my-Train-questions.json", "my-validation-questions.json"],
    "IMDB": ["aclImdb.tar.xz", "aclImdb_v1.tar.gz"],
}
_STRAY = [".~lock.train.csv#", ".train.tsv", "dev_answers.jsonl", "train.csv.bak", "latest.txt", "test_scores.csv", "dev.log", "tests/a.py"]


@pytest.mark.parametrize("names", _READ.values(), ids=_READ)
def test_each_file_that_a_reader_takes_counts_and_a_stray_one_with_such_a_name_does_not(names: list[str], tmp_path: Path) -> None:
    found = []
    for name in names:
        (tmp_path / name).write_text("rows")
        found.append(data_hash(tmp_path))
    assert len({*found}) == len(names)
    for name in _STRAY:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("other")
        assert data_hash(tmp_path) == found[-1], name


def test_answers_beside_published_questions_and_beside_tables_do_not_count(tmp_path: Path) -> None:
    for names in (_READ["tables"], _READ["SQuAD"]):
        for name in names:
            (tmp_path / name).write_text("rows")
        before = data_hash(tmp_path)
        (tmp_path / "dev_answers.json").write_text("{}")
        assert data_hash(tmp_path) == before
        (tmp_path / "dev_answers.json").unlink()


def test_the_hash_of_a_folder_is_as_it_was(folder: Path) -> None:
    assert data_hash(folder) == "304c5e9618443805", "else every user trains every seed anew"


def test_of_imdb_around_which_the_folder_lies_the_reviews_or_the_archive_count(tmp_path: Path) -> None:
    review = tmp_path / "folder" / "aclImdb" / "train" / "neg" / "0_1.txt"
    review.parent.mkdir(parents=True)
    review.write_text("bad")
    archive = tmp_path / "archive" / "aclImdb_v1.tar.gz"
    archive.parent.mkdir()
    archive.write_bytes(b"one")
    before = [data_hash(tmp_path / "folder"), data_hash(archive.parent)]
    (tmp_path / "folder" / "SHA256SUMS").write_text("of another file")
    assert data_hash(tmp_path / "folder") == before[0]
    review.write_text("worse")
    archive.write_bytes(b"two")
    assert len({*before, data_hash(tmp_path / "folder"), data_hash(archive.parent)}) == 4


def test_a_folder_that_cannot_be_read_is_not_left_out_of_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unreadable(monkeypatch, "pos")
    with pytest.raises(PermissionError, match="train/pos"):
        data_hash(folder)


def test_what_is_not_there_has_none(folder: Path) -> None:
    assert data_hash(folder, folder / "none.csv") == ""


def test_where_rows_lie_counts_only_where_they_are_others_or_are_read_otherwise() -> None:
    facts = {"spec": {"path": "a/train.csv", "dev": ""}, "result": {"data_hash": "1"}}
    assert hashed_paths({"path": "b/table.CSV", "dev": ""}, "1", facts) == {"path": "a/train.csv", "dev": ""}
    for path, data, before in (
        ("b/train.tsv", "1", facts),
        ("b/train.csv", "2", facts),
        ("b/train.csv", "", facts),
        ("b/train.csv", "1", None),
    ):
        assert hashed_paths({"path": path, "dev": ""}, data, before) == {"path": path, "dev": ""}
