"""A small valid recipe to change, and what is said of a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from overnight.errors import ConfigError


def tree(**changes: Any) -> dict[str, Any]:
    """A small valid recipe with dotted changes, written with __ for a dot."""
    found: dict[str, Any] = {
        "name": "x",
        "phases": {"short": {"steps": 100, "global_batch": 64}},
        "finetune": {"names": {"task": "docnames"}},
    }
    for key, value in changes.items():
        *parents, last = key.split("__")
        node = found
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return found


def message(what: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        what()
    assert caught.value.exit_code == 2
    return str(caught.value)
