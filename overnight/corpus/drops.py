"""What preparation drops: how much for which reason, with the first samples of each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

SAMPLES = 20
"""Of each reason, in the order of the source."""
SAMPLE_CHARS = 200


@dataclass
class Drops:
    """Counts by reason, and the first samples of each: (name of the document, its first characters)."""

    counts: Counter[str] = field(default_factory=Counter)
    samples: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    def add(self, reason: str, name: str, text: str) -> None:
        """Count a dropped text.

        Args:
            reason: what decided it, most often the name of a setting.
            name: of its document.
            text: of which the beginning may be kept as a sample.
        """
        self.counts[reason] += 1
        samples = self.samples.setdefault(reason, [])
        if len(samples) < SAMPLES:
            samples.append((name, text[:SAMPLE_CHARS]))

    def merge(self, other: Drops) -> None:
        """Add what was dropped behind this in the source."""
        self.counts.update(other.counts)
        for reason, samples in other.samples.items():
            mine = self.samples.setdefault(reason, [])
            mine += samples[: SAMPLES - len(mine)]

    def as_json(self) -> dict[str, Any]:
        """Return plain values, reasons in alphabetical order."""
        return {
            reason: {"count": self.counts[reason], "samples": [{"document": name, "text": text} for name, text in self.samples[reason]]}
            for reason in sorted(self.counts)
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Drops:
        """Return what :meth:`as_json` was called on."""
        samples = {reason: [(sample["document"], sample["text"]) for sample in each["samples"]] for reason, each in value.items()}
        return cls(Counter({reason: each["count"] for reason, each in value.items()}), samples)
