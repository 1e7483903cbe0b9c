"""A byte model answers new texts by the classifier of its transfer, with the answers by which that was scored."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overnight.byte_lm.classify import classify_file
from overnight.byte_lm.linear_probe import linear_probe
from overnight.cli.main import main
from overnight.config import stored_run
from overnight.console import Line
from overnight.errors import ConfigError, DataError
from overnight.interop.byte_models import import_byte_model
from overnight.state_files import SEAL
from tests.interop.byte_formula import random_arrays, write_openai

pytest.importorskip("sklearn")
Captured = pytest.CaptureFixture[str]
LABELS = ("bad", "fair", "good")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An imported model beside tables of two and of three classes, in three parts each."""
    import_byte_model(write_openai(tmp_path / "openai", random_arrays(24, 6)), tmp_path / "ours")
    chance = np.random.default_rng(0)
    for classes in (2, 3):
        (tmp_path / f"of{classes}").mkdir()
        for part, count in (("train", 90), ("dev", 30), ("test", 40)):
            lines = [
                f"{i},the {LABELS[k]} film {chance.integers(99)},{LABELS[k]}\n" for i, k in enumerate(chance.integers(0, classes, count))
            ]
            (tmp_path / f"of{classes}" / f"{part}.csv").write_text("id,text,label\n" + "".join(lines))
    return tmp_path / "ours"


def go(folder: Path, classes: int = 2, *overrides: str) -> dict[str, Any]:
    """LinearProbe to `mine` with one seed; returns the line of the pretrained model."""
    task = [f"linear_probe.mine.{text}" for text in ("task=csv", f"path={folder.parent / f'of{classes}'}", "seeds=[0]", *overrides)]
    lines = linear_probe(stored_run(folder, [*task, "compute.device=cpu", "compute.threads=1"]), "mine", Line(io.StringIO()))
    return next(line for line in lines if line.get("init") == "pretrained")


def classify(folder: Path, *lines: str, name: str = "mine") -> list[dict[str, Any]]:
    path = folder.parent / "lines"
    path.write_text("".join(f"{line}\n" for line in lines))
    return list(classify_file(stored_run(folder), name, str(path)))


@pytest.mark.parametrize(("classes", "features"), [(2, "cell"), (2, "cell+mean"), (3, "mean")])
def test_the_answers_are_those_by_which_the_transfer_was_scored(classes: int, features: str, folder: Path) -> None:
    scored = go(folder, classes, f"features={features}")
    path = folder.parent / f"of{classes}" / "test.csv"
    right = [line.split(",")[2] for line in path.read_text().splitlines()[1:]]
    found = list(classify_file(stored_run(folder), "mine", str(path)))
    assert [answer["id"] for answer in found] == [str(i) for i in range(40)]
    assert np.mean([answer["label"] == label for answer, label in zip(found, right, strict=True)]) == scored["value"] > 1 / classes
    for answer in found:
        assert list(answer["probabilities"]) == list(LABELS[:classes]) == sorted(answer["probabilities"])
        assert sum(answer["probabilities"].values()) == pytest.approx(1, abs=1e-4)
        assert max(answer["probabilities"], key=answer["probabilities"].get) == answer["label"]


def test_lines_in_every_form_are_answered_alike_and_a_bad_one_is_named(folder: Path) -> None:
    go(folder)
    plain, named = classify(folder, "a good film", "", '{"id": "x", "text": "a good film"}')
    assert plain["probabilities"] == named["probabilities"] and [plain["id"], named["id"]] == ["1", "x"]
    _, pair = classify(folder, "one", '{"text_a": "two", "text_b": "texts"}')
    assert pair["error"] == "line 2: is a pair; the classifier was fitted to single texts"


def test_a_tab_is_of_the_text_as_it_is_in_a_task_of_single_texts(folder: Path) -> None:
    go(folder)
    tab, blank = classify(folder, "a good\tfilm", "a good film")
    assert tab["probabilities"] == blank["probabilities"]


def test_of_scores_whose_probabilities_are_all_1_the_highest_is_the_answer(folder: Path) -> None:
    go(folder, 3)
    path = folder / "linear_probe" / "mine" / "classifier.json"
    facts = {key: value for key, value in json.loads(path.read_text()).items() if key != SEAL}
    path.write_text(json.dumps(facts | {"weights": [[0.0] * 24] * 3, "bias": [40.0, 60.0, 50.0]}))
    (answer,) = classify(folder, "a film")
    assert answer["label"] == "fair"


