"""The kernels of a layer of BERT on a GPU, interpreted on the CPU: each follows its equation in float64, and the fused layer equals the plain one with its gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from overnight.models import bert
from overnight.models.attention import Layout
from overnight.models.weight_copies import copy_of, kept_copies
from tests.kernels import needs_interpreter
from tests.models.layer_kernels_worker import (
    DTYPES,
    HEADS,
    LENGTHS,
    WIDTH,
    P,
    decoder,
    drawn,
    encoder,
    given,
    given_batch,
    network,
    reference,
)
from tests.models.sample import pretraining, random_batch

# The interpreter cuts bf16 off where a GPU rounds it: an error of up to 2^-7, where sums of some of them are compared with their largest.
LOOSE = {"fp32": 5e-6, "bf16": 0.03}
types = pytest.mark.parametrize("dtype", list(DTYPES))


@pytest.fixture(scope="module")
def interpreted(interpreted_by: Callable[..., Any]) -> Any:
    return interpreted_by("models.layer_kernels_worker")


def assert_near(found: Tensor, wanted: Tensor, loose: float) -> None:
    """The largest error is small compared with the largest element."""
    assert found.shape == wanted.shape
    wanted = wanted.detach()
    assert float((found.double() - wanted).abs().max()) <= loose * float(wanted.abs().max())


def wide(dtype: str) -> dict[str, Tensor]:
    """What the kernels were given, in float64."""
    return {name: (x if x.ndim == 1 else x.to(DTYPES[dtype])).double().requires_grad_() for name, x in given().items()}


@needs_interpreter
@types
@pytest.mark.parametrize("name", ["norm", "norm dropped"])
def test_a_norm_with_all_around_it_follows_its_equation_and_its_gradient(name: str, dtype: str, interpreted: Any) -> None:
    g, kernels = wide(dtype), interpreted[dtype]["kernels"]
    h, out, dx, dy, sums = kernels[name]
    scale = kernels["kept"] / (1 - P) if "dropped" in name else 1.0
    wanted = g["x"] + (g["y"] + g["bias"]) * scale
    result = F.layer_norm(wanted, (WIDTH,), g["weight"], g["shift"], 1e-5)
    grads = torch.autograd.grad(result, [g[at] for at in ("x", "y", "weight", "shift", "bias")], g["grad"])
    for ours, theirs in zip((h, out, dx, dy, *sums), (wanted, result, *grads), strict=True):
        assert_near(ours, theirs, LOOSE[dtype])
    bare = F.layer_norm(g["y"], (WIDTH,), g["weight"], None, 1e-5)
    assert_near(kernels["bare norm"], bare, LOOSE[dtype])


@needs_interpreter
def test_dropout_keeps_its_share_by_its_own_seed_whatever_the_type(interpreted: Any) -> None:
    kernels = interpreted["fp32"]["kernels"]
    # 65,536 draws: 3.5 standard deviations.
    assert abs(float(kernels["share kept"]) - (1 - P)) < 0.006
    assert not torch.equal(kernels["kept"], kernels["kept by another"])
    assert torch.equal(kernels["kept"], interpreted["bf16"]["kernels"]["kept"])


@needs_interpreter
@types
def test_gelu_follows_its_equation_and_its_gradient(dtype: str, interpreted: Any) -> None:
    g, kernels = wide(dtype), interpreted[dtype]["kernels"]
    result = F.gelu(g["inner"] + g["inner bias"])
    grads = torch.autograd.grad(result, (g["inner"], g["inner bias"]), g["inner grad"])
    for ours, theirs in zip((kernels["gelu"], *kernels["gelu backward"]), (result, *grads), strict=True):
        assert_near(ours, theirs, LOOSE[dtype])


@needs_interpreter
@types
def test_gradients_of_queries_keys_and_values_are_side_by_side_with_their_sums(dtype: str, interpreted: Any) -> None:
    g, (out, sums) = wide(dtype), interpreted[dtype]["kernels"]["joined"]
    wanted = torch.cat([g[name] for name in "qkv"], 1)
    assert torch.equal(out.double(), wanted)
    assert_near(sums, wanted.sum(0), 1e-6)


@needs_interpreter
@types
@pytest.mark.parametrize("p", [0.0, P])
def test_the_fused_layer_equals_the_plain_one_with_all_gradients(
    p: float, dtype: str, interpreted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same elements dropped, and attention by a reference in both."""
    found, net = interpreted[dtype]["layer"], network(p).double()
    keep = iter(found["kept"])
    monkeypatch.setattr(bert, "dropout", lambda x, p, training: x * next(keep) / (1 - p) if p else x)
    monkeypatch.setattr(bert, "attention", lambda qkv, *rest: reference(*qkv.view(len(qkv), 3, HEADS, -1).unbind(1)).flatten(1))
    x = given()["x"].to(DTYPES[dtype]).double().requires_grad_()
    out = net(x, Layout(torch.zeros(1), max(LENGTHS), True))
    (out * given()["grad"]).sum().backward()
    wanted = {"out": out.detach(), "x": x.grad, **{name: tensor.grad for name, tensor in net.named_parameters()}}
    assert set(found[str(p)]) == set(wanted)
    for name, ours in found[str(p)].items():
        theirs = wanted[name]
        assert theirs is not None
        error = float((ours.double() - theirs).norm() / theirs.norm())
        assert error < (1e-5 if dtype == "fp32" else 0.05), (name, error)


