"""The graph: work that cells share stands in it once, and big grids are no obstacle."""

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from choices import CONF, Files, cells, read_choice
from processes import time_limit
from studies import study_request

from moe_lab.config import (
    AllocationConfig,
    BackendConfig,
    BenchmarkConfig,
    Config,
    ProtocolConfig,
    SuiteConfig,
)
from moe_lab.grid import benchmarks
from moe_lab.json_files import write_sealed
from moe_lab.pruning.layer_plan import LayerPlan
from moe_lab.pruning.plan import Plan
from moe_lab.result_files import STEPS
from moe_lab.study import record
from moe_lab.study.graph import Graph, build, unresolved_names
from moe_lab.study.runs import Run
from moe_lab.study.step import Step
from moe_lab.study.steps.evaluation import Evaluate
from moe_lab.study.store import Store

SUITE = ["pocket_arc_easy", "pocket_gsm8k"]


FILES = Files()
OLMOE = {"model": FILES.load([("model", "pocket_olmoe")])["model", "pocket_olmoe"]}


def graph(suite: list[str] = SUITE, overlap: bool = False, **grid: object) -> Graph:
    config = Config(suite=SuiteConfig(suite), overlap=overlap)
    suite_benchmarks = benchmarks(config, ProtocolConfig(), FILES)
    return build(config, [(cells(config, grid, files=FILES, **OLMOE), suite_benchmarks)])


def test_plans_with_merged_experts_hold_weights_of_their_own() -> None:
    allocations = ["uniform", "novices", "hc_smoe"]
    study_graph = graph(
        criterion=["reap"], allocation=allocations, calibration=["pocket_general"], ratio=[0.5]
    )
    evaluated = [
        step for step in study_graph.steps if step.kind == "evaluate" and "plan" in step.inputs
    ]
    merged = {step.id for step in evaluated if "similarity" in step.inputs["plan"].inputs}
    assert len(evaluated) == 3 * len(merged) > 0
    for step in evaluated:
        assert isinstance(step, Evaluate)
        assert (step.id in merged) == step.pruned.is_changed


def test_plans_of_a_file_may_have_merged_experts(tmp_path: Path) -> None:
    channels = numpy.ones((2, 1), dtype=bool)
    for merged in ({}, {0: {0: 0.5, 1: 0.5}}):
        layer = LayerPlan(2, (0, 1), channels & [[True], [not merged]], merged=merged)
        Plan({0: layer}).save(tmp_path / "plan.json")
        settings = ("allocation=list", f"allocation.path={tmp_path / 'plan.json'}", "ratio=0.5")
        _, cell = build(*study_request("criterion=reap", *settings)).cells
        pruned = cell.evaluate["pocket_boolq"].pruned
        assert pruned.is_changed == bool(merged)


def test_the_seed_of_a_search_is_that_of_its_parameters() -> None:
    settings = ("criterion=reap", "allocation=pocket_evolutionary", "seed=1,2")
    for changes, seeds in ((), {1, 2}), (("allocation.parameters.seed=7",), {7}):
        steps = build(*study_request(*settings, *changes)).steps
        assert {step.seed for step in steps if step.kind == "search"} == seeds


def test_plans_are_compared_with_one_step_of_the_unpruned_model() -> None:
    request = study_request("suite.benchmarks=[fidelity]", "criterion=reap,aimer", "ratio=0.5")
    unpruned, *pruned = [cell.evaluate["fidelity"] for cell in build(*request).cells]
    assert "reference" not in unpruned.inputs
    assert [step.inputs["reference"].id for step in pruned] == [unpruned.id] * 2


SETS = ["pocket_general", "pocket_code", "pocket_math"]
CRITERIA = ["frequency", "seer", "ean", "reap", "mone", "man", "msan"]


