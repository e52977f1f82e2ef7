"""What holds for every allocation, whatever the layers, the ratio and the protected experts; and settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import pytest
import tiny
from facts_of import layer, settings
from hypothesis import example, given
from hypothesis import settings as how
from hypothesis import strategies as st

from moe_lab.allocation import ALLOCATIONS, allocate, budgets, check, fits, get, needs, zero_expert
from moe_lab.config import AllocationConfig
from moe_lab.config.base import SettingsError, valid
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


RATIOS = st.integers(0, 9900).map(lambda parts: parts / 10_000)


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


@given(CASES, st.sampled_from([1, 1, 2, 3]), RATIOS)
@how(max_examples=60)
def test_experts_leave_in_equal_numbers_within_limits_of_routers(case: Case, multiple_of: int, ratio: float) -> None:
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


@given(CASES, st.sampled_from(CHOICES), RATIOS, st.sampled_from([None, 1, 2, 4]))
@example(Case(192, 4, 2), ("global", {}), 0.9375, 2)  # a larger ratio is feasible, since budgets are rounded to blocks
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


# ---- settings


@pytest.mark.parametrize(
    ("fields", "granularity", "named"),
    [
        ({"name": "coverage"}, "expert", "allocation=coverage.*evolutionary"),
        ({"name": "evolutionary", "search": "code"}, "channel", "allocation=evolutionary.*coverage, global"),
        ({"name": "globl"}, "expert", "allocation=globl.*global"),
        ({"multiple_of": 4}, "channel", "multiple_of=4"),
        ({"name": "global", "by": "reap"}, "channel", "allocation.by=reap"),
        ({"name": "u_shaped", "parameters": {"betta": 1}}, "expert", "betta.*beta"),
        ({"name": "u_shaped", "parameters": {"beta": "much"}}, "expert", "beta=much"),
        ({"name": "u_shaped", "parameters": {"align": None}}, "expert", "align"),
        ({"name": "coverage", "parameters": {"prior": "ala3"}}, "channel", "prior=ala3.*ala"),
        ({"name": "global", "parameters": {"zero_expert": "dropp"}}, "channel", "zero_expert=dropp.*drop"),
        ({"name": "global", "parameters": {"align": {"block": 1.5}}}, "channel", "align.block=1.5"),
        ({"name": "global", "parameters": {"align": {"block": 0}}}, "channel", "align.block=0"),
        ({"name": "global", "parameters": {"align": {"block": 8, "min_channels": -1}}}, "channel", "min_channels=-1"),
        ({"replacement": "ream", "parameters": {"group_size": 8.5}}, "expert", "allocation.parameters.group_size"),
        ({"replacement": "m_smoe", "parameters": {"group_size": 8}}, "expert", "allocation.parameters.group_size"),
        ({"protect": "super"}, "channel", "allocation.protect=super.*layerwise"),
        ({"protect": "supper"}, "expert", "allocation.protect=supper"),
    ],
)
def test_mistakes_are_said_before_anything_runs(fields: Any, granularity: Any, named: str) -> None:
    with pytest.raises(UserError, match=named):
        check(AllocationConfig(**fields), granularity)


@pytest.mark.parametrize("field", ["by", "search", "path", "protect_layers"])
def test_what_nothing_would_read_is_refused(field: str) -> None:
    with pytest.raises(SettingsError, match=f"allocation.{re.escape(field)}=") as error:
        valid(AllocationConfig, {"name": "uniform", field: 0.5 if field == "protect_layers" else "x"}, "allocation")
    assert len(error.value.sentences) == 1


def test_needs() -> None:
    def of(name: str, **parameters: Any) -> tuple[str, ...]:
        return needs({"name": name, "parameters": parameters})

    assert of("uniform") == of("global") == of("coverage", inter="uniform", intra="ranking") == ()
    assert of("loss_based") == of("coverage") == of("coverage", intra="uniform") == ("statistics",)
    assert of("coverage", prior="ala_lm") == ("gradients", "statistics")
    assert of("coverage", prior="loss", layer_prior="none") == ("ablation",)
    assert of("coverage", prior="none", inter="u_shaped") == ()
    assert of("loss_based", layer_prior="nll") == of("coverage", prior="none", layer_prior="nll") == ("scaling",)
    assert needs(vars(AllocationConfig(protect="super"))) == ("statistics",)
    assert needs({"name": "global", "by": "frequency", "parameters": {}}) == ("by",)


def test_what_becomes_of_empty_experts() -> None:
    assert zero_expert(settings("coverage", 0.5)) == "drop"
    assert zero_expert(settings("global", 0.5)) == "keep_null"
    assert zero_expert(settings("global", 0.5, zero_expert="drop")) == "drop"


def test_what_another_step_decides_is_not_decided_from_scores() -> None:
    for name, allocation in ALLOCATIONS.items():
        if not allocation.functions.get("expert"):
            with pytest.raises(UserError, match=f"allocation={re.escape(name)}"):
                allocate(settings(name, 0.25), {0: layer(4)}, {0: [0.0] * 4})


def test_fits_says_without_scores_what_cannot_be_had() -> None:
    layers = {0: layer(16, top_k=8, width=48)}
    for name in ("uniform", "global", "evolutionary", "reconstruction"):
        fits(settings(name, 0.5), layers, "expert")
        with pytest.raises(UserError, match=r"0.562 is the largest feasible ratio"):
            fits(settings(name, 0.75), layers, "expert")
    for ratio, block in ((0.75, None), (0.75, 16), (0.75, 32)):
        fits(settings("global", ratio, align=block and {"block": block}), layers, "channel")
    for ratio, block, named in ((0.75, 64, "block=64"), (0.25, 32, "block=32.* smallest"), (1, None, "ratio=1")):
        with pytest.raises(UserError, match=named):
            fits(settings("global", ratio, align=block and {"block": block}), layers, "channel")
    assert get("reconstruction").step == "reconstruction"
