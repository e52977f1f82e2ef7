"""The graph: work that cells share stands in it once, and big grids are no obstacle."""

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
from choices import CONF, Files, cells, choose
from processes import within

from moe_lab.config import (
    AllocationConfig,
    BackendConfig,
    BenchmarkConfig,
    Config,
    ProtocolConfig,
    SuiteConfig,
)
from moe_lab.errors import UserError
from moe_lab.evaluation import LIMITED
from moe_lab.evaluation.sandbox import client
from moe_lab.grid import benchmarks
from moe_lab.json_files import write_sealed
from moe_lab.results import STEPS
from moe_lab.study import record
from moe_lab.study.graph import Graph, build, unresolved
from moe_lab.study.runs import Run
from moe_lab.study.step import Step
from moe_lab.study.steps.evaluation import Evaluate
from moe_lab.study.store import Store

SUITE = ["pocket_arc_easy", "pocket_gsm8k"]


FILES = Files()
OLMOE = {"model": FILES.load([("model", "pocket_olmoe")])["model", "pocket_olmoe"]}


def graph(suite: list[str] = SUITE, overlap: bool = False, **grid: object) -> Graph:
    config = Config(suite=SuiteConfig(suite), overlap=overlap)
    asked = benchmarks(config, ProtocolConfig(), FILES)
    return build(config, [(cells(config, grid, files=FILES, **OLMOE), asked)])


def test_plans_with_merged_experts_hold_weights_of_their_own() -> None:
    three = ["uniform", "novices", "hc_smoe"]
    made = graph(criterion=["reap"], allocation=three, calibration=["pocket_general"], ratio=[0.5])
    evaluated = [step for step in made.steps if step.kind == "evaluate" and "plan" in step.inputs]
    merged = {step.id for step in evaluated if "similarity" in step.inputs["plan"].inputs}
    assert len(evaluated) == 3 * len(merged) > 0
    for step in evaluated:
        assert isinstance(step, Evaluate) and (step.id in merged) == step.pruned.is_changed


SETS = ["pocket_general", "pocket_code", "pocket_math"]
SEVEN = ["frequency", "seer", "ean", "reap", "mone", "man", "msan"]


def test_a_gate_counts_where_it_is_looked_at_and_a_seed_for_chance_and_order() -> None:
    values = {"gate": ["model", "renormalized"], "seed": [1, 2]}
    for axis, distinct in (
        ("gate", {"frequency": 1, "reap": 2}),
        ("seed", {"aimer": 1, "random": 2, "man": 2}),
    ):
        for criterion, plans in distinct.items():
            made = graph(criterion=[criterion], calibration=SETS[:1], **{axis: values[axis]})
            assert sum(step.kind == "plan" for step in made.steps) == plans, criterion


def test_what_is_on_the_hub_and_not_known_is_named() -> None:
    """Nothing is downloaded in tests."""
    on_hub = {"criterion": {"name": "reap"}, "calibration": {"name": "t", "path": "owner/set"}}
    unknown = {"model": {"name": "m", "path": "owner/model"}}
    for model, named in ((unknown, {"owner/model", "owner/set"}), (OLMOE, {"owner/set"})):
        found = cells(None, files=FILES, **on_hub, **model)
        assert set(unresolved(build(Config(), [(found, [])]).steps)) == named


def test_ten_thousand_cells_in_five_seconds() -> None:
    with within(5):
        made = graph(
            suite=sorted(file.stem for file in (CONF / "benchmark").glob("pocket_*.yaml")),
            criterion=[*SEVEN, "gate_ean", "gate_energy", "mone_freq"],
            calibration=SETS,
            gate=["model", "renormalized"],
            ratio=[number / 100 for number in range(1, 18)],
            seed=list(range(10)),
        )
        steps = made.steps
    assert len(made.cells) == 10_201 and len(steps) > 100_000
    seen: set[str] = set()
    for step in steps:
        assert seen.issuperset(needed.id for needed in step.needs), "inputs come first"
        seen.add(step.id)


