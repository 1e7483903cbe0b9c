"""`overnight data report`, `look` and `diff`: what they print, how they end, and what they say of bad input."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from overnight import console
from overnight.config import Data
from overnight.config.data import TextSource
from overnight.corpus.pipeline import prepare
from overnight.corpus.prepared import Prepared
from overnight.corpus.sentences import sentences
from tests.cli.test_main import call
from tests.conftest import ROOT
from tests.corpus.folders import as_of_old, is_valid, prepared_folder, texts

Captured = pytest.CaptureFixture[str]
QUOTE = 'He said: "Don\'t be a fool, Größe!" and left. '


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # One that is to train on: a vocabulary knows no mark that only others have.
    found = (QUOTE + text for text in texts(50, seed=5))
    quote = next(text for text in found if not is_valid(sentences(text)))
    rows = {"a.jsonl": [*texts(30), quote], "b.jsonl": texts(10, seed=1)}
    return prepared_folder(tmp_path_factory.mktemp("words"), rows)


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_folder(tmp_path_factory.mktemp("bytes"), {"a.jsonl": [*texts(30), QUOTE * 3]}, tokenizer="bytes")


def split_of(folder: Path, phrase: str) -> str:
    """The split in which a document with these words is."""
    prepared = Prepared(folder)
    return next(split for split in prepared.splits() for each in prepared.documents(split) if phrase in prepared.decoder.text(each.tokens))


@pytest.mark.parametrize(("command", "others"), [("report", []), ("look", []), ("overlap", ["--with", "x"]), ("diff", ["other"])])
def test_an_address_is_refused_as_one_with_what_to_do(command: str, others: list[str], capsys: Captured) -> None:
    assert call("data", command, "s3://bucket/night", *others) == 2
    said = capsys.readouterr().err
    assert (
        "overnight: s3://bucket/night: " in said
        and "is in storage, and this command reads folders of this machine; copy it into one" in said
    )


@pytest.mark.parametrize("command", ["report", "look", "overlap", "diff"])
def test_every_command_has_help(command: str, capsys: Captured) -> None:
    assert call("data", command, "--help") == 0
    assert capsys.readouterr().out.startswith(f"usage: overnight data {command} ")
    assert call("data") == 2


def test_the_usage_of_overlap_names_the_folder_before_the_list_of_evaluations_that_would_take_it_in(capsys: Captured) -> None:
    assert call("data", "overlap", "--with", "dev.json", "data/night") == 2
    assert capsys.readouterr().err.startswith("usage: overnight data overlap FOLDER --with PATH [PATH ...] ")


def test_look_shows_three_documents_at_random_of_a_seed(folder: Path, capsys: Captured) -> None:
    shown = []
    for seed in (0, 0, 1):
        assert call("data", "look", folder, "--seed", seed, "--characters", 50) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] != shown[2]
    blocks = shown[0].strip().split("\n\n")
    assert len(blocks) == 3
    for block in blocks:
        head, text, cut = block.split("\n")
        assert head.startswith("train ") and " tokens, " in head and len(text) <= 50 and cut == "  ... cut here; --whole shows all of it"


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ([], 3),
        (["--limit", 1], 1),
        (["--limit", 5], 5),
        (["--random", 4], 4),
        (["--random", 4, "--limit", 2], 2),
        (["--number", 1, 2, 3, "--limit", 2], 2),
    ],
)
def test_no_more_documents_are_shown_than_the_limit_however_they_are_chosen(
    folder: Path, options: list[str | int], shown: int, capsys: Captured
) -> None:
    assert call("data", "look", folder, "--json", *options) == 0
    assert len(capsys.readouterr().out.splitlines()) == shown


def test_look_shows_whole_documents_by_number_in_the_order_asked_for(folder: Path, capsys: Captured) -> None:
    prepared = Prepared(folder)
    assert call("data", "look", folder, "--split", "valid", "--number", 2, 1, "--whole") == 0
    blocks = capsys.readouterr().out.strip().split("\n\n")
    for block, number in zip(blocks, (2, 1), strict=True):
        document = prepared.document("valid", number)
        head, text = block.split("\n")
        assert head.startswith(f"valid {number}  {document.name}  ") and text == prepared.decoder.text(document.tokens)


def test_look_finds_a_source_whose_name_is_no_utf8(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "folder").mkdir()
    for name, text in {os.fsdecode(b"caf\xe9.txt"): texts(30), "b.txt": texts(10, seed=1)}.items():
        (tmp_path / "folder" / name).write_text("\n".join(text))
    found = prepared_folder(tmp_path, {}, paths=[str(tmp_path / "folder")], documents="line")
    assert call("data", "look", found, "--source", os.fsdecode(b"caf\xe9"), "--limit", 2) == 0
    shown = capsys.readouterr().out
    assert shown.count(r"/caf\udce9.txt#") == 2 and "b.txt" not in shown
    assert call("data", "look", found, "--source", os.fsdecode(b"th\xe9")) == 1


def test_look_shows_sentences_and_tokens(folder: Path, capsys: Captured) -> None:
    prepared = Prepared(folder)
    document = prepared.document("train", 1)
    assert call("data", "look", folder, "--number", 1, "--sentences", "--whole") == 0
    _, *lines = capsys.readouterr().out.strip("\n").split("\n")
    assert [int(line.split()[0]) for line in lines] == list(range(1, len(document.lengths) + 1))
    assert " ".join(line[7:] for line in lines) == prepared.decoder.text(document.tokens)
    assert call("data", "look", folder, "--number", 1, "--tokens", "--whole") == 0
    _, *lines = capsys.readouterr().out.strip("\n").split("\n")
    pairs = [word.rpartition("/") for line in lines for word in line[7:].split()]
    assert [int(token) for *_, token in pairs] == document.tokens.tolist()
    assert [word for word, *_ in pairs] == [prepared.decoder.tokens[token] for token in document.tokens.tolist()]


@pytest.mark.parametrize("query", ["don't be  a fool, größe", "SAID: \"Don't", "Größe!"])
def test_a_search_finds_text_however_its_marks_accents_and_case_are_stored(folder: Path, query: str, capsys: Captured) -> None:
    split = split_of(folder, "fool")
    assert call("data", "look", folder, "--split", split, "--search", query) == 0
    said = capsys.readouterr()
    assert "fool, gro" in said.out
    assert "1 document found, of " in said.err


@pytest.mark.parametrize("lowercase", [True, False])
def test_a_search_finds_chinese_which_wordpiece_takes_apart(tmp_path: Path, lowercase: bool) -> None:
    found = prepared_folder(tmp_path, {"a.jsonl": ["北京是中国的首都。" * 20]}, lowercase=lowercase, valid_fraction=0.0)
    assert call("data", "look", found, "--search", "中国的首都") == 0


def test_a_search_of_bytes_heeds_case_unless_told_not_to(of_bytes: Path, capsys: Captured) -> None:
    split = split_of(of_bytes, "fool")
    assert call("data", "look", of_bytes, "--split", split, "--search", "don't be a fool") == 1
    assert call("data", "look", of_bytes, "--split", split, "--search", "don't be a\nfool", "--ignore-case") == 0
    out = capsys.readouterr().out
    assert len([line for line in out.splitlines() if line.startswith("  ... ") and "Don't be a fool" in line]) == 3 and "bytes\n" in out
    assert call("data", "look", of_bytes, "--split", split, "--regex", r"Gr.ße!\W") == 0


def test_words_of_a_search_are_not_joined(folder: Path) -> None:
    split = split_of(folder, "fool")
    assert call("data", "look", folder, "--split", split, "--search", "be a fo ol") == 1
    assert call("data", "look", folder, "--split", split, "--search", "beafool") == 1
    assert call("data", "look", folder, "--split", split, "--search", "a foo") == 0


def test_a_search_that_finds_nothing_ends_with_1_and_says_how_much_it_looked_through(folder: Path, capsys: Captured) -> None:
    count = Prepared(folder).manifest.count("train", "documents")
    assert call("data", "look", folder, "--search", "xyzzy") == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err == f"0 documents found, of {count} looked through in train\n"


def test_documents_of_a_source_are_found_and_drawn(folder: Path, capsys: Captured) -> None:
    prepared = Prepared(folder)
    mine = [document.number for document in prepared.documents("train") if document.source.endswith("b.jsonl")]
    assert call("data", "look", folder, "--source", "b.jsonl", "--json", "--limit", 1000) == 0
    said = capsys.readouterr()
    rows = [json.loads(line) for line in said.out.splitlines()]
    assert [row["number"] for row in rows] == mine and all("b.jsonl#" in row["name"] for row in rows)
    assert said.err == f"{len(mine)} documents found, of {len(mine)} of that source in train\n"
    assert call("data", "look", folder, "--source", "b.jsonl", "--random", 2, "--json") == 0
    said = capsys.readouterr()
    assert {json.loads(line)["number"] for line in said.out.splitlines()} < set(mine)
    assert said.err == f"2 of the {len(mine)} documents of that source in train, at random\n"
    assert call("data", "look", folder, "--source", "nowhere") == 1
    said = capsys.readouterr().err
    assert said.startswith("no name of a document or a source has 'nowhere' in it; sources are ")
    assert said.endswith("/b.jsonl\n")
    assert call("data", "look", folder, "--source", "b.jsonl", "--limit", 1) == 0
    assert capsys.readouterr().err.endswith("1 document shown of the first 1 of that source in train; --limit shows more\n")


def test_a_source_that_has_documents_in_another_split_alone_is_said_to_be_there(folder: Path, capsys: Captured) -> None:
    trained, scored = ([document.name for document in Prepared(folder).documents(split)] for split in ("train", "valid"))
    name = next(name for name in scored if not any(name in other for other in trained))
    for more in ([], ["--random", 2], ["--search", "e"]):
        assert call("data", "look", folder, "--source", name, *more) == 1
        assert capsys.readouterr().err == "no document of that source in train; valid has 1: --split valid\n"


def test_a_source_without_a_document_is_not_said_to_be_in_no_name(tmp_path: Path, capsys: Captured) -> None:
    folder = prepared_folder(tmp_path, {"a.jsonl": texts(20), "b.jsonl": ["?"]})
    assert call("data", "look", folder, "--source", "b.jsonl") == 1
    assert capsys.readouterr().err == "no document of that source is in the folder\n"


def test_json_lines_have_the_text_the_sentences_and_the_tokens(folder: Path, capsys: Captured) -> None:
    assert call("data", "look", folder, "--number", 3, "--json", "--sentences", "--tokens") == 0
    row, prepared = json.loads(capsys.readouterr().out), Prepared(folder)
    document = prepared.document("train", 3)
    assert row["tokens"] == document.tokens.tolist() and row["text"] == prepared.decoder.text(document.tokens)
    assert " ".join(row["sentences"]) == row["text"]
    assert (row["split"], row["number"], row["name"], row["source"]) == ("train", 3, document.name, document.source)


@pytest.mark.parametrize(
    ("options", "says", "code"),
    [
        (["--number", "0"], "must be 1 or more", 2),
        (["--limit", "many"], "invalid count value: 'many'", 2),
        (["--seed", "-1"], "must be 0 or more", 2),
        (["--seed", "one"], "invalid seed value: 'one'", 2),
        (["--number", "99999"], "there is no document 99,999 in train, which has documents 1 to", 1),
        (["--split", "test"], "test holds no document; there is train, valid", 1),
        (["--search", "a", "--regex", "b"], "--search and --regex: give one of them", 2),
        (["--regex", "("], "is not a regular expression", 2),
        (["--search", " "], "is empty; give a word or a phrase", 2),
        (["--search", ""], "--search '': is empty; give a text", 2),
        (["--regex", ""], "--regex '': is empty; give a text", 2),
        (["--source", ""], "--source '': is empty; give a text", 2),
        (["--number", "1", "--search", "a"], "give one or the other", 2),
    ],
)
def test_wrong_options_of_look_are_told(folder: Path, options: list[str], says: str, code: int, capsys: Captured) -> None:
    assert call("data", "look", folder, *options) == code
    said = capsys.readouterr()
    assert says in said.err and said.out == ""


def test_a_wrong_number_of_samples_is_not_called_a_seed(folder: Path, capsys: Captured) -> None:
    assert call("data", "diff", folder, folder, "--samples", "many") == 2
    assert "--samples: invalid number value: 'many'" in capsys.readouterr().err


def test_a_folder_of_old_can_be_read_and_says_that_it_knows_no_sources(tmp_path: Path, capsys: Captured) -> None:
    folder = as_of_old(prepared_folder(tmp_path, {"a.jsonl": texts(20)}))
    assert call("data", "look", folder, "--random", 1) == 0
    assert capsys.readouterr().out.startswith("train ")
    assert call("data", "look", folder, "--source", "a") == 1
    assert "was prepared before names and sources of documents were kept" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["absent", "no folder", "manifest", "truncated", "vocabulary"])
def test_what_cannot_be_read_is_told_by_all_three(tmp_path: Path, damage: str, capsys: Captured) -> None:
    folder = prepared_folder(tmp_path, {"a.jsonl": texts(20)})
    other = prepared_folder(tmp_path / "other", {"a.jsonl": texts(21)})
    if damage == "absent":
        folder = tmp_path / "absent"
    elif damage == "no folder":
        folder = tmp_path / "a.jsonl"
    else:
        path = folder / {"manifest": "manifest.json", "truncated": "train-00000.arrow", "vocabulary": "vocab.txt"}[damage]
        path.write_bytes(path.read_bytes()[:-7])
    for code, *command in (
        (1, "report", folder),
        (1, "look", folder, "--search", "e"),
        (2, "diff", folder, other),
        (2, "diff", other, folder),
    ):
        assert call("data", *command) == code
        said = capsys.readouterr()
        assert said.err.startswith(f"overnight: {folder}") and "Traceback" not in said.err
    assert not (folder.parent / "report.html").exists() and list(folder.parent.glob("*.tmp")) == []


def test_a_reader_that_goes_away_ends_look_quietly(folder: Path) -> None:
    script = f"'{sys.executable}' -m overnight data look '{folder}' --search e --limit 1000000 --whole | head -c 10; echo \" ${{PIPESTATUS[0]}}\""
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("train ") and done.stdout.endswith(" 0\n")
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


class Terminal(io.StringIO):
    """What says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_has_colors_and_no_control_characters_of_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal, plain = Terminal(), io.StringIO()
    for out in (terminal, plain):
        console.Styled(out).print(("name", "bold"), " \x1b]0;title\x07\x1b[31mtext [b]")
    assert plain.getvalue() == "name \x1b]0;title\x07\x1b[31mtext [b]\n"
    assert "\x1b[1mname" in terminal.getvalue() and "\ufffd]0;title\ufffd\ufffd[31mtext [b]" in terminal.getvalue()


