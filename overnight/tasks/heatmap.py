"""What one unit of a byte model holds at every character of some texts.

Shapes: T bytes, H width.
"""

from __future__ import annotations

from pathlib import Path

import torch

from overnight.corpus.bytes import document_bytes
from overnight.errors import ConfigError, DataError
from overnight.models.bytes import ByteModel
from overnight.tasks.generate import check_unit
from overnight.tasks.transfer import read_results

_WINDOW = 256


@torch.no_grad()
def unit_values(model: ByteModel, text: str, unit: int, tanh: bool = False, dtype: torch.dtype = torch.float32) -> list[tuple[str, float]]:
    """Every character of a text, as the model reads it, with the unit's cell state after its last byte.

    Args:
        model: on its device.
        unit: cell of the top layer, from 0.
        tanh: give tanh(c), which the output gate lets through, instead of c.

    Returns:
        (character, value); the line feed and the space before the text are left out, and the space after it.
    """
    check_unit(model, unit)
    model.eval()
    document = document_bytes(text)
    device = next(model.parameters()).device
    state: torch.Tensor | None = None
    values: list[float] = []
    for start in range(0, len(document), _WINDOW):
        ids = torch.tensor([list(document[start : start + _WINDOW])], device=device)
        _, cell_BTH, state = model.hidden(ids, state, dtype)
        assert cell_BTH is not None
        cell_T = cell_BTH[0, :, unit].float()
        values += (cell_T.tanh() if tanh else cell_T).tolist()
    found, end = [], 0
    for character in document.decode():
        end += len(character.encode())
        found.append((character, values[end - 1]))
    return found[2:-1]


def chosen_unit(folder: Path, unit: str) -> int:
    """The number of a unit, or for `best` the one that the newest transfer in a folder found to say most.

    Raises:
        ConfigError: when it is no number.
        DataError: when no transfer of cell states was done.
    """
    if unit != "best":
        try:
            return int(unit)
        except ValueError:
            raise ConfigError(f"--unit = {unit!r}: must be a number or `best`") from None
    numbers = [line["unit"]["number"] for line in read_results(folder) if (line.get("unit") or {}).get("of") == "cell"]
    if not numbers:
        raise DataError(f"{folder}: no transfer has found a best cell yet; run `overnight transfer` first, or give --unit a number")
    return int(numbers[-1])
