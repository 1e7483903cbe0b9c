"""Which rows `max_train_examples` takes: every label in its share, the same on every machine and in every order of the file."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.config import Finetune, Run
from overnight.corpus.tokenizer import load_vocabulary
from overnight.finetune.encoded_task import EncodedTask, encode_task
from overnight.tasks.examples import drawn, split_off

LABELS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=80)


@given(LABELS, st.integers(1, 100), st.integers(0, 3))
def test_every_label_is_drawn_in_its_share_and_none_is_left_out(labels: list[str], count: int, seed: int) -> None:
    texts = [str(i % 20) for i in range(len(labels))]
    chosen = drawn(texts, count, seed, labels)
    assert chosen == sorted(set(chosen)) and len(chosen) == min(count, len(labels))
    whole, part = Counter(labels), Counter(labels[i] for i in chosen)
    if count >= len(whole):
        assert part.keys() == whole.keys()
        assert all(abs(part[label] - whole[label] * len(chosen) / len(labels)) < len(whole) for label in whole)


@given(LABELS, st.integers(1, 40), st.randoms())
def test_the_draw_depends_on_the_rows_and_not_on_their_order_and_a_larger_one_holds_the_smaller(
    labels: list[str], count: int, chance: random.Random
) -> None:
    rows = [(f"text {i % 30}", label) for i, label in enumerate(labels)]
    rows = list(dict.fromkeys(rows))

    def take(rows: list[tuple[str, str]], count: int) -> Counter[tuple[str, str]]:
        return Counter(rows[i] for i in drawn([f"{text} {label}" for text, label in rows], count, 0, [label for _, label in rows]))

    mixed = chance.sample(rows, len(rows))
    assert take(rows, count) == take(mixed, count) <= take(rows, count + 1)


def test_the_draw_is_pinned_and_equal_texts_are_drawn_one_by_one() -> None:
    texts = [f"text {i}" for i in range(20)]
    assert drawn(texts, 5, 0) == [2, 3, 6, 11, 14] != drawn(texts, 5, 1)
    assert 10 < sum(i < 50 for i in drawn(["same"] * 50 + ["other"] * 50, 50, 0)) < 40


def table(folder: Path, label: Callable[[int], Any], column: str = "label") -> Path:
    path = folder / "sorted.csv"
    path.write_text(f"text,{column}\n" + "".join(f"object number {i},{label(i)}\n" for i in range(200)))
    return path


def glue(folder: Path) -> Path:
    for name in ("train", "dev"):
        (folder / f"{name}.tsv").write_text("sentence\tlabel\n" + "".join(f"class {i}\t{i // 100}\n" for i in range(200)))
    return folder


def sst(folder: Path) -> Path:
    for name in ("train", "dev", "test"):
        (folder / f"{name}_binary_sent.csv").write_text("label,sentence\n" + "".join(f"{i // 100},class {i}\n" for i in range(200)))
    return folder


def imdb(folder: Path) -> Path:
    for part in ("train", "test"):
        for label in ("neg", "pos"):
            (folder / part / label).mkdir(parents=True)
            for i in range(60):
                (folder / part / label / f"{i}_1.txt").write_text(f"a {label} review {i}")
    return folder


def read(pretrained: Run, **settings: Any) -> EncodedTask:
    spec = Finetune(**{"seq_len": 32, "max_train_examples": 40, **settings})
    return encode_task(spec, pretrained.data_dir, load_vocabulary(pretrained.data_dir))


@pytest.mark.parametrize(
    ("task", "make"), [("csv", lambda f: table(f, lambda i: "ab"[i // 100])), ("sst2", glue), ("sst", sst), ("imdb", imdb)]
)
def test_of_a_file_sorted_by_label_both_classes_are_trained_on(
    task: str, make: Callable[[Path], Path], pretrained: Run, tmp_path: Path
) -> None:
    problem = read(pretrained, task=task, path=str(make(tmp_path)))
    counts = Counter(problem.train.targets["label"].tolist())
    assert len(problem.train) == 40 and set(counts) == {0, 1} and abs(counts[0] - counts[1]) <= 4
    assert any(note.startswith("trained on 40 of ") for note in problem.notes)


def test_docnames_and_numbers_are_drawn_too(pretrained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from overnight.tasks import docnames
    from overnight.tasks.examples import Example, TaskData

    rows = [Example(str(i), "open file", f"opens a file {i}", str(i // 100)) for i in range(200)]
    made = TaskData("docnames", "classification", ("0", "1"), rows, rows[::50], [], "accuracy")
    monkeypatch.setattr(docnames, "load_docnames", lambda seed: made)
    assert Counter(read(pretrained).train.targets["label"].tolist()) == {0: 20, 1: 20}
    scores = read(pretrained, task="csv", path=str(table(tmp_path, lambda i: i / 10, "score"))).train.targets["label"]
    assert len(scores) == 40 and scores.min() < 4 and scores.max() > 16


def test_questions_are_drawn_from_all_articles(pretrained: Run, tmp_path: Path) -> None:
    def question(i: int) -> dict[str, Any]:
        qas = [{"id": f"q{i}", "question": "which?", "answers": [{"text": f"number {i}", "answer_start": 4}]}]
        return {"title": f"t{i}", "paragraphs": [{"context": f"The number {i}.", "qas": qas}]}

    for name in ("train", "dev"):
        (tmp_path / f"{name}-v1.1.json").write_text(json.dumps({"data": [question(i) for i in range(100)]}))
    problem = read(pretrained, task="squad", path=str(tmp_path), max_train_examples=20, doc_stride=8)
    whole = read(pretrained, task="squad", path=str(tmp_path), max_train_examples=0, doc_stride=8)
    assert len(problem.train) == 20 < len(whole.train) == 100
    at = [next(i for i, ids in enumerate(whole.train.ids) if list(ids) == list(own)) for own in problem.train.ids]
    assert at == sorted(at) and at[0] < 30 and at[-1] > 60
    assert "trained on 20 of 100 questions" in " ".join(problem.notes)
    assert not any("trained on 20 of" in note for note in whole.notes)


def test_a_linear_probe_draws_each_label_in_its_share(tmp_path: Path) -> None:
    from overnight.byte_lm.linear_probe import read_probe_task
    from overnight.config import LinearProbe

    for name in ("train", "dev", "test"):
        (tmp_path / f"{name}.csv").write_text("text,label\n" + "".join(f"{name} {i},{'rare' if i < 10 else 'usual'}\n" for i in range(200)))
    problem = read_probe_task(LinearProbe(task="csv", path=str(tmp_path), max_train_examples=40, seeds=[0, 1, 2]))
    for part in problem.parts.values():
        assert Counter(problem.classes[part["train"]].tolist()) == {0: 2, 1: 38}
    assert "trained on 40 of 200 rows" in " ".join(problem.notes)


@given(st.integers(0, 50))
def test_a_class_whose_texts_all_stand_under_another_first_is_trained_on_too(seed: int) -> None:
    rows = [*((f"{name}{i}", label) for name, label in ("wa", "vb") for i in range(20)), *[("w12", "c")] * 2]
    texts, labels = [text for text, _ in rows], [label for _, label in rows]
    scored = split_off(texts, labels, seed, 0.1, "")
    trained = [row for i, row in enumerate(rows) if i not in scored]
    assert {label for _, label in trained} == {"a", "b", "c"} and len(scored) == 4
    assert not {texts[i] for i in scored} & {text for text, _ in trained}
    # Where no class needs it, the same rows are split off as before.
    assert split_off(texts[:40], labels[:40], 0, 0.1, "") == {2, 17, 21, 37}
