"""Formats of the files that steps write and the analysis reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, NotRequired, TypedDict

from moe_lab.json_files import Document, canonical, read_sealed

SCHEMA = 1
"""Version of result.json, samples.parquet and record.json."""


RANDOM = ("random", "channel_random")
"""Criteria that drop random experts, or random channels, as a baseline."""
Scale = Literal["score", "loss", "perplexity"]
"""Meaning of a number. score: higher is better. loss: a mean loss, lower is better. perplexity: the
exponential of a mean loss, lower is better."""


class Result(TypedDict):
    """One number of one benchmark."""

    benchmark: str
    """Name of the result, such as arc_challenge or humaneval_plus."""
    metric: str
    """The harness's name for the number, such as acc_norm or base."""
    score: float
    """Mean outcome of the items; for a perplexity, the exponential of the mean outcome."""
    scale: Scale
    """Meaning of the number, as set by the harness."""
    unit: str
    """Unit of a loss, such as nats per token; for a perplexity, the unit of the loss whose
    exponential it is. "" for a score."""
    stderr: float | None
    """Standard error of the score over items; None for fewer than two items."""
    n: int
    """Number of graded items."""
    expected: int | None
    """Number of items of the whole benchmark; larger than n only with a limit."""


class TextMeasures(TypedDict, total=False):
    """Columns of samples.parquet about a generated text, with its thought. 1 and 0 stand for yes
    and no; all columns are empty if no text was generated."""

    limit: float
    """Whether the text was cut at the limit of tokens."""
    unfinished: float
    """Whether the text ends inside a thought."""
    loop: float
    """Whether the text ends in a loop, see `evaluation.items.ends_in_loop`."""
    empty: float
    """Whether there is no answer: nothing, or only white space, after the thought."""
    natural_end: float
    """Whether the model ended the text, by an end token or a stop text outside a thought."""
    distinct_4: float | None
    """Distinct sequences of four words as a share of all sequences of four words; None for fewer
    than four words."""
    characters: float
    """Length of the text."""


class Sample(TextMeasures):
    """One row of samples.parquet: one item of one result."""

    benchmark: str
    """Name of the result, as in Result."""
    item: str
    """The item's id in the data file, or the item's number in that file."""
    replicate: int
    """Number of the answer, from 0, if the item has several answers."""
    outcome: float
    """1 if the answer is right, 0 if it is wrong, or a share for partial credit; for a loss or a
    perplexity, the item's loss in the result's unit."""
    prompt_hash: str
    """sha256 of the prompt, first 16 hexadecimal digits."""
    thought: str
    """The reasoning that the model wrote before the answer, including the marks around the
    reasoning; "" without reasoning."""
    output: str | None
    """The answer that the model wrote, or the log-likelihoods of the choices as JSON; None if the
    reasoning does not end."""
    ended: str | None
    """Why the text ended: end (an end token), stop (a stop text), limit (too many tokens), too_long
    (nothing was written, because prompt and limit together are too long); None if no text was
    requested."""
    extracted: str
    """The graded answer."""
    answer_loss: NotRequired[float | None]
    """Loss on the right answer after the prompt, in bits per byte of the answer; lower is better.
    None or absent if there is no reference answer, or if its likelihood was not computed."""
    units: NotRequired[float | None]
    """Weight of the item in the score: number of tokens, words or bytes for a loss or a perplexity.
    None or absent if all items count equally."""


class ResultFile(TypedDict):
    """result.json."""

    schema: int
    """The SCHEMA with which the file was written."""
    results: list[Result]
    """One result per entry of the benchmark's `reports`."""
    protocol: Document
    """How the results were measured: harness, data digest, limits, sandbox, a rendered prompt."""


ITEMS = "items.jsonl.gz"
"""File with one line of JSON for each item of a benchmark, an `evaluation.items.Item`."""
FOREIGN = "foreign"
"""Kind of the steps with results that other programs have measured."""
OWN = "moe_lab"
"""Value of the axis `source` of cells that were measured here. For other cells, the axis has the
name of the program that measured them."""


def document_keys(hashes: Iterable[str]) -> list[str]:
    """A key for each document of a benchmark: its hash, with a number if earlier documents have the
    same hash."""
    counts: Counter[str] = Counter()
    keys = []
    for value in hashes:
        keys.append(f"{value}#{counts[value]}" if counts[value] else value)
        counts[value] += 1
    return keys


