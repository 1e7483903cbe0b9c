"""A fine-tuned task is known by a link to its folder, and where its run is asked for, that run is named."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import overnight
from overnight.config import BertRun, stored_run
from overnight.errors import UserError
from overnight.interop.sources import read_source


@pytest.mark.parametrize("linked", ["from outside", "from its run"])
def test_the_folder_of_a_task_is_known_by_a_link(linked: str, trained_run: BertRun, tmp_path: Path) -> None:
    shutil.copytree(trained_run.run_dir, tmp_path / "run")
    task, link = tmp_path / "run" / "finetune" / "classes", tmp_path / "link"
    if linked == "from its run":
        link = task
        task = task.rename(tmp_path / "elsewhere")
    link.symlink_to(task)
    found = overnight.load(link)
    assert (found.task, found.kind) == ("classes", "classification")


def test_where_a_run_is_asked_for_a_link_to_a_task_is_answered_with_the_run_that_it_is_in(
    trained_run: BertRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to(trained_run.run_dir / "finetune" / "classes")
    for ask in (read_source, lambda name: stored_run(Path(name))):
        with pytest.raises(
            UserError, match=re.escape(f"link: is a fine-tuned task; name its run folder, {trained_run.run_dir.resolve()}") + "$"
        ):
            ask("link")
