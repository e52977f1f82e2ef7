"""Identity: everything that changes a result, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_lab.study.step import Part, Step, canonical, digest

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=4), json_values, max_size=5))
def test_order_of_keys_does_not_matter(document: dict[str, object]) -> None:
    assert digest(dict(reversed(document.items()))) == digest(document)


def test_nan_has_no_identity() -> None:
    with pytest.raises(ValueError):
        canonical({"ratio": float("nan")})


def step(ratio: float = 0.25, seed: int = 1, device: str = "cpu", label: str = "a") -> Step:
    read = Step("statistics", label, {"data": Part({"seed": seed})}, runtime={"device": device})
    return Step("plan", label, {"allocation": Part({"ratio": ratio})}, {"statistics": read}, {"device": device})


def test_what_changes_the_result_changes_the_id() -> None:
    assert len({step().id, step(ratio=0.5).id, step(seed=2).id}) == 3


def test_what_does_not_change_the_result_leaves_the_id() -> None:
    assert step(device="cuda", label="b").id == step().id


def test_kind_and_roles_count() -> None:
    part = Part({"x": 1})
    assert len({Step("a", "l", {"r": part}).id, Step("b", "l", {"r": part}).id, Step("a", "l", {"q": part}).id}) == 3
