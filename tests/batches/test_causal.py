"""Batches of a causal phase: the text as it is, and at every token but the last of a sequence the next one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from overnight.batches.masking import next_tokens
from overnight.batches.packing import IGNORED, Batch
from tests.batches.test_loader import samples


def causal(**changes: object) -> list[Batch]:
    """The micro-batches of a step."""
    pad = int(changes.pop("pad_to_multiple", 0))  # type: ignore[call-overload]
    return list(samples(objective="causal", nsp=False, short_seq_prob=0.5, **changes).step(3, pad_to_multiple=pad).micro)


def texts(batch: Batch) -> list[list[int]]:
    return [batch.ids_N[a:b].tolist() for a, b in zip(batch.starts.tolist(), batch.starts.tolist()[1:], strict=False)]


def test_every_token_but_the_last_of_a_sequence_has_the_next_one_as_its_label() -> None:
    for batch in causal():
        assert batch.causal and batch.predicted_M is not None and batch.targets.keys() == {"clm"}
        found = dict(zip(batch.predicted_M.tolist(), batch.targets["clm"].tolist(), strict=True))
        expected: dict[int, int] = {}
        for start, text in zip(batch.starts.tolist(), texts(batch), strict=False):
            expected |= {start + at: text[at + 1] for at in range(len(text) - 1)}
        assert found == expected and list(found) == sorted(found)


def test_nothing_is_masked_and_the_samples_are_those_of_a_masked_phase() -> None:
    vocabulary = samples().vocabulary
    for plain, masked in zip(causal(), samples(nsp=False, short_seq_prob=0.5).step(3).micro, strict=True):
        assert masked.predicted_M is not None and not masked.causal and (plain.ids_N != vocabulary.mask).all()
        whole = masked.ids_N.clone()
        whole[masked.predicted_M] = masked.targets["mlm"]
        assert torch.equal(plain.ids_N, whole) and plain.lengths == masked.lengths


def test_a_step_counts_what_is_predicted() -> None:
    step = samples(objective="causal", nsp=False).step(5)
    assert step.sizes is not None and step.sizes.predicted == step.tokens - step.sequences == step.divisors()["clm"]


@pytest.mark.parametrize("pad_to_multiple", [64, 96])
def test_a_filled_batch_has_room_for_the_label_of_every_token_and_ignores_what_fills_it_up(pad_to_multiple: int) -> None:
    for filled, plain in zip(causal(pad_to_multiple=pad_to_multiple), causal(), strict=True):
        assert filled.predicted_M is not None and plain.predicted_M is not None
        count = len(plain.predicted_M)
        assert len(filled.ids_N) % pad_to_multiple == 0 and len(filled.predicted_M) == len(filled.ids_N)
        assert torch.equal(filled.predicted_M[:count], plain.predicted_M) and torch.equal(
            filled.targets["clm"][:count], plain.targets["clm"]
        )
        assert (filled.targets["clm"][count:] == IGNORED).all()


def test_sequences_of_one_token_predict_nothing() -> None:
    predicted, labels = next_tokens(np.array([9, 5, 6, 7, 9]), np.array([0, 1, 4, 5]))
    assert predicted.tolist() == [1, 2] and labels.tolist() == [6, 7]
