"""`overnight bench mlstm`: forward and backward pass of the multiplicative LSTM, compared with the same equations step by step in autograd.

The peer is in fp32 in every row. With each row: the matrix products alone, with nothing between them, which bound it; and for fp32 our
LSTM compared with torch.nn.LSTM.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overnight.batches.packing import Sizes
from overnight.batches.streams import ByteBatch
from overnight.bench.measure import Row, measure, printed, rate_row
from overnight.bench.sizes import DTYPES, not_emulated
from overnight.config import RecurrentLMConfig
from overnight.models.bytes import BYTES, ByteModel, byte_model
from overnight.models.flops import training_flops
from overnight.models.recurrence import multiplier, weight_gradient


@dataclass(frozen=True)
class Case:
    """A network and a window."""

    width: int
    rows: int
    steps: int
    precision: str
    repeats: int = 7

    @property
    def name(self) -> str:
        """Of the row."""
        return f"H{self.width} {self.precision}"


CASES = [Case(1024, 64, 128, "fp32"), Case(1024, 64, 128, "bf16"), Case(512, 32, 64, "fp32", 25)]
TINY = [Case(32, 4, 8, "fp32", 2), Case(32, 4, 8, "bf16", 2)]


def run(peer: str = "autograd", tiny: bool = False) -> None:
    """Measure every case and print the rows, JSON last.

    Args:
        peer: `none` leaves the peers out.
        tiny: the smallest sizes.
    """
    cases = TINY if tiny else not_emulated(CASES, lambda case: case.precision)
    with printed("mlstm") as rows:
        for case in cases:
            for row in measure_case(case, peer != "none"):
                rows.append(row)
                print(describe(row, case), flush=True)
            gc.collect()


def measure_case(case: Case, peers: bool) -> list[Row]:
    """Return the throughput of one case, the share of it that is products, and the LSTM's throughput."""
    batch = window(case)
    steps: dict[str, Callable[[], object]] = {"ours": our_step("mlstm", case, batch), "products": products(case)}
    if peers:
        steps["autograd"] = autograd_step(case, batch)
    if peers and case.precision == "fp32":
        steps |= {"LSTM": our_step("lstm", case, batch), "torch.nn.LSTM": lstm_step(case, batch)}
    times, characters = measure(steps, warmup=2, repeats=case.repeats), case.rows * case.steps
    unit = "characters/s"
    if not peers:
        found = [rate_row(case.name, unit, characters, times["ours"])]
    else:
        found = [rate_row(case.name, unit, characters, times["ours"], "autograd", times["autograd"])]
    found.append(Row(f"{case.name} products' share", 100 * times["products"].median / times["ours"].median, "%"))
    if "LSTM" in times:
        found.append(rate_row(f"{case.name} LSTM", unit, characters, times["LSTM"], "torch.nn.LSTM", times["torch.nn.LSTM"]))
    return found


def describe(row: Row, case: Case) -> str:
    """Return a row as a line to read."""
    if row.unit == "%":
        return f"{row.name:28} {row.value:8.1f} %  (of the time of the products with W_mh and W_h and of their gradients, alone)"
    text = f"{row.name:28} {row.value:8.0f} {row.unit}"
    if row.name == case.name:
        text += f"  ({row.value * flops(case) / 1e9:,.0f} GFLOP/s)"
    return text if row.ratio is None else f"{text}  {row.peer} {row.peer_value:.0f}  ratio {row.ratio:.2f}"


def flops(case: Case) -> float:
    """Return the operations of a character's forward and backward pass in a window of the case."""
    characters = case.rows * case.steps
    return (
        training_flops(RecurrentLMConfig(kind="mlstm", num_layers=1, hidden_size=case.width), BYTES, Sizes(characters, 0, characters, 0))
        / characters
    )


def window(case: Case) -> ByteBatch:
    """Return random bytes."""
    text = torch.randint(0, BYTES, (case.rows, case.steps + 1), generator=torch.Generator().manual_seed(0))
    return ByteBatch(
        text[:, :-1].contiguous(), torch.arange(case.rows), torch.zeros(case.rows, dtype=torch.bool), {"byte": text[:, 1:].contiguous()}
    )


