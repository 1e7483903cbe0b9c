"""A file that is written appears whole and in its own place, and nothing else is put away for it."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from overnight.run_dir.atomic import write_whole


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
