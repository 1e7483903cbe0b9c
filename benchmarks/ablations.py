"""What is each ingredient of a recipe worth? In and out, one at a time, at equal wall-clock time.

    OVERNIGHT_DATA=... python -m benchmarks.ablations --recipe night-cpu --minutes 6             # every variant, three seeds
    OVERNIGHT_DATA=... python -m benchmarks.ablations --recipe night-cpu --only 'optimizer*' --seeds 0
    OVERNIGHT_DATA=... python -m benchmarks.ablations --recipe night-cpu --minutes 0 --phases.short.steps=2000     # equal steps instead: where the machine has other work
    python -m benchmarks.ablations --draw --out DIR                                              # only the table, from the results that are there

The base is the recipe; a variant is the recipe with the overrides of VARIANTS. Every training has the same minutes (`benchmarks/timed_training.py`
says how), so what makes a step slower pays for it. Scores are those of `overnight evaluate` on the same raw validation text: bits per character,
masked accuracy, and BLiMP. The gain is in bits per character against the base with the same seed: mean and standard deviation over the seeds. Optimizers
come with more than one rate, since that of the base may suit another badly. Variants of the vocabulary are to be compared by BLiMP: a larger
vocabulary masks longer tokens, of which even a model that knows only their frequencies needs fewer bits a character.

A variant that this version of `overnight` refuses is in the table with the reason, and one that changes nothing about the base with that.

Into --out go a JSON for each training, summary.json and table.md; called again with the same --out, it does what is missing. The texts, models and logs
are in --work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from string import Template
from typing import Any

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
CAUSAL = 0.27
"""Share of the steps that are causal in `causal first`."""
ADAM = "betas: [0.9, 0.98], weight_decay: 0.1, schedule: $schedule"
HALF = ("phases.*.global_batch_size=$half_batch", "phases.*.micro_batch_size=$half_batch")
EVERY = "phases.*.max_predictions_per_seq=0"
VARIANTS: dict[str, tuple[str, ...]] = {
    "lr x0.5": ("phases.*.optim.lr=$half_lr",),
    "lr x2": ("phases.*.optim.lr=$double_lr",),
    "optimizer muon, 3e-3": (f"phases.*.optim={{name: muon, lr: 3.0e-3, {ADAM}}}",),
    "optimizer adamw, 5e-4": (f"phases.*.optim={{name: adamw, lr: 5.0e-4, {ADAM}}}",),
    "optimizer adamw, 1e-3": (f"phases.*.optim={{name: adamw, lr: 1.0e-3, {ADAM}}}",),
    "optimizer adamw, 2e-3": (f"phases.*.optim={{name: adamw, lr: 2.0e-3, {ADAM}}}",),
    "optimizer adamw, 4e-3": (f"phases.*.optim={{name: adamw, lr: 4.0e-3, {ADAM}}}",),
    "optimizer lamb, 3.5e-3": ("phases.*.optim={name: lamb, lr: 3.5e-3, schedule: $schedule}",),
    "optimizer lamb, 7e-3": ("phases.*.optim={name: lamb, lr: 7.0e-3, schedule: $schedule}",),
    "optimizer lamb, 1.4e-2": ("phases.*.optim={name: lamb, lr: 1.4e-2, schedule: $schedule}",),
    "optimizer lamb, 2.8e-2": ("phases.*.optim={name: lamb, lr: 2.8e-2, schedule: $schedule}",),
    "optimizer lans, 3.5e-3": ("phases.*.optim={name: lans, lr: 3.5e-3, schedule: $schedule}",),
    "optimizer lans, 7e-3": ("phases.*.optim={name: lans, lr: 7.0e-3, schedule: $schedule}",),
    "optimizer lans, 1.4e-2": ("phases.*.optim={name: lans, lr: 1.4e-2, schedule: $schedule}",),
    "schedule wsd": ("phases.*.optim.schedule={name: wsd, warmup_ratio: $warmup_ratio, stable_ratio: 0.6}",),
    "schedule linear": ("phases.*.optim.schedule={name: linear, warmup_ratio: $warmup_ratio}",),
    "schedule cosine": ("phases.*.optim.schedule={name: cosine, warmup_ratio: $warmup_ratio}",),
    "nsp": ("phases.*.nsp=true", "phases.*.token_matching=0.0", "phases.*.whole_sentences=false"),
    "no nsp": ("phases.*.nsp=false",),
    "token matching 0.25 throughout": (
        "phases.*.token_matching=0.25",
        "phases.*.token_matching_steps=0",
        "phases.*.final_token_matching=0.0",
    ),
    "token matching 1.0, then none": (
        "phases.*.token_matching=1.0",
        "phases.*.token_matching_steps=400",
        "phases.*.final_token_matching=0.0",
    ),
    "no token matching": ("phases.*.token_matching=0.0",),
    "causal first": ("phases={causal: $causal, masked: $masked}",),
    "full sequences, half as many": ("phases.*.whole_sentences=false", "phases.*.short_seq_prob=0.0", *HALF),
    "short sequences 0.1": ("phases.*.short_seq_prob=0.1",),
    "no short sequences": ("phases.*.short_seq_prob=0.0",),
    "whole sentences": ("phases.*.whole_sentences=true", "phases.*.nsp=false"),
    "whole sentences, all short": ("phases.*.whole_sentences=true", "phases.*.short_seq_prob=1.0", "phases.*.nsp=false"),
    "masks 15 %": ("phases.*.mlm_probability=0.15", EVERY),
    "masks 30 %": ("phases.*.mlm_probability=0.30", EVERY),
    "masks 30 to 15 %": ("phases.*.mlm_probability=0.30", "phases.*.final_mlm_probability=0.15", EVERY),
    "whole words": ("phases.*.whole_word=true",),
    "vocabulary 4,096": ("data.vocab_size=4096",),
    "vocabulary 8,192": ("data.vocab_size=8192",),
    "vocabulary 16,384": ("data.vocab_size=16384",),
    "vocabulary 30,522": ("data.vocab_size=30522",),
    "batch 16": ("phases.*.global_batch_size=16", "phases.*.micro_batch_size=16"),
    "batch 32": ("phases.*.global_batch_size=32", "phases.*.micro_batch_size=32"),
    "batch 64": ("phases.*.global_batch_size=64", "phases.*.micro_batch_size=32"),
    "batch 16 to 64": (
        "phases.*.global_batch_size=64",
        "phases.*.micro_batch_size=32",
        "phases.*.batch_warmup={initial_batch_size: 16, steps: $half_steps}",
    ),
    "bert": ("model={kind: bert, $sizes, dropout: 0.0, attention_dropout: 0.0}", "phases.*.token_matching=0.0"),
    "modernbert": ("model={kind: modernbert, $sizes}",),
    "local attention 64": ("model.local_attention=64",),
    "global attention": ("model.local_attention=0",),
    "no unigram bias": ("model.unigram_bias=false",),
    "unigram bias": ("model.unigram_bias=true",),
    "init normal": ("model.init=normal",),
    "init megatron": ("model.init=megatron",),
    "init zero": ("model.init=zero",),
    "dropout 0": ("model.dropout=0.0",),
    "dropout 0.1": ("model.dropout=0.1",),
    "fp32": ("precision=fp32",),
}
"""Overrides by the name of the variant. `*` stands for every phase, and a `$name` for what :func:`known` says of the base."""


def known(tree: Mapping[str, Any], phase: Mapping[str, Any]) -> dict[str, str]:
    """Return what a variant may take from the base, written in YAML.

    Args:
        tree: the base.
        phase: of the base, for which an override is written.
    """
    optim, model = phase["optim"], tree["model"]
    values = {
        "schedule": json.dumps(optim["schedule"]),
        "warmup_ratio": optim["schedule"]["warmup_ratio"],
        "half_lr": f"{optim['lr'] / 2:.6f}",
        "double_lr": f"{optim['lr'] * 2:.6f}",
        "half_steps": phase["steps"] // 2,
        "half_batch": phase["global_batch_size"] // 2,
        "sizes": ", ".join(f"{name}: {model[name]}" for name in ("num_layers", "hidden_size", "num_heads")),
        **{name: json.dumps(part) for name, part in causal_first(phase).items()},
    }
    return {name: str(value) for name, value in values.items()}


def causal_first(phase: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a phase in two: a causal one, at the peak rate from its warm-up on, and what is left, which decays for as long as the whole did."""
    steps, optim = round(CAUSAL * phase["steps"]), phase["optim"]
    warmup, stable = (optim["schedule"].get(name, 0.0) for name in ("warmup_ratio", "stable_ratio"))
    # Only wsd can end a phase at its peak; in place of any other schedule the decay is a line.
    schedule = optim["schedule"] if optim["schedule"]["name"] == "wsd" else {"name": "wsd"}
    first = min(1.0, warmup / CAUSAL)
    schedules = {
        "causal": {"warmup_ratio": first, "stable_ratio": 1.0 - first},
        "masked": {"warmup_ratio": 0.0, "stable_ratio": max(0.0, 1.0 - (1.0 - warmup - stable) / (1.0 - CAUSAL))},
    }
    made = {name: {**phase, "optim": {**optim, "schedule": {**schedule, **changes}}} for name, changes in schedules.items()}
    made["causal"] |= {
        "objective": "causal",
        "steps": steps,
        "nsp": False,
        "token_matching": 0.0,
        "final_mlm_probability": 0.0,
        "whole_word": False,
    }
    made["masked"] |= {"steps": phase["steps"] - steps}
    made["masked"]["optim"]["reset_moments"] = False
    return made


