"""Cells, panels and passes of several gates and seeds are told apart wherever they stand."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from synthetic import record_path, write_store

from analysis.load import passes
from analysis.load.settings import labels
from analysis.load.study import Study, load
from analysis.registry import Results, make
from analysis.render.style import Figure
from analysis.render.table import Table
from analysis.report import what_was_run
from analysis.stats.overlap import proxy_overlap


def twice(tmp_path: Path, axis: str, value: Any) -> Study:
    """A study and the same cells once more with another gate or seed; of these, passes reached other tokens."""
    few = {"items": 20, "tasks": ("gsm8k", "rte"), "ratios": (0.5,), "criteria": ("frequency", "reap")}
    root = write_store(tmp_path / "store", calibrations=("pocket_code", "pocket_math"), **few)
    path = record_path(root)
    document = json.loads(path.read_text())
    other = [copy.deepcopy(entry) for entry in document["cells"] if entry["cell"]["criterion"] != "none"]
    for entry in other:
        entry["cell"][axis] = value
        entry["statistics"] = "statistics/gone-000000000000"
    document["cells"] += other
    for kind in ("families", "damages"):
        gone = [{**row, axis: value, "step": f"{kind}/gone-000000000000"} for row in document[kind]]
        document[kind] = gone + document[kind]
    path.write_text(json.dumps(document))
    return load(root, "made_up")


@pytest.mark.parametrize(("axis", "value", "words"), [("seed", 43, "seed 43"), ("gate", "softmax", "gate softmax")])
def test_rows_blocks_and_maps_say_which(tmp_path: Path, axis: str, value: Any, words: str) -> None:
    study = twice(tmp_path, axis, value)
    wanted = ("ranks", "unified.table5", "winners", "pareto", "artefacts", "task_specific", "coverage.table18")
    made = make((*wanted, "tokens_per_expert", "unified.fig3"), Results(study))
    tables = {name: next(each for each in made[name] if isinstance(each, Table)) for name in made if made[name]}
    for name in set(wanted) & set(tables):
        frame = tables[name].frame
        key = [word for word in ("Model", "Pruned", "Calibration", "Criterion", "Column") if word in frame]
        pruned = frame[frame["Pruned"] != "0 %"]
        assert pruned["Pruned"].str.endswith(words).any(), name
        assert not pruned.duplicated(key).any(), name
    assert any(words in label for label in labels(study.cells).values())
    [drawn] = (each.drawing for each in made["winners"] if isinstance(each, Figure))
    titles = [axes.get_title(loc="left") for axes in drawn.axes]
    assert len(set(titles)) == len(titles) == 2
    # passes are shown for the first gate and seed, and say so; the other's folders are never asked for
    assert study.gaps == [] and set(study.family["calibration"]) == {"pocket_code", "pocket_math"}
    first = {"seed": "42 (of 42, 43)", "gate": "model (of model, softmax)"}[axis]
    for output in (*made["tokens_per_expert"], *made["unified.fig3"]):
        assert f"{axis} {first}" in output.caption, output.name
        assert isinstance(output, (Figure, Table))


def test_of_several_passes_the_shown_one_is_taken() -> None:
    usual = {"m": ("model", 42)}
    key = {"calibration": "code", "model": "m", "gate": "model"}
    other, own = {**key, "seed": 41, "step": "other"}, {**key, "seed": 42, "step": "own"}
    for rows, taken in (([other], "other"), ([other, own], "own"), ([own, other], "own")):
        assert passes.steps_by_pass(rows, usual) == {("code", "m"): taken}
    assert passes.steps_by_pass([], usual) == {}


def test_models_stand_together_and_the_lead_says_whose_calibration_sets_they_are(tmp_path: Path) -> None:
    few = {"items": 8, "tasks": ("gsm8k",), "ratios": (0.5,), "criteria": ("frequency", "magnitude")}
    sets = {"b": ("pocket_general", "pocket_code"), "a": ("pocket_general",)}
    for model, calibrations in sets.items():
        write_store(tmp_path, name=model, models=(model,), calibrations=calibrations, **few)
    study = load(tmp_path, "all")
    shuffled = study.damage.sample(frac=1, random_state=0)
    proxy = proxy_overlap(study.family.sort_values("layer", kind="stable"), shuffled)
    models = proxy["model"].tolist()
    assert models == sorted(models, key=models.index) and set(models) == {"a", "b"}
    assert ", with general calibration of a and general and code calibration of b)" in what_was_run(study)