def test_studies_in_one_process_leave_nothing_behind() -> None:
    counts = []
    frozen = gc.get_freeze_count()
    for _ in range(3):
        graph(criterion=SEVEN, calibration=SETS, ratio=[0.25, 0.5])
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert counts[2] <= counts[1] + 20 and gc.isenabled() and gc.get_freeze_count() <= frozen


CODE = BenchmarkConfig(
    name="code", harness="evalplus", task="pocket:benchmarks/mbpp.jsonl", reports={"mbpp": "base"}
)


def code_steps(
    benchmark: BenchmarkConfig, *, pruned: bool = False, **settings: Any
) -> dict[str, Step]:
    """The steps of the unpruned, or the pruned, model on a benchmark with programs."""
    config = Config(**settings)
    made = build(
        config,
        [(cells(config, {"calibration": ["pocket_code"]}, files=FILES, **OLMOE), [benchmark])],
    )
    grade = next(cell for cell in made.cells if (cell.plan is not None) == pruned).evaluate["code"]
    return {"grade": grade, **grade.inputs}


def test_programs_are_generated_once_however_they_are_graded() -> None:
    first = code_steps(CODE)
    assert first["grade"].kind == "grade" and set(first) == {"grade", "generate"}
    for other in (
        replace(CODE, reports={"mbpp": "plus"}),
        replace(CODE, parameters={"seconds": 9.0}),
    ):
        again = code_steps(other)
        assert (
            again["generate"].id == first["generate"].id and again["grade"].id != first["grade"].id
        )
    assert code_steps(replace(CODE, parameters={"processes": 7}))["grade"].id == first["grade"].id
    assert code_steps(replace(CODE, max_new_tokens=9))["generate"].id != first["generate"].id


def test_a_server_generates_from_the_exported_checkpoint() -> None:
    server = BackendConfig(name="server", command="serve {checkpoint}")
    unpruned, pruned = (
        code_steps(CODE, pruned=pruned, backend=server)["generate"] for pruned in (False, True)
    )
    assert "checkpoint" not in unpruned.inputs and pruned.inputs["checkpoint"].kind == "export"
    assert unpruned.id != code_steps(CODE)["generate"].id, "another back end may give other texts"


def test_what_a_chat_template_is_given_counts_where_it_is_used() -> None:
    def ids(benchmark: BenchmarkConfig, **arguments: Any) -> str:
        words = [("model.template_arguments", arguments)]
        found = cells(None, {"calibration": ["pocket_code"]}, files=FILES, words=words, **OLMOE)
        return build(Config(), [(found, [benchmark])]).cells[0].evaluate[benchmark.name].id

    (likelihoods,) = benchmarks(
        Config(suite=SuiteConfig(["pocket_gsm8k"])), ProtocolConfig(), FILES
    )
    for benchmark in (CODE, likelihoods):
        chatting = replace(benchmark, chat=True)
        assert ids(chatting, thinking=True) != ids(chatting, thinking=False)
        assert ids(benchmark, thinking=True) == ids(benchmark, thinking=False)


