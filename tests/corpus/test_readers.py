"""Reading every format out of every wrapping, and every way a source can be bad."""

from __future__ import annotations

import bz2
import functools
import gzip
import io
import json
import lzma
import os
import random
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from overnight.config import Data
from overnight.corpus import readers
from overnight.corpus.document import OpenFile
from overnight.corpus.readers import documents, start_reading
from overnight.errors import ConfigError, DataError

DATA = Path(os.environ.get("OVERNIGHT_DATA", Path(__file__).parents[2] / "../shared/data"))
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no real data at {DATA} (set OVERNIGHT_DATA)")

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lambda content: lzma.compress(content, preset=0),
    ".zst": zstandard.compress,
}


def read(*paths: Path | str, **settings: Any) -> tuple[list[str], readers.Source]:
    data = Data(paths=[str(path) for path in paths], **settings)
    reading = start_reading(data)
    return [document.text for document in documents(data, reading)], reading.sources[0]


def tar_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@functools.cache
def noise(size: int) -> bytes:
    """Text that does not compress to nothing."""
    return "".join(random.Random(0).choices("abcdefghij \n", k=size)).encode()


@pytest.mark.parametrize("ending", PACKERS)
@pytest.mark.parametrize("name", ["a.txt", "misnamed"])
def test_packed_files_are_seen_by_their_first_bytes(tmp_path: Path, ending: str, name: str) -> None:
    content = noise(1_500_000)
    path = tmp_path / (name + (ending if name == "a.txt" else ""))
    path.write_bytes(PACKERS[ending](content))
    texts, source = read(path)
    assert texts == [content.decode()]
    assert (source.files, source.documents, source.bytes, source.truncated) == (1, 1, len(content), [])


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz", ".zst"])
def test_several_packed_streams_in_one_file_are_all_read(tmp_path: Path, ending: str) -> None:
    (tmp_path / f"a.txt{ending}").write_bytes(PACKERS[ending](b"one ") + PACKERS[ending](b"two"))
    assert read(tmp_path / f"a.txt{ending}")[0] == ["one two"]


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz"])
@pytest.mark.parametrize("zeros", [4, 200_000])
def test_zeros_between_packed_streams_and_after_them_are_passed_over(tmp_path: Path, ending: str, zeros: int) -> None:
    one, two = noise(300_000), b"two"
    (tmp_path / f"a.txt{ending}").write_bytes(b"".join(PACKERS[ending](part) + bytes(zeros) for part in (one, two)))
    assert read(tmp_path / f"a.txt{ending}")[0] == [(one + two).decode()]


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz", ".zst"])
def test_a_stream_after_the_first_whose_first_byte_is_damaged_is_not_the_end_of_the_file(tmp_path: Path, ending: str) -> None:
    packed = PACKERS[ending](b"one ") + b"?" + PACKERS[ending](b"two")[1:]
    (tmp_path / f"a.txt{ending}").write_bytes(packed)
    with pytest.raises(DataError, match=rf"a\.txt\{ending}: the compressed file is damaged"):
        read(tmp_path / f"a.txt{ending}")


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz", ".zst"])
@pytest.mark.parametrize("bytes_left", [3, 7, 20])
def test_a_file_cut_in_a_stream_after_the_first_ends_early(tmp_path: Path, ending: str, bytes_left: int) -> None:
    (tmp_path / f"a.txt{ending}").write_bytes(PACKERS[ending](b"one ") + PACKERS[ending](noise(500))[:bytes_left])
    with pytest.raises(DataError, match=rf"a\.txt\{ending}: the compressed file ends early"):
        read(tmp_path / f"a.txt{ending}")


@pytest.mark.parametrize("ending", [".GZ", ".Bz2", ".XZ", ".ZST"])
def test_a_packed_file_whose_ending_is_in_capitals_is_read_as_what_is_packed(tmp_path: Path, ending: str) -> None:
    (tmp_path / f"A.CSV{ending}").write_bytes(PACKERS[ending.lower()](b"stars,text\n5,fine words\n"))
    assert read(tmp_path / f"A.CSV{ending}")[0] == ["fine words"]


