"""Tables on criteria: their formulas, the inputs that they read, and the time and memory of scores
and plans."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from analysis import names
from analysis.load.plans import BYTES
from analysis.load.reader import TIMELESS, records, step_kind, steps_behind, time_and_memory
from analysis.load.study import Study
from analysis.outputs.captions import GPU_PEAK, MEBIBYTE, SECONDS_NOTE, machines_sentence, run_setup
from analysis.outputs.score_rows import by_criterion
from analysis.registry import Results, output
from analysis.render.table import Table, spelled

if TYPE_CHECKING:
    from moe_lab.criteria import Array

SIGNALS = ("Text", "Activations", "Routing", "Gradients", "Weights")
"""Inputs of criteria: the columns of AIMER's Table 1."""
MARKS = {True: "yes", False: "no"}
EXPERTS, CHANNELS, HIDDEN = 5, 3, 2
"""Sizes of the artificial layer on which the dependence of scores on inputs is tested."""
_CRITERION = re.compile(r"(?P<name>\w+)(\((?P<parameters>.*)\))?")


@output("unified.table6", chapter="criteria", needs="registered criteria")
def formula_table(results: Results, name: str) -> Table:
    """Unified Expert Pruning's Table 6: the formula of every criterion of the study, and its
    source."""
    from moe_lab import criteria

    rows = []
    for text in _criteria(results.study):
        registered_name, _ = _parsed(text)
        criterion = criteria.get(registered_name)
        formula, _, _ = (inspect.getdoc(criterion.function) or "").partition("\n\n")
        rows.append(
            (
                names.criterion(text),
                criterion.granularity,
                formula.replace("\n", " "),
                criterion.reference,
            )
        )
    return Table(
        name=name,
        title="Formulas of the criteria",
        caption="Sums run over the N tokens that the router sent to an expert; g: the gate, f: the "
        "expert's output before the gate, phi: the input of down_proj, w: weights. The lowest "
        "scores are pruned first.",
        frame=pd.DataFrame(rows, columns=["Criterion", "Scores", "Formula", "From"]),
        formats={},
    )


@output("aimer.table1", chapter="criteria", needs="registered criteria")
def signal_table(results: Results, name: str) -> Table:
    """AIMER's Table 1: the inputs that each criterion of the study reads."""
    rows = [
        (names.criterion(criterion), *map(MARKS.get, signals(criterion).values()))
        for criterion in _criteria(results.study)
    ]
    return Table(
        name=name,
        title="Inputs of the criteria",
        caption="Text: the criterion reads a calibration set. Other columns: yes if changing that "
        "input changed the scores. Activations: outputs or channels of experts; routing: an "
        "expert's number of tokens, and their gates. Sums over an expert's tokens count as routing "
        "only where counts or gates are in the formula.",
        frame=pd.DataFrame(rows, columns=["Criterion", *SIGNALS]),
        formats={},
    )


def signals(criterion: str) -> dict[str, bool]:
    """Signal -> whether the scores of a criterion depend on it.

    criterion: as spelled in a study's record. The scores are computed for an artificial layer, and
    again with other values of each signal."""
    from moe_lab.criteria import reads_text

    name, parameters = _parsed(criterion)
    reference = _score(name, parameters, _inputs())
    depends = {
        signal: bool((_score(name, parameters, _inputs(signal)) != reference).any())
        for signal in SIGNALS
        if signal != "Text"
    }
    return {"Text": reads_text(name), **depends}


def _score(name: str, parameters: Mapping[str, Any], inputs: Mapping[str, Array]) -> Array:
    """The scores of the artificial layer with these inputs by a criterion."""
    from moe_lab.criteria import Layer, get

    layer = Layer(get(name), 0, EXPERTS, CHANNELS, inputs, "model", np.random.default_rng(0))
    return layer.criterion.function(layer, **parameters)


