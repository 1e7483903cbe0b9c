"""Numbers have one form wherever they are shown, and no other module has a form of its own."""

from __future__ import annotations

import ast
import math

import pytest

from overnight import display
from tests.test_structure import sources


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (display.share(0.1456), "14.6 %"),
        (display.share(0.69, scale=1), "0.7 %"),
        (display.share(None), "-"),
        (display.points(0.0084), "0.8"),
        (display.number(1800, 0), "1,800"),
        (display.measure("mlm_accuracy", 0.1456), "14.6 %"),
        (display.measure("accuracy of the unit alone", 0.5), "50.0 %"),
        (display.measure("f1", 69.0, display.scale_of("squad")), "69.0 %"),
        (display.measure("spearman", 0.5834), "58.3"),
        (display.measure("bits_per_character", 2.34567), "2.346"),
        (display.measure("mlm_loss", math.nan), "nan"),
        (display.measures({"mlm_loss": 5.6764, "mlm_accuracy": 0.1439}), "mlm loss 5.676  mlm accuracy 14.4 %"),
        (display.duration(59.4), "59 s"),
        (display.duration(3599.6), "1 h 00 min"),
    ],
)
def test_a_number_has_its_form(shown: str, text: str) -> None:
    assert shown == text


def own_percents(text: str) -> list[int]:
    """Lines in which a module makes a per cent itself: `{...:.1%}`, or a placeholder with decimals and ` %` after it."""
    found = []
    for node in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.JoinedStr)):
        for part, after in zip(node.values, [*node.values[1:], None], strict=True):
            form = ast.unparse(part.format_spec) if isinstance(part, ast.FormattedValue) and part.format_spec else ""
            follows = isinstance(after, ast.Constant) and str(after.value).startswith(" %")
            if "%" in form or ("f'" in form and ".1f" in form and follows):
                found.append(node.lineno)
    return found


def test_only_one_module_makes_per_cents() -> None:
    assert own_percents('f"{x:.0%} of {y:.1f} %"') == [1, 1]
    shown = {name for name, text in sources().items() if own_percents(text) and not name.startswith("bench")}
    assert shown <= {"display"}
