"""BLiMP is read whole or refused with the line that is wrong, and its means are those of the paper."""

from __future__ import annotations

import io
import json
import lzma
import math
import tarfile
from pathlib import Path

import numpy as np
import pytest

from overnight.errors import DataError
from overnight.evaluation.blimp import ParadigmScore, chosen_pairs, digest_of_pairs, grouped, mean, read_blimp
from tests.corpus.folders import unreadable
from tests.evaluation.sample import row, write_paradigms

ROWS = {
    "b": [row("the cat sleeps", "the cat sleep")],
    "a": [row(f"the dog {i}", f"dog the {i}", "order", "syntax/semantics") for i in range(9)],
}


def archive(path: Path, files: dict[str, str]) -> Path:
    """Write an archive of files."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    path.write_bytes(lzma.compress(content.getvalue()))
    return path


def test_a_folder_its_data_and_an_archive_give_the_same_paradigms_by_name(tmp_path: Path) -> None:
    folder = write_paradigms(tmp_path / "blimp", ROWS)
    (folder / "results").mkdir()
    (folder / "results" / "models.jsonl").write_text('{"no": "pair"}\n')
    files = {f"blimp/{path.relative_to(folder)}": path.read_text() for path in folder.rglob("*.jsonl")}
    packed = read_blimp(archive(tmp_path / "blimp.tar.xz", files))
    plain, data = read_blimp(folder), read_blimp(folder / "data")
    assert [p.name for p in plain] == ["a", "b"] and plain == data
    assert [[pair[:2] for pair in p.pairs] for p in packed] == [[pair[:2] for pair in p.pairs] for p in plain]
    assert plain[1].pairs[0][:2] == ("the cat sleeps", "the cat sleep") and plain[1].pairs[0].where == f"{folder}/data/b.jsonl:1"
    assert (plain[0].field, plain[0].term) == ("syntax_semantics", "order")  # published with both spellings
    assert digest_of_pairs(packed) == digest_of_pairs(plain) != digest_of_pairs(plain[:1])
    assert read_blimp(folder / "data" / "a.jsonl") == plain[:1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"sentence_good": "a", \n', "x.jsonl:2: is not JSON"),
        ("[1]\n", "x.jsonl:2: is not a JSON object"),
        (json.dumps({"sentence_good": "a", "sentence_bad": "b", "field": "f"}) + "\n", "x.jsonl:2: has no text under 'linguistics_term'"),
        (json.dumps(row("a", "  ")) + "\n", "x.jsonl:2: 'sentence_bad' is empty"),
        (json.dumps(row("a", "b \ud800")) + "\n", "x.jsonl:2: 'sentence_bad' is no text"),
        (json.dumps(row("a", 3)) + "\n", "x.jsonl:2: has no text under 'sentence_bad'"),  # type: ignore[arg-type]
        (json.dumps(row("a" * (1 << 20), "b")) + "\n", "x.jsonl:2: has 1,0"),
    ],
)
def test_a_line_that_is_no_pair_is_named(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps(row("a", "b")) + "\n" + text)
    with pytest.raises(DataError) as caught:
        read_blimp(tmp_path)
    assert f"{tmp_path}/{said}" in str(caught.value)


def test_what_is_missing_empty_or_cut_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"does not exist; name blimp.tar.xz, or a folder"):
        read_blimp(tmp_path / "no")
    with pytest.raises(DataError, match=r"holds no .jsonl file"):
        read_blimp(tmp_path)
    whole = archive(tmp_path / "blimp.tar.xz", {"data/a.jsonl": "".join(json.dumps(r) + "\n" for r in ROWS["a"])})
    (tmp_path / "cut.tar.xz").write_bytes(whole.read_bytes()[:-60])
    with pytest.raises(DataError, match=r"cut.tar.xz: is cut short \(.* the compressed file ends early\); get it again"):
        read_blimp(tmp_path / "cut.tar.xz")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "x.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"x.jsonl: is empty"):
        read_blimp(tmp_path / "empty")
    twice = archive(tmp_path / "twice.tar.xz", {f"{folder}/data/a.jsonl": json.dumps(ROWS["a"][0]) for folder in "xy"})
    with pytest.raises(DataError, match="the paradigm 'a' is there twice"):
        read_blimp(twice)


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_paradigms(tmp_path / "blimp", ROWS)
    unreadable(monkeypatch, "data")
    with pytest.raises(DataError, match=rf"^{folder}/data: cannot be read \(Permission denied\); name "):
        read_blimp(folder)


def test_the_pairs_of_the_fast_form_do_not_depend_on_the_order_of_the_file(tmp_path: Path) -> None:
    one, two = (read_blimp(write_paradigms(tmp_path / str(i), {"a": ROWS["a"][:: 1 - 2 * i]}))[0] for i in (0, 1))
    some = {pair[:2] for pair in chosen_pairs(one, 4)}
    assert len(some) == 4 and some == {pair[:2] for pair in chosen_pairs(two, 4)}
    assert {pair[:2] for pair in chosen_pairs(one, 5)} > some  # more pairs keep those of fewer
    assert [one.pairs.index(pair) for pair in chosen_pairs(one, 4)] == sorted(one.pairs.index(pair) for pair in chosen_pairs(one, 4))
    assert chosen_pairs(one, 0) == chosen_pairs(one, 9) == chosen_pairs(one, 10) == one.pairs


def test_means_and_standard_errors_are_those_of_the_single_pairs() -> None:
    wins = {"a": [1, 1, 0.5, 0, 1], "b": [0.5, 0.5, 0, 0], "c": [1, 1, 1]}
    scores = [
        ParadigmScore(name, "f" if name < "c" else "g", "t", len(w), w.count(1), w.count(0.5), 0)  # type: ignore[arg-type]
        for name, w in wins.items()
    ]
    found = mean(scores)
    assert found.accuracy == pytest.approx(np.mean([np.mean(w) for w in wins.values()]))
    assert found.standard_error == pytest.approx(math.sqrt(sum(np.var(w, ddof=1) / len(w) for w in wins.values())) / 3)
    assert grouped(scores, "field") == {"f": mean(scores[:2]), "g": mean(scores[2:])} and list(grouped(scores, "term")) == ["t"]
    assert math.isnan(mean([ParadigmScore("a", "f", "t", 1, 1, 0, 0)]).standard_error)


def test_the_published_archive_is_read(real_data: Path) -> None:
    found = read_blimp(real_data / "blimp" / "blimp.tar.xz")
    assert len(found) == 67 and {len(p.pairs) for p in found} == {1000}
    assert len({p.term for p in found}) == 13 and {p.field for p in found} == {"morphology", "semantics", "syntax", "syntax_semantics"}