@pytest.mark.parametrize("log", [27, 31])
def test_a_zstandard_file_with_a_long_window_is_read(tmp_path: Path, log: int) -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=log, enable_ldm=True)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()  # which does not know the size, as `zstd` in a pipe
    packed = packer.compress(b"some words") + packer.flush()
    assert zstandard.get_frame_parameters(packed).window_size == 1 << log
    (tmp_path / "a.txt.zst").write_bytes(packed)
    assert read(tmp_path)[0] == ["some words"]


@pytest.mark.parametrize(("header", "window"), [(bytes([0, 22 << 3]), "4,096"), (b"\xe0" + (5 << 30).to_bytes(8, "little"), "5,120")])
def test_a_zstandard_file_with_a_window_beyond_memory_says_what_it_needs(tmp_path: Path, header: bytes, window: str) -> None:
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(b"first") + b"\x28\xb5\x2f\xfd" + header + bytes(20))
    with pytest.raises(DataError, match=rf"a\.txt\.zst: was packed with a window of {window} MB, .* 2,048 MB .*; pack it anew"):
        read(tmp_path)


def test_frames_of_zstandard_that_hold_no_data_are_skipped(tmp_path: Path) -> None:
    notes = [(0x184D2A50 + kind).to_bytes(4, "little") + (5000).to_bytes(4, "little") + bytes(5000) for kind in (0, 15)]
    whole = notes[0] + zstandard.compress(b"one ") + notes[1] + zstandard.compress(b"two")
    (tmp_path / "misnamed").write_bytes(whole)
    assert read(tmp_path)[0] == ["one two"]
    (tmp_path / "misnamed").write_bytes(whole[:2000])
    with pytest.raises(DataError, match="ends early"):
        read(tmp_path)


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz", ".zst"])
def test_a_truncated_file_is_refused_and_kept_only_if_asked(tmp_path: Path, ending: str) -> None:
    content = noise(4_000_000)
    packed = PACKERS[ending](content)
    path = tmp_path / f"a.txt{ending}"
    path.write_bytes(packed[: len(packed) * 3 // 4])
    with pytest.raises(DataError, match=r"a\.txt.*ends early.*on_truncated_file=keep"):
        read(path)
    texts, source = read(path, on_truncated_file="keep")
    assert content.startswith(texts[0].encode())
    assert source.truncated == [str(path)]
    # An .xz or .bz2 block is all or nothing, .gz and .zst give what was there.
    assert len(texts[0]) > 1_000_000


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz", ".zst"])
def test_a_damaged_file_is_refused_even_when_truncated_ones_are_kept(tmp_path: Path, ending: str) -> None:
    packed = bytearray(PACKERS[ending](noise(400_000)))
    for place in range(len(packed) // 2, len(packed) // 2 + 50):
        packed[place] ^= 0x55
    (tmp_path / f"a.txt{ending}").write_bytes(packed)
    with pytest.raises(DataError, match="damaged"):
        read(tmp_path / f"a.txt{ending}", on_truncated_file="keep")


@pytest.mark.parametrize("ending", PACKERS)
def test_tar_archives_are_read_as_streams_in_their_order(tmp_path: Path, ending: str) -> None:
    inner = gzip.compress(b'{"text": "json"}\n')
    files = {"d/b.txt": b"bee", "d/a.md": b"---\nx: y\n---\n# A", "d/.hidden": b"no", "._c.txt": b"no", "c.jsonl.gz": inner}
    path = tmp_path / f"x.tar{ending}"
    path.write_bytes(PACKERS[ending](tar_of(files)))
    texts, source = read(path)
    assert texts == ["bee", "# A", "json"]
    assert source.files == 3


@pytest.mark.parametrize("ending", PACKERS)
@pytest.mark.parametrize("share", [0.5, pytest.param(0.9, marks=pytest.mark.heavy)])
def test_a_truncated_tar_is_refused_and_kept_only_if_asked(tmp_path: Path, ending: str, share: float) -> None:
    content = noise(300_000)
    packed = PACKERS[ending](tar_of({f"{i}.txt": content[i * 1000 :] for i in range(12)}))
    path = tmp_path / f"x.tar{ending}"
    path.write_bytes(packed[: int(len(packed) * share)])
    with pytest.raises(DataError, match=r"ends early.*on_truncated_file=keep"):
        read(path)
    texts, source = read(path, on_truncated_file="keep")
    assert str(path) in source.truncated
    assert all(text.encode() == content[i * 1000 :] for i, text in enumerate(texts[:-1]))


def test_a_tar_cut_between_two_members_is_noticed(tmp_path: Path) -> None:
    whole = tar_of({"a.txt": b"a" * 512, "b.txt": b"b" * 512})
    (tmp_path / "x.tar").write_bytes(whole[:1024])
    with pytest.raises(DataError, match="tar archive ends early"):
        read(tmp_path / "x.tar")
    assert read(tmp_path / "x.tar", on_truncated_file="keep")[0] == ["a" * 512]


@pytest.mark.parametrize("zeros", [0, 1, 100])
def test_archives_one_behind_the_other_are_read_as_one(tmp_path: Path, zeros: int) -> None:
    first, second = tar_of({"a.txt": b"a" * 700, "b.txt": b"b" * 30_000}), tar_of({"c.txt": b"c"})
    (tmp_path / "x.tar").write_bytes(first + bytes(512 * zeros) + second + first)
    assert read(tmp_path / "x.tar")[0] == ["a" * 700, "b" * 30_000, "c", "a" * 700, "b" * 30_000]
    (tmp_path / "cut.tar").write_bytes(first + bytes(512 * zeros) + first[:600])
    with pytest.raises(DataError, match="tar archive ends early"):
        read(tmp_path / "cut.tar")
    (tmp_path / "more.tar").write_bytes(first + bytes(512 * zeros) + b"no archive" * 300)
    with pytest.raises(DataError, match=r"more\.tar: the tar archive is damaged, or followed by bytes that are not part of it"):
        read(tmp_path / "more.tar")


def test_a_tar_with_a_damaged_header_in_its_middle_does_not_end_there(tmp_path: Path) -> None:
    whole = bytearray(tar_of({"a.txt": b"a" * 700, "b.txt": b"b" * 30_000, "c.txt": b"c"}))
    whole[3 * 512 + 20] ^= 1
    (tmp_path / "x.tar").write_bytes(whole)
    with pytest.raises(DataError, match=r"x\.tar: the tar archive is damaged"):
        read(tmp_path / "x.tar")


def test_folders_are_walked_in_order_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/y.md", ".git/x.txt", "a/.y.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(tmp_path)[0] == ["a/y.md", "a/z.txt", "b.txt"]
    assert read(f"{tmp_path}/**/*.txt")[0] == ["a/z.txt", "b.txt"]
    assert read(tmp_path / "b.txt", tmp_path / "a")[0] == ["b.txt", "a/y.md", "a/z.txt"]


def test_names_are_read_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("here")
    monkeypatch.setenv("SOME_FOLDER", str(tmp_path))
    assert read("$SOME_FOLDER/a.txt")[0] == ["here"]
    monkeypatch.delenv("SOME_FOLDER")
    with pytest.raises(ConfigError, match="SOME_FOLDER is not set"):
        read("$SOME_FOLDER/a.txt")


def test_an_empty_path_is_not_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("here")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EMPTY", "")
    with pytest.raises(ConfigError, match=r"data.paths: has an empty path; name a file or a folder, the working directory as '\.'"):
        read("")
    with pytest.raises(ConfigError, match=r"data.paths = '\$EMPTY': is empty, as the environment variable is"):
        read("$EMPTY")
    assert read(".")[0] == ["here"]


def test_documents_of_a_text_file_are_files_paragraphs_or_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n \n\nthree")
    assert read(tmp_path, documents="file")[0] == ["one\r\ntwo\n \n\nthree"]
    assert read(tmp_path, documents="paragraph")[0] == ["one\ntwo", "three"]
    assert read(tmp_path, documents="line")[0] == ["one", "two", "three"]


def test_wikipedia_articles_are_seen_by_the_first_bytes(tmp_path: Path) -> None:
    (tmp_path / "wiki_00").write_text('<doc id="1" url="u" title="A">\nA\n\nText.\n</doc>\n<doc id="2">\nB\n</doc>\n')
    assert read(tmp_path)[0] == ["A\n\nText.", "B"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('<doc id="1">\nA\n<doc id="2">\n', ":3: a <doc> begins before that of line 1"),
        ('<doc id="1">\nA\n</doc>\nB\n', ":4: text outside"),
        ('<doc id="1">\nA\n</doc>\n</doc>\n', ":4: </doc> without"),
        ('<doc id="1">\nA\n</doc>\n<doc id="2">\nB\n', ":4: the file ends inside this article.*on_truncated_file=keep"),
        ("<mediawiki>\n<page>", "the dump ends early"),
    ],
)
def test_bad_wikipedia_files_are_refused_with_their_line(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "wiki_00").write_text(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path / "wiki_00")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', r":2: is not JSON"),
        ('{"body": "x", "id": 3}', r":2: has no text in 'text'; its keys are: body, id"),
        ('{"text": null}', r":2: has no text in 'text'"),
        ('["text"]', ":2: is not a JSON object"),
        ('{"text": "\\ud800"}', ":2: has half a surrogate pair"),
    ],
)
def test_bad_json_lines_are_named_and_at_most_the_allowed_number_skipped(tmp_path: Path, line: str, message: str) -> None:
    good = [json.dumps({"text": text}) for text in ("a", "b", "c\ud83d\ude00")]
    (tmp_path / "x.jsonl").write_text(f"{good[0]}\n{line}\n\n{good[1]}\n{line}\n{good[2]}")
    with pytest.raises(DataError, match=message):
        read(tmp_path)
    with pytest.raises(DataError, match=r":5: .*max_invalid_lines=1"):
        read(tmp_path, max_invalid_lines=1)
    texts, source = read(tmp_path, max_invalid_lines=2)
    assert (len(texts), source.skipped_lines) == (3, 2)


