"""Criteria: their formulas, the inputs that they read, the time and memory of scores and plans, and
scores that read weights alone (AIMER, Fig. 2)."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load.plans import BYTES
from moe_lab.analysis.load.reader import (
    records,
    stacked,
    step_kind,
    steps_with_inputs,
    time_and_memory,
)
from moe_lab.analysis.load.study import Study
from moe_lab.analysis.outputs.captions import (
    GPU_PEAK,
    MEBIBYTE,
    PEAKS,
    run_setup,
    timing_note,
)
from moe_lab.analysis.outputs.score_rows import sort_cells
from moe_lab.analysis.registry import Results, output
from moe_lab.analysis.render import charts
from moe_lab.analysis.render.charts import Figure
from moe_lab.analysis.render.table import Columns, Table, frame_and_formats


@output(
    "unified.table6", chapter="criteria", needs="registered criteria", aliases=("aimer.table1",)
)
def formula_table(results: Results) -> Table:
    """Formula, inputs and source of each criterion of a study.

    Unified Expert Pruning's Table 6, and AIMER's Table 1: what each criterion reads."""
    from moe_lab import criteria

    rows = []
    for text in names.in_order(results.study.cells["criterion"], names.CRITERIA):
        # without parameters, as in `s_family(alpha=0,b=1)`
        registered_name, _ = names.name_and_settings(text)
        if registered_name not in criteria.CRITERIA:
            continue
        criterion = criteria.get(registered_name)
        # the first paragraph of the docstring is the formula
        formula, _, _ = (inspect.getdoc(criterion.function) or "").partition("\n\n")
        rows.append(
            (
                names.criterion(text),
                criterion.granularity,
                formula.replace("\n", " "),
                _passes_in_words(criterion.needs),
                criterion.reference,
            )
        )
    return Table(
        title="Formulas and inputs of the criteria",
        caption="Sums run over the N tokens that the router sent to an expert; g: the gate, f: the "
        "expert's output before the gate, phi: the input of down_proj, w: weights. The lowest "
        "scores are pruned first. Reads: passes over a calibration set (statistics: forward; "
        "gradients: forward and backward) or over weights alone.",
        frame=pd.DataFrame(rows, columns=["Criterion", "Scores", "Formula", "Reads", "From"]),
        formats={},
    )


SECONDS_FORMAT = "{:,.3f}"
TEXT_COLUMNS = {"Model": "model", "Calibration": "calibration", "Criterion": "criterion"}


@output(
    "aimer.table4",
    chapter="criteria",
    needs="the scores of its criteria in the store, with the steps they are from",
)
def scoring_table(results: Results) -> Table | None:
    """AIMER's Table 4: time and memory of scores, and of the passes that they need.

    A row per step that computes scores."""
    study = results.study
    cells = study.cells[study.cells["scores_folder"].notna()].drop_duplicates("scores_folder")
    steps = _step_times(study, cells, "scores_folder")
    if steps.empty:
        return None
    by_cell = steps.groupby("cell")
    parameters = {model: facts["parameters"] for model, facts in study.models.items()}
    rows = cells.loc[steps["cell"].unique()].assign(
        reads=by_cell["kind"].agg(_passes_in_words),
        seconds=by_cell["seconds"].sum(),
        score_seconds=steps[steps["kind"] == "scores"].groupby("cell")["seconds"].sum(),
        peak=by_cell["peak"].max(),
        gpu_peak=by_cell["gpu_peak"].max(),
        loading=cells["model"].map(parameters) * BYTES / MEBIBYTE,
    )
    columns: Columns = {
        **TEXT_COLUMNS,
        "Reads": "reads",
        "Scoring time (s)": ("seconds", SECONDS_FORMAT),
        "Of these, the scores (s)": ("score_seconds", SECONDS_FORMAT),
        **PEAKS,
        "Loading memory (MiB)": ("loading", "{:,.2f}"),
    }
    return Table(
        title="Time and memory of scoring",
        caption="Scoring time: of the passes over text or weights that the criterion reads, and of "
        "the scores. Criteria that read one pass share it, so a study takes less than the sum. "
        "Peak memory: of the process, which may have done other steps before, in main memory and, "
        "where some were used, on GPUs; loading memory: the model in bfloat16. "
        f"{timing_note(steps['machine'])}{run_setup(study)}",
        **frame_and_formats(rows, columns),
        lower_is_better={"Scoring time (s)"},
        optional=(GPU_PEAK,),
    )


@output(
    "coverage.table1",
    chapter="criteria",
    needs="channel plans in the store, with the steps they are from",
    aliases=("coverage.table12",),
)
def allocation_table(results: Results) -> Table | None:
    """MoE-Slimming's Tables 1 and 12: seconds of every step behind a plan of channels."""
    study = results.study
    cells = study.cells[
        (study.cells["granularity"] == "channel") & study.cells["plan_folder"].notna()
    ]
    all_but_ratio = ["model", "calibration", "criterion", "allocation", "gate", "seed"]
    steps = _step_times(study, cells.drop_duplicates(all_but_ratio), "plan_folder")
    if steps.empty:
        return None
    columns_of_steps = steps["kind"].str.replace("_", " ").str.capitalize() + " (s)"
    seconds = steps.groupby(["cell", columns_of_steps])["seconds"].sum().unstack()
    rows = cells.loc[steps["cell"].unique()].join(seconds)
    rows["Total (s)"] = steps.groupby("cell")["seconds"].sum()
    step_columns = [str(column) for column in seconds]
    columns: Columns = {
        **TEXT_COLUMNS,
        "Allocation": "allocation",
        **{column: (column, SECONDS_FORMAT) for column in (*step_columns, "Total (s)")},
    }
    return Table(
        title="Time of channel allocations",
        caption="Seconds of each step behind a plan; – where a plan reads no such step. "
        "Statistics give the attributions of all experts in one forward pass; ablation runs the "
        "layers above again for every expert. "
        f"{timing_note(steps['machine'])}{run_setup(study)}",
        **frame_and_formats(rows, columns),
        optional=tuple(step_columns),
    )