@needs_interpreter
@types
def test_embeddings_follow_their_equation_and_its_gradient(dtype: str, interpreted: Any) -> None:
    found, batch, net = interpreted[dtype]["outside"], given_batch(), encoder().double()
    assert set(batch.segments_N.tolist()) == {0, 1} and len(set(batch.ids_N.tolist())) < len(batch.ids_N)
    looked_up = net.word(batch.ids_N) + net.position(batch.positions_N) + net.segment(batch.segments_N)
    wanted = net.norm(looked_up) * found["kept"] / (1 - P)
    (wanted * drawn(*wanted.shape, seed=30)).sum().backward()
    assert_near(found["embedded"], wanted, LOOSE[dtype])
    for name in ("word.weight", "position.weight", "segment.weight", "norm.weight", "norm.bias"):
        assert_near(found[name], net.get_parameter(name).grad, LOOSE[dtype])


@needs_interpreter
@types
def test_the_loss_over_a_vocabulary_follows_its_equation_and_its_gradient(dtype: str, interpreted: Any) -> None:
    found, (x, *rest, labels) = interpreted[dtype]["outside"], decoder(DTYPES[dtype])
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, *rest)]
    loss = F.cross_entropy(F.linear(*wide), labels, reduction="sum", ignore_index=-100)
    (3 * loss).backward()
    assert_near(found["loss"], loss, LOOSE[dtype] / 10)
    for name, tensor in zip(("x", "decoder", "bias"), wide, strict=True):
        assert_near(found[name], tensor.grad, LOOSE[dtype])
    assert not found["x"][2].any() and not found["decoder"][4100:].any() and not found["bias"][4100:].any(), (
        "what counts for nothing has no gradient"
    )


@needs_interpreter
def test_the_gradient_of_the_tied_table_is_that_of_the_decoder_and_of_the_embeddings(interpreted: Any) -> None:
    net = pretraining(num_layers=0)
    for seed in (1, 2):
        losses, _ = net.losses(random_batch([7, 12], seed=seed), torch.float32)
        (losses["mlm"] + losses["nsp"]).backward()
    wanted = {name: tensor.grad for name, tensor in net.named_parameters() if tensor.grad is not None}
    assert set(interpreted["tied"]) == set(wanted)
    for name, ours in interpreted["tied"].items():
        assert_near(ours, wanted[name].double(), 1e-4)


@needs_interpreter
def test_the_gate_passes_the_kernels_and_stops_a_backward_pass_that_drops_others(interpreted: Any) -> None:
    value, problem = interpreted["gate"]
    assert value < 0.02 and problem.startswith("the norm of fused layers differs by")


def test_a_weight_is_cast_once_within_and_every_time_outside() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    with kept_copies():
        first = copy_of(weight, torch.bfloat16)
        assert copy_of(weight, torch.bfloat16) is first and not first.requires_grad
        assert copy_of(weight, torch.float16) is not first
        with torch.no_grad():
            weight.fill_(2.0)
    with kept_copies():  # of the next step
        assert copy_of(weight, torch.bfloat16).tolist() == [2.0] * 3
        with kept_copies(False):
            assert copy_of(weight, torch.bfloat16) is not copy_of(weight, torch.bfloat16)
    assert copy_of(weight, torch.bfloat16) is not copy_of(weight, torch.bfloat16)
    assert copy_of(weight, torch.float32).data_ptr() == weight.data_ptr()
