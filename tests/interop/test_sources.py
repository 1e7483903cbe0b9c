"""Checkpoints of others as a start: equal outputs to 1e-5, their vocabulary and casing with them, and what cannot be used refused."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from safetensors.torch import load_file, save_file

import overnight
from overnight.checkpoint.reader import newest_checkpoint, read_checkpoint
from overnight.cli.main import main
from overnight.config import stored_run
from overnight.errors import ConfigError, DataError, UserError
from overnight.interop.imported import import_encoder, run_folder
from overnight.interop.sources import is_source, read_source, source_digest
from overnight.models.bert import first_tokens
from overnight.models.encoders import masked_lm
from tests.interop.peers import LETTERS, PIECES, V, batch, in_cache, write_model, write_tokenizer

transformers = pytest.importorskip("transformers")
Captured = pytest.CaptureFixture[str]


@torch.no_grad()
def _equal(theirs: Any, source: Path) -> None:
    """Compare the logits of masked words of transformers with those of the same weights here."""
    initial = read_source(str(source))
    assert initial.tokens == PIECES
    ours = masked_lm(initial.model, V)
    ours.load_state_dict({**ours.state_dict(), **initial.state})
    ids, flat = batch()
    expected = theirs(input_ids=ids)
    logits = getattr(expected, "logits", None) if "prediction_logits" not in expected else expected.prediction_logits
    hidden_ND = ours.eval().encoder(flat)
    torch.testing.assert_close(ours.mlm_logits(hidden_ND)[:, :V].view(*ids.shape, V), logits, rtol=1e-5, atol=1e-5)
    if "seq_relationship_logits" in expected:
        torch.testing.assert_close(ours.nsp_logits(first_tokens(hidden_ND, flat)), expected.seq_relationship_logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["BertForPreTraining", "BertForMaskedLM", "ModernBertForMaskedLM"])
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_folder_of_hugging_face_computes_what_it_does_there(name: str, file: str, tmp_path: Path) -> None:
    theirs = write_model(tmp_path, name)
    if file == "pytorch_model.bin":
        torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / file)
        (tmp_path / "model.safetensors").unlink()
    _equal(theirs, tmp_path)


@pytest.mark.parametrize("prefix", ["", "module.", "bert_model.", "module.bert_model."])
def test_a_checkpoint_of_nvidia_computes_what_the_same_weights_do_in_transformers(prefix: str, tmp_path: Path) -> None:
    theirs = write_model(tmp_path / "hf")
    folder = tmp_path / "nvidia"
    folder.mkdir()
    state = {}
    for name, tensor in theirs.state_dict().items():
        if "position_ids" in name:
            continue
        for dense in ("intermediate.dense.", "pooler.dense.", "transform.dense."):
            name = name.replace(dense, dense.replace("dense", "dense_act"))
        if len(tensor) == V:  # they fill the vocabulary up to a multiple of 8
            tensor = torch.cat([tensor, torch.zeros(-V % 8, *tensor.shape[1:])])
        state[prefix + name] = tensor
    del state[f"{prefix}cls.predictions.decoder.bias"]
    assert V % 8 and any("dense_act" in name for name in state)
    torch.save({"model": state, "optimizer": {"state": {}, "param_groups": []}, "epoch": 3}, folder / "ckpt_7.pt")
    (folder / "bert_config.json").write_text((tmp_path / "hf" / "config.json").read_text())
    (folder / "vocab.txt").write_text("\n".join(PIECES))
    for source in (folder, folder / "ckpt_7.pt"):
        assert is_source(str(source))
        _equal(theirs, source)


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("said_by", ["tokenizer.json", "tokenizer_config.json", "the vocabulary"])
def test_the_casing_is_that_of_the_checkpoint(lowercase: bool, said_by: str, tmp_path: Path) -> None:
    write_model(tmp_path)
    pieces = [*PIECES[:-1], "." if lowercase else "Good"]
    write_tokenizer(tmp_path, pieces, lowercase)
    if said_by != "tokenizer.json":
        (tmp_path / "tokenizer.json").unlink()
        (tmp_path / "vocab.txt").write_text("\n".join(pieces))
    config = tmp_path / "tokenizer_config.json"
    if said_by == "the vocabulary":
        config.unlink()
        # Where nobody says it the recipe may.
        assert read_source(str(tmp_path), lowercase=not lowercase).lowercase is not lowercase
    else:
        config.write_text(json.dumps({"do_lower_case": lowercase}))
        assert read_source(str(tmp_path), lowercase=not lowercase).lowercase is lowercase
    initial = read_source(str(tmp_path))
    assert (initial.lowercase, initial.tokens) == (lowercase, pieces)


@pytest.mark.parametrize("vocabulary", ["vocab.txt", "tokenizer.json"])
@pytest.mark.parametrize(("key", "value"), [("strip_accents", False), ("tokenize_chinese_chars", False), ("do_lower_case", False)])
def test_a_tokenizer_whose_settings_split_text_in_another_way_is_refused(vocabulary: str, key: str, value: bool, tmp_path: Path) -> None:
    write_model(tmp_path)
    settings: dict[str, Any] = {"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True, "model_max_length": int(1e30)}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if vocabulary == "vocab.txt":
        (tmp_path / "tokenizer.json").unlink()
        (tmp_path / "vocab.txt").write_text("\n".join(PIECES))
    assert read_source(str(tmp_path)).lowercase
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {key: value}))
    if vocabulary == "vocab.txt" and key == "do_lower_case":
        assert not read_source(str(tmp_path)).lowercase, "nothing else says it"
        return
    with pytest.raises(
        DataError, match=rf"tokenizer_config\.json: {key} = false splits text in another way than BERT's WordPiece in lower"
    ):
        read_source(str(tmp_path))


def _spoil(folder: Path, what: str) -> None:
    config, weights, tokenizer = folder / "config.json", folder / "model.safetensors", folder / "tokenizer.json"
    tree = json.loads(tokenizer.read_text())
    if what == "no tokenizer":
        tokenizer.unlink()
    elif what == "byte pairs":
        tree["model"] = {"type": "BPE", "vocab": {}, "merges": []}
    elif what == "another splitter":
        tree["pre_tokenizer"] = {"type": "WhitespaceSplit"}
    elif what == "more tokens":
        write_tokenizer(folder, [*PIECES, "more"])
    elif what == "cut":
        weights.write_bytes(weights.read_bytes()[:-9])
    elif what == "another size":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_size": 32}))
    elif what == "another model":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "gpt2"}))
    elif what == "no config":
        config.unlink()
    elif what == "empty config":
        config.write_text("")
    elif what == "nothing":
        config.unlink()
        weights.unlink()
    elif what == "fine-tuned":
        (folder / "task.json").write_text("{}")
        config.unlink()
    elif what == "whole numbers":
        tensors = load_file(weights)
        name = next(name for name in tensors if name.endswith("query.weight"))
        save_file({**tensors, name: tensors[name].to(torch.int8)}, weights)
    elif what == "quantized":
        config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"load_in_8bit": True}}))
    if what in ("byte pairs", "another splitter"):
        tokenizer.write_text(json.dumps(tree))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no tokenizer", r"has no tokenizer \(vocab\.txt or tokenizer\.json\); copy it"),
        ("byte pairs", r"is a BPE tokenizer; only WordPiece"),
        ("another splitter", r"splits text in another way than BERT's WordPiece"),
        ("more tokens", rf"its vocabulary has {V + 1} tokens, and its network rows for {V}"),
        ("cut", r"model\.safetensors: cannot be read: .*damaged or cut short"),
        ("another size", r"does not fit .*config\.json"),
        ("another model", r"model_type = 'gpt2'; only 'bert' and 'modernbert'"),
        ("no config", r"has no config\.json, which says the sizes of the network; copy it"),
        ("empty config", r"config\.json: is not JSON"),
        ("fine-tuned", r"is a fine-tuned task; name its run folder"),
        ("whole numbers", r"is of torch\.int8: quantized weights cannot be read"),
        ("quantized", r"config\.json: has a quantization_config: quantized weights cannot be read"),
        (
            "nothing",
            r"is not a checkpoint that can be read; name a run folder, a folder of Hugging Face .*, a folder of TensorFlow .*, or a checkpoint of NVIDIA",
        ),
    ],
)
def test_a_checkpoint_that_cannot_be_used_is_refused_with_its_reason(what: str, message: str, tmp_path: Path, capsys: Captured) -> None:
    write_model(tmp_path)
    _spoil(tmp_path, what)
    with pytest.raises(DataError, match=message):
        read_source(str(tmp_path))
    if what not in ("nothing", "fine-tuned"):
        with pytest.raises(DataError, match=message):
            overnight.load(tmp_path)
        assert main(["predict", "mask", "--from", str(tmp_path)]) == 1
        assert re.search(message, capsys.readouterr().err)


def test_a_vocabulary_that_lacks_more_tokens_than_rows_fill_up_is_refused(tmp_path: Path) -> None:
    """A vocab.txt that is cut short would leave the words behind its end unknown, without a word."""
    pieces = [*PIECES, *(f"word{n}" for n in range(300))]
    write_model(tmp_path, vocab_size=V + 300)
    write_tokenizer(tmp_path, pieces[:-255])
    assert len(read_source(str(tmp_path)).tokens) == V + 45
    write_tokenizer(tmp_path, pieces[:-256])
    with pytest.raises(
        DataError, match=rf"its vocabulary has {V + 44} tokens, and its network rows for {V + 300}; put the right one there"
    ):
        read_source(str(tmp_path))


def test_rows_behind_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    """A network may have more rows than its tokenizer has tokens."""
    write_model(tmp_path)
    write_tokenizer(tmp_path, PIECES[:-3])
    initial = read_source(str(tmp_path))
    assert len(initial.tokens) == V - 3
    assert initial.state["encoder.word.weight"][: V - 3].any(1).all() and not initial.state["encoder.word.weight"][V - 3 :].any()


def test_a_name_of_the_hub_is_found_in_the_cache_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = in_cache(tmp_path / "cache", "some/bert", monkeypatch)
    theirs = write_model(folder)
    initial = read_source("hf:some/bert")
    assert torch.equal(initial.state["encoder.position.weight"], theirs.bert.embeddings.position_embeddings.weight)
    monkeypatch.chdir(tmp_path)
    assert run_folder("hf:some/bert") == Path("runs/bert")
    with pytest.raises(DataError, match=r"hf:some/other: cannot be downloaded from Hugging Face's hub, and is not in the cache"):
        read_source("hf:some/other")


def test_of_a_hub_only_the_files_of_a_model_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No code, no weights of other frameworks; a pickle only where there is nothing else."""
    import huggingface_hub

    write_model(tmp_path)
    asked = []

    def download(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    read_source("hf:some/bert@v2")
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    read_source("hf:some/bert")
    files = ["config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt", "model.safetensors"]
    assert asked == [("some/bert", "v2", files), ("some/bert", None, files), ("some/bert", None, [*files, "pytorch_model.bin"])]


def test_an_imported_checkpoint_is_a_run_whose_pretraining_is_done(tmp_path: Path) -> None:
    write_model(tmp_path / "hf", "BertForMaskedLM")
    run, notes = import_encoder(str(tmp_path / "hf"), tmp_path / "run")
    assert notes == ["it has no pooler and no next-sentence head: drawn at random"]
    stored = stored_run(tmp_path / "run")
    assert (stored.model, stored.data.vocab_size) == (run.model, V) and not stored.predicts_next_sentence
    checkpoint = newest_checkpoint(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None
    state, expected = read_checkpoint(checkpoint)[1], read_source(str(tmp_path / "hf")).state
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    assert state.keys() - expected.keys() == {"pooler.weight", "pooler.bias", "nsp.weight", "nsp.bias"}
    with pytest.raises(UserError, match="exists; name another folder, or delete it"):
        import_encoder(str(tmp_path / "hf"), tmp_path / "run")
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "run"}


@pytest.mark.parametrize("command", ["prepare", "pretrain", "run"])
def test_what_was_imported_is_not_trained_on_the_text_that_is_the_default(command: str, tmp_path: Path, capsys: Captured) -> None:
    write_model(tmp_path / "hf")
    run = tmp_path / "run"
    import_encoder(str(tmp_path / "hf"), run)
    before = sorted(run.rglob("*"))
    assert main([command, str(run), f"--data.dir={tmp_path / 'data'}"]) == 2
    assert (
        f"was imported, so there is nothing to {command}; to continue its pretraining on your text: overnight run adapt-domain --init={run}"
        in (capsys.readouterr().err)
    )
    assert sorted(run.rglob("*")) == before and not (tmp_path / "data").exists()


@pytest.mark.parametrize(("source", "said"), [("nowhere", "does not exist"), ("texts", "holds no model that can be converted")])
def test_import_of_what_is_no_model_names_all_that_can_be_imported(source: str, said: str, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "texts").mkdir()
    assert main(["import", "--from", str(tmp_path / source), "--to", str(tmp_path / "run")]) == 1
    message = capsys.readouterr().err
    assert f"{source}: {said}; name a folder of Hugging Face" in message and "vocab.txt" in message and "0.npy to 14.npy" in message


def test_a_failed_import_leaves_nothing(tmp_path: Path) -> None:
    write_model(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").unlink()
    with pytest.raises(DataError):
        import_encoder(str(tmp_path / "hf"), tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_commands_take_a_checkpoint_where_they_take_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """Fine-tune, predict and export; the checkpoint is imported once, and its folder is left as it is."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "made" / "peer")
    before = {path.name: path.read_bytes() for path in (tmp_path / "made" / "peer").iterdir()}
    (tmp_path / "mine.csv").write_text("text,label\n" + "".join(f"{a} good film,yes\n{a} bad film,no\n" for a in LETTERS))
    fast = ["--compute.device=cpu", "--compute.threads=1"]
    assert main(["finetune", "mine", "--from", "made/peer", "--path=mine.csv", "--seq_len=16", "--epochs=1", *fast]) == 0
    said = capsys.readouterr()
    assert "imported: made/peer as runs/peer" in said.err and "mine: seed 0 pretrained" in said.out
    (tmp_path / "masked.txt").write_text("the [MASK] film\n")
    assert main(["predict", "mask", "--from", "made/peer", "--input", "masked.txt", *fast]) == 0
    said = capsys.readouterr()
    assert said.err == "made/peer: imported before, as runs/peer, which is used\n"
    pipe = transformers.pipeline("fill-mask", model="made/peer", top_k=5)
    ours = json.loads(said.out)["masks"][0]
    assert [guess["token"] for guess in ours] == [guess["token_str"] for guess in pipe("the [MASK] film")]
    assert main(["export", "--from", "made/peer", "--to", "back", *fast]) == 0
    theirs, back = load_file("made/peer/model.safetensors"), load_file("back/model.safetensors")
    assert theirs.keys() == back.keys() and all(torch.equal(theirs[name], back[name]) for name in theirs)
    assert {path.name: path.read_bytes() for path in (tmp_path / "made" / "peer").iterdir()} == before
    write_model(tmp_path / "other" / "peer", num_hidden_layers=1)
    with pytest.raises(ConfigError, match=r"runs/peer: is another run than other/peer; import it under another name: overnight import"):
        run_folder("other/peer")


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_checkpoint_that_was_replaced_is_not_taken_for_the_one_that_was_imported(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "peer")
    out = run_folder("peer")
    assert run_folder("peer") == out
    content = (tmp_path / "peer" / file).read_bytes()
    (tmp_path / "peer" / file).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(
        ConfigError, match=r"runs/peer: was imported from other weights than peer has now; delete runs/peer, .* or import it"
    ):
        run_folder("peer")
    # An earlier version did not say what it had imported.
    record = json.loads((out / "imported.json").read_text())
    (out / "imported.json").write_text(json.dumps({key: record[key] for key in ("version", "source", "random")}))
    assert run_folder("peer") == out


def test_a_checkpoint_that_was_moved_with_its_import_is_known_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "before").mkdir()
    monkeypatch.chdir(tmp_path / "before")
    write_model(Path("peer"))
    out = run_folder("peer")
    monkeypatch.chdir((tmp_path / "before").rename(tmp_path / "after"))
    assert run_folder("peer") == out and run_folder(str(tmp_path / "after" / "peer")) == out
    # Of the hub, and of an import of an earlier version, nothing but the name is known.
    record = json.loads((out / "imported.json").read_text())
    for known in (record["source"], "hf:some/peer"):
        (out / "imported.json").write_text(json.dumps({"version": 1, "source": known, "random": record["random"]}))
        for source in ("peer", "hf:other/peer"):
            with pytest.raises(ConfigError, match="runs/peer: is another run than "):
                run_folder(source)


def test_the_digest_of_a_source_is_of_the_files_that_are_read(tmp_path: Path) -> None:
    write_model(tmp_path / "peer")
    found = source_digest(str(tmp_path / "peer"))
    assert found and source_digest("hf:some/bert") == source_digest(str(tmp_path / "none")) == ""
    (tmp_path / "peer" / "README.md").write_text("of no account")
    torch.save({}, tmp_path / "peer" / "training_args.bin")
    assert source_digest(str(tmp_path / "peer")) == found


@pytest.mark.parametrize("name", ["BertModel", "ModernBertModel"])
def test_an_encoder_without_heads_can_be_fine_tuned_and_nothing_else(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "peer", name)
    (tmp_path / "mine.csv").write_text("text,label\n" + "".join(f"{a} good film,yes\n{a} bad film,no\n" for a in LETTERS))
    (tmp_path / "masked.txt").write_text("the [MASK] film\n")
    assert main(["finetune", "mine", "--from", "peer", "--path=mine.csv", "--seq_len=16", "--epochs=1"]) == 0
    assert "it has no masked-LM head: it can be fine-tuned, but cannot fill in masks" in capsys.readouterr().err
    assert main(["export", "--from", "peer", "--task=mine", "--to=out"]) == 0
    assert main(["export", "--from", "peer", "--to=all"]) == 1
    assert "has no masked-LM head to export; fine-tune it and export the task" in capsys.readouterr().err
    assert main(["predict", "mask", "--from", "peer", "--input", "masked.txt"]) == 1
    assert "runs/peer: has no masked-LM head, so it cannot fill in [MASK]; name a pretrained model that has one" in capsys.readouterr().err
    for words in (["--text", "masked.txt"], []):
        assert main(["evaluate", "--from", "runs/peer", *words]) == 1
        assert "runs/peer: has no masked-LM head, so it cannot fill in [MASK]" in capsys.readouterr().err


def test_import_writes_a_run_folder_of_googles_bert(real_data: Path, tmp_path: Path, capsys: Captured) -> None:
    assert main(["import", "--from", str(real_data / "bert-tf-tiny"), "--to", str(tmp_path / "run")]) == 0
    assert "(bert, 2 layers of 4, 15 tokens)" in capsys.readouterr().out
    (tmp_path / "masked.txt").write_text("all work and no [MASK]\n")
    assert main(["predict", "mask", "--from", str(tmp_path / "run"), "--input", str(tmp_path / "masked.txt")]) == 0
    assert json.loads(capsys.readouterr().out)["masks"]
    (tmp_path / "text.txt").write_text("all work and no play makes jack a dull boy " * 20)
    text = str(tmp_path / "text.txt")
    assert main(["evaluate", "--from", str(tmp_path / "run"), "--text", text, "--json", str(tmp_path / "found.json")]) == 0
    assert json.loads((tmp_path / "found.json").read_text())["bits_per_character"] > 0
