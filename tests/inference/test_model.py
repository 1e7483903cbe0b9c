"""What a loaded model says is what the commands and transformers say, in the order of the texts, however many there are."""

from __future__ import annotations

import io
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch

import overnight
from overnight.bench.sizes import full_batch
from overnight.cli.main import main
from overnight.config import BertRun
from overnight.config.schema import BertConfig, ModernBertConfig
from overnight.corpus.tokenizer import save_tokenizer
from overnight.errors import ConfigError, DataError
from overnight.finetune.predict import at_work, predict
from overnight.inference import model as module
from overnight.inference.model import Model
from overnight.interop.export import export_run
from overnight.interop.huggingface import export, head_of
from overnight.models.bert import Linear
from overnight.models.encoders import masked_lm
from overnight.models.int8 import is_exact
from overnight.models.layers import _onednn_linear
from tests.conftest import ROOT, topics
from tests.interop.peers import PIECES, V, in_cache

TEXTS = ["An integer.", "", "The string literal of a class is an object. " * 9, "é [SEP] [MASK]", "raised"]


@pytest.fixture(scope="module")
def model(trained_run: BertRun) -> Model:
    return overnight.load(trained_run.run_dir)


def transformers_states(folder: Path, texts: list[str]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The hidden states (n, T, D) of every layer by transformers, padded, and where there are tokens (n, T)."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    given = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        states = transformers.AutoModel.from_pretrained(folder).eval()(**given, output_hidden_states=True)
    return [*states.hidden_states[:-1], states.last_hidden_state], given["attention_mask"]


def modern_folder(folder: Path) -> Path:
    """A ModernBERT of random weights in the layout of Hugging Face."""
    sizes = ModernBertConfig(num_layers=3, hidden_size=16, num_heads=2, max_position_embeddings=40, local_attention=8)
    torch.manual_seed(0)
    network = masked_lm(sizes, V)
    save_tokenizer(folder / "tokenizer", PIECES, True)
    export(network.state_dict(), "masked_lm", sizes, folder / "tokenizer", folder / "modern")
    return folder / "modern"


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_embeddings_are_those_of_transformers_in_every_layer_and_pooling(kind: str, trained_run: BertRun, tmp_path: Path) -> None:
    if kind == "bert":
        export_run(trained_run, tmp_path / "out")
    folder = tmp_path / "out" if kind == "bert" else modern_folder(tmp_path)
    texts = [TEXTS[i] for i in (0, 1, 2, 4)]
    ours = overnight.load(folder, device="cpu")
    states, mask = transformers_states(folder, texts)
    for layer, hidden in enumerate(states):
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1)[:, None]
        for pooling, expected in (("mean", mean), ("first", hidden[:, 0])):
            for number in (layer, layer - len(states)):
                np.testing.assert_allclose(ours.embed(texts, pooling, number), expected.numpy(), atol=2e-5, err_msg=f"{pooling} {number}")


