"""How good is a small encoder after some minutes on the same cores: transformers' run_mlm.py, and `overnight`?

    OVERNIGHT_DATA=... python -m benchmarks.time_to_quality                 # all of it: three seeds of 84 minutes for each of four, and a sweep
    OVERNIGHT_DATA=... python -m benchmarks.time_to_quality --only b --minutes 6 --seeds 0
    python -m benchmarks.time_to_quality --draw --out DIR                    # only the table and the picture, from the results that are there

Everyone reads the same books (or --paths), prepared once, with one vocabulary, and is evaluated on the same raw validation text:

a  run_mlm.py with Trainer's defaults (`benchmarks/mlm_peer.py` says which). One training: the schedule is that of the longest time, the others
   are saved on the way; with a learning rate of 5e-5 a shorter schedule would only take from them.
b  the same, tuned: batch 32 or 64, bf16, warm-up over a tenth, no dropout (nothing is read twice), and the best of at least six learning rates at each
   batch by the validation loss of a short training; where the best is at an edge of the grid, the grid grows there. A training for each time.
c  BERT as published, with LAMB: the first phase of --published (128 tokens, pairs, next-sentence prediction). A training for each time.
d  --modern, as it is shipped but for the text and the size. A training for each time.

Network: --layers, --width, --heads, the same for all. The minutes of c and d are those of the whole command, importing and building included; those of a
and b run from the first step to the last, and neither measuring the speed nor the sweep counts. Reported is what each really took.
Scores are those of `overnight evaluate`: bits per character and masked accuracy of the validation text, and BLiMP.

Into --out go a JSON for each training, summary.json, table.md and quality.svg; called again with the same --out, it does what is missing. The text,
the models (100 MB each) and the logs are in --work.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.mlm_peer import Settings, Size
from benchmarks.plots import Spread, by_minutes, figure
from benchmarks.timed_training import (
    Yardstick,
    assert_same_text,
    data_override,
    keep_study,
    prepare,
    pretrain_for,
    read_results,
    run_module,
    validation_text,
)
from overnight import config
from overnight.errors import ConfigError
from overnight.run_dir.atomic import write_json, write_whole
from overnight.run_dir.environment import environment
from overnight.state_files import read_mapping

BOOKS = "$OVERNIGHT_DATA/books-classic.tar.xz"
NAMES = {
    "a": "run_mlm.py, its defaults",
    "b": "run_mlm.py, tuned",
    "c": "overnight, BERT as published",
    "d": "overnight, modern",
}
TUNED = Settings(warmup=0.1, bf16=True, dropout=0.0)
"""Of b, with the batch and the rate that the sweep finds."""
BATCHES = (32, 64)
RATES = (1e-4, 2e-4, 4e-4, 8e-4, 1.6e-3, 3.2e-3)
GROWTH = 3
"""Rates that a grid may grow by, each twice or half that at its edge."""
SWEEP_SEED = 1000
"""Not among the reported ones."""


@dataclass(frozen=True)
class Campaign:
    """What is trained, and where everything is."""

    out: Path
    work: Path
    published: str
    """Recipe of c."""
    modern: str
    """Recipe of d."""
    paths: tuple[str, ...]
    vocab_size: int
    size: Size
    threads: int
    sweep_minutes: float
    trial_seconds: float
    blimp: str
    pairs: int

    def study(self) -> dict[str, Any]:
        """Return what the results depend on."""
        return {name: value for name, value in asdict(self).items() if name not in ("out", "work", "trial_seconds")}

    @property
    def data(self) -> Path:
        """The folder of the prepared text."""
        return self.work / "data"

    def overrides(self, recipe: str, seed: int) -> list[str]:
        """Return what the recipe of every row is changed by: text, size and seed."""
        run = config.load_run(self.published)
        sizes = {"num_layers": self.size.layers, "hidden_size": self.size.width, "num_heads": self.size.heads}
        made = [data_override(run, self.data, paths=list(self.paths), vocab_size=self.vocab_size), f"seed={seed}"]
        made += [f"model.{name}={value}" for name, value in sizes.items()]
        if recipe == self.published:
            name, phase = next(iter(config.to_tree(config.load_run(recipe))["phases"].items()))
            made.append(f"phases={json.dumps({name: phase})}")
        return made

    def yardstick(self) -> Yardstick:
        """Prepare what every model is measured on."""
        recipe = config.load_run(self.published, self.overrides(self.published, 0))
        return Yardstick(validation_text(recipe, self.work / "validation.txt"), self.blimp, self.pairs)


def train_peer(campaign: Campaign, settings: Settings, minutes: Sequence[float], seed: int, out: Path) -> dict[str, Any]:
    """Train the peer in a process of its own, unless it is done; what is half done begins anew. Returns its training.json."""
    if not (out / "training.json").exists():
        shutil.rmtree(out, ignore_errors=True)
        words = ["--data", campaign.data, "--out", out, "--seed", seed, "--threads", campaign.threads]
        words += ["--minutes", *minutes, "--trial-seconds", campaign.trial_seconds]
        for name, value in asdict(campaign.size).items() | asdict(settings).items():
            words += [f"--{name}"] if value is True else [] if value is False else [f"--{name}", value]
        run_module("benchmarks.mlm_peer", words, out / "log.txt", campaign.threads)
    return read_mapping(out / "training.json", "delete it and run again")


def sweep(campaign: Campaign) -> Settings:
    """Return the batch and the learning rate of b with the lowest validation loss; each trial is a JSON of its own."""
    scores: dict[tuple[int, float], float] = {}

    def score(batch: int, lr: float) -> float:
        path = campaign.out / f"sweep-{batch}-{lr:g}.json"
        if not path.exists():
            folder = campaign.work / path.stem
            training = train_peer(campaign, replace(TUNED, batch=batch, lr=lr), [campaign.sweep_minutes], SWEEP_SEED, folder)
            write_json(path, training)
            shutil.rmtree(folder)
            print(f"sweep: batch {batch}, lr {lr:g}: {training['valid_loss']}", flush=True)
        loss = read_mapping(path, "delete it and run again")["valid_loss"]
        scores[batch, lr] = math.inf if loss is None else loss
        return scores[batch, lr]

    for batch in BATCHES:
        rates = {lr: score(batch, lr) for lr in RATES}
        while len(rates) < len(RATES) + GROWTH and (further := beyond(rates)):
            rates[further] = score(batch, further)
    batch, lr = min(scores, key=scores.__getitem__)
    return replace(TUNED, batch=batch, lr=lr)


def beyond(scores: Mapping[float, float]) -> float | None:
    """Return the rate to try next where the best is the lowest or the highest so far, else None; less is better."""
    best = min(scores, key=lambda lr: (scores[lr], lr))
    return best / 2 if best == min(scores) else 2 * best if best == max(scores) else None


def result_path(campaign: Campaign, row: str, minutes: float, seed: int) -> Path:
    """Return where the result of a training is kept."""
    return campaign.out / f"{row}-{minutes:g}m-seed{seed}.json"


def keep(campaign: Campaign, row: str, minutes: float, seed: int, folder: Path, yardstick: Yardstick, facts: Mapping[str, Any]) -> None:
    """Evaluate a model and write its result, and say it."""
    scores = yardstick(folder, folder.parent / f"{folder.name}-evaluation.json", campaign.threads)
    result = {"row": row, "name": NAMES[row], "minutes": minutes, "seed": seed, **facts, "scores": scores, "environment": environment()}
    write_json(result_path(campaign, row, minutes, seed), result)
    print(f"{row} {minutes:g} min, seed {seed}: {facts['steps']} steps in {facts['seconds']:.0f} s: {told(scores)}", flush=True)


def told(scores: Mapping[str, Any]) -> str:
    """Return the scores in words."""
    blimp = scores.get("blimp")
    return f"{scores['bits_per_character']:.3f} bits per character" + ("" if blimp is None else f", BLiMP {100 * blimp:.1f} %")


def run_peer(campaign: Campaign, row: str, settings: Settings, minutes: Sequence[float], seed: int, yardstick: Yardstick) -> None:
    """Train the peer for the longest of some times and keep a result for each of them."""
    folder = campaign.work / f"{row}-{max(minutes):g}m-seed{seed}"
    training = train_peer(campaign, settings, minutes, seed, folder)
    facts = {"settings": training["settings"], "planned_steps": training["steps"], "schedule_minutes": max(minutes)}
    for m in minutes:
        reached = training["reached"][f"{m:g}"]
        keep(campaign, row, m, seed, folder / f"{m:g}m", yardstick, facts | reached)


def run_ours(campaign: Campaign, row: str, minutes: float, seed: int, yardstick: Yardstick) -> None:
    """Train a recipe of `overnight` and keep its result."""
    recipe = campaign.published if row == "c" else campaign.modern
    folder = campaign.work / f"{row}-{minutes:g}m-seed{seed}"
    facts = folder / "training.json"
    if not facts.exists():
        trained = pretrain_for(recipe, campaign.overrides(recipe, seed), folder, minutes, campaign.threads, campaign.trial_seconds)
        write_json(facts, {"recipe": recipe, **asdict(trained)})
    keep(campaign, row, minutes, seed, folder / "run", yardstick, read_mapping(facts, "delete it and run again"))


def run(campaign: Campaign, rows: Sequence[str], minutes: Sequence[float], seeds: Sequence[int]) -> None:
    """Do what is missing, seed after seed, the short times first."""
    try:
        for recipe in {campaign.published, *([campaign.modern] if "d" in rows else [])}:
            config.load_run(recipe, campaign.overrides(recipe, 0))
    except ConfigError as error:  # before anything is written
        raise SystemExit(str(error)) from None
    for folder in (campaign.out, campaign.work):
        keep_study(folder, campaign.study())
    prepare(campaign.published, campaign.overrides(campaign.published, 0), campaign.work / "prepare.log", campaign.threads)
    yardstick, tuned = campaign.yardstick(), Settings()
    for seed in seeds:
        missing = [(m, row) for m in sorted(minutes) for row in rows if not result_path(campaign, row, m, seed).exists()]
        if any(row == "b" for _, row in missing) and tuned == Settings():
            tuned = sweep(campaign)
        for m, row in missing:
            if row == "b":
                run_peer(campaign, row, tuned, [m], seed, yardstick)
            elif row in ("c", "d"):
                run_ours(campaign, row, m, seed, yardstick)
        if defaults := [m for m, row in missing if row == "a"]:
            run_peer(campaign, "a", Settings(), defaults, seed, yardstick)


MEASURES = {
    "bits_per_character": ("bits per character", ".3f", 1.0),
    "blimp": ("BLiMP, %", ".1f", 100.0),
    "masked_accuracy": ("masked accuracy, %", ".1f", 100.0),
}
"""Of an evaluation: its title, its format and its unit."""


def spreads(results: Sequence[Mapping[str, Any]], measure: str) -> dict[str, dict[float, Spread]]:
    """Return a measure, in its unit, over the seeds by name and minutes; a training that has none is left out."""
    found: dict[str, dict[float, list[float]]] = {}
    for name in NAMES.values():
        for result in results:
            value = result["scores"].get(measure)
            if result["name"] == name and value is not None:
                found.setdefault(name, {}).setdefault(result["minutes"], []).append(value * MEASURES[measure][2])
    return {name: {m: Spread.of(values) for m, values in row.items()} for name, row in found.items()}


def table(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a table of each measure, in Markdown, and the trainings that took more or less than their time by a twentieth."""
    minutes = sorted({result["minutes"] for result in results})
    yield f"Median of the seeds {sorted({r['seed'] for r in results})} (lowest–highest) after minutes of training."
    for measure, (title, form, _) in MEASURES.items():
        if not (found := spreads(results, measure)):
            continue
        yield from ("", f"| {title} | " + " | ".join(f"{m:g} min" for m in minutes) + " |", "|---" * (1 + len(minutes)) + "|")
        for name, row in found.items():
            cells = [shown(row[m], form) if m in row else "-" for m in minutes]
            yield f"| {name} | {' | '.join(cells)} |"
    off = [r for r in results if abs(r["seconds"] / (60 * r["minutes"]) - 1) > 0.05]
    yield from ("", *(f"- {r['name']}, {r['minutes']:g} min, seed {r['seed']}, took {r['seconds'] / 60:.2f} minutes." for r in off))


