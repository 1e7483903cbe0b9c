"""What is pretraining worth on real tasks? Fine-tune runs, and the same networks from random init, on GLUE tasks, IMDB and SQuAD.

    OVERNIGHT_DATA=... python -m benchmarks.task_table --run night=runs/night-cpu --run bert=runs/bert-mini-books
    OVERNIGHT_DATA=... python -m benchmarks.task_table --run night=runs/night-cpu --tasks sst2 cola --seeds 0

Every task has the same settings for every run: those below, nothing is chosen by the scores. Beside them stand the rules without a network, as
`overnight finetune` scores them on the same rows, and the published scores of small BERTs, on test rows that are not published. Into --out go result.json and table.md: medians and
spreads (highest - lowest) over the seeds on the published validation rows (IMDB: the 2,487 training reviews that `overnight finetune` splits off; SQuAD: the split that it makes of the files there). Called again, it does what is missing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import psutil

from overnight.config import environment_path
from overnight.display import scale_of
from overnight.finetune.metrics import score
from overnight.run_dir.atomic import write_json, write_whole
from overnight.run_dir.environment import environment
from overnight.run_dir.task_results import read_results
from overnight.tasks.baselines import baselines
from overnight.tasks.classification import load_task
from overnight.tasks.examples import drawn, strata


@dataclass(frozen=True)
class Settings:
    """How a task is fine-tuned."""

    path: str
    metric: str
    epochs: float
    seq_len: int
    max_train_examples: int = 0
    published: tuple[float, ...] = ()
    """Scores of `SMALL`, of the same metric."""


SMALL = ("BERT-tiny", "BERT-mini", "BERT-small")
"""2 x 128, 4 x 256 and 4 x 512, by Turc et al. 2019 (arXiv 1908.08962): test scores of GLUE, with the best of sixteen settings for each task (github.com/google-research/bert)."""
TASKS = {
    "sst2": Settings("$OVERNIGHT_DATA/glue/SST-2", "accuracy", 1, 64, published=(83.2, 85.9, 89.7)),
    "cola": Settings("$OVERNIGHT_DATA/glue/CoLA", "Matthews' correlation", 6, 64, published=(0.0, 0.0, 27.8)),
    "mrpc": Settings("$OVERNIGHT_DATA/glue/MRPC", "accuracy", 6, 128, published=(71.1, 71.8, 76.2)),
    "rte": Settings("$OVERNIGHT_DATA/glue/RTE", "accuracy", 6, 128, published=(57.2, 57.9, 61.8)),
    "stsb": Settings("$OVERNIGHT_DATA/glue/STS-B", "Spearman's correlation", 6, 128, published=(73.6, 73.3, 77.0)),
    "wnli": Settings("$OVERNIGHT_DATA/glue/WNLI", "accuracy", 6, 128, published=(62.3, 62.3, 62.3)),
    "imdb": Settings("$OVERNIGHT_DATA/aclImdb.tar.xz", "accuracy", 2, 256, 5000),
    "squad": Settings("$OVERNIGHT_DATA/squad", "F1", 2, 256),
}


def fine_tune(run: str, task: str, random_init: bool, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Fine-tune a task of a run with every seed, unless it is done, and from random init if asked; return its lines."""
    settings = TASKS[task]
    keys = {name: value for name, value in asdict(settings).items() if name not in ("metric", "published")}
    keys |= {
        "optimizer": options.optimizer,
        "lr": options.lr,
        "seeds": json.dumps(options.seeds),
        "random_init_seeds": len(options.seeds) * random_init,
    }
    keys |= {"compute.threads": options.threads}
    command = [sys.executable, "-m", "overnight", "finetune", task, "--from", run, *(f"--{key}={value}" for key, value in keys.items())]
    subprocess.run(command, check=True)
    last = [line for line in read_results(Path(run) / "tasks.jsonl") if line["name"] == task and line["kind"] == "finetune"]
    return [line for line in last if line["config_hash"] == last[-1]["config_hash"] and line["seed"] in options.seeds]


def without_network(task: str) -> dict[str, float]:
    """Return what rules without a network score on dev, by their names: trained on the rows that the networks are trained on."""
    settings = TASKS[task]
    if task == "squad":
        return {}
    data = load_task(task, environment_path(settings.path, "path"))
    train, wanted = data.train, [example.label for example in data.dev if example.label is not None]
    if settings.max_train_examples:
        texts = [f"{example.text_a}\x00{example.text_b or ''}" for example in train]
        train = [train[row] for row in drawn(texts, settings.max_train_examples, 0, strata(train))]
    return {
        rule: score(data.name, data.kind, wanted, answers)[data.main_metric]
        for rule, (answers,) in baselines(data, train, [data.dev]).items()
    }


def cell(lines: list[dict[str, Any]], init: str) -> str:
    """Return the median and the spread of an initialization, in percent."""
    values = [scale_of(line["task"]) * line["value"] for line in lines if line["init"] == init]
    if not values:
        return "-"
    return f"{statistics.median(values):.1f} ({max(values) - min(values):.1f})"


def table(results: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """Return a Markdown table: a row for each task, two columns for each run."""
    columns = [f"{name}, {init}" for name in results for init in ("pretrained", "random init")]
    head = ["task", "metric, %", *columns, "without a network", *SMALL]
    rows = [head, ["---"] * len(head)]
    for task, settings in TASKS.items():
        found = [runs[task] for runs in results.values() if task in runs]
        if len(found) == len(results):
            rules = without_network(task)
            rows.append(
                [
                    task,
                    settings.metric,
                    *(cell(lines, init) for lines in found for init in ("pretrained", "random")),
                    ", ".join(f"{rule} {100 * value:.1f}" for rule, value in rules.items()),
                    *(map(str, settings.published) if settings.published else [""] * len(SMALL)),
                ]
            )
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main() -> None:
    """Fine-tune, and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--run", action="append", required=True, metavar="NAME=FOLDER", help="a run, and what the table calls it; may be given again"
    )
    parser.add_argument(
        "--random-init",
        nargs="*",
        metavar="NAME",
        help="runs whose network is also trained from random init; without the option all, without a name none",
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--threads", type=int, default=0, help="0 takes every core")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / f"{date.today()}-cpu{psutil.cpu_count()}-tasks")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    runs = dict(given.split("=", 1) for given in options.run)
    for task in options.tasks:
        for name, folder in runs.items():
            results.setdefault(name, {})[task] = fine_tune(
                folder, task, options.random_init is None or name in options.random_init, options
            )
        study = {
            "optimizer": options.optimizer,
            "lr": options.lr,
            "seeds": options.seeds,
            "tasks": {t: asdict(TASKS[t]) for t in options.tasks},
        }
        write_json(options.out / "result.json", {"environment": environment(), "study": study, "results": results})
        text = table(results)
        write_whole(options.out / "table.md", [text.encode()])
        print(text, flush=True)


if __name__ == "__main__":
    main()
