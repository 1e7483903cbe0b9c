"""The loss scale follows its rule and rounds nothing; fp16 follows fp32; a step that overflows is skipped and nothing else."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from overnight import machine
from overnight.checkpoint import reader
from overnight.config import OPTIMIZERS, Run, load_run
from overnight.distributed.world import World
from overnight.engine import loop, precision, stability, training_run
from overnight.engine.finite import NonFiniteError, nonfinite_tensors
from overnight.engine.loop import StepResult, training_steps
from overnight.engine.micro_batch import conditions
from overnight.engine.precision import CEILING, FLOOR, INITIAL_SCALE, LossScale, set_matmul_precision
from overnight.errors import ConfigError
from overnight.optim.groups import build_optimizer
from tests.engine.test_loop_measurements import settings, work
from tests.engine.test_pretrain import Stop, assert_same_run, finish, metrics
from tests.models.sample import pretraining

Make = Callable[..., Run]
CPU = torch.device("cpu")


def scales(events: str, **start: Any) -> list[float]:
    """The scale after each step; `x` is an overflow, `.` none."""
    scale, found = LossScale(**start), []
    for event in events:
        scale.update(finite=event == ".")
        found.append(scale.scale)
    return found


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ("....", [8, 8, 16, 16]),  # doubled after three clean steps
        ("..x.", [8, 8, 4, 4]),  # an overflow halves and the count begins anew
        ("..x...", [8, 8, 4, 4, 4, 8]),
        ("...x...", [8, 8, 16, 8, 8, 8, 16]),
        ("......", [8, 8, 16, 16, 16, 32]),
        ("xxx", [4, 2, 1]),
    ],
)
def test_it_halves_on_overflow_and_doubles_after_a_window_of_clean_steps(
    events: str, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "WINDOW", 3)
    assert scales(events, scale=8.0) == expected


def test_the_published_numbers() -> None:
    assert (LossScale().scale, FLOOR, precision.WINDOW) == (2**16, 1, 1000)
    assert scales("." * 1000)[-2:] == [INITIAL_SCALE, 2 * INITIAL_SCALE]
    assert scales("." * 1000, scale=CEILING)[-1] == CEILING


def test_an_overflow_at_the_floor_stops() -> None:
    with pytest.raises(NonFiniteError, match=r"at its floor of 1, .* with precision=bf16"):
        scales("xx", scale=2.0)


@given(st.lists(st.booleans(), max_size=300), st.integers(0, 40))
def test_it_is_always_a_power_of_two_between_floor_and_ceiling(events: list[bool], power: int) -> None:
    scale = LossScale(2.0**power)
    with mock.patch.object(precision, "WINDOW", 2):
        for finite in events:
            try:
                scale.update(finite)
            except NonFiniteError:
                assert scale.scale == FLOOR and not finite
                break
            assert math.frexp(scale.scale)[0] == 0.5 and FLOOR <= scale.scale <= CEILING


def train(name: str, objective: Callable[..., Any] | None = None, scale: LossScale | None = None, **changes: Any) -> tuple[Any, ...]:
    model = pretraining(dropout=0.1, attention_dropout=0.1)
    optimizer = build_optimizer(model, OPTIMIZERS[name](lr=0.01))  # type: ignore[arg-type]
    losses = (lambda *args: objective(model, *args)) if objective else model.losses
    return model, optimizer, training_steps(model, losses, optimizer, work, settings(**changes), scale=scale)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scaling_rounds_nothing(name: str) -> None:
    found = []
    for scale in (None, LossScale(2.0**12)):
        model, _, steps = train(name, scale=scale, steps=3, measure_every=1, noise_every=1)
        measured = [(s.tensors.rows(17), s.noise.squares(), float(s.grad_norm), {k: float(v) for k, v in s.losses.items()}) for s in steps]
        found.append((measured, {name: p.detach().clone() for name, p in model.named_parameters()}))
    (plain, a), (scaled, b) = found
    assert plain == scaled
    assert all(torch.equal(a[name], b[name]) for name in a)


class Infinite:
    """A BERT whose masked-LM loss is infinite at some steps (each of four micro-batches)."""

    def __init__(self, *at: int) -> None:
        self.at, self.calls = at, 0

    def __call__(self, model: Any, batch: Any, dtype: torch.dtype) -> Any:
        losses, hits = model.losses(batch, dtype)
        step, self.calls = self.calls // 4, self.calls + 1
        return ({**losses, "mlm": losses["mlm"] * math.inf} if step in self.at else losses), hits


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    moments = {name: tensor.clone() for name, tensor in reader.optimizer_tensors(optimizer).items()}
    return {**{name: p.detach().clone() for name, p in model.named_parameters()}, **moments}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["fp16", "fp32"])
def test_an_overflow_skips_exactly_that_step(name: str, kind: str) -> None:
    half = kind == "fp16"
    scale = LossScale(2.0**8) if half else None
    rest = {"dtype": torch.float16} if half else {"on_nonfinite": "skip"}
    model, optimizer, steps = train(name, Infinite(2), scale, steps=5, measure_every=1, lr=lambda step: 0.01 / (1 + step), **rest)
    done: list[StepResult] = []
    states = [state(model, optimizer)]
    for step in steps:
        done.append(step)
        states.append(state(model, optimizer))
    assert [bool(step.skipped) for step in done] == [False, False, True, False, False]
    assert [same(a, b) for a, b in pairwise(states)] == [False, False, True, False, False]
    # The optimizer has its own count, and the rate goes by the number of the step.
    counts = {float(value) for key, value in states[-1].items() if key.endswith("/step")}
    assert counts in ({4.0}, set())
    assert [step.lr for step in done] == [0.01 / (1 + t) for t in range(5)]
    assert "the mlm loss is inf" in done[2].skipped and "the gradient of encoder.layers.0.qkv.weight, " in done[2].skipped
    assert done[2].tensors is None and done[3].tensors is not None
    assert scale is None or (scale.scale, scale.clean) == (2.0**7, 2)


def test_it_stops_after_twenty_skipped_steps_in_a_row() -> None:
    bad = [3, *range(5, 40)]
    _, _, steps = train("lamb", Infinite(*bad), steps=40, on_nonfinite="skip")
    with pytest.raises(NonFiniteError, match=r"step 25: the mlm loss is inf.*20 steps in a row"):
        list(steps)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stop_names_step_loss_and_tensors_and_leaves_all_as_it_was(name: str) -> None:
    model, optimizer, steps = train(name, Infinite(1), steps=3)
    next(steps)
    before = state(model, optimizer)
    with pytest.raises(
        NonFiniteError, match=r"step 2: the mlm loss is inf; the gradient of encoder\.layers\.0\.qkv\.weight, .* and 41 more is not finite"
    ):
        next(steps)
    assert same(before, state(model, optimizer))


def test_only_the_tensors_that_are_not_finite_are_named() -> None:
    def one(model: Any, batch: Any, dtype: torch.dtype) -> Any:
        losses, hits = model.losses(batch, dtype)
        return {**losses, "nsp": losses["nsp"] + (model.pooler.bias * 1e38).sum() * 1e38 - (model.pooler.bias * 1e38).sum() * 1e38}, hits

    for name in ("lamb", "adamw"):
        _, _, steps = train(name, one, steps=1)
        with pytest.raises(NonFiniteError, match=r"the gradient of pooler\.bias is not finite"):
            list(steps)
    assert nonfinite_tensors([("a", torch.ones(2)), ("b", torch.tensor([1.0, math.nan])), ("c", torch.tensor([-math.inf]))]) == ["b", "c"]


def test_tf32_is_asked_of_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)
    set_matmul_precision("tf32", CPU)
    assert asked == []
    for kind in ("tf32", "fp32", "bf16"):
        set_matmul_precision(kind, torch.device("cuda"))
    assert asked == ["high", "highest", "highest"]


def test_large_pages_are_asked_for_on_a_cpu_unless_the_user_has_said_otherwise(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "THP_MEM_ALLOC_ENABLE"
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda how: None)
    for device, before, after in ((CPU, None, "1"), (CPU, "0", "0"), (torch.device("cuda"), None, None)):
        with monkeypatch.context() as patch:
            patch.setenv(name, "")
            os.environ.pop(name)
            if before is not None:
                patch.setenv(name, before)
            patch.setattr(training_run, "device_of", lambda run, found=device: found)
            training_run.set_up_machine(tiny())
            assert os.environ.get(name) == after


@pytest.mark.parametrize(("asked", "threads"), [(0, 3), (2, 2)])
def test_a_container_with_the_time_of_3_cores_is_given_3_threads_unless_others_are_asked_for(
    asked: int, threads: int, tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(training_run, "usable_cores", lambda: 3)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    training_run.set_up_machine(tiny(**{"compute.threads": asked}))
    assert told == [threads]


@pytest.mark.parametrize(("device", "predicts", "keeps"), [(CPU, False, True), (CPU, True, False), (torch.device("cuda"), False, False)])
def test_freed_memory_is_kept_by_trainings_on_a_cpu(
    device: torch.device, predicts: bool, keeps: bool, tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(machine, "_tune", lambda *values: told.append(values))
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda how: None)
    monkeypatch.setattr(training_run, "device_of", lambda run: device)
    training_run.set_up_machine(tiny(), predicts)
    assert len(told) == 2 * keeps


def test_the_users_own_tuning_of_the_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(machine, "_tune", lambda *values: told.append(values))
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_max=65536")
    machine.keep_freed_memory()
    machine.return_large_blocks()
    assert not told


def test_determinism_is_asked_of_torch_for_a_gpu_before_its_libraries_begin(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    cuda = torch.device("cuda")
    try:
        for device, asked in ((CPU, True), (cuda, False), (cuda, True)):
            monkeypatch.setattr(training_run, "device_of", lambda run, found=device: found)
            monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda how: None)
            training_run.set_up_machine(tiny(**{"compute.deterministic": asked}))
            on = asked and device is cuda
            assert torch.are_deterministic_algorithms_enabled() == on and os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (
                ":4096:8" if on else None
            )
        # With warnings only, the backward pass of flash attention would stay as it is.
        assert not torch.is_deterministic_algorithms_warn_only_enabled() and not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)


def test_another_determinism_searches_the_micro_batch_again_and_none_is_as_before(tiny: Make) -> None:
    run = tiny()
    before, after = (conditions(each, run.phases["short"], World(device=CPU)) for each in (run, tiny(**{"compute.deterministic": True})))
    assert "deterministic" not in before and after == {**before, "deterministic": True}


@pytest.fixture
def low_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A start at which the tiny run overflows once or twice."""
    monkeypatch.setattr(stability, "INITIAL_SCALE", 2.0**20)
    yield


