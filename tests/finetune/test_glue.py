"""All of GLUE by one command, one table beside published numbers, and the files that the server takes."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest

from overnight.cli.main import main
from overnight.config import Run
from overnight.errors import DataError
from overnight.finetune.glue import write_submission
from overnight.run_dir.task_results import append_result
from overnight.tasks import classification
from overnight.tasks.classification import load_task
from tests.finetune.test_mnli import LABELS, write_mnli

FAST = ("--epochs=1", "--global_batch_size=8", "--micro_batch_size=8", "--lr=3e-3", "--seq_len=24")


@pytest.fixture
def run(pretrained: Run, tmp_path: Path) -> Path:
    shutil.copytree(pretrained.run_dir, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def glue(tmp_path: Path) -> Path:
    """Three tasks of GLUE with every quirk of their files, the diagnostic set, and QNLI without a file to train on."""
    folder = tmp_path / "glue"
    for name in ("CoLA", "STS-B", "QNLI", "diagnostic"):
        (folder / name).mkdir(parents=True)
    for name in ("train", "dev"):  # no header, and a quotation mark that is never closed
        rows = [f'gj04\t{i % 2}\t{"*" * (1 - i % 2)}\tThe "object {i} is a class' for i in range(24)]
        (folder / "CoLA" / f"{name}.tsv").write_text("\n".join(rows) + "\n")
        rows = [f"{i}\tobject {i}\tclass {i}\t{i % 6 / 1.2:.3f}" for i in range(24)]
        (folder / "STS-B" / f"{name}.tsv").write_text("\n".join(["index\tsentence1\tsentence2\tscore", *rows]) + "\n")
    (folder / "CoLA" / "test.tsv").write_text("index\tsentence\n0\tAn object.\n1\tClass an.\n")
    (folder / "STS-B" / "test.tsv").write_text("index\tsentence1\tsentence2\n0\tobject\tclass\n")
    (folder / "QNLI" / "dev.tsv").write_text("index\tquestion\tsentence\tlabel\n0\tWhat?\tThat.\tentailment\n")
    write_mnli(folder / "MNLI")
    (folder / "diagnostic" / "diagnostic.tsv").write_text("index\tsentence1\tsentence2\n0\tA cat.\tNo cat.\n1\tNo cat.\tA cat.\n")
    return folder


def test_all_tasks_are_tuned_by_one_command_and_answered_as_the_server_wants(
    run: Path, glue: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["finetune", "all", "--from", str(run), f"--path={glue}", *FAST]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "left out, without a file to train on: SST-2, MRPC, QQP, QNLI, RTE, WNLI" in out
    results = {entry["name"]: entry for entry in map(json.loads, (run / "tasks.jsonl").read_text().splitlines())}
    shown = [line.split() for line in out.splitlines() if line.startswith(("cola ", "stsb ", "mnli ", "   "))]
    mismatched = f"{100 * results['mnli']['metrics']['accuracy_mismatched']:.1f}"
    assert ["cola", "24", "rows", "mcc", f"{100 * results['cola']['value']:.1f}", "52.1", "60.5"] in shown
    assert ["stsb", "24", "rows", "spearman", f"{100 * results['stsb']['value']:.1f}", "85.8", "86.5"] in shown
    assert ["accuracy", "mismatched", mismatched, "%", "83.4", "85.9"] in shown
    assert f"overnight submission --from {run} --to glue.zip" in out
    assert main(words) == 0
    kinds = [json.loads(line)["kind"] for line in (run / "tasks.jsonl").read_text().splitlines()]
    assert kinds == ["baseline", "finetune"] * 3, "done already, and of each task one rule without a network"

    assert main(["submission", "--from", str(run), "--to", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "MNLI-mm.tsv: 3 answers of mnli; the published file has 9,847, so the server will refuse it" in said
    assert "missing: SST-2, MRPC, QQP, QNLI, RTE, WNLI; the server wants every file" in said
    files = {path.name: [line.split("\t") for line in path.read_text().splitlines()] for path in (tmp_path / "out").iterdir()}
    assert {name: len(rows) - 1 for name, rows in files.items()} == {
        "CoLA.tsv": 2, "STS-B.tsv": 1, "MNLI-m.tsv": 3, "MNLI-mm.tsv": 3, "AX.tsv": 2,
    }  # fmt: skip
    assert all(
        rows[0] == ["index", "prediction"] and [row[0] for row in rows[1:]] == list("012"[: len(rows) - 1]) for rows in files.values()
    )
    assert {row[1] for name in ("MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv") for row in files[name][1:]} <= set(LABELS)
    assert {row[1] for row in files["CoLA.tsv"][1:]} <= {"0", "1"} and 0 <= float(files["STS-B.tsv"][1][1]) <= 5
    assert len(files["STS-B.tsv"][1][1]) == 5  # three decimals, as in the sample

    write_submission(run, tmp_path / "glue.zip")
    with zipfile.ZipFile(tmp_path / "glue.zip") as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == {
            path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()
        }
    before = (tmp_path / "glue.zip").read_bytes()
    said = write_submission(run, tmp_path / "glue.zip")
    assert (tmp_path / "glue.zip").read_bytes() == before

    assert not any("earlier submission" in line for line in (*said, *write_submission(run, tmp_path / "out")))
    shutil.rmtree(run / "finetune" / "cola")
    said = write_submission(run, tmp_path / "out")
    assert [line for line in said if "earlier" in line] == [f"{tmp_path / 'out' / 'CoLA.tsv'} is of an earlier submission: delete it"]
    assert (tmp_path / "out" / "CoLA.tsv").is_file() and not any("earlier" in line for line in write_submission(run, tmp_path / "glue.zip"))


def test_a_task_that_cannot_be_read_is_left_out_and_the_others_are_tuned(run: Path, glue: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(glue / "MNLI")
    whole = (glue / "CoLA" / "train.tsv").read_text()
    (glue / "CoLA" / "train.tsv").write_text(whole + "one cell\n")
    words = ["finetune", "all", "--from", str(run), f"--path={glue}", *FAST]
    assert main(words) == 1
    said = capsys.readouterr()
    assert "cola: is left out: " in said.err and "train.tsv:25: 1 tab-separated fields where 4 belong" in said.err
    assert "1 of 2 tasks could not be fine-tuned: cola; the errors are above" in said.err
    rows = said.out.partition("BERT-large")[2].splitlines()
    assert [line.split()[0] for line in rows if line.startswith(("cola ", "stsb "))] == ["stsb"]
    (glue / "CoLA" / "train.tsv").write_text(whole)
    assert main(words) == 0
    assert "stsb: done already" in capsys.readouterr().out
    (glue / "CoLA" / "train.tsv").write_text(f"{whole}one cell\n")
    assert main(words) == 1
    rows = capsys.readouterr().out.partition("BERT-large")[2].splitlines()
    assert [line.split()[0] for line in rows if line.startswith(("cola ", "stsb "))] == ["stsb"], "what cola had is of other rows"


def test_what_keeps_every_task_from_being_tuned_is_said_once(run: Path, glue: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "checkpoints")
    assert main(["finetune", "all", "--from", str(run), f"--path={glue}", *FAST]) == 1
    assert capsys.readouterr().err.count("no checkpoint to fine-tune") == 2  # of the first task, and as the reason why all is over


def test_a_run_without_tasks_of_glue_says_what_to_do(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match=r"has no task of GLUE with answers for test rows; run `overnight finetune all --from"):
        write_submission(run, tmp_path / "out")
    assert main(["finetune", "all", "--from", str(run), f"--path={tmp_path}"]) == 2
    assert "holds none of the folders CoLA, SST-2, MRPC" in capsys.readouterr().err
    assert main(["finetune", "all", "--from", str(run), f"--path={tmp_path / 'nowhere'}"]) == 1
    assert "nowhere: is not a folder; name the one that holds CoLA" in capsys.readouterr().err


def test_the_table_has_medians_of_the_newest_settings_only(tmp_path: Path) -> None:
    from overnight.finetune.glue import suite_table

    def add(name: str, task: str, seed: int, tag: str, init: str = "pretrained", **metrics: float) -> None:
        entry = {"kind": "finetune", "name": name, "task": task, "seed": seed, "init": init, "rows": 1500, "config_hash": tag}
        entry |= {"selected_on": "dev" if tag in ("old", "x") else "train"}
        append_result(
            tmp_path / "tasks.jsonl", {**entry, "metric": next(iter(metrics)), "value": next(iter(metrics.values())), "metrics": metrics}
        )

    add("mine", "mrpc", 0, "old", accuracy=0.1, f1=0.1)
    for seed, f1 in enumerate((0.7, 0.9, 0.8)):
        add("mine", "mrpc", seed, "new", accuracy=0.5, f1=f1)
    add("mine", "mrpc", 0, "new", "random", accuracy=0.0, f1=0.0)
    add("q2", "squad", 0, "x", f1=55.5, exact_match=50.0, null_threshold=1.0)
    add("own", "csv", 0, "y", accuracy=0.25)
    said = suite_table(tmp_path, ["mine", "q2", "own", "never"])
    assert said.endswith("\nchosen by the dev rows themselves (select_on: dev), so their scores are a little too good: q2")
    rows = [line.split() for line in said.splitlines()]
    assert ["mine", "1,500", "rows", "f1", "80.0", "%", "88.9", "89.3"] in rows and ["accuracy", "50.0", "%", "-", "-"] in rows
    assert ["q2", "1,500", "rows", "f1", "55.5", "%", "-", "81.9"] in rows and [
        "own",
        "1,500",
        "rows",
        "accuracy",
        "25.0",
        "%",
        "-",
        "-",
    ] in rows
    assert not any(row[:1] in (["never"], ["average"]) for row in rows)


def test_the_average_of_nine_scores_is_that_of_the_paper(tmp_path: Path) -> None:
    from overnight.finetune.glue import _PUBLISHED, suite_table

    for name, published in _PUBLISHED.items():
        if "squad" not in name:
            metrics = {metric: (base or 0.0) / 100 for metric, base, _ in published}
            entry = {"kind": "finetune", "name": name, "task": name, "seed": 0, "init": "pretrained", "rows": 10, "config_hash": "x"}
            append_result(tmp_path / "tasks.jsonl", {**entry, "metric": published[0][0], "value": 0.0, "metrics": metrics})
    rows = [line.split() for line in suite_table(tmp_path, list(_PUBLISHED)).splitlines()]
    # Devlin et al. 2018, table 1, leaves WNLI out, too.
    assert ["average", "9", "scores", "79.6", "79.6", "82.1"] in rows


def test_the_first_version_of_qnli_is_told_from_the_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "".join(f"{i}\tWhat?\tThat {i}.\tentailment\n" for i in range(4))
    for name in ("train", "dev"):
        (tmp_path / f"{name}.tsv").write_text("index\tquestion\tsentence\tlabel\n" + rows)
    assert load_task("qnli", tmp_path).notes == ()
    monkeypatch.setattr(classification, "_QNLI_1", 4)
    assert "first version of QNLI, which the server of GLUE no longer takes" in load_task("qnli", tmp_path).notes[0]


def test_the_real_diagnostic_set_is_read_beside_mnli(data: Path, tmp_path: Path) -> None:
    write_mnli(tmp_path / "MNLI")
    shutil.copytree(data / "glue" / "diagnostic", tmp_path / "diagnostic")
    rows = load_task("mnli", tmp_path / "MNLI").extra["diagnostic"]
    assert len(rows) == 1104 and (rows[0].id, rows[0].text_a, rows[0].label) == ("0", "The cat sat on the mat.", None)
