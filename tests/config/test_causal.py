"""Settings that a phase which predicts the next token cannot have."""

from __future__ import annotations

from typing import Any

import pytest

from overnight import config
from tests.config.test_validate import message, modern_tree

KEY = "phases.short"


def tree(last: bool = False, **values: Any) -> dict[str, Any]:
    """A causal phase, and behind it a masked one unless it is the last."""
    given = {"objective": "causal", "nsp": False, **values}
    found = modern_tree(**{f"phases__short__{name}": value for name, value in given.items()})
    phase = {"steps": 10, "global_batch_size": 64, "nsp": False}
    return found if last else {**found, "phases": {**found["phases"], "then": phase}}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (tree(nsp=True), f"{KEY}.nsp = true: a causal phase predicts the next token alone; set it to false"),
        (tree(whole_word=True), f"{KEY}.whole_word = True: needs {KEY}.objective = masked; leave it out"),
        (tree(token_matching=0.5), f"{KEY}.token_matching = 0.5: needs {KEY}.objective = masked; leave it out"),
        (tree(final_mlm_probability=0.1), f"{KEY}.final_mlm_probability = 0.1: needs {KEY}.objective = masked; leave it out"),
        (
            tree(last=True),
            f"{KEY}.objective = causal: an encoder is used with tokens from both sides, so the last phase must be masked",
        ),
    ],
    ids=["nsp", "words", "matching", "rate", "last"],
)
def test_what_does_not_go_together_is_refused(given: dict[str, Any], said: str) -> None:
    assert message(lambda: config.build_run(given)) == said


def test_with_a_budget_only_the_last_phase_needs_a_decay() -> None:
    held, decays = ({"name": "muon", "schedule": {"name": "wsd", "warmup_ratio": 0.1, "stable_ratio": stable}} for stable in (0.9, 0.5))
    given = tree(optim=held)
    given["phases"]["then"]["optim"] = decays
    assert config.build_run({**given, "budget": "1h"}).budget == "1h"
    given["phases"]["then"]["optim"] = held
    assert "phases.then.optim.schedule.stable_ratio = 0.9: leaves no steps for the decay" in message(
        lambda: config.build_run({**given, "budget": "1h"})
    )