def losses_held_out(run: Run) -> list[float]:
    return [line["mlm_loss"] for line in metrics(run) if line["kind"] == "eval"]


def test_tf32_changes_nothing_on_a_cpu(tiny: Make, tmp_path: Any) -> None:
    runs = [tiny(precision=kind, out=str(tmp_path / kind)) for kind in ("fp32", "tf32")]
    for run in runs:
        finish(run)
    assert losses_held_out(runs[0]) == losses_held_out(runs[1]) != []


@pytest.mark.usefixtures("low_start")
def test_fp16_follows_fp32_over_30_steps(tiny: Make, tmp_path: Any) -> None:
    seldom = {"phases.short.steps": 30, "logging.eval_every": 5, "checkpoint.save_every": 30}
    runs = {kind: tiny(**{"precision": kind, **seldom}, out=str(tmp_path / kind)) for kind in ("fp32", "fp16")}
    for run in runs.values():
        finish(run)
    held = {kind: losses_held_out(run) for kind, run in runs.items()}
    assert held["fp32"][0] > held["fp32"][5] + 0.07, "it falls by more than the two may differ"
    assert held["fp16"] != held["fp32"] and held["fp16"] == pytest.approx(held["fp32"], rel=0.01)
    lines = [line for line in metrics(runs["fp16"]) if line["kind"] == "train"]
    assert lines[-1]["skipped"] == 0 and 2.0**14 <= lines[-1]["loss_scale"] < 2.0**20
    assert not any("loss_scale" in line or "skipped" in line for line in metrics(runs["fp32"]))


