"""Learning-rate schedules as functions of the step: factor(t) of the peak, for t = 0, 1, ..., total - 1.

Two ways of counting are in use. transformers' `get_linear_schedule_with_warmup` and Google's BERT give step t (from 0) t/w while it
warms up, so that the first update does nothing, and (1 - t/T)/(1 - w/T) from t = w on: here the warm-up is one update ahead, (t + 1)/w,
and the decay is theirs. NVIDIA's PolyWarmUpScheduler counts updates n = t + 1 from 1 throughout, so that its last update does nothing:
`poly_nvidia` is that, update by update.
"""

from __future__ import annotations

import math

from overnight.config import Schedule


def factor(schedule: Schedule, step: int, steps: int) -> float:
    """What to multiply the peak learning rate by.

    Step t (from 0) is the update number t + 1. It warms up over w = warmup·total updates, linearly, and reaches the peak with
    update w; then it decays so that the update after the last would have factor 0 (`poly_nvidia`: so that the last has).

    Args:
        schedule: its settings; `total` and `offset` place this phase in a longer schedule.
        step: optimizer step within the phase, from 0.
        steps: steps of the phase.
    """
    total, w = schedule.total or steps, schedule.warmup
    update = schedule.offset + step + 1
    # NVIDIA's decay is that of a schedule without warm-up: it jumps down where the warm-up ends (6e-3 to 5.08e-3 in NVLAMB).
    if schedule.name == "poly_nvidia":
        s = update / total
        return s / w if s < w else float(max(0.0, 1.0 - s) ** schedule.power)
    if update <= w * total:
        return update / (w * total)
    if schedule.name == "constant":
        return 1.0
    share = min(1.0, max(0.0, 1.0 - (update - 1) / total) / (1.0 - w)) if w < 1.0 else 0.0
    if schedule.name == "poly":
        return float(share**schedule.power)
    return 0.5 * (1.0 - math.cos(math.pi * share))
