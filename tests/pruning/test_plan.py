"""Plans: those whose dropped experts are merged into kept ones, in which order of channels, or put
out constants."""

import json
import math
import re
import warnings
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import naive
import numpy
import pandas
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from identities.plans import plan_without_alignment, random_plan, whole_expert_plan
from scipy.optimize import linear_sum_assignment
from tiny import logits

import moe_lab
from moe_lab.errors import UserError
from moe_lab.models.config_json import fewest_experts
from moe_lab.models.discover import moe_layers, routed_layers
from moe_lab.models.experts import activation
from moe_lab.models.streamed import StreamedModel
from moe_lab.pruning.alignment import align_by_activations, align_by_weights, alignment_hook
from moe_lab.pruning.cost import even_routing
from moe_lab.pruning.export import export
from moe_lab.pruning.export.verify import verify
from moe_lab.pruning.layer_plan import LayerPlan
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune
from moe_lab.pruning.selection import (
    count_ties,
    make_channel_plan,
    make_plan,
    merge_experts,
    replace_by_constants,
)
from moe_lab.statistics.observe import collect_statistics
from moe_lab.statistics.streaming import stream

SCORES = st.lists(st.integers(-3, 3).map(float), min_size=4, max_size=40)


def two_layers(retained: tuple[int, ...] = (0, 2, 3), count: int = 4, **provenance: Any) -> Plan:
    return Plan.of_experts({1: retained, 2: (0, 1, 3)}, {1: count, 2: 4}, provenance)


@given(SCORES, st.data())
def test_lowest_scores_are_dropped_and_ties_by_index(
    tmp_path_factory: pytest.TempPathFactory, scores: list[float], data: st.DataObject
) -> None:
    remove = data.draw(st.integers(0, len(scores) - 1))
    routers = tiny.routers([0, 7], 1)
    counts = {0: remove, 7: 0}
    plan = make_plan({0: scores, 7: scores}, counts, routers, provenance={"ratio": 0.25})
    # stable: equal scores stay in index order
    order = sorted(range(len(scores)), key=lambda expert: scores[expert])
    assert plan.retained[0] == tuple(sorted(order[remove:]))
    assert plan.retained[7] == tuple(range(len(scores)))
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.save(path)
    again = Plan.load(path)
    assert again == plan
    assert again.provenance == plan.provenance
    assert [file.name for file in path.parent.iterdir()] == ["plan.json"]


