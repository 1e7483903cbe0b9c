"""A state is chosen by rows that are not trained on, training stops where it gets no better, and neither changes the steps that are taken."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.checkpoint.run_corpus import kept_vocabulary
from overnight.config import Finetune, Run
from overnight.engine import loop
from overnight.errors import DataError
from overnight.finetune.encoded_task import encode_task
from overnight.finetune.seed import is_patience_spent, scoring_steps
from overnight.finetune.task_rows import hold_back
from overnight.models.heads import Classifier
from overnight.state_files import SEAL
from tests.finetune.conftest import Task
from tests.finetune.test_finetune import Stop, kept, lines, train_lines, tune


def weights(run: Run) -> bytes:
    return (kept(run) / "model.safetensors").read_bytes()


def scores(run: Run) -> list[dict[str, Any]]:
    (path,) = (run.run_dir / "finetune" / "mine.training").glob("*/scores.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@given(st.integers(1, 500), st.integers(1, 64), st.floats(0.1, 5), st.floats(0.1, 3))
def test_a_seed_is_scored_every_so_many_epochs_and_at_its_end(examples: int, batch: int, epochs: float, every: float) -> None:
    batch = min(batch, examples)
    steps = max(1, round(epochs * examples / batch))
    spec = Finetune(keep_best=True, epochs=epochs, eval_every=every)
    found = scoring_steps(spec, examples, batch, steps)
    assert found == sorted(set(found)) and found[0] >= 1 and found[-1] == steps
    for number, step in enumerate(found[:-1], 1):
        assert abs(step - number * every * examples / batch) <= 0.5 + 1e-9 or every * examples / batch < 1
    assert scoring_steps(Finetune(epochs=epochs), examples, batch, steps) == [steps]


@given(st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.4]), max_size=12), st.integers(0, 4))
def test_patience_counts_the_scorings_since_the_best_one(values: list[float], patience: int) -> None:
    since, best = 0, -math.inf
    for value in values:
        since = 0 if value > best else since + 1
        best = max(best, value)
    assert is_patience_spent(values, patience) == (patience > 0 and since >= patience)


def test_scoring_on_the_way_changes_no_bit_of_the_steps(with_task: Task, classes: Path, tmp_path: Path) -> None:
    run = with_task("csv", classes, epochs=2, **{"logging.log_every": 1})
    plain = dataclasses.replace(run, out=str(tmp_path / "plain"))
    shutil.copytree(run.run_dir, plain.run_dir)
    tune(plain)
    often = with_task("csv", classes, epochs=2, patience=9, eval_every=0.5, select_on="dev", **{"logging.log_every": 1})
    tune(often)
    assert [line["loss"] for line in train_lines(often)] == [line["loss"] for line in train_lines(plain)]
    assert [line["lr"] for line in train_lines(often)] == [line["lr"] for line in train_lines(plain)]
    assert [entry["epoch"] for entry in scores(often)] == [0.4, 1.0, 1.6, 2.0]  # of 5 steps an epoch


@pytest.fixture
def getting_worse(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Scores of the network from now on, in the order they are asked for, instead of its own."""
    values = [0.5, 0.7, 0.6, 0.7, 0.9]
    made: list[float] = []

    def score(name: str, kind: str, right: Any, given: Any) -> dict[str, float]:
        made.append(values[len(made)] if len(made) < len(values) else 0.1)
        return {"accuracy": made[-1]}

    real = encode_task

    def encoded(*args: Any) -> Any:
        task = real(*args)
        made.clear()  # reading a task asks once, whether the metric's package is there
        return dataclasses.replace(task, baselines=dict)

    monkeypatch.setattr("overnight.finetune.finetune.encode_task", encoded)
    monkeypatch.setattr("overnight.finetune.metrics.score", score)
    return made


def test_training_stops_once_patience_is_spent_and_the_best_state_is_kept(
    with_task: Task, classes: Path, getting_worse: list[float]
) -> None:
    run = with_task("csv", classes, epochs=8, patience=2, select_on="dev", **{"logging.log_every": 1})
    said = tune(run)
    (entry,) = lines(run)
    assert "stopped after epoch 4 of 8: no better accuracy in 2 scorings; epoch 2 is kept" in said
    assert (entry["epoch"], entry["epochs_trained"], entry["selection_value"]) == (2.0, 4.0, 0.7)
    assert (entry["selected_on"], entry["selection_rows"], entry["rows"]) == ("dev", 20, 40)
    # The rates are those of all 8 epochs: a training of 4 would be at 0 by now.
    steps = train_lines(run)
    assert len(steps) == 20 and steps[-1]["lr"] == pytest.approx(3e-3 * (1 - 19 / 40) / 0.9, rel=0.05)
    # Without patience it continues to the end, and finds a better one.
    tune(with_task("csv", classes, epochs=8, keep_best=True, select_on="dev"))
    assert lines(run)[-1]["epoch"] == 5.0


