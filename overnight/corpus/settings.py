"""The settings that decide the bytes of the shards, as the manifest has them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from overnight.config import Data
from overnight.config.load import same_setting
from overnight.corpus.named_sources import deciding
from overnight.errors import ConfigError

# Values of `Data` that decide the bytes of the shards.
SETTINGS = (
    "paths",
    "tokenizer",
    "format",
    "field",
    "documents",
    "html",
    "gutenberg_license",
    "min_chars",
    "fix_text",
    "languages",
    "mask_personal",
    "filters",
    "group_field",
    "valid_fraction",
    "test_fraction",
    "label",
    "vocab_file",
    "new_words",
    "vocab_size",
    "lowercase",
    "encoding_errors",
    "on_truncated_file",
    "namespaces",
    "near_duplicates",
    "repeated_paragraphs",
    "decontaminate",
    "decontaminate_words",
    "sources",
)
_PRESET = "filters.preset"


def settings_of(data: Data) -> dict[str, Any]:
    """Return the plain values of the settings that decide the bytes."""
    values = dataclasses.asdict(data) | {"sources": deciding(data)}
    if data.sources:
        values["paths"] = Data().paths  # is not read, whether it is empty or left out
    found: dict[str, Any] = json.loads(json.dumps({name: values[name] for name in SETTINGS}))
    return found


def check_settings(settings: dict[str, Any], manifest: dict[str, Any], folder: Path) -> None:
    """Check that a folder was prepared with given settings; one that did not exist then had its default.

    Args:
        settings: those of now, of :func:`settings_of`.
        manifest: those that the manifest of the folder has.
        folder: for the message.

    Raises:
        ConfigError: naming those that differ, with both values.
    """
    differ = [f"{name}: prepared with {then!r}, now asked for {now!r}" for name, then, now in different_settings(manifest, settings)]
    if differ:
        raise ConfigError(
            f"{folder}: was prepared with other settings ({'; '.join(differ)}); restore those, set data.dir to another folder, or delete this one"
        )


def different_settings(manifest: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return which settings of two manifests differ, each with both values; one that did not exist yet had its default.

    Returns:
        `data.NAME`, the value in the first, and that in the second.
    """
    defaults = _flat(settings_of(Data()))
    then, now = defaults | _flat(manifest), defaults | _flat(other)
    differ = [name for name in now if not same_setting(then.get(name), now[name], name)]
    if _PRESET in differ:  # all its values differ, too
        differ = [name for name in differ if name == _PRESET or not name.startswith("filters.")]
    return [(f"data.{name}", then.get(name), now[name]) for name in differ]


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with those of a section by dotted names."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= {f"{name}.{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
    return found