def test_diff_says_what_differs_and_ends_with_1(tmp_path: Path, capsys: Captured) -> None:
    rows = texts(40)
    first = prepared_folder(tmp_path, {"a.jsonl": rows}).rename(tmp_path / "first")
    rows[5] = rows[5].replace(rows[5].split()[4], "otherwise", 1)
    second = prepared_folder(tmp_path, {"a.jsonl": [*rows, *texts(2, seed=7)]}, valid_fraction=0.3)
    assert call("data", "diff", first, second) == 1
    out = capsys.readouterr().out
    lines = [line.split() for line in out.splitlines()]
    assert ["data.valid_fraction", "0.2", "0.3"] in lines and "vocabulary" in out
    for words in ("39 in both", "1 of the same name with another text", "0 only in A", "2 only in B", "from train to valid"):
        assert words in out
    assert "another split" in out and "a.jsonl#6: ... " in out and "      B: otherwise" in out.replace("o ther", "other")
    assert call("data", "diff", first, second, "--json", "--samples", 0) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["settings"] == {"data.valid_fraction": [0.2, 0.3]} and found["documents"]["same"] == 39
    assert list(found["documents"]["moved"]) == ["train to valid"] and found["documents"]["samples"]["only_b"] == []


@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer.json", "documents.arrow"])
@pytest.mark.parametrize("damage", ["missing", "cut", "garbage"])
def test_diff_does_not_call_a_folder_the_same_that_has_a_damaged_file(tmp_path: Path, name: str, damage: str, capsys: Captured) -> None:
    good = prepared_folder(tmp_path, {"a.jsonl": texts(20)})
    path = Path(shutil.copytree(good, tmp_path / "bad")) / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-9] if damage == "cut" else b"garbage")
    for folders in ((good, path.parent), (path.parent, good)):
        assert call("data", "diff", *folders) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.startswith(f"overnight: {path.parent}")


