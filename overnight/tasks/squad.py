"""SQuAD (Rajpurkar et al. 2016, 2018): questions from its JSON, checked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overnight.errors import DataError
from overnight.tasks.tables import read_text


@dataclass(frozen=True)
class Answer:
    """A right answer: `context[start : start + len(text)] == text`, or start is -1 where the file's position did not fit its text."""

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """A question about a paragraph."""

    id: str
    title: str
    """Of the article."""
    question: str
    context: str
    """The paragraph; answers are character spans of it."""
    answers: tuple[Answer, ...]
    """Empty where the question has none (SQuAD 2.0), or where they are not known."""


@dataclass(frozen=True)
class SquadData:
    """The questions to train on and to score on."""

    train: list[Question]
    dev: list[Question]
    notes: tuple[str, ...]
    """Which files and articles these are; to be said wherever a score is shown."""


def load_squad(folder: Path) -> SquadData:
    """Read the training and development questions of SQuAD 1.1 from the files that a folder holds.

    `train-v1.1.json` and `dev-v1.1.json` are the published split. A folder with `dev-v1.1.json` and `train-v2.0-10articles.json` (ten
    articles of SQuAD 2.0) gives a small split of its own: the answerable questions of the ten and the first 40 articles of dev to train
    on, the last 8 articles of dev to score on. The notes say which it is.

    Raises:
        DataError: a file that is missing or is not SQuAD.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: is no folder; name the folder that holds train-v1.1.json and dev-v1.1.json")
    published, dev_file, ten = (folder / name for name in ("train-v1.1.json", "dev-v1.1.json", "train-v2.0-10articles.json"))
    if not dev_file.is_file() or not (published.is_file() or ten.is_file()):
        missing = [f.name for f in (published, dev_file) if not f.is_file()]
        raise DataError(f"{folder}: {' and '.join(missing)} missing; SQuAD 1.1 is train-v1.1.json and dev-v1.1.json")
    dev, dev_notes = read_squad(dev_file)
    if published.is_file():
        train, notes = read_squad(published)
        said = (f"SQuAD 1.1: trained on {published.name}, scored on {dev_file.name}",)
    else:
        more, notes = read_squad(ten)
        titles = list(dict.fromkeys(q.title for q in dev))
        held_out = set(titles[-8:])
        train = [q for q in more if q.answers] + [q for q in dev if q.title not in held_out]
        dev = [q for q in dev if q.title in held_out]
        said = (
            f"not the published split: trained on {sum(bool(q.answers) for q in more)} answerable questions of {ten.name} and the first"
            f" {len(titles) - len(held_out)} articles of {dev_file.name}, scored on its last {len(held_out)}",
        )
    unanswered = next((q for q in train + dev if not q.answers), None)
    if unanswered:
        raise DataError(f"{folder}: question {unanswered.id} has no answer; SQuAD 1.1 has one for every question")
    return SquadData(train, dev, said + notes + (() if dev_notes == notes else dev_notes))


def read_squad(path: Path, misaligned: float = 0.001) -> tuple[list[Question], tuple[str, ...]]:
    """Read the questions of one SQuAD 1.1 or 2.0 file.

    An answer whose text does not stand at its `answer_start` is never moved: its text still counts for scoring, it is not trained on
    (start -1), and the notes name it. Above the limit the file is refused.

    Args:
        path: the JSON file.
        misaligned: share of answers that may stand elsewhere (0 to 1).

    Returns:
        The questions in file order, and the notes.

    Raises:
        DataError: not JSON (line), not SQuAD (place), an id used twice, or too many answers that do not match (ids).
    """
    try:
        root = json.loads(read_text(path))
    except ValueError as error:
        raise DataError(f"{path}: is not JSON: {error}; the file may be cut short") from None
    questions: list[Question] = []
    seen: set[str] = set()
    for question in _questions(path, root):
        if question.id in seen:
            raise DataError(f"{path}: question id {question.id!r} is used twice; ids must be unique")
        seen.add(question.id)
        questions.append(question)
    if not questions:
        raise DataError(f"{path}: holds no question")
    answers = sum(len(q.answers) for q in questions)
    wrong = [q.id for q in questions for a in q.answers if a.start < 0]
    if len(wrong) > misaligned * answers:
        raise DataError(
            f"{path}: {len(wrong)} of {answers} answers do not stand at their answer_start, first those of questions {', '.join(dict.fromkeys(wrong[:5]))};"
            " the positions count Unicode characters of the context"
        )
    if not wrong:
        return questions, ()
    return questions, (
        f"{path.name}: {len(wrong)} of {answers} answers do not stand at their answer_start and are not trained on: {', '.join(wrong)}",
    )


def _questions(path: Path, root: Any) -> Iterator[Question]:
    for i, article in enumerate(_get(path, root, "data", list, "the file")):
        where = f"data[{i}]"
        title = article.get("title", str(i)) if isinstance(article, dict) else ""
        for j, paragraph in enumerate(_get(path, article, "paragraphs", list, where)):
            place = f"{where}.paragraphs[{j}]"
            context = _get(path, paragraph, "context", str, place)
            for k, qa in enumerate(_get(path, paragraph, "qas", list, place)):
                yield _question(path, qa, str(title), context, f"{place}.qas[{k}]")


def _question(path: Path, qa: Any, title: str, context: str, place: str) -> Question:
    question_id = _get(path, qa, "id", str, place)
    text = _get(path, qa, "question", str, place)
    where = f"{place} (question {question_id})"
    answers: list[Answer] = []
    # A file to predict on may have no answers; SQuAD 2.0 has an empty list, and plausible_answers that are wrong ones.
    for answer in _get(path, qa, "answers", list, where) if "answers" in qa else ():
        answer_text = _get(path, answer, "text", str, where)
        start = _get(path, answer, "answer_start", int, where)
        if not answer_text.strip():
            raise DataError(f"{path}: {where}: an answer has no text")
        stands = start >= 0 and context.startswith(answer_text, start)
        answers.append(Answer(answer_text, start if stands else -1))
    return Question(question_id, title, text, context, tuple(answers))


def _get(path: Path, node: Any, key: str, kind: type, where: str) -> Any:
    if not isinstance(node, dict) or key not in node:
        found = f"has no key {key!r}" if isinstance(node, dict) else f"is a JSON {type(node).__name__}, not an object"
        raise DataError(
            f"{path}: {where} {found}; SQuAD is data[].paragraphs[].{{context, qas[].{{id, question, answers[].{{text, answer_start}}}}}}"
        )
    if not isinstance(node[key], kind):
        raise DataError(f"{path}: {where}.{key} is a JSON {type(node[key]).__name__} where a {kind.__name__} belongs")
    return node[key]