def warned(
    values: dict[int, Any], ratio: float, allocation: str = "uniform", **settings: Any
) -> tuple[Plan, list[str]]:
    """The plan of scores of 32 experts in each layer, and what is warned of it."""
    layer = {"n_experts": 32, "width": 10, "top_k": 4, "n_group": 1, "topk_group": 1}
    statistics = moe_lab.ModelStatistics({}, {"layers": dict.fromkeys(values, layer)}, {}, {})
    frames = []
    for number, scores in values.items():
        ids = numpy.indices(scores.shape).reshape(scores.ndim, -1)
        columns = dict(zip(("expert", "channel"), ids, strict=False))
        frames.append(pandas.DataFrame({"layer": number, **columns, "score": scores.ravel()}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = moe_lab.plan(
            pandas.concat(frames), ratio, allocation, statistics=statistics, **settings
        )
    assert {warning.filename for warning in caught} <= {__file__}, "where the user calls it"
    return plan, [str(warning.message) for warning in caught]


DISTINCT = {
    layer: numpy.random.default_rng(layer).permutation(320).astype(float).reshape(32, 10)
    for layer in range(2)
}
EXPERTS = {layer: scores[:, 0] for layer, scores in DISTINCT.items()}


@pytest.mark.parametrize(
    ("values", "ratio", "settings", "numbers"),
    [
        (EXPERTS, 0.25, {}, ()),
        (EXPERTS, 0, {}, ()),
        (EXPERTS, 0.02, {}, ("0.02", "0")),
        (EXPERTS, 0.3, {}, ("0.3", "0.281")),
        (EXPERTS, 0.3, {"allocation": "global"}, ("0.3", "0.281")),
        (EXPERTS, 0.25, {"multiple_of": 10}, ("0.25", "0.0625")),
        (DISTINCT, 0.1, {}, ()),
        (DISTINCT, 0.25, {}, ("0.25", "0.3")),
        (DISTINCT, 0.25, {"allocation": "layerwise"}, ()),
    ],
)
def test_rounded_ratio_is_warned_of(values: Any, ratio: float, settings: Any, numbers: Any) -> None:
    plan, messages = warned(values, ratio, **settings)
    warned_numbers = [re.findall(r"\d[\d.]*\b", message) for message in messages]
    assert warned_numbers == ([list(numbers)] if numbers else [])
    removed = numbers[1] if numbers else f"{ratio:g}"
    assert f"{plan.removed_share:.3g}" == removed


def test_equal_scores_at_the_cut_are_warned_of() -> None:
    """Of two layers of 32 experts each, 8 of which go."""
    distinct = numpy.arange(32.0)
    five_alike = distinct.copy()
    five_alike[6:11] = 7
    beside_the_cut = numpy.where(distinct < 8, 0, distinct)
    alike = numpy.ones(32)
    for values, allocation, counts in (
        ({0: distinct, 1: five_alike}, "uniform", [["5", "1"]]),
        ({0: alike, 1: alike}, "uniform", [["64", "2"]]),
        ({0: distinct, 1: beside_the_cut}, "uniform", []),
        ({0: numpy.ones((32, 10)), 1: DISTINCT[1]}, "layerwise", [["320", "1"]]),
    ):
        _, messages = warned(values, 0.25, allocation)
        assert [re.findall(r"\d+", message) for message in messages] == counts


def test_ties_are_those_of_experts_that_compete() -> None:
    """Within groups of a router, and without protected ones."""
    scores = {0: numpy.array([1.0, 2, 3, 4, 2, 5, 6, 7])}
    router = {"n_group": 2, "top_k": 1, "topk_group": 1}
    plan = make_plan(scores, {0: 4}, {0: router}, provenance={})
    assert count_ties(plan, scores, {0: router}) == {}, "2 goes in one group, and goes in the other"
    plan = make_plan(scores, {0: 2}, {0: router}, provenance={})
    assert count_ties(plan, scores, {0: router}) == {}, (
        "2 stays in one group, and goes in the other"
    )
    equal = {0: numpy.ones(4)}
    protected = {**tiny.routers([0], 1)[0], "protected": [0]}
    plan = make_plan(equal, {0: 1}, {0: protected}, provenance={})
    assert plan.retained == {0: (0, 2, 3)}
    assert count_ties(plan, equal, {0: protected}) == {0: 3}


def test_replaced_experts_are_not_retained_in_ties() -> None:
    channels = numpy.ones((4, 2), dtype=bool)
    channels[0] = False
    plan = Plan({0: LayerPlan(4, (0, 1, 2, 3), channels)})
    assert count_ties(plan, {0: numpy.ones(4)}, tiny.routers([0], 1)) == {0: 4}
    assert plan.removed_share == 0.25


@pytest.mark.parametrize(
    ("n_group", "topk_group", "fewest"),
    [
        (1, 1, 5),
        (2, 1, 10),
        (2, 2, 6),
        (2, None, 6),
        (4, 2, 12),
    ],
)
def test_fewest_experts_of_a_group_limited_router(
    n_group: int, topk_group: int | None, fewest: int
) -> None:
    router = {"top_k": 5, "n_group": n_group, "topk_group": topk_group}
    assert fewest_experts(router) == fewest


@given(st.integers(1, 4), st.integers(2, 6), st.data())
def test_groups_lose_equally(n_group: int, size: int, data: st.DataObject) -> None:
    count = n_group * size
    scores = data.draw(st.lists(st.floats(-1, 1), min_size=count, max_size=count))
    share = data.draw(st.integers(0, size - 2))
    routers = tiny.routers([0], 1, n_group)
    plan = make_plan({0: scores}, {0: share * n_group}, routers, provenance={})
    for group in range(n_group):
        members = [expert for expert in plan.layers[0].retained if expert // size == group]
        dropped = set(range(group * size, (group + 1) * size)) - set(members)
        assert len(dropped) == share
        assert all(scores[low] <= scores[high] for low in dropped for high in members)


class ChannelChoice(NamedTuple):
    """Scores (N, I) of a layer, and how many channels each expert retains (N)."""

    scores: Any
    keep: Any

    def plan(self, zero_expert: Any) -> Plan:
        arguments = {"zero_expert": zero_expert, "provenance": {"a": 1}}
        routers = tiny.routers([7], 1)
        return make_channel_plan({7: self.scores}, {7: self.keep}, routers, **arguments)


@st.composite
def channel_choices(draw: Any) -> ChannelChoice:
    experts = draw(st.integers(1, 5))
    width = draw(st.integers(1, 20))
    row = st.lists(st.integers(-2, 2).map(float), min_size=width, max_size=width)
    scores = draw(st.lists(row, min_size=experts, max_size=experts))
    keep = draw(st.lists(st.integers(0, width), min_size=experts, max_size=experts))
    return ChannelChoice(numpy.array(scores), numpy.array(keep))


ZERO_EXPERT = st.sampled_from(["keep_null", "drop"])


@given(channel_choices(), ZERO_EXPERT)
def test_best_channels_of_each_expert_are_retained(choice: ChannelChoice, zero_expert: str) -> None:
    scores, keep = choice
    if not keep.any():
        with pytest.raises(UserError, match="ratio"):
            choice.plan(zero_expert)
        return
    layer = choice.plan(zero_expert).layers[7]
    experts = [expert for expert in range(len(keep)) if keep[expert] or zero_expert == "keep_null"]
    assert layer.retained == tuple(experts)
    assert layer.widths == tuple(keep[list(layer.retained)])
    for row, retained in zip(scores, layer.channels, strict=True):
        # stable: lower index falls first
        order = sorted(range(len(row)), key=lambda channel: row[channel])
        assert sorted(numpy.flatnonzero(~retained)) == sorted(order[: len(row) - retained.sum()])


def test_digest_is_of_retained_experts() -> None:
    assert two_layers(seed=1).digest == two_layers(seed=2).digest
    assert two_layers().digest != two_layers((0, 1, 3)).digest
    assert two_layers().digest != two_layers(count=5).digest
    layers = {2: LayerPlan(2, (0,)), 10: LayerPlan(2, (1,))}
    assert Plan(layers).digest == Plan(dict(reversed(layers.items()))).digest


MASK = numpy.ones((3, 2), dtype=bool)


@pytest.mark.parametrize(
    "layers",
    [
        {1: LayerPlan(4, (0, 4))},
        {1: LayerPlan(4, (-1, 2))},
        {1: LayerPlan(4, (2, 0))},
        {1: LayerPlan(4, (0, 0))},
        {1: LayerPlan(4, ())},
        {1: LayerPlan(3, (0, 2), MASK)},  # channels of a dropped expert
        {1: LayerPlan(4, (0, 2), MASK)},
        {0: LayerPlan(3, (0, 1, 2), MASK), 1: LayerPlan(1, (0,))},  # no mask for layer 1
    ],
)
def test_inconsistent_layers_of_a_plan_are_refused(layers: Any) -> None:
    with pytest.raises(UserError, match=r"layer 1\b|layers .*\b1\b"):
        Plan(layers)


def test_retained_experts_and_counts_must_be_of_the_same_layers() -> None:
    with pytest.raises(UserError, match=r"layers \[1\].*layers \[2\]"):
        Plan.of_experts({1: (0,)}, {2: 2})


@pytest.mark.parametrize(
    ("retained", "count", "router", "nearest"),
    [
        (range(3), 4, (4,), 4),
        ((0, 1, 2, 4, 5), 8, (2, 2), 2),  # unequal groups
        (range(0, 16, 2), 16, (4, 4, 1), 16),  # groups a token reaches must hold top_k experts
    ],
)
def test_routers_must_work_with_the_retained_experts(
    retained: Any, count: int, router: tuple[int, ...], nearest: int
) -> None:
    plan = Plan.of_experts({3: tuple(retained)}, {3: count})
    plan.check(tiny.routers([3], 2))
    with pytest.raises(UserError, match=rf"layer 3 .*\b{re.escape(str(nearest))}\b"):
        plan.check(tiny.routers([3], *router))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_scores_must_be_finite(value: float) -> None:
    with pytest.raises(UserError, match="layer 2, expert 1 "):
        make_plan({2: [1.0, value]}, {2: 0}, tiny.routers([2], 1), provenance={})
    scores = {2: numpy.array([[1.0], [value]])}
    keep = {2: numpy.array([1, 1])}
    with pytest.raises(UserError, match="layer 2, expert 1, channel 0 "):
        make_channel_plan(scores, keep, tiny.routers([2], 1), provenance={})


@pytest.fixture
def saved_plan(tmp_path: Path) -> Path:
    """The file of a plan of three experts of three channels."""
    channels = [
        [1, 0, 1],
        [0, 0, 0],
        [0, 1, 0],
    ]
    plan = Plan({4: LayerPlan(3, (0, 2), numpy.array(channels, bool))})
    plan.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def check_damaged(path: Path, text: str) -> None:
    """A plan file of this content is an error."""
    path.write_text(text)
    with pytest.raises(UserError, match=r"plan\.json is damaged"):
        Plan.load(path)


def test_plan_file_may_be_written_by_hand(saved_plan: Path) -> None:
    """Without schema, digest and provenance."""
    plan = Plan.load(saved_plan)
    saved_plan.write_text(json.dumps({"layers": json.loads(saved_plan.read_text())["layers"]}))
    assert Plan.load(saved_plan) == plan


def test_missing_plan_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"plan\.json"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 3},
        {"schema": None},
        {"digest": "0" * 64},
        {"layers": []},
        {"layers": {"1": {"experts": 4, "retained": [0, "1"]}}},
        {"layers": {"1": {"experts": 4, "retained": [0], "channels": {}}}},
    ],
)
def test_plan_file_with_a_wrong_field_is_refused(change: dict[str, Any], saved_plan: Path) -> None:
    content = json.loads(saved_plan.read_text())
    check_damaged(saved_plan, json.dumps({**content, **change}))


