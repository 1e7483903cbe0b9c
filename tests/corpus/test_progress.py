"""Lines of progress say how much is done and, while that can be told, how long is left."""

from __future__ import annotations

import pytest

from overnight.corpus import progress
from overnight.corpus.progress import Progress


def test_no_time_is_left_to_say_where_all_is_read_and_not_yet_done(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lines = [0.0], list[str]()
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    stage = Progress("read", lines.append)
    for seconds, done, fraction in ((3.0, 1e6, 0.1), (10.0, 2e6, 0.5), (20.0, 4e6, 1.0), (30.0, 5e6, 0.0)):
        clock[0] = seconds
        stage.update(done, fraction)
    assert lines == ["read: 2 MB, 0.2 MB/s, 10 s left", "read: 4 MB, 0.2 MB/s", "read: 5 MB, 0.2 MB/s"]
