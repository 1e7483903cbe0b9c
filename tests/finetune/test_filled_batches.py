"""Batches of a task: filled up to few shapes, against the same batches as they are; and rows that belong together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from overnight.batches.packing import Batch
from overnight.config import BertConfig, BertPhase, ModernBertConfig
from overnight.finetune.encoded_examples import EncodedExamples
from overnight.finetune.workload import TaskSamples
from overnight.models.heads import Classifier, QuestionAnswering, TokenClassifier
from tests.models.sample import MODERN_SIZES, SIZES, VOCAB, loud

COUNT, LONGEST, MULTIPLE = 200, 64, 64
BERT, MODERN = BertConfig(**SIZES), ModernBertConfig(**MODERN_SIZES)


def examples(kind: str) -> EncodedExamples:
    """Return sequences of random lengths with random targets."""
    chance = np.random.default_rng(0)
    lengths = chance.integers(4, LONGEST + 1, COUNT)
    ids = [chance.integers(5, VOCAB, n) for n in lengths]
    segments = [(np.arange(n) > n // 2).astype(np.int8) for n in lengths]
    targets: dict[str, np.ndarray] = {
        "classes": {"label": chance.integers(0, 3, COUNT)},
        "several": {"label": chance.integers(0, 2, (COUNT, 3)).astype(np.float32)},
        "numbers": {"label": chance.normal(size=COUNT).astype(np.float32)},
        "spans": {"start": chance.integers(0, lengths), "end": chance.integers(0, lengths)},
    }.get(kind, {})
    return EncodedExamples(
        ids, segments, targets, token_targets={"label": [chance.integers(0, 3, n) for n in lengths]} if kind == "tokens" else {}
    )


def network(kind: str, model: Any) -> nn.Module:
    """Return a network with a head that fits."""
    torch.manual_seed(0)
    if kind == "spans":
        return loud(QuestionAnswering(model, VOCAB))
    if kind == "tokens":
        return loud(TokenClassifier(model, VOCAB, 3))
    return loud(Classifier(model, VOCAB, 1 if kind == "numbers" else 3))


def learned(net: nn.Module, batch: Batch) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return correct predictions and losses, and the gradients of all parameters."""
    net.zero_grad()
    losses, correct = net.losses(batch, torch.float32)  # type: ignore[operator]
    torch.stack(list(losses.values())).sum().backward()
    return {**losses, **{f"{name} correct": count for name, count in correct.items()}}, [
        p.grad for p in net.parameters() if p.grad is not None
    ]


@pytest.mark.parametrize("model", [BERT, MODERN], ids=["bert", "modernbert"])
@pytest.mark.parametrize("kind", ["classes", "several", "numbers", "tokens", "spans"])
def test_what_fills_a_batch_up_changes_neither_loss_nor_gradient(kind: str, model: Any) -> None:
    rows, net, index = examples(kind), network(kind, model), np.arange(16)
    plain, filled = rows.batch(index), rows.batch(index, MULTIPLE, LONGEST, pad=3)
    assert len(filled.ids_N) > len(plain.ids_N) and (filled.ids_N[len(plain.ids_N) :] == 3).all()
    (expected, grads), (found, theirs) = learned(net, plain), learned(net, filled)
    assert found.keys() == expected.keys() and len(theirs) == len(grads)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)
    for mine, grad in zip(theirs, grads, strict=True):
        torch.testing.assert_close(mine, grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max()))


def test_the_steps_of_a_task_have_few_shapes() -> None:
    steps = [
        [examples("classes").step(step, 16, 8, (0,), pad_to_multiple=multiple, longest=LONGEST).micro for step in range(20)]
        for multiple in (0, MULTIPLE)
    ]
    plain, filled = ({(len(batch.ids_N), len(batch.lengths)) for micro in found for batch in micro} for found in steps)
    assert len(plain) > 20 and len(filled) < 8 and all(tokens % MULTIPLE == 0 for tokens, _ in filled)
    assert len({sequences for _, sequences in filled}) == 1
    for before, after in zip(*steps, strict=True):
        for a, b in zip(before, after, strict=True):
            assert torch.equal(a.ids_N, b.ids_N[: len(a.ids_N)]) and a.lengths == b.lengths[: len(a.lengths)]
            assert torch.equal(a.targets["label"], b.targets["label"])


@given(groups=st.integers(1, 12), together=st.integers(1, 4), groups_of_a_batch=st.integers(1, 5), step=st.integers(0, 20))
def test_rows_that_belong_together_are_in_one_batch(groups: int, together: int, groups_of_a_batch: int, step: int) -> None:
    rows = groups * together
    examples = EncodedExamples([np.array([2, 3])] * rows, [np.zeros(2, np.int8)] * rows, {}, together)
    batch = groups_of_a_batch * together
    index, _ = examples.drawn(step, batch, batch, (0, 2))
    first = index[::together]
    assert (first % together == 0).all()
    assert index.tolist() == [row + i for row in first for i in range(together)]


def test_what_a_task_passes_over_are_whole_batches() -> None:
    passing, plain = (
        TaskSamples(examples("classes"), BertPhase(steps=9, global_batch_size=16, micro_batch_size=8), seed=5) for _ in range(2)
    )
    passing.passed_over = 32
    for step in (0, 12):
        mine, theirs = passing.step(step), plain.step(step + 2)
        assert all(torch.equal(a.ids_N, b.ids_N) for a, b in zip(mine.micro, theirs.micro, strict=True))
        assert passing.provenance(step, 1, 1) == plain.provenance(step + 2, 1, 1)
