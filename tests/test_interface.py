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
POCKET = {"tokens": 32_768, "length": 512, "packing": "chunk", "gap": "eos", "batch_size": 8}
"""conf/calibration/pocket_general.yaml."""


@pytest.fixture(scope="module")
def model() -> tuple[Any, Any]:
    return moe_lab.load("pocket:olmoe")


@pytest.fixture(scope="module")
def statistics(model: tuple[Any, Any]) -> moe_lab.ModelStatistics:
    return moe_lab.calibrate(
        *model, GENERAL, criteria=["reap", "heapr", "aimer"], **{**POCKET, "tokens": 4096}
    )


@pytest.fixture(scope="module")
def replacing(model: tuple[Any, Any]) -> Callable[[str], tuple[moe_lab.ModelStatistics, Any]]:
    """Name of a replacement -> the statistics that it needs, and scores."""

    @cache
    def seen(name: str) -> tuple[moe_lab.ModelStatistics, Any]:
        found = moe_lab.calibrate(
            *model, GENERAL, criteria=["reap"], replacement=name, **{**POCKET, "tokens": 2048}
        )
        return found, moe_lab.score("reap", found)

    return seen


def run(example: str, monkeypatch: pytest.MonkeyPatch, *words: object) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", [example, *map(str, words)])
    return runpy.run_path(str(ROOT / "examples" / example))


def test_the_functions_need_no_hydra_and_their_names_and_plans_no_torch() -> None:
    """What they call is imported where neither Hydra nor OmegaConf is, as in a notebook or on a
    machine for timings."""
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
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_example_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [block] = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    lines = Path(resolve(GENERAL)).read_text("utf-8").splitlines()
    (tmp_path / "notes.txt").write_text("\n".join(json.loads(line)["text"] for line in lines))
    names: dict[str, Any] = {}
    exec(block, names)
    found = names["model"]
    plan = names["plan"]
    pruned, _ = moe_lab.load(str(tmp_path / "pruned"))
    ids = torch.arange(3, 40)[None]
    with moe_lab.mask(found, plan), torch.no_grad():
        assert torch.equal(found(ids).logits, pruned(ids).logits)


def test_an_example_prunes_and_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run("prune.py", monkeypatch, "pocket:qwen3_moe", GENERAL, tmp_path / "out")
    assert Plan.load(tmp_path / "out/plan.json") == found["plan"]
    assert found["whole"] < found["pruned"]


