"""The winner maps as the page shows them: a cell per column and calibration set, and how sure it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis import findings, names, style
from analysis.catalogue import Material
from analysis.frames import groups, records
from analysis.winners import SETTINGS, label


def winner_views(material: Material) -> list[dict[str, Any]]:
    """The winner maps: all criteria by score and by loss, and the papers' five baselines where that is another map."""
    same = set(material.study.cells["criterion"]) - {"none"} <= set(names.BASELINES)
    views = [
        ("all", "All criteria", material.winners),
        ("losses", "All criteria, by loss on right answers (lower is better)", material.by_answer_loss.winners),
        *(() if same else [("baselines", "The papers’ five baselines", material.baseline_winners)]),
    ]
    return [
        {"key": key, "label": text, "maps": [_map(group) for _, group in groups(found, SETTINGS)]}
        for key, text, found in views
        if len(found)
    ]


def _map(found: pd.DataFrame) -> dict[str, Any]:
    sets = names.calibrations_in_order(found["calibration"])
    wins = {(win["column"], win["calibration"]): _win(win) for win in records(found)}
    blank = {"kind": "gap", "colour": "none", "label": "not run", "score": "", "lead": "", "detail": ""}
    first = records(found)[0]
    return {
        "title": f"{first['model']}, {first['pruned']} pruned",
        "sentence": findings.who_won(found)[0].split(", ", 1)[1],
        "calibrations": [names.calibration(name) for name in sets],
        "rows": [
            {"column": names.benchmark(column), "cells": [wins.get((column, name), blank) for name in sets]}
            for column in dict.fromkeys(found["column"])
        ],
    }


def _win(win: Mapping[str, Any]) -> dict[str, str]:
    winners = win["winners"]
    alone = len(winners) == 1
    kind = ("sure" if win["beyond_noise"] else "unsure") if alone else "tie" if winners else "gap"
    detail = f"{names.listing(names.method(name) for name in winners)}: {win['score']:.3f}" if winners else "no result"
    if alone and win["runner_up"]:
        detail += f", {names.signed(win['lead'])} against {names.method(win['runner_up'])}{_certainty(win)}"
    many = len(winners) > 3
    return {
        "kind": kind,
        "colour": style.colour(winners[0]) if alone else "none",
        "label": f"{len(winners)} tied" if many and win["score"] else label(winners, win["score"]),
        "score": f"{win['score']:.3f}" if winners else "",
        "lead": names.signed(win["lead"]) if alone and win["runner_up"] else "",
        "detail": detail,
    }


def _certainty(win: Mapping[str, Any]) -> str:
    """The interval of a lead and its p-value, where it could be tested."""
    if pd.isna(win["p"]):
        return ", not tested"
    low, high = names.signed(win["lead_low"]), names.signed(win["lead_high"])
    return f" (95 % interval {low} to {high}), p = {win['p']:.3g}, {win['p_holm']:.3g} corrected"
