"""Export that transformers loads with the same outputs, import that undoes it, and folders that cannot be read.

Shapes: B sequences, T positions, D width, H heads, E = D / H.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from overnight.config import BertConfig, Model
from overnight.corpus.tokenizer import build_tokenizer, save_tokenizer
from overnight.errors import DataError, UserError
from overnight.interop.bert_layout import import_tensors
from overnight.interop.huggingface import Kind, export, load_pretrained, to_huggingface
from overnight.interop.layout import with_padded_vocabulary

transformers = pytest.importorskip("transformers")

SIZES = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "max_position_embeddings": 40}
MODEL = BertConfig(**SIZES, dropout=0.2, attention_dropout=0.1)
PIECES = [
    *["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
    *"abcdefghijklmnop",
    *(f"##{c}" for c in "abcdefghijklmnop"),
    "cat",
    "mat",
    ",",
    "!",
    "A",
    "é",
    "中",
]
V = len(PIECES)
KINDS: tuple[Kind, ...] = ("pretraining", "classification", "spans")
CLASSES = {
    "pretraining": transformers.AutoModelForPreTraining,
    "classification": transformers.AutoModelForSequenceClassification,
    "spans": transformers.AutoModelForQuestionAnswering,
}


def _state(kind: str, model: Model = MODEL, vocab_size: int = V, outputs: int = 3) -> dict[str, Tensor]:
    """Random parameters under our names; the names are the format, so they are written out."""
    torch.manual_seed(0)
    padded, width, inner = -(-vocab_size // 64) * 64, model.hidden_size, model.intermediate_size or 4 * model.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "encoder.word.weight": (padded, width),
        "encoder.position.weight": (model.max_position_embeddings, width),
        "encoder.segment.weight": (2, width),
    }

    def add(name: str, *shape: int) -> None:
        shapes.update({f"{name}.weight": shape, f"{name}.bias": shape[:1]})

    add("encoder.norm", width)
    for i in range(model.num_layers):
        add(f"encoder.layers.{i}.qkv", 3 * width, width)
        add(f"encoder.layers.{i}.out", width, width)
        add(f"encoder.layers.{i}.norm1", width)
        add(f"encoder.layers.{i}.up", inner, width)
        add(f"encoder.layers.{i}.down", width, inner)
        add(f"encoder.layers.{i}.norm2", width)
    if kind != "spans":
        add("pooler", width, width)
    if kind == "pretraining":
        add("mlm.dense", width, width)
        add("mlm.norm", width)
        add("nsp", 2, width)
        shapes["mlm.bias"] = (padded,)
    else:
        add("head", 2 if kind == "spans" else outputs, width)
    state = {name: torch.randn(shape) * 0.3 for name, shape in shapes.items()}
    state["encoder.word.weight"][vocab_size:] = 0.0
    if kind == "pretraining":
        state["mlm.bias"][vocab_size:] = 0.0
    return state


def _forward(state: dict[str, Tensor], kind: str, ids_BT: Tensor, segments_BT: Tensor, mask_BT: Tensor, heads: int) -> list[Tensor]:
    """BERT as the paper has it, straight from our parameters."""

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"], 1e-12)

    B, T = ids_BT.shape
    x = state["encoder.word.weight"][ids_BT] + state["encoder.position.weight"][:T] + state["encoder.segment.weight"][segments_BT]
    x = norm("encoder.norm", x)
    for i in range(sum(name.endswith("qkv.bias") for name in state)):
        layer = f"encoder.layers.{i}"
        q, k, v = (part.view(B, T, heads, -1).transpose(1, 2) for part in linear(f"{layer}.qkv", x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + torch.where(mask_BT, 0.0, -torch.inf)[:, None, None]
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, -1)
        x = norm(f"{layer}.norm1", x + linear(f"{layer}.out", mixed))
        x = norm(f"{layer}.norm2", x + linear(f"{layer}.down", F.gelu(linear(f"{layer}.up", x))))
    if kind == "spans":
        return list(linear("head", x).unbind(-1))
    pooled = torch.tanh(linear("pooler", x[:, 0]))
    if kind == "classification":
        return [linear("head", pooled)]
    hidden = norm("mlm.norm", F.gelu(linear("mlm.dense", x)))
    return [F.linear(hidden, state["encoder.word.weight"], state["mlm.bias"])[..., :V], linear("nsp", pooled)]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder, PIECES, lowercase=True)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_an_export_whole_and_computes_what_our_parameters_mean(
    kind: Kind, tokenizer_folder: Path, tmp_path: Path
) -> None:
    state = _state(kind)
    labels = ("no", "yes", "maybe") if kind == "classification" else ()
    export(state, kind, MODEL, tokenizer_folder, tmp_path / "out", labels)
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt",
    ]  # fmt: skip
    assert [f.name for f in tmp_path.iterdir()] == ["out"]
    model, info = CLASSES[kind].from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert type(model).__name__ == model.config.architectures[0]
    assert model.config.vocab_size == V and model.config.intermediate_size == 48
    assert (model.config.hidden_dropout_prob, model.config.attention_probs_dropout_prob) == (0.2, 0.1)
    if kind == "classification":
        assert model.config.id2label == {0: "no", 1: "yes", 2: "maybe"}
    ids = torch.randint(5, V, (3, 17))
    segments = (torch.arange(17) > 8).long().expand(3, -1)
    mask = torch.arange(17) < torch.tensor([17, 11, 4])[:, None]
    with torch.no_grad():
        theirs = model.eval()(input_ids=ids, token_type_ids=segments, attention_mask=mask.long()).to_tuple()
    ours = _forward(state, kind, ids, segments, mask, MODEL.num_heads)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        if a.shape[:2] == ids.shape:  # at padding both compute something, and nobody reads it
            a, b = a[mask], b[mask]
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_the_names_are_those_of_our_model() -> None:
    from overnight.models.bert import BertForPretraining

    ours = BertForPretraining(MODEL, V).state_dict()
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in _state("pretraining").items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_loads_strictly_into_transformers_modules(kind: Kind) -> None:
    config = transformers.BertConfig(
        vocab_size=V,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=40,
        num_labels=3,
    )
    heads = {"pretraining": "BertForPreTraining", "classification": "BertForSequenceClassification", "spans": "BertForQuestionAnswering"}
    if kind == "spans":
        config.num_labels = 2
    module = getattr(transformers, heads[kind])(config)
    buffers = {name for name, _ in module.named_buffers()}
    result = module.load_state_dict(to_huggingface(_state(kind), kind, V), strict=False)
    assert not result.unexpected_keys and not set(result.missing_keys) - buffers


@settings(max_examples=15)
@given(st.sampled_from(KINDS), st.integers(1, 3), st.sampled_from([(8, 2), (12, 3)]), st.integers(5, 140), st.integers(1, 4))
def test_import_undoes_export(kind: Kind, layers: int, size: tuple[int, int], vocab_size: int, outputs: int) -> None:
    model = BertConfig(num_layers=layers, hidden_size=size[0], num_heads=size[1], max_position_embeddings=8)
    state = _state(kind, model, vocab_size, outputs)
    there = to_huggingface(state, kind, vocab_size)
    assert len(there["bert.embeddings.word_embeddings.weight"]) == vocab_size
    back = with_padded_vocabulary(import_tensors(there), vocab_size)
    assert set(back) == set(state) and all(torch.equal(back[name], state[name]) for name in state)


@pytest.mark.parametrize("lowercase", [True, False])
def test_the_exported_tokenizer_gives_the_same_ids_and_segments(lowercase: bool, tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "data", PIECES, lowercase)
    export(_state("spans"), "spans", MODEL, tmp_path / "data", tmp_path / "out")
    ours, theirs = build_tokenizer(PIECES, lowercase), transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.model_max_length == 40 and theirs.mask_token_id == PIECES.index("[MASK]")
    for a, b in [
        ("Cat, mat!", None),
        ("A cafe\u0301 É 中文 zz", "bad cab\u2028deal"),
        ("", "cat"),
        ("a [MASK] cat", "ok"),
        ("a" * 101, None),
    ]:
        mine, other = ours.encode(a, b), theirs(a, b)
        assert (other["input_ids"], other["token_type_ids"]) == (mine.ids, mine.type_ids), (a, b)
    assert (tmp_path / "out" / "vocab.txt").read_bytes() == (tmp_path / "data" / "vocab.txt").read_bytes()


def test_a_tokenizer_that_bert_cannot_rebuild_is_exported_as_it_is(tmp_path: Path) -> None:
    from tokenizers import normalizers

    tokenizer = build_tokenizer(PIECES, True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace("mat", "cat"), normalizers.Lowercase()])
    tokenizer.enable_truncation(3)
    (tmp_path / "tokenizer.json").write_text(json.dumps({**json.loads(tokenizer.to_str()), "post_processor": None}))
    export(_state("spans"), "spans", MODEL, tmp_path, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("mat cat", "cat")["input_ids"] == [2, *[PIECES.index("cat")] * 2, 3, PIECES.index("cat"), 3]
    assert theirs("mat cat", "cat")["token_type_ids"] == [0, 0, 0, 0, 1, 1]


def test_regression_is_exported_as_one_output(tokenizer_folder: Path, tmp_path: Path) -> None:
    export(_state("classification", outputs=1), "classification", MODEL, tokenizer_folder, tmp_path / "out")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.config.problem_type == "regression" and model.config.num_labels == 1


@pytest.mark.parametrize(
    "name", ["BertForPreTraining", "BertForMaskedLM", "BertModel", "BertForSequenceClassification", "BertForQuestionAnswering"]
)
def test_what_transformers_saved_is_read_whole(name: str, tmp_path: Path) -> None:
    config = transformers.BertConfig(vocab_size=70, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    theirs = getattr(transformers, name)(config)
    theirs.save_pretrained(tmp_path)
    state, model, vocab_size = load_pretrained(tmp_path)
    assert vocab_size == 70 and model == BertConfig(num_layers=2, hidden_size=16, num_heads=2)
    assert state["encoder.word.weight"].shape == (128, 16)
    has = {part for part in ("pooler", "mlm", "nsp", "head") if any(n.startswith(f"{part}.") for n in state)}
    wanted = {
        "BertForPreTraining": {"pooler", "mlm", "nsp"},
        "BertForMaskedLM": {"mlm"},
        "BertModel": {"pooler"},
        "BertForSequenceClassification": {"pooler", "head"},
        "BertForQuestionAnswering": {"head"},
    }
    assert has == wanted[name]
    if name == "BertForPreTraining":
        back = to_huggingface(state, "pretraining", 70)
        for key, tensor in theirs.state_dict().items():
            if not key.endswith("position_ids"):
                assert torch.equal(back[key], tensor), key


def test_names_of_older_files_are_understood(tokenizer_folder: Path, tmp_path: Path) -> None:
    state = _state("pretraining")
    export(state, "pretraining", MODEL, tokenizer_folder, tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    tensors = {
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t for n, t in load_file(file).items()
    }
    save_file({**tensors, "bert.embeddings.position_ids": torch.arange(40)[None]}, file)
    read, model, vocab_size = load_pretrained(tmp_path / "out")
    assert (model, vocab_size) == (MODEL, V) and set(read) == set(state) and all(torch.equal(read[n], state[n]) for n in state)


def _bad(folder: Path, what: str) -> None:
    config_file, weights = folder / "config.json", folder / "model.safetensors"
    config: dict[str, Any] = json.loads(config_file.read_text())
    instead = {"pickle": ".bin", "shards": ".safetensors.index.json", "shards of PyTorch": ".bin.index.json", "nothing": ".h5"}
    if what in instead:
        weights.unlink()
        (folder / f"{'model' if 'safetensors' in instead[what] else 'pytorch_model'}{instead[what]}").write_bytes(b"x")
    elif what == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif what == "no config":
        config_file.unlink()
    elif what == "broken config":
        config_file.write_text(config_file.read_text()[:-5])
    elif what in ("lacks", "more", "untied"):
        tensors = load_file(weights)
        if what == "lacks":
            del tensors["bert.encoder.layer.1.output.dense.bias"]
        elif what == "more":
            tensors["lm_head.weight"] = torch.zeros(2)
        else:
            tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"] + 1
        save_file(tensors, weights)
    else:
        key, value = what.split("=")
        config[key] = json.loads(value)
        config_file.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("pickle", r"pytorch_model\.bin: .*pickle of more than tensors, which can run code.*Open it where you trust it"),
        ("shards", r"has no model\.safetensors; it is split into several files"),
        ("shards of PyTorch", r"has no model\.safetensors; it is split into several files"),
        ("nothing", r"has no model\.safetensors; name a folder"),
        ("cut", r"model\.safetensors: cannot be read: .*damaged or cut short"),
        ("no config", r"config\.json: cannot be read"),
        ("broken config", r"config\.json: is not JSON"),
        ("lacks", r"tensor bert\.encoder\.layer\.1\.output\.dense\.bias is missing"),
        ("more", r"1 tensors are not of a BERT encoder, such as lm_head\.weight"),
        ("untied", r"cls\.predictions\.decoder\.weight: differs from bert\.embeddings\.word_embeddings\.weight"),
        ('model_type="roberta"', r"model_type = 'roberta'; only 'bert'"),
        ('hidden_act="relu"', r"hidden_act = 'relu'; only 'gelu'"),
        ("layer_norm_eps=1e-5", r"layer_norm_eps = 1e-05; only 1e-12"),
        ("num_hidden_layers=3", r"does not fit .*config\.json: 2 layers where 3 belong"),
        ("num_hidden_layers=1", r"does not fit .*config\.json: 2 layers where 1 belong"),
        ("vocab_size=300", r"encoder\.word\.weight has \d+ rows where the vocabulary has 300 tokens"),
        ("hidden_size=0", r"hidden_size = 0: must be a whole number of 1 or more"),
        ("num_attention_heads=5", r"num_attention_heads = 5: must divide hidden_size = 32"),
    ],
)
def test_a_folder_that_cannot_be_read_is_refused_with_its_reason(what: str, message: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    export(_state("pretraining"), "pretraining", MODEL, tokenizer_folder, tmp_path / "out")
    _bad(tmp_path / "out", what)
    with pytest.raises(DataError, match=message):
        load_pretrained(tmp_path / "out")


def test_an_export_replaces_an_earlier_one_and_nothing_else(tokenizer_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(_state("spans"), "spans", MODEL, tokenizer_folder, out)
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "left by a killed export").write_text("")
    export(_state("pretraining"), "pretraining", MODEL, tokenizer_folder, out)
    assert json.loads((out / "config.json").read_text())["architectures"] == ["BertForPreTraining"]
    assert [f.name for f in tmp_path.iterdir()] == ["out"]
    (out / "thesis.txt").write_text("mine")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "README.md").write_text("mine")
    for folder, file in ((out, "thesis.txt"), (tmp_path / "own", "README.md")):
        with pytest.raises(UserError, match=f"{folder.name}: exists and holds '{file}', which no export wrote"):
            export(_state("spans"), "spans", MODEL, tokenizer_folder, folder)
        assert (folder / file).read_text() == "mine"


def test_every_exported_file_may_be_read_by_whom_the_umask_allows(tokenizer_folder: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        export(_state("pretraining"), "pretraining", MODEL, tokenizer_folder, tmp_path / "out")
    finally:
        os.umask(before)
    modes = {file.name: oct(file.stat().st_mode & 0o777) for file in (tmp_path / "out").iterdir()}
    assert modes and set(modes.values()) == {"0o640"}, modes


@pytest.mark.parametrize("limit", [2_000, 30_000])
def test_an_export_that_runs_out_of_space_leaves_the_earlier_one(limit: int, tokenizer_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(_state("spans"), "spans", MODEL, tokenizer_folder, out)
    before = {f.name: f.read_bytes() for f in out.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(UserError, match=r"out: cannot be written"):
            export(_state("pretraining"), "pretraining", MODEL, tokenizer_folder, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {f.name: f.read_bytes() for f in out.iterdir()} == before
    assert [f.name for f in tmp_path.iterdir()] == ["out"]


def test_a_tokenizer_that_is_not_berts_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    with pytest.raises(DataError, match=r"tokenizer\.json: cannot be read"):
        export(_state("spans"), "spans", MODEL, tmp_path, tmp_path / "out")
    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="is a BPE tokenizer; only WordPiece"):
        export(_state("spans"), "spans", MODEL, tmp_path, tmp_path / "out")
    Tokenizer(models.WordPiece({"[PAD]": 0, "a": 1}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"lacks the special token \[UNK\]"):
        export(_state("spans"), "spans", MODEL, tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_exporting_needs_no_transformers(tokenizer_folder: Path, tmp_path: Path) -> None:
    save_file(_state("spans"), tmp_path / "state.safetensors")
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from pathlib import Path; from safetensors.torch import load_file\n"
        "from overnight.config import BertConfig; from overnight.interop.huggingface import export, load_pretrained\n"
        "model = BertConfig(num_layers=2, hidden_size=32, num_heads=4, intermediate_size=48, max_position_embeddings=40)\n"
        f"export(load_file({str(tmp_path / 'state.safetensors')!r}), 'spans', model, Path({str(tokenizer_folder)!r}), Path({str(tmp_path / 'out')!r}))\n"
        f"load_pretrained(Path({str(tmp_path / 'out')!r}))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
    assert (tmp_path / "out" / "model.safetensors").is_file()
