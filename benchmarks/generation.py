"""Speed of the CPU experts of loaded models in fp32: `python -m benchmarks.generation`.

Compares the loaded model, whose experts run by moe_lab/models/experts.py, with the same model with
transformers' eager experts: for the work of an evaluation (generation, and scoring of answers in
batches of short rows), and for one layer with an increasing number of tokens. A ratio is the median
over rounds, in which all variants run one after the other in this process; results are also
compared bit by bit. Bar for generation and scoring: below 1. Seconds are CPU seconds of one thread,
which other work on the machine disturbs little. Exit code 1 when a bar fails or bits differ."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.measure import parser, ratios, rounds
from moe_lab.config import ModelConfig
from moe_lab.models import experts
from moe_lab.models.discover import MoELayer, moe_layers
from moe_lab.models.load import load_model

Work = Callable[[], torch.Tensor]
"""Function that is timed, and whose result is compared."""
EAGER = "eager"
BAR = 1.0


def main() -> int:
    """Measure, print, compare with the bar; returns 1 when it fails."""
    arguments = _arguments()
    model, _ = load_model(
        ModelConfig(name="model", path=arguments.model, threads=1, device="cpu", dtype="float32")
    )
    if model.get_experts_implementation()[""] != experts.CPU_EXPERTS:
        print(f"{arguments.model}: its experts stay eager, there is nothing to compare")
        return 1
    layers = moe_layers(model)
    print(
        f"{arguments.model}: {len(layers)} layers of {layers[0].n_experts} experts, "
        f"top-{layers[0].top_k}, hidden {layers[0].hidden}, width {layers[0].width}",
        flush=True,
    )
    failed = False
    with torch.no_grad():
        for length, new in arguments.generate:
            variants = _both(model, _generation(model, arguments.batch, length, new))
            name = f"generation, {arguments.batch} rows of {length} + {new} tokens"
            failed |= _fails(name, variants, arguments.rounds, BAR)
        for rows, length in arguments.score:
            variants = _both(model, _scoring(model, rows, length))
            name = f"scoring, {rows} rows of {length} tokens"
            failed |= _fails(name, variants, arguments.rounds, BAR)
        for tokens in arguments.tokens:
            variants = _layer_variants(layers[0], tokens)
            failed |= _fails(f"one layer, {tokens} tokens", variants, arguments.rounds, None)
    return int(failed)


def _arguments() -> argparse.Namespace:
    def pair(text: str) -> tuple[int, int]:
        first, second = text.split("x")
        return int(first), int(second)

    options = parser("generation", __doc__)
    options.add_argument("--model", default="pocket:olmoe", help="a folder or pocket:NAME")
    options.add_argument("--batch", type=int, default=64, help="rows that generate together")
    options.add_argument(
        "--generate", type=pair, nargs="+", default=[(40, 48)], help="prompt x new tokens"
    )
    options.add_argument(
        "--score", type=pair, nargs="+", default=[(8, 40), (32, 40), (64, 64)], help="rows x tokens"
    )
    options.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 256, 512, 1024, 4096])
    options.add_argument(
        "--rounds", type=int, default=7, help="rounds measured, after one that is not"
    )
    return options.parse_args()


def _generation(model: Any, rows: int, length: int, new: int) -> Work:
    """Greedy generation of exactly `new` tokens, so that all variants do the same work. The result
    is the logits of all steps."""
    ids = torch.randint(5, model.config.vocab_size, (rows, length))
    settings = {
        "max_new_tokens": new,
        "min_new_tokens": new,
        "do_sample": False,
        "eos_token_id": None,
    }

    def work() -> torch.Tensor:
        out = model.generate(ids, **settings, return_dict_in_generate=True, output_logits=True)
        return torch.stack(out.logits)

    return work


def _scoring(model: Any, rows: int, length: int) -> Work:
    """One forward pass. The result is the logits of all positions."""
    ids = torch.randint(5, model.config.vocab_size, (rows, length))

    def work() -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
        return logits

    return work


def _both(model: Any, work: Work) -> dict[str, Work]:
    """Name -> `work` with eager experts, and with the CPU experts of loaded models."""

    def with_experts(implementation: str) -> Work:
        def run() -> torch.Tensor:
            model.set_experts_implementation(implementation)
            return work()

        return run

    return {EAGER: with_experts(EAGER), "loaded": with_experts(experts.CPU_EXPERTS)}


def _layer_variants(layer: MoELayer, tokens: int) -> dict[str, Work]:
    """Name -> the experts of one layer: eager, and those of loaded models."""
    hidden = torch.randn(tokens, layer.hidden)
    weights, index = torch.rand(tokens, layer.n_experts).topk(layer.top_k)
    repeat = range(max(1, 512 // tokens))

    def variant(implementation: str) -> Work:
        def run() -> torch.Tensor:
            module: Any = layer.experts
            module.config._experts_implementation_internal = implementation
            results: list[torch.Tensor] = [module(hidden, index, weights) for _ in repeat]
            return results[-1]

        return run

    return {EAGER: variant(EAGER), "loaded": variant(experts.CPU_EXPERTS)}


def _fails(what: str, variants: Mapping[str, Work], count: int, bar: float | None) -> bool:
    """Print the ratios of CPU seconds to those of the variant EAGER, over `count` rounds; True when
    a ratio reaches the bar or bits differ."""
    results = [work() for work in variants.values()]  # the first round is slower and not measured
    equal = all(torch.equal(result, results[0]) for result in results)
    seconds = rounds(variants, count)
    eager = seconds.pop(EAGER)
    medians = {name: statistics.median(ratios(values, eager)) for name, values in seconds.items()}
    listed = ", ".join(f"{name} / eager {ratio:.2f}" for name, ratio in medians.items())
    bits = "equal" if equal else "DIFFER"
    print(f"{what}: {listed} (eager {statistics.median(eager):.3f} s), bits {bits}", flush=True)
    return not equal or (bar is not None and max(medians.values()) >= bar)


if __name__ == "__main__":
    sys.exit(main())
