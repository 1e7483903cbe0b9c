"""What forward.c computes, against the layers by torch and transformers, and where it is used."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from overnight import native
from overnight.config import BertConfig, ModernBertConfig
from overnight.finetune.predict import at_work
from overnight.models import forward_native, layers
from overnight.models.attention import _angle_table
from overnight.models.bert import Linear
from overnight.models.heads import Classifier, QuestionAnswering, TokenClassifier
from tests.models.sample import VOCAB, loud, modern, pretraining, random_batch

CPU = torch.device("cpu")
# Sequences of one token, of a part of a vector, of several blocks of queries, and as many rows as leave each rest of a tile.
LENGTHS = [(1,), (7,), (25,), (64, 3, 1, 50), (17, 30, 64), (48,) * 9]
ODD: dict[str, Any] = {"hidden_size": 42, "num_heads": 3, "intermediate_size": 90}
WIDE: dict[str, Any] = {"hidden_size": 136, "num_heads": 2, "intermediate_size": 300}


@pytest.fixture(params=["as it is here", "without AVX-512"], autouse=True)
def each_width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have forward.c compiled for vectors of each width."""
    if not forward_native.available():
        pytest.skip("forward.c is not used here")
    if request.param != "as it is here":
        monkeypatch.setenv("CC", "gcc -mno-avx512f")
        library = native.library.__wrapped__(forward_native._SOURCE)
        plain = forward_native._library.__wrapped__
        monkeypatch.setattr(native, "library", lambda source: library)
        narrow = plain()
        monkeypatch.setattr(forward_native, "_library", lambda: narrow)


def worked(network: nn.Module) -> Any:
    """Return a copy of a network that is trained no more, whose encoder is one call."""
    done = at_work(copy.deepcopy(network), "fp32", CPU)
    assert done.encoder.native is not None
    return done


def close(found: Tensor, expected: Tensor, what: str = "") -> None:
    """Assert that two tensors are alike but for rounding."""
    atol = 1e-5 * float(expected[expected.isfinite()].abs().max())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=atol, msg=lambda text: f"{what}: {text}")


NETWORKS: dict[str, Callable[[], Any]] = {
    "BERT": lambda: pretraining(),
    "BERT of odd sizes": lambda: pretraining(**ODD),
    "BERT of wide heads": lambda: pretraining(**WIDE),
    "ModernBERT": lambda: modern(),
    "ModernBERT with local layers": lambda: modern(local_attention=10),
    "ModernBERT of odd sizes": lambda: modern(**ODD, local_attention=4, global_attention_every=2),
    "ModernBERT of wide heads": lambda: modern(**WIDE, local_attention=128),
}


@pytest.mark.parametrize("name", NETWORKS)
@torch.inference_mode()
def test_hidden_states_are_those_of_torch(name: str) -> None:
    network = NETWORKS[name]().eval()
    at_once = worked(network)
    for lengths in LENGTHS:
        for causal in (False, True):
            batch = replace(random_batch(lengths), causal=causal)
            close(at_once.encoder(batch), network.encoder(batch), f"{lengths}, causal: {causal}")


@pytest.mark.parametrize("name", ["BERT", "ModernBERT with local layers"])
@torch.inference_mode()
def test_hidden_states_behind_each_layer_are_those_of_torch(name: str) -> None:
    network, batch = NETWORKS[name]().eval(), random_batch((9, 20))
    at_once, inputs = worked(network), []
    hooks = [layer.register_forward_pre_hook(lambda layer, given: inputs.append(given[0].clone())) for layer in network.encoder.layers]
    network.encoder(batch)
    for hook in hooks:
        hook.remove()
    assert len(inputs) == len(network.encoder.layers)
    for depth, expected in enumerate(inputs):
        close(at_once.encoder(batch, depth=depth), expected)
        close(network.encoder(batch, depth=depth), expected)


@pytest.mark.parametrize("sizes", [BertConfig(num_layers=2, **ODD), ModernBertConfig(num_layers=2, **ODD)], ids=["BERT", "ModernBERT"])
@pytest.mark.parametrize("head", [Classifier, TokenClassifier, QuestionAnswering])
@torch.inference_mode()
def test_every_head_says_the_same(head: Any, sizes: Any) -> None:
    torch.manual_seed(0)
    network = loud(head(sizes, VOCAB, *([] if head is QuestionAnswering else [5]))).eval()
    batch = random_batch((20, 3, 11))
    close(worked(network)(batch, torch.float32), network(batch, torch.float32))


