"""Zip archives: their members as documents, and everything that an archive may do to who opens it."""

from __future__ import annotations

import io
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from overnight.corpus import zips
from overnight.errors import DataError
from tests.corpus.test_readers import noise
from tests.reading import read, texts


def zip_of(files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED, streamed: bool = False) -> bytes:
    """An archive of files; `streamed` as a program writes it that cannot seek, with sizes behind the members."""

    class Pipe(io.RawIOBase):
        content = b""

        def writable(self) -> bool:
            return True

        def write(self, block: bytes) -> int:  # type: ignore[override]
            self.content += bytes(block)
            return len(block)

    pipe, buffer = Pipe(), io.BytesIO()
    with zipfile.ZipFile(pipe if streamed else buffer, "w", method) as archive:  # type: ignore[arg-type]
        for name, content in files.items():
            archive.writestr(name, content)
    return pipe.content if streamed else buffer.getvalue()


FILES = {"d/b.txt": b"bee", "d/a.md": b"---\nx: y\n---\n# A", "d/.hidden": b"no", "__/": b"", "c.jsonl": b'{"text": "json"}\n'}


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("name", ["x.zip", "misnamed"])
def test_a_zip_archive_is_read_in_its_order_by_its_first_bytes(tmp_path: Path, method: int, name: str) -> None:
    (tmp_path / name).write_bytes(zip_of(FILES, method))
    found, source = read(tmp_path / name)
    assert [document.text for document in found] == ["bee", "# A", "json"]
    assert found[0].name == f"{tmp_path / name}:d/b.txt"
    assert (source.files, source.truncated) == (3, [])


def test_members_of_a_zip_archive_are_selected_by_a_pattern(tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(zip_of(FILES))
    assert texts(f"{tmp_path}/x.zip::*.md") == ["# A"]
    with pytest.raises(DataError, match=r"no member of the archive matches; it holds d/b\.txt, d/a\.md, c\.jsonl"):
        read(f"{tmp_path}/x.zip::*.csv")


def test_archives_hold_archives(tmp_path: Path) -> None:
    inner = zip_of({"i.txt": b"inner"})
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w:gz") as archive:
        member = tarfile.TarInfo("in.zip")
        member.size = len(inner)
        archive.addfile(member, io.BytesIO(inner))
    (tmp_path / "x.zip").write_bytes(zip_of({"a.zip": inner, "b.tgz": tar.getvalue()}))
    (tmp_path / "y.tgz").write_bytes(tar.getvalue())
    assert texts(tmp_path) == ["inner"] * 3


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("share", [0.4, 0.9, 0.995])
def test_of_a_truncated_zip_the_members_before_the_cut_are_kept_if_asked(tmp_path: Path, method: int, streamed: bool, share: float) -> None:
    content = noise(300_000)
    files = {f"{number}.txt": content[number * 1000 :] for number in range(6)}
    packed = zip_of(files, method, streamed)
    (tmp_path / "x.zip").write_bytes(packed[: int(len(packed) * share)])
    (tmp_path / "y.txt").write_text("behind it")
    with pytest.raises(DataError, match=r"the zip archive ends early.*on_truncated_file=keep"):
        read(tmp_path)
    found, source = read(tmp_path, on_truncated_file="keep")
    assert str(tmp_path / "x.zip") in source.truncated and found.pop().text == "behind it"
    if method == zipfile.ZIP_STORED and streamed:
        assert found == []  # nothing says where such a member ends
        return
    assert len(found) >= int(6 * share)
    assert all(document.text.encode() == content[number * 1000 :] for number, document in enumerate(found[:-1]))
    assert content[(len(found) - 1) * 1000 :].startswith(found[-1].text.encode())


@pytest.mark.parametrize("inner", ["in.zip", "in.epub", "in.docx"])
@pytest.mark.parametrize("cut", [1, 10, 21, 22, 30, 100])
def test_a_zip_that_is_cut_in_its_directory_is_truncated_whatever_it_holds(tmp_path: Path, cut: int, inner: str) -> None:
    stored = zip_of({"[Content_Types].xml" if inner == "in.docx" else "i.txt": b"inner"}, zipfile.ZIP_STORED)
    for files in ({"a.txt": b"one", "b.txt": b"two"}, {"a.txt": b"one", "b.txt": b"two", inner: stored}):
        (tmp_path / "x.zip").write_bytes(zip_of(files, zipfile.ZIP_STORED)[:-cut])
        with pytest.raises(DataError, match=r"the zip archive ends early.*on_truncated_file=keep"):
            read(f"{tmp_path}/x.zip::*.txt")
        found, source = read(f"{tmp_path}/x.zip::*.txt", on_truncated_file="keep")
        assert ([document.text for document in found], source.truncated) == (["one", "two"], [str(tmp_path / "x.zip")])


@pytest.mark.parametrize("behind", [b"", b"a comment", b"PK"])
def test_neither_records_of_64_bits_nor_what_stands_behind_the_end_are_a_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind: bytes
) -> None:
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 10)  # records of 64 bits, as Python writes them from 2 GB on
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a.txt", "one and more")
        archive.comment = behind
    monkeypatch.undo()
    (tmp_path / "y.zip").write_bytes(zip_of({"b.txt": b"two"}) + behind)
    assert texts(tmp_path) == ["one and more", "two"]


