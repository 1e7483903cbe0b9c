"""A task of fine-tuning, read and encoded: the sequences to train on, and how the outputs of the network are scored."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from overnight.config import Finetune
from overnight.corpus.tokenizer import Vocabulary, load_tokenizer
from overnight.errors import ConfigError, DataError
from overnight.finetune import metrics, question_answering
from overnight.finetune.answers import Answer, answer_of, in_words
from overnight.finetune.encode import encode_examples, with_tokens
from overnight.finetune.encoded_examples import EncodedExamples
from overnight.finetune.entities import are_entities
from overnight.finetune.task_rows import load_questions, load_sentences, load_texts, question_rows, sentence_rows, text_rows
from overnight.finetune.task_scores import evaluate_questions, evaluate_tags, evaluate_texts
from overnight.tasks.baselines import baselines, commonest_tags
from overnight.tasks.conll import Sentence
from overnight.tasks.examples import Example, TaskData, digest_of_texts
from overnight.tasks.labels import NO_CORRELATION, have_one_number
from overnight.tasks.squad import Question
from overnight.tasks.tables import number_of

Evaluate = Callable[[list[np.ndarray]], tuple[dict[str, float], dict[str, Any]]]
"""Outputs of the network for every sequence → metrics by name, and files to write by name (JSON values, or texts)."""


@dataclass(frozen=True)
class EncodedTask:
    """A task, read and encoded: what to train on, and how to score the outputs of the network."""

    name: str
    kind: str
    """classification, multi_label, regression, token_classification or spans."""
    labels: tuple[str, ...]
    metric: str
    train: EncodedExamples
    dev: EncodedExamples
    evaluate: Evaluate
    """Of the dev rows."""
    test: dict[str, tuple[EncodedExamples, Callable[[list[np.ndarray]], list[tuple[str, str]]]]]
    """Further splits to predict, by file name, with what makes (id, answer) of their rows from the outputs."""
    extra_metrics: dict[str, Callable[[list[np.ndarray]], dict[str, float]]]
    """Those of them that are scored, since all of their rows have labels: outputs → metrics by name, which say the split (`accuracy_mismatched`, `accuracy_test`)."""
    notes: tuple[str, ...]
    baselines: Callable[[], dict[str, dict[str, float]]] = dict
    """Scores rules without a network, by their names: metrics by name, of the dev rows and of the splits that are scored."""
    pairs: bool = False
    """Whether a row is two texts."""
    columns: tuple[str, ...] = ()
    """Of one's own table, the columns that its texts were read from."""
    undefined: bool = False
    """Whether its metric is a correlation, which is not defined, as the rows that are scored have one number."""
    diagnostic: str = ""
    """Of MNLI, :func:`overnight.tasks.examples.digest_of_texts` of the diagnostic set; empty where it is not there."""
    class_weights: tuple[float, ...] = ()
    """Of each class in the loss; empty where all are alike."""
    selection: tuple[EncodedExamples, Evaluate] | None = None
    """Training rows that are set aside to choose by, and how they are scored; None where nothing is chosen, or by the dev rows."""


