"""What holds for every allocation, whatever the layers, the ratio and the protected experts; and
settings."""

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import tiny
from example_facts import layer, settings
from hypothesis import example, given
from hypothesis import settings as how
from hypothesis import strategies as st

from moe_lab.allocation import (
    ALLOCATIONS,
    allocate,
    check,
    check_fits,
    required_evidence,
    zero_expert,
)
from moe_lab.allocation.problem import apportion
from moe_lab.config import AllocationConfig
from moe_lab.errors import UserError
from moe_lab.pruning.layer_plan import LayerPlan
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.selection import make_channel_plan, make_plan


def decided_from_scores(granularity: str) -> list[str]:
    """Allocations of experts or of channels, without that which reads a file."""
    functions = {name: allocation.functions for name, allocation in ALLOCATIONS.items()}
    return [name for name in functions if functions[name].get(granularity) and name != "list"]


OF_EXPERTS = decided_from_scores("expert")
OF_CHANNELS = decided_from_scores("channel")
COVERAGE: list[dict[str, Any]] = [
    {"inter": "uniform"},
    {"inter": "u_shaped"},
    {"inter": "loss_based"},
    {"intra": "proportional"},
    {"intra": "uniform"},
    {"intra": "ranking"},
    {"layer_prior": "none", "prior": "none"},
    {"prior": "ala_lm", "expert_smoothing": "huber"},
    {"prior": "usage", "layer_prior": "nll", "layer_smoothing": "clip"},
]
CHOICES = [
    *((name, {}) for name in OF_CHANNELS),
    *(("coverage", parameters) for parameters in COVERAGE),
]


class Case:
    """Layers of random shapes, scores, and everything that some allocation reads besides."""

    def __init__(self, seed: int, groups: int, width: int) -> None:
        random = numpy.random.default_rng(seed)
        counts = groups * random.integers(2, 8, random.integers(1, 5))
        self.layers: dict[int, Any] = {}
        self.experts: dict[int, Any] = {}
        self.channels: dict[int, Any] = {}
        self.evidence: dict[str, Any] = {"statistics": {}, "gradients": {}, "scaling": {}}
        for number, count in enumerate(counts.tolist()):
            facts = layer(count, top_k=int(random.integers(1, 3)), n_group=groups, width=width)
            protected = random.choice(count, random.integers(0, 3) * (seed % 2), replace=False)
            self.layers[2 * number] = {**facts, "protected": protected.tolist()}
        for index, facts in self.layers.items():
            self.experts[index] = random.normal(size=facts["n_experts"])
        for index, row in self.experts.items():
            self.channels[index] = random.gamma(0.5, size=(len(row), width))
        for values in self.channels.values():
            values[random.random(len(values)) < 0.1] = -1.0  # as an expert that saw no token
        for index, values in self.channels.items():
            self.evidence["statistics"][index] = {
                "layer_loss": random.gamma(1) + 1e-6,
                "ala_first": random.normal(1, 1, len(values)),
                "tokens": random.integers(0, 9, len(values)),
            }
            gradients = random.normal(size=values.shape)
            self.evidence["gradients"][index] = {"channel_product": gradients}
            self.evidence["scaling"][index] = {"scaling": random.gamma(1) + 1e-6}


CASES = st.builds(Case, st.integers(0, 10_000), st.sampled_from([1, 1, 2, 4]), st.integers(1, 20))


RATIOS = st.integers(0, 9900).map(lambda parts: parts / 10_000)


class Decision(NamedTuple):
    """Experts (or channels) to drop or retain in each layer, at a feasible ratio."""

    ratio: float
    layers: Any


def feasible(decide: Callable[[float], Mapping[int, Any]], ratio: float) -> Decision | None:
    """What is decided at `ratio`, or at the one that the refusal names; None if it names none."""
    try:
        return Decision(ratio, decide(ratio))
    except UserError as error:
        match = re.search(r"; (\S+) is the (largest|smallest) feasible ratio", str(error))
        if match is None:
            message = str(error)
            assert re.search(r"no (smaller|larger) ratio", message) or "multiple_of" in message
            return None
        nearest = float(match[1])
        assert 0 <= nearest < 1
        assert (nearest < ratio) == (match[2] == "largest")
        return Decision(nearest, decide(nearest))


