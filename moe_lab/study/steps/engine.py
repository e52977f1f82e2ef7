"""Passes over a text with the whole model in memory (`Resident`) or one decoder layer at a time (`Streamed`).

Both classes have the same methods. `Merged` has those for sums over rows, from passes that other steps made over shares
of the text.
"""

from __future__ import annotations

from pathlib import Path
from shutil import copyfile
from typing import Any

from moe_lab import allocation
from moe_lab.errors import UserError
from moe_lab.grid import Cell
from moe_lab.study.step import Job
from moe_lab.study.steps.builder import evidence_of
from moe_lab.study.steps.inputs import REPORT, STATISTICS, model_and_tokenizer, own_batches, rows
from moe_lab.study.steps.kind import KINDS


def check_engine(cell: Cell) -> None:
    """Raise UserError for calibration.engine=streamed with an allocation that needs the whole model in memory.

    Such an allocation runs the rest of the model again for every candidate.
    """
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
    """Open the job's model and text with the engine that calibration.engine names."""
    return Streamed(job) if job.text.engine == "streamed" else Resident(job)


def engine_or_parts(job: Job) -> Resident | Streamed | Merged:
    """The engine, for a job that runs the pass; the finished parts, for one that merges them (calibration.parts)."""
    return Merged(job) if job.merges else engine(job)


class Resident:
    """Passes with the whole model in memory."""

    def __init__(self, job: Job) -> None:
        self.job, self.out = job, Path(job.partial)
        self.model, tokenizer = model_and_tokenizer(job)
        self.text = rows(job, tokenizer)[own_batches(job)]

    def read(self, tap: type) -> Any:
        """Sums that `tap` gathers in a forward pass."""
        from moe_lab.statistics.observe import gather

        return gather(self.model, tap, self.text, out=self.out, fingerprint=self.job.settings)

    def gradients(self) -> Any:
        """All sums of a forward and a backward pass."""
        from moe_lab.statistics.gradients import GradientTap, gather_gradients

        about = {"out": self.out, "fingerprint": self.job.settings}
        return gather_gradients(self.model, GradientTap, self.text, checkpointing=self.job.text.checkpointing, **about)

    def weight_gradients(self) -> Any:
        """Sums of a forward and a backward pass with the gradients of weights."""
        from moe_lab.statistics.gradients import WeightGradientTap, gather_gradients

        return gather_gradients(self.model, WeightGradientTap, self.text, fingerprint=self.job.settings)

    def aligned(self, plan: Any) -> Any:
        """A plan with the channels of merged experts matched by activations and weights."""
        from moe_lab.pruning.alignment import align_by_activations, alignment_tap
        from moe_lab.statistics.observe import gather

        return align_by_activations(plan, gather(self.model, alignment_tap(plan), self.text, fingerprint={}).layers)

    def routing(self, plan: Any) -> Any:
        """The measured routing of the text under a plan."""
        from moe_lab.pruning.flops import measured_routing

        return measured_routing(self.model, plan, self.text)


class Streamed:
    """Passes with one decoder layer in memory at a time."""

    def __init__(self, job: Job) -> None:
        from moe_lab.models.streamed import open_streamed

        self.job, self.out = job, Path(job.partial)
        self.model, tokenizer = open_streamed(job.model)
        self.budget = job.text.activation_budget * 2**30
        """Bytes of hidden states that are kept in memory."""
        self.text = rows(job, tokenizer)[own_batches(job)]

    def read(self, tap: type) -> Any:
        from moe_lab.statistics.streaming import stream

        return stream(self.model, tap, self.text, out=self.out, fingerprint=self.job.settings, budget=self.budget)

    def gradients(self) -> Any:
        from moe_lab.statistics.gradients import GradientTap

        return self._backward(GradientTap)

    def weight_gradients(self) -> Any:
        from moe_lab.statistics.gradients import WeightGradientTap

        return self._backward(WeightGradientTap)

    def _backward(self, tap: type) -> Any:
        from moe_lab.statistics.streaming import stream_back

        return stream_back(self.model, tap, self.text, out=self.out, fingerprint=self.job.settings, budget=self.budget)

    def aligned(self, plan: Any) -> Any:
        from moe_lab.pruning.alignment import align_by_activations, alignment_tap

        return align_by_activations(plan, self.read(alignment_tap(plan)).layers)

    def routing(self, plan: Any) -> Any:
        from moe_lab.pruning.flops import layered_routing

        return layered_routing(self.model, plan, self.text, out=self.out, budget=self.budget)


class Merged:
    """Passes over shares of the text, whose sums are added up without the model."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.files = [Path(folder) / STATISTICS for folder in job.merges]
        self._check_names()
        copyfile(Path(job.merges[0]) / REPORT, job.output(REPORT))  # each share has the report on the whole text

    def _check_names(self) -> None:
        """Raise UserError unless all shares have the same sums: one may be older than a sum that others have."""
        from moe_lab.statistics.sums import names

        of_files = [names(file) for file in self.files]
        for file, own in zip(self.files, of_files, strict=True):
            if lacking := sorted(set().union(*of_files) - own):
                raise UserError(
                    f"calibration.parts={len(self.files)}: the part {'/'.join(file.parent.parts[-2:])} lacks "
                    f"{', '.join(lacking)}, which other parts have: it is older than these sums, so remove it from the "
                    "store and run again"
                )

    def read(self, tap: type | None = None) -> Any:
        """The sums of all shares together."""
        from moe_lab.statistics.sums import Statistics, header, merged, read

        about = {"kind": header(self.files[0])["kind"], "fingerprint": self.job.settings}
        return Statistics(merged(read(file, framework="pt") for file in self.files), about)

    def gradients(self) -> Any:
        """The same, of backward passes."""
        return self.read()

    def loss_rises(self) -> Any:
        """The mean rises of the loss over the tokens of all shares."""
        from moe_lab.statistics.sums import Statistics, merged_means

        shares = [Statistics.load(file) for file in self.files]
        about = {"kind": shares[0].header["kind"], "fingerprint": self.job.settings}
        return Statistics(merged_means(shares), about)
