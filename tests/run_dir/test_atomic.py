"""A file that is written appears whole and in its own place, and nothing else is put away for it."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from overnight.errors import ConfigError
from overnight.run_dir.atomic import check_writable, remove_unfinished, whole_file, write_whole


def test_a_pipe_or_a_device_is_written_into_and_stays_what_it_is(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_whole(pipe, [b"one", b"two"])
    reader.join(60)
    assert read == [b"onetwo"] and pipe.is_fifo()
    (tmp_path / "null").symlink_to(os.devnull)
    write_whole(tmp_path / "null", [b"gone"])
    assert (tmp_path / "null").is_char_device() and sorted(path.name for path in tmp_path.iterdir()) == ["null", "pipe"]


def test_a_link_stays_and_the_file_that_it_leads_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(Path("there") / "real")
    for content in (b"first", b"second"):  # where there is no file yet, and where there is
        write_whole(tmp_path / "link", [content])
        assert (tmp_path / "link").is_symlink() and (tmp_path / "there" / "real").read_bytes() == content
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["real"]


def test_a_folder_that_cannot_be_written_is_refused_by_the_key_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    check_writable(tmp_path / "a" / "b", "out")
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]
    for folder in (tmp_path / "empty.txt", tmp_path / "empty.txt" / "x", Path("/proc/x")):
        with pytest.raises(ConfigError, match=rf"data\.dir = {folder}: cannot be written \(.+\); name another folder"):
            check_writable(folder, "data.dir")


@pytest.mark.parametrize("name", ["link", "link/mine"])
def test_a_folder_behind_a_link_to_nothing_is_refused_by_that_link(name: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/mnt/not-mounted/runs")
    with pytest.raises(
        ConfigError, match=rf"^out = {tmp_path / name}: {tmp_path / 'link'} is a link to /mnt/not-mounted/runs, which does not exist;"
    ):
        check_writable(tmp_path / name, "out")


def test_an_error_while_a_file_is_written_names_it(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'state.json'}'"), whole_file(tmp_path / "state.json"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert not list(tmp_path.iterdir())


def test_an_error_of_the_system_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(Path("folder") / "real")
    (tmp_path / "folder" / "real").mkdir()
    long = tmp_path / ("a" * 250)  # with what the name has more while it is written it is too long
    for path in (long, tmp_path / "link", tmp_path / "folder"):
        with pytest.raises(OSError, match=rf"^\[Errno \d+\] [\w ]+: '{path}'$"):
            write_whole(path, [b"x"])


def test_a_name_that_is_too_long_is_refused_before_the_folder_above_it_is_made(tmp_path: Path) -> None:
    check_writable(tmp_path / "runs" / ("a" * 255), "out")
    with pytest.raises(ConfigError, match=r"^out = .+: cannot be written \(File name too long\); name another folder$"):
        check_writable(tmp_path / "runs" / ("ä" * 128), "out")


def test_a_full_disk_is_left_to_the_message_that_says_how_much_room_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **more: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.mkdtemp", full)
    check_writable(tmp_path, "out")


def test_what_is_being_written_is_not_taken_for_what_a_killed_process_left(tmp_path: Path) -> None:
    left = tmp_path / "report.html.77-0a1b2c3d.tmp"
    left.write_bytes(b"half")
    with whole_file(tmp_path / "report.html") as file:
        file.write(b"whole")
        remove_unfinished(tmp_path)
        assert not left.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"] and (tmp_path / "report.html").read_bytes() == b"whole"
