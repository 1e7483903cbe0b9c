"""A loaded model neither changes what its caller has set in torch nor depends on it: random numbers, the default type, the default device."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import overnight
from overnight.checkpoint.reader import newest_checkpoint
from overnight.config import BertRun, Run
from overnight.console import Line
from overnight.engine.pretrain import pretrain
from overnight.inference.model import Model
from overnight.interop.export import export_run
from tests.inference.test_model import modern_folder

TEXTS = ["An integer.", "The string literal of a class. " * 9, "a b"]


@pytest.fixture(scope="module")
def folders(trained_run: BertRun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What can be loaded: a run, a task, their exports, and a ModernBERT."""
    folder, run = tmp_path_factory.mktemp("folders"), trained_run.run_dir
    export_run(trained_run, folder / "run")
    export_run(trained_run, folder / "task", "classes")
    return {
        "run": run,
        "task": run / "finetune" / "classes",
        "exported run": folder / "run",
        "exported task": folder / "task",
        "modern": modern_folder(folder / "made"),
    }


def answers(model: Model) -> tuple[np.ndarray, object]:
    vectors = np.concatenate([model.embed(TEXTS), copy.deepcopy(model).embed(TEXTS, "first", 0, True)])
    return vectors, model.predict(TEXTS) if model.kind != "mask" else model.fill("The [MASK] of a class.")


@contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("name", ["run", "task", "exported run", "exported task", "modern"])
def test_the_random_numbers_of_the_caller_go_on_as_if_nothing_had_been_loaded(
    name: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("the GPUs are seeded"))
    torch.random.default_generator.manual_seed(5)
    expected = torch.rand(4)
    torch.random.default_generator.manual_seed(5)
    answers(overnight.load(folders[name]))
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["run", "task", "exported task", "modern"])
def test_a_model_is_the_same_whatever_type_torch_takes_by_default(name: str, dtype: torch.dtype, folders: dict[str, Path]) -> None:
    vectors, said = answers(overnight.load(folders[name], device="cpu"))
    with default_type(dtype):
        found, again = answers(overnight.load(folders[name], device="cpu"))
        assert torch.get_default_dtype() == dtype
    assert np.array_equal(found, vectors) and again == said


def test_a_run_trains_to_the_same_bits_whatever_type_torch_takes_by_default(tiny: Callable[..., Run], tmp_path: Path) -> None:
    weights = []
    for dtype in (torch.float32, torch.float64):
        run = tiny(out=str(tmp_path / str(dtype)))
        with default_type(dtype):
            pretrain(run, Line(io.StringIO()))
        place = newest_checkpoint(run.run_dir / "checkpoints")
        assert place is not None
        weights.append((place / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", ["run", "task", "exported task", "modern"])
def test_a_model_on_the_cpu_answers_the_same_whatever_device_torch_takes_by_default(
    name: str, precision: str, folders: dict[str, Path]
) -> None:
    vectors, said = answers(overnight.load(folders[name], device="cpu", precision=precision))
    with torch.device("meta"):  # as torch.set_default_device
        found, again = answers(overnight.load(folders[name], device="cpu", precision=precision))
    assert np.array_equal(found, vectors) and again == said
