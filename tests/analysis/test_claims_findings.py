"""What the page says of studies that vary allocations, granularity and bits."""

from __future__ import annotations

from typing import Any

from handmade import UNPRUNED, cell, comparison_of, results_of, study_of

from analysis import report
from analysis.outputs import findings
from analysis.registry import parts
from analysis.stats.comparison import Comparison
from analysis.stats.winners import decided_pairs


def headline(study: Any, comparison: Comparison) -> list[tuple[str, str]]:
    """What the report says first of a study without losses on right answers."""
    results = results_of(study, [comparison])
    results.decided_pairs = decided_pairs([comparison], [])
    return parts("text.headline", results)


def study(axes: list[dict[str, Any]], solved: list[int]) -> tuple[Any, Any]:
    comparison = comparison_of(axes, {"gsm8k": [[1] * n + [0] * (40 - n) for n in solved]})
    return study_of(comparison), comparison


def test_experts_under_one_allocation_are_said_as_ever() -> None:
    found, _ = study([UNPRUNED, cell("reap", ratio=0.25), cell("man", ratio=0.25)], [40, 20, 10])
    assert report.what_was_run(found) == (
        "Two criteria chose which experts of m to remove (25 % of each layer, with code calibration). That gave two "
        "pruned models, each evaluated like the unpruned one on one benchmark of 40 items."
    )


def test_channels_and_allocations_are_counted() -> None:
    axes = [UNPRUNED, cell("heapr", "global"), cell("heapr", "layerwise"), cell("camera", "layerwise")]
    found, _ = study(axes, [40, 20, 10, 5])
    assert report.what_was_run(found).startswith(
        "Two criteria and two allocations chose which channels of m to remove (50 % in all, with code calibration). "
        "That gave three pruned models"
    )
    both, _ = study([*axes, cell("reap")], [40, 20, 10, 5, 4])
    assert "which experts or channels of m" in report.what_was_run(both)


def test_bits_are_said_and_ratio_zero_is_no_pruning() -> None:
    axes = [cell("snip", "coverage", ratio=ratio, recovery=bits) for ratio in (0.0, 0.5) for bits in ("none", "nf4")]
    found, comparison = study([UNPRUNED, *axes], [40, 40, 39, 20, 18])
    said = report.what_was_run(found)
    assert "(50 % in all, with code calibration). Pruned models were evaluated as they are and with NF4. That" in said
    assert "That gave four models, each" in said
    about = headline(found, comparison)
    assert not any("With 0 %" in sentence for _, sentence in about)
    assert [word for word, _ in about] == ["Winners", "Best average", "Recovery"]


def test_wins_and_averages_name_what_was_removed_and_who_competes() -> None:
    axes = [UNPRUNED, cell("heapr", "global"), cell("heapr", "layerwise")]
    found, comparison = study(axes, [40, 30, 10])
    about = dict(headline(found, comparison))
    assert about["Winners"].startswith("With 50 % of the channels of m removed, HEAPr-G won 1 of 1 columns")
    assert "of the channels of m removed, the best average is 0.750, by HEAPr-G" in about["Best average"]
    assert "over the best other method, HEAPr-L with code calibration, is beyond noise" in about["Best average"]
    _, experts = study([UNPRUNED, cell("reap"), cell("man")], [40, 30, 10])
    assert "over the best other criterion, MAN with" in findings.best_plan(experts)[0]


def test_claims_come_first() -> None:
    found, comparison = study([UNPRUNED, cell("reap"), cell("reap", "evolutionary")], [40, 30, 10])
    about = headline(found, comparison)
    assert about[0][0] == "Claim" and "does not hold here: it is the other way round" in about[0][1]
    assert "searched minus uniform, with 50 % pruned, mean of one pair of plans, is −0.500" in about[0][1]
