"""TensorFlow's checkpoints: every tensor as it was written, every fault by its name, and Google's BERT computed as transformers does."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overnight.batches.packing import Batch
from overnight.errors import DataError
from overnight.interop import tensorflow
from overnight.interop.crc32c import _BLOCK, _FEW, crc32c, masked_crc32c
from overnight.interop.sources import read_source
from overnight.interop.tensorflow import read_bundle
from overnight.models.bert import first_tokens
from overnight.models.encoders import masked_lm
from tests.interop import bundle


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"", 0),
    ],
)
def test_crc32c_is_that_of_rfc_3720(data: bytes, crc: int) -> None:
    assert crc32c(data) == bundle.crc32c(data) == crc
    assert masked_crc32c(data) == bundle.masked(data)


def test_crc32c_of_long_data_is_that_of_its_bytes_one_after_another() -> None:
    def appended(crc: int, more: bytes) -> int:
        """CRC of data that had one before, with more behind it."""
        register = crc ^ 0xFFFFFFFF
        for byte in more:
            register ^= byte
            for _ in range(8):
                register = (register >> 1) ^ (0x82F63B78 if register & 1 else 0)
        return register ^ 0xFFFFFFFF

    data = np.random.default_rng(0).bytes(2 * _BLOCK + _FEW + 3)
    assert crc32c(data[: _FEW + 3]) == bundle.crc32c(data[: _FEW + 3])
    # Each boundary between one way of reading and the next.
    for length in (_FEW - 1, _FEW, _BLOCK - 1, _BLOCK, _BLOCK + 1, _BLOCK + _FEW, 2 * _BLOCK, 2 * _BLOCK + _FEW):
        assert crc32c(data[: length + 3]) == appended(crc32c(data[:length]), data[length : length + 3]), length


@settings(max_examples=25)
@given(st.dictionaries(st.text(min_size=1), st.lists(st.integers(0, 4), max_size=3), max_size=12), st.integers(1, 5))
def test_a_bundle_gives_back_what_was_written(shapes: dict[str, list[int]], per_block: int) -> None:
    random = np.random.default_rng(0)
    tensors = {name: random.standard_normal(shape).astype("<f4") for name, shape in shapes.items()}
    with tempfile.TemporaryDirectory() as folder:
        bundle.write_bundle(Path(folder) / "x.ckpt", tensors, per_block=per_block)
        found = read_bundle(Path(folder) / "x.ckpt", lambda name: True)
        assert found.keys() == tensors.keys()
        assert all(np.array_equal(found[name].numpy(), tensors[name]) and found[name].shape == tensors[name].shape for name in tensors)


def test_other_floating_point_types_become_fp32(tmp_path: Path) -> None:
    values = np.array([1.5, -0.25, 3.0])
    tensors = {
        "half": values.astype("<f2"),
        "double": values.astype("<f8"),
        "upper": (values.astype("<f4").view("<u4") >> 16).astype("<u2"),
    }
    bundle.write_bundle(tmp_path / "x", tensors, {"half": 19, "double": 2, "upper": 14})
    for name, tensor in read_bundle(tmp_path / "x", lambda name: True).items():
        assert tensor.dtype == torch.float32 and tensor.tolist() == values.tolist(), name


def _spoil(prefix: Path, what: str) -> None:
    index, data = prefix.with_name("x.index"), prefix.with_name("x.data-00000-of-00001")
    if what == "no data":
        data.unlink()
    elif what == "cut data":
        data.write_bytes(data.read_bytes()[:-1])
    elif what == "flipped data":
        raw = bytearray(data.read_bytes())
        raw[5] ^= 1
        data.write_bytes(raw)
    elif what == "cut index":
        index.write_bytes(index.read_bytes()[:-1])
    elif what == "flipped index":
        raw = bytearray(index.read_bytes())
        raw[12] ^= 1
        index.write_bytes(raw)
    elif what == "empty":
        index.write_bytes(b"")
    elif what == "integers":
        bundle.write_bundle(prefix, {"a": np.zeros(2, "<i8")}, {"a": 9})
    elif what == "compressed":
        bundle.write_bundle(prefix, {"a": np.zeros(2, "<f4")}, compression=1)
    elif what == "wrong shape":
        bundle.write_bundle(prefix, {"a": np.zeros(3, "<f2")})


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no data", r"x\.data-00000-of-00001: cannot be read: No such file.*belongs to the \.index"),
        ("cut data", r"is cut short: it has 31 bytes, and tensor b ends at 32; copy it again"),
        ("flipped data", r"tensor a is damaged: its checksum differs"),
        ("cut index", r"x\.index: is damaged .*cut short"),
        ("flipped index", r"x\.index: is damaged .*checksum of the block at byte 0 differs"),
        ("empty", r"x\.index: is damaged"),
        ("integers", r"tensor a has the type number 9 of TensorFlow; only whole tensors"),
        ("compressed", r"its blocks are compressed"),
        ("wrong shape", r"tensor a of shape \(3,\) has 6 bytes"),
    ],
)
def test_a_damaged_bundle_is_refused_by_its_fault(what: str, message: str, tmp_path: Path) -> None:
    bundle.write_bundle(tmp_path / "x", {"a": np.arange(4, dtype="<f4"), "b": np.ones((2, 2), "<f4")})
    _spoil(tmp_path / "x", what)
    with pytest.raises(DataError, match=message):
        read_bundle(tmp_path / "x", lambda name: True)


class _AnyChecksum:
    """Equal to whatever a file says."""

    def __ne__(self, other: object) -> bool:
        return False


@settings(max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_an_index_with_changed_bytes_and_right_checksums_is_read_or_refused(changes: list[tuple[int, int]]) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorflow, "masked_crc32c", lambda data: _AnyChecksum())
        folder = Path(name)
        bundle.write_bundle(folder / "x", {"a": np.arange(4, dtype="<f4"), "bc": np.ones((2, 2), "<f4")})
        raw = bytearray((folder / "x.index").read_bytes())
        for place, value in changes:
            raw[place % len(raw)] = value
        (folder / "x.index").write_bytes(raw)
        with contextlib.suppress(DataError):
            assert all(tensor.dtype == torch.float32 for tensor in read_bundle(folder / "x", lambda name: True).values())


def _transformers_of(folder: Path) -> Any:
    """The same weights in transformers, module by module as Google's code names them, without ours."""
    transformers = pytest.importorskip("transformers")
    tf = {
        name: tensor.numpy()
        for name, tensor in read_bundle(folder / "bert_model.ckpt", lambda name: "adam" not in name and "/" in name).items()
    }
    model = transformers.BertForPreTraining(transformers.BertConfig(**json.loads((folder / "bert_config.json").read_text())))

    def put(module: Any, name: str, kind: str = "dense") -> None:
        weight, bias = {"dense": ("kernel", "bias"), "norm": ("gamma", "beta"), "output": ("output_weights", "output_bias")}[kind]
        value = tf.pop(f"{name}/{weight}")
        module.weight.data = torch.from_numpy(value.T.copy() if kind == "dense" else value)
        module.bias.data = torch.from_numpy(tf.pop(f"{name}/{bias}"))

    table = model.bert.embeddings
    for kind in ("word", "position", "token_type"):
        getattr(table, f"{kind}_embeddings").weight.data = torch.from_numpy(tf.pop(f"bert/embeddings/{kind}_embeddings"))
    put(table.LayerNorm, "bert/embeddings/LayerNorm", "norm")
    for i, layer in enumerate(model.bert.encoder.layer):
        at = f"bert/encoder/layer_{i}"
        for part in ("query", "key", "value"):
            put(getattr(layer.attention.self, part), f"{at}/attention/self/{part}")
        put(layer.attention.output.dense, f"{at}/attention/output/dense")
        put(layer.attention.output.LayerNorm, f"{at}/attention/output/LayerNorm", "norm")
        put(layer.intermediate.dense, f"{at}/intermediate/dense")
        put(layer.output.dense, f"{at}/output/dense")
        put(layer.output.LayerNorm, f"{at}/output/LayerNorm", "norm")
    put(model.bert.pooler.dense, "bert/pooler/dense")
    put(model.cls.predictions.transform.dense, "cls/predictions/transform/dense")
    put(model.cls.predictions.transform.LayerNorm, "cls/predictions/transform/LayerNorm", "norm")
    model.cls.predictions.decoder.weight = model.bert.embeddings.word_embeddings.weight
    model.cls.predictions.decoder.bias.data = torch.from_numpy(tf.pop("cls/predictions/output_bias"))
    put(model.cls.seq_relationship, "cls/seq_relationship", "output")
    assert not tf
    return model.eval()


