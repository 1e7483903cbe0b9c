"""Whole training steps on a GPU that is not there, for tests/gpu/test_steps.py: `python -m tests.gpu.steps_worker FILE [--all | --old]`.

With `--old` the GPU is of compute capability 7.5, and the steps are those in fp16. Writes of each case the operators of attention, the kernels that were launched, and the lists of tensors that the optimizer went through.
"""

from __future__ import annotations

from tests.gpu import fake_cuda  # first of all

# isort: split
import functools
import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from overnight.batches.packing import Batch, StepBatches
from overnight.config import OPTIMIZERS, BertConfig, ModernBertConfig
from overnight.distributed.world import World
from overnight.engine.loop import LoopConfig, training_steps
from overnight.engine.recurrent_state import RecurrentState
from overnight.models import bert, modernbert
from overnight.models.heads import Classifier, QuestionAnswering, TokenClassifier
from overnight.models.modernbert import ModernBertForMaskedLM
from overnight.optim import batch as optim_batch
from overnight.optim import kernels
from overnight.optim.groups import build_optimizer
from tests.models.sample import MODERN_SIZES, SIZES, VOCAB, modern, pretraining, random_batch
from tests.models.test_bytes import batch as window
from tests.models.test_bytes import model as byte_network

CUDA = torch.device("cuda", 0)
PATHS: dict[str, tuple[str, float, torch.dtype]] = {
    "bert": ("bert", 0.0, torch.bfloat16),
    "modernbert": ("modernbert", 0.0, torch.bfloat16),
    "modernbert fp16": ("modernbert", 0.0, torch.float16),
    "causal": ("causal", 0.0, torch.bfloat16),
    "bert dropout": ("bert", 0.1, torch.bfloat16),
    "bert dropout fp16": ("bert", 0.1, torch.float16),
    "bert fused": ("bert", 0.1, torch.bfloat16),
    "bert fp32": ("bert", 0.1, torch.float32),
    "modernbert fp32": ("modernbert", 0.0, torch.float32),
    "causal fp32": ("causal", 0.0, torch.float32),
    "mlstm": ("mlstm", 0.0, torch.bfloat16),
    "mlstm fp32": ("mlstm", 0.0, torch.float32),
}
"""Network, or modernbert on a causal batch, dropout of attention, type of the products; those of one operator side by side."""
RECOMPUTE = ("none", "selective", "full")
launches: Counter[str] = Counter()


class Seen(TorchDispatchMode):
    """Counts operators, and refuses copies between host and device that the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.batched: set[str] = set()
        """Types of the batched products."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to = kwargs.get("device")
        if (
            func is torch.ops.aten._to_copy.default
            and to is not None
            and torch.device(to).type != args[0].device.type
            and not kwargs.get("non_blocking")
        ):
            raise RuntimeError(f"the host waits for a copy from {args[0].device} to {to}")
        if func is torch.ops.aten.segment_reduce.default and not kwargs.get("unsafe"):
            raise RuntimeError("the host waits for the lengths that segment_reduce looks at")
        if func is torch.ops.aten.baddbmm.default:
            self.batched.add(str(args[0].dtype))
        self.counts[func.name().partition("::")[2].removesuffix(".default")] += 1
        return func(*args, **kwargs)


def launched(kernel: Any, *args: Any, **kwargs: Any) -> None:
    """Note a launch of Triton's instead of doing it."""
    launches[kernel.__name__] += 1