def _passes_in_words(kinds: Iterable[str]) -> str:
    """The kinds of steps behind scores: `statistics and weights`."""
    return names.enumeration(sorted(kind.replace("_", " ") for kind in set(kinds) - {"scores"}))


def _step_times(study: Study, cells: pd.DataFrame, column: str) -> pd.DataFrame:
    """`time_and_memory` of the step in `column`, such as "plan_folder", and of its direct and
    indirect inputs, with the column "cell". The cells are ordered by model and criterion.

    A cell is left out if the store lacks the time of one of its steps."""
    steps_of_cells = pd.DataFrame(
        [
            (cell, folder)
            for cell, step in sort_cells(cells, "model", "criterion")[column].items()
            for folder in steps_with_inputs([step], study.reader)
            if step_kind(folder) != "model"  # this step only reads a configuration
        ],
        columns=["cell", "folder"],
    )
    times = time_and_memory(steps_of_cells["folder"].unique(), study.reader)
    is_known = steps_of_cells["folder"].isin(times["folder"])
    complete = steps_of_cells[is_known.groupby(steps_of_cells["cell"]).transform("all")]
    return complete.merge(times, on="folder")


COLUMNS = ("model", "criterion", "layer", "expert", "score")


def weight_scores(study: Study) -> pd.DataFrame:
    """Scores of experts by Magnitude and AIMER, with the columns COLUMNS.

    Scores have the sign that they have in the papers. AIMER's score in its paper is
    ||w||_1 / (sqrt(N) ||w||_2), and the experts with the highest scores are pruned first."""
    cells = study.cells[
        study.cells["criterion"].isin(["magnitude", "aimer"]) & study.cells["scores_folder"].notna()
    ]
    frames = []
    # one cell per model and criterion: scores that read weights alone depend on nothing else
    for cell in records(cells.drop_duplicates(["model", "criterion"])):
        folder = study.reader.folder(cell["scores_folder"])
        # COLUMNS without model and criterion
        scores = study.reader.frame(folder, "scores.parquet", COLUMNS[2:])
        if scores is not None:
            scores = scores.assign(model=cell["model"], criterion=cell["criterion"])
            if cell["criterion"] == "aimer":
                # the store has the opposite sign, because the lowest scores are pruned first
                scores["score"] = -scores["score"]
            frames.append(scores)
    return stacked(frames, COLUMNS)


def profiles(scores: pd.DataFrame) -> pd.DataFrame:
    """`weight_scores` with two more columns, computed inside each layer of a model and criterion.

    - "profile": the score, scaled from 0 (lowest score of the layer) to 1 (highest); NaN if all are
      equal
    - "position": rank of the expert in the layer, from 0 (lowest score)"""
    layer = ["model", "criterion", "layer"]
    rank = scores.groupby(layer)["score"].rank(method="first") - 1
    return scores.assign(profile=charts.shares_of_range(scores, layer, "score"), position=rank)


@output("aimer.fig2", chapter="weights", needs="cells with criterion=magnitude or aimer")
def profile_figure(results: Results) -> Figure | None:
    """Distribution of Magnitude and AIMER scores over the experts of each layer.

    A map per model and criterion; x axis: experts by rank, y axis: layers.
    """
    scores = weight_scores(results.study)
    if scores.empty:
        return None
    scores = profiles(scores)
    scores["panel"] = scores["model"] + ", " + scores["criterion"].map(names.criterion)
    rows = scores.rename(columns={"model": "Model"})[
        ["Model", "panel", "layer", "position", "profile"]
    ]
    layers = [
        charts.layer(
            "rect",
            x={"field": "position", "type": "ordinal", "title": "rank of the expert in its layer"},
            y={"field": "layer", "type": "ordinal", "sort": "descending"},
            color=charts.number(
                "profile", "score, from the lowest of the layer", scale=charts.SHADE
            ),
        )
    ]
    caption = (
        "Experts of each layer from the lowest score (rank 0) to the highest, shaded by their "
        "score, scaled from the lowest (0) to the highest (1) of the layer. Magnitude prunes the "
        "lowest scores first; AIMER, with the paper's sign, the highest. White: all experts of the "
        "layer have the same score."
    )
    title = "Profiles of scores that read weights only"
    return Figure(title, caption, rows, layers, independent=("x", "y"))