@pytest.mark.parametrize(
    ("original", "damaged"),
    [
        ("{", ""),
        ('"05"', '"5"'),
        ('"05"', '"07"'),
        ('"width": 3', '"width": 30'),
        ('"05"', '"0g"'),
    ],
)
def test_plan_file_with_wrong_text_is_refused(
    original: str, damaged: str, saved_plan: Path
) -> None:
    text = saved_plan.read_text()
    assert original in text
    check_damaged(saved_plan, text.replace(original, damaged, 1))


# ---- replaced experts


@pytest.mark.parametrize("way", ["merged", "constants"])
def test_each_routed_pair_adds_the_replacement_of_its_expert(way: str) -> None:
    """m = sum_j g_j f_G(j) with W_G = sum_i w_i W_i, or sum_j g_j c_j. The router is that of the
    original model."""
    model = tiny.build("qwen3_moe", dtype=torch.float64)
    plan = plan_without_alignment(random_plan(model, way, share=0.5))
    layer = moe_layers(model)[1]
    layer_plan = plan.layers[layer.index]
    calls: list[Any] = []
    hook = layer.experts.register_forward_hook(
        lambda _, args, result: calls.append((*args, result))
    )
    with hook, mask(model, plan):
        logits(model)
    hidden, index, gates, result = calls[0]
    _, gates_of_router, index_of_router, *_ = layer.router(hidden)
    assert torch.equal(index_of_router, index)
    assert torch.equal(gates_of_router, gates)
    experts = layer.experts
    group_of = {expert: group for group in layer_plan.merged.values() for expert in group}
    constants = {} if layer_plan.constants is None else null_outputs(layer_plan)
    assert 0 < len({**group_of, **constants}) < layer.n_experts
    expected = torch.zeros_like(hidden)
    for token, (chosen, weights) in enumerate(zip(index.tolist(), gates.tolist(), strict=True)):
        for expert, gate in zip(chosen, weights, strict=True):
            group = group_of.get(expert, {expert: 1.0}).items()
            gate_up = sum(share * experts.gate_up_proj[member] for member, share in group)
            down = sum(share * experts.down_proj[member] for member, share in group)
            computed = down @ activation(experts)(hidden[token : token + 1] @ gate_up.T)[0]
            expected[token] += gate * constants.get(expert, computed)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)


