"""The models of bytes are their equations, carry their state, and recompute what they did not keep."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from overnight.batches.streams import ByteBatch
from overnight.config import MODELS
from overnight.models.bytes import ByteModel, byte_model

KINDS = ["mlstm", "lstm", "transformer"]
RECURRENT = ["mlstm", "lstm"]
every_kind = pytest.mark.parametrize("kind", KINDS)
recurrent = pytest.mark.parametrize("kind", RECURRENT)


def model(kind: str, label: bool = False, recompute: int = 0, seed: int = 0, **sizes: Any) -> ByteModel:
    """A small network."""
    torch.manual_seed(seed)
    own = {"num_heads": 2, "dropout": 0.0, "max_position_embeddings": 64} if kind == "transformer" else {"embedding_size": 8}
    given: dict[str, Any] = {"num_layers": 2, "hidden_size": 24, **own, **sizes}
    return byte_model(MODELS[kind](kind=kind, **given), label, recompute)  # type: ignore[arg-type]


def batch(rows: int = 4, steps: int = 12, label: bool = False, seed: int = 0) -> ByteBatch:
    """A window; with labels of three documents, one of which ends with it."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, 256, (rows, steps + 1), generator=generator)
    found = ByteBatch(text[:, :-1], torch.arange(rows), torch.zeros(rows, dtype=torch.bool), {"byte": text[:, 1:].clone()})
    if label:
        found = replace(found, ends_K=torch.tensor([3, steps + 2, 2 * steps - 1]))
        found.targets["label"] = torch.tensor([0.5, -1.0, 2.0])
    return found


