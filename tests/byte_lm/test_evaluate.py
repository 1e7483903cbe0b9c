"""Bits per byte are those of the equations, over exactly the bytes that were predicted."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from overnight.batches.streams import Streams
from overnight.byte_lm import evaluate as module
from overnight.byte_lm.evaluate import evaluate
from overnight.cli.main import main
from overnight.config import ByteRun, stored_run
from overnight.console import Line
from overnight.corpus.pipeline import prepare
from overnight.corpus.shards import open_shards
from overnight.engine.finite import NonFiniteError
from overnight.errors import ConfigError, DataError
from overnight.interop.byte_models import import_byte_model
from tests.interop.byte_formula import Arrays, random_arrays, read, write_openai

WIDTH = 12


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    return random_arrays(WIDTH, 6)


@pytest.fixture(scope="module")
def run(arrays: Arrays, tmp_path_factory: pytest.TempPathFactory) -> ByteRun:
    """An imported model with a prepared corpus of 60 short documents, about half of them for the test."""
    folder = tmp_path_factory.mktemp("evaluate")
    chance = np.random.default_rng(0)
    words = ["Ödipus", "saw", "a", "film", "twice"]
    texts = [" ".join(words[k] for k in chance.integers(0, 5, 4 + i % 7)) + f" {i}" for i in range(60)]
    (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    import_byte_model(write_openai(folder / "openai", arrays), folder / "ours")
    data = [f"data.paths={folder / 'in.jsonl'}", f"data.dir={folder / 'data'}", "data.min_chars=1", "data.workers=1"]
    more = ["data.valid_fraction=0.1", "data.test_fraction=0.5", "compute.device=cpu", "compute.threads=1", "phases.elsewhere.seq_len=16"]
    made = stored_run(folder / "ours", data + more)
    prepare(made.data, made.data_dir, log=lambda text: None)
    return made


def stream_texts(run: ByteRun, groups: int | None) -> list[bytes]:
    """What each stream reads, from its first byte to its last."""
    streams = Streams(open_shards(run.data_dir, "test"), run.phases["elsewhere"], (run.seed, 0, 1))
    texts: dict[int, bytes] = {}
    for step in streams.whole(module._STREAMS) if groups is None else streams.random_groups(groups):
        for batch in step.micro:
            for stream, ids, targets in zip(batch.streams.tolist(), batch.ids_BT, batch.targets["byte"], strict=True):
                known = targets[targets >= 0].tolist()
                texts[stream] = texts.get(stream, bytes(ids[:1].tolist())) + bytes(known)
    return [texts[stream] for stream in sorted(texts)]


@pytest.mark.parametrize("groups", [3, 16, None])
def test_bits_are_those_of_the_equations_over_every_byte_that_has_one_before_it(
    groups: int | None, run: ByteRun, arrays: Arrays, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STREAMS", 4)
    texts = stream_texts(run, groups)
    log_p = [read(arrays, text, "ifog")[2] for text in texts]
    nats = sum(-table[t, text[t + 1]] for table, text in zip(log_p, texts, strict=True) for t in range(len(text) - 1))
    right = sum(table[t].argmax() == text[t + 1] for table, text in zip(log_p, texts, strict=True) for t in range(len(text) - 1))
    count = sum(len(text) - 1 for text in texts)
    found = evaluate(run, "test", groups)
    assert found.bytes == count
    assert found.bits == pytest.approx(nats / np.log(2) / count, rel=1e-5)
    assert found.accuracy == pytest.approx(right / count, abs=2 / count)
    if groups is None:
        whole = sum(len(shard.tokens) for shard in open_shards(run.data_dir, "test"))
        assert count == whole - len(texts)  # nothing stands before the first byte of a stream


def test_it_is_shown_how_much_is_read_and_how_long_the_rest_takes(run: ByteRun) -> None:
    out = io.StringIO()
    evaluate(run, "test", None, line=Line(out))
    assert re.fullmatch(r"test: \d+\.\d %  [\d,]+ bytes read  [\d,]+ bytes/s  left \d+ s\n", out.getvalue())


def test_so_many_bytes_are_read_and_no_more(run: ByteRun, arrays: Arrays, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STREAMS", 4)
    found, texts = evaluate(run, "test", None, max_tokens=100), stream_texts(run, None)
    assert found.bytes == 4 * 32  # a step of 4 windows of 16 bytes, and another
    log_p = [read(arrays, text[:32], "ifog")[2] for text in texts]
    nats = sum(-table[t, text[t + 1]] for table, text in zip(log_p, texts, strict=True) for t in range(32))
    assert found.bits == pytest.approx(nats / np.log(2) / 128, rel=1e-5)
    assert evaluate(run, "test", 3, max_tokens=1).bytes == 3 * 16
    assert evaluate(run, "test", 3, max_tokens=10**9).bytes == evaluate(run, "test", 3).bytes


def test_a_split_that_is_not_there_and_a_number_that_makes_no_sense_are_refused(run: ByteRun, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="must be 1 or more"):
        evaluate(run, "test", 0)
    monkeypatch.setattr(module, "open_shards", lambda folder, split: [])
    with pytest.raises(DataError, match=r"holds no test text; raise data\.test_fraction"):
        evaluate(run, "test")


def test_a_model_that_also_learned_labels_is_measured_on_text_without_them(run: ByteRun) -> None:
    learned = replace(run, phases={name: replace(phase, label_weight=0.1) for name, phase in run.phases.items()})
    assert evaluate(learned, "test").bits == evaluate(run, "test").bits


def test_a_loss_that_is_no_number_is_an_error(run: ByteRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.loop, "evaluate", lambda *args: {"byte_loss": float("nan"), "byte_accuracy": 0.0})
    with pytest.raises(NonFiniteError, match="computes numbers that are not finite"):
        evaluate(run, "test")


def test_the_command_says_bits_and_over_how_many_bytes(
    run: ByteRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["evaluate", "--from", str(run.run_dir), f"--data.dir={run.data_dir}", "--compute.device=cpu"]
    assert main([*argv, "--split", "valid", "--whole"]) == 0
    found = evaluate(run, "valid", None)
    assert f"{found.bits:.4f} bits per byte over {found.bytes:,} bytes of valid" in capsys.readouterr().out
    assert main([*argv, "--whole", "--groups", "2"]) == 2
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(module, "evaluate", lambda run, *how: (asked.append(how[:3]), found)[1])
    assert main([*argv, "--max-tokens", "20"]) == 0 and asked == [("test", 16, 20)]


def test_a_letter_of_two_bytes_counts_as_two_and_nothing_is_called_a_character(
    run: ByteRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["evaluate", "--from", str(run.run_dir), f"--data.dir={run.data_dir}", "--compute.device=cpu", "--whole"]
    assert main([*argv, "--json", str(tmp_path / "found.json")]) == 0
    found, texts = json.loads((tmp_path / "found.json").read_text()), stream_texts(run, None)
    assert set(found) == {"split", "bits_per_byte", "byte_accuracy", "bytes", "seconds"}
    assert found["bytes"] == sum(len(text) - 1 for text in texts) > sum(len(text.decode()) for text in texts)
    assert "character" not in capsys.readouterr().out
