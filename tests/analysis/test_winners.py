from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis import names
from analysis.stats import ranks
from analysis.stats.comparison import Comparison
from analysis.stats.winners import label, winner_map

ITEMS = 200


def comparison(outcomes: dict[str, dict[str, np.ndarray]]) -> Comparison:
    """Cells of one panel from criterion -> benchmark -> outcomes; a benchmark that a criterion lacks is a gap."""
    benchmarks = list(dict.fromkeys(name for by_name in outcomes.values() for name in by_name))
    axes = {"model": "m", "calibration": "general", "ratio": 0.25, "allocation": "uniform", "gate": "model", "seed": 42}
    cells = pd.DataFrame([{**axes, "criterion": criterion, "method": criterion} for criterion in outcomes])
    gap = np.full(ITEMS, np.nan)
    stacked = {
        name: np.stack([by_name.get(name, gap) for by_name in outcomes.values()]).astype(float) for name in benchmarks
    }
    scores = pd.DataFrame({name: values.mean(axis=1) for name, values in stacked.items()})
    return Comparison(
        model="m",
        cells=cells,
        benchmarks=scores,
        parts=ranks.displayed(benchmarks),
        lower_is_better=(),
        outcomes=stacked,
        standard_errors=scores * 0,
    )


def right(count: int) -> np.ndarray:
    return (np.arange(ITEMS) < count).astype(float)


def test_a_clear_win_is_beyond_noise_and_a_narrow_one_is_not() -> None:
    made = comparison(
        {
            "reap": {"gsm8k": right(180), "math500": right(100)},
            "ean": {"gsm8k": right(90), "math500": right(98)},
            "seer": {"gsm8k": right(60), "math500": right(40)},
        }
    )
    found = winner_map([made]).set_index("column")
    assert found["winners"].to_dict() == {"GSM8K": ("reap",), "MATH-500": ("reap",)}
    assert found["runner_up"].to_dict() == {"GSM8K": "ean", "MATH-500": "ean"}
    assert found["beyond_noise"].to_dict() == {"GSM8K": True, "MATH-500": False}
    assert found.loc["MATH-500", "p"] == pytest.approx(0.5)  # two discordant items, both for the winner
    assert found.loc["MATH-500", "lead"] == pytest.approx(0.01)
    assert found.loc["GSM8K", "lead_low"] > 0.3


def test_a_win_must_hold_against_every_other_criterion() -> None:
    """Far ahead of the runner-up on the same items, yet not surely ahead of a third that errs elsewhere."""
    rng = np.random.default_rng(0)
    first, third = rng.permutation(right(100)), rng.permutation(right(90))
    second = first.copy()
    second[np.flatnonzero(first)[:8]] = 0
    made = comparison({"man": {"gsm8k": first}, "ean": {"gsm8k": second}, "seer": {"gsm8k": third}})
    found = winner_map([made]).iloc[0]
    alone = made.p_values(("GSM8K",), 0, [1, 2])
    assert alone[0] < 0.05 < alone[1], "ahead of the runner-up beyond noise, but not of the third"
    assert found["runner_up"] == "ean" and found["p"] == alone[1]


def test_holm_covers_the_whole_map() -> None:
    columns = {name: right(100) for name in ("gsm8k", "math500", "livecodebench", "wildbench")}
    behind = {name: right(93) for name in columns}
    found = winner_map([comparison({"man": columns, "ean": behind})])
    assert found["p"].tolist() == pytest.approx([2 * 0.5**7] * 4)
    assert found["p_holm"].tolist() == pytest.approx([8 * 0.5**7] * 4)
    assert not found["beyond_noise"].any()


def test_ties_and_zeros_are_nobodys_win() -> None:
    zero, some = right(0), right(50)
    made = comparison({"reap": {"gsm8k": some, "math500": zero}, "man": {"gsm8k": some[::-1], "math500": zero}})
    found = winner_map([made]).set_index("column")
    assert found["winners"].to_dict() == {"GSM8K": ("reap", "man"), "MATH-500": ("reap", "man")}
    assert label(("reap", "man"), 0.25) == "REAP = MAN" and label(("reap", "man"), 0.0) == "all 0"


def test_gaps_do_not_win_and_do_not_lose() -> None:
    made = comparison({"reap": {"gsm8k": right(50)}, "man": {"math500": right(50)}, "ean": {"gsm8k": right(20)}})
    found = winner_map([made]).set_index("column")
    assert found.loc["MATH-500", "winners"] == ("man",) and found.loc["MATH-500", "runner_up"] == ""
    assert np.isnan(found.loc["MATH-500", "p"]) and not found.loc["MATH-500", "beyond_noise"]
    assert found.loc["GSM8K", "winners"] == ("reap",) and found.loc["GSM8K", "runner_up"] == "ean"


def test_the_published_map_has_the_five_baselines_only() -> None:
    scores = {name: {"gsm8k": right(100 + at)} for at, name in enumerate((*names.BASELINES, "man"))}
    made = comparison(scores)
    assert winner_map([made]).iloc[0]["winners"] == ("man",)
    assert winner_map([made], names.BASELINES).iloc[0]["winners"] == ("mone",)


def test_averaged_columns_resample_shared_answers_together() -> None:
    """HumanEval+ grades HumanEval's answers again: the interval is that of 200 items, not of 400."""
    same = right(100)
    made = comparison({"reap": {"humaneval": same, "humaneval_plus": same}, "man": {"mbpp": same}})
    twice = made.interval(("humaneval", "humaneval_plus"))
    once = made.interval(("humaneval",))
    assert twice[1][0] - twice[0][0] == pytest.approx(once[1][0] - once[0][0], abs=0.01)
