"""The shape of the package: imports go downward, no-torch folders stay so, nothing is unpickled, the README tells the truth."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from overnight import config
from overnight.cli import doctor
from overnight.errors import UserError
from tests.syntax import docstring, nodes

ROOT = Path(__file__).resolve().parent.parent

# From the top down: a part may import its own row and the rows below.
LAYERS = [
    ["__main__", "cli"],
    ["bench"],
    ["evaluation", "inference"],
    ["finetune", "byte_lm", "interop", "report"],
    ["engine"],
    ["checkpoint"],
    ["distributed"],
    ["models", "optim", "batches"],
    ["tasks", "download"],
    ["console"],
    ["corpus"],
    ["run_dir"],
    ["config"],
    ["native", "machine", "signals", "state_files"],
    ["errors", "display", ""],
]
# These, and everything of ours that they import, run without torch.
NO_TORCH = [
    "config",
    "errors",
    "display",
    "state_files",
    "corpus",
    "report",
    "tasks",
    "download",
    *(f"run_dir.{name}" for name in ("atomic", "lock", "task_results")),
    *(f"finetune.{name}" for name in ("encode", "metrics", "question_answering")),
    *(f"byte_lm.{name}" for name in ("logistic", "ngrams")),
]
# Parts of torch and the standard library that unpickle what comes from another process, a port or a file; of torch.load no other name may be made.
UNPICKLE = (
    *(f"torch.distributed.{part}" for part in ("elastic", "run", "launcher", "rpc", "checkpoint", "distributed_c10d")),
    *(
        "torch.load",
        "torch.serialization",
        "torch.package",
        "torch.jit.load",
        "multiprocessing.connection.Client",
        "multiprocessing.connection.Listener",
        "multiprocessing.managers",
    ),
)
# Files of more than 400 lines, and why they are not cut.
LONG_FILES: dict[str, str] = {}
MAX_LINES = 400
LONG_PARTS = {
    "training_steps": "the loop, which is read from top to bottom",
    "Layerwise": "all that three optimizers share, in one base class",
    "Samples": "an epoch from its plan to its batches; half of it says shapes and units",
    "linear_probe": "one task from its settings to its lines of results, in order",
    "encode_task": "the functions that score a task close over its rows",
    "run_all": "the stages of a run, one after another",
}
"""Classes above `MAX_CLASS` lines and functions above `MAX_FUNCTION`, with the reason."""
MAX_CLASS, MAX_FUNCTION = 200, 60


@functools.cache
def sources() -> Mapping[str, str]:
    """Every module of the package by its name without `overnight.`, with its text."""
    found = {}
    for path in sorted((ROOT / "overnight").rglob("*.py")):
        parts = path.relative_to(ROOT / "overnight").with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path.read_text(encoding="utf-8")
    return found


def for_types_alone(node: ast.AST) -> bool:
    """Whether a node is an `if TYPE_CHECKING:` or an `if typing.TYPE_CHECKING:`."""
    test = node.test if isinstance(node, ast.If) else None
    if isinstance(test, ast.Attribute) and isinstance(test.value, ast.Name):
        return (test.value.id, test.attr) == ("typing", "TYPE_CHECKING")
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


@functools.cache
def imports(text: str) -> list[str]:
    """Dotted names that a module imports anywhere in it, but not for type checking alone."""
    found: list[str] = []
    types = [node for node in nodes(text) if isinstance(node, ast.If) and for_types_alone(node)]
    unseen = {below for node in types for statement in node.body for below in ast.walk(statement)}
    for node in nodes(text):
        if isinstance(node, ast.Import) and node not in unseen:
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node not in unseen:
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def graph(modules: Mapping[str, str]) -> dict[str, set[str]]:
    """Which of the package's modules each module imports."""

    def owner(name: str) -> str:
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name

    return {
        module: {owner(name.removeprefix("overnight").removeprefix(".")) for name in imports(text) if name.split(".")[0] == "overnight"}
        - {module}
        for module, text in modules.items()
    }


def part(module: str) -> str:
    """The part of LAYERS that a module belongs to."""
    named = [name for row in LAYERS for name in row]
    return module if module in named else module.split(".")[0]


def upward(modules: Mapping[str, str]) -> list[str]:
    """Imports that go up, or whose part has no place in LAYERS."""
    level = {name: i for i, row in enumerate(LAYERS) for name in row}
    unplaced = [f"{module} has no place in LAYERS" for module in modules if part(module) not in level]
    return unplaced or [
        f"{module} imports {other}"
        for module, others in graph(modules).items()
        for other in others
        if level[part(other)] < level[part(module)]
    ]


def circle(edges: Mapping[str, set[str]]) -> list[str]:
    """One circle of the graph, or nothing."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for other in sorted(edges.get(node, ())):
            if found := walk(other, [*path, node]):
                return found
        done.add(node)
        return []

    return next((found for node in sorted(edges) if (found := walk(node, []))), [])


def by_part(edges: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The graph of the parts."""
    found: dict[str, set[str]] = {}
    for module, others in edges.items():
        found.setdefault(part(module), set()).update(part(other) for other in others if part(other) != part(module))
    return found


