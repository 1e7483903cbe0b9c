"""`overnight evaluate` of encoders: what is named is measured, one form for runs and Hugging Face folders, and a run keeps its results."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from overnight import config
from overnight.cli.main import main
from overnight.config import BertRun, Data, Run
from overnight.console import Line
from overnight.corpus.pipeline import prepare
from overnight.corpus.shards import load_manifest
from overnight.evaluation.evaluate import evaluate_run
from overnight.evaluation.results import kept_results
from tests.evaluation.sample import row, write_paradigms

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def run(pretrained: Run, tmp_path: Path) -> Path:
    """A run folder of one's own."""
    return Path(shutil.copytree(pretrained.run_dir, tmp_path / "run"))


@pytest.fixture(scope="module")
def blimp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = ("is", "are", "was", "the", "of", "object")
    rows = {f"p{i}": [row(f"the object {a} {b}", f"the {b} object {a}", f"t{i % 2}") for a in words for b in words] for i in range(3)}
    return write_paradigms(tmp_path_factory.mktemp("blimp"), rows)


@pytest.fixture(scope="module")
def text(tiny_data: Path) -> str:
    return str(tiny_data.parent / "topics.jsonl")


def call(source: Path, *words: str) -> int:
    return main(["evaluate", "--from", str(source), "--compute.threads=1", "--compute.device=cpu", *words])


