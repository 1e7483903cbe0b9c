"""Memory is measured, and running out of it halves the micro-batch and nothing else."""

from __future__ import annotations

import gc
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from overnight.config import Run
from overnight.console import Line
from overnight.engine import loop, memory
from overnight.engine.memory import OutOfMemory, is_out_of_memory, memory_budget, peak_gb, reset_peak
from overnight.engine.micro_batch_trials import BatchSizeFinder
from overnight.engine.pretrain import pretrain
from overnight.errors import DataError
from overnight.models import vocabulary_loss
from tests.conftest import CLOCK
from tests.engine.planted_faults import planted
from tests.engine.test_pretrain import parameters
from tests.recipe import change

Make = Callable[..., Run]
CPU = torch.device("cpu")
MEASURED = {"logging.grad_noise_every": 1, "logging.tensor_norms_every": 1, "checkpoint.save_every": 2, "checkpoint.keep_latest_k": 9}


class Stop(Exception):
    """What stands for a crash."""


def finish(run: Run, plant: dict[str, Any] | None = None, crash: int = 0) -> str:
    """The run's words; it crashes in optimizer step number `crash`."""
    told, real, count = io.StringIO(), loop.clip_and_step, 0

    def step(*args: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        if count == crash:
            raise Stop
        return real(*args)

    with pytest.MonkeyPatch.context() as patch, planted(plant or {}):
        patch.setattr(loop, "clip_and_step", step)
        try:
            pretrain(run, Line(told))
        except Stop:
            assert crash
    return told.getvalue()


def lines(run: Run, *kinds: str) -> list[dict[str, Any]]:
    found = [json.loads(text) for text in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in CLOCK} for line in found if line["kind"] in kinds]


def remembered(run: Run) -> dict[str, Any]:
    return dict(json.loads((run.run_dir / "memory.json").read_text()))


def assert_same(a: Run, b: Run) -> None:
    mine, theirs = parameters(a), parameters(b)
    assert mine.keys() == theirs.keys() and [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    kinds = ("train", "eval", "noise", "tensor_norms", "phase")
    assert lines(a, *kinds) == lines(b, *kinds)


def test_what_says_that_there_is_no_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory")) and is_out_of_memory(MemoryError())
    assert not is_out_of_memory(RuntimeError("shape mismatch")) and not is_out_of_memory(ValueError("can't allocate memory"))


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "CUDA driver error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    ],
)
def test_a_gpu_that_has_no_memory_left_is_understood_whoever_says_so(said: str) -> None:
    assert is_out_of_memory(RuntimeError(said))


def test_the_peak_is_that_since_it_was_restarted() -> None:
    if not reset_peak(CPU):
        pytest.skip("this system does not count the peak anew")
    before = peak_gb(CPU)
    del (block := [torch.ones(50_000_000)])[:]
    assert peak_gb(CPU) > before + 0.19
    assert block == [] and reset_peak(CPU)
    assert peak_gb(CPU) < before + 0.1


