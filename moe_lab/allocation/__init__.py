"""How many experts each layer loses, or how many channels each expert keeps. No torch."""

from __future__ import annotations

from moe_lab.allocation.registry import (
    ALLOCATIONS,
    Allocation,
    allocate,
    budgets,
    check,
    check_by,
    fits,
    get,
    needs,
    register,
    routed_ratio,
    zero_expert,
)

__all__ = [
    "ALLOCATIONS",
    "Allocation",
    "allocate",
    "budgets",
    "check",
    "check_by",
    "fits",
    "get",
    "needs",
    "register",
    "routed_ratio",
    "zero_expert",
]