@pytest.mark.parametrize(
    ("axis", "values", "criterion", "plans"),
    [
        ("gate", ["model", "renormalized"], "frequency", 1),
        ("gate", ["model", "renormalized"], "reap", 2),
        ("seed", [1, 2], "aimer", 1),
        ("seed", [1, 2], "random", 2),
        ("seed", [1, 2], "man", 2),
    ],
)
def test_plans_depend_on_gate_and_seed_if_their_criterion_does(
    axis: str, values: list[Any], criterion: str, plans: int
) -> None:
    steps = graph(criterion=[criterion], calibration=SETS[:1], **{axis: values}).steps
    assert sum(step.kind == "plan" for step in steps) == plans


def test_unknown_models_and_texts_of_the_hub_are_unresolved() -> None:
    """Nothing is downloaded in tests."""
    on_hub = {"criterion": {"name": "reap"}, "calibration": {"name": "t", "path": "owner/set"}}
    unknown = {"model": {"name": "m", "path": "owner/model"}}
    for model, names in ((unknown, {"owner/model", "owner/set"}), (OLMOE, {"owner/set"})):
        grid = cells(None, files=FILES, **on_hub, **model)
        assert set(unresolved_names(build(Config(), [(grid, [])]).steps)) == names


@pytest.mark.slow
def test_ten_thousand_cells_in_five_seconds() -> None:
    with time_limit(5):
        study_graph = graph(
            suite=sorted(file.stem for file in (CONF / "benchmark").glob("pocket_*.yaml")),
            criterion=[*CRITERIA, "gate_ean", "gate_energy", "mone_freq"],
            calibration=SETS,
            gate=["model", "renormalized"],
            ratio=[number / 100 for number in range(1, 18)],
            seed=list(range(10)),
        )
        steps = study_graph.steps
    assert len(study_graph.cells) == 10_201 and len(steps) > 100_000
    seen: set[str] = set()
    for step in steps:
        assert seen.issuperset(input_step.id for input_step in step.needs), "inputs come first"
        seen.add(step.id)


@pytest.mark.slow
def test_studies_in_one_process_leave_nothing_behind() -> None:
    counts = []
    frozen = gc.get_freeze_count()
    for _ in range(3):
        graph(criterion=CRITERIA, calibration=SETS, ratio=[0.25, 0.5])
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert counts[2] <= counts[1] + 20
    assert gc.isenabled()
    assert gc.get_freeze_count() <= frozen


CODE = BenchmarkConfig(
    name="code",
    harness="evalplus",
    task="pocket:benchmarks/mbpp.jsonl",
    reports={"mbpp": "base"},
    max_new_tokens=48,
)


def code_steps(
    benchmark: BenchmarkConfig, *, pruned: bool = False, **settings: Any
) -> dict[str, Step]:
    """The steps of the unpruned, or the pruned, model on a benchmark with programs."""
    config = Config(**settings)
    study_graph = build(
        config,
        [(cells(config, {"calibration": ["pocket_code"]}, files=FILES, **OLMOE), [benchmark])],
    )
    grade = next(cell for cell in study_graph.cells if (cell.plan is not None) == pruned).evaluate[
        "code"
    ]
    return {"grade": grade, **grade.inputs}


def test_programs_are_generated_once_for_all_gradings() -> None:
    """Processes change no grade, and new tokens change programs."""
    steps = code_steps(CODE)
    assert steps["grade"].kind == "grade"
    assert set(steps) == {"grade", "generate"}
    for changes in ({"reports": {"mbpp": "plus"}}, {"parameters": {"seconds": 9.0}}):
        graded_otherwise = code_steps(replace(CODE, **changes))
        assert graded_otherwise["generate"].id == steps["generate"].id
        assert graded_otherwise["grade"].id != steps["grade"].id
    more_processes = code_steps(replace(CODE, parameters={"processes": 7}))
    assert more_processes["grade"].id == steps["grade"].id
    fewer_tokens = code_steps(replace(CODE, max_new_tokens=9))
    assert fewer_tokens["generate"].id != steps["generate"].id


