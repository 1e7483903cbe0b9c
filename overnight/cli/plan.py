"""`overnight plan`: what a recipe will do, before it does it: parameters, groups, learning rate and batch of every phase.

:func:`make_plan` computes the numbers from the functions and the network that training uses; :func:`plan_text` shows them.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from overnight.batches.batch_size import batch_size, batch_warmup, sequences_before
from overnight.batches.lengths import expected_lengths
from overnight.batches.matching import pairs_before, too_short
from overnight.checkpoint.run_corpus import with_data
from overnight.cli.ascii_plot import Panel, Stretch, draw
from overnight.cli.source_plan import SourcePlan, epoch_sizes, source_plans, sources_text
from overnight.cli.time_plan import TimePlan, decided_steps, decided_text, decisions_of, time_plan, time_plan_text
from overnight.config import BertPhase, BertRun, ByteRun, Optim, Phase, Run
from overnight.config.continued import with_steps
from overnight.config.optimizers import LayerwiseOptim
from overnight.config.schema import ENCODERS
from overnight.console import table
from overnight.corpus.places import is_remote
from overnight.corpus.tokenizer import load_vocabulary
from overnight.display import plural, share
from overnight.models.bert import padded_vocabulary
from overnight.models.bytes import BYTES, byte_model
from overnight.models.encoders import masked_lm
from overnight.optim.decisions import Decision
from overnight.optim.groups import parameter_groups
from overnight.optim.schedules import learning_rate, peak_lr, reference, resolved

_SAMPLES = 1000
# What a plan says of an optimizer elsewhere.
_NOT_SETTINGS = ("name", "lr", "layer_lr_decay", "scaling", "schedule", "reset_moments")
_WIDTH = 100
# Names of tensors, and the part of the network they belong to; those of the layers are counted together.
_PARTS = (
    (r"encoder\.word\.", "word embedding"),
    (r"encoder\.position\.", "position embedding"),
    (r"encoder\.segment\.", "segment embedding"),
    (r"encoder\.norm\.", "embedding norm"),
    (r"encoder\.layers\.\d+\.(qkv|out)\.", "attention"),
    (r"encoder\.layers\.\d+\.(up|down)\.", "feed-forward"),
    (r"encoder\.layers\.\d+\.norm\d\.", "norms"),
    (r"encoder\.final_norm\.", "final norm"),
    (r"pooler\.", "pooler"),
    (r"mlm\.", "masked-LM head"),
    (r"nsp\.", "next-sentence head"),
    (r"match\.", "token-matching head"),
    (r"embedding\.", "byte embedding"),
    (r"position\.", "positions"),
    (r"layers\.\d+\.", "layer"),
    (r"norm\.", "norm"),
    (r"decoder\.", "decoder"),
    (r"label\.", "label head"),
)


@dataclass(frozen=True)
class Part:
    """A part of the network."""

    name: str
    times: int
    """How often it is there: once in every layer, alike, or once."""
    parameters: int
    """Of all of them."""


@dataclass(frozen=True)
class Group:
    """Tensors that the optimizer treats alike."""

    name: str
    weight_decay: float
    trust_ratio: bool | None
    """Whether they take the trust ratio; None where the optimizer has none."""
    muon: bool | None
    """Whether Muon steps them, else AdamW; None under another optimizer."""
    lr_factor: float
    """What their learning rate is multiplied by, for a network that is not of the width that it was tuned for."""
    tensors: dict[str, list[int]]
    """Their names and shapes."""
    parameters: int


@dataclass(frozen=True)
class PhasePlan:
    """What a phase will do."""

    name: str
    steps: int
    length: int
    """Longest sequence (tokens)."""
    objective: str
    """What an encoder predicts, `masked` or `causal`; of a byte model nothing, it has no choice."""
    nsp: bool
    global_batch: int
    batch_warmup: dict[str, int]
    micro_batch: int
    """0: found by trial."""
    sequences: int
    tokens: int
    """About: some sequences are shorter than `length`."""
    epochs: float | None
    """Passes over the prepared data, estimated from its first documents; None where none is prepared."""
    sources: list[SourcePlan]
    """Those that are named (`data.sources`), by the mixture of the phase."""
    optimizer: str
    settings: dict[str, Any]
    """Of the optimizer."""
    peak_lr: float
    rule: str
    """By which it comes from `tuned`, or `none`."""
    tuned: dict[str, Any]
    """Rate and warm-up, and the batch for which they were tuned."""
    schedule: dict[str, Any]
    """With `warmup` and `total` as they come out."""
    reset_moments: bool
    """Whether its moments begin at zero."""
    groups: list[Group]
    at: list[int]
    """Steps (from 0) at which the following two are given."""
    lr: list[float]
    batch: list[int]


@dataclass(frozen=True)
class Plan:
    """What a run will do."""

    name: str
    model: dict[str, Any]
    vocabulary: int
    """Tokens."""
    prepared: bool
    """Whether the data is: else the vocabulary is the recipe's."""
    parts: list[Part]
    parameters: int
    phases: list[PhasePlan]
    time: TimePlan | None = None
    """What the budget of the run comes to, by which the phases have their steps; None where there is none, or nothing is prepared to be timed."""
    budget: str = ""
    decisions: list[Decision] = field(default_factory=list)
    """What the folder of the run has decided of its budget already; nothing is timed then."""


