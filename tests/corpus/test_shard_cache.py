"""Prepared data in storage: copied once, checked, shared by the processes of a machine, and within a bound."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from overnight.cli.main import main
from overnight.cli.run import run_all
from overnight.config import Data, Run
from overnight.corpus import places, shard_cache
from overnight.corpus.shard_cache import local_copy
from overnight.corpus.shards import load_manifest, open_shards
from overnight.corpus.tokenizer import save_tokenizer
from overnight.errors import ConfigError, DataError
from tests.conftest import ROOT
from tests.engine.test_pretrain import assert_same_run, finish
from tests.processes import HANG

fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
Make = Callable[..., Run]


@pytest.fixture(autouse=True)
def storage(tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A storage in memory that holds a small prepared corpus; further tries come at once."""
    found = fsspec.filesystem("memory")
    found.store.clear()
    for file in tiny_data.iterdir():
        if file.is_file() and not file.name.startswith("."):
            found.pipe(f"/bucket/tiny/{file.name}", file.read_bytes())
    monkeypatch.setattr(shard_cache, "_PAUSES", (0.0, 0.0))
    yield found
    found.store.clear()
    for file in shard_cache._read_here.values():
        file.close()
    shard_cache._read_here.clear()


def forget() -> None:
    """Let go of all copies, as the end of the process would."""
    for file in shard_cache._read_here.values():
        file.close()
    shard_cache._read_here.clear()


def settings(folder: Path, address: str = "memory://bucket/tiny", **changes: Any) -> Data:
    return dataclasses.replace(Data(dir=address, cache=str(folder / "cache")), **changes)


def copy(folder: Path, said: list[str] | None = None, **changes: Any) -> Path:
    return local_copy(settings(folder, **changes), "x", (said if said is not None else []).append)


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def test_a_copy_is_fetched_once_and_holds_the_same_shards(tiny_data: Path, tmp_path: Path) -> None:
    said: list[str] = []
    found = copy(tmp_path, said)
    assert len(said) == 1 and said[0].startswith("fetch: 2 of 2 shards of memory://bucket/tiny")
    assert found.parent == tmp_path / "cache" and found.name.startswith("tiny-")
    for split in ("train", "valid"):
        theirs, ours = open_shards(tiny_data, split), open_shards(found, split)
        assert [shard.tokens.tobytes() for shard in ours] == [shard.tokens.tobytes() for shard in theirs]
    forget()
    assert copy(tmp_path, said) == found and len(said) == 1


def test_a_run_trains_on_data_in_storage_with_the_same_bits_and_keeps_the_address(tiny: Make, tmp_path: Path) -> None:
    here = tiny(out=str(tmp_path / "here"))
    there = tiny(out=str(tmp_path / "there"), **{"data.dir": "memory://bucket/tiny", "data.cache": str(tmp_path / "cache")})
    finish(here)
    finish(there)
    assert_same_run(here, there)
    assert "dir: memory://bucket/tiny" in (tmp_path / "there" / "run.yaml").read_text(encoding="utf-8")


