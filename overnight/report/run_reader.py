"""Read a run folder: `run.yaml`, `env.json`, `metrics.jsonl`, `tasks.jsonl`, `samples.json`, `evaluation.json`. The report meets the trainer only in these files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overnight.config.load import meant, refuse_untrained
from overnight.errors import DataError
from overnight.state_files import fitted, read_json, read_lines, read_mapping, read_yaml

Record = dict[str, Any]

# Keys without which a line of its kind cannot be shown. Other kinds, and other keys, are ignored.
_NEEDED: dict[str, dict[str, type | tuple[type, ...]]] = {
    "train": {"phase": str, "global_step": int, "seconds": (int, float), "loss": (int, float)},
    "eval": {"phase": str, "global_step": int, "seconds": (int, float)},
    "tensor_norms": {"phase": str, "global_step": int, "seconds": (int, float), "tensor_norms": dict},
    "noise": {"phase": str, "global_step": int, "seconds": (int, float), "batch": int, "groups": dict},
    "phase": {"phase": str, "global_step": int, "event": str},
    "finetune": {"name": str, "seed": int, "init": str, "metric": str, "value": (int, float)},
    "linear_probe": {"name": str, "seed": int, "init": str, "metric": str, "value": (int, float)},
    "baseline": {"name": str, "method": str, "metric": str, "value": (int, float)},
    "event": {"event": str},
}
# Where they are there at all, of any kind of line.
_OPTIONAL: dict[str, type | tuple[type, ...]] = {
    "step": int,
    "global_step": int,
    "seconds": (int, float),
    "tokens": int,
    "sequences": int,
    "message": str,
    "metrics": dict,
    "rows": int,
    "task": str,
    "config_hash": str,
}


@dataclass(frozen=True)
class RunFolder:
    """What a run folder holds, as read."""

    path: Path
    settings: Record
    """The resolved recipe."""
    environment: Record | None
    """The machine, or None where `env.json` is absent."""
    records: dict[str, list[Record]]
    """Lines of `metrics.jsonl` by kind, in the order of the steps, and of `tasks.jsonl`."""
    notes: list[str] = field(default_factory=list)
    """What was found incomplete, for the reader of the report."""
    samples: Record = field(default_factory=dict)
    """What a finished run shows of itself, empty where `samples.json` is absent."""
    evaluation: Record = field(default_factory=dict)
    """Bits per character and BLiMP, empty where `evaluation.json` is absent."""
    checkpoint: str = ""
    """Name of the newest checkpoint, empty where there is none."""
    reached: tuple[str, int] = ("", 0)
    """The phase of that checkpoint, empty where it cannot be read, and the steps done in it."""
    decided: dict[str, int] = field(default_factory=dict)
    """Steps of the phases of a run with a budget by its newest decisions."""

    @property
    def name(self) -> str:
        """Return the name of the run."""
        return str(self.settings.get("name") or self.path.name)


def read_folder(path: Path) -> RunFolder:
    """Return a run folder's settings, environment and metrics.

    A cut last line, as a kill leaves it, is left out and noted.

    Raises:
        ConfigError: when it is of a run whose training has not begun.
        DataError: when the folder, `run.yaml` or `metrics.jsonl` is absent, or a file cannot be read; with the file and the line.
    """
    if not path.is_dir():
        raise DataError(f"{path}: no such run folder{meant(str(path))}")
    settings = _settings(path / "run.yaml")
    records, notes = _metrics(path / "metrics.jsonl", path / "tasks.jsonl")
    environment, samples = _shaped(path / "env.json", _Environment), _shaped(path / "samples.json", _Samples)
    if environment is None:
        notes.append("env.json is absent: the machine is not known")
    evaluation = _shaped(path / "evaluation.json", _Evaluation)
    newest = path / "checkpoints" / "latest"
    checkpoint = newest.read_text(encoding="utf-8", errors="replace") if newest.exists() else ""
    reached = _reached(newest.parent / checkpoint.strip() / "state.json") if checkpoint else ("", 0)
    decided = _decided(path / "budget.json", records["event"])
    return RunFolder(path, settings, environment, records, notes, samples or {}, evaluation or {}, checkpoint, reached, decided)


@dataclass(frozen=True)
class _Progress:
    phase: str
    step: int


@dataclass(frozen=True)
class _State:
    """What the report reads of a checkpoint's `state.json`."""

    progress: _Progress


