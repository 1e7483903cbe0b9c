"""Text that is not UTF-8 is refused by the place of its first bad byte, or replaced, and UTF-16, UTF-32 and ISO-2022-JP are told with the command that converts it."""

from __future__ import annotations

import codecs
from pathlib import Path

import pytest

from overnight.errors import DataError
from tests.reading import read


@pytest.mark.parametrize("kind", ["file", "paragraph", "line"])
def test_a_byte_that_is_not_utf8_is_named_by_its_offset_or_replaced(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.txt").write_bytes("zwölf\n".encode() * 3 + b"caf\xe9 x\n")
    with pytest.raises(DataError, match=r"a\.txt: byte 24 \(0xe9\) is not UTF-8.*encoding_errors=replace"):
        read(tmp_path, documents=kind)
    found, _ = read(tmp_path, documents=kind, encoding_errors="replace")
    assert "caf\ufffd x" in "\n".join(document.text for document in found)


@pytest.mark.parametrize("name", ["UTF-16", "UTF-32"])
@pytest.mark.parametrize("mark", [codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE])
def test_utf16_and_utf32_are_guessed(tmp_path: Path, name: str, mark: bytes) -> None:
    mark = mark if name == "UTF-32" else mark.replace(b"\0", b"")
    order = "LE" if mark[0] == 0xFF else "BE"
    (tmp_path / "a.txt").write_bytes(mark + "hello".encode(f"{name}-{order}"))
    with pytest.raises(DataError, match=rf"is not UTF-8; it looks like {name}; convert it, as `iconv -f {name} -t UTF-8 FILE` does$"):
        read(tmp_path)


@pytest.mark.parametrize("kind", ["file", "paragraph", "line"])
@pytest.mark.parametrize("name", ["UTF-16LE", "UTF-16BE", "UTF-32LE", "UTF-32BE"])
def test_utf16_and_utf32_without_their_mark_are_guessed(tmp_path: Path, kind: str, name: str) -> None:
    (tmp_path / "a.txt").write_text("hello\nyou\n", encoding=name)
    for errors in ("strict", "replace"):
        with pytest.raises(DataError, match=rf"a\.txt: every second byte or so is 0; .* `iconv -f {name} -t UTF-8 FILE` does$"):
            read(tmp_path, documents=kind, encoding_errors=errors)


def test_a_text_with_a_few_zeros_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\0 one \0 two \0\n")
    assert "one" in read(tmp_path)[0][0].text


@pytest.mark.parametrize("kind", ["file", "paragraph", "line"])
@pytest.mark.parametrize("errors", ["strict", "replace"])
@pytest.mark.parametrize("begin", [b"\x1b$B", b"\x1b$@"])
def test_iso_2022_jp_is_guessed(tmp_path: Path, kind: str, errors: str, begin: bytes) -> None:
    text = "hello\n日本語の文。\n".encode("iso2022_jp").replace(b"\x1b$B", begin)
    (tmp_path / "a.txt").write_bytes(text)
    with pytest.raises(
        DataError,
        match=r"a\.txt: byte 6 \(0x1b\) begins Japanese; it looks like ISO-2022-JP; .* `iconv -f ISO-2022-JP -t UTF-8 FILE` does$",
    ):
        read(tmp_path, documents=kind, encoding_errors=errors)


def test_a_text_with_the_colors_of_a_terminal_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\x1b[31mred\x1b(B\x1b[m plain $B\n")
    assert "plain $B" in read(tmp_path)[0][0].text
