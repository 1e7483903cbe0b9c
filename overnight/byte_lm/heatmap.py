"""What one unit of a byte model holds at every character of some texts.

Shapes: T bytes, H width.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from overnight.byte_lm.generate import Unit, check_unit
from overnight.byte_lm.linear_probe import probe_results
from overnight.corpus.bytes import document_bytes
from overnight.engine.finite import finite_outputs
from overnight.errors import ConfigError, DataError
from overnight.interop.byte_models import weights_name
from overnight.models.bytes import ByteModel

_WINDOW = 256


@torch.no_grad()
def unit_values(model: ByteModel, text: str, unit: Unit, tanh: bool = False, dtype: torch.dtype = torch.float32) -> list[tuple[str, float]]:
    """Return every character of a text, as the model reads it, with the unit's cell or hidden state after its last byte.

    Args:
        model: on its device.
        unit: of the top layer.
        tanh: give tanh(c), which the output gate lets through, instead of c.

    Returns:
        (character, value); the line feed and the space before the text are left out, and the space after it.

    Raises:
        ConfigError: for a unit that the model does not have, or the tanh of a hidden state.
        NonFiniteError: when a value is not finite.
    """
    check_unit(model, unit)
    if tanh and unit.state == "hidden":
        raise ConfigError(f"--tanh: applies to cells only, and the unit is {unit}, which already lies between -1 and 1; leave it out")
    model.eval()
    document = document_bytes(text)
    device = next(model.parameters()).device
    state: torch.Tensor | None = None
    values: list[float] = []
    for start in range(0, len(document), _WINDOW):
        ids = torch.tensor([list(document[start : start + _WINDOW])], device=device)
        hidden_BTH, cell_BTH, state = model.hidden(ids, state, dtype)
        assert cell_BTH is not None
        value_T = (cell_BTH if unit.state == "cell" else hidden_BTH)[0, :, unit.number].float()
        values += (value_T.tanh() if tanh else value_T).tolist()
    finite_outputs(np.array(values))
    found, end = [], 0
    for character in document.decode():
        end += len(character.encode())
        found.append((character, values[end - 1]))
    return found[2:-1]


def chosen_unit(folder: Path, unit: str) -> Unit:
    """Return the cell of a number, or for `best` the unit that the newest linear probe in a folder found to say most.

    Standard error is told where that probe was of another checkpoint than the newest.
    Of the features `hidden` and `mean`, a mean of hidden states, the unit is a hidden state.

    Raises:
        ConfigError: when it is no number.
        DataError: when no linear probe found one.
    """
    if unit != "best":
        try:
            return Unit(int(unit))
        except ValueError:
            raise ConfigError(f"--unit = {unit!r}: must be a number or `best`") from None
    probes = probe_results(folder)
    found = [line for line in probes if line.get("unit")]
    if probes and not found:
        last = probes[-1]
        why = (
            "has more than two classes, so no unit is the best"
            if last.get("nonzero")
            else "gives no unit a weight, since none tells the classes apart"
        )
        raise DataError(f"{folder}: the linear probe {last['name']} {why}; give --unit a number")
    if not found:
        raise DataError(
            f"{folder}: no linear probe on a task of two classes has found a best unit yet; run `overnight linear-probe` first, or give --unit a number"
        )
    newest, at_work = found[-1], weights_name(folder)
    best = Unit(int(newest["unit"]["number"]), "cell" if newest["unit"]["of"] == "cell" else "hidden")
    if (of := newest.get("checkpoint", at_work)) != at_work:
        print(
            f"{best} is the best unit of {of} according to the linear probe {newest['name']}, but the newest checkpoint is {at_work}: "
            "run the linear probe again",
            file=sys.stderr,
        )
    return best