@dataclass(frozen=True)
class _Decision:
    phase: str
    steps: int


@dataclass(frozen=True)
class _Budget:
    """What the report reads of `budget.json`."""

    decisions: list[_Decision] = field(default_factory=list)


@dataclass(frozen=True)
class _Phase:
    steps: int | None = None


@dataclass(frozen=True)
class _Task:
    task: str = ""
    seeds: list[int] = field(default_factory=list)
    random_init_seeds: int = 0


@dataclass(frozen=True)
class _Settings:
    """What the report reads of `run.yaml`; all of it may be absent."""

    name: str | None = None
    model: dict[str, Any] = field(default_factory=dict)
    compute: dict[str, Any] = field(default_factory=dict)
    phases: dict[str, _Phase] = field(default_factory=dict)
    finetune: dict[str, _Task] = field(default_factory=dict)
    linear_probe: dict[str, _Task] = field(default_factory=dict)


@dataclass(frozen=True)
class _Gpu:
    name: str = ""


@dataclass(frozen=True)
class _Cpu:
    model: str = ""
    cores: int = 0


@dataclass(frozen=True)
class _Environment:
    """What the report reads of `env.json`; all of it may be absent."""

    gpus: list[_Gpu] | None = None
    cpu: _Cpu | None = None


@dataclass(frozen=True)
class _Guess:
    token: str
    probability: float


@dataclass(frozen=True)
class _Mask:
    text: str
    word: str
    guesses: list[_Guess]


@dataclass(frozen=True)
class _Text:
    prompt: str
    text: str


@dataclass(frozen=True)
class _Counts:
    documents: int
    tokens: int


@dataclass(frozen=True)
class _Corpus:
    vocabulary: int = 0
    train: _Counts = _Counts(0, 0)
    valid: _Counts = _Counts(0, 0)
    test: _Counts = _Counts(0, 0)


@dataclass(frozen=True)
class _Samples:
    """What the report reads of `samples.json`; all of it may be absent."""

    checkpoint: str = ""
    parameters: int = 0
    corpus: _Corpus = _Corpus()
    masks: list[_Mask] = field(default_factory=list)
    texts: list[_Text] = field(default_factory=list)


@dataclass(frozen=True)
class _MaskedScore:
    bits_per_character: float
    masked_accuracy: float
    masked_tokens: int
    characters: int
    unknown: float
    word_bits_per_character: float | None = None
    word_standard_error: float | None = None


@dataclass(frozen=True)
class _Mean:
    accuracy: float
    standard_error: float | None


@dataclass(frozen=True)
class _Blimp:
    accuracy: float
    standard_error: float | None
    total: int
    ties: int
    indistinguishable: int
    fields: dict[str, _Mean]
    terms: dict[str, _Mean]
    paradigms: dict[str, float]


@dataclass(frozen=True)
class _Evaluation:
    """What the report reads of `evaluation.json`."""

    checkpoint: str
    texts: dict[str, _MaskedScore] = field(default_factory=dict)
    blimp: _Blimp | None = None


@dataclass(frozen=True)
class _Histogram:
    edges: list[float]
    counts: dict[str, list[int]]


@dataclass(frozen=True)
class _Unit:
    """What the report reads of the unit that a linear probe found to say most."""

    of: str
    number: int
    threshold: float
    above: str
    histogram: _Histogram


def _settings(path: Path) -> Record:
    if not path.exists():
        refuse_untrained(path.parent)
        raise DataError(
            f"{path} does not exist: {path.parent} is not a run folder; name one that `overnight run` or `overnight pretrain` has made"
        )
    remedy = "put back the one that belongs there"
    settings, _ = read_yaml(path, remedy)
    fitted(settings, _Settings, str(path), remedy)
    return settings


def _shaped(path: Path, kind: type) -> Record | None:
    if not path.exists():
        return None
    remedy = "remove the file to continue without it"
    found = read_mapping(path, remedy)
    fitted(found, kind, str(path), remedy)
    return found