def encode_task(spec: Finetune, folder: Path, vocabulary: Vocabulary) -> EncodedTask:
    """Read and encode a task.

    Args:
        spec: which task, where, how long.
        folder: holds the tokenizer.

    Raises:
        DataError: when a file is missing or a row cannot be used.
    """
    tokenizer = load_tokenizer(folder)
    if spec.task == "squad":
        return _read_squad(spec, tokenizer, vocabulary)
    if spec.task == "tokens":
        return _read_tokens(spec, tokenizer, vocabulary)
    if spec.task == "docnames":
        from overnight.tasks.docnames import load_docnames

        task = load_docnames(seed=spec.dev_seed)
    else:
        task = with_tokens(tokenizer, load_texts(spec))

    # A metric that lacks its package says so here, before any training.
    metrics.score(task.name, task.kind, *[[0.0, 1.0] if task.kind == "regression" else ["0", "1"]] * 2)

    def encoded(examples: list[Example], rows_together: int = 1) -> EncodedExamples:
        sequences = encode_examples(tokenizer, vocabulary, examples, spec.seq_len)
        targets: dict[str, np.ndarray] = {}
        if _are_labeled(examples):
            if task.kind == "regression":
                targets["label"] = np.array([example.label for example in examples], np.float32)
            elif task.kind == "multi_label":
                targets["label"] = np.array([[label in (e.label or ()) for label in task.labels] for e in examples], np.float32)  # type: ignore[operator]
            else:
                number = {label: i for i, label in enumerate(task.labels)}
                targets["label"] = np.array([number[str(example.label)] for example in examples], np.int64)
        return EncodedExamples([e.ids for e in sequences], [e.segments for e in sequences], targets, rows_together=rows_together)

    def answers(outputs: list[np.ndarray]) -> list[Answer]:
        return [answer_of(task.kind, task.labels, output) for output in outputs]

    def scored(split: str, examples: list[Example], given: list[Answer]) -> dict[str, float]:
        found = metrics.score(task.name, task.kind, [example.label for example in examples if example.label is not None], given)
        return {f"{name}_{split.removeprefix('dev_')}": value for name, value in found.items()} if split != "dev" else found

    evaluate = partial(evaluate_texts, task.name, task.kind, task.labels)

    def rows_of(examples: list[Example], outputs: list[np.ndarray]) -> list[tuple[str, str]]:
        return [(example.id, in_words(answer)) for example, answer in zip(examples, answers(outputs), strict=True)]

    def evaluate_split(split: str, examples: list[Example], outputs: list[np.ndarray]) -> dict[str, float]:
        return scored(split, examples, answers(outputs))

    def rules(learned: list[Example], splits: dict[str, list[Example]]) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for rule, answered in baselines(task, learned, [*splits.values()]).items():
            parts = [scored(split, examples, given) for (split, examples), given in zip(splits.items(), answered, strict=True)]
            found[rule] = {name: value for part in parts for name, value in part.items()}
        return found

    undefined = have_one_number(task.dev)
    notes = task.notes + _too_alike(task)
    notes += (NO_CORRELATION.format("row to score on", task.dev[0].label),) if undefined else ()
    rows = text_rows(spec, task)
    # Of the rows that are trained on: a draw that leaves no class out has others in it than the whole.
    weights = class_weights(spec.class_weights, replace(task, train=rows.train))
    tests = {"test": task.test, **task.extra}
    labeled = {name: examples for name, examples in tests.items() if _are_labeled(examples)}
    return EncodedTask(
        name=task.name,
        kind=task.kind,
        labels=task.labels,
        metric=task.main_metric,
        train=encoded(rows.train, rows.together),
        dev=encoded(task.dev),
        evaluate=partial(evaluate, task.dev),
        test={name: (encoded(examples), partial(rows_of, examples)) for name, examples in tests.items() if examples},
        extra_metrics={name: partial(evaluate_split, name, examples) for name, examples in labeled.items()},
        notes=notes + rows.notes,
        baselines=partial(rules, rows.drawn, {"dev": task.dev, **labeled}),
        pairs=any(example.text_b is not None for example in rows.train),
        columns=task.columns,
        undefined=undefined,
        diagnostic=digest_of_texts(task.extra["diagnostic"]) if "diagnostic" in task.extra else "",
        class_weights=weights,
        selection=(encoded(rows.selection), partial(evaluate, rows.selection)) if rows.selection else None,
    )


def _too_alike(task: TaskData) -> tuple[str, ...]:
    """Return a note where the numbers of a task differ by so little of their size that 32 bits, in which they are learned and answered, hardly tell them apart."""
    if task.kind != "regression":
        return ()
    numbers = np.array([example.label for example in task.train], np.float64)
    if not 0 < numbers.std() < 10 * np.finfo(np.float32).eps * np.abs(numbers).max():
        return ()
    return (
        f"scores of {numbers.min():.17g} to {numbers.max():.17g} differ too little for the 7 digits of a network's answers to tell them apart: subtract a constant from them",
    )


def _are_labeled(examples: Sequence[Example]) -> bool:
    return bool(examples) and all(example.label is not None for example in examples)


def class_weights(wanted: str, task: TaskData) -> tuple[float, ...]:
    """Return the weight of each class in the loss, with mean 1 over the training rows; none where they are all alike.

    Args:
        wanted: `balanced`, inversely to the rows of each class, or `LABEL=3,LABEL=1` (others 1).
        task: with one class a row.

    Raises:
        ConfigError: of a task without classes, or for a label that it does not have.
    """
    if not wanted:
        return ()
    if task.kind != "classification":
        raise ConfigError(f"class_weights = {wanted!r}: only a task with one class per row has class weights; {task.name} is {task.kind}")
    rows = Counter(str(example.label) for example in task.train)
    weights = dict.fromkeys(task.labels, 1.0)
    if wanted == "balanced":
        weights = {label: 1 / rows[label] if rows[label] else 0.0 for label in task.labels}
    else:
        for label, number in _label_weights(wanted, task.labels):
            try:
                weights[label] = number_of(number, f"class_weights: {label}", 0.0, what="weight")
            except DataError as error:
                raise ConfigError(str(error)) from None
    mean = sum(weights[label] * count for label, count in rows.items()) / rows.total()
    if mean == 0:
        raise ConfigError(f"class_weights = {wanted!r}: every class has weight 0")
    return tuple(weights[label] / mean for label in task.labels)