def test_an_example_has_its_own_criterion(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from moe_lab.criteria import CRITERIA

    monkeypatch.setattr("moe_lab.criteria.CRITERIA", {**CRITERIA})
    found = run("own_criterion.py", monkeypatch)
    loudest, reap = found["dropped"].values()
    assert len(loudest) == len(reap) == 32
    assert f"{len(loudest & reap)} of 32 dropped experts" in capsys.readouterr().out


def test_an_example_reads_a_sweep(
    tmp_path: Path, model: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(preloaded.python()))
    found = run("read_sweep.py", monkeypatch, tmp_path)
    cells = found["study"].cells
    assert found["table"].notna().all().all() and len(cells) == 5
    statistics = moe_lab.calibrate(*model, GENERAL, criteria=["reap", "man"], **POCKET)
    for cell in cells[cells["criterion"] != "none"].itertuples():
        plan = moe_lab.plan(moe_lab.score(cell.criterion, statistics), cell.ratio)
        assert plan.retained == Plan.load(tmp_path / cell.plan_folder / "plan.json").retained


def test_a_model_that_transformers_loaded_is_left_as_it_was(
    statistics: moe_lab.ModelStatistics,
) -> None:
    """Trainable, in train mode, with experts by grouped_mm; the text is a list of documents."""
    folder = resolve("pocket:olmoe")
    own = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="grouped_mm"
    ).train()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = Path(resolve(GENERAL)).read_text("utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    criteria = ["reap", "heapr", "aimer"]
    found = moe_lab.calibrate(
        own, tokenizer, texts, criteria=criteria, **{**POCKET, "tokens": 4096}
    )
    assert own.training and all(weight.requires_grad for weight in own.parameters())
    assert own.config._experts_implementation == "grouped_mm"
    for name in criteria:
        first, second = (moe_lab.score(name, one)["score"] for one in (found, statistics))
        assert torch.allclose(
            torch.tensor(first.values), torch.tensor(second.values), rtol=1e-4, atol=1e-7
        )


@pytest.mark.parametrize("replacement", [name for name in REPLACEMENTS if name != "none"])
def test_dropped_experts_can_be_replaced(replacement: str, replacing: Any) -> None:
    seen, scores = replacing(replacement)
    plan = moe_lab.plan(scores, 0.5, replacement=replacement)
    for layer in plan.layers.values():
        constants = layer.null_experts if replacement == "mean_output" else []
        assert len(layer.merged_away) + len(constants) == 16
        assert len(layer.retained) == (16 if replacement == "ream" else 32)
    for need in {*REPLACEMENTS[replacement]} - {"statistics"}:
        fewer = replace(seen, sums={key: sums for key, sums in seen.sums.items() if key != need})
        with pytest.raises(UserError, match=need):
            moe_lab.plan(scores, 0.5, statistics=fewer, replacement=replacement)


@pytest.mark.parametrize("replacement", ["m_smoe", "ream", "m_smoe_unaligned", "hc_smoe"])
def test_unaligned_plans_are_refused(
    model: tuple[Any, Any], replacement: str, replacing: Any, tmp_path: Path
) -> None:
    """Weights of channels that do not belong together would be added up, unless that is meant."""
    plan = moe_lab.plan(replacing(replacement)[1], 0.5, replacement=replacement)
    uses: list[Callable[[Plan], object]] = [
        lambda plan: moe_lab.mask(model[0], plan).__enter__(),
        lambda plan: moe_lab.prune(model[0], plan),
        lambda plan: moe_lab.export("pocket:olmoe", plan, tmp_path / "out"),
    ]
    if replacement in ("m_smoe", "ream"):
        plan.save(tmp_path / "plan.json")
        assert json.loads((tmp_path / "plan.json").read_text())["aligned"] is False
        unaligned = replace(plan, provenance={})
        plan = moe_lab.align(model[0], plan)
        plan.save(tmp_path / "aligned.json")
        assert Plan.load(tmp_path / "aligned.json").aligned
        for of, use in product((unaligned, Plan.load(tmp_path / "plan.json")), uses):
            with pytest.raises(UserError, match=r"plan: aligned="):
                use(of)
        assert not (tmp_path / "out").exists()
    with moe_lab.mask(model[0], plan):
        pass
    for use in uses[1:]:
        use(plan)


def test_scores_of_ones_own_are_planned_in_any_order(statistics: moe_lab.ModelStatistics) -> None:
    scores = moe_lab.score("reap", statistics)
    shuffled = scores.sample(frac=1, random_state=0)[["score", "expert", "layer"]]
    shuffled.attrs = {}
    plan = moe_lab.plan(shuffled, 0.25, statistics=statistics)
    worst = scores[scores["layer"] == 0].nsmallest(8, "score")["expert"]
    assert plan.retained == moe_lab.plan(scores, 0.25).retained
    assert set(worst) == set(range(32)) - set(plan.layers[0].retained)
    scores = moe_lab.score("heapr", statistics)
    texts = scores.astype({"layer": str, "expert": str, "channel": str}).sample(
        frac=1, random_state=0
    )
    texts.attrs = scores.attrs
    assert moe_lab.plan(texts, 0.5) == moe_lab.plan(scores, 0.5)
    plan = moe_lab.plan(scores, 0.5, "coverage")  # which reads the statistics
    assert plan.has_channels and list(scores) == ["layer", "expert", "channel", "score"]
    assert plan.removed == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("dtype", [str, float, object, "category", "string", "Int64", "uint8"])
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
NUMBERED = ("layer 0", "from 0 to")


@pytest.mark.parametrize("criterion", ["reap", "heapr"])
@pytest.mark.parametrize(
    "change, words",
    [
        (lambda scores: scores.assign(**{scores.columns[-2]: scores.iloc[:, -2] + 1}), NUMBERED),
        (
            lambda scores: scores.assign(**{scores.columns[-2]: scores.iloc[:, -2].replace(1, 0)}),
            NUMBERED,
        ),
        (lambda scores: scores.assign(expert=scores["expert"] + 1), ONE_EACH),
        (lambda scores: scores.assign(expert=scores["expert"].replace(31, 0)), ONE_EACH),
        (lambda scores: scores.assign(expert=scores["expert"] + 0.5), ONE_EACH),
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
    words: tuple[str, ...],
) -> None:
    with pytest.raises(UserError) as error:
        moe_lab.plan(change(moe_lab.score(criterion, statistics)), 0.25, statistics=statistics)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    "wrong, words",
    [
        (lambda model, found: moe_lab.load("pocket:olmoe", dtyp="float16"), ("dtyp", "dtype")),
        (lambda model, found: moe_lab.calibrate(*model, GENERAL, token=9), ("token", "tokens")),
        (lambda model, found: moe_lab.calibrate(*model, ["short"]), ("too short",)),
        (
            lambda model, found: moe_lab.calibrate(torch.nn.Linear(2, 2), model[1], GENERAL),
            ("Linear",),
        ),
        (lambda model, found: moe_lab.score("snip", found), ("snip", "weight_gradients")),
        (lambda model, found: moe_lab.plan(moe_lab.score("reap", found), 1.5), ("1.5", "0.906")),
        (
            lambda model, found: moe_lab.plan(moe_lab.score("reap", found), 0.25, "evolutionary"),
            ("evolutionary",),
        ),
        (
            lambda model, found: moe_lab.plan(moe_lab.score("reap", found), 0.25, "coverage"),
            ("coverage",),
        ),
        (
            lambda model, found: moe_lab.plan(moe_lab.score("reap", found)[:40], 0.25),
            ("another model",),
        ),
    ],
)
def test_a_mistake_is_a_sentence(
    model: tuple[Any, Any],
    statistics: moe_lab.ModelStatistics,
    wrong: Callable[..., Any],
    words: tuple[str, ...],
) -> None:
    with pytest.raises(UserError) as error:
        wrong(model, statistics)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)
