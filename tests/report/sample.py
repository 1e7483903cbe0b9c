"""A run folder as training leaves it, for the tests of the report."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def settings(name: str = "demo", **changes: Any) -> dict[str, Any]:
    """Resolved settings of a run with two phases and one task."""
    task = {"task": "docnames", "epochs": 3.0, "global_batch_size": 32, "lr": 5e-5, "seeds": [0, 1, 2], "random_init_seeds": 3}
    optim = {"name": "lamb", "lr": 4e-3, "schedule": {"name": "poly", "warmup_ratio": 0.1, "power": 1.0}}
    return {
        "name": name,
        "seed": 0,
        "model": {"num_layers": 2, "hidden_size": 128, "num_heads": 2, "max_position_embeddings": 512, "dropout": 0.1},
        "phases": {
            "short": {"steps": 200, "global_batch_size": 64, "seq_len": 128, "nsp": True, "optim": optim},
            "long": {"steps": 50, "global_batch_size": 32, "seq_len": 256, "nsp": True, "optim": {**optim, "lr": 2e-3}},
        },
        "finetune": {"docnames": task},
        "precision": "fp32",
        "compute": {"device": "auto", "threads": 0},
        **changes,
    }


def metrics(shift: float = 0.0, nsp: bool = True) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl; the curves are made up."""
    lines: list[dict[str, Any]] = []
    step, seconds, tokens, sequences = 0, 0.0, 0, 0
    for phase, steps, batch, length in (("short", 200, 64, 110), ("long", 50, 32, 220)):
        lines.append({"kind": "phase", "phase": phase, "global_step": step, "event": "start", "seconds": seconds})
        for i in range(1, steps + 1):
            step, seconds = step + 1, seconds + 0.9 + 0.03 * math.sin(step)
            tokens, sequences = tokens + batch * length, sequences + batch
            here = {"phase": phase, "step": i, "global_step": step, "seconds": round(seconds, 3)}
            mlm = 3.1 + shift + 5.5 * math.exp(-step / 60) + 0.12 * math.sin(2.3 * step) * math.sin(0.7 * step)
            loss = {"nsp_loss": 0.3 + 0.4 * math.exp(-step / 90)} if nsp else {}
            if i % 5 == 0:
                lr = (4e-3 if phase == "short" else 2e-3) * min(10 * i / steps, 1 - i / steps)
                rates = {"tokens_per_s": 7800 + 300 * math.sin(step), "sequences_per_s": 71 + 3 * math.sin(step)}
                numbers = {
                    "loss": mlm + loss.get("nsp_loss", 0),
                    "mlm_loss": mlm,
                    **loss,
                    "lr": lr,
                    "grad_norm": 1.2 + 0.5 * math.cos(step),
                }
                lines.append({"kind": "train", **here, **numbers, "tokens": tokens, "sequences": sequences, **rates})
            if i % 25 == 0:
                held = {"mlm_loss": mlm + 0.1, "mlm_accuracy": 0.45 - 0.4 * math.exp(-step / 80) - shift / 10}
                more = {"nsp_loss": loss["nsp_loss"] + 0.02, "nsp_accuracy": 0.85 - 0.35 * math.exp(-step / 90)} if nsp else {}
                lines.append({"kind": "eval", **here, **held, **more})
        lines.append({"kind": "phase", "phase": phase, "global_step": step, "event": "end", "seconds": seconds})
    return lines


def byte_settings(name: str = "bytes") -> dict[str, Any]:
    """Resolved settings of a run of a byte model."""
    phase = {"steps": 60, "global_batch_size": 128, "seq_len": 256}
    return settings(name, model={"kind": "mlstm", "num_layers": 1, "hidden_size": 512}, phases={"only": phase}, finetune={})


def byte_metrics() -> list[dict[str, Any]]:
    """Lines of metrics.jsonl of a byte model; the curves are made up."""
    lines: list[dict[str, Any]] = []
    for step in range(5, 65, 5):
        here = {"phase": "only", "step": step, "global_step": step, "seconds": 2.0 * step}
        nats = 1.0 + 3 * math.exp(-step / 20)
        lines.append({"kind": "train", **here, "loss": nats, "byte_loss": nats, "lr": 1e-3, "grad_norm": 0.5, "tokens": step * 128 * 256})
        if step % 20 == 0:
            held = {"byte_loss": nats + 0.1, "byte_accuracy": 1 - nats / 5, "bits_per_byte": (nats + 0.1) / math.log(2)}
            lines.append({"kind": "eval", **here, **held})
    return [*lines, {"kind": "phase", "phase": "only", "global_step": 60, "event": "end", "seconds": 120.0}]


def measured(steps: int = 40, every: int = 2) -> list[dict[str, Any]]:
    """Lines of the tensors and of the noise scale, the first of which is unknown; made up."""
    lines: list[dict[str, Any]] = []
    for step in range(every, steps + 1, every):
        here = {"phase": "short", "step": step, "global_step": step, "seconds": round(0.9 * step, 3)}
        tensors = {
            "encoder.word.weight": [18.0, 0.8, 0.09 + step / 1000, 0.11],
            "encoder.layers.0.up.weight": [6.4, 0.04, 0.03, 0.0123456 * step],
            "encoder.layers.0.up.bias": [0.0 if step == every else 0.5, 0.005, 0.02, None],
        }
        lines.append({"kind": "tensor_norms", **here, "tensor_norms": tensors})
        scales = {"run": None if step == every else 10.0 * step, "matrices": 11.0 * step, "vectors": None}
        lines.append({"kind": "noise", **here, "batch": 64, "groups": scales})
    return lines


def finetunings(pretrained: list[float], random_init: list[float]) -> list[dict[str, Any]]:
    """Lines of the fine-tuned seeds and the baseline."""
    lines: list[dict[str, Any]] = []
    for init, values in (("pretrained", pretrained), ("random", random_init)):
        for seed, value in enumerate(values):
            scores = {"metric": "accuracy", "value": value, "metrics": {"accuracy": value, "f1": value - 0.02}}
            lines.append(
                {
                    "kind": "finetune",
                    "name": "docnames",
                    "task": "docnames",
                    "seed": seed,
                    "init": init,
                    **scores,
                    "rows": 4000,
                    "seconds": 31.0,
                }
            )
    return [*lines, {"kind": "baseline", "name": "docnames", "method": "word overlap", "metric": "accuracy", "value": 0.88}]


ENVIRONMENT = {
    "overnight": "0.1.0", "python": "3.11.7", "packages": {"torch": "2.13.0", "numpy": "2.4.6"},
    "cpu": {"model": "Sample Processor", "cores": 2, "flags": ["avx2", "avx512f"]}, "memory_gb": 8.0, "gpus": [],
}  # fmt: skip


def write_run(
    folder: Path, lines: list[dict[str, Any]], run: dict[str, Any] | None = None, environment: dict[str, Any] | None = None
) -> Path:
    """Write a run folder of these lines and settings."""
    import yaml

    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(run or settings(), sort_keys=False), encoding="utf-8")
    (folder / "env.json").write_text(json.dumps(environment or ENVIRONMENT), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return folder
