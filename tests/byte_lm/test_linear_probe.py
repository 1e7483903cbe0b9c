"""LinearProbe: splits that never mix, baselines on the same rows, the unit that says most, nothing done twice, and all of it in the report."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import regression
from overnight.byte_lm import linear_probe as module
from overnight.byte_lm.generate import Unit
from overnight.byte_lm.heatmap import chosen_unit
from overnight.byte_lm.linear_probe import NGRAMS, linear_probe, read_probe_task
from overnight.byte_lm.logistic import STRENGTHS
from overnight.config import LinearProbe, Run, stored_run
from overnight.console import Line
from overnight.corpus.bytes import document_bytes
from overnight.errors import ConfigError, DataError, UserError
from overnight.interop.byte_models import import_byte_model
from overnight.report.page import write_report
from overnight.report.summary import summarize, summary_text
from overnight.run_dir.lock import run_lock
from overnight.run_dir.task_results import read_results
from tests.interop.byte_formula import random_arrays, write_openai

pytest.importorskip("sklearn")
WIDTH = 24


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in which cell 4 counts the exclamation marks: what says the class in the tables below."""
    folder = tmp_path_factory.mktemp("imported")
    arrays = random_arrays(WIDTH, 6)
    arrays["embedding"][:, 0] = 0
    arrays["embedding"][ord("!"), 0] = 20  # the only byte that speaks in this direction
    i, f, o, g = (WIDTH * at + 4 for at in range(4))
    arrays["w_x"][[i, f, o, g]] = arrays["w_h"][[i, f, o, g]] = 0
    arrays["w_x"][[i, g], 0] = 1
    arrays["b"][[i, f, o, g]] = (-6, 6, 0, 0)
    for name in ("x", "h", "mx", "mh"):
        arrays[f"g_{name}"] = np.linalg.norm(arrays[f"w_{name}"], axis=1)
        arrays[f"w_{name}"][arrays[f"g_{name}"] == 0, 1] = 1  # a row of zeros has no direction
    import_byte_model(write_openai(folder / "openai", arrays), folder / "ours")
    return folder / "ours"


def sentences(rows: int, seed: int) -> list[tuple[str, str]]:
    chance = np.random.default_rng(seed)
    found = []
    for _ in range(rows):
        words = [["film", "plot", "a", "the", "was", "so", "it"][k] for k in chance.integers(0, 7, 6)]
        loud = bool(chance.integers(0, 2))
        if loud:
            words[int(chance.integers(0, 6))] += "!"
        found.append((" ".join(words) + f" {chance.integers(1000)}", "yes" if loud else "no"))
    return found


def table(path: Path, rows: list[tuple[str, str]]) -> None:
    path.write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows), encoding="utf-8")


@pytest.fixture
def folder(imported: Path, tmp_path: Path) -> Path:
    """A copy of the model, beside a task with its three parts."""
    for name, rows, seed in (("train", 120, 1), ("dev", 60, 2), ("test", 80, 3)):
        (tmp_path / "task").mkdir(exist_ok=True)
        table(tmp_path / "task" / f"{name}.csv", sentences(rows, seed))
    shutil.copytree(imported, tmp_path / "run")
    return tmp_path / "run"


def settings(folder: Path, *overrides: str) -> Run:
    return stored_run(
        folder,
        [f"linear_probe.mine.{text}" for text in ("task=csv", f"path={folder.parent / 'task'}", *overrides)]
        + ["compute.device=cpu", "compute.threads=1"],
    )


def go(folder: Path, *overrides: str) -> list[dict[str, Any]]:
    return linear_probe(settings(folder, *overrides), "mine", Line(io.StringIO()))


def test_a_folder_that_another_job_writes_is_waited_for_or_that_is_stopped(folder: Path) -> None:
    with run_lock(folder), pytest.raises(UserError, match=r"wait until it ends, or stop it$"):
        go(folder)


