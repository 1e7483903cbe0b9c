"""Read the files that say how things stand (JSON, JSON lines, YAML): whole, unchanged and of the right shape, or refused in words.

Every such file of a run or data folder is read here. A JSON object that was written with :func:`sealed` says when a bit of it has changed.
Only the standard library is imported before something is read.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from overnight.errors import DataError, UserError

MAX_BYTES = 1 << 28
"""Of a file that is read at once, and of a line."""
MAX_DEPTH = 64
"""Lists and mappings within each other; ours are 6 deep at most."""
MAX_VALUES = 1_000_000
"""Of a YAML file with its aliases written out."""
_SHALLOW = 1000
"""Signs that begin a level, in YAML that cannot overflow the stack of the parser in C; ours has up to 300."""
SEAL = "checksum_of_the_rest"
"""Key of a JSON object's own checksum."""
STRICT = {"extra": "forbid"}
"""`__pydantic_config__` of a dataclass whose file may have no other keys."""
_KINDS: dict[type, str] = {
    str: "a text",
    bool: "true or false",
    **dict.fromkeys((int, float), "a number"),
    **dict.fromkeys((list, tuple), "a list"),
    dict: "an object",
    type(None): "null",
}
_SEAL_LINE = re.compile(r"# checksum of the lines below: (\w*).*\n")


def digest(content: bytes | memoryview) -> str:
    """Return the XXH3-64 of some bytes, 16 hex digits."""
    import xxhash

    return xxhash.xxh3_64_hexdigest(content)


def file_digest(path: Path) -> str:
    """Return the XXH3-64 of a file's bytes, 16 hex digits."""
    import xxhash

    state = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            state.update(block)
    return state.hexdigest()


def digest_of(value: Any) -> str:
    """Return the checksum of a JSON value, whatever the order of its keys and its white space."""
    return digest(json.dumps(value, sort_keys=True).encode())


