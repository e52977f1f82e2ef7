"""The search step: find the best schedule for given scores and search set; write its plan, the history and the cost."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import torch

from moe_lab.allocation.protection import provenance
from moe_lab.calibration.answers import AnswerBatch, answer_batches
from moe_lab.config import CalibrationConfig
from moe_lab.search.candidates import Candidates, Cost, Plans, quartered
from moe_lab.search.evolution import Outcome, Recorded, check, evolve
from moe_lab.search.settings import SearchSettings, search_settings
from moe_lab.search.speculative_decoding import DraftingCandidates
from moe_lab.statistics.observe import digest

ANSWERS = "answers.jsonl"
"""File of `Recorded` in the folder of partial results."""
SCHEMA = 1
"""Schema of search.json."""
HISTORY = arrow.schema(
    [
        ("generation", arrow.int64()),
        ("schedule", arrow.list_(arrow.int64())),
        ("origin", arrow.string()),
        ("parent", arrow.list_(arrow.int64())),
        ("evaluated", arrow.bool_()),
        ("fitness", arrow.float64()),
        ("elite", arrow.bool_()),
    ]
)
"""Columns of history.parquet, one row for each schedule that was made; see `evolve`."""


def search(
    model: Any,
    tokenizer: Any,
    *,
    facts: Mapping[str, Any],
    scores: Mapping[int, Sequence[float]],
    settings: Mapping[str, Any],
    text: CalibrationConfig,
    out: Path,
    partial: Path,
    fingerprint: Mapping[str, Any],
    seed: int,
) -> None:
    """Search for the schedule of highest fitness and write plan.json, history.parquet and search.json in `out`.

    `facts` are those of the model, perhaps with protected experts; `scores`: layer -> a score per expert, of which the
    lowest are dropped first; `settings`: fields of AllocationConfig and the ratio; `text`: the search set, tasks with
    answers. After every generation its fitness values are saved in the folder `partial`. A search that finds them there
    goes on from them, and gives the same plan and history as one that was never stopped. `fingerprint` is JSON data
    about all that the fitness depends on besides settings, scores and search set, which is the model. `seed` determines
    all random draws.

    Raises UserError for settings, a ratio or a search set that cannot work, and a fitness that is not finite.
    """
    chosen = search_settings(settings, facts, seed)
    check(chosen.problem, chosen.evolution)
    rows = answer_batches(text, tokenizer, header=chosen.fitness.header)
    protected = {int(layer): about.get("protected", ()) for layer, about in facts["layers"].items()}
    plans = Plans(model, scores, protected)
    judge = _judge(model, plans, rows, chosen, text.batch_size, _ends(model, tokenizer))
    evaluate = Recorded(judge.evaluate, partial / ANSWERS, _depends_on(fingerprint, scores, rows, chosen))
    start = time.perf_counter()
    outcome = evolve(chosen.problem, chosen.evolution, evaluate)
    result = {"fitness": outcome.fitness, "search": text.name, "seed": seed}
    origin = {"allocation": dict(settings), **result, **provenance(facts), "model_sha256": facts.get("sha256")}
    plan = plans.plan(outcome.best, origin)
    plan.save(out / "plan.json")
    parquet.write_table(arrow.Table.from_pylist(outcome.history, schema=HISTORY), out / "history.parquet")
    report = _report(outcome, chosen, plans, judge.cost, time.perf_counter() - start)
    (out / "search.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _judge(
    model: Any,
    plans: Plans,
    rows: Sequence[AnswerBatch],
    chosen: SearchSettings,
    batch_size: int,
    ends: frozenset[int],
) -> Candidates | DraftingCandidates:
    """What evaluates schedules."""
    fitness, evolution = chosen.fitness, chosen.evolution
    if fitness.fitness == "spec_dec":
        return DraftingCandidates(model, plans, rows, fitness, seed=evolution.seed, ends=ends)
    cut = quartered(rows, batch_size) if evolution.proposals > 1 else rows
    return Candidates(model, plans, cut, fitness, seed=evolution.seed, elites=evolution.elites)


def _ends(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a text."""
    configured = model.generation_config.eos_token_id
    several = configured if isinstance(configured, list) else [configured]
    return frozenset(token for token in (*several, tokenizer.eos_token_id) if token is not None)


def _depends_on(
    fingerprint: Mapping[str, Any],
    scores: Mapping[int, Sequence[float]],
    rows: Sequence[AnswerBatch],
    chosen: SearchSettings,
) -> dict[str, Any]:
    """All that determines which schedules are asked for, and their fitness."""
    text = [torch.cat(parts) for parts in zip(*rows, strict=True)]
    ranked = [torch.tensor(list(map(float, scores[layer])), dtype=torch.float64) for layer in sorted(scores)]
    settings = {name: value for name, value in asdict(chosen.fitness).items() if name != "memory_budget"}
    return {
        "fingerprint": dict(fingerprint),
        "search_set": digest(text),
        "scores": digest(ranked),
        "problem": asdict(chosen.problem),
        "evolution": asdict(chosen.evolution),
        "fitness": settings,
    }


def _report(outcome: Outcome, chosen: SearchSettings, plans: Plans, cost: Cost, seconds: float) -> dict[str, Any]:
    """The content of search.json. `cost` is that of this process only, not of earlier runs of a resumed search."""
    first = next((row for row in outcome.history if row["origin"] == "uniform"), None)
    return {
        "schema": SCHEMA,
        "layers": [layer.index for layer in plans.layers],
        "budget": chosen.problem.budget,
        "settings": {"evolution": asdict(chosen.evolution), "fitness": asdict(chosen.fitness)},
        "best": {"schedule": list(outcome.best), "fitness": outcome.fitness},
        "uniform": {name: first[name] for name in ("schedule", "fitness")} if first else None,
        "counts": outcome.counts,
        "cost": {
            **asdict(cost),
            "per_candidate": cost.forwards / cost.candidates if cost.candidates else None,
            "seconds": round(seconds, 3),
        },
    }
