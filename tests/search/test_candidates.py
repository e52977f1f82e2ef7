"""Fitness by hand; candidates with all shortcuts against the plain way: the masked model, run on
all of the set.

And the steps that run the model to make a plan: an evolutionary search, and pruning layer after
layer.
"""

import copy
import itertools
import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
import tiny
import torch
from tokenizers.pre_tokenizers import WhitespaceSplit

from moe_lab import criteria
from moe_lab.allocation.grouping import required_passes
from moe_lab.calibration.batches import answer_batches
from moe_lab.config import CalibrationConfig
from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.models.streamed import StreamedModel
from moe_lab.pruning.alignment import align_by_activations, align_by_weights, alignment_hook
from moe_lab.pruning.layer_plan import LayerPlan
from moe_lab.pruning.mask import mask, mask_layers
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune
from moe_lab.pruning.selection import plan_from_scores
from moe_lab.search.candidates import Candidates, Decoder, Plans, PrefixStates
from moe_lab.search.evolution import Schedule, SearchSettings, space_to_search
from moe_lab.search.fitness import POSITION_FITNESS, average, evaluated_positions
from moe_lab.search.run import search
from moe_lab.search.sequential import Sums, prune_sequentially
from moe_lab.search.speculative_decoding import DraftingCandidates, accepted_and_proposed, prompts
from moe_lab.statistics import observe
from moe_lab.statistics.damage import SimilarityHook
from moe_lab.statistics.forward import ForwardHook
from moe_lab.statistics.observe import Batch, Observer, collect_statistics

ARCHITECTURES = [
    "olmoe",
    "deepseek_v2",
    "deepseek_v2:grouped",
    "deepseek_v3",
    "deepseek_v3:grouped",
    "ernie4_5_moe",
    "minimax_m2",
    "qwen3_next",
    "gpt_oss",
    "granitemoe",
    "afmoe",
    "jamba",
]


def naive(name: str, p: list[float], q: list[float], target: int, luck: float) -> float:
    if name == "esap":
        return sum(map(min, p, q))
    if name == "nll":
        return math.log(q[target])
    if name == "kl_reversed":
        p, q = q, p
    if name != "sap":
        return -sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    y = next(y for y in range(len(q)) if sum(q[: y + 1]) > luck)
    return min(1.0, p[y] / q[y])


