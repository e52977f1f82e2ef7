from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes

from analysis import __main__
from analysis.load.study import load
from analysis.outputs import convergence
from analysis.registry import Results, find, make


@pytest.fixture(scope="module")
def results(small: Path) -> Results:
    return Results(load(small, "made_up"))


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


def test_keep_sets_are_compared_with_the_last_one(results: Results) -> None:
    scores = results.study.convergence
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


def test_what_was_read_is_said(results: Results) -> None:
    sentences = convergence.convergence_findings(results.study)
    assert len(sentences) == 3 and "after 75 % of the text at most" in sentences[0] and "Frequency" in sentences[0]
    found = convergence.settlings(results.study, convergence.EXPERTS)
    calm = found[found["criterion"] == "man"]
    assert "has settled" in convergence.convergence_finding(calm, "expert")[0]
    assert "has not settled" in convergence.convergence_finding(found.assign(changed=0.03), "expert")[0]


def channel_shares() -> pd.DataFrame:
    """Two layers of 100 and 300 channels at two kept shares; after 10 and 30 of 40 tokens."""
    rows = [
        ("pocket_olmoe", "pocket_code", "heapr", tokens, 40, layer, channels, kept, same - 0.1 * (kept == 0.75))
        for tokens, sames in ((10, (0.5, 0.7)), (30, (0.9, 1.0)))
        for layer, channels, same in zip((0, 1), (100, 300), sames, strict=True)
        for kept in (0.5, 0.75)
    ]
    columns = ["model", "calibration", "criterion", "tokens", "whole", "layer", "channels", "kept", "same"]
    return pd.DataFrame(rows, columns=columns)


def test_channels_settle_like_experts(results: Results) -> None:
    found = convergence.channel_settling(channel_shares(), [0.5]).set_index("tokens")
    assert found["jaccard"].to_dict() == pytest.approx({10: (50 / 150 + 70 / 130) / 2, 30: (90 / 110 + 1) / 2})
    assert found["lowest"].to_dict() == pytest.approx({10: 50 / 150, 30: 90 / 110})
    assert found["changed"].to_dict() == pytest.approx({10: 1 - (50 + 210) / 400, 30: 1 - (90 + 300) / 400})
    assert found["chance"].tolist() == pytest.approx([25 / 75] * 2) and set(found["whole"]) == {40}
    nearest = convergence.channel_settling(channel_shares(), [0.3]).set_index("tokens")
    assert nearest.loc[30, "lowest"] == pytest.approx(0.8 / 1.2), "75 % kept is closest to 30 % pruned"
    study = replace(results.study)
    study.__dict__["channel_convergence"] = channel_shares()
    figure, table = find("convergence").items(Results(study))[-2:]
    assert (figure.name, table.name) == ("convergence.channels",) * 2 and len(table.frame) == 4
    assert "same channels kept" in figure.drawing.axes[0].get_ylabel()
    assert "of the channels to keep still changed (HEAPr" in convergence.convergence_findings(study)[-1]


def lines(axes: Axes) -> dict[str, list[float]]:
    return {line.get_color(): list(line.get_ydata()) for line in axes.get_lines()}


def test_the_figure_ends_where_all_text_is_read(results: Results) -> None:
    figure, table = make(["convergence"], results)["convergence"]
    panels = [axes for axes in figure.drawing.axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in panels][:2] == ["General, 25 % pruned", "Code, 25 % pruned"]
    assert len(panels) == 6
    for axes in panels:
        drawn = [line for line in axes.get_lines() if len(line.get_xdata()) == 4]
        assert len(drawn) == 3 and all(line.get_ydata()[-1] == 1 and line.get_xdata()[-1] == 65000 for line in drawn)
    assert len(table.frame) == 3 * 3 * 2 * 3 and "65,000 calibration tokens" in table.caption


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
