"""The search step: find the best schedule for given scores and search set; write its plan, the
history and the cost."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet

from moe_lab.allocation.protection import protected_entry
from moe_lab.calibration.batches import AnswerBatch, answer_batches
from moe_lab.config import CalibrationConfig
from moe_lab.json_files import ResultCache, write_json
from moe_lab.models.config_json import eos_tokens
from moe_lab.search.candidates import Candidates, Plans
from moe_lab.search.evolution import SearchSettings, evolve, parse, space_to_search
from moe_lab.search.speculative_decoding import DraftingCandidates

FITNESS_CACHE = "answers.jsonl"
"""File of the `ResultCache` of a search, in its folder of partial results."""


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
    seed: int,
) -> None:
    """Search for the schedule of highest fitness and write plan.json, history.parquet and
    search.json in `out`.

    `facts`: facts of the model, which may list protected experts of each layer. `scores`: layer ->
    a score per expert; the experts with the lowest scores are dropped first. `settings`: fields of
    AllocationConfig and the ratio. `text`: the search set. `seed`: used if the parameters in
    `settings` have no seed.

    An interrupted search resumes from the fitness values in the folder `partial`, which no other
    search may use. UserError for invalid settings, an infeasible ratio, an unsuitable search set,
    and a fitness that is not finite.
    """
    parameters = parse(settings["parameters"], seed)
    space = space_to_search(settings, facts, parameters)
    rows = answer_batches(text, tokenizer, header=parameters.header)
    plans = Plans({int(layer): router for layer, router in facts["layers"].items()}, scores)
    candidates = _candidates(model, tokenizer, plans, rows, parameters)
    start = time.perf_counter()
    cache = ResultCache(partial / FITNESS_CACHE)
    history = evolve(
        space,
        parameters,
        lambda schedules: cache.result(schedules, lambda: list(candidates.evaluate(schedules))),
    )
    seconds = time.perf_counter() - start
    best = max(history, key=lambda row: row["fitness"])  # the first of equal ones
    provenance = {
        "allocation": dict(settings),
        "fitness": best["fitness"],
        "search": text.name,
        "seed": seed,
        **protected_entry(facts),
        "model_sha256": facts.get("sha256"),
    }
    plans.plan(best["schedule"], provenance).save(out / "plan.json")
    parquet.write_table(arrow.Table.from_pylist(history), out / "history.parquet")
    cost = {
        "candidates": len({tuple(row["schedule"]) for row in history}),
        # of this process alone, not of earlier runs of a resumed search
        "forwards": candidates.forwards,
        "seconds": round(seconds, 3),
    }
    report = {"layers": plans.layers, "settings": asdict(parameters), "cost": cost}
    write_json(out / "search.json", report)


def _candidates(
    model: Any,
    tokenizer: Any,
    plans: Plans,
    rows: Sequence[AnswerBatch],
    parameters: SearchSettings,
) -> Candidates | DraftingCandidates:
    """The candidates of a search, which compute its fitness function. `rows`: the search set."""
    if parameters.fitness == "spec_dec":
        end_tokens = frozenset(eos_tokens(model.generation_config.eos_token_id, tokenizer))
        return DraftingCandidates(model, plans, rows, parameters, end_tokens)
    return Candidates(model, plans, rows, parameters)
