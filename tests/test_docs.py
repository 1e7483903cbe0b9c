"""The examples of the documentation run, in the order of the page, as one program."""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import warnings
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml

from overnight import config
from overnight.checkpoint.reader import VERSION as CHECKPOINT_VERSION
from overnight.config import BertConfig, ModernBertConfig
from overnight.corpus.shards import FORMAT_VERSION
from tests.conftest import ROOT, topics
from tests.processes import Process, overnight


def _alone(program: str) -> None:
    """Run a program that may not use what torch will give up, as the only process of a distributed job."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    torch.set_num_threads(1)
    warnings.simplefilter("error", FutureWarning)
    runpy.run_path(program, run_name="__main__")


def test_the_examples_of_the_optimizers_page_run_and_print_what_it_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "optimizers.md").read_text(encoding="utf-8")
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    blocks, shown = ([text for kind, text in fences if kind == wanted] for wanted in ("python", ""))
    assert len(blocks) >= 9 and shown
    program = tmp_path / "examples.py"
    program.write_text("\n".join(blocks), encoding="utf-8")
    with contextlib.chdir(tmp_path), Process(_alone, str(program), errors=tmp_path / "errors") as process:
        code, output = process.end()
    assert code == 0, (tmp_path / "errors").read_text()[-3000:]
    assert all(text in output for text in shown)
    assert "the gradient of 0.weight" in output and "is not finite: the step was refused" in output


def test_the_mixture_of_the_documentation_is_prepared_planned_and_trained_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "mixtures.md").read_text(encoding="utf-8")
    recipe, commands = (re.findall(rf"^```{kind}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0] for kind in ("yaml", "bash"))
    texts = list(topics().values())
    (tmp_path / "books").mkdir()
    for number, text in enumerate(texts[::2]):
        (tmp_path / "books" / f"{number}.txt").write_text(text, encoding="utf-8")
    (tmp_path / "reviews.jsonl").write_text("".join(json.dumps({"reviewText": text}) + "\n" for text in texts[1::2]), encoding="utf-8")
    (tmp_path / "mixed.yaml").write_text(recipe, encoding="utf-8")
    found = ""
    for command in commands.splitlines():
        program, *words = command.split()
        assert program == "overnight"
        with overnight(*words, *(["--compute.device=cpu", "--data.workers=1"] if "plan" not in words else [])) as process:
            code, output = process.end()
        assert code == 0, output[-3000:]
        found += output
    (shown,) = re.findall(r"reads it:\n```\n(.*?)\n```", page)
    assert " ".join(shown.split()) in " ".join(found.split())
    assert "mixture: books 60.0 % =" in found and "mlm loss/reviews" in found


def test_the_formats_page_says_the_versions_that_the_code_writes() -> None:
    page = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    prepared = page.split("## Prepared data")[1].split("\n## ")[0]
    assert re.findall(r"format\s+is\s+version\s+(\d+)", prepared) == [str(FORMAT_VERSION)]
    assert re.findall(r"^- `checkpoints/step-\d+/`, version (\d+)", page, re.M) == [str(CHECKPOINT_VERSION)]
    assert re.findall(r"format\s+is\s+version\s+(\d+)", page.split("\n## Checkpoints\n")[1]) == [str(CHECKPOINT_VERSION)]


def test_the_recipe_of_a_budget_in_the_documentation_takes_one() -> None:
    page = (ROOT / "docs" / "budget.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    run = config.build_run({"name": "mine", "budget": "8h", **yaml.safe_load(shown)})
    assert list(run.phases) == ["short", "long"]


def test_the_recipes_of_networks_in_the_documentation_are_ones() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    network, causal = (yaml.safe_load(shown) for shown in re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    assert config.build_run({"name": "mine", **network}).model.kind == "modernbert"
    for kind in ("bert", "modernbert"):
        run = config.build_run({"name": "mine", "model": {"kind": kind}, "budget": "1h", **causal})
        assert isinstance(run, config.BertRun) and [phase.objective for phase in run.phases.values()] == ["causal", "masked"]
    own = re.search(r"^\| `modernbert` \|.*\| (.*) \|$", page, re.MULTILINE)
    assert own and own[1].split() == [f"`{f.name}`" for f in fields(ModernBertConfig) if f.name not in {f.name for f in fields(BertConfig)}]
