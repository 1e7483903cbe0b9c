"""How far the files of a download are, as a line or a picture with a bar for each."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from overnight.console import Line, Status
from overnight.download.jobs import Job

_SPEED_OVER = 10.0
# Seconds of work before there is anything to show.
_QUIET = 1.0


class DownloadProgress:
    """The progress of a download; it begins now.

    Args:
        line: where it is shown.
    """

    def __init__(self, line: Line) -> None:
        self._line, self._began = line, time.monotonic()
        self._samples: deque[tuple[float, int]] = deque([(self._began, 0)])

    def show(self, jobs: Sequence[Job]) -> None:
        """Show how far the files are: megabytes of all and of those under way, speed, and the time that is left."""
        done, total = sum(job.done for job in jobs), sum(max(job.total, job.done) for job in jobs)
        now = time.monotonic()
        if not total or now - self._began < _QUIET:
            return
        self._samples.append((now, done))
        while len(self._samples) > 2 and now - self._samples[0][0] > _SPEED_OVER:
            self._samples.popleft()
        speed = (done - self._samples[0][1]) / max(now - self._samples[0][0], 1e-3)
        steps = {"MB": (_whole(done), _whole(total))}
        steps |= {job.name: (_whole(job.done), _whole(max(job.total, job.done))) for job in jobs if job.state == "under way"}
        left = {"MB": (total - done) / speed} if speed > 0 else {}
        files = f"{sum(job.state == 'done' for job in jobs)} of {len(jobs)}"
        self._line.update(Status("MB", steps, left, {"files": files, "speed": f"{speed / 1e6:,.1f} MB/s"}))


def _whole(count: int) -> int:
    return -(-count // 1_000_000)
