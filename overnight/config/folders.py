"""Folders as a recipe names them."""

from __future__ import annotations

import os
from pathlib import Path


def folder_of(text: str, name: str) -> Path:
    """Return the folder that `out` or `data.dir` names: with the name of the run, and the home folder, which a shell leaves as it is behind `--out=`."""
    return Path(os.path.expanduser(text.replace("{name}", name)))
