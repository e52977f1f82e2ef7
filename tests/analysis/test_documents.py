"""Records of studies, gates, seeds and models: read together, and told apart wherever they
stand."""

import copy
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from synthetic import edited_document, record_path, write_json, write_store

from moe_lab.analysis import names, report
from moe_lab.analysis.__main__ import main
from moe_lab.analysis.load.settings import labels
from moe_lab.analysis.load.studies import combined_record, requested_studies
from moe_lab.analysis.load.study import Study, load
from moe_lab.analysis.registry import Results, find
from moe_lab.analysis.render.charts import Figure
from moe_lab.analysis.render.table import Table
from moe_lab.analysis.stats.overlap import proxy_overlap
from moe_lab.errors import UserError


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two studies that share the unpruned model and REAP; only the second has families, and one
    benchmark less."""
    root = tmp_path_factory.mktemp("two") / "store"
    tasks = ("gsm8k", "rte", "mmlu")
    write_store(root, name="experts", criteria=("reap", "man"), tasks=tasks)
    write_store(root, name="channels", criteria=("reap", "heapr"), tasks=tasks[:2], overlap=True)
    return root


def test_several_studies_are_read_as_one(store: Path) -> None:
    study = load(store, "experts,channels")
    assert study.name == "experts+channels"
    assert study.gaps == []
    assert study.cells["method"].tolist() == ["none", "reap", "man", "heapr"]
    benchmarks = study.results.groupby("cell")["benchmark"].agg(sorted).tolist()
    assert benchmarks == [["gsm8k", "mmlu", "rte"]] * 3 + [["gsm8k", "rte"]]
    assert set(study.family["calibration"]) == {"pocket_code"}
    assert list(study.document["config"]) == ["experts", "channels"]
    first, second = (
        combined_record(store, names)
        for names in (["experts", "channels"], ["channels", "experts"])
    )
    evaluations = [
        {json.dumps(e["cell"]): e["evaluate"] for e in record["cells"]}
        for record in (first, second)
    ]
    assert evaluations[0] == evaluations[1] and first["families"] == second["families"] != [], (
        "their order changes nothing"
    )


def test_all_stands_for_every_study(store: Path, tmp_path: Path) -> None:
    assert requested_studies(store, "all") == ["channels", "experts"]
    assert requested_studies(store, "experts,experts") == ["experts"]
    with pytest.raises(UserError, match="did you mean experts"):
        requested_studies(store, "channels,expert")
    assert main(["report", f"store={store}", "study=all", f"out={tmp_path}"]) == 0
    assert "<h1>Channels and experts</h1>" in (tmp_path / report.PAGE).read_text(encoding="utf-8")


def test_failure_in_a_study_does_not_hide_a_result_in_another(store: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(store, tmp_path / "copy"))
    with edited_document(record_path(damaged, "experts")) as record:
        record["cells"][1]["evaluate"]["gsm8k"] = None
        record["cells"][1]["errors"] = {"gsm8k": "out of memory"}
    assert len(load(damaged, "experts").gaps) == 1
    for order in ("experts,channels", "channels,experts"):
        study = load(damaged, order)
        assert np.isfinite(study.results.query("cell == 1 and benchmark == 'gsm8k'")["score"]).all()
        assert study.gaps == [], order


def test_a_model_that_failed_in_a_study_is_that_of_another(store: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(store, tmp_path / "copy"))
    with edited_document(record_path(damaged, "experts")) as record:
        for entry in record["cells"]:
            entry.update(model=None, evaluate=dict.fromkeys(entry["evaluate"]))
    study = load(damaged, "experts,channels")
    assert study.cells["method"].tolist() == ["none", "reap", "man", "heapr"]
    assert set(study.results["cell"]) == {0, 1, 3}


def test_of_different_results_those_of_the_newest_study_count(store: Path, tmp_path: Path) -> None:
    changed = Path(shutil.copytree(store, tmp_path / "copy"))
    with edited_document(record_path(changed, "experts")) as record:
        record["created"] += 1
        unpruned, reap, _ = (entry["evaluate"] for entry in record["cells"])
        reap["gsm8k"] = unpruned["gsm8k"]
        kept = reap.pop("rte")
    for order in ("experts,channels", "channels,experts"):
        study = load(changed, order)
        [reap_cell] = study.cells.index[study.cells["method"] == "reap"]
        rows = study.results[study.results["cell"] == reap_cell].set_index("benchmark")
        assert not study.gaps
        [note] = [note for note in study.notes if labels(study.cells)[reap_cell] in note]
        assert "gsm8k" in note
        assert rows.loc["gsm8k", "folder"] == unpruned["gsm8k"], order
        assert rows.loc["rte", "folder"] == kept, order


@pytest.mark.parametrize("together", [True, False])
def test_two_models_of_one_name_are_two(store: Path, together: bool) -> None:
    """Each in a study of its own, or both in one, as jobs of a multirun leave them; what is one
    model stays one."""
    record = json.loads(record_path(store, "experts").read_text())
    copied = copy.deepcopy(record)
    for entry in copied["cells"]:
        entry["model"] = f"{entry['model'][:-12]}abcdefabcdef"
    copied["cells"] = record["cells"] + copied["cells"] if together else copied["cells"]
    write_json(record_path(store, "other"), {**copied, "study": "other"})
    read = combined_record(store, ["other"] if together else ["experts", "other"])
    record_path(store, "other").unlink()
    name = record["cells"][0]["cell"]["model"]
    digests = {entry["cell"]["model"]: entry["model"][-12:][:6] for entry in read["cells"]}
    assert len(read["cells"]) == 2 * len(record["cells"])
    assert digests == {f"{name}-{digest}": digest for digest in digests.values()}
    assert len(digests) == 2
    assert {row["model"] for row in read["families"]} <= set(digests)
    alone = combined_record(store, ["experts"])
    assert {entry["cell"]["model"] for entry in alone["cells"]} == {name}


def test_families_of_all_studies_have_the_names_of_their_models(
    store: Path, tmp_path: Path
) -> None:
    """The models of both studies are called alike; with top-2 routing their names still end in
    it."""
    record = json.loads(record_path(store, "experts").read_text())
    for number, name in enumerate(("one", "other")):
        for entry in record["cells"]:
            entry["cell"]["model"], entry["model"] = (
                "qwen_top2",
                f"model/qwen-{number}{number}bcdefabcde",
            )
        row = {
            "calibration": "code",
            "model": "qwen_top2",
            "gate": "model",
            "seed": 42,
            "step": f"family/{name}",
        }
        write_json(record_path(tmp_path, name), {**record, "families": [row]})
    read = combined_record(tmp_path, ["one", "other"])
    assert {row["model"]: row["step"] for row in read["families"]} == {
        "qwen-00bcde_top2": "family/one",
        "qwen-11bcde_top2": "family/other",
    }
    assert {names.split_top_k(entry["cell"]["model"])[1] for entry in read["cells"]} == {2}


GATED = (
    "ranks",
    "unified.table5",
    "winners",
    "pareto",
    "artefacts",
    "task_specific",
    "coverage.table18",
)
"""Outputs whose rows are of a gate."""


@pytest.fixture(scope="module")
def two_gates(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """The same cells once more with another gate, whose passes are gone."""
    root = write_store(
        tmp_path_factory.mktemp("gates") / "store",
        criteria=("frequency", "reap"),
        calibrations=("pocket_code", "pocket_math"),
        tasks=("gsm8k", "rte"),
        overlap=True,
    )
    with edited_document(record_path(root)) as record:
        pruned = [entry for entry in record["cells"] if entry["cell"]["criterion"] != "none"]
        for entry in copy.deepcopy(pruned):
            entry["cell"]["gate"] = "softmax"
            entry["statistics"] = "statistics/gone-000000000000"
            record["cells"].append(entry)
        for kind in ("families", "damages"):
            other = {"gate": "softmax", "step": f"{kind}/gone-000000000000"}
            record[kind] = [{**row, **other} for row in record[kind]] + record[kind]
    return load(root, "made_up")


@pytest.mark.parametrize("name", GATED)
def test_rows_of_tables_name_their_gate(name: str, two_gates: Study) -> None:
    items = find(name).items(Results(two_gates))
    for table in [item for item in items if isinstance(item, Table)][:1]:
        frame = table.frame
        columns = ("Model", "Pruned", "Calibration", "Criterion", "Column")
        pruned = frame[frame["Pruned"] != "0 %"]
        assert pruned["Pruned"].str.endswith("gate softmax").any(), name
        assert not pruned.duplicated([column for column in columns if column in frame]).any(), name


def test_labels_name_their_gate(two_gates: Study) -> None:
    assert any("gate softmax" in label for label in labels(two_gates.cells).values())


def test_passes_are_shown_for_the_first_gate(two_gates: Study) -> None:
    """And say so; the other's folders are never asked for."""
    results = Results(two_gates)
    for name in ("tokens_per_expert", "unified.fig3"):
        for output in find(name).items(results):
            assert "gate=model (of model and softmax)" in output.caption, output.name
    assert two_gates.gaps == []
    assert set(two_gates.family["calibration"]) == {"pocket_code", "pocket_math"}


