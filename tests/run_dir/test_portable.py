"""A run folder is whole: moved, and with its prepared data gone, it does all that comes after pretraining."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from overnight.corpus.pipeline import prepare
from overnight.corpus.tokenizer import save_tokenizer
from tests.cli.test_main import call
from tests.conftest import tiny_tree

Captured = pytest.CaptureFixture[str]
SPEC = ["--seq_len=16", "--epochs=1", "--global_batch_size=8", "--micro_batch_size=8"]


@pytest.fixture(scope="module")
def made(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which a run was pretrained and fine-tuned, all its paths relative: `data/tiny`, `runs/tiny`, `recipe.yaml`."""
    folder = tmp_path_factory.mktemp("made")
    shutil.copytree(tiny_data, folder / "data" / "tiny")
    tree = tiny_tree(folder, tiny_data.parent / "topics.jsonl")
    tree |= {"out": "runs/{name}", "phases": {"short": {**tree["phases"]["short"], "steps": 2}}}
    tree["data"]["dir"] = "data/{name}"
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree))
    words = (("good", "yes"), ("bad", "no"))
    (folder / "mine.csv").write_text("text,label\n" + "".join(f"a {w} object {i},{label}\n" for i in range(20) for w, label in words))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert call("pretrain", "recipe.yaml") == 0
        assert call("finetune", "opinion", "--from", "runs/tiny", "--task=csv", "--path=mine.csv", *SPEC) == 0
    return folder