def expert_decider(name: str, case: Case, multiple_of: int) -> Callable[[float], dict[int, int]]:
    """Ratio -> numbers of experts to drop, by an allocation; the same each time."""

    def decide(ratio: float) -> dict[int, int]:
        chosen = settings(name, ratio, multiple_of=multiple_of)
        remove = allocate(chosen, case.layers, case.experts, case.evidence)
        assert remove == allocate(chosen, case.layers, case.experts, case.evidence), "random"
        return remove

    return decide


MULTIPLES = st.sampled_from([1, 1, 2, 3])


@given(CASES, MULTIPLES, RATIOS)
@how(max_examples=60)
def test_allocations_drop_equally_many_experts(case: Case, multiple_of: int, ratio: float) -> None:
    """Within the limits of routers, and at smaller ratios no more. A refusal names the nearest
    feasible ratio."""
    totals: dict[float, set[int]] = {}
    for name in OF_EXPERTS:
        decide = expert_decider(name, case, multiple_of)
        decision = feasible(decide, ratio)
        if decision is None:
            continue
        total = sum(decision.layers.values())
        totals.setdefault(decision.ratio, set()).add(total)
        chosen = settings(name, decision.ratio, multiple_of=multiple_of)
        check_fits(chosen, case.layers, "expert")
        check_dropped(case, decision.layers, multiple_of)
        if abs(decision.ratio - ratio) > 0.0011:
            nearer = decision.ratio + math.copysign(0.001, ratio - decision.ratio)
            with pytest.raises(UserError):
                decide(nearer)
        smaller = feasible(decide, decision.ratio / 2)
        if smaller is not None and smaller.ratio <= decision.ratio:
            assert sum(smaller.layers.values()) <= total
    assert all(len(equal_totals) == 1 for equal_totals in totals.values())
    if multiple_of > 1 or case.layers[0]["n_group"] > 1:
        return
    for feasible_ratio, equal_totals in totals.items():
        counts = [int(facts["n_experts"] * feasible_ratio) for facts in case.layers.values()]
        assert equal_totals == {sum(counts)}


def check_dropped(case: Case, remove: dict[int, int], multiple_of: int) -> None:
    """The plan leaves a multiple of experts, and drops those of the lowest scores that are not
    protected."""
    # refuses what routers cannot work with
    plan = make_plan(case.experts, remove, case.layers, provenance={})
    for index, facts in case.layers.items():
        assert (facts["n_experts"] - remove[index]) % multiple_of == 0
        retained = set(plan.layers[index].retained)
        assert set(facts["protected"]) <= retained
        order = numpy.argsort(case.experts[index])
        lowest = [expert for expert in order if expert not in facts["protected"]]
        if facts["n_group"] == 1:
            dropped = set(range(facts["n_experts"])) - retained
            assert dropped == set(lowest[: remove[index]])


def decided_channels(
    case: Case, name: str, ratio: float, parameters: dict[str, Any]
) -> Decision | None:
    """Numbers of channels that each expert retains, by an allocation; the same each time."""

    def decide(ratio: float) -> dict[int, Any]:
        chosen = settings(name, ratio, zero_expert="keep_null", **parameters)
        retained = allocate(chosen, case.layers, case.channels, case.evidence)
        again = allocate(chosen, case.layers, case.channels, case.evidence)
        for index, row in retained.items():
            assert (row == again[index]).all(), "random"
        return retained

    return feasible(decide, ratio)


