"""Check that the shipped models distinguish criteria from random plans:
`python -m benchmarks.instrument`.

Experts are ranked on the calibration set of a skill (code, mathematics), a quarter of them is
removed from every layer, and the loss on right answers to the benchmarks of that skill is compared
with that of random plans. Two conditions must hold for every model and skill:

1. The loss with the ranking by exact ablation (rise of the loss without one expert) is below the
   mean of random plans.
2. So is the loss with every criterion that reads the text.

No settings were chosen by these results. Exit code 1 when one fails; docs/analysis.md explains the
known failures.
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
from moe_lab.statistics.observe import gather

MODELS = ("olmoe", "qwen3_moe", "deepseek_v2", "ernie4_5_moe")
SKILLS = {"math": ("gsm8k", "math500"), "code": ("humaneval", "mbpp")}
"""Calibration set -> the benchmarks of its skill."""
ABLATION = "ablation"
Scores = Mapping[int, Sequence[float]]


def main() -> int:
    """Measure, print, compare."""
    arguments = _arguments()
    torch.set_num_threads(1)
    failures: list[str] = []
    for name in arguments.models:
        model, tokenizer = load_model(ModelConfig(name=name, path=f"pocket:{name}", threads=1))
        subject = LoadedModel(model, tokenizer)
        chance = [random_scores(model, seed) for seed in range(arguments.seeds)]
        for skill in SKILLS:
            failures += _skill(subject, name, skill, chance, arguments)
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


def _skill(
    subject: LoadedModel,
    name: str,
    skill: str,
    chance: Sequence[Scores],
    arguments: argparse.Namespace,
) -> list[str]:
    """Print the losses of one model on one skill; returns the criteria that are not below the
    random plans."""
    items = [item for benchmark in SKILLS[skill] for item in items_of(benchmark)[: arguments.items]]
    whole = mean_loss(subject, items)
    by_chance = [pruned_loss(subject, scores, items, arguments.ratio) for scores in chance]
    mean = statistics.mean(by_chance)
    print(
        f"{name}, {skill}: {len(items)} items; unpruned {whole:.3f} bits per byte, "
        f"{len(by_chance)} random plans {mean:.3f} ({min(by_chance):.3f} to {max(by_chance):.3f})",
        flush=True,
    )
    failures = []
    for criterion, scores in rankings(subject, skill, arguments.tokens, arguments.ablation_tokens):
        loss = pruned_loss(subject, scores, items, arguments.ratio)
        better = sum(other < loss for other in by_chance)
        verdict = "ok" if loss < mean else "FAILED"
        print(
            f"  {criterion:13} {loss:.3f}, {better} random plans are better: {verdict}", flush=True
        )
        if loss >= mean:
            failures.append(f"{name} {skill} {criterion}")
    return failures


def items_of(benchmark: str) -> list[tuple[str, str]]:
    """Prompts and right answers of a shipped benchmark, as its harness builds them."""
    lines = (
        Path(resolve(f"pocket:benchmarks/{benchmark}.jsonl"))
        .read_text(encoding="utf-8")
        .splitlines()
    )
    rows = [json.loads(line) for line in lines]
    return [(row["prompt"], row.get("canonical_solution") or f" {row['target']}") for row in rows]


def mean_loss(subject: LoadedModel, items: Sequence[tuple[str, str]]) -> float:
    """Mean loss on the right answers in bits per byte."""
    asked = [
        Item(str(number), (Text(prompt, 1, reference=answer),))
        for number, (prompt, answer) in enumerate(items)
    ]
    losses = [
        answer.reply.loss
        for answer in collect_answers(subject, asked, BenchmarkConfig("losses", "lm_eval", "none"))
    ]
    return statistics.mean(loss for loss in losses if loss is not None)


def pruned_loss(
    subject: LoadedModel, scores: Scores, items: Sequence[tuple[str, str]], ratio: float
) -> float:
    """The same when the share `ratio` of experts with the lowest scores is masked in every
    layer."""
    with mask(subject.model, _plan(subject.model, scores, ratio)):
        return mean_loss(subject, items)


def _plan(model: Any, scores: Scores, ratio: float) -> Plan:
    layers = {layer.index: vars(layer) for layer in moe_layers(model)}
    return make_plan(scores, same_share(limits(layers), ratio), layers, provenance={})


def random_scores(model: Any, seed: int) -> Scores:
    """Scores of the criterion `random`."""
    return _score("random", {}, model, seed)


def _score(
    name: str, inputs: Mapping[int, Mapping[str, Any]], model: Any, seed: int = 42
) -> Scores:
    experts = {layer.index: layer.n_experts for layer in moe_layers(model)}
    found = criteria.score(name, inputs, experts=experts, gate="model", seed=seed)
    return {layer: [float(value) for value in values] for layer, values in found.items()}


def rankings(
    subject: LoadedModel, skill: str, tokens: int, ablation_tokens: int
) -> Iterable[tuple[str, Scores]]:
    """Yield names and scores: exact ablation, then every criterion of whole experts that reads the
    calibration set."""
    model = subject.model
    tokenizer = subject.tokenizer
    few = _rows(skill, ablation_tokens, tokenizer)
    silent = loss_rises(model, "ablation", few).layers
    yield ABLATION, {layer: sums["ablation"].tolist() for layer, sums in silent.items()}
    rows = _rows(skill, tokens, tokenizer)
    passes: dict[str, Mapping[int, Mapping[str, Any]]] = {
        "statistics": gather(model, ForwardHook, rows).layers,
        "damage": gather(model, DamageHook, rows).layers,
    }
    for need, sums in passes.items():
        for name, about in criteria.CRITERIA.items():
            if about.granularity == "expert" and about.needs == (need,) and name != "s_family":
                yield name, _score(name, sums, model)


def _rows(skill: str, tokens: int, tokenizer: Any) -> Any:
    path = f"pocket:calibration/{skill}.jsonl"
    text = CalibrationConfig(
        skill, path, packing="chunk", length=512, tokens=tokens, gap="eos", batch_size=8, seed=42
    )
    return batches(text, tokenizer).rows


if __name__ == "__main__":
    sys.exit(main())
