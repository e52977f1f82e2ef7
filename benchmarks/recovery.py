"""Benefit and cost of recovery on the shipped model: `python -m benchmarks.recovery`.

dropped: a random half of the experts of each layer is removed. The pruned model is fine-tuned on
the shipped arithmetic problems, stored as NF4, or both; or its routers, or DoRA adapters, are
trained on the shipped general text with the unpruned model as the teacher.

merged: half of the experts are merged into others, as in HC-SMoE and MergeMoE; the down projections
of the merged experts are fitted as in MergeMoE, on the text from which the plan was computed.

ratios: of CPU seconds of one thread, medians over rounds in this process: the NF4 forward pass
against the forward pass with unquantised weights, and a training step with adapters, or of routers
with a teacher, against a forward and backward pass without them.

For each model are printed bytes by part, solved word problems, and the KL divergence from the
unpruned model on general text that is not in the training text.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
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
from moe_lab.evaluation import Policy, run
from moe_lab.evaluation.answers import collect_answers
from moe_lab.evaluation.engines.hf import LoadedModel
from moe_lab.models.discover import moe_layers, routed_layers
from moe_lab.models.load import load_model
from moe_lab.paths import resolve
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune
from moe_lab.pruning.selection import make_plan
from moe_lab.recovery.apply import recovered, storage_bytes
from moe_lab.recovery.dora import attach
from moe_lab.recovery.finetune import answer_loss, distillation_loss, finetune, trained_routers
from moe_lab.recovery.merge_fit import fit

CONF = Path(__file__).parents[1] / "conf"
MODULES = ("experts", "shared_experts")
PARTS = ("dropped", "merged", "ratios")


def main() -> int:
    """Run the parts and print the results."""
    arguments = _arguments()
    torch.set_num_threads(1)
    model, tokenizer = load_model(ModelConfig(name="pocket", path="pocket:olmoe", device="cpu"))
    general = CalibrationConfig(**_conf("calibration/pocket_general"), batch_tokens=4096, seed=0)
    longer = replace(general, tokens=general.tokens + 32 * general.length)
    held_out = batches(longer, tokenizer).batches[-4:]

    def print_model(name: str, recovered_model: Any) -> None:
        print(f"{name:23} KL {_divergence(recovered_model, model, held_out):.3f}", end=", ")
        _print_score(recovered_model, tokenizer, arguments.limit)

    settings = RecoveryConfig(
        instructions="pocket_math_search",
        rank=arguments.rank,
        learning_rate=arguments.learning_rate,
        epochs=arguments.epochs,
        rows_per_step=16,
    )
    print_model("unpruned", model)
    if "dropped" in arguments.parts:
        _recover_dropped(model, tokenizer, settings, general, print_model)
    if "merged" in arguments.parts:
        _fit_merged(model, tokenizer, general, print_model)
    if "ratios" in arguments.parts:
        _print_ratios(model, random_half(model), settings, arguments)
    return 0


def _recover_dropped(
    model: Any,
    tokenizer: Any,
    settings: RecoveryConfig,
    general: CalibrationConfig,
    print_model: Callable[[str, Any], None],
) -> None:
    """Drop a random half of the experts, then train the model, store it in 4 bits, or both; print
    each result."""
    plan = random_half(model)
    text = CalibrationConfig(**_conf("calibration/pocket_math_search"), batch_tokens=4096)
    with tempfile.TemporaryDirectory() as folder:

        def trained(name: str, settings: RecoveryConfig, text: CalibrationConfig) -> Path:
            out = Path(folder) / name
            start_time = time.monotonic()
            finetune(model, tokenizer, plan, settings, text, out=out, partial=out, seed=0)
            seconds = time.monotonic() - start_time
            report = json.loads((out / "finetune.json").read_text())
            losses = report["loss"]
            print(
                f"{name}: {len(losses)} steps, loss of the first {losses[0]:.3f}, of the last "
                f"{losses[-1]:.3f}, trained: {report['trained_parameters']}, {seconds:.1f} s",
                flush=True,
            )
            return out

        def with_tuned(folder: Path) -> Any:
            return recovered(model, plan, modules=(), tuned=folder)

        dora = trained("dora", settings, text)
        routers = trained(
            "router_kd", RecoveryConfig(**_conf("recovery/pocket_router_kd")), general
        )
        distilled = trained("distill", RecoveryConfig(**_conf("recovery/pocket_distill")), general)
        print_model("pruned", prune(model, plan))
        print_model("pruned, NF4", recovered(model, plan, modules=MODULES, tuned=None))
        print_model("pruned, DoRA", with_tuned(dora))
        quantised = recovered(model, plan, modules=MODULES, tuned=dora)
        print_model("pruned, DoRA, NF4", quantised)
        print_model("pruned, Router-KD", with_tuned(routers))
        print_model("pruned, DoRA, distilled", with_tuned(distilled))


def _fit_merged(
    model: Any,
    tokenizer: Any,
    general: CalibrationConfig,
    print_model: Callable[[str, Any], None],
) -> None:
    """Merge half of the experts into others, then fit these; print each result."""
    settings = RecoveryConfig(**_conf("recovery/pocket_merge_fit"))
    path = resolve(general.path)
    text = {name: getattr(general, name) for name in ("tokens", "length", "gap", "seed")}
    for replacement in ("hc_smoe", "merge_moe"):
        sums = moe_lab.calibrate(
            model, tokenizer, path, criteria=["frequency"], replacement=replacement, **text
        )
        plan = moe_lab.plan(moe_lab.score("frequency", sums), 0.5, replacement=replacement)
        print_model(replacement, prune(model, plan))
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder)
            start_time = time.monotonic()
            report = fit(model, tokenizer, plan, settings, general, out=out, partial=out)
            seconds = time.monotonic() - start_time
            fitted_model = recovered(model, plan, modules=(), tuned=out)
            print_model(f"{replacement}, fitted", fitted_model)
        experts = report["experts"]
        averaged = statistics.mean(expert["error_averaged"] for expert in experts)
        fitted = statistics.mean(expert["error_fitted"] for expert in experts)
        print(
            f"  {len(experts) - report['averaged']} of {len(experts)} merged experts fitted in "
            f"{seconds:.1f} s; mean ||Y - W P||^2 / ||Y||^2 {averaged:.3f} of the average, "
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
    """A plan that retains a random half of the experts of each layer."""
    layers = {layer.index: vars(layer) for layer in moe_layers(model)}
    generator = torch.Generator().manual_seed(0)
    scores = {
        index: torch.rand(layer["n_experts"], generator=generator).tolist()
        for index, layer in layers.items()
    }
    return make_plan(scores, same_share(limits(layers), 0.5), layers, provenance={"ratio": 0.5})


def _conf(name: str) -> dict[str, Any]:
    """The settings in a file of conf/, such as benchmark/pocket_gsm8k."""
    settings: dict[str, Any] = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    return settings


@torch.no_grad()
def _divergence(
    model: Any, teacher: Any, held_out: list[tuple[torch.Tensor, torch.Tensor]]
) -> float:
    """KL(teacher || model) in nats per predicted token: a valid token after a valid one."""
    total = 0.0
    count = 0
    for ids, valid in held_out:
        predicted = valid.clone()
        predicted[:, 1:] &= valid[:, :-1]
        total += float(
            distillation_loss(model, ids, valid, predicted, teacher=teacher, temperature=1.0)
        )
        count += int(predicted[:, 1:].sum())
    return total / count


def _print_score(model: Any, tokenizer: Any, limit: int | None) -> None:
    """Print the share of solved word problems and the bytes of a model."""
    benchmark = BenchmarkConfig(**_conf("benchmark/pocket_gsm8k"), limit=limit)
    with tempfile.TemporaryDirectory() as folder:
        engine = LoadedModel(model, tokenizer)
        (answers,) = collect_answers(engine, [(benchmark, run.list_items(benchmark))])
        results = run.grade(answers, benchmark, Path(folder), policy=Policy())
    result = results[0]
    experts = sum(storage_bytes(layer.experts) for layer in routed_layers(model))
    print(
        f"word problems {result['score']:.3f} of {result['n']}, experts {experts:9,} "
        f"bytes, all {storage_bytes(model):9,} bytes",
        flush=True,
    )


def _print_ratios(
    model: Any, plan: Plan, settings: RecoveryConfig, arguments: argparse.Namespace
) -> None:
    """Run the part ratios."""
    ids = torch.randint(3, 700, (16, 128), generator=torch.Generator().manual_seed(0))
    all_tokens = torch.ones_like(ids, dtype=torch.bool)
    plain = prune(model, plan)
    quantised = recovered(model, plan, modules=MODULES, tuned=None)
    adapted = prune(model, plan)
    attach(adapted, settings, seed=0)
    # gradients to the embeddings alone
    unadapted = prune(model, plan)
    embeddings = unadapted.get_input_embeddings()
    embeddings.weight = torch.nn.Parameter(embeddings.weight.detach())

    @torch.no_grad()
    def forward(network: Any) -> None:
        network(ids)

    def step(network: Any) -> None:
        answer_loss(network, ids, all_tokens, all_tokens).backward()

    with trained_routers(model, plan) as student:

        def distilling_step() -> None:
            distillation_loss(
                student.model, ids, all_tokens, all_tokens, teacher=model, temperature=1.0
            ).backward()

        for name, variant, reference in (
            ("NF4 forward / forward", partial(forward, quantised), partial(forward, plain)),
            (
                "adapted forward and backward / without adapters",
                partial(step, adapted),
                partial(step, unadapted),
            ),
            (
                "Router-KD forward and backward / without a teacher",
                distilling_step,
                partial(step, unadapted),
            ),
        ):
            seconds = rounds({"variant": variant, "reference": reference}, arguments.rounds)
            ratio = statistics.median(ratios(seconds["variant"], seconds["reference"]))
            print(f"{name}: {ratio:.2f} ({ids.numel()} tokens)")


if __name__ == "__main__":
    sys.exit(main())
