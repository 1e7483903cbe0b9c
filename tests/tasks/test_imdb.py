"""IMDB from its folder and from its archive, whole and damaged."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from overnight.errors import DataError
from overnight.tasks.classification import load_task


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "around" / "aclImdb"
    for part in ("train", "test"):
        for label in ("pos", "neg"):
            (root / part / label).mkdir(parents=True)
            for i in range(40):
                text = f"A {label} film, number {i} of {part}.<br /><br />Seen twice."
                (root / part / label / f"{i}_7.txt").write_text(text)
    (root / "train" / "unsup").mkdir()
    (root / "train" / "unsup" / "0_0.txt").write_text("no label")
    (root / "README").write_text("about")
    return root.parent


def test_folder_and_archive_give_the_same_rows_without_markup(folder: Path, tmp_path: Path) -> None:
    for mode, name in (("w:xz", "aclImdb.tar.xz"), ("w:gz", "aclImdb_v1.tar.gz")):
        with tarfile.open(tmp_path / name, mode) as archive:
            archive.add(folder / "aclImdb", "aclImdb")
    read = load_task("imdb", folder)
    assert read == load_task("imdb", folder / "aclImdb")
    for source in (tmp_path / "aclImdb.tar.xz", tmp_path / "aclImdb_v1.tar.gz", tmp_path):
        assert load_task("imdb", source) == read
    assert read.labels == ("neg", "pos") and len(read.test) == 80 and len(read.train) + len(read.dev) == 80 and read.dev
    texts = {r.id: (r.text_a, r.label) for r in read.test}
    assert texts["pos/3_7"] == ("A pos film, number 3 of test. Seen twice.", "pos")
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "around", tmp_path / "aclImdb.tar.xz", tmp_path / "aclImdb_v1.tar.gz"])


def test_of_a_review_that_is_twice_in_an_archive_the_last_one_counts(folder: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "aclImdb.tar.gz", "w:gz") as archive:
        archive.add(folder / "aclImdb", "aclImdb")
        review = folder / "aclImdb/test/pos/3_7.txt"
        review.write_text("Seen again.")
        archive.add(review, "aclImdb/test/pos/3_7.txt")
    assert load_task("imdb", tmp_path) == load_task("imdb", folder)


@pytest.mark.parametrize(("mode", "name"), [("w:xz", "aclImdb.tar.xz"), ("w:gz", "aclImdb.tar.gz")])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.99])
def test_an_archive_cut_short_is_refused_wherever_the_cut_is(mode: str, name: str, share: float, folder: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / name, mode) as archive:  # type: ignore[call-overload]
        archive.add(folder / "aclImdb", "aclImdb")
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(DataError, match=r"cannot be read to its end .* cut short"):
        load_task("imdb", tmp_path)


def test_what_is_not_the_archive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds neither aclImdb/train nor one of aclImdb\.tar\.xz"):
        load_task("imdb", tmp_path)
    (tmp_path / "aclImdb.tar.xz").write_bytes(b"<html>not found</html>")
    with pytest.raises(DataError, match="cannot be read to its end"):
        load_task("imdb", tmp_path)
    (tmp_path / "reviews.zip").write_bytes(b"PK")
    with pytest.raises(DataError, match=r"ends in \.xz, \.gz, \.tgz"):
        load_task("imdb", tmp_path / "reviews.zip")


def test_missing_classes_and_bad_reviews_are_named(folder: Path) -> None:
    bad = folder / "aclImdb" / "test" / "neg" / "5_7.txt"
    bad.write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"test/neg/5_7\.txt: not UTF-8 at offset 3"):
        load_task("imdb", folder)
    bad.write_bytes(b" \n")
    with pytest.raises(DataError, match=r"test/neg/5_7\.txt: holds no text"):
        load_task("imdb", folder)
    for file in (folder / "aclImdb" / "train" / "pos").iterdir():
        file.unlink()
    bad.unlink()
    with pytest.raises(DataError, match="no reviews in train/pos"):
        load_task("imdb", folder)


@pytest.mark.heavy
def test_the_real_archive_has_12500_reviews_of_each_class_in_each_split(data: Path) -> None:
    read = load_task("imdb", data / "aclImdb.tar.xz")
    for rows in (read.train + read.dev, read.test):
        assert [sum(r.label == label for r in rows) for label in read.labels] == [12_500, 12_500]
    assert 2300 < len(read.dev) < 2700
    assert not {r.text_a for r in read.train} & {r.text_a for r in read.dev}
