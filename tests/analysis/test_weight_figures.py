from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from synthetic import write_store

from analysis.load.study import load
from analysis.outputs.weights import profile_figure, profiles, weight_scores


def scores(layers: list[list[float]], criterion: str = "aimer", model: str = "m") -> pd.DataFrame:
    rows = [
        {"model": model, "criterion": criterion, "layer": layer, "expert": expert, "score": score}
        for layer, values in enumerate(layers)
        for expert, score in enumerate(values)
    ]
    return pd.DataFrame(rows)


def test_each_layer_is_scaled_by_itself() -> None:
    found = profiles(scores([[2.0, 4.0, 3.0], [-1.0, -3.0, -2.0]]))
    assert found["profile"].tolist() == [0, 1, 0.5, 1, 0, 0.5]
    assert found["place"].tolist() == [0, 1, 0.5, 1, 0, 0.5]


def test_a_layer_without_differences_has_no_profile() -> None:
    found = profiles(scores([[1.0, 1.0, 1.0], [0.0, 1.0, 2.0]]))
    assert np.isnan(found["profile"][:3]).all() and found["profile"][3:].tolist() == [0, 0.5, 1]


def test_a_panel_per_model_and_criterion_a_line_per_layer() -> None:
    both = pd.concat([scores([[1.0, 2, 3]] * 4, name) for name in ("aimer", "magnitude")], ignore_index=True)
    drawn = profile_figure(profiles(both), name="aimer.fig2").drawing
    assert [axes.get_title(loc="left") for axes in drawn.axes] == ["m, Magnitude", "m, AIMER"]
    assert [len(axes.lines) for axes in drawn.axes] == [4, 4]


def test_scores_are_read_once_per_criterion_and_gaps_are_noted(tmp_path: Path) -> None:
    settings = {"calibrations": ("pocket_code",), "tasks": ("rte",), "items": 5, "overlap": False}
    store = write_store(tmp_path / "store", criteria=("aimer", "magnitude", "reap"), **settings)
    study = load(store, "made_up")
    folder = study.cells.query("criterion == 'aimer'")["scores_folder"].iloc[0]
    (store / folder).mkdir(parents=True)
    pd.DataFrame({"layer": [0, 0], "expert": [0, 1], "score": [0.5, 0.75]}).to_parquet(
        store / folder / "scores.parquet"
    )
    found = weight_scores(study)
    assert found["criterion"].tolist() == ["aimer", "aimer"] and found["score"].tolist() == pytest.approx([0.5, 0.75])
    assert any("magnitude" in gap.where for gap in study.gaps), "what is gone is said"
