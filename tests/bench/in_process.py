"""The processes of the campaigns as calls, which saves importing torch and transformers for each, and a stand-in for what scores their models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import mlm_peer, time_to_quality, timed_training
from overnight.cli.main import main as overnight


class Calls(list[list[str]]):
    """Every command, in order."""

    def of(self, name: str) -> list[list[str]]:
        """The commands of one name."""
        return [words for words in self if words[0] == name]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Commands are called and noted; `overnight evaluate` gives scores by the number of models before it: 5.0 bits, 4.9, 4.8, ..."""
    found = Calls()

    def run_module(module: str, arguments: Sequence[object], log: Path, threads: int) -> float:
        words = [str(word) for word in arguments]
        found.append(words if module == "overnight" else [module, *words])
        if words[0] == "evaluate":
            folder, text = (Path(words[words.index(name) + 1]) for name in ("--from", "--text"))
            assert (folder / "model.safetensors").is_file() or (folder / "checkpoints").is_dir()
            assert text.stat().st_size
            bits = 5.1 - 0.1 * len(found.of("evaluate"))
            scores = {"bits_per_character": bits, "masked_accuracy": 0.2, "blimp": 0.6, "characters": 800}
            Path(words[words.index("--json") + 1]).write_text(json.dumps(scores), encoding="utf-8")
        elif module == "overnight":
            assert overnight(words) == 0
        else:
            mlm_peer.main(words)
        return 1.0

    for module in (timed_training, time_to_quality):
        monkeypatch.setattr(module, "run_module", run_module)
    return found
