"""Does a task keep its score in bf16 and int8? Answer its dev rows in each precision, on a CPU.

    python -m benchmarks.precision_scores runs/night-cpu --task stsb --path $OVERNIGHT_DATA/glue/STS-B --threads 1

Prints, and with --out writes, for each precision the score, how many answers are another class than in fp32 (of a number, how far the farthest
is), and texts a second of processor time. The task must be fine-tuned in the run.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import overnight
from overnight.finetune.metrics import score
from overnight.run_dir.atomic import write_json
from overnight.run_dir.environment import environment
from overnight.tasks.classification import load_task


def measure(run: Path, task: str, path: Path, threads: int) -> list[dict[str, Any]]:
    """Return a row for each precision."""
    data = load_task(task, path)
    texts = [each.text_a if each.text_b is None else (each.text_a, each.text_b) for each in data.dev]
    key = "score" if data.kind == "regression" else "label"
    rows: list[dict[str, Any]] = []
    exact: list[Any] = []
    for precision in ("fp32", "bf16", "int8"):
        model = overnight.load(run, task, precision=precision, device="cpu", threads=threads)
        model.predict(texts[:64])
        begun = time.process_time()
        found = [answer[key] for answer in model.predict(texts)]
        seconds = time.process_time() - begun
        exact = exact or found
        apart = [abs(a - b) if data.kind == "regression" else a != b for a, b in zip(found, exact, strict=True)]
        scores = score(task, data.kind, [each.label for each in data.dev], found)  # type: ignore[arg-type]  # every row of dev has a label
        rows.append(
            {
                "precision": precision,
                "scores": scores,
                "apart": max(apart) if data.kind == "regression" else sum(apart),
                "texts": len(texts),
                "texts_per_s": round(len(texts) / seconds, 1),
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure, and keep the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder in which the task is fine-tuned")
    parser.add_argument("--task", required=True)
    parser.add_argument("--path", type=Path, required=True, help="folder of the task's data")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a JSON to write")
    options = parser.parse_args()
    rows = measure(options.run, options.task, options.path, options.threads)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.out, {"environment": environment(), "task": options.task, "rows": rows})


if __name__ == "__main__":
    main()
