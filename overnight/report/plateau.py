"""The step at which a BERT leaves the plateau of a model without context: from there on it reads, and learns fast."""

from __future__ import annotations

import statistics
from typing import Any

from overnight.display import duration, number
from overnight.report.run_reader import RunFolder

# Below the loss without context by more than it can be off: the validation text has other words than the training text, and dropout raises the loss.
BELOW = 0.97
# A line counts where the median of it and those that follow it is below too, so that no single line is taken for the end of the plateau.
_LINES, _FEWEST = 9, 5


def plateau(folder: RunFolder) -> dict[str, Any] | None:
    """Return where training left the plateau.

    It is the first line of metrics whose training loss `mlm_loss`, and the median of it and the eight lines after it (at least four), is below 0.97
    times `plateau_loss`, the loss of the best model that sees no context (:func:`overnight.batches.masking.context_free_loss`).

    Returns:
        `loss` without context (nats), and the `global_step` and the `seconds` at which it was left, None where it was not (yet); None for runs
        whose metrics do not have that loss.
    """
    loss = next((record["plateau_loss"] for record in folder.records["phase"] if "plateau_loss" in record), None)
    if not isinstance(loss, int | float) or isinstance(loss, bool):
        return None
    lines = [record for record in folder.records["train"] if isinstance(record.get("mlm_loss"), int | float)]
    losses = [record["mlm_loss"] for record in lines]
    for at in range(len(losses) - _FEWEST + 1):
        if losses[at] < BELOW * loss and statistics.median(losses[at : at + _LINES]) < BELOW * loss:
            return {"loss": loss, "global_step": lines[at]["global_step"], "seconds": lines[at]["seconds"]}
    return {"loss": loss, "global_step": None, "seconds": None}


def plateau_text(found: dict[str, Any]) -> str:
    """Return it in words."""
    loss = f"plateau of a model without context (masked-LM loss {number(found['loss'], 3)})"
    if found["global_step"] is None:
        return f"The {loss} was not left: so far the network knows little more than how frequent each token is"
    return f"The {loss} was left at step {number(found['global_step'], 0)}, after {duration(found['seconds'])}"
