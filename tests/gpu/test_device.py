"""On a GPU: a training follows that of a CPU, resumes bit by bit where it was asked to, and its model says what it says on a CPU.

The other tests of this folder need no GPU; these are skipped without one.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import overnight
from overnight import config
from overnight.config import Run
from overnight.console import Line
from overnight.finetune.finetune import finetune
from tests.conftest import modern_settings
from tests.engine.test_byte_training import byte_tree
from tests.engine.test_byte_training import folder as prepared_bytes
from tests.engine.test_pretrain import assert_same_run, finish, metrics, stop_after
from tests.finetune.conftest import Task, classes, with_task
from tests.recipe import change

__all__ = ["classes", "prepared_bytes", "with_task"]

Make = Callable[..., Run]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # torch warns inside its own tracing, where an error would stop it
]

BERT: dict[str, Any] = {"model.dropout": 0.0, "model.attention_dropout": 0.0}
MODERN = modern_settings()
DROPPED = {"model.dropout": 0.1, "model.attention_dropout": 0.1, "compute.deterministic": True}
GPU = {"compute.device": "cuda"}
# Of losses after ten steps, as a share.
LOOSE = {"fp32": 1e-4, "bf16": 0.01, "fp16": 0.01}


def optimizer(name: str, **more: Any) -> dict[str, Any]:
    """Settings that train both phases by an optimizer."""
    given = {"name": name, "lr": 0.003, "schedule": {"name": "poly", "warmup_ratio": 0.1}, **more}
    return {f"phases.{phase}.optim": dict(given) for phase in ("short", "long")}


def losses(run: Run) -> list[float]:
    """The losses of training and validation, in the order of the run."""
    return [value for line in metrics(run) for key, value in line.items() if key in ("mlm_loss", "byte_loss", "valid_loss")]


def assert_near(ours: Run, theirs: Run, loose: float) -> None:
    found, wanted = losses(ours), losses(theirs)
    assert len(found) == len(wanted) > 10
    for a, b in zip(found, wanted, strict=True):
        assert a == pytest.approx(b, rel=loose), (found, wanted)


@pytest.fixture(scope="module")
def on_cpu(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """Trains on the CPU in fp32, once for the same settings."""
    from tests.conftest import tiny_tree

    done: dict[str, Run] = {}

    def trained(settings: dict[str, Any]) -> Run:
        key = json.dumps(settings, sort_keys=True)
        if key not in done:
            tree = tiny_tree(tmp_path_factory.mktemp("cpu"), tiny_data.parent / "topics.jsonl")
            tree["data"]["dir"] = str(tiny_data)
            done[key] = config.build_run(change(tree, settings))
            finish(done[key])
        return done[key]

    return trained


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", ["bert", "modernbert"])
@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_a_training_follows_that_of_a_cpu(kind: str, name: str, precision: str, tiny: Make, on_cpu: Callable[..., Run]) -> None:
    settings = {**(BERT if kind == "bert" else MODERN), **optimizer(name)}
    ours = tiny(**settings, **GPU, precision=precision)
    finish(ours)
    assert_near(ours, on_cpu(settings), LOOSE[precision])


@pytest.mark.parametrize("name", ["lans", "lars", "adamw"])
def test_so_does_one_by_every_other_optimizer(name: str, tiny: Make, on_cpu: Callable[..., Run]) -> None:
    settings = {**BERT, **optimizer(name, lr=1.0 if name == "lars" else 0.003)}
    ours = tiny(**settings, **GPU)
    finish(ours)
    assert_near(ours, on_cpu(settings), LOOSE["fp32"])


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_so_do_fused_and_compiled_layers(kind: str, tiny: Make, on_cpu: Callable[..., Run]) -> None:
    settings = {**(BERT if kind == "bert" else MODERN), **optimizer("lamb")}
    ours = tiny(**settings, **GPU, **{"compute.torch_compile": True}, precision="bf16")
    finish(ours)
    assert_near(ours, on_cpu(settings), LOOSE["bf16"])


@pytest.mark.parametrize("layers", ["fused", "plain"])
@pytest.mark.parametrize("at", [4, 7])
def test_a_crash_does_not_change_a_deterministic_training(
    layers: str, at: int, tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**GPU, **DROPPED, "precision": "bf16", "compute.torch_compile": layers == "fused"}
    whole, cut = (tiny(**settings, out=str(tmp_path / name)) for name in ("whole", "cut"))
    finish(whole)
    stop_after(at, cut, monkeypatch)
    finish(cut)
    assert_same_run(whole, cut)


@pytest.mark.parametrize("recomputed", ["selective", "full"])
@pytest.mark.parametrize("layers", ["fused", "plain"])
def test_recomputed_layers_give_the_same_bits(layers: str, recomputed: str, tiny: Make, tmp_path: Path) -> None:
    settings = {**GPU, **DROPPED, "precision": "bf16", "compute.torch_compile": layers == "fused"}
    kept = tiny(**settings, out=str(tmp_path / "kept"))
    again = tiny(**settings, **{"memory.activation_checkpointing": recomputed}, out=str(tmp_path / "again"))
    for run in (kept, again):
        finish(run)
    assert_same_run(kept, again)


def test_state_in_the_memory_of_the_host_gives_the_same_bits(tiny: Make, tmp_path: Path) -> None:
    runs = [tiny(**GPU, **DROPPED, **{"memory.optimizer_cpu_offload": off}, out=str(tmp_path / str(off))) for off in (False, True)]
    for run in runs:
        finish(run)
    assert_same_run(*runs)


def test_micro_batches_are_tried_out(tiny: Make, on_cpu: Callable[..., Run]) -> None:
    ours = tiny(**BERT, **GPU, **{"phases.short.micro_batch_size": 0, "phases.long.micro_batch_size": 0})
    finish(ours)
    assert_near(ours, on_cpu(BERT), LOOSE["fp32"])


def test_a_step_that_overflows_fp16_is_taken_again_at_half_the_scale(
    tiny: Make, on_cpu: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    from overnight.engine.precision import LossScale

    settings = {**BERT, **optimizer("lamb")}
    monkeypatch.setattr(LossScale.__init__, "__defaults__", (2.0**40, 0))
    ours = tiny(**settings, **GPU, precision="fp16")
    finish(ours)
    assert_near(ours, on_cpu(settings), LOOSE["fp16"])
    scales = [line["loss_scale"] for line in metrics(ours) if "loss_scale" in line]
    assert scales and max(scales) < 2.0**40


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_byte_model_follows_that_of_a_cpu(graphs: bool, precision: str, prepared_bytes: Path, tmp_path: Path) -> None:
    given = {**GPU, "precision": precision, "compute.cuda_graphs": graphs}
    runs = [
        config.build_run(byte_tree(prepared_bytes, settings=more) | {"out": str(tmp_path / name)})
        for name, more in (("cpu", {}), ("gpu", given))
    ]
    for run in runs:
        finish(run)
    assert_near(runs[1], runs[0], LOOSE[precision])


def test_a_task_is_learned_and_answered_as_on_a_cpu(with_task: Task, classes: Path) -> None:
    run = dataclasses.replace(with_task("csv", classes, **{"compute.device": "cuda", "compute.torch_compile": True}), precision="bf16")
    finetune(run, "mine", Line(io.StringIO()))
    texts = ["integer division", "string literal", "a", "the text method " * 9]
    answers = [
        [each["label"] for each in overnight.load(run.run_dir, "mine", device=device, precision="fp32").predict(texts)]
        for device in ("cpu", "cuda")
    ]
    assert answers[0] == answers[1] and set(answers[0]) <= {"number", "text"}


@pytest.mark.parametrize(("precision", "loose"), [("fp32", 1e-3), ("bf16", 0.05)])
def test_a_model_embeds_as_on_a_cpu(precision: str, loose: float, pretrained: Run) -> None:
    texts = ["integer division", "", "a", "the text method " * 9]
    models = [
        overnight.load(pretrained.run_dir, device=device, precision=given) for device, given in (("cpu", "fp32"), ("cuda", precision))
    ]
    first, second = (torch.as_tensor(model.embed(texts)) for model in models)
    assert float((second - first).norm() / first.norm()) < loose


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_a_training_in_8_bits_follows_that_of_a_cpu(kind: str, compiled: bool, tiny: Make, on_cpu: Callable[..., Run]) -> None:
    pytest.importorskip("torchao", reason="needs the extra fp8")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no products in 8 bits")
    settings = {**(BERT if kind == "bert" else MODERN), **optimizer("lamb")}
    ours = tiny(**settings, **GPU, **{"compute.torch_compile": compiled}, precision="fp8")
    finish(ours)
    assert_near(ours, on_cpu(settings), 0.02)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("reduced", ["fp32", "bf16"])
def test_nccl_adds_gradients_up(strategy: str, reduced: str, tiny: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a group of one process, whose sum is its own gradient; it counts as two, which alone are wrapped."""
    import torch.distributed as dist
    from torch.distributed import device_mesh

    from overnight.distributed.world import World
    from overnight.distributed.wrap import full_tensor_cpu, gradient_sync, parallelize_model
    from tests.models.sample import pretraining, random_batch

    device = torch.device("cuda", 0)
    run = tiny(**{"distributed.strategy": strategy, "distributed.grad_reduce_dtype": reduced})
    batch, grads = random_batch([24, 20, 32]).to(device), []
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, device_id=device)
    real = device_mesh.init_device_mesh
    monkeypatch.setattr(device_mesh, "init_device_mesh", lambda kind, shape: real(kind, (1,)))
    try:
        for size in (1, 2):
            torch.manual_seed(0)
            net = pretraining().to(device)
            objective = parallelize_model(net, World(0, size, device), run)
            for last in (False, True):
                with gradient_sync(objective, last):
                    losses, _ = objective(batch, torch.bfloat16)
                    (losses["mlm"] + losses["nsp"]).backward()
            grads.append({name: full_tensor_cpu(p.grad) for name, p in net.named_parameters() if p.grad is not None})
    finally:
        dist.destroy_process_group()
    alone, summed = grads
    assert alone.keys() == summed.keys() and len(alone) > 10
    for name, grad in alone.items():
        # Attention and look-ups add up in an order that is not fixed.
        error = float((summed[name] - grad).norm() / grad.norm())
        assert error < (1e-2 if reduced == "bf16" else 1e-3), (name, error)
