"""A small run with one fine-tuned task, to use."""

from __future__ import annotations

import dataclasses
import io
import shutil
from collections.abc import Iterator

import pytest

from overnight import config
from overnight.config import BertRun, Run
from overnight.console import Line
from overnight.finetune.finetune import finetune
from tests.inference.serving import start


@pytest.fixture(scope="package")
def trained_run(pretrained: Run, tmp_path_factory: pytest.TempPathFactory) -> BertRun:
    """A run with the task `classes`, barely trained."""
    folder = tmp_path_factory.mktemp("inference")
    shutil.copytree(pretrained.run_dir, folder / "run")
    words = [("integer division", "number"), ("string literal", "text"), ("raised exception", "error")]
    (folder / "classes.csv").write_text("text,label\n" + "".join(f"{w} {i},{label}\n" for i in range(12) for w, label in words))
    tree = config.to_tree(pretrained)
    spec = {"task": "csv", "epochs": 2, "global_batch_size": 8, "micro_batch_size": 8, "lr": 3e-3, "seq_len": 32}
    tree["finetune"] = {"classes": {**spec, "path": str(folder / "classes.csv")}}
    result = dataclasses.replace(config.build_run(tree), out=str(folder / "run"))
    assert isinstance(result, BertRun)
    (folder / "run" / "run.yaml").write_text(config.run_yaml(result))
    finetune(result, "classes", Line(io.StringIO()))
    return result


@pytest.fixture(scope="module")
def port(trained_run: BertRun) -> Iterator[int]:
    """The port of a server of its task, with small limits."""
    process, number = start(trained_run, "--max-bytes=2000", "--max-texts=4", task="classes")
    with process:
        yield number