SHAREABLE = "shareable"
"""Key of a protocol that is False if the items of the benchmark must not leave the store."""
CONTAMINATION = "contamination.json"
"""File with benchmark -> number of items that were compared with a text (comparable), and number of
items that share a phrase with the text (found)."""
RECORD = "record.json"
"""File in the folder of a run, runs/STUDY/RUN, with the cells of the run and the folders of their
results."""
FIGURE_STEPS = ("families", "damages", "contaminations")
"""Entries of a record with the steps that only figures and remarks need."""


class FigureKey(NamedTuple):
    """Fields that identify the step of a figure in the entries FIGURE_STEPS of a record.
    `calibration` and `model` are names."""

    calibration: str
    model: str
    gate: str
    seed: int


def current_records(root: Path, study: str) -> dict[str, Document]:
    """Name of a run -> record of the run, oldest run first, for the runs of a study. A run is left
    out if a later record names the run in the entry "replaces", as its record no longer counts.
    `root`: folder of the store. Raises Damaged for a damaged record."""
    records: dict[str, Document] = {}
    replaced_runs: set[str] = set()
    # newest run first, because the name of a run begins with its number
    for path in sorted(root.glob(f"runs/{study}/*/{RECORD}"), reverse=True):
        if path.parent.name not in replaced_runs:
            record = read_sealed(path)
            records[path.parent.name] = record
            replaced_runs.update(record["replaces"])
    return dict(reversed(records.items()))


def read_record(root: Path, study: str) -> Document | None:
    """The current records of a study, joined to one record. None if the study has no record. Raises
    Damaged for a damaged record."""
    current = current_records(root, study)
    return join_records(current) if current else None


def join_records(current: Mapping[str, Document]) -> Document:
    """One record from all records in `current`, such as the result of `current_records`. The record
    has the cells of all records, and the rows of all records in the entries FIGURE_STEPS. All other
    entries are copied from the last record. The entry "run" has the last key of `current`.

    The entries of a cell in several records are merged, see `_merge`.
    """
    cells: dict[str, Document] = {}
    figures: dict[str, dict[FigureKey, Document]] = {figure: {} for figure in FIGURE_STEPS}
    for record in current.values():
        for entry in record["cells"]:
            # models may have the same name, so the key also has the id of the step "model"
            key = canonical({**entry["cell"], "id": (entry.get("model") or "")[-ID_DIGITS:]})
            cells[key] = _merge(cells[key], entry) if key in cells else entry
        for figure, rows in figures.items():
            for row in record[figure]:
                figure_key = FigureKey(*[row[name] for name in FigureKey._fields])
                if row["step"] or figure_key not in rows:
                    rows[figure_key] = row
    last_run = list(current)[-1]
    return {
        **current[last_run],
        "run": last_run,
        "cells": list(cells.values()),
        **{figure: list(rows.values()) for figure, rows in figures.items()},
    }


MEASUREMENTS = ("cost", "profile", "timing")
"""Those of STEPS that measure a model and change no weights."""
STEPS = ("model", "statistics", "scores", "plan", "finetune", "export", *MEASUREMENTS)
"""Fields of a cell in a record whose value is the folder of a step, or None."""
ID_DIGITS = 12
"""Number of digits of a step's id at the end of the name of the step's folder."""


def start_of(name: str) -> str:
    """The first digits of a step's id, at the end of the `name` of the step's folder."""
    return name[-ID_DIGITS:]


def _finished(entry: Document) -> dict[str, str]:
    """Field of a cell's entry, or name of a benchmark -> folder of the step, if it is finished."""
    folders = {**{name: entry.get(name) for name in STEPS}, **entry["evaluate"]}
    return {name: folder for name, folder in folders.items() if folder}


def _merge(old: Document, new: Document) -> Document:
    """Merge the entries of one cell in two records: `old` in the earlier record, `new` in the later
    record. Each step and benchmark is copied from `new` if it is finished there, else from `old`.
    All are copied from `new` if the entries are about different weights. If `old` and `new` have
    steps with different ids, the entry "differing" has their fields and benchmarks."""
    old_folders, new_folders = _finished(old), _finished(new)
    differing = [
        name
        for name in old_folders.keys() & new_folders.keys()
        if start_of(old_folders[name]) != start_of(new_folders[name])
    ]
    if all_differing := sorted({*old.get("differing", ()), *differing}):
        new = {**new, "differing": all_differing}
    if set(differing) & set(STEPS).difference(MEASUREMENTS):
        return new
    finished = {**old_folders, **new_folders}
    errors = {**old["errors"], **new["errors"]}
    return {
        **new,
        **{name: finished.get(name) for name in STEPS},
        "evaluate": {name: finished.get(name) for name in {**old["evaluate"], **new["evaluate"]}},
        "errors": {name: error for name, error in errors.items() if name not in finished},
    }


