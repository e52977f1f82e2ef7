"""Run a study: its cells become a graph of distinct steps; each step is content-addressed, cached
and restartable."""

from __future__ import annotations

from typing import Any

UNREPORTED: dict[str, Any] = {}
"""Name -> `record.Study` whose report is made once, after the last job of a multirun."""
