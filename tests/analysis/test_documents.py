from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from synthetic import record_path, write_json, write_store

from analysis import names, report
from analysis.__main__ import main
from analysis.load.studies import chosen, document
from analysis.load.study import load
from analysis.outputs.pareto import pareto_table
from analysis.registry import Results
from moe_lab.errors import UserError

SMALL = {"calibrations": ("pocket_code",), "ratios": (0.25,), "tasks": ("gsm8k", "rte", "mmlu"), "items": 15}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two studies that share the unpruned model and REAP; only the second has families, and one benchmark less."""
    root = tmp_path_factory.mktemp("two") / "store"
    write_store(root, name="experts", criteria=("reap", "man"), overlap=False, **SMALL)
    write_store(root, name="channels", criteria=("reap", "heapr"), **{**SMALL, "tasks": ("gsm8k", "rte")})
    return root


def test_several_studies_are_read_as_one(store: Path) -> None:
    study = load(store, "experts,channels")
    assert study.name == "experts+channels" and study.gaps == []
    assert study.cells["method"].tolist() == ["none", "reap", "man", "heapr"]
    benchmarks = study.results.groupby("cell")["benchmark"].agg(sorted).tolist()
    assert benchmarks == [["gsm8k", "mmlu", "rte"]] * 3 + [["gsm8k", "rte"]]
    assert set(study.family["calibration"]) == {"pocket_code"}
    assert list(study.document["config"]) == ["experts", "channels"]


def test_the_order_of_studies_does_not_change_what_is_found(store: Path) -> None:
    one, other = (document(store, names) for names in (["experts", "channels"], ["channels", "experts"]))
    places = [{json.dumps(e["cell"]): e["evaluate"] for e in found["cells"]} for found in (one, other)]
    assert places[0] == places[1] and one["families"] == other["families"] != []


def test_all_stands_for_every_study(store: Path) -> None:
    assert chosen(store, "all") == ["channels", "experts"]
    assert chosen(store, "experts,experts") == ["experts"]
    with pytest.raises(UserError, match="did you mean experts"):
        chosen(store, "channels,expert")


def test_all_methods_of_a_store_meet_in_one_table(store: Path, tmp_path: Path) -> None:
    study = load(store, "all")
    table = pareto_table(Results(study), "pareto")
    assert sorted(table.frame["Criterion"]) == ["HEAPr", "MAN", "REAP", "Unpruned"]
    assert main(["report", f"store={store}", "study=all", f"out={tmp_path}"]) == 0
    assert "<h1>Channels and experts</h1>" in (tmp_path / report.PAGE).read_text(encoding="utf-8")


def test_a_failure_in_one_study_does_not_hide_the_result_in_the_other(store: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(store, tmp_path / "copy"))
    path = record_path(copy, "experts")
    record = json.loads(path.read_text())
    record["cells"][1]["evaluate"]["gsm8k"] = None
    record["cells"][1]["errors"] = {"gsm8k": "out of memory"}
    path.write_text(json.dumps(record))
    assert len(load(copy, "experts").gaps) == 1
    for order in ("experts,channels", "channels,experts"):
        assert np.isfinite(load(copy, order).results.query("cell == 1 and benchmark == 'gsm8k'")["score"]).all()
        assert load(copy, order).gaps == [], order


@pytest.mark.parametrize("together", [True, False])
def test_two_models_of_one_name_are_two(store: Path, together: bool) -> None:
    """Each in a study of its own, or both in one, as jobs of a multirun leave them; what is one model stays one."""
    record = json.loads(record_path(store, "experts").read_text())
    other = json.loads(json.dumps(record))
    for entry in other["cells"]:
        entry["model"] = f"{entry['model'][:-12]}abcdefabcdef"
    other["cells"] = record["cells"] + other["cells"] if together else other["cells"]
    write_json(record_path(store, "other"), {**other, "study": "other"})
    read = document(store, ["other"] if together else ["experts", "other"])
    name = record["cells"][0]["cell"]["model"]
    words = {entry["cell"]["model"]: entry["model"][-12:][:6] for entry in read["cells"]}
    assert len(read["cells"]) == 2 * len(record["cells"])
    assert words == {f"{name}-{own}": own for own in words.values()} and len(words) == 2
    models = {row["model"] for row in read["families"]}
    assert models <= set(words)
    record_path(store, "other").unlink()
    alone = document(store, ["experts"])
    assert {entry["cell"]["model"] for entry in alone["cells"]} == {name}


def test_families_of_all_studies_are_read_under_the_names_of_their_models(tmp_path: Path) -> None:
    """The models of both studies are called alike; with top-2 routing their names still end in it."""
    for at, name in enumerate(("one", "other")):
        write_store(tmp_path, name=name, criteria=("heapr",), overlap=False, **SMALL)
        path = record_path(tmp_path, name)
        record = json.loads(path.read_text())
        for entry in record["cells"]:
            entry["cell"]["model"], entry["model"] = "qwen_top2", f"model/qwen-{at}{at}bcdefabcde"
        row = {"calibration": "code", "model": "qwen_top2", "gate": "model", "seed": 42, "step": f"family/{name}"}
        path.write_text(json.dumps({**record, "families": [row]}))
    read = document(tmp_path, ["one", "other"])
    assert {row["model"]: row["step"] for row in read["families"]} == {
        "qwen-00bcde_top2": "family/one",
        "qwen-11bcde_top2": "family/other",
    }
    assert {names.routed(entry["cell"]["model"])[1] for entry in read["cells"]} == {2}
