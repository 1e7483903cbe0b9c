"""BERT is exactly the published network: transformers is the reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from overnight.batches.loader import Samples
from overnight.batches.packing import IGNORED, Batch
from overnight.config import OPTIMIZERS, BertConfig, BertPhase
from overnight.interop.huggingface import to_huggingface
from overnight.models.bert import BertForPretraining, first_tokens, padded_vocabulary
from overnight.optim.groups import build_optimizer
from tests.batches.corpus import book_like, shard, words
from tests.models.sample import SIZES, VOCAB, Copies, padded, pretraining, random_batch

transformers = pytest.importorskip("transformers")

FULL, RAGGED, PACKED = [64] * 4, [64, 17, 33, 3], [9, 41, 8, 22, 8, 30, 5, 11, 64, 2]
BATCHES = pytest.mark.parametrize("lengths", [FULL, RAGGED, PACKED], ids=["full", "padded", "packed"])


def theirs(model: BertForPretraining) -> Any:
    """transformers' model with the same weights and the vocabulary without padding."""
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=SIZES["hidden_size"],
        num_hidden_layers=SIZES["num_layers"],
        num_attention_heads=SIZES["num_heads"],
        intermediate_size=4 * SIZES["hidden_size"],
        max_position_embeddings=SIZES["max_position_embeddings"],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    reference = transformers.BertForPreTraining(config)
    reference.load_state_dict(to_huggingface(model.state_dict(), "pretraining", VOCAB))
    return reference.train(model.training)


