"""Every benchmark runs at its smallest size on a CPU, and prints what it promises."""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from overnight.batches.packing import Batch
from overnight.bench import gates, gpu, loader, mlstm, optim, scaling, train
from overnight.bench.sizes import full_batch, natural_batch
from overnight.cli.main import main
from overnight.errors import UserError
from overnight.models.bert import BertForPretraining
from overnight.models.modernbert import ModernBertForMaskedLM
from overnight.optim import Lamb
from tests.conftest import ROOT

# What `overnight bench gpu` must do without: everything that neither torch nor the standard library brings.
ABSENT = (
    "pyarrow",
    "tokenizers",
    "pydantic",
    "yaml",
    "rich",
    "xxhash",
    "safetensors",
    "transformers",
    "psutil",
    "zstandard",
    "sklearn",
    "scipy",
)
WORDS = 1000


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def few_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary that takes little of a step."""
    for module in (train, optim, gpu):
        monkeypatch.setattr(module, "VOCABULARY", WORDS)
        for name in ("full_batch", "natural_batch"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, partial(getattr(module, name), vocabulary=WORDS))


def assert_result(text: str, what: str) -> list[dict[str, Any]]:
    found = json.loads(text.splitlines()[-1])
    assert list(found) == ["what", "environment", "rows"] and found["what"] == what
    assert found["environment"]["python"] and found["rows"]
    for row in found["rows"]:
        assert {"name", "value", "unit", "spread"} <= set(row)
        assert math.isfinite(row["value"]) and row["value"] >= 0
        if row["spread"] is not None:
            low, high = row["spread"]
            assert low <= row["value"] <= high
        if "peer" in row:
            assert row["peer_value"] > 0 and row["ratio"] > 0
    names = [row["name"] for row in found["rows"]]
    assert len(set(names)) == len(names)
    return list(found["rows"])


@pytest.mark.usefixtures("few_words")
def test_training_is_measured_beside_its_peer(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert main(["bench", "train", "--tiny"]) == 0
    rows = assert_result(capsys.readouterr().out, "train")
    assert [row["name"] for row in rows] == [
        *(f"{kind}-tiny 32 {precision}" for kind in ("bert", "modernbert") for precision in ("fp32", "bf16")),
        "bert-tiny up to 32 fp32",
    ]
    for row in rows:
        assert row["unit"] == "sequences/s" and row["peer"] == "transformers"
        assert row["ratio"] == pytest.approx(row["value"] / row["peer_value"], rel=1e-3)


def test_training_is_measured_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "TINY", train.TINY[:1])
    assert main(["bench", "train", "--tiny", "--peer", "none"]) == 0
    assert all("peer" not in row for row in assert_result(capsys.readouterr().out, "train"))


def test_the_loader_is_measured_in_every_form(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_REPEATS", "_STEPS"):
        monkeypatch.setattr(loader, name, 2)
    assert main(["bench", "loader", "--tiny"]) == 0
    rows = {row["name"]: row["unit"] for row in assert_result(capsys.readouterr().out, "loader")}
    batches = ("segments of 128", "segments of 128, whole words", "pairs of 128", "segments of 512", "segments of 128, two sources")
    assert {rows[name] for name in (*batches, "bytes, windows of 256", "plans of pairs of 128")} == {"tokens/s"}
    assert rows["begin segments in epoch 6"] == rows["begin pairs in epoch 6"] == "ms" and len(rows) == 13


def test_what_was_measured_before_an_interruption_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_REPEATS", "_STEPS"):
        monkeypatch.setattr(loader, name, 2)

    def interrupted(*args: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(loader, "seek_row", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loader.run(tiny=True)
    assert len(assert_result(capsys.readouterr().out, "loader")) == 11


def test_the_multiplicative_lstm_is_measured_beside_autograd(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "mlstm", "--tiny"]) == 0
    rows = assert_result(capsys.readouterr().out, "mlstm")
    peers = {row["name"]: row.get("peer") for row in rows}
    assert peers == {
        "H32 fp32": "autograd",
        "H32 fp32 products' share": None,
        "H32 fp32 LSTM": "torch.nn.LSTM",
        "H32 bf16": "autograd",
        "H32 bf16 products' share": None,
    }


def test_the_multiplicative_lstm_and_its_peer_do_the_same() -> None:
    case = mlstm.TINY[0]
    batch, grads = mlstm.window(case), []
    for make in (lambda: mlstm.our_step("mlstm", case, batch), lambda: mlstm.autograd_step(case, batch)):
        step = make()
        step()
        parameters = inspect.getclosurevars(step).nonlocals["parameters"]
        grads.append([p.grad for p in parameters])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_multiplicative_lstm_costs_what_was_published() -> None:
    # 6 (5H² + 257H) as published, and of its 5·64·H products with the embedding those of 256 bytes for all characters of a window.
    rows = [mlstm.flops(mlstm.Case(width, 128, 256, "fp32")) / 1e6 for width in (1024, 4096, 8192)]
    assert [round(flops, 1) for flops in rows] == [33.0, 509.7, 2026.0]


def test_without_its_peer_the_benchmark_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"pip install 'overnight\[transformers\]', or --peer none"):
        train.run(tiny=True)


def test_scaling_is_measured_where_a_process_cannot_be_kept_on_a_core(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sched_getaffinity", "sched_setaffinity"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(scaling, "measured", lambda world, model, repeats: scaling.Times(0.1, 0.05, 0.1 + 0.01 * world))
    assert main(["bench", "scaling", "--tiny"]) == 0
    assert len(assert_result(capsys.readouterr().out, "scaling")) == 8
    scaling.pin(0)


@pytest.mark.usefixtures("few_words")
def test_the_optimizers_are_measured_beside_adamw_a_hand_written_lamb_and_their_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "optim", "--tiny"]) == 0
    rows = {row["name"]: row for row in assert_result(capsys.readouterr().out, "optim")}
    assert {rows[f"bert-tiny: {name} {how}"]["peer"] for name in ("LAMB", "LANS", "LARS") for how in ("fused", "foreach")} == {
        "fused AdamW"
    }
    assert [rows[f"bert-tiny: {name} fused, bytes"]["peer"][:2] for name in ("LAMB", "LANS", "LARS")] == ["44", "48", "28"]
    assert rows["bert-tiny: LAMB fused, by hand"]["peer"] == "eager, tensor by tensor"


def test_optimizers_that_do_not_fit_into_memory_are_left_out(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.25 GiB.\nMore")
    monkeypatch.setattr(optim, "measure_case", lambda *args, **kwargs: raising(error))
    assert main(["bench", "optim", "--tiny"]) == 0
    text = capsys.readouterr().out
    assert "left out, for memory: optimizers of bert-tiny (CUDA out of memory. Tried to allocate 1.25 GiB.)" in text
    assert json.loads(text.splitlines()[-1])["rows"] == []


def test_without_a_fast_step_of_the_optimizers_the_benchmark_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optim, "why_lists", lambda device: "Triton needs compute capability 8.0, this GPU has 7.0")
    assert main(["bench", "optim", "--tiny"]) == 1
    assert "to measure on this cpu: Triton needs compute capability 8.0, this GPU has 7.0" in capsys.readouterr().err


def test_the_hand_written_lamb_of_the_benchmark_is_lamb() -> None:
    ours, by_hand = ([torch.randn(5, 4, generator=torch.Generator().manual_seed(i)) for i in range(2)] for _ in range(2))
    for params, step in ((ours, Lamb(ours, lr=1e-3).step), (by_hand, optim.eager_lamb(by_hand))):
        for at in range(3):
            for i, p in enumerate(params):
                p.grad = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * at + i))
            step()
    torch.testing.assert_close(ours, by_hand, rtol=1e-5, atol=1e-7)


def test_the_cases_named_in_the_goals_are_measured() -> None:
    cases = {case.name: case for case in train.CASES}
    assert {f"bert-mini {lengths} {precision}" for lengths in ("128", "up to 512") for precision in ("fp32", "bf16")} <= cases.keys()
    natural = cases["bert-mini up to 512 fp32"].batch().lengths
    assert len(natural) == 16 and max(natural) == 512 and 250 < sum(natural) / 16 < 270
    sizes = {(case.model, case.length) for case in gpu.CASES}
    assert {("bert-base", 128), ("bert-base", 512), ("bert-large", 128), ("bert-large", 512)} <= sizes
    assert {(case.length, case.mean) for case in gpu.CASES if case.mean} == {(512, 250)}
    assert gpu.BYTES[:4] == (4096, 256, 256, "bf16")
    for case in gpu.CASES:
        lengths = gpu.given_batch(replace(case, sequences=8)).lengths
        assert sum(lengths) == 8 * (case.mean or case.length) and max(lengths) == case.length


def test_the_peer_is_given_the_same_sequences_padded() -> None:
    batch = natural_batch((9, 4, 7), vocabulary=100)
    rows = train.padded_inputs(batch)
    assert {name: tuple(x.shape) for name, x in rows.items()} == dict.fromkeys(
        ("input_ids", "token_type_ids", "attention_mask", "labels"), (3, 9)
    )
    real = rows["attention_mask"].bool()
    assert torch.equal(real.sum(1), torch.tensor(batch.lengths)) and torch.equal(rows["input_ids"][real], batch.ids_N)
    assert torch.equal(rows["token_type_ids"][real], batch.segments_N) and (rows["labels"][~real] == -100).all()
    assert torch.equal((rows["labels"][real] != -100).nonzero().squeeze(1), batch.predicted_M)
    assert "attention_mask" not in train.padded_inputs(natural_batch((5, 5)))


@pytest.mark.usefixtures("few_words")
@pytest.mark.parametrize("batch", [full_batch(4, 32, 5, WORDS), natural_batch((32, 40, 24, 37), WORDS)], ids=["full", "natural"])
@pytest.mark.parametrize(
    ("name", "network", "peer"),
    [("bert-tiny", BertForPretraining, "BertForPreTraining"), ("modernbert-tiny", ModernBertForMaskedLM, "ModernBertForMaskedLM")],
)
def test_a_step_of_the_benchmark_and_of_its_peer_do_the_same_work(name: str, network: Any, peer: str, batch: Batch) -> None:
    """Both lower the loss of the one batch they are given, from about the same place to about the same place."""
    transformers = pytest.importorskip("transformers")
    model, theirs = train.NETWORKS[name], getattr(transformers, peer)
    losses: dict[str, list[float]] = {"ours": [], "theirs": []}
    real, forward = network.losses, theirs.forward

    def noted(self: Any, *args: Any) -> Any:
        summed, hits = real(self, *args)
        losses["ours"].append(sum(float(loss.detach()) / len(batch.targets[what]) for what, loss in summed.items()))
        return summed, hits

    def heard(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(self, *args, **kwargs)
        losses["theirs"].append(float(out.loss.detach()))
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "losses", noted)
        patch.setattr(theirs, "forward", heard)
        for step in (train.our_step(model, batch, torch.float32), train.transformers_step(model, batch, "fp32")):
            for _ in range(20):
                step()
    assert losses["ours"][0] == pytest.approx(losses["theirs"][0], abs=0.3)
    assert losses["ours"][-1] == pytest.approx(losses["theirs"][-1], abs=0.3)
    assert losses["ours"][-1] < losses["ours"][0] - 0.1


@pytest.mark.heavy  # tests/test_structure.py has these benchmarks begin with torch and numpy alone
def test_the_gpu_benchmark_needs_the_repository_and_torch_only() -> None:
    script = f"""