@torch.no_grad()
def test_googles_bert_computes_what_the_same_weights_do_in_transformers(real_data: Path) -> None:
    folder = real_data / "bert-tf-tiny"
    theirs, initial = _transformers_of(folder), read_source(str(folder))
    assert initial.tokens == (folder / "vocab.txt").read_text().split() and initial.lowercase and initial.lacks() == []
    ours = masked_lm(initial.model, len(initial.tokens))
    ours.load_state_dict(initial.state)
    ids, segments = torch.randint(0, 15, (3, 11), generator=torch.Generator().manual_seed(0)), (torch.arange(11) > 5).long().expand(3, -1)
    expected = theirs(input_ids=ids, token_type_ids=segments)
    batch = Batch(
        ids_N=ids.flatten(),
        segments_N=segments.flatten(),
        positions_N=torch.arange(11).repeat(3),
        starts=torch.tensor([0, 11, 22, 33]),
        lengths=(11, 11, 11),
        targets={},
    )
    hidden_ND = ours.eval().encoder(batch)
    logits = ours.mlm_logits(hidden_ND)[:, :15].view(3, 11, 15)
    torch.testing.assert_close(logits, expected.prediction_logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.nsp_logits(first_tokens(hidden_ND, batch)), expected.seq_relationship_logits, rtol=1e-5, atol=1e-5)


def test_a_checkpoint_is_found_by_its_folder_its_prefix_and_its_index(real_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bert"
    shutil.copytree(real_data / "bert-tf-tiny", folder)
    names = [folder, folder / "bert_model.ckpt", folder / "bert_model.ckpt.index"]
    found = [read_source(str(name)).state for name in names]
    assert all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in found[0])
    folder.chmod(0o755)
    (folder / "vocab.txt").chmod(0o644)
    (folder / "vocab.txt").write_text((folder / "vocab.txt").read_text() + "\nsixteenth\n")
    with pytest.raises(DataError, match="its vocabulary has 16 tokens, and its network rows for 15"):
        read_source(str(folder))
    (folder / "vocab.txt").unlink()
    with pytest.raises(DataError, match="has no tokenizer"):
        read_source(str(folder))
    (folder / "bert_config.json").unlink()
    with pytest.raises(DataError, match=r"bert_config\.json: is missing; it says the sizes of the network"):
        read_source(str(folder))
