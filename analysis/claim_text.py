"""The papers' claims as sentences and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis import names
from analysis.claims import ALL, BY_CHANCE, CHANNELS, EQUAL, INVARIANT, SEARCHED
from analysis.frames import records
from analysis.load import Study
from analysis.tables import SCORE, Table, setting

STATEMENTS = {
    SEARCHED: "Searched allocations beat uniform ones",
    CHANNELS: "Removing channels beats removing whole experts at equal routed parameters",
    BY_CHANCE: "Removing channels beats removing whole experts even at random",
    INVARIANT: "Scores divided by the token count depend less on the calibration set than sums",
}
PAPERS = {SEARCHED: "claimed by EvoESAP", CHANNELS: "claimed by HEAPr", INVARIANT: "claimed by Unified Expert Pruning"}
PAPERS[BY_CHANCE] = "a control"


def sentences(found: pd.DataFrame) -> list[str]:
    """A sentence per claim and model: what is claimed, whether it holds here, and the interval that says so."""
    return [_sentence(row) for row in records(found[found["headline"].astype(bool)])] if len(found) else []


def _sentence(row: Mapping[str, Any]) -> str:
    verdict = {
        "holds": "holds here",
        "does not hold": "does not hold here: it is the other way round",
        "undecided": "is undecided here: the interval contains 0",
        "not tested": "could not be tested: results are missing",
    }[row["verdict"]]
    said = f"“{STATEMENTS[row['claim']]}” ({PAPERS[row['claim']]}) {verdict}."
    if row["verdict"] == "not tested":
        return said
    interval = (
        f"{names.signed(row['difference'])} (95 % interval {names.signed(row['low'])} to {names.signed(row['high'])})"
    )
    parts = sorted(row["parts"].items(), key=lambda part: -part[1])
    by_part = f"; by part: {names.listing(f'{name} {names.signed(value)}' for name, value in parts)}" if parts else ""
    return f"{said} {_measured(row)} is {interval}{by_part}."


def _measured(row: Mapping[str, Any]) -> str:
    """What the difference is of."""
    pairs = f"{row['pairs']} pairs" if row["pairs"] != 1 else "one pair"
    where = "over all ratios" if row["ratio"] == ALL else f"with {names.ratio(row['ratio'])} pruned"
    if row["claim"] == INVARIANT:
        return (
            f"The share of the experts to remove from {row['model']} that all calibration sets agree on, b = 1 minus "
            f"b = 0, {where},"
        )
    sides = "searched minus uniform" if row["claim"] == SEARCHED else "channels minus experts"
    return f"The average of {row['model']}, {sides}, {where}, mean of {pairs} of plans,"


def claim_table(study: Study, found: pd.DataFrame, *, name: str = "claims") -> Table:
    """The claims with their paired differences, per ratio and over all."""
    parts = pd.DataFrame(list(found["parts"]), index=found.index, dtype=float)
    text = pd.DataFrame(
        {
            "Model": found["model"],
            "Claim": found["claim"].map(STATEMENTS),
            "Pruned": [ratio if ratio == ALL else names.ratio(ratio) for ratio in found["ratio"]],
            "Pairs": found["pairs"],
            "Difference": found["difference"],
            "p": found["p"],
            "p (Holm)": found["p_holm"],
            "Verdict": found["verdict"],
        }
    )
    frame = pd.concat([text, parts], axis=1)
    return Table(
        name=name,
        title="What the papers claim",
        caption="Difference: of Avg (without columns where less is better) for the first two claims, mean over the "
        "pairs of plans, items resampled with the "
        "same draw for every plan; channels and whole experts are paired when the shares of routed parameters kept "
        f"differ by less than {EQUAL:g}. For calibration sets: of the share of the lowest-scored experts common to all "
        "sets, layers resampled, the interval widened for few layers. Undecided: the 95 % interval contains 0. Holm: "
        "corrected for all rows. The last columns are differences of group averages. Criteria, texts and seeds are "
        f"those of this study. {setting(study)}",
        frame=frame,
        formats={
            "Pairs": "{:.0f}",
            "Difference": SCORE,
            "p": "{:.4f}",
            "p (Holm)": "{:.4f}",
            **dict.fromkeys(map(str, parts), SCORE),
        },
        optional=tuple(map(str, parts)),
        low=found[["low"]].set_axis(["Difference"], axis=1),
        high=found[["high"]].set_axis(["Difference"], axis=1),
    )
