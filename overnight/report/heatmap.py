"""One self-contained HTML page that shows a unit's value at every character of some texts; it opens offline."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from importlib import resources
from itertools import groupby
from pathlib import Path

from overnight.errors import UserError
from overnight.run_dir.atomic import write_whole

Characters = Sequence[tuple[str, float]]
# Shades of each of the two colors.
_SHADES = 20


def write_heatmap(path: Path, texts: Sequence[Characters], title: str, lead: str) -> float:
    """Write the page.

    The colors reach their full strength at the greatest value of all texts, on both sides of 0 alike. Neighbors of one shade share an element.

    Args:
        path: the HTML file; its folder is made if absent.
        texts: of each text the characters with their values.
        title: heading.
        lead: a sentence below it.

    Returns:
        the greatest absolute value, at which the color is full.

    Raises:
        UserError: when the page cannot be written.
    """
    most = max((abs(value) for text in texts for _, value in text), default=0.0) or 1.0
    own = resources.files("overnight.report")
    page = (own / "heatmap.html").read_text(encoding="utf-8")
    scale = "".join(f'<i class="{_shade(k / _SHADES)}"></i>' for k in range(-_SHADES, _SHADES + 1, 2))
    shades = "\n".join(
        f".{side}{k} {{ background: rgb(var(--{side}) / {k / _SHADES * 0.85:.3f}); }}" for side in "np" for k in range(1, _SHADES + 1)
    )
    parts = {
        "title": html.escape(title),
        "lead": html.escape(lead),
        "low": f"{-most:.3g}",
        "high": f"+{most:.3g}",
        "scale": scale,
        "shades": shades,
        "texts": "\n".join(f'<p class="text">{"".join(_marked(text, most))}</p>' for text in texts),
    }
    for name, value in parts.items():
        page = page.replace(f"<!--{name}-->", value)
    try:
        write_whole(path, [page.encode()])
    except OSError as error:
        raise UserError(f"{path} could not be written: {error}") from None
    return most


def _marked(text: Characters, most: float) -> Iterator[str]:
    for shade, run in groupby(text, lambda pair: _shade(pair[1] / most)):
        pairs = list(run)
        mean = sum(value for _, value in pairs) / len(pairs)
        words = html.escape("".join(character for character, _ in pairs))
        yield f'<i class="{shade}" title="{mean:+.3g}">{words}</i>' if shade else words


def _shade(value: float) -> str:
    """Return the class of a value from -1 to 1; none around 0."""
    level = round(value * _SHADES)
    return f"{'p' if level > 0 else 'n'}{abs(level)}" if level else ""
