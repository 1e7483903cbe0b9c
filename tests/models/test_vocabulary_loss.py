"""The loss over the vocabulary equals cross-entropy, value and gradients, however it is sliced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from overnight.batches.packing import IGNORED
from overnight.models import bert, modernbert
from overnight.models import vocabulary_loss as module
from overnight.models.bert import BertForPretraining
from overnight.models.modernbert import ModernBertForMaskedLM
from overnight.models.vocabulary_loss import vocabulary_loss
from tests.models.sample import modern, pretraining, random_batch


def problem(rows: int, width: int = 16, vocab: int = 50, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, w, b = (torch.randn(*shape, generator=generator) for shape in ((rows, width), (vocab, width), (vocab,)))
    return x, w, b, torch.randint(0, vocab, (rows,), generator=generator)


def both(x: Tensor, w: Tensor, b: Tensor, labels: Tensor, upstream: float = 1.0) -> list[list[Tensor]]:
    """Loss and gradients of x, w, b: ours, and of cross_entropy in float64."""
    found = []
    for double in (False, True):
        leaves = [(t.double() if double else t.clone()).requires_grad_() for t in (x, w, b)]
        if double:
            loss = F.cross_entropy(F.linear(*leaves), labels, reduction="sum", ignore_index=IGNORED)
        else:
            loss, correct = vocabulary_loss(*leaves, labels, count_correct=False)
            assert correct is None and loss.dtype == torch.float32
        (loss * upstream).backward()
        found.append([loss.detach(), *[leaf.grad for leaf in leaves if leaf.grad is not None]])
    return found


@pytest.mark.parametrize("rows_a_slice", [1, 3, 7, 100])
@pytest.mark.parametrize("ignored", [[], [0], [2, 3, 6], list(range(7))])
@pytest.mark.parametrize("upstream", [1.0, 1 / 9600, -3.0])
def test_loss_and_gradients_equal_cross_entropy(
    rows_a_slice: int, ignored: list[int], upstream: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rows_a_slice < 100:  # Without a C compiler.
        monkeypatch.setattr(module.encoder_native, "available", lambda dtype: False)
    monkeypatch.setattr(module, "_SLICE", rows_a_slice * 50 + 1)
    x, w, b, labels = problem(7)
    labels[ignored] = IGNORED
    ours, exact = both(x, w, b, labels, upstream)
    for a, e in zip(ours, exact, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), e, rtol=1e-5, atol=2e-5 * max(abs(upstream), 1e-3))
    assert (ours[1][ignored] == 0).all()


def test_extreme_logits_give_a_finite_loss() -> None:
    x, w, b, labels = problem(7)
    ours, exact = both(x * 100, w, b, labels)
    assert all(torch.isfinite(t).all() for t in ours)
    torch.testing.assert_close(ours[0].double(), exact[0], rtol=1e-5, atol=1e-3)


def test_bf16_rows_give_fp32_gradients_of_the_decoder_close_to_the_exact_ones() -> None:
    x, w, b, labels = problem(200, 32, 400)
    exact = both(x, w * 0.1, b, labels)[1]
    leaves = [x.bfloat16().requires_grad_(), (w * 0.1).requires_grad_(), b.clone().requires_grad_()]
    loss, _ = vocabulary_loss(*leaves, labels, count_correct=False)
    loss.backward()
    assert [leaf.grad.dtype for leaf in leaves if leaf.grad is not None] == [torch.bfloat16, torch.float32, torch.float32]
    torch.testing.assert_close(loss.detach().double(), exact[0], rtol=2e-3, atol=0.0)
    for leaf, e in zip(leaves, exact[1:], strict=True):
        assert F.cosine_similarity(leaf.grad.double().flatten(), e.flatten(), 0) > 0.999


def test_the_counting_path_agrees_and_counts() -> None:
    x, w, b, labels = problem(60)
    labels[:20] = (x @ w.t() + b)[:20].argmax(-1)
    labels[50:] = IGNORED
    loss, correct = vocabulary_loss(x, w, b, labels, count_correct=True)
    fast, _ = vocabulary_loss(x, w, b, labels, count_correct=False)
    torch.testing.assert_close(loss, fast)
    assert correct is not None and correct.dtype == torch.int64
    assert correct == ((x @ w.t() + b).argmax(-1) == labels).sum() >= 20


def test_no_row_at_all_is_a_loss_of_zero() -> None:
    x, w, b, labels = problem(0)
    ours, _ = both(x, w, b, labels)
    assert all((t == 0).all() for t in ours)


@pytest.mark.parametrize("count_correct", [False, True])
def test_without_a_gradient_few_logits_are_held_at_once_and_the_sums_are_those_of_all(
    count_correct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w, b, labels = problem(100)
    labels[::7] = IGNORED
    held, real = list[int](), F.linear
    monkeypatch.setattr(F, "linear", lambda *given: (logits := real(*given), held.append(logits.numel()))[0])
    with torch.no_grad():
        loss, correct = vocabulary_loss(x, w, b, labels, count_correct)
        assert held == [100 * 50]
        monkeypatch.setattr(module, "_LOGITS", 40 * 50)
        sliced, sliced_correct = vocabulary_loss(x, w, b, labels, count_correct)
    assert held[1:] == [40 * 50, 40 * 50, 20 * 50]
    torch.testing.assert_close(sliced, loss, rtol=1e-6, atol=0)
    assert sliced_correct == correct and (correct is not None) == count_correct


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [pretraining, modern])
def test_embeddings_that_add_to_the_gradient_of_the_decoder_give_the_bits_of_autograd(
    kind: Callable[[], BertForPretraining | ModernBertForMaskedLM], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, batch = [], random_batch([20, 3, 31])
    net = kind()
    for tied in (True, False):
        for family in (bert, modernbert):
            monkeypatch.setattr(family, "eager_cpu", lambda x, tied=tied: tied)
        net.zero_grad()
        for _ in range(2):  # two micro-batches
            torch.stack([*net.losses(batch, dtype)[0].values()]).sum().backward()
        found.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 5
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