def _inputs(changed: str | None = None) -> dict[str, Array]:
    """Random sums of the artificial layer, named as in statistics/sums.py. Sums that depend on the
    signal `changed` have other values than without it."""
    from moe_lab.config import GATES

    act, route, grad, weight = (
        _draws(number + 10 * (signal == changed))
        for number, signal in enumerate(SIGNALS)
        if signal != "Text"
    )
    channels = (EXPERTS, CHANNELS)
    tokens = 5 * route(EXPERTS)
    sums = act(EXPERTS, 3, 3) * np.concatenate(
        [np.ones((EXPERTS, 1, 3)), route(EXPERTS, 2, 3)], axis=1
    )
    sums[:, :, 0] = route(EXPERTS, 3)
    sums[:, 0, 0] = tokens
    phi = act(*channels)
    gated = phi * route(*channels)
    return {
        "tokens": tokens,
        **{f"sums_{gate}": sums for gate in GATES},
        "output_sum": act(EXPERTS, HIDDEN) * 0.1,
        **{
            sums_of: act(EXPERTS) * route(EXPERTS)
            for sums_of in ("damage", "ala_first", "ala_second")
        },
        "layer_loss": act().reshape(()),
        "channel_square": phi,
        "channel_max": phi,
        "gate_channel_square": gated,
        "gate_channel_max": gated,
        "renormalized_channel_square": gated,
        "renormalized_channel_max": gated,
        "channel_gradient_square": grad(*channels),
        "channel_product": phi * grad(*channels),
        "channel_product_abs": phi * grad(*channels),
        **{f"snip_{part}": weight(*channels) * grad(*channels) for part in ("down", "gate", "up")},
        "abs_sum": weight(EXPERTS),
        "square_sum": weight(EXPERTS),
        "count": np.asarray(9.0),
        **{
            f"channel_{part}": weight(*channels)
            for part in ("down_square", "down_abs", "gate_square", "up_square")
        },
        "shift_weighted": act(EXPERTS) * route(EXPERTS),
    }


def _draws(seed: int) -> Callable[..., Array]:
    """A function that draws an array of a given shape, uniform in [1, 2). Every call draws new
    numbers."""
    random = np.random.default_rng(seed)
    return lambda *shape: np.asarray(random.uniform(1, 2, shape))


def _criteria(study: Study) -> list[str]:
    """The criteria of the study that are registered, as spelled in its record, in the order of
    tables."""
    from moe_lab.criteria import CRITERIA

    ordered = names.in_order(set(study.cells["criterion"]) - {"none"}, names.CRITERIA)
    return [criterion for criterion in ordered if _parsed(criterion)[0] in CRITERIA]


def _parsed(criterion: str) -> tuple[str, dict[str, Any]]:
    """Parse `s_family(alpha=0,b=1)` into its name and its parameters."""
    match = _CRITERION.fullmatch(criterion)
    if match is None:
        return criterion, {}
    pairs = (part.partition("=") for part in (match["parameters"] or "").split(",") if part)
    return match["name"], {key: _value(text) for key, _, text in pairs}


def _value(text: str) -> Any:
    """The value of a parameter: JSON, or else a string."""
    try:
        return json.loads(text)
    except ValueError:
        return text


PASSES = {
    "statistics": "Forward pass (s)",
    "gradients": "Backward pass (s)",
    "weight_gradients": "Weight gradients (s)",
    "ablation": "Ablation (s)",
    "scaling": "Layer scaling (s)",
    "damage": "Exact damage (s)",
    "weights": "Weights (s)",
    "channel_weights": "Channel weights (s)",
    "scores": "Scores (s)",
    "search": "Search (s)",
    "reconstruction": "Search (s)",
    "sequential": "Search (s)",
    "plan": "Plan (s)",
}
"""Kind of step -> the column of its seconds."""
SECONDS = "{:,.3f}"
TEXT = {"Model": "model", "Calibration": "calibration", "Criterion": "criterion"}


