"""ModernBERT is fine-tuned, asked and exported as BERT is; transformers answers from the exported folder as `overnight predict` does."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from safetensors.torch import load_file

from overnight import config
from overnight.checkpoint import reader
from overnight.config import BertRun
from overnight.console import Line
from overnight.engine.pretrain import pretrain
from overnight.finetune.finetune import finetune
from overnight.finetune.predict import predict
from overnight.interop.export import export_run
from overnight.interop.huggingface import load_pretrained
from tests.conftest import modern_settings, tiny_tree
from tests.recipe import change

transformers = pytest.importorskip("transformers")

SPEC = {"epochs": 2, "global_batch_size": 8, "micro_batch_size": 8, "lr": 3e-3, "seq_len": 32}
CONTEXT = "The value of an object is number seven. " + "Every class has a method. " * 10


@pytest.fixture(scope="module")
def run(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> BertRun:
    """A run with a task of classes, one of numbers for pairs, and one of questions, each barely trained."""
    folder = tmp_path_factory.mktemp("modern")
    words = [("integer division", "number"), ("string literal", "text"), ("raised exception", "error")]
    (folder / "classes.csv").write_text("text,label\n" + "".join(f"{w} {i},{label}\n" for i in range(12) for w, label in words))
    (folder / "scores.csv").write_text("text_a,text_b,score\n" + "".join(f"class {i},object {i},{i / 10}\n" for i in range(40)))
    squad = folder / "squad"
    squad.mkdir()
    for name in ("train", "dev"):
        answer = {"text": "seven", "answer_start": CONTEXT.index("seven")}
        qas = [{"id": f"{name}{i}", "question": "What is it?", "answers": [answer]} for i in range(8)]
        articles = [{"title": name, "paragraphs": [{"context": CONTEXT, "qas": qas}]}]
        (squad / f"{name}-v1.1.json").write_text(json.dumps({"data": articles}))
    tree = change(tiny_tree(folder, tiny_data.parent / "topics.jsonl"), {**modern_settings(), "data.dir": str(tiny_data)})
    tree["finetune"] = {
        "classes": {**SPEC, "task": "csv", "path": str(folder / "classes.csv")},
        "scores": {**SPEC, "task": "csv", "path": str(folder / "scores.csv")},
        "squad": {**SPEC, "doc_stride": 8, "task": "squad", "path": str(squad)},
    }
    made = config.build_run(tree)
    assert isinstance(made, BertRun)
    pretrain(made, Line(io.StringIO()))
    for name in made.finetune:
        finetune(made, name, Line(io.StringIO()))
    return made


def loaded(run: BertRun, task: str | None, auto: str, folder: Path) -> tuple[Any, Any]:
    """Model and tokenizer of transformers from what is exported."""
    export_run(run, folder, task)
    model, info = getattr(transformers, auto).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)


def test_a_task_begins_where_pretraining_ended(run: BertRun) -> None:
    place = reader.newest_checkpoint(run.run_dir / "checkpoints")
    assert place is not None
    before = load_file(place / "model.safetensors")
    for task in run.finetune:
        after = load_file(run.run_dir / "finetune" / task / "model.safetensors")
        for ours, theirs in (("pooler.dense.weight", "mlm.dense.weight"), ("encoder.word.weight", "encoder.word.weight")):
            # A few steps at 3e-3 move a weight by less than 0.1; those drawn anew would be elsewhere.
            assert 0 < (after[ours] - before[theirs]).abs().max() < 0.1
            assert torch.nn.functional.cosine_similarity(after[ours].flatten(), before[theirs].flatten(), 0) > 0.3


def test_classes_are_answered_as_transformers_does(run: BertRun, tmp_path: Path) -> None:
    model, tokenizer = loaded(run, "classes", "AutoModelForSequenceClassification", tmp_path / "out")
    texts = ["a string literal", "integer division by an object", "raised"]
    with torch.no_grad():
        logits = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
    for answer, shares in zip(predict(run, "classes", texts), torch.softmax(logits, -1).tolist(), strict=True):
        assert model.config.id2label[shares.index(max(shares))] == answer["label"]
        expected = dict(zip(model.config.id2label.values(), shares, strict=True))
        assert answer["probabilities"] == pytest.approx(expected, abs=2e-5)


def test_numbers_for_pairs_are_answered_as_transformers_does(run: BertRun, tmp_path: Path) -> None:
    model, tokenizer = loaded(run, "scores", "AutoModelForSequenceClassification", tmp_path / "out")
    first, second = ["class 3", "a class"], ["object 3", "an object of another class"]
    with torch.no_grad():
        numbers = model(**tokenizer(first, second, padding=True, return_tensors="pt")).logits[:, 0].tolist()
    answers = predict(run, "scores", [f"{a}\t{b}" for a, b in zip(first, second, strict=True)])
    assert [answer["score"] for answer in answers] == pytest.approx(numbers, rel=5e-5)
    assert numbers[0] != numbers[1]


def test_answers_to_questions_lie_in_their_context_and_the_first_window_is_transformers(run: BertRun, tmp_path: Path) -> None:
    model, tokenizer = loaded(run, "squad", "AutoModelForQuestionAnswering", tmp_path / "out")
    (long,) = predict(run, "squad", [json.dumps({"id": "q", "question": "What is the value?", "context": CONTEXT})])
    assert long["id"] == "q" and long["answer"] in CONTEXT and long["answer"]
    context = "The value is number nine."
    (short,) = predict(run, "squad", [f"What is the value?\t{context}"])
    given = tokenizer("What is the value?", context, return_offsets_mapping=True, return_tensors="pt")
    offsets = given.pop("offset_mapping")[0].tolist()
    with torch.no_grad():
        out = model(**given)
    places = [i for i, part in enumerate(given.sequence_ids(0)) if part == 1]
    scores = {(i, j): float(out.start_logits[0, i] + out.end_logits[0, j]) for i in places for j in places if i <= j}
    i, j = max(scores, key=scores.__getitem__)
    assert short["answer"] == context[offsets[i][0] : offsets[j][1]]


def test_masks_are_filled_as_transformers_does(run: BertRun, tmp_path: Path) -> None:
    export_run(run, tmp_path / "out")
    text = "The value of an [MASK] is a class."
    (answer,) = predict(run, "mask", [text])
    fills = transformers.pipeline("fill-mask", str(tmp_path / "out"), device="cpu")(text, top_k=5)
    assert [guess["probability"] for guess in answer["masks"][0]] == pytest.approx([fill["score"] for fill in fills], rel=1e-4)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert [guess["token"] for guess in answer["masks"][0]] == tokenizer.convert_ids_to_tokens([fill["token"] for fill in fills])


def test_an_exported_run_reads_back_as_its_checkpoint(run: BertRun, tmp_path: Path) -> None:
    export_run(run, tmp_path / "out")
    state, model, _ = load_pretrained(tmp_path / "out")
    place = reader.newest_checkpoint(run.run_dir / "checkpoints")
    assert place is not None
    kept = load_file(place / "model.safetensors")
    assert kept.keys() == state.keys() and all(torch.equal(kept[name], state[name]) for name in kept)
    assert model == run.model
