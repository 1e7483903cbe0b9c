"""Settings of token matching that do not go together."""

from __future__ import annotations

from typing import Any

import pytest

from overnight import config
from tests.config.test_validate import message, modern_tree, tree

KEY = "phases.short"


def settings(**values: Any) -> dict[str, Any]:
    return {f"phases__short__{name}": value for name, value in values.items()}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            tree(**settings(token_matching=0.1)),
            f"{KEY}.token_matching = 0.1: needs model.kind = modernbert; BERT learns to compare texts by {KEY}.nsp, so set it to 0",
        ),
        (
            modern_tree(**settings(token_matching=0.1, nsp=True)),
            f"{KEY}.token_matching = 0.1: needs {KEY}.nsp=false, since it makes pairs of its own; or set it to 0",
        ),
        (
            modern_tree(**settings(token_matching=0.1, token_matching_steps=9, final_token_matching=0.2)),
            f"{KEY}.final_token_matching = 0.2: must be at most {KEY}.token_matching = 0.1: it falls",
        ),
        (
            modern_tree(**settings(token_matching=0.1, final_token_matching=0.05)),
            f"{KEY}.final_token_matching = 0.05: is never reached; set {KEY}.token_matching_steps, after which the share falls",
        ),
    ],
    ids=["BERT", "nsp", "rises", "never"],
)
def test_what_does_not_go_together_is_refused(given: dict[str, Any], said: str) -> None:
    assert message(lambda: config.build_run(given)) == said


@pytest.mark.parametrize("share", [0.1, 0.0])
def test_without_a_share_the_rest_means_nothing_and_one_setting_turns_it_off(share: float) -> None:
    run: Any = config.build_run(modern_tree(**settings(token_matching=share, token_matching_steps=9, final_token_matching=0.05)))
    assert run.matches_tokens == bool(share)
