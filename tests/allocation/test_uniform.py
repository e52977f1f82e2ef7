from __future__ import annotations

import re

import pytest
import tiny
from hypothesis import assume, given
from hypothesis import strategies as st

from moe_lab.allocation import ALLOCATIONS, allocate, check, get
from moe_lab.allocation.problem import limits
from moe_lab.allocation.uniform import same_share
from moe_lab.config import AllocationConfig
from moe_lab.errors import UserError
from moe_lab.pruning.plan import make_plan


def uniform(experts: dict[int, int], ratio: float, *, multiple_of: int = 1, **router: int) -> dict[int, int]:
    layers = {
        layer: {"n_experts": count, "n_group": 1, "topk_group": None, **router} for layer, count in experts.items()
    }
    return same_share(limits(layers, multiple_of), ratio)


@pytest.mark.parametrize(("count", "ratio", "removed"), [(64, 0.25, 16), (128, 0.5, 64), (60, 0.25, 15), (60, 0.5, 30)])
def test_published_counts(count: int, ratio: float, removed: int) -> None:
    assert uniform({0: count, 3: count}, ratio, top_k=6) == {0: removed, 3: removed}


@given(
    st.integers(2, 300),
    st.floats(0, 1, exclude_max=True),
    st.integers(1, 8),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4]),
)
def test_budget_is_kept_or_the_feasible_ratio_named(
    count: int, ratio: float, top_k: int, multiple_of: int, n_group: int
) -> None:
    def run(value: float) -> int:
        return uniform({0: count}, value, top_k=top_k, multiple_of=multiple_of, n_group=n_group)[0]

    assume(count % n_group == 0)
    try:
        removed = run(ratio)
    except UserError as error:
        found = re.search(r": (\S+) is the (largest|smallest|nearest) feasible", str(error))
        if found is None:
            assert "choose a smaller multiple" in str(error)
            return
        named = float(found[1])
        assert run(named) >= 0
        assert (named < ratio) == (found[2] == "largest")
        return
    assert 0 <= removed <= int(count * ratio)
    assert int(count * ratio) - removed < multiple_of * n_group
    assert (count - removed) % multiple_of == 0
    make_plan({0: [0.0] * count}, {0: removed}, tiny.routers([0], top_k, n_group), provenance={})


@pytest.mark.parametrize(
    ("ratio", "message"),
    [
        (1.0, r"ratio=1.0: expected a number in \[0, 1\), 0.75 is the nearest feasible"),
        (-0.1, r"ratio=-0.1: expected a number in \[0, 1\), 0 is the nearest feasible"),
        (float("nan"), "ratio=nan: expected a number in"),
        (
            0.9,
            r"ratio=0.9 leaves 2 of 16 experts in layer 5.*at least 4 \(top_k=4\): 0.75 is the largest feasible ratio",
        ),
    ],
)
def test_infeasible_ratios(ratio: float, message: str) -> None:
    assert uniform({5: 16}, 0.75, top_k=4) == {5: 12}
    with pytest.raises(UserError, match=message):
        uniform({5: 16}, ratio, top_k=4)


def test_largest_ratio_is_that_of_the_smallest_layer() -> None:
    with pytest.raises(UserError, match=r"0.5 is the largest feasible ratio"):
        uniform({0: 64, 1: 8}, 0.9, top_k=4)


def test_granularity() -> None:
    assert uniform({0: 64}, 0.3, top_k=8, multiple_of=8) == {0: 16}
    with pytest.raises(
        UserError, match=r"ratio=0.0 leaves 60 of 60.*multiple of 16: 0.2 is the smallest feasible ratio"
    ):
        uniform({0: 60}, 0.0, top_k=4, multiple_of=16)
    with pytest.raises(UserError, match="multiple_of: layer 0 has 60 experts and cannot keep a multiple of 80"):
        uniform({0: 60}, 0.25, top_k=4, multiple_of=80)
    with pytest.raises(UserError, match="multiple_of=0"):
        uniform({0: 60}, 0.25, top_k=4, multiple_of=0)


def test_registry() -> None:
    assert get("uniform") is ALLOCATIONS["uniform"]
    with pytest.raises(UserError, match="allocation=unifrom is unknown: did you mean uniform"):
        get("unifrom")


def test_settings_are_checked() -> None:
    check(AllocationConfig())
    for settings, message in [
        (AllocationConfig(name="unifrom"), "did you mean uniform"),
        (AllocationConfig(multiple_of=0), "multiple_of=0"),
        (AllocationConfig(parameters={"top_k": 1}), "allocation.parameters=top_k is unknown"),
    ]:
        with pytest.raises(UserError, match=message):
            check(settings)


def test_layers_have_limits_of_their_own() -> None:
    settings = {"name": "uniform", "ratio": 0.5, "multiple_of": 1, "parameters": {}}
    facts = {
        0: {"n_experts": 16, "top_k": 2, "n_group": 1, "topk_group": 1},
        1: {"n_experts": 24, "top_k": 4, "n_group": 4, "topk_group": 2},
    }
    assert allocate(settings, facts, {0: [0.0] * 16, 1: [0.0] * 24}) == {0: 8, 1: 12}
    assert allocate({**settings, "ratio": 0.45}, facts, {0: [0.0] * 16, 1: [0.0] * 24}) == {0: 7, 1: 8}
    with pytest.raises(UserError, match="scores are of another model"):
        allocate(settings, facts, {0: [0.0] * 16, 1: [0.0] * 16})
