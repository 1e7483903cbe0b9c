"""What a phase may not say: values that cannot work, alone, together or with the network."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from overnight.config.optimizers import SCHEDULE_SETTINGS, UNTUNED, MuonConfig, Optim, Schedule, share_problems
from overnight.config.schema import ENCODERS, BertPhase, BertRun, BytePhase, ModernBertConfig, Phase, Run, TransformerConfig

_LONGEST_WINDOW = 8192
# Up to this share of masks fewer predictions than it asks for are a choice, as in published recipes; above, a bound left over from them.
_PUBLISHED_RATE = 0.15


def phase_problems(key: str, phase: Phase, run: Run) -> Iterator[str]:
    """Yield everything in a phase that cannot work; `key` is its place in the recipe."""
    model = run.model
    if isinstance(model, TransformerConfig):
        if not 8 <= phase.seq_len <= model.max_position_embeddings:
            yield f"{key}.seq_len = {phase.seq_len}: must be 8 to model.max_position_embeddings = {model.max_position_embeddings}"
    elif not 8 <= phase.seq_len <= _LONGEST_WINDOW:
        yield f"{key}.seq_len = {phase.seq_len}: must be 8 to {_LONGEST_WINDOW}"
    batch, micro = phase.global_batch_size, phase.micro_batch_size
    if min(micro, batch) > 0 and batch % min(micro, batch):
        yield f"{key}.global_batch_size = {batch}: cannot be split into micro-batches of {key}.micro_batch_size = {micro}; it must divide"
    if isinstance(phase, BertPhase):
        yield from _causal_problems(key, phase, run)
        if phase.whole_sentences and phase.nsp:
            yield f"{key}.whole_sentences = true: needs {key}.nsp=false; pairs are made of sentences anyway, so leave it out"
        if phase.mlm_probability == 0:
            yield f"{key}.mlm_probability = 0: must be above 0, else there is nothing to predict"
        if phase.final_mlm_probability > phase.mlm_probability:
            yield f"{key}.final_mlm_probability = {phase.final_mlm_probability:g}: must be at most {key}.mlm_probability = {phase.mlm_probability:g}: it falls"
        schedule = phase.optim.schedule
        holds = schedule.name == "constant" or (schedule.name == "wsd" and schedule.warmup_ratio + schedule.stable_ratio >= 1)
        if phase.final_mlm_probability and holds:
            yield f"{key}.final_mlm_probability = {phase.final_mlm_probability:g}: is never reached, since the learning rate of the schedule `{schedule.name}` does not decay"
        if phase.token_matching and not isinstance(run.model, ModernBertConfig):
            yield f"{key}.token_matching = {phase.token_matching:g}: needs model.kind = modernbert; BERT learns to compare texts by {key}.nsp, so set it to 0"
        elif phase.token_matching and phase.nsp:
            yield f"{key}.token_matching = {phase.token_matching:g}: needs {key}.nsp=false, since it makes pairs of its own; or set it to 0"
        if phase.token_matching and phase.final_token_matching > phase.token_matching:
            yield f"{key}.final_token_matching = {phase.final_token_matching:g}: must be at most {key}.token_matching = {phase.token_matching:g}: it falls"
        elif phase.token_matching and phase.final_token_matching and not phase.token_matching_steps:
            yield f"{key}.final_token_matching = {phase.final_token_matching:g}: is never reached; set {key}.token_matching_steps, after which the share falls"
        most, wanted = phase.max_predictions_per_seq, phase.mlm_probability * phase.seq_len
        if _PUBLISHED_RATE < phase.mlm_probability <= 1 and 0 < most < round(wanted):
            yield f"{key}.mlm_probability = {phase.mlm_probability:g}: asks for {round(wanted)} of {phase.seq_len} tokens, but max_predictions_per_seq = {most} allows fewer; set that to 0"
        yield from _batch_warmup_problems(key, phase, bool(run.budget))
    if isinstance(phase, BytePhase):
        if 0 < phase.num_document_groups < batch:
            yield f"{key}.num_document_groups = {phase.num_document_groups}: must be {key}.global_batch_size = {batch} or more, one for each stream, or 0"
        if phase.label_weight > 0 and not run.data.label:
            yield f"{key}.label_weight = {phase.label_weight}: needs data.label, the key of the number to predict"
    if isinstance(phase.optim, MuonConfig) and phase.optim.base_width and not isinstance(run, BertRun):
        yield f"{key}.optim.base_width = {phase.optim.base_width}: {model.kind} has no rule for the rate at another width; only {' and '.join(ENCODERS)} have"
    if phase.optim.layer_lr_decay != 1 and not isinstance(run, BertRun):
        yield f"{key}.optim.layer_lr_decay = {phase.optim.layer_lr_decay:g}: is for the layers of an encoder; only {' and '.join(ENCODERS)} have it"
    yield from _scaling_problems(f"{key}.optim", phase.optim)
    yield from _schedule_problems(f"{key}.optim", phase)


def _causal_problems(key: str, phase: BertPhase, run: Run) -> Iterator[str]:
    """Yield what a phase that predicts the next token cannot have."""
    if phase.objective != "causal":
        return
    if phase.nsp:
        yield f"{key}.nsp = true: a causal phase predicts the next token alone; set it to false"
    masks = ("token_matching", "final_mlm_probability", "whole_word")
    for name in (name for name in masks if getattr(phase, name)):
        yield f"{key}.{name} = {getattr(phase, name)}: needs {key}.objective = masked; leave it out"
    if phase is list(run.phases.values())[-1]:
        yield f"{key}.objective = causal: an encoder is used with tokens from both sides, so the last phase must be masked"


def _batch_warmup_problems(key: str, phase: BertPhase, budget: bool) -> Iterator[str]:
    """Yield what is wrong with a batch that grows; a budget decides the steps of the phase later."""
    start, steps = phase.batch_warmup.initial_batch_size, phase.batch_warmup.steps
    if start and (not 0 < start < phase.global_batch_size or phase.global_batch_size % start):
        yield f"{key}.batch_warmup.initial_batch_size = {start}: must divide {key}.global_batch_size = {phase.global_batch_size} and be smaller"
    if start and not 0 < steps < (math.inf if budget else phase.steps):
        most = "" if budget else f" and below {key}.steps = {phase.steps}"
        yield f"{key}.batch_warmup.steps = {steps}: must be above 0{most}"
    if steps and not start:
        yield f"{key}.batch_warmup.steps = {steps}: needs {key}.batch_warmup.initial_batch_size, the sequences of the first step"


def foreign_settings(key: str, part: Any, kind: str, table: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield what is set and does nothing: what the table has for other kinds and not for this one."""
    for f in dataclasses.fields(part):
        value = getattr(part, f.name)
        if value == f.default or not any(f.name in names for names in table.values()) or f.name in table[kind]:
            continue
        yield f"{key}.{f.name} = {value}: {kind} has no {f.name}"


