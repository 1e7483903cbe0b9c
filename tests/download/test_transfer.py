"""A file comes whole and as published, or not at all, whatever its server does; what has come of it is never lost, and never mixed with another."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overnight.download import transfer
from overnight.download.addresses import mirror_of
from overnight.download.connection import MissingError, Source
from overnight.download.datasets import RemoteFile
from overnight.download.patience import Attempts, StoppedError
from overnight.download.transfer import DiskFullError, Transfer, part_path
from overnight.errors import DataError
from tests.download.conftest import CONTENT, HOST, PATH, Get, Pauses, checksum
from tests.download.server import Handler, Site, cut, no_ranges, other, serving, stall, status, unannounced


def test_a_file_comes_whole_with_its_checksum(get: Get, site: Site) -> None:
    received = get(size=len(CONTENT), checksum=checksum(CONTENT))
    assert received.path.read_bytes() == CONTENT
    assert received.sha256 == hashlib.sha256(CONTENT).hexdigest() and received.size == len(CONTENT)
    assert received.path.name == ".a.bin.part"
    assert site.asked[0][1]["User-Agent"].startswith("overnight/") and site.asked[0][1]["Accept-Encoding"] == "identity"


def test_a_connection_that_is_cut_is_continued_where_it_was_cut(get: Get, site: Site, pauses: Pauses) -> None:
    site.faults[PATH] = [cut(100_000), cut(50_000), cut(0)]
    assert get(checksum=checksum(CONTENT)).path.read_bytes() == CONTENT
    assert site.ranges(PATH) == ["", "bytes=100000-", "bytes=150000-", "bytes=150000-"]
    assert len(pauses.waited) == 3


def test_a_server_that_stalls_is_left_after_the_timeout_and_asked_for_the_rest(get: Get, site: Site, said: list[str]) -> None:
    site.faults[PATH] = [stall(300_000)]
    assert get(timeout=0.2).path.read_bytes() == CONTENT
    assert site.ranges(PATH) == ["", "bytes=300000-"]
    assert "nothing came for a while" in said[0]


def test_a_server_that_answers_nothing_at_all_is_asked_again(get: Get, site: Site, said: list[str]) -> None:
    site.faults[PATH] = [lambda handler, content: handler.site.released.wait(600) and None]
    assert get(timeout=0.2).path.read_bytes() == CONTENT
    assert "no answer in time" in said[0]


def test_a_server_that_ignores_ranges_sends_all_again_and_nothing_is_written_twice(get: Get, site: Site) -> None:
    site.faults[PATH] = [no_ranges(400_000), no_ranges(200_000), no_ranges()]
    assert get(checksum=checksum(CONTENT)).path.read_bytes() == CONTENT


def test_a_server_that_ignores_ranges_and_never_gets_to_the_end_is_left(get: Get, site: Site) -> None:
    site.faults[PATH] = [no_ranges(400_000)] * 10
    with pytest.raises(DataError, match="it ended after 400,000 of 1,000,000 bytes, 4 times"):
        get()
    assert len(site.asked) == 4


@pytest.mark.parametrize("published", ["", checksum(CONTENT[::-1])])
def test_a_file_that_changed_between_two_parts_begins_anew(get: Get, site: Site, published: str) -> None:
    def change(handler: Handler, content: bytes) -> None:
        cut(400_000)(handler, content)
        handler.site.files[PATH] = CONTENT[::-1]

    site.faults[PATH] = [change]
    assert get(checksum=published).path.read_bytes() == CONTENT[::-1]
    assert site.asked[1][1]["If-Range"] and site.asked[1][1]["Range"] == "bytes=400000-"


def test_a_changed_file_of_a_server_that_does_not_know_if_range_is_noticed(get: Get, site: Site, said: list[str]) -> None:
    def rest(handler: Handler, content: bytes) -> None:
        del handler.headers["If-Range"]
        handler.serve(CONTENT[::-1])

    site.faults[PATH] = [cut(400_000), rest, no_ranges()]
    assert get().path.read_bytes() == CONTENT
    assert any("cannot be continued and begins anew" in line for line in said)


def test_a_file_that_changes_all_the_time_is_left(get: Get, site: Site) -> None:
    def change(handler: Handler, content: bytes) -> None:
        cut(400_000)(handler, content)
        handler.site.files[PATH] = content[1:] + content[:1]

    site.faults[PATH] = [change] * 20
    with pytest.raises(DataError, match="changes again and again"):
        get(retries=20)


def test_lengths_of_one_file_that_contradict_each_other_are_said(get: Get, site: Site) -> None:
    def longer(handler: Handler, content: bytes) -> None:
        handler.start(200, content, len(content) + 1000)
        handler.wfile.write(content)

    site.faults[PATH] = [longer, Handler.serve] * 10
    with pytest.raises(
        DataError, match=rf"{PATH}: announces 1,001,000 bytes and then 1,000,000 of one file; name another place with --mirror"
    ):
        get(retries=20)


def test_a_part_of_which_nothing_could_tell_a_change_is_not_continued(get: Get, site: Site) -> None:
    site.faults[PATH] = [lambda handler, content: nameless(handler, content, 1000), lambda handler, content: nameless(handler, content)]
    assert get().path.read_bytes() == CONTENT
    assert site.ranges(PATH) == ["", ""]


def test_a_part_without_etag_is_continued_where_the_checksum_will_tell(get: Get, site: Site) -> None:
    site.faults[PATH] = [lambda handler, content: nameless(handler, content, 1000)]
    assert get(checksum=checksum(CONTENT)).path.read_bytes() == CONTENT
    assert site.ranges(PATH) == ["", "bytes=1000-"]


def test_a_part_that_cannot_be_continued_is_not_said_to_be(get: Get, site: Site) -> None:
    for published, then in (("", "the same command begins it anew"), (checksum(CONTENT), "is kept, and the same command continues")):
        site.faults[PATH] = [lambda handler, content: nameless(handler, content, 1000)] + [status(503)] * 2
        with pytest.raises(DataError, match=f"3 times; .*{then}"):
            get(checksum=published, retries=2)


def nameless(handler: Handler, content: bytes, after: int | None = None) -> None:
    """Send a file without anything that says which it is."""
    handler.start(200, content, len(content), {"ETag": ""})
    handler.wfile.write(content[:after])


def test_a_length_that_is_not_the_published_one_is_refused_before_a_byte_is_kept(get: Get, site: Site, tmp_path: Path) -> None:
    for size in (len(CONTENT) - 1, len(CONTENT) + 1):
        with pytest.raises(DataError, match=f"announces 1,000,000 bytes where {size:,} are published"):
            get(size=size)
    assert not part_path(tmp_path / "a.bin").exists() and len(site.asked) == 2


def test_a_body_longer_than_published_is_cut_off_and_nothing_is_kept(get: Get, site: Site, tmp_path: Path) -> None:
    site.faults[PATH] = [unannounced(CONTENT + b"more")]
    with pytest.raises(DataError, match="sends more than the 1,000,000 bytes"):
        get(size=len(CONTENT))
    assert not part_path(tmp_path / "a.bin").exists()


def test_a_body_without_end_stops_at_a_limit(get: Get, site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(transfer, "MAX_UNANNOUNCED", 500_000)
    site.faults[PATH] = [unannounced(CONTENT)]
    with pytest.raises(DataError, match="sends more than the 500,000 bytes"):
        get(checksum=checksum(CONTENT))
    assert not part_path(tmp_path / "a.bin").exists()


def test_a_file_whose_end_nothing_tells_is_refused(get: Get, site: Site, tmp_path: Path) -> None:
    site.faults[PATH] = [unannounced(CONTENT[:1000])]
    with pytest.raises(DataError, match=r"a\.bin: does not say where it ends, .* --mirror"):
        get()
    assert not part_path(tmp_path / "a.bin").exists()
    site.faults[PATH] = [unannounced(CONTENT)]
    assert get(checksum=checksum(CONTENT)).path.read_bytes() == CONTENT


def test_a_body_shorter_than_announced_is_asked_for_again_and_then_left_with_what_has_come(get: Get, site: Site, tmp_path: Path) -> None:
    site.faults[PATH] = [cut(999_999)] + [cut(0)] * 10
    with pytest.raises(
        DataError, match="it ended after 999,999 of 1,000,000 bytes, 3 times; what was downloaded is kept, and the same command"
    ):
        get(retries=2)
    assert part_path(tmp_path / "a.bin").read_bytes() == CONTENT[:-1]
    site.faults.clear()
    assert get().path.read_bytes() == CONTENT
    assert site.ranges(PATH)[-1] == "bytes=999999-"


def test_a_length_that_is_no_number_is_none(get: Get, site: Site) -> None:
    site.faults[PATH] = [other(CONTENT, Content_Length="-5", Connection="close")]
    assert get(checksum=checksum(CONTENT)).size == len(CONTENT)


def test_a_length_of_more_digits_than_a_file_can_have_is_none(get: Get, site: Site) -> None:
    digits = "1" * 5000  # int() refuses more than 4,300
    site.faults[PATH] = [other(CONTENT, Content_Length=digits, Connection="close")]
    assert get(checksum=checksum(CONTENT)).size == len(CONTENT)
    site.faults[PATH] = [cut(1000), status(206, Content_Range=f"bytes {digits}-5/7")]
    assert get(checksum=checksum(CONTENT)).path.read_bytes() == CONTENT


def test_a_refusal_after_a_while_ends_with_what_has_come_kept(get: Get, site: Site, tmp_path: Path, pauses: Pauses) -> None:
    site.faults[PATH] = [cut(100_000), status(403)]
    with pytest.raises(DataError, match=r"answers 403 Forbidden; what was downloaded is kept"):
        get()
    assert part_path(tmp_path / "a.bin").stat().st_size == 100_000 and len(pauses.waited) == 1
    assert get().path.read_bytes() == CONTENT


def test_a_busy_server_is_given_the_time_that_it_asks_for(get: Get, site: Site, pauses: Pauses, said: list[str]) -> None:
    site.faults[PATH] = [status(429, Retry_After="17"), status(503, Retry_After="Fri, 31 Dec 2027 23:59:59 GMT"), status(503)]
    with pytest.raises(DataError, match=r"answers 503 Service Unavailable, and asks to wait .* h"):
        get()
    assert 17.0 in pauses.waited and "answers 429 Too Many Requests; trying again in 17 s (1 of 3)" in said[0]


def test_pauses_double_and_vary_and_new_bytes_begin_them_again(get: Get, site: Site, pauses: Pauses) -> None:
    site.faults[PATH] = [status(500), status(502), status(504), cut(10), status(500)]
    assert get(retries=4).path.read_bytes() == CONTENT
    for paused, longest in zip(pauses.waited, [1, 2, 4, 1, 2], strict=True):
        assert longest / 2 <= paused <= longest


def test_redirects_in_a_circle_and_without_end_are_left(get: Get, site: Site) -> None:
    site.faults[PATH] = [status(302, Location="/b")]
    site.faults["/b"] = [status(307, Location=PATH)]
    with pytest.raises(DataError, match="redirects in a circle"):
        get()
    site.faults = {PATH: [status(301, Location="/0")], **{f"/{i}": [status(301, Location=f"/{i + 1}")] for i in range(20)}}
    with pytest.raises(DataError, match="redirects more than 10 times"):
        get()
    site.files["/there"] = CONTENT
    site.faults = {PATH: [status(301, Location="/there")]}
    assert get().path.read_bytes() == CONTENT


def test_a_redirect_to_no_address_is_an_error_in_words(get: Get, site: Site) -> None:
    site.faults[PATH] = [status(302, Location="http://[bad/a.bin")]
    with pytest.raises(DataError, match=rf"{PATH}: redirects to something that is not an address"):
        get()


def test_a_file_that_is_not_there_is_said_at_once(get: Get, site: Site, pauses: Pauses) -> None:
    site.files.clear()
    with pytest.raises(MissingError, match=rf"{PATH}: answers 404 Not Found; there is no such file, and --mirror names another place"):
        get()
    assert not pauses.waited


def test_a_wrong_checksum_is_tried_once_more_and_then_nothing_is_kept(get: Get, site: Site, tmp_path: Path) -> None:
    wrong = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
    site.faults[PATH] = [other(wrong)]
    assert get(checksum=checksum(CONTENT)).path.read_bytes() == CONTENT
    part_path(tmp_path / "a.bin").unlink()
    site.asked.clear()
    site.faults[PATH] = [other(wrong)] * 5
    with pytest.raises(
        DataError, match=f"its sha1 is {hashlib.sha1(wrong).hexdigest()}, and {hashlib.sha1(CONTENT).hexdigest()} is published"
    ):
        get(checksum=checksum(CONTENT, "sha1"))
    assert list(tmp_path.iterdir()) == [] and len(site.asked) == 2


def test_a_damaged_part_is_found_by_the_checksum_and_begins_anew(get: Get, site: Site, tmp_path: Path) -> None:
    site.faults[PATH] = [cut(500_000), status(403)]
    with pytest.raises(DataError):
        get(checksum=checksum(CONTENT))
    part = part_path(tmp_path / "a.bin")
    part.write_bytes(bytes(500_000))
    assert get(checksum=checksum(CONTENT)).path.read_bytes() == CONTENT


def test_a_gzip_file_without_a_published_checksum_is_checked_by_its_own(get: Get, site: Site, tmp_path: Path) -> None:
    packed = gzip.compress(b"text " * 1000, mtime=0)
    site.files[f"/{HOST}/sets/b.gz"] = packed[:-4] + b"\0\0\0\0"
    with pytest.raises(DataError, match="is not a whole gzip file"):
        get(name="b.gz")
    site.files[f"/{HOST}/sets/b.gz"] = packed
    assert get(name="b.gz").path.read_bytes() == packed


def test_a_page_for_people_is_not_taken_for_the_file(get: Get, site: Site) -> None:
    site.faults[PATH] = [other(b"<html>log in</html>", Content_Type="text/html; charset=utf-8")]
    with pytest.raises(DataError, match="is a page for people and not the file"):
        get()


def test_an_answer_that_is_packed_is_refused(get: Get, site: Site) -> None:
    site.faults[PATH] = [other(gzip.compress(CONTENT), Content_Encoding="gzip")]
    with pytest.raises(DataError, match="is sent compressed as gzip"):
        get()


def test_there_must_be_room_before_the_first_byte(get: Get, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Usage(NamedTuple):
        free: int

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(999_999))
    with pytest.raises(DiskFullError, match=r"has 1 MB free, and a.bin needs 1 MB; make room, and the same .* folder with --to"):
        get()
    assert not part_path(tmp_path / "a.bin").exists()


def test_a_disk_that_fills_up_keeps_what_it_took_and_is_continued(
    get: Get, site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Full(io.FileIO):
        """A file on a disk with room for 300,001 bytes: the last write that fits is a short one."""

        def write(self, block: Any) -> int:
            room = 300_001 - self.tell()
            if not room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(bytes(block)[:room])

    real = open
    monkeypatch.setattr(transfer, "open", lambda path, mode, **more: (Full if mode == "ab" else real)(path, mode), raising=False)
    with pytest.raises(
        DiskFullError, match=r"No space left on device after 300,001 bytes, which are kept; make room, and the same command"
    ):
        get()
    assert part_path(tmp_path / "a.bin").read_bytes() == CONTENT[:300_001]
    monkeypatch.undo()
    assert get(checksum=checksum(CONTENT)).path.read_bytes() == CONTENT
    assert site.ranges(PATH) == ["", "bytes=300001-"]


def test_a_file_that_was_whole_when_the_process_ended_is_not_asked_for_again(get: Get, site: Site) -> None:
    get(checksum=checksum(CONTENT))
    assert get(checksum=checksum(CONTENT)).path.read_bytes() == CONTENT
    assert len(site.asked) == 1


def test_a_part_that_turns_out_to_be_the_whole_is_not_asked_for_again(get: Get, site: Site, tmp_path: Path) -> None:
    get()
    state = tmp_path / ".a.bin.part.json"
    state.write_text(state.read_text().replace("1000000", "null"))
    assert get(retries=0).path.read_bytes() == CONTENT
    assert site.ranges(PATH) == ["", "bytes=1000000-"]


@pytest.mark.parametrize(
    "state", ["", "{", "[]", '{"address": 1}', '{"address": "https://elsewhere.example.org/x", "etag": "", "modified": "", "total": 5}']
)
def test_a_part_of_which_nothing_is_known_begins_anew(get: Get, site: Site, tmp_path: Path, state: str) -> None:
    part_path(tmp_path / "a.bin").write_bytes(b"other")
    (tmp_path / ".a.bin.part.json").write_text(state)
    assert get().path.read_bytes() == CONTENT
    assert site.ranges(PATH) == [""]


def test_the_end_of_the_command_ends_a_file_and_keeps_its_part(get: Get, site: Site, pauses: Pauses, tmp_path: Path) -> None:
    def stop(handler: Handler, content: bytes) -> None:
        cut(600_000)(handler, content)
        pauses.set()

    site.faults[PATH] = [cut(100_000), stop]
    with pytest.raises(StoppedError):
        get()
    part = part_path(tmp_path / "a.bin").read_bytes()
    assert len(part) >= 100_000 and CONTENT.startswith(part)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(max_size=400),
    faults=st.lists(st.tuples(st.sampled_from(["cut", "no_ranges", "busy", "changed"]), st.integers(0, 400)), max_size=6),
)
def test_whatever_happens_on_the_way_the_file_is_one_that_the_server_had(
    content: bytes, faults: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = {"cut": cut, "no_ranges": no_ranges, "busy": lambda n: status(503), "changed": changed}
    folder, stop = tmp_path_factory.mktemp("any"), Pauses()
    with serving(Site({PATH: content}, {PATH: [made[name](count) for name, count in faults]})) as site:
        source = Source(mirror_of(site.address, "--mirror"), 30.0, stop)
        attempts = Attempts(10, stop, lambda text: None)
        file = RemoteFile(f"https://{HOST}/sets/a.bin", "a.bin")
        flow: list[int] = []
        try:
            received = Transfer(file, folder / "a.bin", source, attempts, flow.append, lambda total: None).receive()
        except DataError as error:
            assert "changes again and again" in str(error)
            return
        # One of the two that the server had, whole.
        assert received.path.read_bytes() in (content, bytes(255 - byte for byte in content))
        assert sum(flow) == received.size == len(content)


def changed(after: int) -> Any:
    """Cut the answer, and have another file from then on."""

    def fault(handler: Handler, content: bytes) -> None:
        cut(after)(handler, content)
        handler.site.files[PATH] = bytes(255 - byte for byte in content)

    return fault