def make_plan(run: Run) -> Plan:
    """Return the values of a run; nothing is written and no network is filled.

    With a budget and prepared data, some steps are timed.

    Raises:
        DataError: when the prepared data cannot be read.
    """
    if not is_remote(run.data.dir):  # else all of it would be fetched
        run = with_data(run)
    prepared = (run.data_dir / "manifest.json").is_file()
    decisions = decisions_of(run)
    time = time_plan(run) if run.budget and prepared and not decisions else None
    if steps := decided_steps(run, decisions) if decisions else time.steps if time else {}:
        run = dataclasses.replace(run, phases=with_steps(run.phases, steps))
    assert isinstance(run, BertRun | ByteRun)
    bert = isinstance(run, BertRun)
    vocabulary = BYTES if not bert else load_vocabulary(run.data_dir).size if prepared else run.data.vocab_size
    with torch.device("meta"):
        network = (
            masked_lm(run.model, vocabulary, run.predicts_next_sentence, run.matches_tokens)
            if isinstance(run, BertRun)
            else byte_model(run.model, run.predicts_label)
        )
    return Plan(
        name=run.name,
        model=vars(run.model),
        vocabulary=vocabulary,
        prepared=prepared,
        parts=parts(network),
        parameters=sum(p.numel() for p in network.parameters()),
        phases=[
            phase_plan(name, phase, network, run, epoch_sizes(run, phase, number) if prepared else None)
            for number, (name, phase) in enumerate(run.phases.items())
        ],
        time=time,
        budget=run.budget,
        decisions=decisions,
    )


def parts(network: torch.nn.Module) -> list[Part]:
    """Return the parts of a network, with their parameters; a tied tensor counts once."""
    found: dict[str, Counter[str]] = {}
    for name, p in network.named_parameters():
        part = next(part for pattern, part in _PARTS if re.match(pattern, name))
        layer = re.search(r"layers\.\d+", name)
        found.setdefault(part, Counter())[layer[0] if layer else ""] += p.numel()
    # Where the layers differ, there is no number of each.
    return [
        Part(name, len(counts) if len(set(counts.values())) == 1 else 1, counts.total())
        for _, name in _PARTS
        if (counts := found.get(name))
    ]


def phase_plan(name: str, phase: Phase, network: torch.nn.Module, run: Run, sizes: dict[str, float] | None) -> PhasePlan:
    """Return the values of a phase.

    Args:
        sizes: examples in an epoch of each source, if known.
    """
    optim, count = phase.optim, min(phase.steps, _SAMPLES)
    at = [round(i * (phase.steps - 1) / max(1, count - 1)) for i in range(count)]
    sequences = sequences_before(phase, phase.steps)
    left_out = bool(run.budget) and isinstance(phase, BertPhase) and too_short(phase, phase.steps)
    pairs = 0.0 if left_out else pairs_before(phase, phase.steps)
    return PhasePlan(
        name=name,
        steps=phase.steps,
        length=phase.seq_len,
        objective=phase.objective if isinstance(phase, BertPhase) else "",
        nsp=isinstance(phase, BertPhase) and phase.nsp,
        global_batch=phase.global_batch_size,
        batch_warmup=dataclasses.asdict(batch_warmup(phase)),
        micro_batch=min(phase.micro_batch_size, phase.global_batch_size),
        sequences=sequences,
        tokens=round((sequences - pairs) * expected_lengths(phase).mean + pairs * expected_lengths(phase, pairs=True).mean),
        epochs=sequences / sum(sizes.values()) if sizes else None,
        sources=source_plans(run, phase, sequences, sizes),
        optimizer=optim.name,
        settings={name: value for name, value in vars(optim).items() if name not in _NOT_SETTINGS},
        peak_lr=peak_lr(phase),
        rule=optim.scaling.rule,
        tuned=reference(optim)._asdict(),
        schedule=vars(resolved(phase)),
        reset_moments=optim.reset_moments,
        groups=list(groups(network, optim)),
        at=at,
        lr=[learning_rate(phase, step) for step in at],
        batch=[batch_size(phase, step) for step in at],
    )


