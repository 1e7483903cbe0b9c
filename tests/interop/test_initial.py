"""A run with an `init`: the network of step 0 is the checkpoint's, with its vocabulary, casing and sizes; what the recipe says otherwise is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from overnight.checkpoint.initial import initial_folder, with_new_rows
from overnight.checkpoint.reader import newest_checkpoint, read_checkpoint
from overnight.cli.main import main
from overnight.config import BertRun, Run, stored_run
from overnight.corpus.tokenizer import build_tokenizer, load_tokens
from overnight.distributed.world import World
from overnight.engine.workload import BertWorkload
from overnight.errors import DataError
from overnight.interop.sources import read_source
from tests.conftest import topics
from tests.interop.peers import LETTERS, PIECES, SIZES, V, write_model

pytest.importorskip("transformers")
Captured = pytest.CaptureFixture[str]
Recipe = Callable[..., Path]


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """Writes a recipe that begins from a checkpoint that transformers wrote, and its text."""

    def write(name: str = "BertForPreTraining", **changes: Any) -> Path:
        write_model(tmp_path / "peer", name)
        (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in topics().values()))
        phase = {"steps": 2, "global_batch_size": 4, "micro_batch_size": 4, "seq_len": 32, "nsp": False}
        tree = {
            "name": "mine",
            "out": str(tmp_path / "run"),
            "init": str(tmp_path / "peer"),
            "data": {"paths": [str(tmp_path / "text.jsonl")], "dir": str(tmp_path / "data"), "workers": 1, "valid_fraction": 0.2},
            "phases": {"adapt": {**phase, "optim": {"name": "adamw", "lr": 1e-4, "schedule": {"name": "constant"}}}},
            "logging": {"log_every": 1, "eval_every": 0},
            "compute": {"threads": 1, "device": "cpu"},
        }
        for key, value in changes.items():
            *parents, last = key.split("__")
            node: Any = tree
            for part in parents:
                node = node.setdefault(part, {})
            node[last] = value
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree))
        return tmp_path / "recipe.yaml"

    return write


def _stored(tmp_path: Path) -> BertRun:
    run: Run = stored_run(tmp_path / "run")
    assert isinstance(run, BertRun)
    return run


@pytest.mark.parametrize("name", ["BertForPreTraining", "ModernBertForMaskedLM"])
def test_a_run_begins_where_the_checkpoint_ended(name: str, recipe: Recipe, tmp_path: Path) -> None:
    path = recipe(name)
    assert main(["prepare", str(path)]) == 0
    assert main(["pretrain", str(path)]) == 0
    run, expected = _stored(tmp_path), read_source(str(tmp_path / "peer"))
    assert (run.model.kind, run.model.hidden_size, run.model.num_layers) == (expected.model.kind, 16, 2)
    assert (run.model.intermediate_size or 4 * 16, run.data.vocab_size, run.data.lowercase) == (SIZES["intermediate_size"], V, True)
    assert load_tokens(tmp_path / "data")[0] == PIECES
    begun = BertWorkload(run, World()).untrained(torch.device("cpu")).state_dict()
    assert expected.state.keys() <= begun.keys() and all(torch.equal(begun[key], tensor) for key, tensor in expected.state.items())
    checkpoint = newest_checkpoint(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None
    trained = read_checkpoint(checkpoint)[1]
    moved = (trained["encoder.layers.0.up.weight"] - begun["encoder.layers.0.up.weight"]).abs().max()
    assert 0 < moved < 1e-3, "two steps of AdamW at 1e-4 from there"


def test_heads_that_the_checkpoint_lacks_are_those_of_the_seed(recipe: Recipe, tmp_path: Path) -> None:
    path = recipe("BertForMaskedLM", seed=5)
    assert main(["run", str(path)]) == 0
    run = _stored(tmp_path)
    begun = BertWorkload(run, World()).untrained(torch.device("cpu")).state_dict()
    assert not begun["nsp.bias"].any() and 0.01 < begun["pooler.weight"].std() < 0.03
    assert torch.equal(begun["encoder.position.weight"], read_source(str(tmp_path / "peer")).state["encoder.position.weight"])
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()


def test_a_run_goes_on_without_the_checkpoint_and_in_another_place(recipe: Recipe, tmp_path: Path, capsys: Captured) -> None:
    path = recipe()
    assert main(["prepare", str(path)]) == 0
    assert main(["pretrain", str(path)]) == 0
    shutil.rmtree(tmp_path / "peer")
    assert main(["pretrain", str(path)]) == 0
    assert main(["pretrain", str(path), "--phases.adapt.steps=3", "--extend"]) == 0
    (tmp_path / "run").rename(tmp_path / "moved")
    assert main(["pretrain", str(tmp_path / "moved")]) == 0
    assert "all phases are done" in capsys.readouterr().out


def test_a_run_may_begin_from_another_run(recipe: Recipe, tmp_path: Path) -> None:
    path = recipe()
    assert main(["prepare", str(path)]) == 0
    assert main(["pretrain", str(path)]) == 0
    again = [f"--init={tmp_path / 'run'}", f"--out={tmp_path / 'second'}"]
    assert main(["pretrain", str(path), *again]) == 0
    first = newest_checkpoint(tmp_path / "run" / "checkpoints")
    assert first is not None
    copied = read_source(str(tmp_path / "run")).state
    assert all(torch.equal(copied[name], tensor) for name, tensor in read_checkpoint(first)[1].items())


def test_new_words_begin_at_the_mean_of_their_pieces(recipe: Recipe, tmp_path: Path, capsys: Captured) -> None:
    path = recipe(data__new_words=7)
    assert main(["prepare", str(path)]) == 0
    assert "7 new words (" in capsys.readouterr().out
    assert main(["pretrain", str(path)]) == 0
    tokens = load_tokens(tmp_path / "data")[0]
    assert tokens[:V] == PIECES and len(tokens) == V + 7
    state = BertWorkload(_stored(tmp_path), World()).untrained(torch.device("cpu")).state_dict()
    old = build_tokenizer(PIECES, True)
    for number, word in enumerate(tokens[V:], V):
        ids = old.encode(word, add_special_tokens=False).ids
        for name in ("encoder.word.weight", "mlm.bias"):
            torch.testing.assert_close(state[name][number], state[name][ids].mean(0), msg=f"{name} of {word}")
    assert not state["encoder.word.weight"][V + 7 :].any()
    (tmp_path / "masked.txt").write_text(f"the [MASK] {tokens[V]}\n")
    assert main(["predict", "mask", "--from", str(tmp_path / "run"), "--input", str(tmp_path / "masked.txt")]) == 0


def test_new_rows_are_means_and_padding_is_zero() -> None:
    table = torch.arange(8.0).view(4, 2)
    found = with_new_rows(table, 3, [[0, 2], [1]], 6)
    assert found.tolist() == [[0, 1], [2, 3], [4, 5], [2, 3], [2, 3], [0, 0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__hidden_size": 32}, r"model\.hidden_size = 32: init = .*peer has 16; leave it out, or name another checkpoint"),
        ({"model__kind": "modernbert"}, r"model\.kind = 'modernbert': init = .*peer has 'bert'"),
        ({"model__intermediate_size": 64}, r"model\.intermediate_size = 64: init = .*peer has 48"),
        ({"data__vocab_size": 600}, rf"data\.vocab_size = 600: init = .*peer has its own vocabulary, of {V} tokens; leave it out"),
        ({"data__vocab_file": "vocab.txt"}, rf"data\.vocab_file = vocab\.txt: init = .*, of {V} tokens; leave it out"),
        ({"data__lowercase": False}, r"data\.lowercase = false: init = .*peer was trained on lower case"),
        ({"init": "nowhere"}, r"nowhere: does not exist; name a run folder"),
    ],
)
def test_what_a_recipe_says_otherwise_than_its_checkpoint_is_refused(
    changes: dict[str, Any], message: str, recipe: Recipe, tmp_path: Path, capsys: Captured
) -> None:
    path = recipe(**changes)
    assert main(["prepare", str(path)]) in (1, 2)
    import re

    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "data").exists()


def test_what_is_the_same_and_what_is_free_may_be_said(recipe: Recipe, tmp_path: Path) -> None:
    path = recipe(model__hidden_size=16, model__dropout=0.0, data__vocab_size=V)
    assert main(["prepare", str(path)]) == 0
    assert main(["pretrain", str(path)]) == 0
    assert _stored(tmp_path).model.dropout == 0.0


def test_data_of_another_vocabulary_is_refused(recipe: Recipe, tmp_path: Path, tiny_data: Path, capsys: Captured) -> None:
    path = recipe()
    assert main(["pretrain", str(path), f"--data.dir={tiny_data}"]) == 1
    said = capsys.readouterr().err
    assert (
        f"was prepared with another vocabulary (600 tokens, lower case) than that of {tmp_path / 'peer'} ({V} tokens, lower case)" in said
    )
    assert main(["prepare", str(path)]) == 0
    write_model(tmp_path / "other")
    tokenizer = tmp_path / "other" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"film"', '"movie"'))
    assert main(["prepare", str(path), f"--init={tmp_path / 'other'}", f"--out={tmp_path / 'second'}"]) == 2
    assert f"was prepared with another vocabulary ({V} tokens) than that of the checkpoint ({V})" in capsys.readouterr().err


def test_a_run_folder_that_began_elsewhere_is_not_begun_anew(recipe: Recipe, tmp_path: Path, capsys: Captured) -> None:
    path = recipe()
    assert main(["prepare", str(path)]) == 0
    assert main(["pretrain", str(path)]) == 0
    shutil.copytree(tmp_path / "peer", tmp_path / "other")
    assert main(["pretrain", str(path), f"--init={tmp_path / 'other'}"]) == 2
    assert "was begun from" in capsys.readouterr().err


def test_a_recipe_that_is_refused_copies_nothing(recipe: Recipe, tmp_path: Path, capsys: Captured) -> None:
    assert main(["pretrain", str(recipe(phases__adapt__seq_len=-1))]) == 2
    assert "phases.adapt.seq_len = -1" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_until_a_run_begins_it_follows_the_files_of_its_checkpoint_and_then_no_more(recipe: Recipe, tmp_path: Path) -> None:
    path, weights = recipe(), tmp_path / "peer" / "model.safetensors"
    assert main(["prepare", str(path)]) == 0
    other = {name: tensor + 1 for name, tensor in load_file(weights).items()}
    save_file(other, weights, metadata={"format": "pt"})
    assert main(["pretrain", str(path)]) == 0
    begun = BertWorkload(_stored(tmp_path), World()).untrained(torch.device("cpu")).state_dict()
    assert torch.equal(begun["encoder.position.weight"], other["bert.embeddings.position_embeddings.weight"])
    weights.write_bytes(b"nothing")
    assert main(["pretrain", str(path)]) == 0


def test_a_damaged_copy_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    path = recipe()
    assert main(["prepare", str(path)]) == 0
    assert main(["pretrain", str(path)]) == 0
    weights = initial_folder(tmp_path / "run") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(DataError, match="cut short or changed"):
        BertWorkload(_stored(tmp_path), World())


def test_plan_looks_at_a_checkpoint_and_copies_nothing(recipe: Recipe, tmp_path: Path, capsys: Captured) -> None:
    path = recipe()
    assert main(["plan", str(path)]) == 0
    assert f"{V}" in capsys.readouterr().out
    assert main(["pretrain", str(path), "--print-config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["hidden_size"] == 16
    assert not (tmp_path / "run").exists()


def test_new_words_need_a_vocabulary_to_be_added_to(recipe: Recipe, capsys: Captured) -> None:
    path = recipe(data__new_words=5)
    assert main(["prepare", str(path), "--init="]) == 2
    assert "data.new_words = 5: new words are added to an existing vocabulary; name init or data.vocab_file" in capsys.readouterr().err


def test_new_words_are_the_most_frequent_ones_that_the_vocabulary_splits() -> None:
    from overnight.corpus.vocabulary import new_words
    from overnight.corpus.word_counts import WordCounts

    words = WordCounts.of({"filming": 9, ",": 4, "film": 50, "zebra": 9, "apple": 9, "x1": 30, "once": 1, "ooo": 2, "the": 99})
    assert new_words(words, PIECES, True, 10) == ["apple", "filming", "zebra", "ooo"]
    assert new_words(words, PIECES, True, 2) == ["apple", "filming"]
    assert set(LETTERS) <= set(PIECES)
