from __future__ import annotations

import re
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lab.allocation.coverage import Alignment, align, alignment_of, check_fits
from moe_lab.allocation.problem import RatioTooLarge, RatioTooSmall
from moe_lab.errors import UserError

ORDERS = ("remainder", "scores")
BUDGETS = numpy.array([300, 130, 100, 260, 500, 384])


def aligned(kept: Any, width: int, block: int, *, least: int | None = None, order: str = "remainder") -> list[int]:
    scores = numpy.tile(numpy.arange(width, 0.0, -1), (len(kept), 1))
    rules = Alignment(block, block if least is None else least, order)
    return align({0: numpy.array(kept)}, {0: scores}, rules)[0].tolist()


def test_golden_example() -> None:
    found = aligned(BUDGETS, 512, 128)
    assert found == [384, 128, 0, 256, 512, 384]
    assert sum(found) == 1664 and BUDGETS.sum() == 1674


def test_order_of_scores() -> None:
    scores = numpy.array([[9, 8, 1, 1], [9, 8, 7, 1], [9, 8, 1, 0]], dtype=float)
    kept = {0: numpy.array([3, 3, 2])}
    assert align(kept, {0: scores}, Alignment(2, 2, "remainder"))[0].tolist() == [4, 2, 2]
    assert align(kept, {0: scores}, Alignment(2, 2, "scores"))[0].tolist() == [2, 4, 2]


def reference(kept: list[int], lost: list[float], width: int, block: int, least: int) -> list[int]:
    """The paper's rule, one block at a time, with a second pass for what is left."""
    active = [i for i, n in enumerate(kept) if n >= least and n > 0]
    found = [kept[i] // block * block if i in active else 0 for i in range(len(kept))]
    blocks = (sum(kept) - sum(found)) // block
    while blocks and any(found[i] + block <= width for i in active):
        for i in sorted(active, key=lambda i: -lost[i]):
            if blocks and found[i] + block <= width:
                found[i] += block
                blocks -= 1
    return found


@given(
    st.lists(st.integers(0, 24), min_size=1, max_size=6),
    st.sampled_from([1, 2, 4, 5, 7, 8]),
    st.integers(0, 10),
    st.sampled_from(ORDERS),
)
def test_properties(kept: list[int], block: int, least: int, order: str) -> None:
    try:
        found = aligned(kept, 24, block, least=least, order=order)
    except RatioTooLarge:
        assert max(kept) < least or max(kept) < block
        return
    assert all(n % block == 0 and 0 <= n <= 24 for n in found)
    assert all(n == 0 for n, before in zip(found, kept, strict=True) if before < least)
    full = all(n in (0, 24 // block * block) for n in found)
    assert sum(kept) - block < sum(found) <= sum(kept) or full
    if order == "remainder":
        assert found == reference(kept, [n % block for n in kept], 24, block, least)


def test_what_is_refused() -> None:
    layers = {3: {"n_experts": 60, "width": 1408}}
    check_fits(Alignment(128, 128, "remainder"), layers, 0.0)
    check_fits(Alignment(256, 256, "remainder"), layers, 0.091)
    with pytest.raises(RatioTooSmall, match=r"align\.block=256"):
        check_fits(Alignment(256, 256, "remainder"), layers, 0.05)
    for rules, field in ((Alignment(1536, 128, "remainder"), "block=1536"), (Alignment(32, 1409, "scores"), "min_ch")):
        with pytest.raises(UserError, match=f"{re.escape(field)}.*1408"):
            check_fits(rules, layers, 0.5)
    with pytest.raises(RatioTooLarge, match=r"layer 0\b.* 7\b"):
        aligned([7, 3], 16, 8)


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (128, "align=128"),
        ({"blocks": 8}, "blocks.*block"),
        ({}, "align.block"),
        ({"block": 0}, "align.block=0"),
        ({"block": 8, "min_channels": -1}, "min_channels=-1"),
        ({"block": 8, "order": "remainders"}, "order=remainders.*remainder"),
    ],
)
def test_mistakes_in_the_setting(value: Any, field: str) -> None:
    with pytest.raises(UserError, match=field):
        alignment_of({"parameters": {"align": value}})
