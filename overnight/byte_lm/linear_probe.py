"""A linear probe: a logistic regression on the features of a frozen byte model, its score, and the unit that says most.

Compared with it are the same network with random weights, and the counts of byte n-grams, scored by the same classifier on the same rows.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from overnight.batches.order import key
from overnight.byte_lm.classify import classifier_path, read_classifier
from overnight.byte_lm.features import extract_features
from overnight.byte_lm.logistic import Classifier, Labels, best_unit, check_installed, fit, histogram, threshold
from overnight.byte_lm.ngrams import LONGEST, ngram_counts, tf_idf
from overnight.config import ByteRun, LinearProbe, environment_path
from overnight.console import Line
from overnight.corpus.bytes import document_bytes
from overnight.display import duration, measures
from overnight.engine.precision import DTYPES
from overnight.engine.training_run import set_up_machine
from overnight.errors import DataError
from overnight.interop.byte_models import load_byte_model, weights_digest, weights_name
from overnight.models.bytes import ByteModel, byte_model
from overnight.run_dir.atomic import write_json
from overnight.run_dir.lock import run_lock
from overnight.run_dir.task_results import append_result, read_results, results_of
from overnight.state_files import sealed
from overnight.tasks.classification import load_task
from overnight.tasks.data_hash import data_hash, hashed_paths
from overnight.tasks.examples import Example, check_draw, drawn, drawn_note, in_validation

_INIT = 1
NGRAMS = f"byte n-grams (1 to {LONGEST})"


@dataclass(frozen=True)
class ProbeTask:
    """The texts of a task that are trained or scored on, as the model reads them, with their classes."""

    labels: tuple[str, ...]
    documents: list[bytes]
    classes: Labels
    parts: dict[int, dict[str, np.ndarray]]
    """Seed → rows of `train`, `valid` and `test`."""
    notes: tuple[str, ...]


def read_probe_task(spec: LinearProbe) -> ProbeTask:
    """Read a task.

    SST comes with its three parts. Of IMDB's training reviews a tenth is for validation. A table of one's own is scored on its labeled
    test rows; without them on its dev rows, and a tenth of its training rows is for validation.

    Raises:
        DataError: when a file is missing, or the rows are not single texts of two classes or more.
    """
    path = environment_path(spec.path, "linear_probe.path")
    task = load_task(spec.task, path, columns=spec.columns)
    if task.kind != "classification" or any(example.text_b for example in task.train):
        raise DataError(f"{path}: a linear probe needs single texts (`text`) with classes (`label`); pairs and scores are for finetune")
    labeled = bool(task.test) and all(example.label is not None for example in task.test)
    fixed = labeled and not task.is_dev_made
    # Rows of which a tenth, by a hash of the text and the seed, is for validation; where there is one already, that.
    pool = task.train if fixed or not labeled else [*task.train, *task.dev]
    valid, test = (task.dev if fixed else []), (task.test if labeled else task.dev)
    examples: Sequence[Example] = [*pool, *valid, *test]
    number = {label: i for i, label in enumerate(task.labels)}

    def part(seed: int) -> dict[str, np.ndarray]:
        first, second = len(pool), len(pool) + len(valid)
        inside = np.array([bool(not fixed and in_validation(example.text_a, seed)) for example in pool])
        train = np.flatnonzero(~inside)
        if spec.max_train_examples and spec.max_train_examples < len(train):
            texts, labels = [pool[i].text_a for i in train], [str(pool[i].label) for i in train]
            check_draw(spec.max_train_examples, labels)
            train = train[drawn(texts, spec.max_train_examples, seed, labels)]
        return {
            "train": train,
            "valid": np.arange(first, second) if fixed else np.flatnonzero(inside),
            "test": np.arange(second, len(examples)),
        }

    classes = np.array([number[str(example.label)] for example in examples], np.int64)
    parts = {seed: part(seed) for seed in spec.seeds}
    for found in parts.values():
        if not len(found["valid"]) or not len(found["test"]) or len(np.unique(classes[found["train"]])) < len(task.labels):
            raise DataError(
                f"{path}: {len(pool)} training rows are too few to train on every class and set a tenth apart; give dev and test files"
            )
    scored_on = "its test rows" if labeled else f"{len(test)} rows that were not trained on, since not every test row has a label"
    notes: tuple[str, ...] = (
        ()
        if spec.task == "sst"
        else (f"scored on {scored_on}{'' if fixed else '; validation is a tenth of the training rows, by a hash'}",)
    )
    if 0 < spec.max_train_examples == len(parts[spec.seeds[0]]["train"]):
        notes += (drawn_note(spec.max_train_examples, len(pool)) + ", others for each seed",)
    used = np.unique(np.concatenate([index for found in parts.values() for index in found.values()]))
    parts = {seed: {name: np.searchsorted(used, index) for name, index in found.items()} for seed, found in parts.items()}
    return ProbeTask(task.labels, [document_bytes(examples[i].text_a) for i in used], classes[used], parts, notes)


def linear_probe(run: ByteRun, name: str, line: Line | None = None) -> list[dict[str, Any]]:
    """Evaluate a run's features on a task with every seed, compared with the network with random weights and the n-grams.

    What is done already, with the same settings from the same checkpoint on the same rows, is not done again. The regression of the best seed by
    validation goes to `linear_probe/NAME/` in the run folder.

    Args:
        run: settings of a run folder or of an exported model, as :func:`overnight.config.stored_run` gives them.
        name: key in `run.linear_probe`.

    Returns:
        the lines of `tasks.jsonl` of this task.

    Raises:
        ConfigError, DataError: when the model has no state to describe a text by, or the task cannot be read.
        UserError: when another process is writing the folder, or scikit-learn or scipy is not installed.
    """
    spec, device = run.linear_probe[name], set_up_machine(run)
    there = data_hash(environment_path(spec.path, f"linear_probe.{name}.path"))
    data = there or _kept_fact(run.run_dir, name, "data_hash")
    kept = read_classifier(run.run_dir, name) if classifier_path(run.run_dir, name).exists() else None
    hashed = replace(spec, **hashed_paths({"path": spec.path}, there, kept))
    facts = json.dumps([asdict(hashed) | {"seeds": []}, weights_name(run.run_dir), weights_digest(run.run_dir), run.precision, data])
    config_hash = hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()
    with run_lock(run.run_dir, movable=False), line or Line() as line:
        log = run.run_dir / "tasks.jsonl"
        mine = results_of(log, name, config_hash)
        # The folder holds one classifier: what was done with other settings since is not what it holds, so all is done again.
        if any(e.get("init") == "pretrained" for e in mine) and _kept_fact(run.run_dir, name, "config_hash") != config_hash:
            mine = []
        missing = [
            (init, seed)
            for init in ("pretrained", "random")
            for seed in spec.seeds
            if (init, seed) not in {(e.get("init"), e.get("seed")) for e in mine}
        ]
        baselines = [e for e in read_results(log) if (e["kind"], e["name"], e.get("config_hash")) == ("baseline", name, config_hash)]
        scores = baselines[-1].get("values", {}) if baselines else {}
        uncompared = [seed for seed in spec.seeds if str(seed) not in scores]
        if not missing and not uncompared:
            line.print(f"{name}: done already")
            return mine
        check_installed()
        model, settings = load_byte_model(run.run_dir)  # before n-grams, of which a large task needs minutes
        task = read_probe_task(spec)
        for note in task.notes:
            line.print(f"{name}: {note}")
        if uncompared:
            counts = ngram_counts(task.documents)
            scores = scores | {str(seed): _ngram_score(task, counts, seed) for seed in uncompared}
            baseline: dict[str, Any] = {
                "kind": "baseline",
                "name": name,
                "config_hash": config_hash,
                "method": NGRAMS,
                "metric": "accuracy",
            }
            baseline |= {"value": statistics.median(scores.values()), "values": scores}
            mine.append(append_result(log, baseline))
            line.print(f"{name}: {NGRAMS}  {measures({'accuracy': baseline['value']})}")
        probe = _Probe(name, spec, task, DTYPES[run.precision], line)
        features = None
        for init, seed in missing:
            start = time.perf_counter()
            if init == "random":
                torch.manual_seed(key(seed, _INIT) >> 1)
                model, features = byte_model(settings), None
            if features is None:
                features = probe.features(model.to(device), init, seed)
            found, entry = probe.fit(features, settings.hidden_size, seed)
            entry |= {
                "init": init,
                "checkpoint": weights_name(run.run_dir),
                "config_hash": config_hash,
                "data_hash": data,
                "seconds": round(time.perf_counter() - start, 2),
            }
            if init == "pretrained":
                _keep(run.run_dir, hashed, task, found, entry, mine)
            mine.append(append_result(log, entry))
            line.print(f"{name}: seed {seed} {init}  " + measures(entry["metrics"]))
    return mine


@dataclass(frozen=True)
class _Probe:
    """What is the same for every network that is scored on a task."""

    name: str
    spec: LinearProbe
    task: ProbeTask
    dtype: torch.dtype
    line: Line

    def features(self, model: ByteModel, init: str, seed: int) -> np.ndarray:
        """Return features of all documents of the task."""
        start, total = time.perf_counter(), sum(map(len, self.task.documents))

        def report_progress(documents: int, size: int) -> None:
            rate = size / (time.perf_counter() - start)
            self.line.update(
                f"{self.name} {init} seed {seed}  {documents:,} texts read  {rate:,.0f} bytes/s  left {duration((total - size) / rate)}"
            )

        return extract_features(model, self.task.documents, self.spec.features, self.dtype, report_progress)

    def fit(self, features: np.ndarray, width: int, seed: int) -> tuple[Classifier, dict[str, Any]]:
        """Return the regression on all features, and its line of `tasks.jsonl`."""
        rows, classes = self.task.parts[seed], self.task.classes
        part = {name: (features[index], classes[index]) for name, index in rows.items()}
        found = fit(part["train"], part["valid"], len(self.task.labels), seed)
        accuracy = found.accuracy(*part["test"])
        entry: dict[str, Any] = {"kind": "linear_probe", "name": self.name, "task": self.spec.task, "seed": seed, "metric": "accuracy"}
        entry |= {"value": accuracy, "metrics": {"accuracy": accuracy, "validation accuracy": found.valid}, "rows": len(rows["train"])}
        entry |= {"features": self.spec.features, "c": found.strength, "nonzero": found.used}
        if len(self.task.labels) == 2 and found.used:
            entry["unit"], scores = self.unit(part, best_unit(found), width, seed)
            entry["metrics"] |= scores
        return found, entry

    def unit(
        self, part: dict[str, tuple[np.ndarray, Labels]], column: int, width: int, seed: int
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Return a unit in words and its histogram on the test rows, with what it knows alone and what all others know without it."""
        (train, right), (test, truth) = part["train"], part["test"]
        split_at, upward = threshold(train[:, column], right)
        others = {name: (np.delete(x, column, 1), y) for name, (x, y) in part.items()}
        rest = fit(others["train"], others["valid"], 2, seed)
        scores = {
            "accuracy of the unit alone": float(np.mean(((test[:, column] > split_at) == upward) == (truth == 1))),
            "accuracy without it": rest.accuracy(*others["test"]),
        }
        unit = {"of": self.spec.features.split("+")[column // width], "number": column % width, "threshold": split_at}
        unit |= {"above": self.task.labels[int(upward)], "histogram": histogram(test[:, column], truth, self.task.labels)}
        return unit, scores


def _ngram_score(task: ProbeTask, counts: Any, seed: int) -> float:
    rows, classes = task.parts[seed], task.classes
    train, (valid, test) = tf_idf(counts[rows["train"]], [counts[rows["valid"]], counts[rows["test"]]], classes[rows["train"]])
    found = fit((train, classes[rows["train"]]), (valid, classes[rows["valid"]]), len(task.labels), seed)
    return found.accuracy(test, classes[rows["test"]])


def _keep(
    run_dir: Path, spec: LinearProbe, task: ProbeTask, found: Classifier, entry: dict[str, Any], before: list[dict[str, Any]]
) -> None:
    """Write the regression, unless one of an earlier seed is better by validation."""
    valid = [e["metrics"]["validation accuracy"] for e in before if e.get("init") == "pretrained"]
    if not valid or entry["metrics"]["validation accuracy"] > max(valid):
        weights = {"weights": found.weights_KF.tolist(), "bias": found.bias_K.tolist()}
        model = {"checkpoint": weights_name(run_dir), "model": weights_digest(run_dir)}
        facts = {"spec": asdict(spec), "labels": task.labels, **model, "result": entry, **weights}
        write_json(classifier_path(run_dir, entry["name"]), sealed(facts))


def _kept_fact(run_dir: Path, name: str, key: str) -> Any:
    """Return what the result of the classifier of a task says; None where there is none."""
    return read_classifier(run_dir, name)["result"].get(key) if classifier_path(run_dir, name).exists() else None


def probe_results(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a folder's linear probes of the pretrained model, oldest first."""
    return [line for line in read_results(folder / "tasks.jsonl") if line["kind"] == "linear_probe" and line.get("init") == "pretrained"]
