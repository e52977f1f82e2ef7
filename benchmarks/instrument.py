"""Check that the shipped models distinguish criteria from random plans:
`python -m benchmarks.instrument`.

Experts are scored on the calibration set of a skill (code, mathematics), a quarter of the experts
is removed from every layer, and the loss on right answers to the benchmarks of the same skill is
compared with the mean loss of random plans. For every model and skill, the loss must be below this
mean

1. for plans by exact ablation, the rise of the loss without one expert;
2. for plans by every criterion that reads the text.

No settings were chosen by these results. Exit code 1 when a plan fails; docs/analysis.md explains
the known failures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import parser
from moe_lab import criteria
from moe_lab.allocation.problem import limits
from moe_lab.allocation.shapes import same_share
from moe_lab.calibration.batches import batches
from moe_lab.config import BenchmarkConfig, CalibrationConfig, ModelConfig
from moe_lab.evaluation.answers import collect_answers
from moe_lab.evaluation.engines.hf import LoadedModel
from moe_lab.evaluation.items import Item, Text
from moe_lab.models.discover import moe_layers
from moe_lab.models.load import load_model
from moe_lab.paths import resolve
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.selection import make_plan
from moe_lab.search.ablation import loss_rises
from moe_lab.statistics.damage import DamageHook
from moe_lab.statistics.forward import ForwardHook
from moe_lab.statistics.observe import collect_statistics

MODELS = ("olmoe", "qwen3_moe", "deepseek_v2", "ernie4_5_moe")
SKILLS = {"math": ("gsm8k", "math500"), "code": ("humaneval", "mbpp")}
"""Calibration set -> the benchmarks of its skill."""
ABLATION = "ablation"
Scores = Mapping[int, Sequence[float]]
"""Layer -> scores of its experts; the lowest are removed."""


def main() -> int:
    """Measure, print, compare; returns 1 when a plan fails."""
    arguments = _arguments()
    torch.set_num_threads(1)
    failures: list[str] = []
    for name in arguments.models:
        model, tokenizer = load_model(ModelConfig(name=name, path=f"pocket:{name}", threads=1))
        engine = LoadedModel(model, tokenizer)
        random = [random_scores(model, seed) for seed in range(arguments.seeds)]
        for skill in SKILLS:
            failures += _failures(engine, name, skill, random, arguments)
    print(f"{len(failures)} failed{': ' if failures else ''}{'; '.join(failures)}")
    return int(bool(failures))


def _arguments() -> argparse.Namespace:
    options = parser("instrument", __doc__)
    options.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    options.add_argument(
        "--ratio", type=float, default=0.25, help="experts removed from every layer"
    )
    options.add_argument("--seeds", type=int, default=5, help="random plans")
    options.add_argument(
        "--items", type=int, default=None, help="items of each benchmark; all by default"
    )
    options.add_argument("--tokens", type=int, default=32768, help="calibration tokens")
    options.add_argument(
        "--ablation-tokens", type=int, default=8192, help="calibration tokens of the exact ablation"
    )
    return options.parse_args()


def _failures(
    engine: LoadedModel,
    name: str,
    skill: str,
    random: Sequence[Scores],
    arguments: argparse.Namespace,
) -> list[str]:
    """Print the losses of one model on one skill; returns the criteria whose loss is not below the
    mean of the random plans. random: the scores of these plans."""
    items = [item for benchmark in SKILLS[skill] for item in items_of(benchmark)[: arguments.items]]
    unpruned = mean_loss(engine, items)
    random_losses = [pruned_loss(engine, scores, items, arguments.ratio) for scores in random]
    mean = statistics.mean(random_losses)
    print(
        f"{name}, {skill}: {len(items)} items; unpruned {unpruned:.3f} bits per byte, "
        f"{len(random_losses)} random plans {mean:.3f} "
        f"({min(random_losses):.3f} to {max(random_losses):.3f})",
        flush=True,
    )
    failures = []
    for criterion, scores in rankings(engine, skill, arguments.tokens, arguments.ablation_tokens):
        loss = pruned_loss(engine, scores, items, arguments.ratio)
        better = sum(random_loss < loss for random_loss in random_losses)
        verdict = "ok" if loss < mean else "FAILED"
        print(
            f"  {criterion:13} {loss:.3f}, {better} random plans are better: {verdict}", flush=True
        )
        if loss >= mean:
            failures.append(f"{name} {skill} {criterion}")
    return failures


def items_of(benchmark: str) -> list[tuple[str, str]]:
    """Pairs (prompt, right answer) of a shipped benchmark, as its harness builds them."""
    lines = (
        Path(resolve(f"pocket:benchmarks/{benchmark}.jsonl"))
        .read_text(encoding="utf-8")
        .splitlines()
    )
    rows = [json.loads(line) for line in lines]
    return [(row["prompt"], row.get("canonical_solution") or f" {row['target']}") for row in rows]


def mean_loss(engine: LoadedModel, items: Sequence[tuple[str, str]]) -> float:
    """Mean loss on the right answers in bits per byte. items: pairs (prompt, right answer)."""
    requests = [
        Item(str(number), (Text(prompt, 1, reference=answer),))
        for number, (prompt, answer) in enumerate(items)
    ]
    config = BenchmarkConfig("losses", "lm_eval", "none")
    (answers,) = collect_answers(engine, [(config, requests)])
    losses = [answer.reply.loss for answer in answers]
    return statistics.mean(loss for loss in losses if loss is not None)


def pruned_loss(
    engine: LoadedModel, scores: Scores, items: Sequence[tuple[str, str]], ratio: float
) -> float:
    """`mean_loss` with the share `ratio` of experts with the lowest scores masked in every
    layer."""
    with mask(engine.model, _plan(engine.model, scores, ratio)):
        return mean_loss(engine, items)


def _plan(model: Any, scores: Scores, ratio: float) -> Plan:
    layers = {layer.index: vars(layer) for layer in moe_layers(model)}
    return make_plan(scores, same_share(limits(layers), ratio), layers, provenance={})


def random_scores(model: Any, seed: int) -> Scores:
    """Scores of the criterion `random`."""
    return _score("random", {}, model, seed)


def _score(
    name: str, inputs: Mapping[int, Mapping[str, Any]], model: Any, seed: int = 42
) -> Scores:
    """Scores of a criterion; inputs: layer -> the sums that the criterion reads."""
    layers = {layer.index: vars(layer) for layer in moe_layers(model)}
    scores = criteria.score(name, inputs, layers, gate="model", seed=seed)
    return {layer: [float(score) for score in of_layer] for layer, of_layer in scores.items()}


def rankings(
    engine: LoadedModel, skill: str, tokens: int, ablation_tokens: int
) -> Iterable[tuple[str, Scores]]:
    """Yield (name, scores): exact ablation, then every criterion of whole experts that reads the
    calibration set of the skill."""
    model = engine.model
    tokenizer = engine.tokenizer
    rises = loss_rises(model, "ablation", _rows(skill, ablation_tokens, tokenizer)).layers
    yield ABLATION, {layer: sums["ablation"].tolist() for layer, sums in rises.items()}
    rows = _rows(skill, tokens, tokenizer)
    passes: dict[str, Mapping[int, Mapping[str, Any]]] = {
        "statistics": collect_statistics(model, ForwardHook, rows).layers,
        "damage": collect_statistics(model, DamageHook, rows).layers,
    }
    for need, sums in passes.items():
        for name, criterion in criteria.CRITERIA.items():
            is_read = criterion.needs == (need,)
            if criterion.granularity == "expert" and is_read and name != "s_family":
                yield name, _score(name, sums, model)


def _rows(skill: str, tokens: int, tokenizer: Any) -> Any:
    """Batches of the shipped calibration set of a skill."""
    path = f"pocket:calibration/{skill}.jsonl"
    text = CalibrationConfig(
        skill,
        path,
        packing="chunk",
        length=512,
        tokens=tokens,
        gap="eos",
        batch_tokens=4096,
        seed=42,
    )
    return batches(text, tokenizer).batches


if __name__ == "__main__":
    sys.exit(main())