@given(CASES, st.sampled_from(CHOICES), RATIOS, st.sampled_from([None, 1, 2, 4]))
# a larger ratio is feasible, since budgets are rounded to blocks
@example(Case(192, 4, 2), ("global", {}), 0.9375, 2)
@how(max_examples=150)
def test_allocations_retain_the_exact_number_of_channels(
    case: Case, choice: tuple[str, dict[str, Any]], ratio: float, block: int | None
) -> None:
    name, parameters = choice
    width = case.layers[0]["width"]
    if name == "uniform" or (block and width % block):
        for facts in case.layers.values():
            facts["protected"] = []
    aligned = bool(block and block <= width)
    if aligned:
        parameters = {**parameters, "align": {"block": block, "min_channels": 0}}
    decision = decided_channels(case, name, ratio, parameters)
    if decision is None:
        return
    rows = decision.layers.values()
    count = sum(int(row.sum()) for row in rows)
    total = sum(values.size for values in case.channels.values())
    budget = int(total * (1 - decision.ratio) + 1e-6)
    if name == "uniform":
        assert budget - sum(map(len, rows)) <= count <= budget or aligned
    elif not aligned:
        assert count == budget
    else:
        assert count <= budget
        assert all(not (row % block).any() for row in rows)
    check_widths(case, decision.layers)


def check_widths(case: Case, retained: dict[int, Any]) -> None:
    """Each expert retains at most its channels, a protected one all, and a plan can be made."""
    for index, row in retained.items():
        facts = case.layers[index]
        assert row.shape == (facts["n_experts"],)
        assert row.dtype == numpy.int64
        assert (row >= 0).all()
        assert (row <= facts["width"]).all()
        assert (row[facts["protected"]] == facts["width"]).all()
    if any(row.any() for row in retained.values()):
        make_channel_plan(case.channels, retained, tiny.routers(retained, 1), provenance={})


# ---- settings


@pytest.mark.parametrize(
    ("fields", "granularity", "field"),
    [
        ({"name": "coverage"}, "expert", "allocation=coverage.*evolutionary"),
        (
            {"name": "evolutionary", "search": "code"},
            "channel",
            "allocation=evolutionary.*coverage, global",
        ),
        ({"name": "globl"}, "expert", "allocation=globl.*global"),
        ({"multiple_of": 4}, "channel", "multiple_of=4"),
        ({"name": "global", "by": "reap"}, "channel", "allocation.by=reap"),
        ({"name": "u_shaped", "parameters": {"betta": 1}}, "expert", "betta.*beta"),
        ({"name": "u_shaped", "parameters": {"beta": "much"}}, "expert", "beta=much"),
        ({"name": "u_shaped", "parameters": {"align": None}}, "expert", "align"),
        ({"name": "coverage", "parameters": {"prior": "ala3"}}, "channel", "prior=ala3.*ala"),
        (
            {"name": "global", "parameters": {"zero_expert": "dropp"}},
            "channel",
            "zero_expert=dropp.*drop",
        ),
        ({"name": "global", "parameters": {"align": {"block": 0}}}, "channel", "align.block=0"),
        (
            {"name": "global", "parameters": {"align": {"block": 8, "min_channels": -1}}},
            "channel",
            "min_channels=-1",
        ),
        (
            {"replacement": "ream", "parameters": {"group_size": 8.5}},
            "expert",
            "allocation.parameters.group_size",
        ),
        (
            {"replacement": "m_smoe", "parameters": {"group_size": 8}},
            "expert",
            "allocation.parameters.group_size",
        ),
        ({"protect": "super"}, "channel", "allocation.protect=super.*layerwise"),
        ({"name": "list"}, "channel", r"allocation\.path"),
        ({"name": "list", "path": "nowhere.json"}, "channel", r"allocation\.path"),
    ],
)
def test_mistakes_are_said_before_anything_runs(fields: Any, granularity: Any, field: str) -> None:
    with pytest.raises(UserError, match=field):
        check(AllocationConfig(**fields), granularity)


@pytest.mark.parametrize(
    ("name", "parameters", "inputs"),
    [
        ("global", {}, ()),
        ("coverage", {"inter": "uniform", "intra": "ranking"}, ()),
        ("loss_based", {}, ("statistics",)),
        ("coverage", {}, ("statistics",)),
        ("coverage", {"intra": "uniform"}, ("statistics",)),
        ("coverage", {"prior": "ala_lm"}, ("gradients", "statistics")),
        ("coverage", {"prior": "loss", "layer_prior": "none"}, ("ablation",)),
        ("coverage", {"prior": "none", "inter": "u_shaped"}, ()),
        ("loss_based", {"layer_prior": "nll"}, ("scaling",)),
        ("coverage", {"prior": "none", "layer_prior": "nll"}, ("scaling",)),
    ],
)
def test_needs_of_an_allocation(
    name: str, parameters: dict[str, Any], inputs: tuple[str, ...]
) -> None:
    assert required_evidence({"name": name, "parameters": parameters}) == inputs


