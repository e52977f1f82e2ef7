"""Stores with made-up numbers in the layout a study leaves behind; deterministic, and used by tests
only.

Every plan has a quality between 0 and 1 that follows from its criterion, calibration set and ratio;
items have a difficulty, and a plan solves an item if its quality, plus luck, exceeds it. So winners
are known beforehand.
"""

import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import synthetic_plans
from synthetic_plans import EXPERTS, LAYERS
from synthetic_plans import rng as _rng

from moe_lab.analysis.names import MULTIPLE_CHOICE
from moe_lab.json_files import sealed
from moe_lab.result_files import EXPERTS as EXPERT_SUMS

DATA_FREE_CRITERIA = ("aimer", "magnitude", "random", "channel_weight", "channel_random")
CALIBRATIONS = ("pocket_general", "pocket_code", "pocket_math")
TASKS = {"humaneval": ("humaneval", "humaneval_plus"), "mbpp": ("mbpp", "mbpp_plus")}
TASKS |= {
    name: (name,) for name in ("livecodebench", "wildbench", "gsm8k", "math500", *MULTIPLE_CHOICE)
}
ALL_TASKS = tuple(TASKS)
TASKS |= {"perplexity": ("perplexity",)}
DEFAULT_SEED = 42
SKILLS = {
    "humaneval": "code",
    "mbpp": "code",
    "livecodebench": "code",
    "gsm8k": "math",
    "math500": "math",
}
STRENGTH = {
    "frequency": 0.30, "seer": 0.34, "ean": 0.45, "reap": 0.62, "mone": 0.50, "mone_freq": 0.36,
    "man": 0.78,
    "msan": 0.66, "gate_ean": 0.40, "gate_energy": 0.38, "exact_damage": 0.58, "aimer": 0.44,
    "magnitude": 0.32,
    "random": 0.10, "heapr": 0.85, "camera": 0.80, "channel_weight": 0.60,
    "channel_activation": 0.75,
    "snip": 0.70, "channel_random": 0.30,
}  # fmt: skip
CRITERIA = tuple(name for name in STRENGTH if synthetic_plans.granularity(name) == "expert")
GAIN = {"uniform": 0.0, "evolutionary": 0.25, "global": 0.15}
"""Allocation -> number that it adds to the strength of a criterion; other allocations add 0.1."""


def _quality(cell: dict[str, Any], task: str) -> float:
    criterion = cell["criterion"]
    calibration = cell["calibration"]
    ratio = cell["ratio"]
    if criterion == "none":
        return 0.97
    calibration_skill = calibration.removeprefix("pocket_")
    skill = SKILLS.get(task, "general")
    match = (
        0.18
        if calibration_skill == skill
        else (-0.1 if calibration_skill != "none" and skill != "general" else 0.0)
    )
    strength = (
        STRENGTH[criterion]
        + match
        + GAIN.get(cell["allocation"], 0.1)
        - 0.1 * (cell["recovery"] == "nf4")
    )
    noise = (
        _rng("plan", criterion, ratio, cell["seed"]).normal(0, 0.05)
        if cell["seed"] != DEFAULT_SEED
        else 0.0
    )
    return float(np.clip(1.05 - 1.6 * ratio * (1.25 - strength) + noise, 0.0, 0.97))


FILES_WITH_DIGEST = ("record.json", "step.json")
"""Files that contain their digest; other files are files of steps, whose hashes are in
step.json."""