def answer_rows(rows: int = 6, length: int = 12, batch: int = 2) -> list[tuple[torch.Tensor, ...]]:
    """Rows of different lengths, each with a task and an answer, in batches."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, tiny.VOCABULARY, (rows, length), generator=generator)
    end = torch.randint(length // 2 + 1, length + 1, (rows, 1), generator=generator)
    begin = torch.randint(1, length // 2, (rows, 1), generator=generator)
    positions = torch.arange(length)[None]
    valid = positions < end
    answers = valid & (positions >= begin)
    parts = (part.split(batch) for part in (ids, valid, answers))
    return list(zip(*parts, strict=True))


def make_plans(model: Any, seed: int = 0) -> Plans:
    generator = torch.Generator().manual_seed(seed)
    draws = {
        layer.index: torch.rand(layer.n_experts, generator=generator)
        for layer in tiny.moe_layers(model)
    }
    return Plans(
        tiny.routers_of(model), {index: scores.tolist() for index, scores in draws.items()}
    )


def some_schedules(plans: Plans) -> list[Schedule]:
    """A family: relatives that differ early, late, and in between; feasible for groups of four."""
    half = [len(scores) // 2 // 4 * 4 for scores in plans.scores.values()]
    steps = list(itertools.product((0, 4), repeat=len(half)))
    schedules = []
    for step in reversed(steps):
        schedules.append(tuple(count - less for count, less in zip(half, step, strict=True)))
    return schedules


def plainly(
    model: Any, plans: Plans, schedule: Schedule, rows: Any, name: str, draws: torch.Tensor
) -> float:
    """Macro average in fp64 with nothing spared; `draws` is the luck of all judged positions."""
    means = []
    used = 0
    for ids, valid, answers in rows:
        with torch.no_grad():
            p = model(ids, attention_mask=valid.long()).logits.double().softmax(-1)
            with mask(model, plans.plan(schedule)):
                q = model(ids, attention_mask=valid.long()).logits.double().softmax(-1)
        for row in range(len(ids)):
            values = []
            for position in range(ids.shape[1] - 1):
                if answers[row, position + 1]:
                    true = p[row, position].tolist()
                    estimated = q[row, position].tolist()
                    values.append(
                        naive(
                            name, true, estimated, int(ids[row, position + 1]), float(draws[used])
                        )
                    )
                    used += 1
            means.append(sum(values) / len(values))
    return sum(means) / len(means)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_shortcuts_change_nothing(name: str) -> None:
    model = tiny.build(name)
    original = tiny.logits(model)
    plans = make_plans(model)
    rows = answer_rows()
    candidates = Candidates(model, plans, rows, SearchSettings(seed=0))
    schedules = some_schedules(plans)
    half = len(schedules) // 2
    results = candidates.evaluate(schedules[:half]) + candidates.evaluate(schedules[half:])
    expected = [
        plainly(model, plans, schedule, rows, "esap", torch.zeros(999)) for schedule in schedules
    ]
    assert results == pytest.approx(expected, abs=1e-6)
    assert len(set(results)) == len(schedules)
    assert candidates.forwards < 1 + 0.85 * len(schedules)
    assert torch.equal(tiny.logits(model), original)
    assert not any("forward" in vars(module) for module in model.modules())


def test_prefixes_are_computed_once() -> None:
    """And the unpruned model once: of three layers, in three batches."""
    model = tiny.build("olmoe")
    runs = []
    candidates = Candidates(model, make_plans(model), answer_rows(), SearchSettings(seed=0))
    for number, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_pre_hook(lambda module, args, index=number: runs.append(index))
    candidates.evaluate(list(itertools.product((0, 4), repeat=3)))
    assert candidates.forwards == pytest.approx(1 + (2 + 4 + 8) / 3)
    assert [runs.count(layer) for layer in range(3)] == [3 * (1 + count) for count in (2, 4, 8)]


@pytest.mark.parametrize("fitness", sorted(POSITION_FITNESS))
def test_every_fitness_is_what_the_plain_way_gives(fitness: str) -> None:
    """Also with batches of other sizes."""
    model = tiny.build("olmoe")
    plans = make_plans(model)
    rows = answer_rows()
    schedules = [(8, 4, 8), (4, 8, 8)]
    generator = torch.Generator().manual_seed(7)
    luck = torch.cat(
        [
            torch.rand(int(marks.sum()), generator=generator, dtype=torch.float64)
            for _, _, marks in rows
        ]
    )
    expected = [plainly(model, plans, schedule, rows, fitness, luck) for schedule in schedules]
    for size in (1, 2, 6):
        settings = SearchSettings(fitness=fitness, seed=7)
        results = Candidates(model, plans, answer_rows(batch=size), settings).evaluate(schedules)
        assert results == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("budget", [0, 20_000, 40_000, 2**31])
def test_no_memory_gives_the_same_numbers_at_a_higher_cost(budget: int) -> None:
    model = tiny.build("olmoe")
    plans = make_plans(model)
    rows = answer_rows()
    rich, poor = (
        Candidates(model, plans, rows, SearchSettings(memory_budget=size, seed=0))
        for size in (2**31, budget)
    )
    schedules = some_schedules(plans)
    for some in (schedules[:3], schedules[3:6], schedules[6:]):
        assert poor.evaluate(some) == rich.evaluate(some)
    # without memory, the unpruned model runs for each of the three calls
    assert poor.forwards >= rich.forwards + (0 if budget else 2)


def test_a_schedule_has_a_count_for_each_layer() -> None:
    plans = make_plans(tiny.build("olmoe"))
    with pytest.raises(ValueError, match="shorter"):
        plans.plan((4,) * (len(plans.layers) - 1))


def test_candidates_of_a_damaged_model_are_refused() -> None:
    model = tiny.build("olmoe")
    plans = make_plans(model)
    model.get_output_embeddings().weight.data[5, 5] = float("nan")
    with pytest.raises(UserError, match=r"esap of the model that loses \[4, 4, 4\] .* is nan"):
        Candidates(model, plans, answer_rows(), SearchSettings(seed=0)).evaluate([(4, 4, 4)])


def drafting(model: Any, **settings: Any) -> DraftingCandidates:
    how = SearchSettings(fitness="spec_dec", seed=0, **settings)
    return DraftingCandidates(model, make_plans(model), answer_rows(), how, frozenset({2}))


def test_spec_dec_of_the_unpruned_model_accepts_everything() -> None:
    candidates = drafting(tiny.build("deepseek_v2"), max_new_tokens=4)
    unpruned, half = candidates.evaluate([(0, 0), (12, 12)])
    assert unpruned == 1
    assert 0 < half < 1
    assert candidates.evaluate([(12, 12)]) == [half]
    # the unpruned model checks at most four drafted tokens, all at once or one after the other
    assert 0 < candidates.forwards <= 2 * 2 * 4
    with pytest.raises(
        UserError, match=r"max_new_tokens=125 and a task of \d+ tokens do not fit the model's 128"
    ):
        drafting(tiny.build("olmoe"), max_new_tokens=125)


def test_contexts_end_just_before_answers() -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    answers = torch.tensor([[True, False, True, True]])
    luck = torch.Generator().manual_seed(0)
    shifted = evaluated_positions(ids, answers, shift=True, generator=luck)
    assert shifted.is_evaluated.tolist() == [[False, True, True, False]]
    assert shifted.targets.tolist() == [
        7,
        8,
    ]
    released = evaluated_positions(ids, answers, shift=False, generator=luck)
    assert released.is_evaluated.tolist() == answers.tolist()
    assert released.targets.tolist() == [
        6,
        8,
        0,
    ]
    ids = torch.tensor([[4, 5, 6, 7], [8, 9, 0, 0]])
    valid = torch.tensor([[True] * 4, [True, True, False, False]])
    answers = torch.tensor([[False, False, True, True], [True, True, False, False]])
    assert prompts(ids, valid, answers) == [[4, 5], []]


def test_macro_and_micro() -> None:
    sums = [1.0, 0.0, 9.0]
    counts = [1, 0, 10]
    assert average(sums, counts, "macro") == pytest.approx((1 + 0.9) / 2)
    assert average(sums, counts, "micro") == pytest.approx(10 / 11)


def markov(
    table: list[list[float]], ids: torch.Tensor, valid: torch.Tensor, where: torch.Tensor
) -> torch.Tensor:
    """A language model that only looks at the last token."""
    return torch.tensor(table, dtype=torch.float64)[ids[where]]


def test_speculative_decoding_by_hand() -> None:
    """Token 2 ends a text. The candidate always drafts 1; the full model accepts it half of the
    time after 0, never after 1, where it says 2 itself."""
    candidate = [[0.0, 1.0, 0.0]] * 3
    full = [[0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    luck = torch.tensor(
        [
            [[0.5, 0.4, 0.5], [0.5] * 3],
            [[0.5, 0.6, 0.5], [0.5, 0.1, 0.5]],
            [[0.5, 0.1, 0.5], [0.5] * 3],
        ]
    )
    counts = accepted_and_proposed(
        [[0], [0], []],
        luck.double(),
        lambda *batch: markov(candidate, *batch),
        lambda *batch: markov(full, *batch),
        ends=frozenset({2}),
    )
    # first text: 1 is accepted, 2 follows; second: 1 is refused, 0 follows, then 1 is accepted; the
    # third has no task
    assert counts == [(1, 1), (1, 2), (0, 0)]


# ---- which layers are run, which states are kept, and for how many bytes


def test_layers_that_are_skipped_get_their_forward_back() -> None:
    """As the forward of a model that is spread over devices."""
    model = tiny.build("olmoe")
    layer = model.model.layers[0]
    calls = tiny.count_calls(pytest.MonkeyPatch(), layer, "forward")
    forward = layer.forward
    ids = tiny.tokens(2, 5)
    states = {}
    valid = torch.ones_like(ids, dtype=torch.bool)
    for schedule in ((0, 0, 0), (0, 0, 4)):
        Decoder(model).logits(ids, valid, valid, schedule, states)
    assert layer.forward is forward
    assert len(calls) == 1


def test_candidates_keep_states_within_their_budget() -> None:
    # room for three states of 16 bytes for each batch
    prefix_states, state = PrefixStates(2, 2 * 3 * 16), torch.zeros(4)
    for schedule, states in prefix_states.iterate(0, [(1, 1, 1, 1), (2, 2, 2, 2)]):
        assert all(schedule[: len(start)] == start for start in states)
        states.update({schedule[:k]: state for k in range(4)})
    assert not prefix_states.states[1]
    assert set(prefix_states.states[0]) == {(), (1,), (1, 1)}
    prefix_states.retain([(1, 2, 2, 2)])
    assert not prefix_states.states[1]
    assert set(prefix_states.states[0]) == {(), (1,)}


# ---- the steps

SMALL = {"population": 14, "elites": 3, "generations": 6}


class World:
    """A tiny model with its facts, scores, tokenizer and a search set of twelve tasks."""

    def __init__(self, name: str, folder: Path) -> None:
        self.model = tiny.build(name)
        self.folder = folder
        layers = moe_layers(self.model)
        generator = torch.Generator().manual_seed(1)
        self.scores = {
            layer.index: torch.rand(layer.n_experts, generator=generator).tolist()
            for layer in layers
        }
        # as facts.json has it
        self.facts = {"layers": {str(layer.index): vars(layer) for layer in layers}}
        self.tokenizer = tiny.tokenizer(model_max_length=128)
        self.tokenizer.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
        tasks = torch.randint(3, tiny.VOCABULARY, (12, 10), generator=generator).tolist()
        halves = [[" ".join(f"w{n}" for n in half) for half in (row[:5], row[5:])] for row in tasks]
        lines = [json.dumps({"instruction": task, "output": answer}) for task, answer in halves]
        (folder / "tasks.jsonl").write_text("\n".join(lines))
        rows = {
            "packing": "none",
            "length": 10,
            "tokens": 120,
            "batch_tokens": 40,
            "order": "first",
        }
        self.text = CalibrationConfig("tasks", str(folder / "tasks.jsonl"), **rows)

    def settings(self, **parameters: Any) -> dict[str, Any]:
        return {
            "name": "evolutionary",
            "ratio": 0.5,
            "multiple_of": 1,
            "parameters": {**SMALL, **parameters},
        }

    def run(self, out: str, text: CalibrationConfig | None = None, **parameters: Any) -> Path:
        folder = self.folder / out
        folder.mkdir(exist_ok=True)
        fields = {
            "facts": self.facts,
            "scores": self.scores,
            "settings": self.settings(**parameters),
        }
        paths = {"out": folder, "partial": self.folder / f"{out}.partial"}
        search(self.model, self.tokenizer, text=text or self.text, seed=5, **fields, **paths)
        return folder


@pytest.mark.parametrize("name", ["olmoe", "deepseek_v3:grouped"])
def test_search_finds_the_optimum_of_enumeration(name: str, tmp_path: Path) -> None:
    """Of 20 generations, against the fitness of every schedule of the space. The history has every
    schedule that was made."""
    world = World(name, tmp_path)
    folder = world.run("found", generations=20)
    space = space_to_search(world.settings(), world.facts, SearchSettings())
    schedules = [space.schedule_at(number) for number in range(space.size)]
    plans = Plans(tiny.routers_of(world.model), world.scores)
    tasks = answer_batches(world.text, world.tokenizer)
    values = Candidates(world.model, plans, tasks, SearchSettings(seed=5)).evaluate(schedules)
    fitness = dict(zip(schedules, values, strict=True))
    rows = parquet.read_table(folder / "history.parquet").to_pylist()
    best = max(rows, key=lambda row: row["fitness"])
    assert best["fitness"] == pytest.approx(max(values), abs=1e-9)
    assert tuple(best["schedule"]) == max(fitness, key=lambda schedule: fitness[schedule])
    assert Plan.load(folder / "plan.json") == plans.plan(tuple(best["schedule"]))
    assert "uniform" in {row["origin"] for row in rows}
    assert len({sum(row["schedule"]) for row in rows}) == 1
    cost = json.loads((folder / "search.json").read_text())["cost"]
    assert len({tuple(row["schedule"]) for row in rows}) == cost["candidates"]
    assert cost["forwards"] > 0


def test_killed_search_resumes_with_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World("olmoe", tmp_path)
    complete = world.run("whole")
    with monkeypatch.context() as patch, pytest.raises(tiny.SimulatedKill):
        tiny.count_calls(patch, Candidates, "evaluate", kill_at=4)
        world.run("killed")
    assert not (world.folder / "killed" / "plan.json").exists()
    resumed = world.run("killed")
    for file in ("plan.json", "history.parquet"):
        assert (resumed / file).read_bytes() == (complete / file).read_bytes()
    costs = [
        json.loads((folder / "search.json").read_text())["cost"] for folder in (complete, resumed)
    ]
    assert costs[1]["candidates"] == costs[0]["candidates"]
    assert costs[1]["forwards"] < costs[0]["forwards"]


# ---- layer after layer


def chooser(model: Any, name: str, replacement: str = "none") -> Any:
    """(layer, its sums) -> the plan of that layer by a criterion; squared norms of the down columns
    are the model's."""
    granularity = criteria.get(name).granularity
    settings = {
        "name": "uniform" if granularity == "expert" else "layerwise",
        "ratio": 0.25 if replacement == "none" else 0.5,
        "multiple_of": 1,
        "parameters": {},
        "replacement": replacement,
    }
    layers = {layer.index: layer for layer in moe_layers(model)}

    def choose(index: int, sums: Sums) -> Plan:
        layer = layers[index]
        sums = {
            **sums,
            "channel_down_square": layer.experts.down_proj.double().square().sum(1).numpy(),
        }
        facts = {index: {**vars(layer), "width": layer.width}}
        scores = criteria.score(name, {index: sums}, facts)
        evidence = {need: {index: sums} for need in required_passes(replacement)}
        return plan_from_scores(settings, scores, facts, evidence, provenance={})

    return choose


