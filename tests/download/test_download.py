"""`overnight download`: what is there is not got again and never lost, and what is got is recorded."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import time
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from overnight.cli.main import main
from overnight.console import Line
from overnight.download import download as module
from overnight.download.connection import Answer, Source, _open_file
from overnight.download.datasets import DATASETS, Dataset, RemoteFile
from overnight.download.download import Download
from overnight.download.manifest import Manifest
from overnight.download.selection import SelectedDataset
from overnight.errors import DataError
from tests.download.conftest import CONTENT, HOST, Pauses, checksum
from tests.download.server import Handler, Site, cut, other, status
from tests.processes import HANG

TRAIN, DEV = CONTENT[:300_000], CONTENT[300_000:350_000]


def zipped(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return out.getvalue()


COLA = zipped({"CoLA/train.tsv": b"a\tb\n", "CoLA/dev.tsv": b"c\td\n", "CoLA/original/x.tsv": b"no"})


@pytest.fixture(autouse=True)
def small(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQuAD and CoLA of small files, which the server has."""

    def row(name: str, variants: dict[str, tuple[RemoteFile, ...]], default: tuple[str, ...]) -> None:
        monkeypatch.setitem(DATASETS, name, Dataset(name, f"about {name}", f"license of {name}", f"paper of {name}", variants, default))

    squad = tuple(
        RemoteFile(f"https://{HOST}/{part}-v1.1.json", f"squad/{part}-v1.1.json", len(content), checksum(content))
        for part, content in (("train", TRAIN), ("dev", DEV))
    )
    row("squad", {"1.1": squad, "2.0": ()}, ("1.1",))
    glue = RemoteFile(f"https://{HOST}/CoLA.zip", "glue/CoLA", len(COLA), checksum(COLA), "CoLA/*.tsv")
    row("glue", {"cola": (glue,)}, ("cola",))
    row("imdb", {"": (RemoteFile(f"https://{HOST}/plain.txt", "imdb/plain.txt"),)}, ("",))
    site.files |= {
        f"/{HOST}/train-v1.1.json": TRAIN,
        f"/{HOST}/dev-v1.1.json": DEV,
        f"/{HOST}/CoLA.zip": COLA,
        f"/{HOST}/plain.txt": b"plain\n",
    }


def download(site: Site, folder: Path, *words: str) -> int:
    return main(["download", *words, "--to", str(folder), "--mirror", site.address, "--retries", "0", "--timeout", "20"])


def visible(folder: Path) -> set[str]:
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in files if not any(part.startswith(".") for part in path.parts)}