def labels(*paths: Path | str, **settings: Any) -> list[float | None]:
    data = Data(paths=[str(path) for path in paths], tokenizer="bytes", **settings)
    return [document.label for document in documents(data, start_reading(data))]


def test_a_label_is_a_number_of_the_json_object_or_none(tmp_path: Path) -> None:
    rows = [{"text": "a", "stars": 5}, {"text": "b", "stars": -1.5}, {"text": "c", "stars": None}, {"text": "d"}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "y.txt").write_text("no place for a label")
    assert labels(tmp_path, label="stars") == [5.0, -1.5, None, None, None]
    assert labels(tmp_path) == [None] * 5


@pytest.mark.parametrize("value", ['"5"', "true", "[5]", "NaN", "-Infinity", "1e39", "1" + "0" * 400])
def test_a_label_that_is_no_number_is_a_bad_line(tmp_path: Path, value: str) -> None:
    (tmp_path / "x.jsonl").write_text(f'{{"text": "a", "stars": 1}}\n{{"text": "b", "stars": {value}}}\n')
    with pytest.raises(DataError, match=r"x\.jsonl:2: has no finite number in 'stars' but .*\(data\.label names it"):
        labels(tmp_path, label="stars")
    assert labels(tmp_path, label="stars", max_invalid_lines=1) == [1.0]


