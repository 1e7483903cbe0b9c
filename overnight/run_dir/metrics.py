"""What a run writes of itself: metrics.jsonl always, TensorBoard and Weights & Biases where they are asked for."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from overnight.config import Run, to_tree
from overnight.errors import DataError, UserError
from overnight.run_dir.atomic import naming, write_json, write_whole
from overnight.state_files import parse_json, read_json

# Seconds that Weights & Biases may take to begin and to end, before the run continues without the network.
_BEGIN_WITHIN, _END_WITHIN = 30.0, 60.0


def _values(line: bytes) -> dict[str, Any] | None:
    """Return what a line of metrics says; None where it is none."""
    try:
        values = parse_json(line.decode())
    except ValueError:
        return None
    return values if isinstance(values, dict) else None


class Logger(Protocol):
    """A place besides metrics.jsonl that is shown the same values."""

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Show values by name (`train/loss`) of a step, counted over all phases."""

    def back_to(self, step: int) -> None:
        """Resume from this step: what came after it is written again."""

    def close(self) -> None:
        """Write what is not written yet."""


class Metrics:
    """The run's metrics.jsonl: one JSON object a line, in the order of the steps.

    Args:
        path: the file; made if absent. None writes nothing, where another process does.
        keep_bytes: forget what was written after this many bytes, because the run resumes there.
        loggers: are shown the values of `train` and `eval` lines.
        step: counted over all phases, at which the run resumes.
    """

    def __init__(self, path: Path | None, keep_bytes: int = 0, loggers: Sequence[Logger] = (), step: int = 0) -> None:
        self._path, self._loggers = path, loggers
        self.lost = ""
        """What is missing of the lines that it was opened with, in words; empty where nothing is, or a line `metrics_lost` of that step says so."""
        self._file = self._open(keep_bytes, step)

    def _open(self, keep_bytes: int, step: int) -> FileIO:
        if self._path is not None:
            self._path.touch()
            content = self._path.read_bytes()
            end = content.rfind(b"\n", 0, keep_bytes) + 1
            found = [(line, values) for line in content[:end].split(b"\n")[:-1] if (values := _values(line)) is not None]
            kept = b"".join(line + b"\n" for line, _ in found)
            # The line that says how long the checkpoint of these bytes took can only follow them.
            saved = content[end : content.find(b"\n", end) + 1]
            saved = saved if b'"event": "checkpoint_saved"' in saved else b""
            if len(kept) < end:
                write_whole(self._path, [kept, saved])
            else:
                os.truncate(self._path, end + len(saved))
            said = any((values.get("event"), values.get("global_step")) == ("metrics_lost", step) for _, values in found)
            if len(kept) < keep_bytes and not said:
                last = found[-1][1].get("global_step", 0) if found else 0
                self.lost = (
                    f"{self._path}: has {len(kept):,} of the {keep_bytes:,} bytes that the checkpoint knows, the last line of step {last:,}; "
                    "what is missing is missing in the curves and tables of the report, and in nothing else"
                )
        return FileIO(self._path or os.devnull, "a")

    def write(self, kind: str, **values: Any) -> None:
        """Append one line."""
        rest = memoryview((json.dumps({"kind": kind, **values}) + "\n").encode())
        with naming(self._path):
            while rest:  # a disk that fills up takes the beginning of it first
                rest = rest[self._file.write(rest) :]
        if kind in ("train", "eval"):
            numbers = {f"{kind}/{k}": v for k, v in values.items() if isinstance(v, int | float) and k not in ("step", "global_step")}
            for logger in self._loggers:
                logger.add(numbers, values["global_step"])

    def sync(self) -> int:
        """Let what was written survive a power cut; return bytes written so far."""
        if self._path is not None:
            with naming(self._path):
                os.fsync(self._file.fileno())
        return self._file.tell()

    def back_to(self, keep_bytes: int, step: int) -> None:
        """Forget what was written after this many bytes, which was the size at this step (of all phases)."""
        self._file.close()
        self._file = self._open(keep_bytes, step)
        for logger in self._loggers:
            logger.back_to(step)

    def close(self) -> None:
        """Close the file and the loggers."""
        self._file.close()
        for logger in self._loggers:
            logger.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def open_loggers(run: Run, step: int, log: Callable[[str], None]) -> list[Logger]:
    """Return the loggers that a run asks for, to resume from a step.

    Args:
        step: counted over all phases; 0 at the start.
        log: called with where a logger writes, if that is not where it should.

    Raises:
        UserError: where one is not installed.
    """
    loggers: list[Logger] = []
    if run.logging.tensorboard:
        loggers.append(TensorBoard(run.run_dir / "tensorboard", step))
    if run.logging.wandb_project:
        loggers.append(WeightsAndBiases(run, log))
    return loggers