def with_numbers(function: Any) -> Any:
    """Call it on the host's own numbers, which the fake mode would take away; what it moves to the device is fake again."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


def refused(*args: Any) -> None:
    """Stand for a wait for the device."""
    raise RuntimeError("the host waits for the device")


def cases(every: bool, old: bool) -> Iterator[tuple[str, str, str]]:
    """Every path of attention with and without recomputation, its kinds and the optimizers in turn, so that all of them meet each operator; or all with all; or fp16."""
    if old:
        yield from ((path, optimizer, "none") for path in ("bert dropout fp16", "modernbert fp16") for optimizer in OPTIMIZERS)
        return
    turn = 0
    for number, path in enumerate(PATHS):
        kinds = RECOMPUTE if every else ("none", RECOMPUTE[1 + number % 2])
        for recompute in kinds if "mlstm" not in path else ("none", "full"):
            for optimizer in OPTIMIZERS if every else [list(OPTIMIZERS)[turn % len(OPTIMIZERS)]]:
                turn += 1
                yield path, optimizer, recompute


class Prepared(StepBatches):
    """A micro-batch of real numbers on the host, and their targets, counted before all numbers become fake."""

    def divisors(self) -> dict[str, float]:
        return COUNTS[frozenset(self.micro[0].targets), type(self.micro[0])]


COUNTS: dict[Any, dict[str, float]] = {}


def prepared(kind: str) -> StepBatches:
    """The batches of a step."""
    if kind == "mlstm":
        found = Prepared(tuple(window(steps=5, seed=i) for i in range(1)), 20, 4)
    else:
        found = Prepared(tuple(random_batch([20, 13, 9], seed=i, nsp=kind == "bert", causal=kind == "causal") for i in range(1)), 42, 3)
    COUNTS[frozenset(found.micro[0].targets), type(found.micro[0])] = StepBatches.divisors(found)
    return found


def network(kind: str, dropped: float, recompute: str) -> Any:
    """A small network on the device."""
    with CUDA:
        if kind == "mlstm":
            return byte_network("mlstm", recompute=2 if recompute == "full" else 0)
        sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "dropout": 0.1}
        sizes |= {"attention_dropout": dropped} if kind == "bert" else {"local_attention": 4, "global_attention_every": 2}
        net = (pretraining if kind == "bert" else modern)(**sizes)
    net.encoder.recompute_layers(recompute)
    return net


# What waits for a device, put into the objective to see that it is found.
WAITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a number that is read": float,
    "a condition": bool,
    "numbers of unknown count": torch.nonzero,
    "a copy to the host": lambda x: x.cpu(),
    "lengths that are looked at": lambda x: torch.segment_reduce(x[None], "sum", lengths=torch.ones(1, dtype=torch.int64, device=x.device)),
    "a wait": lambda x: torch.cuda.synchronize(),
}


def step(given: StepBatches, path: str, optimizer: str, recompute: str, wait: Callable[[torch.Tensor], Any] = id) -> dict[str, Any]:
    """Take two steps; `wait` is called with each loss."""
    kind, dropped, dtype = PATHS[path]
    net = network(kind, dropped, recompute)
    if path == "bert fused":
        assert not net.encoder.fuse_layers(CUDA, dtype)
    carry = RecurrentState(range(4), net.state_shape, World(device=CUDA)) if kind == "mlstm" else None
    settings = LoopConfig(steps=2, lr=lambda step: 0.01, max_grad_norm=1.0, dtype=dtype, device=CUDA, seed=(1, 2), world=World(device=CUDA))
    made = build_optimizer(net, OPTIMIZERS[optimizer]())
    launches.clear()

    def objective(*asked: Any) -> Any:
        found = net.losses(*asked)
        wait(next(iter(found[0].values())))
        return found

    with Seen() as seen:
        done = list(training_steps(net, objective, made, lambda step: given, settings, carry=carry))
    assert len(done) == 2 and all(loss.device == CUDA for each in done for loss in each.losses.values())
    attention = {name: count for name, count in seen.counts.items() if "attention" in name or "attn" in name}
    lists = {name: count for name, count in seen.counts.items() if name.startswith("_foreach") or name.startswith("_fused")}
    return {"attention": attention, "launches": dict(launches), "lists": lists, "batched": sorted(seen.batched)}


HEADS: dict[str, tuple[Callable[[Any], Any], dict[str, list[int]]]] = {
    "classes": (lambda model: Classifier(model, VOCAB, 2), {"label": [0, 1, 0]}),
    "tokens": (lambda model: TokenClassifier(model, VOCAB, 3), {"label": [1] * 42}),
    "question": (lambda model: QuestionAnswering(model, VOCAB), {"start": [1, 2, 3], "end": [2, 3, 4]}),
}
"""Heads of fine-tuning and the targets of three sequences."""
ENCODERS: dict[str, Any] = {"bert": BertConfig(**SIZES), "modernbert": ModernBertConfig(**MODERN_SIZES)}


def head(make: Callable[[], Any], batch: Batch) -> dict[str, Any]:
    """Take a training pass of a head, forward and backward."""
    with CUDA:
        net = make()
    with Seen():
        found, _ = net.train().losses(batch.to(CUDA), torch.bfloat16)
        torch.stack(list(found.values())).sum().backward()
    return {}


def heads() -> dict[str, Callable[[], dict[str, Any]]]:
    """Passes of all heads, by name; their batches have real numbers."""
    plain = random_batch([20, 13, 9])
    found: dict[str, Callable[[], dict[str, Any]]] = {
        "head modernbert nsp": functools.partial(head, lambda: ModernBertForMaskedLM(ENCODERS["modernbert"], VOCAB, nsp=True), plain)
    }
    for name, (make, targets) in HEADS.items():
        batch = replace(plain, predicted_M=None, targets={key: torch.tensor(values) for key, values in targets.items()})
        for kind, model in ENCODERS.items():
            found[f"head {kind} {name}"] = functools.partial(head, functools.partial(make, model), batch)
    return found


def faked() -> FakeTensorMode:
    """Return the mode in which tensors on the device are fake, with all in place that goes from the host to them."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def pin_memory(self: Any) -> Any:
        numbers = self.constant if isinstance(self, FakeTensor) else self
        if numbers is None:
            return self
        with unset_fake_temporarily():  # What the mode knows by its numbers it would copy with them.
            return mode.from_tensor(numbers.clone())

    torch.Tensor.pin_memory = pin_memory  # type: ignore[method-assign,assignment]
    bert.layout, modernbert.layout = with_numbers(bert.layout), with_numbers(modernbert.layout)
    kernels._make_layout = with_numbers(kernels._make_layout)  # type: ignore[assignment]
    # Elsewhere the optimizers look through a fake tensor, and step it by lists; here it stands for one of a GPU.
    optim_batch.has_memory, optim_batch.is_traced = lambda x: True, torch.compiler.is_compiling  # type: ignore[assignment]
    return mode


