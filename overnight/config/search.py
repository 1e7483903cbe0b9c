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
    """Peak learning rates to try, each combined with all other settings to try; empty uses the task's."""
    epochs: list[PositiveFloat] = field(default_factory=list)
    """Numbers of epochs to try."""
    global_batch_size: list[PositiveInt] = field(default_factory=list)
    """Batch sizes to try (rows)."""
    layer_lr_decay: list[LayerDecay] = field(default_factory=list)
    """Layer-wise decays of the learning rate to try."""
    draw: NonNegativeInt = 0
    """Number of combinations to try, drawn at random by `seed`; 0 tries all, in the order of the lists."""
    seed: int = 0
    """Seed that decides which combinations are drawn, and in which order."""
    budget: str = ""
    """Time limit of the search, such as `30m`, without the seeds that follow; a combination not expected to fit is left out. Empty tries all."""

    @property
    def combinations(self) -> list[dict[str, Any]]:
        """All combinations of the settings to try, in the order of the lists, the last list fastest; none where nothing is to be tried."""
        lists = {name: getattr(self, name) for name in ("lr", "epochs", "global_batch_size", "layer_lr_decay")}
        given = {name: list(dict.fromkeys(values)) for name, values in lists.items() if values}
        return [dict(zip(given, values, strict=True)) for values in itertools.product(*given.values())] if given else []
