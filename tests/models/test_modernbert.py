"""ModernBERT is exactly the published network: transformers is the reference."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from overnight.batches.packing import IGNORED, MATCH_CLASSES, Batch
from overnight.config import OPTIMIZERS, ModernBertConfig
from overnight.interop.huggingface import to_huggingface
from overnight.models import attention, layers
from overnight.models.heads import Classifier, QuestionAnswering, pretrained_weights
from overnight.models.modernbert import ModernBertForMaskedLM, inner_size, is_local
from overnight.optim.groups import build_optimizer
from tests.models.sample import MODERN_SIZES, VOCAB, Copies, loud, modern, padded, random_batch

transformers = pytest.importorskip("transformers")

FULL, RAGGED, PACKED = [64] * 4, [64, 17, 33, 3], [9, 41, 8, 22, 8, 30, 5, 11, 64, 2]
BATCHES = pytest.mark.parametrize("lengths", [FULL, RAGGED, PACKED], ids=["full", "padded", "packed"])
WINDOWS = pytest.mark.parametrize("window", [0, 16], ids=["global", "local"])


def theirs(state: dict[str, Tensor], kind: Any, name: str, model: ModernBertConfig, **settings: Any) -> Any:
    """transformers' network with the same weights and the vocabulary without padding."""
    kinds = {True: "sliding_attention", False: "full_attention"}
    config = transformers.ModernBertConfig(
        vocab_size=VOCAB,
        hidden_size=model.hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        intermediate_size=inner_size(model),
        max_position_embeddings=model.max_position_embeddings,
        local_attention=model.local_attention or 128,
        layer_types=[kinds[is_local(model, number)] for number in range(model.num_layers)],
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": model.rope_theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": model.local_rope_theta},
        },
        classifier_pooling=model.pooling,
        pad_token_id=None,  # else its row of the embedding would have no gradient
        **settings,
    )
    reference = getattr(transformers, name)(config)
    reference.load_state_dict(to_huggingface(state, kind, VOCAB))
    return reference


