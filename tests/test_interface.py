"""The Python interface: what the README and examples/ show runs, and equals what a study does."""

import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pandas
import preloaded
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import moe_lab
from moe_lab.allocation.grouping import REPLACEMENTS
from moe_lab.errors import UserError
from moe_lab.paths import resolve
from moe_lab.pruning.plan import Plan

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
GENERAL = "pocket:calibration/general.jsonl"
POCKET = {
    "tokens": 32_768,
    "length": 512,
    "packing": "chunk",
    "gap": "eos",
}
"""conf/calibration/pocket_general.yaml."""


@pytest.fixture(scope="module")
def model() -> tuple[Any, Any]:
    return moe_lab.load("pocket:olmoe")


@pytest.fixture(scope="module")
def statistics(model: tuple[Any, Any]) -> moe_lab.ModelStatistics:
    return moe_lab.calibrate(
        *model, GENERAL, criteria=["reap", "heapr", "aimer"], **{**POCKET, "tokens": 4096}
    )


Replacing = Callable[[str], tuple[moe_lab.ModelStatistics, Any]]


@pytest.fixture(scope="module")
def replacing(model: tuple[Any, Any]) -> Replacing:
    """Name of a replacement -> the statistics that it needs, and scores."""

    @cache
    def statistics_and_scores(name: str) -> tuple[moe_lab.ModelStatistics, Any]:
        statistics = moe_lab.calibrate(
            *model, GENERAL, criteria=["reap"], replacement=name, **{**POCKET, "tokens": 2048}
        )
        return statistics, moe_lab.score("reap", statistics)

    return statistics_and_scores


def run(example: str, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> dict[str, Any]:
    """The variables of an example after it has run."""
    monkeypatch.setattr(sys, "argv", [example, *map(str, arguments)])
    return runpy.run_path(str(ROOT / "examples" / example))


def test_the_notebook_runs() -> None:
    cells = json.loads((ROOT / "docs/notebook.ipynb").read_text())["cells"]
    variables: dict[str, Any] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), variables)
    assert variables["table"]["score"].between(0, 1).all()
    assert set(variables["dropped"]) == {"reap", "man", "frequency"}
    assert variables["chart"]._repr_png_().startswith(b"\x89PNG")


def test_functions_need_no_hydra_and_plans_no_torch() -> None:
    """The modules of the Python interface are imported where Hydra and OmegaConf are missing, as in
    a notebook or on a machine for timings."""
    names = (
        "calibration.batches models.load models.streamed statistics.gradients criteria "
        "allocation pruning.export"
    )
    code = f"""
import importlib, sys, moe_lab
assert not {{'torch', 'transformers', 'pandas', 'hydra'}} & set(sys.modules)
for name in ('pruning.plan', 'allocation', 'recovery', 'search.evolution'):
    importlib.import_module('moe_lab.' + name)
assert 'torch' not in sys.modules
sys.modules.update(hydra=None, omegaconf=None)
for name in {names!r}.split():
    importlib.import_module('moe_lab.' + name)
"""
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_example_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [block] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    lines = Path(resolve(GENERAL)).read_text("utf-8").splitlines()
    (tmp_path / "notes.txt").write_text("\n".join(json.loads(line)["text"] for line in lines))
    variables: dict[str, Any] = {}
    exec(block, variables)
    model, plan = variables["model"], variables["plan"]
    pruned, _ = moe_lab.load(str(tmp_path / "pruned"))
    ids = torch.arange(3, 40)[None]
    with moe_lab.mask(model, plan), torch.no_grad():
        assert torch.equal(model(ids).logits, pruned(ids).logits)


def test_the_example_of_pruning_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = run("prune.py", monkeypatch, "pocket:qwen3_moe", GENERAL, tmp_path / "out")
    assert Plan.load(tmp_path / "out/plan.json") == statistics["plan"]
    assert statistics["whole"] < statistics["pruned"]


