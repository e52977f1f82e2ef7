from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes

from analysis import __main__ as command
from analysis import catalogue, convergence
from analysis.load import load
from analysis.needs import NEEDS, needs


@pytest.fixture(scope="module")
def material(small: Path) -> catalogue.Material:
    return catalogue.Material(load(small, "made_up"))


def naive(scores: pd.DataFrame, ratio: float) -> dict[int, float]:
    """Tokens -> Jaccard of the keep-set with the last one, mean over layers, set by set."""
    last = max(scores["tokens"])

    def kept(tokens: int, layer: int) -> set[int]:
        part = scores[(scores["tokens"] == tokens) & (scores["layer"] == layer)]
        by_score = sorted(zip(part["score"], part["expert"], strict=True))
        return {expert for _, expert in by_score[int(len(by_score) * ratio) :]}

    layers = sorted(set(scores["layer"]))
    return {
        tokens: float(
            np.mean([len(kept(tokens, i) & kept(last, i)) / len(kept(tokens, i) | kept(last, i)) for i in layers])
        )
        for tokens in sorted(set(scores["tokens"]))
        if tokens < last
    }


def test_keep_sets_are_compared_with_the_last_one(material: catalogue.Material) -> None:
    scores = material.study.convergence
    found = convergence.settling(scores, [0.25, 0.5, 0.01])
    assert set(found["ratio"]) == {0.25, 0.5}  # a ratio that removes no expert says nothing
    for (criterion, calibration), part in found.groupby(["criterion", "calibration"]):
        own = scores[(scores["criterion"] == criterion) & (scores["calibration"] == calibration)]
        for ratio in (0.25, 0.5):
            row = part[part["ratio"] == ratio].set_index("tokens")
            assert row["jaccard"].to_dict() == pytest.approx(naive(own, ratio))
            assert np.allclose(row["chance"], (1 - ratio) / (1 + ratio)) and set(row["whole"]) == {65000}
    assert (found.loc[found["criterion"] == "man", "jaccard"] == 1).all()
    slow, fast = (found[found["criterion"] == name]["changed"].mean() for name in ("frequency", "reap"))
    assert slow > fast > 0


def test_what_was_read_is_said(material: catalogue.Material) -> None:
    found = convergence.settling(material.study.convergence, convergence.ratios_of(material.study))
    sentences = convergence.settling_finding(found)
    assert len(sentences) == 3 and "after 75 % of the text at most" in sentences[0] and "Frequency" in sentences[0]
    calm = found[found["criterion"] == "man"]
    assert "has settled" in convergence.settling_finding(calm)[0]
    assert "has not settled" in convergence.settling_finding(found.assign(changed=0.03))[0]


def lines(axes: Axes) -> dict[str, list[float]]:
    return {line.get_color(): list(line.get_ydata()) for line in axes.get_lines()}


def test_the_figure_ends_where_all_text_is_read(material: catalogue.Material) -> None:
    figure, table = catalogue.make(["convergence"], material)["convergence"]
    panels = [axes for axes in figure.drawing.axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in panels][:2] == ["General, 25 % pruned", "Code, 25 % pruned"]
    assert len(panels) == 6
    for axes in panels:
        drawn = [line for line in axes.get_lines() if len(line.get_xdata()) == 4]
        assert len(drawn) == 3 and all(line.get_ydata()[-1] == 1 and line.get_xdata()[-1] == 65000 for line in drawn)
    assert len(table.frame) == 3 * 3 * 2 * 3 and "65,000 calibration tokens" in table.caption


def test_profiles_stand_beside_the_unpruned_model(material: catalogue.Material) -> None:
    made = catalogue.make(["aimer.fig6", "coverage.fig11"], material)
    figure, table = made["aimer.fig6"]
    [entropy] = made["coverage.fig11"]
    row = table.frame[(table.frame["Criterion"] == "MAN") & (table.frame["Layer"] == "2")].iloc[0]
    whole = table.frame[(table.frame["Criterion"] == "Unpruned") & (table.frame["Layer"] == "2")].iloc[0]
    assert row["Of the unpruned"] == pytest.approx(row["Token variance"] / whole["Token variance"])
    first = table.frame[table.frame["Layer"] == "0"]
    assert first[["Router entropy", "Experts"]].isna().all(axis=None) and first["Token variance"].notna().all()
    for drawn, length in ((figure, 4), (entropy, 3)):
        axes = drawn.drawing.axes[0]
        assert len(axes.get_lines()) == 5 and {len(line.get_xdata()) for line in axes.get_lines()} == {length}


def test_what_is_lacking_is_said_with_what_it_needs(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert command.main(["coverage.table6", "ranks", f"store={small}", f"out={tmp_path}"]) == 1
    said = capsys.readouterr().err
    assert "coverage.table6 needs one channel criterion under allocation=coverage and others, which" in said
    assert (tmp_path / "tables" / "ranks.csv").exists()
    assert set(NEEDS) <= set(catalogue.CATALOGUE) and needs("ranks") == "results"