def test_needs_of_protection_and_of_scores_by_name() -> None:
    assert required_evidence(vars(AllocationConfig(protect="super"))) == ("statistics",)
    assert required_evidence({"name": "global", "by": "frequency", "parameters": {}}) == ("by",)


def test_empty_experts_are_null_or_dropped() -> None:
    assert zero_expert(settings("coverage", 0.5)) == "drop"
    assert zero_expert(settings("global", 0.5)) == "keep_null"
    assert zero_expert(settings("global", 0.5, zero_expert="drop")) == "drop"


def test_allocations_of_other_steps_are_not_decided_from_scores() -> None:
    for name, allocation in ALLOCATIONS.items():
        if not allocation.functions.get("expert"):
            with pytest.raises(UserError, match=f"allocation={name}"):
                allocate(settings(name, 0.25), {0: layer(4)}, {0: [0.0] * 4})


def test_check_fits_says_without_scores_what_cannot_be_had() -> None:
    layers = {0: layer(16, top_k=8, width=48)}
    for name in ("uniform", "global", "evolutionary", "reconstruction"):
        check_fits(settings(name, 0.5), layers, "expert")
        with pytest.raises(UserError, match=r"0.562 is the largest feasible ratio"):
            check_fits(settings(name, 0.75), layers, "expert")
    for align in (None, {"block": 16}, {"block": 32}):
        check_fits(settings("global", 0.75, align=align), layers, "channel")
    with pytest.raises(UserError, match="ratio=1"):
        check_fits(settings("global", 1), layers, "channel")
    # a model whose sizes are not known yet has no layers
    check_fits(settings("global", 0.5, align={"block": 16, "min_channels": 32}), {}, "channel")
    # 200 * (1 - 0.435) is 112.99..., which counts as 113; whole blocks of 28 hold 112
    layers = {0: layer(4, top_k=2, width=50)}
    with pytest.raises(UserError, match=r"keeps 113 of 200 channels"):
        check_fits(settings("global", 0.435, align={"block": 28}), layers, "channel")


# ---- how many experts each layer loses


def equal_scores(layers: Any) -> dict[int, list[float]]:
    return {index: [0.0] * facts["n_experts"] for index, facts in layers.items()}


def test_layers_have_limits_of_their_own() -> None:
    facts = {0: layer(16, top_k=2), 1: layer(24, top_k=4, n_group=4, topk_group=2)}
    assert allocate(settings("uniform", 0.45), facts, equal_scores(facts)) == {0: 7, 1: 8}


def test_layers_retain_a_multiple_of_experts() -> None:
    eights = settings("uniform", 0.3, multiple_of=8)
    assert allocate(eights, {0: layer(64, top_k=8)}, {0: [0.0] * 64}) == {0: 16}


@given(st.integers(0, 500), st.floats(0, 0.9))
def test_global_is_a_walk_down_one_list(seed: int, ratio: float) -> None:
    """Lowest first over all layers; layers that hold only top-k are passed over."""
    random = numpy.random.default_rng(seed)
    layers = {0: layer(8, top_k=2), 1: layer(12, top_k=4), 5: layer(8, top_k=1)}
    most = {0: 6, 1: 8, 5: 7}
    scores = {}
    budget = 0
    for index, facts in layers.items():
        scores[index] = random.normal(index, 1, size=facts["n_experts"])
        budget += int(facts["n_experts"] * ratio)
    remove = dict.fromkeys(layers, 0)
    for _, index in sorted((score, index) for index, row in scores.items() for score in row):
        if sum(remove.values()) < budget and remove[index] < most[index]:
            remove[index] += 1
    if sum(remove.values()) == budget:
        assert allocate(settings("global", ratio), layers, scores) == remove


