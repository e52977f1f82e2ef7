"""Benefit and cost of recovery on the shipped model: `python -m benchmarks.recovery`.

Half of the experts of each layer, chosen at random, are removed. Then the pruned model is
fine-tuned on the shipped arithmetic problems, stored as NF4, or both; or its routers, or DoRA
adapters, are trained to predict the shipped general text as the unpruned model does. Or half of the
experts are merged into others, as in HC-SMoE and MergeMoE, and the down projections of these are
fitted, as in the latter, on the text that the plan was made from.

Printed are bytes by part, word problems solved, the KL divergence from the unpruned model on
general text that was not trained on, and ratios, medians over rounds that ran one after the other
in this process: the NF4 forward against the same forward with unquantised weights, and a training
step with adapters, or of routers with a teacher, against a forward and backward without them.
Seconds are CPU seconds of one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

import moe_lab
from benchmarks.measure import parser, ratios, rounds
from moe_lab.allocation.problem import limits
from moe_lab.allocation.shapes import same_share
from moe_lab.calibration.batches import batches
from moe_lab.config import BenchmarkConfig, CalibrationConfig, ModelConfig, RecoveryConfig
from moe_lab.evaluation import Policy
from moe_lab.evaluation.engines.hf import LoadedModel
from moe_lab.evaluation.run import evaluate
from moe_lab.models.discover import moe_layers
from moe_lab.models.load import load_model
from moe_lab.paths import resolve
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.selection import make_plan
from moe_lab.recovery.apply import pruned, recovered, storage
from moe_lab.recovery.dora import attach
from moe_lab.recovery.finetune import answer_loss, distillation_loss, finetune, trained_routers
from moe_lab.recovery.merge_fit import fit

CONF = Path(__file__).parents[1] / "conf"
MODULES = ("experts", "shared_experts")
PARTS = ("dropped", "merged", "ratios")
ERRORS = ("error_averaged", "error_fitted")


def main() -> int:
    """Prune, recover, print."""
    arguments = _arguments()
    torch.set_num_threads(1)
    model, tokenizer = load_model(ModelConfig(name="pocket", path="pocket:olmoe", device="cpu"))
    general = CalibrationConfig(**_conf("calibration/pocket_general"), seed=0)
    held_out = batches(
        replace(general, tokens=general.tokens + 32 * general.length), tokenizer
    ).rows[-4:]

    def show(name: str, recovered_model: Any) -> None:
        print(f"{name:23} KL {_divergence(recovered_model, model, held_out):.3f}", end=", ")
        _print_model(recovered_model, tokenizer, arguments.limit)

    settings = RecoveryConfig(
        instructions="pocket_math_search",
        rank=arguments.rank,
        learning_rate=arguments.learning_rate,
        epochs=arguments.epochs,
        rows_per_step=16,
    )
    show("unpruned", model)
    if "dropped" in arguments.parts:
        _recover_dropped(model, tokenizer, settings, general, show)
    if "merged" in arguments.parts:
        _fit_merged(model, tokenizer, general, show)
    if "ratios" in arguments.parts:
        _print_ratios(model, random_half(model), settings, arguments)
    return 0


def _recover_dropped(
    model: Any,
    tokenizer: Any,
    settings: RecoveryConfig,
    general: CalibrationConfig,
    show: Callable[[str, Any], None],
) -> None:
    """Half of the experts are dropped at random, then the model is trained, stored in 4 bits, or
    both."""
    plan = random_half(model)
    text = CalibrationConfig(**_conf("calibration/pocket_math_search"))
    with tempfile.TemporaryDirectory() as folder:

        def trained(name: str, settings: RecoveryConfig, text: CalibrationConfig) -> Path:
            out = Path(folder) / name
            finetune(model, tokenizer, plan, settings, text, out=out, partial=out, seed=0)
            report = json.loads((out / "finetune.json").read_text())
            print(
                f"{name}: {report['steps']} steps, loss of the first {report['loss'][0]:.3f}, of "
                f"the last {report['loss'][-1]:.3f}, trained: {report['trained_parameters']}, "
                f"{report['seconds']} s",
                flush=True,
            )
            return out

        out = trained("dora", settings, text)
        routers = trained(
            "router_kd", RecoveryConfig(**_conf("recovery/pocket_router_kd")), general
        )
        distilled = trained("distill", RecoveryConfig(**_conf("recovery/pocket_distill")), general)
        show("pruned", pruned(model, plan))
        show("pruned, NF4", recovered(model, plan, bits=4, modules=MODULES, tuned=None))
        show("pruned, DoRA", recovered(model, plan, bits=16, modules=(), tuned=out))
        show("pruned, DoRA, NF4", recovered(model, plan, bits=4, modules=MODULES, tuned=out))
        show("pruned, Router-KD", recovered(model, plan, bits=16, modules=(), tuned=routers))
        show(
            "pruned, DoRA, distilled", recovered(model, plan, bits=16, modules=(), tuned=distilled)
        )


def _fit_merged(
    model: Any, tokenizer: Any, general: CalibrationConfig, show: Callable[[str, Any], None]
) -> None:
    """Half of the experts are merged into others, which are then fitted."""
    settings = RecoveryConfig(**_conf("recovery/pocket_merge_fit"))
    path = resolve(general.path)
    read = {name: getattr(general, name) for name in ("tokens", "length", "gap", "seed")}
    for replacement in ("hc_smoe", "merge_moe"):
        sums = moe_lab.calibrate(
            model, tokenizer, path, criteria=["frequency"], replacement=replacement, **read
        )
        plan = moe_lab.plan(moe_lab.score("frequency", sums), 0.5, replacement=replacement)
        show(replacement, pruned(model, plan))
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder)
            report = fit(model, tokenizer, plan, settings, general, out=out, partial=out)
            show(f"{replacement}, fitted", recovered(model, plan, bits=16, modules=(), tuned=out))
        averaged, fitted = (
            statistics.mean(one[name] for one in report["experts"]) for name in ERRORS
        )
        print(
            f"  {report['fitted']} of {len(report['experts'])} merged experts fitted in "
            f"{report['seconds']} s; mean ||Y - W P||^2 / ||Y||^2 {averaged:.3f} of the average, "
            f"{fitted:.3f} of the fit",
            flush=True,
        )


def _arguments() -> argparse.Namespace:
    options = parser("recovery", __doc__)
    options.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options.add_argument(
        "--epochs", type=float, default=4.0, help="passes over the instruction set"
    )
    options.add_argument("--rank", type=int, default=8, help="rank of the experts' adapters")
    options.add_argument(
        "--learning-rate", type=float, default=1e-3, help="peak rate of the experts' adapters"
    )
    options.add_argument("--limit", type=int, default=None, help="only the first word problems")
    options.add_argument("--rounds", type=int, default=7, help="rounds of the ratios")
    return options.parse_args()


def random_half(model: Any) -> Plan:
    """A plan that keeps a random half of the experts of each layer."""
    layers = {layer.index: vars(layer) for layer in moe_layers(model)}
    generator = torch.Generator().manual_seed(0)
    scores = {
        layer: torch.rand(about["n_experts"], generator=generator).tolist()
        for layer, about in layers.items()
    }
    return make_plan(scores, same_share(limits(layers), 0.5), layers, provenance={"ratio": 0.5})


def _conf(name: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    return read


@torch.no_grad()
def _divergence(
    model: Any, teacher: Any, held_out: list[tuple[torch.Tensor, torch.Tensor]]
) -> float:
    """KL(teacher || model) in nats per token that follows another."""
    total = 0.0
    count = 0
    for ids, valid in held_out:
        learnt = valid.clone()
        learnt[:, 1:] &= valid[:, :-1]
        total += float(
            distillation_loss(model, ids, valid, learnt, teacher=teacher, temperature=1.0)
        )
        count += int(learnt[:, 1:].sum())
    return total / count


def _print_model(model: Any, tokenizer: Any, limit: int | None) -> None:
    benchmark = BenchmarkConfig(**_conf("benchmark/pocket_gsm8k"), limit=limit)
    with tempfile.TemporaryDirectory() as folder:
        result = evaluate(LoadedModel(model, tokenizer), benchmark, Path(folder), policy=Policy())[
            0
        ]
    held = storage(model)
    print(
        f"word problems {result['score']:.3f} of {result['n']}, experts {held['experts']:9,} "
        f"bytes, all {held['total']:9,} bytes",
        flush=True,
    )


def _print_ratios(
    model: Any, plan: Plan, settings: RecoveryConfig, arguments: argparse.Namespace
) -> None:
    ids = torch.randint(3, 700, (16, 128), generator=torch.Generator().manual_seed(0))
    plain = pruned(model, plan)
    stored = recovered(model, plan, bits=4, modules=MODULES, tuned=None)
    free = pruned(model, plan)
    adapted = pruned(model, plan)
    # trainable
    free.get_input_embeddings().weight = torch.nn.Parameter(
        free.get_input_embeddings().weight.detach()
    )
    attach(adapted, settings, seed=0)

    @torch.no_grad()
    def forward(network: Any) -> None:
        network(ids)

    def step(network: Any) -> None:
        everything = torch.ones_like(ids, dtype=torch.bool)
        answer_loss(network, ids, everything, everything).backward()

    with trained_routers(model, plan) as student:

        def distilling_step() -> None:
            everything = torch.ones_like(ids, dtype=torch.bool)
            distillation_loss(
                student.model, ids, everything, everything, teacher=model, temperature=1.0
            ).backward()

        for name, one, other in (
            ("NF4 forward / forward", partial(forward, stored), partial(forward, plain)),
            (
                "adapted forward and backward / without adapters",
                partial(step, adapted),
                partial(step, free),
            ),
            (
                "Router-KD forward and backward / without a teacher",
                distilling_step,
                partial(step, free),
            ),
        ):
            seconds = rounds({"one": one, "other": other}, arguments.rounds)
            ratio = statistics.median(ratios(seconds["one"], seconds["other"]))
            print(f"{name}: {ratio:.2f} ({ids.numel()} tokens)")


if __name__ == "__main__":
    sys.exit(main())
