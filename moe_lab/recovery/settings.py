"""Settings of a recovery: checks before anything is loaded, its identity, its optional libraries. No torch."""

from __future__ import annotations

import logging
import math
from functools import cache
from importlib import import_module
from typing import Any

from moe_lab.config import ModelConfig, RecoveryConfig
from moe_lab.errors import UserError, need, unknown
from moe_lab.models.config_json import check_plain_weights

MODULES = ("experts", "shared_experts", "attention")
"""What bits=4 can quantise; routers, embeddings and lm_head never are."""
SCHEDULES = ("cosine", "linear")


def check(settings: RecoveryConfig) -> None:
    """Raise UserError for an invalid value, or for a required package that is not installed."""
    if settings.bits not in (4, 16):
        raise UserError(f"recovery.bits={settings.bits} is unknown: expected 4 (NF4) or 16 (as loaded)")
    if settings.bits == 4:
        check_modules(settings.modules)
        need("bitsandbytes", "quantisation", "recovery.bits=4")
    if settings.instructions is not None:
        _check_tuning(settings)
        need("peft", "fine-tuning", f"recovery.instructions={settings.instructions}")


def check_none(settings: RecoveryConfig) -> None:
    """Raise UserError when recovery.name=none is combined with settings of a recovery."""
    if settings.name == "none" and (settings.bits != 16 or settings.instructions is not None):
        raise UserError(
            f"recovery.name=none means none, but recovery.bits={settings.bits} and recovery.instructions="
            f"{settings.instructions} ask for one: expected another name, such as recovery.name=mine"
        )


def check_model(settings: RecoveryConfig, model: ModelConfig) -> None:
    """Raise UserError when there is a recovery and the weights of the model are quantised."""
    if settings.name != "none":
        check_plain_weights(model, f"recovery={settings.name}")


def check_modules(modules: list[str]) -> None:
    """Raise UserError when `modules` is empty or names something that cannot be quantised."""
    if not modules:
        raise UserError(f"recovery.modules is empty: expected one or more of {', '.join(MODULES)}")
    for module in modules:
        if module not in MODULES:
            raise unknown("recovery.modules", module, MODULES)


def finetune_identity(settings: RecoveryConfig) -> dict[str, Any]:
    """The settings that change the result of fine-tuning, JSON-ready; {} when there is none.

    Together with the model, the plan, the instruction set and the seed they identify a fine-tuning, whatever the bits
    its result is stored in afterwards. Settings that make no difference are left out: the name, and how often progress
    is saved.
    """
    if settings.instructions is None:
        return {}
    routers = {"rank": settings.router_rank, "learning_rate": settings.router_learning_rate}
    return {
        "adapter": "dora",
        "experts": {"rank": settings.rank, "learning_rate": settings.learning_rate, "dropout": settings.dropout},
        "routers": routers if settings.router_rank else None,
        "shared_experts": settings.shared_experts,
        **{name: getattr(settings, name) for name in ("scaling", "epochs", "rows_per_step")},
        **{name: getattr(settings, name) for name in ("schedule", "warmup", "clip")},
    }


def storage_identity(settings: RecoveryConfig) -> dict[str, Any]:
    """How a recovered model is stored, JSON-ready: {"bits": 4, "modules": [...]}; {} when weights stay as they are."""
    return {"bits": 4, "modules": sorted(set(settings.modules))} if settings.bits == 4 else {}


def finetune_words(settings: RecoveryConfig, instructions: str | None) -> str:
    """A sentence that says how a model was fine-tuned on the set `instructions`; empty when it was not."""
    if instructions is None:
        return ""
    parts = "routed experts" + (", shared experts" if settings.shared_experts else "")
    parts += f" (rank {settings.rank}) and routers (rank {settings.router_rank})" if settings.router_rank else ""
    return (
        f"It was then fine-tuned (recovery={settings.name}): DoRA adapters on {parts} were trained on the answers of "
        f"{instructions} for {settings.epochs} epochs and merged into the weights."
    )


def _check_tuning(settings: RecoveryConfig) -> None:
    if settings.schedule not in SCHEDULES:
        raise unknown("recovery.schedule", settings.schedule, SCHEDULES)
    for name in ("epochs", "learning_rate", "scaling", "clip"):
        if not 0 < getattr(settings, name) < math.inf:
            value = getattr(settings, name)
            raise UserError(f"recovery.{name}={value} is not positive and finite: expected a number above 0")
    for name in ("rank", "rows_per_step", "save_every"):
        if getattr(settings, name) < 1:
            raise UserError(f"recovery.{name}={getattr(settings, name)} is too small: expected 1 or more")
    if settings.router_rank < 0:
        raise UserError(f"recovery.router_rank={settings.router_rank} is negative: expected 0 (routers stay) or more")
    if settings.router_rank and not 0 < settings.router_learning_rate < math.inf:
        raise UserError(
            f"recovery.router_learning_rate={settings.router_learning_rate} is not positive and finite: expected a "
            "number above 0, or recovery.router_rank=0 to leave routers alone"
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
    return _import("bitsandbytes.functional")


@cache
def peft() -> Any:
    """The module peft, which imports bitsandbytes if installed; UserError with the command that installs peft."""
    need("peft", "fine-tuning", "fine-tuning")
    return _import("peft")


def _import(name: str) -> Any:
    log = logging.getLogger("bitsandbytes")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        return import_module(name)
    finally:
        log.setLevel(level)
