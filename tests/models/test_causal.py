"""A network that predicts the next token sees none of those behind: transformers' decoder of the same form is the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from overnight.models import attention, layers
from overnight.models.modernbert import ModernBertForMaskedLM, inner_size
from tests.models.sample import VOCAB, modern, padded, pretraining, random_batch

LENGTHS = [9, 41, 64, 1, 30, 2]
# What transformers calls otherwise in its decoder.
_NAMES = {
    "encoder.word.": "model.embeddings.tok_embeddings.",
    "encoder.norm.": "model.embeddings.norm.",
    "encoder.": "model.",
    "mlm.": "lm_head.",
    ".norm1.": ".attn_norm.",
    ".norm2.": ".mlp_norm.",
    ".out.": ".attn.Wo.",
    ".up.": ".mlp.Wi.",
    ".down.": ".mlp.Wo.",
}


def translated(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters, or their gradients, by transformers' names, without the padding of the vocabulary."""
    found: dict[str, Tensor] = {"decoder.bias": tensors["mlm.bias"][:VOCAB]}
    for name, value in tensors.items():
        for ours, theirs in _NAMES.items():
            name = name.replace(ours, theirs)
        if ".qkv." in name:
            found |= {name.replace("qkv", f"attn.{part}_proj"): rows for part, rows in zip("qkv", value.chunk(3), strict=True)}
        elif name != "lm_head.bias":
            found[name] = value[:VOCAB] if "tok_embeddings" in name else value
    return found


def decoder(model: ModernBertForMaskedLM) -> Any:
    """transformers' causal ModernBERT with the weights of ours, in float64."""
    transformers = pytest.importorskip("transformers")
    sizes, rope = model.model, {"rope_type": "default", "rope_theta": model.model.rope_theta}
    config = transformers.ModernBertDecoderConfig(
        vocab_size=VOCAB,
        hidden_size=sizes.hidden_size,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        intermediate_size=inner_size(sizes),
        layer_types=["full_attention"] * sizes.num_layers,
        rope_parameters={"full_attention": rope, "sliding_attention": rope},
        **dict.fromkeys(("pad_token_id", "eos_token_id", "bos_token_id", "cls_token_id", "sep_token_id"), 0),
    )
    reference = transformers.ModernBertDecoderForCausalLM(config)
    state = translated(model.state_dict())
    reference.load_state_dict({**state, "decoder.weight": state["model.embeddings.tok_embeddings.weight"]})
    reference.model.embeddings.tok_embeddings.padding_idx = None  # else that row would have no gradient
    return reference.double()


def test_logits_loss_and_gradients_are_those_of_transformers_decoder() -> None:
    model, batch = modern().train(), random_batch(LENGTHS, nsp=False, causal=True)
    reference = decoder(model)
    losses, _ = model.losses(batch, torch.float32)
    losses["clm"].backward()
    real = padded(torch.ones_like(batch.ids_N), batch).bool()
    logits_NV = reference(padded(batch.ids_N, batch), attention_mask=real.long()).logits[real]
    loss = F.cross_entropy(logits_NV[batch.predicted_M], batch.targets["clm"], reduction="sum")
    loss.backward()
    with torch.no_grad():
        ours = model.mlm_logits(model.encoder(batch))[:, :VOCAB]
    torch.testing.assert_close(ours.double(), logits_NV.detach(), rtol=1e-5, atol=5e-5)
    assert losses.keys() == {"clm"} and losses["clm"].item() == pytest.approx(loss.item(), rel=1e-5)
    grads = translated({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    expected = {name: p.grad for name, p in reference.named_parameters()}
    assert grads.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(grads[name].double() / grad.abs().max(), grad / grad.abs().max(), rtol=1e-4, atol=3e-5, msg=name)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", ["modernbert", "local", "bert"])
def test_what_comes_behind_changes_nothing_before_it(kind: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        for module in (attention, layers):
            monkeypatch.setattr(module, "eager_cpu", lambda x: False)
    model = pretraining().eval() if kind == "bert" else modern(local_attention=16 * (kind == "local")).eval()
    batch = random_batch(LENGTHS, nsp=False, causal=True)
    at = int(batch.starts[2]) + 20
    ids = batch.ids_N.clone()
    ids[at] = (ids[at] + 1) % VOCAB
    with torch.no_grad():
        before, after = (model.encoder(dataclasses.replace(batch, ids_N=tokens)) for tokens in (batch.ids_N, ids))
        both_sides = model.encoder(dataclasses.replace(batch, causal=False))
    changed = ((before - after).abs().amax(1) > 0).nonzero().squeeze(1)
    assert at in changed and changed.min() == at and changed.max() < batch.starts[3]
    assert not torch.allclose(before, both_sides, atol=0.1)
    (_, correct), (_, none) = model.losses(batch, torch.float32), model.train().losses(batch, torch.float32)
    assert correct.keys() == {"clm"} and none == {}