def test_a_process_may_use_what_is_free_but_a_tenth_and_shares_it_with_those_beside_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory, "memory_bytes", lambda: 1000)
    monkeypatch.setattr(memory, "_resident", lambda name: 40)
    monkeypatch.setattr(memory, "_cgroup_free", lambda: 500)
    assert memory_budget(CPU) == (40, 40 + 400, 1000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert memory_budget(CPU) == (40, 40 + 200, 1000)


def test_a_container_counts_files_that_may_be_forgotten_as_free(tmp_path: Path) -> None:
    assert memory._cgroup_free(tmp_path) == float("inf")
    for name, text in {"memory.max": "1000\n", "memory.current": "600\n", "memory.stat": "anon 5\ninactive_file 250\n"}.items():
        (tmp_path / name).write_text(text)
    assert memory._cgroup_free(tmp_path) == 650
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._cgroup_free(tmp_path) == float("inf")


# Of the tiny run, a step of phase short has two micro-batches of 4 sequences: the tenth is the second of step 5.
OUT = {"memory": [0, 10, 2]}


@pytest.fixture(scope="module")
def halved(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, str]:
    from overnight import config
    from tests.conftest import tiny_tree

    tree = tiny_tree(tmp_path_factory.mktemp("halved"), tiny_data.parent / "topics.jsonl")
    tree["data"]["dir"] = str(tiny_data)
    run = config.build_run(change(tree, MEASURED))
    return run, finish(run, OUT)


def test_out_of_memory_halves_the_micro_batch_and_the_run_is_the_one_that_had_it_from_there_on(halved: tuple[Run, str], tiny: Make) -> None:
    run, told = halved
    # The step is the fifth, the checkpoint before it the fourth.
    finish(tiny(**MEASURED), crash=5)
    reference = tiny(**MEASURED, **{"phases.short.micro_batch_size": 2})
    finish(reference)
    assert_same(run, reference)
    text = "step 5 ran out of memory (CUDA out of memory. Tried to allocate 2.00 GiB.) with micro-batches of 4: taken again with 2"
    assert told.count("ran out of memory") == 1 and text in told
    (event,) = (line for line in lines(run, "event") if line["event"] == "out_of_memory")
    assert (event["message"], event["micro_batch_size"], event["phase"], event["global_step"]) == (text, 2, "short", 4)
    assert remembered(run)["short"]["since"] == [[0, 4], [4, 2]] and "long" not in remembered(run)


@pytest.mark.parametrize("crash", [4, 6])
def test_a_crash_after_it_does_not_change_the_result(crash: int, halved: tuple[Run, str], tiny: Make) -> None:
    run = tiny(**MEASURED)
    finish(run, OUT, crash=6)
    if crash == 4:  # The newest checkpoint is then from before the step at which memory ran out, which was taken in halves.
        shutil.rmtree(run.run_dir / "checkpoints" / "step-0000004")
        (run.run_dir / "checkpoints" / "latest").write_text("step-0000002")
    told = finish(run)
    assert_same(run, halved[0])
    assert ("micro-batch 2, as " in told) == (crash == 6)


def test_it_is_forgotten_on_another_machine_and_with_another_setting(tiny: Make) -> None:
    run = tiny()
    finish(run, {"memory": [0, 3, 2]}, crash=4)
    assert remembered(run)["short"]["since"] == [[0, 4], [1, 2]]
    assert "6 steps of 8 sequences (4 x 2)" in finish(tiny(**{"memory.activation_checkpointing": "full"}), crash=1)
    assert "6 steps of 8 sequences (8)" in finish(tiny(**{"phases.short.micro_batch_size": 8}), crash=1)
    assert "6 steps of 8 sequences (2 x 4)" in finish(run, crash=1)
    (run.run_dir / "memory.json").write_text("{")
    with pytest.raises(DataError, match=r"memory\.json: is not JSON: .*; delete it"):
        finish(run)


def test_one_sequence_that_does_not_fit_is_an_error_that_says_what_to_do(tiny: Make) -> None:
    with pytest.raises(
        OutOfMemory, match=r"phase short, step 1 ran out .* with micro-batches of 1 up to 32 tokens\. .*memory\.activation_checkpointing"
    ):
        finish(tiny(**{"phases.short.micro_batch_size": 1}), {"memory": [0, 1, 0]})


def test_what_a_failed_pass_held_is_free_when_its_step_is_taken_again(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    real, held = vocabulary_loss._product, list[int]()

    def product(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        held.append(sum(thing.numel() for thing in gc.get_objects() if type(thing) is torch.Tensor and thing.grad_fn is not None))
        if len(held) == 1:
            raise torch.OutOfMemoryError
        return real(x, *rest)

    # Inside an autograd.Function, which does not let go of the graph before it.
    monkeypatch.setattr(vocabulary_loss, "_product", product)
    gc.disable()  # else it might come to the rescue by chance
    try:
        finish(tiny(), crash=1)
    finally:
        gc.enable()
    # The second time with half as many sequences, and nothing of the first.
    assert held[1] < 0.75 * held[0]


def test_memory_that_runs_out_elsewhere_is_an_error_without_a_traceback(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(loop, "clip_and_step", full)
    with pytest.raises(OutOfMemory, match=r"after step 0 of phase short: CUDA out of memory\.\. Less memory is taken with"):
        pretrain(tiny(), Line(io.StringIO()))


def test_another_error_of_torch_stays_what_it_is(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any) -> None:
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr("overnight.models.bert.BertForPretraining.losses", wrong)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        pretrain(tiny(), Line(io.StringIO()))


def test_an_automatic_micro_batch_is_the_one_that_could_have_been_given(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero = {"phases.short.micro_batch_size": 0, "phases.long.micro_batch_size": 0}
    run = tiny(**zero, out=str(tmp_path / "automatic"))
    told = finish(run, crash=5)
    found = remembered(run)["short"]["since"][0][1]
    assert found in (1, 2, 4, 8) and f"micro-batch {found} of 1, 2, " in told
    with monkeypatch.context() as patch:  # The second time it is remembered.
        patch.setattr(BatchSizeFinder, "micro_batch", lambda self, owed: pytest.fail("a trial"))
        finish(run, crash=1)
    finish(run)
    found_long = remembered(run)["long"]["since"][0][1]
    given = tiny(**{"phases.short.micro_batch_size": found, "phases.long.micro_batch_size": found_long}, out=str(tmp_path / "given"))
    finish(given)
    assert_same(run, given)
    events = {line["phase"]: line for line in lines(run, "event") if line["event"] == "micro_batch_size"}
    assert {name: line["micro_batch_size"] for name, line in events.items()} == {"short": found, "long": found_long}


def test_an_automatic_micro_batch_is_the_usual_one_where_the_system_does_not_tell_memory(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overnight.engine.micro_batch_trials.reset_peak", lambda device: False)
    monkeypatch.setattr(BatchSizeFinder, "measure", lambda self, count: pytest.fail("a trial"))
    run = tiny(**{"phases.short.micro_batch_size": 0}, out=str(tmp_path / "open"))
    assert "micro-batch 8, the usual one: none was tried, since this system does not report a process's memory" in finish(run)
    given = tiny(**{"phases.short.micro_batch_size": 8}, out=str(tmp_path / "given"))
    finish(given)
    assert_same(run, given)


def test_an_automatic_micro_batch_leaves_two_where_noise_is_measured(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    real = BatchSizeFinder.measure
    monkeypatch.setattr(BatchSizeFinder, "measure", lambda self, count: tried.append(count) or real(self, count))
    finish(tiny(**{"phases.short.micro_batch_size": 0, "logging.grad_noise_every": 1}), crash=1)
    assert tried and max(tried) <= 4


def test_every_line_of_metrics_and_the_end_of_a_phase_have_the_peak(halved: tuple[Run, str]) -> None:
    run = halved[0]
    found = [json.loads(text) for text in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all(0.05 < line["memory_gb"] < 100 for line in found if line["kind"] == "train")
    ends = [line for line in found if line.get("event") == "memory"]
    assert [(line["phase"], line["micro_batch_size"], line["seq_len"], line["activation_checkpointing"]) for line in ends] == [
        ("short", 2, 32, "none"),
        ("long", 4, 48, "none"),
    ]
    assert all(0.05 < line["peak_gb"] < 100 for line in ends)
