"""What Inductor makes of an encoder layer for a GPU that is not there, for tests/gpu/test_layers.py: `python -m tests.gpu.layers_worker FILE`.

Writes of each case, forward and backward: the Triton kernels, the calls of libraries by name, and the bytes that the kernels read and write. With
`machine`, the names of the kernels that were compiled down to machine code instead.
"""

from __future__ import annotations

from tests.gpu import fake_cuda  # first of all

# isort: split
import copy
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
import torch._functorch.config as functorch
import torch._inductor.config as settings
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx, graph
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import fuse_attention, pad_mm
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from overnight.bench.sizes import VOCABULARY, full_batch
from overnight.config import BertConfig, ModernBertConfig
from overnight.models import bert, modernbert
from overnight.models.attention import Layout, find_varlen
from tests.gpu.steps_worker import CUDA, faked

SEQUENCES, TOKENS, LONGEST = 131, 16384, 128
BERT = BertConfig(num_layers=24, hidden_size=1024, num_heads=16, dropout=0.1, attention_dropout=0.1)
MODERN = ModernBertConfig(num_layers=24, hidden_size=1024, num_heads=16)
# Network, variable lengths or padding, recomputation.
CASES: dict[str, tuple[Any, bool, Any]] = {
    "bert": (BERT, True, "none"),
    "bert full recomputation": (BERT, True, "full"),
    "bert padded": (BERT, False, "none"),
    "modernbert": (MODERN, True, "none"),
    "modernbert padded": (MODERN, False, "none"),
}
made: list[dict[str, Any]] = []
compilations = 0


class Written(Exception):
    """What is wanted of a graph is there: it is compiled no further."""


def written(self: Any) -> Any:
    """Write the code of a graph and its bytes down instead of compiling it further."""
    code, _ = self.codegen()
    text = code.value if hasattr(code, "value") else code[0]
    body = text[text.index("def call(") :] if "def call(" in text else text[text.index("class Runner") :]
    outside = re.findall(r"(?:extern_kernels|torch\.ops\.\w+)\.(\w+)[\w.]*\(", body)
    kernels = [node for node in self.scheduler.nodes if not node.is_extern()]
    made.append(
        {
            "triton": len(re.findall(r"^\s+triton_\w+\.run\(", body, re.M)),
            "products": sum(name in ("mm", "addmm", "bmm") for name in outside),
            "attention": dict(Counter(name for name in outside if "attention" in name or "attn" in name)),
            # Calls whose random numbers are kept to be drawn again, or drawn again.
            "drawn": dict(Counter(re.findall(r"(run_\w+_rng_state)\([^\n]*_flash_attention_forward", body))),
            "bytes": sum(node.get_read_write_buffers_sizes() for node in kernels),
        }
    )
    raise Written


def to_machine_code() -> None:
    """Have the Triton kernels of a graph compiled to machine code, and their names written down instead of their number and bytes."""
    compile_to_module = graph.GraphLowering.compile_to_module

    def compiled(self: Any) -> Any:
        made.append({"machine code": []})
        compile_to_module(self)
        raise Written

    def loaded(self: Any) -> None:
        assert self.compile_results
        made[-1]["machine code"].append(self.fn.__name__)

    graph.GraphLowering.compile_to_module = compiled  # type: ignore[method-assign]
    CachingAutotuner._make_launchers = loaded  # type: ignore[method-assign]
    triton_helpers.set_driver_to_gpu = lambda: None  # which would look for the driver itself


def compiler(backward: bool) -> Any:
    """A compiler of one graph, which runs it uncompiled."""

    def compiled(module: Any, inputs: Any) -> Any:
        global compilations
        compilations += 1
        try:
            compile_fx.compile_fx_inner(copy.deepcopy(module), inputs, is_backward=backward, cudagraphs=False)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, Written):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
        return make_boxed_func(module.forward)

    return compiled


def partition(module: Any, inputs: Any, **kwargs: Any) -> Any:
    """Split a joint graph as Inductor does."""
    with V.set_fake_mode(detect_fake_mode(inputs)):
        module = compile_fx._recursive_joint_graph_passes(module, input_device=torch.device("cuda", 0)) or module
    return min_cut_rematerialization_partition(module, inputs, compiler="inductor", **kwargs)


