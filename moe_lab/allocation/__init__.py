"""How many experts each layer loses. A new allocation is one function and one line here."""

from __future__ import annotations

from collections.abc import Callable

from moe_lab.allocation.uniform import uniform
from moe_lab.errors import unknown

ALLOCATIONS: dict[str, Callable[..., dict[int, int]]] = {"uniform": uniform}
"""Name -> function that takes layer -> expert count and the ratio, and gives layer -> experts to remove."""


def get(name: str) -> Callable[..., dict[int, int]]:
    """The allocation of that name; UserError with the nearest known one."""
    if name not in ALLOCATIONS:
        raise unknown("allocation", name, ALLOCATIONS)
    return ALLOCATIONS[name]