def test_files_come_with_a_record_their_license_and_the_next_command(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert download(site, tmp_path, "squad", "glue", "--task", "cola") == 0
    assert visible(tmp_path) == {
        "download.json",
        "squad/train-v1.1.json",
        "squad/dev-v1.1.json",
        "glue/CoLA/train.tsv",
        "glue/CoLA/dev.tsv",
    }
    assert (tmp_path / "squad" / "train-v1.1.json").read_bytes() == TRAIN
    assert (tmp_path / "glue" / "CoLA" / "dev.tsv").read_bytes() == b"c\td\n"
    record = json.loads((tmp_path / "download.json").read_text())["files"]
    assert record.keys() == visible(tmp_path) - {"download.json"}
    train, dev = record["squad/train-v1.1.json"], record["glue/CoLA/dev.tsv"]
    assert train["sha256"] == hashlib.sha256(TRAIN).hexdigest() and train["size"] == len(TRAIN)
    assert (train["address"], train["license"], train["citation"]) == (
        f"https://{HOST}/train-v1.1.json",
        "license of squad",
        "paper of squad",
    )
    assert dev["member"] == "CoLA/dev.tsv" and dev["sha256"] == hashlib.sha256(b"c\td\n").hexdigest()
    assert time.strptime(train["date"], "%Y-%m-%dT%H:%M:%SZ")
    out = capsys.readouterr().out
    assert "license: license of squad" in out and "cite: paper of glue" in out and "squad: 2 files, 0.3 MB" in out
    assert out.endswith(
        f"next:\n  overnight finetune squad --from RUN --path={tmp_path}/squad\n  overnight finetune cola --from RUN --path={tmp_path}/glue/CoLA\n"
    )
    assert not [path for path in tmp_path.rglob(".*") if path.name != ".download.lock"]


def test_what_is_there_is_not_got_again_and_what_is_not_as_it_came_is(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert download(site, tmp_path, "squad", "glue", "imdb") == 0
    site.asked.clear()
    assert download(site, tmp_path, "squad", "glue", "imdb", "--verify") == 0
    assert not site.asked
    train, member = tmp_path / "squad" / "train-v1.1.json", tmp_path / "glue" / "CoLA" / "dev.tsv"
    train.touch()  # another time alone is no other file
    assert download(site, tmp_path, "squad") == 0 and not site.asked
    train.write_bytes(TRAIN[:-1] + b"x")
    member.unlink()
    assert download(site, tmp_path, "squad", "glue") == 0
    assert sorted(path for path, _ in site.asked) == [f"/{HOST}/CoLA.zip", f"/{HOST}/train-v1.1.json"]
    assert train.read_bytes() == TRAIN and member.read_bytes() == b"c\td\n"
    assert f"{train}: differs from what was downloaded" in capsys.readouterr().out


def test_a_change_that_kept_size_and_time_is_found_by_verify(site: Site, tmp_path: Path) -> None:
    assert download(site, tmp_path, "squad") == 0
    train = tmp_path / "squad" / "train-v1.1.json"
    times = train.stat()
    train.write_bytes(bytes(len(TRAIN)))
    os.utime(train, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert download(site, tmp_path, "squad") == 0 and train.read_bytes() == bytes(len(TRAIN))
    assert download(site, tmp_path, "squad", "--verify") == 0 and train.read_bytes() == TRAIN


def test_a_file_that_someone_has_put_there_is_taken_if_it_is_the_published_one_and_never_replaced(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in {"squad/train-v1.1.json": TRAIN, "imdb/plain.txt": b"mine", "glue/CoLA/train.tsv": b"mine"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert download(site, tmp_path, "squad") == 0
    assert [path for path, _ in site.asked] == [f"/{HOST}/dev-v1.1.json"]
    assert "was already there, and is what is published" in capsys.readouterr().out
    assert download(site, tmp_path, "imdb") == 1
    assert "no checksum is published that would tell whether it is whole; move it away to download it" in capsys.readouterr().err
    assert download(site, tmp_path, "glue") == 1
    assert "train.tsv: exists and differs from what is published; move it away" in capsys.readouterr().err
    assert (tmp_path / "imdb" / "plain.txt").read_bytes() == (tmp_path / "glue" / "CoLA" / "train.tsv").read_bytes() == b"mine"
    assert not (tmp_path / "glue" / "CoLA" / "dev.tsv").exists()
    (tmp_path / "squad" / "dev-v1.1.json").write_bytes(b"mine")
    (tmp_path / "download.json").unlink()
    assert download(site, tmp_path, "squad") == 1
    assert (tmp_path / "squad" / "dev-v1.1.json").read_bytes() == b"mine"


def test_a_file_that_fails_does_not_keep_the_others_from_coming(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site.faults[f"/{HOST}/train-v1.1.json"] = [status(403)]
    site.faults[f"/{HOST}/plain.txt"] = [status(404)]
    assert download(site, tmp_path, "squad", "imdb", "--jobs", "1") == 1
    said = capsys.readouterr()
    assert "2 files of 3 could not be downloaded; the first: http" in said.err and "403 Forbidden" in said.err
    assert said.out.count("failed: ") == 2 and "next:" not in said.out
    assert visible(tmp_path) == {"squad/dev-v1.1.json", "download.json"}
    assert download(site, tmp_path, "squad", "imdb") == 0


def test_a_server_that_is_lost_is_not_asked_for_its_other_files(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site.faults[f"/{HOST}/train-v1.1.json"] = [status(503)]
    assert download(site, tmp_path, "squad", "--jobs", "1") == 1
    said = capsys.readouterr()
    assert f"failed: https://{HOST}/dev-v1.1.json: was not requested, since https://{HOST} no longer answers" in said.out
    assert "answers 503 Service Unavailable, 1 time" in said.err and len(site.asked) == 1


def test_several_files_come_at_once(site: Site, tmp_path: Path) -> None:
    def after_the_other(handler: Handler, content: bytes) -> None:
        end = time.monotonic() + HANG
        while not site.ranges(f"/{HOST}/dev-v1.1.json") and time.monotonic() < end:
            time.sleep(0.001)
        handler.serve(content)

    site.faults[f"/{HOST}/train-v1.1.json"] = [after_the_other]
    assert download(site, tmp_path, "squad", "--jobs", "2") == 0


def test_a_publisher_who_asks_for_pauses_is_given_them(tmp_path: Path, pauses: Pauses, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(None, 5.0, pauses)
    (tmp_path / "book").write_bytes(b"text")
    under_way: list[int] = []

    def open_one(address: str, first: int = 0, validator: str = "") -> Answer:
        under_way.append(sum(1 for path in (tmp_path / "to" / "books").glob("pg*.txt")))
        return _open_file(tmp_path / "book", first, address)

    monkeypatch.setattr(source, "open", open_one)
    row = DATASETS["gutenberg"]
    files = tuple(file for variant in ("11", "84", "1342") for file in row.variants[variant])
    (tmp_path / "to").mkdir()
    Download(tmp_path / "to", source, 0, Line(io.StringIO())).run([SelectedDataset(row, ("11", "84", "1342"), files)], 3)
    assert under_way == [0, 1, 2] and pauses.waited == [2.0] * 3


def test_there_must_be_room_for_all_before_anything_is_asked(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Usage(NamedTuple):
        free: int

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(len(TRAIN)))
    assert download(site, tmp_path, "squad") == 1
    assert "has 0.3 MB free, but 0.3 MB must be downloaded; make room, or name another folder with --to" in capsys.readouterr().err
    assert not site.asked


def test_an_archive_that_is_damaged_is_not_kept(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = COLA[:40] + b"?" + COLA[41:-30]
    file = RemoteFile(f"https://{HOST}/CoLA.zip", "glue/CoLA", unpack="CoLA/*.tsv")
    monkeypatch.setitem(DATASETS["glue"].variants, "cola", (file,))  # type: ignore[arg-type]
    site.faults[f"/{HOST}/CoLA.zip"] = [other(broken)]
    assert download(site, tmp_path, "glue") == 1
    assert "CoLA.zip: is damaged or no zip archive" in capsys.readouterr().err
    assert download(site, tmp_path, "glue") == 0
    assert site.ranges(f"/{HOST}/CoLA.zip") == ["", ""]


def test_a_process_that_ended_before_the_name_was_given_finds_the_part_whole(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(part: Path, target: Path) -> None:
        raise DataError("ended")

    with monkeypatch.context() as patch:
        patch.setattr(module, "put", ended)
        assert download(site, tmp_path, "imdb", "glue") == 1
    assert visible(tmp_path) == {"download.json"}
    assert download(site, tmp_path, "imdb", "glue") == 0
    assert len(site.asked) == 2 and (tmp_path / "imdb" / "plain.txt").read_bytes() == b"plain\n"
    assert (tmp_path / "glue" / "CoLA" / "dev.tsv").read_bytes() == b"c\td\n"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"version": 1, "files": {"a": {}}}',
        '{"version": 2, "files": {}}',
        '{"version": 1, "files": {}, "checksum_of_the_rest": "0"}',
    ],
)
def test_a_record_that_is_damaged_is_refused_and_kept(site: Site, tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "download.json").write_text(content)
    assert download(site, tmp_path, "squad") == 1
    assert "download.json: " in (error := capsys.readouterr().err) and "move it away" in error
    assert (tmp_path / "download.json").read_text() == content and not site.asked


def test_a_mirror_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "mirror" / HOST).mkdir(parents=True)
    (tmp_path / "mirror" / HOST / "train-v1.1.json").write_bytes(TRAIN)
    (tmp_path / "mirror" / "dev-v1.1.json").write_bytes(DEV)
    assert main(["download", "squad", "--to", str(tmp_path / "to"), "--mirror", str(tmp_path / "mirror")]) == 0
    assert (tmp_path / "to" / "squad" / "dev-v1.1.json").read_bytes() == DEV


def test_what_a_folder_lacks_or_has_damaged_is_said_with_its_place_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mirror").mkdir()
    (tmp_path / "mirror" / "dev-v1.1.json").write_bytes(DEV[:-1] + b"?")
    assert main(["download", "squad", "--to", str(tmp_path / "to"), "--mirror", str(tmp_path / "mirror")]) == 1
    said, lacks = capsys.readouterr().out, tmp_path / "mirror" / HOST / "train-v1.1.json"
    assert (
        f"{lacks}: is not in the mirror, neither there nor by its name alone; it is published at https://{HOST}/train-v1.1.json\n" in said
    )
    assert f"{tmp_path / 'mirror' / 'dev-v1.1.json'}: its sha256 is " in said


def test_the_mirror_of_the_environment_and_its_password_which_nothing_shows(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site.password = "user:secret"
    monkeypatch.setenv("OVERNIGHT_MIRROR", site.address.replace("//", "//user:secret@"))
    site.faults[f"/{HOST}/dev-v1.1.json"] = [status(403)]
    for code in (1, 0):
        assert main(["download", "squad", "--to", str(tmp_path), "--retries", "0"]) == code
    said = capsys.readouterr()
    assert f"mirror: {site.address}" in said.out and "secret" not in said.out + said.err
    assert "secret" not in (tmp_path / "download.json").read_text() and site.address not in (tmp_path / "download.json").read_text()


def test_no_network_is_an_error_that_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["download", "squad", "--to", str(tmp_path), "--mirror", "http://127.0.0.1:1", "--retries", "0", "--jobs", "1"]) == 1
    said = capsys.readouterr().err
    assert "train-v1.1.json: no connection (Connection refused), 1 time" in said and "Is there a network?" in said


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "name what to get: wikipedia, squad"),
        (["sqaud"], "'sqaud': is not one of wikipedia, squad"),
        (["--list", "sqaud"], "'sqaud': is not one of wikipedia, squad"),
        (["squad", "--language", "en"], "--language: is an option of wikipedia, which is not among"),
        (["amazon"], "amazon: name --category; 2014 has Amazon_Instant_Video, "),
        (["amazon", "--category", "Software"], "--category = Software: is not one of Amazon_Instant_Video"),
        (["gutenberg", "--ids", "0"], "--ids = 0: must be the number of a book"),
        (["squad", "--jobs", "0"], "--jobs = 0: must be 1 or more"),
        (["squad", "--retries", "-1"], "--retries = -1: must be 0 or more"),
        (["squad", "--timeout", "0"], "--timeout = 0: must be above 0"),
        (["squad", "--mirror", "gopher://x"], "--mirror = gopher://x: must begin with https://"),
        (["wikipedia", "--date", "today"], "--date = 'today': must be YYYYMMDD"),
        (["squad", "--to", __file__], "is a file; name a folder"),
    ],
)
def test_a_wrong_command_is_refused_before_anything_is_asked(
    words: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OVERNIGHT_DATA", raising=False)
    assert main(["download", *words]) == 2
    assert error in capsys.readouterr().err


def test_the_list_has_every_dataset_with_license_and_citation_and_every_file_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["download", "--list"]) == 0
    out = capsys.readouterr().out
    for row in DATASETS.values():
        assert all(text in out for text in (f"{row.name}: {row.summary}", f"license: {row.license}", f"cite: {row.citation}"))
    assert main(["download", "--list", "squad"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "dev-v1.1" in line)
    assert line.split() == ["squad/dev-v1.1.json", "50,000", checksum(DEV), f"https://{HOST}/dev-v1.1.json"]


@pytest.mark.parametrize(
    ("words", "listed"),
    [
        ("gutenberg --ids 84 1342", ["84", "1342"]),
        ("squad --squad-version 1.1", ["train-v1.1", "dev-v1.1"]),
        ("amazon --year 2018 --category Gift_Cards", ["Gift_Cards"]),
    ],
)
def test_the_list_is_of_what_the_options_ask_for(words: str, listed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["download", "--list", *words.split()]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if re.fullmatch(r"\s+\S+/\S+\s+\S+\s+\S+\s+https://\S+", line)]
    assert len(lines) == len(listed) and all(any(name in line for line in lines) for name in listed)


def test_a_list_refuses_options_of_what_is_not_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["download", "--list", "squad", "--ids", "84"]) == 2
    assert "--ids: is an option of gutenberg, which is not among what is named" in capsys.readouterr().err


def test_every_row_of_the_table_is_https_stays_in_the_folder_and_says_its_license() -> None:
    for row in DATASETS.values():
        assert row.license and row.citation and row.summary and set(row.default) <= set(row.variants)
        files = [file for variant in row.variants.values() for file in variant]
        assert len({file.path + file.unpack for file in files}) == len({file.address for file in files}) == len(files)
        for file in files:
            assert file.address.startswith("https://") and not file.path.startswith(("/", ".")) and ".." not in file.path


def test_a_connection_that_is_cut_is_said_and_continued(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overnight.download.patience.random.uniform", lambda low, high: 0.001)
    site.faults[f"/{HOST}/train-v1.1.json"] = [cut(1000)]
    assert main(["download", "squad", "--to", str(tmp_path), "--mirror", site.address, "--retries", "1"]) == 0
    assert "it ended after 1,000 of 300,000 bytes; trying again in 1 s (1 of 1)" in capsys.readouterr().out
    assert Manifest(tmp_path).is_whole("squad/train-v1.1.json", again=True)
