"""Steps done on tiny and shipped models: passes in parts, the tables that they leave, costs,
evaluations."""

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import example_steps
import numpy as np
import pandas as pd
import pytest
import tiny
from example_steps import Example, cell_of, evaluation_step, perform_with_inputs
from safetensors.numpy import load_file

from moe_lab import calibration as calibrations
from moe_lab.config import (
    BenchmarkConfig,
    CalibrationConfig,
    CriterionConfig,
    ModelConfig,
    RecoveryConfig,
)
from moe_lab.errors import Unavailable
from moe_lab.evaluation import run
from moe_lab.evaluation.harness import Harness
from moe_lab.evaluation.items import Answer
from moe_lab.models import load
from moe_lab.models.discover import moe_layers
from moe_lab.pruning.layer_plan import LayerPlan
from moe_lab.pruning.plan import Plan
from moe_lab.statistics import read
from moe_lab.statistics.observe import Observer
from moe_lab.study.provenance import read_step
from moe_lab.study.schedule import InProcessExecutor, Schedule, StepError, work
from moe_lab.study.slurm.jobs import update_from_store
from moe_lab.study.step import Step, unmerged
from moe_lab.study.steps.costs import Cost
from moe_lab.study.steps.evaluation import Contamination, Evaluate, Items
from moe_lab.study.steps.files import Files
from moe_lab.study.steps.passes import loaded_field
from moe_lab.study.steps.plans import drops_whole_experts
from moe_lab.study.steps.recovery import Pruned, unpruned_model
from moe_lab.study.store import Store

MODEL = ModelConfig(name="pocket", path="pocket:olmoe", device="cpu", threads=1)
TEXT = CalibrationConfig(
    name="text",
    path="pocket:calibration/general.jsonl",
    packing="chunk",
    gap="eos",
    length=48,
    tokens=7 * 48,
    batch_tokens=96,
    seed=3,
)
"""7 rows in 4 batches, the last of 1 row."""
SUMS = "statistics.safetensors"
KINDS = ("statistics", "gradients", "damage", "similarity", "ablation", "scaling")


def step_of(kind: str = "statistics", **settings: Any) -> Step:
    return example_steps.step_of(kind, cell_of(MODEL, replace(TEXT, **settings)))


def do(store: Store, step: Step) -> list[Step]:
    """Execute the step and all that it needs in this process; returns the steps that were
    executed."""
    executed: list[Step] = []
    steps = [*step.inputs.values(), *step.merged_steps, step]
    finished = {step.id for step in steps if store.is_finished(step)}
    with InProcessExecutor(store) as execute:

        def count_and_execute(step: Step, scratch: Path) -> None:
            executed.append(step)
            execute(step, scratch)

        schedule = Schedule(unmerged(steps, finished), finished)
        work(schedule, store, count_and_execute)
    for error in schedule.failed.values():
        raise error
    return executed


