"""Differences between two sets of cells, A and B, of one or two studies or stores, and the data
from which the page computes the differences between any two cells of its study."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from moe_lab.analysis import names
from moe_lab.analysis.load.items import answers
from moe_lab.analysis.load.reader import Gap, Reader, records
from moe_lab.analysis.load.settings import AXES, labels
from moe_lab.analysis.load.studies import studies
from moe_lab.analysis.load.study import Study, load
from moe_lab.analysis.render.page import packed
from moe_lab.analysis.stats import uncertainty
from moe_lab.errors import UserError, check_known
from moe_lab.paths import store_folder

KEYS = (
    ["benchmark", "key", "replicate"],
    ["layer", "expert"],
    ["cost"],
)
"""Columns that identify a row in each of the frames of `_plan`."""
_SCORES = ["benchmark", "items", "score_a", "score_b", "difference", "low", "high", "p"]
_METHOD_AXES = set(AXES) - {"seed"}


@dataclass(frozen=True)
class Differences:
    """Differences between pairs of plans. All frames have the columns `a` and `b`, the labels of
    the plans. Pairs that differ in the seed alone are one pair, named by its first plans; the
    frames besides `scores` are about these."""

    scores: pd.DataFrame
    """benchmark, items (number of items that both answered), score_a and score_b (mean outcomes of
    these items, which for a perplexity are losses), difference (A minus B, paired by seed and
    item), low and high (95 % interval), p (corrected over the frame by Holm's method)."""
    experts: pd.DataFrame
    """layer, expert, share_a, share_b: experts of which A and B retain different shares."""
    costs: pd.DataFrame
    """cost (see `plans.COSTS`), value_a, value_b."""
    flips: pd.DataFrame
    """benchmark, item, prompt, right_answer, outcome_a, outcome_b, output_a, output_b: answers of
    which one is right and the other wrong. Texts are "" if the benchmark is not shareable."""


def compare(a: str, b: str, store: str | Path = "store", study: str | None = None) -> Differences:
    """Compare cells A with cells B.

    a, b: terms AXIS=VALUE that select cells, separated by commas: criterion=reap,ratio=0.5. A term
    without = is a study of the store, or else a criterion. The terms store= and study= replace the
    arguments of this name. study: None for the newest.

    A cell of A and a cell of B are compared if they agree on all axes on which A and B have values
    in common. If they have no seeds in common, the seeds are paired in their order. Raises
    UserError when terms select no cell, and when no cells agree.
    """
    study_a, cells_a = _selected(a, store, study)
    study_b, cells_b = _selected(b, store, study)
    has_several_seeds = cells_a["seed"].nunique() > 1 and cells_b["seed"].nunique() > 1
    if has_several_seeds and not set(cells_a["seed"]) & set(cells_b["seed"]):
        cells_a = cells_a.assign(seed=cells_a["seed"].rank(method="dense"))
        cells_b = cells_b.assign(seed=cells_b["seed"].rank(method="dense"))
    shared = [axis for axis in AXES if set(cells_a[axis]) & set(cells_b[axis])]
    plans = cells_a.reset_index().merge(cells_b.reset_index(), on=shared, suffixes=("_a", "_b"))
    if plans.empty:
        raise UserError(f"compare {a} {b}: no cell of A agrees with a cell of B on the other axes")
    labels_a, labels_b = labels(study_a.cells), labels(study_b.cells)
    # pairs with equal values of these differ in the seed alone
    axes = [
        name
        for name in map(str, plans)
        if name.removesuffix("_a").removesuffix("_b") in _METHOD_AXES
    ]
    differences = {}
    for _, pairs in plans.groupby(axes, sort=False):
        joined = [
            [
                of_a.merge(of_b, on=keys, suffixes=("_a", "_b"))
                for keys, of_a, of_b in zip(
                    KEYS, _plan(study_a, row["cell_a"]), _plan(study_b, row["cell_b"]), strict=True
                )
            ]
            for row in records(pairs)
        ]
        answers_of_seeds = [first.assign(seed=seed) for seed, (first, *_) in enumerate(joined)]
        first_answers, experts, costs = joined[0]
        first = pairs.iloc[0]
        # by the labels of A and B
        differences[labels_a[first["cell_a"]], labels_b[first["cell_b"]]] = (
            _scores(pd.concat(answers_of_seeds)),
            experts[experts["share_a"] != experts["share_b"]],
            costs,
            _flips(first_answers),
        )
    scores, *others = (
        pd.concat(dict(zip(differences, parts, strict=True)), names=["a", "b"])
        .reset_index(["a", "b"])
        .reset_index(drop=True)
        for parts in zip(*differences.values(), strict=True)
    )
    return Differences(scores.assign(p=uncertainty.holm(scores["p"].to_numpy())), *others)


def _selected(text: str, store: str | Path, study: str | None) -> tuple[Study, pd.DataFrame]:
    """A study, and the rows of its cells that the terms in `text` select, see `compare`."""
    terms: dict[str, str] = {}
    words = []
    # commas in parentheses separate parameters of a criterion
    for term in re.split(r",(?![^(]*\))", text):
        key, equals, value = term.partition("=")
        if equals and key.isidentifier():
            terms[key] = value
        else:
            words.append(term)
    folder = store_folder(str(terms.pop("store", store)))
    names = studies(folder)
    for word in words:
        terms["study" if word in names else "criterion"] = word
    data = load(folder, terms.pop("study", study or names[0]))
    cells = data.cells
    for axis, value in terms.items():
        check_known(f"compare {text}: axis", axis, AXES)
        values = cells[axis].map("{:g}".format if axis in ("ratio", "seed") else str)
        check_known(axis, value, set(values))
        cells = cells[values == value]
    return data, cells


def _plan(study: Study, cell: int) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """(answers, retained, costs) of a plan: `load.items.answers` of all its benchmarks, its rows of
    `Study.retained`, and its costs with the columns cost and value."""
    results = study.results[study.results["cell"] == cell]
    columns = [*KEYS[0], "item", "prompt", "right_answer", "outcome", "units", "output"]
    retained = study.retained.loc[study.retained["cell"] == cell, ["layer", "expert", "share"]]
    # without columns that NaN would fill, as a cell may have no costs
    costs = study.costs.reindex([cell]).T.dropna().set_axis(["value"], axis="columns")
    return (
        answers(results, study.reader)[columns],
        retained,
        costs.rename_axis("cost").reset_index(),
    )


def _scores(answers: pd.DataFrame) -> pd.DataFrame:
    """`Differences.scores` of a pair, with p before the correction. answers: those of both plans,
    with the column seed."""
    numbers = ["outcome_a", "outcome_b", "units_a"]
    # an item may have several answers
    items = answers.groupby(["benchmark", "seed", "key"])[numbers].mean().reset_index()
    rows = []
    for benchmark, outcomes in items.groupby("benchmark"):
        # each (seeds, items)
        tables = [outcomes.pivot(index="seed", columns="key", values=name) for name in numbers]
        common_items = tables[0].dropna(axis="columns").columns
        a, b, units = (table[common_items] for table in tables)
        shares = units.iloc[0].fillna(1.0).to_numpy()
        shares = shares / shares.sum()
        stratum = uncertainty.Stratum((a - b).to_numpy() * shares, shares)
        estimate = uncertainty.crossed_estimate([stratum])
        means = [(outcome @ shares).mean() for outcome in (a, b)]
        rows.append(
            (benchmark, len(shares), *means, estimate.value, *estimate.interval, estimate.p)
        )
    return pd.DataFrame(rows, columns=_SCORES)


def _flips(answers: pd.DataFrame) -> pd.DataFrame:
    """`Differences.flips` of a pair. answers: those of both plans."""
    outcomes = answers[["outcome_a", "outcome_b"]]
    is_flipped = outcomes.isin([0, 1]).all(axis=1) & (outcomes.nunique(axis=1) == 2)
    flips = answers[is_flipped]
    # the logs of some programs have no prompts
    texts = {
        text: flips[f"{text}_a"].mask(flips[f"{text}_a"] == "", flips[f"{text}_b"])
        for text in ("item", "prompt", "right_answer")
    }
    columns = ["benchmark", *texts, *outcomes, "output_a", "output_b"]
    return flips.assign(**texts)[columns]


MOST_OUTCOMES, MOST_CHARACTERS = 10_000_000, 15_000_000
"""Most outcomes, and most characters of prompts and answers, that the page gets. Of more it gets a
sample. Packed, these are at most about 3 and 8 MB."""


def page_plans(study: Study) -> dict[str, Any]:
    """The numbers from which the page computes the differences between two cells, as `compare`
    does. Frames with a column for each cell:

    - outcomes: outcomes, and "units CELL" with the weights of the items for a cell unless they are
      equal; a row for each item, with index benchmark (display name) and item
    - retained: retained shares, with index layer and expert
    - costs: values, with index cost (see `plans.COSTS`)

    and

    - cells: cell, label, and cell of its unpruned model
    - quantiles: 0.975 quantiles of Student's t with 1, 2, ... degrees of freedom
    - note: a sentence if the items are a sample, otherwise ""
    """
    cells = study.cells.reset_index("cell")
    unpruned = cells["cell"].where(cells["criterion"] == "none")
    samples, keys = study.samples, ["benchmark", "item"]
    outcomes = samples.pivot(index=keys, columns="cell", values="outcome")
    units = samples.dropna(subset="units").pivot(index=keys, columns="cell", values="units")
    step, note = _sampling(outcomes.size / MOST_OUTCOMES)
    outcomes = outcomes.join(units.add_prefix("units "))[::step]
    degrees_of_freedom = np.arange(1, max(2, len(outcomes)))
    return {
        "outcomes": outcomes.rename(index=names.benchmark),
        "retained": study.retained.pivot(index=KEYS[1], columns="cell", values="share"),
        "costs": study.costs.T,
        "cells": cells[["cell"]].assign(
            label=cells["cell"].map(labels(study.cells)),
            unpruned=unpruned.groupby(cells["model"]).transform("first"),
        ),
        "quantiles": stdtrit(degrees_of_freedom, (1 + uncertainty.CONFIDENCE) / 2).tolist(),
        "note": note,
    }


def page_answers(results: pd.DataFrame, store: Path) -> tuple[dict[str, str], list[Gap]]:
    """Display name of a benchmark -> its answers, packed; and the gaps found. Benchmarks without
    texts, or with texts that are not shareable, are left out. Of several answers to an item the
    first counts. results: `Study.results`.

    - items: for each item [item, prompt, right_answer, answers], with [verdict, answer, list of
      cells] for each distinct answer
    - note: as in `page_plans`
    """
    reader = Reader(store)
    columns = ["benchmark", "item", "outcome", "output", "extracted", "limit", "loop"]
    documents = {}
    for benchmark, rows in results.groupby("benchmark", sort=False):
        frame = answers(rows, reader, columns)
        frame = frame[frame["benchmark"] == benchmark].drop_duplicates(["folder", "key"])
        if (frame["answer"] == "").all():
            continue
        verdict = frame["outcome"].map({0: "wrong", 1: "right"}).fillna(frame["outcome"].map(str))
        for column, remark in (("limit", ", cut off"), ("loop", ", loops")):
            verdict += np.where(frame[column] == 1, remark, "")
        # several cells can share an evaluation
        cells = rows.groupby("folder")["cell"].agg(list).to_dict()
        # key of an item -> (its texts, (verdict, answer) -> cells)
        items: dict[str, tuple[list[str], dict[tuple[str, str], list[int]]]] = {}
        shown = ["key", "folder", "item", "prompt", "right_answer", "verdict", "answer"]
        for key, folder, *texts, verdict_text, answer in (
            frame.assign(verdict=verdict)[shown].to_numpy().tolist()
        ):
            _, cells_of_answer = items.setdefault(key, (texts, {}))
            cells_of_answer.setdefault((verdict_text, answer), []).extend(cells[folder])
        characters = 0
        for (_, prompt, _), cells_of_answer in items.values():
            characters += len(prompt) + sum(len(answer) for _, answer in cells_of_answer)
        step, note = _sampling(characters * results["benchmark"].nunique() / MOST_CHARACTERS)
        rows_of_items = [
            [*texts, [[*answer, of_answer] for answer, of_answer in cells_of_answer.items()]]
            for texts, cells_of_answer in list(items.values())[::step]
        ]
        documents[names.benchmark(str(benchmark))] = packed({"items": rows_of_items, "note": note})
    return documents, list(reader.gaps)


def _sampling(size: float) -> tuple[int, str]:
    """(step, note) of a sample: the first of each `step` items is shown. size: size of all items,
    in units of what the page may have. note: a sentence that says so, "" if all are shown."""
    step = max(1, math.ceil(size))
    return step, f"A sample: one of {step} items. " if step > 1 else ""
