"""Cost of searching an allocation: `python -m benchmarks.search`.

An evolutionary search with the paper's settings (P = 32, m = 4, at most 3 transfers of at most 4
experts) runs on a random model of 16 layers and 64 experts. The number of layers that are run for a
candidate, and the CPU seconds of a candidate, are compared with an evaluation without reuse: the
masked model runs on the whole search set, with logits at all positions. Bar: 0.75 of the layers,
counted by the search itself.

Exit code 1 when the bar fails.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.measure import cpu_seconds, misses, parser
from moe_lab.allocation.problem import Limits
from moe_lab.calibration.batches import AnswerBatch
from moe_lab.models.discover import moe_layers
from moe_lab.pruning.mask import mask
from moe_lab.search.candidates import Candidates, Plans, PrefixStates
from moe_lab.search.evolution import Schedule, SearchSettings, evolve, feasible_space
from moe_lab.search.fitness import fitness_row_sums, log_probabilities

BAR_CHILD = 0.75


def main() -> int:
    """Measure, print, compare with the bar; returns 1 when it fails."""
    options = parser("search", __doc__)
    options.add_argument("--generations", type=int, default=8, help="generations of the search")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    model = _model()
    rows = _random_rows()
    scores = {
        layer: torch.rand(64, generator=torch.Generator().manual_seed(layer)).tolist()
        for layer in range(16)
    }
    plans = Plans({layer.index: vars(layer) for layer in moe_layers(model)}, scores)
    candidates = Candidates(model, plans, rows, SearchSettings(seed=0))
    generations: list[Sequence[Schedule]] = []
    forwards_of_generations: list[float] = []
    seconds_of_generations: list[float] = []

    def evaluate(schedules: Sequence[Schedule]) -> list[float]:
        start = time.process_time()
        start_forwards = candidates.forwards
        values = candidates.evaluate(schedules)
        generations.append(schedules)
        forwards_of_generations.append(candidates.forwards - start_forwards)
        seconds_of_generations.append(time.process_time() - start)
        return values

    settings = SearchSettings(generations=arguments.generations)
    layers = [Limits(64, top_k=8, n_group=1, step=1, minimum_experts=8)] * 16
    evolve(feasible_space(layers, 16 * 32, settings.granularity), settings, evaluate)
    # the first generation is random, not mutated
    children = sum(map(len, generations[1:]))
    forwards = sum(forwards_of_generations[1:]) / children
    seconds = sum(seconds_of_generations[1:]) / children
    plain = statistics.median(_plain_seconds(candidates, rows) for _ in range(3))
    print(
        f"exact: {children} children of {len(generations) - 1} generations, 16 layers of 64 "
        "experts, 50 % removed"
    )
    print(f"  CPU seconds of a child / the plain way: {seconds / plain:.2f}")
    layers_run = sum(_layers_run(PrefixStates(1, 0), schedules) for schedules in generations[1:])
    print(
        "  layers run for a child / all layers, if no elite's states fit memory_budget: "
        f"{layers_run / 16 / children:.2f}"
    )
    return int(misses("layers run for a child / all layers", forwards, "<=", BAR_CHILD))


def _model() -> Any:
    """A narrow random model of OLMoE's architecture. Weights of routers and experts have a large
    spread, so that experts differ."""
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
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, experts_implementation="eager"
    )
    for name, weight in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            torch.nn.init.normal_(weight, std=128**-0.5)
        elif "experts" in name:
            torch.nn.init.normal_(weight, std=0.1)
    return model.eval().requires_grad_(False)


def _random_rows() -> list[AnswerBatch]:
    """Four batches of four rows of random tokens; the second half of a row is the answer."""
    ids = torch.randint(2, 1024, (16, 64), generator=torch.Generator().manual_seed(0))
    answers = torch.arange(64).expand(16, 64) >= 32
    valid = torch.ones_like(answers)
    return list(zip(ids.split(4), valid.split(4), answers.split(4), strict=True))


def _plain_seconds(candidates: Candidates, rows: Sequence[AnswerBatch]) -> float:
    """CPU seconds of one candidate without reuse. As in the search, the full model's
    log-probabilities are computed before."""

    def evaluate() -> None:
        plan = candidates.plans.plan((32,) * 16)
        with mask(candidates.model, plan), torch.inference_mode():
            for number, (ids, _, _) in enumerate(rows):
                logits = candidates.model(input_ids=ids, use_cache=False).logits
                positions = candidates.batches[number].positions
                evaluated = logits[:, : positions.is_evaluated.shape[1]][positions.is_evaluated]
                fitness_row_sums("esap", log_probabilities(evaluated), evaluated, positions)

    return cpu_seconds(evaluate)


def _layers_run(prefix_states: PrefixStates, schedules: Iterable[Schedule], batch: int = 0) -> int:
    """Number of layers that `Candidates` runs for these schedules on one batch, if all layers are
    MoE layers."""
    layers_run = 0
    for schedule, states in prefix_states.iterate(batch, schedules):
        start = max((k for k in range(len(schedule)) if schedule[:k] in states), default=0)
        layers_run += len(schedule) - start
        states.update({schedule[:k]: torch.empty(1) for k in range(start, len(schedule))})
    return layers_run


if __name__ == "__main__":
    sys.exit(main())
