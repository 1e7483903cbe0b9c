"""One self-contained HTML page from one or several run folders; it opens offline."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from overnight.config.describe import default_tree
from overnight.display import duration, number, plural, points, rounded, share, yaml_text
from overnight.errors import ConfigError, DataError, UserError
from overnight.report.evaluation_text import blimp_line
from overnight.report.plateau import plateau_text
from overnight.report.run_reader import Record, RunFolder, read_folder
from overnight.report.summary import facts_lines, quoted, summarize_folder, unit_text
from overnight.report.task_errors import read_errors, row_text
from overnight.run_dir.atomic import FULL, how_to_make_room, write_whole


def write_report(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write the page of one or several runs.

    Args:
        run_dirs: run folders; several are laid over each other by name.
        out: the HTML file; its folder is made if absent.

    Returns:
        `out`.

    Raises:
        ConfigError: without a run folder, or with the same one twice.
        DataError: when a folder cannot be read.
        UserError: when jinja2 or plotly is not installed, or the page cannot be written.
    """
    if not run_dirs:
        raise ConfigError("a report needs at least one run folder, such as runs/demo")
    places = [path.resolve() for path in run_dirs]
    twice = next((path for path in places if places.count(path) > 1), None)
    if twice:
        raise ConfigError(f"{twice} is named twice")
    if out.is_dir():
        raise ConfigError(f"{out} is a folder; name the HTML file to write, such as {out / 'report.html'}")
    return write_page(_render([read_folder(path) for path in run_dirs]), out)


def write_page(page: str, out: Path) -> Path:
    """Write a page; returns `out`.

    Raises:
        UserError: when it cannot be written.
    """
    try:
        write_whole(out, [page.encode("utf-8", "backslashreplace")])  # names of files need be no UTF-8
    except OSError as error:
        remedy = how_to_make_room(error.errno) if error.errno in FULL else "name another file by --to of the report"
        raise UserError(f"{out} could not be written: {error.strerror}; {remedy}") from error
    return out


def refresh_report(run_dir: Path) -> str:
    """Write `report.html` into a run folder, if what it needs is installed; return what to say of it."""
    if find_spec("plotly") is None or find_spec("jinja2") is None:
        return "no report.html: it needs the extra `report` (pip install 'overnight[report]')"
    return f"report: {write_report([run_dir], run_dir / 'report.html')}"


def rendered(template: str, **values: Any) -> str:
    """Return a page of this folder with what it shows, its style and its scripts.

    Args:
        template: its file.
        values: by the names that the file has for them; `title` is of the window.

    Raises:
        UserError: when jinja2 or plotly is not installed.
    """
    try:
        import jinja2  # noqa: F401
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UserError(f"the report needs {error.name}: pip install 'overnight[report]'") from None
    page = _templates().get_template(template)
    return page.render(style=_own("page.css"), script=_own("page.js"), plotly=get_plotlyjs(), **values)


def _own(name: str) -> str:
    return (resources.files("overnight.report") / name).read_text(encoding="utf-8")


@cache
def _templates() -> Any:
    """Return what compiles the pages, each once in a process."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_own), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(share=share, points=points, number=number, duration=duration, plural=plural, quoted=quoted, ordinal=_ordinal)
    environment.filters.update(rounded=rounded)
    return environment


def _render(folders: Sequence[RunFolder]) -> str:
    try:
        from overnight.report import figures
    except ImportError as error:
        raise UserError(f"the report needs {error.name}: pip install 'overnight[report]'") from None
    names = _names(folders)
    charts = figures.Charts(folders, names)
    runs: list[dict[str, Any]] = [{**summarize_folder(folder), "name": name} for folder, name in zip(folders, names, strict=True)]
    return rendered(
        "page.html",
        title=", ".join(names),
        runs=runs,
        seeds=_seeds(runs),
        strips=_strips(runs),
        errors={
            (run["name"], task["name"]): read_errors(folder.path / "finetune" / task["name"])
            for folder, run in zip(folders, runs, strict=True)
            for task in run["tasks"]
        },
        row_text=row_text,
        unit_text=unit_text,
        plateau_text=plateau_text,
        blimp_line=blimp_line,
        facts_lines=facts_lines,
        event_text=figures.event_text,
        histogram=figures.histogram,
        routine=figures.ROUTINE,
        settings=_side_by_side([folder.settings for folder in folders]),
        defaults=_defaults([folder.settings for folder in folders]),
        machines=_side_by_side([folder.environment or {} for folder in folders]),
        charts=charts,
        pale=figures.PALE,
        skipped=max((math.ceil(len(folder.records["train"]) / figures.POINTS) for folder in folders), default=1),
    )


def _names(folders: Sequence[RunFolder]) -> list[str]:
    """Return the runs' names, with their folders where two runs have the same."""
    plain = [folder.name for folder in folders]
    names = [name if plain.count(name) == 1 else f"{name} ({folder.path})" for name, folder in zip(plain, folders, strict=True)]
    if len(set(names)) < len(names):
        raise DataError(f"two of the runs cannot be distinguished: {', '.join(names)}")
    return names


def _ordinal(value: int) -> str:
    ending = "th" if value % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(value % 10, "th")
    return f"{value}{ending}"


def _seeds(runs: Sequence[Record]) -> dict[str, list[int]]:
    """Return the seeds of each task that any of the runs has."""
    found: dict[str, set[int]] = {}
    for run in runs:
        for task in run["tasks"]:
            found.setdefault(task["name"], set()).update(*((task[init] or {}).get("values", {}) for init in ("pretrained", "random")))
    return {name: sorted(seeds) for name, seeds in found.items()}


def _strips(runs: Sequence[Record]) -> Callable[[Record, str], list[float]]:
    """Return a function of a task and a kind of seeds: where these lie on a strip from the worst to the best value of the task in all runs (pixels)."""
    every: dict[str, list[float]] = {}
    for run in runs:
        for task in run["tasks"]:
            every.setdefault(task["name"], []).extend(value for init in ("pretrained", "random") for value in _values(task, init))
    width, margin = 160.0, 6.0

    def places(task: Record, init: str) -> list[float]:
        low, high = min(every[task["name"]], default=0.0), max(every[task["name"]], default=0.0)
        return [margin + (width - 2 * margin) * ((value - low) / (high - low) if high > low else 0.5) for value in _values(task, init)]

    return places


def _values(task: Record, init: str) -> list[float]:
    """Return the values of the seeds that can be drawn: NaN and infinity have no place."""
    return [value for value in (task[init] or {}).get("values", {}).values() if math.isfinite(value)]


def _side_by_side(trees: Sequence[Record]) -> list[tuple[str, list[str], bool]]:
    """Return the dotted key, the value in each run, and whether the runs differ in it."""
    flat = [dict(_flatten(tree)) for tree in trees]
    keys = dict.fromkeys(key for tree in flat for key in tree)
    rows = [(key, [tree.get(key, "-") for tree in flat]) for key in keys]
    return [(key, values, len(set(values)) > 1) for key, values in rows]


def _flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, list) and any(isinstance(value, dict) for value in tree):
        for index, value in enumerate(tree):
            yield from _flatten(value, f"{prefix}.{index}")
    else:
        yield prefix, yaml_text(tree)


def _defaults(trees: Sequence[Record]) -> Callable[[str, Sequence[str]], bool]:
    """Return a function of a dotted key and its value in each run: whether all are what a recipe has that does not mention the key."""
    known = [dict(_flatten(default_tree(tree))) for tree in trees]
    return lambda key, values: all(value == own.get(key, "-") for value, own in zip(values, known, strict=True))
