"""Heads for fine-tuning, against transformers with the same weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from overnight.config import BertConfig
from overnight.interop.huggingface import to_huggingface
from overnight.models.heads import Classifier, QuestionAnswering, TokenClassifier
from tests.models.sample import SIZES, VOCAB, loud, padded, random_batch

transformers = pytest.importorskip("transformers")
LENGTHS = [30, 64, 7]


def theirs(model: nn.Module, kind: Any, name: str, **settings: Any) -> Any:
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=SIZES["hidden_size"],
        num_hidden_layers=SIZES["num_layers"],
        num_attention_heads=SIZES["num_heads"],
        intermediate_size=4 * SIZES["hidden_size"],
        max_position_embeddings=SIZES["max_position_embeddings"],
        **settings,
    )
    reference = getattr(transformers, name)(config)
    reference.load_state_dict(to_huggingface(model.state_dict(), kind, VOCAB))
    return reference.eval()


@pytest.mark.parametrize("outputs", [1, 2, 3])
def test_classifier_matches_transformers(outputs: int) -> None:
    torch.manual_seed(0)
    model, batch = loud(Classifier(BertConfig(**SIZES), VOCAB, outputs)).eval(), random_batch(LENGTHS)
    labels = torch.tensor([0.5, 3.0, -1.0]) if outputs == 1 else torch.tensor([0, outputs - 1, 1])
    batch = dataclasses.replace(batch, predicted_M=None, targets={"label": labels})
    reference = theirs(model, "classification", "BertForSequenceClassification", num_labels=outputs)
    with torch.no_grad():
        out = reference(
            padded(batch.ids_N, batch),
            attention_mask=padded(torch.ones_like(batch.ids_N), batch),
            token_type_ids=padded(batch.segments_N, batch),
            labels=labels,
        )
        losses, hits = model.losses(batch, torch.float32)
        torch.testing.assert_close(model(batch, torch.float32), out.logits, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(losses["label"] / 3, out.loss, rtol=1e-5, atol=1e-5)
    assert out.logits.abs().max() > 0.5
    if outputs > 1:
        assert hits["label"] == (out.logits.argmax(-1) == labels).sum()


def test_span_reader_matches_transformers() -> None:
    torch.manual_seed(0)
    model, batch = loud(QuestionAnswering(BertConfig(**SIZES), VOCAB)).eval(), random_batch(LENGTHS)
    start, end = torch.tensor([3, 60, 0]), torch.tensor([9, 63, 0])
    batch = dataclasses.replace(batch, predicted_M=None, targets={"start": start, "end": end})
    mask = padded(torch.ones_like(batch.ids_N), batch)
    with torch.no_grad():
        out = theirs(model, "spans", "BertForQuestionAnswering")(
            padded(batch.ids_N, batch), attention_mask=mask, token_type_ids=padded(batch.segments_N, batch)
        )
        logits = model(batch, torch.float32)
        losses, _ = model.losses(batch, torch.float32)
    expected = torch.stack([out.start_logits, out.end_logits], -1).masked_fill(mask[:, :, None] == 0, float("-inf"))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-5)
    ends = [torch.nn.functional.cross_entropy(expected[:, :, i], target) for i, target in enumerate((start, end))]
    torch.testing.assert_close(sum(losses.values()) / 3, (ends[0] + ends[1]) / 2, rtol=1e-5, atol=1e-5)  # type: ignore[operator]


def test_token_classifier_matches_transformers() -> None:
    torch.manual_seed(0)
    model, batch = loud(TokenClassifier(BertConfig(**SIZES), VOCAB, 5)).eval(), random_batch(LENGTHS)
    labels = torch.randint(0, 5, batch.ids_N.shape).where(torch.rand(batch.ids_N.shape) < 0.6, -100)
    batch = dataclasses.replace(batch, predicted_M=None, targets={"label": labels})
    mask = padded(torch.ones_like(batch.ids_N), batch)
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=SIZES["hidden_size"],
        num_hidden_layers=SIZES["num_layers"],
        num_attention_heads=SIZES["num_heads"],
        intermediate_size=4 * SIZES["hidden_size"],
        max_position_embeddings=SIZES["max_position_embeddings"],
        num_labels=5,
    )
    reference = transformers.BertForTokenClassification(config).eval()
    state = to_huggingface(model.state_dict(), "spans", VOCAB)  # the same tensors, under another name
    reference.load_state_dict({name.replace("qa_outputs", "classifier"): tensor for name, tensor in state.items()})
    ignored = padded(labels + 100, batch) - 100  # behind the end, too
    with torch.no_grad():
        out = reference(padded(batch.ids_N, batch), attention_mask=mask, token_type_ids=padded(batch.segments_N, batch), labels=ignored)
        losses, hits = model.losses(batch, torch.float32)
        logits = model(batch, torch.float32)
    torch.testing.assert_close(logits, out.logits.masked_fill(mask[:, :, None] == 0, float("-inf")), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(losses["label"] / (labels >= 0).sum(), out.loss, rtol=1e-5, atol=1e-5)
    assert hits["label"] == ((out.logits.argmax(-1) == ignored) & (ignored >= 0)).sum()


def test_several_classes_and_weights_of_classes_are_torchs_losses() -> None:
    torch.manual_seed(0)
    model, batch = loud(Classifier(BertConfig(**SIZES), VOCAB, 4)).eval(), random_batch(LENGTHS)
    several, one = torch.randint(0, 2, (3, 4)).float(), torch.tensor([3, 0, 3])
    weights = torch.tensor([0.5, 1.0, 2.0, 3.0])
    with torch.no_grad():
        logits = model(batch, torch.float32)
        losses, hits = model.losses(dataclasses.replace(batch, targets={"label": several}), torch.float32)
        torch.testing.assert_close(losses["label"] / 12, torch.nn.BCEWithLogitsLoss()(logits, several))
        assert hits["label"] == ((logits > 0) == several.bool()).sum()
        model.class_weights = weights
        losses, _ = model.losses(dataclasses.replace(batch, targets={"label": one}), torch.float32)
    torch.testing.assert_close(losses["label"], torch.nn.CrossEntropyLoss(weights, reduction="sum")(logits, one))
    assert "class_weights" not in model.state_dict()


@pytest.mark.parametrize("head", [TokenClassifier, QuestionAnswering])
def test_rows_of_each_sequence_are_laid_out_whatever_device_torch_takes_by_default(head: Any) -> None:
    torch.manual_seed(0)
    outputs = (5,) if head is TokenClassifier else ()
    model, batch = loud(head(BertConfig(**SIZES), VOCAB, *outputs)).eval(), random_batch(LENGTHS)
    with torch.no_grad():
        expected = model(batch, torch.float32)
        with torch.device("meta"):
            found = model(batch, torch.float32)
    assert torch.equal(found, expected)
