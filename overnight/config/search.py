"""What a fine-tuning may try before its seeds are trained."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from overnight.config.fields import LayerDecay, NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(frozen=True)
class Search:
    """Settings that are tried with the first seed; all seeds are then trained with the best of them. Nothing is tried where no list has a value."""

    lr: list[PositiveFloat] = field(default_factory=list)
    """Peak learning rates to try, each with every other setting to try; empty takes the one of the task."""
    epochs: list[PositiveFloat] = field(default_factory=list)
    """Numbers of epochs to try."""
    global_batch_size: list[PositiveInt] = field(default_factory=list)
    """Batches to try (rows)."""
    layer_lr_decay: list[LayerDecay] = field(default_factory=list)
    """Decays of the learning rate from layer to layer to try."""
    draw: NonNegativeInt = 0
    """How many of the combinations are tried, drawn at random by `seed`; 0 tries all, in the order of the lists."""
    seed: int = 0
    """Which combinations are drawn, and in which order."""
    budget: str = ""
    """Time that the search may take, such as `30m`, without the seeds that follow: a combination that is not expected to fit is left out. Empty tries all."""

    @property
    def combinations(self) -> list[dict[str, Any]]:
        """All combinations of the settings to try, in the order of the lists, the last list fastest; none where nothing is to be tried."""
        lists = {name: getattr(self, name) for name in ("lr", "epochs", "global_batch_size", "layer_lr_decay")}
        given = {name: list(dict.fromkeys(values)) for name, values in lists.items() if values}
        return [dict(zip(given, values, strict=True)) for values in itertools.product(*given.values())] if given else []
