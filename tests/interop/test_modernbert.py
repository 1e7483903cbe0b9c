"""A ModernBERT's export that transformers loads with the same outputs, import that undoes it, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from overnight.config import EncoderConfig, ModernBertConfig
from overnight.corpus.tokenizer import build_tokenizer, save_tokenizer
from overnight.errors import DataError
from overnight.interop.huggingface import export, load_pretrained, to_huggingface
from overnight.interop.layout import Kind
from overnight.models.heads import Classifier, QuestionAnswering
from overnight.models.modernbert import ModernBertForMaskedLM
from tests.models.sample import padded, random_batch

transformers = pytest.importorskip("transformers")

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij", *(f"##{c}" for c in "abcdefghij"), "cat", "mat", ",", "."]
V = len(PIECES)
MODEL = ModernBertConfig(
    num_layers=5,
    hidden_size=32,
    num_heads=4,
    max_position_embeddings=40,
    dropout=0.2,
    local_attention=8,
    global_attention_every=2,
    rope_theta=1000.0,
    local_rope_theta=100.0,
)
LENGTHS = [17, 11, 4]
AUTO = {
    "pretraining": "AutoModelForMaskedLM",
    "classification": "AutoModelForSequenceClassification",
    "spans": "AutoModelForQuestionAnswering",
}
ARCHITECTURE = {
    "pretraining": "ModernBertForMaskedLM",
    "classification": "ModernBertForSequenceClassification",
    "spans": "ModernBertForQuestionAnswering",
}


def network(kind: Kind, model: ModernBertConfig = MODEL, outputs: int = 3) -> Any:
    """A network of that kind whose weights are large enough to matter."""
    torch.manual_seed(0)
    made: nn.Module
    if kind == "pretraining":
        made = ModernBertForMaskedLM(model, V)
    else:
        made = Classifier(model, V, outputs) if kind == "classification" else QuestionAnswering(model, V)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name == "mlm.bias":
                parameter[:V].normal_()
            elif parameter.ndim > 1:
                parameter.mul_(8.0)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return made.eval()


@torch.no_grad()
def outputs_of(made: Any, kind: Kind) -> list[Tensor]:
    """What it gives for a batch of three texts, at their tokens only."""
    batch = random_batch(LENGTHS, vocab=V, nsp=False)
    if kind == "pretraining":
        return [made.mlm_logits(made.encoder(batch))[:, :V]]
    logits = made(batch, torch.float32)
    return [logits] if kind == "classification" else [logits[:, :, i][logits[:, :, i].isfinite()] for i in range(2)]


@torch.no_grad()
def theirs(model: Any) -> list[Tensor]:
    """The same of a network of transformers."""
    batch = random_batch(LENGTHS, vocab=V, nsp=False)
    real = padded(torch.ones_like(batch.ids_N), batch)
    out = model.eval()(input_ids=padded(batch.ids_N, batch), attention_mask=real).to_tuple()
    return [part[real.bool()] if part.shape[:2] == real.shape else part for part in out]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder, PIECES, lowercase=True)
    return folder


def assert_equal(ours: list[Tensor], others: list[Tensor]) -> None:
    assert len(ours) == len(others)
    for a, b in zip(ours, others, strict=True):
        assert a.std() > 0.1
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"local_attention": 0},
        {"local_attention": 8, "global_attention_every": 1},
        {"pooling": "cls", "local_attention": 4, "global_attention_every": 3, "intermediate_size": 40},
    ],
    ids=["local", "no window", "all global", "cls"],
)
@pytest.mark.parametrize("kind", ["pretraining", "classification", "spans"])
def test_transformers_loads_an_export_whole_and_gives_the_same_outputs(
    kind: Kind, changes: dict[str, Any], tokenizer_folder: Path, tmp_path: Path
) -> None:
    settings = dataclasses.replace(MODEL, **changes)
    made = network(kind, settings)
    labels = ("no", "yes", "maybe") if kind == "classification" else ()
    export(made.state_dict(), kind, settings, tokenizer_folder, tmp_path / "out", labels)
    model, info = getattr(transformers, AUTO[kind]).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert type(model).__name__ == model.config.architectures[0] == ARCHITECTURE[kind]
    assert_equal(outputs_of(made, kind), theirs(model))
    if kind == "classification":
        assert model.config.id2label == {0: "no", 1: "yes", 2: "maybe"} and model.config.problem_type == "single_label_classification"
    drops = {module.p for module in model.modules() if isinstance(module, nn.Dropout)}
    assert drops == {0.2}
    assert (model.config.pad_token_id, model.config.cls_token_id, model.config.sep_token_id) == (0, 2, 3)
    assert (model.config.bos_token_id, model.config.eos_token_id) == (2, 3)


@pytest.mark.parametrize("kind", ["pretraining", "classification"])
def test_the_bare_encoder_is_loaded_from_any_export(kind: Kind, tokenizer_folder: Path, tmp_path: Path) -> None:
    made = network(kind)
    export(made.state_dict(), kind, MODEL, tokenizer_folder, tmp_path / "out")
    model = transformers.AutoModel.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        hidden = made.encoder(random_batch(LENGTHS, vocab=V, nsp=False))
    assert_equal([hidden], theirs(model))


def test_regression_is_exported_as_one_output(tokenizer_folder: Path, tmp_path: Path) -> None:
    made = network("classification", outputs=1)
    export(made.state_dict(), "classification", MODEL, tokenizer_folder, tmp_path / "out")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.config.problem_type == "regression" and model.config.num_labels == 1
    assert_equal(outputs_of(made, "classification"), theirs(model))


def test_configuration_also_says_what_transformers_4_reads(tokenizer_folder: Path, tmp_path: Path) -> None:
    export(network("spans").state_dict(), "spans", MODEL, tokenizer_folder, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["layer_types"] == ["full_attention", "sliding_attention"] * 2 + ["full_attention"]
    assert config["global_attn_every_n_layers"] == 2 and config["local_attention"] == 8
    assert (config["global_rope_theta"], config["local_rope_theta"]) == (1000.0, 100.0)
    assert config["rope_parameters"]["sliding_attention"] == {"rope_type": "default", "rope_theta": 100.0}
    assert "decoder.weight" not in load_file(tmp_path / "out" / "model.safetensors")


def test_the_exported_tokenizer_gives_our_ids_and_no_segments(tokenizer_folder: Path, tmp_path: Path) -> None:
    export(network("spans").state_dict(), "spans", MODEL, tokenizer_folder, tmp_path / "out")
    ours, other = build_tokenizer(PIECES, True), transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert other.model_max_length == 40 and other.mask_token_id == PIECES.index("[MASK]") and other.pad_token_id == 0
    for a, b in [("Cat, mat.", None), ("a bad cab", "B\u00e9 \u4e2d zz"), ("", "cat"), ("a [MASK] cat", "ok"), ("a" * 101, None)]:
        given = other(a, b)
        assert given["input_ids"] == ours.encode(a, b).ids and set(given) == {"input_ids", "attention_mask"}, (a, b)


def test_the_pipelines_of_transformers_answer_as_we_do(tokenizer_folder: Path, tmp_path: Path) -> None:
    tokenizer = build_tokenizer(PIECES, True)
    for kind in ("pretraining", "classification"):
        export(
            network(kind).state_dict(),
            kind,
            MODEL,
            tokenizer_folder,
            tmp_path / kind,
            ("no", "yes", "maybe")[: 3 * (kind != "pretraining")],
        )
    ids = tokenizer.encode("a [MASK] cat.").ids
    batch = dataclasses.replace(random_batch([len(ids)], nsp=False), ids_N=torch.tensor(ids))
    with torch.no_grad():
        filler, classifier = network("pretraining"), network("classification")
        at = ids.index(PIECES.index("[MASK]"))
        words = torch.softmax(filler.mlm_logits(filler.encoder(batch))[at, :V], -1).topk(3)
        shares = torch.softmax(classifier(batch, torch.float32)[0], -1)
    fills = transformers.pipeline("fill-mask", str(tmp_path / "pretraining"), device="cpu")("a [MASK] cat.", top_k=3)
    assert [fill["token"] for fill in fills] == words.indices.tolist()
    assert [fill["score"] for fill in fills] == pytest.approx(words.values.tolist(), rel=1e-5)
    answers = transformers.pipeline("text-classification", str(tmp_path / "classification"), device="cpu")("a [MASK] cat.", top_k=None)
    found = {answer["label"]: answer["score"] for answer in answers}
    assert found == pytest.approx(dict(zip(("no", "yes", "maybe"), shares.tolist(), strict=True)), rel=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        MODEL,
        dataclasses.replace(MODEL, local_attention=0, global_attention_every=3, dropout=0.0),
        dataclasses.replace(MODEL, num_layers=2, global_attention_every=3, intermediate_size=48, pooling="cls"),
        dataclasses.replace(MODEL, num_layers=1),
    ],
    ids=["local", "no window", "few layers", "one layer"],
)
@pytest.mark.parametrize("kind", ["pretraining", "classification", "spans"])
def test_import_undoes_export_bit_for_bit(kind: Kind, settings: ModernBertConfig, tokenizer_folder: Path, tmp_path: Path) -> None:
    state = network(kind, settings).state_dict()
    export(state, kind, settings, tokenizer_folder, tmp_path / "out")
    back, model, vocab_size = load_pretrained(tmp_path / "out")
    expected: EncoderConfig = (
        settings if settings.num_layers > 1 else dataclasses.replace(settings, local_attention=0, global_attention_every=3)
    )
    assert vocab_size == V and model == expected
    assert set(back) == set(state) and all(torch.equal(back[name], state[name]) for name in state)
    assert {name: tensor.shape for name, tensor in to_huggingface(back, kind, V).items()} == {
        name: tensor.shape for name, tensor in to_huggingface(state, kind, V).items()
    }


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("ModernBertModel", set()),
        ("ModernBertForMaskedLM", {"mlm"}),
        ("ModernBertForSequenceClassification", {"pooler", "head"}),
        ("ModernBertForQuestionAnswering", {"pooler", "head"}),
    ],
)
def test_what_transformers_saved_is_read_whole(name: str, heads: set[str], tmp_path: Path) -> None:
    config = transformers.ModernBertConfig(
        vocab_size=70, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=48, pad_token_id=0
    )
    other = getattr(transformers, name)(config)
    other.save_pretrained(tmp_path)
    state, model, vocab_size = load_pretrained(tmp_path)
    # The settings are those of the published ModernBERT.
    assert model == ModernBertConfig(
        num_layers=4,
        hidden_size=32,
        num_heads=2,
        intermediate_size=48,
        max_position_embeddings=8192,
        local_attention=128,
        rope_theta=160_000.0,
        pooling="cls",
    )
    assert vocab_size == 70 and state["encoder.word.weight"].shape == (128, 32)
    assert {part for part in ("pooler", "mlm", "head") if any(n.startswith(f"{part}.") for n in state)} == heads
    if name == "ModernBertForMaskedLM":
        back = to_huggingface(state, "pretraining", 70)
        assert set(back) == set(other.state_dict())
        assert all(torch.equal(back[key], tensor) for key, tensor in other.state_dict().items())


def test_a_configuration_of_transformers_4_is_read(tokenizer_folder: Path, tmp_path: Path) -> None:
    state = network("pretraining").state_dict()
    export(state, "pretraining", MODEL, tokenizer_folder, tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    for key in ("layer_types", "rope_parameters"):
        del config[key]
    path.write_text(json.dumps(config))
    assert load_pretrained(tmp_path / "out")[1] == MODEL


ROPE = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, r"attention_bias = True; only False"),
        ({"mlp_bias": True}, r"mlp_bias = True; only False"),
        ({"norm_bias": True}, r"norm_bias = True; only False"),
        ({"classifier_bias": True}, r"classifier_bias = True; only False"),
        ({"decoder_bias": False}, r"decoder_bias = False; only True"),
        ({"tie_word_embeddings": False}, r"tie_word_embeddings = False; only True"),
        ({"hidden_activation": "silu"}, r"hidden_activation = 'silu'; only 'gelu'"),
        ({"classifier_activation": "relu"}, r"classifier_activation = 'relu'; only 'gelu'"),
        ({"norm_eps": 1e-6}, r"norm_eps = 1e-06; only 1e-05"),
        ({"classifier_pooling": "max"}, r"classifier_pooling = 'max'; only 'mean' and 'cls'"),
        ({"mlp_dropout": 0.5}, r"embedding_dropout = 0\.2; only the value of mlp_dropout, 0\.5, can be read"),
        ({"mlp_dropout": "much"}, r"mlp_dropout = 'much': must be a number from 0 to below 1"),
        (
            {"rope_parameters": {**ROPE, "full_attention": {"rope_type": "yarn", "factor": 4.0}}},
            r"rope_parameters = .*only the rope_type 'default'",
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, r"rope_parameters = .*only the rope_type 'default'"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": -1}}},
            r"global_rope_theta .* = -1: must be a number above 0",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, r"rope_scaling = .*not scaled"),
        ({"layer_types": ["sliding_attention"] * 5}, r"layer_types = .*only a full_attention after every so many layers"),
        ({"layer_types": ["full_attention"] * 4}, r"layer_types = .*only a full_attention after every so many layers"),
        ({"local_attention": 7}, r"local_attention = 7: must be even"),
        ({"local_attention": None}, r"local_attention = None: must be a whole number"),
        ({"num_attention_heads": 5}, r"num_attention_heads = 5: must divide hidden_size = 32"),
        ({"num_attention_heads": 32}, r"num_attention_heads = 32: leaves heads of odd size"),
        ({"num_hidden_layers": 4, "layer_types": None}, r"does not fit .*: 5 layers where 4 belong"),
        ({"intermediate_size": 90}, r"encoder\.layers\.0\.up\.weight \(128, 32\) where \(180, 32\) belongs"),
        ({"vocab_size": 300}, r"encoder\.word\.weight has 29 rows where the vocabulary has 300 tokens"),
        ({"model_type": "modernbert-decoder"}, r"model_type = 'modernbert-decoder'; only 'bert' and 'modernbert' can be read"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_configuration_of_what_we_do_not_have_is_refused_by_its_key(
    changes: dict[str, Any], message: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    export(network("pretraining").state_dict(), "pretraining", MODEL, tokenizer_folder, tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(DataError, match=message):
        load_pretrained(tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("lacks", r"tensor model\.layers\.1\.mlp\.Wo\.weight is missing"),
        ("bias", r"1 tensors are not of a ModernBERT encoder, such as model\.layers\.0\.attn\.Wo\.bias"),
        ("first norm", r"such as model\.layers\.0\.attn_norm\.weight"),
        ("untied", r"decoder\.weight: differs from model\.embeddings\.tok_embeddings\.weight"),
    ],
)
def test_tensors_that_do_not_belong_are_refused(change: str, message: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    export(network("pretraining").state_dict(), "pretraining", MODEL, tokenizer_folder, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    if change == "lacks":
        del tensors["model.layers.1.mlp.Wo.weight"]
    elif change == "bias":
        tensors["model.layers.0.attn.Wo.bias"] = torch.zeros(32)
    elif change == "first norm":
        tensors["model.layers.0.attn_norm.weight"] = torch.ones(32)
    else:
        tensors["decoder.weight"] = tensors["model.embeddings.tok_embeddings.weight"] + 1
    save_file(tensors, file)
    with pytest.raises(DataError, match=message):
        load_pretrained(tmp_path / "out")
