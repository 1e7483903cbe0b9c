"""A classifier at work is measured beside its peers, which compute the same, or are refused."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from overnight.bench import infer, infer_peers, infer_texts, train
from overnight.cli.main import main
from overnight.corpus.tokenizer import load_tokenizer
from overnight.errors import DataError
from overnight.models.int8 import is_exact
from tests.bench.test_benchmarks import assert_result, one_thread  # noqa: F401


@pytest.fixture
def few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of no more than the words of the texts."""
    monkeypatch.setattr(infer_texts, "VOCABULARY", 0)


@pytest.mark.usefixtures("few_words")
def test_a_classifier_at_work_is_measured_beside_its_peer(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert main(["bench", "infer", "--tiny"]) == 0
    rows = {row["name"]: row for row in assert_result(capsys.readouterr().out, "infer")}
    assert rows["bert-tiny logits of transformers"]["value"] < infer.TOLERANCE < rows["bert-tiny logits of overnight bf16"]["value"]
    for case in infer.TINY:
        own = [(f"bert-tiny {case.name} {precision}", "overnight fp32") for precision in ("bf16", *(["int8"] if is_exact() else []))]
        for name, peer in ((f"bert-tiny {case.name}, transformers", "transformers"), *own):
            units = {rows[name + what]["unit"] for what in (", median", ", p95")}
            assert rows[name]["unit"] == "sequences/s" and units == {"ms"} and rows[name]["peer"] == peer


def test_a_classifier_at_work_is_measured_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infer, "TINY", infer.TINY[1:2])
    assert main(["bench", "infer", "--tiny", "--peer", "none"]) == 0
    assert all(row.get("peer", "overnight fp32") == "overnight fp32" for row in assert_result(capsys.readouterr().out, "infer"))


def test_a_peer_that_computes_something_else_is_no_peer() -> None:
    def candidate(name: str, off: float) -> infer_peers.Candidate:
        return infer_peers.Candidate(name, list, lambda texts: np.full((len(texts), 3), off))

    right = {"overnight": candidate("overnight", 0.0), "overnight bf16": candidate("overnight bf16", 0.1)}
    (row,) = infer.compared("tiny", right, ["one"])
    assert row.value == pytest.approx(0.1)
    for off in (2e-4, math.nan):
        with pytest.raises(DataError, match="tiny: peer differs from overnight"):
            infer.compared("tiny", right | {"peer": candidate("peer", off)}, ["one"])


@pytest.mark.usefixtures("few_words")
def test_texts_of_a_length_have_so_many_tokens(tmp_path: Path) -> None:
    natural = infer_texts.natural_texts()
    infer_texts.write_classifier(tmp_path / "model", train.NETWORKS["bert-tiny"], natural, onnx=False)
    tokenizer = load_tokenizer(tmp_path / "model-tokenizer")
    texts = infer_texts.texts_of_length(natural, 40, 7)
    assert [len(encoding.ids) for encoding in tokenizer.encode_batch(texts)] == [40] * 7 and len(set(texts)) == 7


@pytest.mark.parametrize(("threads", "order"), [(1, ["ax", "bx", "ay", "by"]), (2, ["ax", "ay", "bx", "by"])])
def test_candidates_take_turns_and_the_first_round_does_not_count(threads: int, order: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    monkeypatch.setattr(infer, "_PAUSE", 0.0)
    functions = {name: lambda part, name=name: said.append(name + part[0]) for name in "ab"}
    found = infer.take_turns(functions, [["x"], ["y"]], 2)
    assert said == order * 3
    assert {name: [len(row) for row in times] for name, times in found.items()} == {"a": [2, 2], "b": [2, 2]}
    assert infer.percentile([float(n) for n in range(101)], 0.95) == pytest.approx(95)
