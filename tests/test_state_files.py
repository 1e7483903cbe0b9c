"""State files are read whole, unchanged and of the right shape, or refused in words that name the file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overnight.errors import ConfigError, DataError
from overnight.run_dir.atomic import write_json
from overnight.state_files import (
    MAX_DEPTH,
    SEAL,
    STRICT,
    digest_of,
    parse_json,
    parse_yaml,
    read_json,
    read_lines,
    read_mapping,
    read_yaml,
    sealed,
    sealed_yaml,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats(allow_infinity=False, allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@dataclass(frozen=True)
class Shape:
    __pydantic_config__ = STRICT
    count: int
    names: list[str]
    of: dict[str, float] = field(default_factory=dict)


@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_a_sealed_object_is_read_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, value: dict[str, Any]) -> None:
    path = tmp_path_factory.mktemp("sealed") / "state.json"
    value.pop(SEAL, None)
    write_json(path, sealed(value))
    assert read_mapping(path, "delete it") == value


def test_every_bit_flip_of_a_sealed_object_is_told_or_leaves_the_value_as_it_is(tmp_path: Path) -> None:
    path, value = tmp_path / "state.json", {"count": 3, "names": ["a", "ö"], "of": {"x": 0.5, "y": 1e300}}
    write_json(path, sealed(value))
    whole, told = path.read_bytes(), 0
    for at in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[at // 8] ^= 1 << at % 8
        path.write_bytes(changed)
        try:
            assert read_mapping(path, "delete it") == value  # of whatever keys
            assert read_json(path, Shape, "delete it") == Shape(**value)  # type: ignore[arg-type]
        except DataError as error:
            assert str(error).startswith(f"{path}: ") and "; delete it" in str(error)
            told += 1
    assert told > 0.95 * 8 * len(whole)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not JSON"),
        (b'{"count": 1', "is not JSON"),
        (b"\0" * 40, "is not JSON"),
        (b'{"count": \xff}', "is not UTF-8 (byte 10)"),
        (b"[" * 100_000, "is nested more than 64 deep"),
        (b'{"a": ' * 100_000 + b"1" + b"}" * 100_000, "is nested more than 64 deep"),
        (b'{"names": ' + b"[" * 90 + b"]" * 90 + b"}", "is nested more than 64 deep"),
        (b'{"count": 1' + b"0" * 30 + b', "names": []}', "is larger than any of ours"),
        (b'{"count": 1' + b"0" * 5000 + b', "names": []}', "is larger than any of ours"),
        (b'{"count": 1, "names": [], "of": {"x": 1e999}}', "is larger than any of ours"),
        (b'{"count": "1", "names": []}', "count: input should be a valid integer"),
        (b'{"count": true, "names": []}', "count: input should be a valid integer"),
        (b'{"count": 1, "names": [1]}', "names.0: input should be a valid string"),
        (b'{"count": 1}', "names: "),
        (b'{"count": 1, "names": [], "more": 1}', "more: "),
        (b"[]", "the whole: "),
        (b"null", "the whole: "),
    ],
)
def test_damage_is_told_with_the_file_what_is_wrong_and_what_to_do(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_json(path, Shape, "delete it")
    assert str(caught.value).startswith(f"{path}: ") and said in str(caught.value) and str(caught.value).endswith("; delete it")


def test_a_missing_file_a_folder_in_its_place_and_one_too_large_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is missing; delete it"):
        read_mapping(tmp_path / "absent.json", "delete it")
    with pytest.raises(DataError, match="cannot be read: Is a directory; delete it"):
        read_mapping(tmp_path, "delete it")
    with (tmp_path / "large.json").open("wb") as file:
        file.truncate(1 << 40)  # without a byte of it on the disk
    with pytest.raises(DataError, match="has 1,099,511,627,776 bytes, which no such file has"):
        read_mapping(tmp_path / "large.json", "delete it")


def test_a_file_without_a_seal_is_read_as_older_programs_wrote_it(tmp_path: Path) -> None:
    write_json(tmp_path / "old.json", {"count": 1, "names": []})
    assert read_json(tmp_path / "old.json", Shape, "delete it") == Shape(1, [])


def test_the_seal_does_not_depend_on_order_or_white_space() -> None:
    assert digest_of({"a": 1, "b": [1.5]}) == digest_of(json.loads('{ "b":[ 1.50 ],\n"a":1}'))


def test_lines_are_read_with_their_numbers_and_a_torn_one_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n\n' + json.dumps(sealed({"b": 2})).encode() + b'\n{"c"')
    assert list(read_lines(path, "delete it")) == [(1, {"a": 1}), (3, {"b": 2}), (4, None)]
    path.write_bytes(b'{"a": 1}\n' + b"\0" * 30)  # as a power cut leaves it
    assert list(read_lines(path, "delete it")) == [(1, {"a": 1}), (2, None)]


@pytest.mark.parametrize(
    "line", [b"\0\0", b'{"a": 1', b"[1]", b'{"a": "\xff"}', b"[" * 100_000, json.dumps({"a": 2, SEAL: "0" * 16}).encode()]
)
def test_a_damaged_line_is_told_with_its_number(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 3}\n')
    with pytest.raises(DataError, match=r"lines\.jsonl:2: .*; delete it$"):
        list(read_lines(path, "delete it"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "is not YAML"),
        ("[" * 100_000, "is nested more than 64 deep"),
        ("{a: " * 70 + "1" + "}" * 70, "is nested more than 64 deep"),
        ("a: &x [*x]", "is nested more than 64 deep"),
        ("a: &a [x, x, x, x, x, x, x, x]\n" + "".join(f"{n}: &{n} [{', '.join([f'*{b}'] * 8)}]\n" for b, n in zip("abcdefgh", "bcdefghi", strict=True)), "more than 1,000,000"),
        ("a: 1" + "0" * 5000, "is not YAML"),
        ("a: 1" + "0" * 30, "is larger than any of ours"),
        ("a: 2026-13-45", "is not YAML"),
        ("a: \0", "is not YAML"),
        ("a", "must hold a mapping"),
        ("", "must hold a mapping"),
    ],
)  # fmt: skip
def test_damaged_yaml_is_told_and_does_not_grow(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_yaml(path, "put it back", ConfigError)
    assert str(caught.value).startswith(f"{path}: ") and said in str(caught.value)


def test_sealed_yaml_is_told_when_it_was_changed_and_may_be_changed_without_its_first_line(tmp_path: Path) -> None:
    path, text = tmp_path / "run.yaml", sealed_yaml("name: a\nseed: 1\n")
    path.write_text(text)
    assert read_yaml(path, "put it back")[0] == {"name": "a", "seed": 1}
    path.write_text(text.replace("seed: 1", "seed: 3"))
    with pytest.raises(DataError, match=r"was changed since it was written, .* remove its first line if the change is meant"):
        read_yaml(path, "put it back")
    path.write_text(text.replace("seed: 1", "seed: 3").partition("\n")[2])
    assert read_yaml(path, "put it back")[0] == {"name": "a", "seed": 3}
    for size in range(len(text)):  # cut short, wherever
        path.write_text(text[:size])
        with pytest.raises(DataError):
            read_yaml(path, "put it back")


@given(st.text() | st.binary().map(lambda b: b.decode("latin-1")))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    for parse in (parse_json, parse_yaml):
        try:
            parse(text)  # type: ignore[operator]
        except ValueError as error:
            assert str(error)


def test_as_deep_as_may_be_is_read() -> None:
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    with pytest.raises(ValueError, match="nested more"):
        parse_json("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))
