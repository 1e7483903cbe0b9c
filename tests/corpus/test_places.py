"""Sources that lie elsewhere: object storage, data sets of Hugging Face, and folders with links that lead back."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from overnight.config import Data
from overnight.corpus import hub, places
from overnight.corpus.document import Document
from overnight.corpus.pipeline import prepare
from overnight.errors import ConfigError, DataError
from tests.corpus.test_rows import ROWS, write
from tests.corpus.test_zips import zip_of
from tests.reading import read, texts

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")


@pytest.fixture
def storage() -> Iterator[Any]:
    """A storage in memory, empty before and after."""
    found = fsspec.filesystem("memory")
    found.store.clear()
    yield found
    found.store.clear()


def tar_of(name: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as archive:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def test_storage_is_read_as_folders_globs_files_and_archives(storage: Any, tmp_path: Path) -> None:
    content = {
        "/b/a.txt": b"one",
        "/b/c/d.txt.gz": gzip.compress(b"two"),
        "/b/c/.hidden": b"no",
        "/b/e.tar.xz": tar_of("in.txt", b"three"),
        "/b/f.zip": zip_of({"in.txt": b"four", "other.md": b"five"}),
        "/b/g.parquet": write(tmp_path, "parquet", [{"text": "six"}]).read_bytes(),
    }
    for name, block in content.items():
        storage.pipe(name, block)
    assert texts("memory://b") == ["one", "two", "three", "four", "five", "six"]
    assert texts("memory://b/c/*.gz", "memory://b/a.txt") == ["two", "one"]
    assert texts("memory://b/f.zip::*.md") == ["five"]
    found, source = read("memory://b/a.txt")
    assert found == [Document("one", None, "memory://b/a.txt")] and source.path == "memory://b/a.txt"


def test_storage_is_streamed_and_only_what_is_asked_for_is_fetched(storage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.pipe("/b/x.zip", zip_of({"a.txt": os.urandom(3_000_000), "b.txt": b"wanted"}))
    fetched: list[int] = []
    whole = places._Fetched.readinto

    def counted(self: Any, buffer: memoryview) -> int:
        fetched.append(whole(self, buffer))
        return fetched[-1]

    monkeypatch.setattr(places._Fetched, "readinto", counted)
    assert texts("memory://b/x.zip::b.txt") == ["wanted"]
    assert sum(fetched) < 2_500_000


def test_preparing_from_storage_resumes_unless_a_file_has_changed(storage: Any, tmp_path: Path) -> None:
    text = "Some words of a text that is long enough to be kept by the cleaning, in a sentence or two. And one more of them."
    for number in range(40):
        storage.pipe(f"/b/{number}.txt", f"{number} {text}".encode())
    data = Data(paths=["memory://b"], vocab_size=100, valid_fraction=0.2, workers=1)
    manifest = prepare(data, tmp_path / "out", lambda line: None)
    assert manifest.sources[0].documents == 40
    before = [(file.name, file.size, file.version) for file in places.files("memory://b")]
    storage.pipe("/b/7.txt", b"changed")
    after = [(file.name, file.size, file.version) for file in places.files("memory://b")]
    assert sum(x != y for x, y in zip(before, after, strict=True)) == 1


def test_a_cut_file_in_storage_is_truncated(storage: Any) -> None:
    storage.pipe("/b/x.txt.gz", gzip.compress(os.urandom(1000).hex().encode())[:-300])
    with pytest.raises(DataError, match=r"memory://b/x\.txt\.gz: the compressed file ends early.*on_truncated_file=keep"):
        read("memory://b/x.txt.gz")
    assert read("memory://b", on_truncated_file="keep")[1].truncated == ["memory://b/x.txt.gz"]


def test_what_storage_refuses_is_said_without_keys(storage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.pipe("/b/x.txt", b"x")
    for path, message in {
        "memory://gone": r"memory://gone: there is no such file or folder",
        "memory://b/*.md": r"memory://b/\*\.md: there is no such file",
        "nothing://b": r"nothing://b: cannot be listed \(Protocol not known: nothing",
    }.items():
        with pytest.raises(DataError, match=message):
            read(path)
    with pytest.raises(ConfigError, match=r"address of s3://bucket has a user or key in it") as refused:
        read("s3://key:secret@bucket/x")
    assert "secret" not in str(refused.value)

    def fails(*_: Any, **__: Any) -> Any:
        raise PermissionError("403 for https://host/x?X-Amz-Signature=secret of bucket")

    monkeypatch.setattr(storage, "open", fails)
    with pytest.raises(DataError, match=r"memory://b/x\.txt: cannot be read \(403 for https://host/x of bucket\)"):
        read("memory://b")
    monkeypatch.setattr(storage, "info", fails)
    with pytest.raises(DataError, match=r"memory://b: cannot be listed \(403 for https://host/x of bucket\)"):
        read("memory://b?token=secret")


def test_an_address_may_stand_in_the_environment(storage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    storage.pipe("/b/x.txt", b"x")
    monkeypatch.setenv("BUCKET", "b")
    assert texts("memory://$BUCKET/x.txt") == ["x"]
    monkeypatch.delenv("BUCKET")
    with pytest.raises(ConfigError, match="BUCKET is not set"):
        read("memory://$BUCKET/x.txt")


def test_storage_without_its_library_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(DataError, match=r"s3://bucket/x: .*s3fs.*pip install 'overnight\[remote\]'"):
        read("s3://bucket/x")


def test_links_that_lead_back_are_not_followed_around(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x.txt").write_text("once")
    (tmp_path / "a" / "b" / "up").symlink_to(tmp_path / "a")
    (tmp_path / "above.txt").write_text("not below b")
    assert texts(tmp_path / "a") == texts(tmp_path / "a" / "b") == ["once"]
    assert texts(f"{tmp_path}/**/x.txt") == texts(f"{tmp_path}/a/**") == ["once"]
    assert texts(f"{tmp_path}/a/../a/b/*.txt") == ["once"]  # passes through a folder twice and is no loop
    (tmp_path / "beside").symlink_to(tmp_path / "a" / "b")
    assert texts(tmp_path / "beside") == ["once"]


def test_linked_folders_are_entered_once_and_by_their_own_path_if_they_have_one(tmp_path: Path) -> None:
    for name in ("text/z/own.txt", "elsewhere/deep/linked.txt", "elsewhere/.hidden/no.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    for name, target in {"a": "z", "b": "../elsewhere", "c": "../elsewhere", ".d": "../elsewhere", "e": "../elsewhere/deep"}.items():
        (tmp_path / "text" / name).symlink_to(target)
    found, _ = read(tmp_path / "text")
    assert [Path(document.name).relative_to(tmp_path) for document in found] == [
        Path("text/b/deep/linked.txt"),
        Path("text/z/own.txt"),
    ]
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "only").symlink_to(tmp_path / "elsewhere")
    assert texts(tmp_path / "links") == ["elsewhere/deep/linked.txt"]


@pytest.mark.parametrize("path", ["", "/a", "/*", "/*/*.txt", "/**"])
def test_a_link_that_leads_nowhere_is_refused_wherever_it_is_met(tmp_path: Path, path: str) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("text")
    (tmp_path / "a" / ".#x.txt").symlink_to("hidden, as an editor leaves it")
    assert texts(f"{tmp_path}{path}") == ["text"]
    for target in ("../nowhere", "y.txt"):
        (tmp_path / "a" / "y.txt").symlink_to(target)
        with pytest.raises(DataError, match=rf"a/y\.txt: is a link to {target}, which does not exist; correct or remove it"):
            read(f"{tmp_path}{path}")
        with pytest.raises(DataError, match=r"y\.txt: there is no such file"):
            read(tmp_path / "a" / "y.txt")
        (tmp_path / "a" / "y.txt").unlink()


def test_globs_of_storage_leave_out_what_is_hidden_unless_they_name_it(storage: Any, tmp_path: Path) -> None:
    for name in ("a.txt", ".b.txt", ".c/d.txt", "e/.f/g.txt"):
        storage.pipe(f"/b/{name}", name.encode())
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    for root in ("memory://b", f"file://{tmp_path}", str(tmp_path)):
        assert texts(f"{root}/*.txt") == texts(f"{root}/**/*.txt") == ["a.txt"]
        assert texts(f"{root}/.c/*.txt") == [".c/d.txt"]
        assert texts(f"{root}/.*.txt") == [".b.txt"]


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set in a folder, of two splits."""
    pytest.importorskip("datasets", reason="the extra `datasets` is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub._builder.cache_clear()
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "test.jsonl").write_text(json.dumps(ROWS[2]) + "\n")
    return folder


