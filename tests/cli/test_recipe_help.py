"""The help of a command that takes a recipe begins with examples, and shows what the reader can use."""

from __future__ import annotations

import re

import pytest

from overnight import config
from overnight.cli.main import main
from overnight.config.describe import describe, in_training
from overnight.config.validate import PHASE_SETTINGS

RECIPE_COMMANDS = ("run", "prepare", "pretrain", "launch", "plan")
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """As wide as the help is ever made, so that no line of it is broken before its end."""
    monkeypatch.setenv("COLUMNS", "110")


def call(*argv: str) -> int:
    return main(list(argv))


def helped(out: str) -> dict[str, str]:
    """The keys that a help text lists, with their type and what is said of them in one line."""
    blocks = re.findall(r"^  --([\w.]+)=(.+)\n((?:      .*\n?)+)", out, re.MULTILINE)
    return {key: f"{kind} {' '.join(text.split())}" for key, kind, text in blocks}


def test_the_help_of_run_lists_every_key_with_type_default_and_meaning(capsys: Captured) -> None:
    assert call("run", "-h") == 0
    shown = helped(capsys.readouterr().out)
    assert list(shown) != [] and set(shown) == {key for key, *_ in describe()}
    for key, kind, default, text in (in_training(setting, of_bytes=False) for setting in describe()):
        assert text, f"{key} has no documentation"
        long = kind.count("|") > 7
        assert shown[key].startswith(f"{'WORD' if long else kind} {' '.join(text.split())}")
        assert shown[key].endswith("(required)" if default == "required" else f"(default: {default})")


@pytest.mark.parametrize("command", RECIPE_COMMANDS)
def test_the_help_of_a_recipe_command_begins_with_examples_and_shows_its_sections(command: str, capsys: Captured) -> None:
    assert call(command, "--help") == 0
    out = capsys.readouterr().out
    places = [out.index(f"\n{part}") for part in ("examples:", "options:", "run: ", "data: ")]
    assert places == sorted(places) and f"overnight {command} " in out.split("options:")[0].split("examples:")[1]
    assert ("model.hidden_size" in helped(out)) is (command != "prepare") and ("finetune.NAME.lr" in helped(out)) is (command == "run")


def test_the_examples_of_the_help_are_of_keys_and_recipes_that_exist(capsys: Captured) -> None:
    known = {key for key, *_ in describe()}
    for command in RECIPE_COMMANDS:
        call(command, "--help")
        examples = capsys.readouterr().out.split("examples:\n")[1].split("\n\n")[0].splitlines()
        assert len(examples) >= 2
        for example in examples:
            program, of, name, *rest = re.split(r"  +|>", example.strip())[0].split()
            assert (program, of) == ("overnight", command)
            keys = [word.removeprefix("--") for word in rest if "." in word.partition("=")[0]]
            assert {re.sub(r"^phases\.\w+", "phases.NAME", key.partition("=")[0]) for key in keys} <= known
            if name != "my.yaml":
                config.read_recipe(name, keys)


@pytest.mark.parametrize("name", list(config.recipes()))
def test_the_help_of_a_recipe_shows_only_what_its_network_has_and_its_values(name: str, capsys: Captured) -> None:
    assert call("run", name, "--help") == 0
    shown = helped(capsys.readouterr().out)
    bert = config.read_recipe(name).get("model", {}).get("kind", "bert") in ("bert", "modernbert")
    of_bert = {
        "model.num_heads",
        "phases.NAME.nsp",
        "data.vocab_size",
        "finetune.NAME.lr",
        "compute.torch_compile",
        "phases.NAME.batch_warmup.initial_batch_size",
    }
    of_bytes = {
        "model.embedding_size",
        "phases.NAME.num_document_groups",
        "data.test_fraction",
        "linear_probe.NAME.features",
        "compute.cuda_graphs",
    }
    assert of_bert & set(shown) == (of_bert if bert else set()) and of_bytes & set(shown) == (set() if bert else of_bytes)
    assert f"({name}: {name}; required)" in shown["name"] and "seed" in shown


def test_the_help_says_of_a_key_which_network_or_optimizer_has_what(capsys: Captured) -> None:
    assert call("run", "--help") == 0
    shown = helped(capsys.readouterr().out)
    assert shown["model.kind"].endswith("(default: bert)") and "ModernBERT. A" not in shown["model.kind"]
    assert shown["phases.NAME.optim.name"].endswith("(default: lamb)")
    assert "float `bert`, `transformer`: Dropout" in shown["model.dropout"] and "`modernbert`: Dropout" in shown["model.dropout"]
    assert shown["model.dropout"].endswith("(default: 0.1, of `modernbert` 0.0)")
    for key in ("model.intermediate_size", "model.max_position_embeddings"):
        assert shown[key].startswith("int `bert`, `transformer`: ") and ". `modernbert`: " in shown[key]
    assert "float `lars`: " in shown["phases.NAME.optim.momentum"] and ". `muon`: " in shown["phases.NAME.optim.momentum"]
    assert shown["phases.NAME.nsp"].startswith("bool Encoders: ") and shown["phases.NAME.reshuffle"].startswith("bool Byte models: ")
    assert shown["phases.NAME.token_matching"].startswith("float `modernbert`: share of")


def test_the_help_of_a_recipe_of_bert_leaves_out_what_bert_refuses(capsys: Captured) -> None:
    matching = {f"phases.NAME.{name}" for name in PHASE_SETTINGS}
    for name, keys in (("bert-base", set[str]()), ("demo", matching)):
        assert call("run", name, "--help") == 0
        assert matching & set(helped(capsys.readouterr().out)) == keys


def test_the_help_fits_a_narrow_terminal_without_a_broken_word(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("run", "-h") == 0
    wide = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "60")
    assert call("run", "-h") == 0
    narrow = capsys.readouterr().out
    assert narrow.split() == wide.split()
    assert [line for line in narrow.splitlines() if len(line) > 60 and len(line.split()) > 1] == []
