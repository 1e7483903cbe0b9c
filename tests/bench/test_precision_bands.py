"""A precision whose validation loss is no number is not within the band."""

from __future__ import annotations

import math

import pytest

from benchmarks.precision_bands import farthest


def test_a_loss_that_is_no_number_is_out_of_every_band() -> None:
    reference = {10: 8.0, 100: 4.0, 110: 2.0}
    assert farthest({10: 8.8, 100: 4.02, 110: 2.0}, reference) == pytest.approx((0.005, 0.1))
    assert farthest({10: 8.0, 100: 4.0, 110: math.nan}, reference) == (math.inf, math.inf)