def groups(network: torch.nn.Module, optim: Optim) -> Iterator[Group]:
    """Yield the groups of an optimizer, without the tensors' contents."""
    for group in parameter_groups(network, optim):
        yield Group(
            name=group["name"],
            weight_decay=group["weight_decay"],
            trust_ratio=group["trust_ratio"] if isinstance(optim, LayerwiseOptim) else None,
            muon=group["muon"] if optim.name == "muon" else None,
            lr_factor=group["lr_factor"],
            tensors={name: list(p.shape) for name, p in group["params"]},
            parameters=sum(p.numel() for _, p in group["params"]),
        )


def plan_text(plan: Plan, tensors: bool = False, chosen: bool = False, room: int = 10_000) -> str:
    """Return a plan for people.

    Args:
        tensors: list the tensors of every group.
        chosen: whether the recipe leaves the vocabulary open, and it was chosen.
        room: characters of a line, for the curves, which cannot be broken; too few leave them out.
    """
    model = plan.model
    source = "as prepared" if plan.prepared else f"{'as chosen' if chosen else 'as the recipe says'}; the data is not prepared"
    blocks = [
        f"{plan.name}: {_network(model)}\nvocabulary {plan.vocabulary:,} {source if model['kind'] in ENCODERS else 'bytes'}",
        _parts_text(plan),
    ]
    if plan.decisions:
        blocks.append(decided_text(plan.budget, {phase.name: phase.steps for phase in plan.phases}, plan.decisions))
    elif plan.time:
        blocks.append(time_plan_text(plan.time))
    elif plan.budget:
        blocks.append(f"budget {plan.budget}: no step can be timed before the data is prepared; the steps below are shares of it")
    number = 0
    for same, phases in groupby(plan.phases, key=lambda phase: phase.groups):
        members = list(phases)
        for phase in members:
            blocks.append(_phase_text(phase, plan.phases[number - 1].name if number else ""))
            number += 1
        several = f" of {', '.join(phase.name for phase in members)}" if len(plan.phases) > 1 else ""
        blocks.append(f"parameter groups{several}\n{_groups_text(same, plan.parameters)}")
        if tensors:
            blocks.append(_tensors_text(same))
    blocks += filter(None, [_curves(plan, room)])
    if len(plan.phases) > 1:
        steps, sequences, tokens = (sum(getattr(phase, what) for phase in plan.phases) for what in ("steps", "sequences", "tokens"))
        blocks.append(f"in all: {plural(steps, 'step')}, {plural(sequences, 'sequence')}, about {_rounded(tokens)} tokens")
    return "\n\n".join(blocks)


def _network(model: dict[str, Any]) -> str:
    kind = {
        "bert": "BERT",
        "modernbert": "ModernBERT",
        "mlstm": "multiplicative LSTM",
        "lstm": "LSTM",
        "transformer": "causal Transformer",
    }[model["kind"]]
    heads = f", {model['num_heads']} attention heads" if "num_heads" in model else ""
    return f"{kind}, {plural(model['num_layers'], 'layer')}, hidden size {model['hidden_size']:,}{heads}"


def _parts_text(plan: Plan) -> str:
    rows = [("parameters", "each", "all", "share")]
    for part in plan.parts:
        name, each = (f"{part.times} x {part.name}", f"{part.parameters // part.times:,}") if part.times > 1 else (part.name, "")
        rows.append((name, each, f"{part.parameters:,}", share(part.parameters / plan.parameters)))
    rows.append(("total", "", f"{plan.parameters:,}", ""))
    if plan.model["kind"] not in ENCODERS:
        return table(rows)
    padded = padded_vocabulary(plan.vocabulary)
    note = f"The word embedding ({padded:,} rows) is also the decoder of the masked-LM head, and counted once."
    return f"{table(rows)}\n{note}"


