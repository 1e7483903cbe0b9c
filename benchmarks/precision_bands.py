"""Train 300 steps in every precision from the same start on the same batches, and see how far each curve goes from that of fp32.

    python -m benchmarks.precision_bands
    python -m benchmarks.precision_bands --draw DIR    # only the picture, from DIR/result.json

Two layers of width 128 on the documentation inside the Python environment, with LAMB at a rate of the order of the demo's and without dropout. Validation
losses are compared every ten steps: a precision passes when it stays within BAND of fp32 from step SETTLED on (fp16 first skips the steps in which
it finds its loss scale, and its curve begins as many steps late). `fp32, cut otherwise` is fp32 with another
micro-batch: what rounding alone does. fp8 is emulated on a machine without the hardware, and left out without torchao.
Into benchmarks/results/<date>-<machine>-precision/ go result.json and bands.svg.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch
from matplotlib.axes import Axes

from benchmarks.plots import figure
from overnight import config
from overnight.console import Line
from overnight.corpus.pipeline import prepare
from overnight.engine.pretrain import pretrain
from overnight.run_dir.environment import environment

BAND = 0.01
"""Relative difference of the validation loss from that of fp32 in which a precision must stay."""
STEPS, EVERY, SETTLED = 300, 10, 100
OTHERWISE = "fp32, cut otherwise"
COLORS = {"fp32": "#000000", OTHERWISE: "#999999", "tf32": "#56B4E9", "bf16": "#0072B2", "fp16": "#D55E00", "fp8": "#CC79A7"}

Curve = dict[int, float]
"""Validation masked-LM loss by step."""


def train(folder: Path, name: str, device: str, steps: int) -> tuple[Curve, float, int]:
    """Train in a precision: the validation losses, the seconds, and how many steps were skipped."""
    optim = {"name": "lamb", "lr": 0.02, "schedule": {"name": "poly", "warmup_ratio": 0.1}}
    tree = {
        "name": "bands",
        "out": str(folder / name.replace(" ", "-")),
        "data": {"dir": str(folder / "data"), "vocab_size": 4000, "valid_fraction": 0.02},
        "model": {
            "num_layers": 2,
            "hidden_size": 128,
            "num_heads": 2,
            "max_position_embeddings": 64,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "phases": {
            "short": {
                "steps": steps,
                "global_batch_size": 64,
                "seq_len": 64,
                "micro_batch_size": 16 if name == OTHERWISE else 64,
                "max_predictions_per_seq": 10,
                "optim": optim,
            }
        },
        "precision": name.partition(",")[0],
        "compute": {"device": device, "threads": 1},
        "logging": {"eval_every": EVERY, "eval_examples": 1024},
        "checkpoint": {"save_every": steps},
    }
    run = config.build_run(tree)
    prepare(run.data, run.data_dir, log=lambda words: None)
    start = time.perf_counter()
    with (folder / "log.txt").open("a", encoding="utf-8") as log:
        pretrain(run, Line(log))
    lines = [json.loads(text) for text in (run.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    losses = {int(entry["step"]): float(entry["mlm_loss"]) for entry in lines if entry["kind"] == "eval"}
    skipped = sum(entry["kind"] == "event" and entry["event"] == "skipped" for entry in lines)
    return losses, time.perf_counter() - start, skipped


def distances(curve: Curve, reference: Curve) -> Curve:
    """Relative difference from the reference, by step."""
    return {step: loss / reference[step] - 1 for step, loss in curve.items()}


def farthest(curve: Curve, reference: Curve) -> tuple[float, float]:
    """The largest relative difference from SETTLED on, and of all steps."""
    found = {step: abs(d) if math.isfinite(d) else math.inf for step, d in distances(curve, reference).items()}  # NaN is above no number
    return max(d for step, d in found.items() if step >= min(SETTLED, max(found))), max(found.values())


def picture(curves: Mapping[str, Curve]) -> str:
    """Return two panels as SVG: the losses, and their differences from fp32 with the band."""
    far = {name: {s: 100 * d for s, d in distances(curve, curves["fp32"]).items()} for name, curve in curves.items() if name != "fp32"}

    def losses(axes: Axes) -> None:
        draw(axes, "validation masked-LM loss", curves)

    def differences(axes: Axes) -> None:
        axes.axhspan(-100 * BAND, 100 * BAND, color="#666666", alpha=0.1, linewidth=0)
        draw(axes, "difference from fp32, %", far)

    return figure("the same training in every precision", [losses, differences])


def draw(axes: Axes, title: str, curves: Mapping[str, Curve]) -> None:
    """Draw curves over the optimizer steps; that of fp32 cut otherwise dashed, because it lies on fp32."""
    axes.set(title=title, xlabel="optimizer steps")
    for name, curve in curves.items():
        axes.plot(list(curve), list(curve.values()), "--" if name == OTHERWISE else "-", color=COLORS[name], linewidth=1.8, label=name)


def precisions(device: str) -> Sequence[str]:
    """Those that this machine can train in; a CPU has no tf32."""
    return ["fp32", OTHERWISE, *(["tf32"] if device == "cuda" else []), "bf16", "fp16", *(["fp8"] if find_spec("torchao") else [])]


def main() -> None:
    """Train, compare, draw, and keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--without", nargs="*", default=[], help="precisions to leave out, such as fp8, which is slow where it is emulated")
    parser.add_argument("--machine", default=f"cpu{psutil.cpu_count()}", help="word for the machine in the name of the results folder")
    parser.add_argument("--draw", type=Path, metavar="DIR", help="only draw the picture of these results again")
    options = parser.parse_args()
    if options.draw:
        known = json.loads((options.draw / "result.json").read_text(encoding="utf-8"))["precisions"]
        losses = {name: {int(step): loss for step, loss in found["losses"].items()} for name, found in known.items()}
        (options.draw / "bands.svg").write_text(picture(losses), encoding="utf-8")
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in [name for name in precisions(device) if name not in options.without]:
            found[name] = train(Path(folder), name, device, options.steps)
            curve, seconds, skipped = found[name]
            away, ever = farthest(curve, found["fp32"][0])
            print(
                f"{name:20} validation loss {curve[max(curve)]:.4f}  at most {100 * away:.3f} % from fp32 (ever {100 * ever:.3f} %)  {skipped} steps skipped  {seconds:.0f} s",
                flush=True,
            )
    out = Path(__file__).parent / "results" / f"{date.today()}-{options.machine}-precision"
    out.mkdir(parents=True, exist_ok=True)
    curves = {name: curve for name, (curve, _, _) in found.items()}
    (out / "bands.svg").write_text(picture(curves), encoding="utf-8")
    ways = {name: farthest(curve, curves["fp32"]) for name, curve in curves.items()}
    result = {
        "command": ["python", "-m", "benchmarks.precision_bands", *sys.argv[1:]],
        "environment": environment(),
        "band": BAND,
        "settled": SETTLED,
        "farthest": {name: {"settled": settled, "ever": ever} for name, (settled, ever) in ways.items()},
        "precisions": {name: {"losses": c, "seconds": round(s, 1), "skipped": k} for name, (c, s, k) in found.items()},
    }
    (out / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.exit(any(settled > BAND for settled, _ in ways.values()))


if __name__ == "__main__":
    main()
