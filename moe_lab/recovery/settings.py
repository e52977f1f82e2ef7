"""Settings of a recovery: checks before anything is loaded, its identity, its optional libraries. No torch."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from typing import Any

from moe_lab.allocation import listed
from moe_lab.allocation.grouping import GROUPINGS
from moe_lab.config import AllocationConfig, ModelConfig, RecoveryConfig
from moe_lab.config.base import counting_fields, identity
from moe_lab.config.pruning import QUANTISABLE, TEXTS
from moe_lab.errors import UserError, need, unknown
from moe_lab.models.config_json import check_plain_weights

RATES = {"experts": "learning_rate", "shared_experts": "learning_rate", "routers": "router_learning_rate"}
"""Part of the model -> the setting that holds its peak learning rate."""
RIDGE = 1e-6
"""How strongly fits are held to the plain average, as a share of the mean square of their inputs: enough for channels
that are never active, and too little to matter for others."""


def check(settings: RecoveryConfig) -> None:
    """Raise UserError for a required package that is not installed."""
    if settings.bits == 4:
        need("bitsandbytes", "quantisation", "recovery.bits=4")


def text_role(settings: RecoveryConfig) -> str | None:
    """The setting that names the text by which the recovery finds other weights; None where it finds none."""
    return next((role for role in TEXTS if getattr(settings, role) is not None), None)


def is_tuned(settings: RecoveryConfig) -> bool:
    """Whether the recovery finds other weights, by training or by a fit."""
    return text_role(settings) is not None


def is_trained(settings: RecoveryConfig) -> bool:
    """Whether the recovery trains weights."""
    return is_tuned(settings) and settings.fit is None


def check_none(settings: RecoveryConfig) -> None:
    """Raise UserError when recovery.name=none is combined with settings of a recovery."""
    if settings.name == "none" and (settings.bits == 4 or is_tuned(settings)):
        asked = f"recovery.{text_role(settings)}" if is_tuned(settings) else "recovery.bits"
        raise UserError(f"recovery.name=none means none, and {asked} asks for one: expected another name, such as mine")


def check_model(settings: RecoveryConfig, model: ModelConfig) -> None:
    """Raise UserError when there is a recovery and the weights of the model are quantised."""
    if settings.name != "none":
        check_plain_weights(model, f"recovery={settings.name}")


def check_merging(settings: RecoveryConfig, allocation: AllocationConfig, ratio: float) -> None:
    """Raise UserError for a fit of merged experts in a cell whose allocation and ratio merge none."""
    if settings.fit is None:
        return
    path = allocation.path
    if path is not None and listed.is_plan(content := listed.read(path)):
        if not listed.merges(content):
            raise UserError(
                f"recovery={settings.name} fits merged experts, and the plan allocation.path={path} merges none: "
                "expected a plan that does"
            )
    elif allocation.replacement not in GROUPINGS:
        raise UserError(
            f"recovery={settings.name} fits merged experts, and allocation.replacement={allocation.replacement} merges "
            f"none: expected one of {', '.join(GROUPINGS)}"
        )
    elif ratio == 0:
        raise UserError(
            f"recovery={settings.name} fits merged experts, and ratio=0 merges none: expected a ratio above 0"
        )


def check_modules(modules: list[str]) -> None:
    """Raise UserError when `modules` is empty or names something that cannot be quantised."""
    if not modules:
        raise UserError(f"recovery.modules is empty: expected one or more of {', '.join(QUANTISABLE)}")
    for module in modules:
        if module not in QUANTISABLE:
            raise unknown("recovery.modules", module, QUANTISABLE)


@identity.register
def _(settings: RecoveryConfig) -> Any:
    """What changes the weights that a recovery finds, whatever the bits they are stored in afterwards.

    Its text has an identity of its own, so here only counts what the text is used for.
    """
    return {**counting_fields(settings), "text": text_role(settings)}


def finetune_words(settings: RecoveryConfig, text: str | None) -> str:
    """A sentence that says how a model was fine-tuned or fitted on the set `text`; empty when it was not."""
    if text is None:
        return ""
    if settings.fit is not None:
        return (
            f"The down projections of merged experts were then fitted (recovery={settings.name}), by least squares, to "
            f"the outputs of their members for the tokens of {text} that are routed to these; nothing was trained."
        )
    if settings.train == "routers":
        trained = "its routers were trained"
    else:
        parts = f"routed experts, shared experts (rank {settings.rank})"
        parts += f" and routers (rank {settings.router_rank})" if settings.router_rank else ""
        trained = f"DoRA adapters on {parts} were trained"
    if settings.distill is not None:
        learnt = f"to predict the tokens of {text} as the unpruned model does, at temperature {settings.temperature:g},"
    else:
        learnt = f"on the answers of {text}"
    merged = " and merged into the weights" if settings.train == "adapters" else ""
    return (
        f"It was then fine-tuned (recovery={settings.name}): {trained} {learnt} for {settings.epochs} epochs{merged}."
    )


@cache
def bitsandbytes_functional() -> Any:
    """The module bitsandbytes.functional; UserError with the command that installs it."""
    need("bitsandbytes", "quantisation", "recovery.bits=4")
    log = logging.getLogger("bitsandbytes")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        return import_module("bitsandbytes.functional")
    finally:
        log.setLevel(level)