def run_theirs(reference: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits of all tokens (N, V) and the mean loss of the predicted ones, of the batch as padded rows."""
    assert batch.predicted_M is not None
    labels_N = torch.full_like(batch.ids_N, IGNORED)
    labels_N[batch.predicted_M] = batch.targets["mlm"]
    real = padded(torch.ones_like(batch.ids_N), batch)
    out = reference(padded(batch.ids_N, batch), attention_mask=real, labels=padded(labels_N, batch, IGNORED))
    return out.logits[real.bool()], out.loss


@WINDOWS
@BATCHES
def test_logits_and_loss_match_transformers(lengths: list[int], window: int) -> None:
    model, batch = modern(local_attention=window).eval(), random_batch(lengths, nsp=False)
    with torch.no_grad():
        expected, loss = run_theirs(theirs(model.state_dict(), "pretraining", "ModernBertForMaskedLM", model.encoder.model).eval(), batch)
        logits, (losses, correct) = model.mlm_logits(model.encoder(batch))[:, :VOCAB], model.losses(batch, torch.float32)
    assert 1 < expected.std() < 20
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(losses["mlm"] / len(batch.targets["mlm"]), loss, rtol=1e-5, atol=1e-5)
    assert correct["mlm"] == (expected[batch.predicted_M].argmax(-1) == batch.targets["mlm"]).sum()


@WINDOWS
@BATCHES
def test_gradients_match_transformers(lengths: list[int], window: int) -> None:
    model, batch = modern(local_attention=window).train(), random_batch(lengths, nsp=False)
    reference = theirs(model.state_dict(), "pretraining", "ModernBertForMaskedLM", model.encoder.model).train()
    losses, correct = model.losses(batch, torch.float32)
    assert correct == {}
    (losses["mlm"] / len(batch.targets["mlm"])).backward()
    run_theirs(reference, batch)[1].backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert all(grad is not None for grad in grads.values())
    ours = to_huggingface(grads, "pretraining", VOCAB)  # type: ignore[arg-type]
    compared = 0
    for name, p in reference.named_parameters():
        largest = p.grad.abs().max()
        torch.testing.assert_close(
            ours[name] / largest, p.grad / largest, rtol=1e-4, atol=3e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
        compared += 1
    assert compared == len(grads) == 2 + 6 * MODERN_SIZES["num_layers"] - 1 + 1 + 3


def test_a_local_layer_sees_half_of_the_window_to_either_side() -> None:
    batch, at = random_batch([40, 24], nsp=False), 20
    for every, reach in ((1, 40), (2, 4)):
        model = modern(num_layers=2, local_attention=8, global_attention_every=every).eval()
        with torch.no_grad():
            for part in (model.encoder.layers[0].out, model.encoder.layers[0].down):  # type: ignore[union-attr]
                part.weight.zero_()  # The first layer is always global: here it adds nothing.
            ids = batch.ids_N.clone()
            ids[at] = (ids[at] + 1) % VOCAB
            change = model.encoder(batch) - model.encoder(dataclasses.replace(batch, ids_N=ids))
        changed = (change.abs().amax(1) > 0).nonzero().flatten().tolist()
        assert changed == list(range(max(0, at - reach), min(40, at + reach + 1)))


def test_which_layers_are_local() -> None:
    model = ModernBertConfig(num_layers=7, local_attention=128, global_attention_every=3)
    assert [is_local(model, number) for number in range(7)] == [False, True, True, False, True, True, False]
    assert not any(is_local(dataclasses.replace(model, local_attention=0), number) for number in range(7))
    assert not any(is_local(dataclasses.replace(model, global_attention_every=1), number) for number in range(7))


def test_the_default_inner_size_has_the_parameters_of_four_times_the_width_without_gates() -> None:
    assert [inner_size(ModernBertConfig(hidden_size=width)) for width in (768, 256, 192, 16)] == [2048, 672, 512, 32]
    assert inner_size(ModernBertConfig(intermediate_size=1152)) == 1152
    assert 3 * 2048 * 768 == 2 * 4 * 768 * 768


def test_parameters_are_those_of_the_published_base() -> None:
    sizes = {"num_layers": 22, "hidden_size": 768, "num_heads": 12, "intermediate_size": 1152, "local_attention": 128}
    with torch.device("meta"):
        ours = ModernBertForMaskedLM(ModernBertConfig(**sizes), 50368)
        reference = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig())
    count = sum(p.numel() for p in ours.parameters())
    assert count == sum(p.numel() for p in reference.parameters()) == 149_655_232


@pytest.mark.parametrize("init", ["megatron", "zero", "normal"])
def test_initial_weights_are_as_said(init: Any) -> None:
    torch.manual_seed(0)
    model = ModernBertForMaskedLM(ModernBertConfig(num_layers=2, hidden_size=128, num_heads=2, init=init), 5000)
    for name, p in model.named_parameters():
        if name == "encoder.word.weight":
            assert (p[5000:] == 0).all() and len(p) == 5056
            p = p[:5000]
        if p.ndim > 1:
            residual = name.endswith(("out.weight", "down.weight"))
            expected = 0.02 * ({"megatron": 0.5, "zero": 0.0, "normal": 1.0}[init] if residual else 1.0)
            assert abs(p.std().item() - expected) <= 4 * expected / (2 * p.numel()) ** 0.5, name
        else:
            assert name == "mlm.bias" or "norm" in name
            assert (p == (0 if name == "mlm.bias" else 1)).all(), name
    if init == "zero":  # The layers add nothing at first.
        batch = random_batch([5, 9], nsp=False)
        encoder = model.encoder.eval()
        plain = F.layer_norm(F.layer_norm(encoder.word(batch.ids_N), (128,), eps=1e-5), (128,), eps=1e-5)
        torch.testing.assert_close(encoder(batch), plain)


def test_the_bias_of_the_decoder_begins_at_the_log_unigram() -> None:
    model = ModernBertForMaskedLM(ModernBertConfig(**MODERN_SIZES), VOCAB).eval()
    counts = torch.arange(VOCAB)
    model.begin_at_unigram(counts)
    total = float(counts.clamp(min=1).sum())
    assert model.mlm.bias[0].item() == pytest.approx(math.log(1 / total)) and model.mlm.bias[1].item() == model.mlm.bias[0].item()
    assert model.mlm.bias[VOCAB - 1].item() == pytest.approx(math.log((VOCAB - 1) / total))
    assert (model.mlm.bias[VOCAB:] == 0).all()
    # All that is predicted at first is the frequency, as nearly as the small weights let it.
    with torch.no_grad():
        predicted = torch.softmax(model.mlm_logits(model.encoder(random_batch([64] * 20, nsp=False))), -1).mean(0)
    assert predicted[:VOCAB].log().sub((counts.clamp(min=1) / total).log()).abs().max() < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_padding_rows_of_the_vocabulary_get_no_probability_and_no_gradient(dtype: torch.dtype) -> None:
    model, batch = modern(), random_batch(RAGGED, nsp=False)
    with torch.no_grad():
        probability = torch.softmax(model.mlm_logits(model.encoder(batch, dtype)).float(), -1)
    assert (probability[:, VOCAB:] == 0).all()
    losses, _ = model.train().losses(batch, dtype)
    losses["mlm"].backward()
    assert (model.encoder.word.weight.grad[VOCAB:] == 0).all() and (model.mlm.bias.grad[VOCAB:] == 0).all()
    assert (model.mlm.bias.grad[:VOCAB] != 0).all()


@WINDOWS
@BATCHES
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_16_bits_are_close_to_fp32(low: torch.dtype, lengths: list[int], window: int) -> None:
    batch, found = random_batch(lengths, nsp=False), {}
    for dtype in (torch.float32, low):
        torch.manual_seed(0)
        model = ModernBertForMaskedLM(ModernBertConfig(**MODERN_SIZES, local_attention=window), VOCAB).train()
        losses, _ = model.losses(batch, dtype)
        assert losses["mlm"].dtype == torch.float32
        losses["mlm"].backward()
        found[dtype] = losses["mlm"].detach(), {name: p.grad for name, p in model.named_parameters()}
    (a, grads_a), (b, grads_b) = found.values()
    torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-2)
    for name, grad in grads_a.items():
        assert grad is not None and grads_b[name].dtype == torch.float32
        assert F.cosine_similarity(grad.flatten().double(), grads_b[name].flatten().double(), 0) > 0.98, name


@WINDOWS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_other_devices_compute_is_what_a_cpu_computes(dtype: torch.dtype, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, found = random_batch(PACKED, nsp=False), []
    for eager in (True, False):
        if not eager:
            for module in (attention, layers):
                monkeypatch.setattr(module, "eager_cpu", lambda x: False)
        model = modern(local_attention=window).train()
        losses, _ = model.losses(batch, dtype)
        losses["mlm"].backward()
        found.append((losses["mlm"].detach(), {name: p.grad for name, p in model.named_parameters()}))
    (a, grads_a), (b, grads_b) = found
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    for name, grad in grads_a.items():
        assert (grad - grads_b[name]).norm() <= tolerance * grad.norm(), name


@WINDOWS
def test_sequences_of_a_batch_do_not_see_each_other(window: int) -> None:
    model, batch = modern(local_attention=window).eval(), random_batch(PACKED, nsp=False)
    with torch.no_grad():
        before = model.encoder(batch)
        ids = batch.ids_N.clone()
        ids[batch.starts[3] : batch.starts[4]] += 1
        after = model.encoder(dataclasses.replace(batch, ids_N=ids % VOCAB))
    changed = (before - after).abs().amax(1) > 0
    expected = torch.zeros(len(ids), dtype=torch.bool)
    expected[batch.starts[3] : batch.starts[4]] = True
    assert torch.equal(changed, expected)


def test_dropout_is_reproducible_from_the_seed_and_none_in_evaluation() -> None:
    model, batch = modern(dropout=0.1, local_attention=16).train(), random_batch(RAGGED, nsp=False)

    def loss(seed: int) -> float:
        torch.manual_seed(seed)
        with torch.no_grad():
            return float(model.losses(batch, torch.float32)[0]["mlm"])

    assert loss(3) == loss(3) != loss(4)
    model.eval()
    assert loss(3) == loss(4)


@pytest.mark.parametrize("training", [True, False])
def test_the_host_waits_for_no_copy_to_the_device(training: bool) -> None:
    model = modern(local_attention=16).to("meta").train(training)
    with Copies() as copies:
        losses, _ = model.losses(random_batch([20, 13, 9], nsp=False).to(torch.device("meta")), torch.float32)
        torch.stack(list(losses.values())).sum().backward()
    assert copies.waited and not any(copies.waited)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_lowers_the_loss_and_leaves_the_padding_at_zero(name: str) -> None:
    torch.manual_seed(0)
    model, batch = ModernBertForMaskedLM(ModernBertConfig(**MODERN_SIZES), VOCAB).train(), random_batch(RAGGED, nsp=False)
    optimizer = build_optimizer(model, OPTIMIZERS[name](lr=1.0 if name == "lars" else 0.01, weight_decay=0.01))  # type: ignore[arg-type]
    before = {parameter: p.detach().clone() for parameter, p in model.named_parameters()}
    found = []
    for _ in range(6):
        optimizer.zero_grad()
        losses, _ = model.losses(batch, torch.float32)
        (losses["mlm"] / len(batch.targets["mlm"])).backward()
        found.append(losses["mlm"].item())
        optimizer.step()
    assert found[-1] < found[0] and all(math.isfinite(loss) for loss in found)
    assert all(not torch.equal(p, before[parameter]) for parameter, p in model.named_parameters())
    assert (model.encoder.word.weight[VOCAB:] == 0).all() and (model.mlm.bias[VOCAB:] == 0).all()


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("outputs", [1, 3])
def test_the_classifier_matches_transformers(outputs: int, pooling: Any) -> None:
    torch.manual_seed(0)
    settings = ModernBertConfig(**MODERN_SIZES, local_attention=16, pooling=pooling)
    model, batch = loud(Classifier(settings, VOCAB, outputs)).eval(), random_batch([30, 64, 7], nsp=False)
    labels = torch.tensor([0.5, 3.0, -1.0]) if outputs == 1 else torch.tensor([0, outputs - 1, 1])
    batch = dataclasses.replace(batch, predicted_M=None, targets={"label": labels})
    reference = theirs(model.state_dict(), "classification", "ModernBertForSequenceClassification", settings, num_labels=outputs).eval()
    with torch.no_grad():
        out = reference(padded(batch.ids_N, batch), attention_mask=padded(torch.ones_like(batch.ids_N), batch), labels=labels)
        losses, correct = model.losses(batch, torch.float32)
        torch.testing.assert_close(model(batch, torch.float32), out.logits, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(losses["label"] / 3, out.loss, rtol=1e-5, atol=1e-5)
    assert out.logits.abs().max() > 0.5
    if outputs > 1:
        assert correct["label"] == (out.logits.argmax(-1) == labels).sum()


def test_question_answering_matches_transformers() -> None:
    torch.manual_seed(0)
    settings = ModernBertConfig(**MODERN_SIZES, local_attention=16)
    model, batch = loud(QuestionAnswering(settings, VOCAB)).eval(), random_batch([30, 64, 7], nsp=False)
    mask = padded(torch.ones_like(batch.ids_N), batch)
    with torch.no_grad():
        reference = theirs(model.state_dict(), "spans", "ModernBertForQuestionAnswering", settings).eval()
        out = reference(padded(batch.ids_N, batch), attention_mask=mask)
        logits = model(batch, torch.float32)
    expected = torch.stack([out.start_logits, out.end_logits], -1).masked_fill(mask[:, :, None] == 0, float("-inf"))
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=2e-5)


def test_a_task_begins_from_the_encoder_and_the_transform_of_the_pretrained_head() -> None:
    model = modern()
    taken = pretrained_weights(model.state_dict())
    task = Classifier(model.encoder.model, VOCAB, 3)
    result = task.load_state_dict(taken, strict=False)
    assert result.missing_keys == ["head.weight", "head.bias"] and not result.unexpected_keys
    assert torch.equal(task.pooler.dense.weight, model.mlm.dense.weight) and torch.equal(task.pooler.norm.weight, model.mlm.norm.weight)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_next_sentence_prediction_reads_pooled_sequences_and_is_left_out_of_an_export(pooling: str) -> None:
    settings = ModernBertConfig(**MODERN_SIZES, pooling=pooling)  # type: ignore[arg-type]
    torch.manual_seed(0)
    model, batch = loud(ModernBertForMaskedLM(settings, VOCAB, nsp=True)).train(), random_batch(RAGGED)
    assert isinstance(model, ModernBertForMaskedLM)
    losses, _ = model.losses(batch, torch.float32)
    parts = model.encoder(batch).split(RAGGED)
    read = torch.stack([part.mean(0) if pooling == "mean" else part[0] for part in parts])
    expected = F.cross_entropy(model.nsp(model.pooler(read)), batch.targets["nsp"], reduction="sum")
    torch.testing.assert_close(losses["nsp"], expected)
    losses["nsp"].backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for part in (model.pooler, model.nsp) for p in part.parameters())
    assert {"pooler.dense.weight", "pooler.norm.weight"} <= set(pretrained_weights(model.state_dict()))
    plain = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(("pooler.", "nsp."))}
    exported, wanted = (to_huggingface(state, "pretraining", VOCAB) for state in (model.state_dict(), plain))
    assert exported.keys() == wanted.keys() and all(torch.equal(exported[name], wanted[name]) for name in wanted)


def test_token_matching_reads_every_labeled_token_and_is_left_out_of_an_export() -> None:
    torch.manual_seed(0)
    model, batch = (
        loud(ModernBertForMaskedLM(ModernBertConfig(**MODERN_SIZES), VOCAB, matching=True)).train(),
        random_batch(RAGGED, nsp=False),
    )
    assert isinstance(model, ModernBertForMaskedLM)
    labels = torch.randint(0, MATCH_CLASSES, (len(batch.ids_N),))
    labels[::3] = IGNORED
    batch.targets["match"] = labels
    losses, correct = model.losses(batch, torch.float32)
    logits = model.match(model.pooler(model.encoder(batch)))
    torch.testing.assert_close(losses["match"], F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"))
    assert not correct and model.eval().losses(batch, torch.float32)[1]["match"] == (logits.argmax(-1) == labels).sum()
    losses["match"].backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for part in (model.pooler, model.match) for p in part.parameters())
    assert {"pooler.dense.weight", "pooler.norm.weight"} <= set(pretrained_weights(model.state_dict()))
    plain = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(("pooler.", "match."))}
    exported, wanted = (to_huggingface(state, "pretraining", VOCAB) for state in (model.state_dict(), plain))
    assert exported.keys() == wanted.keys() and all(torch.equal(exported[name], wanted[name]) for name in wanted)


def test_token_matching_without_a_label_is_a_loss_of_0_with_a_gradient() -> None:
    model, batch = ModernBertForMaskedLM(ModernBertConfig(**MODERN_SIZES), VOCAB, matching=True).train(), random_batch(RAGGED, nsp=False)
    batch.targets["match"] = torch.full((len(batch.ids_N),), IGNORED)
    loss = model.losses(batch, torch.float32)[0]["match"]
    loss.backward()
    assert loss == 0 and model.match.weight.grad is not None and not model.match.weight.grad.any()