@pytest.mark.parametrize("name", ["BERT of odd sizes", "ModernBERT with local layers"])
@torch.inference_mode()
def test_a_text_has_the_same_bits_alone_and_among_others(name: str) -> None:
    network, batch = worked(NETWORKS[name]()), random_batch((30, 25, 60))
    alone = replace(
        batch,
        ids_N=batch.ids_N[30:55],
        positions_N=batch.positions_N[30:55],
        segments_N=batch.segments_N[30:55],
        starts=torch.tensor([0, 25], dtype=torch.int32),
        lengths=(25,),
    )
    assert torch.equal(network.encoder(batch)[30:55], network.encoder(alone))


@torch.inference_mode()
def test_several_threads_give_the_same_bits() -> None:
    network, batch = worked(NETWORKS["ModernBERT of odd sizes"]()), random_batch((64, 3, 33))
    threads, expected = torch.get_num_threads(), network.encoder(batch)
    try:
        torch.set_num_threads(3)
        assert torch.equal(network.encoder(batch), expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["BERT of odd sizes", "ModernBERT"])
@torch.inference_mode()
def test_a_copy_computes_the_same_and_outlives_what_it_is_of(name: str) -> None:
    network, batch = worked(NETWORKS[name]()), random_batch((9, 20))
    expected = network.encoder(batch)
    copies = [copy.deepcopy(network), pickle.loads(pickle.dumps(network))]
    for part in network.parameters():
        part.zero_()
    for module in network.modules():
        if isinstance(module, Linear) and module.packed is not None:
            module.packed.zero_()
    for other in copies:
        assert torch.equal(other.encoder(batch), expected)


@pytest.mark.parametrize("name", ["BERT of odd sizes", "ModernBERT"])
@pytest.mark.parametrize("oneDNN", [True, False])
@torch.inference_mode()
def test_what_wakes_where_forward_c_is_not_taken_computes_the_same(name: str, oneDNN: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    network, batch = worked(NETWORKS[name]()), random_batch((9, 20))
    expected, pickled = network.encoder(batch), pickle.dumps(network)
    monkeypatch.setattr(forward_native, "takes", lambda weight: False)
    if not oneDNN:
        monkeypatch.setattr(layers, "_onednn_linear", None)
    torch.testing.assert_close(pickle.loads(pickled).encoder(batch), expected)


@torch.inference_mode()
def test_a_product_of_no_rows_has_no_rows() -> None:
    for outputs in (5, 64):
        weight = forward_native.panels(torch.randn(outputs, 8))
        assert forward_native.linear(torch.empty(0, 8), weight, None, outputs).shape == (0, outputs)


@pytest.mark.parametrize("name", ["BERT", "ModernBERT"])
@pytest.mark.parametrize(("part", "number"), [("ids_N", -1), ("ids_N", 1 << 40), ("positions_N", 64), ("segments_N", 2)])
def test_a_number_without_a_row_in_its_table_is_refused(name: str, part: str, number: int) -> None:
    network, batch = worked(NETWORKS[name]()), random_batch((9, 20))
    getattr(batch, part)[12] = number
    if name == "ModernBERT" and part != "ids_N":
        network.encoder(batch)  # which has no such table
        return
    with pytest.raises(IndexError, match="has no row in its table"):
        network.encoder(batch)


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 3, 42), (13, 64, 300), (100, 90, 7)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_map_is_that_of_torch(shape: tuple[int, int, int], bias: bool) -> None:
    rows, outputs, inputs = shape
    torch.manual_seed(0)
    plain = nn.Linear(inputs, outputs, bias).requires_grad_(False)
    x = torch.randn(rows, 2 * inputs)[:, :inputs]
    found = forward_native.linear(x, forward_native.panels(plain.weight), plain.bias, outputs)
    close(found, plain(x))


def test_of_no_rows_there_is_nothing() -> None:
    assert forward_native.linear(torch.empty(0, 5), forward_native.panels(torch.ones(3, 5)), None, 3).shape == (0, 3)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_other_precisions_stay_with_torch(precision: str) -> None:
    assert at_work(pretraining(), precision, CPU).encoder.native is None


@torch.inference_mode()
def test_without_a_compiler_torch_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_native, "available", lambda: False)
    network, batch = modern(local_attention=10).eval(), random_batch((9, 20))
    expected, done = network.encoder(batch), at_work(network, "fp32", CPU)
    assert done.encoder.native is None
    close(done.encoder(batch), expected)


def test_torchs_default_type_changes_nothing() -> None:
    network, batch = worked(NETWORKS["ModernBERT"]()), random_batch((9, 20))
    expected = network.encoder(batch)
    torch.set_default_dtype(torch.float64)
    try:
        _angle_table.cache_clear()
        assert torch.equal(network.encoder(batch), expected)
    finally:
        torch.set_default_dtype(torch.float32)
