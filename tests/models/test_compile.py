"""The compiled model computes what the plain one does, and is compiled for few shapes."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch._dynamo.utils

from overnight.batches.loader import Samples
from overnight.config import Model, Phase
from overnight.models.bert import BertForPretraining
from tests.batches.corpus import book_like, shard, words


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch warns inside its own tracing, where an error would stop it
def test_compiled_layers_compute_the_same_and_are_compiled_once() -> None:
    if shutil.which("g++") is None:
        pytest.skip("torch.compile on a CPU needs a C++ compiler")
    phase = Phase(steps=9, global_batch=8, length=32, micro_batch=4, max_predictions=5)
    stream = Samples([shard(book_like(1, 12), size=500)], words(500), phase, (0,))
    torch.manual_seed(0)
    model = BertForPretraining(Model(layers=1, width=32, heads=2, max_length=32, dropout=0.0, attention_dropout=0.0), 500)
    batches = [batch for step in range(4) for batch in stream.step(step, grain=128).micro]
    plain = [model.losses(batch, torch.float32)[0]["mlm"].item() for batch in batches]
    model.encoder.compile_layers()
    torch._dynamo.utils.counters.clear()
    compiled = [model.losses(batch, torch.float32)[0]["mlm"].item() for batch in batches]
    assert compiled == pytest.approx(plain, rel=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= len({len(batch.ids_N) for batch in batches}) < len(batches)
