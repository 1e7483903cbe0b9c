"""What rows can be answered by without a network: pretraining is worth something where it beats them."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from overnight.tasks.conll import Sentence
from overnight.tasks.examples import Example, TaskData, drawn, in_validation, strata
from overnight.tasks.words import word_pattern

Answer = str | float | tuple[str, ...]
# Training rows of word counts at most, drawn by the hash of their texts: a minute's work or so.
_ROWS, _DRAW = 100_000, 0
# With many classes time and memory are those of rows times classes, and of weights: words and pairs of words times classes.
_ANSWERS, _WEIGHTS = 2_000_000, 3_000_000
# Inverse penalties of the regression, of which a tenth of the training rows chooses.
_STRENGTHS = (1.0, 10.0)


def baselines(task: TaskData, train: Sequence[Example], splits: Sequence[Sequence[Example]]) -> dict[str, list[list[Answer]]]:
    """Return what rules without a network answer to each row of each split, by the name of the rule.

    `largest class` answers always the same (where accuracy is the metric); `word counts` is a regression on the TF-IDF of words and pairs of
    words, for single texts; `shared words`, for pairs, answers by the share of their different words that both texts have: that share
    itself, or which of two classes by the threshold that is right most often on the training rows. `docnames` has a rule of its own, `word
    overlap`. :func:`overnight.tasks.words.word_pattern` says what a word is. Without scikit-learn there are no word counts.

    Args:
        task: what is asked.
        train: the rows that are trained on.
        splits: the rows that are answered, such as those of dev and of a test.
    """
    rows = [example for split in splits for example in split]
    found: dict[str, list[Answer] | None] = {}
    if task.name == "docnames":
        from overnight.tasks.docnames import by_overlap

        found["word overlap"] = [*by_overlap(train, rows)]
    else:
        if task.main_metric == "accuracy" and task.kind == "classification":
            largest = Counter(str(example.label) for example in train).most_common(1)[0][0]
            found["largest class"] = [largest] * len(rows)
        pairs = any(example.text_b is not None for example in train)
        found["shared words" if pairs else "word counts"] = (_by_shared_words if pairs else _by_word_counts)(task, train, rows)
    ends = list(accumulate(map(len, splits)))
    return {
        rule: [answers[end - len(split) : end] for split, end in zip(splits, ends, strict=True)]
        for rule, answers in found.items()
        if answers is not None
    }


def commonest_tags(train: Sequence[Sentence], dev: Sequence[Sentence]) -> list[list[str]]:
    """Return for every word of the dev sentences the tag that it has most often in the training ones; for a new word the one that most words have."""
    by_word, of_all = defaultdict[str, Counter[str]](Counter), Counter[str]()
    for sentence in train:
        for word, tag in zip(sentence.words, sentence.tags or (), strict=True):
            by_word[word][tag] += 1
            of_all[tag] += 1
    tags = {word: counts.most_common(1)[0][0] for word, counts in by_word.items()}
    (other, _), *_ = of_all.most_common(1)
    return [[tags.get(word, other) for word in sentence.words] for sentence in dev]


def shared_words(examples: Sequence[Example]) -> npt.NDArray[np.float64]:
    """Return the share of their different words that the two texts of each row have in common (0 to 1)."""
    return np.array([_share(example.text_a, example.text_b or "") for example in examples])


def _share(*texts: str) -> float:
    a, b = (set(word_pattern().findall(text.lower())) for text in texts)
    return len(a & b) / max(1, len(a | b))


def _by_shared_words(task: TaskData, train: Sequence[Example], rows: Sequence[Example]) -> list[Answer] | None:
    if task.kind != "regression" and (task.kind != "classification" or len(task.labels) != 2):
        return None
    here, there = shared_words(train), shared_words(rows)
    labels = [example.label for example in train]
    if task.kind == "regression":
        gold, off = np.array(labels, np.float64), here - here.mean()
        slope = off @ gold / (off @ off) if off.any() else 0.0
        return [float(value) for value in gold.mean() + slope * (there - here.mean())]
    # Above a threshold one class, below it the other, either way around: sums over the sorted rows count what each would have right.
    order = np.argsort(here, kind="stable")
    ours = np.array([label == task.labels[1] for label in labels])[order]
    starts = np.flatnonzero(np.diff(here[order], prepend=-1.0))
    second_above = np.concatenate([[ours.sum()], ours.sum() - np.cumsum(ours)])[starts] + np.concatenate([[0], np.cumsum(~ours)])[starts]
    right = np.stack([second_above, len(ours) - second_above])
    flipped, at = np.unravel_index(int(right.argmax()), right.shape)
    above = there >= here[order][starts[at]]
    return [task.labels[int(one != flipped)] for one in above]


def _by_word_counts(task: TaskData, train: Sequence[Example], rows: Sequence[Example]) -> list[Answer] | None:
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
    except ImportError:
        return None
    outputs = len(task.labels) if len(task.labels) > 2 else 1
    if len(train) > (most := min(_ROWS, _ANSWERS // outputs)):
        train = [train[i] for i in drawn([example.text_a for example in train], most, _DRAW, strata(train))]
    weigh = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=word_pattern().pattern, max_features=_WEIGHTS // outputs)
    try:
        x = weigh.fit_transform([example.text_a for example in train])
    except ValueError:  # no text has a word
        return None
    asked = weigh.transform([example.text_a for example in rows])
    chooses = np.array([in_validation(example.text_a, _DRAW) for example in train])
    y = _targets(task, train)
    if chooses.all() or not chooses.any():
        return _answers(task, _fitted(task, x, y, _STRENGTHS[0]), asked)

    def right(strength: float) -> float:
        model = _fitted(task, x[~chooses], y[~chooses], strength)
        gold = y[chooses]
        guess = np.asarray(model.predict(x[chooses])).reshape(gold.shape)  # one label alone is predicted without its axis
        return -float(np.mean((guess - gold) ** 2)) if task.kind == "regression" else float(np.mean(guess == gold))

    return _answers(task, _fitted(task, x, y, max(_STRENGTHS, key=right)), asked)


def _targets(task: TaskData, train: Sequence[Example]) -> npt.NDArray[Any]:
    if task.kind == "regression":
        return np.array([example.label for example in train], np.float64)
    if task.kind == "multi_label":
        return np.array([[label in (example.label or ()) for label in task.labels] for example in train], np.int64)  # type: ignore[operator]
    return np.array([task.labels.index(str(example.label)) for example in train], np.int64)


def _fitted(task: TaskData, x: Any, y: npt.NDArray[Any], strength: float) -> Any:
    """Return a fitted model of scikit-learn."""
    from sklearn.dummy import DummyClassifier
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.multiclass import OneVsRestClassifier

    if task.kind == "regression":
        model: Any = Ridge(alpha=1 / strength, solver="sparse_cg")
    else:
        model = LogisticRegression(C=strength, max_iter=200)
    if task.kind == "multi_label":
        model = OneVsRestClassifier(model)
    elif task.kind == "classification" and len(np.unique(y)) == 1:
        model = DummyClassifier()
    with warnings.catch_warnings():
        # A regression that has not quite converged is a baseline, too; a label that all rows have, or none, is no mistake.
        warnings.simplefilter("ignore", UserWarning)
        return model.fit(x, y)


def _answers(task: TaskData, model: Any, asked: Any) -> list[Answer]:
    found = np.asarray(model.predict(asked))
    if task.kind == "regression":
        return [float(value) for value in found]
    if task.kind == "multi_label":
        return [tuple(label for label, has in zip(task.labels, row, strict=True) if has) for row in found.reshape(-1, len(task.labels))]
    return [task.labels[int(number)] for number in found]
