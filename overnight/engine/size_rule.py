"""Which network to train in the time that there is: a ladder of sizes, scored by the law of `engine.scaling_law`. No clock, file or device is met here.

For each candidate follow, one from the other: the time of a step, from the arithmetic of the step and the rate that the machine reached at sizes near it;
the tokens, from the time; the batch, from the tokens; the characters that they are worth, from the text; and the loss. The least loss wins.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from overnight.batches.batch_size import sequences_before, usual_micro_batch
from overnight.batches.lengths import expected_lengths
from overnight.config import BertRun, ModernBertConfig
from overnight.display import plural
from overnight.engine.budget import planned_steps
from overnight.engine.planner import shares
from overnight.engine.precision import DTYPES
from overnight.engine.scaling_law import HELPFUL_EPOCHS, REPEATS, Law, layer_parameters, worth
from overnight.models.bert import padded_vocabulary
from overnight.models.modernbert import inner_size
from overnight.state_files import STRICT

HEAD = 64
"""Width of a head of attention."""
LADDER = (
    (2, 128),
    (3, 192),
    (4, 256),
    (6, 320),
    (8, 384),
    (10, 448),
    (12, 512),
    (12, 640),
    (12, 768),
    (18, 896),
    (24, 1024),
)
"""Layers and width, each about twice the parameters of the one before."""
VOCABULARIES = (4096, 8192, 16384, 32768)
CHARACTERS_PER_TOKEN = {4096: 3.78, 8192: 4.12, 16384: 4.36, 32768: 4.48}
"""Of English books, while there is no prepared text to measure; measured on 1.6 MB of them, with WordPiece vocabularies trained on 14 MB."""
LEAST_TOKENS_PER_ENTRY = 250
"""Tokens of text for each entry of a vocabulary: with fewer most entries are met too seldom to be learned. A rule of thumb."""
_BATCH, _BATCH_TOKENS, _BATCH_POWER, _MOST_BATCH = 16, 2.4e6, 0.47, 1024
# Bytes of a parameter: weight, gradient and two moments, fp32.
_STATE_BYTES = 16
# Numbers that the backward pass finds kept of a layer, for each token and unit of width; where layers are computed again, those of each, and of how many layers
# there are as many as without that at the same time. Measured with 6 and 12 layers of width 320 on a CPU (bf16: 466 and 872 MB, computed again 339 and 404).
_KEPT, _KEPT_AGAIN, _AT_ONCE = 26, 4, 3
_NEWTON_SCHULZ = 5
# Times the usual batch that a step may have because it waits for its host, and at which batch, in such times, tokens are worth half as much: with 8 times as many
# sequences eight layers of width 384 came to what 0.77 of their tokens come to by the law (docs/night-runs.md).
_MOST_WAITING, _CRITICAL = 8, 20
# Bits per character that no law tells apart: where the text is exhausted, ever larger networks win by a millionth.
_AS_GOOD = 1e-3


class Shape(NamedTuple):
    """A candidate."""

    layers: int
    width: int
    vocabulary: int

    def __str__(self) -> str:
        return f"{plural(self.layers, 'layer')} of width {self.width}, vocabulary {self.vocabulary:,}"


@dataclass(frozen=True)
class Text:
    """What there is to read."""

    characters: float
    """Of the training text."""
    per_token: Mapping[int, float]
    """Characters of a token, by vocabulary."""

    def tokens_per_entry(self, vocabulary: int) -> float:
        """Return how many tokens the text has for each entry of a vocabulary."""
        return self.characters / self.per_token[vocabulary] / vocabulary


class Timed(NamedTuple):
    """A rate that the machine reached."""

    flops: float
    """Operations a token of the network that it was measured with; 0 where it was not."""
    rate: float
    """Operations a second."""
    launch: float = 0.0
    """Least time of a step for each layer, whatever its batch (s): of a small network a GPU waits for its host; 0 where it was not met."""


@dataclass(frozen=True)
class Score:
    """What a candidate would come to; `size.json` holds it so."""

    __pydantic_config__ = STRICT
    layers: int
    width: int
    vocabulary: int
    parameters: int
    """Of the layers."""
    batch: int
    """Sequences of 128 tokens in a step, where the recipe leaves the batch open."""
    sequences: int
    """Of a step of the first phase."""
    seconds_per_step: float
    """Of the first phase."""
    steps: int
    """Of all phases."""
    tokens: float
    epochs: float
    """Passes over the text."""
    memory: float
    """Bytes, about."""
    loss: float
    """Bits per character of validation text, predicted."""
    refused: str = ""
    """Why it cannot be taken; empty where it can."""

    @property
    def shape(self) -> Shape:
        """Layers, width and vocabulary."""
        return Shape(self.layers, self.width, self.vocabulary)


def with_shape(run: BertRun, shape: Shape, batch: int) -> BertRun:
    """Return a run whose sizes are chosen, with those of a candidate: what its recipe gives itself, a vocabulary or the batch of a phase, stays.

    Args:
        batch: sequences of 128 tokens; longer ones are fewer, and shorter ones more.
    """
    assert isinstance(run.model, ModernBertConfig)
    sizes = {"size": "given", "num_layers": shape.layers, "hidden_size": shape.width, "num_heads": max(1, shape.width // HEAD)}
    phases = {}
    for name, phase in run.phases.items():
        sequences = max(1, batch * 128 // 2 ** math.ceil(math.log2(expected_lengths(phase).mean)))
        phases[name] = dataclasses.replace(phase, global_batch_size=phase.global_batch_size or sequences)
    return dataclasses.replace(
        run,
        model=dataclasses.replace(run.model, **sizes),  # type: ignore[arg-type]
        data=dataclasses.replace(run.data, vocab_size=run.data.vocab_size or shape.vocabulary),
        phases=phases,
    )


def batch_of(tokens: float) -> int:
    """Return the batch for a training of so many tokens: sequences of 128, a power of two.

    16 sequences are better than 32 for 2.4 M tokens (docs/night.md). The batch beyond which larger ones save no steps grows as the text to the 0.47 (Zhang et
    al. 2024, arXiv 2410.21676).
    """
    wanted = _BATCH * (max(tokens, 1.0) / _BATCH_TOKENS) ** _BATCH_POWER
    return int(min(_MOST_BATCH, max(_BATCH, 2 ** math.floor(math.log2(wanted)))))


def step_flops(run: BertRun) -> float:
    """Return the operations of a step of the first phase: those of the network, and those of Muon, which do not depend on the batch."""
    return shares(run)[0].flops + muon_flops(run.model)


def muon_flops(model: object) -> float:
    """Return the operations of Muon's Newton and Schulz a step: X Xᵀ and a product with it, of the shorter side m, and one of m x m, five times."""
    assert isinstance(model, ModernBertConfig)
    h, ff = model.hidden_size, inner_size(model)

    def matrix(rows: int, columns: int) -> float:
        m, n = sorted((rows, columns))
        return _NEWTON_SCHULZ * (4 * m * m * n + 2 * m**3)

    return model.num_layers * (matrix(3 * h, h) + matrix(h, h) + matrix(2 * ff, h) + matrix(h, ff)) + matrix(h, h)