def expanded(base: Run, overrides: Sequence[str]) -> list[str]:
    """Return the overrides of a variant for a base: one for each phase, with the base's own values in their places."""
    tree = config.to_tree(base)
    first = next(iter(tree["phases"].values()))
    made = []
    for override in overrides:
        key, _, value = override.partition("=")
        for name, own in tree["phases"].items() if ".*." in key else list(tree["phases"].items())[:1]:
            if own["continues"] and ".*.optim" in key:  # it has that of the phase before
                continue
            phase = {**first, **own}
            # safe: a `$NAME` of the environment is not ours to replace.
            made.append(f"{key.replace('.*.', f'.{name}.')}={Template(value).safe_substitute(known(tree, phase))}")
    return made


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

    def facts(self) -> dict[str, Any]:
        """Return what the results depend on."""
        return {name: value for name, value in asdict(self).items() if name not in ("out", "work", "trial_seconds")}

    @cached_property
    def base(self) -> Run:
        """The run that the variants change, without a budget of its own: the time of all of them is given, and not every variant can have one."""
        return config.load_run(self.recipe, [*self.overrides, NO_BUDGET])

    def variant(self, name: str, seed: int) -> list[str]:
        """Return all overrides of a variant; texts of one vocabulary lie in one folder.

        Raises:
            ConfigError: when this version of `overnight` refuses them.
        """
        made = [*self.overrides, *expanded(self.base, VARIANTS.get(name, ())), f"seed={seed}"]
        run = config.load_run(self.recipe, [*made, NO_BUDGET])
        return [*made, data_override(run, self.work / f"data-{run.data.vocab_size}")]

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
    yield "| variant | gain | bits per character | masked accuracy, % | BLiMP, % | steps | seeds |"
    yield "|---" * 7 + "|"
    for row in rows(results):
        scores = [r["scores"] for r in row.results]
        bits = mean_and_spread([s["bits_per_character"] for s in scores], ".3f")
        accuracy, blimp = (mean_and_spread([percent(s.get(key)) for s in scores], ".1f") for key in ("masked_accuracy", "blimp"))
        gain = "" if row.name == BASE else mean_and_spread(row.gains, "+.3f")
        steps = round(statistics.fmean(r["steps"] for r in row.results))
        label = f"**{BASE}**" if row.name == BASE else row.name
        yield f"| {label} | {gain} | {bits} | {accuracy} | {blimp} | {steps:,} | {len(row.results)} |"
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
    )
    if not given.draw:
        try:
            assert study.base
        except ConfigError as error:  # before anything is written
            raise SystemExit(f"--recipe {given.recipe}: {error}") from None
    names = [BASE, *(name for name in VARIANTS if any(fnmatchcase(name, pattern) for pattern in given.only))]
    if len(names) == 1:
        raise SystemExit(f"--only {' '.join(given.only)}: matches none of {', '.join(VARIANTS)}")
    if given.list:
        print("\n".join(f"{name}: {study.refusal(name) or 'to train'}" for name in names))
        return
    if not given.draw:
        run(study, names, given.seeds)
    write(given.out)


if __name__ == "__main__":
    main()