def test_diff_shows_no_paths_of_a_folder_that_was_made_from_sources(tmp_path: Path, capsys: Captured) -> None:
    first = prepared_folder(tmp_path / "1", {"a.jsonl": texts(20)})
    named = Data(paths=[], sources={"mine": TextSource(paths=[str(tmp_path / "1/a.jsonl")])}, vocab_size=300, valid_fraction=0.2, workers=1)
    prepare(named, second := tmp_path / "2", lambda line: None)
    assert call("data", "diff", first, second) == 1
    (row,) = (line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("data.paths"))
    assert "a.jsonl" in row[1] and row[2:] == ["-"]
    assert call("data", "diff", second, first, "--json") == 1
    assert json.loads(capsys.readouterr().out)["settings"]["data.paths"] == [None, [str(tmp_path / "1/a.jsonl")]]


def test_diff_says_that_documents_are_of_another_source(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": f"{text} one", "more": f"{text} two"}) + "\n" for text in texts(20)))
    for folder, fields in (("1", ("text", "more")), ("2", ("more", "text"))):
        sources = {name: TextSource(paths=[str(tmp_path / "x.jsonl")], field=key) for name, key in zip("ab", fields, strict=True)}
        prepared_folder(tmp_path / folder, {}, paths=[], sources=sources)
    assert call("data", "diff", tmp_path / "1/data", tmp_path / "2/data") == 1
    out = capsys.readouterr().out
    assert "  40 of them of another source: 20 from a to b, 20 from b to a" in out and "differ only in how" not in out
    assert call("data", "diff", tmp_path / "1/data", tmp_path / "2/data", "--json") == 1
    assert json.loads(capsys.readouterr().out)["documents"]["other_source"] == {"a to b": 20, "b to a": 20}


def test_look_finds_a_source_by_its_name(tmp_path: Path, capsys: Captured) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": f"{name} {text}"}) + "\n" for text in texts(10)))
    sources = {name: TextSource(paths=[str(tmp_path / f"{name[0]}.jsonl")]) for name in ("a-books", "b-reviews")}
    prepare(Data(paths=[], sources=sources, vocab_size=300, valid_fraction=0.0, workers=1), folder := tmp_path / "out", lambda line: None)
    assert call("data", "look", folder, "--source", "b-reviews", "--json") == 0
    assert {json.loads(line)["source"] for line in capsys.readouterr().out.splitlines()} == {str(tmp_path / "b.jsonl")}


def test_diff_of_equal_folders_ends_with_0(tmp_path: Path, capsys: Captured) -> None:
    first = prepared_folder(tmp_path, {"a.jsonl": texts(20)}).rename(tmp_path / "first")
    second = prepared_folder(tmp_path, {"a.jsonl": texts(20)})
    assert call("data", "diff", first, second) == 0
    assert capsys.readouterr().out.endswith("nothing differs\n")
    assert call("data", "diff", first, first, "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"settings": {}, "counts": {}, "vocabulary": None, "documents": None}


def test_prepare_and_report_write_the_page(tmp_path: Path, folder: Path, capsys: Captured) -> None:
    assert call("data", "report", folder, "--to", tmp_path / "page.html") == 0
    assert capsys.readouterr().out == f"written: {tmp_path / 'page.html'}\n"
    rows = tmp_path / "a.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(30)))
    command = (
        "prepare",
        "demo",
        f"--data.paths=[{rows}]",
        f"--data.dir={tmp_path / 'data'}",
        "--data.vocab_size=300",
        "--data.valid_fraction=0.2",
    )
    for last in (f"data report: {tmp_path / 'data' / 'report.html'}", None):
        assert call(*command, "--data.workers=1") == 0
        out = capsys.readouterr().out
        assert out.splitlines()[-1] == last if last else "data report:" not in out