@pytest.fixture
def moved(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run folder alone, in another place; the working directory is a third."""
    shutil.copytree(made / "runs" / "tiny", tmp_path / "moved")
    place = tmp_path / "moved" / "corpus" / "place.json"
    assert json.loads(place.read_text()).items() >= {"version": 1, "dir": str(made / "data" / "tiny")}.items()
    place.write_text(json.dumps({"version": 1, "dir": str(tmp_path / "gone")}))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "moved"


def other_data(folder: Path) -> None:
    """Prepared data of the same name and size that was made from other text."""
    from overnight import config

    folder.parent.mkdir(parents=True)
    source = folder.parent / "other.jsonl"
    source.write_text("".join(json.dumps({"text": f"quick brown fox number {i} jumps over lazy dogs " * 9}) + "\n" for i in range(90)))
    run = config.build_run(tiny_tree(folder.parent, source))
    prepare(run.data, folder, log=lambda text: None)


def predict(run: Path, task: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> dict[str, Any]:
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert call("predict", task, "--from", run) == 0
    return dict(json.loads(capsys.readouterr().out))


@pytest.mark.parametrize("task", ["mask", "opinion"])
def test_a_moved_run_without_its_data_predicts_the_same(
    task: str, made: Path, moved: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    here = predict(moved, task, "a good [MASK]", monkeypatch, capsys)
    other_data(Path("data/tiny"))  # of the same name: not to be looked at
    assert predict(moved, task, "a good [MASK]", monkeypatch, capsys) == here
    monkeypatch.chdir(made)
    assert predict(Path("runs/tiny"), task, "a good [MASK]", monkeypatch, capsys) == here


def test_a_moved_run_without_its_data_is_tuned_exported_and_reported(made: Path, moved: Path, tmp_path: Path, capsys: Captured) -> None:
    assert call("finetune", "again", "--from", moved, "--task=csv", f"--path={made / 'mine.csv'}", *SPEC) == 0
    tasks = [json.loads((moved / "finetune" / name / "task.json").read_text()) for name in ("opinion", "again")]
    assert tasks[0]["result"]["metrics"] == tasks[1]["result"]["metrics"] and tasks[0]["tokenizer"] == tasks[1]["tokenizer"]
    for task in ([], ["--task", "opinion"], ["--task", "again"]):
        assert call("export", "--from", moved, "--to", out := tmp_path / "-".join(["out", *task[1:]]), *task) == 0
        assert (out / "vocab.txt").read_bytes() == (made / "data" / "tiny" / "vocab.txt").read_bytes()
    assert call("report", moved) == 0
    assert (moved / "report.html").is_file()


def test_what_comes_after_pretraining_never_opens_the_prepared_data(
    made: Path, moved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_data(Path("data/tiny"))
    (tmp_path / "elsewhere" / "data" / "tiny" / "manifest.json").write_text("{}")
    assert call("finetune", "opinion", "--from", moved, "--task=csv", f"--path={made / 'mine.csv'}", *SPEC) == 0
    assert call("export", "--from", moved, "--to", tmp_path / "out") == 0


@pytest.mark.parametrize("folder", ["corpus", "finetune/opinion"])
def test_another_vocabulary_than_the_weights_were_trained_with_is_refused(
    folder: str, moved: Path, tmp_path: Path, capsys: Captured
) -> None:
    pieces = (moved / folder / "vocab.txt").read_text().splitlines()
    pieces[-1], pieces[-2] = pieces[-2], pieces[-1]
    save_tokenizer(moved / folder, pieces, lowercase=True)
    task = [] if folder == "corpus" else ["--task", "opinion"]
    assert call("export", "--from", moved, "--to", tmp_path / "out", *task) == 1
    said = capsys.readouterr().err
    assert f"{moved / folder}: vocab.txt and tokenizer.json are another vocabulary" in said
    assert str(moved / ("checkpoints" if folder == "corpus" else "finetune/opinion/model.safetensors")) in said
    assert call("predict", *(task[1:] or ["mask"]), "--from", moved, "--input", moved / "run.yaml") == 1
    assert "are another vocabulary" in capsys.readouterr().err


def test_the_vocabulary_and_manifest_of_another_corpus_are_refused(moved: Path, tmp_path: Path, capsys: Captured) -> None:
    other_data(tmp_path / "others" / "tiny")
    shutil.rmtree(moved / "corpus")
    shutil.copytree(tmp_path / "others" / "tiny", moved / "corpus")
    assert call("export", "--from", moved, "--to", tmp_path / "out") == 1
    said = capsys.readouterr().err
    assert f"{moved / 'corpus'} holds other data than the checkpoints in {moved} were trained on" in said


def test_a_folder_that_lost_its_vocabulary_says_how_to_get_it_back_and_the_commands_do(
    made: Path, moved: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(moved / "corpus")
    (moved / "finetune" / "opinion" / "vocab.txt").unlink()
    assert call("export", "--from", moved, "--to", tmp_path / "out") == 1
    assert f"Run `overnight pretrain {moved}` once in the directory from which data/tiny can be read" in capsys.readouterr().err
    assert call("export", "--from", moved, "--to", tmp_path / "out", "--task", "opinion") == 1
    assert f"delete the folder, and run `overnight finetune opinion --from {moved}` again" in capsys.readouterr().err
    monkeypatch.chdir(made)
    assert call("pretrain", moved) == 0
    assert "all phases are done" in capsys.readouterr().out
    assert call("export", "--from", moved, "--to", tmp_path / "out") == 0
    shutil.rmtree(moved / "finetune" / "opinion")
    assert call("finetune", "opinion", "--from", moved, "--task=csv", "--path=mine.csv", *SPEC) == 0
    assert "opinion: done already" not in capsys.readouterr().out
    assert call("export", "--from", moved, "--to", tmp_path / "task", "--task", "opinion") == 0


def unfinished(run: Path) -> None:
    """Let one more step be to do."""
    tree = yaml.safe_load((run / "run.yaml").read_text())
    tree["phases"]["more"] = {**tree["phases"]["short"], "steps": 1}
    (run / "run.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))


def test_a_moved_run_goes_on_from_anywhere_with_the_data_where_it_lay(
    made: Path, moved: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    (moved / "corpus" / "place.json").write_text(json.dumps({"version": 1, "dir": str(made / "data" / "tiny")}))
    unfinished(moved)
    assert call("pretrain", moved) == 0
    assert "more 1/1" in capsys.readouterr().out
    assert yaml.safe_load((moved / "run.yaml").read_text())["data"]["dir"] == "data/{name}"
    assert json.loads((moved / "corpus" / "place.json").read_text())["dir"] == str(made / "data" / "tiny")


def test_a_run_is_trained_in_a_working_folder_whose_name_is_no_utf_8(
    made: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / os.fsdecode(b"d\xedr")
    shutil.copytree(made / "data", folder / "data")
    shutil.copy(made / "recipe.yaml", folder)
    monkeypatch.chdir(folder)
    assert call("pretrain", "recipe.yaml") == 0
    place = Path("runs/tiny/corpus/place.json")
    assert json.loads(place.read_text())["dir"] == str(tmp_path / "d\\udcedr" / "data" / "tiny")
    unfinished(Path("runs/tiny"))
    assert call("pretrain", "runs/tiny") == 0
    assert "more 1/1" in capsys.readouterr().out


def test_a_run_that_cannot_find_its_data_names_where_it_looked(moved: Path, capsys: Captured) -> None:
    unfinished(moved)
    assert call("pretrain", moved) == 1
    said = capsys.readouterr().err
    assert str(moved.parent / "gone") in said and "data/tiny" in said and "--data.dir=FOLDER" in said
    assert call("pretrain", moved, f"--data.dir={moved.parent / 'gone'}") == 1
    assert capsys.readouterr().err.count(str(moved.parent / "gone")) == 1


@pytest.mark.parametrize("damaged", ['{"version": 1, "dir": "/el', '{"version": 1, "dir": 5}', '{"version": 2, "dir": "x"}', "[" * 99_999])
def test_a_damaged_note_of_where_the_data_lay_is_refused_by_name(moved: Path, capsys: Captured, damaged: str) -> None:
    unfinished(moved)
    (moved / "corpus" / "place.json").write_text(damaged)
    assert call("pretrain", moved) == 1
    said = capsys.readouterr().err
    assert "place.json: " in said and "delete it and name the prepared data with --data.dir=FOLDER" in said and "Traceback" not in said


def test_a_run_does_not_go_on_with_other_data_of_the_same_name(made: Path, moved: Path, capsys: Captured) -> None:
    unfinished(moved)
    before = {path: path.read_bytes() for path in (moved / "corpus").iterdir()}
    other_data(Path("data/tiny"))
    assert call("pretrain", moved) == 1
    said = capsys.readouterr().err
    assert f"data/tiny holds other data than the checkpoints in {moved} were trained on" in said
    assert f"The right data was in {moved.parent / 'gone'}" in said
    assert {path: path.read_bytes() for path in (moved / "corpus").iterdir()} == before
    assert call("pretrain", moved, f"--data.dir={made / 'data' / 'tiny'}") == 0


@pytest.fixture
def byte_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A byte model pretrained for a step in `tmp_path/made`, all its paths relative; the working directory is another."""
    folder = tmp_path / "made"
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path("texts.jsonl").write_text("".join(json.dumps({"text": f"Number {i} of the films was good. " * 4}) + "\n" for i in range(60)))
    tree = {
        "name": "small",
        "data": {"paths": ["texts.jsonl"], "tokenizer": "bytes", "valid_fraction": 0.2, "test_fraction": 0.3, "min_chars": 1, "workers": 1},
        "model": {"kind": "mlstm", "num_layers": 1, "hidden_size": 8, "embedding_size": 4},
        "phases": {"only": {"steps": 1, "global_batch_size": 2, "seq_len": 16, "micro_batch_size": 2, "num_document_groups": 2}},
        "compute": {"device": "cpu", "threads": 1},
        "logging": {"eval_examples": 2},
    }
    Path("recipe.yaml").write_text(yaml.safe_dump(tree))
    assert call("prepare", "recipe.yaml") == call("pretrain", "recipe.yaml") == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return folder / "runs" / "small"


def test_a_byte_model_is_measured_on_its_own_corpus_from_anywhere(byte_run: Path, capsys: Captured) -> None:
    evaluate = ("evaluate", "--from", byte_run, "--whole")
    capsys.readouterr()
    assert call(*evaluate) == 0
    here = capsys.readouterr().out
    assert "bits per byte" in here
    # Other text of the same name in the working directory is not taken for it, and measured only if it is asked for.
    Path("texts.jsonl").write_text("".join(json.dumps({"text": f"The {i}th day was long and rainy. " * 5}) + "\n" for i in range(60)))
    assert call("prepare", byte_run.parent.parent / "recipe.yaml") == 0
    assert call(*evaluate) == 1
    assert f"data/small holds other data than the checkpoints in {byte_run} were trained on" in capsys.readouterr().err
    assert call(*evaluate, "--data.dir=data/small") == 0
    assert capsys.readouterr().out.split(" in ")[0] != here.split(" in ")[0]


def test_a_byte_model_without_its_data_does_all_but_to_be_measured_and_says_so(byte_run: Path, capsys: Captured) -> None:
    pytest.importorskip("sklearn")
    shutil.rmtree(byte_run.parent.parent / "data")
    Path("mine.csv").write_text(
        "text,label\n" + "".join(f"a {w} film {i},{label}\n" for i in range(30) for w, label in (("good", 1), ("bad", 0)))
    )
    assert call("linear-probe", "csv", "--from", byte_run, "--path=mine.csv") == 0
    assert call("predict", "csv", "--from", byte_run, "--input", "mine.csv") == 0
    assert call("generate", "--from", byte_run, "--length", 5) == 0
    assert call("extract-features", "--from", byte_run, "--input", "mine.csv", "--to", "mine.npy") == 0
    assert call("heatmap", "--from", byte_run, "--input", "mine.csv", "--to", "mine.html", "--unit", 3) == 0
    assert call("export", "--from", byte_run, "--to", "exported") == call("report", byte_run) == 0
    assert call("evaluate", "--from", byte_run) == 1
    said = capsys.readouterr().err
    assert "data/small" in said and str(byte_run.parent.parent / "data" / "small") in said and "--data.dir=FOLDER" in said
    assert call("evaluate", "--from", "exported") == 1
    assert "from which to read the test text; name its folder with --data.dir=FOLDER" in capsys.readouterr().err