def results(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def test_a_run_and_its_export_are_measured_on_the_same_text_and_pairs(run: Path, blimp: Path, text: str, capsys: Captured) -> None:
    pytest.importorskip("transformers")
    folder = run.parent / "hf"
    assert main(["export", "--from", str(run), "--to", str(folder)]) == 0
    more = ("--text", text, "--max-tokens=5000", f"--blimp={blimp}", "--pairs=9", "--json")
    assert call(run, *more, str(run / "x.json")) == 0 == call(folder, *more, str(run / "y.json")), capsys.readouterr().err
    ours, theirs = results(run / "x.json"), results(run / "y.json")
    for key in (
        "bits_per_character",
        "word_bits_per_character",
        "masked_accuracy",
        "blimp",
        "blimp_standard_error",
        "blimp_pairs",
        "text",
        "characters",
    ):
        assert ours[key] == pytest.approx(theirs[key], rel=1e-4) if isinstance(ours[key], float) else ours[key] == theirs[key], key
    assert (
        ours["blimp_pairs"] == 9 and ours["text"] == f"{text}, 5,000 tokens" and 0 < ours["bits_per_character"] < 10 and "split" not in ours
    )
    assert ours["details"]["blimp"]["total"] == 27 and set(ours["details"]["blimp"]["terms"]) == {"t0", "t1"}
    assert list((run / "evaluation").iterdir()) and list((run.parent / "hf.evaluation").iterdir())
    assert {path.name for path in folder.iterdir()} >= {"config.json"} and not (folder / "evaluation.json").exists()
    out = capsys.readouterr().out
    assert "BLiMP: " in out and "mean of 3 paradigms, 27 pairs" in out and f"{text}, 5,000 tokens: bits per character " in out


def test_nothing_named_is_the_validation_text_and_what_is_measured_is_kept_together(
    run: Path, blimp: Path, text: str, tiny_data: Path
) -> None:
    assert call(run) == 0
    assert set(kept_results(run)["texts"]) == {"valid"} and "blimp" not in kept_results(run)
    assert call(run, f"--blimp={blimp}", "--pairs=2") == 0 == call(run, "--text", text, "--max-tokens=2000")
    kept = kept_results(run)
    assert set(kept["texts"]) == {"valid", f"{text}, 2,000 tokens"} and kept["blimp"]["pairs"] == 2 and kept["checkpoint"] == "step-0000010"
    (run / "evaluation.json").write_text(json.dumps({**results(run / "evaluation.json"), "model": "another"}))  # damaged: it has a seal
    assert kept_results(run) == {}
    assert call(run, "--split=train", "--max-tokens=500", f"--json={run / 'z.json'}") == 0
    assert call(run, f"--data.dir={tiny_data}", "--max-tokens=500") == 0
    assert (
        set(kept_results(run)["texts"]) == {"train, 500 tokens", f"{tiny_data}, valid, 500 tokens"}
        and results(run / "z.json")["split"]["name"] == "train"
    )


def test_a_text_is_cut_into_sequences_of_the_length_that_is_asked_for(run: Path, text: str, tmp_path: Path, capsys: Captured) -> None:
    more = ("--text", text, "--max-tokens=5000", f"--json={tmp_path / 'x.json'}")
    found = {}
    for length in (8, 16, 48):
        assert call(run, *more, f"--seq-len={length}") == 0
        found[length] = results(tmp_path / "x.json")
    assert set(kept_results(run)["texts"]) == {f"{text}, 5,000 tokens, sequences of {length}" for length in found}
    tokens = {length: result["details"]["texts"][f"{text}, 5,000 tokens, sequences of {length}"] for length, result in found.items()}
    assert len({one["characters"] for one in found.values()}) == len({one["tokens"] for one in tokens.values()}) == 1
    masked = {length: one["masked_tokens"] for length, one in tokens.items()}
    count = tokens[8]["tokens"]
    # One of each six and fewer beside [CLS] and [SEP]; of longer sequences about 15 %, those two counted in.
    assert count / 6 <= masked[8] < count / 4 and len(set(masked.values())) == 3
    assert 0.15 * count < masked[48] < 0.15 * count * 48 / 40
    assert call(run, *more, "--seq-len=64") == 2
    assert f"--seq-len = 64: must be at most 48, as many positions as {run} has" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--pairs=1", "--blimp=x"], "--pairs = 1: must be 2 or more"),
        (["--pairs=5"], "--pairs = 5: needs --blimp=PATH"),
        (["--max-tokens=0"], "--max-tokens = 0: must be 1 or more"),
        (["--seq-len=7"], "--seq-len = 7: must be 8 or more"),
        (["--seq-len=64", "--blimp=x"], "--seq-len = 64: applies to a text, and BLiMP consists of single sentences"),
        (["--json=."], "--json = .: is a folder"),
        (["--json="], "--json = '': name a file"),
        (["--blimp="], "--blimp = '': name a file"),
        (["--text", "x", ""], "--text = '': name a file"),
        (["--groups=2"], "--groups = 2: only a byte model reads groups"),
        (["--groups=0"], "--groups = 0: only a byte model reads groups"),
        (["--whole"], "--whole = True: only a byte model reads groups"),
        (["--data.dir=nowhere"], "nowhere: holds no prepared data from which to read the valid text; name its folder with --data.dir"),
        (["--blimp=nowhere"], "nowhere: does not exist; name blimp.tar.xz"),
        (["--text", "nowhere.txt"], "nowhere.txt: there is no such file"),
        (
            ["--model.num_layers=3"],
            "--model.num_layers: `overnight evaluate` takes only run-level keys, such as --precision=bf16 and --data.dir",
        ),
        (["--text", "x", "--data.field=body", "--data.format=word"], "data.format = 'word'"),
    ],
)
def test_what_cannot_be_measured_is_refused(words: list[str], said: str, run: Path, capsys: Captured) -> None:
    assert call(run, *words) in (1, 2)
    assert said in capsys.readouterr().err
    assert not (run / "evaluation.json").exists()