def test_a_whole_run_on_data_in_storage_prepares_nothing(
    tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reached(*arguments: object) -> None:
        raise InterruptedError

    monkeypatch.setattr("overnight.engine.pretrain.pretrain", reached)
    run = tiny(out=str(tmp_path / "run"), **{"data.dir": "memory://bucket/tiny", "data.cache": str(tmp_path / "cache")})
    with pytest.raises(InterruptedError):
        run_all(run, extend=False)
    said = capsys.readouterr().out
    assert "prepare: memory://bucket/tiny is used as it was prepared" in said and "preparing it again" not in said
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert not {path.name for path in folder.iterdir()} & {"documents.arrow", "drops.json", "report.html"}


@pytest.mark.parametrize("times", [1, 2])
def test_a_connection_that_is_cut_is_tried_again(times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left, real = {"train": times, "manifest": times}, places._Fetched.readinto

    def cut(self: Any, buffer: memoryview) -> int:
        for name, count in left.items():
            if name in self._shown and count and self.tell():
                left[name] -= 1
                raise DataError(f"{self._shown}: cannot be read (connection reset); run the same command again when it can")
        return real(self, buffer[: max(1, min(len(buffer), 5000))])

    monkeypatch.setattr(places._Fetched, "readinto", cut)
    said: list[str] = []
    assert load_manifest(copy(tmp_path, said)).count("train", "documents") > 10
    assert left == {"train": 0, "manifest": 0}
    tries = [line for line in said if "trying again in 0 s" in line]
    assert len(tries) == 2 * times and "fetch: manifest.json did not arrive" in tries[0] and "connection reset" in tries[0]


def test_a_storage_that_stays_away_is_an_error_that_leaves_nothing_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = places._Fetched.readinto

    def cut(self: Any, buffer: memoryview) -> int:
        if "valid" in self._shown:
            raise DataError(f"{self._shown}: cannot be read (timed out); run the same command again when it can")
        return real(self, buffer)

    with monkeypatch.context() as patch:
        patch.setattr(places._Fetched, "readinto", cut)
        with pytest.raises(DataError, match=r"valid-00000.arrow: cannot be read \(timed out\); run the same command again"):
            copy(tmp_path)
    (folder,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert not (folder / "manifest.json").exists() and not list(folder.rglob("*.tmp"))
    said: list[str] = []
    copy(tmp_path, said)
    # What had arrived stays.
    assert said[0].startswith("fetch: 1 of 2 shards")


@pytest.mark.parametrize("fault", ["cut", "changed"])
def test_a_shard_that_is_not_the_one_of_the_manifest_is_refused(fault: str, storage: Any, tmp_path: Path) -> None:
    whole = storage.cat("/bucket/tiny/train-00000.arrow")
    storage.pipe("/bucket/tiny/train-00000.arrow", whole[:-8] if fault == "cut" else whole[:-200] + bytes(8) + whole[-192:])
    with pytest.raises(
        DataError, match=r"train-00000.arrow: has [\d,]+ bytes with the checksum \w+, but the manifest says .*cut short or changed"
    ):
        copy(tmp_path)
    assert not list((tmp_path / "cache").rglob("train*"))
    storage.pipe("/bucket/tiny/train-00000.arrow", whole)
    copy(tmp_path)


@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer.json"])
def test_a_vocabulary_that_is_not_the_one_of_the_manifest_is_refused_until_storage_has_it(name: str, storage: Any, tmp_path: Path) -> None:
    whole = storage.cat(f"/bucket/tiny/{name}")
    storage.pipe(f"/bucket/tiny/{name}", whole[:-8] if name == "tokenizer.json" else whole.replace(b"\nthe\n", b"\n"))
    with pytest.raises(
        DataError, match=r"/vocab\.txt: is with tokenizer\.json the vocabulary \(damaged\), but the manifest says \w{32}; .*put"
    ):
        copy(tmp_path)
    assert not list((tmp_path / "cache").glob("tiny-*/*.[jt]*"))
    storage.pipe(f"/bucket/tiny/{name}", whole)
    assert open_shards(copy(tmp_path), "train")


def test_a_copy_with_another_vocabulary_is_mended(tiny_data: Path, storage: Any, tmp_path: Path) -> None:
    found = copy(tmp_path)
    forget()
    tokens = (tiny_data / "vocab.txt").read_text(encoding="utf-8").splitlines()
    save_tokenizer(found, [*tokens[:-1], "another"], lowercase=True)
    with pytest.raises(DataError, match="was made with the tokenizer"):
        open_shards(found, "train")
    said: list[str] = []
    assert open_shards(copy(tmp_path, said), "train") and said[0].startswith("fetch: 0 of 2 shards")


def test_what_is_not_there_is_said_at_once(storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_cache, "_PAUSES", (1e9,))
    with pytest.raises(DataError, match=r"memory://bucket/none/manifest.json: there is no such file .*correct data\.dir"):
        copy(tmp_path, address="memory://bucket/none")
    storage.rm("/bucket/tiny/valid-00000.arrow")
    with pytest.raises(DataError, match=r"valid-00000.arrow: there is no such file"):
        copy(tmp_path)


@pytest.mark.parametrize(
    ("address", "said"), [("s3://bucket/tiny", r"pip install 'overnight\[remote\]'"), ("nothing://b", "Protocol not known")]
)
def test_storage_for_which_nothing_is_installed_is_refused_at_once(
    address: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_cache, "_PAUSES", (1e9,))
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(DataError, match=said):
        copy(tmp_path, address=address)


def test_a_copy_that_was_cut_short_is_fetched_again_and_one_that_was_changed_is_noticed(tmp_path: Path) -> None:
    path = copy(tmp_path) / "train-00000.arrow"
    whole = path.read_bytes()
    forget()
    path.write_bytes(whole[:-100])
    said: list[str] = []
    copy(tmp_path, said)
    assert path.read_bytes() == whole and said[0].startswith("fetch: 1 of 2 shards")
    path.write_bytes(whole[:-200] + bytes(8) + whole[-192:])
    with pytest.raises(
        DataError,
        match=r"train-00000\.arrow: the shard is damaged, its checksum .*; delete it and run the same command again, which fetches",
    ):
        open_shards(path.parent, "train")
    forget()
    path.unlink()
    assert path.parent == copy(tmp_path) and open_shards(path.parent, "train")


def test_data_that_was_prepared_anew_is_another_copy(storage: Any, tmp_path: Path) -> None:
    before = copy(tmp_path)
    changed = json.loads(storage.cat("/bucket/tiny/manifest.json"))
    storage.pipe(
        "/bucket/tiny/manifest.json",
        json.dumps({key: value for key, value in changed.items() if "checksum" not in key} | {"short": 77}).encode(),
    )
    after = copy(tmp_path)
    assert before != after and load_manifest(after).short == 77 != load_manifest(before).short


def test_a_name_that_leads_out_of_the_folder_is_refused(storage: Any, tmp_path: Path) -> None:
    changed = json.loads(storage.cat("/bucket/tiny/manifest.json"))
    changed["shards"][0]["name"] = "../../x.arrow"
    storage.pipe("/bucket/tiny/manifest.json", json.dumps({key: value for key, value in changed.items() if "checksum" not in key}).encode())
    with pytest.raises(DataError, match=r"names a shard '\.\./\.\./x\.arrow', which is not a file name"):
        copy(tmp_path)
    assert not list(tmp_path.rglob("x.arrow"))


def test_the_bound_holds_and_takes_away_the_copy_that_was_opened_longest_ago(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_cache, "_OTHER_FILES", 0)
    for name in ("b", "c"):
        for path in storage.find("/bucket/tiny"):
            storage.pipe(path.replace("tiny", name), storage.cat(path))
    first, second = (copy(tmp_path, address=f"memory://bucket/{name}") for name in ("tiny", "b"))
    limit = 2.5 * size(first) / 1e9
    # Both are read by this process, so neither can go.
    with pytest.raises(DataError, match=r"other processes read 0\.\d+ GB of it.*raise data\.cache_gb"):
        copy(tmp_path, address="memory://bucket/c", cache_gb=limit)
    forget()
    assert copy(tmp_path) == first  # opened last, now
    forget()
    said: list[str] = []
    third = copy(tmp_path, said, address="memory://bucket/c", cache_gb=limit)
    assert any("removing" in line and second.name in line for line in said)
    assert first.exists() and third.exists() and not second.exists()
    with pytest.raises(DataError, match=r"needs 0\.\d+ GB, but data\.cache_gb = 1e-06; every step reads from all of it"):
        copy(tmp_path, address="memory://bucket/b", cache_gb=1e-6)


def test_a_cache_in_a_folder_of_other_things_takes_away_copies_alone(storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_cache, "_OTHER_FILES", 0)
    theirs = [tmp_path / name / "thesis.bin" for name in ("precious", f"mine-{'0' * 12}-{'f' * 12}")]
    for path in theirs:
        path.parent.mkdir()
        path.write_bytes(bytes(10_000_000))
    found = copy(tmp_path)
    limit = 1.5 * size(found) / 1e9
    forget()
    shutil.rmtree(found)
    assert copy(tmp_path, cache_gb=limit) == found
    assert all(path.stat().st_size == 10_000_000 for path in theirs)


def test_processes_share_a_copy_and_fetch_it_once(tiny_data: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from overnight.config import Data; from overnight.corpus.shard_cache import local_copy; "
        "from overnight.corpus.shards import open_shards; said = []; "
        "folder = local_copy(Data(dir=sys.argv[1], cache=sys.argv[2]), 'x', said.append); "
        "print(len(said), len(open_shards(folder, 'train')[0].tokens))"
    )
    command = [sys.executable, "-c", program, f"file://{tiny_data}", str(tmp_path / "cache")]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    told = [process.communicate(timeout=HANG)[0].split() for process in running]
    tokens = str(len(open_shards(tiny_data, "train")[0].tokens))
    assert sorted(told) == [["0", tokens], ["0", tokens], ["1", tokens]]


def test_a_copy_that_another_process_reads_stays(storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_cache, "_OTHER_FILES", 0)
    for path in storage.find("/bucket/tiny"):
        storage.pipe(path.replace("tiny", "b"), storage.cat(path))
    first = copy(tmp_path)
    forget()
    with open(f"{first}.read") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        with pytest.raises(DataError, match="other processes read"):
            copy(tmp_path, address="memory://bucket/b", cache_gb=1.5 * size(first) / 1e9)
    assert load_manifest(first)
    copy(tmp_path, address="memory://bucket/b", cache_gb=1.5 * size(first) / 1e9)
    assert not first.exists()


def test_preparing_into_storage_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", "demo", "--data.dir=memory://bucket/out", f"--out={tmp_path / 'run'}"]) == 2
    assert "prepare into a folder of this machine, and copy that into storage" in capsys.readouterr().err


def test_a_cache_that_cannot_be_written_is_refused_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ConfigError, match=rf"^data\.cache = {tmp_path}/cache: cannot be written \(.+\); name another folder$"):
        copy(tmp_path)


def test_a_whole_copy_that_may_only_be_read_is_used_and_another_one_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shard_cache._open_lock

    def refused(*arguments: Any, to_read: bool = False) -> Any:
        if to_read:
            return real(*arguments, to_read=True)
        raise OSError(errno.EROFS, "Read-only file system")

    found = copy(tmp_path)
    forget()
    monkeypatch.setattr(shard_cache, "_open_lock", refused)
    monkeypatch.setattr(shard_cache, "write_whole", refused)
    assert copy(tmp_path) == found and open_shards(found, "train")
    with open(f"{found}.read", "a") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # who wants to take it away, from where it can be written
    forget()
    (found / "train-00000.arrow").unlink()
    with pytest.raises(ConfigError, match=r"data\.cache = .*: cannot be written \(Read-only file system\); name another folder"):
        copy(tmp_path)