@pytest.mark.parametrize("ending", PACKERS)
def test_members_of_an_archive_are_selected_by_a_pattern(tmp_path: Path, ending: str) -> None:
    inner = tar_of({"train/x.txt": b"inner x", "y.txt": b"inner y"})
    files = {"d/train/a.txt": b"a", "d/test/b.txt": b"b", "d/train/deep/c.jsonl": b'{"text": "c"}\n', "e.txt": b"e", "train/i.tar": inner}
    path = tmp_path / f"x.tar{ending}"
    path.write_bytes(PACKERS[ending](tar_of(files)))
    assert read(f"{path}::*/train/*")[0] == ["a", "c"]
    assert read(f"{path}::d/train/?.txt", f"{path}::e.txt")[0] == ["a", "e"]
    # Of an archive in it, all: the pattern is about the outer names.
    assert read(f"{path}::train/*")[0] == ["inner x", "inner y"]
    assert read(f"{path}::")[0] == read(path)[0]
    with pytest.raises(DataError, match=r"x\.tar.*::\*\.md: no member of the archive matches; it holds d/train/a\.txt, d/test/b\.txt, "):
        read(f"{path}::*.md")


def test_a_file_or_folder_may_have_the_two_colons_of_a_pattern_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a::b.txt").write_text("a")
    (tmp_path / "c::d").mkdir()
    (tmp_path / "c::d" / "x::y.tar").write_bytes(tar_of({"e.txt": b"e", "f.md": b"f"}))
    monkeypatch.setenv("HERE", str(tmp_path))
    assert read("$HERE/a::b.txt", tmp_path / "c::d")[0] == ["a", "e", "f"]
    assert read(f"{tmp_path}/c::d/x::y.tar::*.md")[0] == ["f"]
    assert sorted(read(f"{tmp_path}/*.txt")[0]) == ["a"]
    with pytest.raises(DataError, match=r"a: there is no such file"):
        read(f"{tmp_path}/a::c.txt")


