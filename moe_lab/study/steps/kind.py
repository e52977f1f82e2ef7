"""`Kind`: what identifies the steps of one kind, what they do, and which resources they need.

Each kind is one object next to the function that does its work; other modules of `moe_lab.study` read it from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from moe_lab.allocation.grouping import GROUPINGS
from moe_lab.errors import unknown
from moe_lab.grid import Cell
from moe_lab.models.config_json import Size
from moe_lab.study.step import Job, Step
from moe_lab.study.steps.memory import hidden_states, token_memory

Settings = Mapping[str, Mapping[str, Any]]
"""Role -> the settings that identify a step, as in `Step.parts` and in the step.json of a finished one."""


class Reads(Enum):
    """What a step reads of a model."""

    NOTHING = 0
    """No weights: it works on files of other steps, takes little time and memory, and may concern several models."""
    CHECKPOINT = 1
    """The files once, on the CPU, with a piece of them in memory at a time."""
    MODEL = 2
    """The model is loaded and run, if the step has a text or a benchmark to run it on."""


class Packing(Enum):
    """How many steps one Slurm job does."""

    ONE = 0
    SMALL = 1
    """`launcher.steps_per_job` steps."""
    GRADING = 2
    """`launcher.cells_per_job` steps."""
    CELLS = 3
    """The steps of `launcher.cells_per_job` pruned models of one model, whose weights are loaded once."""


def text_units(settings: Settings) -> float:
    """Tokens of the text that a step reads; 1 for a step without a text."""
    text = settings.get("calibration") or settings.get("text") or {"rows": 1, "length": 1}
    share = settings.get("rows") or {"first": 0, "end": text["rows"]}
    return float((share["end"] - share["first"]) * text["length"])


def never(_: Step) -> bool:
    return False


def always(_: Step) -> bool:
    return True


def is_changed(step: Step) -> bool:
    """Whether the step's model has weights of its own: it was fine-tuned or quantised, or its experts are merged."""
    if "finetune" in step.inputs or "storage" in step.parts:
        return True
    made_by = step.inputs["plan"].parts.get("allocation") if "plan" in step.inputs else None
    return made_by is not None and made_by.settings.get("replacement") in GROUPINGS


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of step. Every instance in a module of this package is registered in `KINDS` by its name."""

    name: str
    """The folder in the store, and the name in settings and tables."""
    work: Callable[[Job], None]
    """Reads the job's inputs and writes files to its scratch folder. Imports torch inside the function."""
    step: Callable[..., Step]
    """(builder, cell) -> the step: its parts, inputs, runtime settings and label. Kinds about a pruned model take
    (pruned model) instead, and those that run a benchmark on it (pruned model, benchmark)."""
    checks: tuple[Callable[[Cell], None], ...] = ()
    """For kinds that make plans: each function raises UserError for a cell whose plan cannot be made."""
    reads: Reads = Reads.NOTHING
    reads_text: bool = False
    """Whether a criterion or an allocation that needs the step depends on the calibration set."""
    units: Callable[[Settings], float] = text_units
    """Amount of work: the seconds that steps of this kind take with one model are proportional to it."""
    checkpoint_reads: int = 0
    """How often the checkpoint is read when one decoder layer is in memory at a time; 0 where that is impossible."""
    backward: Callable[[Step], bool] = never
    """Whether gradients come back through the layers."""
    second_model: Callable[[Step], bool] = is_changed
    """Whether a second copy of the weights is held in memory."""
    batch_memory: Callable[[Kind, Step, Size], float] = token_memory
    """Bytes that a batch takes while the whole model is loaded."""
    layer_memory: Callable[[Size], float] = lambda size: 0.0
    """Bytes held for every layer whose weights are in memory, in addition to the weights."""
    buffers: Callable[[Size], float] = lambda size: 0.0
    """Bytes held for one layer at a time, however many have their weights in memory."""
    memory: float | None = None
    """Bytes of the whole process, where they do not depend on a model; None for the default."""
    writes: Callable[[Kind, Step, Size], float] = hidden_states
    """Upper bound of the bytes written to disk, counted only where they are many."""
    own_process: bool = False
    """Whether it runs foreign code; launcher=inline then runs it in a worker process."""
    packing: Packing = Packing.ONE
    packed_as: Callable[[Step], str | None] = lambda step: None
    """Name of another kind whose Slurm jobs also do the step; None for jobs of its own kind."""

    @property
    def needs_whole_model(self) -> bool:
        """Whether it runs the model and cannot do so with one decoder layer in memory at a time."""
        return self.reads is Reads.MODEL and not self.checkpoint_reads

    def loads_model(self, step: Step) -> bool:
        """Whether `step` runs the model. A cost step without a text, for example, does not."""
        on = {"calibration", "text", "benchmark"}
        return self.reads is Reads.MODEL and not step.merges and not on.isdisjoint(step.runtime)


KINDS: dict[str, Kind] = {}
"""All kinds of step by name; filled when the package is imported."""


def needed_kind(name: str) -> Kind:
    """The kind of step that a criterion or an allocation needs.

    Raises UserError, with the nearest name, when there is none.
    """
    if name not in KINDS:
        raise unknown("step in needs", name, KINDS)
    return KINDS[name]