def shown(spread: Spread, form: str) -> str:
    """Return a spread in the cell of a table."""
    return f"{spread.median:{form}} ({spread.low:{form}}–{spread.high:{form}})"


def write(out: Path) -> None:
    """Write the table, the picture and the summary of the results that are there, and print the table."""
    results = read_results(out, "[abcd]-*.json")
    if not results:
        raise SystemExit(f"{out} holds no result; leave --draw out to train")
    assert_same_text({f"{r['name']}, {r['minutes']:g} min, seed {r['seed']}": r["scores"] for r in results})
    lines = list(table(results))
    print("\n".join(["", *lines]), flush=True)
    write_whole(out / "table.md", ["\n".join([*lines, ""]).encode()])
    panels = [
        lambda axes, measure=measure: by_minutes(axes, MEASURES[measure][0], spreads(results, measure))
        for measure in ("bits_per_character", "blimp")
        if spreads(results, measure)
    ]
    study = read_mapping(out / "study.json", "run without --draw")
    about = f"{study['size']['layers']} layers, width {study['size']['width']}: quality against minutes, {study['threads']} threads"
    write_whole(out / "quality.svg", [figure(about, panels).encode()])
    sweeps = read_results(out, "sweep-*.json")
    write_json(out / "summary.json", {"environment": environment(), "results": results, "sweep": sweeps, "report": lines})


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is not done, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--minutes", type=float, nargs="+", default=[3, 6, 15, 60])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--published", default="bert-mini-books", metavar="RECIPE")
    parser.add_argument("--modern", default="night-cpu", metavar="RECIPE")
    parser.add_argument("--paths", nargs="+", default=[BOOKS], help="text, as `data.paths` names it")
    parser.add_argument("--vocab-size", type=int, default=8192)
    for name in ("layers", "width", "heads", "length"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Size, name))
    parser.add_argument("--sweep-minutes", type=float, default=3, help="of each trial of the sweep of b")
    parser.add_argument("--trial-seconds", type=float, default=15, help="how long a speed is measured")
    parser.add_argument("--blimp", default="$OVERNIGHT_DATA/blimp/blimp.tar.xz", help="archive or folder; '' leaves BLiMP out")
    parser.add_argument("--pairs", type=int, default=100, help="of a paradigm of BLiMP")
    parser.add_argument("--work", type=Path, default=Path("runs/time-to-quality"), help="folder of the prepared text, models and logs")
    parser.add_argument("--draw", action="store_true", help="only the table and the picture of --out")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / f"{date.today()}-cpu{os.cpu_count()}-time-to-quality"
    )
    given = parser.parse_args(arguments)
    if not given.draw:
        campaign = Campaign(
            out=given.out,
            work=given.work,
            published=given.published,
            modern=given.modern,
            paths=tuple(given.paths),
            vocab_size=given.vocab_size,
            size=Size(given.layers, given.width, given.heads, given.length),
            threads=given.threads,
            sweep_minutes=given.sweep_minutes,
            trial_seconds=given.trial_seconds,
            blimp=given.blimp,
            pairs=given.pairs,
        )
        run(campaign, given.only, given.minutes, given.seeds)
    write(given.out)


if __name__ == "__main__":
    main()
