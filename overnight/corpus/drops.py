"""What preparation drops: how much for each reason, and the first samples of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SAMPLES = 20
CHARACTERS = 200


@dataclass
class Drops:
    """Counts by reason, and of each reason the first samples in the order of the sources."""

    counts: dict[str, int] = field(default_factory=dict)
    samples: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """By reason: name of the document, and how its text begins."""

    def add(self, reason: str, name: str, text: str) -> None:
        """Count one more; keep it while there are fewer than :data:`SAMPLES`.

        Args:
            reason: why it is dropped, in two or three words.
            name: of its document (see `readers.Document.name`).
            text: of what is dropped; its first :data:`CHARACTERS` are kept.
        """
        self.count(reason, 1)
        self.sample(reason, name, text)

    def count(self, reason: str, number: int) -> None:
        """Count more without a sample; zero makes the reason appear."""
        self.counts[reason] = self.counts.get(reason, 0) + number
        self.samples.setdefault(reason, [])

    def sample(self, reason: str, name: str, text: str) -> None:
        """Keep a sample of what was counted."""
        if len(kept := self.samples.setdefault(reason, [])) < SAMPLES:
            kept.append((name, text[:CHARACTERS]))

    def merge(self, other: Drops) -> None:
        """Add what was dropped from documents that come later in the sources."""
        for reason, number in other.counts.items():
            self.count(reason, number)
            for name, text in other.samples[reason]:
                self.sample(reason, name, text)

    def as_json(self) -> dict[str, Any]:
        """Return a JSON object: of each reason its count and its samples."""
        return {
            reason: {"count": number, "samples": [{"name": name, "text": text} for name, text in self.samples[reason]]}
            for reason, number in self.counts.items()
        }

    @staticmethod
    def from_json(tree: Mapping[str, Any]) -> Drops:
        """Return what :meth:`as_json` wrote."""
        return Drops(
            {reason: entry["count"] for reason, entry in tree.items()},
            {reason: [(each["name"], each["text"]) for each in entry["samples"]] for reason, entry in tree.items()},
        )

    def line(self) -> str:
        """Return the counts by reason in one line, `duplicate 12, short 3`."""
        return ", ".join(f"{reason} {number:,}" for reason, number in self.counts.items() if number) or "nothing"
