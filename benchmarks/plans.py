"""Time to evaluate many plans: `python -m benchmarks.plans` (after `make vllm`).

Random plans of half of the experts are evaluated in three ways, plan after plan:

masks         one engine of vLLM, a plan is a mask on its routers (backend=vllm)
exports       an export of each plan, and an engine of vLLM that is started for it
transformers  the loaded model, a plan is a mask (backend=hf)

For a plan, a greedy text and a log-likelihood are computed for each prompt of GSM8K. For each way
are printed the seconds of a start, the median seconds of a plan, the seconds of all plans together,
and their ratio to masks. The texts of the three ways must be equal; exit code 1 if they are not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.measure import describe, parser, timed
from moe_lab.config import BackendConfig, BenchmarkConfig, ModelConfig
from moe_lab.evaluation.answers import collect_answers
from moe_lab.evaluation.engines import Engine
from moe_lab.evaluation.engines.hf import LoadedModel
from moe_lab.evaluation.engines.vllm import VllmModel
from moe_lab.evaluation.items import Item, Pair, Text
from moe_lab.models.discover import moe_layers
from moe_lab.models.files import local_folder
from moe_lab.models.load import load_model
from moe_lab.paths import resolve
from moe_lab.pruning.export import export
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan

BACKEND = BackendConfig("vllm")


def main() -> int:
    """Measure, print, compare the texts; returns 1 when they differ."""
    arguments = _arguments()
    model = ModelConfig(
        name="model", path=arguments.model, threads=1, device="cpu", dtype="float32"
    )
    folder = local_folder(model)
    lines = Path(resolve("pocket:benchmarks/gsm8k.jsonl")).read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines[: arguments.prompts]]
    (network, tokenizer), loading, _ = timed(lambda: load_model(model))
    served, starting, _ = timed(lambda: VllmModel(folder, BACKEND, model))
    loaded = LoadedModel(network, tokenizer)
    _texts(served, prompts, arguments.tokens)  # the first texts of an engine are slower

    def by_mask(plan: Plan) -> list[str]:
        served.set_plan(plan)
        return _texts(served, prompts, arguments.tokens)

    def by_export(plan: Plan) -> list[str]:
        with tempfile.TemporaryDirectory() as scratch:
            out = export(folder, plan, Path(scratch, "checkpoint"))
            exported = VllmModel(out, BACKEND, model)
            texts = _texts(exported, prompts, arguments.tokens)
            exported.close()
        return texts

    def by_transformers(plan: Plan) -> list[str]:
        with mask(network, plan):
            return _texts(loaded, prompts, arguments.tokens)

    ways = {"masks": by_mask, "exports": by_export, "transformers": by_transformers}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    equal = True
    for plan in _plans(network, arguments.plans):
        texts_of_ways = []
        for way, evaluate in ways.items():
            texts, wall, _ = timed(partial(evaluate, plan))
            texts_of_ways.append(texts)
            seconds[way].append(wall)
        equal &= texts_of_ways[0] == texts_of_ways[1] == texts_of_ways[2]
    served.close()
    _print_seconds(seconds, {"masks": starting, "exports": 0.0, "transformers": loading})
    print(f"{arguments.plans} plans, {len(prompts)} prompts, {arguments.tokens} new tokens")
    verdict = "equal" if equal else "NOT equal"
    print(
        f"{describe('cpu')}, vLLM {served.metadata['vllm']}; texts of all three ways are {verdict}"
    )
    return int(not equal)


def _arguments() -> argparse.Namespace:
    options = parser("plans", __doc__)
    options.add_argument(
        "--model", default="pocket:olmoe", help="a model whose head size vLLM's CPU build has"
    )
    options.add_argument("--plans", type=int, default=20)
    options.add_argument("--prompts", type=int, default=64)
    options.add_argument("--tokens", type=int, default=48, help="new tokens of a text, at most")
    return options.parse_args()


def _plans(network: torch.nn.Module, count: int) -> Iterator[Plan]:
    """Yield random plans that retain half of the experts of each layer."""
    generator = torch.Generator().manual_seed(0)
    counts = {layer.index: layer.n_experts for layer in moe_layers(network)}
    for _ in range(count):
        retained = {}
        for layer, experts in counts.items():
            order = torch.randperm(experts, generator=generator).tolist()
            retained[layer] = tuple(sorted(order[: experts // 2]))
        yield Plan.of_experts(retained, counts)


def _texts(engine: Engine, prompts: list[str], tokens: int) -> list[str]:
    """The texts that continue the prompts, of at most `tokens` tokens. The log-likelihood of each
    prompt's second half is computed as well, for the timing."""
    items = []
    for number, prompt in enumerate(prompts):
        half = len(prompt) // 2
        items.append(Item(str(number), (Text(prompt, tokens), Pair(prompt[:half], prompt[half:]))))
    benchmark = BenchmarkConfig("plans", "lm_eval", "none")
    (answers,) = collect_answers(engine, [(benchmark, items)])
    return [answer.reply.text or "" for answer in answers]


def _print_seconds(seconds: dict[str, list[float]], starts: dict[str, float]) -> None:
    """Print a line per way. seconds: way -> seconds of each plan; starts: way -> seconds of its
    start."""
    together = {way: starts[way] + sum(times) for way, times in seconds.items()}
    for way, times in seconds.items():
        print(
            f"{way:12} start {starts[way]:6.2f} s, a plan {statistics.median(times):6.2f} s, "
            f"together {together[way]:7.1f} s, {together[way] / together['masks']:5.1f} times masks"
        )


if __name__ == "__main__":
    sys.exit(main())