@pytest.fixture(scope="module")
def undivided(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with one pass of each kind over all rows."""
    store = Store(tmp_path_factory.mktemp("undivided")).create()
    for kind in KINDS:
        do(store, step_of(kind))
    return store


def assert_close(
    sums: dict[int, dict[str, Any]],
    expected: dict[int, dict[str, Any]],
    tolerance: float = 1e-12,
) -> None:
    assert sums.keys() == expected.keys()
    for layer, arrays in sums.items():
        assert arrays.keys() == expected[layer].keys()
        for name, values in arrays.items():
            size = np.abs(expected[layer][name]).max()
            np.testing.assert_allclose(
                values, expected[layer][name], rtol=tolerance, atol=tolerance * size, err_msg=name
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "parts"), [*zip(KINDS, [2, 3] * 3, strict=True), ("statistics streamed", 2)]
)
def test_merged_sums_are_those_of_one_pass(
    undivided: Store, tmp_path: Path, kind: str, parts: int
) -> None:
    kind, _, engine = kind.partition(" ")
    step = step_of(kind, parts=parts, engine=engine or "resident")
    store = Store(tmp_path).create()
    do(store, step)
    folder = store.path(step)
    expected = undivided.path(step_of(kind))
    assert_close(read(folder / SUMS), read(expected / SUMS))
    assert (folder / "calibration.json").read_bytes() == (
        expected / "calibration.json"
    ).read_bytes()
    tables, expected_tables = (
        {file.name for file in path.glob("*.parquet")} for path in (folder, expected)
    )
    assert tables == expected_tables
    merged = [store.path(part).name for part in step.merged_steps]
    assert read_step(folder)["provenance"]["merged"] == merged


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["statistics", "gradients", "damage", "similarity"])
def test_sums_depend_on_the_size_of_batches_only_by_rounding(
    undivided: Store, tmp_path: Path, kind: str
) -> None:
    """One row at once, and six tenths of the text, against two rows."""
    expected = read(undivided.path(step_of(kind)) / SUMS)
    for batch_tokens in (1, 200):
        step = step_of(kind, batch_tokens=batch_tokens)
        assert step.id != step_of(kind).id
        store = Store(tmp_path).create()
        do(store, step)
        assert_close(read(store.path(step) / SUMS), expected, tolerance=1e-5)


@pytest.mark.slow
def test_only_the_killed_part_of_a_pass_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two, the second. Afterwards no part is needed, neither by a run nor by
    `update_from_store`, which the last job of a submission calls."""
    store = Store(tmp_path).create()
    step = step_of(parts=2)
    with monkeypatch.context() as patch:
        tiny.count_calls(patch, Observer, "run_batch", kill_at=4)
        with pytest.raises((tiny.SimulatedKill, StepError)):
            do(store, step)
    assert [store.is_finished(part) for part in step.merged_steps] == [True, False]
    assert not store.is_finished(step)
    assert do(store, step) == [step.merged_steps[1], step]
    for part in step.merged_steps:
        shutil.rmtree(store.path(part))
    assert do(store, step) == []
    schedule = Schedule([*step.inputs.values(), *step.merged_steps, step])
    update_from_store(schedule, store)
    assert not schedule.failed
    assert not schedule.skipped
    assert step.id in schedule.finished


@pytest.mark.parametrize(
    ("parts", "rows", "batch_rows", "shares"),
    [
        (1, 7, 2, []),
        (2, 7, 2, [(0, 4), (4, 7)]),
        (3, 7, 2, [(0, 2), (2, 4), (4, 7)]),
        (4, 7, 2, [(0, 2), (2, 4), (4, 6), (6, 7)]),
        (8, 8, 1, [(row, row + 1) for row in range(8)]),
    ],
)
def test_rows_are_shared_in_whole_batches(
    parts: int, rows: int, batch_rows: int, shares: list[tuple[int, int]]
) -> None:
    assert shares_of(parts, rows, batch_rows) == shares


def shares_of(parts: int, rows: int, batch_rows: int) -> list[tuple[int, int]]:
    """First row and end of each part of a text with so many rows of 4 tokens."""
    tokens = rows * 4 + 3
    return calibrations.part_bounds(
        CalibrationConfig(
            name="t", path="t", length=4, tokens=tokens, batch_tokens=4 * batch_rows, parts=parts
        )
    )


# Tables

CELL = cell_of(
    MODEL,
    replace(TEXT, length=128, tokens=1024, batch_tokens=256, seed=42),
    criterion=CriterionConfig(name="heapr"),
)


def table(folder: Path, name: str) -> pd.DataFrame:
    """A table of a step by layer and expert."""
    return pd.read_parquet(folder / f"{name}.parquet").set_index(["layer", "expert"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind -> folder of the steps about the weights of a model, and about a pass over 8 rows in 4
    batches."""
    store = Store(tmp_path_factory.mktemp("steps")).create()
    kinds = ("model", "statistics", "weights", "gradients", "scores")
    return {kind: perform_with_inputs(store, example_steps.step_of(kind, CELL)) for kind in kinds}


def test_provenance_names_the_experts_implementation_of_the_model_that_a_step_used(
    folders: dict[str, Path],
) -> None:
    for kind, expected in (("gradients", "moe_lab_cpu"), ("scores", None)):
        document = json.loads((folders[kind] / "step.json").read_text())
        assert document["provenance"]["experts"] == expected


def test_tables_of_a_pass_have_its_sums(folders: dict[str, Path]) -> None:
    """Of experts, the rows of the first and the last one of the last layer are compared; the table
    of entropies counts all tokens."""
    folder = folders["statistics"]
    sums = read(folder / SUMS)
    layer = max(sums)
    arrays = sums[layer]
    for expert in (0, -1):
        squares = arrays["channel_square"][expert].tolist()
        row = table(folder, "experts").loc[layer].iloc[expert]
        assert row["tokens"] == arrays["tokens"][expert]
        assert row["channels"] == arrays["channel_square"].shape[1]
        assert row["gate_sum"] == arrays["sums_model"][expert, 1, 0]
        assert row["norm_sum"] == arrays["sums_model"][expert, 0, 1]
        assert row["channel_square"] == pytest.approx(sum(squares))
        roots = [(square / row["tokens"]) ** 0.5 for square in squares]
        assert row["channel_root_sum"] == pytest.approx(sum(roots))
    losses = pd.read_parquet(folder / "layers.parquet").set_index("layer")["layer_loss"]
    assert losses.to_dict() == {index: float(part["layer_loss"]) for index, part in sums.items()}
    entropies = pd.read_parquet(folder / "entropy.parquet")
    assert entropies["entropy"].max() == 1
    top_k = json.loads((folders["model"] / "facts.json").read_text())["layers"][str(layer)]["top_k"]
    tokens = entropies.groupby("layer")["tokens"].sum() * top_k
    assert tokens.to_dict() == {index: part["tokens"].sum() for index, part in sums.items()}


def test_tables_of_weights_gradients_and_scores_have_their_sums(folders: dict[str, Path]) -> None:
    """Of all experts; the concentration of scores is a curve from 0 to 1."""
    facts = json.loads((folders["model"] / "facts.json").read_text())["layers"]
    n_experts = sum(layer["n_experts"] for layer in facts.values())
    for kind, name in (
        ("statistics", "experts"),
        ("weights", "weights"),
        ("gradients", "gradients"),
        ("scores", "expert_concentration"),
    ):
        assert table(folders[kind], name).index.nunique() == n_experts
    weights = read(folders["weights"] / SUMS)
    layer = max(weights)
    arrays = weights[layer]
    assert table(folders["weights"], "weights").loc[(layer, 3)].tolist() == [
        arrays["abs_sum"][3],
        arrays["square_sum"][3],
        arrays["count"],
    ]
    squares = read(folders["gradients"] / SUMS)[layer]["channel_gradient_square"][3]
    gradients = table(folders["gradients"], "gradients")
    assert gradients.loc[(layer, 3), "gradient_square"] == pytest.approx(sum(squares.tolist()))
    concentration = table(folders["scores"], "expert_concentration")
    curve = concentration.loc[(layer, 3), "score"].tolist()
    assert curve[0] == 0
    assert curve[-1] == pytest.approx(1)
    assert curve == sorted(curve)
    scores = load_file(folders["scores"] / "scores.safetensors")[str(layer)][3]
    assert curve[1] > scores.max() / scores.sum() > 1 / len(scores)


# Costs

EXPERTS = CriterionConfig(name="aimer")
CHANNELS = CriterionConfig(name="channel_weight")
PLANS = {EXPERTS.name: Example(), CHANNELS.name: Example(number=1)}


def cost_step(
    model: ModelConfig,
    text: CalibrationConfig,
    criterion: CriterionConfig | None = None,
    engine: str = "resident",
) -> Cost:
    """The cost of a plan made by `criterion`, or of the unpruned model, counted by that engine."""
    text = replace(text, engine=engine)
    unpruned = Cost.of(unpruned_model(model), text)
    if criterion is None:
        return unpruned
    whole_experts = drops_whole_experts(cell_of(model, text, criterion=criterion))
    pruned = Pruned(
        loaded_field(model), PLANS[criterion.name], None, None, RecoveryConfig(), whole_experts
    )
    return Cost.of(pruned, text, unpruned)


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    tiny.save("deepseek_v2", tmp_path / "model")
    return ModelConfig(name="m", path=str(tmp_path / "model"), device="cpu")


@pytest.fixture
def text(tmp_path: Path) -> CalibrationConfig:
    texts = [f"w{(7 * number) % (tiny.VOCABULARY - 4) + 4}" for number in range(64)]
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"text": passage}) + "\n" for passage in texts)
    )
    return CalibrationConfig(
        name="t",
        path=str(tmp_path / "text.jsonl"),
        length=16,
        tokens=64,
        packing="chunk",
        seed=0,
        batch_tokens=32,
    )


def cost(store: Store, step: Cost) -> dict[str, Any]:
    """The result of a step that counts costs."""
    result: dict[str, Any] = json.loads(
        (perform_with_inputs(store, step) / "cost.json").read_text()
    )
    return result


def publish(store: Store, criterion: CriterionConfig, plan: Plan) -> None:
    with store.claim(PLANS[criterion.name]) as scratch:
        assert scratch is not None
        plan.save(scratch / "plan.json")


def channel_plan(network: Any, width: Callable[[int], int]) -> Plan:
    """Each expert keeps its first `width(expert)` channels."""
    layers = moe_layers(network)
    plans = {}
    for layer in layers:
        experts = range(layer.n_experts)
        channels = np.arange(layer.width) < np.array([[width(expert)] for expert in experts])
        plans[layer.index] = LayerPlan(layer.n_experts, tuple(experts), channels)
    return Plan(plans)


def test_costs_of_even_plans_need_no_model(
    model: ModelConfig, text: CalibrationConfig, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = tiny.build("deepseek_v2")
    monkeypatch.setattr(load, "load_model", lambda *_: pytest.fail("the model was loaded"))
    unpruned = cost(store, cost_step(model, text))
    assert unpruned["flops_ratio"] == 1
    for criterion, plan in (
        (EXPERTS, tiny.plan(network, 0.5)),
        (CHANNELS, channel_plan(network, lambda _: 7)),
    ):
        publish(store, criterion, plan)
        pruned = cost(store, cost_step(model, text, criterion))
        assert pruned["flops_per_token_unpruned"] == unpruned["flops_per_token"]
        assert 0 < pruned["flops_ratio"] < 1


def refuse_to_load(*_: Any) -> None:
    pytest.fail("the whole model was loaded")


def test_the_engine_changes_neither_id_nor_flops(
    model: ModelConfig, text: CalibrationConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resident = cost_step(model, text, CHANNELS, "resident")
    streamed = cost_step(model, text, CHANNELS, "streamed")
    assert resident.id == streamed.id
    assert streamed.text
    assert streamed.text.engine == "streamed"
    plan = channel_plan(tiny.build("deepseek_v2"), lambda expert: 5 + expert)
    costs = []
    for number, step in enumerate((resident, streamed)):
        store = Store(tmp_path / str(number)).create()
        publish(store, CHANNELS, plan)
        costs.append(cost(store, step))
        monkeypatch.setattr(load, "load_model", refuse_to_load)
    assert costs[0] == costs[1]
    assert 0 < costs[0]["flops_ratio"] < 1


def test_only_a_cost_that_depends_on_routing_depends_on_the_text(
    model: ModelConfig, text: CalibrationConfig
) -> None:
    other_text = replace(text, path=model.path + "/config.json", tokens=32)
    longer_text = replace(text, length=32)
    for criterion, count in ((None, 1), (EXPERTS, 1), (CHANNELS, 2)):
        ids = {cost_step(model, calibration, criterion).id for calibration in (text, other_text)}
        assert len(ids) == count
        assert cost_step(model, longer_text, criterion).id not in ids


def test_a_checkpoint_of_uneven_experts_is_counted_on_the_text(
    model: ModelConfig, text: CalibrationConfig
) -> None:
    file = Path(model.path) / "config.json"
    assert cost_step(model, text).text is None
    file.write_text(
        json.dumps(
            {**json.loads(file.read_text()), "pruned": {"layers": {"1": {"widths": [3, 5]}}}}
        )
    )
    assert cost_step(model, text).text is not None


# Evaluations


@pytest.fixture
def evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Evaluate, Files, list[Any]]:
    """A step that evaluates a model with template arguments, its files, and the template arguments
    that the engine has."""

    def collect_answers(engine: Any, *_: Any) -> list[list[Answer]]:
        template_arguments.append(engine.template_arguments)
        return [[Answer("item", "?", ())]]

    template_arguments: list[Any] = []
    network = Mock(
        **{"generation_config.eos_token_id": 2, "generation_config.to_dict.return_value": {}}
    )
    tokenizer = Mock(eos_token_id=2)
    monkeypatch.setattr(Pruned, "open", lambda *_: nullcontext((network, tokenizer)))
    monkeypatch.setattr(Items, "read", lambda *_: [])
    monkeypatch.setattr("moe_lab.study.steps.evaluation.collect_answers", collect_answers)
    monkeypatch.setattr(run, "grade", lambda *_, **__: None)
    benchmark = BenchmarkConfig(
        "code", "evalplus", "pocket:benchmarks/mbpp.jsonl", reports={"mbpp": "base"}
    )
    model = ModelConfig(
        name="m", path="pocket:olmoe", template_arguments={"enable_thinking": False}
    )
    step = evaluation_step(model, benchmark)
    assert step.id
    return step, Files(tmp_path, tmp_path, {}, tmp_path / "log", tmp_path), template_arguments


def test_a_harness_gets_the_template_arguments_of_the_model(
    evaluation: tuple[Evaluate, Files, list[Any]],
) -> None:
    step, files, template_arguments = evaluation
    step.work(files)
    assert template_arguments == [{"enable_thinking": False}]


def test_data_that_changed_since_the_start_is_refused(
    evaluation: tuple[Evaluate, Files, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, files, _ = evaluation
    monkeypatch.setattr(Harness, "data_digest", lambda *_: "another")
    with pytest.raises(Unavailable, match="its data has changed since"):
        step.work(files)


WORDS = [
    f"{first}{second}{third}" for first in "bdfgk" for second in "aeiou" for third in "lmnprstz"
]
ITEMS = [" ".join(WORDS[start : start + 13]) for start in range(0, 130, 13)]
"""Ten items of 13 words each, the length of a match."""
COMMON = " ".join(reversed(WORDS[130:145]))
"""Text that eleven further items share, so that it belongs to the benchmark."""
PROMPTS = [*ITEMS, " ".join(WORDS[150:162]), *(f"{COMMON}, {number}" for number in range(11))]
"""The items of a benchmark; the eleventh has 12 words, too few for a match."""
PASSAGES = [
    ITEMS[0].upper(),
    ITEMS[2].replace(" ", " -- "),
    f"It says: {ITEMS[5]}.",
    ITEMS[7].partition(" ")[2],
    PROMPTS[10],
    COMMON,
]
"""The calibration text: items 0, 2 and 5, in other case and punctuation, and 12 words of item 7."""


def test_contamination_counts_the_planted_items(tmp_path: Path) -> None:
    """Case and punctuation do not matter; paragraphs of a document are counted. Of the third story,
    a part is the reference answer. The step depends on tokens, and not on batches."""
    rows: list[dict[str, Any]] = [
        {"id": str(number), "prompt": prompt, "checklist": [{}]}
        for number, prompt in enumerate(PROMPTS)
    ]
    rows[2] |= {"prompt": ITEMS[2][:30], "reference": ITEMS[2][30:]}
    items, document, passages = (tmp_path / name for name in ("a.jsonl", "a.txt", "b.jsonl"))
    items.write_text("\n".join(map(json.dumps, rows)))
    document.write_text("\n\n".join(ITEMS))
    passages.write_text("\n".join(json.dumps({"text": passage}) for passage in PASSAGES))
    stories = BenchmarkConfig("s", "stories", str(items), reports={"s": "score"}, max_new_tokens=1)
    one_document = BenchmarkConfig(
        "w", "perplexity", str(document), reports={"w": "loss"}, max_new_tokens=1
    )
    text: Any = {"path": str(passages), "packing": "none", "length": 512, "order": "first"}
    planted = replace(TEXT, tokens=6 * 512, **text)
    step = Contamination.of(MODEL, planted, [stories, one_document])
    folder = perform_with_inputs(Store(tmp_path / "store").create(), step)
    counts = json.loads((folder / "contamination.json").read_text())
    assert counts["s"] == {"comparable": 21, "found": 3}
    assert counts["w"] == {"comparable": 10, "found": 3}
    other_batches = [one_document, replace(stories, batch_size=2)]
    assert Contamination.of(MODEL, replace(planted, batch_tokens=1), other_batches).id == step.id
    fewer_tokens = replace(planted, tokens=512)
    assert Contamination.of(MODEL, fewer_tokens, [stories, one_document]).id != step.id
