"""The folders of a server of HTTP, where every address is a file, a folder is a page with links, and only asking for a file tells its size and version.

The walk of fsspec leaves out a folder whose connection is lost, and of two files of one name to which a page links it returns one.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urljoin

from overnight.corpus import data_paths
from overnight.errors import DataError

# What a page of Apache or nginx links to is itself in another order.
_ORDER = re.compile(r"\?C=[A-Z](?:;|&|&amp;)O=[AD]")
# Folders below one another; what goes deeper leads in a circle.
_MOST_LEVELS = 50


def details(system: Any, address: str) -> dict[str, dict[str, Any]]:
    """Return what a server says of each file that an address stands for: itself, all below a folder, or all that its glob matches.

    What begins with a dot must be asked for by name, and what a page links to elsewhere is no part of its folder.

    Args:
        system: the server, of fsspec.
        address: a file, a folder with a slash at its end, or a glob.

    Raises:
        DataError: when a page links to what is not there.
        Exception: whatever else fsspec and its library raise.
    """
    is_glob = "*" in address or "[" in address
    if not is_glob and not address.endswith("/"):
        return {address: system.info(address)}
    folder = re.split(r"[*[]", address)[0].rpartition("/")[0] + "/"
    pattern = address.removeprefix(folder)
    most = pattern.count("/") + 1 if pattern and "**" not in pattern else None
    linked = _linked(system, folder, most, data_paths.is_hidden(pattern))
    if is_glob:
        from fsspec.utils import glob_translate

        matches = re.compile(glob_translate(address)).match
        linked = {name: page for name, page in linked.items() if matches(name)}
    elif not linked:  # the page is a file itself, or nothing
        return {address: system.info(address)}
    return {name: _info(system, name, page) for name, page in linked.items()}


def status_of_absent(error: BaseException | None) -> int:
    """Return the status with which a server said that something is not there; 0 of any other error."""
    status = getattr(error, "status", None)
    return status if status in (404, 410) else 0


def _linked(system: Any, folder: str, most: int | None, hidden: bool) -> dict[str, str]:
    """Return the files to which the pages of a folder link, and of each the page.

    Args:
        system: the server.
        folder: its address.
        most: levels of folders to enter; None for all.
        hidden: whether what begins with a dot counts.
    """
    files: dict[str, str] = {}
    folders, pages = {folder}, [(folder, folder, 1)]
    for page, linked_by, level in pages:  # which grows by the links
        if level > _MOST_LEVELS:
            raise DataError(
                f"{_shown(page)}: is {_MOST_LEVELS} folders below {_shown(folder)}, as in a circle; correct the pages, or name the files"
            )
        for name in _links(system, page, linked_by):
            inside = _bare(name).removeprefix(_bare(folder))
            if inside == _bare(name) or (data_paths.is_hidden(inside) and not hidden):
                continue
            if not name.endswith("/"):
                files.setdefault(name, page)
            elif name not in folders and level != most:
                folders.add(name)
                pages.append((name, page, level + 1))
    return files


def _links(system: Any, page: str, linked_by: str) -> list[str]:
    """Return the addresses to which a page links below it, none where it is not there."""
    try:
        found = [info["name"] for info in system.ls(page, detail=True)]
    except FileNotFoundError:  # also of an empty page, which fsspec asks for without its slash then
        if page != linked_by:
            _info(system, page, linked_by)
        return []
    return sorted(_resolved(name, page) for name in found if not _ORDER.fullmatch(_bare(name).removeprefix(_bare(page))))


def _resolved(name: str, page: str) -> str:
    """Return an address below a page without `.` and `..` in it."""
    below = _bare(name).removeprefix(_bare(page))
    if not {".", ".."} & set(below.split("/")):
        return name
    return urljoin(f"{name.partition('://')[0]}://{_bare(page)}", f"./{below}")


def _info(system: Any, name: str, page: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = system.info(name)
    except FileNotFoundError as error:
        if status := status_of_absent(error.__cause__):
            link = _shown(_bare(name).removeprefix(_bare(page)))
            raise DataError(
                f"{_shown(page)}: links to {link}, which is not there ({status}); correct the page, or name the files"
            ) from None
        raise
    return found


def _bare(address: str) -> str:
    """Return an address without http or https, between which a page may lead."""
    return address.partition("://")[2]


def _shown(address: str) -> str:
    return address.partition("?")[0]
