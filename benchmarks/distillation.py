"""Cost of a step of distillation:
`python -m benchmarks.distillation [--model olmoe_7b --layers 1]`.

A random half of the experts of each layer is removed. A ratio is the median over pairs of runs in
this process: the time of a training step with the unpruned model as the teacher, divided by that of
a forward and backward pass of the pruned model with frozen weights, whose gradients go to the
embeddings. The step trains

- routers: the routers' weights (recovery=router_kd);
- adapters: DoRA adapters on all experts and routers (recovery=distill). Experts with adapters run
  one after the other, so their bar is higher.

Exit code 1 when a bar fails.
"""

from __future__ import annotations

import argparse
import functools
import sys
from typing import Any

import torch

from benchmarks.measure import describe, device_seconds, median_misses, parser
from benchmarks.models import CONFIGURATIONS, published_model
from benchmarks.recovery import random_half
from benchmarks.statistics import Batch, batch, plain_gradients
from moe_lab.config import RecoveryConfig
from moe_lab.pruning.prune import prune
from moe_lab.recovery.finetune import distillation_loss, student

BARS = {"routers": 2.00, "adapters": 8.00}
"""Trained part -> its largest ratio."""


def main() -> int:
    """Measure, print, compare with the bars; returns 1 when a bar fails."""
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    print(describe(arguments.device), flush=True)
    model = published_model(
        arguments.model, arguments.layers, arguments.device, vocabulary=arguments.vocabulary
    )
    plan = random_half(model)
    text = batch(arguments.rows, arguments.length)
    seconds = functools.partial(device_seconds, model.device.type)
    plain = functools.partial(plain_gradients, prune(model, plan), text)
    failed = False
    for name in arguments.parts:
        settings = RecoveryConfig(distill="text", train=name)
        with student(model, plan, settings, seed=0) as trained:
            step = functools.partial(_step, trained.model, model, text)
            # the first runs are slower and not measured
            seconds(step)
            seconds(plain)
            ratios = [seconds(step) / seconds(plain) for _ in range(arguments.pairs)]
        what = f"step with a teacher, {name} / forward and backward, {text[0].numel()} tokens"
        failed |= median_misses(what, ratios, "<=", BARS[name])
    return int(failed)


def _arguments() -> argparse.Namespace:
    options = parser("distillation", __doc__)
    options.add_argument("--model", choices=CONFIGURATIONS, default="olmoe_7b")
    options.add_argument("--layers", type=int, help="all if not given")
    options.add_argument(
        "--vocabulary", type=int, help="words of the published model, all if not given"
    )
    options.add_argument("--device", default="cpu", help="cpu or cuda")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument(
        "--parts", nargs="+", choices=BARS, default=list(BARS), help="what is trained"
    )
    options.add_argument("--rows", type=int, default=2)
    options.add_argument("--length", type=int, default=512, help="tokens in a row")
    options.add_argument("--pairs", type=int, default=3)
    return options.parse_args()


def _step(model: Any, teacher: Any, text: Batch) -> None:
    """Forward and backward pass of the distillation loss."""
    ids, valid = (tensor.to(model.device) for tensor in text)
    distillation_loss(model, ids, valid, valid, teacher=teacher, temperature=1.0).backward()


if __name__ == "__main__":
    sys.exit(main())