def sealed(value: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object with its own checksum as the last key."""
    return {**value, SEAL: digest_of(value)}


def sealed_yaml(text: str) -> str:
    """Return a YAML text with a first line, a comment, that has the checksum of the others; so a text cut short is noticed."""
    return f"# checksum of the lines below: {digest(text.encode())}; remove this line when you change them\n{text}"


def read_json(path: Path, kind: Any, remedy: str) -> Any:
    """Read a JSON file and check it against a type.

    Args:
        path: the file. A seal is checked where there is one.
        kind: a dataclass, or whatever pydantic validates; numbers are not taken for text or the reverse.
        remedy: what the user is to do when it cannot be used.

    Returns:
        a value of that type.

    Raises:
        DataError: when it is missing, too large, not UTF-8, not JSON, too deep, changed since it was sealed, or of another shape.
    """
    return fitted(_parsed(read_text(path, remedy), str(path), remedy), kind, str(path), remedy)


def read_mapping(path: Path, remedy: str) -> dict[str, Any]:
    """Read a JSON object of any keys; else as :func:`read_json`."""
    return cast(dict[str, Any], read_json(path, dict[str, Any], remedy))


def read_text(path: Path, remedy: str, error: type[UserError] = DataError) -> str:
    """Read a UTF-8 file that is not larger than such a file can be.

    Raises:
        UserError: of the given kind, naming the file, what is wrong and the remedy.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise error(f"{path}: has {path.stat().st_size:,} bytes, which no such file has; {remedy}")
        return path.read_bytes().decode()
    except FileNotFoundError:
        raise error(f"{path}: is missing; {remedy}") from None
    except OSError as problem:
        raise error(f"{path}: cannot be read: {problem.strerror}; {remedy}") from None
    except UnicodeDecodeError as problem:
        raise error(f"{path}: is not UTF-8 (byte {problem.start}); {remedy}") from None


def read_lines(path: Path, remedy: str) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Read a file with one JSON object a line; seals are checked where there are any.

    Returns:
        each line's number (from 1) and its object; None for a last line without an end, as a kill leaves it. Empty lines are left out.

    Raises:
        DataError: naming file and line, when a line is damaged.
    """
    try:
        with path.open("rb") as file:
            number = 0
            while raw := file.readline(MAX_BYTES):
                number += 1
                if not raw.endswith(b"\n"):
                    yield number, None
                elif raw.strip():
                    where = f"{path}:{number}"
                    yield number, fitted(_parsed(_decoded(raw, where, remedy), where, remedy), dict[str, Any], where, remedy)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; {remedy}") from None


def _decoded(raw: bytes, where: str, remedy: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: is not UTF-8 (byte {error.start} of the line); {remedy}") from None


def _parsed(text: str, where: str, remedy: str) -> Any:
    try:
        return parse_json(text, _STATE)
    except ValueError as error:
        raise DataError(f"{where}: is not JSON: {error}; {remedy}") from None


def fitted(tree: Any, kind: Any, where: str, remedy: str) -> Any:
    """Check the seal of a JSON value, where it has one, and return it as a type.

    Raises:
        DataError: when the seal is broken or a field is of another type; `where` and the field are named.
    """
    if isinstance(tree, dict) and SEAL in tree:
        seal, tree = tree[SEAL], {key: value for key, value in tree.items() if key != SEAL}
        if seal != digest_of(tree):
            raise DataError(f"{where}: was changed since it was written, its checksum differs; {remedy}")
    elif isinstance(tree, dict) and any(map(_almost_seal, tree)):
        raise DataError(f"{where}: was changed since it was written, the name of its checksum is damaged; {remedy}")
    if kind == dict[str, Any]:
        if not isinstance(tree, dict):
            raise DataError(f"{where}: is not a JSON object; {remedy}")
        return tree
    from pydantic import ValidationError

    try:
        return adapter(kind).validate_json(json.dumps(tree, default=str), strict=True)
    except TypeError as error:  # YAML has keys that are no text
        raise DataError(f"{where}: {error}; {remedy}") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{where}: {field or 'the whole'}: {first['msg'][0].lower()}{first['msg'][1:]}; {remedy}") from None


def _almost_seal(key: object) -> bool:
    """Return whether a key is that of a checksum with a flipped bit, of which the rest would else count as written by hand."""
    return isinstance(key, str) and len(key) == len(SEAL) and sum(map(str.__ne__, key, SEAL)) == 1


@functools.cache
def adapter(kind: Any) -> Any:
    """Return what pydantic reads a type by; to make it takes longer than to use it."""
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _integer(text: str) -> int:
    if len(text) > 20 or not -(1 << 63) <= (value := int(text)) < 1 << 63:
        raise ValueError(f"the number {text[:20]}... is larger than any of ours")
    return value


def _number(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"the number {text[:20]} is larger than any of ours")
    return value


_STATE = json.JSONDecoder(parse_int=_integer, parse_float=_number)
_PLAIN = json.JSONDecoder()


def parse_json(text: str, decoder: json.JSONDecoder = _PLAIN) -> Any:
    """Parse JSON of anyone's making.

    Raises:
        ValueError: when it is none, or nested deeper than anything that is read here.
    """
    try:
        value = decoder.decode(text)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from None
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _bounded(value)
    return value


def kind_of(value: Any) -> str:
    """Return what a value is, as a reader who does not know Python calls it: `a number`, `a list`."""
    kind = type(value)
    return _KINDS.get(kind, f"of type {kind.__name__}")


def is_text(text: str) -> bool:
    """Return whether a text can be written as UTF-8: it has no half of a surrogate pair alone, as of bytes that were none or of an escape in JSON."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_yaml(text: str) -> tuple[Any, Any]:
    """Parse YAML of anyone's making; returns the value, and its tree of nodes.

    Raises:
        ValueError: when it is none, nested too deep, within itself, or has a number that is larger than any of ours.
    """
    import yaml

    try:
        nodes = _composed(text)
        value = None if nodes is None else yaml.SafeLoader("").construct_document(nodes)
        if "<<" in text:  # A key of this name puts the keys of another mapping into the tree itself.
            nodes = _composed(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from None
    _bounded(value, MAX_VALUES)
    return value, nodes


def _composed(text: str) -> Any:
    """Return the tree of nodes of YAML by the parser in C, in a tenth of the time; what that refuses by the one in Python, which says more.

    That in C takes some tabs and question marks that the other refuses, and overflows the stack where it is nested deep; each level begins with
    one of four characters.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", None)
    if loader is not None and "\t" not in text and "?" not in text and sum(map(text.count, "[{-:")) <= _SHALLOW:
        with contextlib.suppress(yaml.YAMLError, UnicodeError):
            return yaml.compose(text, loader)
    return yaml.compose(text, yaml.SafeLoader)


def read_yaml(path: Path, remedy: str, error: type[UserError] = DataError) -> tuple[dict[str, Any], Any]:
    """Read a YAML file that holds a mapping, with the checksum of :func:`sealed_yaml` where it has one.

    Returns:
        the mapping, and its tree of nodes.

    Raises:
        UserError: of the given kind, naming the file, what is wrong and the remedy.
    """
    text = read_text(path, remedy, error)
    if (seal := _SEAL_LINE.match(text)) and seal[1] != digest(text[seal.end() :].encode()):
        raise error(
            f"{path}: was changed since it was written, its checksum differs; put it back, or remove its first line if the change is meant"
        )
    try:
        value, nodes = parse_yaml(text)
    except ValueError as problem:
        raise error(f"{path}: is not YAML: {problem}; {remedy}") from None
    if not isinstance(value, dict):
        raise error(f"{path}: must hold a mapping of keys to values, as the shipped recipes do; {remedy}")
    return value, nodes


def _bounded(value: Any, most: int | None = None) -> None:
    """Refuse a value that is too deep, also because it contains itself; with `most`, one of more values or of larger integers than ours."""
    todo, seen = [(value, 1)] if isinstance(value, dict | list) else [], 0
    while todo:
        node, depth = todo.pop()
        seen += len(node)
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        if most and seen > most:
            raise ValueError(f"it has more than {most:,} values")
        for inner in node.values() if isinstance(node, dict) else node:
            if isinstance(inner, dict | list):
                todo.append((inner, depth + 1))
            elif most and isinstance(inner, int) and not -(1 << 63) <= inner < 1 << 63:
                raise ValueError("a number is larger than any of ours")