@pytest.mark.usefixtures("low_start")
@pytest.mark.parametrize("at", [3, *(pytest.param(at, marks=pytest.mark.heavy) for at in (1, 8))])
def test_fp16_resumes_bit_by_bit_with_its_scale(at: int, tiny: Make, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "WINDOW", 3)
    whole, cut = (tiny(**{"precision": "fp16"}, out=str(tmp_path / name)) for name in ("whole", "cut"))
    finish(whole)
    used = {line["loss_scale"] for line in metrics(whole) if line["kind"] == "train"}
    assert len(used) > 1, "the scale never changed"
    real, count = loop.clip_and_step, 0

    def crash(*args: Any) -> Tensor:
        nonlocal count
        count += 1
        if count == at + 1:
            raise Stop
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "clip_and_step", crash)
        with pytest.raises(Stop):
            finish(cut)
    finish(cut)
    assert_same_run(whole, cut)
    ends = [reader.read_checkpoint(run.run_dir / "checkpoints" / "step-0000010")[0] for run in (whole, cut)]
    (a, b) = ((end.states["loss_scale"], end.skipped) for end in ends)
    assert a == b


@pytest.mark.parametrize("name", ["lamb", pytest.param("adamw", marks=pytest.mark.heavy)])
def test_an_overflow_is_taken_again_on_the_same_batch_and_nothing_is_lost(name: str) -> None:
    high = LossScale(2.0**32)
    model, optimizer, steps = train(name, scale=high, steps=3, dtype=torch.float16)
    done = list(steps)
    assert [(step.step, step.skipped) for step in done] == [(1, ""), (2, ""), (3, "")]
    assert high.scale < 2.0**32
    # As from a start at the scale that it found: every bit, and the optimizer's count of steps.
    other, same_optimizer, steps = train(name, scale=LossScale(high.scale), steps=3, dtype=torch.float16)
    assert [float(step.grad_norm) for step in steps] == [float(step.grad_norm) for step in done]
    assert same(state(model, optimizer), state(other, same_optimizer))


