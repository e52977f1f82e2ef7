"""Cost: scores against parameters, FLOPs and bytes, speed and memory of requests (MoE-Slimming,
Table 2, Figs. 6 and 10), loading memory, and architectures (Unified Expert Pruning, Tables 3 and
4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd

from moe_lab.analysis import names
from moe_lab.analysis.load import plans, settings
from moe_lab.analysis.load.reader import groups
from moe_lab.analysis.load.study import Study
from moe_lab.analysis.outputs.captions import MEBIBYTE, TIMINGS, run_setup
from moe_lab.analysis.outputs.score_rows import (
    COSTS_OF_MODEL,
    OF_MODEL,
    STORAGE,
    STORAGE_COSTS,
    Block,
    score_table,
    sort_cells,
)
from moe_lab.analysis.registry import Results, output, per_model
from moe_lab.analysis.render import charts
from moe_lab.analysis.render.charts import Figure
from moe_lab.analysis.render.table import Columns, Table, format_number, frame_and_formats
from moe_lab.analysis.stats.comparison import Comparison
from moe_lab.analysis.stats.quantity import AVG


@score_table(
    "pareto",
    "All methods: accuracy against what is kept",
    (AVG,),
    "Kept: share of the parameters of routed experts. Of the model: share of all parameters. "
    "FLOPs: per token, as a share of the unpruned model's. Storage: weights on disk.",
    costs={**COSTS_OF_MODEL, **STORAGE_COSTS},
    drawn=(OF_MODEL, "FLOPs", STORAGE),
    chapter="cost",
)
def pareto(results: Results, comparison: Comparison) -> Iterator[Block]:
    """All methods: accuracy against parameters, FLOPs and storage, with Pareto fronts."""
    labels = settings.method_labels(comparison.pruned_cells)
    if len(results.study.costs):
        ordered = sort_cells(comparison.pruned_cells, "ratio", "gate", "method")
        for _, cells in groups(ordered, ["ratio", "gate"]):
            yield Block(comparison, labels[cells.index])


PREFILL = "Prefill (tokens/s)"
DECODE = "Decode (tokens/s)"
TIME_TO_FIRST_TOKEN = "First token (ms)"
TIME_PER_TOKEN = "Per token (ms)"
WEIGHTS = "Weights (MiB)"
PEAK_MEMORY = "Peak memory (MiB)"
"""PREFILL to PEAK_MEMORY: displayed columns."""
SPEEDS: Mapping[str, str] = {
    PREFILL: "{:,.1f}",
    DECODE: "{:,.1f}",
    TIME_TO_FIRST_TOKEN: "{:,.2f}",
    TIME_PER_TOKEN: "{:,.2f}",
}
"""Displayed column with a speed or duration -> its format."""
REQUEST_COLUMNS = ["cell", "device", "batch_size", "prompt_length", "new_tokens"]
"""Columns in which repeats of a request have equal values."""
QUARTILES = {" low": 0.25, "": 0.5, " high": 0.75}
"""Suffix of a column -> its quantile over repeated requests."""


def requests(study: Study) -> pd.DataFrame:
    """Speed and memory, a row per request.

    Columns:

    - REQUEST_COLUMNS
    - each of SPEEDS: median over the repeats
    - each of SPEEDS followed by ` low` or ` high`: lower or upper quartile over the repeats
    - WEIGHTS; PEAK_MEMORY: weights and working memory"""
    timings = study.timings
    prompt_tokens = timings["batch_size"] * timings["prompt_length"]
    new_tokens = timings["batch_size"] * timings["new_tokens"]
    numbers = {
        PREFILL: prompt_tokens / timings["prefill_seconds"],
        DECODE: new_tokens / timings["decode_seconds"],
        TIME_TO_FIRST_TOKEN: 1000 * timings["prefill_seconds"],
        TIME_PER_TOKEN: 1000 * timings["decode_seconds"] / timings["new_tokens"],
        WEIGHTS: timings["weight_bytes"] / MEBIBYTE,
        PEAK_MEMORY: (timings["weight_bytes"] + timings["working_bytes"]) / MEBIBYTE,
    }
    # columns of a study without timings have no type
    rows = timings.assign(**numbers).astype(dict.fromkeys(numbers, float))
    by_request = rows.groupby(REQUEST_COLUMNS, sort=False)
    speeds = [
        by_request[list(SPEEDS)].quantile(quantile).add_suffix(suffix)
        for suffix, quantile in QUARTILES.items()
    ]
    # all repeats have the same bytes
    memory = by_request[[WEIGHTS, PEAK_MEMORY]].first()
    return pd.concat([*speeds, memory], axis=1).reset_index()


@output(
    "coverage.table2",
    chapter="cost",
    needs=TIMINGS,
    aliases=("coverage.fig6",),
)
def speed_table(results: Results) -> Table | None:
    """MoE-Slimming's Table 2 and Fig. 6: throughput, latency and memory of every timed model."""
    study = results.study
    if study.timings.empty or not results.pruned:
        return None
    labels = [
        comparison.cells[["model", "removed_text"]].assign(
            label=settings.method_labels(comparison.cells)
        )
        for comparison in results.pruned
    ]
    rows = pd.concat(labels).merge(requests(study), left_index=True, right_on="cell")
    columns: Columns = {
        "Model": "model",
        "Pruned": "removed_text",
        "Criterion": "label",
        "Device": "device",
        "Prompts": "batch_size",
        "Tokens each": "prompt_length",
        **{column: (column, form) for column, form in SPEEDS.items()},
        WEIGHTS: (WEIGHTS, "{:,.2f}"),
        PEAK_MEMORY: (PEAK_MEMORY, "{:,.1f}"),
        **{f"{column}{end}": f"{column}{end}" for end in (" low", " high") for column in SPEEDS},
    }
    rows = rows.astype({"batch_size": str, "prompt_length": str})
    return Table(
        title="Throughput, latency and memory of requests",
        caption=f"Medians, with quartiles. {conditions(study)} {run_setup(study)}",
        **frame_and_formats(rows, columns),
        lower_is_better={TIME_TO_FIRST_TOKEN, TIME_PER_TOKEN},
        optional=(PEAK_MEMORY,),
    )


