"""Several classes of a row, tags of words, weights of classes, and the errors: trained, scored and predicted from the command line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch

from overnight.cli.main import main
from overnight.config import Finetune, Run
from overnight.corpus.tokenizer import load_vocabulary
from overnight.errors import ConfigError
from overnight.finetune.answers import in_words
from overnight.finetune.encoded_task import class_weights, encode_task
from overnight.finetune.error_analysis import errors
from overnight.finetune.metrics import score
from overnight.finetune.tagging import encode_sentences, tags_of
from overnight.finetune.workload import FinetuneWorkload
from overnight.models.heads import without_top
from overnight.tasks.conll import Sentence
from overnight.tasks.examples import Example, TaskData
from tests.finetune.test_entities import conlleval

FAST = ("--epochs=8", "--global_batch_size=8", "--micro_batch_size=8", "--lr=3e-3", "--seq_len=24")
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def run(pretrained: Run, tmp_path: Path) -> Path:
    shutil.copytree(pretrained.run_dir, tmp_path / "run")
    return tmp_path / "run"


def kept(run: Path, name: str, file: str) -> Any:
    return json.loads((run / "finetune" / name / file).read_text())


def answered(run: Path, name: str, path: Path, capsys: Captured) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["predict", name, "--from", str(run), "--input", str(path)]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def exported(run: Path, name: str, tmp_path: Path) -> dict[str, Any]:
    """`config.json` of a task that is exported."""
    assert main(["export", "--from", str(run), f"--task={name}", f"--to={tmp_path / 'out'}"]) == 0
    return dict(json.loads((tmp_path / "out" / "config.json").read_text()))


def test_several_classes_of_a_row_are_trained_scored_and_predicted(run: Path, tmp_path: Path, capsys: Captured) -> None:
    words = {"number": "integer division", "text": "string literal", "error": "raised exception"}
    sets = [[], ["number"], ["text", "number"], ["error"], ["error", "text"]]
    rows = [{"id": i, "text": f"{' '.join(words[w] for w in s)} object {i % 3}", "labels": s} for i, s in enumerate(sets * 12)]
    for name, part in (("train", rows[:40]), ("dev", rows[40:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (tmp_path / "test.jsonl").write_text(json.dumps({"id": "x\ty", "text": "integer division"}) + "\n")
    assert main(["finetune", "topics", "--from", str(run), f"--path={tmp_path}", *FAST, "--epochs=20", "--lr=6e-3"]) == 0
    assert "micro f1 " in capsys.readouterr().out
    facts, answers, wrong = (kept(run, "topics", f"{name}.json") for name in ("task", "predictions", "errors"))
    assert (facts["kind"], facts["labels"]) == ("multi_label", ["error", "number", "text"])
    right = {str(row["id"]): row["labels"] for row in rows[40:]}
    table = [[[label in of[i] for label in facts["labels"]] for i in right] for of in (right, answers)]
    assert facts["result"]["metrics"] == pytest.approx(
        {
            "micro_f1": sklearn.metrics.f1_score(*table, average="micro"),
            "macro_f1": sklearn.metrics.f1_score(*table, average="macro"),
            "accuracy": sklearn.metrics.accuracy_score(*table),
        }
    )
    assert facts["result"]["value"] > 0.5
    both = [sum(label in right[i] and label in answers[i] for i in right) for label in facts["labels"]]
    assert wrong["counts"]["right"] == both
    found = answered(run, "topics", tmp_path / "dev.jsonl", capsys)
    assert {a["id"]: a["labels"] for a in found} == answers
    assert all((p > 0.5) == (label in a["labels"]) for a in found for label, p in a["probabilities"].items())
    assert (run / "finetune" / "topics" / "test.tsv").read_text().startswith("index\tprediction\nx\\ty\t")
    assert exported(run, "topics", tmp_path)["problem_type"] == "multi_label_classification"


def test_words_are_tagged_and_scored_by_entities_and_predicted(run: Path, tmp_path: Path, capsys: Captured) -> None:
    sentence = [("class", "O"), ("integer", "B-NUM"), ("division", "I-NUM"), ("returns", "O"), ("string", "B-TXT"), ("\u200b", "O")]
    for name, count in (("train", 40), ("dev", 8)):
        text = "".join("".join(f"{word} x {tag}\n" for word, tag in sentence[i % 3 :]) + "\n" for i in range(count))
        (tmp_path / f"{name}.conll").write_text(text)
    (tmp_path / "test.conll").write_text("integer\ndivision\n")
    assert main(["finetune", "names", "--from", str(run), f"--path={tmp_path}", *FAST]) == 0
    facts, answers = (kept(run, "names", f"{name}.json") for name in ("task", "predictions"))
    assert facts["kind"] == "token_classification" and facts["labels"] == ["O", "B-NUM", "B-TXT", "I-NUM"]
    right = [[tag for _, tag in sentence[i % 3 :]] for i in range(8)]
    assert (
        facts["result"]["metrics"] == pytest.approx(conlleval(right, [answers[str(i)] for i in range(8)]))
        and facts["result"]["value"] > 0.8
    )
    wrong, pairs = kept(run, "names", "errors.json"), list(zip(right, [answers[str(i)] for i in range(8)], strict=True))
    assert sum(map(sum, wrong["confusion"])) == sum(map(len, right)) and wrong["labels"] == facts["labels"]
    assert sum(row["wrong_tags"] for row in wrong["worst"]) == sum(
        a != b for tags, given in pairs for a, b in zip(tags, given, strict=True)
    )
    columns = [line.split() for line in (run / "finetune" / "names" / "predictions.conll").read_text().splitlines() if line]
    assert [row[2] for row in columns] == [tag for i in range(8) for tag in answers[str(i)]] and columns[0][:2] == ["class", "O"]
    assert (run / "finetune" / "names" / "test.tsv").read_text().splitlines()[1].split("\t")[0] == "0"
    found = answered(run, "names", tmp_path / "dev.conll", capsys)
    assert {a["id"]: a["tags"] for a in found} == answers
    (tmp_path / "lines").write_text("class integer division\n" + json.dumps({"id": "j", "tokens": ["integer", "division"]}) + "\n")
    plain, named = answered(run, "names", tmp_path / "lines", capsys)
    assert plain["tokens"] == ["class", "integer", "division"] and len(plain["tags"]) == len(plain["probabilities"]) == 3
    assert {"type": "NUM", "text": "integer division", "first": 1, "last": 2} in plain["entities"] and named["id"] == "j"
    assert main(["predict", "names", "--from", str(run), "--input", str(tmp_path / "train.conll"), "--to", str(tmp_path / "out/")]) == 0
    assert exported(run, "names", tmp_path / "export")["id2label"]["1"] == "B-NUM"


def test_a_sentence_or_a_question_of_many_sequences_is_counted_once(pretrained: Run, tmp_path: Path) -> None:
    words = [f"word{i}" for i in range(40)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"tokens": words[i:], "tags": ["X", *["Y"] * (39 - i)]}) + "\n" for i in range(3)))
    asked = [
        {"id": i, "question": "Which?", "answers": [{"text": words[i], "answer_start": " ".join(words).index(words[i])}]} for i in range(3)
    ]
    (tmp_path / "q.json").write_text(json.dumps({"data": [{"paragraphs": [{"context": " ".join(words), "qas": asked}]}]}))
    corpus = pretrained.run_dir / "corpus"
    for name, file in (("tokens", "t.jsonl"), ("squad", "q.json")):
        path = str(tmp_path / file)
        task = encode_task(Finetune(task=name, path=path, dev=path, seq_len=16, doc_stride=8), corpus, load_vocabulary(corpus))  # type: ignore[arg-type]
        assert task.train.rows == task.dev.rows == 3 < len(task.train)


def test_a_word_of_several_parts_is_one_column_of_what_conlleval_reads(pretrained: Run, tmp_path: Path) -> None:
    row = {"tokens": ["New York", "is", "a\nb\tc"], "tags": ["B-LOC", "O", "I-fine art"]}
    (tmp_path / "t.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    corpus, path = pretrained.run_dir / "corpus", str(tmp_path / "t.jsonl")
    task = encode_task(Finetune(task="tokens", path=path, dev=path), corpus, load_vocabulary(corpus))
    _, files = task.evaluate([np.eye(3)[[0, 1, 0, 0] + [0] * (len(ids) - 4)] for ids in task.dev.ids])
    columns = [line.split(" ") for line in files["predictions.conll"].split("\n") if line]
    assert [len(cells) for cells in columns] == [3] * 6
    assert [cells[:2] for cells in columns[:3]] == [["New_York", "B-LOC"], ["is", "O"], ["a_b_c", "I-fine_art"]]


def test_a_sentence_longer_than_a_sequence_is_tagged_in_parts_without_a_gap(tokenizer: Any) -> None:
    class Pieces:
        cls, sep, unk = 2, 3, 1

    words = tuple(["cat", "bronco", "\u0300", "x" * 300, "denvers"] * 9)
    sentences = [Sentence("a", words, tuple("XY"[i % 2] for i in range(len(words)))), Sentence("b", ("the",), None)]
    parts = encode_sentences(tokenizer, Pieces(), sentences, ("X", "Y"), 12)  # type: ignore[arg-type]
    assert all(len(part.ids) <= 12 and part.ids[0] == 2 and part.ids[-1] == 3 and len(part.labels) == len(part.ids) for part in parts)
    outputs = []
    for part in parts:
        logits = np.zeros((len(part.ids), 2))
        logits[np.arange(len(part.ids)), np.maximum(part.labels, 0)] = 9.0
        outputs.append(logits)
    (tags, shares), (other, _) = tags_of(parts, outputs, ("X", "Y"), 2)
    assert tuple(tags) == sentences[0].tags and min(shares) > 0.99 and other == ["X"]
    assert sum((part.labels >= 0).sum() for part in parts) == len(words)


def _task(labels: list[str]) -> TaskData:
    examples = [Example(str(i), f"t{i}", None, label) for i, label in enumerate(labels)]
    return TaskData("csv", "classification", tuple(sorted(set(labels))), examples, [], [], "accuracy")


def test_weights_of_classes_are_balanced_or_given_with_mean_one() -> None:
    task = _task(["a"] * 6 + ["b"] * 2 + ["c=d"] * 2)
    assert class_weights("", task) == ()
    balanced = class_weights("balanced", task)
    assert balanced == pytest.approx(
        sklearn.utils.compute_class_weight("balanced", classes=np.array(["a", "b", "c=d"]), y=["a"] * 6 + ["b"] * 2 + ["c=d"] * 2)
    )
    given = class_weights("c=d=3,b=2", task)
    assert np.array(given) / given[0] == pytest.approx([1, 2, 3]) and np.dot(given, [6, 2, 2]) == pytest.approx(10)
    comma = _task(["good", "good, but long", "bad"])
    assert class_weights("good, but long=2,good=1,bad=3", comma) == pytest.approx([1.5, 0.5, 1.0])
    refused = {
        "a=1,,b=2": "',b=2' is not LABEL=WEIGHT",
        "e=1": "'e=1' is not LABEL=WEIGHT with one of the labels a, b, c=d",
        "b": "'b' is not LABEL=WEIGHT",
        "a=-1": "class_weights: a: weight '-1' is not 0 or more, and finite",
        "a=x": "class_weights: a: weight 'x' is not a number",
    }
    for wrong, message in refused.items():
        with pytest.raises(ConfigError, match=message):
            class_weights(wrong, task)
    with pytest.raises(ConfigError, match="every class has weight 0"):
        class_weights("a=0,b=0,c=d=0", task)


@pytest.mark.parametrize("fewer", [{}, {"max_train_examples": 20}, {"keep_best": True}], ids=["all", "drawn", "held back"])
def test_balanced_weights_are_those_of_the_rows_that_are_trained_on(fewer: dict[str, Any], pretrained: Run, tmp_path: Path) -> None:
    rows = [f"object {i},common" for i in range(200)] + ["raised exception,rare", "string literal,rare"]
    for name, part in (("train", rows), ("dev", rows[-3:])):
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,label", *part]) + "\n")
    corpus = pretrained.run_dir / "corpus"
    task = encode_task(Finetune(task="csv", path=str(tmp_path), class_weights="balanced", **fewer), corpus, load_vocabulary(corpus))
    counts = np.bincount(task.train.targets["label"], minlength=2)
    assert counts.sum() < 202 or not fewer
    assert np.array(task.class_weights) * counts == pytest.approx(counts.sum() / 2)


def test_a_rare_class_is_found_where_it_weighs_more(run: Path, tmp_path: Path, capsys: Captured) -> None:
    # Rows that say nothing of their label: alone its frequency decides, and its weight.
    rows = [(f"object {i}", "rare" if i % 4 == 0 else "common") for i in range(80)]
    (tmp_path / "t.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    words = ["--from", str(run), f"--path={tmp_path / 't.csv'}", *FAST, "--epochs=2", "--lr=1e-3"]
    given = {}
    for name, weights in (("plain", ""), ("heavy", "rare=30")):
        assert main(["finetune", name, *words, f"--class_weights={weights}"]) == 0
        given[name] = list(kept(run, name, "predictions.json").values())
    assert given["plain"].count("rare") == 0 and given["heavy"].count("rare") == len(given["heavy"])
    assert (
        main(
            [
                "finetune",
                "names",
                "--from",
                str(run),
                f"--path={tmp_path / 't.csv'}",
                "--columns.labels=label",
                "--class_weights=balanced",
                *FAST,
            ]
        )
        == 2
    )
    assert "only a task with one class per row has class weights" in capsys.readouterr().err


def test_the_errors_of_a_task_are_its_confusion_and_its_worst_rows(run: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "t.csv").write_text("text,label\n" + "".join(f"object {i},{'xy'[i % 2]}\n" for i in range(40)))
    assert main(["finetune", "mine", "--from", str(run), f"--path={tmp_path / 't.csv'}", *FAST, "--epochs=1", "--dev_share=0.5"]) == 0
    out = capsys.readouterr().out
    found, answers = kept(run, "mine", "errors.json"), kept(run, "mine", "predictions.json")
    right = {str(i): "xy"[i % 2] for i in range(40)}
    table = sklearn.metrics.confusion_matrix([right[i] for i in answers], list(answers.values()), labels=["x", "y"])
    assert found["labels"] == ["x", "y"] and found["confusion"] == table.tolist() and table.sum() == 20
    wrong = {i for i in answers if answers[i] != right[i]}
    assert {row["id"] for row in found["worst"]} == set(sorted(wrong, key=int)[:20]) and len(wrong) <= 20
    chances = [row["probability"] for row in found["worst"]]
    assert chances == sorted(chances) and max(chances) < 0.5
    assert "answered as" in out and f"object {found['worst'][0]['id']}" in out
    path = run / "finetune" / "mine" / "errors.json"
    path.write_bytes(path.read_bytes().replace(b'"probability"', b'"prob`bility"', 1))
    assert main(["report", str(run), "--to", str(tmp_path / "page.html")]) == 1
    assert "errors.json: was changed since it was written, its checksum differs; delete it" in capsys.readouterr().err


def test_classes_in_another_order_are_no_error() -> None:
    rows = [Example("right", "t", None, ("b", "a")), Example("wrong", "t", None, ("b",))]
    found = errors("multi_label", ("a", "b", "c"), rows, [np.array([1.0, 1.0, -1.0])] * 2)
    assert [row["id"] for row in found["worst"]] == ["wrong"]


def test_the_errors_of_a_regression_are_the_furthest_rows_and_long_texts_are_cut() -> None:
    rows = [Example(str(i), "long " * 100, "b", float(i)) for i in range(30)]
    found = errors("regression", (), rows, [np.array([0.0])] * 30)
    assert [row["id"] for row in found["worst"]] == [str(i) for i in range(29, 9, -1)] and found["worst"][0]["error"] == 29.0
    assert len(found["worst"][0]["text_a"]) == 301 and found["worst"][0]["text_b"] == "b"


@pytest.mark.parametrize("number", [3.0e-06, 1.2345678e-05, 0.1, -2.5, 4321.125, 1.5e12])
def test_a_number_in_the_file_of_answers_is_the_one_that_was_computed(number: float) -> None:
    assert np.float32(in_words(float(np.float32(number)))) == np.float32(number) and len(in_words(float(np.float32(number)))) < 14


def test_ten_thousand_rows_of_several_classes_score_as_scikit_learn_says() -> None:
    chance = np.random.default_rng(0)
    names = np.array(["a", "b", "c", "d", "e"])
    for _ in range(10):
        right, given = chance.random((2, 1000, 5)) < [0.5, 0.2, 0.1, 0.3, 0.01]
        sides = [[tuple(names[row]) for row in side] for side in (right, given)]
        assert score("csv", "multi_label", *sides) == pytest.approx(
            {
                "micro_f1": sklearn.metrics.f1_score(right, given, average="micro"),
                "macro_f1": sklearn.metrics.f1_score(right, given, average="macro"),
                "accuracy": sklearn.metrics.accuracy_score(right, given),
            }
        )
        one, other = chance.choice(names, (2, 1000))
        assert score("csv", "classification", one, other)["macro_f1"] == pytest.approx(
            sklearn.metrics.f1_score(one, other, average="macro")
        )


def test_rows_without_a_token_are_counted_not_trained_on_and_answered_by_an_error(run: Path, tmp_path: Path, capsys: Captured) -> None:
    rows = [{"id": f"r{i}", "text": f"object {i}", "label": "ab"[i % 2]} for i in range(8)]
    rows[3]["text"] = "\u200b\u200b"
    for name in ("train", "dev"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["finetune", "mine", "--from", str(run), f"--path={tmp_path}", *FAST, "--epochs=1"]) == 0
    said = capsys.readouterr().out
    assert "1 of 8 training rows have no token (ids 'r3'): not trained on" in said
    assert "1 of 8 dev rows have no token (ids 'r3'): answered" in said and len(kept(run, "mine", "predictions.json")) == 8
    assert main(["predict", "mine", "--from", str(run), "--input", str(tmp_path / "dev.jsonl")]) == 1
    printed = capsys.readouterr()
    found = [json.loads(line) for line in printed.out.splitlines()]
    assert [a["id"] for a in found] == [row["id"] for row in rows] and ["label" in a for a in found] == [i != 3 for i in range(8)]
    assert found[3]["error"].startswith("has no token") and "1 line could not be answered" in printed.err


def test_a_model_whose_last_step_was_too_large_is_an_error_and_no_result(run: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "t.csv").write_text("text,label\n" + "".join(f"the object {i},{i % 3}\n" for i in range(64)))
    words = ("--global_batch_size=64", "--micro_batch_size=8", "--seq_len=24", "--epochs=1", "--warmup_ratio=0", "--lr=1e20")
    assert main(["finetune", "mine", "--from", str(run), f"--path={tmp_path / 't.csv'}", *words]) == 1
    assert (
        "mine seed 0 pretrained, dev: the network computes numbers that are not finite: training diverged; lower" in capsys.readouterr().err
    )
    assert not (run / "finetune" / "mine").exists()


def test_the_top_layers_and_the_pooler_begin_at_random_where_that_is_asked_for(
    run: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.csv").write_text("text,label\n" + "".join(f"object {i},{'xy'[i % 2]}\n" for i in range(40)))
    begun: dict[int, dict[str, torch.Tensor]] = {}
    untrained = FinetuneWorkload.untrained

    def seen(self: FinetuneWorkload, device: torch.device) -> Any:
        model = untrained(self, device)
        begun.setdefault(count, {name: tensor.clone() for name, tensor in model.state_dict().items()})
        return model

    monkeypatch.setattr(FinetuneWorkload, "untrained", seen)
    words = ["--from", str(run), f"--path={tmp_path / 't.csv'}", *FAST, "--epochs=0.1"]
    for count in (0, 1):
        assert main(["finetune", "mine", *words, f"--reinit_layers={count}"]) == 0
    different = {name for name in begun[0] if not torch.equal(begun[0][name], begun[1][name])}
    assert {"pooler.weight", "encoder.layers.0.qkv.weight"} <= different
    assert all(name.startswith(("encoder.layers.0.", "pooler.")) for name in different)
    assert main(["finetune", "mine", *words, "--reinit_layers=2"]) == 2
    assert "reinit_layers = 2: must be 0 to model.num_layers = 1" in capsys.readouterr().err


def test_only_the_top_layers_are_left_out() -> None:
    names = [*(f"encoder.layers.{i}.up.weight" for i in range(12)), "encoder.word.weight", "pooler.weight"]
    weights = {name: torch.zeros(1) for name in names}
    assert list(without_top(weights, 0, 12)) == names
    assert [name for name in names if name not in without_top(weights, 2, 12)] == [*names[10:12], "pooler.weight"]
    assert list(without_top(weights, 12, 12)) == ["encoder.word.weight"]


def test_the_best_epoch_is_kept_where_that_is_asked_for(run: Path, tmp_path: Path, capsys: Captured) -> None:
    for name, sign in (("train", 1), ("dev", -1)):  # what is learned of the one is wrong in the other: the last epoch is not the best
        rows = (f"{'integer division' if i % 2 else 'string literal'} {i},{sign * (5 * (i % 2) + i % 3)}\n" for i in range(40))
        (tmp_path / f"{name}.csv").write_text("text,score\n" + "".join(rows))
    words = ["finetune", "mine", "--from", str(run), f"--path={tmp_path}", *FAST, "--epochs=4", "--lr=2e-3"]
    assert main([*words, "--keep_best=true", "--select_on=dev"]) == 0
    shown = re.findall(r"epoch (\d)  pearson [-\d.]+  spearman ([-\d.]+)", capsys.readouterr().out)
    assert [epoch for epoch, _ in shown] == ["1", "2", "3", "4"] and len({value for _, value in shown}) > 1
    entry = kept(run, "mine", "task.json")["result"]
    best, at = max((float(value), -int(epoch)) for epoch, value in shown)
    assert round(100 * entry["value"], 1) == best and entry["epoch"] == -at < 4
    answers, right = kept(run, "mine", "predictions.json"), [-5 * (i % 2) - i % 3 for i in range(40)]
    assert scipy.stats.spearmanr(list(answers.values()), right).statistic == pytest.approx(entry["value"])
    found = answered(run, "mine", tmp_path / "dev.csv", capsys)
    assert [a["score"] for a in found] == pytest.approx(list(answers.values()), rel=1e-3)
    # Without the choice the last epoch is kept.
    assert main(words) == 0
    assert round(100 * kept(run, "mine", "task.json")["result"]["value"], 1) == float(shown[-1][1])
    assert not list((run / "finetune" / "mine.training").rglob("step-*"))