def main(file: str, every: bool, old: bool) -> NoReturn:
    """Take the steps of all cases."""
    from triton.runtime.jit import JITFunction

    JITFunction.run = launched  # type: ignore[method-assign]
    found: dict[str, Any] = {}
    mode, given = faked(), {kind: prepared(kind) for kind, *_ in PATHS.values()}
    torch.cuda.synchronize = refused
    asked: dict[str, Any] = {" | ".join(case): case for case in cases(every, old)}
    asked |= {} if old else {wait: ("bert", "adamw", "none", WAITS[wait]) for wait in WAITS}
    passes = {name: functools.partial(step, given[PATHS[path][0]], path, *rest) for name, (path, *rest) in asked.items()}
    passes |= {} if old else heads()
    for name, take in passes.items():
        try:
            with mode:
                found[name] = take()
        except Exception as error:
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename]
            places = [f"{frame.filename}:{frame.lineno}" for frame in frames[-4:]]
            found[name] = {"error": f"{type(error).__name__}: {str(error)[:300]}", "at": places}
    fake_cuda.end(file, json.dumps(found, indent=1))


if __name__ == "__main__":
    old = "--old" in sys.argv
    fake_cuda.install((7, 5) if old else (9, 0))
    torch.set_num_threads(1)
    main(sys.argv[1], "--all" in sys.argv, old)
