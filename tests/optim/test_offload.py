"""The optimizer's state on the host: the same bits, in pieces, in memory that is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overnight import config
from overnight.checkpoint.reader import optimizer_tensors, restore_optimizer
from overnight.config import OPTIMIZERS
from overnight.engine.loop import clip_and_step
from overnight.errors import ConfigError
from overnight.optim import offload as module
from overnight.optim.groups import build_optimizer
from overnight.optim.offload import offload, on_device

NAMES = tuple(OPTIMIZERS)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 4, bias=False))


def trained(name: Any, offloads: bool, steps: int = 4) -> tuple[list[Tensor], dict[str, Tensor], torch.optim.Optimizer]:
    """Parameters and state after some clipped steps; the state went through a checkpoint in the middle."""
    net, optim = network(), OPTIMIZERS[name](lr=0.1, **({} if name == "lans" else {"max_grad_norm": 1.0}))
    optimizer = build_optimizer(net, optim)
    for step in range(steps):
        if step == 2:
            saved = {entry: value.clone() for entry, value in optimizer_tensors(optimizer).items()}
            optimizer = build_optimizer(net, optim)
            restore_optimizer(optimizer, saved)
        if offloads and step in (0, 2):
            offload(optimizer)
        torch.manual_seed(step)
        net(torch.randint(0, 11, (7,))).square().sum().backward()
        clip_and_step(optimizer, 1.0, check=True)
        optimizer.zero_grad()
    return [p.detach() for p in net.parameters()], optimizer_tensors(optimizer), optimizer


# Here device and host are one, but the copies are made as between two.
@pytest.mark.parametrize("piece", [1, 40, 1 << 26])
@pytest.mark.parametrize("name", NAMES)
def test_an_offloaded_optimizer_gives_the_same_bits(name: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", piece)
    params, state, _ = trained(name, offloads=False)
    ours, our_state, optimizer = trained(name, offloads=True)
    assert all(torch.equal(a, b) for a, b in zip(ours, params, strict=True))
    assert state.keys() == our_state.keys() and all(torch.equal(our_state[entry], state[entry]) for entry in state)
    assert all(len(group["params"]) == len(group["param_names"]) for group in optimizer.param_groups)


@pytest.mark.parametrize("name", NAMES)
def test_the_memory_on_the_host_is_used_again_and_a_step_sees_copies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 40)
    net = network()
    optimizer, moves = build_optimizer(net, OPTIMIZERS[name]()), module.moves
    offload(optimizer)
    places: list[dict[int, int]] = []
    for _ in range(3):
        net(torch.arange(11)).square().sum().backward()
        clip_and_step(optimizer, 1.0)
        places.append({id(p): v.data_ptr() for p, state in optimizer.state.items() for v in state.values() if moves(v)})
    assert places[0] == places[1] == places[2] and len(places[0]) == len(list(net.parameters()))
    p = net[1].weight
    host = dict(optimizer.state[p])
    with on_device(optimizer.state, [p]):
        assert all((value is not host[entry]) == moves(value) for entry, value in optimizer.state[p].items())
    assert all(optimizer.state[p][entry] is value for entry, value in host.items())


def test_what_is_cut_already_is_not_offloaded() -> None:
    tree = {"name": "x", "phases": {"short": {"steps": 1, "global_batch_size": 8}}, "memory": {"optimizer_cpu_offload": True}}
    assert config.build_run(tree).memory.optimizer_cpu_offload
    tree["distributed"] = {"strategy": "fsdp"}
    with pytest.raises(ConfigError, match=r"memory\.optimizer_cpu_offload = true: works with distributed\.strategy = ddp only"):
        config.build_run(tree)


def test_pieces_hold_everything_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK", 10)
    tensors = [torch.empty(n) for n in (4, 6, 1, 30, 2, 2)]
    assert [tensors[here] for here in module.chunks(tensors)] == [tensors[:2], tensors[2:3], tensors[3:4], tensors[4:]]
    assert list(module.chunks([])) == []


@pytest.mark.parametrize("name", NAMES)
def test_what_a_checkpoint_has_of_an_offloaded_optimizer_never_goes_to_the_device(name: str) -> None:
    _, saved, _ = trained(name, offloads=False)
    on_device = build_optimizer(network().to("meta"), OPTIMIZERS[name]())
    restore_optimizer(on_device, saved)
    assert {value.device.type for state in on_device.state.values() for value in state.values()} == {"meta"}
    optimizer = build_optimizer(network().to("meta"), OPTIMIZERS[name]())
    offload(optimizer)
    restore_optimizer(optimizer, saved)
    kept = {(value.ndim > 0, value.device.type) for state in optimizer.state.values() for value in state.values()}
    assert kept == {(True, "cpu"), (False, "meta")}  # the counts of steps
