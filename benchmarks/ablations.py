"""What is each ingredient of a recipe worth? In and out, one at a time, at equal wall-clock time.

    OVERNIGHT_DATA=... python -m benchmarks.ablations --recipe night-cpu --minutes 6             # every variant, three seeds
    OVERNIGHT_DATA=... python -m benchmarks.ablations --recipe night-cpu --only 'optimizer*' --seeds 0
    OVERNIGHT_DATA=... python -m benchmarks.ablations --recipe night-cpu --minutes 0 --phases.short.steps=2000     # equal steps instead: where the machine has other work
    python -m benchmarks.ablations --draw --out DIR                                              # only the table, from the results that are there

The base is the recipe; a variant is the recipe with the overrides of VARIANTS. Every training has the same minutes (`benchmarks/timed_training.py`
says how), so what makes a step slower pays for it. Scores are those of `overnight evaluate` on the same raw validation text: bits per character,
those of whole words, masked accuracy, and BLiMP. The gain is in bits per character against the base with the same seed: mean and standard deviation over the
seeds. Optimizers come with more than one rate, since that of the base may suit another badly. Variants of the vocabulary are to be compared by the bits of
whole words. Filters change the training text only: the validation text is that of the base.

Where the machine has other work, `--minutes 0` gives all the same steps; `--share 'vocabulary 16,384=0.9'` gives a variant so many of them, by what its steps
are known to take.

A variant that this version of `overnight` refuses is in the table with the reason, and one that changes nothing about the base with that.

Into --out go a JSON for each training, summary.json and table.md; called again with the same --out, it does what is missing. The texts, models and logs
are in --work.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.ablation_variants import VARIANTS, expanded
from benchmarks.timed_training import (
    NO_BUDGET,
    Yardstick,
    assert_same_text,
    data_override,
    keep_study,
    prepare,
    pretrain_for,
    read_results,
    validation_text,
)
from overnight import config
from overnight.config import Run
from overnight.errors import ConfigError
from overnight.run_dir.atomic import write_json, write_whole
from overnight.run_dir.environment import environment
from overnight.state_files import read_mapping

BASE = "base"


@dataclass(frozen=True)
class Study:
    """What is trained, and where everything is."""

    out: Path
    work: Path
    recipe: str
    overrides: tuple[str, ...]
    """Of the base."""
    minutes: float
    threads: int
    trial_seconds: float
    blimp: str
    pairs: int
    shares: tuple[tuple[str, float], ...] = ()
    """Of the steps of the base, for variants whose steps take another time."""

    def facts(self) -> dict[str, Any]:
        """Return what the results depend on."""
        left_out = ("out", "work", "trial_seconds", *(() if self.shares else ("shares",)))
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    @cached_property
    def base(self) -> Run:
        """The run that the variants change, without a budget of its own: the time of all of them is given, and not every variant can have one."""
        return config.load_run(self.recipe, [*self.overrides, NO_BUDGET])

    def variant(self, name: str, seed: int) -> list[str]:
        """Return all overrides of a variant; texts that differ by nothing but their vocabulary are named after it.

        Raises:
            ConfigError: when this version of `overnight` refuses them.
        """
        made = [*self.overrides, *expanded(self.base, VARIANTS.get(name, ())), f"seed={seed}"]
        if share := dict(self.shares).get(name):
            made += [f"phases.{phase}.steps={round(share * self.base.phases[phase].steps)}" for phase in self.base.phases]
        run = config.load_run(self.recipe, [*made, NO_BUDGET])
        same = dataclasses.replace(run.data, vocab_size=self.base.data.vocab_size) == self.base.data
        return [*made, data_override(run, self.work / f"data-{run.data.vocab_size if same else slug(name)}")]

    def refusal(self, name: str) -> str:
        """Return why a variant is not trained: it is refused, or is the base itself; empty where it is trained."""
        if name == BASE:
            return ""
        try:
            here = config.load_run(self.recipe, [*self.variant(name, self.base.seed), NO_BUDGET])
        except ConfigError as error:
            return f"refused: {str(error).splitlines()[0]}"
        return "is the base" if config.identity(here) == config.identity(self.base) else ""


def train(study: Study, name: str, seed: int, yardstick: Yardstick) -> dict[str, Any]:
    """Train a variant and evaluate it; returns its result."""
    folder, overrides = study.work / f"{slug(name)}-seed{seed}", study.variant(name, seed)
    facts = folder / "training.json"
    if not facts.exists():
        trained = pretrain_for(study.recipe, overrides, folder, study.minutes, study.threads, study.trial_seconds)
        write_json(facts, asdict(trained))
    scores = yardstick(folder / "run", folder / "evaluation.json", study.threads)
    found = read_mapping(facts, "delete it and run again")
    return {
        "variant": name,
        "seed": seed,
        "overrides": list(VARIANTS.get(name, ())),
        **found,
        "scores": scores,
        "environment": environment(),
    }


def slug(name: str) -> str:
    """Return a name as a part of a file's name."""
    return "".join(c if c.isalnum() or c in ".-" else "-" for c in name.replace(", ", "-"))


