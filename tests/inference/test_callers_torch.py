"""A loaded model does not change what its caller has set in torch: its random numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import overnight
from overnight.config import BertRun
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
    vectors = np.concatenate([model.embed(TEXTS), model.embed(TEXTS, "first", 0, True)])
    return vectors, model.predict(TEXTS) if model.kind != "mask" else model.fill("The [MASK] of a class.")


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
