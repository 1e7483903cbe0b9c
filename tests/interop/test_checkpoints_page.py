"""Every command of docs/checkpoints.md runs as it stands there, on small files of the names that it has, with sizes that fit them."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from overnight.cli.main import main
from tests.conftest import ROOT, topics
from tests.interop.peers import LETTERS, PIECES, in_cache, write_model

pytest.importorskip("transformers")
MACHINE = ["--compute.device=cpu", "--compute.threads=1"]
SHORT = [
    *("--phases.adapt.steps=2", "--phases.adapt.seq_len=32", "--phases.adapt.global_batch_size=4", "--phases.adapt.micro_batch_size=4"),
    *("--data.valid_fraction=0.2", "--data.workers=1", "--precision=fp32", "--logging.eval_every=0"),
]
EXTRA = {"run": SHORT, "finetune": ["--seq_len=32", "--epochs=1"], "evaluate": [], "predict": [], "export": []}


def _files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write all that the page names: checkpoints, text and tables."""
    write_model(in_cache(folder / "cache", "google-bert/bert-base-uncased", monkeypatch))
    write_model(folder / "uncased_L-12_H-768_A-12")
    torch.save({"model": load_file(folder / "uncased_L-12_H-768_A-12" / "model.safetensors")}, folder / "ckpt_8601.pt")
    (folder / "bert_config.json").write_text((folder / "uncased_L-12_H-768_A-12" / "config.json").read_text())
    (folder / "vocab.txt").write_text("\n".join(PIECES))
    (folder / "masked.txt").write_text("the [MASK] film\n")
    (folder / "book.txt").write_text("the good film is a film. " * 40)
    rows = "".join(json.dumps({"text": text}) + "\n" for text in topics().values())
    (folder / "FOLDER").mkdir()
    for name in ("FOLDER/texts.jsonl", "abstracts.jsonl"):
        (folder / name).write_text(rows)
    (folder / "glue" / "SST-2").mkdir(parents=True)
    for name in ("train", "dev"):
        lines = "".join(f"{letter} good film\t1\n{letter} bad film\t0\n" for letter in LETTERS)
        (folder / "glue" / "SST-2" / f"{name}.tsv").write_text(f"sentence\tlabel\n{lines}")
    (folder / "labels.csv").write_text("text,label\n" + "".join(f"{a} good film,yes\n{a} bad film,no\n" for a in LETTERS))


@pytest.mark.heavy
def test_the_commands_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    commands = [line for block in re.findall(r"^```\n(.*?)^```$", page, re.M | re.S) for line in block.splitlines()]
    assert len(commands) >= 10 and all(command.startswith("overnight ") for command in commands)
    monkeypatch.chdir(tmp_path)
    _files(tmp_path, monkeypatch)
    for command in commands:
        _, name, *words = shlex.split(command)
        if "onnx" in words:  # minutes; tests/interop/test_export_heads.py does
            continue
        if "--budget=1h" in words:  # another run stands for the one that an hour makes
            shutil.copytree("runs/bert-base-uncased", "runs/reviews")
            continue
        more = [] if name == "import" else [*EXTRA[name], *MACHINE]
        assert main([name, *words, *more]) == 0, f"{command}\n{capsys.readouterr().err}"
    assert (tmp_path / "medical-classifier" / "README.md").is_file() and (tmp_path / "runs" / "google" / "run.yaml").is_file()