def null_outputs(plan: LayerPlan) -> dict[int, torch.Tensor]:
    """Null expert -> the constant that it puts out."""
    assert plan.constants is not None
    constants = torch.from_numpy(plan.constants).double()
    return dict(zip(plan.null_experts, constants, strict=True))


def test_merged_experts_without_a_router_row_lend_their_weights() -> None:
    """The router chooses among the experts that stand for a group; their weights are those of the
    merging plan."""
    model = tiny.build("qwen3_moe")
    plan = random_plan(model, "merged rows", share=0.5)
    merging = random_plan(model, "merged", share=0.5)
    for number, layer in merging.layers.items():
        assert plan.layers[number].merged == layer.merged
    assert merging.shares_experts
    assert not plan.shares_experts
    pruned = prune(model, plan)
    unmerged = prune(model, whole_expert_plan(plan))
    for merged, dropped in zip(moe_layers(pruned), moe_layers(unmerged), strict=True):
        assert torch.equal(merged.router.weight, dropped.router.weight)
        layer_plan = plan.layers[merged.index]
        differ = merged.experts.down_proj != dropped.experts.down_proj
        for position, expert in enumerate(layer_plan.retained):
            assert bool(differ[position].any()) == (expert in layer_plan.merged)


@pytest.mark.parametrize("shape", ["masked", "padded"])
def test_masked_and_padded_exports_refuse_merged_and_constant_experts(
    shape: str, tmp_path: Path
) -> None:
    model = tiny.save("deepseek_v3", tmp_path / "model")
    plan = random_plan(model, "merged rows", share=0.5)
    folder = export(tmp_path / "model", plan, tmp_path / "out", shape=shape)
    with mask(model, plan):
        expected = logits(model)
    torch.testing.assert_close(logits(tiny.load(folder)), expected, rtol=0, atol=1e-5)
    assert verify(tmp_path / "model", plan, folder) < 1e-4
    for way in ("merged", "constants") if shape == "padded" else ("merged",):
        other = random_plan(model, way, share=0.5)
        with pytest.raises(UserError, match=f"export={re.escape(shape)}.*export=natural"):
            export(tmp_path / "model", other, tmp_path / "other", shape=shape)
        assert not (tmp_path / "other").exists()


