"""Studies that are derived from another one: with other numbers in place of the scores, or with
cells that are joined from several."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load.settings import AXES
from moe_lab.analysis.load.study import Study

_OTHER_AXES = [axis for axis in AXES if axis != "calibration"]


def study_by_answer_loss(study: Study) -> Study:
    """A copy of the study with the losses on right answers in place of outcomes and scores. Items
    without an answer loss are left out."""
    # units NaN: all items have equal weights
    samples = study.samples.dropna(subset=["answer_loss"])
    samples = samples.assign(outcome=samples["answer_loss"], units=np.nan)
    outcomes = samples.groupby(["cell", "benchmark"])["outcome"]
    summary = outcomes.agg(score="mean", stderr="sem", n="size").reset_index()
    results = study.results.drop(columns=["score", "stderr", "n"])
    results = results.merge(summary, on=["cell", "benchmark"])
    results = results.assign(metric="answer_loss", scale="loss", unit="bits per byte")
    return replace(study, results=results, samples=samples)


def study_by_domain(study: Study) -> Study:
    """A copy of the study with joint cells: plans that differ in the calibration set alone become
    one cell, in which each benchmark is read from the plan that was calibrated on the benchmark's
    domain. The calibration of this cell names all sets: `c4+opencodereasoning+gsm8k`. The study
    itself if no plans can be joined.

    A plan also keeps its own cell if some other plan with its calibration set is not joined with
    the same sets, so that both can be compared. Other data of a joint cell, such as its cost, are
    those of its first plan. Of several sets of a domain, the first is joined.
    """
    plans = study.cells.assign(domain=study.cells["calibration"].map(names.domain))
    plans = plans.dropna(subset="domain")
    order = names.calibrations_in_order(plans["calibration"])
    plans = plans.sort_values("calibration", key=lambda sets: sets.map(order.index), kind="stable")
    plans = plans.drop_duplicates([*_OTHER_AXES, "domain"])
    joint_plans = plans.groupby(_OTHER_AXES, sort=False)
    plans["sets"] = joint_plans["calibration"].transform(names.JOINT.join)
    plans["joint_cell"] = study.cells.index.max() + 1 + joint_plans.ngroup()
    is_joint = plans["sets"] != plans["calibration"]
    if not is_joint.any():
        return study
    plans_of_set = plans.groupby(["model", "calibration"])
    has_equal_sets = plans_of_set["sets"].transform("nunique") == 1
    replaced = plans.index[is_joint & has_equal_sets]
    plans = plans[is_joint]

    def joined(rows: pd.DataFrame) -> pd.DataFrame:
        """Rows of results or samples, with those of joint cells."""
        domains = rows["cell"].map(plans["domain"])
        rows_of_plans = rows[domains == rows["benchmark"].map(names.domain_of_benchmark)]
        joint_rows = rows_of_plans.assign(cell=rows_of_plans["cell"].map(plans["joint_cell"]))
        return pd.concat([rows[~rows["cell"].isin(replaced)], joint_rows], ignore_index=True)

    cells = plans.assign(calibration=plans["sets"]).drop_duplicates(_OTHER_AXES)
    cells = cells.set_index("joint_cell").rename_axis("cell")[study.cells.columns]
    return replace(
        study,
        cells=pd.concat([study.cells.drop(replaced), cells]),
        results=joined(study.results),
        samples=joined(study.samples),
    )