def flops_per_token(run: BertRun) -> float:
    """Return the operations of a step of the first phase for each of its tokens."""
    phase = next(iter(run.phases.values()))
    return step_flops(run) / (phase.global_batch_size * expected_lengths(phase).mean)


def rate_at(flops: float, timed: Sequence[Timed]) -> float:
    """Return the rate (operations a second) of a network, between those that were timed on a line over the logarithm of its operations a token."""
    known = sorted(timed)
    if flops <= known[0].flops or len(known) == 1:
        return known[0].rate
    for (low, before, _), (high, after, _) in pairwise(known):
        if flops <= high:
            return before + (after - before) * (math.log(flops) - math.log(low)) / (math.log(high) - math.log(low))
    return known[-1].rate


def score(run: BertRun, shape: Shape, text: Text, timed: Sequence[Timed], seconds: float, memory: float, law: Law) -> Score:
    """Return what a candidate would come to.

    Args:
        run: whose sizes are chosen.
        timed: on this machine.
        seconds: for the steps of all phases.
        memory: that the machine has for it (bytes).
    """
    batch = _BATCH
    while batch_of((found := _training(run, shape, batch, timed, seconds)).tokens) > batch:
        batch *= 2
    assert isinstance(found.run.model, ModernBertConfig)
    parameters, per_token = layer_parameters(found.run.model), text.per_token[shape.vocabulary]

    def loss_of(training: _Training, batch: int) -> float:
        # Tokens of a batch beyond the usual one are worth less (McCandlish et al. 2018, arXiv 1812.06162).
        read = training.tokens * per_token * (_CRITICAL + 1) / (_CRITICAL + max(1.0, batch / batch_of(training.tokens)))
        return law.loss_on(max(1.0, text.characters), parameters, max(1.0, read))

    loss = loss_of(found, batch)
    # Where steps wait for the host, more sequences come for nothing.
    while found.waits and batch < _MOST_WAITING * batch_of(found.tokens):
        larger = _training(run, shape, 2 * batch, timed, seconds)
        if loss_of(larger, 2 * batch) >= loss:
            break
        batch, found, loss = 2 * batch, larger, loss_of(larger, 2 * batch)
    needs = memory_of(found.run)
    refused = ""
    if needs > memory:
        refused = f"needs about {needs / 1e9:.1f} GB of memory"
    elif (
        not run.data.vocab_size and shape.vocabulary > VOCABULARIES[0] and text.tokens_per_entry(shape.vocabulary) < LEAST_TOKENS_PER_ENTRY
    ):
        refused = "the text is too short for the vocabulary"
    first, characters = next(iter(found.run.phases.values())), found.tokens * per_token
    epochs = characters / max(1.0, text.characters)
    return Score(*shape, parameters, batch, first.global_batch_size, found.step, found.steps, found.tokens, epochs, needs, loss, refused)