def test_merged_experts_save_no_operations() -> None:
    model = tiny.build("olmoe")
    pruned = prune(model, random_plan(model, "merged"))
    assert even_routing(routed_layers(pruned)) == even_routing(moe_layers(model))


@pytest.mark.parametrize(("way", "name"), [("merged", "alignment"), ("constants", "constants")])
def test_arrays_of_a_plan_are_read_as_they_were_written(
    way: str, name: str, tmp_path: Path
) -> None:
    plan = random_plan(tiny.build("olmoe"), way, share=0.5)
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    for number, layer in plan.layers.items():
        layer_again = again.layers[number]
        assert layer_again.merged == layer.merged
        numpy.testing.assert_array_equal(getattr(layer_again, name), getattr(layer, name))


@pytest.mark.parametrize(("way", "name"), [("merged", "alignment"), ("constants", "constants")])
def test_arrays_of_another_plan_are_refused(way: str, name: str, tmp_path: Path) -> None:
    plan = random_plan(tiny.build("olmoe"), way, share=0.5)
    plan.save(tmp_path / "plan.json")
    array = getattr(plan.layers[1], name)
    reversed_layer = replace(plan.layers[1], **{name: array[:, ::-1].copy()})
    replace(plan, layers={**plan.layers, 1: reversed_layer}).save(tmp_path / "other.json")
    numpy.save(tmp_path / "array.npy", array)
    other_files = [(tmp_path / file).read_bytes() for file in ("other.npz", "array.npy")]
    for damaged in (*other_files, b"PK", b""):
        (tmp_path / "plan.npz").write_bytes(damaged)
        with pytest.raises(UserError, match=r"plan\.json is damaged"):
            Plan.load(tmp_path / "plan.json")
    (tmp_path / "plan.npz").unlink()
    with pytest.raises(UserError, match=r"plan\.npz"):
        Plan.load(tmp_path / "plan.json")