@output(
    "aimer.table4",
    chapter="criteria",
    filters="Model|Calibration",
    needs="the scores of its criteria in the store, with the steps they are from",
)
def scoring_table(results: Results, name: str) -> Table:
    """AIMER's Table 4: time and memory of scoring a model, including the passes that the criterion
    needs."""
    study = results.study
    cells = study.cells[study.cells["scores_folder"].notna()].drop_duplicates("scores_folder")
    rows = []
    machines = []
    for cell, steps in _timed(study, cells, "scores_folder"):
        machines += list(steps["machine"])
        inputs = sorted(kind.replace("_", " ") for kind in set(steps["kind"]) - {"scores"})
        rows.append(
            {
                **cell,
                "reads": names.listing(inputs),
                "Scoring time (s)": steps["seconds"].sum(),
                "Of these, the scores (s)": steps.loc[steps["kind"] == "scores", "seconds"].sum(),
                "Peak memory (MiB)": steps["peak"].max() / MEBIBYTE,
                GPU_PEAK: steps["gpu_peak"].max() / MEBIBYTE,
                "Loading memory (MiB)": _parameters(study, cell["model"]) * BYTES / MEBIBYTE,
            }
        )
    numbers = {
        "Scoring time (s)": SECONDS,
        "Of these, the scores (s)": SECONDS,
        "Peak memory (MiB)": "{:,.0f}",
    }
    on_gpu = {GPU_PEAK: "{:,.0f}"} if any(pd.notna(row[GPU_PEAK]) for row in rows) else {}
    formats = {**numbers, **on_gpu, "Loading memory (MiB)": "{:,.2f}"}
    return Table(
        name=name,
        title="Time and memory of scoring",
        caption="Scoring time: of the passes over text or weights that the criterion reads, and of "
        "the scores. Criteria that read one pass share it, so a study takes less than the sum. "
        "Peak memory: of the process, which may have done other steps before, in main memory and, "
        "where some were used, on GPUs; loading memory: the model in bfloat16. "
        f"{SECONDS_NOTE}{machines_sentence(machines)}{run_setup(study)}",
        frame=spelled(
            pd.DataFrame(rows), {**TEXT, "Reads": "reads", **{column: column for column in formats}}
        ),
        formats=formats,
        best=dict.fromkeys(list(numbers)[:1], "min"),
        blocks=("Model",),
        optional=tuple(on_gpu),
    )


@output(
    "coverage.table1",
    chapter="criteria",
    filters="Model|Calibration",
    needs="channel plans in the store, with the steps they are from",
    also=("coverage.table12",),
)
def allocation_table(results: Results, name: str) -> Table:
    """MoE-Slimming's Tables 1 and 12: seconds of every step behind a plan of channels.

    A row per allocation, for its first ratio. The forward pass gives attributions; the ablation is
    listed where a plan reads it.
    """
    study = results.study
    cells = study.cells[
        (study.cells["granularity"] == "channel") & study.cells["plan_folder"].notna()
    ]
    all_but_ratio = ["model", "calibration", "criterion", "allocation", "gate", "seed"]
    rows = []
    machines = []
    for cell, steps in _timed(study, cells.drop_duplicates(all_but_ratio), "plan_folder"):
        machines += list(steps["machine"])
        # steps of kinds without a column are in the total only
        by_pass = steps.groupby(steps["kind"].map(PASSES))["seconds"].sum()
        rows.append({**cell, **by_pass, "Total (s)": steps["seconds"].sum()})
    columns = [
        column for column in dict.fromkeys(PASSES.values()) if any(column in row for row in rows)
    ]
    formats = dict.fromkeys([*columns, "Total (s)"], SECONDS)
    return Table(
        name=name,
        title="Time of channel allocations",
        caption="Seconds of each step behind a plan; – where a plan reads no such step. The "
        "forward pass gives the attributions of all experts at once; ablation runs the layers "
        "above again for every expert. "
        f"{SECONDS_NOTE}{machines_sentence(machines)}{run_setup(study)}",
        frame=spelled(
            pd.DataFrame(rows),
            {**TEXT, "Allocation": "allocation", **{column: column for column in formats}},
        ),
        formats=formats,
        blocks=("Model", "Calibration"),
        optional=tuple(columns),
    )


def _timed(
    study: Study, cells: pd.DataFrame, folder: str
) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """Yield (cell, `time_and_memory` of the steps that it needs), with cells sorted by criterion.

    folder: column of the folder of a step; this step and all its direct and indirect inputs are
    listed. A cell is left out when the time of one of them is not known."""
    for cell in records(by_criterion(cells, "model")):
        behind = [
            name
            for name in steps_behind([cell[folder]], study.reader)
            if step_kind(name) not in TIMELESS
        ]
        steps = time_and_memory(behind, study.reader)
        if behind and set(steps["folder"]) == set(behind):
            yield cell, steps


def _parameters(study: Study, model: str) -> float:
    """Number of parameters of a model; NaN when unknown."""
    return float(study.models.get(model, {}).get("parameters", np.nan))
