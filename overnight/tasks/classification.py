"""Classification and regression tasks read from their original files: GLUE, SST, IMDB, and one's own table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from overnight.config.schema import Columns
from overnight.errors import ConfigError, DataError
from overnight.tasks import tables
from overnight.tasks.examples import Example, TaskData
from overnight.tasks.imdb import load_imdb
from overnight.tasks.labels import check_labels
from overnight.tasks.tables import OWN_NAMES, Line, load_table, number_of, read_csv, read_text, read_tsv


@dataclass(frozen=True)
class _Glue:
    """How a GLUE task lies in its tsv files (the header names; the classes in the order of google-research/bert)."""

    a: str
    b: str | None
    target: str
    labels: tuple[str, ...]
    metric: str = "accuracy"
    header: tuple[str, ...] = ()
    """Columns of train.tsv and dev.tsv where these have no header line."""
    dev: str = "dev"
    test: str = "test"
    broken: int = 0
    """Lines with another number of fields in the files as published."""


# Dev rows of the first version.
_QNLI_1 = 5732
_BINARY = ("0", "1")
_ENTAILMENT = ("entailment", "not_entailment")
_GLUE = {
    "cola": _Glue("sentence", None, "label", _BINARY, "mcc", header=("source", "label", "mark", "sentence")),
    "sst2": _Glue("sentence", None, "label", _BINARY),
    "mrpc": _Glue("#1 String", "#2 String", "Quality", _BINARY),
    "qqp": _Glue("question1", "question2", "is_duplicate", _BINARY, broken=32),  # github.com/nyu-mll/GLUE-baselines/issues/5
    "stsb": _Glue("sentence1", "sentence2", "score", (), "spearman"),
    "mnli": _Glue(
        "sentence1", "sentence2", "gold_label", ("contradiction", "entailment", "neutral"), dev="dev_matched", test="test_matched"
    ),
    "qnli": _Glue("question", "sentence", "label", _ENTAILMENT),
    "rte": _Glue("sentence1", "sentence2", "label", _ENTAILMENT),
    "wnli": _Glue("sentence1", "sentence2", "label", _BINARY),
}


def kind_of_glue(task: str) -> Literal["classification", "regression", ""]:
    """Return what a task of GLUE is answered with; nothing of another task."""
    if task not in _GLUE:
        return ""
    return "classification" if _GLUE[task].labels else "regression"


def load_task(task: str, path: Path, seed: int = 0, columns: Columns = OWN_NAMES, dev: Path | None = None, share: float = 0.1) -> TaskData:
    """Read a labeled task.

    Args:
        task: cola, sst2, mrpc, qqp, stsb, mnli, qnli, rte, wnli (GLUE), sst, imdb, or csv (one's own table).
        path: the folder with the task's files in their original layout (also the archive of imdb, the file of csv).
        seed: which rows are split off where a task has no dev split.
        columns: of csv, names of its columns.
        dev: of csv, the table to score on.
        share: of csv, the share of its texts that is split off where there is none.

    Raises:
        ConfigError: an unknown task.
        DataError: a file that is missing, a row that cannot be used (file:line).
    """
    path = Path(path)
    if task in _GLUE:
        return _load_mrpc(path) if task == "mrpc" and not (path / "train.tsv").is_file() else _load_glue(task, _GLUE[task], path)
    if task == "sst":
        return _load_sst(path)
    if task == "imdb":
        return load_imdb(path, seed)
    if task == "csv":
        return load_table(path, seed, columns, dev, share)
    raise ConfigError(f"task {task!r}: is not one of {', '.join([*_GLUE, 'sst', 'imdb', 'csv'])}")


def labeled_rows(
    task: str, path: Path, columns: Columns, kind: str, labels: tuple[str, ...], skipped: list[str] | None = None
) -> list[Example]:
    """Read a file of labeled rows that a trained model is scored on.

    Args:
        task: that it was trained on, as of :func:`load_task`, or docnames.
        path: a file of GLUE (.tsv) or SST as published, or a table with the columns of one's own.
        columns: names of the columns of such a table; a file is one where these are named, or its header has `text` or `text_a`.
        kind: of the task: classification, multi_label or regression.
        labels: its classes.
        skipped: receives `file:line: why` for each broken line of QQP as published, which is left out.

    Raises:
        DataError: a file that is missing, a row that cannot be used (file:line), a class that the model does not know.
    """
    if columns != OWN_NAMES:
        return tables.labeled_rows(path, columns, kind, labels)
    if task == "sst" and path.name.endswith("_binary_sent.csv"):
        return _sst_rows(path)
    if task in _GLUE and path.suffix.lower() in (".tsv", ".txt"):
        found = _GLUE[task]
        first = read_text(path).partition("\n")[0].rstrip("\r").split("\t")
        if {"text", "text_a"} & {*first}:
            return tables.labeled_rows(path, columns, kind, labels)
        if {found.a, found.b or found.a} <= set(first) and found.target not in first:
            raise DataError(
                f"{path}: has no labels (column {found.target!r}), as the test files of GLUE; "
                f"score {found.dev}.tsv, or answer these with `overnight predict`"
            )
        header = () if found.a in first else found.header
        examples = list(_glue_examples(read_tsv(path, header, found.broken, skipped), found, path, labeled=True))
        if kind != "regression":
            check_labels(examples, labels, path)
        return examples
    return tables.labeled_rows(path, columns, kind, labels)


def text_columns(task: str) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Return the ways in which a table may name the texts of a task, its own first, and the header of files published without one.

    Args:
        task: as of :func:`load_task`, or squad, docnames or mask.
    """
    single, pair = [("text",), ("text_a",)], [("text_a", "text_b")]
    if task in _GLUE:
        found = _GLUE[task]
        return ([(found.a, found.b), *pair] if found.b else [(found.a,), *single]), found.header
    if task == "csv":
        return [*pair, ("text_a",), ("text",)], ()
    if task in ("squad", "docnames"):
        return [*([("question", "context")] if task == "squad" else []), *pair], ()
    return [*([("sentence",)] if task == "sst" else []), *single], ()


def _load_glue(name: str, task: _Glue, folder: Path) -> TaskData:
    skipped: list[str] = []

    def read(stem: str, labeled: bool = True) -> list[Example]:
        file = _file(folder, f"{stem}.tsv", name)
        header = task.header if labeled else ()
        return list(_glue_examples(read_tsv(file, header, task.broken, skipped), task, file, labeled))

    train, dev = read("train"), read(task.dev)
    # The labels of the test files are not public; without the file there is nothing to hand in, which harms nobody.
    test = read(task.test, labeled=False) if (folder / f"{task.test}.tsv").is_file() else []
    extra: dict[str, list[Example]] = {}
    if name == "mnli":
        if (folder / "dev_mismatched.tsv").is_file():
            extra["dev_mismatched"] = read("dev_mismatched")
        if (folder / "test_mismatched.tsv").is_file():
            extra["test_mismatched"] = read("test_mismatched", labeled=False)
        if diagnostic := read_diagnostic(folder):
            extra["diagnostic"] = diagnostic
    kind: Literal["classification", "regression"] = "classification" if task.labels else "regression"
    notes = [f"left out {line}" for line in skipped]
    if name == "qnli" and len(dev) == _QNLI_1:
        notes.append("this is the first version of QNLI, which the server of GLUE no longer takes; its second has 5,463 dev rows")
    return TaskData(name, kind, task.labels, train, dev, test, task.metric, extra, tuple(notes))


def read_diagnostic(folder: Path) -> list[Example]:
    """Return the diagnostic set of GLUE (AX), which has no rows of its own to train on: it is answered by the model of MNLI; none where it is not there.

    Args:
        folder: of MNLI, in which it lies, or beside which, as `diagnostic/diagnostic.tsv`.

    Raises:
        DataError: a row that cannot be used.
    """
    for file in (folder / "diagnostic.tsv", folder.parent / "diagnostic" / "diagnostic.tsv"):
        if file.is_file():
            return list(_glue_examples(read_tsv(file), _GLUE["mnli"], file, labeled=False))
    return []


def _glue_examples(lines: Iterator[Line], task: _Glue, file: Path, labeled: bool) -> Iterator[Example]:
    seen: set[str] = set()
    for count, (number, cells) in enumerate(lines):
        needed = [c for c in (task.a, task.b, task.target if labeled else None) if c]
        if count == 0 and (absent := [c for c in needed if c not in cells]):
            raise DataError(f"{file}:1: has no column {absent[0]!r} (it has {', '.join(cells)}); give the file in its original layout")
        where = f"{file}:{number}"
        text_b = cells[task.b] if task.b else None
        if not cells[task.a] and not text_b:
            raise DataError(f"{where}: no text in column {task.a!r}")
        label = _glue_label(cells[task.target], task, where) if labeled else None
        # QQP calls it `id`, and repeats none; CoLA, SST-2 and MRPC have no index in their training files.
        row_id = cells.get("index") or cells.get("id") or str(count)
        if row_id in seen:
            raise DataError(f"{where}: id {row_id!r} was used before")
        seen.add(row_id)
        yield Example(row_id, cells[task.a], text_b, label)


def _glue_label(cell: str, task: _Glue, where: str) -> str | float:
    if not task.labels:
        return number_of(cell, where, 0.0, 5.0)
    if cell not in task.labels:
        raise DataError(f"{where}: label {cell!r} is not one of {', '.join(task.labels)}")
    return cell


def _load_mrpc(folder: Path) -> TaskData:
    """Read MRPC from Microsoft's own files: GLUE's dev rows are those that `dev_ids.tsv` lists, and the test rows are labeled.

    No quoting: many sentences hold a single quotation mark, and csv's rules would join their rows.
    """
    task, name = _GLUE["mrpc"], "mrpc"
    source = folder / "msr_paraphrase_train.txt"
    if not source.is_file():
        raise DataError(f"{folder}: has neither train.tsv nor msr_paraphrase_train.txt; task {name!r} needs one of them")
    ids_file = _file(folder, "dev_ids.tsv", name)
    dev_ids = {(c["#1 ID"], c["#2 ID"]) for _, c in read_tsv(ids_file, ("#1 ID", "#2 ID"))}
    lines = list(read_tsv(source))
    pairs = [(c.get("#1 ID", ""), c.get("#2 ID", "")) for _, c in lines]
    missing = dev_ids - set(pairs)
    if missing:
        raise DataError(
            f"{ids_file}: {len(missing)} pairs are not in {source.name}, such as {' '.join(min(missing))}; the two files do not belong together"
        )
    examples = list(_glue_examples(iter(lines), task, source, labeled=True))
    train = [example for example, pair in zip(examples, pairs, strict=True) if pair not in dev_ids]
    dev = [example for example, pair in zip(examples, pairs, strict=True) if pair in dev_ids]
    test_file = folder / "msr_paraphrase_test.txt"
    test = list(_glue_examples(read_tsv(test_file), task, test_file, labeled=True)) if test_file.is_file() else []
    return TaskData(name, "classification", task.labels, train, dev, test, task.metric)


def _load_sst(folder: Path) -> TaskData:
    """Read binary sentence-level SST in the csv files of Radford et al. 2017 (arXiv:1704.01444): label, sentence."""

    train, dev, test = (_sst_rows(_file(folder, f"{split}_binary_sent.csv", "sst")) for split in ("train", "dev", "test"))
    return TaskData("sst", "classification", _BINARY, train, dev, test, "accuracy")


def _sst_rows(file: Path) -> list[Example]:
    examples: list[Example] = []
    for count, (number, cells) in enumerate(read_csv(file)):
        where = f"{file}:{number}"
        if "label" not in cells or "sentence" not in cells:
            raise DataError(f"{where}: the columns are label and sentence, not {', '.join(cells)}")
        if cells["label"] not in _BINARY or not cells["sentence"]:
            raise DataError(f"{where}: label {cells['label']!r} must be 0 or 1, and the sentence not empty")
        examples.append(Example(str(count), cells["sentence"], None, cells["label"]))
    return examples


def _file(folder: Path, name: str, task: str) -> Path:
    if not folder.is_dir():
        raise DataError(f"{folder}: is not a folder; task {task!r} needs the folder that holds {name}")
    if not (folder / name).is_file():
        raise DataError(f"{folder / name}: is missing; task {task!r} cannot be read without it")
    return folder / name