def test_a_pattern_is_for_archives_alone(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(DataError, match=r"a\.txt: is not a tar or zip archive, so ::\*\.txt selects nothing"):
        read(f"{tmp_path}::*.txt")
    with pytest.raises(DataError, match=r"absent: there is no such file"):
        read(f"{tmp_path / 'absent'}::*")


def test_a_glob_of_archives_may_have_a_pattern_that_one_of_them_does_not_match(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.tar").write_bytes(tar_of({f"{name}.txt": name.encode()}))
    assert read(f"{tmp_path}/*.tar::b.*")[0] == ["b"]


def test_a_json_file_that_is_no_json_lines_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('[{"text": "a"}]')
    with pytest.raises(DataError, match=r"not one object a line; write it as JSON lines, as `jq -c '\.\[\]' FILE` does of a list"):
        read(tmp_path)


def test_missing_and_empty_sources_are_refused(tmp_path: Path) -> None:
    (tmp_path / "void").mkdir()
    (tmp_path / "empty.txt").touch()
    cases: list[tuple[Path | str, str]] = [
        (tmp_path / "absent", "no such file or folder"),
        (tmp_path / "void", "holds no files"),
        (f"{tmp_path}/*.md", "no file matches"),
        (f"{tmp_path}/A*.txt,R*.txt", r"""no file matches; correct data\.paths; several are written --data\.paths='\["a", "b"\]'"""),
        (tmp_path / "empty.txt", "holds no text"),
        ("builtin:something", "is not built in"),
    ]
    for path, message in cases:
        with pytest.raises(DataError, match=message):
            read(path)
    with pytest.raises(DataError, match=r"data\.paths is empty"):
        read()


def test_an_endless_document_is_refused_before_it_fills_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenFile, "max_bytes", 1 << 20)
    (tmp_path / "a.txt").write_bytes(b"x" * (2 << 20))
    with pytest.raises(DataError, match=r"set data\.documents to paragraph or line"):
        read(tmp_path)
    with pytest.raises(DataError, match=r"a\.txt:1: more than 1 MB in one line"):
        read(tmp_path, documents="line")


@needs_data
def test_the_real_truncated_gzip_is_refused_and_gives_its_whole_lines_if_asked() -> None:
    path = DATA / "amazon/reviews_Digital_Music_5.json.truncated.gz"
    with pytest.raises(DataError, match="ends early"):
        read(path, field="reviewText")
    texts, source = read(path, field="reviewText", on_truncated_file="keep")
    assert len(texts) == source.documents == 6908
    assert source.truncated == [str(path)]


@needs_data
def test_the_real_wikipedia_files_hold_933_articles() -> None:
    texts, source = read(DATA / "wiki/wiki_0*")
    assert (len(texts), source.files) == (933, 8)
