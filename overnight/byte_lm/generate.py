"""Text from a byte model, byte by byte, with one of its units held at a value if asked.

Shapes: B = 1 text, H width.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from overnight.errors import ConfigError
from overnight.models.bytes import ByteModel

# What stands before every document: the model has seen no other beginning.
_OPENING = b"\n "
# What a generator of torch takes.
_SEEDS = (-(1 << 63), (1 << 64) - 1)


@dataclass(frozen=True)
class Unit:
    """A unit of the top layer of a recurrent byte model."""

    number: int
    """From 0."""
    state: Literal["cell", "hidden"] = "cell"
    """Which of its two states is meant."""

    def __str__(self) -> str:
        return f"{self.state} {self.number}"


@torch.no_grad()
def generate(
    model: ByteModel,
    prompt: str,
    length: int,
    temperature: float = 1.0,
    seed: int = 0,
    clamped: tuple[Unit, float] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Iterator[str]:
    """Sample a continuation of a prompt, bytes as they come, decoded as UTF-8; what is none becomes U+FFFD.

    A unit is held by setting its cell or hidden state in the top layer to the value after every byte, those of the prompt included; the next
    byte is read from there (Radford et al. 2017, arXiv:1704.01444, section 4.4, hold a cell).

    Args:
        model: on its device; its dropout is off.
        prompt: bytes of a command line that are no UTF-8 are in it as Python has them (`surrogateescape`), and read as they are.
        length: bytes to sample.
        temperature: by which the logits are divided; 0 takes the likeliest byte.
        seed: the same gives the same text, on the same kind of device.
        clamped: a unit, and the value of its state.

    Yields:
        pieces of the continuation, without the prompt.

    Raises:
        ConfigError: for a unit that the model does not have, numbers that make no sense, or half a surrogate pair in the prompt.
    """
    _check_numbers(model, length, temperature, seed, clamped, dtype)
    model.eval()
    device = next(model.parameters()).device
    state, prepared = model.zero_state(1), model.prepared(dtype)
    chance = torch.Generator().manual_seed(seed)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = list(_OPENING + _prompt_bytes(prompt))
    # A Transformer carries nothing: it reads its text again, as much as it has positions for.
    reach = None if model.recurrent else model.position.num_embeddings
    chunks = [[byte] for byte in text] if clamped else [text if reach is None else text[-reach:]]
    for done in range(length):
        for chunk in chunks:
            hidden_BTH, _, state = model.hidden(torch.tensor([chunk], device=device), state, dtype, prepared)
            if clamped:
                unit, value = clamped
                state[:, -1, 1 if unit.state == "cell" else 0, unit.number] = value
                if unit.state == "hidden":  # the logits are made of it
                    hidden_BTH[:, -1, unit.number] = value
        logits = model.logits(hidden_BTH[:, -1]).flatten().double().cpu()
        if not logits.isfinite().all():
            because = f"--value = {clamped[1]} is too large" if clamped else "its weights are damaged"
            raise ConfigError(f"the model's logits are not finite: {because}")
        # The largest is 0 first: divided by a small temperature it would be infinite.
        scaled = (logits - logits.max()) / (temperature or 1.0)
        byte = int(logits.argmax()) if temperature == 0 else int(scaled.softmax(0).multinomial(1, generator=chance))
        text.append(byte)
        chunks = [[byte] if reach is None else text[-reach:]]
        if decoded := decoder.decode(bytes([byte]), final=done == length - 1):
            yield decoded


def _prompt_bytes(prompt: str) -> bytes:
    try:
        return prompt.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        half = prompt[error.start]
        raise ConfigError(
            f"--prompt: character {error.start + 1} is {half!r}, half of a surrogate pair, which is not text; leave it out"
        ) from None


def _check_numbers(
    model: ByteModel, length: int, temperature: float, seed: int, clamped: tuple[Unit, float] | None, dtype: torch.dtype
) -> None:
    if clamped:
        check_unit(model, clamped[0])
    if clamped and not abs(clamped[1]) <= torch.finfo(dtype).max:
        raise ConfigError(f"--value = {clamped[1]}: must be a finite number of {str(dtype).removeprefix('torch.')}")
    if not _SEEDS[0] <= seed <= _SEEDS[1]:
        raise ConfigError(f"--seed = {seed}: must be from {_SEEDS[0]} to {_SEEDS[1]}")
    if temperature < 0 or not math.isfinite(temperature):
        raise ConfigError(f"--temperature = {temperature}: must be 0 or more")
    if length < 1:
        raise ConfigError(f"--length = {length}: must be 1 or more")


def check_unit(model: ByteModel, unit: Unit) -> None:
    """Check that a model has a unit.

    Raises:
        ConfigError: when it does not, or has no cells at all.
    """
    if not model.recurrent:
        raise ConfigError("--unit: a Transformer has no cells; only mlstm and lstm do")
    if not 0 <= unit.number < model.state_shape[-1]:
        raise ConfigError(f"--unit = {unit.number}: the model has units 0 to {model.state_shape[-1] - 1}")
