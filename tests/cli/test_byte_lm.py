"""The commands of byte models work on run folders and on exported ones, and answer a mistake in words."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import nn

from overnight import config
from overnight.byte_lm.features import extract_features
from overnight.checkpoint.reader import TrainingProgress, newest_checkpoint, read_checkpoint
from overnight.checkpoint.writer import CheckpointWriter, write_checkpoint
from overnight.corpus.bytes import document_bytes
from overnight.errors import DataError
from overnight.interop.byte_models import load_byte_model
from overnight.models.bytes import ByteModel, byte_model
from tests.cli.test_main import call
from tests.interop.byte_formula import bits, random_arrays, write_openai

Captured = pytest.CaptureFixture[str]
TEXT = "\n It was a film. "


def strong(model: ByteModel) -> ByteModel:
    """Weights that make more of a text than fresh ones do."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.5)
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder as pretraining leaves it, with two checkpoints."""
    folder = tmp_path_factory.mktemp("made") / "run"
    tree = {
        "name": "small",
        "out": str(folder),
        "data": {"tokenizer": "bytes"},
        "model": {"kind": "mlstm", "num_layers": 1, "hidden_size": 24, "embedding_size": 8},
        "phases": {"only": {"steps": 2, "global_batch_size": 2}},
        "compute": {"device": "cpu", "threads": 1},
    }
    run = config.build_run(tree)
    folder.mkdir()
    (folder / "run.yaml").write_text(config.run_yaml(run))
    for step in (1, 2):
        torch.manual_seed(step)
        model = strong(byte_model(run.model))
        optimizer = torch.optim.SGD([{"params": model.parameters(), "param_names": [n for n, _ in model.named_parameters()]}], lr=0.1)
        with CheckpointWriter(folder / "checkpoints", keep=2) as saver:
            saver.save(model, optimizer, TrainingProgress(global_step=step))
    return folder


@pytest.fixture
def run_folder(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


def bits_a_byte(model: ByteModel) -> float:
    ids = torch.tensor([list(TEXT.encode())])
    with torch.no_grad():
        hidden, _, _ = model.hidden(ids, None, torch.float32)
        return float(nn.functional.cross_entropy(model.logits(hidden[0, :-1]), ids[0, 1:]) / np.log(2))


def test_an_export_is_the_newest_checkpoint_bit_for_bit_and_takes_the_same_commands(
    run_folder: Path, tmp_path: Path, capsys: Captured
) -> None:
    assert call("export", "--from", run_folder, "--to", tmp_path / "out") == 0
    (one, settings), (other, again) = load_byte_model(run_folder), load_byte_model(tmp_path / "out")
    assert settings == again
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))
    assert bits_a_byte(one) == bits_a_byte(other)
    torch.manual_seed(2)
    assert bits_a_byte(one) == bits_a_byte(strong(byte_model(settings)))
    capsys.readouterr()
    said = []
    for folder in (run_folder, tmp_path / "out"):
        assert call("generate", "--from", folder, "--prompt", "It ", "--length", 20, "--seed", 3) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and said[0].startswith("It ")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"model.safetensors", "config.json", "README.md"}


def test_an_imported_model_has_the_bits_of_the_equations(tmp_path: Path, capsys: Captured) -> None:
    arrays = random_arrays(24, 6)
    assert call("import", "--from", write_openai(tmp_path / "openai", arrays), "--to", tmp_path / "ours") == 0
    assert "mlstm, 1 layer of 24" in capsys.readouterr().out
    assert bits_a_byte(load_byte_model(tmp_path / "ours")[0]) == pytest.approx(bits(arrays, TEXT.encode(), "ifog"), abs=1e-5)


def test_featurise_writes_what_the_function_gives_in_the_precision_asked(run_folder: Path, tmp_path: Path) -> None:
    texts = ["one text", "", "another, longer text"]
    (tmp_path / "in.json").write_text(json.dumps([{"review": text} for text in texts]))
    options = ("--from", run_folder, "--input", tmp_path / "in.json", "--field", "review", "--features", "cell+mean")
    assert call("extract-features", *options, "--to", tmp_path / "a.npy") == 0
    model, _ = load_byte_model(run_folder)
    wanted = extract_features(model, [document_bytes(text) for text in texts], "cell+mean")
    np.testing.assert_allclose(np.load(tmp_path / "a.npy"), wanted, atol=1e-5)
    assert call("extract-features", *options, "--to", tmp_path / "b.npy", "--precision=bf16") == 0
    half = np.load(tmp_path / "b.npy")
    assert not np.array_equal(half, wanted)
    assert np.abs(half - wanted).mean() < 0.02


@pytest.mark.parametrize(
    "command",
    [
        ["extract-features", "--input", "texts.txt", "--to", "features.npy"],
        ["heatmap", "--unit=0", "--input", "texts.txt", "--to", "page.html"],
        ["generate"],
        ["predict", "mine"],
    ],
)
def test_a_byte_model_of_bf16_answers_in_fp32_where_the_processor_would_emulate_it(
    command: list[str], run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = run_folder / "run.yaml"
    settings.write_text(settings.read_text().replace("precision: fp32", "precision: bf16"))
    monkeypatch.chdir(tmp_path)
    Path("texts.txt").write_text("a film\n")
    answering: list[str] = []

    def answer(run: config.Run, *_: object, **__: object) -> None:
        answering.append(run.precision)
        raise DataError("seen")

    monkeypatch.setattr("overnight.interop.byte_models.ready_model", answer)
    monkeypatch.setattr("overnight.byte_lm.classify.classify_file", answer)
    for has in (False, True):
        monkeypatch.setattr("overnight.engine.precision.has_bf16", lambda has=has: has)
        for asked in ([], ["--precision=auto"], ["--precision=bf16"]):
            assert call(*command, "--from", run_folder, *asked) == 1
    assert answering == ["fp32", "fp32", "bf16", "bf16", "bf16", "bf16"]


def test_transfer_heatmap_and_a_held_unit_follow_each_other(
    run_folder: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn")
    rows = "".join(f"{'a good' if i % 2 else 'so bad a'} film {i},{i % 2}\n" for i in range(120))
    (tmp_path / "mine.csv").write_text("text,label\n" + rows)
    (run_folder / "metrics.jsonl").write_text("")
    page = tmp_path / "page.html"
    (tmp_path / "in.txt").write_text("Good <b>film</b>\n")
    heatmap = ("heatmap", "--from", run_folder, "--unit", "best", "--input", tmp_path / "in.txt", "--to", page)
    assert call(*heatmap) == 1
    assert "run `overnight linear-probe` first" in capsys.readouterr().err
    assert call("linear-probe", "csv", "--from", run_folder, f"--path={tmp_path / 'mine.csv'}") == 0
    out = capsys.readouterr().out
    assert "random init" in out and "byte n-grams" in out
    assert call(*heatmap, "--tanh") == 0
    assert "tanh of cell " in page.read_text()
    assert call("generate", "--from", run_folder, "--length", 5, "--unit", "best", "--value", "-2.5", "--temperature", 0) == 0
    with monkeypatch.context() as patch:  # what is done needs no library
        hide_scipy(patch)
        assert call("linear-probe", "csv", "--from", run_folder, f"--path={tmp_path / 'mine.csv'}") == 0
    assert "done already" in capsys.readouterr().out
    # The task's keys, and how this machine computes: features of another precision are judged anew.
    assert call("linear-probe", "csv", "--from", run_folder, f"--path={tmp_path / 'mine.csv'}", "--precision=bf16", "--seeds=[1]") == 0
    assert "csv: seed 1 pretrained" in capsys.readouterr().out
    # Weights of the same step that were trained again.
    checkpoint = newest_checkpoint(run_folder / "checkpoints")
    assert checkpoint is not None
    progress, model, optimizer = read_checkpoint(checkpoint)
    shutil.rmtree(run_folder / "checkpoints")
    again = {"model": {name: x * 1.5 for name, x in model.items()}, "optimizer": optimizer}
    write_checkpoint(run_folder / "checkpoints", again, asdict(progress))
    assert call("linear-probe", "csv", "--from", run_folder, f"--path={tmp_path / 'mine.csv'}") == 0
    assert "csv: seed 0 pretrained" in capsys.readouterr().out


def test_the_best_unit_of_a_transfer_on_means_is_shown_and_held(run_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    rows = "".join(f"{'a good' if i % 2 else 'so bad a'} film {i},{i % 2}\n" for i in range(120))
    (tmp_path / "mine.csv").write_text("text,label\n" + rows)
    (run_folder / "metrics.jsonl").write_text("")
    assert call("linear-probe", "csv", "--from", run_folder, f"--path={tmp_path / 'mine.csv'}", "--features=mean") == 0
    page = tmp_path / "page.html"
    assert call("heatmap", "--from", run_folder, "--unit", "best", "--input", tmp_path / "mine.csv", "--to", page) == 0
    lines = [json.loads(line) for line in (run_folder / "tasks.jsonl").read_text().splitlines()]
    unit = next(line["unit"] for line in reversed(lines) if line["kind"] == "linear_probe" and line["init"] == "pretrained")
    assert f"hidden {unit['number']} of run" in page.read_text()
    assert call("generate", "--from", run_folder, "--length", 5, "--unit", "best", "--value", "-0.5") == 0


def hide_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have it look as if it were not installed."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "scipy" else found(name, *rest))


def test_a_probe_that_lacks_a_library_says_so_before_anything_is_done(
    run_folder: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_scipy(monkeypatch)
    (tmp_path / "mine.csv").write_text("text,label\na good film,1\n")
    told = "linear-probe needs scipy, which this Python lacks: pip install 'overnight[tasks]'"
    assert call("linear-probe", "csv", "--from", run_folder, f"--path={tmp_path / 'mine.csv'}") == 1
    assert told in capsys.readouterr().err
    tree = yaml.safe_load((run_folder / "run.yaml").read_text())
    tree |= {"linear_probe": {"reviews": {"task": "csv", "path": str(tmp_path / "mine.csv")}}, "out": str(tmp_path / "new")}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
    assert call("run", tmp_path / "recipe.yaml") == 1
    assert told in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_a_task_of_the_recipe_is_known_by_its_name(run_folder: Path, tmp_path: Path, capsys: Captured) -> None:
    tree = yaml.safe_load((run_folder / "run.yaml").read_text())
    tree["linear_probe"] = {"reviews": {"task": "csv", "path": str(tmp_path / "absent.csv")}}
    (run_folder / "run.yaml").write_text(yaml.safe_dump(tree))
    assert call("linear-probe", "reviews", "--from", run_folder) == 1
    assert "absent.csv: does not exist" in capsys.readouterr().err
    assert call("linear-probe", "other", "--from", run_folder) == 2
    assert "'other' is neither a task of this run nor one of sst, imdb, csv" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("generate", "--from", "RUN", "--unit", "3"), "--unit and --value must be given together"),
        (("generate", "--from", "RUN", "--unit", "24", "--value", "1"), "the model has units 0 to 23"),
        (("generate", "--from", "RUN", "--precision=fp4"), "precision = 'fp4'"),
        (("generate", "--from", "NOTHING"), "is neither a run folder"),
        (("linear-probe", "sst", "--from", "RUN", "--speed=9"), "linear_probe.sst.speed = 9: unknown key"),
        (("extract-features", "--from", "RUN", "--input", "x", "--to", "x.csv"), "features are written as .npy"),
        (("extract-features", "--from", "RUN", "--input", "x", "--to", "x.npy", "--features", "gates"), "invalid choice: 'gates'"),
        (("heatmap", "--from", "RUN", "--input", "README", "--to", "x", "--unit", "first"), "must be a number or `best`"),
        (("heatmap", "--from", "RUN", "--input", "README", "--to", "RUN", "--unit", "3"), "is a folder; name a page"),
        (("export", "--from", "RUN", "--to", "x", "--task", "sst"), "has no fine-tuned tasks"),
        (("import", "--from", "RUN", "--to", "x", "--what=y"), "unrecognized arguments"),
    ],
)
def test_a_mistake_is_said_and_ends_with_2(argv: tuple[str, ...], said: str, run_folder: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "README").write_text("a text\n")
    places = {"RUN": run_folder, "NOTHING": tmp_path, "README": tmp_path / "README"}
    assert call(*(places.get(word, word) for word in argv)) == 2
    assert said in capsys.readouterr().err


def test_nothing_is_printed_before_the_numbers_of_a_continuation_are_checked(run_folder: Path, capsys: Captured) -> None:
    assert call("generate", "--from", run_folder, "--prompt", "It ", "--unit", 3, "--value", "nan") == 2
    said = capsys.readouterr()
    assert said.out == "" and "--value = nan: must be a finite number" in said.err
    assert call("generate", "--from", run_folder, "--prompt", "It ", "--length", 1) == 0
    assert capsys.readouterr().out.startswith("It ")


def test_bytes_of_a_prompt_that_are_no_utf8_are_shown_as_replacement_characters(run_folder: Path, capsys: Captured) -> None:
    prompt = b"caf\xc3\xa9 \xe9 and \xf0\x9f".decode("utf-8", "surrogateescape")
    assert call("generate", "--from", run_folder, "--prompt", prompt, "--length", 1) == 0
    assert capsys.readouterr().out.startswith("caf\xe9 \ufffd and \ufffd")
    assert call("generate", "--from", run_folder, "--prompt", "half \ud800") == 2
    said = capsys.readouterr()
    assert said.out == "" and "half of a surrogate pair" in said.err


def test_no_generated_text_steers_a_terminal_and_a_pipe_has_its_bytes(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    said = "a\x1b[2J\tb\r\n\x9bc\x07\x7f"
    monkeypatch.setattr("overnight.byte_lm.generate.generate", lambda *args: iter(said))
    assert call("generate", "--from", run_folder, "--prompt", "\x1b ") == 0
    assert capsys.readouterr().out == f"\x1b {said}\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert call("generate", "--from", run_folder, "--prompt", "\x1b ") == 0
    assert capsys.readouterr().out == "\ufffd a\ufffd[2J\tb\ufffd\n\ufffdc\ufffd\ufffd\n"


def test_a_run_without_a_checkpoint_and_a_damaged_one_are_said(run_folder: Path, capsys: Captured) -> None:
    newest = run_folder / "checkpoints" / "step-0000002" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-4] + b"xxxx")
    assert call("generate", "--from", run_folder) == 1
    assert "was cut short or changed" in capsys.readouterr().err
    shutil.rmtree(run_folder / "checkpoints")
    assert call("generate", "--from", run_folder) == 1
    assert "has no checkpoint" in capsys.readouterr().err
