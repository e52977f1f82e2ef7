"""How attributions agree with what losing an expert changes, what they take, and what plans by them score
(MoE-Slimming, Table 14)."""

from __future__ import annotations

import numpy as np
import pandas as pd

from analysis import names
from analysis.load import plans
from analysis.load.passes import ABLATION, MEASURES, shown_passes
from analysis.load.reader import groups, records, step_kind, steps_behind, time_and_memory
from analysis.load.study import Study
from analysis.outputs.captions import MEASURED, SUMS, measured_on, of_pass
from analysis.outputs.score_rows import Block, block_table
from analysis.registry import Item, Results, output
from analysis.render.table import SCORE, Table
from analysis.stats.cell_scores import MEAN
from analysis.stats.ranks import correlations, rank_correlation_by_layer

ESTIMATES = ("tokens", "gate", "norm", "first", "second")
TRUTHS = {"second": "layer loss", "ablation": "model loss"}
"""What is exact: the change of a layer's loss, and of the model's."""
PRIORS = {"tokens": ("usage",), "first": ("ala1",), "second": ("ala2", "true_ablation"), "ablation": ("loss",)}
"""Measure of an expert -> the priors of allocation=coverage that are in proportion to it."""
PRIOR_LABELS = {
    "ala1": "Attribution, first order",
    "ala2": "Attribution, second order",
    "true_ablation": "Layer loss without the expert",
    "loss": "Model loss without the expert",
    "usage": "Tokens routed to the expert",
    "router_weight": "Sum of router weights",
    "ala_lm": "Attribution of the model's loss",
    "none": "No prior",
}
ALIKE = ["ratio", "criterion", "gate", "seed", "others"]
"""Plans that agree in these differ in the prior alone."""
SECONDS = "Time (s)"


def agreement_table(study: Study, attributions: pd.DataFrame, *, name: str) -> Table:
    """Table 14: how the cheap measures of an expert agree with what silencing it truly changes, and what they take."""
    kinds = ("Pearson", "Rank", "Rank in a layer", "Pearson of channels kept")
    columns = [f"{kind}, {truth}" for truth in TRUTHS.values() for kind in kinds]
    rows, machines = [], []
    for key, experts in groups(attributions, ["model", "calibration"]):
        alike = (study.cells["model"] == key["model"]) & (study.cells["calibration"] == key["calibration"])
        cells = study.cells[alike]
        by_prior = cells.reset_index().merge(plans.priors(cells, study.reader), on="cell")
        seconds, on = measure_seconds(study, cells)
        machines += on
        ablated = experts["ablation"].notna().any()
        for measure in [*ESTIMATES, "ablation"] if ablated else ESTIMATES:
            numbers: list[float] = []
            for truth in TRUTHS:
                pooled = correlations(experts, measure, truth) if measure != truth else {"linear": 1.0, "rank": 1.0}
                inside = rank_correlation_by_layer(experts, measure, truth) if measure != truth else 1.0
                channels = channel_agreement(by_prior, study.kept, measure, truth)
                numbers += [pooled["linear"], pooled["rank"], inside, channels]
            words = key["model"], names.calibration(key["calibration"]), _capital(MEASURES[measure])
            rows.append((*words, *numbers, seconds["ablation" if measure == "ablation" else "pass"]))
    text = ["Model", "Calibration", "Estimate"]
    return Table(
        name=name,
        title="How attributions agree with what losing an expert changes",
        caption="Correlations over experts: Pearson's and Spearman's over all layers, Spearman's inside a layer (mean "
        "over layers). Layer loss: what the routed output, relative to the residual stream, changes when one expert is "
        "silent; it is quadratic in that expert's factor, so the second order is the true value and agrees by "
        "construction. Model loss: the rise of the language model's loss, where a plan read the ablation. Channels "
        "kept: by each expert, in two plans of allocation=coverage that differ in nothing but what they divide a layer "
        "by, this estimate and the true value (mean over such pairs). Time: of the step that measures it. One forward "
        "pass gives all estimates but the ablation, so first and second order take the same time here. "
        f"{MEASURED}{measured_on(machines)}Based on {of_pass(study)}",
        frame=pd.DataFrame(rows, columns=[*text, *columns, SECONDS]),
        formats={**dict.fromkeys(columns, SCORE), SECONDS: "{:,.1f}"},
        blocks=text[:2],
        optional=(*columns, SECONDS),
    )


