"""Lars, Lamb and Lans against trajectories that were computed by the formulas in float64."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.optim.problem import CLASSES, VECTORS, vectors

CASES = sorted(json.loads(VECTORS.read_text(encoding="utf-8"))["cases"]) if VECTORS.is_file() else ["(no vectors)"]


def tensors(values: list[Any]) -> list[Tensor]:
    return [torch.tensor(value, dtype=torch.float64) for value in values]


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_matches_the_vectors_to_1e_12(name: str, foreach: bool) -> None:
    data = vectors()
    case, settings = data["cases"][name], dict(data["cases"][name]["settings"])
    make = CLASSES[settings.pop("optimizer")]
    params, a, b = (tensors(data[key]) for key in ("x0", "A", "B"))
    each = {key: settings.pop(key) for key in list(settings) if isinstance(settings[key], list) and key != "betas"}
    groups = [{"params": [p], **{key: values[i] for key, values in each.items()}} for i, p in enumerate(params)]
    if "betas" in settings:
        settings["betas"] = tuple(settings["betas"])
    optimizer = make(groups if each else params, foreach=foreach, **settings)
    assert data["steps"] == len(case["lr"]) == 20
    for step, lr in enumerate(case["lr"]):
        for p, a_i, b_i, noise in zip(params, a, b, tensors(data["noise"][step]), strict=True):
            p.grad = a_i * (p - b_i) + noise
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    for p, end in zip(params, tensors(case["end"]), strict=True):
        torch.testing.assert_close(p, end, rtol=1e-12, atol=1e-12)


def test_every_optimizer_has_cases() -> None:
    assert {case["settings"]["optimizer"] for case in vectors()["cases"].values()} == set(CLASSES)