def test_a_damaged_member_is_refused_even_when_truncated_ones_are_kept(tmp_path: Path) -> None:
    packed = bytearray(zip_of({"a.txt": noise(100_000)}))
    packed[2000] ^= 0x55
    (tmp_path / "x.zip").write_bytes(packed)
    with pytest.raises(DataError, match=r"x\.zip:a\.txt: is damaged"):
        read(tmp_path, on_truncated_file="keep")


def test_a_damaged_directory_is_refused(tmp_path: Path) -> None:
    packed = bytearray(zip_of(FILES))
    packed[packed.index(b"PK\x01\x02")] = 0
    (tmp_path / "x.zip").write_bytes(packed)
    with pytest.raises(DataError, match=r"x\.zip: is not a zip archive or is damaged"):
        read(tmp_path, on_truncated_file="keep")


def test_an_encrypted_member_is_refused_unless_it_is_not_asked_for(tmp_path: Path) -> None:
    packed = bytearray(zip_of({"a.txt": b"secret", "b.txt": b"open"}))
    packed[6] |= 1
    packed[packed.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "x.zip").write_bytes(packed)
    with pytest.raises(DataError, match=r"x\.zip:a\.txt: is encrypted; unpack"):
        read(tmp_path)
    assert texts(f"{tmp_path}/x.zip::b.txt") == ["open"]


def test_a_method_that_python_does_not_know_is_refused(tmp_path: Path) -> None:
    packed = bytearray(zip_of({"a.txt": b"x"}))
    packed[8] = packed[packed.index(b"PK\x01\x02") + 10] = 9
    (tmp_path / "x.zip").write_bytes(packed)
    with pytest.raises(DataError, match=r"x\.zip:a\.txt: is packed in a way that cannot be read here"):
        read(tmp_path)


def test_a_link_is_no_document_and_a_name_outside_the_archive_does_no_harm(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "er"
    folder.mkdir(parents=True)
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    link = zipfile.ZipInfo("link.txt")
    link.create_system, link.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(folder / "x.zip", "w") as archive:
        archive.writestr(link, str(secret))
        archive.writestr("../../secret.txt", "overwritten")
        archive.writestr(str(secret), "a name like any other")
        archive.writestr("a.txt", "a")
    assert texts(folder) == ["overwritten", "a name like any other", "a"]
    assert secret.read_text() == "secret"
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["secret.txt", "x.zip"]


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zips, "_ALWAYS_ALLOWED", 1 << 20)
    bomb = zip_of({"a.txt": (b"0" * 99 + b"\n") * 300_000})
    (tmp_path / "x.zip").write_bytes(bomb)
    with pytest.raises(DataError, match=r"x\.zip: unpacks to more than \d+ MB, 200 times its .* as a zip bomb does"):
        read(tmp_path, documents="line")
    # What is wrapped in another archive counts as that one's.
    (tmp_path / "x.zip").write_bytes(zip_of({f"{number}.zip": bomb[:-22] + bomb[-22:] for number in range(20)}))
    with pytest.raises(DataError, match="zip bomb"):
        read(tmp_path, documents="line")
    # A hundred members of the same data, as overlapping entries give them, add up.
    monkeypatch.setattr(zips, "_MAX_RATIO", 20)
    (tmp_path / "x.zip").write_bytes(zip_of({f"{number}.txt": b"word " * 20_000 for number in range(100)}))
    with pytest.raises(DataError, match="zip bomb"):
        read(tmp_path)


def test_an_office_document_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.docx").write_bytes(zip_of({"[Content_Types].xml": b"<x/>", "word/document.xml": b"<x/>"}))
    with pytest.raises(DataError, match=r"x\.docx: is an office document; save its text"):
        read(tmp_path)


def test_an_empty_archive_holds_no_text(tmp_path: Path) -> None:
    (tmp_path / "x.zip").write_bytes(zip_of({}))
    with pytest.raises(DataError, match="holds no text"):
        read(tmp_path)


def test_a_member_without_a_name_is_left_out(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a.txt", "one")
        archive.writestr("b.txt", "two")
        archive.filelist[0].filename = ""
    assert texts(tmp_path / "x.zip") == ["two"]