def test_a_server_generates_from_the_exported_checkpoint() -> None:
    server = BackendConfig(name="server", command="serve {checkpoint}")
    unpruned, pruned = (
        code_steps(CODE, pruned=pruned, backend=server)["generate"] for pruned in (False, True)
    )
    assert "checkpoint" not in unpruned.inputs
    assert pruned.inputs["checkpoint"].kind == "export"
    assert unpruned.id != code_steps(CODE)["generate"].id, "another back end may give other texts"


def shared_steps(*settings: str, members: str = "pocket_gsm8k,pocket_humaneval") -> dict[str, Step]:
    """Name of a benchmark -> the step with the results of a pruned model, for a suite with a group
    that shares batches."""
    request = study_request(
        "suite.benchmarks=[pocket_gsm8k,pocket_humaneval,pocket_mbpp,pocket_boolq]",
        f"suite.shared_batches={{g: {{batch_size: 240, benchmarks: [{members}]}}}}",
        *settings,
    )
    return dict(build(*request).cells[-1].evaluate)


def test_benchmarks_that_share_batches_have_one_step_that_generates() -> None:
    steps = shared_steps()
    generate = steps["pocket_gsm8k"].inputs["generate"]
    assert steps["pocket_humaneval"].inputs["generate"] is generate
    assert generate.inputs.keys() >= {"items of pocket_gsm8k", "items of pocket_humaneval"}
    assert generate.settings["questions of pocket_gsm8k"]["batch_size"] == 240
    assert generate.resources().units == sum(
        step.inputs["generate"].resources().units
        for name, step in shared_steps(members="").items()
        if name in ("pocket_gsm8k", "pocket_humaneval")
    )
    alone = shared_steps(members="")
    assert alone["pocket_gsm8k"].id != steps["pocket_gsm8k"].id
    for name in ("pocket_mbpp", "pocket_boolq"):
        assert alone[name].id == steps[name].id, "it is in no group"
    others = shared_steps(members="pocket_gsm8k,pocket_mbpp")
    assert others["pocket_gsm8k"].id != steps["pocket_gsm8k"].id


def evaluation_id(benchmark: BenchmarkConfig, **arguments: Any) -> str:
    """The id of an evaluation of a model with such template arguments."""
    settings = [("model.template_arguments", arguments)]
    grid = cells(None, {"calibration": ["pocket_code"]}, files=FILES, overrides=settings, **OLMOE)
    return build(Config(), [(grid, [benchmark])]).cells[0].evaluate[benchmark.name].id


def test_template_arguments_change_chat_evaluations() -> None:
    (likelihoods,) = benchmarks(
        Config(suite=SuiteConfig(["pocket_gsm8k"])), ProtocolConfig(), FILES
    )
    for benchmark in (CODE, likelihoods):
        chat = replace(benchmark, chat=True)
        assert evaluation_id(chat, thinking=True) != evaluation_id(chat, thinking=False)
        assert evaluation_id(benchmark, thinking=True) == evaluation_id(benchmark, thinking=False)


def test_a_new_harness_version_changes_only_its_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ids(version: str) -> dict[str, set[str]]:
        monkeypatch.setattr("moe_lab.evaluation.harness.package_version", lambda package: version)
        by_kind: dict[str, set[str]] = {}
        for step in graph(criterion=["man"]).steps:
            by_kind.setdefault(step.kind, set()).add(step.id)
        return by_kind

    old_ids = ids("0.4.13")
    new_ids = ids("0.4.14")
    assert old_ids.keys() == new_ids.keys()
    assert len(old_ids) > 4
    assert {kind for kind in old_ids if old_ids[kind] != new_ids[kind]} == {
        "items",
        "evaluate",
        "generate",
        "grade",
        "contamination",
    }


def test_figures_have_one_pass_for_every_gate_and_one_seed() -> None:
    gates = ["model", "renormalized"]
    study_graph = graph(
        criterion=["man"], calibration=["pocket_code"], gate=gates, seed=[1, 2], overlap=True
    )
    keys = {("pocket_code", "pocket_olmoe", gate, 1) for gate in gates}
    assert set(study_graph.figures["families"]) == set(study_graph.figures["damages"]) == keys
    assert len({step.id for step in study_graph.figures["families"].values()}) == len(keys)