def run(study: Study, names: Sequence[str], seeds: Sequence[int]) -> None:
    """Do what is missing, seed after seed, the base first."""
    refusals = {name: study.refusal(name) for name in names}
    for folder in (study.out, study.work):
        keep_study(folder, study.facts())
    write_json(study.out / "refused.json", {name: why for name, why in refusals.items() if why})
    trained = [name for name in names if not refusals[name]]
    for text in dict.fromkeys(study.variant(name, 0)[-1] for name in (BASE, *trained)):
        prepare(study.recipe, [*study.overrides, text], study.work / "prepare.log", study.threads)
    first = config.load_run(study.recipe, study.variant(BASE, 0))
    yardstick = Yardstick(validation_text(first, study.work / "validation.txt"), study.blimp, study.pairs)
    for seed in seeds:
        for name in trained:
            path = study.out / f"variant-{slug(name)}-seed{seed}.json"
            if not path.exists():
                write_json(path, result := train(study, name, seed, yardstick))
                bits = result["scores"]["bits_per_character"]
                print(
                    f"{name}, seed {seed}: {bits:.3f} bits per character, {result['steps']} steps in {result['seconds']:.0f} s", flush=True
                )


@dataclass(frozen=True)
class Row:
    """What a variant reached."""

    name: str
    gains: tuple[float, ...]
    """Bits per character less than the base with the same seed, by seed."""
    results: tuple[Mapping[str, Any], ...]

    @property
    def gain(self) -> float:
        """The mean."""
        return statistics.fmean(self.gains)


