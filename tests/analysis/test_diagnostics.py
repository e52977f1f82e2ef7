from __future__ import annotations

from pathlib import Path

import pytest

from analysis import __main__
from analysis.load.study import load
from analysis.registry import Results, find, make


@pytest.fixture(scope="module")
def results(small: Path) -> Results:
    return Results(load(small, "made_up"))


def test_profiles_stand_beside_the_unpruned_model(results: Results) -> None:
    made = make(["aimer.fig6", "router_entropy"], results)
    figure, table = made["aimer.fig6"]
    [entropy] = made["router_entropy"]
    row = table.frame[(table.frame["Criterion"] == "MAN") & (table.frame["Layer"] == "2")].iloc[0]
    whole = table.frame[(table.frame["Criterion"] == "Unpruned") & (table.frame["Layer"] == "2")].iloc[0]
    assert row["Of the unpruned"] == pytest.approx(row["Token variance"] / whole["Token variance"])
    first = table.frame[table.frame["Layer"] == "0"]
    assert first[["Router entropy", "Experts"]].isna().all(axis=None) and first["Token variance"].notna().all()
    for drawn, length in ((figure, 4), (entropy, 3)):
        axes = drawn.drawing.axes[0]
        assert len(axes.get_lines()) == 5 and {len(line.get_xdata()) for line in axes.get_lines()} == {length}


def test_what_is_lacking_is_said_with_what_it_needs(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert __main__.main(["coverage.table6", "ranks", f"store={small}", f"out={tmp_path}"]) == 1
    said = capsys.readouterr().err
    assert "coverage.table6 needs one channel criterion under allocation=coverage and others, and " in said
    assert (tmp_path / "tables" / "ranks.csv").exists()
    assert find("ranks").needs == "results of pruned models"
