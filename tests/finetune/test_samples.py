"""What a finished run shows of itself: drawn by its seed from validation text, the same each time."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
from pathlib import Path

import pytest

from overnight import config
from overnight.byte_lm.generate import generate
from overnight.config import Run
from overnight.console import Line
from overnight.corpus.pipeline import prepare
from overnight.corpus.shards import load_manifest, open_shards
from overnight.corpus.tokenizer import load_tokenizer
from overnight.engine.pretrain import pretrain
from overnight.errors import DataError
from overnight.finetune import samples as module
from overnight.finetune.predict import predict
from overnight.finetune.samples import filled_masks, write_samples
from overnight.interop.byte_models import ready_model
from overnight.report.summary import quoted, summary_text


@pytest.fixture
def run(pretrained: Run, tmp_path: Path) -> Run:
    """A finished run whose folder may be written to."""
    shutil.copytree(pretrained.run_dir, tmp_path / "run")
    return dataclasses.replace(pretrained, out=str(tmp_path / "run"))


def plain(text: str) -> str:
    """Return a text without the spaces that decoding leaves before some marks."""
    return re.sub(r" (?=[.,;:?!])", "", text)


def test_masked_words_are_of_validation_sentences_and_the_guesses_are_those_of_predict(run: Run) -> None:
    tokenizer, found = load_tokenizer(run.data_dir), filled_masks(run)
    validation = plain(" ".join(tokenizer.decode(shard.tokens.tolist()) for shard in open_shards(run.data_dir, "valid")))
    assert 1 <= len(found) <= module.SENTENCES and len({mask["text"] for mask in found}) == len(found)
    for mask, answer in zip(found, predict(run, "mask", [mask["text"] for mask in found]), strict=True):
        assert mask["text"].count("[MASK]") == 1 and plain(mask["text"].replace("[MASK]", mask["word"])) in validation
        assert len(mask["word"]) >= 4 and mask["word"].isalpha()
        assert mask["guesses"] == answer["masks"][0][:3]
        shares = [guess["probability"] for guess in mask["guesses"]]
        assert shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 1
    assert found == filled_masks(run), "the same again"


def test_a_sentence_that_several_documents_have_is_shown_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SENTENCES", 40)
    monkeypatch.setattr(module, "open_shards", lambda *args, **options: open_shards(*args, **options) * 3)
    sentences = [mask["text"].replace("[MASK]", mask["word"]) for mask in filled_masks(run)]
    assert len(set(sentences)) == len(sentences) > 5


def test_damaged_samples_are_made_anew_and_refused_by_the_report(run: Run) -> None:
    path = run.run_dir / "samples.json"
    write_samples(run)
    whole = path.read_text()
    path.write_text(whole.replace('"valid"', '"vapid"'))
    with pytest.raises(DataError, match=r"samples\.json: was changed since it was written, its checksum differs; remove the file"):
        summary_text(run.run_dir)
    write_samples(run)
    assert path.read_text() == whole


def test_samples_are_written_once_a_checkpoint_and_shown_in_the_summary(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run.run_dir / "samples.json"
    write_samples(run)
    found = json.loads(path.read_text())
    manifest = load_manifest(run.data_dir)
    assert found["corpus"]["valid"] == {what: manifest.count("valid", what) for what in ("documents", "tokens")}
    text = summary_text(run.run_dir)
    assert f"{found['parameters']:,} parameters, trained on " in text
    for mask in found["masks"]:
        best = mask["guesses"][0]
        assert (
            f"- {mask['text']}\n  {quoted(best['token'])} {100 * best['probability']:.1f} %, " in text
            and f"(right: {mask['word']})" in text
        )
    monkeypatch.setattr(module, "filled_masks", lambda run: pytest.fail("made anew"))
    write_samples(run)
    shutil.rmtree(run.run_dir / "checkpoints" / found["checkpoint"])
    monkeypatch.setattr(module, "filled_masks", lambda run: [])
    write_samples(run)
    assert json.loads(path.read_text())["checkpoint"] != found["checkpoint"]


def test_without_validation_sentences_nothing_is_masked(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "open_shards", lambda *place, **more: [])
    assert filled_masks(run) == []


@pytest.fixture
def byte_run(tmp_path: Path) -> Run:
    """A finished run of a byte model."""
    source = tmp_path / "lines.jsonl"
    source.write_text(
        "".join(json.dumps({"text": f"the number {i} is followed by {i + 1} and more words. " * 4}) + "\n" for i in range(60))
    )
    tree = {
        "name": "small",
        "out": str(tmp_path / "run"),
        "data": {"paths": [str(source)], "dir": str(tmp_path / "data"), "tokenizer": "bytes", "valid_fraction": 0.2, "workers": 1},
        "model": {"kind": "mlstm", "num_layers": 1, "hidden_size": 16, "embedding_size": 8},
        "phases": {"only": {"steps": 2, "global_batch_size": 2, "seq_len": 16, "num_document_groups": 4, "micro_batch_size": 2}},
        "compute": {"device": "cpu", "threads": 1},
        "checkpoint": {"save_every": 2},
        "logging": {"eval_examples": 4},
    }
    run = config.build_run(tree)
    prepare(run.data, run.data_dir, log=lambda text: None)
    pretrain(run, Line(io.StringIO()))
    return run


def test_a_byte_model_goes_on_with_validation_beginnings(byte_run: Run) -> None:
    run = byte_run
    write_samples(run)
    texts = json.loads((run.run_dir / "samples.json").read_text())["texts"]
    assert len(texts) == 2 and all(
        text["prompt"].startswith("the number ") and len(text["prompt"]) <= 60 and text["text"] for text in texts
    )
    assert f"- {texts[0]['prompt']} | " in summary_text(run.run_dir)
    assert module.continued_texts(run) == texts


def test_what_follows_each_beginning_has_draws_of_its_own(byte_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PROMPT_BYTES", 12)  # each prompt is "the number", and so is all that the network knows
    first, second = module.continued_texts(byte_run)
    assert first["prompt"] == second["prompt"] and first["text"] != second["text"]
    model, dtype = ready_model(byte_run)  # type: ignore[arg-type]
    assert first["text"] == "".join(generate(model, first["prompt"], 120, 0.7, byte_run.seed, None, dtype))
