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
from example_steps import Example, cell_of, done, evaluated
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
from moe_lab.json_files import write_json
from moe_lab.models import load
from moe_lab.models.discover import moe_layers
from moe_lab.pruning.layer_plan import LayerPlan
from moe_lab.pruning.plan import Plan
from moe_lab.statistics import read
from moe_lab.statistics.observe import Observer
from moe_lab.study.integrity import read_step
from moe_lab.study.schedule import InProcessExecutor, Schedule, StepError, work
from moe_lab.study.slurm.jobs import settle
from moe_lab.study.step import Step, unmerged
from moe_lab.study.steps.costs import Cost
from moe_lab.study.steps.evaluation import Contamination
from moe_lab.study.steps.files import Files
from moe_lab.study.steps.passes import loaded_as
from moe_lab.study.steps.plans import drops_whole_experts
from moe_lab.study.steps.recovery import Pruned
from moe_lab.study.steps.recovery import unpruned as unpruned_model
from moe_lab.study.store import Store

MODEL = ModelConfig(name="pocket", path="pocket:olmoe", device="cpu", threads=1)
TEXT = CalibrationConfig(
    name="text",
    path="pocket:calibration/general.jsonl",
    packing="chunk",
    gap="eos",
    length=48,
    tokens=7 * 48,
    batch_size=2,
    seed=3,
)
"""7 rows in 4 batches, the last of 1 row."""
SUMS = "statistics.safetensors"
KINDS = ("statistics", "gradients", "damage", "similarity", "ablation", "scaling")


def step_of(kind: str = "statistics", **settings: Any) -> Step:
    return example_steps.step_of(kind, cell_of(MODEL, replace(TEXT, **settings)))


def do(store: Store, step: Step) -> list[Step]:
    """Do the step and whatever it needs in this process; returns the steps that were run."""
    ran: list[Step] = []
    steps = [*step.inputs.values(), *step.merges, step]
    done = {one.id for one in steps if store.done(one)}
    with InProcessExecutor(store) as execute:

        def counted(one: Step, scratch: Path) -> None:
            ran.append(one)
            execute(one, scratch)

        schedule = Schedule(unmerged(steps, done), done)
        work(schedule, store, counted)
    for error in schedule.failed.values():
        raise error
    return ran


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """One pass of each kind over all rows."""
    store = Store(tmp_path_factory.mktemp("whole")).create()
    for kind in KINDS:
        do(store, step_of(kind))
    return store


def compare(one: dict[int, dict[str, Any]], other: dict[int, dict[str, Any]]) -> None:
    assert one.keys() == other.keys()
    for layer, named in one.items():
        assert named.keys() == other[layer].keys()
        for name, values in named.items():
            size = np.abs(other[layer][name]).max()
            np.testing.assert_allclose(
                values, other[layer][name], rtol=1e-12, atol=1e-12 * size, err_msg=name
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "parts"), [*zip(KINDS, [2, 3] * 3, strict=True), ("statistics streamed", 2)]
)
def test_merged_sums_are_those_of_one_pass(
    whole: Store, tmp_path: Path, kind: str, parts: int
) -> None:
    kind, _, engine = kind.partition(" ")
    single = step_of(kind)
    step = step_of(kind, parts=parts, engine=engine or "resident")
    store = Store(tmp_path).create()
    assert step.id == single.id and not single.merges
    assert (
        len(step.merges) == parts and len({share.id for share in (step, *step.merges)}) == parts + 1
    )
    do(store, step)
    made = store.path(step)
    expected = whole.path(single)
    compare(read(made / SUMS), read(expected / SUMS))
    assert (made / "calibration.json").read_bytes() == (expected / "calibration.json").read_bytes()
    assert {file.name for file in made.glob("*.parquet")} == {
        file.name for file in expected.glob("*.parquet")
    }
    assert read_step(made)["provenance"]["merged"] == [
        store.path(share).name for share in step.merges
    ]