def test_models_of_one_name_are_told_apart_by_their_files(tmp_path: Path) -> None:
    """`model=local model.path=A,B` gives two models of one name. The same model twice is one
    cell."""
    paths = [str(tmp_path / "a"), str(tmp_path / "b"), "pocket:olmoe", "pocket:olmoe"]
    for path in paths[:2]:
        Path(path).mkdir()
        (Path(path) / "config.json").write_text(json.dumps({"path": path}))
    requests = []
    for path in paths:
        model = {"name": "local", "path": path, "top_k": 4}
        requests.append((cells(None, files=FILES, model=model, criterion={"name": "random"}), []))
    unpruned = [cell.model.id for cell in build(Config(), requests).cells if cell.plan is None]
    assert len(unpruned) == len(set(unpruned)) == 3


def plan_with_protection(allocation: str, protect: str | None) -> Step:
    """The plan of an allocation, whose name shows the protection."""
    lists = {
        "criterion": ["reap"],
        "calibration": ["pocket_general"],
        "allocation": [allocation],
    }
    grid = cells(None, lists, files=FILES, overrides=[("allocation.protect", protect)], **OLMOE)
    (cell,) = (cell for cell in build(Config(), [(grid, [])]).cells if cell.plan)
    assert record.allocation_columns(cell.cell.allocation)["protect"] == protect
    assert cell.plan is not None
    return cell.plan


@pytest.mark.parametrize("allocation", ["uniform", "sequential", "pocket_evolutionary"])
def test_protected_super_experts_need_statistics(allocation: str) -> None:
    plan, protecting_plan = (
        plan_with_protection(allocation, protect) for protect in (None, "super")
    )
    assert plan.id != protecting_plan.id
    assert protecting_plan.inputs.keys() - plan.inputs.keys() == {"statistics"}


def test_a_sequential_plan_measures_and_matches_merged_experts_itself() -> None:
    """REAM (arXiv 2604.04356) merges layer after layer."""
    plan = plan_with_protection("ream_sequential", None)
    assert plan.kind == "sequential"
    assert not plan.inputs.keys() & {"similarity", "statistics"}
    assert plan_with_protection("ream", None).kind == "activation_alignment"


def test_protected_layers_are_in_the_name_of_an_allocation() -> None:
    columns = record.allocation_columns(AllocationConfig(protect="super", protect_layers=1.0))
    assert columns["protect"] == "super, protect_layers=1"


@pytest.mark.parametrize("allocation", ["uniform", "coverage"])
def test_parameters_are_in_the_name_of_an_allocation(allocation: str) -> None:
    """Otherwise several cells would have one name, and the analysis would show one of them."""
    settings = read_choice(AllocationConfig, "allocation", allocation)
    for parameters, suffix in (({}, ""), ({"group_size": 4}, "(group_size=4)")):
        columns = record.allocation_columns(
            replace(settings, parameters={**settings.parameters, **parameters})
        )
        assert [*columns.values()] == [f"{allocation}{suffix}", "none", None]


def test_a_record_of_two_protocols(tmp_path: Path) -> None:
    """Models of further protocols are named after them."""
    store = Store(tmp_path).create()
    requests = [
        (cells(None, {"ratio": [0.25, 0.5]}, files=FILES, protocol={"name": name}, **OLMOE), [])
        for name in ("a", "b")
    ]
    study = record.Study(Config(study="two"), build(Config(), requests), store)
    run = Run(store, tmp_path / "runs/two/1")
    run.folder.mkdir(parents=True)
    write_sealed(run.folder / "record.json", record.record_of(study, run, {}))
    entries = record.study_record(store, "two")["cells"]
    assert {entry["cell"]["model"] for entry in entries} == {"pocket_olmoe", "pocket_olmoe (b)"}
    assert len(entries) == 6
    assert all(entry.keys() >= set(STEPS) for entry in entries)
