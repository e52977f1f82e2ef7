from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from handmade import results_of, table_of
from synthetic import record_path

from analysis.load.study import Study, load
from analysis.outputs.scores import benchmark_table
from analysis.registry import Results
from moe_lab.errors import UserError

Copy = Callable[[], Path]


def document(store: Path) -> dict:
    return json.loads(record_path(store).read_text())


def rewrite(store: Path, changed: dict) -> None:
    record_path(store).write_text(json.dumps(changed))


def folder(store: Path, cell: int, task: str) -> Path:
    return store / document(store)["cells"][cell]["evaluate"][task]


def change_result(store: Path, cell: int, task: str, **values: object) -> None:
    path = folder(store, cell, task) / "result.json"
    result = json.loads(path.read_text())
    result["results"][0].update(values)
    path.write_text(json.dumps(result))


def gaps(study: Study) -> list[str]:
    return [f"{gap.where}: {gap.what}" for gap in study.gaps]


def score(study: Study, cell: int, benchmark: str) -> float:
    [comparison] = Results(study).measured
    return float(comparison.benchmarks.loc[cell, benchmark])


def test_a_whole_store_is_read_whole(small: Path) -> None:
    study = load(small, "made_up")
    assert gaps(study) == [] and list(study.notes) == []
    assert len(study.cells) == 1 + 2 * (3 * 3 + 1)
    assert len(study.results) == len(study.cells) * 16
    assert len(study.samples) == len(study.results) * 30
    means = study.samples.groupby(["cell", "benchmark"])["outcome"].mean()
    scores = study.results.set_index(["cell", "benchmark"])["score"]
    assert np.allclose(means.loc[scores.index], scores)
    assert set(study.family["calibration"]) == {"pocket_general", "pocket_code", "pocket_math"}
    assert len(study.coverage) == 3 * 4 * 32
    assert study.models["pocket_olmoe"]["parameters"] == 3_700_000


@pytest.mark.parametrize("damage", ["gone", "result", "samples", "text"])
def test_damage_is_a_gap_with_its_place(copied: Copy, damage: str) -> None:
    store = copied()
    place = folder(store, 3, "rte")
    if damage == "gone":
        place.rename(store / "elsewhere")
    elif damage == "result":
        (place / "result.json").unlink()
    elif damage == "samples":
        (place / "samples.parquet").write_bytes(b"PAR1 no parquet")
    else:
        (place / "result.json").write_text("{")
    study = load(store, "made_up")
    [gap] = study.gaps
    assert place.name in gap.where
    expected = {"gone": "gone", "result": "is missing", "samples": "is damaged", "text": "is damaged"}[damage]
    assert expected in gap.what
    if damage != "samples":
        assert np.isnan(score(study, 3, "rte"))
    else:
        low, high = Results(study).measured[0].interval(("rte",))
        stderr = study.results.query("cell == 3 and benchmark == 'rte'")["stderr"].item()
        assert score(study, 3, "rte") - low[3] == pytest.approx(1.96 * stderr) and high[4] <= 1


def test_a_number_that_was_not_published_is_not_read(copied: Copy) -> None:
    store = copied()
    file = folder(store, 3, "rte") / "result.json"
    published = {"bytes": file.stat().st_size, "sha256": sha256(file.read_bytes()).hexdigest()}
    (file.parent / "step.json").write_text(json.dumps({"files": {file.name: published}}))
    assert not load(store, "made_up").gaps
    change_result(store, 3, "rte", score=0.5)
    study = load(store, "made_up")
    assert [gap.what for gap in study.gaps] == ["result.json is damaged"] and np.isnan(score(study, 3, "rte"))


def test_a_cell_that_is_listed_twice_counts_once(copied: Copy) -> None:
    store = copied()
    changed = document(store)
    changed["cells"].append(changed["cells"][4])
    rewrite(store, changed)
    study = load(store, "made_up")
    assert len(study.cells) == len(changed["cells"]) - 1 and not study.gaps


def test_mixed_sizes_metrics_and_versions_are_told(copied: Copy) -> None:
    store = copied()
    place = folder(store, 1, "hellaswag")
    frame = pd.read_parquet(place / "samples.parquet").iloc[:20]
    frame.to_parquet(place / "samples.parquet", index=False)
    change_result(store, 1, "hellaswag", score=float(frame["outcome"].mean()), n=20)
    change_result(store, 2, "arc_easy", metric="acc_norm")
    step = folder(store, 2, "rte") / "step.json"
    step.write_text(json.dumps({"files": {}, "provenance": {"versions": {"torch": "9.9"}}}))
    result = folder(store, 3, "humaneval") / "result.json"
    result.write_text(json.dumps({**json.loads(result.read_text()), "protocol": {"sandbox": "limited subprocess"}}))
    result = folder(store, 3, "wildbench") / "result.json"
    result.write_text(json.dumps({**json.loads(result.read_text()), "protocol": {"too_long": ["a", "b"]}}))
    result = folder(store, 3, "mbpp") / "result.json"
    result.write_text(json.dumps({**json.loads(result.read_text()), "protocol": {"unfinished_thoughts": ["a"]}}))
    study = load(store, "made_up")
    notes = " ".join(study.notes)
    for words in (
        "wildbench: up to 2 items of a model were not asked",
        "mbpp: up to 1 items of a model have no answer, because a thought does not end",
        "hellaswag was counted on different numbers",
        "arc_easy was measured by different metrics",
        "torch",
        "sandbox: limited",
    ):
        assert words in notes
    assert "A limit was set: 1 benchmark " in notes
    [comparison] = Results(study).measured
    assert comparison.outcomes["hellaswag"].shape[1] == 20
    assert len(table_of(benchmark_table, results_of(study, [comparison])).frame) == len(study.cells)


def test_a_renamed_label_is_found_by_its_id(copied: Copy) -> None:
    store = copied()
    place = folder(store, 1, "rte")
    place.rename(place.with_name(f"renamed-{place.name[-12:]}"))
    assert gaps(load(store, "made_up")) == []


@pytest.mark.parametrize("metric", ["perplexity", "perplexity,none"])
def test_scores_that_are_no_means_get_intervals_from_their_standard_error(copied: Copy, metric: str) -> None:
    store = copied()
    for cell in range(len(document(store)["cells"])):
        change_result(store, cell, "gsm8k", score=10.0 + cell, stderr=0.5, metric=metric)
    [comparison] = Results(load(store, "made_up")).measured
    assert "gsm8k" in comparison.lower_is_better
    low, high = comparison.interval(("gsm8k",))
    assert (low[3], high[3]) == pytest.approx((13 - 0.98, 13 + 0.98))
    assert np.isnan(comparison.p_values(("gsm8k",), 1, [2, 3])).all()


def test_records_that_cannot_be_read_are_named(copied: Copy) -> None:
    store = copied()
    for text, word in ((json.dumps({**document(store), "schema": 2}), "newer"), ("{", "damaged")):
        record_path(store).write_text(text)
        with pytest.raises(UserError, match=word):
            load(store, "made_up")
