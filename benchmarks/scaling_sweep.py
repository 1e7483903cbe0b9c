"""How do bits per character fall with the size of a small encoder and with the text it reads? The runs of which `model.size: auto` has its rule.

    OVERNIGHT_DATA=... python -m benchmarks.scaling_sweep --list                          # every chain, its work, and what is done of it
    OVERNIGHT_DATA=... python -m benchmarks.scaling_sweep --threads 2 --minutes 480       # continues where it was, and begins nothing after that
    OVERNIGHT_DATA=... python -m benchmarks.scaling_sweep --only 'size-*' 'rate-*-w128*'
    python -m benchmarks.scaling_fit DIR                                                  # the law, its error, a picture

A chain is one network with one batch, rate and vocabulary. Its trunk is trained at a constant rate. For every count of tokens T of --tokens the trunk
stops at 0.6 T, and a copy of it is trained for 0.4 T more while the rate falls to 0 on a line (warm-up, stable, decay: the end of a run is what its
branch has reached; Hägele et al. 2024, arXiv 2405.18392). So a run of each length costs 0.4 T, and all trunks together 0.6 of the longest. Text, masks,
precision and rate are those of --recipe, without its budget; sequences fill their length.

`size-*`   depth and width, with the recipe's vocabulary and --batch
`vocab-*`  other vocabularies at two of the sizes
`batch-*`  other batches at one size
`rate-*`   learning rates at three widths of four layers; `-scaled` with `optim.base_width: 256`, by which one rate should be best at all widths

The loss is that of `overnight evaluate`, bits per character of the validation text. Into --out goes results.json, written anew after every branch; trunks and logs are in
--work, which can be deleted when all is done.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks.timed_training import NO_BUDGET, data_override, keep_study, prepare, train_lines
from overnight import config
from overnight.config import BertRun, ModernBertConfig
from overnight.console import Line
from overnight.corpus.shards import load_manifest
from overnight.display import duration
from overnight.engine.pretrain import pretrain
from overnight.engine.scaling_law import characters_per_token, layer_parameters
from overnight.evaluation.masked import masked_score
from overnight.evaluation.masked_lm import RunMaskedLM
from overnight.evaluation.texts import text_of_shards
from overnight.run_dir.atomic import write_json
from overnight.run_dir.environment import environment
from overnight.state_files import read_mapping

SIZES = ((2, 128), (3, 192), (4, 192), (6, 256), (8, 384), (12, 512))
OF_VOCABULARIES, OF_BATCHES, OF_RATES = ((4, 192), (6, 256)), (4, 192), tuple((4, width) for width in (128, 256, 512))
VOCABULARIES, BATCHES, RATES = (4096, 16384), (16, 64), (1.5e-3, 3e-3, 6e-3, 1.2e-2)
DECAY = 0.4
"""Share of a run in which its rate falls."""
_HEAD, _LENGTH, _WIDTH = 64, 128, 256
# The trunk's schedule is made for so many steps, more than it ever has: its warm-up must not depend on how far it is trained.
_LONGEST = 10_000_000
_WARMUP, _LEAST_WARMUP = 0.03, 20


@dataclass(frozen=True)
class Chain:
    """A network, and how it is trained; for every count of tokens there is a run of it."""

    name: str
    layers: int
    width: int
    vocabulary: int
    batch: int
    lr: float
    base_width: int
    tokens: tuple[int, ...]

    def steps(self, tokens: int) -> tuple[int, int]:
        """Return the steps of the trunk and of the branch that make a run of so many tokens, of full sequences."""
        whole = max(2, round(tokens / (self.batch * _LENGTH)))
        decay = max(1, round(DECAY * whole))
        return whole - decay, decay


@dataclass(frozen=True)
class Sweep:
    """What is trained, and where everything is."""

    out: Path
    work: Path
    recipe: str
    overrides: tuple[str, ...]
    tokens: tuple[int, ...]
    batch: int
    data: Mapping[int, Path]
    """Folders of text that is prepared already, by vocabulary."""
    evaluated: int
    """Tokens of the validation text."""
    threads: int

    def study(self) -> dict[str, Any]:
        """Return what the results depend on; they may be made on several machines, and of more and more tokens."""
        return {"recipe": self.recipe, "overrides": self.overrides, "batch": self.batch, "evaluated": self.evaluated}

    @property
    def base(self) -> BertRun:
        """The recipe without its budget."""
        run = config.load_run(self.recipe, [*self.overrides, NO_BUDGET])
        assert isinstance(run, BertRun), self.recipe
        return run

    def chains(self) -> Iterator[Chain]:
        """Yield all chains; those of large networks, vocabularies and batches have the shorter half of the lengths, those of rates the shortest."""
        base, few = self.base, self.tokens[: max(1, (len(self.tokens) + 1) // 2)]
        optim = next(iter(base.phases.values())).optim
        lr, base_width, vocabulary = optim.lr, getattr(optim, "base_width", 0), base.data.vocab_size
        for layers, width in SIZES:
            lengths = self.tokens if width <= _WIDTH else few
            yield Chain(f"size-{layers}x{width}", layers, width, vocabulary, self.batch, lr, base_width, lengths)
        for layers, width in OF_VOCABULARIES:
            for other in VOCABULARIES:
                yield Chain(f"vocab-{other}-{layers}x{width}", layers, width, other, self.batch, lr, base_width, few)
        layers, width = OF_BATCHES
        for batch in BATCHES:
            yield Chain(f"batch-{batch}-{layers}x{width}", layers, width, vocabulary, batch, lr, base_width, few)
        for scaled in (0, _WIDTH):
            for layers, width in OF_RATES:
                for rate in RATES if width != scaled else ():
                    name = f"rate-{rate:g}-w{width}{'-scaled' if scaled else ''}"
                    yield Chain(name, layers, width, vocabulary, self.batch, rate, scaled, few[:1])

    def run(self, chain: Chain, out: Path, trunk: int, decay: int = 0) -> BertRun:
        """Return the run of a trunk of some steps, with the branch where that has some."""
        tree = config.to_tree(self.base)
        phase = next(iter(tree["phases"].values()))
        warmup = max(_LEAST_WARMUP, _WARMUP * sum(chain.steps(min(chain.tokens))))
        optim = {**phase["optim"], "lr": chain.lr} | ({"base_width": chain.base_width} if phase["optim"]["name"] == "muon" else {})
        full = {"seq_len": _LENGTH, "short_seq_prob": 0.0, "whole_sentences": False}
        same = {**phase, "global_batch_size": chain.batch, "micro_batch_size": min(32, chain.batch), **full}
        constant = {"name": "constant", "warmup_ratio": warmup / _LONGEST, "total_steps": _LONGEST}
        phases = {"trunk": {**same, "steps": trunk, "optim": {**optim, "schedule": constant}}}
        if decay:
            fall = {"name": "wsd", "warmup_ratio": 0.0, "stable_ratio": 0.0}
            phases["decay"] = {**same, "steps": decay, "optim": {**optim, "schedule": fall, "reset_moments": False}}
        sizes = {"num_layers": chain.layers, "hidden_size": chain.width, "num_heads": max(1, chain.width // _HEAD)}
        made = [f"model={json.dumps({'kind': 'modernbert', **sizes})}", f"phases={json.dumps(phases)}", "finetune={}", f"out={out}"]
        made += [
            "logging.eval_every=0",
            "logging.log_every=20",
            "checkpoint={save_every: 500, keep_latest_k: 1}",
            f"compute.threads={self.threads}",
        ]
        run = config.load_run(self.recipe, [*self.overrides, NO_BUDGET, self.text(chain.vocabulary), *made])
        assert isinstance(run, BertRun)
        return run

    def text(self, vocabulary: int) -> str:
        """Return the override by which a run reads the text with a vocabulary."""
        folder = self.data.get(vocabulary, self.work / f"data-{vocabulary}")
        return data_override(self.base, folder, vocab_size=vocabulary)

    @property
    def results(self) -> Path:
        """Where the results are."""
        return self.out / "results.json"

    def points(self) -> list[dict[str, Any]]:
        """Return the results so far."""
        return read_mapping(self.results, "delete it, and do all again")["points"] if self.results.exists() else []


def network(run: BertRun) -> ModernBertConfig:
    """Return the sizes of the network of a run of a sweep, which is never the published BERT."""
    assert isinstance(run.model, ModernBertConfig)
    return run.model


def work_of(chain: Chain, done: Sequence[int] = ()) -> float:
    """Return the tokens that a chain still has to train, its trunk and its branches."""
    left = [tokens for tokens in chain.tokens if tokens not in done]
    return (1 - DECAY) * (max(left) - max(done, default=0)) + DECAY * sum(left) if left else 0.0


def train(sweep: Sweep, chain: Chain, tokens: int) -> dict[str, Any]:
    """Train a chain up to a branch, and that, from wherever they stand; return the result.

    The trunk continues from the branch before: lengths come in their order.
    """
    folder = sweep.work / chain.name
    branch, (trunk, decay) = folder / f"branch-{tokens}", chain.steps(tokens)
    if not branch.exists():
        line = Line()
        pretrain(sweep.run(chain, folder / "trunk", trunk), line, extend=True)
        # By a rename: a copy that was interrupted is none.
        shutil.rmtree(part := folder / "copying", ignore_errors=True)
        shutil.copytree(folder / "trunk", part)
        part.rename(branch)
    run = sweep.run(chain, branch, trunk, decay)
    pretrain(run, Line(), extend=True)
    score = masked_score(RunMaskedLM(run), text_of_shards(run.data_dir, "valid", sweep.evaluated), Line())
    lines, per_token = train_lines(branch), characters_per_token(load_manifest(run.data_dir), run.data_dir)
    seen = lines[-1]["tokens"]
    result = {
        **{name: value for name, value in asdict(chain).items() if name != "tokens"},
        "tokens": seen,
        "asked_tokens": tokens,
        "characters": round(seen * per_token),
        "parameters": layer_parameters(network(run)),
        "steps": trunk + decay,
        "bits_per_character": round(score.bits_per_character, 5),
        "masked_accuracy": round(score.masked_accuracy, 5),
        "threads": sweep.threads,
    }
    shutil.rmtree(branch)
    return result


def go(sweep: Sweep, chains: Sequence[Chain], minutes: float) -> None:
    """Do what is missing, the shortest first over all chains, and begin nothing after some minutes."""
    keep_study(sweep.out, sweep.study())
    for vocabulary in dict.fromkeys(chain.vocabulary for chain in chains):
        if vocabulary not in sweep.data:
            prepare(sweep.recipe, [*sweep.overrides, NO_BUDGET, sweep.text(vocabulary)], sweep.work / "prepare.log", sweep.threads)
    began = time.monotonic()
    for tokens in sorted({tokens for chain in chains for tokens in chain.tokens}):
        for chain in chains:
            points = sweep.points()
            if tokens not in chain.tokens or tokens in done(points, chain):
                continue
            if time.monotonic() - began > 60 * minutes:
                print("time is over; the same command continues", flush=True)
                return
            start = time.monotonic()
            points.append(point := train(sweep, chain, tokens))
            write_json(sweep.results, {"environment": environment(), "points": points})
            took, bits = duration(time.monotonic() - start), point["bits_per_character"]
            print(f"{chain.name}, {tokens / 1e6:g} M tokens: {bits:.4f} bits per character ({took})", flush=True)


def done(points: Sequence[Mapping[str, Any]], chain: Chain) -> list[int]:
    """Return the lengths of a chain that have a result."""
    return [point["asked_tokens"] for point in points if point["name"] == chain.name]


def listed(sweep: Sweep, chains: Sequence[Chain]) -> Iterator[str]:
    """Yield a line on each chain."""
    points = sweep.points()
    for chain in chains:
        here = done(points, chain)
        left = work_of(chain, here)
        model = network(sweep.run(chain, sweep.work, 1))
        yield (
            f"{chain.name:24} {layer_parameters(model):>12,} parameters  batch {chain.batch:<4} lr {chain.lr:<8g} "
            f"{len(here)} of {len(chain.tokens)} lengths done, {left / 1e6:,.0f} M tokens to train"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is not done; what the parser does not know are overrides of the recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="night-cpu", help="its keys may follow: --data.paths=FOLDER")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="chains whose names match")
    parser.add_argument("--tokens", type=float, nargs="+", default=[2.5, 5, 10, 20, 40, 80], help="lengths of the runs (millions)")
    parser.add_argument("--batch", type=int, default=32, help="sequences")
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no run is begun")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--data", nargs="+", default=[], metavar="VOCABULARY=FOLDER", help="text of the recipe that is prepared already")
    parser.add_argument("--evaluated", type=int, default=200_000, help="tokens of the validation text")
    parser.add_argument("--list", action="store_true", help="say what there is to do, and stop")
    parser.add_argument("--out", type=Path, default=Path(f"benchmarks/results/{date.today()}-cpu{os.cpu_count()}-scaling"))
    parser.add_argument("--work", type=Path, default=Path("runs/scaling"))
    options, rest = parser.parse_known_args(arguments)
    data = {int(vocabulary): Path(folder) for vocabulary, _, folder in (word.partition("=") for word in options.data)}
    sweep = Sweep(
        options.out,
        options.work,
        options.recipe,
        tuple(word.removeprefix("--") for word in rest),
        tuple(sorted(round(millions * 1e6) for millions in options.tokens)),
        options.batch,
        data,
        options.evaluated,
        options.threads,
    )
    chains = [chain for chain in sweep.chains() if any(fnmatchcase(chain.name, pattern) for pattern in options.only)]
    if not chains:
        raise SystemExit(f"--only {' '.join(options.only)}: matches no chain; --list names them")
    if options.list:
        print("\n".join(listed(sweep, chains)))
    else:
        go(sweep, chains, options.minutes)


if __name__ == "__main__":
    main()
