"""Features are those of the equations, whatever is read beside a text, in the order given; texts come out of every kind of file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.byte_lm import features as module
from overnight.byte_lm.features import extract_features, features_file, read_texts, write_features
from overnight.config import CausalLMConfig
from overnight.corpus.bytes import document_bytes
from overnight.errors import ConfigError, DataError
from overnight.interop.byte_models import import_byte_model, load_byte_model
from overnight.models.bytes import ByteModel, byte_model
from tests.interop.byte_formula import Arrays, random_arrays, read, write_openai

WIDTH = 24


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    return random_arrays(WIDTH, 6)


@pytest.fixture(scope="module")
def model(arrays: Arrays, tmp_path_factory: pytest.TempPathFactory) -> ByteModel:
    folder = tmp_path_factory.mktemp("model")
    import_byte_model(write_openai(folder / "openai", arrays), folder / "ours")
    return load_byte_model(folder / "ours")[0]


def expected(arrays: Arrays, document: bytes) -> dict[str, np.ndarray]:
    cells, hidden, _ = read(arrays, document, "ifog")
    return {"cell": cells[-1], "hidden": hidden[-1], "mean": hidden.mean(0)}


@pytest.mark.parametrize("features", ["cell", "hidden", "mean", "cell+hidden", "cell+mean", "cell+hidden+mean"])
def test_features_are_those_of_the_equations_in_the_order_given(features: str, model: ByteModel, arrays: Arrays) -> None:
    documents = [document_bytes(text) for text in ("long " * 40, "", "short", "Zoë — naïve", "short", "x")]
    found = extract_features(model, documents, features)
    assert found.dtype == np.float32 and found.shape == (6, WIDTH * len(features.split("+")))
    for row, document in zip(found, documents, strict=True):
        parts = expected(arrays, document)
        np.testing.assert_allclose(row, np.concatenate([parts[part] for part in features.split("+")]), atol=5e-5)


@settings(max_examples=15)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12), window=st.integers(1, 16), together=st.integers(1, 5))
def test_neither_the_window_nor_the_neighbors_change_a_text(lengths: list[int], window: int, together: int, model: ByteModel) -> None:
    chance = np.random.default_rng(sum(lengths))
    documents = [chance.integers(0, 256, n, np.uint8).tobytes() for n in lengths]
    whole = np.concatenate([extract_features(model, [document], "cell+hidden+mean") for document in documents])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_WINDOW", window)
        patch.setattr(module, "_TEXTS", together)
        np.testing.assert_allclose(extract_features(model, documents, "cell+hidden+mean"), whole, atol=1e-4)


def test_16_bits_come_close_and_memory_bounds_the_window(model: ByteModel, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [document_bytes("a film " * n) for n in range(1, 9)]
    exact = extract_features(model, documents)
    np.testing.assert_allclose(extract_features(model, documents, dtype=torch.bfloat16), exact, atol=0.05)
    sizes = []
    real = model.hidden
    monkeypatch.setattr(module, "_STATES", WIDTH * 8 * 5)
    monkeypatch.setattr(model, "hidden", lambda ids, state, dtype: (sizes.append(ids.shape), real(ids, state, dtype))[1])
    np.testing.assert_allclose(extract_features(model, documents), exact, atol=1e-4)
    assert max(rows * steps for rows, steps in sizes) <= 40


def test_little_is_read_that_is_no_text(model: ByteModel, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = np.random.default_rng(0)
    documents = [b"x" * int(n) for n in chance.integers(3, 250, 2000)]
    read_bytes = 0
    real = model.hidden

    def counted(ids: torch.Tensor, state: torch.Tensor, dtype: torch.dtype) -> object:
        nonlocal read_bytes
        read_bytes += ids.numel()
        return real(ids, state, dtype)

    monkeypatch.setattr(model, "hidden", counted)
    extract_features(model, documents)
    assert read_bytes < 1.1 * sum(map(len, documents))


def test_a_transformer_has_no_features() -> None:
    model = byte_model(CausalLMConfig(num_layers=1, hidden_size=16, num_heads=2))
    with pytest.raises(ConfigError, match="a Transformer has none"):
        extract_features(model, [b"x"])


FILES = {
    "a.csv": 'label,text\n1,"one, two"\n0,three\n',
    "a.tsv": "text\tlabel\none, two\t1\nthree\t0\n",
    "a.jsonl": '{"text": "one, two"}\n\n{"text": "three", "more": [1]}\n',
    "lines.json": '{"text": "one, two"}\n{"text": "three"}\n',
    "list.json": '["one, two", {"text": "three"}]',
    "a.txt": "one, two\nthree\n",
    "README": "one, two\r\nthree",
}


@pytest.mark.parametrize("name", FILES)
def test_texts_come_out_of_every_kind_of_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(FILES[name])
    assert read_texts(str(tmp_path / name)) == ["one, two", "three"]


def test_one_json_object_is_one_line_and_an_empty_line_of_text_is_a_text(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"text": "one"}')
    assert read_texts(str(tmp_path / "a.json")) == ["one"]
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert read_texts(str(tmp_path / "a.txt")) == ["one", "", "two"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "label,sentence\n1,x\n", r"a\.csv:2: has no 'text' \(it has label, sentence\); name the texts with --field"),
        ("a.jsonl", '{"text": "x"}\n{"body": "y"}\n', r"a\.jsonl:2: has no 'text' \(it has body\)"),
        ("a.json", '["x", 3]', r"a\.json: entry 1: is neither a text nor an object"),
        ("a.json", "[]", r"a\.json: is not a list of texts"),
        ("a.json", "[", r"a\.json:1: is not JSON"),
        ("a.txt", "", r"a\.txt: holds no lines"),
    ],
)
def test_a_file_without_the_texts_is_refused(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=said):
        read_texts(str(tmp_path / name))


def test_features_are_written_as_an_array_that_numpy_reads(tmp_path: Path) -> None:
    features = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    write_features(features_file(str(tmp_path / "sub" / "f.npy")), features[:, ::2])
    found = np.load(tmp_path / "sub" / "f.npy", allow_pickle=False)
    assert found.dtype == np.float32 and np.array_equal(found, features[:, ::2])
    assert json.dumps(sorted(p.name for p in (tmp_path / "sub").iterdir())) == '["f.npy"]'
    with pytest.raises(ConfigError, match=r"give the file that ending"):
        features_file("f.csv")