def reference(net: ByteModel, given: ByteBatch, state: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Losses and next state of a recurrent network step by step, with autograd, in the type of its parameters."""
    hs, cs = list(state[:, :, 0].unbind(1)), list(state[:, :, 1].unbind(1))
    total, label = state.new_zeros(()), state.new_zeros(())
    ends = {} if given.ends_K is None else {int(at): float(y) for at, y in zip(given.ends_K, given.targets["label"], strict=True)}
    rows, steps = given.ids_BT.shape
    for t in range(steps):
        x = net.embedding.weight[given.ids_BT[:, t]]
        for at, layer in enumerate(net.layers):
            p: dict[str, Tensor] = dict(layer.named_parameters())
            w = {
                name: p[f"g.{name}"][:, None] * p[name] / p[name].norm(dim=1, keepdim=True) if f"g.{name}" in p else p[name]
                for name in ("w_x", "w_h", "w_mx", "w_mh")
                if name in p
            }
            m = (x @ w["w_mx"].t()) * (hs[at] @ w["w_mh"].t()) if "w_mx" in w else hs[at]
            i, f, g, o = (x @ w["w_x"].t() + p["b"] + m @ w["w_h"].t()).chunk(4, 1)
            cs[at] = f.sigmoid() * cs[at] + i.sigmoid() * g.tanh()
            x = hs[at] = o.sigmoid() * cs[at].tanh()
        logits = x @ net.decoder.weight.t() + net.decoder.bias
        total = total + F.cross_entropy(logits, given.targets["byte"][:, t], reduction="sum", ignore_index=-100)
        for row in range(rows):
            if row * steps + t in ends:
                assert net.label is not None
                found = cs[-1][row] @ net.label.weight[0] + net.label.bias[0]
                label = label + (found - ends[row * steps + t]) ** 2
    losses = {"byte": total} | ({"label": label} if ends else {})
    return losses, torch.stack((torch.stack(hs, 1), torch.stack(cs, 1)), 2)


def gradients(net: ByteModel) -> dict[str, Tensor]:
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def backward(losses: dict[str, Tensor]) -> None:
    torch.stack([0.1 * loss for loss in losses.values()]).sum().backward()


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        error = float((found[name].detach().double() - value.detach().double()).norm() / value.detach().double().norm())
        assert error < tolerance, f"{name} is off by {error:.2g}"


@recurrent
@pytest.mark.parametrize(("layers", "norm", "label"), [(1, True, False), (1, False, True), (3, True, True), (3, False, False)])
def test_losses_and_gradients_are_those_of_the_equations(kind: str, layers: int, norm: bool, label: bool) -> None:
    net, given = model(kind, label, num_layers=layers, weight_norm=norm), batch(label=label)
    state = torch.randn(4, *net.state_shape, generator=torch.Generator().manual_seed(1)) * 0.5
    double = copy.deepcopy(net).double()
    wanted, wanted_state = reference(double, given, state.double())
    backward(wanted)
    losses, hits, after = net.losses(replace(given, state_B=state), torch.float32)
    backward(losses)
    assert hits == {} and losses.keys() == wanted.keys()
    for name, loss in losses.items():
        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss.double(), wanted[name], rtol=2e-6, atol=0)
    assert after.dtype == torch.float32 and not after.requires_grad
    torch.testing.assert_close(after.double(), wanted_state, rtol=1e-5, atol=1e-6)
    assert_near(gradients(net), gradients(double), 1e-5)


@every_kind
def test_bf16_is_near_fp32(kind: str) -> None:
    net, found = model(kind, label=True), {}
    for dtype in (torch.float32, torch.bfloat16):
        net.zero_grad()
        losses, _, state = net.losses(batch(label=True), dtype)
        backward(losses)
        found[dtype] = (losses, {"all": torch.cat([g.flatten() for g in gradients(net).values()])}, state)
        assert state.dtype == torch.float32 and all(loss.dtype == torch.float32 for loss in losses.values())
    (narrow, narrow_grads, _), (wide, grads, _) = found[torch.bfloat16], found[torch.float32]
    assert_near(narrow, wide, 0.01)
    assert_near(narrow_grads, grads, 0.03)


@recurrent
def test_two_windows_with_the_state_carried_are_one(kind: str) -> None:
    net, whole = model(kind), batch(steps=20)
    wanted, _, state = net.losses(whole, torch.float32)
    total, carried = torch.zeros(()), None
    for part in (slice(0, 7), slice(7, 20)):
        cut = replace(whole, ids_BT=whole.ids_BT[:, part], targets={"byte": whole.targets["byte"][:, part]}, state_B=carried)
        losses, _, carried = net.losses(cut, torch.float32)
        total = total + losses["byte"]
    torch.testing.assert_close(total, wanted["byte"])
    torch.testing.assert_close(carried, state)
    assert state.shape == (4, 2, 2, 24) == (4, *net.state_shape)


@recurrent
def test_a_fresh_row_begins_from_zero_and_the_others_from_their_state(kind: str) -> None:
    net, given = model(kind), batch()
    state = torch.randn(4, *net.state_shape)
    fresh = torch.tensor([True, False, False, True])
    _, _, after = net.losses(replace(given, state_B=state, fresh_B=fresh), torch.float32)
    _, _, from_zero = net.losses(given, torch.float32)
    _, _, from_state = net.losses(replace(given, state_B=state), torch.float32)
    assert torch.equal(after[fresh], from_zero[fresh]) and torch.equal(after[~fresh], from_state[~fresh])
    assert not torch.equal(after[fresh], from_state[fresh])


@every_kind
def test_nothing_depends_on_a_later_byte(kind: str) -> None:
    net, given = model(kind).eval(), batch()
    other = given.ids_BT.clone()
    other[:, 8:] = (other[:, 8:] + 1) % 256
    with torch.no_grad():
        (h, c, _), (h2, _, _) = net.hidden(given.ids_BT, None, torch.float32), net.hidden(other, None, torch.float32)
    assert torch.equal(h[:, :8], h2[:, :8]) and not torch.equal(h[:, 8:], h2[:, 8:])
    assert h.shape == (4, 12, 24) and (c is None) == (kind == "transformer")


@recurrent
def test_the_state_is_that_of_the_last_byte(kind: str) -> None:
    net = model(kind)
    h, c, state = net.hidden(batch().ids_BT, None, torch.float32)
    assert c is not None
    assert torch.equal(state[:, -1, 0], h[:, -1]) and torch.equal(state[:, -1, 1], c[:, -1])


@every_kind
@pytest.mark.parametrize("recompute", [1, 5, 6, 12])
def test_recomputing_changes_neither_losses_nor_gradients(kind: str, recompute: int) -> None:
    net, again = model(kind, label=True), model(kind, label=True, recompute=recompute)
    given = replace(batch(label=True), fresh_B=torch.tensor([True, False, True, False]))
    ends = []
    for each in (net, again):
        losses, _, state = each.losses(replace(given, state_B=torch.ones(4, *net.state_shape)), torch.float32)
        backward(losses)
        ends.append((losses, gradients(each), {"state": state} if state.numel() else {}))
    for found, wanted in zip(ends[1], ends[0], strict=True):
        assert_near(found, wanted, 1e-5)


def saved_bytes(net: ByteModel, rows: int, steps: int) -> int:
    """What autograd keeps of a window in bf16, without the parameters."""
    own, seen = {p.data_ptr() for p in net.parameters()}, {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        losses, _, state = net.losses(batch(rows, steps), torch.bfloat16)
    del losses, state
    return sum(seen.values())


def test_at_8192_units_and_256_sequences_of_256_bytes_under_a_gigabyte_is_kept() -> None:
    """A segment of 16 bytes, as it is recomputed, and the state between segments; each byte and each row costs the same."""
    net = model("mlstm", num_layers=1, hidden_size=256, embedding_size=64, weight_norm=False)
    # From differences, without what does not grow: tables and matrices in 16 bits.
    a, b, c = (saved_bytes(net, rows, steps) for rows, steps in ((32, 8), (32, 16), (64, 16)))
    a_byte, a_row = (b - a) / 8 / 32, (c - b) / 32
    # gates 4, u and h in bf16, c in fp32: 16 H; logits 512; h by time is h itself
    assert 16 * 256 <= a_byte <= 16 * 256 + 1100
    first = a_row - 16 * a_byte
    assert 0 <= first <= 24 * 256, "the state before the first byte"
    at_8192 = 256 * (16 * (16 * 8192 + 1100) + 24 * 8192)
    between = (256 // 16) * 256 * 2 * 8192 * 4
    assert at_8192 + between < 1e9

    whole = saved_bytes(net, 32, 64)
    net.recompute = 16
    cut = saved_bytes(net, 32, 64)
    assert cut < 0.1 * whole, "nothing of a segment is kept"


@every_kind
def test_predictions_are_counted_outside_training_only(kind: str) -> None:
    net, given = model(kind), batch()
    losses, hits, _ = net.losses(given, torch.float32)
    assert hits == {}
    net.eval()
    with torch.no_grad():
        h, _, _ = net.hidden(given.ids_BT, None, torch.float32)
        logits = net.logits(h)
        given.targets["byte"][:] = logits.argmax(-1)
        given.targets["byte"][0, :3] = (given.targets["byte"][0, :3] + 1) % 256
        losses, hits, _ = net.losses(given, torch.float32)
    assert int(hits["byte"]) == 4 * 12 - 3
    wanted = F.cross_entropy(logits.flatten(0, 1), given.targets["byte"].flatten(), reduction="sum")
    torch.testing.assert_close(losses["byte"], wanted)
    assert logits.shape == (4, 12, 256) and logits.dtype == torch.float32


@every_kind
def test_a_row_that_only_fills_up_counts_nothing(kind: str) -> None:
    given, net = batch(5), model(kind)
    given.targets["byte"][4] = -100
    four = replace(given, ids_BT=given.ids_BT[:4], fresh_B=given.fresh_B[:4], targets={"byte": given.targets["byte"][:4]})
    ends = []
    for each in (given, four):
        net.zero_grad()
        losses, _, _ = net.losses(each, torch.float32)
        backward(losses)
        ends.append((losses, gradients(net)))
    for found, wanted in zip(*ends, strict=True):
        assert_near(found, {k: v.clone() for k, v in wanted.items()}, 1e-5)


def test_without_documents_that_end_the_auxiliary_loss_is_zero() -> None:
    given = replace(batch(), ends_K=torch.zeros(0, dtype=torch.int64))
    given.targets["label"] = torch.zeros(0)
    losses, _, _ = model("mlstm", label=True).losses(given, torch.float32)
    backward(losses)
    assert float(losses["label"].detach()) == 0.0


def test_parameters_have_the_names_and_numbers_of_the_field() -> None:
    names = {name: tuple(p.shape) for name, p in model("mlstm", num_layers=1).named_parameters()}
    matrices = {"w_x": (96, 8), "w_h": (96, 24), "w_mx": (24, 8), "w_mh": (24, 24)}
    wanted = {f"layers.0.{name}": shape for name, shape in matrices.items()}
    wanted |= {f"layers.0.g.{name}": shape[:1] for name, shape in matrices.items()}
    wanted |= {"embedding.weight": (256, 8), "layers.0.b": (96,), "decoder.weight": (256, 24), "decoder.bias": (256,)}
    assert names == wanted
    assert "label.weight" in dict(model("lstm", label=True).named_parameters())
    with torch.device("meta"):
        for hidden_size, millions in ((4096, 86.30), (8192, 340.35)):
            count = sum(p.numel() for p in model("mlstm", num_layers=1, hidden_size=hidden_size, embedding_size=64).parameters())
            assert count / 1e6 == pytest.approx(millions, rel=3e-4)


@recurrent
def test_initial_weights_are_as_published(kind: str) -> None:
    net = model(kind, num_layers=2, hidden_size=400, embedding_size=64)
    for name, p in net.named_parameters():
        if ".g." in name:
            continue
        if name == "embedding.weight":
            assert float(p.detach().std()) == pytest.approx(1, rel=0.05)
        else:
            assert float(p.detach().abs().max()) <= 0.05 and float(p.detach().std()) == pytest.approx(0.05 / 3**0.5, rel=0.12), name
    for layer in net.layers:
        for name, g in layer.g.items():
            torch.testing.assert_close(g.detach(), layer.get_parameter(name).detach().norm(dim=1))


@every_kind
def test_a_network_learns_a_repeated_text(kind: str) -> None:
    net, text = model(kind, num_layers=1, hidden_size=48), torch.tensor(list(b"the quick brown fox jumps over the lazy dog; " * 3))
    given = ByteBatch(text[None, :60], torch.arange(1), torch.tensor([True]), {"byte": text[None, 1:61]})
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(60):
        losses, _, _ = net.losses(given, torch.float32)
        optimizer.zero_grad()
        losses["byte"].backward()
        optimizer.step()
    assert float(losses["byte"].detach()) / 60 < 1.5, "nats a byte; without learning 5.5"


def test_copies_of_a_network_share_no_memory_for_work() -> None:
    net = model("mlstm")
    losses, _, _ = net.losses(batch(), torch.float32)
    backward(losses)
    other = copy.deepcopy(net)
    assert net.workspace.free and not other.workspace.free
    assert net.state_dict().keys() == other.state_dict().keys()
