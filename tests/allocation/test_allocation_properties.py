"""What holds for every allocation in the registry, whatever the layers, the ratio and the protected experts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import pytest
import tiny
from facts_of import layer, settings
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st

from moe_lab.allocation import ALLOCATIONS, allocate, budgets, fits
from moe_lab.errors import UserError
from moe_lab.pruning.plan import make_channel_plan, make_plan

OF_EXPERTS, OF_CHANNELS = (
    [name for name, allocation in ALLOCATIONS.items() if allocation.functions.get(granularity) and name != "list"]
    for granularity in ("expert", "channel")
)
COVERAGE: list[dict[str, Any]] = [
    *({"inter": inter} for inter in ("uniform", "u_shaped", "loss_based")),
    *({"intra": intra} for intra in ("proportional", "uniform", "ranking")),
    {"layer_prior": "none", "prior": "none"},
    {"prior": "ala_lm", "expert_smoothing": "huber"},
    {"prior": "usage", "layer_prior": "nll", "layer_smoothing": "clip"},
]
CHOICES = [(name, {}) for name in OF_CHANNELS] + [("coverage", parameters) for parameters in COVERAGE]


class Case:
    """Layers of random shapes, scores, and everything that some allocation reads besides."""

    def __init__(self, seed: int, groups: int, width: int) -> None:
        random = numpy.random.default_rng(seed)
        counts = groups * random.integers(2, 8, random.integers(1, 5))
        self.layers = {
            2 * at: {
                **layer(int(count), top_k=int(random.integers(1, 3)), n_group=groups, width=width),
                "protected": random.choice(count, random.integers(0, 3) * (seed % 2), replace=False).tolist(),
            }
            for at, count in enumerate(counts)
        }
        self.experts = {at: random.normal(size=facts["n_experts"]) for at, facts in self.layers.items()}
        self.channels = {at: random.gamma(0.5, size=(len(row), width)) for at, row in self.experts.items()}
        for values in self.channels.values():
            values[random.random(len(values)) < 0.1] = -1.0  # as an expert that saw no token
        self.evidence: dict[str, Any] = {"statistics": {}, "gradients": {}, "scaling": {}}
        for at, values in self.channels.items():
            self.evidence["statistics"][at] = {
                "layer_loss": random.gamma(1) + 1e-6,
                "ala_first": random.normal(1, 1, len(values)),
                "tokens": random.integers(0, 9, len(values)),
            }
            self.evidence["gradients"][at] = {"channel_product": random.normal(size=values.shape)}
            self.evidence["scaling"][at] = {"scaling": random.gamma(1) + 1e-6}


CASES = st.builds(Case, st.integers(0, 10_000), st.sampled_from([1, 1, 2, 4]), st.integers(1, 20))


def or_what_is_feasible(decide: Callable[[float], Mapping[int, Any]], ratio: float) -> tuple[float, Any] | None:
    """The ratio and what is decided, at `ratio` or at the one that the refusal names; None if it names none."""
    try:
        return ratio, decide(ratio)
    except UserError as error:
        named = re.search(r"; (\S+) is the (largest|smallest) feasible ratio", str(error))
        if named is None:
            assert "no other ratio is feasible" in str(error) or "multiple_of" in str(error)
            return None
        nearest = float(named[1])
        assert 0 <= nearest < 1 and (nearest < ratio) == (named[2] == "largest")
        return nearest, decide(nearest)


@given(CASES, st.sampled_from([1, 1, 2, 3]), st.floats(0, 0.99))
@how(max_examples=60)
def test_experts_leave_in_the_same_number_within_the_limits_of_routers(
    case: Case, multiple_of: int, ratio: float
) -> None:
    totals: dict[float, set[int]] = {}
    for name in OF_EXPERTS:

        def decide(at: float, name: str = name) -> dict[int, int]:
            chosen = {**settings(name, at), "multiple_of": multiple_of}
            remove = allocate(chosen, case.layers, case.experts, case.evidence)
            assert remove == allocate(chosen, case.layers, case.experts, case.evidence), "random"
            return remove

        decided = or_what_is_feasible(decide, ratio)
        if decided is None:
            continue
        at, remove = decided
        totals.setdefault(at, set()).add(sum(remove.values()))
        fits({**settings(name, at), "multiple_of": multiple_of}, case.layers, "expert")
        if abs(at - ratio) > 0.0011:
            with pytest.raises(UserError):
                decide(at + (0.001 if at < ratio else -0.001))
        plan = make_plan(case.experts, remove, case.layers, provenance={})  # refuses what routers cannot work with
        for index, facts in case.layers.items():
            assert (facts["n_experts"] - remove[index]) % multiple_of == 0
            assert set(facts["protected"]) <= set(plan.experts[index])
            lowest = [expert for expert in numpy.argsort(case.experts[index]) if expert not in facts["protected"]]
            if facts["n_group"] == 1:  # of the others, those of the lowest scores leave
                assert set(range(facts["n_experts"])) - set(plan.experts[index]) == set(lowest[: remove[index]])
        smaller = or_what_is_feasible(decide, at / 2)
        assert smaller is None or sum(smaller[1].values()) <= sum(remove.values()) or smaller[0] > at
    assert all(len(total) == 1 for total in totals.values())
    plain = multiple_of == 1 and case.layers[0]["n_group"] == 1
    for at, total in totals.items() if plain else ():
        assert total == {sum(int(facts["n_experts"] * at) for facts in case.layers.values())}


@given(CASES, st.sampled_from(CHOICES), st.floats(0, 0.99), st.sampled_from([None, 1, 2, 4]))
@how(max_examples=150)
def test_channels_are_kept_to_the_last_one(
    case: Case, choice: tuple[str, dict[str, Any]], ratio: float, block: int | None
) -> None:
    name, parameters = choice
    width = case.layers[0]["width"]
    if name == "uniform" or (block and width % block):
        for facts in case.layers.values():
            facts["protected"] = []
    if block and block <= width:
        parameters = {**parameters, "align": {"block": block, "min_channels": 0}}
    total = sum(values.size for values in case.channels.values())

    def decide(at: float) -> dict[int, Any]:
        chosen = settings(name, at, zero_expert="keep_null", **parameters)
        kept = budgets(chosen, case.layers, case.channels, case.evidence)
        again = budgets(chosen, case.layers, case.channels, case.evidence)
        assert all((row == again[index]).all() for index, row in kept.items()), "random"
        return kept

    decided = or_what_is_feasible(decide, ratio)
    if decided is None:
        return
    at, kept = decided
    found, wanted = sum(int(row.sum()) for row in kept.values()), int(total * (1 - at) + 1e-6)
    experts = sum(map(len, kept.values()))
    if name == "uniform":
        assert wanted - experts <= found <= wanted or "align" in parameters
    elif "align" not in parameters:
        assert found == wanted
    else:
        assert found <= wanted and all(not (row % parameters["align"]["block"]).any() for row in kept.values())
    for index, row in kept.items():
        assert row.shape == (case.layers[index]["n_experts"],) and row.dtype == numpy.int64
        assert (row >= 0).all() and (row <= width).all()
        assert (row[case.layers[index]["protected"]] == width).all()
    if any(row.any() for row in kept.values()):
        make_channel_plan(case.channels, kept, tiny.routers(kept, 1), provenance={})