@pytest.mark.slow
def test_a_part_that_is_killed_is_resumed_and_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path).create()
    step = step_of(parts=2)
    with monkeypatch.context() as patch:
        tiny.count_calls(patch, Observer, "read", kill_at=4)
        with pytest.raises((tiny.Killed, StepError)):
            do(store, step)
    assert [store.done(share) for share in step.merges] == [True, False] and not store.done(step)
    assert do(store, step) == [step.merges[1], step]
    for share in step.merges:
        shutil.rmtree(store.path(share))
    assert do(store, step) == [], "parts of a finished merge are not missed"
    schedule = Schedule([*step.inputs.values(), *step.merges, step])
    settle(schedule, store)  # as the last job of a submission does
    assert not schedule.failed and not schedule.skipped and step.id in schedule.finished


def test_rows_are_shared_in_whole_batches() -> None:
    def of(parts: int, rows: int = 7, batch_size: int = 2) -> list[tuple[int, int]]:
        text = CalibrationConfig(
            name="t", path="t", length=4, tokens=rows * 4 + 3, batch_size=batch_size, parts=parts
        )
        return calibrations.part_bounds(text)

    assert of(1) == []
    assert of(2) == [(0, 4), (4, 7)] and of(3) == [(0, 2), (2, 4), (4, 7)] and of(4)[-1] == (6, 7)
    assert of(8, rows=8, batch_size=1) == [(row, row + 1) for row in range(8)]


# Tables