def channel_agreement(by_prior: pd.DataFrame, kept: pd.DataFrame, measure: str, truth: str) -> float:
    """Pearson's correlation over experts of the share of channels that a plan by `measure` and one by `truth` keep, the
    mean over pairs that differ in nothing else; NaN without such a pair. `by_prior`: cell, prior and ALIKE."""
    values = []
    for _, alike in groups(by_prior, ALIKE):
        pair = [alike.loc[alike["prior"].isin(PRIORS.get(word, ())), "cell"] for word in (measure, truth)]
        if all(map(len, pair)):
            shares = [kept[kept["cell"] == cells.iloc[0]].set_index(["layer", "expert"])["share"] for cells in pair]
            both = pd.concat(shares, axis=1, keys=["one", "other"])
            values.append(correlations(both, "one", "other")["linear"])
    defined = [value for value in values if not np.isnan(value)]
    return float(np.mean(defined)) if defined else np.nan


def measure_seconds(study: Study, cells: pd.DataFrame) -> tuple[dict[str, float], list[str]]:
    """Seconds of the steps that measure the experts of one model and calibration set, `pass` and `ablation`, NaN where
    the store does not say; and the machines they ran on."""
    shown = shown_passes(study.cells)["statistics_folder"]
    passes = list(shown[shown.index.isin(cells.index)])
    ablations = [
        step
        for folder in cells["plan_folder"].dropna()
        for step in steps_behind(folder, study.reader)
        if step_kind(step) == ABLATION
    ]
    measured = {"pass": passes[:1], "ablation": ablations[:1]}
    took = {word: time_and_memory(folders, study.reader) for word, folders in measured.items()}
    machines = [str(machine) for table in took.values() for machine in table["machine"]]
    return {word: float(table["seconds"].sum(min_count=1)) for word, table in took.items()}, machines


def prior_table(results: Results, name: str) -> Table:
    """Table 14's scores: plans of allocation=coverage that differ in the prior alone, measured against first order."""
    study, blocks = results.study, []
    for comparison in results.comparisons:
        cells = comparison.cells.reset_index().merge(plans.priors(comparison.cells, study.reader), on="cell")
        for key, part in groups(cells, [*ALIKE, "calibration", "recovery"]):
            if part["prior"].nunique() < 2:
                continue
            rows = records(part)
            rows.sort(key=lambda row: list(PRIOR_LABELS).index(row["prior"]))
            labels = {int(row["cell"]): PRIOR_LABELS[row["prior"]] for row in rows}
            usual = part.loc[part["prior"] == plans.FIRST_ORDER]
            words = [names.ratio(key["ratio"]), names.RECOVERIES.get(key["recovery"], key["recovery"])]
            if len(usual):
                words.append(names.allocated(str(usual["allocation"].iloc[0])))
            pruned = ", ".join(word for word in words if word)
            blocks.append(Block(comparison, pruned, labels, int(usual["cell"].iloc[0]) if len(usual) else None))
    return block_table(
        study,
        blocks,
        columns=(*names.COMMON_SENSE, "gsm8k", "mmlu", MEAN),
        name=name,
        title="Channel budgets by what a layer is divided by",
        caption="Rows name what allocation=coverage divides a layer among its experts by; all else is the same in a "
        "block. Difference: Mean minus that of the first order, paired.",
    )


def _capital(word: str) -> str:
    return word[:1].upper() + word[1:]


@output("coverage.table14", chapter="attribution", filters="Model|Calibration|Pruned", needs=SUMS)
def agreements(results: Results, name: str) -> list[Item]:
    """How well attributions agree with ablations, what they take, and the scores of plans by each of them."""
    agreeing = agreement_table(results.study, results.study.experts, name=name)
    return [agreeing, prior_table(results, f"{name}.scores")]