def test_nothing_is_merged_into_a_protected_expert() -> None:
    groups = {0: {0: 0.5, 1: 0.5}, 2: {2: 1.0}, 3: {3: 1.0}}
    plan = Plan({0: merge_experts(groups, 4)})
    routers = tiny.routers([0], 2)
    plan.check({0: {**routers[0], "protected": (2,)}})
    with pytest.raises(UserError, match=r"expert 0\b"):
        plan.check({0: {**routers[0], "protected": (0,)}})


# ---- orders of channels


def weights_of(layer: Any, expert: int) -> list[Any]:
    """The gate row, up row and down column of each channel of an expert."""
    gate, up = layer.experts.gate_up_proj[expert].detach().double().chunk(2)
    down = layer.experts.down_proj[expert].detach().double()
    return [torch.cat((gate[i], up[i], down[:, i])).numpy() for i in range(layer.width)]


def test_alignment_by_weights_is_the_best_of_all_orders() -> None:
    """M-SMoE: argmax over p of sum_i <gate_o[i], gate_m[p_i]> + <up_o[i], up_m[p_i]> + <down_o[i],
    down_m[p_i]>."""
    model = tiny.build("olmoe", intermediate_size=5)
    plan = align_by_weights(random_plan(model, "merged", share=0.5), moe_layers(model))
    for layer in moe_layers(model):
        owners = plan.layers[layer.index].owners
        for row, member in enumerate(plan.layers[layer.index].merged_members):
            of_owner = weights_of(layer, owners[member])
            of_member = weights_of(layer, member)
            products = numpy.array(of_owner) @ numpy.array(of_member).T
            orders = [list(order) for order in permutations(range(5))]
            sums = [products[range(5), order].sum() for order in orders]
            best = orders[numpy.argmax(sums)]
            assert plan.layers[layer.index].alignment[row].tolist() == best


def permute_members(model: Any, plan: Plan) -> None:
    """Make the members of each group their owner with its channels in another order."""
    random = numpy.random.default_rng(0)
    for layer in moe_layers(model):
        experts: Any = layer.experts
        for owner, group in plan.layers[layer.index].merged.items():
            for member in group.keys() - {owner}:
                order = torch.from_numpy(random.permutation(layer.width))
                gate_and_up = torch.cat((order, order + layer.width))
                experts.gate_up_proj[member] = experts.gate_up_proj[owner][gate_and_up]
                experts.down_proj[member] = experts.down_proj[owner][:, order]


@pytest.mark.parametrize("by_activations", [False, True])
def test_alignment_merges_permuted_experts_without_loss(by_activations: bool) -> None:
    model = tiny.build("qwen3_moe")
    plan = plan_without_alignment(random_plan(model, "merged", share=0.8))
    permute_members(model, plan)
    if by_activations:
        sums = collect_statistics(model, alignment_hook(plan), tiny.batches()).layers
        aligned = align_by_activations(plan, sums)
    else:
        aligned = align_by_weights(plan, moe_layers(model))
    original = logits(model)
    with mask(model, aligned):
        assert (logits(model) - original).abs().max() < 1e-5
    with mask(model, plan):
        assert (logits(model) - original).abs().max() > 1e-3


def naive_cost(of_owner: Any, of_member: Any) -> Any:
    """(I, I) Euclidean distances of rows, each divided by its norm."""
    first = of_owner / numpy.linalg.norm(of_owner, axis=1)[:, None]
    second = of_member / numpy.linalg.norm(of_member, axis=1)[:, None]
    return numpy.array([[numpy.linalg.norm(a - b) for b in second] for a in first])


def record_inputs(model: Any, ids: torch.Tensor, valid: torch.Tensor) -> dict[int, torch.Tensor]:
    """MoE layer -> hidden states of the valid tokens before its experts (T, H)."""
    states: dict[int, torch.Tensor] = {}
    hooks = [
        layer.experts.register_forward_pre_hook(
            lambda _, args, index=layer.index: states.update({index: args[0].detach()})
        )
        for layer in moe_layers(model)
    ]
    with torch.no_grad():
        model(input_ids=ids, attention_mask=valid.long())
    for hook in hooks:
        hook.remove()
    return {index: tensor[valid.flatten()] for index, tensor in states.items()}