def conditions(study: Study) -> str:
    """Sentences for captions on the conditions under which requests were timed."""
    timings = study.timings
    devices, dtypes, new_tokens = (
        " / ".join(map(str, timings[column].dropna().unique()))
        for column in ("device", "dtype", "new_tokens")
    )
    threads = " / ".join(f"{count:g}" for count in timings["threads"].dropna().unique())
    repeats = timings["repeat"].max() + 1  # numbered from 0
    return (
        f"{repeats} requests each, {new_tokens} new tokens after the first one, {dtypes} on "
        f"{devices}, {threads} threads, load of the machine up to {timings['load'].max():.1f}; run "
        "by transformers on prompts from a text. Peak memory: the weights and the working memory "
        "of a request."
    )


BLOCK_MAPS = {DECODE: "tokens per second", PEAK_MEMORY: "peak memory (MiB)"}
"""Column of a map in Fig. 10 -> its title."""


@output(
    "coverage.fig10",
    chapter="cost",
    needs=f"{TIMINGS}, of several aligned allocations (coverage_fig10 of sweeps)",
)
@per_model
def blocks_figure(results: Results, comparison: Comparison) -> Figure | None:
    """Tokens per second and peak memory by the block size of channels and the smallest expert.

    Each ratio, recovery and device has a row of two maps (BLOCK_MAPS).
    """
    study = results.study
    if study.timings.empty:
        return None
    blocks = plans.channel_rounding(comparison.cells, study.reader)
    axes = comparison.cells[["ratio", "removed_text", "recovery"]]
    timed_blocks = requests(study).merge(blocks.join(axes), left_on="cell", right_index=True)
    # the largest requests
    prompt_tokens = timed_blocks["batch_size"] * timed_blocks["prompt_length"]
    timed_blocks = timed_blocks[prompt_tokens == prompt_tokens.max()]
    if len(timed_blocks) < 2:
        return None
    removed = timed_blocks["removed_text"] + " pruned"
    recoveries = timed_blocks["recovery"].map(names.recovery_name)
    timed_blocks["pruned"] = list(map(names.comma_joined, removed, recoveries))
    columns = ["ratio", "recovery", "device", "pruned", "block", "smallest"]
    rows = timed_blocks.melt(columns, list(BLOCK_MAPS), "measure")
    rows = rows.sort_values(columns[:3], kind="stable")
    rows["panel"] = rows["pruned"] + ": " + rows["measure"].map(BLOCK_MAPS)
    rows["share"] = charts.shares_of_range(rows, "panel", "value").fillna(0.5)
    rows["text"] = [format_number(value, "{:,.1f}") for value in rows["value"]]
    layers = charts.heat_map(
        {"field": "block", "type": "ordinal", "title": "block size"},
        {"field": "smallest", "type": "ordinal", "title": "smallest expert"},
    )
    caption = (
        "Block size: an expert's number of channels is a multiple of it. Smallest expert: experts "
        "with fewer channels lose all. Tokens per second are medians. "
        f"{conditions(study)}"
    )
    title = "Throughput and memory by blocks of channels"
    columns = ["panel", "block", "smallest", "share", "text"]
    size = ({"step": 70}, {"step": 22})
    return Figure(title, caption, rows[columns], layers, columns=2, size=size)


