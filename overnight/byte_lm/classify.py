"""Answers of a byte model for new text: its features, and the regression that `overnight linear-probe` fitted to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from overnight.byte_lm.features import extract_features
from overnight.byte_lm.logistic import Classifier
from overnight.config import Run
from overnight.corpus.bytes import document_bytes
from overnight.engine.precision import DTYPES
from overnight.engine.training_run import set_up_machine
from overnight.errors import ConfigError, DataError
from overnight.interop.byte_models import load_byte_model, weights_digest, weights_name, without_weight_norm
from overnight.state_files import fitted, read_mapping
from overnight.tasks.examples import Example
from overnight.tasks.inputs import answered, read_input
from overnight.tasks.line_fields import example_of


def classify_file(run: Run, name: str, path: str, form: str = "") -> Iterator[dict[str, Any]]:
    """Answer the rows of a file one by one, in order, by the classifier of a linear probe; one that cannot be used is answered by `id` and `error`.

    Args:
        run: settings of a run folder or of an exported model, as :func:`overnight.config.stored_run` gives them.
        name: a task of a linear probe of it.
        path: .csv, .tsv, .jsonl and .parquet are tables, with the column of the task; any other file, and standard input (`-`), is lines: JSON
            objects (`text`), or plain text, of which a tab is a part. Empty ones are skipped.
        form: of the file, as of :func:`overnight.tasks.inputs.read_input`.

    Raises:
        ConfigError: for `mask`, which is for BERT.
        DataError: when there is no such classifier, it is of other weights, or the file cannot be read.
    """
    facts = _facts(run.run_dir, name)
    features, labels = facts["spec"]["features"], facts["labels"]
    device = set_up_machine(run)
    model, settings = load_byte_model(run.run_dir)
    model = without_weight_norm(model, settings).to(device)
    weights_KF, bias_K = np.array(facts["weights"], np.float64), np.array(facts["bias"], np.float64)
    classifier = Classifier(1.0, weights_KF, bias_K, 0.0)
    wanted = len(features.split("+")) * settings.hidden_size
    if weights_KF.shape != (1 if len(labels) == 2 else len(labels), wanted):
        raise DataError(
            f"{classifier_path(run.run_dir, name)}: has weights {weights_KF.shape}, the model has {wanted} features; {_again(run.run_dir, name)}"
        )

    def read(number: int, fields: dict[str, Any]) -> Example:
        row = example_of(number, fields)
        if row.text_b is not None:
            raise DataError(f"line {number}: is a pair; the classifier was fitted to single texts")
        return row

    def answer(rows: list[Example]) -> Iterator[dict[str, Any]]:
        found = extract_features(model, [document_bytes(row.text_a) for row in rows], features, DTYPES[run.precision])
        # Not the largest probability: of scores above 37 all are 1.
        for row, best, p in zip(rows, classifier.predict(found), _probabilities(found @ weights_KF.T + bias_K), strict=True):
            shares = {label: float(f"{value:.5g}") for label, value in zip(labels, p, strict=True)}
            yield {"id": row.id, "label": labels[int(best)], "probabilities": shares}

    yield from answered(read_input(path, facts["spec"], form), read, answer, keep_going=True, pairs=False)


def _probabilities(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return probabilities (n, classes) from scores (n, 1), of the second of two classes, or (n, classes), of each against the rest."""
    p = 1 / (1 + np.exp(-np.clip(scores, -500, 500)))
    return np.hstack([1 - p, p]) if scores.shape[1] == 1 else p / p.sum(1, keepdims=True)


def classifier_path(folder: Path, name: str) -> Path:
    """Return where the linear probe of a task leaves its classifier."""
    return folder / "linear_probe" / name / "classifier.json"


@dataclass(frozen=True)
class _Spec:
    task: str
    features: str
    columns: dict[str, str | None] | None = None


@dataclass(frozen=True)
class _Facts:
    """What must be in `classifier.json`; there may be more."""

    spec: _Spec
    labels: list[str]
    weights: list[list[float]]
    bias: list[float]
    result: dict[str, Any]
    checkpoint: str
    """Name of the weights whose features it was fitted to."""
    model: str = ""
    """Their checksum; classifiers of earlier versions have none."""


def read_classifier(folder: Path, name: str) -> dict[str, Any]:
    """Read the `classifier.json` of a task.

    Raises:
        DataError: when it is missing, damaged, changed since it was written, or lacks what a classifier needs.
    """
    path = classifier_path(folder, name)
    again = f"delete {path.parent} and {_again(folder, name)}"
    tree = read_mapping(path, again)
    found: _Facts = fitted(tree, _Facts, str(path), again)
    if len({len(row) for row in found.weights}) != 1 or len(found.weights) != len(found.bias):
        raise DataError(f"{path}: weights and bias are not of one regression; {again}")
    return tree


def _facts(folder: Path, name: str) -> dict[str, Any]:
    """Return what `classifier.json` holds of a task, after a check that it is of the weights that the folder holds now."""
    if name == "mask":
        raise ConfigError(f"mask: a byte model has no [MASK] to fill in; `overnight generate --from {folder}` continues a text")
    path = classifier_path(folder, name)
    if not path.exists():
        have = ", ".join(sorted(p.parent.name for p in folder.glob("linear_probe/*/classifier.json"))) or "none"
        raise DataError(
            f"{folder} has no classifier {name!r} (it has: {have}); run `overnight linear-probe {name} --from {folder} --path=FOLDER` first, "
            "for sst, imdb or csv"
        )
    facts = read_classifier(folder, name)
    newest = weights_name(folder)
    if facts["checkpoint"] != newest:
        raise DataError(
            f"{path}: was fitted to the features of {facts['checkpoint']}, and the newest weights are {newest}; {_again(folder, name)}"
        )
    if facts.get("model") not in (None, weights_digest(folder)):
        raise DataError(f"{path}: was fitted to the features of other weights than {newest} has now; {_again(folder, name)}")
    return facts


def _again(folder: Path, name: str) -> str:
    return f"run `overnight linear-probe {name} --from {folder}` again, with the same settings as before"