CELL = cell_of(
    MODEL, replace(TEXT, length=128, tokens=1024, seed=42), criterion=CriterionConfig(name="heapr")
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The steps about the weights of a model, and about a pass over 8 rows in 4 batches."""
    store = Store(tmp_path_factory.mktemp("steps")).create()
    kinds = ("model", "statistics", "weights", "gradients", "scores")
    return {kind: done(store, example_steps.step_of(kind, CELL)) for kind in kinds}


def test_figures_get_the_numbers_of_the_sums(made: dict[str, Path]) -> None:
    folder = made["statistics"]
    sums = read(folder / "statistics.safetensors")
    experts = pd.read_parquet(folder / "experts.parquet").set_index(["layer", "expert"])
    layer = max(sums)
    one = sums[max(sums)]
    assert len(experts) == sum(len(named["tokens"]) for named in sums.values())
    for expert in (0, len(one["tokens"]) - 1):
        row = experts.loc[(layer, expert)]
        assert (
            row["tokens"] == one["tokens"][expert]
            and row["channels"] == one["channel_square"].shape[1]
        )
        assert (
            row["gate_sum"] == one["sums_model"][expert, 1, 0]
            and row["norm_sum"] == one["sums_model"][expert, 0, 1]
        )
        assert row["channel_square"] == pytest.approx(sum(one["channel_square"][expert].tolist()))
    losses = pd.read_parquet(folder / "layers.parquet").set_index("layer")["layer_loss"]
    assert losses.to_dict() == {layer: float(named["layer_loss"]) for layer, named in sums.items()}
    roots = [(square / row["tokens"]) ** 0.5 for square in one["channel_square"][expert].tolist()]
    assert row["channel_root_sum"] == pytest.approx(sum(roots))
    entropies = pd.read_parquet(folder / "entropy.parquet")
    assert set(entropies["layer"]) == set(sums) and entropies["entropy"].max() == 1
    top_k = json.loads((made["model"] / "facts.json").read_text())["layers"][str(layer)]["top_k"]
    tokens = entropies.groupby("layer")["tokens"].sum().to_dict()
    assert {at: count * top_k for at, count in tokens.items()} == {
        at: sums[at]["tokens"].sum() for at in sums
    }


def test_weights_gradients_and_scores_leave_their_tables(made: dict[str, Path]) -> None:
    weights = made["weights"]
    gradients = made["gradients"]
    files = {"weights": weights, "gradients": gradients, "expert_concentration": made["scores"]}
    found = {
        name: pd.read_parquet(folder / f"{name}.parquet").set_index(["layer", "expert"])
        for name, folder in files.items()
    }
    layers = json.loads((made["model"] / "facts.json").read_text())["layers"]
    for name, table in found.items():
        assert table.index.nunique() == sum(about["n_experts"] for about in layers.values()), name
    layer = max(read(weights / "statistics.safetensors"))
    one = read(weights / "statistics.safetensors")[layer]
    assert found["weights"].loc[(layer, 3)].tolist() == [
        one["abs_sum"][3],
        one["square_sum"][3],
        one["count"],
    ]
    squares = read(gradients / "statistics.safetensors")[layer]["channel_gradient_square"][3]
    assert found["gradients"].loc[(layer, 3), "gradient_square"] == pytest.approx(
        sum(squares.tolist())
    )
    curve = found["expert_concentration"].loc[(layer, 3), "score"].tolist()
    assert curve[0] == 0 and curve[-1] == pytest.approx(1) and curve == sorted(curve)
    scored = load_file(made["scores"] / "scores.safetensors")[str(layer)][3]
    assert curve[1] > scored.max() / scored.sum() > 1 / len(scored)


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
    whole = drops_whole_experts(cell_of(model, text, criterion=criterion))
    pruned = Pruned(loaded_as(model), PLANS[criterion.name], None, None, RecoveryConfig(), whole)
    return Cost.of(pruned, text, unpruned)


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    tiny.save("deepseek_v2", tmp_path / "model")
    return ModelConfig(name="m", path=str(tmp_path / "model"), device="cpu")


@pytest.fixture
def text(tmp_path: Path) -> CalibrationConfig:
    words = [f"w{(7 * at) % (tiny.VOCABULARY - 4) + 4}" for at in range(64)]
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"text": word}) + "\n" for word in words)
    )
    return CalibrationConfig(
        name="t",
        path=str(tmp_path / "text.jsonl"),
        length=16,
        tokens=64,
        packing="chunk",
        seed=0,
        batch_size=2,
    )


def cost(store: Store, asked: Cost) -> dict[str, Any]:
    """What a step counts."""
    found: dict[str, Any] = json.loads((done(store, asked) / "cost.json").read_text())
    return found


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


def test_whole_experts_and_even_channels_are_counted_without_the_model(
    model: ModelConfig, text: CalibrationConfig, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = tiny.build("deepseek_v2")
    monkeypatch.setattr(load, "load_model", lambda *_: pytest.fail("the model was loaded"))
    before = cost(store, cost_step(model, text))
    assert before["flops_ratio"] == 1
    for criterion, plan in (
        (EXPERTS, tiny.plan(network, 0.5)),
        (CHANNELS, channel_plan(network, lambda _: 7)),
    ):
        publish(store, criterion, plan)
        found = cost(store, cost_step(model, text, criterion))
        assert (
            found["flops_per_token_unpruned"] == before["flops_per_token"]
            and 0 < found["flops_ratio"] < 1
        )


def test_the_engine_of_the_study_counts_flops_and_changes_nothing(
    model: ModelConfig, text: CalibrationConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = []
    one, other = (cost_step(model, text, CHANNELS, engine) for engine in ("resident", "streamed"))
    assert one.id == other.id and other.text and other.text.engine == "streamed"
    for asked in (one, other):
        store = Store(tmp_path / str(len(counted))).create()
        publish(store, CHANNELS, channel_plan(tiny.build("deepseek_v2"), lambda expert: 5 + expert))
        counted.append(cost(store, asked))
        monkeypatch.setattr(
            load, "load_model", lambda *_: pytest.fail("the whole model was loaded")
        )
    assert counted[0] == counted[1] and 0 < counted[0]["flops_ratio"] < 1


def test_only_a_cost_that_depends_on_routing_depends_on_the_text(
    model: ModelConfig, text: CalibrationConfig
) -> None:
    other = replace(text, path=model.path + "/config.json", tokens=32)
    longer = replace(text, length=32)
    for criterion, texts in ((None, 1), (EXPERTS, 1), (CHANNELS, 2)):
        assert len({cost_step(model, each, criterion).id for each in (text, other)}) == texts
        assert cost_step(model, longer, criterion).id != cost_step(model, text, criterion).id


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


def test_a_harness_has_template_arguments_and_unchanged_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(subject: Any, *_: Any, **__: Any) -> None:
        given.append(subject.template_arguments)
        write_json(tmp_path / "result.json", {"protocol": {"prompt": "?"}})

    given: list[Any] = []
    network = Mock(**{"generation_config.eos_token_id": 2})
    tokenizer = Mock(eos_token_id=2)
    monkeypatch.setattr(Pruned, "open", lambda *_: nullcontext((network, tokenizer)))
    monkeypatch.setattr(run, "evaluate", evaluate)
    reports = {"mbpp": "base"}
    benchmark = BenchmarkConfig("code", "evalplus", "pocket:benchmarks/mbpp.jsonl", reports=reports)
    model = ModelConfig(
        name="m", path="pocket:olmoe", template_arguments={"enable_thinking": False}
    )
    step = evaluated(model, benchmark)
    files = Files(tmp_path, tmp_path, {}, tmp_path / "log", tmp_path)
    assert step.id
    step.work(files)
    assert given == [{"enable_thinking": False}]
    monkeypatch.setattr(Harness, "data_digest", lambda *_: "another")
    with pytest.raises(Unavailable, match="its data is not what it was"):
        step.work(files)


def test_exactly_the_items_that_were_planted_in_a_text_are_found(tmp_path: Path) -> None:
    """In any case, with any marks between words. Too short: an item of 12 words, and one of which
    12 are in the text. What eleven items have in common is of the benchmark, and what stands in a
    document is counted by paragraphs."""
    words = [
        f"{first}{second}{third}" for first in "bdfgk" for second in "aeiou" for third in "lmnprstz"
    ]
    texts = [" ".join(words[at : at + 13]) for at in range(0, 130, 13)]
    common = " ".join(reversed(words[130:145]))
    asked = [*texts, " ".join(words[150:162]), *(f"{common}, {number}" for number in range(11))]
    rows = [{"id": str(at), "prompt": text, "checklist": [{}]} for at, text in enumerate(asked)]
    rows[2] = {**rows[2], "prompt": texts[2][:30], "reference": texts[2][30:]}
    planted = [
        texts[0].upper(),
        texts[2].replace(" ", " -- "),
        f"It says: {texts[5]}.",
        texts[7].partition(" ")[2],
    ]
    text = tmp_path / "text.jsonl"
    text.write_text(
        "\n".join(json.dumps({"text": passage}) for passage in [*planted, asked[10], common])
    )
    (tmp_path / "items.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "whole.txt").write_text("\n\n".join(texts))
    stories = BenchmarkConfig(
        "s", "stories", str(tmp_path / "items.jsonl"), reports={"s": "score"}, max_new_tokens=1
    )
    whole = replace(
        stories,
        name="w",
        harness="perplexity",
        task=str(tmp_path / "whole.txt"),
        reports={"w": "loss"},
    )
    read = replace(TEXT, path=str(text), packing="none", length=512, tokens=6 * 512, order="first")
    step = Contamination.of(MODEL, read, {"s": stories, "w": whole})
    counts = json.loads(
        (done(Store(tmp_path / "store").create(), step) / "contamination.json").read_text()
    )
    assert counts["s"] == {"comparable": 21, "found": 3}
    assert counts["w"] == {"comparable": 10, "found": 3}
    same = Contamination.of(
        MODEL, replace(read, batch_size=1), {"w": whole, "s": replace(stories, batch_size=2)}
    )
    assert (
        same.id
        == step.id
        != Contamination.of(MODEL, replace(read, tokens=512), {"s": stories, "w": whole}).id
    )
