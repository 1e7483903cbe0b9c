"""Words with tags: CoNLL files and JSON lines, their splits, and what is refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from overnight.errors import DataError
from overnight.tasks.conll import Sentence, load_tokens, read_sentences

CONLL = "-DOCSTART- -X- O O\n\nEU NNP I-NP B-ORG\nrejects VBZ I-VP O\n\n\n-DOCSTART- -X- O O\n\nPeter NNP I-NP B-PER\nBlackburn NNP I-NP I-PER\n"

CONLL_U = (
    "# sent_id = 1\n1-2\tdu\t_\t_\t_\t_\t_\t_\t_\t_\n1\tde\tde\tADP\t_\t_\t_\t_\t_\t_\n"
    "2\t#\tx\tSYM\t_\t_\t_\t_\t_\tSpaceAfter=No\n\n1\ta\ta\tX\t_\t_\t_\t_\t_\t_\n"
)


def test_the_columns_of_conll_2003_are_words_first_and_tags_last(tmp_path: Path) -> None:
    (tmp_path / "eng.train").write_text(CONLL)
    (tmp_path / "eng.testa").write_text("\ufeffU.N.\tB-ORG\r\nofficial\tO\r\n\r\n")
    (tmp_path / "eng.testb").write_text("Ekeus\nheads\n")
    read = load_tokens(tmp_path)
    assert read.train == [
        Sentence("0", ("EU", "rejects"), ("B-ORG", "O")),
        Sentence("1", ("Peter", "Blackburn"), ("B-PER", "I-PER")),
    ]
    assert read.dev == [Sentence("0", ("U.N.", "official"), ("B-ORG", "O"))] and read.test == [Sentence("0", ("Ekeus", "heads"), None)]
    assert read.labels == ("O", "B-ORG", "B-PER", "I-PER") and read.notes == ()
    (tmp_path / "eng.train").write_bytes(CONLL.replace("\n", "\r").encode())
    assert load_tokens(tmp_path) == read


def test_json_lines_are_the_same_task(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"id": 7, "tokens": ["a", "b c"], "tags": ["X", "Y"]}\n\n{"tokens": ["d"], "tags": ["X"]}\n')
    assert read_sentences(path, tagged=True) == [Sentence("7", ("a", "b c"), ("X", "Y")), Sentence("2", ("d",), ("X",))]


def test_files_named_by_split_may_be_in_capitals(tmp_path: Path) -> None:
    (tmp_path / "train.CONLL").write_text("a X\nb Y\n")
    (tmp_path / "DEV.TXT").write_text("c X\n")
    read = load_tokens(tmp_path)
    assert [sentence.words for sentence in (*read.train, *read.dev)] == [("a", "b"), ("c",)]


def test_without_a_dev_file_sentences_are_split_off_and_equal_ones_stay_together(tmp_path: Path) -> None:
    path = tmp_path / "t.conll"
    path.write_text("".join(f"word{i % 50} {'AB'[i % 2]}\nend A\n\n" for i in range(100)))
    read = load_tokens(path, seed=0, share=0.2)
    assert len(read.dev) == 20 and len(read.train) == 80 and read.notes[0].startswith("scored on 20 sentences split off t.conll")
    assert not {s.words for s in read.train} & {s.words for s in read.dev}
    assert load_tokens(path, seed=0, share=0.2) == read != load_tokens(path, seed=1, share=0.2)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.conll", "a X\nb\n", r"t\.conll:2: 'b' has 1 column where 2 columns as in the lines before belong"),
        ("t.conll", "a\nb\n", r"t\.conll:1: 'a' has 1 column where a word and its tag belong"),
        ("t.conll", "\n\n", "holds no sentence"),
        ("t.conll", "a X\n\nb X\n", "has 1 different tags; the last column"),
        ("t.conll", "".join(f"a {i}\n" for i in range(2000)), "has 2000 different tags"),
        ("t.jsonl", '{"tokens": ["a"], "tags": ["X", "Y"]}\n', r"t\.jsonl:1: has 1 tokens and 2 tags"),
        ("t.jsonl", '{"tokens": ["a"], "tags": null}\n', r"t\.jsonl:1: `tags` is null, where a list of texts belongs"),
        ("t.jsonl", '{"tokens": ["a"], "ner_tags": ["X"]}\n', r"t\.jsonl:1: has no `tags` \(there are tokens, ner_tags\)"),
        ("t.jsonl", '{"tokens": ["a", " "], "tags": ["X", "Y"]}\n', r"t\.jsonl:1: `tokens` is"),
        (
            "t.jsonl",
            '{"id": "s", "tokens": ["a"], "tags": ["X"]}\n{"id": "s", "tokens": ["b"], "tags": ["Y"]}\n',
            r"t\.jsonl:2: id 's' was used before",
        ),
        ("t.jsonl", "[1]\n", r"t\.jsonl:1: `tokens` is null"),
        ("t.jsonl", '{"tokens": ["a\\ud83d"], "tags": ["X"]}\n', r"t\.jsonl:1: a token or a tag is no text: .*half of a surrogate pair"),
        ("t.conllu", "# sent_id = 1\n1\ta\n", r"t\.conllu:1: is CoNLL-U, which numbers its words; take their forms and tags: awk"),
        ("t.conllu", "1\ta\ta\tX\t_\t_\t_\t_\t_\tSpaceAfter=No\n", r"t\.conllu:1: is CoNLL-U"),
        ("t.jsonl", "{", r"t\.jsonl:1: is not JSON"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        load_tokens(tmp_path / name)


def test_the_command_for_conll_u_takes_forms_and_parts_of_speech(tmp_path: Path) -> None:
    (tmp_path / "t.conllu").write_text(CONLL_U)
    with pytest.raises(DataError, match=r"t\.conllu:1: is CoNLL-U") as error:
        read_sentences(tmp_path / "t.conllu", tagged=True)
    command = str(error.value).partition("tags: ")[2].replace("FILE", str(tmp_path / "t"))
    subprocess.run(command, shell=True, check=True)
    assert read_sentences(tmp_path / "t.conll", tagged=True) == [Sentence("0", ("de", "#"), ("ADP", "SYM")), Sentence("1", ("a",), ("X",))]
    (tmp_path / "own.conllu").write_text("# SYM\na X\n")
    assert read_sentences(tmp_path / "own.conllu", tagged=True) == [Sentence("0", ("#", "a"), ("SYM", "X"))]


def test_an_unknown_tag_and_two_files_of_a_split_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has none of train\.conll"):
        load_tokens(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        load_tokens(tmp_path / "nowhere.conll")
    (tmp_path / "train.conll").write_text("a X\nb Y\n")
    (tmp_path / "dev.jsonl").write_text(json.dumps({"id": "s", "tokens": ["a"], "tags": ["Z"]}))
    with pytest.raises(DataError, match=r"dev\.jsonl: sentence s has tag 'Z', which no training sentence has"):
        load_tokens(tmp_path)
    (tmp_path / "dev.jsonl").write_text("".join(json.dumps({"tokens": ["a"], "tags": [tag]}) + "\n" for tag in "XZW"))
    with pytest.raises(
        DataError, match="sentence 1 has tag 'Z', which no training sentence has; 2 of 3 sentences have one of these: 'Z', 'W'"
    ):
        load_tokens(tmp_path)
    (tmp_path / "dev.jsonl").write_text(json.dumps({"tokens": ["a", "b"], "tags": ["X", "Y"]}))
    assert load_tokens(tmp_path).notes == (
        "the text of 1 of 1 sentences to score on is also trained on, so their score says little about others",
    )
    (tmp_path / "valid.conll").write_text("a X\n")
    with pytest.raises(DataError, match=r"holds dev\.jsonl and valid\.conll"):
        load_tokens(tmp_path)
