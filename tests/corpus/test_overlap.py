"""`overnight data overlap`: what a prepared folder shares with evaluations is found whatever its vocabulary is, counted by texts and by documents."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from overnight.cli.main import main
from overnight.corpus import decontaminate
from overnight.corpus.overlap import find_overlap
from overnight.corpus.prepared import Prepared
from tests.corpus.folders import prepared_folder

Captured = pytest.CaptureFixture[str]
WORDS = ["hare", "tortoise", "Bögen", "road", "slept", "won", "Race", "Café", "long", "they", "saw", "did"]


def sentence(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


@pytest.fixture(scope="module", params=["wordpiece", "bytes"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(3)
    rows = [f"{sentence(rng, 30)}." for _ in range(200)]
    return prepared_folder(tmp_path_factory.mktemp(request.param), {"a.jsonl": rows}, tokenizer=request.param)


def grams(text: str, n: int) -> set[tuple[str, ...]]:
    """The runs of n words of a text, as people compare them."""
    words = text.lower().replace("ö", "o").replace("é", "e").replace(".", " ").replace(",", " ").split()
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


@pytest.mark.parametrize("batch", [1, 1 << 20])
@pytest.mark.parametrize("n", [3, 4])
def test_documents_and_texts_are_those_that_share_a_run_of_words(
    folder: Path, tmp_path: Path, n: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decontaminate, "_BATCH", batch)
    rng, prepared = random.Random(n), Prepared(folder)
    documents = [prepared.decoder.text(each.tokens) for each in prepared.documents("train")]
    # Equal ones, and a text that is too short, are texts too.
    one, two = ([sentence(rng, rng.randint(2, 5)) for _ in range(12)] + [documents[at].upper()[:60]] for at in (5, 80))
    paths = []
    for name, texts in (("one", [*one, one[0]]), ("two", [*two, sentence(random.Random(3), 30)])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        paths.append((str(tmp_path / f"{name}.jsonl"), texts))
    found = find_overlap(prepared, "train", [path for path, _ in paths], n, 3)
    read, every = [grams(text, n) for text in documents], set()
    for counts, (path, texts) in zip(found.paths, paths, strict=True):
        asked = [grams(text, n) for text in texts]
        wanted = set().union(*asked)
        every |= wanted
        assert (counts.path, counts.texts, counts.long) == (path, len(texts), sum(map(bool, asked)))
        assert counts.found == sum(bool(each & set().union(*read)) for each in asked) > 0
        assert counts.documents == sum(bool(each & wanted) for each in read)
    assert (found.read, found.documents) == (len(documents), sum(bool(each & every) for each in read))
    numbers = [sample.document.number for sample in found.samples]
    assert numbers == [number for number, each in enumerate(read, 1) if each & every][:3]
    for sample in found.samples:
        assert grams(sample.text, n) & read[sample.document.number - 1]
        assert sample.text in dict(paths)[sample.path]


def test_the_command_says_what_it_found_and_ends_with_1(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    text = next(sample for sample in Prepared(folder).documents("train"))
    words = Prepared(folder).decoder.text(text.tokens).split()[:20]
    (tmp_path / "dev.tsv").write_text(f"0\t{' '.join(words).upper()}\n1\tNothing of it\n")
    command = ["data", "overlap", str(folder), "--with", str(tmp_path / "dev.tsv")]
    assert main(command) == 1
    head, row, summary, sample = capsys.readouterr().out.splitlines()
    assert head.split() == ["evaluation", "texts", "of", "13", "words", "found", "in", "documents"]
    assert row.split() == [str(tmp_path / "dev.tsv"), "4", "1", "1", "100.0", "%", "1"]
    assert summary.endswith("of train shares 13 words in a row with a text of them") and " ".join(words).upper() in sample
    assert main([*command, "--json", "--samples=0"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert (record["documents"], record["paths"][0]["found"], record["samples"]) == (1, 1, [])
    assert main([*command, "--samples=0"]) == 1 and "and 1 more; --samples shows them" in capsys.readouterr().out


@pytest.mark.parametrize("mark", ["{}&nbsp;", "<a href='x'>{}</a>", "{}<br /><br />", "\u201c{}\u201d", '"{}"'])
def test_marks_and_markup_of_an_evaluation_hide_nothing(folder: Path, tmp_path: Path, mark: str) -> None:
    prepared = Prepared(folder)
    words = [prepared.decoder.text(document.tokens).split()[:18] for document in list(prepared.documents("train"))[:20]]
    marked = [" ".join(mark.format(word) if not number % 6 else word for number, word in enumerate(text)) for text in words]
    (tmp_path / "dev.jsonl").write_text("".join(json.dumps(text) + "\n" for text in marked))
    found = find_overlap(prepared, "train", [str(tmp_path / "dev.jsonl")], 13, 0)
    assert (found.paths[0].found, found.documents) == (20, 20)


def test_nothing_shared_ends_with_0_and_what_cannot_be_used_with_2(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "dev.txt").write_text(" ".join([*WORDS, WORDS[0]]), encoding="utf-8")
    assert main(["data", "overlap", str(folder), "--with", str(tmp_path / "dev.txt")]) == 0
    assert "0 of " in capsys.readouterr().out
    for more, said in (
        (["--with", str(tmp_path / "absent")], "there is no such file or folder; correct --with"),
        (["--with", str(tmp_path / "dev.txt"), "--words=14"], "no text of it has 14 words that the vocabulary knows; lower --words"),
        (["--with", str(tmp_path / "dev.txt"), "--split=test"], "test holds no document; there is train"),
    ):
        assert main(["data", "overlap", str(folder), *more]) == 2
        assert said in capsys.readouterr().err
    assert main(["data", "overlap", str(tmp_path), "--with", str(tmp_path / "dev.txt")]) == 2
