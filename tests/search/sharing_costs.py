"""Costs of candidates alone and together that do not depend on the machine."""

from __future__ import annotations

from typing import Any

import pytest

from moe_lab.search import sharing


def fix_costs(monkeypatch: pytest.MonkeyPatch, *, together: bool) -> list[int]:
    """Let passes that candidates share be faster or slower; returns a list to which each trial adds its size."""
    sizes: list[int] = []

    def timed(trial: Any, schedules: Any, size: int) -> tuple[float, Any]:
        sizes.append(size)
        return (1.0 if (size > 1) == together else 2.0), trial(schedules, size)

    monkeypatch.setattr(sharing, "timed", timed)
    return sizes
