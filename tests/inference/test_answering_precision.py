"""The precision in which a trained model answers, from Python and by the command."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import overnight
from overnight import config
from overnight.cli.main import main
from overnight.config import BertRun
from overnight.engine.precision import slow_precision


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


SLOW = {
    "bf16": "this processor has no bf16 and emulates it, which takes several times as long as fp32; use precision=fp32",
    "int8": "this processor has no instructions for 8-bit products, which take ten times as long as in fp32; use precision=fp32",
}


def has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a processor that computes fast in fp32 alone."""
    monkeypatch.setattr("overnight.machine.processor", lambda: ("", frozenset({"avx2"})))


@pytest.mark.parametrize("precision", SLOW)
def test_a_precision_that_the_processor_lacks_is_said_to_be_slow(
    precision: str, trained_run: BertRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("overnight.models.int8.is_exact", lambda: True)
    (tmp_path / "texts.txt").write_text("a text\n")
    file, source = str(tmp_path / "texts.txt"), ["--from", str(trained_run.run_dir)]
    for command in (["predict", "classes", f"--input={file}", *source], ["embed", file, *source]):
        for asked, told in ((precision, f"warning: {SLOW[precision]}\n"), ("auto", ""), ("fp32", "")):
            with monkeypatch.context() as patch:
                has_none(patch)
                assert main([*command, f"--precision={asked}"]) == 0
            assert capsys.readouterr().err == told


def test_a_program_is_warned_once_of_a_precision_that_the_processor_lacks(trained_run: BertRun, monkeypatch: pytest.MonkeyPatch) -> None:
    has_none(monkeypatch)
    with pytest.warns(UserWarning) as found:
        overnight.load(trained_run.run_dir, precision="bf16")
    assert [str(warning.message) for warning in found] == [SLOW["bf16"]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        overnight.load(trained_run.run_dir), overnight.load(trained_run.run_dir, precision="auto")


def test_an_evaluation_in_a_precision_that_the_processor_lacks_is_said_to_be_slow(
    trained_run: BertRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    has_none(monkeypatch)
    assert main(["evaluate", "--from", str(trained_run.run_dir), "--precision=bf16", "--max-tokens=500"]) == 0
    assert f"warning: {SLOW['bf16']}\n" in capsys.readouterr().err


@pytest.mark.parametrize("feature", ["avx512_vnni", "avx_vnni", "amx_int8", "asimddp"])
def test_each_family_of_8_bit_instructions_is_known(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overnight.machine.processor", lambda: ("", frozenset({"avx2", feature})))
    assert slow_precision("int8", torch.device("cpu")) == ""
