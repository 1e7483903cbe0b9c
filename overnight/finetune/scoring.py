"""The score of a trained task on labeled rows that came later: a file of them, which the model was neither trained nor chosen on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from overnight.config import Finetune
from overnight.config.schema import Columns
from overnight.console import Line
from overnight.display import duration, plural
from overnight.errors import ConfigError, DataError, UserError
from overnight.finetune import metrics, question_answering
from overnight.finetune.encode import encode_examples, with_tokens, without_tokens
from overnight.finetune.predict import Trained, answer_questions
from overnight.finetune.tagging import encode_sentences, tags_of
from overnight.finetune.task_rows import load_questions, load_sentences, load_texts, question_rows, sentence_rows, text_rows
from overnight.finetune.task_scores import evaluate_tags, evaluate_texts, question_files
from overnight.run_dir.task_results import scored_seeds
from overnight.tasks.classification import labeled_rows
from overnight.tasks.conll import Sentence, read_sentences
from overnight.tasks.examples import Example
from overnight.tasks.labels import NO_CORRELATION, have_one_number
from overnight.tasks.squad import Question, check_answers, read_squad

# Rows answered at once, sorted by length among themselves: how far it is can be shown behind each.
_AT_ONCE = 1024

Row = TypeVar("Row")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Score:
    """How well a model answers rows whose right answers are known."""

    rows: int
    metrics: dict[str, float]
    """As of fine-tuning on the dev rows."""
    files: dict[str, Any]
    """What fine-tuning writes of the dev rows, by name: `predictions.json`, `errors.json` and the like."""
    notes: tuple[str, ...]
    """What a reader of the score has to know."""
    largest_class: float | None
    """Accuracy of answering every row with the commonest class of these rows; None where a row has not one class."""


def score_file(model: Trained, path: Path, line: Line, columns: Mapping[str, str] | None = None) -> Score:
    """Answer the rows of a file and score the answers, with the metrics of the task.

    Args:
        model: of a task.
        path: of texts a table with labels, or a file of GLUE or SST as published; of words with tags CoNLL or JSON lines; of questions SQuAD's format.
        line: shows how far it is.
        columns: names of the columns of a table (fields of :class:`overnight.config.schema.Columns`), instead of those that the task was trained on.

    Raises:
        ConfigError: columns of what is no table.
        DataError: the file cannot be read, or a row has no right answer; naming file and line.
        NonFiniteError: the network says NaN or Infinity.
    """
    kind, given = model.facts["kind"], {what: name for what, name in (columns or {}).items() if name}
    if given and kind in ("spans", "token_classification"):
        (what, name), *_ = given.items()
        raise ConfigError(f"columns.{what} = {name!r}: only a table has columns to name, and {path} is of words with tags or questions")
    if kind == "spans":
        return _score_questions(model, path, line)
    return _score_sentences(model, path, line) if kind == "token_classification" else _score_texts(model, path, line, given)


def _in_parts(rows: Sequence[Row], answer: Callable[[Sequence[Row]], Sequence[Found]], line: Line) -> Iterator[Found]:
    """Answer rows some at a time, and show how far it is."""
    begin = time.perf_counter()
    for first in range(0, len(rows), _AT_ONCE):
        yield from answer(rows[first : first + _AT_ONCE])
        done = min(first + _AT_ONCE, len(rows))
        if done < len(rows):
            left = (time.perf_counter() - begin) * (len(rows) - done) / done
            line.update(f"scored {done:,}/{len(rows):,}  left {duration(left)}")


def _score_texts(model: Trained, path: Path, line: Line, columns: Mapping[str, str]) -> Score:
    kind, labels, task = model.facts["kind"], tuple(model.facts["labels"]), model.facts["spec"]["task"]
    skipped: list[str] = []
    examples = labeled_rows(task, path, Columns(**{**(model.facts["spec"].get("columns") or {}), **columns}), kind, labels, skipped)
    _check_pairs(model, path, examples)

    def answer(part: Sequence[Example]) -> list[Any]:
        return model.outputs(encode_examples(model.tokenizer, model.vocabulary, part, model.longest))

    scores, files = evaluate_texts(task, kind, labels, examples, list(_in_parts(examples, answer, line)))
    empty = len(without_tokens(model.tokenizer, examples))
    notes = tuple(f"left out {why}" for why in skipped)
    if empty:
        notes += (f"{empty:,} of {plural(len(examples), 'row')} have no token: answered as an empty text",)
    if have_one_number(examples):
        notes += (NO_CORRELATION.format("row", examples[0].label),)
    notes += _seen_notes(model, [_of_text(example) for example in examples], "row")
    commonest = max(Counter(example.label for example in examples).values()) / len(examples) if kind == "classification" else None
    return Score(len(examples), scores, files, notes, commonest)


def _of_text(example: Example) -> Hashable:
    return example.text_a, example.text_b


def _seen_notes(model: Trained, rows: Sequence[Hashable], noun: str) -> tuple[str, ...]:
    """Return notes on the rows that the model was trained on, and on those that it was chosen by, where its own rows are still at hand as they were.

    Args:
        model: of a task.
        rows: the texts of each row, as of :func:`_own_rows`.
        noun: what a row is called.
    """
    said, result = model.facts["spec"], model.facts["result"]
    if not said.get("path"):
        return ()
    known = {name: said[name] for name in vars(Finetune()) if name in said and name not in ("columns", "search")}
    spec = Finetune(**known, columns=Columns(**said.get("columns") or {}))
    try:
        train, selection, dev = _own_rows(model, spec)
    except UserError:
        return ()
    # Those that the model's command was given, and those of commands after it.
    seeds = {*spec.seeds, *(scored_seeds(model.run_dir, result) if model.run_dir else ())}
    by_dev = result.get("selected_on") == "dev" or len(seeds) > 1 or "null_threshold" in result["metrics"]
    chosen = {*selection, *(dev if by_dev else ())} - {*train}
    notes = []
    for seen, what, but in (
        ({*train}, "the task trains on", "says little about other rows"),
        (chosen, "the model, its epoch or its threshold was chosen by", "is a little too good"),
    ):
        if count := sum(row in seen for row in rows):
            notes.append(
                f"{count:,} of {plural(len(rows), noun)} {'is' if count == 1 else 'are'} of those that {what}: a score there {but}"
            )
    return tuple(notes)


def _own_rows(model: Trained, spec: Finetune) -> list[list[Hashable]]:
    """Return the texts of the rows that a task trains on, those that are set aside to choose by, and those that it is scored on.

    Raises:
        UserError: they are not there any more, or cannot be read.
    """
    if spec.task == "squad":
        questions = load_questions(spec)
        asked = question_rows(spec, questions)
        return [[_of_question(one) for one in part] for part in (asked.train, asked.selection, questions.dev)]
    if spec.task == "tokens":
        data = load_sentences(spec)
        tagged = sentence_rows(spec, data)
        return [[one.words for one in part] for part in (tagged.train, tagged.selection, data.dev)]
    task = load_texts(spec)
    if spec.max_train_examples or spec.selects:  # what is drawn of them depends on which have tokens, which takes time to find out
        task = with_tokens(model.tokenizer, task)
    texts = text_rows(spec, task)
    return [[_of_text(one) for one in part] for part in (texts.train, texts.selection, task.dev)]


def _of_question(question: Question) -> Hashable:
    return question.context, question.question


def _check_pairs(model: Trained, path: Path, examples: Sequence[Example]) -> None:
    pairs = model.facts.get("pairs")  # of a folder of others it is not known
    if pairs is not None and pairs != (examples[0].text_b is not None):
        has, wants = ("single texts", "pairs of texts") if pairs else ("pairs of texts", "single texts")
        raise DataError(f"{path}: has {has}, and the model was trained on {wants}")


def _score_sentences(model: Trained, path: Path, line: Line) -> Score:
    labels = model.facts["labels"]
    sentences = read_sentences(path, tagged=True)

    def answer(part: Sequence[Sentence]) -> list[list[str]]:
        # Tags that the model does not know are wrong whatever it answers, and nothing to encode.
        bare = [Sentence(sentence.id, sentence.words, None) for sentence in part]
        encoded = encode_sentences(model.tokenizer, model.vocabulary, bare, labels, model.longest)
        return [tags for tags, _ in tags_of(encoded, model.outputs(encoded), labels, len(part))]

    scores, files = evaluate_tags(labels, sentences, list(_in_parts(sentences, answer, line)))
    unknown = sorted({tag for sentence in sentences for tag in sentence.tags or ()} - set(labels))
    notes = (f"tags that the model does not know, and so never answers: {', '.join(unknown)}",) if unknown else ()
    notes += _seen_notes(model, [sentence.words for sentence in sentences], "sentence")
    return Score(len(sentences), scores, files, notes, None)


def _score_questions(model: Trained, path: Path, line: Line) -> Score:
    # An answer counts by its text, wherever it stands.
    questions, notes = read_squad(path, max_misplaced_answers=1.0)
    check_answers(path, questions)

    def answer(part: Sequence[Question]) -> list[tuple[dict[str, Any], list[dict[str, str | float]]]]:
        return list(answer_questions(model, [(question, question.id) for question in part]))

    unread = question_answering.too_long(model.tokenizer, questions, model.longest)
    answers = list(_in_parts([question for question in questions if question.id not in unread], answer, line))
    predictions = {question.id: "" for question in questions} | {found["id"]: str(found["answer"]) for found, _ in answers}
    nbest = {found["id"]: best for found, best in answers}
    odds = {found["id"]: found["null_odds"] for found, _ in answers if "null_odds" in found}
    right = {question.id: [answer.text for answer in question.answers] for question in questions}
    may_have_none = bool(odds) or any(question.impossible for question in questions)
    scores = (metrics.squad2_scores if may_have_none else metrics.squad_scores)(right, predictions)
    if may_have_none and not odds:
        notes += ("some questions have no answer, and the model was trained to answer every one",)
    if unread:
        most = question_answering.longest_question(model.longest)
        notes += (
            f"{len(unread):,} of {plural(len(questions), 'question')} have more than {most} tokens, which leave no room for the paragraph: answered with an empty text",
        )
    notes += _seen_notes(model, [_of_question(question) for question in questions], "question")
    return Score(len(questions), scores, question_files(questions, predictions, nbest, odds), notes, None)
