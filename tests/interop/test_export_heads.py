"""Every head by one row of a table: loaded by transformers, run by its pipeline, the same in ONNX, described by a model card."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, get_args, get_type_hints

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import yaml
from torch import Tensor

from overnight import config
from overnight.checkpoint import task_folder
from overnight.cli.main import main
from overnight.config import BertConfig, BertRun, EncoderConfig, ModernBertConfig, Run
from overnight.corpus.shards import load_manifest
from overnight.corpus.tokenizer import save_tokenizer
from overnight.errors import ConfigError, DataError
from overnight.interop.huggingface import export, load_pretrained, to_huggingface
from overnight.interop.layout import HEADS, Kind
from overnight.interop.model_card import _recipe, _task, _use, model_card
from overnight.models.encoders import masked_lm
from overnight.models.heads import Classifier, QuestionAnswering
from overnight.run_dir.atomic import write_json
from overnight.run_dir.task_results import append_result, read_results
from overnight.state_files import read_mapping, sealed
from tests.interop.peers import PIECES, V, batch, write_model

transformers = pytest.importorskip("transformers")
Captured = pytest.CaptureFixture[str]
SIZES = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "max_position_embeddings": 40}
MODELS: dict[str, EncoderConfig] = {"bert": BertConfig(**SIZES), "modernbert": ModernBertConfig(**SIZES, local_attention=8, pooling="cls")}
LABELS = {
    "classification": ("no", "yes", "maybe"),
    "multi_label": ("red", "green"),
    "token_classification": ("O", "B-PER", "I-PER", "B-LOC"),
}


def _network(kind: Kind, model: EncoderConfig) -> tuple[Any, dict[str, Tensor]]:
    """Our network of a kind with random weights, and its state. Classes of tokens have the parameters of spans, with more outputs."""
    torch.manual_seed(0)
    if kind in ("pretraining", "masked_lm"):
        network: Any = masked_lm(model, V)
    elif kind in ("spans", "token_classification"):
        network = QuestionAnswering(model, V)
        if kind == "token_classification":
            network.head = torch.nn.Linear(16, len(LABELS[kind]))
    else:
        network = Classifier(model, V, len(LABELS.get(kind, "1")))
    state = {name: torch.randn(tensor.shape) * 0.3 for name, tensor in network.state_dict().items()}
    for name in ("encoder.word.weight", "mlm.bias"):
        if name in state:
            state[name][V:] = 0.0
    network.load_state_dict(state)
    return network.eval(), state


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path / "tokenizer", PIECES, True)
    return tmp_path / "tokenizer"


def test_the_table_has_every_kind_of_a_task() -> None:
    kinds = get_args(get_type_hints(task_folder._Facts)["kind"])
    assert len(kinds) >= 5 and set(kinds) <= set(HEADS)


@torch.no_grad()
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("name", MODELS)
def test_transformers_and_its_pipeline_take_every_kind(name: str, kind: Kind, tokenizer: Path, tmp_path: Path) -> None:
    network, state = _network(kind, MODELS[name])
    export(state, kind, MODELS[name], tokenizer, tmp_path / "out", LABELS.get(kind, ()))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    theirs, info = getattr(transformers, config["architectures"][0]).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    ids, flat = batch()
    found = theirs.eval()(input_ids=ids)
    if kind in ("pretraining", "masked_lm"):
        expected = network.mlm_logits(network.encoder(flat))[:, :V].view(*ids.shape, V)
        given = found.prediction_logits if "prediction_logits" in found else found.logits
    elif kind in ("spans", "token_classification"):
        expected = network.head(network.pooler(network.encoder(flat))).view(*ids.shape, -1)
        given = torch.stack([found.start_logits, found.end_logits], -1) if kind == "spans" else found.logits
    else:
        expected, given = network(flat, torch.float32), found.logits
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5)
    if kind in LABELS:
        assert list(theirs.config.id2label.values()) == list(LABELS[kind])
    if HEADS[kind].problem:
        assert theirs.config.problem_type == HEADS[kind].problem

    back, model, _ = load_pretrained(tmp_path / "out")
    again = to_huggingface({**state, **back} if kind == "pretraining" else back, kind, V)
    assert (model.kind, model.hidden_size) == (name, 16)
    assert all(torch.equal(again[key], tensor) for key, tensor in to_huggingface(state, kind, V).items())

    if kind == "spans":  # transformers 5 has no pipeline for it; the model card shows how
        code = _use(HEADS[kind].pipeline).replace("FOLDER", str(tmp_path / "out")).replace("QUESTION", "good film")
        exec(code.replace("CONTEXT", "the bad film is good"), {})
        return
    pipe = transformers.pipeline(HEADS[kind].pipeline, model=str(tmp_path / "out"))
    if HEADS[kind].pipeline == "fill-mask":
        assert {guess["token_str"] for guess in pipe("the [MASK] film")} <= set(PIECES)
    elif kind == "token_classification":
        assert all(token["entity"] in LABELS[kind] for token in pipe("the good film"))
    else:
        assert pipe("the good film")[0]["label"] in [*LABELS.get(kind, ["LABEL_0"])]


@pytest.mark.heavy
@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "kind"), [("bert", "pretraining"), ("bert", "spans"), ("modernbert", "masked_lm"), ("modernbert", "classification")]
)
def test_onnxruntime_computes_what_pytorch_does_at_any_length(name: str, kind: Kind, tokenizer: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    from overnight.interop.onnx import write_onnx

    _, state = _network(kind, MODELS[name])
    export(state, kind, MODELS[name], tokenizer, tmp_path / "out", LABELS.get(kind, ()), more=write_onnx)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    theirs = getattr(transformers, config["architectures"][0]).from_pretrained(tmp_path / "out").eval()
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"), providers=["CPUExecutionProvider"])
    for sequences, tokens in ((1, 3), (4, 40)):
        ids, _ = batch(sequences, tokens)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)} | (
            {"token_type_ids": torch.zeros_like(ids)} if name == "bert" else {}
        )
        expected = [value for key, value in theirs(**inputs).items() if key.endswith("logits")]
        found = session.run(None, {key: tensor.numpy() for key, tensor in inputs.items()})
        for ours, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.from_numpy(ours), wanted, rtol=1e-5, atol=1e-5)


def test_the_folder_to_write_may_be_the_working_one_and_has_a_name(
    pretrained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    source = str(pretrained.run_dir.resolve())
    assert main(["export", "--from", source, "--to="]) == 2
    assert "--to = '': name what to write" in capsys.readouterr().err and not list((tmp_path / "out").iterdir())
    Path("file").write_text("mine")
    assert main(["export", "--from", source, "--to=file"]) == 1
    assert "file: is a file; name a folder" in capsys.readouterr().err and Path("file").read_text() == "mine"
    Path("file").unlink()
    assert main(["export", "--from", source, "--to=."]) == 0
    assert (tmp_path / "out" / "config.json").is_file() and [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.heavy
def test_the_command_writes_onnx_beside_the_rest_and_may_replace_it(pretrained: Run, tmp_path: Path, capsys: Captured) -> None:
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    to = ["export", "--from", str(pretrained.run_dir), "--to", str(tmp_path / "out")]
    assert main([*to, "--format=onnx"]) == 0
    assert "model.onnx" in {path.name for path in (tmp_path / "out").iterdir()}
    assert main(to) == 0
    assert "model.onnx" not in {path.name for path in (tmp_path / "out").iterdir()}
    assert capsys.readouterr().err == ""


def test_an_onnx_file_that_computes_something_else_does_not_count(tokenizer: Path, tmp_path: Path) -> None:
    """The folder does not appear when what writes into it fails."""

    def fail(folder: Path) -> None:
        raise DataError("onnxruntime computes something else")

    _, state = _network("spans", MODELS["bert"])
    with pytest.raises(DataError, match="something else"):
        export(state, "spans", MODELS["bert"], tokenizer, tmp_path / "out", more=fail)
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer"]


def test_an_onnx_graph_of_another_network_is_noticed(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    from overnight.interop.onnx import _compare

    info = onnx.helper.make_tensor_value_info
    names = ("input_ids", "attention_mask")
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Cast", ["input_ids"], ["logits"], to=1)],
        "planted",
        [info(name, onnx.TensorProto.INT64, ["b", "s"]) for name in names],
        [info("logits", onnx.TensorProto.FLOAT, ["b", "s"])],
    )
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9), tmp_path / "model.onnx")

    class Same(torch.nn.Module):
        def __init__(self, more: float) -> None:
            super().__init__()
            self.more = more

        def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor]:
            return (ids.float() + self.more,)

    config = {"model_type": "modernbert", "vocab_size": 30}
    _compare(tmp_path / "model.onnx", Same(0.0), config, 40)
    with pytest.raises(DataError, match=r"model\.onnx: onnxruntime's outputs differ from PyTorch's \(3\.\de-03 apart, 1e-05 allowed\)"):
        _compare(tmp_path / "model.onnx", Same(0.1), config, 40)


def test_without_its_packages_onnx_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    from overnight.interop.onnx import check_onnx

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs onnx, onnxruntime, onnxscript, transformers: pip install 'overnight\[onnx\]'"):
        check_onnx()


def test_a_model_card_says_data_recipe_steps_scores_license_and_seed(pretrained: Run, tmp_path: Path, capsys: Captured) -> None:
    run = tmp_path / "run"
    shutil.copytree(pretrained.run_dir, run)
    assert main(["evaluate", "--from", str(run), "--max-tokens=2000"]) == 0
    assert main(["export", "--from", str(run), "--to", str(tmp_path / "out"), "--license=cc-by-4.0"]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    _, head, body = card.split("---\n", 2)
    assert yaml.safe_load(head) == {
        "library_name": "transformers",
        "pipeline_tag": "fill-mask",
        "tags": ["bert", "overnight"],
        "license": "cc-by-4.0",
    }
    for wanted in (
        "- `topics.jsonl`",
        "10 steps, 80 sequences, ",
        "seed 0.",
        "bits per character",
        "| bits per character of whole words |",
        "masked accuracy",
        "## License\n\ncc-by-4.0.",
    ):
        assert wanted in body, wanted
    recipe = yaml.safe_load(body.split("```yaml\n")[1].split("```")[0])
    assert recipe["phases"]["short"]["steps"] == 6 and recipe["data"]["vocab_size"] == 600
    assert str(tmp_path) not in card and str(pretrained.data_dir.parent) not in card, "no path of this machine"
    assert main(["export", "--from", str(run), "--to", str(tmp_path / "out")]) == 0
    assert "## License\n\nNot stated." in (tmp_path / "out" / "README.md").read_text()


def test_the_card_of_an_imported_model_says_where_it_is_from(pretrained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "theirs")
    monkeypatch.chdir(tmp_path)
    assert main(["import", "--from", "theirs", "--to", "runs/mine"]) == 0
    assert main(["export", "--from", "runs/mine", "--to=out"]) == 0
    card = Path("out/README.md").read_text()
    assert "width 16, imported by overnight " in card and "It was pretrained elsewhere, as `theirs`, on other text" in card
    assert "base_model" not in card and str(tmp_path) not in card
    run = config.stored_run(pretrained.run_dir)
    assert isinstance(run, BertRun)
    begun = model_card(dataclasses.replace(run, init="hf:google-bert/bert-base-uncased"), "masked_lm", None, None)
    assert yaml.safe_load(begun.split("---\n")[1])["base_model"] == "google-bert/bert-base-uncased"
    assert "It began from `google-bert/bert-base-uncased`." in begun
    begun = model_card(dataclasses.replace(run, init="hf:google-bert/bert-base-uncased@86b5e09"), "masked_lm", None, None)
    assert yaml.safe_load(begun.split("---\n")[1])["base_model"] == "google-bert/bert-base-uncased"


def test_a_model_card_has_the_scores_of_its_own_weights_alone_and_names_each_text(pretrained: Run, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(pretrained.run_dir, run)
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text("The class defines a method. It returns an integer.\n\n" * 4)
    texts = [str(tmp_path / f"{name}.txt") for name in ("one", "two")]

    def card() -> str:
        assert main(["export", "--from", str(run), "--to", str(tmp_path / "out")]) == 0
        return (tmp_path / "out" / "README.md").read_text()

    assert main(["evaluate", "--from", str(run), "--text", *texts]) == 0
    assert "| bits per character of one.txt, two.txt |" in card()
    assert main(["pretrain", str(run), "--extend", "--phases.long.steps=6"]) == 0
    assert "12 steps" in card() and "None were measured" in card()


def test_measures_that_cannot_be_read_are_named_before_anything_is_exported(pretrained: Run, tmp_path: Path, capsys: Captured) -> None:
    run = tmp_path / "run"
    shutil.copytree(pretrained.run_dir, run)
    for content in ('{"model": "cut sho', "[]", '{"checksum_of_the_rest": "0"}'):
        (run / "evaluation.json").write_text(content)
        assert main(["export", "--from", str(run), "--to", str(tmp_path / "out")]) == 1
        said = capsys.readouterr().err
        assert f"{run / 'evaluation.json'}" in said and "delete it; `overnight evaluate` measures again" in said
    assert not (tmp_path / "out").exists()


def test_the_recipe_of_a_model_card_names_no_folder_of_this_machine(pretrained: Run, tmp_path: Path) -> None:
    tree = config.to_tree(pretrained)
    here = {key: str(tmp_path / f"{key}.txt") for key in ("books", "web", "blimp")}
    sources = {name: {"paths": [here[name], f"s3://bucket/{name}"], "weight": 1.0} for name in ("books", "web")}
    tree["data"] |= {"paths": [], "sources": sources, "decontaminate": [here["blimp"]]}
    run = config.build_run(tree)
    assert isinstance(run, BertRun)
    recipe = _recipe(run)
    assert recipe["data"]["sources"]["web"]["paths"] == ["web.txt", "s3://bucket/web"]
    assert str(tmp_path) not in str(recipe)


def test_a_model_card_has_no_key_of_an_address_and_no_folder_of_one_of_this_machine(pretrained: Run, tmp_path: Path) -> None:
    shutil.copytree(pretrained.run_dir, tmp_path / "run")
    places = ["https://acct.example.net/text.jsonl?sig=SECRET", f"file://{tmp_path}/books.jsonl", f"zip::file://{tmp_path}/more.zip"]
    assert main(["evaluate", "--from", str(tmp_path / "run"), "--max-tokens=2000"]) == 0
    path = tmp_path / "run" / "evaluation.json"
    measured = read_mapping(path, "")
    measured["texts"] = {"https://acct.example.net/valid.txt?sig=SECRET": next(iter(measured["texts"].values()))}
    write_json(path, sealed({key: value for key, value in measured.items() if key != "checksum_of_the_rest"}))
    run = dataclasses.replace(config.stored_run(tmp_path / "run"), data=dataclasses.replace(pretrained.data, paths=places))
    card = model_card(run, "masked_lm", None, load_manifest(pretrained.data_dir))
    assert (
        "- `https://acct.example.net/text.jsonl`\n- `books.jsonl`\n- `more.zip`" in card and "https://acct.example.net/valid.txt |" in card
    )
    assert "SECRET" not in card and str(tmp_path) not in card


def test_the_card_of_a_task_says_how_well_and_its_labels(pretrained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(pretrained.run_dir, tmp_path / "run")
    Path("data").mkdir()
    for name, letters in (("train", "abcdefghijklmn"), ("dev", "op"), ("test", "q")):
        Path(f"data/{name}.csv").write_text("text,label\n" + "".join(f"{a} good film,yes\n{a} bad film,no\n" for a in letters))
    assert main(["finetune", "mine", "--from", "run", "--path=data", "--seq_len=16", "--epochs=1"]) == 0
    assert main(["export", "--from", "run", "--task=mine", "--to=out"]) == 0
    card = Path("out/README.md").read_text()
    assert "pipeline_tag: text-classification" in card and "Labels: `no`, `yes`." in card and "accuracy" in card
    assert "# tiny, fine-tuned on mine (`data`)\n" in card and ", from step 10 of pretraining." in card
    assert transformers.pipeline("text-classification", model="out")("a good film")[0]["label"] in ("no", "yes")
    assert "the best of seeds 0: seed 0," in card
    assert re.search(r"\naccuracy [\d.]+ %  macro f1 [\d.]+ % on the development rows, .* On the test rows: accuracy [\d.]+ %", card)
    # A model that stays the best is the best of more.
    log = Path("run/tasks.jsonl")
    *rules, entry = read_results(log)
    assert {rule["kind"] for rule in rules} == {"baseline"}
    append_result(log, {**entry, "seed": 7, "value": entry["value"] - 0.1})
    append_result(log, {**entry, "seed": 8, "init": "random"})
    assert main(["export", "--from", "run", "--task=mine", "--to=out"]) == 0
    assert "the best of seeds 0, 7: seed 0," in Path("out/README.md").read_text()
    facts = task_folder.read_facts(Path("run/finetune/mine"))
    (words, *_) = _task({**facts, "spec": {**facts["spec"], "seeds": [0, 1, 2]}}, [0])
    assert words.endswith(" No score is kept of seeds 1, 2.")
    (words, *_) = _task({**facts, "result": {**facts["result"], "selected_on": "dev"}}, [0])
    assert words.endswith(" It was chosen by the same development rows, so their score is a little too good.")


def test_the_program_on_the_card_of_a_task_of_pairs_gives_both_texts(tokenizer: Path, tmp_path: Path) -> None:
    _, state = _network("classification", MODELS["bert"])
    export(state, "classification", MODELS["bert"], tokenizer, tmp_path / "out", LABELS["classification"])
    pipe = transformers.pipeline("text-classification", model=str(tmp_path / "out"))
    call = _use("text-classification", pairs=True).splitlines()[-1]
    assert (
        '"text_pair": ' in call
        and pipe(**{"inputs": json.loads(call.partition(")(")[2].removesuffix(")"))})["label"] in LABELS["classification"]
    )
    assert _use("text-classification").endswith('("a text")')


@pytest.mark.parametrize("task", [(), ("--task=mine",)])
def test_a_model_whose_text_is_not_known_any_more_is_not_called_one_of_others(
    task: tuple[str, ...], pretrained: Run, tmp_path: Path, capsys: Captured
) -> None:
    shutil.copytree(pretrained.run_dir, tmp_path / "run")
    rows = "".join(f"{a} good film,yes\n{a} bad film,no\n" for a in "abcdefghijklmnop")
    (tmp_path / "mine.csv").write_text(f"text,label\n{rows}")
    fast = ["--seq_len=16", "--epochs=1"]
    assert not task or main(["finetune", "mine", "--from", str(tmp_path / "run"), f"--path={tmp_path / 'mine.csv'}", *fast]) == 0
    (tmp_path / "run" / "corpus" / "manifest.json").unlink()
    capsys.readouterr()
    assert main(["export", "--from", str(tmp_path / "run"), *task, "--to", str(tmp_path / "out")]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "corpus" in said and "is missing" in said and "overnight pretrain" in said
    assert not (tmp_path / "out").exists()
