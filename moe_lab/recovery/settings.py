"""Settings of a recovery: checks before anything is loaded, its identity, its optional libraries. No torch."""

from __future__ import annotations

import logging
import math
from dataclasses import fields
from functools import cache
from importlib import import_module
from typing import Any

from moe_lab.allocation import listed
from moe_lab.allocation.grouping import GROUPINGS
from moe_lab.config import AllocationConfig, ModelConfig, RecoveryConfig
from moe_lab.config.identity import counting_fields, identity
from moe_lab.errors import UserError, need, unknown
from moe_lab.models.config_json import check_plain_weights

MODULES = ("experts", "shared_experts", "attention")
"""What bits=4 can quantise; routers, embeddings and lm_head never are."""
SCHEDULES = ("cosine", "linear")
TRAINED = ("adapters", "routers")
TEXTS = ("instructions", "distill", "fit")
"""Settings that name the text of a recovery."""
RATES = {"experts": "learning_rate", "shared_experts": "learning_rate", "routers": "router_learning_rate"}
"""Part of the model -> the setting that holds its peak learning rate."""
OF_ADAPTERS = ("shared_experts", "rank", "learning_rate", "router_rank", "scaling", "dropout")
"""Settings that train=routers does not read."""
OF_FIT = ("name", "bits", "modules", "fit", "save_every")
"""Settings that apply where nothing is trained."""
RIDGE = 1e-6
"""How strongly fits are held to the plain average, as a share of the mean square of their inputs: enough for channels
that are never active, and too little to matter for others."""


def check(settings: RecoveryConfig) -> None:
    """Raise UserError for an invalid value, or for a required package that is not installed."""
    if settings.bits not in (4, 16):
        raise UserError(f"recovery.bits={settings.bits} is unknown: expected 4 (NF4) or 16 (as loaded)")
    if settings.bits == 4:
        check_modules(settings.modules)
        need("bitsandbytes", "quantisation", "recovery.bits=4")
    _check_objective(settings)
    if is_tuned(settings):
        _check_tuning(settings)


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
    if settings.name == "none" and (settings.bits != 16 or is_tuned(settings)):
        texts = [f"recovery.{role}={getattr(settings, role)}" for role in TEXTS]
        raise UserError(
            f"recovery.name=none means none, but recovery.bits={settings.bits}, {', '.join(texts[:-1])} and "
            f"{texts[-1]} ask for one: expected another name, such as recovery.name=mine"
        )


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
        raise UserError(f"recovery.modules is empty: expected one or more of {', '.join(MODULES)}")
    for module in modules:
        if module not in MODULES:
            raise unknown("recovery.modules", module, MODULES)


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
        parts = f"routed experts{', shared experts' if settings.shared_experts else ''} (rank {settings.rank})"
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


def _check_objective(settings: RecoveryConfig) -> None:
    """Raise UserError for an unknown choice of what is trained, and for settings that nothing would read."""
    if settings.train not in TRAINED:
        raise unknown("recovery.train", settings.train, TRAINED)
    texts = [f"recovery.{role}={getattr(settings, role)}" for role in TEXTS if getattr(settings, role) is not None]
    if len(texts) > 1:
        raise UserError(
            f"{texts[0]} and {texts[1]} are both set: expected one of {', '.join(TEXTS)}, and null for the others"
        )
    if settings.fit is not None:
        _check_fit(settings)
    if settings.distill is None and settings.temperature != RecoveryConfig.temperature:
        raise UserError(
            f"recovery.temperature={settings.temperature} is that of a distillation: expected recovery.distill, the "
            "name of a file in conf/calibration"
        )
    if settings.train == "adapters":
        return
    if not is_tuned(settings):
        raise UserError(
            f"recovery.train={settings.train} has no text to train on: expected recovery.distill, the name of a file "
            "in conf/calibration"
        )
    for name in OF_ADAPTERS:
        if getattr(settings, name) != getattr(RecoveryConfig, name):
            raise UserError(
                f"recovery.{name}={getattr(settings, name)} is about adapters, which recovery.train=routers does not "
                "have: expected recovery.train=adapters, or recovery.router_learning_rate for the rate of routers"
            )


def _check_fit(settings: RecoveryConfig) -> None:
    """Raise UserError for settings of a training beside those of a fit."""
    for field in fields(RecoveryConfig):
        value = getattr(settings, field.name)
        if field.name not in OF_FIT and value != field.default:
            raise UserError(
                f"recovery.{field.name}={value} is about training, and recovery.fit={settings.fit} trains nothing: "
                f"expected recovery.{field.name}={field.default}"
            )


def _check_tuning(settings: RecoveryConfig) -> None:
    if settings.schedule not in SCHEDULES:
        raise unknown("recovery.schedule", settings.schedule, SCHEDULES)
    for name in ("epochs", "learning_rate", "scaling", "clip", "temperature"):
        if not 0 < getattr(settings, name) < math.inf:
            value = getattr(settings, name)
            raise UserError(f"recovery.{name}={value} is not positive and finite: expected a number above 0")
    for name in ("rank", "rows_per_step", "save_every"):
        if getattr(settings, name) < 1:
            raise UserError(f"recovery.{name}={getattr(settings, name)} is too small: expected 1 or more")
    if settings.router_rank < 0:
        raise UserError(f"recovery.router_rank={settings.router_rank} is negative: expected 0 (routers stay) or more")
    if settings.router_rank and not 0 < settings.router_learning_rate < math.inf:
        other = ", or recovery.router_rank=0 to leave routers alone" if settings.train == "adapters" else ""
        raise UserError(
            f"recovery.router_learning_rate={settings.router_learning_rate} is not positive and finite: expected a "
            f"number above 0{other}"
        )
    for name in ("warmup", "dropout"):
        if not 0 <= getattr(settings, name) < 1:
            raise UserError(
                f"recovery.{name}={getattr(settings, name)} is no share: expected 0 or more and less than 1"
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
