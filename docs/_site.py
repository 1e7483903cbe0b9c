"""What mkdocs cannot know of pages that are also read in the repository: links that leave docs/ (a hook of mkdocs.yml)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent


def on_files(files: Files, config: Any) -> Files:
    """Add the pictures of the studies, which lie with their results."""
    for path in sorted((ROOT / "benchmarks" / "results").rglob("*.svg")):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Point to the added pictures: `../benchmarks/` of the repository is `benchmarks/` of the site."""
    return re.sub(r"\]\(\.\./benchmarks/", "](benchmarks/", markdown)