def _phase_text(phase: PhasePlan, before: str) -> str:
    cut = phase.global_batch // phase.micro_batch if phase.micro_batch else 0
    micro = (
        f" ({cut:,} micro-batches of {phase.micro_batch})" if cut > 1 else "" if cut else " (micro-batch measured when the phase starts)"
    )
    epochs = f", about {phase.epochs:.2f} epochs" if phase.epochs is not None else ""
    schedule, total = phase.schedule, phase.schedule["total_steps"]
    w = schedule["warmup_ratio"] * total
    shape = [f"{schedule['name']} over {plural(total, 'step')}", f"warm-up {w:,.0f}" if w else "no warm-up"]
    shape += [f"at the peak {schedule['stable_ratio'] * total:,.0f}"] if schedule["name"] == "wsd" else []
    form = "decay by 1 - sqrt" if schedule["decay"] == "sqrt" else f"power {schedule['power']:g}"
    shape += [form] if schedule["name"] in ("poly", "poly_nvidia", "wsd") else []
    shape += [f"this phase is {schedule['step_offset']:,} to {schedule['step_offset'] + phase.steps:,}"] if total != phase.steps else []
    rule = f", by the rule {phase.rule} from {phase.tuned['lr']:.4g} at batch {phase.tuned['batch_size']:,}" if phase.rule != "none" else ""
    growing = f"; the batch grows over {plural(phase.batch_warmup['steps'], 'step')}" if phase.batch_warmup["initial_batch_size"] else ""
    kept = f"kept from {before}" + ("" if schedule["step_offset"] else "; their step count starts over")
    rows = [
        *([("predicts", "every next token, from those before it")] if phase.objective == "causal" else []),
        ("batches", f"{_batches(phase)} sequences{micro} of up to {phase.length} tokens{growing}"),
        ("seen", f"{plural(phase.sequences, 'sequence')}, about {_rounded(phase.tokens)} tokens{epochs}"),
        *([("mixture", sources_text(phase.sources))] if phase.sources else []),
        ("optimizer", f"{phase.optimizer}: {' '.join(f'{key}={_yaml(value)}' for key, value in phase.settings.items())}"),
        ("rate", f"peak {phase.peak_lr:.4g}{rule}; {', '.join(shape)}"),
        ("moments", "reset" if phase.reset_moments or not before else kept),
    ]
    return f"phase {phase.name}: {plural(phase.steps, 'step')}\n{textwrap.indent(table(rows, left=2, width=_WIDTH - 2), '  ')}"


def _rounded(count: int) -> str:
    """Return a number with three digits that count."""
    return f"{float(f'{count:.3g}'):,.0f}"


def _groups_text(chosen: Sequence[Group], total: int) -> str:
    last = "trust ratio" if chosen[0].trust_ratio is not None else "stepped by" if chosen[0].muon is not None else ""
    scaled = any(group.lr_factor != 1.0 for group in chosen)
    rows = [("group", "tensors", "parameters", "share", "decay", last, *(["rate"] if scaled else []))]
    for group in chosen:
        how = "" if not last else ("Muon" if group.muon else "AdamW") if group.trust_ratio is None else "yes" if group.trust_ratio else "no"
        decay = f"{group.weight_decay:g}" if group.weight_decay else "none"
        rate = [f"times {group.lr_factor:.3g}"] if scaled else []
        rows.append((group.name, f"{len(group.tensors):,}", f"{group.parameters:,}", share(group.parameters / total), decay, how, *rate))
    return table(rows)


def _tensors_text(chosen: Sequence[Group]) -> str:
    rows = [("tensor", "shape", "group")]
    rows += [(name, " x ".join(map(str, shape)), group.name) for group in chosen for name, shape in group.tensors.items()]
    return table(rows)


def _curves(plan: Plan, room: int) -> str:
    stretches = []
    for number, phase in enumerate(plan.phases):
        kept = "kept" if number and not phase.reset_moments else "reset"
        labels = (phase.name, plural(phase.steps, "step"), f"peak {phase.peak_lr:.4g}", f"batch {_batches(phase)}", f"moments {kept}")
        stretches.append(Stretch(phase.steps, labels))
    rate, batch = max(phase.peak_lr for phase in plan.phases), max(phase.global_batch for phase in plan.phases)
    panels = [Panel("learning rate", [phase.lr for phase in plan.phases], rate, (f"{rate:.4g}", f"{rate / 2:.4g}"), 10)]
    if len({size for phase in plan.phases for size in phase.batch}) > 1:
        panels.append(Panel("batch (sequences)", [phase.batch for phase in plan.phases], batch, (f"{batch:,}", f"{batch / 2:,g}"), 4))
    return draw(stretches, panels, room=room)


def _batches(phase: PhasePlan) -> str:
    return " to ".join(f"{size:,}" for size in dict.fromkeys((phase.batch[0], phase.global_batch)))


def _yaml(value: Any) -> str:
    """Return a setting as an override has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(map(_yaml, value))}]" if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else str(value)
