"""Run folders in every state that a stopped, resumed or damaged run leaves them in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overnight.errors import DataError
from overnight.report.run_reader import read_folder
from overnight.report.summary import summarize
from tests.report.sample import finetunings, metrics, write_run

_TYPE = "line is of a type that it never has"


def test_a_run_folder_without_metrics_is_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [])
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(DataError, match=r"metrics\.jsonl does not exist: nothing was trained"):
        read_folder(folder)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"run\.yaml does not exist: .* is not a run folder"):
        read_folder(tmp_path)
    with pytest.raises(DataError, match="no such run folder"):
        read_folder(tmp_path / "absent")


def test_a_cut_last_line_is_left_out_and_noted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", metrics())
    whole = read_folder(folder)
    path = folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    cut = read_folder(folder)
    assert sum(map(len, cut.records.values())) == sum(map(len, whole.records.values())) - 1
    assert [note for note in cut.notes if "is cut and left out" in note]
    assert not whole.notes


def test_a_damaged_line_in_the_middle_is_refused_with_its_number(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", metrics())
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[3] = lines[3][:-9]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"metrics\.jsonl:4: is not JSON"):
        read_folder(folder)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"kind":"train","phase":"a","global_step":1,"seconds":1}', "'loss' of a 'train' line is missing"),
        ('{"kind":"train","phase":"a","global_step":"1","seconds":1,"loss":1}', "'global_step' of a 'train' line is '1'"),
        (
            '{"kind":"tensor_norms","phase":"a","global_step":1,"seconds":1,"tensor_norms":[]}',
            "'tensor_norms' of a 'tensor_norms' line is []",
        ),
        ('{"kind":"finetune","name":"a","seed":true,"init":"random","metric":"f1","value":1}', "'seed' of a 'finetune' line is True"),
        ('{"kind":"train","phase":"a","step":null,"global_step":1,"seconds":1,"loss":1}', f"'step' of a 'train' {_TYPE}"),
        ('{"kind":"train","phase":"a","global_step":1,"seconds":1,"loss":1,"tokens":null}', f"'tokens' of a 'train' {_TYPE}"),
        ('{"kind":"phase","phase":"a","global_step":1,"event":"start","seconds":null}', f"'seconds' of a 'phase' {_TYPE}"),
        ('{"kind":"event","event":"resumed","global_step":1,"seconds":null}', f"'seconds' of a 'event' {_TYPE}"),
        (
            '{"kind":"tensor_norms","phase":"a","global_step":1,"seconds":1,"tensor_norms":{"w":[1,2]}}',
            f"'tensor_norms' of a 'tensor_norms' {_TYPE}",
        ),
        (
            '{"kind":"tensor_norms","phase":"a","global_step":1,"seconds":1,"tensor_norms":{"w":[1,2,{},null]}}',
            f"'tensor_norms' of a 'tensor_norms' {_TYPE}",
        ),
        ('{"kind":"noise","phase":"a","global_step":1,"seconds":1,"batch":4,"groups":{"run":[]}}', f"'groups' of a 'noise' {_TYPE}"),
        (
            '{"kind":"linear_probe","name":"a","seed":0,"init":"pretrained","metric":"accuracy","value":1,'
            '"unit":{"of":"cell","number":1,"threshold":0.5,"above":"x"}}',
            "unit: histogram: field required; delete that line, or put the file back",
        ),
        ("[1, 2]", "is not a JSON object; delete that line, or put the file back"),
        ('{"step": 3}', "is not a JSON object with a `kind`"),
    ],
)
def test_a_line_without_what_it_needs_is_refused_with_the_key(tmp_path: Path, line: str, complaint: str) -> None:
    folder = write_run(tmp_path / "run", [])
    (folder / "metrics.jsonl").write_text(line + "\n", encoding="utf-8")
    with pytest.raises(DataError) as caught:
        read_folder(folder)
    assert str(caught.value).endswith(f"metrics.jsonl:1: {complaint}")


def test_unknown_kinds_and_keys_are_ignored(tmp_path: Path) -> None:
    plain = write_run(tmp_path / "plain", metrics())
    more = write_run(tmp_path / "more", [{"kind": "weather", "sun": 1}, *({**line, "new_key": 3} for line in metrics())])
    assert summarize(plain)["phases"] == summarize(more)["phases"]


def test_an_empty_run_is_described_as_empty(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [])
    found = summarize(folder)
    assert not found["finished"]
    assert [row["name"] for row in found["phases"]] == ["short", "long"]
    assert any("nothing was measured yet" in note for note in found["notes"])


def test_of_a_step_that_was_trained_twice_the_newer_line_counts(tmp_path: Path) -> None:
    lines = metrics()
    again = [{**line, "loss": 99.0} for line in lines if line["kind"] == "train" and line["global_step"] == 100]
    folder = write_run(tmp_path / "run", [*lines, *again])
    train = read_folder(folder).records["train"]
    steps = [record["global_step"] for record in train]
    assert steps == sorted(set(steps))
    assert next(record for record in train if record["global_step"] == 100)["loss"] == 99.0


@pytest.mark.parametrize("text", ["{", "[]", "\xff", '{"cpu": {"cores": "2"}}', '{"gpus": [{"name": null}]}'])
def test_a_damaged_environment_is_refused_and_an_absent_one_noted(tmp_path: Path, text: str) -> None:
    folder = write_run(tmp_path / "run", metrics())
    (folder / "env.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=r"env\.json"):
        read_folder(folder)
    (folder / "env.json").unlink()
    assert any("env.json is absent" in note for note in read_folder(folder).notes)
    assert summarize(folder)["device"] == "unknown"


@pytest.mark.parametrize("text", ["a: [", "- 1", "", "finetune: {mine: {random_init_seeds: [0]}}"])
def test_damaged_settings_are_refused(tmp_path: Path, text: str) -> None:
    folder = write_run(tmp_path / "run", metrics())
    (folder / "run.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"run\.yaml"):
        read_folder(folder)


def test_lines_written_with_nan_are_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [*metrics(), *finetunings([float("nan")], [0.5])])
    assert "NaN" in (folder / "metrics.jsonl").read_text(encoding="utf-8")
    assert summarize(folder)["tasks"][0]["verdict"] == "a score is not a number"
    assert json.dumps(summarize(folder))