def test_a_data_set_is_streamed_with_labels_and_groups(dataset: Path) -> None:
    path = f"hf:{dataset}"
    names = {"field": "body", "label": "stars", "group_field": "product", "tokenizer": "bytes"}
    found, source = read(path, **names)
    assert found == [Document(row["body"], row["stars"], f"{path}#{row['id']}", row["product"]) for row in ROWS]
    assert (source.files, source.documents) == (1, 3)
    assert texts(f"{path}:default:test", field="body") == [ROWS[2]["body"]]
    assert texts(f"{path}::test", field="body") == [ROWS[2]["body"]]


def test_a_data_set_that_changes_is_another(dataset: Path) -> None:
    before = hub.version(f"hf:{dataset}")
    assert hub.version(f"hf:{dataset}") == before
    (dataset / "train.jsonl").write_text('{"body": "x"}\n' * 5)
    os.utime(dataset / "train.jsonl", (1, 1))
    hub._builder.cache_clear()
    assert hub.version(f"hf:{dataset}") != before


def test_what_a_data_set_lacks_is_named(dataset: Path) -> None:
    with pytest.raises(DataError, match=r"has no column 'text'; its columns are: id, body, stars, product"):
        read(f"hf:{dataset}")
    with pytest.raises(DataError, match=r"cannot be read \(Bad split: dev\. Available splits: \['train', 'test'\]"):
        read(f"hf:{dataset}::dev", field="body")
    with pytest.raises(DataError, match=r"cannot be read \(BuilderConfig 'x' not found"):
        read(f"hf:{dataset}:x", field="body")
    with (dataset / "train.jsonl").open("a") as file:
        file.write("{broken\n")
    hub._builder.cache_clear()
    with pytest.raises(
        DataError, match=r"cannot be read \(.*\); correct data\.paths, repair the data set, or make sure that this machine can reach it"
    ):
        read(f"hf:{dataset}", field="body")


def test_what_is_no_data_set_says_what_one_is() -> None:
    for wrong in ("hf:", "hf:a:b:c:d", "hf:a@"):
        with pytest.raises(ConfigError, match="is not a Hugging Face data set; write hf:NAME"):
            hub.version(wrong)
    for part in ("[:10%]", "[10:]", "[:50]"):
        with pytest.raises(ConfigError, match=r"names a part of a split, but a split is read as one stream; name 'hf:a::train', or write"):
            hub.version(f"hf:a::train{part}")


def test_a_data_set_may_stand_in_the_environment(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET", str(dataset))
    assert texts("hf:$SET::test", field="body") == [ROWS[2]["body"]]
    monkeypatch.delenv("SET")
    with pytest.raises(ConfigError, match="SET is not set"):
        hub.version("hf:${SET}:default")


def test_without_the_extra_a_data_set_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    hub._builder.cache_clear()
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"hf:some/set: .*pip install 'overnight\[datasets\]'"):
        read("hf:some/set")
