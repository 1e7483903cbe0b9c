"""The files around the package agree with it and with each other: workflows, hooks, citation, documentation site."""

from __future__ import annotations

import pydoc
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import overnight
import overnight.optim
from tests.conftest import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def load(path: str | Path) -> Any:
    """A YAML file of the project."""
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def project() -> dict[str, Any]:
    """The table of pyproject.toml that describes the package."""
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return found


def pins() -> dict[str, str]:
    """The versions of constraints.txt by name."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M))


def targets() -> set[str]:
    """The targets of the Makefile."""
    return set(re.findall(r"^([a-z-]+):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    """All steps of all jobs."""
    return list(chain.from_iterable(job.get("steps", []) for job in workflow["jobs"].values()))


def unknown_targets(commands: str) -> list[str]:
    """What follows `make` in shell commands and is no target."""
    return [name for name in re.findall(r"^\s*make +([\w-]+)", commands, re.M) if name not in targets()]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_targets_that_exist_and_may_only_read_by_default(path: Path) -> None:
    workflow = load(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert all(("run" in step) != ("uses" in step) for step in steps(workflow))
    assert all(re.fullmatch(r"[\w./-]+@[\w./]+", step["uses"]) for step in steps(workflow) if "uses" in step)
    assert unknown_targets("\n".join(step["run"] for step in steps(workflow) if "run" in step)) == []
    needed = {name for job in workflow["jobs"].values() for name in [job.get("needs", [])] if isinstance(name, str)}
    assert needed <= set(workflow["jobs"])
    assert all((ROOT / job["uses"]).is_file() for job in workflow["jobs"].values() if "uses" in job)


def test_an_unknown_target_is_found() -> None:
    assert unknown_targets("make lint PYTHON=python\nmake lnit") == ["lnit"]


def test_the_tests_run_on_every_python_and_on_the_lowest_and_the_highest_torch_that_are_allowed() -> None:
    about = project()["project"]
    matrix = load(".github/workflows/tests.yml")["jobs"]["tests"]["strategy"]["matrix"]
    pythons = [name.rsplit(" ", 1)[1] for name in about["classifiers"] if re.search(r"Python :: 3\.\d+$", name)]
    assert matrix["python"] == pythons
    assert about["requires-python"] == f">={pythons[0]}"
    (torch,) = (r for text in about["dependencies"] if (r := Requirement(text)).name == "torch")
    low, high = (Version(text) for text in matrix["torch"])
    allowed = {spec.operator: Version(spec.version) for spec in torch.specifier}
    assert allowed == {">=": low, "<": Version(f"{high.major}.{high.minor + 1}")}


def test_the_hooks_check_with_the_versions_of_the_constraints() -> None:
    ruff, local = load(".pre-commit-config.yaml")["repos"]
    assert ruff["rev"] == f"v{pins()['ruff']}"
    # What is in .venv has the versions of constraints.txt.
    assert [hook["entry"] for hook in local["hooks"]] == [".venv/bin/pyrefly check"] and "pyrefly" in pins()


def release_check(folder: Path, tag: str) -> subprocess.CompletedProcess[str]:
    """What the release workflow says of a tag, in a folder with the package's version, changelog and citation."""
    (step,) = (step for step in steps(load(".github/workflows/release.yml")) if step.get("name", "").startswith("Check that"))
    script = step["run"].replace("$(python ", f"$({sys.executable} ")
    environment = {"GITHUB_REF_NAME": tag, "PATH": "/usr/bin:/bin"}
    return subprocess.run(["bash", "-e", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_tag_is_released_only_if_package_changelog_and_citation_name_its_version(tmp_path: Path) -> None:
    (tmp_path / "overnight").mkdir()
    (tmp_path / "overnight" / "__init__.py").write_text('__version__ = "1.2.3"\n', encoding="utf-8")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.3 - 2026-12-01\n", encoding="utf-8")
    (tmp_path / "CITATION.cff").write_text("title: x\nversion: 1.2.3\n", encoding="utf-8")
    assert release_check(tmp_path, "v1.2.3").returncode == 0
    assert "the tag is v1.2.4 and overnight.__version__ is 1.2.3" in release_check(tmp_path, "v1.2.4").stdout
    (tmp_path / "CITATION.cff").write_text("title: x\nversion: 1.2.30\n", encoding="utf-8")
    assert "CITATION.cff" in release_check(tmp_path, "v1.2.3").stdout
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n", encoding="utf-8")
    refused = release_check(tmp_path, "v1.2.3")
    assert refused.returncode == 1 and "CHANGELOG.md has no heading" in refused.stdout


def test_the_citation_names_this_version_and_license() -> None:
    found = load("CITATION.cff")
    assert (found["version"], found["license"]) == (overnight.__version__, project()["project"]["license"])
    assert {"cff-version", "message", "title", "authors"} <= set(found)


def test_a_bug_report_must_bring_what_the_doctor_says() -> None:
    (field,) = (field for field in load(".github/ISSUE_TEMPLATE/bug.yml")["body"] if field["id"] == "doctor")
    assert "`overnight doctor`" in field["attributes"]["label"] and field["validations"]["required"]


def test_coverage_has_a_floor() -> None:
    coverage = project()["tool"]["coverage"]
    assert coverage["run"]["source"] == ["overnight"]
    assert 50 <= coverage["report"]["fail_under"] <= 100


def pages(nav: Any) -> list[str]:
    """All files of a navigation, however deep."""
    if isinstance(nav, str):
        return [nav]
    return list(chain.from_iterable(map(pages, nav.values() if isinstance(nav, dict) else nav)))


def test_the_site_has_every_page_of_docs_once_and_no_other() -> None:
    listed = pages(load("mkdocs.yml")["nav"])
    assert sorted(listed) == sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))


def test_the_reference_names_what_there_is_and_every_optimizer() -> None:
    named = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.M)
    assert [name for name in named if pydoc.locate(name) is None] == []
    assert {f"overnight.optim.{name}" for name in overnight.optim.__all__} <= set(named)


def test_the_links_between_pages_lead_somewhere() -> None:
    lost = [
        f"{path.name}: {target}"
        for path in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8"))
        if not (path.parent / target).exists()
    ]
    assert lost == []


def test_the_glossary_is_in_alphabetical_order_and_says_each_term_once() -> None:
    terms = [term.lower() for term in re.findall(r"^\| \*\*(.+?)\*\*", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.M)]
    assert len(terms) > 20 and terms == sorted(set(terms))


def test_a_source_distribution_has_all_that_its_tests_read() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("is no checkout")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    # What setuptools takes by itself.
    names = {file.partition("/")[0] for file in files} - {"", "overnight", "pyproject.toml", "LICENSE", "MANIFEST.in"}
    lines = [line.split() for line in (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()]
    named = [name for word, *patterns in lines if word in ("graft", "include") for name in patterns]
    assert sorted(name for name in names if not any(fnmatch(name, pattern) for pattern in named)) == []
