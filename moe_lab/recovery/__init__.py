"""Recovery of a pruned model before its evaluation: fine-tuning or a fit of merged experts, then
4-bit weights.

This module checks the settings of a recovery before a model is loaded, and describes the recovery
for the model card. It imports no torch.
"""

from __future__ import annotations

from moe_lab.allocation import list_file
from moe_lab.allocation.grouping import GROUPINGS
from moe_lab.config import AllocationConfig, ModelConfig, RecoveryConfig
from moe_lab.errors import UserError, check_installed
from moe_lab.models.config_json import check_plain_weights
from moe_lab.pruning.plan import Plan


def check(settings: RecoveryConfig) -> None:
    """Raise UserError if a recovery named none is to change the model, or if bitsandbytes is needed
    but not installed."""
    # the name of a setting by which the recovery changes the model, or None
    active_setting = "bits" if settings.bits == 4 else settings.text_setting
    if settings.name == "none" and active_setting is not None:
        raise UserError(
            "recovery.name=none means no recovery, and "
            f"recovery.{active_setting} is set: expected another name"
        )
    if settings.bits == 4:
        check_installed("bitsandbytes", "recovery.bits=4")


def check_model(settings: RecoveryConfig, model: ModelConfig) -> None:
    """Raise UserError if a model with quantised weights is to be recovered."""
    if settings.name != "none":
        check_plain_weights(model, f"recovery={settings.name}")


def check_merging(settings: RecoveryConfig, allocation: AllocationConfig, ratio: float) -> None:
    """Raise UserError if the recovery fits merged experts, but the allocation and ratio merge
    none."""
    if settings.fit is None:
        return
    path = allocation.path
    has_merged_experts = allocation.replacement in GROUPINGS and ratio > 0
    # a plan in a file is used as it is, whatever the replacement and the ratio
    if path is not None and list_file.is_plan(list_file.read(path)):
        has_merged_experts = bool(Plan.load(path).merged_layers)
    if not has_merged_experts:
        raise UserError(
            f"recovery={settings.name} fits merged experts, and "
            f"allocation.replacement={allocation.replacement} with ratio={ratio:g} and "
            f"allocation.path={path} merges none: expected a replacement out of "
            f"{', '.join(GROUPINGS)} and a ratio above 0, or a plan that merges experts"
        )


def training_sentence(settings: RecoveryConfig, text: str | None) -> str:
    """A sentence for the model card on the fine-tuning or fit. `text`: name of the calibration
    set."""
    if text is None:
        return ""
    if settings.fit is not None:
        return (
            f"The down projections of merged experts were then fitted on {text} "
            f"(recovery={settings.name}), by least squares; nothing was trained."
        )
    ranks = f"ranks {settings.rank} and {settings.router_rank}"
    adapters = f"DoRA adapters on experts, shared experts and routers ({ranks})"
    trained_parts = (
        "its routers were trained"
        if settings.train == "routers"
        else f"{adapters} were trained and merged"
    )
    target = (
        f"the unpruned model's predictions on {text}"
        if settings.distill
        else f"the answers of {text}"
    )
    return (
        f"It was then fine-tuned (recovery={settings.name}): {trained_parts}, on {target}, for "
        f"{settings.epochs} epochs."
    )