def test_the_planted_unit_is_found_and_knows_alone_what_the_others_do_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[np.ndarray] = []
    real = module.extract_features
    monkeypatch.setattr(module, "extract_features", lambda *args: (made.append(real(*args)), made[-1])[1])
    lines = go(folder, "seeds=[0, 1]")
    assert [(e["kind"], e.get("init"), e.get("seed")) for e in lines] == [
        ("baseline", None, None), ("linear_probe", "pretrained", 0), ("linear_probe", "pretrained", 1), ("linear_probe", "random", 0), ("linear_probe", "random", 1),
    ]  # fmt: skip
    first = lines[1]
    assert first["unit"]["of"] == "cell" and first["unit"]["number"] == 4 and first["unit"]["above"] == "yes"
    assert first["metrics"]["accuracy of the unit alone"] == 1.0
    assert first["metrics"]["accuracy without it"] < 1.0
    assert first["value"] == first["metrics"]["accuracy"] > 0.95 and first["rows"] == 120 and 1 <= first["nonzero"] <= WIDTH
    assert sum(map(sum, first["unit"]["histogram"]["counts"].values())) == 80
    assert lines[0]["method"] == NGRAMS and lines[0]["value"] > 0.9  # a single byte says it
    # One reading with the pretrained weights, and one a seed with random ones.
    assert len(made) == 3 and not np.allclose(made[1], made[2]) and not np.allclose(made[0], made[1])
    assert read_results(folder / "tasks.jsonl") == lines
    kept = json.loads((folder / "linear_probe" / "mine" / "classifier.json").read_text())
    assert kept["labels"] == ["no", "yes"] and len(kept["weights"][0]) == WIDTH and kept["result"]["seed"] == 0
    assert chosen_unit(folder, "best") == Unit(4)


def test_nothing_is_done_twice_and_other_settings_are_done_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once = go(folder)
    monkeypatch.setattr(module, "extract_features", None)
    assert go(folder) == once
    monkeypatch.undo()
    assert [(e["init"], e["seed"]) for e in go(folder, "seeds=[0, 3]") if e["kind"] == "linear_probe"] == [
        ("pretrained", 0), ("random", 0), ("pretrained", 3), ("random", 3),
    ]  # fmt: skip
    assert {e["features"] for e in go(folder, "features=mean") if e["kind"] == "linear_probe"} == {"mean"}