def test_what_is_not_there_is_said_with_a_command_that_works(folder: Path) -> None:
    with pytest.raises(
        DataError, match=r"no classifier 'csv' \(it has: none\); run `overnight linear-probe csv --from .*ours --path=FOLDER`"
    ):
        classify(folder, "text", name="csv")
    with pytest.raises(ConfigError, match=r"a byte model has no \[MASK\] to fill in; `overnight generate --from .*ours` continues"):
        classify(folder, "[MASK]", name="mask")


def test_a_classifier_of_other_weights_or_another_width_is_refused(folder: Path) -> None:
    go(folder)
    path = folder / "linear_probe" / "mine" / "classifier.json"
    facts = {key: value for key, value in json.loads(path.read_text()).items() if key != SEAL}
    path.write_text(json.dumps(facts | {"checkpoint": "step-0000100"}))
    with pytest.raises(
        DataError, match=r"features of step-0000100, and the newest weights are model\.safetensors; run `overnight linear-probe mine"
    ):
        classify(folder, "text")
    path.write_text(json.dumps(facts | {"weights": [[0.5] * 7]}))
    with pytest.raises(DataError, match=r"has weights \(1, 7\), the model has 24 features"):
        classify(folder, "text")


def test_a_classifier_of_other_weights_of_the_same_name_is_refused(folder: Path) -> None:
    go(folder)
    path = folder / "linear_probe" / "mine" / "classifier.json"
    kept = {key: value for key, value in json.loads(path.read_text()).items() if key not in (SEAL, "model")}
    answers = classify(folder, "a good film")
    write_openai(folder.parent / "other", random_arrays(24, 6, seed=1))
    import_byte_model(folder.parent / "other", folder.parent / "another")
    (folder.parent / "another" / "model.safetensors").rename(folder / "model.safetensors")
    with pytest.raises(DataError, match=r"features of other weights than model\.safetensors has now; run `overnight linear-probe mine"):
        classify(folder, "a good film")
    path.write_text(json.dumps(kept))  # of an earlier version, which has only the name
    assert classify(folder, "a good film") != answers
    go(folder)
    assert classify(folder, "a good film")


def test_a_classifier_that_was_changed_or_is_of_another_shape_is_refused_by_name(folder: Path) -> None:
    go(folder)
    path = folder / "linear_probe" / "mine" / "classifier.json"
    facts = json.loads(path.read_text())
    unsealed = {key: value for key, value in facts.items() if key != SEAL}
    wrong = {
        "was changed since it was written": facts | {"bias": [0.5]},
        "bias.0: input should be a valid number": unsealed | {"bias": ["0.5"]},
        "are not of one regression": unsealed | {"weights": [[0.5] * 24, [0.5] * 7]},
    }
    for said, tree in wrong.items():
        path.write_text(json.dumps(tree))
        with pytest.raises(DataError, match=rf"classifier\.json: .*{said}.*; delete .*mine and run `overnight linear-probe mine"):
            classify(folder, "text")


def test_the_classifier_is_that_of_the_settings_asked_for_last(folder: Path) -> None:
    path = folder / "linear_probe" / "mine" / "classifier.json"
    first = go(folder, 2, "features=cell")
    kept = path.read_text()
    go(folder, 2, "features=mean")
    assert json.loads(path.read_text())["spec"]["features"] == "mean"
    assert go(folder, 2, "features=cell")["value"] == first["value"]
    again = json.loads(path.read_text())
    assert again["spec"] == json.loads(kept)["spec"] and again["weights"] == json.loads(kept)["weights"]
    path.unlink()
    go(folder, 2, "features=cell")
    assert json.loads(path.read_text())["weights"] == again["weights"]


def test_the_command_answers_for_an_exported_model(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    go(folder)
    table = tmp_path / "of2" / "test.csv"
    assert main(["predict", "mine", "--from", str(folder), "--input", str(table)]) == 0
    assert [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()] == [str(i) for i in range(40)]
    (tmp_path / "in.jsonl").write_text('{"text": "a good film"}\n{"text": "cut\n{"text": "a bad film", "id": "x"}\n')
    assert main(["predict", "mine", "--from", str(folder), "--input", str(tmp_path / "in.jsonl")]) == 1
    good, broken, other = map(json.loads, capsys.readouterr().out.splitlines())
    assert "label" in good and other["id"] == "x" and broken["id"] == "1" and "in.jsonl:2: is not JSON" in broken["error"]
    assert main(["predict", "mine", "--from", str(tmp_path), "--input", str(table)]) == 2
    assert "holds no model; name a run folder" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert main(["predict", "mask", "--from", str(tmp_path)]) == 1
    assert "has no model.safetensors; name a folder that transformers' save_pretrained wrote" in capsys.readouterr().err