def _label_weights(wanted: str, labels: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each label of `LABEL=3,LABEL=1` and its weight as it is written; labels may have commas and equals signs of their own."""
    begun = ""
    for part in wanted.split(","):
        begun += part
        label, equals, number = begun.rpartition("=")
        if equals and label in labels:
            yield label, number
            begun = ""
        else:
            begun += ","
    if begun:
        raise ConfigError(f"class_weights: {begun[:-1]!r} is not LABEL=WEIGHT with one of the labels {', '.join(labels)}")


def _read_tokens(spec: Finetune, tokenizer: Any, vocabulary: Vocabulary) -> EncodedTask:
    from overnight.finetune.tagging import encode_sentences, tags_of

    if spec.class_weights:
        raise ConfigError(f"class_weights = {spec.class_weights!r}: only a task with one class per row has class weights; tags have none")
    data = load_sentences(spec)
    rows = sentence_rows(spec, data)
    parts = {
        name: encode_sentences(tokenizer, vocabulary, sentences, data.labels, spec.seq_len)
        for name, sentences in (("train", rows.train), ("dev", data.dev), ("test", data.test), ("selection", rows.selection))
    }

    def encoded(name: str) -> EncodedExamples:
        mine, count = parts[name], len({part.sentence for part in parts[name]})
        ids, segments = [part.ids for part in mine], [np.zeros(len(part.ids), np.int8) for part in mine]
        return EncodedExamples(ids, segments, {}, token_targets={"label": [part.labels for part in mine]}, several=count)

    def answers(name: str, sentences: list[Sentence], outputs: list[np.ndarray]) -> list[list[str]]:
        return [tags for tags, _ in tags_of(parts[name], outputs, data.labels, len(sentences))]

    def scored(sentences: list[Sentence], given: list[list[str]]) -> dict[str, float]:
        return metrics.tag_scores(data.labels, [list(sentence.tags or ()) for sentence in sentences], given)

    def evaluate(name: str, sentences: list[Sentence], outputs: list[np.ndarray]) -> tuple[dict[str, float], dict[str, Any]]:
        return evaluate_tags(data.labels, sentences, answers(name, sentences, outputs))

    def rows_of(outputs: list[np.ndarray]) -> list[tuple[str, str]]:
        return [(s.id, " ".join(tags)) for s, tags in zip(data.test, answers("test", data.test, outputs), strict=True)]

    def by_rule(split: str) -> dict[str, float]:
        sentences = data.dev if split == "dev" else data.test
        return scored(sentences, commonest_tags(rows.drawn, sentences))

    metric = "f1" if are_entities(data.labels) else "accuracy"
    return EncodedTask(
        "tokens",
        "token_classification",
        data.labels,
        metric,
        encoded("train"),
        encoded("dev"),
        partial(evaluate, "dev", data.dev),
        {"test": (encoded("test"), rows_of)} if data.test else {},
        {"test": lambda outputs: _of_test(scored(data.test, answers("test", data.test, outputs)))} if _are_tagged(data.test) else {},
        data.notes + rows.notes,
        baselines=lambda: {"commonest tags": by_rule("dev") | (_of_test(by_rule("test")) if _are_tagged(data.test) else {})},
        selection=(encoded("selection"), partial(evaluate, "selection", rows.selection)) if rows.selection else None,
    )


def _are_tagged(sentences: Sequence[Sentence]) -> bool:
    return bool(sentences) and all(sentence.tags is not None for sentence in sentences)


def _of_test(scores: dict[str, float]) -> dict[str, float]:
    return {f"{name}_test": value for name, value in scores.items()}


def _read_squad(spec: Finetune, tokenizer: Any, vocabulary: Vocabulary) -> EncodedTask:
    data = load_questions(spec)
    rows = question_rows(spec, data)
    notes = data.notes + rows.notes
    if (most := question_answering.longest_question(spec.seq_len)) < question_answering.MAX_QUESTION:
        room = f"seq_len = {spec.seq_len} leaves no room for a paragraph beside a question of more than {most} tokens"
        notes += (f"{room}, which is not answered; use 128 or more",)
    with_null = any(q.impossible for q in (*rows.drawn, *data.dev))
    split_windows = {
        name: question_answering.windows(tokenizer, vocabulary, questions, spec.seq_len, spec.doc_stride)
        for name, questions in (("train", rows.train), ("dev", data.dev), ("selection", rows.selection))
    }
    split_windows["train"], unheld = question_answering.with_answers(split_windows["train"], rows.train)

    def evaluate(name: str, questions: list[Question]) -> Callable[[list[np.ndarray]], tuple[dict[str, float], dict[str, Any]]]:
        return partial(evaluate_questions, split_windows[name], questions, with_null, spec.max_answer_length)

    examples = {
        # As in run_squad.py, a window without the answer points at [CLS].
        split: EncodedExamples(
            [w.ids for w in windows],
            [w.segments for w in windows],
            {name: np.array([getattr(w, name) or 0 for w in windows], np.int64) for name in ("start", "end")},
            several=len({w.id for w in windows}),
        )
        for split, windows in split_windows.items()
    }
    return EncodedTask(
        "squad",
        "spans",
        (),
        "f1",
        examples["train"],
        examples["dev"],
        evaluate("dev", data.dev),
        {},
        {},
        notes + unheld,
        selection=(examples["selection"], evaluate("selection", rows.selection)) if rows.selection else None,
    )