def no_torch_modules(modules: Mapping[str, str]) -> list[str]:
    """The modules that must run without torch."""
    return [module for module in modules if module in NO_TORCH or part(module) in NO_TORCH]


def torch_reached(modules: Mapping[str, str]) -> list[str]:
    """No-torch modules from which an import of torch can be reached, with the module that has it."""
    edges = graph(modules)
    heavy = {module for module, text in modules.items() if any(name.split(".")[0] == "torch" for name in imports(text))}
    found = []
    for start in no_torch_modules(modules):
        seen, todo = {start}, [start]
        while todo:
            new = edges[todo.pop()] - seen
            seen |= new
            todo += new
        found += [f"{start} reaches torch in {module}" for module in sorted(seen & heavy)]
    return found


def unsafe(text: str) -> list[str]:
    """Ways to run code out of a file, or to write outside a folder, that a module uses."""
    found = [
        f"imports {name}"
        for name in imports(text)
        if name.split(".")[0] in ("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib")
        or name.startswith(UNPICKLE)
    ]
    for node in nodes(text):
        if not isinstance(node, ast.Call):
            continue
        name, keys = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
        if (name == "torch.load" or name.endswith("serialization.load")) and keys.get("weights_only") != "True":
            found.append(f"line {node.lineno}: torch.load without weights_only=True")
        if name.endswith((".extractall", ".extract", "unpack_archive")) or name in ("yaml.load", "yaml.unsafe_load", "eval", "exec"):
            found.append(f"line {node.lineno}: {name}")
        if name.endswith(("_object", "_object_list", "read_pickle", "jit.load")):
            found.append(f"line {node.lineno}: {name} unpickles")
        if keys.get("allow_pickle", "False") != "False":
            found.append(f"line {node.lineno}: allow_pickle")
    return found