def rows(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the variants by their gain, the greatest first; the base has none, and those that share no seed with it are left out.

    Raises:
        SystemExit: when not all were scored on the same validation text, such as that of another version's preparation.
    """
    assert_same_text({f"{r['variant']}, seed {r['seed']}": r["scores"] for r in results})
    base = {r["seed"]: r["scores"]["bits_per_character"] for r in results if r["variant"] == BASE}
    found = []
    for name in dict.fromkeys(r["variant"] for r in results):
        here = tuple(r for r in results if r["variant"] == name and r["seed"] in base)
        if here:
            found.append(Row(name, tuple(base[r["seed"]] - r["scores"]["bits_per_character"] for r in here), here))
    return sorted(found, key=lambda row: (-row.gain, row.name))


def mean_and_spread(values: Sequence[float | None], form: str) -> str:
    """Return `mean ± standard deviation`, without the latter for a single value; a dash for none."""
    kept = [value for value in values if value is not None]
    if not kept:
        return "-"
    return f"{statistics.fmean(kept):{form}}" + (f" ± {statistics.stdev(kept):{form.lstrip('+')}}" if len(kept) > 1 else "")


def table(results: Sequence[Mapping[str, Any]], refused: Mapping[str, str]) -> Iterator[str]:
    """Yield the table, in Markdown, and below it the variants that were not trained."""
    yield "Mean ± standard deviation over the seeds; the gain is in bits per character, against the base with the same seed."
    yield ""
    yield "| variant | gain | bits per character | of whole words | masked accuracy, % | BLiMP, % | steps | seeds |"
    yield "|---" * 8 + "|"
    for row in rows(results):
        scores = [r["scores"] for r in row.results]
        bits, words = (mean_and_spread([s.get(key) for s in scores], ".3f") for key in ("bits_per_character", "word_bits_per_character"))
        accuracy, blimp = (mean_and_spread([percent(s.get(key)) for s in scores], ".1f") for key in ("masked_accuracy", "blimp"))
        gain = "" if row.name == BASE else mean_and_spread(row.gains, "+.3f")
        steps = round(statistics.fmean(r["steps"] for r in row.results))
        label = f"**{BASE}**" if row.name == BASE else row.name
        yield f"| {label} | {gain} | {bits} | {words} | {accuracy} | {blimp} | {steps:,} | {len(row.results)} |"
    yield from ("", *(f"- {name}: not trained, {why}" for name, why in refused.items()))


def percent(share: float | None) -> float | None:
    """Return a share in per cent, None as it is."""
    return None if share is None else 100 * share


def write(out: Path) -> None:
    """Write the table and the summary of the results that are there, and print the table."""
    results = read_results(out, "variant-*.json")
    if not results:
        raise SystemExit(f"{out} holds no result; leave --draw out to train")
    refused = read_mapping(out / "refused.json", "run without --draw")
    lines = list(table(results, refused))
    print("\n".join(["", *lines]), flush=True)
    write_whole(out / "table.md", ["\n".join([*lines, ""]).encode()])
    write_json(out / "summary.json", {"environment": environment(), "results": results, "refused": refused, "report": lines})


def _shares(given: Sequence[str], minutes: float) -> Iterator[tuple[str, float]]:
    for name, _, share in (each.rpartition("=") for each in given):
        if name not in VARIANTS or minutes:
            raise SystemExit(f"--share {name}={share}: {'is for --minutes 0' if minutes else 'names no variant'}")
        yield name, float(share)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is not done, and write the results; what the parser does not know are overrides of the base."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="night-cpu", help="the base; its keys may follow: --model.num_layers=4")
    parser.add_argument(
        "--only", nargs="+", default=["*"], metavar="PATTERN", help="variants whose names match; the base is always trained"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=6, help="of each training; 0: the steps of the recipe instead")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--trial-seconds", type=float, default=10, help="how long a speed is measured, where it has to be")
    parser.add_argument("--blimp", default="$OVERNIGHT_DATA/blimp/blimp.tar.xz", help="archive or folder; '' leaves BLiMP out")
    parser.add_argument(
        "--share", nargs="+", default=[], metavar="VARIANT=SHARE", help="with --minutes 0: of the base's steps that a variant has"
    )
    parser.add_argument("--pairs", type=int, default=50, help="of a paradigm of BLiMP")
    parser.add_argument("--work", type=Path, default=Path("runs/ablations"), help="folder of the prepared texts, models and logs")
    parser.add_argument("--list", action="store_true", help="only say which variants are to be trained")
    parser.add_argument("--draw", action="store_true", help="only the table of --out")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / f"{date.today()}-cpu{os.cpu_count()}-ablations")
    given, overrides = parser.parse_known_args(arguments)
    study = Study(
        out=given.out,
        work=given.work,
        recipe=given.recipe,
        overrides=tuple(override.removeprefix("--") for override in overrides),
        minutes=given.minutes,
        threads=given.threads,
        trial_seconds=given.trial_seconds,
        blimp=given.blimp,
        pairs=given.pairs,
        shares=tuple(_shares(given.share, given.minutes)),
    )
    if not given.draw:
        try:
            assert study.base
        except ConfigError as error:  # before anything is written
            raise SystemExit(f"--recipe {given.recipe}: {error}") from None
    for pattern in given.only:  # argparse takes an override with a space in it, such as a list, for another pattern
        if not any(fnmatchcase(name, pattern) for name in VARIANTS):
            raise SystemExit(f"--only {pattern}: matches none of {', '.join(VARIANTS)}; overrides with spaces stand before --only")
    names = [BASE, *(name for name in VARIANTS if any(fnmatchcase(name, pattern) for pattern in given.only))]
    if given.list:
        print("\n".join(f"{name}: {study.refusal(name) or 'to train'}" for name in names))
        return
    if not given.draw:
        run(study, names, given.seeds)
    write(given.out)


if __name__ == "__main__":
    main()