@output("unified.table3", chapter="memory")
def memory_table(results: Results) -> Table:
    """Bytes of the model in bfloat16 before and after pruning, counted without its weights."""
    study = results.study
    costs = study.costs[["parameters_unpruned", "loading_bytes"]].dropna()
    cells = study.pruned_cells[["model", "removed_text"]]
    memory = cells.join(costs, how="inner").drop_duplicates()
    before = plans.BYTES * memory["parameters_unpruned"] / MEBIBYTE
    after = memory["loading_bytes"] / MEBIBYTE
    columns: Columns = {
        "Model": "model",
        "Pruned": "removed_text",
        "Before (MiB)": ("before", "{:,.2f}"),
        "After (MiB)": ("after", "{:,.2f}"),
        "Saved": ("saved", "{:.1%}"),
    }
    return Table(
        title="Loading memory",
        caption=(
            "Parameters of the whole model in bfloat16. Plans that remove the same share can "
            "differ in it, by rows of routers and by what replaces experts."
        ),
        **frame_and_formats(
            memory.assign(before=before, after=after, saved=1 - after / before), columns
        ),
    )


@output("unified.table4", chapter="memory", needs="the facts of its models in the store")
def architecture_table(results: Results) -> Table | None:
    """Unified Expert Pruning's Table 4: numbers of layers, experts and parameters of each model."""
    rows = []
    for model, facts in results.study.models.items():
        layers = pd.DataFrame(facts["layers"].values())  # only layers with experts
        largest = layers[["n_experts", "top_k", "hidden", "width"]].max()
        inactive = (layers["n_experts"] - layers["top_k"]) * layers["expert_parameters"]
        counts = {
            "Parameters (M)": facts["parameters"] / 1e6,
            "Active (M)": (facts["parameters"] - inactive.sum()) / 1e6,
            "Experts": largest["n_experts"],
            "Top-k": largest["top_k"],
            # the channels of all shared experts, in units of a routed expert's channels
            "Shared experts": facts.get("shared_width", np.nan) / largest["width"],
            "MoE layers": len(layers),
            "Dense layers": facts.get("decoder_layers", np.nan) - len(layers),
            "Hidden size": largest["hidden"],
            "Channels": largest["width"],
        }
        rows.append({"Model": model, "Type": str(facts.get("model_type", "")), **counts})
    if not rows:
        return None
    formats = {
        **dict.fromkeys(counts, "{:,.0f}"),
        "Parameters (M)": "{:,.2f}",
        "Active (M)": "{:,.2f}",
        "Shared experts": "{:g}",
    }
    return Table(
        title="Architectures",
        caption="From configurations alone. Parameters: of the whole model; active: without the "
        "routed experts that a token is not given to. Experts, top-k and channels (the width of an "
        "expert): of a layer, the largest where layers differ. Shared experts: in experts of that "
        "width.",
        frame=pd.DataFrame(rows),
        formats=formats,
        optional=("Shared experts", "Dense layers"),
    )
