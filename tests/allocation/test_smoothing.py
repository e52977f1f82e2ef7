from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lab.allocation.shapes import FUNCTIONS, smooth

X = numpy.array([0.25, 0.75, 1.0, 2.0])  # mean 1, population deviation sqrt(0.40625)
HALF = 0.5 * 0.40625**0.5


def test_formulas() -> None:
    assert smooth(X, "sqrt") == pytest.approx([0.5, 0.75**0.5, 1, 2**0.5])
    assert smooth(X, "log") == pytest.approx([numpy.log(2.25), numpy.log(4.75), numpy.log(6), numpy.log(11)])
    delta = 1 + HALF
    assert smooth(X, "huber") == pytest.approx([0.25, 0.75, 1, delta + (delta * (2 - delta)) ** 0.5])
    assert smooth(X, "clip") == pytest.approx([1 - HALF, 0.75, 1, 1 + HALF])
    assert smooth(X, "none") == pytest.approx(X)


@given(
    st.lists(st.just(0.0) | st.floats(1e-9, 1e6), min_size=1, max_size=9),
    st.sampled_from(sorted(FUNCTIONS)),
    st.floats(1e-3, 1e3),
)
def test_order_stays_nothing_is_zero_and_units_do_not_matter(values: list[float], name: str, unit: float) -> None:
    x = numpy.array(values)
    found = smooth(x, name)
    assert (found > 0).all()
    assert (numpy.diff(found[numpy.argsort(x)]) >= -1e-12).all()
    assert smooth(x * unit, name) == pytest.approx(found, rel=1e-6)