def test_vectors_come_in_the_order_of_the_texts_whatever_they_are_batched_with(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [*TEXTS, *(text[:200] for text in topics().values())][:40]
    together = model.embed(texts)
    assert together.dtype == np.float32 and together.shape == (40, model.embedding_size)
    monkeypatch.setattr("overnight.finetune.predict._CPU_TOKENS", 64)
    monkeypatch.setattr(module, "WINDOW", 7)
    np.testing.assert_allclose(model.embed(texts), together, atol=1e-5)
    np.testing.assert_allclose(np.concatenate([model.embed([text]) for text in texts]), together, atol=1e-5)
    assert len(np.unique(together.round(4), axis=0)) == len(set(texts))
    assert model.embed([]).shape == (0, model.embedding_size)


def test_normalized_vectors_have_length_one_and_the_same_direction(model: Model) -> None:
    plain, unit = model.embed(TEXTS), model.embed(TEXTS, normalize=True)
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(unit * np.linalg.norm(plain, axis=1)[:, None], plain, atol=1e-5)


def test_a_stream_without_end_is_answered_while_only_a_window_of_it_is_read(
    trained_run: BertRun, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WINDOW", 8)
    read = 0

    def endless() -> Iterator[str]:
        nonlocal read
        for read in itertools.count(1):
            yield f"object {read % 5}"

    vectors = list(itertools.islice(model.embed(endless()), 20))
    assert read == 24
    np.testing.assert_allclose(np.stack(vectors), model.embed([f"object {n % 5}" for n in range(1, 21)]), atol=1e-5)
    answers = list(itertools.islice(overnight.load(trained_run.run_dir, "classes").predict(endless()), 9))
    assert read == 16 and {answer["label"] for answer in answers} <= {"number", "text", "error"}


def test_a_task_answers_as_the_command_does_and_so_does_its_export(trained_run: BertRun, tmp_path: Path) -> None:
    task = overnight.load(trained_run.run_dir, task="classes")
    assert (task.kind, task.task, task.labels) == ("classification", "classes", ("error", "number", "text"))
    texts: list[Any] = ["a string", {"id": "x", "text": "a number"}, "one\ttext"]
    found = task.predict(texts)
    assert [set(answer) for answer in found] == [
        {"label", "probabilities"},
        {"id", "label", "probabilities"},
        {"label", "probabilities"},
    ]
    said = list(predict(trained_run, "classes", ["a string", '{"id": "x", "text": "a number"}', "one\ttext"]))
    assert [answer["probabilities"] for answer in found] == [answer["probabilities"] for answer in said]
    assert overnight.load(trained_run.run_dir / "finetune" / "classes").predict(texts) == found
    export_run(trained_run, tmp_path / "out", "classes")
    theirs = overnight.load(tmp_path / "out", device="cpu")
    assert theirs.labels == task.labels
    for ours, answer in zip(found, theirs.predict(texts), strict=True):
        assert answer["probabilities"] == pytest.approx(ours["probabilities"], abs=1e-4)
    assert task.embed(["a"]).shape == (1, 32)
    good, empty, dropped = task.predict(["a string", "", "\u200b"])
    assert good["label"] == found[0]["label"] and set(empty) == set(dropped) == {"error"}
    with pytest.raises(DataError, match="line 600: is a number; it needs a text, a pair of texts"):
        task.predict([*["a"] * 599, 3])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"problem_type": "regression"}, r"config\.json: problem_type = 'regression' with 3 outputs \(id2label\); only one number"),
        ({"architectures": None}, r"config\.json: architectures is missing, and the weights have the head of a task: name it"),
        ({"id2label": {"0": "a", "1": "b", "2": "a"}}, r"config\.json: id2label: 2 classes are called 'a'; give each a name of its own"),
        ({"id2label": {"0": "a", "1": "b", "x": "c"}}, r"config\.json: id2label: must name the outputs from 0 on, each once"),
    ],
)
def test_a_head_whose_answers_nobody_names_is_refused(change: dict[str, Any], message: str, trained_run: BertRun, tmp_path: Path) -> None:
    export_run(trained_run, tmp_path / "out", "classes")
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=message):
        overnight.load(tmp_path / "out", device="cpu")


def test_classes_without_names_are_as_many_as_the_folder_says(trained_run: BertRun, tmp_path: Path) -> None:
    export_run(trained_run, tmp_path / "out", "classes")
    path = tmp_path / "out" / "config.json"
    named = json.loads(path.read_text())
    bare = {key: value for key, value in named.items() if key not in ("id2label", "label2id", "problem_type")}
    path.write_text(json.dumps(bare | {"num_labels": 3}))
    model = overnight.load(tmp_path / "out", device="cpu")
    assert model.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    (ours,), (theirs,) = (overnight.load(trained_run.run_dir, task="classes").predict(["a string"]), model.predict(["a string"]))
    assert [*theirs["probabilities"].values()] == pytest.approx([*ours["probabilities"].values()], abs=1e-4)
    assert head_of(tmp_path / "out") == ("classification", ["LABEL_0", "LABEL_1", "LABEL_2"])
    for number, found in ((1, ("regression", [])), (2, ("classification", ["LABEL_0", "LABEL_1"]))):
        path.write_text(json.dumps(bare | {"num_labels": number}))
        assert head_of(tmp_path / "out") == found
    path.write_text(json.dumps(bare | {"num_labels": "3"}))
    with pytest.raises(DataError, match=r"config\.json: num_labels = '3': must be a whole number of 1 or more"):
        overnight.load(tmp_path / "out", device="cpu")


