"""Formats of the files that steps write and the analysis reads: evaluations, records of runs,
columns of tables.

Evaluations write `result.json` and `samples.parquet`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, get_args

from moe_lab.json_files import Number, read_sealed

SCHEMA = 1
"""Version of result.json, samples.parquet and record.json; a reader refuses a higher one."""


RANDOM = ("random", "channel_random")
"""Criteria that drop random experts, or random channels, as a baseline."""
Scale = Literal["score", "loss", "perplexity"]
"""Meaning of a number: a score, where higher is better; or a mean loss, or a perplexity, the
exponential of a mean loss, where lower is better."""
SCALES: tuple[Scale, ...] = get_args(Scale)


class Result(TypedDict):
    """One number of one benchmark."""

    benchmark: str
    """Result name, such as arc_challenge or humaneval_plus."""
    metric: str
    """The harness's name for the number, such as acc_norm or base."""
    score: float
    """Mean outcome of the items; for a perplexity, its exponential."""
    scale: Scale
    """Meaning of the number, as set by the harness; it is not inferred from the metric's name."""
    unit: str
    """Unit of a loss, such as nats per token; for a perplexity, the unit of its loss. "" for a
    score."""
    stderr: float | None
    """Standard error of the score over items; None for fewer than two items."""
    n: int
    """Number of graded items."""
    expected: int | None
    """Number of items of the whole benchmark; larger than n only with a limit."""


class Sample(TypedDict):
    """One row of samples.parquet: one item of one result."""

    benchmark: str
    """Result name, as in Result."""
    item: str
    """The item's id in its data file, or its number there."""
    replicate: int
    """Number of the answer to the item, from 0, where an item has several answers."""
    outcome: float
    """1 if right, 0 if wrong, a share for partial credit; for a loss or a perplexity, the loss in
    the result's unit."""
    prompt_hash: str
    """sha256 of the prompt, first 16 hexadecimal digits."""
    thought: str
    """The reasoning that the model wrote before its answer, with its marks; "" without any."""
    output: str | None
    """The answer that the model wrote, or the log-likelihoods of the choices as JSON; None where
    the reasoning does not end."""
    ended: str | None
    """Why the text ended: end (an end token), stop (a stop text), limit (too many tokens), too_long
    (nothing was written, because prompt and limit together are too long); None where no text was
    requested."""
    extracted: str
    """The graded answer."""
    answer_loss: NotRequired[float | None]
    """Loss on the right answer after the prompt, in bits per byte of the answer; lower is better.
    None or absent without a reference answer or its likelihood."""
    units: NotRequired[float | None]
    """Weight of the item in the score: the tokens, words or bytes of a loss or a perplexity, or a
    weight with which all tasks of a group count equally. None or absent where all items count
    equally."""


class ResultFile(TypedDict):
    """result.json."""

    schema: int
    """SCHEMA of the writer."""
    results: list[Result]
    """One per entry of the benchmark's reports."""
    protocol: dict[str, Any]
    """How the results were measured: harness, data digest, limits, sandbox, a rendered prompt."""
    versions: dict[str, str]
    """Versions of the libraries that generated and graded."""


CONTAMINATION = "contamination.json"
"""File with benchmark -> number of items that were looked for in a text (comparable), and that
occur in it (found)."""
RECORD = "record.json"
"""File in the folder of a run, runs/STUDY/RUN, with the cells of the run and the folders of their
results."""
FIGURES = ("families", "damages", "contaminations")
"""Entries of a record with steps that only figures and remarks need."""
KEY = ("calibration", "model", "gate", "seed")
"""Columns that identify a step of a figure."""
_NAME = str | None
_FIGURE = [{"calibration": str, "model": str, "gate": str, "seed": Number, "step": _NAME}]
RECORD_SHAPE = {
    "schema": int,
    "created": Number,
    "replaces": [str],
    "cells": [
        {
            "cell": {
                "model": _NAME,
                "criterion": _NAME,
                "calibration": _NAME,
                "ratio": Number | None,
            },
            "evaluate": {str: _NAME},
            "errors": dict,
        }
    ],
    **dict.fromkeys(FIGURES, _FIGURE),
}
"""Shape of record.json for `json_files.fits`. `replaces`: names of the earlier runs whose records
no longer count."""