def test_a_step_runs_in_no_weaker_sandbox_than_its_identity_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Programs that are not run give other results. Where the study begins decides, not the machine
    that grades."""
    monkeypatch.setattr(client, "check_namespaces", lambda: None)
    confined = code_steps(CODE, allow_code_execution=True)
    monkeypatch.setattr(
        client, "check_namespaces", Mock(side_effect=client.NoNamespaces("none here"))
    )
    limited = code_steps(CODE, allow_code_execution=True)
    assert (
        limited["grade"].id != confined["grade"].id
        and limited["generate"].id == confined["generate"].id
    )
    grade: Any = limited["grade"]
    assert grade.grading.policy.protection(closed_world=True) == LIMITED
    grade = confined["grade"]
    with pytest.raises(UserError, match=r"sandbox=.*none here"):
        grade.grading.policy.protection(closed_world=True)


def test_a_raised_pin_gives_new_results_of_its_harness_and_leaves_all_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ids(version: str) -> dict[str, set[str]]:
        monkeypatch.setattr("moe_lab.evaluation.harness.installed", lambda package: version)
        found: dict[str, set[str]] = {}
        for step in graph(criterion=["man"]).steps:
            found.setdefault(step.kind, set()).add(step.id)
        return found

    before = ids("0.4.13")
    after = ids("0.4.14")
    assert before.keys() == after.keys() and len(before) > 4
    assert {kind for kind in before if before[kind] != after[kind]} == {"evaluate", "contamination"}


def test_figures_have_one_pass_for_every_gate_and_one_seed() -> None:
    gates = ["model", "renormalized"]
    made = graph(
        criterion=["man"], calibration=["pocket_code"], gate=gates, seed=[1, 2], overlap=True
    )
    keys = {("pocket_code", "pocket_olmoe", gate, 1) for gate in gates}
    assert set(made.figures["families"]) == set(made.figures["damages"]) == keys
    assert len({step.id for step in made.figures["families"].values()}) == len(keys)


def test_two_models_of_one_name_are_two_cells_and_the_same_model_twice_is_one(
    tmp_path: Path,
) -> None:
    """As `model=local model.path=A,B` asks for."""
    paths = [str(tmp_path / "a"), str(tmp_path / "b"), "pocket:olmoe", "pocket:olmoe"]
    for path in paths[:2]:
        Path(path).mkdir()
        (Path(path) / "config.json").write_text(json.dumps({"path": path}))
    asked = []
    for path in paths:
        model = {"name": "local", "path": path, "top_k": 4}
        asked.append((cells(None, files=FILES, model=model, criterion={"name": "random"}), []))
    unpruned = [cell.model.id for cell in build(Config(), asked).cells if cell.plan is None]
    assert len(unpruned) == len(set(unpruned)) == 3


@pytest.mark.parametrize("allocation", ["uniform", "sequential", "pocket_evolutionary"])
def test_super_experts_are_an_input_of_the_plan_and_in_its_name(allocation: str) -> None:
    plans = []
    for protect in (None, "super"):
        lists = {
            "criterion": ["reap"],
            "calibration": ["pocket_general"],
            "allocation": [allocation],
        }
        found = cells(None, lists, files=FILES, words=[("allocation.protect", protect)], **OLMOE)
        (cell,) = (one for one in build(Config(), [(found, [])]).cells if one.plan)
        assert record.allocation_columns(cell.cell.allocation)["protect"] == protect
        plans.append(cell.plan)
    assert len({plan.id for plan in plans if plan}) == 2
    none, by_statistics = (plan.inputs.keys() for plan in plans if plan)
    assert by_statistics - none == {"statistics"}
    of_every_layer = AllocationConfig(protect="super", protect_layers=1.0)
    assert record.allocation_columns(of_every_layer)["protect"] == "super, protect_layers=1"


@pytest.mark.parametrize("allocation", ["uniform", "coverage"])
def test_parameters_are_in_the_name_of_an_allocation(allocation: str) -> None:
    """Otherwise several cells would have one name, and the analysis would show one of them."""
    settings = choose(AllocationConfig, "allocation", allocation)
    for parameters, words in (({}, ""), ({"group_size": 4}, "(group_size=4)")):
        named = record.allocation_columns(
            replace(settings, parameters={**settings.parameters, **parameters})
        )
        assert [*named.values()] == [f"{allocation}{words}", "none", None]


def test_a_model_is_called_after_its_protocol_in_each_but_the_first(tmp_path: Path) -> None:
    store = Store(tmp_path).create()
    asked = [
        (cells(None, {"ratio": [0.25, 0.5]}, files=FILES, protocol={"name": name}, **OLMOE), [])
        for name in ("a", "b")
    ]
    ask = patch.object(store, "name", wraps=store.name)
    study = record.Study(Config(study="two"), build(Config(), asked), store)
    run = Run(store, tmp_path / "runs/two/1")
    run.folder.mkdir(parents=True)
    with ask as named:
        write_sealed(run.folder / "record.json", record.record_of(study, run, {}))
    assert len({call.args[0].id for call in named.call_args_list}) == named.call_count, (
        "once for each step"
    )
    written = record.read(store, "two")["cells"]
    assert {entry["cell"]["model"] for entry in written} == {
        "pocket_olmoe",
        "pocket_olmoe (b)",
    } and len(written) == 6
    assert all(entry.keys() >= set(STEPS) for entry in written)