def run_theirs(reference: Any, batch: Batch, separately: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of all tokens (N, V) and of all sequences (S, 2), and the summed loss of means; sequence by sequence or padded."""
    assert batch.predicted_M is not None
    labels_N = torch.full_like(batch.ids_N, IGNORED)
    labels_N[batch.predicted_M] = batch.targets["mlm"]
    real = padded(torch.ones_like(batch.ids_N), batch)
    ids, segments = padded(batch.ids_N, batch), padded(batch.segments_N, batch)
    if separately:
        outs = [reference(ids[i : i + 1, :n], token_type_ids=segments[i : i + 1, :n]) for i, n in enumerate(batch.lengths)]
        mlm, nsp = torch.cat([out.prediction_logits[0] for out in outs]), torch.cat([out.seq_relationship_logits for out in outs])
    else:
        out = reference(ids, attention_mask=real, token_type_ids=segments)
        mlm, nsp = out.prediction_logits[real.bool()], out.seq_relationship_logits
    loss = torch.nn.functional.cross_entropy(mlm, labels_N, ignore_index=IGNORED)
    return mlm, nsp, loss + torch.nn.functional.cross_entropy(nsp, batch.targets["nsp"])


@BATCHES
@pytest.mark.parametrize("separately", [False, True], ids=["theirs padded", "theirs one by one"])
def test_logits_match_transformers(lengths: list[int], separately: bool) -> None:
    model, batch = pretraining().eval(), random_batch(lengths)
    with torch.no_grad():
        mlm, nsp, loss = run_theirs(theirs(model), batch, separately)
        hidden = model.encoder(batch)
        ours_mlm, ours_nsp = model.mlm_logits(hidden), model.nsp_logits(first_tokens(hidden, batch))
        losses, _ = model.losses(batch, torch.float32)
    # Weights so large that a wrong term shows: the logits are of order 1 to 10.
    assert 1 < mlm.std() < 20 and 0.3 < nsp.std() < 20
    torch.testing.assert_close(ours_mlm[:, :VOCAB], mlm, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(ours_nsp, nsp, rtol=1e-5, atol=1e-5)
    total = losses["mlm"] / len(batch.targets["mlm"]) + losses["nsp"] / len(lengths)
    torch.testing.assert_close(total, loss, rtol=1e-5, atol=1e-5)


def test_loss_is_the_one_transformers_itself_reports() -> None:
    model, batch = pretraining().eval(), random_batch(RAGGED)
    labels_N = torch.full_like(batch.ids_N, IGNORED)
    labels_N[batch.predicted_M] = batch.targets["mlm"]
    out = theirs(model)(
        padded(batch.ids_N, batch),
        attention_mask=padded(torch.ones_like(batch.ids_N), batch),
        token_type_ids=padded(batch.segments_N, batch),
        labels=padded(labels_N, batch, IGNORED),
        next_sentence_label=batch.targets["nsp"],
    )
    losses, _ = model.losses(batch, torch.float32)
    total = losses["mlm"] / len(batch.targets["mlm"]) + losses["nsp"] / len(RAGGED)
    torch.testing.assert_close(total, out.loss, rtol=1e-5, atol=1e-5)


@BATCHES
def test_gradients_match_transformers(lengths: list[int]) -> None:
    model, batch = pretraining().train(), random_batch(lengths)
    reference = theirs(model)
    losses, hits = model.losses(batch, torch.float32)
    assert hits == {}
    (losses["mlm"] / len(batch.targets["mlm"]) + losses["nsp"] / len(lengths)).backward()
    run_theirs(reference, batch, False)[2].backward()
    ours = to_huggingface({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, "pretraining", VOCAB)
    compared, grads = 0, {name: p.grad for name, p in reference.named_parameters()}
    for name, grad in grads.items():
        assert grad is not None, name
        # A key's bias has no gradient but for rounding, as it shifts all scores of a query alike: it is held to the query's.
        largest = grads[name.replace("key.bias", "query.bias")].abs().max()
        torch.testing.assert_close(
            ours[name] / largest, grad / largest, rtol=1e-4, atol=3e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
        compared += 1
    assert compared == 5 + 16 * SIZES["num_layers"] + 2 + 5 + 2


def test_the_vocabulary_head_at_the_predicted_positions_equals_computing_all_and_selecting() -> None:
    batch = random_batch(PACKED)
    at, labels = batch.predicted_M, batch.targets["mlm"]
    ours, everywhere = pretraining().train(), pretraining().train()
    losses, _ = ours.losses(batch, torch.float32)
    losses["mlm"].backward()
    logits = everywhere.mlm_logits(everywhere.encoder(batch))[at]
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    loss.backward()
    torch.testing.assert_close(losses["mlm"], loss, rtol=1e-5, atol=1e-5)
    for (name, a), b in zip(ours.named_parameters(), everywhere.parameters(), strict=True):
        if "pooler" in name or "nsp" in name:
            assert a.grad is b.grad is None
        else:
            torch.testing.assert_close(a.grad, b.grad, rtol=2e-4, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}")


@BATCHES
def test_training_and_evaluation_agree_without_dropout(lengths: list[int]) -> None:
    model, batch = pretraining(), random_batch(lengths)
    trained, _ = model.train().losses(batch, torch.float32)
    with torch.no_grad():
        held, hits = model.eval().losses(batch, torch.float32)
        hidden = model.encoder(batch)
        best = model.mlm_logits(hidden[batch.predicted_M]).argmax(-1)
        nsp = model.nsp_logits(first_tokens(hidden, batch)).argmax(-1)
    for name in ("mlm", "nsp"):
        torch.testing.assert_close(trained[name].detach(), held[name], rtol=1e-5, atol=1e-4)
    assert hits["mlm"] == (best == batch.targets["mlm"]).sum() and hits["nsp"] == (nsp == batch.targets["nsp"]).sum()


@pytest.mark.parametrize(
    ("sizes", "encoder_and_pooler", "published"),
    [({}, 109_482_240, 110_106_428), ({"num_layers": 24, "hidden_size": 1024, "num_heads": 16}, 335_141_888, 336_226_108)],
    ids=["base 110 M", "large 336 M"],
)
def test_parameter_counts_are_those_published(sizes: dict[str, Any], encoder_and_pooler: int, published: int) -> None:
    model = BertConfig(**sizes)
    padding = padded_vocabulary(30522) - 30522
    with torch.device("meta"):
        ours = BertForPretraining(model, 30522)
        config = {"hidden_size": model.hidden_size, "num_hidden_layers": model.num_layers, "num_attention_heads": model.num_heads}
        reference = transformers.BertForPreTraining(
            transformers.BertConfig(vocab_size=30522 + padding, intermediate_size=4 * model.hidden_size, **config)
        )
    count = sum(p.numel() for p in ours.parameters())
    assert count == sum(p.numel() for p in reference.parameters())
    assert count - padding * (model.hidden_size + 1) == published
    bare = sum(p.numel() for part in (ours.encoder, ours.pooler) for p in part.parameters())
    assert bare - padding * model.hidden_size == encoder_and_pooler


def test_initial_weights_are_as_published() -> None:
    torch.manual_seed(0)
    model = BertForPretraining(BertConfig(num_layers=2, hidden_size=128, num_heads=2, max_position_embeddings=512), 5000)
    for name, p in model.named_parameters():
        if name == "encoder.word.weight":
            assert (p[5000:] == 0).all() and len(p) == 5056
            p = p[:5000]
        if p.ndim > 1:
            assert abs(p.std().item() - 0.02) < 4 * 0.02 / (2 * p.numel()) ** 0.5, name
            assert abs(p.mean().item()) < 5 * 0.02 / p.numel() ** 0.5, name
        elif "norm" in name:
            assert (p == (1 if name.endswith("weight") else 0)).all(), name
        else:
            assert (p == 0).all(), name
    assert len(model.mlm.bias) == 5056


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_padding_rows_of_the_vocabulary_get_no_probability_and_no_gradient(dtype: torch.dtype) -> None:
    model, batch = pretraining(), random_batch(RAGGED)
    assert padded_vocabulary(VOCAB) == 1024 and padded_vocabulary(1024) == 1024 and padded_vocabulary(1025) == 1088
    with torch.no_grad():
        probability = torch.softmax(model.mlm_logits(model.encoder(batch, dtype)).float(), -1)
    assert (probability[:, VOCAB:] == 0).all()
    losses, _ = model.train().losses(batch, dtype)
    losses["mlm"].backward()
    assert (model.encoder.word.weight.grad[VOCAB:] == 0).all() and (model.mlm.bias.grad[VOCAB:] == 0).all()
    assert (model.mlm.bias.grad[:VOCAB] != 0).all()


@pytest.mark.parametrize("name", ["lamb", "lans", "lars", "adamw"])
def test_padding_of_the_vocabulary_is_zero_and_adds_to_no_norm_whatever_is_adapted(name: str) -> None:
    model, batch = BertForPretraining(BertConfig(**SIZES), VOCAB).train(), random_batch(RAGGED)
    adapted = {"trust_ratio_on": "all"} if name != "adamw" else {}
    optimizer = build_optimizer(model, OPTIMIZERS[name](lr=0.01, weight_decay=0.01, **adapted))  # type: ignore[arg-type]
    for _ in range(2):
        optimizer.zero_grad()
        losses, _ = model.losses(batch, torch.float32)
        (losses["mlm"] / len(batch.targets["mlm"])).backward()
        optimizer.step()
    for rows in (model.encoder.word.weight[VOCAB:], model.mlm.bias[VOCAB:]):
        assert (rows == 0).all()
    # A step of lr * 24,495 would follow from -10,000 in the padding.
    assert model.mlm.bias.norm().item() < 2.0


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.flatten().double(), b.flatten().double(), 0))


@BATCHES
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_16_bits_are_close_to_fp32(low: torch.dtype, lengths: list[int]) -> None:
    batch, found = random_batch(lengths), {}
    # One class only, else the gradients of the sequences cancel in the biases of the head and leave rounding.
    batch.targets["nsp"].zero_()
    for dtype in (torch.float32, low):
        torch.manual_seed(0)
        model = BertForPretraining(BertConfig(**SIZES), VOCAB).train()
        losses, _ = model.losses(batch, dtype)
        assert all(loss.dtype == torch.float32 for loss in losses.values())
        sum(losses.values()).backward()  # type: ignore[union-attr]
        found[dtype] = losses, {name: p.grad for name, p in model.named_parameters()}
    (a, grads_a), (b, grads_b) = found.values()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=2e-3, atol=2e-2)
    for name, grad in grads_a.items():
        assert grads_b[name].dtype == torch.float32
        # The key's bias has no gradient but for rounding, as it shifts all scores of a query alike.
        if not name.endswith("qkv.bias"):
            assert cosine(grad, grads_b[name]) > 0.98, name


def test_sequences_of_a_batch_do_not_see_each_other() -> None:
    model, batch = pretraining().eval(), random_batch(PACKED)
    with torch.no_grad():
        before = model.encoder(batch)
        ids = batch.ids_N.clone()
        ids[batch.starts[3] : batch.starts[4]] += 1
        after = model.encoder(dataclasses.replace(batch, ids_N=ids % VOCAB))
    changed = (before - after).abs().amax(1) > 0
    expected = torch.zeros(len(ids), dtype=torch.bool)
    expected[batch.starts[3] : batch.starts[4]] = True
    assert torch.equal(changed, expected)


@pytest.mark.parametrize("nsp", [True, False])
@pytest.mark.parametrize("pad_to_multiple", [64, 256])
@pytest.mark.parametrize("training", [True, False])
def test_filling_a_batch_changes_neither_losses_nor_hidden_states_nor_gradients(nsp: bool, pad_to_multiple: int, training: bool) -> None:
    vocabulary = words(VOCAB)
    phase = BertPhase(steps=9, global_batch_size=8, seq_len=64, micro_batch_size=4, max_predictions_per_seq=10, nsp=nsp)
    stream = Samples([shard(book_like(1, 12), size=VOCAB)], vocabulary, phase, (0,))
    fills = set()
    for step in range(4):
        for plain, filled in zip(stream.step(step).micro, stream.step(step, pad_to_multiple=pad_to_multiple).micro, strict=True):
            results = []
            for batch in (plain, filled):
                model = pretraining().train(training)
                losses, hits = model.losses(batch, torch.float32)
                if training:
                    sum(losses.values()).backward()  # type: ignore[union-attr]
                results.append((losses, hits, model.encoder(batch), [p.grad for p in model.parameters()]))
            (losses_a, hits_a, hidden_a, grads_a), (losses_b, hits_b, hidden_b, grads_b) = results
            fills.add(len(filled.ids_N) - len(plain.ids_N))
            torch.testing.assert_close(hidden_a, hidden_b[: len(hidden_a)], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(losses_a, losses_b, rtol=1e-5, atol=1e-4)
            assert hits_a == hits_b
            for a, b in zip(grads_a, grads_b, strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert len(fills) > 1


def test_dropout_is_reproducible_from_the_seed_and_averages_to_none() -> None:
    model, batch = pretraining(dropout=0.1, attention_dropout=0.1).train(), random_batch(RAGGED)

    def loss(seed: int) -> float:
        torch.manual_seed(seed)
        with torch.no_grad():
            return float(model.losses(batch, torch.float32)[0]["mlm"])

    assert loss(3) == loss(3) != loss(4)
    with torch.no_grad():
        model.eval()
        assert float(model.losses(batch, torch.float32)[0]["mlm"]) == loss(3) == loss(4)


def test_positions_beyond_the_learned_ones_are_an_error() -> None:
    batch = random_batch([65])
    with pytest.raises(IndexError):
        pretraining().eval().encoder(batch)
    assert np.isfinite(float(pretraining().encoder(random_batch([64])).detach().sum()))


@pytest.mark.parametrize("training", [True, False])
def test_the_host_waits_for_no_copy_to_the_device(training: bool) -> None:
    # The meta device stands for a GPU: the same path, without its numbers. Attention is padded, with what that needs beside the batch.
    model = pretraining(dropout=0.1, attention_dropout=0.1).to("meta").train(training)
    with Copies() as copies:
        losses, _ = model.losses(random_batch([20, 13, 9]).to(torch.device("meta")), torch.float32)
        torch.stack(list(losses.values())).sum().backward()
    assert len(copies.waited) == 7 + 3 and not any(copies.waited)