def test_global_compares_layers_by_another_criterion() -> None:
    layers = {0: layer(4), 1: layer(4)}
    scores = {0: [1.0, 2.0, 3.0, 4.0], 1: [5.0, 6.0, 7.0, 8.0]}
    by = {0: [9.0, 9.0, 9.0, 9.0], 1: [1.0, 8.0, 2.0, 3.0]}
    assert allocate(settings("global", 0.5), layers, scores) == {0: 3, 1: 1}
    assert allocate(settings("global", 0.5), layers, scores, {"by": by}) == {0: 1, 1: 3}


def test_global_in_steps_goes_by_their_means() -> None:
    layers = {0: layer(4), 1: layer(4)}
    scores = {0: [0.0, 9.0, 10.0, 11.0], 1: [3.0, 4.0, 5.0, 6.0]}
    pairs = settings("global", 0.25, multiple_of=2)
    assert allocate(settings("global", 0.25), layers, scores) == {0: 1, 1: 1}
    assert allocate({**pairs, "ratio": 0.5}, layers, scores) == {0: 2, 1: 2}
    uneven = {0: [0.0, 5.0, 6.0, 7.0] + [8.0] * 4, 1: [3.0, 4.0, 4.2, 4.3] + [9.0] * 4}
    assert allocate(pairs, {0: layer(8), 1: layer(8)}, uneven) == {0: 2, 1: 2}
    grouped = {0: layer(8, n_group=2), 1: layer(8, n_group=2)}
    rows = {0: [0.0, 1.0, 2.0, 3.0, 50.0, 51.0, 52.0, 53.0], 1: [9.0] * 8}
    # (0 + 50) / 2 is above 9
    assert allocate(settings("global", 0.25), grouped, rows) == {0: 0, 1: 4}


def test_u_shape_spares_the_ends() -> None:
    def removed(count: int, ratio: float, layers: int = 5, **parameters: float) -> list[int]:
        facts = {index: layer(count) for index in range(layers)}
        chosen = settings("u_shaped", ratio, **parameters)
        return list(allocate(chosen, facts, equal_scores(facts)).values())

    # z of (1/4, 1/16, 0, 1/16, 1/4): mean 1/8, deviation sqrt(0.0109375); 64 (1 + 0.2 z) kept:
    # 79.3, 56.4, 48.7.
    assert removed(128, 0.5, beta=0.2) == [49, 71, 79, 72, 49]
    # max(.1, .1 (1 + z / 2)): .16 at the ends, .1 between
    assert removed(100, 0.9, beta=0.5) == [87, 92, 92, 92, 87]
    assert removed(128, 0.5, layers=2) == [64, 64]


def test_loss_based_keeps_in_proportion_to_the_smoothed_loss() -> None:
    layers = {0: layer(20), 1: layer(20), 2: layer(20)}
    scores = equal_scores(layers)
    losses = {
        "statistics": {
            0: {"layer_loss": numpy.array(1.0)},
            1: {"layer_loss": numpy.array(4.0)},
            2: {"layer_loss": numpy.array(9.0)},
        }
    }
    assert allocate(settings("loss_based", 0.5), layers, scores, losses) == {0: 15, 1: 10, 2: 5}
    unsmoothed = settings("loss_based", 0.5, smoothing="none")  # kept 15/7, 60/7, 135/7
    assert allocate(unsmoothed, layers, scores, losses) == {0: 18, 1: 11, 2: 1}
    capped = settings("loss_based", 0.1, smoothing="none")  # 54 kept: the last two are full
    assert allocate(capped, layers, scores, losses) == {0: 6, 1: 0, 2: 0}


@pytest.mark.parametrize(
    ("name", "ratio", "multiple_of", "reason", "nearest"),
    [
        ("uniform", 0.9, 1, r"layer 0\b.*top_k=4", "0.562 is the largest"),  # layer 1 keeps 8 of 16
        ("global", 0.7, 1, r"removes 22 .* 20 ", "0.687 is the largest"),
        ("uniform", 0.0, 7, r"layer 0\b.*multiple of 7", "0.125 is the smallest"),
        ("global", 0.0, 7, r"removes 0 .* 4 ", "0.125 is the smallest"),
        ("uniform", -0.1, 1, r"\[0, 1\)", "0 is the smallest"),
        ("uniform", float("nan"), 1, r"\[0, 1\)", "0.562 is the largest"),
    ],
)
def test_infeasible_ratios_name_a_nearest(
    name: str, ratio: float, multiple_of: int, reason: str, nearest: str
) -> None:
    layers = {0: layer(16, top_k=4), 1: layer(16, top_k=8)}
    chosen = settings(name, ratio, multiple_of=multiple_of)
    message = f"{re.escape(f'ratio={ratio:g}: ')}.*; {nearest}"
    with pytest.raises(UserError, match=message) as refused:
        allocate(chosen, layers, equal_scores(layers))
    assert re.search(reason, str(refused.value))