class TensorBoard:
    """TensorBoard events in a folder; those of an earlier process after `step` are withdrawn."""

    def __init__(self, folder: Path, step: int) -> None:
        self._folder = folder
        self._writer = self._open(step)

    def _open(self, step: int) -> Any:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(
                "logging.tensorboard = True: needs the extra `tensorboard`: pip install 'overnight[tensorboard]', or leave it out"
            ) from None
        return SummaryWriter(str(self._folder), purge_step=step + 1)  # type: ignore[no-untyped-call]

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Write values as scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def back_to(self, step: int) -> None:
        """Withdraw the events after a step."""
        self._writer.close()
        self._writer = self._open(step)

    def close(self) -> None:
        """Close the file of events."""
        self._writer.close()


class WeightsAndBiases:
    """One run of Weights & Biases for a run folder, however often it is resumed; its id lies in `wandb.json`.

    Without a key or the network it records offline, in `wandb/` of the run folder, for `wandb sync`; so it does with WANDB_MODE=offline.

    Args:
        run: its `logging.wandb_project` names the project.
        log: called when it records offline unasked.
    """

    def __init__(self, run: Run, log: Callable[[str], None]) -> None:
        try:
            import wandb
        except ImportError:
            raise UserError(
                f"logging.wandb_project = {run.logging.wandb_project!r}: needs the extra `wandb`: pip install 'overnight[wandb]', or leave it out"
            ) from None

        self._log = log

        def begin(mode: str | None) -> Any:
            return wandb.init(
                project=run.logging.wandb_project,
                id=_wandb_id(run.run_dir / "wandb.json"),
                name=run.name,
                config=to_tree(run),
                dir=run.run_dir,
                resume="allow",
                allow_val_change=True,
                mode=mode,
                # Its capture of the terminal would tear the live view.
                settings=wandb.Settings(console="off", silent=True, init_timeout=_BEGIN_WITHIN, finish_timeout=_END_WITHIN),
            )

        try:
            # Without a key, `init` would ask for one on a terminal, and the training would wait.
            if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.login(prompt=False):
                raise wandb.Error("no API key is configured; `wandb login` stores one")
            self._run: Any = begin(None)
        except wandb.Error as error:
            place = run.run_dir / "wandb"
            log(f"Weights & Biases: {_without_key(error)}. Recording offline in {place}; `wandb sync {place}/offline-run-*` sends it later")
            self._run = begin("offline")

    def add(self, values: Mapping[str, float], step: int) -> None:
        """Log values; those of a step that it has already are equal after a resume, and are not sent again."""
        if self._run is None or step < self._run.step:
            return
        try:
            self._run.log(dict(values), step=step)
        except Exception as error:  # Whatever its service died of, the training has lost nothing.
            self._log(f"Weights & Biases: {_without_key(error)}. The training continues without it")
            self._run = None

    def back_to(self, step: int) -> None:
        """Do nothing: its steps only grow, so what is trained again shows from the step that was reached."""

    def close(self) -> None:
        """Send what is left."""
        if self._run is not None:
            self._run.finish()


def _wandb_id(path: Path) -> str:
    if not path.exists():
        write_json(path, {"id": secrets.token_hex(4)})
    found: dict[str, str] = read_json(path, dict[str, str], remedy := "delete it, and another run of Weights & Biases is begun")
    if "id" not in found:
        raise DataError(f"{path}: has no id; {remedy}")
    return found["id"]


def _without_key(error: Exception) -> str:
    """Return the first line of an error, in which no key can stand."""
    line = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
    return line.replace(os.environ.get("WANDB_API_KEY") or "\0", "...")
