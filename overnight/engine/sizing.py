"""Choose the sizes of a run with `model.size: auto` on this machine, for its budget and its text, and write down what was chosen.

The vocabulary must be known before the text is prepared, and the machine is best measured with a prepared text. So first the peak of the device,
which a product of matrices tells in a fifth of a second, gives a first choice, of which only the vocabulary is kept; after the preparation
the best size and one below it are timed, and the choice is made anew. A text that is prepared already decides its vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from overnight.checkpoint.run_corpus import with_data
from overnight.config import BertRun, Run
from overnight.config.budget import deadline_of
from overnight.console import table
from overnight.corpus import hub
from overnight.corpus.named_sources import named_paths
from overnight.corpus.readers import BUILTIN, start_reading
from overnight.corpus.shards import Manifest, load_manifest
from overnight.display import duration
from overnight.distributed.world import World
from overnight.engine import budget_record, run_clock, size_rule
from overnight.engine.budget import reserve, seconds_text
from overnight.engine.core_waits import CoreWaits
from overnight.engine.memory import OutOfMemory, memory_budget
from overnight.engine.precision import DTYPES
from overnight.engine.rehearsal import seconds_per_step
from overnight.engine.scaling_law import LAW, LAW_FROM, characters_per_token
from overnight.engine.size_record import SizeRecord, is_open, plain_identity, read_record, with_sizes, with_vocabulary, write_record
from overnight.engine.size_rule import (
    CHARACTERS_PER_TOKEN,
    LADDER,
    VOCABULARIES,
    Score,
    Text,
    Timed,
    best,
    flops_per_token,
    remarks,
    step_flops,
)
from overnight.engine.training_run import set_up_machine
from overnight.engine.workload import build_workload
from overnight.errors import ConfigError
from overnight.models.flops import device_peak

# Share of the peak that training reaches, until some steps are timed.
_REACHED = 0.35
# Networks that are timed at most: each takes some seconds, on a GPU that compiles half a minute. None is begun when such a share of the budget is over.
_TIMED, _PATIENCE = 4, 0.1
# A batch so many times larger is timed too, on a GPU, and tells that the GPU waits for its host where its step takes less than so much of as many times longer.
_LARGER, _WAITED = 4, 0.8
# What text of an archive has more bytes than the archive, and the documentation inside Python (bytes): for a first estimate.
_UNPACKED, _BUILTIN = 3.5, 12e6
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".tgz", ".zip")


@dataclass(frozen=True)
class Choice:
    """What was found for a run whose sizes are open."""

    scores: list[Score]
    chosen: Score
    text: Text
    seconds: float
    """For the steps of all phases."""
    timed: list[dict[str, float]]
    """Empty where only the peak of the device is known."""


def settle_vocabulary(run: Run, log: Callable[[str], None]) -> Run:
    """Return a run with the vocabulary that its text is to be prepared with, chosen now and written down if its recipe leaves it open.

    Raises:
        ConfigError: when the recipe is not the one that an earlier choice was made for, or nothing fits the machine.
        DataError: when `size.json` is damaged or missing, or a source is.
    """
    if not (isinstance(run, BertRun) and is_open(run)):
        return run
    record = read_record(run)
    if record is None:
        found, vocabulary = _known_text(run), run.data.vocab_size
        if found:
            vocabulary = next(iter(found.per_token))
        characters = found.characters if found else 0.0
        if not vocabulary:
            choice = first_choice(run)
            vocabulary, characters = choice.chosen.vocabulary, choice.text.characters
            log(
                f"model.size auto: a vocabulary of {vocabulary:,}, for about {choice.chosen.shape}; some steps will be timed when the text is prepared"
            )
        record = SizeRecord(plain_identity(run), vocabulary, characters, dataclasses.asdict(LAW))
        run.run_dir.mkdir(parents=True, exist_ok=True)
        write_record(run, record)
    return with_vocabulary(run, record)


def settle_sizes(run: Run, log: Callable[[str], None], after: Callable[[BertRun], float] = lambda sized: 0.0) -> Run:
    """Return a run with all its sizes; if its recipe leaves them open, those of `size.json`, else they are chosen now and written there.

    Args:
        run: as its recipe has it; its text is prepared.
        log: is told the candidates and the choice.
        after: how long everything after pretraining takes with a network (s).

    Raises:
        ConfigError, DataError: as :func:`settle_vocabulary`.
    """
    if not (isinstance(run, BertRun) and is_open(run)):
        return run
    if not is_prepared(run):
        folder = with_data(run).data_dir
        there = _asked_vocabulary(load_manifest(folder))  # or its error, which says what to do
        raise ConfigError(
            f"data.vocab_size = {run.data.vocab_size}: {folder} was prepared with {there}; give that, or another folder (--data.dir=...)"
        )
    open_run = settle_vocabulary(run, log)
    record = read_record(run)
    assert record is not None and isinstance(open_run, BertRun), "just written"
    if record.chosen is None:
        choice = timed_choice(open_run, log, after)
        record = dataclasses.replace(
            record, characters=choice.text.characters, timed=choice.timed, candidates=choice.scores, chosen=choice.chosen
        )
        sized = with_sizes(open_run, choice.chosen)
        write_record(run, record)
        log(choice_text(choice))
        return sized
    log(f"model.size auto: {record.chosen.shape}, as chosen before ({run.run_dir / 'size.json'})")
    return with_sizes(open_run, record.chosen)


def first_choice(run: BertRun) -> Choice:
    """Return the choice by the peak of the device and the sizes of the files, before anything is prepared or timed."""
    device = set_up_machine(run)
    text = _known_text(run) or _estimated_text(run)
    scores = _scores(run, text, [_guess(run, device)], _seconds(run, 0.0), _memory(device))
    return Choice(scores, _the_best(scores), text, _seconds(run, 0.0), [])


def timed_choice(run: BertRun, log: Callable[[str], None], after: Callable[[BertRun], float]) -> Choice:
    """Return the choice by steps that are timed now, on prepared text: of the best, of one below, and again of what is then the best."""
    device, text = set_up_machine(run), _known_text(run)
    assert text is not None, "it is prepared"
    # The text decides; a recipe that names another vocabulary is refused by the preparation.
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, vocab_size=next(iter(text.per_token))))
    memory, timed, facts, rest = _memory(device), [_guess(run, device)], list[dict[str, float]](), -1.0
    waits, begun, patience, starts = CoreWaits(), run_clock.CLOCK.seconds(), _PATIENCE * _seconds(run, 0.0), 0.0
    while True:
        scores = _scores(run, text, timed, _seconds(run, max(rest, 0.0) + starts), memory)
        chosen = _the_best(scores)
        known = {(fact["layers"], fact["width"]) for fact in facts}
        wanted = [chosen, *([] if facts else _below(scores, chosen))]
        new = [score for score in wanted if (score.layers, score.width) not in known]
        if not new or len(facts) >= _TIMED or (facts and run_clock.CLOCK.seconds() - begun > patience):
            break
        for score in new:
            before = run_clock.CLOCK.seconds()
            if facts and before - begun > patience:
                break
            try:
                fact, rate = _time(run, score, device, log)
            except OutOfMemory:
                memory = 0.99 * score.memory
                continue
            timed = [rate] if not facts else [*timed, rate]
            facts.append(fact)
            if device.type == "cuda":  # training compiles too, and tries its micro-batches
                starts = run_clock.CLOCK.seconds() - before
        if rest < 0 and facts:
            rest = after(with_sizes(run, chosen))
    if device.type == "cpu" and (said := waits.while_timed()):
        log(
            f"warning: {said}: stop them and give the command again (with a folder of its own, --out=..., since a choice stays), or name the sizes"
        )
    return Choice(scores, chosen, text, _seconds(run, max(rest, 0.0) + starts), facts)


def _time(run: BertRun, score: Score, device: torch.device, log: Callable[[str], None]) -> tuple[dict[str, float], Timed]:
    """Return how long a step of a candidate takes, and the rate that it means; nothing is kept."""
    sized, seconds = _step(run, score, device, log)
    rate, launch = step_flops(sized) / seconds, 0.0
    fact = {"layers": score.layers, "width": score.width, "batch": score.sequences, "seconds": seconds, "flops_per_second": rate}
    if device.type == "cuda" and _is_open_batch(run):
        # Of a small network a GPU waits for its host, and a larger batch takes no longer: it is the larger one that tells the rate.
        larger = dataclasses.replace(score, batch=_LARGER * score.batch, sequences=_LARGER * score.sequences)
        with contextlib.suppress(OutOfMemory):
            sized, longer = _step(run, larger, device, log)
            rate = max(rate, step_flops(sized) / longer)
            launch = seconds / score.layers if longer < _WAITED * _LARGER * seconds else 0.0
            fact |= {"larger": larger.sequences, "seconds_of_larger": longer, "flops_per_second": rate}
    return fact, Timed(flops_per_token(sized), rate, launch)


def _is_open_batch(run: BertRun) -> bool:
    """Return whether the batch of the first phase is still to be chosen."""
    return not next(iter(run.phases.values())).global_batch_size


def _step(run: BertRun, score: Score, device: torch.device, log: Callable[[str], None]) -> tuple[BertRun, float]:
    """Return a run with the sizes of a candidate, and how long its step takes (s)."""
    sized = with_sizes(run, score)
    with TemporaryDirectory() as folder:
        aside = dataclasses.replace(with_data(sized), out=str(Path(folder)))
        seconds = seconds_per_step(aside, build_workload(aside, World(device=device)), 0, device)
    log(f"model.size auto: a step of {score.shape} and {score.sequences} sequences takes {seconds_text(seconds)}")
    return sized, seconds


def _below(scores: Sequence[Score], chosen: Score) -> list[Score]:
    """Return the candidate two rungs below, or above where there is none: small networks reach less of a machine."""
    rung = LADDER.index((chosen.layers, chosen.width))
    wanted = LADDER[rung - 2 if rung >= 2 else min(rung + 2, len(LADDER) - 1)]
    return [s for s in scores if (s.layers, s.width, s.vocabulary) == (*wanted, chosen.vocabulary) and s != chosen and not s.refused]


def _scores(run: BertRun, text: Text, timed: Sequence[Timed], seconds: float, memory: float) -> list[Score]:
    return [size_rule.score(run, shape, text, timed, seconds, memory, LAW) for shape in size_rule.candidates(run, list(text.per_token))]


def _the_best(scores: Sequence[Score]) -> Score:
    if found := best(scores):
        return found
    raise ConfigError(
        f"model.size = auto: no size fits this machine: {scores[0].shape} {scores[0].refused}; lower phases.*.micro_batch_size, "
        "or take precision=bf16 or memory.activation_checkpointing=full"
    )


def _guess(run: BertRun, device: torch.device) -> Timed:
    peak = device_peak(device, run.precision, DTYPES[run.precision])
    if peak is None:
        raise ConfigError(
            f"model.size = auto: nobody knows how fast this device is in {run.precision}; set precision=bf16, or give the sizes"
        )
    return Timed(0.0, _REACHED * peak.flops)


def _memory(device: torch.device) -> float:
    return float(memory_budget(device).limit)


def _seconds(run: BertRun, after: float) -> float:
    """Return the time that is left for the steps (s)."""
    begun = budget_record.read_record(run)
    begun = begun if begun and begun.budget == run.budget else None
    now = begun.now() if begun else run_clock.CLOCK.wall()
    deadline = begun.deadline if begun else deadline_of(run.budget, now)
    return max(0.0, deadline - now - reserve(after, deadline - (begun.started if begun else now)))


def is_prepared(run: BertRun) -> bool:
    """Return whether there is prepared text for a run, with the vocabulary of its recipe where that names one."""
    return _known_text(run) is not None


def _known_text(run: BertRun) -> Text | None:
    """Return the prepared text of a run, which has one vocabulary; None where there is none, or one of another vocabulary than the recipe's."""
    folder = with_data(run).data_dir
    if not (folder / "manifest.json").is_file():
        return None
    manifest = load_manifest(folder)
    vocabulary = _asked_vocabulary(manifest)
    if run.data.vocab_size not in (0, vocabulary):
        return None
    per_token = characters_per_token(manifest, folder)
    return Text(per_token * manifest.count("train", "tokens"), {vocabulary: per_token})


