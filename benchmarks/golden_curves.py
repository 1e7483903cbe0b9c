"""Show that a change of the code changes no bit of a training: both families, two precisions, one and two processes, a resume.

    python -m benchmarks.golden_curves --write     run all cases and store the curves (about 2 minutes on two cores)
    python -m benchmarks.golden_curves             run them again and compare

Every case is a small run of two phases through the command line. Compared are the losses, gradient norms and learning rates of every step, the
validation results and the bytes of the last weights. Bits depend on the processor, on torch and on Python's own documentation, which is the text:
where one of them differs from the stored ones nothing can be compared, and the command says so. A refactoring of the training path keeps the file
benchmarks/results/golden-curves.json as it is; a change of the arithmetic writes it anew, and says why.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import pydoc_data.topics
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from overnight.run_dir.environment import environment

STORED = Path(__file__).parent / "results" / "golden-curves.json"
CASES = (
    "bert-fp32",
    "bert-bf16",
    "bert-fp32-2-processes",
    "bert-fp32-resumed",
    "mlstm-fp32",
    "mlstm-bf16",
    "mlstm-fp32-2-processes",
    "mlstm-fp32-resumed",
)


def recipe(folder: Path, case: str) -> dict[str, Any]:
    """The recipe of a case, whose run and data lie in the folder."""
    family, precision = case.split("-")[:2]
    optim = {"name": "lamb", "lr": 0.01, "schedule": {"name": "poly", "warmup_ratio": 0.1}}
    phase: dict[str, Any] = {"steps": 20, "global_batch_size": 16, "seq_len": 32, "micro_batch_size": 4, "optim": optim}
    second = {"steps": 10, "seq_len": 64, "optim": {**optim, "name": "lans"}}
    data: dict[str, Any] = {
        "paths": [str(folder / "text.jsonl")],
        "dir": str(folder / f"data-{family}"),
        "valid_fraction": 0.2,
        "workers": 1,
    }
    if family == "bert":
        model: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "max_position_embeddings": 64}
        data["vocab_size"] = 600
        phase |= {"max_predictions_per_seq": 5}
    else:
        model = {"kind": "mlstm", "num_layers": 1, "hidden_size": 64, "embedding_size": 16}
        data["tokenizer"] = "bytes"
        phase |= {"num_document_groups": 32}
    return {
        "name": "golden",
        "out": str(folder / case),
        "data": data,
        "model": model,
        "phases": {"short": phase, "long": phase | second},
        "precision": precision, "compute": {"threads": 1, "device": "cpu"}, "logging": {"log_every": 1, "eval_every": 10, "eval_examples": 32}, "checkpoint": {"save_every": 5, "keep_latest_k": 9},
    }  # fmt: skip


def run(folder: Path, case: str) -> dict[str, Any]:
    """Train a case and return its curve: numbers in hexadecimal, so that no bit is lost."""
    path = folder / f"{case}.yaml"
    path.write_text(yaml.safe_dump(recipe(folder, case)), encoding="utf-8")
    command("prepare", str(path))
    train = ["launch", str(path), "--processes", "2"] if "2-processes" in case else ["pretrain", str(path)]
    command(*train)
    if case.endswith("resumed"):
        for step in (15, 20, 25, 30):
            shutil.rmtree(folder / case / "checkpoints" / f"step-{step:07d}")
        command(*train)
    lines = [json.loads(line) for line in (folder / case / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    kept = ("loss", "grad_norm", "lr")
    curve = [
        [
            line["kind"],
            line["global_step"],
            *(line[name].hex() for name in sorted(line) if name in kept or name.endswith(("_loss", "_accuracy"))),
        ]
        for line in lines
        if line["kind"] in ("train", "eval")
    ]
    weights = load_file(folder / case / "checkpoints" / "step-0000030" / "model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(weights[name].contiguous().view(torch.uint8).numpy().tobytes())
    return {"curve": curve, "weights": digest.hexdigest()}


def command(*words: str) -> None:
    """Run the command line in a process of its own, as a user does."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "overnight", *words], capture_output=True, text=True, env=variables, check=False)
    if done.returncode:
        sys.exit(f"overnight {' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def machine() -> dict[str, str]:
    """What the bits depend on besides the code."""
    text = hashlib.sha256(json.dumps(pydoc_data.topics.topics, sort_keys=True).encode()).hexdigest()[:16]
    return {"processor": environment()["cpu"]["model"], "torch": torch.__version__, "python": platform.python_version(), "text": text}


def main() -> int:
    """Write the curves or compare with them; returns 1 where a bit differs, 2 where nothing can be compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the curves instead of comparing")
    parser.add_argument("--to", type=Path, default=STORED, metavar="FILE", help="the stored curves")
    options = parser.parse_args()
    if not options.write and not options.to.is_file():
        parser.error(f"{options.to} is missing: write it before the change, with --write")
    stored = {} if options.write else json.loads(options.to.read_text(encoding="utf-8"))
    if stored and stored["machine"] != machine():
        print(f"these bits are of another machine: {stored['machine']}, here is {machine()}; write the curves here before the change")
        return 2
    found, differ = {}, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = (json.dumps({"text": text}) + "\n" for _, text in sorted(pydoc_data.topics.topics.items()))
        (folder / "text.jsonl").write_text("".join(rows), encoding="utf-8")
        for case in CASES:
            found[case] = run(folder, case)
            verdict = "stored"
            if stored:
                same = stored["cases"][case] == found[case]
                differ += not same
                verdict = "the same bits" if same else "DIFFERS"
            print(f"{case:26} {len(found[case]['curve'])} lines  weights {found[case]['weights'][:16]}  {verdict}", flush=True)
        for resumed in (case for case in CASES if case.endswith("resumed")):
            if found[resumed] != found[resumed.removesuffix("-resumed")]:
                print(f"{resumed}: not the bits of the undisturbed run")
                differ += 1
    if options.write:
        options.to.write_text(json.dumps({"machine": machine(), "cases": found}, indent=0) + "\n", encoding="utf-8")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
