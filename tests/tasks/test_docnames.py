"""The demo's task: balanced, nothing used twice, the same rows whatever the order of the documentation."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.errors import DataError
from overnight.tasks.docnames import LABELS, by_overlap, load_docnames, name_words


@dataclass(frozen=True)
class Doc:
    """What the task reads of a docstring."""

    package: str
    name: str
    text: str


WORDS = [a + b for a in ("al", "be", "ce", "do", "en") for b in ("lt", "mok", "nip", "sar", "tun", "rag", "vil", "wex")]


def _docs(count: int, packages: int = 3) -> list[Doc]:
    rng = random.Random(0)
    docs = []
    for i in range(count):
        package = f"pack{'abc'[i % packages]}"
        name = [*rng.sample(WORDS, 3), "xyz"[i % 3] * (1 + i // 3 % 40)]
        prose = " ".join([name[0], *rng.choices(WORDS, k=12), str(i)])
        docs.append(Doc(package, f"{package}.{name[0].title()}{name[1].title()}.{name[2]}_{name[3]}{i}", prose))
    return docs


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("http.server.HTTPServer.serve_forever", "http server http server serve forever"),
        ("ipaddress.IPv4Address", "ipaddress i pv 4 address"),
        ("np.linalg.LinAlgError", "np linalg lin alg error"),
        ("__init__", "init"),
        ("log2", "log 2"),
        ("...", ""),
    ],
)
def test_names_are_split_at_dots_underscores_capitals_and_digits(name: str, words: str) -> None:
    assert " ".join(name_words(name)) == words


def test_rows_are_balanced_and_no_docstring_is_on_both_sides_of_the_split() -> None:
    task = load_docnames(_docs(1500), train=400, dev=100)
    assert (len(task.train), len(task.dev), task.test, task.labels, task.notes) == (400, 100, [], LABELS, ())
    for rows in (task.train, task.dev):
        assert Counter(r.label for r in rows) == dict.fromkeys(LABELS, len(rows) // 2)
    assert len({r.text_a for r in task.dev}) == len({r.text_b for r in task.dev}) == 100
    assert len({r.text_a for r in task.train}) == len({r.text_b for r in task.train}) == 200
    assert not {r.text_a for r in task.dev} & {r.text_a for r in task.train} and not {r.text_b for r in task.dev} & {
        r.text_b for r in task.train
    }
    assert len({r.id for r in task.train + task.dev}) == 500


def test_neither_a_text_nor_a_name_tells_the_label_of_a_training_row() -> None:
    rows = load_docnames(_docs(1500), train=400, dev=100).train
    for part in ("text_a", "text_b"):
        assert Counter((getattr(row, part), row.label) for row in rows) == {
            (text, label): 1 for text in {getattr(row, part) for row in rows} for label in LABELS
        }


def test_the_label_says_whether_the_name_is_the_docstrings_own_and_a_wrong_one_is_of_the_same_package() -> None:
    docs = _docs(1500)
    by_text = {d.text: d for d in docs}
    by_name = {" ".join(name_words(d.name)): d for d in docs}
    for row in load_docnames(docs, train=400, dev=100).train:
        assert row.text_b is not None
        described, named = by_text[row.text_b], by_name[row.text_a]
        assert described.package == named.package
        assert (described == named) == (row.label == "own")


@given(st.randoms())
def test_the_order_of_the_documentation_does_not_change_the_task(rng: random.Random) -> None:
    docs = _docs(300)
    # Two of an opening and two of a name, of which one must be chosen the same way every time.
    docs += [Doc(d.package, f"{d.package}.Twin{d.name[-6:]}", d.text + " and more") for d in docs[:60] if len(d.text) > 200]
    docs += [Doc(d.package, d.name, f"Another docstring under a name that exists: {d.text}") for d in docs[60:120]]
    mixed = list(docs)
    rng.shuffle(mixed)
    assert load_docnames(mixed, train=80, dev=20) == load_docnames(docs, train=80, dev=20)


def test_another_seed_makes_another_task() -> None:
    docs = _docs(300)
    first, second = load_docnames(docs, seed=0, train=80, dev=20), load_docnames(docs, seed=1, train=80, dev=20)
    assert {r.text_b for r in first.dev} != {r.text_b for r in second.dev}


def test_repeated_openings_short_texts_and_names_without_words_are_left_out() -> None:
    docs = _docs(300)
    family = [Doc("packa", f"packa.family.m{i}", "The same opening of a family of methods. " * 8 + str(i)) for i in range(50)]
    short = [Doc("packa", f"packa.short.s{i}", f"Too short {i}") for i in range(50)]
    nameless = [Doc("packa", "___", f"A docstring long enough to be used, were it not for its name, {i}") for i in range(50)]
    rows = load_docnames(docs + family + short + nameless, train=120, dev=30)
    texts = [r.text_b or "" for r in rows.train + rows.dev]
    assert sum(t.startswith("The same opening") for t in texts) <= 1
    again = load_docnames([*docs, *(Doc(d.package, d.name, f"Once more: {d.text}") for d in docs)], train=120, dev=30)
    assert len({r.text_a for r in again.train + again.dev}) == 90
    assert not any(t.startswith(("Too short", "A docstring long")) for t in texts)


def test_too_few_docstrings_shrink_the_splits_and_say_so_and_very_few_are_refused() -> None:
    task = load_docnames(_docs(300))
    assert (len(task.train), len(task.dev)) == (480, 30)
    assert task.notes == ("480 training and 30 scored rows instead of 48,000 and 1,000: there are no more docstrings",)
    with pytest.raises(DataError, match=r"gives 30 name-docstring pairs, too few"):
        load_docnames(_docs(60))


def _right_by_overlap(docs: list[Doc]) -> int:
    """Return how many of 100 rows the rule without a model has right."""
    task = load_docnames(docs, train=400, dev=100)
    return sum(answer == row.label for answer, row in zip(by_overlap(task.train, task.dev), task.dev, strict=True))


def test_the_overlap_rule_is_right_where_names_tell_and_chance_where_they_do_not() -> None:
    docs = [Doc(d.package, d.name, f"{' '.join(name_words(d.name))} {d.text}") for d in _docs(1500)]
    assert _right_by_overlap(docs) > 95
    letters = [str(i).translate(str.maketrans("0123456789", "qwrtyupsdf")) for i in range(1500)]
    silent = [
        Doc(d.package, d.name, f"q{word} words that no name has, of sufficient length")
        for word, d in zip(letters, _docs(1500), strict=True)
    ]
    assert _right_by_overlap(silent) == 50
