"""`overnight run`: one command from text to a report, which may be killed anywhere and is nothing when it is done."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from overnight import config
from overnight.batches.packing import Batch
from overnight.checkpoint import reader
from overnight.cli.main import main
from overnight.config import Run
from overnight.corpus.tokenizer import load_vocabulary
from overnight.models.bert import BertForPretraining
from tests.conftest import modern_settings, tiny_tree
from tests.processes import overnight
from tests.recipe import change

STAGES = ("prepare", "pretrain short, long", "fine-tune opinion", "evaluate", "export to", "report")


def write_recipe(folder: Path, source: Path) -> Path:
    table = folder / "opinion.csv"
    rows = "".join(f"a {word} object {i},{label}\n" for i in range(20) for word, label in (("good", "yes"), ("bad", "no")))
    table.write_text("text,label\n" + rows)
    spec = {
        "task": "csv",
        "path": str(table),
        "epochs": 2,
        "global_batch_size": 8,
        "micro_batch_size": 8,
        "lr": 3e-3,
        "seq_len": 16,
        "seeds": [0, 1],
        "random_init_seeds": 2,
    }
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**tiny_tree(folder, source), "finetune": {"opinion": spec}}, sort_keys=False))
    return recipe


@pytest.fixture(scope="module")
def finished(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, str]:
    """A run that was not disturbed, made by another process, and what it printed."""
    folder = tmp_path_factory.mktemp("everything")
    recipe, errors = write_recipe(folder, tiny_data.parent / "topics.jsonl"), folder / "errors"
    with overnight("run", recipe, errors=errors) as process:
        code, output = process.end()
    assert (code, errors.read_text()) == (0, "")
    return config.load_run(str(recipe)), output


def results(run: Run) -> dict[str, bytes]:
    """Every file that says what was learned and measured: without clocks, page and environment."""
    keep = ("checkpoints/*/*.safetensors", "export/*", "finetune/*/model.safetensors", "finetune/*/predictions.json")
    return {str(p.relative_to(run.run_dir)): p.read_bytes() for pattern in keep for p in run.run_dir.glob(pattern)}


def scores(run: Run) -> list[tuple[str, int, float]]:
    lines = [json.loads(text) for text in (run.run_dir / "tasks.jsonl").read_text().splitlines()]
    return [(e["init"], e["seed"], e["value"]) for e in lines if e["kind"] == "finetune"]


def test_it_says_its_stages_and_results(finished: tuple[Run, str]) -> None:
    run, out = finished
    assert "run tiny: 6 stages: prepare, pretrain, fine-tune opinion, evaluate, export, report" in out
    places = [out.index(f"[{number}/6] {stage}") for number, stage in enumerate(STAGES, 1)]
    assert places == sorted(places)
    for text in (
        "validation after",
        "short",
        "long",
        "random init",
        "opinion, accuracy",
        "valid: bits per character",
        "evaluated at step-0000010",
        "seed 0",
        "seed 1",
        "done in",
        "(right: ",
        "parameters, trained on ",
    ):
        assert text in out
    assert [s[:2] for s in scores(run)] == [("pretrained", 0), ("pretrained", 1), ("random", 0), ("random", 1)]


def test_the_report_holds_the_numbers(finished: tuple[Run, str]) -> None:
    run, _ = finished
    page = (run.run_dir / "report.html").read_text()
    lines = [json.loads(text) for text in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "eval"][-1]
    assert f"{100 * last['mlm_accuracy']:.1f} %" in page
    bits = json.loads((run.run_dir / "evaluation.json").read_text())["texts"]["valid"]["bits_per_character"]
    assert f"{bits:.3f}" in page and "plateau of a model without context" in page
    for init, seed, value in scores(run):
        assert f"{100 * value:.1f} %" in page, (init, seed)


def test_the_export_is_read_by_transformers_with_equal_logits(finished: tuple[Run, str]) -> None:
    transformers = pytest.importorskip("transformers")
    run, _ = finished
    theirs = transformers.AutoModelForPreTraining.from_pretrained(run.run_dir / "export").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.run_dir / "export")
    encoded = tokenizer("The value of an object.", "Every class defines methods.", return_tensors="pt")
    with torch.no_grad():
        expected = theirs(**encoded)
    vocabulary = load_vocabulary(run.data_dir)
    ours = BertForPretraining(run.model, vocabulary.size)
    assert reader.load_checkpoint(run.run_dir / "checkpoints", ours) is not None
    ours.eval()
    n = encoded["input_ids"].shape[1]
    batch = Batch(encoded["input_ids"][0], torch.arange(n), encoded["token_type_ids"][0], torch.tensor([0, n], dtype=torch.int32), (n,))
    with torch.no_grad():
        logits = ours.mlm_logits(ours.encoder(batch, torch.float32))
    torch.testing.assert_close(logits[:, : vocabulary.size], expected.prediction_logits[0], rtol=1e-5, atol=1e-5)


def test_a_run_of_modernbert_goes_through_every_stage(tmp_path: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    path = write_recipe(tmp_path, tiny_data.parent / "topics.jsonl")
    tree = change(yaml.safe_load(path.read_text()), {**modern_settings(), "data.dir": str(tiny_data)})
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    assert main(["run", str(path)]) == 0
    out = capsys.readouterr().out
    assert "opinion, accuracy" in out and "(right: " in out
    run = config.load_run(str(path))
    model, info = transformers.AutoModelForMaskedLM.from_pretrained(run.run_dir / "export", output_loading_info=True)
    assert type(model).__name__ == "ModernBertForMaskedLM" and not any(info.values())
    assert main(["report", str(run.run_dir)]) == 0 and main(["evaluate", "--from", str(run.run_dir)]) == 0
    assert main(["export", "--from", str(run.run_dir), "--task", "opinion", "--to", str(tmp_path / "task")]) == 0
    assert json.loads((tmp_path / "task" / "config.json").read_text())["id2label"] == {"0": "no", "1": "yes"}


def test_run_again_changes_nothing_that_was_learned(finished: tuple[Run, str], capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = finished
    learned = ("metrics.jsonl", "tasks.jsonl", "run.yaml", "env.json")
    before = results(run), [(run.run_dir / name).read_bytes() for name in learned]
    assert main(["run", str(run.run_dir.parent / "recipe.yaml")]) == 0
    out = capsys.readouterr().out
    assert "opinion: done already" in out and "validation:" not in out
    assert before == (results(run), [(run.run_dir / name).read_bytes() for name in learned])


@pytest.mark.slow
def test_extended_it_does_all_that_followed_anew(tmp_path: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(write_recipe(tmp_path, tiny_data.parent / "topics.jsonl"))
    longer = ["run", recipe, "--phases.long.steps=7"]
    assert main(["run", recipe]) == 0
    run = config.load_run(recipe)
    before = results(run)
    assert main(longer) == 2 and "add --extend" in capsys.readouterr().err
    assert before == results(run)
    assert main([*longer, "--extend"]) == 0
    out, after = capsys.readouterr().out, results(run)
    assert "phase long has 7 steps instead of 4" in out and "opinion: seed 0 pretrained" in out and "opinion: done already" not in out
    assert "checkpoints/step-0000013/model.safetensors" in after and len(scores(run)) == 8
    for name in ("export/model.safetensors", "finetune/opinion/model.safetensors"):
        assert before[name] != after[name]
    assert main(longer) == 0 and "opinion: done already" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("sign", ["deduplicate", "short 3/6  validation", "opinion: seed 0 pretrained  acc", "[6/6]"])
def test_killed_at_any_stage_it_ends_as_the_undisturbed_run(sign: str, finished: tuple[Run, str], tmp_path: Path, tiny_data: Path) -> None:
    undisturbed, _ = finished
    recipe = write_recipe(tmp_path, tiny_data.parent / "topics.jsonl")
    with overnight("run", recipe, signal_at=(sign, signal.SIGKILL)) as process:
        code, output = process.end()
    assert code == -signal.SIGKILL, output
    assert main(["run", str(recipe)]) == 0
    run = config.load_run(str(recipe))
    assert scores(run) == scores(undisturbed)
    mine, theirs = results(run), results(undisturbed)
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if mine[name] != theirs[name]] == []


def test_a_task_without_its_data_is_refused_before_any_work(tmp_path: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, tiny_data.parent / "topics.jsonl")
    (tmp_path / "opinion.csv").unlink()
    assert main(["run", str(recipe)]) == 2
    assert "finetune.opinion.path = " in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["recipe.yaml"]


def test_a_task_without_its_rows_to_score_on_is_refused_before_any_work(
    tmp_path: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path, tiny_data.parent / "topics.jsonl")
    assert main(["run", str(recipe), f"--finetune.opinion.dev={tmp_path / 'nowhere.csv'}"]) == 2
    assert "nowhere.csv': does not exist; name the file to score on" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["opinion.csv", "recipe.yaml"]


def test_minimal_pairs_that_are_not_there_are_refused_before_any_work(
    tmp_path: Path, tiny_data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(tmp_path, tiny_data.parent / "topics.jsonl")
    monkeypatch.setenv("PAIRS", str(tmp_path / "nowhere"))
    assert main(["run", str(recipe), "--evaluation.blimp=$PAIRS/blimp"]) == 2
    assert "evaluation.blimp = '$PAIRS/blimp': does not exist; name blimp.tar.xz or its folder" in capsys.readouterr().err
    assert main(["run", str(recipe), "--evaluation.blimp=$NO_SUCH"]) == 2 and "NO_SUCH is not set" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["opinion.csv", "recipe.yaml"]


@pytest.mark.heavy
def test_real_text_and_a_real_task_go_through(real_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree = tiny_tree(tmp_path, real_data / "wiki" / "wiki_00")
    tree["data"] |= {"vocab_file": str(real_data / "vocab" / "bert-base-uncased-vocab.txt"), "vocab_size": 30522, "format": "wiki"}
    for phase in tree["phases"].values():
        phase["steps"] = 2
    spec = {
        "task": "sst",
        "path": str(real_data / "sst"),
        "epochs": 1,
        "global_batch_size": 16,
        "micro_batch_size": 16,
        "seq_len": 32,
        "max_train_examples": 64,
    }
    tree["finetune"] = {"sst": spec}
    recipe = tmp_path / "real.yaml"
    recipe.write_text(yaml.safe_dump(tree, sort_keys=False))
    assert main(["run", str(recipe)]) == 0
    out = capsys.readouterr().out
    assert "sst, accuracy" in out
    run = config.load_run(str(recipe))
    answers = json.loads((run.run_dir / "finetune" / "sst" / "predictions.json").read_text())
    assert len(answers) == 872 and set(answers.values()) <= {"0", "1"}
    word = load_file(run.run_dir / "export" / "model.safetensors")["bert.embeddings.word_embeddings.weight"]
    assert word.shape == (30522, 32) and np.isfinite(word.numpy()).all()
    assert os.listdir(run.run_dir / "checkpoints")