def test_the_n_grams_are_compared_on_the_seeds_of_the_network_also_where_some_are_added(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, few = folder.parent / "task", "max_train_examples=12"
    chance = np.random.default_rng(0)
    for name in ("train", "dev", "test"):  # one row in three has any label
        rows = [(text, str(chance.choice(["yes", "no"])) if chance.random() < 0.33 else label) for text, label in sentences(120, len(name))]
        table(task / f"{name}.csv", rows)

    def baselines(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [e for e in found if e["kind"] == "baseline"]

    whole = baselines(go(shutil.copytree(folder, folder.parent / "whole"), few, "seeds=[0, 1, 2]"))
    assert len(whole) == 1 and len(set(whole[0]["values"].values())) > 1
    go(folder, few)
    scored: list[int] = []
    real = module._ngram_score
    monkeypatch.setattr(module, "_ngram_score", lambda task, counts, seed: (scored.append(seed), real(task, counts, seed))[1])
    assert baselines(go(folder, few, "seeds=[0, 1, 2]"))[1:] == whole and scored == [1, 2]
    # Lines of before, which do not say of which seeds they are.
    log = folder / "tasks.jsonl"
    before = [{k: v for k, v in e.items() if k != "values"} for e in read_results(log)]
    log.unlink()
    for entry in before:
        module.append_result(log, entry)
    assert baselines(go(folder, few, "seeds=[0, 1, 2]"))[-1] == whole[0] and scored == [1, 2, 0, 1, 2]


def test_a_return_to_earlier_features_that_is_cut_off_does_every_seed_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once = go(folder, "seeds=[0, 3]")
    go(folder, "seeds=[0, 3]", "features=mean")
    real = module.append_result

    def cut(log: Path, entry: dict[str, Any]) -> Any:
        if entry.get("seed") == 3:
            raise KeyboardInterrupt
        return real(log, entry)

    monkeypatch.setattr(module, "append_result", cut)
    with pytest.raises(KeyboardInterrupt):
        go(folder, "seeds=[0, 3]")
    monkeypatch.undo()
    go(folder, "seeds=[0, 3]")
    again = read_results(folder / "tasks.jsonl")[2 * len(once) :]
    networks = [(e["kind"], e.get("init"), e.get("seed")) for e in once if e["kind"] != "baseline"]  # n-grams are as they were
    assert [(e["kind"], e.get("init"), e.get("seed")) for e in again] == networks


def test_a_run_without_a_checkpoint_is_refused_before_anything_is_counted(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match="cannot be read"):
        go(folder)
    assert not read_results(folder / "tasks.jsonl")


def test_a_table_that_was_moved_is_done(folder: Path) -> None:
    once = go(folder)
    [table] = folder.parent.rglob("train.csv")
    moved = table.parent.rename(table.parent.with_name("moved"))
    assert go(folder, f"path={moved}") == once and go(folder, f"path={moved}", "seeds=[0, 1]")[: len(once)] == once
    assert go(folder, f"path={moved}") == go(folder, f"path={moved.rename(table.parent)}")


def test_other_rows_are_done_again(folder: Path) -> None:
    once = go(folder)
    [table] = folder.parent.rglob("train.csv")
    table.write_text(table.read_text().replace("yes", "sure"))
    for other in table.parent.glob("*.csv"):
        other.write_text(other.read_text().replace("yes", "sure"))
    assert {e["data_hash"] for e in go(folder) if "seed" in e}.isdisjoint({e["data_hash"] for e in once if "seed" in e})


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_after_a_cut_only_what_is_missing_is_done(calls: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = go(shutil.copytree(folder, folder.parent / "whole"))
    real, left = module.append_result, calls

    def cut(*args: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(module, "append_result", cut)
    with pytest.raises(KeyboardInterrupt):
        go(folder)
    monkeypatch.undo()
    with (folder / "tasks.jsonl").open("a") as file:
        file.write('{"kind": "transf')
    found = go(folder)
    assert [{**e, "seconds": 0} for e in found] == [{**e, "seconds": 0} for e in whole]


def test_more_classes_and_several_features_are_judged_without_a_unit(folder: Path) -> None:
    path = folder.parent / "task"
    for name in ("train", "dev", "test"):
        rows = [(text, label if i % 3 else "perhaps") for i, (text, label) in enumerate(sentences(90, len(name)))]
        table(path / f"{name}.csv", rows)
    found = go(folder, "features=cell+mean")
    assert all("unit" not in e and set(e["metrics"]) == {"accuracy", "validation accuracy"} for e in found if e["kind"] == "linear_probe")


def parts_of(folder: Path, **changes: Any) -> tuple[Any, Callable[[int], dict[str, set[bytes]]]]:
    problem = read_probe_task(LinearProbe(task="csv", path=str(folder), seeds=[0, 1], **changes))
    return problem, lambda seed: {name: {problem.documents[i] for i in rows} for name, rows in problem.parts[seed].items()}


@pytest.mark.parametrize("files", [("train", "dev", "test"), ("train", "test"), ("train", "dev"), ("train",)])
def test_the_parts_never_mix_and_only_what_is_not_given_is_split_off(files: tuple[str, ...], tmp_path: Path) -> None:
    given = {name: sentences(200, seed) for seed, name in enumerate(files)}
    for name, rows in given.items():
        table(tmp_path / f"{name}.csv", rows)
    documents = {name: {document_bytes(text) for text, _ in rows} for name, rows in given.items()}
    problem, parts = parts_of(tmp_path)
    for seed in (0, 1):
        found = parts(seed)
        assert found["train"] and found["valid"] and found["test"]
        assert not found["train"] & found["valid"] and not found["valid"] & found["test"] and not found["train"] & found["test"]
        assert found["train"] <= documents["train"]
        if "test" in files:
            assert found["test"] == documents["test"]
        elif "dev" in files:
            assert found["test"] == documents["dev"]
        if files == ("train", "dev", "test"):
            assert found["valid"] == documents["dev"] and found["train"] == documents["train"]
        else:
            assert found["valid"] <= documents["train"]
    assert (parts(0)["valid"] == parts(1)["valid"]) == (files == ("train", "dev", "test"))
    assert parts(0)["test"] == parts(1)["test"]
    assert bool(problem.notes)


def test_fewer_rows_are_drawn_from_both_classes_and_only_for_training(tmp_path: Path) -> None:
    table(tmp_path / "train.csv", sorted(sentences(300, 1), key=lambda row: row[1]))
    table(tmp_path / "dev.csv", sentences(50, 2))
    table(tmp_path / "test.csv", sentences(50, 3))
    problem, parts = parts_of(tmp_path, max_train_examples=40)
    rows = problem.parts[0]
    assert len(rows["train"]) == 40 and len(rows["valid"]) == 50 and len(rows["test"]) == 50
    assert 5 < problem.classes[rows["train"]].sum() < 35
    assert parts(0)["train"] != parts(1)["train"]
    # What no seed draws is not read by the network.
    assert len(problem.documents) == 100 + len(parts(0)["train"] | parts(1)["train"]) < 200


def test_where_test_rows_lack_labels_the_note_says_so_and_no_more(tmp_path: Path) -> None:
    for name, labels in (("train", "01" * 40), ("test", "01 1")):
        rows = "".join(f"{name} {i},{label.strip()}\n" for i, label in enumerate(labels))
        (tmp_path / f"{name}.csv").write_text(f"text,label\n{rows}")
    (note,) = read_probe_task(LinearProbe(task="csv", path=str(tmp_path))).notes
    assert note.startswith("scored on 8 rows that were not trained on, since not every test row has a label;")


def test_pairs_scores_and_too_few_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_text("text_a,text_b,label\n" + "".join(f"a{i},b,{i % 2}\n" for i in range(60)))
    (tmp_path / "scores.csv").write_text("text,score\n" + "".join(f"t{i},{i}\n" for i in range(60)))
    for name in ("pairs", "scores"):
        with pytest.raises(DataError, match="single texts"):
            read_probe_task(LinearProbe(task="csv", path=str(tmp_path / f"{name}.csv")))
    table(tmp_path / "train.csv", [("a", "x"), ("b", "y")])
    table(tmp_path / "dev.csv", [("c", "x")])
    with pytest.raises(DataError, match="2 training rows are too few to train on every class"):
        read_probe_task(LinearProbe(task="csv", path=str(tmp_path)))
    table(tmp_path / "train.csv", [(f"a{i}", "xy"[i % 2]) for i in range(40)])
    with pytest.raises(ConfigError, match="max_train_examples = 1: leaves some of 2 classes without a row to train on; give 2 or more"):
        read_probe_task(LinearProbe(task="csv", path=str(tmp_path), max_train_examples=1))


def test_sst_comes_with_its_three_parts(real_data: Path) -> None:
    problem = read_probe_task(LinearProbe(task="sst", path=str(real_data / "sst")))
    assert {name: len(rows) for name, rows in problem.parts[0].items()} == {"train": 6920, "valid": 872, "test": 1821}
    assert problem.labels == ("0", "1") and problem.notes == ()


def test_the_report_and_the_summary_show_the_scores_the_baselines_and_the_unit(folder: Path) -> None:
    pytest.importorskip("jinja2")
    pytest.importorskip("plotly")
    go(folder, "seeds=[0, 1]")
    (folder / "run.yaml").write_text(json.dumps({"name": "mine", "linear_probe": {"mine": {"task": "csv", "seeds": [0, 1, 2]}}}))
    (folder / "metrics.jsonl").write_text("")
    (task,) = summarize(folder)["tasks"]
    assert set(task["pretrained"]["values"]) == {0, 1} == set(task["random"]["values"])
    assert [b["method"] for b in task["baselines"]] == [NGRAMS]
    assert task["best_unit"]["number"] == 4
    assert task["notes"] == ["mine pretrained: seed 2 not run yet", "mine random init: seed 2 not run yet"]
    text = summary_text(folder)
    assert "random init" in text and NGRAMS in text and "cell 4 is the most informative: 100.0 % alone (yes above" in text
    page = write_report([folder], folder / "report.html").read_text()
    assert "random init" in page and "cell 4 is the most informative" in page and page.count('"name":"yes","opacity":0.55') == 1


def test_the_benchmark_of_the_solvers_fits_both_at_every_strength(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "solvers.json"
    task = [f"--linear_probe.mine.{text}" for text in ("task=csv", f"path={folder.parent / 'task'}")]
    regression.main(["mine", "--from", str(folder), "--out", str(out), *task, "--compute.threads=1", "--compute.device=cpu"])
    found = json.loads(out.read_text())
    assert found["rows"] == 120 and found["features"] == WIDTH and [line["c"] for line in found["lines"]] == list(STRENGTHS)
    assert all(line["newton distance"] <= 1.1e-3 and line["liblinear distance"] <= 0.1 for line in found["lines"])
    assert all(line["newton accuracy"] == pytest.approx(line["liblinear accuracy"], abs=0.05) for line in found["lines"])
    assert "in all: " in capsys.readouterr().out