def test_a_folder_of_others_needs_a_text_and_a_byte_model_has_none(run: Path, tmp_path: Path, capsys: Captured) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "bert"}')
    assert call(folder) == 2 and "name what to measure it on: --text FILE, --data.dir=FOLDER" in capsys.readouterr().err
    assert call(folder, "--split=valid") == 2 and "has no data of its own" in capsys.readouterr().err
    assert call(folder, "--text", "x", "--phases.a.steps=1") == 2 and "takes only run-level keys" in capsys.readouterr().err
    tree = {"name": "x", "model": {"kind": "mlstm"}, "phases": {"a": {"steps": 9, "global_batch_size": 32}}, "data": {"tokenizer": "bytes"}}
    (tmp_path / "bytes").mkdir()
    (tmp_path / "bytes" / "run.yaml").write_text(config.run_yaml(config.build_run(tree)))
    assert call(tmp_path / "bytes", "--blimp=x") == 2 and "--blimp = x: is for masked language models" in capsys.readouterr().err


def test_a_text_is_read_alike_whatever_the_recipe_says_of_its_own(run: Path, tmp_path: Path) -> None:
    (tmp_path / "body.jsonl").write_text(
        "".join(json.dumps({"body": f"An object is number {i}. It has a type."}) + "\n" for i in range(30))
    )
    assert call(run, "--text", str(tmp_path / "body.jsonl"), "--data.field=body", f"--json={tmp_path / 'x.json'}") == 0
    assert results(tmp_path / "x.json")["characters"] == sum(len(f"An object is number {i}. It has a type.") for i in range(30))


def test_text_that_a_run_was_trained_on_is_said(run: Path, text: str, tmp_path: Path, capsys: Captured) -> None:
    manifest = load_manifest(config.stored_run(run).data_dir)
    assert call(run, "--text", text, "--max-tokens=2000") == 0
    said = re.search(r"warning: (\d+) of (\d+) documents of --text are text that it was trained on, word for word", capsys.readouterr().out)
    assert said and int(said[2]) == len(Path(text).read_text().splitlines())
    assert 0 <= int(said[1]) - manifest.count("train", "documents") <= manifest.duplicates  # each that stands twice was trained on once
    (tmp_path / "new.jsonl").write_text(json.dumps({"text": "It returns an object that nobody has seen. " * 20}) + "\n")
    assert call(run, "--text", str(tmp_path / "new.jsonl"), "--max-tokens=2000") == 0
    assert "trained on" not in capsys.readouterr().out


def test_a_run_is_measured_as_its_recipe_says_and_once(run: Path, blimp: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAIRS", str(blimp))
    made = config.stored_run(run, ["evaluation.blimp=$PAIRS", "evaluation.blimp_pairs=3"])
    assert isinstance(made, BertRun)
    first, second = io.StringIO(), io.StringIO()
    evaluate_run(made, Line(first))
    kept = (run / "evaluation.json").read_bytes()
    evaluate_run(made, Line(second))
    assert "valid: bits per character" in first.getvalue() and "bits per character" not in second.getvalue()
    assert "mean of 3 paradigms, 9 pairs" in first.getvalue() and (run / "evaluation.json").read_bytes() == kept


def test_a_run_whose_valid_text_is_unknown_to_its_vocabulary_is_measured_without_it(run: Path, blimp: Path, tmp_path: Path) -> None:
    (tmp_path / "snow.jsonl").write_text("".join(json.dumps({"text": f"The object {i} is a \u2603."}) + "\n" for i in range(20)))
    given = Data(
        paths=[str(tmp_path / "snow.jsonl")],
        vocab_file=str(run / "corpus/vocab.txt"),
        vocab_size=600,
        min_chars=1,
        valid_fraction=0.5,
        workers=1,
    )
    prepare(given, tmp_path / "snow", lambda text: None)
    made = config.stored_run(run, [f"data.dir={tmp_path / 'snow'}", f"evaluation.blimp={blimp}", "evaluation.blimp_pairs=3"])
    assert isinstance(made, BertRun)
    evaluate_run(made, Line(said := io.StringIO()))
    assert (
        f"{tmp_path / 'snow'}, valid: each of its sentences has an unknown token, so there are no bits per character\n" in said.getvalue()
    )
    assert "mean of 3 paradigms, 9 pairs" in said.getvalue() and results(run / "evaluation.json")["texts"] == {}