def test_the_example_of_an_own_criterion_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from moe_lab.criteria import CRITERIA

    monkeypatch.setattr("moe_lab.criteria.CRITERIA", {**CRITERIA})
    statistics = run("own_criterion.py", monkeypatch)
    loudest, reap = statistics["dropped"].values()
    assert len(loudest) == len(reap) == 32
    assert f"{len(loudest & reap)} of 32 dropped experts" in capsys.readouterr().out


def test_the_example_of_a_sweep_runs(
    tmp_path: Path, model: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(preloaded.python()))
    statistics = run("read_sweep.py", monkeypatch, tmp_path)
    cells = statistics["study"].cells
    assert statistics["table"].notna().all().all()
    assert len(cells) == 5
    statistics = moe_lab.calibrate(*model, GENERAL, criteria=["reap", "man"], **POCKET)
    for cell in cells[cells["criterion"] != "none"].itertuples():
        plan = moe_lab.plan(moe_lab.score(cell.criterion, statistics), cell.ratio)
        assert plan.retained == Plan.load(tmp_path / cell.plan_folder / "plan.json").retained


CRITERIA = ["reap", "heapr", "aimer"]


def test_each_criterion_reads_its_own_passes(model: tuple[Any, Any]) -> None:
    """Sums of two passes may have the same names."""
    names = ["channel_gradient", "moe_slimming.channel_gradient"]
    both = moe_lab.calibrate(*model, GENERAL, criteria=names, **POCKET)
    of_the_model, of_a_layer = (moe_lab.score(name, both)["score"] for name in names)
    alone = moe_lab.calibrate(*model, GENERAL, criteria=names[0], **POCKET)
    assert (of_the_model == moe_lab.score(names[0], alone)["score"]).all()
    assert (of_the_model != of_a_layer).any()