def _reached(path: Path) -> tuple[str, int]:
    try:
        state: _State = read_json(path, _State, "")
    except DataError:  # of a checkpoint that is damaged, which the training will say
        return "", 0
    return state.progress.phase, state.progress.step


def _decided(path: Path, events: list[Record]) -> dict[str, int]:
    """Return the steps of phases by the lines of the decisions and, where these are lost, by their record."""
    try:
        record: _Budget = read_json(path, _Budget, "") if path.exists() else _Budget()
    except DataError:  # which the training will say
        record = _Budget()
    said = {event.get("phase"): event.get("steps") for event in events if event["event"] == "budget"}
    return {decision.phase: decision.steps for decision in record.decisions} | {
        phase: steps for phase, steps in said.items() if isinstance(phase, str) and isinstance(steps, int)
    }


def _metrics(path: Path, tasks: Path) -> tuple[dict[str, list[Record]], list[str]]:
    notes: list[str] = []
    records: dict[str, list[Record]] = {kind: [] for kind in _NEEDED}
    if not path.exists():
        if (path.parent / "checkpoints" / "latest").exists():
            raise DataError(f"{path}: is missing; put it back, or run `overnight pretrain {path.parent}` once, which begins another")
        raise DataError(f"{path} does not exist: nothing was trained in this folder yet; `overnight run` or `overnight pretrain` begins it")
    _read(path, "delete that line, or put the file back", records, notes)
    if tasks.exists():
        _read(tasks, "delete that line, and the task is done again, or put the file back", records, notes)
    if not any(records.values()):
        notes.append("metrics.jsonl is empty: nothing was measured yet")
    for kind in ("train", "eval", "tensor_norms", "noise"):
        records[kind] = _newest(records[kind])
    _keep_same_settings(records)
    return records, notes


def _read(path: Path, remedy: str, records: dict[str, list[Record]], notes: list[str]) -> None:
    for number, record in read_lines(path, remedy):
        if record is None:
            notes.append(f"the last line of {path.name} (line {number}) is cut and left out: the run was stopped while writing it")
            continue
        _check(record, f"{path}:{number}", remedy)
        if record["kind"] in records:
            records[record["kind"]].append(record)


def _check(record: Record, where: str, remedy: str) -> None:
    if not isinstance(record.get("kind"), str):
        raise DataError(f"{where}: is not a JSON object with a `kind`")
    for key, kinds in _NEEDED.get(record["kind"], {}).items():
        value = record.get(key)
        if not isinstance(value, kinds) or isinstance(value, bool):
            found = f"is {value!r}" if key in record else "is missing"
            raise DataError(f"{where}: {key!r} of a {record['kind']!r} line {found}")
    wrong = [key for key, kinds in _OPTIONAL.items() if key in record and not isinstance(record[key], kinds)]
    if record["kind"] in ("train", "eval"):  # numbers, but for these two
        wrong += [key for key, value in record.items() if key not in ("kind", "phase") and not _is_number(value)]
    rows = record["tensor_norms"].values() if record["kind"] == "tensor_norms" else ()
    if any(not isinstance(row, list) or len(row) != 4 or not all(map(_is_number, row)) for row in rows):
        wrong.append("tensor_norms")
    if record["kind"] == "noise" and not all(map(_is_number, record["groups"].values())):
        wrong.append("groups")
    if wrong:
        raise DataError(f"{where}: {wrong[0]!r} of a {record['kind']!r} line is of a type that it never has")
    if record.get("unit") is not None:
        fitted(record["unit"], _Unit, f"{where}: unit", remedy)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _newest(records: list[Record]) -> list[Record]:
    """Return one line a step, the last that was written: a run that went back to an older checkpoint repeats steps."""
    by_step = {record["global_step"]: record for record in records}
    return [by_step[step] for step in sorted(by_step)]


def _keep_same_settings(records: dict[str, list[Record]]) -> None:
    """Keep of each task the lines that were made with the settings, and from the checkpoint, of its last seed; before there is one, of its last baseline."""
    kinds = ("baseline", "finetune", "linear_probe")
    newest = {record["name"]: record.get("config_hash") for kind in kinds for record in records[kind]}
    for kind in kinds:
        records[kind] = [record for record in records[kind] if record.get("config_hash") == newest[record["name"]]]
