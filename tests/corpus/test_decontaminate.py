"""Evaluation text is found in training documents, whatever file it is in and however it is written."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import random
import tarfile
import unicodedata
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.config import Data
from overnight.corpus import pipeline, zips
from overnight.corpus.decontaminate import evaluation_texts, find_evaluation_text, write_ngrams
from overnight.corpus.pipeline import prepare
from overnight.corpus.shards import seal_chunk, write_table
from overnight.errors import DataError
from overnight.state_files import SEAL
from tests.corpus.test_zips import zip_of

RNG = random.Random(0)
QUESTION = "When did the hare, having slept too long beside the road, finally see that the tortoise had won?"
LOUD = "The café of René: the hare, who had slept beside a résumé, saw that the tortoise had won."
VOCABULARY = ["".join(RNG.choices("abcdeghilnorstu", k=6)) for _ in range(3000)]


def silent(line: str) -> None:
    pass


def archive(path: Path, members: dict[str, str]) -> None:
    with tarfile.open(path, "w:xz") as tar:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("squad.json", json.dumps({"data": [{"paragraphs": [{"context": "Short.", "qas": [{"question": QUESTION, "id": 3}]}]}]})),
        ("pairs.jsonl", json.dumps({"sentence_good": QUESTION, "n": 1}) + "\n\n" + json.dumps({"sentence_good": "No."})),
        ("dev.tsv", f"index\tquestion\n0\tNo.\n1\t{QUESTION}\n"),
        ("dev.csv", f'index,question\n0,No.\n1,"{QUESTION}"\n'),
        ("plain.txt", f"No.\n\n{QUESTION[:40]}\n{QUESTION[41:]}\n\nNo."),
    ],
)
def test_every_format_gives_its_texts(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text("\ufeff" + text)
    found = [" ".join(each.split()) for each in evaluation_texts(str(tmp_path / name))]
    assert QUESTION in found
    assert not any(QUESTION in each and each != QUESTION for each in found)
    archive(tmp_path / "all.tar.xz", {f"data/{name}": text, "other/no.txt": "other"})
    assert QUESTION in [" ".join(each.split()) for each in evaluation_texts(f"{tmp_path}/all.tar.xz::data/*")]
    assert "other" not in evaluation_texts(f"{tmp_path}/all.tar.xz::data/*")
    inner = zip_of({name: text.encode()})
    (tmp_path / "all.zip").write_bytes(zip_of({f"data/{name}": text.encode(), "data/inner.zip": inner, "other/no.txt": b"other"}))
    zipped = [" ".join(each.split()) for each in evaluation_texts(f"{tmp_path}/all.zip::data/*")]
    assert zipped.count(QUESTION) == 2 and "other" not in zipped
    assert "other" in evaluation_texts(f"{tmp_path}/all.zip")


def test_a_zip_archive_that_is_cut_or_a_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = zip_of({"a.txt": QUESTION.encode(), "b.txt": bytes(100_000)})
    (tmp_path / "x.zip").write_bytes(content[:-40])
    with pytest.raises(DataError, match=r"x\.zip: the zip archive ends early; get it again, or correct --with"):
        list(evaluation_texts(str(tmp_path / "x.zip"), "--with"))
    monkeypatch.setattr(zips, "_ALWAYS_ALLOWED", 1000)
    (tmp_path / "x.zip").write_bytes(zip_of({"in.zip": content}))
    with pytest.raises(DataError, match=r"x\.zip: unpacks to more than .* as a zip bomb does"):
        list(evaluation_texts(str(tmp_path / "x.zip")))


@pytest.mark.parametrize("between", ["\n", "\r\n\n"])
def test_a_json_file_is_one_value_or_one_a_line(tmp_path: Path, between: str) -> None:
    rows = [{"a": QUESTION, "n": 1}, {"a": "Two."}]
    (tmp_path / "x.json").write_text("\n" + between.join(map(json.dumps, rows)) + "\n")
    assert list(evaluation_texts(str(tmp_path / "x.json"))) == [QUESTION, "Two."]
    for indent in (None, 2):
        (tmp_path / "x.json").write_text("\n" + json.dumps(rows, indent=indent))
        assert list(evaluation_texts(str(tmp_path / "x.json"))) == [QUESTION, "Two."]


def test_a_cell_of_csv_may_be_as_long_as_a_text(tmp_path: Path) -> None:
    csv.field_size_limit(131_072)
    (tmp_path / "x.csv").write_text(f'n,text\n1,"{"word " * 40_000}"\n')
    assert [len(cell) for cell in evaluation_texts(str(tmp_path / "x.csv"))] == [1, 4, 1, 200_000]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("no.json", b"{", "no.json: Expecting"),
        ("no.jsonl", b'{"a": 1}\n{\n', "no.jsonl: Expecting"),
        ("no.txt", b"a \xff b", "no.txt: is not UTF-8"),
        ("no.txt.gz", b"\x1f\x8b\x08\x00", "ends early"),
        ("few.txt", b"few words", "no text of .*few.txt has 13 words; lower data.decontaminate_words"),
    ],
)
def test_what_cannot_be_used_is_said_before_anything_is_read(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    (tmp_path / "text.txt").write_text("word " * 100)
    with pytest.raises(DataError, match=said):
        prepare(Data(paths=[str(tmp_path / "text.txt")], decontaminate=[str(tmp_path / name)]), tmp_path / "out", silent)
    assert not list((tmp_path / "out/work").glob("*.arrow"))
    with pytest.raises(DataError, match=r"there is no such file or folder; correct data\.decontaminate"):
        prepare(Data(paths=[str(tmp_path / "text.txt")], decontaminate=[str(tmp_path / "absent")]), tmp_path / "out", silent)


@settings(max_examples=40)
@given(st.integers(0, 1 << 30), st.integers(2, 5))
def test_a_document_goes_exactly_where_it_shares_an_ngram(tmp_path_factory: pytest.TempPathFactory, seed: int, n: int) -> None:
    rng = random.Random(seed)
    texts = [[rng.choice("abcdefg") for _ in range(rng.randint(0, 12))] for _ in range(12)]
    evaluation = [[rng.choice("abcdefg") for _ in range(rng.randint(n, 8))] for _ in range(3)]
    folder = tmp_path_factory.mktemp("marks")
    (folder / "evaluation.tsv").write_text("\t".join(" ".join(words) for words in evaluation))
    write_ngrams([str(folder / "evaluation.tsv")], n, folder / "evaluation.u64", silent, [str])
    paths = [folder / f"clean-{number}.arrow" for number in range(3)]
    for number, path in enumerate(paths):
        part = [", ".join(words).upper() for words in texts[4 * number : 4 * number + 4]]
        write_table(path, {"text": pa.array(part, pa.large_string())})
        seal_chunk(path)
    grams = {tuple(words[i : i + n]) for words in evaluation for i in range(len(words) - n + 1)}
    expected = [any(tuple(words[i : i + n]) in grams for i in range(len(words) - n + 1)) for words in texts]
    for _ in range(2):  # the second time from what is there
        assert find_evaluation_text(paths, folder / "evaluation.u64", n, 1).tolist() == expected


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pipeline, "CHUNK_BYTES", 5_000)
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / "text" / f"{number:03d}.txt").write_text(" ".join(RNG.choices(VOCABULARY, k=80)) + ".")
    (tmp_path / "dev.tsv").write_text(f"0\t{QUESTION}\n1\tThe same\n")
    return tmp_path / "text"


def settings_of(corpus: Path, **changes: Any) -> Data:
    return dataclasses.replace(Data(paths=[str(corpus)], tokenizer="bytes", valid_fraction=0.2, workers=1), **changes)


def plant(path: Path, text: str) -> None:
    words = path.read_text().split()
    path.write_text(" ".join([*words[:30], text, *words[30:]]))


def test_prepare_drops_documents_with_evaluation_text_counts_and_samples_them(corpus: Path, tmp_path: Path) -> None:
    plant(corpus / "007.txt", QUESTION)
    plant(corpus / "011.txt", QUESTION.upper().replace(",", " --"))
    plant(corpus / "013.txt", " ".join(QUESTION.split()[2:15]))  # 13 words
    plant(corpus / "017.txt", " ".join(QUESTION.split()[2:14]))  # 12 words
    lines: list[str] = []
    manifest = prepare(settings_of(corpus, decontaminate=[str(tmp_path / "dev.tsv")]), tmp_path / "out", lines.append)
    assert manifest.count("train", "documents") + manifest.count("valid", "documents") == 37
    drops = json.loads((tmp_path / "out/drops.json").read_text())["decontaminate"]
    assert (drops["count"], [Path(sample["document"]).stem for sample in drops["samples"]]) == (3, ["007", "011", "013"])
    assert any("3 by data.decontaminate" in line for line in lines)
    assert any("6 13-grams of 1 texts; 3 have fewer words" in line for line in lines)


def test_prepare_says_so_where_no_document_has_evaluation_text(corpus: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    prepare(settings_of(corpus, decontaminate=[str(tmp_path / "dev.tsv")]), tmp_path / "out", lines.append)
    assert "decontaminate: 0 documents with text of evaluations left out" in lines


def test_text_of_which_nothing_but_evaluation_text_is_left_is_refused_for_that_reason(corpus: Path, tmp_path: Path) -> None:
    (corpus / "short.txt").write_text("Too short.")
    with pytest.raises(DataError, match=r"^no document is left: \d+ by data\.decontaminate, 1 by data\.min_chars; allow more of them"):
        prepare(settings_of(corpus, decontaminate=[str(corpus)]), tmp_path / "out", lambda line: None)


def test_neither_case_nor_punctuation_of_any_alphabet_counts(tmp_path: Path) -> None:
    texts = [
        "兔子在路边睡着了，乌龟赢了比赛。",
        "Über Äcker eilt der Hase geschwind.",
        "Заяц долго спал у дороги, а черепаха победила.",
        "Ο λαγός κοιμήθηκε πολύ και έχασε τον αγώνα.",
    ]
    (tmp_path / "dev.txt").write_text("\n\n".join(texts))
    write_ngrams([str(tmp_path / "dev.txt")], 5, tmp_path / "evaluation.u64", silent, [str])
    for kind in (pa.large_string(), pa.large_binary()):
        path = tmp_path / f"clean-{kind}.arrow"
        write_table(
            path,
            {
                "text": pa.array([text.upper().replace("，", ",").encode() for text in texts] + [b"", b"other"], pa.large_binary()).cast(
                    kind
                )
            },
        )
        seal_chunk(path)
        assert find_evaluation_text([path], tmp_path / "evaluation.u64", 5, 1).tolist() == [True, True, True, True, False, False]


def test_a_letter_and_its_accent_are_the_same_in_one_character_and_in_two(tmp_path: Path) -> None:
    texts = [
        "Über Äcker eilt der Hase geschwind.",
        "제주도 토끼는 거북이보다 빠르지 않았다 합니다.",
        "Thỏ ngủ quên bên đường, rùa đã thắng.",
    ]
    forms = [[unicodedata.normalize(form, text) for text in texts] for form in ("NFC", "NFD")]
    for there, here in (forms, forms[::-1]):
        (tmp_path / "dev.txt").write_text("\n\n".join(there))
        folder = tmp_path / str(len(there[0]))
        folder.mkdir()
        write_ngrams([str(tmp_path / "dev.txt")], 5, folder / "evaluation.u64", silent, [str])
        write_table(folder / "clean-0.arrow", {"text": pa.array([*here, "", "Ueber Aecker eilt der Hase."], pa.large_string())})
        seal_chunk(folder / "clean-0.arrow")
        found = find_evaluation_text([folder / "clean-0.arrow"], folder / "evaluation.u64", 5, 1)
        assert found.tolist() == [True, True, True, False, False]


@pytest.mark.parametrize("tokenizer", ["wordpiece", "bytes"])
@pytest.mark.parametrize(
    "written",
    [
        unicodedata.normalize("NFD", LOUD),
        LOUD.replace("é", "&eacute;"),
        LOUD.replace(" slept", " sle\u200bpt"),
        LOUD.replace("the tortoise", "<b>the</b> tor<i>t</i>oise"),
        LOUD,
    ],
)
def test_evaluation_text_is_found_however_it_is_written_there_and_in_training_text(
    tokenizer: Any, written: str, corpus: Path, tmp_path: Path
) -> None:
    plant(corpus / "007.txt", LOUD)
    plant(corpus / "011.txt", written)
    (tmp_path / "dev.tsv").write_text(f"0\t{written}\n")
    asked = settings_of(corpus, decontaminate=[str(tmp_path / "dev.tsv")], tokenizer=tokenizer, vocab_size=300)
    prepare(asked, tmp_path / "out", silent)
    drops = json.loads((tmp_path / "out/drops.json").read_text())["decontaminate"]
    assert [Path(sample["document"]).stem for sample in drops["samples"]] == ["007", "011"]


def test_changed_evaluation_text_begins_a_preparation_anew(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(corpus / "007.txt", QUESTION)
    asked = settings_of(corpus, decontaminate=[str(tmp_path / "dev.tsv")])

    def stop(*arguments: Any) -> None:
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "_tokenize", stop)
        with pytest.raises(InterruptedError):
            prepare(asked, tmp_path / "out", silent)
    (tmp_path / "dev.tsv").write_text(" ".join(RNG.choices(VOCABULARY, k=20)))
    lines: list[str] = []
    assert prepare(asked, tmp_path / "out", lines.append).count("train", "documents") > 0
    assert "starting anew" in lines[0]
    assert json.loads((tmp_path / "out/drops.json").read_text()) == {SEAL: mock.ANY}


def test_paragraphs_of_squad_are_found_and_their_words_in_another_order_are_not(tmp_path: Path, real_data: Path) -> None:
    squad = real_data / "squad/dev-v1.1.json"
    write_ngrams([str(squad)], 13, tmp_path / "evaluation.u64", silent, [str])
    articles = json.loads(squad.read_text())["data"]
    contexts = [each["context"] for each in articles[0]["paragraphs"]]
    texts = [*contexts, *(" ".join(RNG.choices(" ".join(contexts).split(), k=100)) for _ in contexts)]
    write_table(tmp_path / "clean-0.arrow", {"text": pa.array(texts, pa.large_string())})
    seal_chunk(tmp_path / "clean-0.arrow")
    found = find_evaluation_text([tmp_path / "clean-0.arrow"], tmp_path / "evaluation.u64", 13, 1)
    assert found.tolist() == [True] * len(contexts) + [False] * len(contexts)
