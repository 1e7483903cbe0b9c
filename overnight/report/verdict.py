"""Whether pretraining wins over what it is compared with: random initialization, and methods without a network."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from overnight.report.run_reader import Record

# Rounding of the difference of two scores: 0.725 - 0.625 is more than 0.1.
_ROUNDING = 1e-9


def spread(by_seed: dict[int, Record]) -> dict[str, Any] | None:
    """Return every seed's value, the median, and the spread from worst to best; None without a line.

    Returns:
        `values` by seed, `median`, `low`, `high`, `spread` (high - low; None for a single seed), and `others`, the medians of the other metrics.
    """
    if not by_seed:
        return None
    values = {seed: float(by_seed[seed]["value"]) for seed in sorted(by_seed)}
    metric = next(iter(by_seed.values()))["metric"]
    scores: dict[str, list[float]] = {}
    for record in by_seed.values():
        for key, value in (record.get("metrics") or {}).items():
            if key != metric and isinstance(value, int | float):
                scores.setdefault(key, []).append(value)
    low, high = min(values.values()), max(values.values())
    return {
        "values": values,
        "median": statistics.median(values.values()),
        "low": low,
        "high": high,
        "spread": high - low if len(values) > 1 else None,
        "others": {key: statistics.median(found) for key, found in scores.items()},
    }


def compare(
    pretrained: dict[str, Any] | None,
    random: dict[str, Any] | None,
    baselines: Sequence[dict[str, Any]] = (),
) -> tuple[bool | None, str]:
    """Say whether pretraining wins over everything it is compared with, and what is best.

    It wins where its median is ahead of every baseline, and of that without pretraining, by more than the larger of the spreads of the seeds.

    Args:
        pretrained: see :func:`spread`.
        random: the same network without pretraining, at random initialization.
        baselines: `method` and `value` of each method that the network is compared with.

    Returns:
        the answer, None where there is nothing to compare, and the same in words, which name the best first. Every metric here is better when higher.
    """
    if pretrained is None:
        return None, "not run yet"
    median = pretrained["median"]
    others = {baseline["method"]: float(baseline["value"]) for baseline in baselines if math.isfinite(baseline["value"])}
    if random is not None:
        others["random init"] = random["median"]
    if not all(math.isfinite(value) for value in (median, *others.values())):
        return None, "a score is not a number"
    ranked = sorted(others, key=lambda what: -others[what])
    best = ranked[0] if ranked else ""
    if best and median <= others[best] + _ROUNDING:
        beaten = [what for what in ranked if others[what] - median > _ROUNDING]
        ahead = [what for what in ranked if median > others[what] + _ROUNDING]
        matched = [what for what in ranked if what not in (*beaten, *ahead)]
        said = (("beaten by", beaten), ("matched by", matched), ("ahead of", ahead))
        return False, "pretraining does not win: " + "; ".join(f"{how} {' and '.join(names)}" for how, names in said if names)
    without = "not compared with random init"
    if not best:
        return None, without
    more = "" if random is not None else f"; {without}"
    spreads = [found["spread"] for found in (pretrained, random) if found is not None and found["spread"] is not None]
    if not spreads:
        return None, f"pretraining is ahead of {' and '.join(ranked)}, on a single seed: no spread to compare with{more}"
    if median - others[best] <= max(spreads) + _ROUNDING:
        return False, f"pretraining is ahead, but not by more than the spread of the seeds; next is {best}{more}"
    if random is None:
        return None, f"pretraining is ahead of {best} by more than the spread{more}"
    return True, f"pretraining wins by more than the spread; next is {best}"