def principal_components(layer: Any) -> Any:
    """(N, I, H) coordinates of the normed weights of each channel of each expert."""
    rows = numpy.stack([weights_of(layer, expert) for expert in range(layer.n_experts)])
    rows = rows / numpy.linalg.norm(rows, axis=2)[:, :, None]
    mean = rows.mean((0, 1))
    deviations = (rows - mean).reshape(-1, len(mean))
    _, singular, directions = numpy.linalg.svd(deviations, full_matrices=False)
    return (((rows - mean) @ directions.T) * singular)[..., :64]


# with 96, there are more than the 64 components that are compared
@pytest.mark.parametrize("hidden_size", [16, 96])
def test_ream_adds_distances_of_activations_and_of_principal_components(hidden_size: int) -> None:
    model = tiny.build("olmoe", dtype=torch.float64, hidden_size=hidden_size)
    ids, valid = naive.batch()
    plan = plan_without_alignment(random_plan(model, "merged", share=0.5))
    states = record_inputs(model, ids, valid)
    sums = collect_statistics(
        model, alignment_hook(plan), [(ids[:2], valid[:2]), (ids[2:], valid[2:])]
    )
    aligned = align_by_activations(plan, sums.layers)
    assert not valid.all()
    assert plan.merged_layers
    for layer in moe_layers(model):
        components = principal_components(layer)
        layer_plan = aligned.layers[layer.index]
        for row, member in enumerate(layer_plan.merged_members):
            owner = layer_plan.owners[member]
            phi = [
                layer.phi(states[layer.index], layer.weights(expert)).detach().numpy().T
                for expert in (owner, member)
            ]
            cost = naive_cost(*phi) + naive_cost(components[owner], components[member])
            best = cost[linear_sum_assignment(cost)].sum()
            order = layer_plan.alignment[row]
            assert cost[numpy.arange(layer.width), order].sum() == pytest.approx(best, rel=1e-6)


def test_engines_align_alike(tmp_path: Path) -> None:
    model = tiny.save("olmoe", tmp_path / "model")
    plan = plan_without_alignment(random_plan(model, "merged", share=0.5))
    streamed = StreamedModel(tmp_path / "model", dtype=torch.float32, device="cpu")
    by_weights = align_by_weights(plan, streamed.loaded_moe_layers())
    assert by_weights != plan
    assert by_weights == align_by_weights(plan, moe_layers(model))
    assert by_weights == moe_lab.align(model, plan)
    hook = alignment_hook(plan)
    batches = tiny.batches()
    sums = stream(streamed, hook, batches, out=tmp_path / "out")
    by_activations = align_by_activations(plan, sums.layers)
    assert by_activations == align_by_activations(
        plan, collect_statistics(model, hook, batches).layers
    )
    assert by_activations not in (plan, by_weights)


@pytest.mark.parametrize(
    ("merges", "arguments", "field"),
    [
        (False, {}, "plan merges no experts"),
        (True, {"length": 3}, "length"),
        (True, {"text": ["a text"]}, "tokenizer"),
    ],
)
def test_align_names_a_wrong_argument(merges: bool, arguments: dict[str, Any], field: str) -> None:
    model = tiny.build("olmoe")
    plan = random_plan(model, "merged", share=0.5) if merges else tiny.plan(model, 0.5)
    with pytest.raises(UserError, match=field):
        moe_lab.align(model, plan=plan, **arguments)


def test_constants_replace_dropped_experts_alone() -> None:
    outputs = numpy.arange(6.0).reshape(3, 2)
    replaced = replace_by_constants(LayerPlan(3, (0, 2)), outputs, width=4)
    assert replaced.constants is not None
    assert replaced.constants.tolist() == [[2.0, 3.0]]
    assert replace_by_constants(LayerPlan(3, (0, 1, 2)), outputs, width=4).constants is None
