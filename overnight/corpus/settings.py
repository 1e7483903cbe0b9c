"""The settings that decide the bytes of the shards, as the manifest has them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from overnight.config import Data

_PRESET = "filters.preset"


def settings_of(data: Data, names: Sequence[str]) -> dict[str, Any]:
    """Return the plain values of some settings."""
    values = dataclasses.asdict(data)
    found: dict[str, Any] = json.loads(json.dumps({name: values[name] for name in names}))
    return found


def changed_settings(settings: dict[str, Any], manifest: dict[str, Any]) -> list[str]:
    """Return which settings differ from those of a manifest, each with both values; one that did not exist then had its default.

    Args:
        settings: those of now, of :func:`settings_of`.
        manifest: those that it has.
    """
    then, now = _flat(settings_of(Data(), list(settings))) | _flat(manifest), _flat(settings)
    differ = [name for name in now if then[name] != now[name]]
    if _PRESET in differ:  # all its values differ, too
        differ = [name for name in differ if name == _PRESET or not name.startswith("filters.")]
    return [f"data.{name} = {now[name]!r} (prepared with {then[name]!r})" for name in differ]


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with those of a section by dotted names."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
    return found
