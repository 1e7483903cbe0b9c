"""Questions in the JSON of SQuAD (Rajpurkar et al. 2016, 2018), published or of one's own, checked."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from overnight.errors import DataError
from overnight.state_files import is_text, kind_of, parse_json
from overnight.tasks.examples import in_validation, trained_on_note
from overnight.tasks.tables import read_text

MAX_MISPLACED_ANSWERS = 0.001
"""Share of answers that may stand elsewhere than their file says."""
# Misplaced answers by which it is found out what their positions count.
_TRIED = 100
# As the files are published.
_TRAIN, _DEV, _TEN = ("train-v1.1.json", "train-v2.0.json"), ("dev-v1.1.json", "dev-v2.0.json"), "train-v2.0-10articles.json"
# Questions to train on and to score on (Rajpurkar et al. 2016, 2018).
_PUBLISHED = {(87_599, 10_570): "SQuAD 1.1: ", (130_319, 11_873): "SQuAD 2.0: "}


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
    impossible: bool = False
    """The file says that the paragraph does not answer it (`is_impossible` of SQuAD 2.0)."""


class _Misplaced(NamedTuple):
    """An answer that does not stand where its file says."""

    id: str
    """Of its question."""
    context: str
    text: str
    start: int
    """As the file has it."""


@dataclass(frozen=True)
class SquadData:
    """The questions to train on and to score on."""

    train: list[Question]
    dev: list[Question]
    notes: tuple[str, ...]
    """Which files and articles these are; to be said wherever a score is shown."""


def load_squad(path: Path, dev: Path | None = None, max_misplaced_answers: float = MAX_MISPLACED_ANSWERS, seed: int = 0) -> SquadData:
    """Read the questions to train on and those to score on, all in the format of SQuAD 1.1 or 2.0.

    A folder holds one file with `train` in its name and one with `dev` or `valid`, whatever else they are called; the published names
    `train-v1.1.json` and `dev-v1.1.json` (or those of v2.0, where there is no v1.1) go first. A folder with `dev-v1.1.json` and `train-v2.0-10articles.json` (ten articles of
    SQuAD 2.0) gives a small split of its own: the answerable questions of the ten and the first 40 articles of dev to train on, the last
    8 articles of dev to score on. Of a file without `dev` a tenth of the paragraphs is split off by a hash of their text. The notes say
    which it is.

    Args:
        path: the folder, or the file to train on.
        dev: the file to score on.
        max_misplaced_answers: see :func:`read_squad`.
        seed: which tenth is split off.

    Raises:
        DataError: a file that is missing or has another format, a question without an answer that does not say that it has none.
    """
    if not path.exists():
        raise DataError(f"{path}: does not exist; name the file with the questions to train on, or the folder that holds it")
    published, beside, ten = (path / name for name in (_TRAIN[0], _DEV[0], _TEN))
    if dev is None and ten.is_file() and beside.is_file() and not published.is_file():
        return _small_split(ten, beside, max_misplaced_answers)
    file = path if path.is_file() else _find(path, ("train",), *_TRAIN)
    if dev is None and path.is_dir():
        dev = _find(path, ("dev", "valid"), _DEV[file.name == _TRAIN[1]])
    train, notes = read_squad(file, max_misplaced_answers)
    check_answers(file, train)
    if dev is None:
        scored = [q for q in train if in_validation(q.context, seed)]
        train = [q for q in train if not in_validation(q.context, seed)]
        if not train or not scored:
            raise DataError(f"{file}: too few paragraphs to split off a tenth; name the questions to score on with --dev=FILE")
        said = f"scored on {len(scored):,} questions, those of a tenth of the paragraphs of {file.name}, split off by a hash of their text"
        return SquadData(train, scored, (said, *notes))
    scored, dev_notes = read_squad(dev, max_misplaced_answers)
    check_answers(dev, scored)
    whole = _PUBLISHED.get((len(train), len(scored)), "")
    said = f"{whole}trained on {file.name}, scored on {dev.name}"
    seen = trained_on_note([q.context for q in train], [q.context for q in scored], "questions to score on", "paragraph")
    return SquadData(train, scored, (said, *dict.fromkeys([*notes, *dev_notes]), *seen))


def _small_split(ten: Path, dev_file: Path, max_misplaced_answers: float) -> SquadData:
    more, notes = read_squad(ten, max_misplaced_answers)
    dev, dev_notes = read_squad(dev_file, max_misplaced_answers)
    titles = list(dict.fromkeys(q.title for q in dev))
    last = set(titles[-8:])
    train = [q for q in more if q.answers] + [q for q in dev if q.title not in last]
    check_answers(dev_file, dev)
    said = (
        f"not the published split: trained on {sum(bool(q.answers) for q in more)} answerable questions of {ten.name} and the first"
        f" {len(titles) - len(last)} articles of {dev_file.name}, scored on its last {len(last)}"
    )
    return SquadData(train, [q for q in dev if q.title in last], (said, *notes, *dev_notes))


def _find(folder: Path, words: tuple[str, ...], *published: str) -> Path:
    """Return the JSON file of a folder with one of the words in its name; a published name goes first."""
    for name in published:
        if (folder / name).is_file():
            return folder / name
    files = _json_files(folder)
    found = _with_words(files, words)
    if len(found) != 1:
        have = ", ".join(file.name for file in files) or "no .json file"
        raise DataError(
            f"{folder}: {len(found) or 'no'} file{'s' * (len(found) != 1)} with {' or '.join(words)} in the name (it has {have}); "
            "name both: --path=TRAIN.json --dev=DEV.json"
        )
    return found[0]


def squad_files(folder: Path) -> list[Path]:
    """Return the files of a folder that :func:`load_squad` may read; none where there is none to train on.

    Args:
        folder: of one's own files or of published ones, beside which others of such names, such as answers, are not read.
    """
    files = _json_files(folder)
    train, dev = (
        [file for file in named if file.name in published] or named
        for named, published in ((_with_words(files, ("train",)), (*_TRAIN, _TEN)), (_with_words(files, ("dev", "valid")), _DEV))
    )
    return [*train, *dev] if train else []


def _json_files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix.lower() == ".json" and file.is_file())


def _with_words(files: list[Path], words: tuple[str, ...]) -> list[Path]:
    return [file for file in files if any(word in file.name.lower() for word in words)]


def check_answers(path: Path, questions: list[Question]) -> None:
    """Check that questions can be trained or scored on.

    Raises:
        DataError: one has an empty context, no answer without saying so, or a text that is none.
    """
    if odd := [q.id for q in questions if not is_text(f"{q.id}{q.question}{q.context}")]:
        named = ", ".join(map(ascii, odd[:5]))
        raise DataError(
            f"{path}: {len(odd):,} of {len(questions):,} questions, or their context, have half of a surrogate pair, which is no character, "
            f"first {named}; take it out"
        )
    if empty := [q.id for q in questions if not q.context.strip()]:
        raise DataError(
            f"{path}: {len(empty):,} of {len(questions):,} questions have an empty context, first {', '.join(empty[:5])}; "
            "there is nothing to find an answer in: take them out, or put their paragraph back"
        )
    without = [q.id for q in questions if not q.answers and not q.impossible]
    if without:
        raise DataError(
            f"{path}: {len(without):,} of {len(questions):,} questions have no answer, first {', '.join(without[:5])}; one that its "
            "paragraph does not answer says so, as in SQuAD 2.0: `is_impossible: true`. Take out the others"
        )


def question_lines(path: str) -> Iterator[str] | None:
    """Return the questions of a file in SQuAD's format as the JSON lines that `overnight predict` answers; None for any other file.

    Raises:
        DataError: as :func:`read_squad`.
    """
    if not path.lower().endswith(".json") or not Path(path).is_file():
        return None
    try:
        root = parse_json(read_text(Path(path)))
    except ValueError:  # JSON lines, or what the reader of lines will name
        return None
    if not isinstance(root, dict) or "data" not in root:
        return None
    questions, _ = read_squad(Path(path), max_misplaced_answers=1.0)
    return (json.dumps({"id": q.id, "question": q.question, "context": q.context}) for q in questions)


def read_squad(path: Path, max_misplaced_answers: float = MAX_MISPLACED_ANSWERS) -> tuple[list[Question], tuple[str, ...]]:
    """Read the questions of one file in the format of SQuAD 1.1 or 2.0.

    An answer whose text does not stand at its `answer_start` is never moved: its text still counts for scoring, it is not trained on
    (start -1), and the notes name it. Above the limit the file is refused.

    Args:
        path: the JSON file.
        max_misplaced_answers: share of answers that may stand elsewhere (0 to 1).

    Returns:
        The questions in file order, and the notes.

    Raises:
        DataError: not JSON (line), not SQuAD (place), an id used twice, or too many answers that do not match (ids).
    """
    try:
        root = parse_json(read_text(path))
    except ValueError as error:
        raise DataError(f"{path}: is not JSON: {error}; the file may be cut short") from None
    if isinstance(root, list):
        raise DataError(
            f"{path}: is a list, and questions in SQuAD's format are an object with the key 'data'; rows of a table are JSON lines, an object a line in a .jsonl"
        )
    questions: list[Question] = []
    seen: set[str] = set()
    misplaced: list[_Misplaced] = []
    for question in _questions(path, root, misplaced):
        if question.id in seen:
            raise DataError(f"{path}: question id {question.id!r} is used twice; ids must be unique")
        seen.add(question.id)
        questions.append(question)
    if not questions:
        raise DataError(f"{path}: holds no question")
    notes = _without_text(path, questions)
    if not misplaced:
        return questions, notes
    answers, wrong = sum(len(q.answers) for q in questions), list(dict.fromkeys(one.id for one in misplaced))
    if len(misplaced) > max_misplaced_answers * answers:
        allow = f" To train on the others, allow their share: --max_misplaced_answers={_above(len(misplaced) / answers)}"
        raise DataError(
            f"{path}: {len(misplaced)} of {answers} answers do not stand at their answer_start, first those of questions {', '.join(wrong[:5])};"
            f" the positions count Unicode characters of the context{_counted_otherwise(misplaced)}." + allow * (len(misplaced) < answers)
        )
    said = f"{path.name}: {len(misplaced)} of {answers} answers do not stand at their answer_start and are not trained on: {', '.join(wrong[:5])}"
    return questions, (said + (f" and {len(wrong) - 5:,} more" if len(wrong) > 5 else ""), *notes)


def _without_text(path: Path, questions: list[Question]) -> tuple[str, ...]:
    """Return a note that counts the questions that ask nothing."""
    empty = [q.id for q in questions if not q.question.strip()]
    return (f"{path.name}: {len(empty):,} of {len(questions):,} questions have no text: {', '.join(empty[:5])}",) if empty else ()


def _counted_otherwise(misplaced: list[_Misplaced]) -> str:
    """Return what the positions of misplaced answers seem to count instead of characters, in words; nothing where that is not plain."""
    for encoding, size, what in (("utf-16-le", 2, "UTF-16 units, as JavaScript and Java do"), ("utf-8", 1, "bytes of UTF-8")):
        if all(_stands(one, encoding, size) for one in misplaced[:_TRIED]):
            return f", and these count {what}: convert them"
    return ""


def _stands(one: _Misplaced, encoding: str, size: int) -> bool:
    """Return whether an answer stands where its position counts units of some bytes of an encoding."""
    context, text = (part.encode(encoding, "surrogatepass") for part in (one.context, one.text))
    return one.start >= 0 and context.startswith(text, size * one.start)


def _above(share: float) -> float:
    """Return a round number that is not below a share."""
    return min(1.0, math.ceil(1000 * share) / 1000)


def _questions(path: Path, root: Any, misplaced: list[_Misplaced]) -> Iterator[Question]:
    for i, article in enumerate(_get(path, root, "data", list, "the file")):
        where = f"data[{i}]"
        title = article.get("title", str(i)) if isinstance(article, dict) else ""
        for j, paragraph in enumerate(_get(path, article, "paragraphs", list, where)):
            place = f"{where}.paragraphs[{j}]"
            context = _get(path, paragraph, "context", str, place)
            for k, qa in enumerate(_get(path, paragraph, "qas", list, place)):
                yield _question(path, qa, str(title), context, f"{place}.qas[{k}]", misplaced)


def _question(path: Path, qa: Any, title: str, context: str, place: str, misplaced: list[_Misplaced]) -> Question:
    number = qa.get("id") if isinstance(qa, dict) else None
    whole = isinstance(number, int) and not isinstance(number, bool)
    question_id = str(number) if whole else _get(path, qa, "id", str, place)
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
        if not stands:
            misplaced.append(_Misplaced(question_id, context, answer_text, start))
    impossible = "is_impossible" in qa and _get(path, qa, "is_impossible", bool, where)
    if impossible and answers:
        raise DataError(f"{path}: {where}: is_impossible is true, and there are answers; put wrong ones under plausible_answers")
    return Question(question_id, title, text, context, tuple(answers), impossible)


def _get(path: Path, node: Any, key: str, kind: type, where: str) -> Any:
    if not isinstance(node, dict) or key not in node:
        found = f"has no key {key!r}" if isinstance(node, dict) else f"is {kind_of(node)}, not an object"
        raise DataError(
            f"{path}: {where} {found}; the format of SQuAD is data[].paragraphs[].{{context, qas[].{{id, question, answers[].{{text, answer_start}}}}}}"
        )
    if not isinstance(node[key], kind) or (kind is int and isinstance(node[key], bool)):
        found = f"the number {node[key]}" if isinstance(node[key], float) else kind_of(node[key])
        raise DataError(f"{path}: {where}.{key} is {found} where {'a whole number' if kind is int else kind_of(kind())} belongs")
    return node[key]