def test_a_kill_between_two_scorings_changes_nothing(
    with_task: Task, classes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = with_task("csv", classes, epochs=3, patience=2, eval_every=0.5)
    run = dataclasses.replace(run, checkpoint=dataclasses.replace(run.checkpoint, save_every=1))
    whole = dataclasses.replace(run, out=str(tmp_path / "whole"))
    shutil.copytree(run.run_dir, whole.run_dir)
    tune(whole)
    real, forward = loop.clip_and_step, Classifier.forward
    for cut in ("step", "scoring"):
        calls = 0

        def cut_step(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 5:
                raise Stop
            return real(*args)

        def cut_scoring(self: Classifier, *args: Any) -> Any:
            nonlocal calls
            calls += not self.training
            if calls == 2 and not self.training:
                raise Stop
            return forward(self, *args)

        with monkeypatch.context() as patch:
            if cut == "step":
                patch.setattr(loop, "clip_and_step", cut_step)
            else:
                patch.setattr(Classifier, "forward", cut_scoring)
            with pytest.raises(Stop):
                tune(run)
        assert lines(run) == []
    tune(run)
    assert weights(run) == weights(whole)
    (mine,), (theirs,) = ([{k: v for k, v in entry.items() if k not in ("seconds", SEAL)} for entry in lines(one)] for one in (run, whole))
    assert mine == theirs
    assert not list((run.run_dir / "finetune" / "mine.training").glob("*/checkpoints"))


def test_a_seed_whose_result_was_deleted_is_trained_and_scored_once_more(with_task: Task, classes: Path) -> None:
    run = with_task("csv", classes, epochs=2, keep_best=True)
    tune(run)
    first, made = weights(run), scores(run)
    shutil.rmtree(kept(run))
    tune(run)
    assert weights(run) == first and len(scores(run)) == len(made)
    assert [entry["value"] for entry in lines(run)] == [lines(run)[0]["value"]] * 2


def test_rows_to_choose_by_are_held_back_of_each_class_and_never_trained_or_reported_on(with_task: Task, classes: Path) -> None:
    run = with_task("csv", classes, epochs=1, keep_best=True, select_share=0.2)
    said = tune(run)
    (entry,) = lines(run)
    assert entry["selected_on"] == "train" and 0 < entry["selection_rows"] < 20 and entry["rows"] + entry["selection_rows"] == 40
    assert f"{entry['selection_rows']} of 40 training rows are set aside to choose by, not trained on" in said


@given(st.lists(st.sampled_from("abcdefgh"), min_size=8, max_size=40), st.sampled_from([0.1, 0.3, 0.5]), st.sampled_from([1, 2]))
def test_equal_texts_and_rows_that_belong_together_stay_on_one_side(texts: list[str], share: float, together: int) -> None:
    rows = list(range(len(texts) // together * together))
    texts = texts[: len(rows)]
    try:
        train, chosen, notes = hold_back(Finetune(patience=1, select_share=share), rows, texts, together=together)
    except DataError as error:
        assert "too few" in str(error) and "--select_on=dev" in str(error)
        assert len({tuple(texts[i : i + together]) for i in range(0, len(rows), together)}) == 1
        return
    assert sorted(train + chosen) == rows and train and chosen and notes
    groups = [{tuple(texts[i // together * together :][:together]) for i in side} for side in (train, chosen)]
    assert not groups[0] & groups[1]
    assert hold_back(Finetune(), rows, texts) == hold_back(Finetune(patience=1, select_on="dev"), rows, texts) == (rows, [], ())


@pytest.mark.parametrize("task", ["squad", "tokens"])
def test_questions_and_sentences_are_held_back_too(task: str, tmp_path: Path, pretrained: Run) -> None:
    corpus = kept_vocabulary(pretrained)  # type: ignore[arg-type]
    if task == "squad":
        paragraphs = [
            {
                "context": f"The value of object {i} is {i}.",
                "qas": [{"id": f"{i}-{k}", "question": "What value?", "answers": [{"text": "value", "answer_start": 4}]} for k in range(2)],
            }
            for i in range(40)
        ]
        path = tmp_path / "train.json"
        path.write_text(json.dumps({"data": [{"title": "a", "paragraphs": paragraphs}]}))
        (tmp_path / "dev.json").write_text(json.dumps({"data": [{"title": "a", "paragraphs": paragraphs[:2]}]}))
    else:
        path = tmp_path / "train.conll"
        path.write_text("".join(f"object O\nnumber{i} B-X\n\n" for i in range(80)))
        (tmp_path / "dev.conll").write_text("object O\nnumber B-X\n\n")
    dev = str(path).replace("train", "dev")
    spec = Finetune(task=task, path=str(path), dev=dev, seq_len=24, doc_stride=8, patience=1)  # type: ignore[arg-type]
    whole = encode_task(dataclasses.replace(spec, patience=0), *corpus)
    encoded = encode_task(spec, *corpus)
    assert whole.selection is None and encoded.selection is not None
    examples, evaluate = encoded.selection
    assert len(examples) == 8 and len(encoded.train) == 72 and len(whole.train) == 80 and len(encoded.dev) == len(whole.dev)
    lengths = [len(ids) for ids in examples.ids]
    results, files = evaluate([np.zeros((max(lengths), 2), np.float32) for _ in lengths])
    assert encoded.metric in results and "predictions.json" in files and len(files["predictions.json"]) == 8


def test_dev_seed_says_which_questions_are_scored_and_of_what_rows_docnames_is(
    tmp_path: Path, pretrained: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = kept_vocabulary(pretrained)
    paragraphs = [
        {"context": f"print number {i}", "qas": [{"id": str(i), "question": "what?", "answers": [{"text": "number", "answer_start": 6}]}]}
        for i in range(40)
    ]
    (tmp_path / "train.json").write_text(json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]}))
    spec = Finetune(task="squad", path=str(tmp_path / "train.json"), seq_len=24)

    def scored(spec: Finetune) -> list[list[int]]:
        return [ids.tolist() for ids in encode_task(spec, *corpus).dev.ids]

    assert scored(spec) == scored(dataclasses.replace(spec, dev_seed=0)) != scored(dataclasses.replace(spec, dev_seed=1))

    def made(seed: int) -> Any:
        raise DataError(f"of seed {seed}")

    monkeypatch.setattr("overnight.tasks.docnames.load_docnames", made)
    with pytest.raises(DataError, match="of seed 3"):
        encode_task(Finetune(dev_seed=3), *corpus)