def network(kind: str, width: int) -> ByteModel:
    """Return a byte model of one layer, as published."""
    torch.manual_seed(0)
    return byte_model(RecurrentLMConfig(kind=kind, num_layers=1, hidden_size=width, weight_norm=kind == "mlstm"))  # type: ignore[arg-type]


def stepped(parameters: list[nn.Parameter], loss: Callable[[], Tensor]) -> Callable[[], object]:
    """Take a forward and a backward pass."""

    def step() -> None:
        for p in parameters:
            p.grad = None
        loss().backward()

    return step


def our_step(kind: str, case: Case, batch: ByteBatch) -> Callable[[], object]:
    """Return one forward and backward pass of ours, on the device of the batch."""
    net, dtype = network(kind, case.width).to(batch.ids_BT.device), DTYPES[case.precision]
    return stepped(list(net.parameters()), lambda: net.losses(batch, dtype)[0]["byte"])


def autograd_step(case: Case, batch: ByteBatch) -> Callable[[], object]:
    """Return the same network step by step, as one writes it by hand: fp32, the matrices normalized once a window, the decoder once for all steps."""
    net = network("mlstm", case.width)
    p = dict(net.named_parameters())

    def loss() -> Tensor:
        w_x, w_h, w_mx, w_mh = (
            torch._weight_norm(p[f"layers.0.{n}"], p[f"layers.0.g.{n}"][:, None], 0) for n in ("w_x", "w_h", "w_mx", "w_mh")
        )
        x = F.embedding(batch.ids_BT.t(), p["embedding.weight"])
        h = c = x.new_zeros(case.rows, case.width)
        hs = []
        for x_t in x:
            m = F.linear(x_t, w_mx) * F.linear(h, w_mh)
            i, f, g, o = (F.linear(x_t, w_x, p["layers.0.b"]) + F.linear(m, w_h)).chunk(4, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            hs.append(h)
        logits = F.linear(torch.stack(hs), p["decoder.weight"], p["decoder.bias"])
        return F.cross_entropy(logits.flatten(0, 1), batch.targets["byte"].t().flatten(), reduction="sum")

    return stepped(list(net.parameters()), loss)


def lstm_step(case: Case, batch: ByteBatch) -> Callable[[], object]:
    """Return an LSTM of the same width by torch.nn.LSTM, fp32."""
    torch.manual_seed(0)
    embedding, lstm, decoder = nn.Embedding(BYTES, 64), nn.LSTM(64, case.width), nn.Linear(case.width, BYTES)

    def loss() -> Tensor:
        h, _ = lstm(embedding(batch.ids_BT.t()))
        return F.cross_entropy(decoder(h).flatten(0, 1), batch.targets["byte"].t().flatten(), reduction="sum")

    return stepped([p for module in (embedding, lstm, decoder) for p in module.parameters()], loss)


def products(case: Case) -> Callable[[], object]:
    """Return a function that computes all products of the recurrence and nothing else: of every step with W_mh and W_h, forward and transposed, and of the gradients."""
    dtype, width = DTYPES[case.precision], case.width
    w_mh, w_h = torch.randn(width, width).to(dtype), torch.randn(4 * width, width).to(dtype)
    h, z = torch.randn(case.rows, width).to(dtype), torch.randn(case.rows, 4 * width).to(dtype)
    everything, gates = torch.randn(case.steps * case.rows, width).to(dtype), torch.randn(case.steps * case.rows, 4 * width).to(dtype)

    def step() -> None:
        for matrices, inputs in (((w_mh, w_h), (h, h)), ((w_h.t(), w_mh.t()), (z, h))):
            by = [multiplier(w, case.rows, case.steps) for w in matrices]
            for _ in range(case.steps):
                for multiply, x in zip(by, inputs, strict=True):
                    multiply(x)
        weight_gradient(gates, everything)
        weight_gradient(everything, everything)

    return step
