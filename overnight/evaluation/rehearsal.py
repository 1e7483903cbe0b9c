"""How long the measuring at the end of a run will take: a few batches of its validation through an untrained network, timed."""

from __future__ import annotations

import time

import torch

from overnight.config import BertRun
from overnight.corpus.shards import load_manifest
from overnight.distributed.world import World
from overnight.engine.precision import DTYPES
from overnight.engine.training_run import set_up_machine
from overnight.engine.workload import BertWorkload
from overnight.evaluation.texts import MAX_TOKENS

# Tokens that BLiMP has a pair: both sentences, each as often as it has tokens (15.8 M for all 67,000 pairs with BERT's vocabulary). Paradigms, and pairs of each.
_TOKENS_PER_PAIR, _PARADIGMS, _PAIRS = 236, 67, 1000
# Tokens that are read to measure a text, for each that it has: once for its bits per character, and 0.8 times for those of whole words (without a command, demo).
READINGS = 1.8
# Sequences that are timed.
_SEQUENCES = 32


@torch.no_grad()
def evaluation_seconds(run: BertRun) -> float:
    """Return how long bits per character and BLiMP, where the run has it, will take (s).

    Args:
        run: with the folder of its prepared data.
    """
    device = set_up_machine(run)
    workload, phase = BertWorkload(run, World(device=device)), next(iter(run.phases.values()))
    samples = workload.samples(phase, 0, "train")
    samples.cache = None
    samples.set_micro_batch_size(_SEQUENCES)
    workload.model.eval()
    took, tokens = 0.0, 0
    # The last step counts, taken again: layers may be compiled for the first ones, and for each of them anew.
    steps = samples.validation_steps(2 * _SEQUENCES)
    for step in [*steps, *steps[-1:]]:
        begun = time.perf_counter()
        for batch in step.micro:
            float(sum(loss.sum() for loss in workload.model.losses(batch.to(device), DTYPES[run.precision])[0].values()))
        took, tokens = time.perf_counter() - begun, step.tokens
    blimp = _PARADIGMS * (run.evaluation.blimp_pairs or _PAIRS) * _TOKENS_PER_PAIR if run.evaluation.blimp else 0
    text = READINGS * min(MAX_TOKENS, load_manifest(run.data_dir).count("valid", "tokens"))
    return took / max(1, tokens) * (text + blimp)
