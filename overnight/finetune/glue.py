"""GLUE as a whole: the files that its server takes, and one table of what was scored beside published numbers."""

from __future__ import annotations

import io
import statistics
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overnight.checkpoint.task_folder import folders_of_tasks, read_facts
from overnight.console import table
from overnight.display import measure, plural, scale_of
from overnight.download.datasets import GLUE_FOLDERS
from overnight.errors import DataError
from overnight.run_dir.atomic import write_whole
from overnight.run_dir.task_results import read_results
from overnight.tasks.tables import read_tsv

# Task and split → the name that the server expects, and the rows of the published file.
_OFFICIAL = {
    ("cola", "test"): ("CoLA", 1063),
    ("sst2", "test"): ("SST-2", 1821),
    ("mrpc", "test"): ("MRPC", 1725),
    ("stsb", "test"): ("STS-B", 1379),
    ("qqp", "test"): ("QQP", 390_965),
    ("mnli", "test"): ("MNLI-m", 9796),
    ("mnli", "test_mismatched"): ("MNLI-mm", 9847),
    ("qnli", "test"): ("QNLI", 5463),
    ("rte", "test"): ("RTE", 3000),
    ("wnli", "test"): ("WNLI", 146),
    ("mnli", "diagnostic"): ("AX", 1104),
}
# Metric, and the scores of BERT-base and BERT-large: on the test sets of GLUE, and the dev sets of SQuAD (Devlin et al. 2018, tables 1 to 3). None was published.
_PUBLISHED: dict[str, tuple[tuple[str, float | None, float | None], ...]] = {
    "cola": (("mcc", 52.1, 60.5),),
    "sst2": (("accuracy", 93.5, 94.9),),
    "mrpc": (("f1", 88.9, 89.3), ("accuracy", None, None)),
    "stsb": (("spearman", 85.8, 86.5), ("pearson", None, None)),
    "qqp": (("f1", 71.2, 72.1), ("accuracy", None, None)),
    "mnli": (("accuracy", 84.6, 86.7), ("accuracy_mismatched", 83.4, 85.9)),
    "qnli": (("accuracy", 90.5, 92.7),),
    "rte": (("accuracy", 66.4, 70.1),),
    "squad": (("f1", 88.5, 90.9), ("exact_match", 80.8, 84.1)),
    "squad 2.0": (("f1", None, 81.9), ("exact_match", None, 78.7)),
}


def task_folders(path: Path) -> tuple[dict[str, Path], list[str]]:
    """Return the tasks of a folder that holds all of GLUE, with the folder of each, and the names of those that cannot be trained on.

    Raises:
        DataError: there is no such folder.
    """
    if not path.is_dir():
        raise DataError(f"{path}: is not a folder; name the one that holds {', '.join(GLUE_FOLDERS.values())}")
    found = {task: path / name for task, name in GLUE_FOLDERS.items()}
    there = {
        task: folder for task, folder in found.items() if any((folder / f).is_file() for f in ("train.tsv", "msr_paraphrase_train.txt"))
    }
    return there, [GLUE_FOLDERS[task] for task in found if task not in there]


