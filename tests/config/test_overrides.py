"""An override of the command line changes the key that it names, and no other."""

from __future__ import annotations

from pathlib import Path

from overnight import config
from overnight.config import Optim


def test_an_override_changes_one_of_several_phases_that_an_alias_of_yaml_makes_alike(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("name: x\nphases: {short: &same {steps: 100, global_batch_size: 64, optim: {name: lamb}}, long: *same}\n")
    run = config.load_run(str(path), ["phases.short.steps=7", "phases.long.optim.lr=0.5"])
    assert [phase.steps for phase in run.phases.values()] == [7, 100]
    assert [phase.optim.lr for phase in run.phases.values()] == [Optim.lr, 0.5]