def current_records(root: Path, study: str) -> dict[str, dict[str, Any]]:
    """Name of a run -> its record, for the records of a study that no later record replaces, oldest
    first. Replaced records are not opened. Raises Damaged for a damaged record."""
    records: dict[str, dict[str, Any]] = {}
    replaced: set[str] = set()
    for path in sorted(root.glob(f"runs/{study}/*/{RECORD}"), reverse=True):
        if path.parent.name not in replaced:
            record = read_sealed(path, RECORD_SHAPE)
            records[path.parent.name] = record
            replaced.update(record["replaces"])
    return dict(reversed(records.items()))


def read_record(root: Path, study: str) -> dict[str, Any] | None:
    """The current records of a study, `joined`; None without a record. Raises Damaged for a damaged
    record."""
    current = current_records(root, study)
    return joined(current) if current else None


def joined(current: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """One record with the cells and figures of all of `current_records`. Other entries, and `run`,
    are those of the last run.

    A cell in several records has the benchmarks of all of them. If these records name different
    steps for it, as settings differed, the later record counts, and the cell is in `differing`.
    """
    cells: dict[str, dict[str, Any]] = {}
    figures: dict[str, dict[str, Any]] = {figure: {} for figure in FIGURES}
    differing = {}
    for record in current.values():
        for entry in record["cells"]:
            # the id, as different models may have the same name
            key = _key({**entry["cell"], "id": (entry.get("model") or "")[-DIGITS:]})
            merged = _merged(cells[key], entry) if key in cells else entry
            if merged is None:
                differing[key] = entry["cell"]
            cells[key] = merged or entry
        for figure, rows in figures.items():
            for row in record[figure]:
                key = _key({name: row[name] for name in KEY})
                if row["step"] or key not in rows:
                    rows[key] = row
    last = list(current)[-1]
    return {
        **current[last],
        "run": last,
        "cells": list(cells.values()),
        **{figure: list(rows.values()) for figure, rows in figures.items()},
        "differing": list(differing.values()),
    }


def _key(document: Mapping[str, Any]) -> str:
    """A dictionary key that is equal for equal documents."""
    return json.dumps(document, sort_keys=True)


STEPS = ("model", "statistics", "scores", "plan", "finetune", "export", "cost", "profile", "timing")
"""Fields of a cell in a record with the folder of a step, or None. The folders of evaluations are
in the field `evaluate`."""
DIGITS = 12
"""Digits of a step's id at the end of the name of its folder."""
Folders = Mapping[str, str | None]
"""Name of a step of a cell -> its folder, None if the step is missing."""


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any] | None:
    """The entry of a cell in a later record, completed by results that only the earlier one has;
    None if they name different steps. Ids of steps are compared, as labels may differ."""
    steps = _merged_folders(
        {name: old.get(name) for name in STEPS}, {name: new.get(name) for name in STEPS}
    )
    evaluate = _merged_folders(old["evaluate"], new["evaluate"])
    if steps is None or evaluate is None:
        return None
    finished = {**steps, **evaluate}
    errors = {**old["errors"], **new["errors"]}
    errors = {name: error for name, error in errors.items() if not finished.get(name)}
    return {**new, **steps, "evaluate": evaluate, "errors": errors}


def _merged_folders(old: Folders, new: Folders) -> dict[str, str | None] | None:
    """The folders of both, of the new ones where both have one; None if these differ in their
    ids."""
    merged = dict(old)
    for name, folder in new.items():
        old_folder = old.get(name)
        if folder and old_folder and folder[-DIGITS:] != old_folder[-DIGITS:]:
            return None
        merged[name] = folder or old_folder
    return merged