def _asked_vocabulary(manifest: Manifest) -> int:
    """Return `data.vocab_size` of a preparation; a short text may have given fewer tokens."""
    return int(manifest.settings.get("vocab_size", manifest.vocab_size))


def _estimated_text(run: BertRun) -> Text:
    """Return about how much text there is, by the sizes of the files.

    Raises:
        ConfigError: when it is a data set of Hugging Face, of which nobody says how much text it has.
        DataError: when a path leads nowhere.
    """
    data = run.data
    paths = [path for _, path in named_paths(data)]
    if unknown := next((path for path in paths if path.startswith(hub.PREFIX)), ""):
        raise ConfigError(
            f"model.size = auto: how much text {unknown} has is not known before it is prepared; prepare it first, with data.vocab_size, or give the sizes"
        )
    reading = start_reading(data, [run.data_dir, run.run_dir])
    sizes = [file.size * (_UNPACKED if Path(file.name).suffix in _PACKED else 1.0) for files in reading.files for file in files]
    share = 1 - data.valid_fraction - data.test_fraction
    characters = share * (sum(sizes) + _BUILTIN * paths.count(BUILTIN))
    known = (
        {data.vocab_size: _characters_per_token(data.vocab_size)} if data.vocab_size else {v: CHARACTERS_PER_TOKEN[v] for v in VOCABULARIES}
    )
    return Text(characters, known)