def pruned(model: Any, plans: dict[int, Plan]) -> Any:
    """A copy of the model in which some layers have lost what their plans drop; columns of dropped
    channels are 0."""
    changed = copy.deepcopy(model)
    layers = {layer.index: layer for layer in moe_layers(changed)}
    for index, plan in plans.items():
        channels = plan.layers[index].channels
        for expert, row in enumerate(() if channels is None else channels):
            layers[index].experts.down_proj.data[expert][:, ~torch.from_numpy(row)] = 0
    expected_files = {
        index: LayerPlan(layer.n_experts, tuple(range(layer.n_experts)))
        for index, layer in layers.items()
    }
    dropping = {
        index: LayerPlan(len(expected_files[index].retained), plan.retained[index])
        for index, plan in plans.items()
    }
    return prune(changed, Plan(expected_files | dropping))


def one_after_the_other(model: Any, choose: Any, batches: list[Batch]) -> dict[int, Plan]:
    """The definition: statistics of a model whose layers below are pruned, read anew for each
    layer."""
    plans: dict[int, Plan] = {}
    for layer in moe_layers(model):
        statistics = collect_statistics(pruned(model, plans), ForwardHook, batches)
        plans[layer.index] = choose(layer.index, statistics.layers[layer.index])
    return plans


def run_sequentially(name: str, choose: Any, folder: Path, **settings: Any) -> Plan:
    tiny.save(name, folder / "model")
    streamed = StreamedModel(folder / "model", dtype=torch.float32, device="cpu")
    return prune_sequentially(
        streamed, tiny.batches(), choose, out=folder, provenance={"of": "a test"}, **settings
    )