def _scaling_problems(key: str, optim: Optim) -> Iterator[str]:
    rule, batch = optim.scaling.rule, optim.scaling.base_batch_size
    if rule == "none" and batch:
        yield f"{key}.scaling.base_batch_size = {batch}: does nothing without {key}.scaling.rule"
    if rule in ("linear", "sqrt") and batch == 0:
        yield f"{key}.scaling.base_batch_size = 0: name the batch size for which {key}.lr was tuned"
    if rule == "lamb_untuned" and batch == 0:
        if optim.name != "lamb":
            yield (
                f"{key}.scaling.rule = lamb_untuned: its rate, {UNTUNED.lr} at batch size {UNTUNED.batch_size}, is LAMB's, not that of "
                f"{optim.name}; name {key}.lr and the batch size it was tuned for in {key}.scaling.base_batch_size"
            )
        given = {"lr": (optim.lr, Optim.lr), "schedule.warmup_ratio": (optim.schedule.warmup_ratio, Schedule.warmup_ratio)}
        for name, (value, default) in given.items():
            if value != default:
                yield (
                    f"{key}.{name} = {value}: lamb_untuned sets it; leave it out, or name the batch size it was tuned for in "
                    f"{key}.scaling.base_batch_size"
                )


def _schedule_problems(key: str, phase: Phase) -> Iterator[str]:
    schedule, scaling = phase.optim.schedule, phase.optim.scaling
    yield from foreign_settings(f"{key}.schedule", schedule, schedule.name, SCHEDULE_SETTINGS)
    if schedule.decay == "sqrt" and schedule.power != Schedule.power:
        yield f"{key}.schedule.power = {schedule.power}: decay = sqrt has none; leave it out, or set decay=power"
    warmup, how = schedule.warmup_ratio, ""
    if scaling.rule == "lamb_untuned" and scaling.base_batch_size >= 0:
        tuned, base = (warmup, scaling.base_batch_size) if scaling.base_batch_size else (UNTUNED.warmup_ratio, UNTUNED.batch_size)
        warmup, how = tuned * phase.global_batch_size / base, f" at batch size {phase.global_batch_size} by lamb_untuned"
    yield from share_problems(f"{key}.schedule", schedule, warmup, how)
    total = schedule.total_steps or phase.steps
    if schedule.step_offset < 0 or schedule.step_offset + phase.steps > total:
        yield f"{key}.schedule.total_steps = {total}: must cover step_offset {schedule.step_offset} + {phase.steps} steps"