def finished_steps(record: Mapping[str, Any]) -> set[str]:
    """KIND/NAME of all finished steps that a record names; none for {}."""
    names: set[str | None] = set()
    for entry in record.get("cells", ()):
        names.update(entry.get(step) for step in STEPS)
        names.update(entry["evaluate"].values())
    for figure in FIGURES:
        names.update(row["step"] for row in record.get(figure, ()))
    return {name for name in names if name}


# Columns of the tables that steps write for figures, mostly besides large arrays.
COVERAGE = ("layer", "expert", "tokens")
"""coverage.parquet of a pass over a text: how many tokens the router sent to each expert."""
SCORES = ("layer", "expert", "score")
"""scores.parquet of a criterion; higher means keep."""
FAMILY = ("layer", "expert", "b", "alpha", "beta", "score")
"""family.parquet: every S(b, alpha, beta)."""
PROFILES = (
    "layer",
    "variance",
    "router_entropy",
    "gate_entropy",
    "load_entropy",
    "experts",
    "output_loss",
)
"""profile.parquet:
variance         of the residual stream after the layer over tokens, the mean over its coordinates
router_entropy   of the softmax of the router's logits over the experts it chooses from, mean over
                 tokens
gate_entropy     of the gates of the chosen experts divided by their sum, mean over tokens
load_entropy     of the shares of tokens that are routed to each expert
experts          that the router chooses from, or 0
output_loss      of pruning this layer alone: ||m - m'||^2 / (||y||^2 + eps), mean over tokens, m
                 the routed output, m' that of the pruned layer on the same input, y the residual
                 stream after the unpruned layer

Entropies are in nats. Both entropies and losses are NaN in layers without a router, losses also
without a plan."""
TIMINGS = (
    "batch_size",
    "prompt_length",
    "new_tokens",
    "repeat",
    "prefill_seconds",
    "decode_seconds",
    "working_bytes",
)
"""timing.parquet, one row per request:
prefill_seconds   from the prompts (batch_size x prompt_length tokens) to the first new token of
                  each
decode_seconds    for new_tokens further tokens of each, one after the other
working_bytes     of memory beyond the weights at the peak of a request; NaN where the system does
                  not report it"""
EXPERTS = (
    "layer",
    "expert",
    "tokens",
    "gate_sum",
    "norm_sum",
    "ala_first",
    "ala_second",
    "channel_square",
    "channel_max",
    "channels",
    "channel_root_sum",
)
"""experts.parquet of a pass over a text: for each expert its tokens; over them, the sums of the
gate, of the output's norm and of its attributions of first and second order; the sum of its squared
channels, and the maximum over its channels; number of channels; the sum over channels of their root
mean squares."""
LOSSES = ("layer", "layer_loss")
"""layers.parquet of a pass over a text: the sum over tokens of ||m||^2 / (||y||^2 + eps), m the
routed output of the layer, y the residual stream after it."""
ABLATIONS = ("layer", "expert", "ablation")
"""ablation.parquet: the rise of the model's loss without the expert, in nats per token."""
ENTROPIES = ("layer", "entropy", "tokens")
"""entropy.parquet of a pass over a text: number of tokens by the entropy of the layer's router, in
equal bins. `entropy` is the upper end of a bin, as a share of the logarithm of the number of
experts."""
GRADIENTS = ("layer", "expert", "tokens", "gradient_square", "gradient_root_sum", "channels")
"""gradients.parquet of a forward and backward pass: tokens; over them and all channels, the sum of
the squared gradient of the loss at a channel; the sum over channels of the root mean squares of
that gradient; number of channels."""
WEIGHTS = ("layer", "expert", "abs_sum", "square_sum", "count")
"""weights.parquet: sum |w| and sum w^2 over the weights of each expert, and their number."""
CONCENTRATION = ("layer", "expert", "channels", "score")
"""expert_concentration.parquet of scores of channels: the share of the expert's score (`score`)
that its highest channels hold, by the share of its channels (`channels`)."""
BUDGETS = ("layer", "coverage", "kept")
"""budgets.parquet of a plan of channels: the share of the layer's score that its retained channels
have (`coverage`), and their share of the layer's channels (`kept`)."""