@pytest.mark.parametrize("criterion", ["camera", "reap"])
@pytest.mark.parametrize("name", ["olmoe", "deepseek_v2", "qwen3_next", "ernie4_5_moe"])
def test_sequential_search_scores_layers_on_pruned_inputs(
    name: str, criterion: str, tmp_path: Path
) -> None:
    model = tiny.build(name)
    choose = chooser(model, criterion)
    expected = one_after_the_other(model, choose, tiny.batches())
    result = run_sequentially(name, choose, tmp_path)
    assert result.provenance == {"of": "a test"}
    for number, plan in expected.items():
        assert result.layers[number].as_json() == plan.layers[number].as_json()


MERGES = {
    "mean_output": (None, [ForwardHook]),
    "hc_smoe": (None, [ForwardHook, SimilarityHook]),
    "m_smoe": ("weights", [ForwardHook, SimilarityHook]),
    "ream": ("activations_and_weights", [ForwardHook, SimilarityHook]),
}
"""Replacement -> features by which channels are matched, and hooks whose sums it reads."""


def sums_of(model: Any, number: int, hook: Any, plans: dict[int, LayerPlan]) -> Any:
    """The sums of one layer of a model in which some layers are masked by plans."""
    layers = moe_layers(model)
    masked = [layer for layer in layers if layer.index in plans]
    observed = [layer for layer in layers if layer.index == number]
    with (
        mask_layers(masked, Plan(plans)) if plans else nullcontext(),
        Observer(model, hook, layers=observed) as observer,
    ):
        for ids, valid in tiny.batches():
            observer.run_batch(ids, valid)
        return observer.layers()[number]


