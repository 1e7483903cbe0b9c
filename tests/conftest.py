"""Shared fixtures: a small prepared corpus and the smallest run on it."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pydoc_data.topics
import re
import signal
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Read by oneDNN when torch begins. Networks of tests are small and of many shapes: to make the kernel of a shape takes longer than all its products.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "20000")

import pytest
from hypothesis import settings

from overnight import config
from overnight.config import Run
from tests.recipe import change

# A suite that a script starts in the background ignores Ctrl-C, and one that nohup starts the end of its terminal; so would every process that it starts, to be
# interrupted by a test.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=50)
settings.register_profile("all", deadline=None, derandomize=True, max_examples=200)

ROOT = Path(__file__).parent.parent
CLOCK = ("seconds", "tokens_per_s", "sequences_per_s", "mfu", "data_wait_fraction", "memory_gb", "straggler_wait_fraction")
"""What the clock and the machine decide of a line of metrics: two runs that are the same differ in it."""
TOGETHER = (
    ("tests/gpu/",),
    ("tests/test_display.py", "tests/test_prose.py", "tests/test_structure.py"),
    ("tests/models/test_layer_kernels.py", "tests/models/test_recurrence_kernels.py", "tests/optim/test_kernels.py"),
)
"""Beginnings of the names of tests that one process does: what they share is made once."""
DATA = Path(os.environ.get("OVERNIGHT_DATA", ROOT.parent / "shared" / "data"))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Leave all that the imports make out of every search for garbage: a fifth of their time, and a third of a second of each training, which asks for one."""
    gc.disable()
    share_rewriting(session.config)
    result = yield
    gc.freeze()
    gc.enable()
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Give one process the files that share a process of their own, which takes longer to begin than many of their tests."""
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((beginning[0] for beginning in TOGETHER if nodeid.startswith(beginning)), super()._split_scope(nodeid))

    return Together(config, log) if config.getoption("dist") == "loadfile" else None


def share_rewriting(configuration: pytest.Config) -> None:
    """Import the tests of a process of pytest-xdist beginning with a share of its own.

    In a fresh checkout each would else rewrite the assertions of all of them at the same time, which takes longer than the rest of its imports.
    """
    process: dict[str, Any] | None = getattr(configuration, "workerinput", None)
    if process is None:
        return
    places = [(configuration.invocation_params.dir / name.partition("::")[0]).resolve() for name in configuration.args]
    files = sorted({path for place in places for path in ([place] if place.is_file() else place.rglob("test_*.py"))})
    first, count = int(process["workerid"].removeprefix("gw")), process["workercount"]
    for path in sorted(files, key=lambda path: (files.index(path) - first) % count):
        # What cannot be imported is said when it is collected.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


@pytest.fixture(scope="session", autouse=True)
def no_sync() -> Iterator[None]:
    """Let the disk take its time: no test cuts the power, and under load a sync takes long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def collect_young() -> Iterator[None]:
    """Have the end of a training look for garbage among young objects only: its end would come a quarter of a second later."""
    from overnight.engine import training_run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_run, "gc", SimpleNamespace(collect=partial(gc.collect, 1)))
        yield


@pytest.fixture(scope="session", autouse=True)
def warm_workers() -> Iterator[None]:
    """Fork the processes of a preparation, too, from the warm one: each of its stages starts some, and would import all of it in each."""
    from overnight.corpus import workers
    from tests.processes import warm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "get_context", lambda method: warm())
        yield


@pytest.fixture(scope="session")
def interpreted_by(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """What a worker's kernels compute in Triton's interpreter: interpreted_by("optim.kernels_worker")."""
    from tests.kernels import interpreting

    with interpreting(tmp_path_factory.mktemp("interpreted")) as found:
        yield found


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real texts and tasks; tests that need it are skipped without."""
    if not DATA.is_dir():
        pytest.skip(f"no real data at {DATA}; set OVERNIGHT_DATA")
    return DATA


def topics() -> dict[str, str]:
    """The language reference that ships with Python, by topic: real text that is always there."""
    return {name: re.sub(r"\*+", "", text) for name, text in sorted(pydoc_data.topics.topics.items())}


def tiny_tree(folder: Path, source: Path) -> dict[str, Any]:
    """The smallest recipe that has every part, as a mapping."""
    optim = {"name": "lamb", "lr": 0.01, "schedule": {"name": "poly", "warmup_ratio": 0.1}}
    phase = {"steps": 6, "global_batch_size": 8, "seq_len": 32, "micro_batch_size": 4, "max_predictions_per_seq": 5, "optim": optim}
    return {
        "name": "tiny",
        "out": str(folder / "run"),
        "data": {"paths": [str(source)], "dir": str(folder / "data"), "vocab_size": 600, "valid_fraction": 0.2, "workers": 1},
        "model": {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "max_position_embeddings": 48},
        "phases": {"short": phase, "long": {**phase, "steps": 4, "seq_len": 48, "optim": {**optim, "reset_moments": False}}},
        "logging": {"eval_every": 3, "eval_examples": 16, "log_every": 1},
        "checkpoint": {"save_every": 2, "keep_latest_k": 2},
        "compute": {"threads": 1, "device": "cpu"},
    }


def modern_settings(**model: Any) -> dict[str, Any]:
    """Dotted overrides that make the smallest recipe one of ModernBERT, with local and global layers and the model's own settings changed."""
    sizes = {"kind": "modernbert", "num_layers": 2, "hidden_size": 32, "num_heads": 2, "max_position_embeddings": 48}
    return {
        "model": {**sizes, "local_attention": 8, "global_attention_every": 2, **model},
        **{f"phases.{phase}.nsp": False for phase in ("short", "long")},
    }


def tiny_run(folder: Path, data: Path, overrides: Mapping[str, Any]) -> Run:
    """The smallest run, in a folder, on the prepared corpus, with dotted overrides."""
    tree = tiny_tree(folder, data.parent / "topics.jsonl")
    tree["data"]["dir"] = str(data)
    return config.build_run(change(tree, overrides))


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared folder with a vocabulary of 600 pieces; beside it lies its source, `topics.jsonl`."""
    from overnight.corpus.pipeline import prepare

    folder = tmp_path_factory.mktemp("tiny")
    source = folder / "topics.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in topics().values()), encoding="utf-8")
    run = config.build_run(tiny_tree(folder, source))
    prepare(run.data, run.data_dir, log=lambda text: None)
    return run.data_dir


@pytest.fixture(scope="session")
def pretrained(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A small run whose pretraining is done; copy its folder before changing anything in it."""
    import io

    from overnight.console import Line
    from overnight.engine.pretrain import pretrain

    run = tiny_run(tmp_path_factory.mktemp("pretrained"), tiny_data, {})
    pretrain(run, Line(io.StringIO()))
    return run


@pytest.fixture
def tiny(tmp_path: Path, tiny_data: Path) -> Callable[..., Run]:
    """Makes the smallest run on the prepared corpus, with dotted overrides: tiny(**{"seed": 1})."""

    def make(**overrides: Any) -> Run:
        return tiny_run(tmp_path, tiny_data, overrides)

    return make
