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
"""Criteria whose plans show what chance can do: of experts, of channels."""
Scale = Literal["score", "loss", "perplexity"]
"""What a number is: a score, of which more is better; a mean loss; or a perplexity, the exponential
of a mean loss. Of the last two, less is better."""
SCALES: tuple[Scale, ...] = get_args(Scale)


class Result(TypedDict):
    """One number of one benchmark."""

    benchmark: str
    """Result name, such as arc_challenge or humaneval_plus."""
    metric: str
    """The harness's name for the number, such as acc_norm or base."""
    score: float
    """The number: the mean outcome of the items; of a perplexity, its exponential."""
    scale: Scale
    """What the number is. The harness decides this, and nobody infers it from the metric's name."""
    unit: str
    """Unit of a loss, such as nats per token; of a perplexity, that of its loss. "" if there is
    none."""
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
    """Number of the answer among several to the same item; 0 for the first."""
    outcome: float
    """1 if right, 0 if wrong, a share for partial credit; of a loss or a perplexity, the loss in
    the result's unit."""
    prompt_hash: str
    """sha256 of the prompt, first 16 hexadecimal digits."""
    thought: str
    """What the model wrote before its answer, with its marks; empty where it did not think."""
    output: str | None
    """The answer that it wrote, or the log-likelihoods of the choices as JSON; None where a thought
    does not end."""
    ended: str | None
    """Why the text ended: end (an end token), stop (a stop text), limit (too many tokens), too_long
    (nothing was written, because prompt and limit together are too long); None where nothing was to
    be written."""
    extracted: str
    """The graded answer."""
    answer_loss: NotRequired[float | None]
    """Loss on the right answer after the prompt, in bits per byte of the answer; lower is better.
    None or absent without a reference answer or its likelihood."""
    units: NotRequired[float | None]
    """Weight of the item in the score: the tokens, words or bytes of a loss or a perplexity, or
    what makes tasks of a group count alike; None or absent where all items do."""


class ResultFile(TypedDict):
    """result.json."""

    schema: int
    """SCHEMA of the writer."""
    results: list[Result]
    """One per entry of the benchmark's reports."""
    protocol: dict[str, Any]
    """How it was measured: harness, data digest, limits, sandbox, one rendered prompt."""
    versions: dict[str, str]
    """Versions of the libraries that generated and graded."""


CONTAMINATION = "contamination.json"
"""File with how many items of each benchmark occur in a text: comparable, found."""
RECORD = "record.json"
"""File in the folder of a run, runs/STUDY/RUN, with the cells of the run and the folders of their
results."""
FIGURES = ("families", "damages", "contaminations")
"""Entries of a record with the steps that are for figures, and for remarks."""
KEY = ("calibration", "model", "gate", "seed")
"""Columns that tell the steps of a figure apart."""
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
    first. Walks from the newest run, so replaced records are never opened. Raises Damaged for a
    damaged record."""
    records: dict[str, dict[str, Any]] = {}
    replaced: set[str] = set()
    for path in sorted(root.glob(f"runs/{study}/*/{RECORD}"), reverse=True):
        if path.parent.name not in replaced:
            record = read_sealed(path, RECORD_SHAPE)
            records[path.parent.name] = record
            replaced.update(record["replaces"])
    return dict(reversed(records.items()))


def read_record(root: Path, study: str) -> dict[str, Any] | None:
    """The records of a study, `joined`; None without any. Raises Damaged for a damaged record."""
    current = current_records(root, study)
    return joined(current) if current else None


def joined(current: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The record of a study's last run (`run`), and of the runs at the same time: those of
    `current_records`.

    Of a cell that several records have, the benchmarks of all count. Where its steps differ, as
    their settings do, the record of the later run counts, and the cell is in `differing`.
    """
    cells: dict[str, dict[str, Any]] = {}
    figures: dict[str, dict[str, Any]] = {figure: {} for figure in FIGURES}
    differing = {}
    for record in current.values():
        for entry in record["cells"]:
            # models may share a name
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
    return json.dumps(document, sort_keys=True)


STEPS = ("model", "statistics", "scores", "plan", "finetune", "export", "cost", "profile", "timing")
"""Fields of a cell in a record with the folder of a step, or None; those of its evaluations are in
`evaluate`."""
DIGITS = 12
"""Digits of a step's id at the end of the name of its folder."""
Folders = Mapping[str, str | None]
"""Name of a step of a cell -> its folder, None if it is missing."""


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any] | None:
    """The new entry of a cell with the results that only the old entry has; None where they name
    different steps. Labels of one step may differ, its id does not."""
    pairs: list[tuple[Folders, Folders]] = [
        ({name: old.get(name) for name in STEPS}, {name: new.get(name) for name in STEPS}),
        (old["evaluate"], new["evaluate"]),
    ]
    for before, after in pairs:
        for name, folder in after.items():
            earlier = before.get(name)
            if folder and earlier and folder[-DIGITS:] != earlier[-DIGITS:]:
                return None
    steps, evaluate = (
        {**before, **{name: folder or before.get(name) for name, folder in after.items()}}
        for before, after in pairs
    )
    finished = {**steps, **evaluate}
    errors = {**old["errors"], **new["errors"]}
    errors = {name: error for name, error in errors.items() if not finished.get(name)}
    return {**new, **steps, "evaluate": evaluate, "errors": errors}


def finished_steps(record: Mapping[str, Any]) -> set[str]:
    """KIND/NAME of all finished steps that a record names; none for {}."""
    names: set[str | None] = set()
    for entry in record.get("cells", ()):
        names.update(entry.get(step) for step in STEPS)
        names.update(entry["evaluate"].values())
    for figure in FIGURES:
        names.update(row["step"] for row in record.get(figure, ()))
    return {name for name in names if name}


# Columns of the tables that steps write for figures, most of them next to large arrays.
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
load_entropy     of the shares of tokens that experts are given
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
"""budgets.parquet of a plan of channels: the shares of the layer's score and of its channels that
are kept."""