def merged_one_after_the_other(model: Any, choose: Any, replacement: str) -> Plan:
    """The definition: each layer is scored, grouped and matched on the output of merged layers."""
    align, hooks = MERGES[replacement]
    plans: dict[int, LayerPlan] = {}
    for layer in moe_layers(model):
        number = layer.index
        sums: dict[str, Any] = {}
        for hook in hooks:
            sums |= sums_of(model, number, hook, plans)
        plan = choose(number, sums)
        if align == "weights":
            plan = align_by_weights(plan, [layer])
        elif align is not None:
            order = sums_of(model, number, alignment_hook(plan), plans)
            plan = align_by_activations(plan, {number: order})
        plans |= plan.layers
    return Plan(plans, {"of": "a test"})


@pytest.mark.parametrize("replacement", MERGES)
@pytest.mark.parametrize("name", ["olmoe", "deepseek_v2"])
def test_sequential_search_merges_experts_on_merged_inputs(
    name: str, replacement: str, tmp_path: Path
) -> None:
    """REAM (arXiv 2604.04356) merges a layer before it reads the next one."""
    model = tiny.build(name)
    choose = chooser(model, "reap", replacement)
    align, hooks = MERGES[replacement]
    expected = merged_one_after_the_other(model, choose, replacement)
    result = run_sequentially(name, choose, tmp_path, hooks=hooks, align=align)
    assert result == expected
    ids, valid = tiny.batches()[0]
    with mask(model, result):
        model(ids, attention_mask=valid)


@pytest.mark.parametrize(("criterion", "replacement"), [("camera", "none"), ("reap", "ream")])
def test_interrupted_sequential_search_resumes_at_its_last_layer(
    criterion: str, replacement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = chooser(tiny.build("olmoe"), criterion, replacement)
    align, hooks = MERGES.get(replacement, (None, [ForwardHook]))
    settings: dict[str, Any] = {"hooks": hooks, "align": align}
    expected = run_sequentially("olmoe", choose, tmp_path / "undisturbed", **settings)

    def killed(layer: int, sums: Sums) -> Plan:
        if layer == 1:
            raise KeyboardInterrupt
        return choose(layer, sums)

    monkeypatch.setattr(observe, "SAVE_INTERVAL", 0.0)
    monkeypatch.setattr(observe, "SAVE_FACTOR", 0)
    with pytest.raises(KeyboardInterrupt):
        run_sequentially("olmoe", killed, tmp_path / "killed", **settings)
    calls = tiny.count_calls(monkeypatch, ForwardHook, "experts")
    result = run_sequentially("olmoe", choose, tmp_path / "killed", **settings)
    assert result == expected and len(calls) == 2 * len(tiny.batches()), "layers 1 and 2 are left"
