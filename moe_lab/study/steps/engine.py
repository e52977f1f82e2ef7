"""Passes over a text with the whole model in memory, or with one decoder layer of it: both answer the same calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_lab import allocation
from moe_lab.errors import UserError
from moe_lab.grid import Cell
from moe_lab.study.step import Job
from moe_lab.study.steps.builder import evidence_of
from moe_lab.study.steps.inputs import model_and_tokenizer, rows
from moe_lab.study.steps.kind import KINDS


def check_engine(cell: Cell) -> None:
    """UserError when one decoder layer in memory at a time is not enough: what runs the rest of the model anew for
    every candidate needs all of it."""
    if cell.calibration.engine != "streamed":
        return
    name = cell.allocation.name
    compares = KINDS[allocation.get(name).step].needs_whole_model
    if compares or any(KINDS[need].needs_whole_model for need in evidence_of(cell) if need != "by"):
        what = "compares whole models" if compares else "reads the loss of the whole model with one part changed"
        raise UserError(
            f"allocation={name} {what}, and calibration.engine=streamed has one decoder layer in memory: "
            "expected calibration.engine=resident, or an allocation from sums, such as uniform"
        )


def engine(job: Job) -> Resident | Streamed:
    """The engine that calibration.engine names, with the job's model and text."""
    return Streamed(job) if job.text.engine == "streamed" else Resident(job)


class Resident:
    """Passes that have the whole model in memory."""

    def __init__(self, job: Job) -> None:
        self.job, self.out = job, Path(job.partial)
        self.model, tokenizer = model_and_tokenizer(job)
        self.text = rows(job, tokenizer)

    def read(self, tap: type) -> Any:
        """What `tap` sums in a forward pass."""
        from moe_lab.statistics.observe import gather

        return gather(self.model, tap, self.text, out=self.out, fingerprint=self.job.settings)

    def statistics(self, snapshots: int) -> Any:
        """All sums of a forward pass, and of so many parts of it in files of their own."""
        from moe_lab.statistics.forward import ForwardTap
        from moe_lab.statistics.observe import gather

        return self._with_snapshots(gather, ForwardTap, snapshots)

    def gradients(self, snapshots: int) -> Any:
        """The same of a forward and a backward pass."""
        from moe_lab.statistics.gradients import GradientTap, gather_gradients

        checkpointing = self.job.text.checkpointing
        return self._with_snapshots(gather_gradients, GradientTap, snapshots, checkpointing=checkpointing)

    def _with_snapshots(self, gather: Callable[..., Any], tap: type, parts: int, **settings: bool) -> Any:
        from moe_lab.statistics.sums import Snapshots

        snapshots = Snapshots(self.out, self.text, parts)
        common = {"out": self.out, "fingerprint": self.job.settings, "snapshots": snapshots}
        sums = gather(self.model, tap, self.text, **common, **settings)
        snapshots.publish(Path(self.job.scratch))
        return sums

    def weight_gradients(self) -> Any:
        """Sums of a forward and a backward pass with the gradients of weights."""
        from moe_lab.statistics.gradients import WeightGradientTap, gather_gradients

        return gather_gradients(self.model, WeightGradientTap, self.text, fingerprint=self.job.settings)

    def routing(self, plan: Any) -> Any:
        """Where the tokens go under a plan."""
        from moe_lab.pruning.flops import measured_routing

        return measured_routing(self.model, plan, self.text)


class Streamed:
    """Passes that have one decoder layer in memory at a time. They leave no snapshots."""

    def __init__(self, job: Job) -> None:
        from moe_lab.models.streamed import open_streamed

        self.job, self.out = job, Path(job.partial)
        self.model, tokenizer = open_streamed(job.model)
        self.budget = job.text.activation_budget * 2**30
        """Bytes of hidden states that are kept in memory."""
        self.text = rows(job, tokenizer)

    def read(self, tap: type) -> Any:
        from moe_lab.statistics.streaming import stream

        return stream(self.model, tap, self.text, out=self.out, fingerprint=self.job.settings, budget=self.budget)

    def statistics(self, snapshots: int) -> Any:
        from moe_lab.statistics.forward import ForwardTap

        return self.read(ForwardTap)

    def gradients(self, snapshots: int) -> Any:
        from moe_lab.statistics.gradients import GradientTap

        return self._backward(GradientTap)

    def weight_gradients(self) -> Any:
        from moe_lab.statistics.gradients import WeightGradientTap

        return self._backward(WeightGradientTap)

    def _backward(self, tap: type) -> Any:
        from moe_lab.statistics.streaming import stream_back

        return stream_back(self.model, tap, self.text, out=self.out, fingerprint=self.job.settings, budget=self.budget)

    def routing(self, plan: Any) -> Any:
        from moe_lab.pruning.flops import layered_routing

        return layered_routing(self.model, plan, self.text, out=self.out, budget=self.budget)
