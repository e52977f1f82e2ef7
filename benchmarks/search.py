"""Cost of searching an allocation: `python -m benchmarks.search`.

1. Exact: children of the paper's mutation (P = 32, m = 4, at most 3 transfers of at most 4 experts) on a random model
   of 16 layers and 64 experts. Layers run per child, and CPU seconds per child, against the plain way: the masked model
   on the whole search set with logits at all positions. Bar: 0.75 of the layers.
2. Halving: on the shipped model, small searches with proposals=8 against exact ones, ten seeds. Bars: 0.5 of the cost,
   and a best fitness not worse in 8 seeds. Each row's fitness of all schedules is computed once beforehand, so that
   searches only look it up. The cost of a search is counted in layers run, by the code that decides which layers run.

Exit code 1 when a bar fails.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.measure import cpu_seconds, misses, parser
from moe_lab import criteria
from moe_lab.calibration.answers import AnswerBatch, answer_batches
from moe_lab.calibration.batches import batches
from moe_lab.config import CalibrationConfig, ModelConfig
from moe_lab.models.load import load_model
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.search.candidates import Candidates, Plans, quartered
from moe_lab.search.evolution import evolve
from moe_lab.search.fitness import log_probabilities, row_sums
from moe_lab.search.prefix import Relatives, Schedule
from moe_lab.search.schedules import Problem, space_of
from moe_lab.search.settings import EvolutionSettings, FitnessSettings
from moe_lab.statistics.forward import ForwardTap
from moe_lab.statistics.observe import gather

BAR_CHILD, BAR_HALVING, BAR_SEEDS = 0.75, 0.5, 8
SEEDS = 10
PARTS = ["exact", "halving"]


def main() -> int:
    """Measure, print, compare with the bars."""
    arguments = _arguments()
    torch.set_num_threads(1)
    failed = False
    if "exact" in arguments.parts:
        failed |= _exact(arguments)
    if "halving" in arguments.parts:
        failed |= _halving(arguments)
    return int(failed)


def _arguments() -> argparse.Namespace:
    options = parser("search", __doc__)
    options.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    options.add_argument("--generations", type=int, default=8, help="generations of the exact part")
    options.add_argument("--rows", type=int, default=64, help="rows of the search set on the shipped model")
    options.add_argument("--ratio", type=float, default=0.5, help="experts to remove from the shipped model")
    options.add_argument("--searched", type=int, nargs="+", default=[50, 20], help="generations of the exact searches")
    return options.parse_args()


def _exact(arguments: argparse.Namespace) -> bool:
    model = _model()
    rows = _random_rows()
    scores = {layer: torch.rand(64, generator=torch.Generator().manual_seed(layer)).tolist() for layer in range(16)}
    plans = Plans(model, scores)
    candidates = Candidates(model, plans, rows, FitnessSettings(), seed=0)
    spent: list[tuple[int, float, float]] = []
    generations: list[Sequence[Schedule]] = []

    def evaluate(schedules: Sequence[Schedule], count: int) -> list[float | None]:
        start, before = time.process_time(), candidates.cost.forwards
        values = candidates.evaluate(schedules, count)
        generations.append(schedules)
        spent.append((len(schedules), candidates.cost.forwards - before, time.process_time() - start))
        return values

    problem = Problem((64,) * 16, (8,) * 16, (1,) * 16, 16 * 32)
    evolve(problem, EvolutionSettings(generations=arguments.generations), evaluate)
    children, forwards, seconds = map(sum, zip(*spent[1:], strict=True))
    plain = statistics.median(_plain_seconds(candidates, rows) for _ in range(3))
    print(f"exact: {children} children of {len(spent) - 1} generations, 16 layers of 64 experts, 50 % removed")
    print(f"  CPU seconds of a child / the plain way: {seconds / children / plain:.2f}")
    forgetful = sum(_layers_run(Relatives(1, 0), some) for some in generations[1:]) / 16 / children
    print(f"  layers run for a child / all layers, if no elite's states fit memory_budget: {forgetful:.2f}")
    return misses("layers run for a child / all layers", forwards / children, "<=", BAR_CHILD)


def _model() -> Any:
    """A narrow random model of OLMoE's shape; router and expert weights have a large spread, so that experts differ."""
    config = AutoConfig.for_model(
        "olmoe",
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=16,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=64,
        num_experts_per_tok=8,
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager")
    for name, weight in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            torch.nn.init.normal_(weight, std=128**-0.5)
        elif "experts" in name:
            torch.nn.init.normal_(weight, std=0.1)
    return model.eval().requires_grad_(False)


def _random_rows() -> list[AnswerBatch]:
    """Four batches of four rows, the second half of each an answer."""
    ids = torch.randint(2, 1024, (16, 64), generator=torch.Generator().manual_seed(0))
    answers = torch.arange(64).expand(16, 64) >= 32
    parts = (part.split(4) for part in (ids, torch.ones_like(answers), answers))
    return [(one, valid, marks) for one, valid, marks in zip(*parts, strict=True)]


def _plain_seconds(candidates: Candidates, rows: Sequence[AnswerBatch]) -> float:
    """CPU seconds of one candidate without reuse. In both ways the full model's log-probabilities are precomputed."""

    def evaluate() -> None:
        plan = candidates.plans.plan((32,) * 16)
        with mask(candidates.model, plan), torch.inference_mode():
            for number, (ids, _, _) in enumerate(rows):
                logits = candidates.model(input_ids=ids, use_cache=False).logits
                at = candidates.batches[number].at
                chosen = logits[:, : at.where.shape[1]][at.where]
                row_sums("esap", log_probabilities(chosen), chosen, at)

    return cpu_seconds(evaluate)


class Lookup(Candidates):
    """Candidates whose row sums were computed before; layers that would be run are counted as ever."""

    def __init__(self, *given: Any, sums: Sequence[Mapping[Schedule, list[float]]], **named: Any) -> None:
        super().__init__(*given, **named)
        self.sums = sums

    def row_sums(self, number: int, plans: Mapping[Schedule, Plan]) -> dict[Schedule, list[float]]:
        """Schedule -> its sum for each row of one batch."""
        share = len(self.batches[number].ids) / self.rows
        self.cost.forwards += _layers_run(self.relatives, plans, number) / len(self.decoder.layers) * share
        return {schedule: self.sums[number][schedule] for schedule in plans}


def _halving(arguments: argparse.Namespace) -> bool:
    plans, rows, model = _shipped(arguments.rows)
    rows = quartered(rows, 32)
    count = len(plans.layers)
    budget = sum(int(layer.n_experts * arguments.ratio) for layer in plans.layers)
    problem = Problem((32,) * count, (4,) * count, (1,) * count, budget)
    space = space_of(problem, EvolutionSettings().granularity)
    schedules = [space.nth(number) for number in range(space.size)]
    candidates = Candidates(model, plans, rows, FitnessSettings(memory_budget=2**27), seed=0)
    table = {schedule: plans.plan(schedule) for schedule in schedules}
    sums = [candidates.row_sums(number, table) for number in range(len(candidates.batches))]

    def played(settings: EvolutionSettings) -> tuple[float, float]:
        """Best fitness and full forwards of one search."""
        lookup = Lookup(model, plans, rows, FitnessSettings(), seed=0, elites=settings.elites, sums=sums)
        return evolve(problem, settings, lookup.evaluate).fitness, lookup.cost.forwards

    print(f"halving: pocket olmoe, {budget} of {32 * count} experts removed, {arguments.rows} rows")
    failed = False
    for generations in arguments.searched:
        failed |= _compare(played, generations)
    return failed


def _compare(played: Callable[[EvolutionSettings], tuple[float, float]], generations: int) -> bool:
    """Compare ten seeds of the exact search, of a small one with halving, and of small ones without it."""
    settings = EvolutionSettings(generations=generations)
    fewer = replace(settings, population=12, generations=generations // 3)
    searches = {
        "exact": settings,
        "halving": replace(fewer, proposals=8),
        "as small, without halving": fewer,
        "P=20, without halving": replace(fewer, population=20),
    }
    print(f"  exact: P=32, {generations} generations; small: P=12, {fewer.generations} generations, proposals=8")
    found = {name: [played(replace(each, seed=seed)) for seed in range(SEEDS)] for name, each in searches.items()}
    shares = {}
    for name, of_seeds in found.items():
        best = sorted(fitness for fitness, _ in of_seeds)
        cost = statistics.mean(cost for _, cost in of_seeds)
        pairs = zip(of_seeds, found["exact"], strict=True)
        shares[name] = statistics.mean(cost / whole for (_, cost), (_, whole) in pairs)
        print(
            f"  {name}: {cost:.0f} full forwards, {shares[name]:.2f} of the exact search, best fitness "
            f"{best[0]:.6f} to {best[-1]:.6f}, not worse in {_not_worse(of_seeds, found['exact'])} of {SEEDS} seeds"
        )
    failed = misses("cost of the search with halving / the exact one", shares["halving"], "<=", BAR_HALVING)
    good = _not_worse(found["halving"], found["exact"])
    return misses(f"seeds out of {SEEDS} in which its best is not worse", good, ">=", BAR_SEEDS) or failed


def _not_worse(some: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> int:
    """Number of seeds in which the best fitness of `some` is at least that of `others`."""
    return sum(found >= best for (found, _), (best, _) in zip(some, others, strict=True))


def _shipped(rows: int) -> tuple[Plans, list[AnswerBatch], Any]:
    """The shipped model, its experts ranked by REAP on the math calibration set, and the math search set."""
    model, tokenizer = load_model(ModelConfig(name="pocket_olmoe", path="pocket:olmoe", threads=1))
    text = CalibrationConfig(
        "math", "pocket:calibration/math.jsonl", packing="chunk", length=512, tokens=32768, gap="eos", seed=42
    )
    found = gather(model, ForwardTap, batches(text, tokenizer).rows, fingerprint={})
    experts = {layer: 32 for layer in found.layers}
    scores = criteria.score("reap", found.layers, experts=experts, gate="model")
    plans = Plans(model, {layer: list(row) for layer, row in scores.items()})
    return plans, _tasks(tokenizer, rows), model


def _tasks(tokenizer: Any, rows: int) -> list[AnswerBatch]:
    """The first rows of the math search set."""
    text = CalibrationConfig(
        "search",
        "pocket:search/math.jsonl",
        packing="none",
        length=112,
        tokens=112 * rows,
        batch_size=32,
        seed=42,
    )
    return answer_batches(text, tokenizer)


def _layers_run(relatives: Relatives, schedules: Iterable[Schedule], batch: int = 0) -> int:
    """Number of layers that `Candidates` runs for these schedules on one batch, when all layers are MoE layers."""
    run = 0
    for schedule, states in relatives.walk(batch, schedules):
        start = max((k for k in range(len(schedule)) if schedule[:k] in states), default=0)
        run += len(schedule) - start
        states.update({schedule[:k]: torch.empty(1) for k in range(start, len(schedule))})
    return run


if __name__ == "__main__":
    sys.exit(main())