import sys
from importlib.machinery import PathFinder
class Present(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in {ABSENT!r} else PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Present
import runpy
sys.argv = ["overnight", "bench", "gpu", "--tiny"]
runpy.run_module("overnight", run_name="__main__")
"""
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert result.returncode == 0, result.stderr
    rows = assert_result(result.stdout, "gpu")
    names = [row["name"] for row in rows]
    assert sum(name.startswith("gate:") for name in names) == 6
    for part in (
        "ceiling: bf16 product",
        "ceiling: copy",
        "bert-tiny: LAMB fused",
        "bert-tiny 32 bf16",
        "vocabulary head",
    ):
        assert any(part in name for name in names), part
    assert "left out: mLSTM (No module named 'pyarrow')" in result.stdout
    bound = next(row for row in rows if row["name"] == "bert-tiny: LAMB fused, bytes")
    assert bound["peer"] == "44 bytes a parameter"


@pytest.mark.usefixtures("few_words")
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5.40 GiB.\nMore"), RuntimeError("CUDA error: out of memory")]
)
def test_the_gpu_benchmark_survives_where_memory_runs_out(
    error: Exception, tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizers and one training do not fit: they are left out, in words, and all else is measured, printed and written."""
    monkeypatch.setattr(gpu, "GATES", ())
    monkeypatch.setattr(gpu.optim, "measure_case", lambda *args, **kwargs: raising(error))
    real = gpu.train_rows
    monkeypatch.setattr(gpu, "train_rows", lambda case, *rest: raising(error) if case.mean else real(case, *rest))
    file, written = tmp_path / "gpu.json", []
    monkeypatch.setattr(gpu, "write_json", lambda path, tree: written.append((path, len(tree["rows"]))))
    gpu.run(tiny=True, file=file)
    text = capsys.readouterr().out
    rows = assert_result(text, "gpu")
    assert written == [(file, number + 1) for number in range(len(rows))]
    assert text.count(f"left out, for memory: optimizers of bert-tiny ({str(error).splitlines()[0]})") == 1
    assert "left out, for memory: bert-tiny 32 mean 20 bf16 attention dropout 0.1" in text
    assert {"bert-tiny 32 bf16", "bert-tiny 32 bf16 attention dropout 0.1", "mLSTM H32 bf16"} <= {row["name"] for row in rows}


def test_the_gpu_benchmark_prints_what_it_has_whatever_happens(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "GATES", (gates.precision_gate,))
    monkeypatch.setattr(gpu, "ceilings", lambda *args: raising(RuntimeError("CUDA error: an illegal memory access was encountered")))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        gpu.run(tiny=True)
    (row,) = assert_result(capsys.readouterr().out, "gpu")
    assert row["name"].startswith("gate: fp32 losses")


@pytest.mark.parametrize(("total_gb", "copied_gb"), [(80, 4.29), (8, 1.9), (4, 0.9)])
def test_the_ceiling_of_a_copy_fits_into_half_of_a_small_gpu(total_gb: int, copied_gb: float, monkeypatch: pytest.MonkeyPatch) -> None:
    free = total_gb * 10**9 - 400_000_000  # torch and its libraries
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total_gb * 10**9))
    taken = 4 * gpu.copied(torch.device("cuda"))
    assert taken / 1e9 == pytest.approx(copied_gb, abs=0.01) and (2 * taken <= free / 2 or total_gb == 80)


