"""Passes over a text with the whole model in memory (`Resident`) or one decoder layer at a time (`Streamed`).

Both classes have the same methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_lab.config import CalibrationConfig, ModelConfig
from moe_lab.study import memory
from moe_lab.study.steps.files import Files, loaded, read_text

Rows = tuple[int, int] | None
"""The first row of a share of a text, and its end; None for all rows."""


def engine(
    model: ModelConfig, text: CalibrationConfig, files: Files, fingerprint: Mapping[str, Any], rows: Rows = None
) -> Resident | Streamed:
    """Open a model and a text with the engine that calibration.engine names. An interrupted pass of the same
    `fingerprint` is resumed."""
    return (Streamed if text.engine == "streamed" else Resident)(model, text, files, fingerprint, rows)


class Resident:
    """Passes with the whole model in memory."""

    def __init__(
        self, model: ModelConfig, text: CalibrationConfig, files: Files, fingerprint: Mapping[str, Any], rows: Rows
    ) -> None:
        self.about: dict[str, Any] = {"fingerprint": fingerprint, "out": files.partial}
        self.model, tokenizer = loaded(model)
        self.checkpointing = text.checkpointing
        self.text = read_text(text, tokenizer, files, rows)

    def read(self, tap: type) -> Any:
        """Sums that `tap` gathers in a forward pass."""
        from moe_lab.statistics.observe import gather

        return gather(self.model, tap, self.text, **self.about)

    def read_back(self, tap: type) -> Any:
        """Sums that `tap` gathers in a forward and a backward pass."""
        from moe_lab.statistics.gradients import gather_gradients

        return gather_gradients(self.model, tap, self.text, checkpointing=self.checkpointing, **self.about)

    def routing(self, plan: Any) -> Any:
        """The measured routing of the text under a plan."""
        from moe_lab.pruning.flops import measured_routing

        return measured_routing(self.model, plan, self.text)


class Streamed:
    """Passes with one decoder layer in memory at a time."""

    def __init__(
        self, model: ModelConfig, text: CalibrationConfig, files: Files, fingerprint: Mapping[str, Any], rows: Rows
    ) -> None:
        from moe_lab.models.streamed import open_streamed

        self.model, tokenizer = open_streamed(model)
        self.budget = memory.STATES
        """Bytes of hidden states that are kept in memory."""
        self.about: dict[str, Any] = {"fingerprint": fingerprint, "out": files.partial, "budget": self.budget}
        self.text = read_text(text, tokenizer, files, rows)

    def read(self, tap: type) -> Any:
        from moe_lab.statistics.streaming import stream

        return stream(self.model, tap, self.text, **self.about)

    def read_back(self, tap: type) -> Any:
        from moe_lab.statistics.streaming import stream_back

        return stream_back(self.model, tap, self.text, **self.about)

    def routing(self, plan: Any) -> Any:
        from moe_lab.pruning.flops import layered_routing

        return layered_routing(self.model, plan, self.text, out=self.about["out"], budget=self.budget)