def test_no_start_of_fp16_costs_a_step_data_or_warm_up(tiny: Make, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for kind, start in (("fp32", 0.0), ("fp16", INITIAL_SCALE), ("high", 2.0**32)):
        run = tiny(**{"precision": "fp32" if kind == "fp32" else "fp16"}, out=str(tmp_path / kind))
        monkeypatch.setattr(stability, "INITIAL_SCALE", start)
        finish(run)
        found[kind] = [line for line in metrics(run) if line["kind"] == "train"]
    for kind in ("fp16", "high"):
        assert [line["skipped"] for line in found[kind]] == [0] * len(found["fp32"])
        for key in ("step", "lr", "tokens", "sequences"):
            assert [line[key] for line in found[kind]] == [line[key] for line in found["fp32"]]
        assert [line["loss"] for line in found[kind]] == pytest.approx([line["loss"] for line in found["fp32"]], rel=0.01)
    assert found["fp16"][-1]["loss_scale"] == INITIAL_SCALE and found["high"][-1]["loss_scale"] < 2.0**24


def test_a_gpu_for_which_torch_has_no_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_run, "device_of", lambda run: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    with pytest.raises(
        ConfigError,
        match=r"compute\.device: this torch has no kernels for compute capability 7\.0, only for sm_80, sm_90; .*compute\.device=cpu",
    ):
        training_run.set_up_machine(load_run("demo"))