def write_json(path: Path, document: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(document)
    path.write_text(sealed(text) if path.name in FILES_WITH_DIGEST else text)


@contextmanager
def edited_document(path: Path) -> Iterator[Any]:
    """Context manager that yields the document in a JSON file. At the end the document is written
    to the file, with all changes."""
    document = json.loads(path.read_text())
    if path.name in FILES_WITH_DIGEST:
        del document["digest"]
    yield document
    write_json(path, document)


def _folder(kind: str, label: str) -> str:
    return f"{kind}/{label}-{zlib.crc32(label.encode()):08x}0000"


_DEFAULTS = ("none", "uniform", 0, DEFAULT_SEED)


def _label_parts(cell: dict[str, Any]) -> tuple[str, ...]:
    """The parts of the names of a cell's folders. Allocation, recovery and seed are parts only if
    they differ from _DEFAULTS."""
    other_values = [
        str(cell[axis])
        for axis in ("allocation", "recovery", "seed")
        if cell[axis] not in _DEFAULTS
    ]
    return (cell["model"], cell["calibration"], cell["criterion"], *other_values)


def _folder_of(kind: str, cell: dict[str, Any]) -> str:
    return _folder(kind, f"{'-'.join(_label_parts(cell))}-{cell['ratio']:g}")


def _evaluate(root: Path, cell: dict[str, Any], task: str, items: int) -> str:
    parts = (*_label_parts(cell), cell["ratio"], task)
    folder = _folder("evaluate", "-".join(map(str, parts)))
    difficulty = _rng("items", task).uniform(0, 1, items)
    luck = _rng(*parts).normal(0, 0.06, items)
    solved = _quality(cell, task) + luck > difficulty
    rows = pd.DataFrame(
        {"item": [f"{task}/{i}" for i in range(items)], "prompt_hash": "0", "output": "made up"}
    )
    rows = rows.assign(extracted="", answer_loss=1.5 + difficulty - _quality(cell, task) - luck)
    frames = []
    results = []
    for number, name in enumerate(TASKS[task]):
        outcome = (solved & (_rng(*parts, "plus").uniform(size=items) > 0.15 * number)).astype(
            float
        )
        if name == "wildbench":
            outcome = np.round(
                np.where(solved, 0.75, 0.25) + _rng(*parts, "grade").uniform(-0.2, 0.2, items), 2
            )
        frames.append(rows.assign(benchmark=name, outcome=outcome))
        metric = "pass@1" if task in ("humaneval", "mbpp", "livecodebench") else "acc"
        metric_fields = {"metric": metric, "scale": "score", "unit": ""}
        if name == "perplexity":  # nats per token of windows of different lengths
            outcome = 3.0 + difficulty - _quality(cell, task) - luck
            units = 100.0 + np.arange(items)
            frames[-1] = rows.assign(
                benchmark=name, outcome=outcome, units=units, answer_loss=np.nan
            )
            outcome = np.exp(np.full(items, outcome @ units / units.sum()))
            metric_fields = {
                "metric": "perplexity",
                "scale": "perplexity",
                "unit": "nats per token",
            }
        stderr = float(outcome.std(ddof=1) / np.sqrt(items))
        result = {
            "benchmark": name,
            **metric_fields,
            "score": float(outcome.mean()),
            "stderr": stderr,
        }
        results.append({**result, "n": items, "expected": items})
    write_frame(root / folder / "samples.parquet", pd.concat(frames))
    write_json(root / folder / "result.json", {"schema": 1, "results": results, "protocol": {}})
    provenance = {
        "moe_lab": "0.0-synthetic",
        "host": "nowhere",
        "machine": "imagined, 2 cores",
        "python": "3.11",
    }
    code = {"commit": "0" * 40, "edited": False}
    provenance |= {"seconds": 1.5, "code": code, "versions": VERSIONS}
    write_json(root / folder / "step.json", {"files": {}, "provenance": provenance})
    return folder


VERSIONS = {"lm_eval": "0.0-synthetic", "torch": "0.0-synthetic"}


def write_frame(path: Path, frame: pd.DataFrame) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.to_parquet(path, index=False)


def _step(root: Path, folder: str, file: str, content: Any) -> str:
    """Write a file of a step; returns its folder."""
    (write_frame if isinstance(content, pd.DataFrame) else write_json)(
        root / folder / file, content
    )
    return folder


def _facts(root: Path, model: str) -> str:
    sizes = {
        "n_experts": EXPERTS,
        "top_k": 4,
        "n_group": 1,
        "topk_group": 1,
        "hidden": 128,
        "width": 64,
        "expert_parameters": synthetic_plans.EXPERT_PARAMETERS,
    }
    facts = {"model": model, "model_type": "olmoe", "parameters": synthetic_plans.PARAMETERS}
    facts |= {
        "decoder_layers": LAYERS + 1,
        "shared_width": 128,
        "layers": {str(i): sizes for i in range(LAYERS)},
    }
    return _step(root, _folder("model", model), "facts.json", facts)


def _expert_frame() -> pd.DataFrame:
    grid = np.indices((LAYERS, EXPERTS)).reshape(2, -1)
    return pd.DataFrame({"layer": grid[0], "expert": grid[1]})


def _statistics(root: Path, model: str, calibration: str) -> str:
    folder = _folder("statistics", f"{model}-{calibration}")
    frame = _expert_frame()
    frame["tokens"] = _rng("tokens", model, calibration).gamma(0.6, 800, len(frame)).astype(int)
    frame.loc[frame["expert"] == 7, "tokens"] = 0
    sums = frame.reindex(columns=EXPERT_SUMS, fill_value=0.0)
    write_frame(root / folder / "experts.parquet", sums)
    report = {"name": calibration, "valid_tokens": {calibration: 65000}, "rows": 512, "length": 128}
    return _step(
        root, folder, "calibration.json", {**report, "packing": "reap", "first_row": "made-up text"}
    )


def _family(root: Path, model: str, calibration: str) -> str:
    """Scores whose ranking depends on the calibration set through frequency (b=0), hardly through
    norms (b=1)."""
    frame = _expert_frame()
    model_random = _rng("norm", model)
    set_random = _rng("frequency", model, calibration)
    norm = model_random.lognormal(0, 0.5, len(frame)) * set_random.lognormal(0, 0.1, len(frame))
    count = set_random.lognormal(4, 1.2, len(frame)) * model_random.lognormal(0, 0.4, len(frame))
    gate = set_random.uniform(0.1, 0.4, len(frame))
    parts = [
        frame.assign(b=b, alpha=alpha, beta=beta, score=count ** (1 - b) * gate**alpha * norm**beta)
        for b in (0, 1)
        for alpha in (0, 1, 2)
        for beta in (0, 1, 2)
        if (b, alpha, beta) != (1, 0, 0)
    ]
    return _step(
        root, _folder("family", f"{model}-{calibration}"), "family.parquet", pd.concat(parts)
    )


def _damage(root: Path, model: str, calibration: str) -> str:
    family = pd.read_parquet(root / _folder("family", f"{model}-{calibration}") / "family.parquet")
    proxy = family.query("b == 0 and alpha == 1 and beta == 1")
    noise = _rng("damage", model, calibration).lognormal(0, 0.05, len(proxy))
    scores = proxy.assign(score=proxy["score"] * noise)[["layer", "expert", "score"]]
    return _step(
        root, _folder("scores", f"{model}-{calibration}-exact_damage"), "scores.parquet", scores
    )


def _contamination(root: Path, model: str, calibration: str) -> str:
    """Three of 80 items of GSM8K in code, and benchmarks whose items are too short or were not
    looked up."""
    found_items = 3 if calibration == "pocket_code" else 0
    gsm8k = {"comparable": 75, "found": found_items}
    counts = {"gsm8k": gsm8k, "rte": {"comparable": 80, "found": 0}}
    counts["winogrande"] = {"comparable": 0, "found": 0}
    return _step(
        root, _folder("contamination", f"{calibration}-{model}"), "contamination.json", counts
    )


FIGURES = {"families": _family, "damages": _damage, "contaminations": _contamination}
"""Field of a record -> function that makes its step for a model and a calibration set."""


def _plan(root: Path, axes: dict[str, Any]) -> str:
    kind = (
        "search" if axes["allocation"].startswith(synthetic_plans.SEARCHED_ALLOCATION) else "plan"
    )
    folder = _folder_of(kind, axes)
    write_json(root / folder / "plan.json", synthetic_plans.plan(axes))
    if kind == "search":
        write_json(root / folder / "search.json", synthetic_plans.search(axes))
        provenance = {
            "seconds": 12.5,
            "peak_memory_bytes": 50 * 2**20,
            "peak_gpu_memory_bytes": 30 * 2**20,
        }
        settings = {"text": {"rows": 64}}
        write_json(
            root / folder / "step.json",
            {"files": {}, "settings": settings, "provenance": provenance},
        )
    return folder


def _cell(root: Path, axes: dict[str, Any], tasks: Sequence[str], items: int) -> dict[str, Any]:
    is_pruned, reads_text, has_recovery = (
        axes[axis] != "none" for axis in ("criterion", "calibration", "recovery")
    )
    axes = {**axes, "granularity": synthetic_plans.granularity(axes["criterion"])}
    label = f"{axes['model']}-{axes['calibration']}-{axes['criterion']}"
    profile = pd.DataFrame(synthetic_plans.profile(axes))
    return {
        "cell": axes,
        "model": _facts(root, axes["model"]),
        "finetune": None,
        "export": None,
        "errors": {},
        "plan": _plan(root, axes) if is_pruned else None,
        "scores": _folder("scores", label) if is_pruned else None,
        "statistics": _statistics(root, axes["model"], axes["calibration"]) if reads_text else None,
        "cost": _step(root, _folder_of("cost", axes), "cost.json", synthetic_plans.cost(axes)),
        "profile": None
        if has_recovery
        else _step(root, _folder_of("profile", axes), "profile.parquet", profile),
        "evaluate": {task: _evaluate(root, axes, task, items) for task in tasks},
    }


def write_store(
    root: Path,
    *,
    name: str = "made_up",
    models: Sequence[str] = ("pocket_olmoe",),
    criteria: Sequence[str] = CRITERIA,
    calibrations: Sequence[str] = ("pocket_code",),
    ratios: Sequence[float] = (0.5,),
    allocations: Sequence[str] = ("uniform",),
    recoveries: Sequence[str] = ("none",),
    tasks: Sequence[str] = ALL_TASKS,
    random_seeds: Sequence[int] = (DEFAULT_SEED,),
    items: int = 20,
    overlap: bool = False,
) -> Path:
    """Write a store with one study; returns its root. `overlap`: whether the study has steps for
    figures of overlaps."""
    cells = []
    for model in models:
        unpruned = {"model": model, "criterion": "none", "calibration": "none", "ratio": 0.0}
        unpruned |= {"allocation": "none", "recovery": "none", "gate": "none", "seed": 0}
        cells.append(_cell(root, unpruned, tasks, items))
        for ratio, criterion, allocation, recovery in product(
            ratios, criteria, allocations, recoveries
        ):
            is_searched = allocation.startswith(synthetic_plans.SEARCHED_ALLOCATION)
            if is_searched and criterion in synthetic_plans.CHANNEL_CRITERIA:
                continue
            reads_text = is_searched or criterion not in DATA_FREE_CRITERIA
            seeds = random_seeds if criterion == "random" else (DEFAULT_SEED,)
            for calibration, seed in product(calibrations if reads_text else ("none",), seeds):
                axes = {
                    "model": model,
                    "criterion": criterion,
                    "calibration": calibration,
                    "ratio": ratio,
                    "allocation": allocation,
                    "recovery": recovery,
                    "gate": "model",
                    "seed": seed,
                }
                cells.append(_cell(root, axes, tasks, items))
    config = {"study": name, "calibration": {"tokens": 65536, "length": 128}}
    document = {
        "schema": 1,
        "study": name,
        "created": 946684800.0,
        "moe_lab": "0.0-synthetic",
        "replaces": [],
    }
    document |= {"config": config, "cells": cells}
    pairs = list(product(models, calibrations)) if overlap else []
    for figure, make in FIGURES.items():
        document[figure] = [
            {
                "calibration": calibration,
                "model": model,
                "gate": "model",
                "seed": DEFAULT_SEED,
                "step": make(root, model, calibration),
            }
            for model, calibration in pairs
        ]
    write_json(record_path(root, name), document)
    return root


def record_path(root: Path, study: str = "made_up") -> Path:
    """The record of a study that `write_store` wrote."""
    return root / "runs" / study / "000001-0123abcd" / "record.json"