def raising(error: Exception) -> Any:
    raise error


def test_a_file_for_the_rows_is_of_the_gpu_benchmark_only(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    assert main(["bench", "optim", "--tiny", f"--json={tmp_path / 'x.json'}"]) == 2
    assert "--json: belongs to `overnight bench gpu` and `overnight bench roof` alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("what", "option"), [("optim", "--peer=none"), ("loop", "--peer=none"), ("roof", "--peer=none"), ("train", "--precision=bf16")]
)
def test_an_option_of_other_benchmarks_is_refused(what: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", what, "--tiny", option]) == 2
    assert f"{option.partition('=')[0]}: belongs to `overnight bench " in capsys.readouterr().err


@pytest.mark.parametrize("bench", [train, mlstm])
def test_what_the_processor_emulates_is_left_out_and_said(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []
    found: list[Any] = []
    monkeypatch.setattr(bench, "measure_case", lambda case, peer: measured.append(case.precision) or found)
    monkeypatch.setattr(bench, "describe", lambda *_: "")
    monkeypatch.setattr(bench, "printed", lambda what: contextlib.nullcontext([]))
    for has, wanted in ((set(), {"fp32"}), ({"avx512_bf16"}, {"fp32", "bf16"})):
        measured.clear()
        monkeypatch.setattr("overnight.machine.processor", lambda has=has: ("", frozenset(has)))
        bench.run()
        assert set(measured) == wanted
        told = "bf16: left out, since this processor has no bf16 and emulates it, which takes several times as long as fp32"
        assert (told in capsys.readouterr().out) == (not has)
