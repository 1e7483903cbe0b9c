"""The variants of `benchmarks/ablations.py`: what is changed about a recipe, written as overrides of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from string import Template
from typing import Any

from overnight import config
from overnight.config import Run

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
    "no filters": ("data.filters={}",),
    # Without its rules for lines: a document with other lines may change from the validation text to the training text.
    "filters web": ("data.filters={preset: web, lines_end_sentences: false, min_words_per_line: 0}",),
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
