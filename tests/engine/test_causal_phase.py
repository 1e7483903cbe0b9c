"""A run that first predicts the next token, then masked ones: its lines, its resumption, its evaluation and its report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from overnight.config import Run
from overnight.engine.evaluate import evaluate
from overnight.report.page import write_report
from overnight.report.summary import summary_text
from tests.conftest import modern_settings
from tests.engine.test_modernbert_training import workload
from tests.engine.test_pretrain import assert_same_run, finish, metrics, parameters, stop_after

Make = Callable[..., Run]
MATCHING = {"token_matching": 0.5, "token_matching_steps": 2, "final_token_matching": 0.2}


def settings(**more: Any) -> dict[str, Any]:
    masked = {f"phases.long.{name}": value for name, value in MATCHING.items()}
    return {**modern_settings(), "phases.short.objective": "causal", **masked, **more}


@pytest.mark.parametrize("at", [pytest.param(3, marks=pytest.mark.heavy), 6, pytest.param(8, marks=pytest.mark.heavy)])
def test_a_crash_in_or_behind_the_causal_phase_does_not_change_the_result(
    at: int, tiny: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = (tiny(**settings(precision="bf16"), out=str(tmp_path / name)) for name in ("whole", "cut"))
    finish(whole)
    stop_after(at, cut, monkeypatch)
    finish(cut)
    assert_same_run(cut, whole)


def test_each_phase_has_the_loss_of_what_it_predicts_and_the_summary_both(tiny: Make) -> None:
    run = tiny(**settings())
    finish(run)
    for kind, ends in (("train", ("_loss",)), ("eval", ("_loss", "_accuracy"))):
        for phase, names in (("short", {"clm"}), ("long", {"mlm", "match"} if kind == "train" else {"mlm"})):
            lines = [line for line in metrics(run) if line["kind"] == kind and line["phase"] == phase]
            found = {key for line in lines for key in line if key.endswith(ends)}
            assert lines and found == {f"{name}{end}" for name in names for end in ends}, (kind, phase)
    said = summary_text(run.run_dir)
    assert "next-token loss" in said and "masked-LM accuracy" in said
    page = write_report([run.run_dir], run.run_dir / "page.html").read_text(encoding="utf-8")
    assert page.count("Next-token accuracy") == page.count("Masked-LM accuracy") - 1 == 2  # the best is also at the top


def test_stopped_in_its_causal_phase_it_is_evaluated_on_masked_tokens_and_other_heads_are_as_they_began(
    tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny(**settings())
    stop_after(5, run, monkeypatch)
    found = evaluate(run, "valid")  # type: ignore[arg-type]
    assert found.phase == "short" and set(found.metrics) == {"mlm_loss", "perplexity", "mlm_accuracy"}
    began, now = workload(run).model.state_dict(), parameters(run)
    moved = {name for name, value in began.items() if not torch.equal(value, now[name])}
    assert {name for name in began if name.split(".")[0] in ("match", "pooler")} == began.keys() - moved
