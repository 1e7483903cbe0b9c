"""fp8: the products of the layers in 8 bits, emulated where there is no hardware for it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from overnight.checkpoint import reader
from overnight.config import Run
from overnight.engine.precision import to_fp8
from overnight.errors import ConfigError
from tests.engine.test_pretrain import assert_same_run, finish, metrics
from tests.models.sample import modern, pretraining, random_batch

Make = Callable[..., Run]


@pytest.fixture
def torchao() -> None:
    pytest.importorskip("torchao", reason="needs the extra fp8")


@pytest.mark.usefixtures("torchao")
@pytest.mark.parametrize("make", [pretraining, modern])
def test_the_products_of_the_layers_are_rounded_to_8_bits_and_no_others(make: Callable[[], Any]) -> None:
    from torchao.float8.float8_linear import Float8Linear

    model, batch = make(), random_batch([24, 20, 32])
    plain, _ = model.losses(batch, torch.bfloat16)
    names = dict(model.named_parameters())
    to_fp8(model, torch.device("cpu"))
    changed = [name for name, module in model.named_modules() if isinstance(module, Float8Linear)]
    assert changed == [f"encoder.layers.{i}.{part}" for i in range(len(model.encoder.layers)) for part in ("qkv", "out", "up", "down")]
    assert dict(model.named_parameters()).keys() == names.keys() and all(p is names[name] for name, p in model.named_parameters())
    rounded, _ = model.losses(batch, torch.bfloat16)
    assert rounded["mlm"].item() == pytest.approx(plain["mlm"].item(), rel=0.02) and not torch.equal(rounded["mlm"], plain["mlm"])
    rounded["mlm"].backward()
    assert all(p.grad.dtype == torch.float32 for p in model.encoder.layers.parameters() if p.grad is not None)


@pytest.mark.usefixtures("torchao")
def test_a_run_in_fp8_follows_fp32_and_resumes_with_the_same_bits(tiny: Make, tmp_path: Path) -> None:
    runs = {kind: tiny(**{"precision": kind}, out=str(tmp_path / kind)) for kind in ("fp32", "fp8")}
    cut = tiny(**{"precision": "fp8"}, out=str(tmp_path / "cut"))
    for run in (*runs.values(), cut):
        finish(run)
    curves = {kind: [line["mlm_loss"] for line in metrics(run) if line["kind"] == "eval"] for kind, run in runs.items()}
    assert curves["fp8"] == pytest.approx(curves["fp32"], rel=0.02) and curves["fp8"] != curves["fp32"]
    shutil.rmtree(cut.run_dir / "checkpoints" / "step-0000010")
    finish(cut)
    assert_same_run(cut, runs["fp8"])
    kept = [set(reader.read_checkpoint(run.run_dir / "checkpoints" / "step-0000010")[1]) for run in runs.values()]
    assert kept[0] == kept[1]


def test_without_torchao_fp8_is_refused_with_what_to_install(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match=r"needs the extra `fp8`: pip install 'overnight\[fp8\]'"):
        finish(tiny(**{"precision": "fp8"}))
