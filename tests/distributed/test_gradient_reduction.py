"""Gradients added up between processes in 16 bits: near those of fp32, the same every time, and an overflow of the sum is seen."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from overnight import config
from overnight.console import Line
from overnight.engine.pretrain import pretrain
from overnight.errors import ConfigError
from tests.conftest import tiny_tree
from tests.distributed.test_parallel import KINDS, Runs, distance, lines, newest
from tests.recipe import change


def recipe(runs: Runs, name: str, steps: int, micro_batch_size: int = 1, **settings: Any) -> str:
    """A recipe of one phase, with batches of 8."""
    path = Path(runs.recipe(name, phase={"steps": steps, "micro_batch_size": micro_batch_size}, settings=settings))
    tree = yaml.safe_load(path.read_text())
    del tree["phases"]["long"]
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return str(path)


@pytest.fixture(scope="module")
def runs(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs of two processes: kind-reduce, and `scaled` where the products are fp16 too."""
    runs = Runs(tmp_path_factory.mktemp("reduce"), tiny_data)
    jobs = [recipe(runs, "ddp-fp32", 4), recipe(runs, "ddp-scaled-fp32", 20, 4, precision="fp16")]
    for kind in KINDS:
        narrow = {"distributed.strategy": kind, "distributed.grad_reduce_dtype": "bf16", "stability.replica_check_every": 1}
        jobs += [recipe(runs, f"{kind}-{name}", 4, **narrow) for name in ("bf16", "again")]
        scaled = {"distributed.strategy": kind, "distributed.grad_reduce_dtype": "fp16", "precision": "fp16"}
        jobs.append(recipe(runs, f"{kind}-scaled-fp16", 20, 4, **scaled))
    # So high that both the products and the sums overflow at first.
    said = runs.on(2, *({"recipe": path, "start": 2.0**32} for path in jobs))
    assert {code for job in said for code, _ in job} == {0}, said
    return runs


@pytest.mark.parametrize("kind", KINDS)
def test_sums_in_16_bits_stay_near_those_in_32_and_are_the_same_every_time(kind: str, runs: Runs) -> None:
    run = runs.folder / f"{kind}-bf16"
    assert 1e-5 < distance(run, runs.folder / "ddp-fp32") < 3e-3
    ours, again = newest(run), newest(runs.folder / f"{kind}-again")
    assert [name for name in ours if not torch.equal(ours[name], again[name])] == []
    assert {tensor.dtype for name, tensor in ours.items() if not name.endswith("/step")} == {torch.float32}


def test_the_micro_batches_of_a_process_are_added_up_in_32_bits_whole_or_cut(runs: Runs) -> None:
    # In bf16 their sum would be as far off as that of the processes, and FSDP2's policy makes it so.
    assert distance(runs.folder / "fsdp-bf16", runs.folder / "ddp-bf16") < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_of_the_sum_is_taken_again_at_a_lower_loss_scale(kind: str, runs: Runs) -> None:
    wide, narrow = (lines(runs.folder / name, "train") for name in ("ddp-scaled-fp32", f"{kind}-scaled-fp16"))
    # The sums of fp32 hold what the products can make; those of fp16 may not.
    assert 2.0**10 < narrow[-1]["loss_scale"] <= wide[-1]["loss_scale"] < 2.0**32
    assert {line["skipped"] for line in (*wide, *narrow)} == {0} and len(wide) == len(narrow) == 20
    assert all(bool(tensor.isfinite().all()) for tensor in newest(runs.folder / f"{kind}-scaled-fp16").values())


def test_one_process_alone_has_nothing_to_add_up(tiny_data: Path, tmp_path: Path) -> None:
    runs = Runs(tmp_path, tiny_data)
    for dtype in ("fp32", "bf16"):
        pretrain(config.load_run(recipe(runs, dtype, 2, **{"distributed.grad_reduce_dtype": dtype})), Line(io.StringIO()))
    ours, theirs = (newest(tmp_path / name) for name in ("bf16", "fp32"))
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_sums_in_fp16_without_a_loss_scale_are_refused(tmp_path: Path) -> None:
    tree = tiny_tree(tmp_path, tmp_path)
    for precision in ("fp32", "bf16"):
        change(tree, {"distributed.grad_reduce_dtype": "fp16", "precision": precision})
        with pytest.raises(ConfigError, match=rf"distributed\.grad_reduce_dtype = fp16: .* not {precision}; use bf16"):
            config.build_run(tree)