def test_overlaps_rows_and_figures_of_two_models(tmp_path: Path) -> None:
    """Model b with two calibration sets, and a with one: overlaps are pooled, rows of a model stand
    together, and a figure of layers is drawn for each."""
    few = {"criteria": ("frequency", "magnitude"), "tasks": ("gsm8k",), "overlap": True}
    sets = {"b": ("pocket_general", "pocket_code"), "a": ("pocket_general",)}
    for model, calibrations in sets.items():
        write_store(tmp_path, name=model, models=(model,), calibrations=calibrations, **few)
    study = load(tmp_path, "all")
    shuffled = study.damage.sample(frac=1, random_state=0)
    proxy = proxy_overlap(study.family.sort_values("layer", kind="stable"), shuffled)
    names = proxy["model"].tolist()
    assert names == sorted(names, key=names.index)
    assert set(names) == {"a", "b"}
    results = Results(study)
    items = find("aimer.fig6").items(results)
    figures = [item.name for item in items if isinstance(item, Figure)]
    assert sorted(figures) == ["aimer.fig6.a", "aimer.fig6.b"]
    both = pd.concat([results.overlaps, results.overlaps.assign(model="a")])
    for overlaps, models in ((results.overlaps, ["b"]), (both, ["all models", "b", "a"])):
        results.__dict__["overlaps"] = overlaps
        figure, *_ = find("unified.fig5").items(results)
        assert isinstance(figure, Figure)
        titles = [panel.partition(",")[0] for panel in figure.rows["panel"].unique()]
        assert list(dict.fromkeys(titles)) == models
