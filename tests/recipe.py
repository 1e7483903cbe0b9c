"""A small valid recipe to change, and what is said of a wrong one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from overnight.errors import ConfigError


def tree(**changes: Any) -> dict[str, Any]:
    """A small valid recipe with dotted changes, written with __ for a dot."""
    found: dict[str, Any] = {
        "name": "x",
        "phases": {"short": {"steps": 100, "global_batch_size": 64}},
        "finetune": {"names": {"task": "docnames"}},
    }
    return change(found, {key.replace("__", "."): value for key, value in changes.items()})


def change(tree: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The tree, with settings changed in place that are named as on the command line: `phases.short.steps`."""
    for key, value in changes.items():
        *parents, last = key.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def message(what: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        what()
    assert caught.value.exit_code == 2
    return str(caught.value)