def _characters_per_token(vocabulary: int) -> float:
    """Return characters of a token of a vocabulary that is in no table: those of the nearest that is."""
    return CHARACTERS_PER_TOKEN[min(VOCABULARIES, key=lambda known: abs(known - vocabulary))]


def choice_text(choice: Choice) -> str:
    """Return the candidates, of each size with its best vocabulary, the choice and what is to be said of it."""
    rows = [("", "size", "vocabulary", "parameters", "batch", "a step", "tokens", "passes", "bits per character", "")]
    for size in dict.fromkeys((s.layers, s.width) for s in choice.scores):
        here = [s for s in choice.scores if (s.layers, s.width) == size]
        s = choice.chosen if choice.chosen in here else min(here, key=lambda s: (bool(s.refused), s.loss))
        name, step = (f"{s.layers} x {s.width}", f"{s.vocabulary:,}", f"{s.parameters / 1e6:,.1f} M"), seconds_text(s.seconds_per_step)
        values = (f"{s.sequences:,}", step, f"{s.tokens / 1e6:,.1f} M", f"{s.epochs:.2f}", f"{s.loss:.3f}", s.refused)
        rows.append(("*" if s == choice.chosen else "", *name, *values))
    how = f"{len(choice.timed)} sizes timed" if choice.timed else "from the peak of the device; no step was timed"
    lines = [f"model.size auto: {choice.chosen.shape}, for {duration(choice.seconds)} of steps ({how})", table(rows, left=2)]
    lines.append(f"predicted {choice.chosen.loss:.3f} bits per character, by a law from {LAW_FROM}")
    if choice.seconds < (step := choice.chosen.seconds_per_step):
        lines.append(
            f"the budget is too short: {duration(choice.seconds)} of it are for steps, of which one takes about {seconds_text(step)}"
        )
    return "\n".join([*lines, *remarks(choice.chosen, choice.text)])