def test_predict_answers_by_the_head_of_a_folder_of_hugging_face(
    trained_run: BertRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    export_run(trained_run, tmp_path / "out", "classes")
    (tmp_path / "texts.txt").write_text("a string\n\na\tnumber\n")
    ask = ["--from", "out", "--input", "texts.txt", "--compute.device=cpu"]
    assert main(["predict", "classes", *ask]) == 0
    said = capsys.readouterr()
    assert said.err == "out: classes is answered by its own head (classification, error, number, text)\n"
    model = overnight.load("out", device="cpu")
    expected = model.predict([{"id": "1", "text": "a string"}, {"id": "3", "text": "a\tnumber"}])
    assert [json.loads(line) for line in said.out.splitlines()] == expected
    assert not (tmp_path / "runs").exists()
    assert main(["predict", "mask", *ask]) == 1
    said = capsys.readouterr()
    assert (
        "its head of a task is left out: `overnight predict TASK`" in said.err
        and "has no masked-LM head, so it cannot fill in [MASK]" in said.err
    )
    assert main(["predict", "classes", *ask, "--lr=1"]) == 2


def test_a_name_of_the_hub_keeps_the_head_of_its_task(trained_run: BertRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("huggingface_hub")
    folder = in_cache(tmp_path / "cache", "me/classes", monkeypatch)
    export_run(trained_run, folder, "classes")
    found = overnight.load("hf:me/classes", device="cpu")
    assert (found.task, found.kind, found.labels) == ("classes", "classification", ("error", "number", "text"))
    assert found.predict(["a string"]) == overnight.load(folder, device="cpu").predict(["a string"])
    with pytest.raises(DataError, match="hf:me/other: cannot be downloaded from Hugging Face's hub"):
        overnight.load("hf:me/other")


def test_an_exported_task_cuts_long_texts_where_the_run_cuts_them(trained_run: BertRun, tmp_path: Path) -> None:
    positions = trained_run.model.max_position_embeddings
    task, long = overnight.load(trained_run.run_dir, task="classes"), "The string literal of a class is an object. " * 9
    export_run(trained_run, tmp_path / "out", "classes")
    theirs = overnight.load(tmp_path / "out", device="cpu")
    assert theirs.trained.longest == task.trained.longest == 32 < positions
    assert theirs.predict([long])[0]["probabilities"] == pytest.approx(task.predict([long])[0]["probabilities"], abs=1e-4)
    settings = tmp_path / "out" / "tokenizer_config.json"
    tree = json.loads(settings.read_text())
    for given, expected in ((10**30, positions), (20, 20), (None, positions)):
        settings.write_text(json.dumps({**tree, "model_max_length": given}))
        assert overnight.load(tmp_path / "out", device="cpu").trained.longest == expected


def test_an_exported_task_of_single_texts_takes_a_tab_as_text_as_the_run_does(
    trained_run: BertRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    export_run(trained_run, tmp_path / "out", "classes")
    found = []
    for source in (trained_run.run_dir, tmp_path / "out"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a string\tor a number\n")))
        assert main(["predict", "classes", "--from", str(source)]) == 0
        found.append(json.loads(capsys.readouterr().out)["probabilities"])
    assert found[1] == pytest.approx(found[0], abs=1e-5)
    with pytest.raises(DataError, match="line 1: is a pair; the task is of single texts"):
        overnight.load(tmp_path / "out", device="cpu").predict([("a", "b")])
    # Folders of others do not say.
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "overnight_task"}))
    assert "label" in overnight.load(tmp_path / "out", device="cpu").predict([("a", "b")])[0]


@pytest.mark.parametrize(("inside", "name"), [("finetune/classes", "."), ("finetune", "classes"), ("finetune/classes", "../classes/")])
def test_the_folder_of_a_task_is_known_by_any_of_its_names(
    inside: str, name: str, trained_run: BertRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained_run.run_dir / inside)
    found = overnight.load(name)
    assert (found.task, found.kind) == ("classes", "classification")


def test_masks_are_filled_as_the_command_fills_them_also_from_an_export(trained_run: BertRun, model: Model, tmp_path: Path) -> None:
    text = "The [MASK] of an [MASK]."
    (said,) = predict(trained_run, "mask", [text])
    assert model.fill(text) == said["masks"]
    export_run(trained_run, tmp_path / "out")
    (first, _) = overnight.load(tmp_path / "out", device="cpu").fill(text)
    assert [guess["token"] for guess in first] == [guess["token"] for guess in said["masks"][0]]


def test_what_cannot_be_done_is_said(trained_run: BertRun, model: Model, tmp_path: Path) -> None:
    task = overnight.load(trained_run.run_dir, task="classes")
    for what, message in (
        (lambda: model.predict(["a"]), r"no head of a task .* has classes: name .*/finetune/classes instead"),
        (lambda: task.fill("[MASK]"), "is of the task 'classes', so it cannot fill in"),
        (lambda: model.embed("one text"), "texts: is a text; give a list"),
        (lambda: model.fill_all("The [MASK]."), "texts: is a text; give a list"),
        (lambda: model.embed(["a"], "max"), "pooling = 'max': must be one of mean, first"),
        (lambda: model.embed(["a"], layer=2), "layer = 2: must be from 0, .* to 1"),
        (lambda: model.embed(["a"], layer=1.0), r"layer = 1\.0: must be a whole number"),  # type: ignore[call-overload]
        (lambda: model.embed(["a"], layer="1"), "layer = '1': must be a whole number"),  # type: ignore[call-overload]
        (lambda: overnight.load(tmp_path / "none"), "does not exist; name a run folder"),
        (lambda: overnight.load(trained_run.run_dir, precision="fp7"), "precision"),
    ):
        with pytest.raises(ConfigError, match=message):
            what()
    for what, message in (
        (lambda: model.embed(["a", 3]), "text 2: is a number; give strings"),
        (lambda: model.embed(["\ud800"]), "text 1: is not valid text"),
        (lambda: model.embed([*["a"] * 599, "\ud800"]), "text 600: is not valid text"),
        (lambda: list(model.embed(iter(["a"] * 599 + ["\ud800"]))), "text 600: is not valid text"),
        (lambda: task.predict(["a", {"words": "b"}]), "line 2: has the keys words"),
        (lambda: task.predict([3]), "line 1: is a number"),
        (lambda: task.predict(["a", {"id": ["x"], "text": "b"}]), "line 2: its id is a list; it needs a text or a number"),
        (lambda: task.predict(["a", "\ud800"]), "line 2: is not valid text"),
        (lambda: task.predict([("a", "\ud800")]), "line 1: is not valid text"),
        (lambda: task.predict(["a", ("one", "pair")]), "line 2: is a pair; the task is of single texts"),
        (lambda: model.fill("\ud800 [MASK]"), "line 1: is not valid text"),
        (lambda: model.fill("nothing"), r"no \[MASK\]"),
        (lambda: overnight.load(trained_run.run_dir, task="sst2"), r"no fine-tuned task 'sst2' \(it has: classes\)"),
    ):
        with pytest.raises(DataError, match=message):
            what()


def test_a_mark_in_a_text_is_text_whatever_was_asked_before(trained_run: BertRun) -> None:
    asked, model = "The [SEP] of a [MASK].", overnight.load(trained_run.run_dir)
    first = model.fill(asked)
    model.embed(["An integer."])
    assert model.fill(asked) == first != model.fill("The of a [MASK].")
    (line,) = predict(trained_run, "mask", [asked])
    assert line["masks"] == first


def test_the_precision_is_that_which_is_asked_for(trained_run: BertRun, model: Model) -> None:
    half = overnight.load(trained_run.run_dir, precision="bf16")
    vectors, exact = half.embed(TEXTS), model.embed(TEXTS)
    assert vectors.dtype == np.float32 and not np.array_equal(vectors, exact)
    np.testing.assert_allclose(vectors, exact, atol=0.05)


@pytest.mark.skipif(not is_exact(), reason="this processor does not multiply 8 bits exactly")
def test_in_8_bits_the_command_and_the_model_answer_as_in_32(
    trained_run: BertRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(f"integer division {n}\nraised exception {n}" for n in range(20)))
    answers = {}
    for precision in ("fp32", "int8"):
        command = [
            "predict",
            "classes",
            "--from",
            str(trained_run.run_dir),
            f"--input={tmp_path / 'texts.txt'}",
            f"--precision={precision}",
        ]
        assert main(command) == 0
        answers[precision] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(answers["int8"]) == 40 and answers["int8"] != answers["fp32"]
    for ours, exact in zip(answers["int8"], answers["fp32"], strict=True):
        assert ours["label"] == exact["label"]
    model = overnight.load(trained_run.run_dir, "classes", precision="int8")
    texts = (tmp_path / "texts.txt").read_text().splitlines()
    assert [answer["label"] for answer in model.predict(texts)] == [answer["label"] for answer in answers["int8"]]


def test_8_bits_are_refused_where_something_is_trained_or_scored(
    trained_run: BertRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in (["evaluate", "--from", str(trained_run.run_dir)], ["finetune", "classes", "--from", str(trained_run.run_dir)]):
        assert main([*command, "--precision=int8"]) == 2
        assert "precision = int8: works only for predict, embed and serve; use bf16" in capsys.readouterr().err
    for command in ("run", "pretrain", "plan"):  # before anything is prepared or written
        assert main([command, "demo", "--precision=int8", f"--out={trained_run.run_dir / 'absent'}"]) == 2
        assert "precision = int8: works only for predict, embed and serve; use bf16" in capsys.readouterr().err
    assert not (trained_run.run_dir / "absent").exists()
    monkeypatch.setattr("overnight.engine.training_run.device_of", lambda run: torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"is for CPUs; take bf16, or compute\.device=cpu"):
        overnight.load(trained_run.run_dir, precision="int8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sizes", [BertConfig(num_layers=2, hidden_size=16, num_heads=2), ModernBertConfig(num_layers=2, hidden_size=16, num_heads=2)]
)
def test_weights_that_are_cast_and_laid_out_once_give_the_same_outputs(sizes: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    network = masked_lm(sizes, 64).eval()
    batches = [full_batch(1, 3, 1, vocabulary=64), full_batch(1, 9, 1, vocabulary=64), full_batch(3, 9, 1, vocabulary=64)]

    def logits() -> list[torch.Tensor]:
        return [network.mlm_logits(network.encoder(batch, dtype)) for batch in batches]

    trained = logits()  # with a gradient
    with torch.inference_mode():
        before = logits()
        at_work(network, {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype], torch.device("cpu"))
        after = logits()
    for first, second, third in zip(trained, before, after, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(third, second, atol=1e-5, rtol=0 if dtype == torch.float32 else 1e-2)
    layers = [module for module in network.encoder.layers.modules() if isinstance(module, Linear)]
    assert len(layers) == 8 and {(m.weight if m.packed is None else m.packed).dtype for m in layers} == {dtype}
    # A weight is held once.
    assert all((m.packed is None) == (m.weight.numel() > 0) for m in layers)
    if _onednn_linear is not None and dtype == torch.float32:
        assert all(m.packed is not None for m in layers)


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, overnight\nassert not {'torch', 'numpy', 'pydantic'} & sys.modules.keys()\nassert callable(overnight.load) and 'torch' in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        overnight.laod  # noqa: B018