def layer(model: Any, varlen: bool, recompute: Any, dtype: torch.dtype) -> dict[str, Any]:
    """What a layer is compiled to."""
    made.clear()
    torch._dynamo.reset()
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True), torch.device("cuda"):
        net: nn.Module = bert.Layer(model) if isinstance(model, BertConfig) else modernbert.ModernLayer(model, 1)
        net.recompute = recompute
        x = torch.empty(TOKENS, model.hidden_size, dtype=dtype, requires_grad=True)
        starts, places = torch.empty(SEQUENCES + 1, dtype=torch.int32), SEQUENCES * LONGEST
        where = Layout(starts, LONGEST, True)
        if not varlen:
            pad, unpad = torch.empty(places, dtype=torch.int64), torch.empty(TOKENS, dtype=torch.int64)
            where = Layout(starts, LONGEST, False, pad, unpad, torch.empty(SEQUENCES, 1, 1, LONGEST, dtype=torch.bool))
        size = model.hidden_size // model.num_heads
        turns = () if isinstance(model, BertConfig) else tuple(torch.empty(TOKENS, 1, 1, size // 2) for _ in range(2))
        backend = aot_autograd(
            fw_compiler=compiler(False), bw_compiler=compiler(True), partition_fn=partition, decompositions=select_decomp_table()
        )
        torch.compile(net.train(), backend=backend, dynamic=True, fullgraph=True)(x, where, *turns).sum().backward()
    forward, backward = made
    return {"forward": forward, "backward": backward}


def shapes(model: Any) -> int:
    """How many graphs three layers are compiled to over the shapes of a run: trained on many lengths, evaluated on others."""
    global compilations
    compilations = 0
    torch._dynamo.reset()

    def counted(module: Any, inputs: Any) -> Any:
        global compilations
        compilations += 1
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=counted, bw_compiler=counted, decompositions=select_decomp_table())
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True), torch.device("cuda"):
        layers = [bert.Layer(model) for _ in range(2)]
        for each in layers:
            each.compile(dynamic=True, backend=backend)
        runs = [
            (True, 67, 4096, 64),
            (True, 66, 4160, 64),
            (False, 64, 4000, 63),
            (False, 7, 256, 40),
            (True, 18, 2048, 128),
            (False, 16, 1270, 127),
        ]
        for training, sequences, tokens, longest in runs:
            x = torch.empty(tokens, model.hidden_size, dtype=torch.bfloat16, requires_grad=training)
            where = Layout(torch.empty(sequences + 1, dtype=torch.int32), longest, True)
            with torch.set_grad_enabled(training):
                for each in layers:
                    x = each.train(training)(x, where)
                if training:
                    x.sum().backward()
    return compilations


def kept() -> dict[str, float]:
    """Bytes a token that a layer keeps for its backward pass, uncompiled, by the number of its heads: what one more layer adds, by what more tokens add to that."""
    mode, found = faked(), {}
    for heads in (12, 16):
        sums = {}
        for layers in (1, 2):
            for sequences in (8, 24):
                storages: dict[int, int] = {}
                given = full_batch(sequences, LONGEST, 20)

                def keep(x: torch.Tensor, into: dict[int, int] = storages) -> torch.Tensor:
                    into[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
                    return x

                with mode, torch.device("cuda"):
                    net = bert.BertForPretraining(replace(BERT, num_layers=layers, num_heads=heads, hidden_size=64 * heads), VOCABULARY)
                    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                        _held = net.losses(given.to(CUDA), torch.bfloat16)
                sums[layers, sequences] = sum(storages.values())
        found[str(heads)] = (sums[2, 24] - sums[1, 24] - sums[2, 8] + sums[1, 8]) / (16 * LONGEST)
    return found


if __name__ == "__main__":
    capability = (int(sys.argv[2][0]), int(sys.argv[2][1]))
    fake_cuda.install(capability)
    fake_cuda.drive(capability)
    torch.set_num_threads(1)
    # What would run on the device to choose, or is compiled in other processes.
    fuse_attention._sfdp_init = pad_mm._pad_mm_init = lambda *args, **kwargs: None
    settings.shape_padding = settings.joint_graph_constant_folding = False
    functorch.graphsafe_rng_functionalization = False  # a generator's state on the device has numbers
    settings.compile_threads, settings.force_disable_caches = 1, True
    if "machine" in sys.argv:
        to_machine_code()
    else:
        graph.GraphLowering.compile_to_module = graph.GraphLowering._compile_to_module = written  # type: ignore[method-assign]
    find_varlen()  # as what makes a layout does, which is given here
    dtype = torch.bfloat16 if capability >= (8, 0) else torch.float16
    found: dict[str, Any] = {name: layer(*CASES[name], dtype) for name in sys.argv[3:] if name in CASES}
    found["compilations"] = shapes(BertConfig(num_layers=2, hidden_size=128, num_heads=2))
    if "kept" in sys.argv:
        found["kept"] = kept()
    fake_cuda.end(sys.argv[1], json.dumps(found, indent=1))