def write_submission(run_dir: Path, to: Path) -> list[str]:
    """Write the answers of a run's tasks as the server of GLUE takes them: NAME.tsv with the columns index and prediction, labels as words.

    Args:
        run_dir: the run folder; of several models for a task, that with the best score is taken.
        to: a folder, or a .zip to upload.

    Returns:
        what was written, what is missing or has another number of rows than the published file, and which files of the folder are older.

    Raises:
        DataError: when the run has no task of GLUE with answers for its test rows.
    """
    best: dict[str, tuple[float, Path]] = {}
    for folder in folders_of_tasks(run_dir):
        facts = read_facts(folder)
        rank = (float(facts["result"]["value"]), folder)
        if facts["spec"]["task"] in GLUE_FOLDERS:
            best[facts["spec"]["task"]] = max(best.get(facts["spec"]["task"], rank), rank)
    files: dict[str, bytes] = {}
    said, missing = [], []
    for (task, split), (name, rows) in _OFFICIAL.items():
        source = best[task][1] / f"{split}.tsv" if task in best else None
        if source is None or not source.is_file():
            missing.append(name)
            continue
        answers = [(cells["index"], _official(task, cells["prediction"])) for _, cells in read_tsv(source)]
        files[f"{name}.tsv"] = "".join(f"{index}\t{answer}\n" for index, answer in [("index", "prediction"), *answers]).encode()
        other = "" if len(answers) == rows else f"; the published file has {rows:,}, so the server will refuse it"
        said.append(f"{name}.tsv: {plural(len(answers), 'answer')} of {source.parent.name}{other}")
    if not files:
        raise DataError(
            f"{run_dir}: has no task of GLUE with answers for test rows; run `overnight finetune all --from {run_dir} --path=GLUE`"
        )
    if to.suffix == ".zip":
        write_whole(to, [_zipped(files)])
    else:
        for file, content in files.items():
            write_whole(to / file, [content])
    said += [f"missing: {', '.join(missing)}; the server wants every file"] if missing else []
    old = [] if to.suffix == ".zip" else [to / f"{name}.tsv" for name in missing if (to / f"{name}.tsv").is_file()]
    return [*said, *(f"{file} is of an earlier submission: delete it" for file in old), f"written: {to}"]


def _official(task: str, answer: str) -> str:
    """Return an answer in the form of the sample submission: a score with three decimals from 0 to 5, a label as it is."""
    return f"{min(5.0, max(0.0, float(answer))):.3f}" if task == "stsb" else answer


def _zipped(files: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, content in files.items():
            archive.writestr(zipfile.ZipInfo(file, (1980, 1, 1, 0, 0, 0)), content, zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def suite_table(run_dir: Path, names: list[str]) -> str:
    """Return one table of the newest scores of some tasks, medians over the seeds, with published numbers beside them.

    Args:
        run_dir: the run folder.
        names: of the tasks; one that was not scored yet is left out.
    """
    cells = [["task", "trained on", "metric", "dev", "BERT-base", "BERT-large"]]
    lines = [entry for entry in read_results(run_dir / "tasks.jsonl") if entry["kind"] == "finetune" and entry["init"] == "pretrained"]
    compared: list[tuple[float, float, float]] = []
    chosen = []
    for name in names:
        mine = [entry for entry in lines if entry["name"] == name]
        mine = [entry for entry in mine if entry["config_hash"] == mine[-1]["config_hash"]]
        chosen += [name] if any(entry.get("selected_on") == "dev" for entry in mine) else []
        for place, (metric, value, base, large) in enumerate(_suite_scores(mine)):
            task = mine[-1]["task"]
            first = [name, plural(int(mine[-1]["rows"]), "row")] if place == 0 else ["", ""]
            shown = measure(metric, value, scale_of(task))
            cells.append([*first, metric.replace("_", " "), shown, *("-" if v is None else f"{v:.1f}" for v in (base, large))])
            if task in GLUE_FOLDERS and base is not None and large is not None:
                compared.append((value * scale_of(task), base, large))
    if len(compared) > 1:
        means = (statistics.mean(column) for column in zip(*compared, strict=True))
        cells.append(["average", "", f"{len(compared)} scores", *(f"{mean:.1f}" for mean in means)])
    return (
        table(cells)
        + "\npublished: test sets of GLUE, dev sets of SQuAD, trained on all rows (Devlin et al. 2018); dev: of this run, on its own rows"
        + "; average: of the scores of GLUE that were published" * (len(compared) > 1)
        + (
            f"\nchosen by the dev rows themselves (select_on: dev), so their scores are a little too good: {', '.join(chosen)}"
            if chosen
            else ""
        )
    )


def _suite_scores(entries: list[dict[str, Any]]) -> list[tuple[str, float, float | None, float | None]]:
    """Return of one task each metric of the table, its median over the seeds, and the published scores of BERT-base and BERT-large."""
    if not entries:
        return []
    key = "squad 2.0" if "null_threshold" in entries[-1]["metrics"] else entries[-1]["task"]
    found = []
    for metric, base, large in _PUBLISHED.get(key, ((entries[-1]["metric"], None, None),)):
        values = [entry["metrics"][metric] for entry in entries if metric in entry["metrics"]]
        if values:
            found.append((metric, statistics.median(values), base, large))
    return found
