"""The compiled model computes what the plain one does, and is compiled at the beginning of a phase only."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch._dynamo

from overnight.batches.loader import Samples
from overnight.config import BertConfig, BertPhase, EncoderConfig, ModernBertConfig
from overnight.models.encoders import MaskedLM, masked_lm
from tests.batches.corpus import book_like, shard, words
from tests.models.sample import random_batch

MODELS = [
    BertConfig(num_layers=1, hidden_size=32, num_heads=2, max_position_embeddings=48, dropout=0.0, attention_dropout=0.0),
    ModernBertConfig(num_layers=2, hidden_size=32, num_heads=2, max_position_embeddings=48, local_attention=8, global_attention_every=2),
]


def training(model: MaskedLM, stream: Samples, step: int) -> list[float]:
    """The losses of a step's micro-batches, with their gradients added up."""
    model.train()
    losses = []
    for batch in stream.step(step, pad_to_multiple=16).micro:
        loss = model.losses(batch, torch.float32)[0]["mlm"]
        loss.backward()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def evaluation(model: MaskedLM, stream: Samples) -> list[float]:
    model.eval()
    return [model.losses(batch, torch.float32)[0]["mlm"].item() for work in stream.validation_steps(30) for batch in work.micro]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch warns inside its own tracing, where an error would stop it
@pytest.mark.parametrize(
    ("settings", "backend", "lengths"),
    [
        pytest.param(settings, backend, lengths, marks=marks, id=f"{settings.kind}-{backend}-{len(lengths)}")
        for settings, backend, lengths, marks in (
            # When it is compiled does not depend on the compiler behind it, which takes most of the time.
            (MODELS[0], "eager", (32, 48), ()),
            (replace(MODELS[1], num_layers=1), "eager", (32,), ()),
            (MODELS[0], "inductor", (32, 48), pytest.mark.heavy),
            (MODELS[1], "inductor", (32, 48), pytest.mark.heavy),
        )
    ],
)
def test_compiled_layers_compute_the_same_and_are_compiled_in_the_first_two_steps_only(
    settings: EncoderConfig, backend: str, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("torch.compile on a CPU needs a C++ compiler")
    monkeypatch.setattr(torch.nn.Module, "compile", functools.partialmethod(torch.nn.Module.compile, backend=backend))
    text = shard(book_like(1, 12), size=500)
    phases = [
        Samples(
            [text],
            words(500),
            BertPhase(
                steps=20,
                global_batch_size=8,
                seq_len=length,
                micro_batch_size=4,
                max_predictions_per_seq=5,
                nsp=settings.kind == "bert",
            ),
            (0,),
        )
        for length in lengths
    ]
    shapes = {len(batch.ids_N) for stream in phases for step in range(20) for batch in stream.step(step, pad_to_multiple=16).micro}
    assert len(shapes) > 3
    torch.manual_seed(0)
    plain, compiled = masked_lm(settings, 500), masked_lm(settings, 500)
    compiled.load_state_dict(plain.state_dict())
    compiled.encoder.compile_layers()
    torch._dynamo.reset()
    for stream in phases:
        for step in range(20):
            # A phase of another length may be compiled for anew.
            with torch._dynamo.config.patch(error_on_recompile=step >= 2):
                assert training(compiled, stream, step) == pytest.approx(training(plain, stream, step), rel=1e-5)
                if step % 6 == 1:
                    assert evaluation(compiled, stream) == pytest.approx(evaluation(plain, stream), rel=1e-5)
    for (name, ours), theirs in zip(compiled.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.filterwarnings("ignore")  # as above
def test_networks_of_many_sizes_in_one_process_are_all_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(torch.nn.Module, "compile", functools.partialmethod(torch.nn.Module.compile, backend=backend))
    torch._dynamo.reset()
    # torch's is 8: the test would take long. It is as it was afterwards.
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=2):
        for width in (8, 16, 24):
            net = masked_lm(BertConfig(num_layers=1, hidden_size=width, num_heads=2), 64).eval()
            net.encoder.compile_layers()
            net.losses(random_batch([5, 3], vocab=64), torch.float32)
    assert len(compiled) == 3
    torch._dynamo.reset()