def test_multiples_that_no_layer_can_have() -> None:
    eighties = settings("uniform", 0.25, multiple_of=80)
    with pytest.raises(UserError, match=r"allocation\.multiple_of"):
        allocate(eighties, {0: layer(60)}, {0: [0.0] * 60})


def test_losses_that_no_layer_can_have() -> None:
    evidence = {"statistics": {0: {"layer_loss": 0.0}}}
    with pytest.raises(UserError, match=r"layer_loss is \[0.0\]"):
        allocate(settings("loss_based", 0.25), {0: layer(4)}, {0: [0.0] * 4}, evidence)


# ---- dividing whole numbers


def test_largest_remainders_come_first() -> None:
    assert apportion([5, 3, 2], 7, 0, 100).tolist() == [4, 2, 1]  # shares 3.5, 2.1, 1.4
    assert apportion([1, 1, 1], 5, 0, 100).tolist() == [2, 2, 1]  # ties: first
    # what a full one cannot take, others get
    assert apportion([8, 1, 1], 9, 0, 5).tolist() == [5, 2, 2]
    assert apportion([8, 1, 1], 9, [0, 4, 1], 16).tolist() == [4, 4, 1]
    # shares 8, 4.8, 3.2: two units of four left
    assert apportion([5, 3, 2], 16, 0, 100, 4).tolist() == [8, 4, 4]


# ---- allocation=list

LISTED = {0: layer(8, top_k=2), 3: layer(8, top_k=2)}
SCORES = {0: numpy.arange(8.0), 3: numpy.arange(8.0)}


def listed(path: Path, ratio: float, content: Any = None, multiple_of: int = 1) -> dict[str, Any]:
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return {**settings("list", ratio, multiple_of), "path": str(path)}


def test_listed_schedule_decides_each_layer(tmp_path: Path) -> None:
    schedule = listed(tmp_path / "list", 0.5, {"3": 6, "0": 2})
    assert allocate(schedule, LISTED, SCORES) == {0: 2, 3: 6}


def test_listed_plan_is_for_criteria_of_its_granularity(tmp_path: Path) -> None:
    masks = {index: numpy.eye(8, dtype=bool) for index in LISTED}
    layers = {index: LayerPlan(8, tuple(range(8)), mask) for index, mask in masks.items()}
    Plan(layers).save(tmp_path / "plan.json")
    chosen_file = AllocationConfig(name="list", path=str(tmp_path / "plan.json"))
    check(chosen_file, "channel")
    with pytest.raises(UserError, match="lists channels, but the criterion scores experts"):
        check(chosen_file, "expert")


@pytest.mark.parametrize(
    ("content", "multiple_of", "field"),
    [
        ("{", 1, "is no JSON.*criterion=file"),
        ([1, 2], 1, "expected a schedule"),
        ({"0": 2.5}, 1, "expected a schedule"),
        ({"schema": 1, "layers": {"0": {"experts": 4}}}, 1, "expected a schedule"),
        ({"0": 4}, 1, r"layers \[0\], expected \[0, 3\]"),
        ({"0": 8, "3": 0}, 1, "removes 8 of 8 experts in layer 0, 6 is the nearest feasible"),
        ({"0": 3, "3": 5}, 4, "removes 3 of 8 experts in layer 0, 4 is the nearest feasible"),
        ({"0": 2, "3": 2}, 1, "ratio=0.5, but allocation.path removes 0.25 of all"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, content: Any, multiple_of: int, field: str) -> None:
    chosen = listed(tmp_path / "list", 0.5, content, multiple_of)
    with pytest.raises(UserError, match=field):
        allocate(chosen, LISTED, SCORES)
