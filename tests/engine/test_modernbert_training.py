"""A run of ModernBERT begins at the unigram, resumes bit by bit, and trains in every precision."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from overnight.checkpoint import reader
from overnight.config import Run
from overnight.corpus.shards import open_shards
from overnight.distributed.world import World
from overnight.engine import loop
from overnight.engine.evaluate import evaluate
from overnight.engine.metrics_logger import not_learned
from overnight.engine.workload import BertWorkload, token_counts
from overnight.errors import DataError
from tests.conftest import modern_settings
from tests.engine.test_pretrain import Stop, assert_same_run, finish, metrics, parameters

Make = Callable[..., Run]


def workload(run: Run) -> BertWorkload:
    return BertWorkload(run, World(device=torch.device("cpu")))  # type: ignore[arg-type]


def test_the_counts_are_those_of_the_training_text_or_of_equally_spaced_tokens_of_much_of_it(
    tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = open_shards(tiny().data_dir, "train")
    tokens = np.concatenate([shard.tokens for shard in shards])
    assert np.array_equal(token_counts(shards, 600), np.bincount(tokens, minlength=600))
    monkeypatch.setattr("overnight.engine.workload._COUNTED", len(tokens) // 3)
    assert np.array_equal(token_counts(shards, 600), sum(np.bincount(shard.tokens[::3], minlength=600) for shard in shards))


def test_it_begins_at_the_unigram_of_its_corpus_unless_told_not_to(tiny: Make) -> None:
    run = tiny(**modern_settings())
    counts = np.maximum(token_counts(open_shards(run.data_dir, "train"), 600), 1)
    bias = workload(run).model.mlm.bias
    assert np.allclose(bias[:600].detach().numpy(), np.log(counts / counts.sum()), atol=1e-5) and (bias[600:] == 0).all()
    plain = workload(tiny(**modern_settings(unigram_bias=False))).model
    assert (plain.mlm.bias == 0).all()
    # Nothing else differs: the counts draw no random numbers.
    for (name, a), b in zip(workload(run).model.named_parameters(), plain.parameters(), strict=True):
        assert name == "mlm.bias" or torch.equal(a, b), name


def test_the_unigram_is_a_better_beginning(tiny: Make, tmp_path: Any) -> None:
    first = {}
    for unigram in (True, False):
        run = tiny(**modern_settings(unigram_bias=unigram), out=str(tmp_path / str(unigram)))
        finish(run)
        first[unigram] = next(line["mlm_loss"] for line in metrics(run) if line["kind"] == "train")
    assert first[True] < first[False] - 0.5 and first[False] == pytest.approx(np.log(600), rel=0.02)


@pytest.mark.parametrize(
    ("precision", "at"),
    [
        pytest.param(*case, marks=() if case in (("fp32", 1), ("bf16", 5), ("fp16", 7)) else pytest.mark.heavy)
        for case in product(("fp32", "bf16", "fp16"), (1, 5, 7))
    ],
)
def test_a_crash_does_not_change_the_result(precision: str, at: int, tiny: Make, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    falling = {"token_matching": 0.5, "token_matching_steps": 4, "final_token_matching": 0.2}
    settings = {**modern_settings(dropout=0.1), "precision": precision, **{f"phases.short.{key}": value for key, value in falling.items()}}
    whole, cut = (tiny(**settings, out=str(tmp_path / name)) for name in ("whole", "cut"))
    finish(whole)
    real, count = loop.clip_and_step, 0

    def crash(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        if count == at + 1:
            raise Stop
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "clip_and_step", crash)
        with pytest.raises(Stop):
            finish(cut)
    finish(cut)
    assert_same_run(cut, whole)


def test_16_bits_follow_fp32(tiny: Make, tmp_path: Any) -> None:
    found = {}
    for precision in ("fp32", "bf16", "fp16"):
        run = tiny(**modern_settings(), precision=precision, out=str(tmp_path / precision))
        finish(run)
        found[precision] = [line["mlm_loss"] for line in metrics(run) if line["kind"] == "eval"]
        assert all(tensor.dtype == torch.float32 for name, tensor in parameters(run).items() if not name.startswith("optimizer "))
    assert found["bf16"] != found["fp32"] and found["bf16"] == pytest.approx(found["fp32"], rel=0.01)
    assert found["fp16"] != found["fp32"] and found["fp16"] == pytest.approx(found["fp32"], rel=0.01)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_and_micro_batches_change_no_result(recompute: str, tiny: Make, tmp_path: Any) -> None:
    plain = tiny(**modern_settings(dropout=0.1), out=str(tmp_path / "plain"))
    less = tiny(**modern_settings(dropout=0.1), **{"memory.activation_checkpointing": recompute}, out=str(tmp_path / "less"))
    for run in (plain, less):
        finish(run)
    mine, theirs = parameters(less), parameters(plain)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_run_with_token_matching_validates_as_any_other(tiny: Make) -> None:
    run = tiny(**modern_settings(), **{"phases.short.token_matching": 0.5})
    finish(run)
    for line in metrics(run):
        if line["kind"] in ("train", "eval"):
            assert ("match_loss" in line) == (line["kind"] == "train" and line["phase"] == "short"), line
    assert evaluate(run, "valid").metrics.keys() == {"mlm_loss", "perplexity", "mlm_accuracy"}  # type: ignore[arg-type]


def test_the_loss_of_token_matching_counts_less_where_its_share_is_below_a_quarter(tiny: Make) -> None:
    falling = {"token_matching": 0.8, "token_matching_steps": 2, "final_token_matching": 0.2}
    run = tiny(**modern_settings(), **{f"phases.short.{key}": value for key, value in falling.items()})
    finish(run)
    lines = [line for line in metrics(run) if line["kind"] == "train" and line["phase"] == "short"]
    assert [line["step"] for line in lines][:4] == [1, 2, 3, 4]
    for line in lines:
        weight = 1.0 if line["step"] <= 2 else 0.8
        assert line["loss"] == pytest.approx(line["mlm_loss"] + weight * line["match_loss"], rel=1e-6), line["step"]


@pytest.mark.parametrize(
    ("steps", "at", "said"), [(4, 4, "raise token_matching_steps or"), (0, 6, "raise steps or"), (8, 6, "raise steps or")]
)
def test_token_matching_that_is_not_learned_in_its_steps_is_said_once(steps: int, at: int, said: str, tiny: Make) -> None:
    run = tiny(**modern_settings(), **{"phases.short.token_matching": 0.8, "phases.short.token_matching_steps": steps})
    finish(run)
    lines = [json.loads(text) for text in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    [event] = [line for line in lines if line.get("event") == "token_matching" and line["phase"] == "short"]
    assert event["message"].startswith(f"token matching is not learned after {at} steps (loss 1.") and said in event["message"]


def test_what_goes_on_with_fewer_sequences_is_judged_again_at_the_end_of_the_phase(tiny: Make) -> None:
    falling = {"token_matching": 0.8, "token_matching_steps": 4, "final_token_matching": 0.2}
    run = tiny(**modern_settings(), **{f"phases.short.{key}": value for key, value in falling.items()})
    finish(run)
    events = [json.loads(text) for text in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    first, last = (line["message"] for line in events if line.get("event") == "token_matching")
    assert first.startswith("token matching is not learned after 4 steps (loss 1.")
    assert first.endswith("20.0 % of the sequences are still pairs, and the end of the phase says whether that is too few")
    assert last.startswith("token matching is not learned after 6 steps") and last.endswith("raise token_matching_steps or token_matching")
    phase = run.phases["short"]
    assert not_learned(phase, 6, 1, {"match": 0.05}) == "" == not_learned(phase, 5, 1, {"match": 1.0})


def test_a_run_is_evaluated_and_a_checkpoint_of_bert_is_refused(tiny: Make, pretrained: Run) -> None:
    run = tiny(**modern_settings())
    finish(run)
    last = [line for line in metrics(run) if line["kind"] == "eval"][-1]
    assert evaluate(run, "valid").metrics["mlm_loss"] == pytest.approx(last["mlm_loss"], rel=0.1)  # type: ignore[arg-type]
    place = reader.newest_checkpoint(run.run_dir / "checkpoints")
    theirs = reader.newest_checkpoint(pretrained.run_dir / "checkpoints")
    assert place is not None and theirs is not None
    shutil.rmtree(place)
    shutil.copytree(theirs, place)
    with pytest.raises(
        DataError, match=r"belongs to another model: encoder\.layers\.0\.down\.weight: float32 \[32, 128\] there, float32 \[32, 64\] here"
    ):
        evaluate(run, "valid")  # type: ignore[arg-type]