def python_files() -> list[Path]:
    """Every Python file of the repository."""
    return [path for folder in ("overnight", "tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]


def test_imports_go_only_downward() -> None:
    assert upward(sources()) == []


def test_there_is_no_import_circle_between_modules_or_parts() -> None:
    edges = graph(sources())
    assert circle(edges) == []
    assert circle(by_part(edges)) == []


def test_no_torch_modules_reach_no_torch() -> None:
    modules = sources()
    assert no_torch_modules(modules)
    assert torch_reached(modules) == []


def test_no_torch_modules_and_the_command_line_import_without_loading_torch() -> None:
    names = [f"overnight.{module}" for module in [*no_torch_modules(sources()), "cli.main", "cli.doctor", "bench.measure"]]
    code = f"import importlib, sys\nfor name in {names}:\n    importlib.import_module(name)\n    assert 'torch' not in sys.modules, name"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


def test_a_training_begins_without_importing_torch_s_compiler() -> None:
    code = """
import sys
import overnight.engine.pretrain, overnight.finetune.finetune, overnight.inference.model, overnight.interop.export, torch
from overnight.optim import Lamb
weight = torch.ones(2, requires_grad=True)
optimizer = Lamb([weight])
weight.sum().backward(), optimizer.step(), optimizer.zero_grad()
assert weight.grad is None
assert not {"torch._dynamo", "transformers", "sympy"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_benchmarks_start_on_a_machine_with_only_torch_and_numpy() -> None:
    code = """
import sys
sys.modules.update({name: None for name in ("rich", "pydantic", "pyarrow", "yaml", "psutil", "tokenizers", "transformers", "plotly", "jinja2")})
from overnight.bench.measure import Row, print_result
print_result("nothing", [Row("n", 1.0, "s")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


def test_nothing_is_unpickled_extracted_or_evaluated() -> None:
    assert {name: found for name, text in sources().items() if (found := unsafe(text))} == {}


def test_every_module_has_a_docstring() -> None:
    assert [str(path.relative_to(ROOT)) for path in python_files() if not docstring(path.read_text(encoding="utf-8"))] == []
    planted = {'"""Words."""\nx = 1\n': "Words.", '"""Words."""': "Words.", "x = 1\n": None, '"""Words""" + """More."""\n': None}
    assert {text: docstring(text) for text in planted} == planted


def long_parts(source: str) -> dict[str, int]:
    """Classes above 200 lines and functions above 60, docstrings and all, with their lines."""
    found = {}
    for node in nodes(source):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > (MAX_CLASS if isinstance(node, ast.ClassDef) else MAX_FUNCTION):
                found[node.name] = lines
    return found


def test_classes_are_at_most_200_lines_and_functions_60_or_say_why() -> None:
    long = {name for path in (ROOT / "overnight").rglob("*.py") for name in long_parts(path.read_text(encoding="utf-8"))}
    assert long - LONG_PARTS.keys() == set()
    assert LONG_PARTS.keys() - long == set(), "an exception that is no longer needed"
    assert long_parts("class Planted:\n" + "    x = 1\n" * 200) == {"Planted": 201}
    assert long_parts("def planted():\n" + "    x = 1\n" * 60) == {"planted": 61}


def test_files_are_at_most_400_lines_or_say_why() -> None:
    lines = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in python_files()}
    long = {name: count for name, count in lines.items() if count > MAX_LINES}
    assert {name: count for name, count in long.items() if name not in LONG_FILES} == {}
    assert [name for name in LONG_FILES if name not in long] == [], "an exception that is no longer needed"


def test_the_checks_find_what_they_look_for() -> None:
    planted = {
        "": "",
        "engine": "from overnight.cli import main",
        "cli": "def main():\n    import overnight.engine",
        "corpus": "import overnight.optim",
        "optim": "import torch",
    }
    assert sorted(upward(planted)) == ["corpus imports optim", "engine imports cli"]
    assert circle(graph(planted)) == ["cli", "engine", "cli"]
    assert torch_reached(planted) == ["corpus reaches torch in optim"]
    assert upward({"new": ""}) == ["new has no place in LAYERS"]
    assert len(unsafe("import pickle\ntorch.load(f)\nnp.load(f, allow_pickle=True)\ntar.extractall()\nyaml.load(f)")) == 5
    assert (
        len(
            unsafe(
                "dist.broadcast_object_list(x)\ndist.all_gather_object(x, y)\ndist.gather_object(x)\nrecv_object_list(x)\npd.read_pickle(f)"
            )
        )
        == 5
    )
    planted_imports = ["torch.distributed.elastic.agent", "torch.distributed.checkpoint", "multiprocessing.managers"]
    assert [len(unsafe(f"import {name}")) for name in planted_imports] == [1, 1, 1]
    assert len(unsafe("from torch import load\nfrom torch.distributed import rpc")) == 2
    assert len(unsafe("torch.load(f, weights_only=False)\ntorch.serialization.load(f)\ntorch.jit.load(f)")) == 3
    assert unsafe("torch.load(f, weights_only=True)\nyaml.safe_load(f)\nfrom torch.distributed.rendezvous import rendezvous") == []


@pytest.fixture
def vocabularies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OVERNIGHT_DATA with stand-ins of the published vocabularies, so that recipes load wherever the tests run."""
    folder = tmp_path / "vocab"
    folder.mkdir()
    for name, size in (("uncased", 30522), ("cased", 28996)):
        (folder / f"bert-base-{name}-vocab.txt").write_text("".join(f"piece{i}\n" for i in range(size)), encoding="utf-8")
    monkeypatch.setenv("OVERNIGHT_DATA", str(tmp_path))


@pytest.mark.usefixtures("vocabularies")
@pytest.mark.parametrize("name", sorted(config.recipes()))
def test_every_shipped_recipe_loads_and_survives_saving(name: str) -> None:
    import yaml

    run = config.load_run(name)
    assert config.build_run(yaml.safe_load(config.run_yaml(run))) == run


def test_the_demo_is_a_shipped_recipe() -> None:
    assert "demo" in config.recipes()


def test_an_unknown_recipe_is_refused() -> None:
    with pytest.raises(UserError, match="no recipe 'dmeo'"):
        config.load_run("dmeo")


def requirements() -> dict[str, list[Requirement]]:
    """What pyproject.toml asks for, by extra; the package's own extras spelled out nowhere else are left out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: [r for text in texts if (r := Requirement(text)).name != "overnight"] for extra, texts in groups.items()}


def test_constraints_pin_every_requirement_inside_its_range() -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pins = {name.lower(): Version(version) for name, version in re.findall(r"^([\w.-]+)==(\S+)$", text, re.M)}
    wanted = [requirement for group in requirements().values() for requirement in group]
    assert [str(r) for r in wanted if r.name.lower() not in pins or pins[r.name.lower()] not in r.specifier] == []
    assert [line for line in text.splitlines() if not re.fullmatch(r"#.*|[\w.-]+==[\w.]+", line)] == []


def test_an_installation_for_everyone_leaves_torchao_out() -> None:
    """transformers imports it wherever it is installed, slowly and with warnings; only who trains in fp8 needs it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    wanted, todo = set(), ["dev"]
    while todo:
        for requirement in map(Requirement, extras[todo.pop()]):
            wanted.add(requirement.name)
            todo += requirement.extras if requirement.name == "overnight" else []
    assert "transformers" in wanted and "torchao" not in wanted
    assert "torchao" in {Requirement(text).name for text in extras["fp8"]}


def test_the_doctor_knows_every_requirement() -> None:
    wanted = {
        extra: tuple(r.name for r in group)
        for extra, group in requirements().items()
        if extra not in ("all", "dev", "docs", "peer", "plots", "test")
    }
    assert tuple(wanted.pop("")) == doctor.REQUIRED
    assert wanted == doctor.EXTRAS