def finished_steps(record: Document) -> set[str]:
    """Folders (KIND/LABEL-ID) of all finished steps that a record names."""
    names: set[str | None] = set()
    for entry in record.get("cells", ()):
        names.update(entry.get(step) for step in STEPS)
        names.update(entry["evaluate"].values())
    for figure in FIGURE_STEPS:
        names.update(row["step"] for row in record.get(figure, ()))
    return {name for name in names if name}


# Columns of the tables that steps write for figures.
SCORES = ("layer", "expert", "score")
"""scores.parquet of a criterion; experts with lower scores are removed first."""
FAMILY = ("layer", "expert", "b", "alpha", "beta", "score")
"""family.parquet: one row for each score S(b, alpha, beta) of an expert."""
PROFILES = ("layer", "variance", "output_loss")
"""profile.parquet, one row per layer:
variance         variance over coordinates of the residual stream after the layer, mean over tokens
output_loss      loss of pruning this layer alone: mean over tokens of
                 ||m - m'||^2 / (||y||^2 + eps), where m is the routed output, m' the routed output
                 of the pruned layer on the same input, and y the residual stream after the unpruned
                 layer; NaN in layers without a router, and without a plan"""
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
prefill_seconds   seconds from the prompts (batch_size x prompt_length tokens) to the first new
                  token of each prompt
decode_seconds    seconds for new_tokens further tokens of each prompt, one after the other
working_bytes     bytes of memory beyond the weights at the peak of a request; NaN if the system
                  does not report them"""
EXPERTS = (
    "layer",
    "expert",
    "tokens",
    "gate_sum",
    "norm_sum",
    "ala_first",
    "ala_second",
    "channel_square",
    "channels",
    "channel_root_sum",
)
"""experts.parquet of a pass over a text, one row per expert:
tokens                  number of tokens that are routed to the expert
gate_sum, norm_sum      sums over these tokens of the gate, and of the norm of the expert's output
ala_first, ala_second   sums over these tokens of the attributions of first and second order
channel_square          sum over tokens and channels of the squared activation of a channel
channels                number of channels
channel_root_sum        sum over channels of the root mean square over tokens"""
LOSSES = ("layer", "layer_loss")
"""layers.parquet of a pass over a text: the sum over tokens of ||m||^2 / (||y||^2 + eps), where m
is the routed output of the layer and y the residual stream after the layer."""
ABLATIONS = ("layer", "expert", "ablation")
"""ablation.parquet: the rise of the model's loss without the expert, in nats per token."""
ENTROPIES = ("layer", "entropy", "tokens")
"""entropy.parquet of a pass over a text: a histogram of the entropy of each layer's router. One row
per bin: number of tokens (`tokens`), and upper end of the bin (`entropy`) as a share of the
logarithm of the number of experts. Bins have equal widths."""
GRADIENTS = ("layer", "expert", "tokens", "gradient_square", "gradient_root_sum", "channels")
"""gradients.parquet of a forward and backward pass, one row per expert. x is the gradient of the
loss at the activation of a channel:
tokens              number of tokens that are routed to the expert
gradient_square     sum over tokens and channels of x^2
gradient_root_sum   sum over channels of the root mean square of x over tokens
channels            number of channels"""
WEIGHTS = ("layer", "expert", "abs_sum", "square_sum", "count")
"""weights.parquet: sum |w| and sum w^2 over the weights of each expert, and the number of
weights."""
CONCENTRATION = ("layer", "expert", "channels", "score")
"""expert_concentration.parquet of scores of channels: points of a curve per expert. The share
`channels` of the expert's channels with the highest scores has the share `score` of the sum of the
expert's scores."""
BUDGETS = ("layer", "coverage", "kept")
"""budgets.parquet of a plan of channels: the share of the layer's score that the retained channels
have (`coverage`), and the share of the layer's channels that is retained (`kept`)."""
