"""The precision in which a trained model answers, from Python and by the command."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import overnight
from overnight import config
from overnight.cli.main import main
from overnight.config import BertRun


@pytest.mark.parametrize(
    ("trained", "has", "asked", "dtype"),
    [
        ("bf16", True, None, "bfloat16"),
        ("bf16", False, None, "float32"),
        ("bf16", False, "auto", "float32"),
        ("bf16", False, "bf16", "bfloat16"),
        ("bf16", True, "auto", "bfloat16"),
        ("fp8", False, None, "float32"),
        ("fp16", False, "auto", "float32"),
        ("fp16", True, None, "float16"),
        ("fp16", False, "fp16", "float16"),
    ],
)
def test_what_was_trained_in_16_bits_answers_in_fp32_where_the_processor_would_emulate_them_by_the_command_too(
    trained: str, has: bool, asked: str | None, dtype: str, trained_run: BertRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(trained_run.run_dir, tmp_path / "run")
    (tmp_path / "run" / "run.yaml").write_text(config.run_yaml(replace(trained_run, precision=trained)))  # type: ignore[arg-type]
    for name in ("has_bf16", "has_fp16"):
        monkeypatch.setattr(f"overnight.engine.precision.{name}", lambda: has)
    assert overnight.load(tmp_path / "run", precision=asked).trained.dtype == getattr(torch, dtype)
    answering: list[torch.dtype] = []
    monkeypatch.setattr("overnight.finetune.predict.answer_file", lambda model, *_, **__: answering.append(model.dtype) or ())
    assert main(["predict", "classes", "--from", str(tmp_path / "run"), *([f"--precision={asked}"] if asked else [])]) == 0
    assert answering == [getattr(torch, dtype)]