def test_scores_of_a_model_that_transformers_loaded(
    statistics: moe_lab.ModelStatistics,
) -> None:
    """Trainable, in train mode, with experts by grouped_mm, as which it is left; on a list of
    documents."""
    model = AutoModelForCausalLM.from_pretrained(
        resolve("pocket:olmoe"), dtype=torch.float32, experts_implementation="grouped_mm"
    ).train()
    tokenizer = AutoTokenizer.from_pretrained(resolve("pocket:olmoe"))
    lines = Path(resolve(GENERAL)).read_text("utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    settings = {**POCKET, "tokens": 4096}
    own_statistics = moe_lab.calibrate(model, tokenizer, texts, criteria=CRITERIA, **settings)
    assert model.training
    assert all(weight.requires_grad for weight in model.parameters())
    assert model.config._experts_implementation == "grouped_mm"
    for criterion in CRITERIA:
        own_scores, scores = (
            torch.tensor(moe_lab.score(criterion, sums)["score"].values)
            for sums in (own_statistics, statistics)
        )
        assert torch.allclose(own_scores, scores, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("replacement", [name for name in REPLACEMENTS if name != "none"])
def test_dropped_experts_can_be_replaced(replacement: str, replacing: Any) -> None:
    statistics, scores = replacing(replacement)
    plan = moe_lab.plan(scores, 0.5, replacement=replacement)
    for layer in plan.layers.values():
        constants = layer.null_experts if replacement == "mean_output" else []
        assert len(layer.merged_members) + len(constants) == 16
        assert len(layer.retained) == (16 if replacement == "ream" else 32)
    for need in {*REPLACEMENTS[replacement]} - {"statistics"}:
        fewer = replace(
            statistics, sums={key: sums for key, sums in statistics.sums.items() if key != need}
        )
        with pytest.raises(UserError, match=need):
            moe_lab.plan(scores, 0.5, statistics=fewer, replacement=replacement)


def uses(model: Any, folder: Path) -> list[Callable[[Plan], object]]:
    """Functions that mask, prune and export a model under a plan."""

    def enter_mask(plan: Plan) -> None:
        with moe_lab.mask(model, plan):
            pass

    return [
        enter_mask,
        lambda plan: moe_lab.prune(model, plan),
        lambda plan: moe_lab.export("pocket:olmoe", plan, folder),
    ]


@pytest.mark.parametrize("replacement", ["m_smoe", "ream"])
def test_unaligned_plans_are_refused(
    model: tuple[Any, Any], replacement: str, replacing: Replacing, tmp_path: Path
) -> None:
    """Weights of channels that do not belong together would be added up."""
    plan = moe_lab.plan(replacing(replacement)[1], 0.5, replacement=replacement)
    plan.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["aligned"] is False
    unaligned = (replace(plan, provenance={}), Plan.load(tmp_path / "plan.json"))
    for refused, use in product(unaligned, uses(model[0], tmp_path / "out")):
        with pytest.raises(UserError, match=r"plan: aligned="):
            use(refused)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("replacement", ["m_smoe", "ream", "m_smoe_unaligned", "hc_smoe"])
def test_plans_that_are_aligned_or_need_no_alignment_are_used(
    model: tuple[Any, Any], replacement: str, replacing: Replacing, tmp_path: Path
) -> None:
    plan = moe_lab.plan(replacing(replacement)[1], 0.5, replacement=replacement)
    if replacement in ("m_smoe", "ream"):
        plan = moe_lab.align(model[0], plan)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").aligned
    for use in uses(model[0], tmp_path / "out"):
        use(plan)


@pytest.mark.parametrize("criterion", ["reap", "heapr"])
def test_scores_of_the_user_are_planned_in_any_order(
    criterion: str, statistics: moe_lab.ModelStatistics
) -> None:
    """Also with ids as texts."""
    scores = moe_lab.score(criterion, statistics)
    texts = scores.astype(dict.fromkeys(scores.columns.drop("score"), str))
    shuffled = texts.sample(frac=1, random_state=0)[scores.columns[::-1]]
    shuffled.attrs = {}
    plan = moe_lab.plan(shuffled, 0.5, statistics=statistics)
    assert plan == moe_lab.plan(scores, 0.5)


def test_an_allocation_reads_the_statistics_of_the_scores(
    statistics: moe_lab.ModelStatistics,
) -> None:
    scores = moe_lab.score("heapr", statistics)
    plan = moe_lab.plan(scores, 0.5, "coverage")
    assert plan.has_channels
    assert list(scores) == ["layer", "expert", "channel", "score"]
    assert plan.removed_share == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    "dtype",
    [
        str,
        float,
        object,
        "category",
        "string",
        "Int64",
        "uint8",
    ],
)
@pytest.mark.parametrize("columns", [["expert"], ["layer", "expert"]])
def test_ids_are_whole_numbers_of_any_type(
    statistics: moe_lab.ModelStatistics, dtype: Any, columns: list[str]
) -> None:
    """Expert e has score e, so a quarter of 32 drops 0 to 7; sorted as texts, 0, 1, 10, 11 ...
    would go."""
    scores = moe_lab.score("reap", statistics)
    scores["score"] = scores["expert"].astype(float)
    scores[columns] = scores[columns].astype(str if dtype == "category" else dtype).astype(dtype)
    assert moe_lab.plan(scores, 0.25).retained == dict.fromkeys(range(4), tuple(range(8, 32)))


ONE_EACH = ("layer 0", "expert from 0 to 31")


@pytest.mark.parametrize("criterion", ["reap", "heapr"])
@pytest.mark.parametrize(
    "change, parts",
    [
        (
            lambda scores: scores.assign(**{scores.columns[-2]: scores.iloc[:, -2] + 1}),
            ("layer 0", "from 0 to"),
        ),
        (lambda scores: scores.assign(expert=scores["expert"].replace(31, 0)), ONE_EACH),
        (lambda scores: scores.assign(expert=scores["expert"].astype(str) + "a"), ONE_EACH),
        (lambda scores: pandas.concat([scores, scores]), ONE_EACH),
        (lambda scores: scores.assign(layer=scores["layer"] + 1), ("layer", "4", "[0, 1, 2, 3]")),
        (
            lambda scores: scores[(scores["layer"] != 2) | (scores["expert"] != 5)],
            ("layer 2", "31"),
        ),
        (
            lambda scores: scores.assign(score=scores["score"].where(scores["expert"] != 3)),
            ("layer 0", "expert 3"),
        ),
        (lambda scores: scores.assign(score="much"), ("layer 0", "expert 0")),
        (lambda scores: scores.rename(columns={"expert": "experts"}), ("expert", "experts")),
    ],
)
def test_scores_that_are_not_one_for_each_expert_are_refused(
    statistics: moe_lab.ModelStatistics,
    criterion: str,
    change: Callable[[Any], Any],
    parts: tuple[str, ...],
) -> None:
    with pytest.raises(UserError) as error:
        moe_lab.plan(change(moe_lab.score(criterion, statistics)), 0.25, statistics=statistics)
    assert all(part in str(error.value) for part in parts), error.value


@pytest.mark.parametrize(
    "call, parts",
    [
        (lambda model, statistics: moe_lab.load("pocket:olmoe", dtyp="float16"), ("dtyp", "dtype")),
        (
            lambda model, statistics: moe_lab.calibrate(*model, GENERAL, token=9),
            ("token", "tokens"),
        ),
        (lambda model, statistics: moe_lab.calibrate(*model, ["short"]), ("too short",)),
        (
            lambda model, statistics: moe_lab.calibrate(torch.nn.Linear(2, 2), model[1], GENERAL),
            ("Linear",),
        ),
        (lambda model, statistics: moe_lab.score("snip", statistics), ("snip", "weight_gradients")),
        (
            lambda model, statistics: moe_lab.plan(moe_lab.score("reap", statistics), 1.5),
            ("1.5", "0.906"),
        ),
        (
            lambda model, statistics: moe_lab.plan(
                moe_lab.score("reap", statistics), 0.25, "evolutionary"
            ),
            ("evolutionary",),
        ),
        (
            lambda model, statistics: moe_lab.plan(
                moe_lab.score("reap", statistics), 0.25, "coverage"
            ),
            ("coverage",),
        ),
        (
            lambda model, statistics: moe_lab.plan(moe_lab.score("reap", statistics)[:40], 0.25),
            ("another model",),
        ),
        (lambda model, statistics: moe_lab.score("reap", model[0]), ("statistics", "calibrate")),
        (lambda model, statistics: moe_lab.prune("pocket:olmoe", 7), ("model", "moe_lab.load")),
        (
            lambda model, statistics: moe_lab.plan(moe_lab.score("reap", statistics), "0.25"),
            ("ratio is of type str: expected a number",),
        ),
        (lambda model, statistics: moe_lab.evaluate(*model, "fidelity"), ("fidelity", "study")),
        (lambda model, statistics: moe_lab.evaluate(*model, "boolqq"), ("did you mean boolq?",)),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(
    model: tuple[Any, Any],
    statistics: moe_lab.ModelStatistics,
    call: Callable[..., Any],
    parts: tuple[str, ...],
) -> None:
    with pytest.raises(UserError) as error:
        call(model, statistics)
    assert all(part in str(error.value) for part in parts)
    assert "\n" not in str(error.value)


def test_a_masked_model_is_evaluated_as_the_pruned_one(
    model: tuple[Any, Any], statistics: moe_lab.ModelStatistics
) -> None:
    loaded, tokenizer = model
    plan = moe_lab.plan(moe_lab.score("reap", statistics), 0.5)
    names = ["pocket_arc_easy", "pocket_gsm8k"]
    with moe_lab.mask(loaded, plan):
        masked = moe_lab.evaluate(loaded, tokenizer, names, limit=16)
    pruned = moe_lab.evaluate(moe_lab.prune(loaded, plan), tokenizer, names, limit=16)
    assert masked["n"].tolist() == [16, 16]
    assert masked.to_dict() == pruned.to_dict()
    unpruned = moe_lab.evaluate(loaded, tokenizer, names, limit=16)
    assert unpruned["score"].sum() > masked["score"].sum()


def test_objects_and_the_module_are_shown_on_a_screen(statistics: moe_lab.ModelStatistics) -> None:
    plan = moe_lab.plan(moe_lab.score("reap", statistics), 0.25)
    assert max(map(len, (repr(statistics), repr(plan)))) < 100
    assert plan.digest[:8] in repr(plan)
    assert dir(moe_lab) == sorted(moe_lab.__all__)