class _Training(NamedTuple):
    run: BertRun
    step: float
    """Of the first phase (s)."""
    steps: int
    tokens: float
    waits: bool
    """Whether a step waits for its host, so that it takes no longer with more sequences."""


def _training(run: BertRun, shape: Shape, batch: int, timed: Sequence[Timed], seconds: float) -> _Training:
    here = with_shape(run, shape, batch)
    # Another program may have delayed one of those that were timed; none launches sooner than it can.
    launch = min((one.launch for one in timed if one.launch), default=0.0)
    works, launched = step_flops(here) / rate_at(flops_per_token(here), timed), shape.layers * launch
    step = max(works, launched)
    steps = planned_steps(shares(here), 0, 0, max(seconds, 0.0), step)
    tokens = sum(sequences_before(phase, n) * expected_lengths(phase).mean for n, phase in zip(steps, here.phases.values(), strict=True))
    return _Training(here, step, sum(steps), float(tokens), launched > works)


def memory_of(run: BertRun) -> float:
    """Return about how many bytes the training of a run takes: its state, and the activations of the largest micro-batch, in its precision.

    One that is left open is found so that it fits; a network for which it would be a small one is not worth its time.
    """
    model = run.model
    assert isinstance(model, ModernBertConfig)
    rows = padded_vocabulary(run.data.vocab_size)
    state = _STATE_BYTES * (layer_parameters(model) + rows * model.hidden_size)
    most, element = 0.0, DTYPES[run.precision].itemsize
    for phase in run.phases.values():
        length = expected_lengths(phase, pairs=phase.token_matching > 0).mean
        tokens = min(phase.micro_batch_size or usual_micro_batch(phase), phase.global_batch_size) * length
        scores = 2 * tokens * phase.seq_len * (model.hidden_size // HEAD)
        predicted = tokens * (phase.mlm_probability if phase.objective == "masked" else 1.0)
        layer = _KEPT * tokens * model.hidden_size + scores
        layers = model.num_layers * layer
        if run.memory.activation_checkpointing == "full":
            layers = min(layers, model.num_layers * _KEPT_AGAIN * tokens * model.hidden_size + _AT_ONCE * layer)
        most = max(most, element * layers + (4 + element) * predicted * rows)
    return state + most


def candidates(run: BertRun, vocabularies: Sequence[int]) -> list[Shape]:
    """Return all shapes that a run may get.

    Args:
        vocabularies: that it may have; the recipe's own, where that names one.
    """
    sizes = [run.data.vocab_size] if run.data.vocab_size else vocabularies
    return [Shape(layers, width, vocabulary) for layers, width in LADDER for vocabulary in sizes]


def best(scores: Sequence[Score]) -> Score | None:
    """Return the candidate with the least loss, or the smallest of those that are as good to a thousandth; None where none can be taken."""
    able = [s for s in scores if not s.refused]
    least = min((s.loss for s in able), default=0.0)
    return min((s for s in able if s.loss <= least + _AS_GOOD), key=lambda s: (s.parameters, s.loss), default=None)


def remarks(chosen: Score, text: Text) -> list[str]:
    """Return what is to be said of a choice: of repetitions, and of a vocabulary that the text hardly supports."""
    said = []
    if chosen.epochs > HELPFUL_EPOCHS:
        said.append(
            f"the time is enough to read the text ({text.characters / 1e6:,.1f} M characters) {chosen.epochs:,.0f} times. More than about {HELPFUL_EPOCHS} passes help little, "
            f"and all of them are worth {worth(chosen.epochs, 1.0, REPEATS):.1f} passes over new text: more text would use the time better"
        )
    per_entry = text.tokens_per_entry(chosen.shape.vocabulary)
    if per_entry < LEAST_TOKENS_PER_ENTRY:
        said.append(
            f"data.vocab_size = {chosen.shape.vocabulary}: the text has {per_entry:,.0f} tokens for each entry of the vocabulary, and below about "
            f"{LEAST_TOKENS_PER_ENTRY} most entries are not learned; a smaller vocabulary, or more text, is better"
        )
    return said
