"""A kind of step: one object next to the function that does its work; the rest of `moe_lab.study` asks this object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

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
    """No weight: it works on files of other steps, takes little time and memory, and may be about several models."""
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
    return float(text["rows"] * text["length"])


def never(_: Step) -> bool:
    return False


def always(_: Step) -> bool:
    return True


def is_changed(step: Step) -> bool:
    """Whether the step's model has weights of its own: it was fine-tuned or quantised."""
    return "finetune" in step.inputs or "storage" in step.parts


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of step. Every instance in a module of this package is registered in `KINDS` by its name."""

    name: str
    """The folder in the store, and the word in settings and tables."""
    work: Callable[[Job], None]
    """Reads the job's inputs and leaves files in its scratch folder. Imports torch inside."""
    step: Callable[..., Step]
    """(builder, cell) -> the step: its parts, inputs, runtime settings and label. Kinds about a pruned model take
    (pruned model), those that ask it something (pruned model, benchmark)."""
    checks: tuple[Callable[[Cell], None], ...] = ()
    """Of a kind that makes plans: each raises UserError for a cell whose plan cannot be made."""
    reads: Reads = Reads.NOTHING
    reads_text: bool = False
    """Whether a criterion or an allocation that needs the step depends on the calibration set."""
    units: Callable[[Settings], float] = text_units
    """What the seconds of two steps of this kind and one model are proportional to."""
    checkpoint_reads: int = 0
    """How often the checkpoint is read when one decoder layer is in memory at a time; 0 where that is impossible."""
    backward: Callable[[Step], bool] = never
    """Whether gradients come back through the layers."""
    second_model: Callable[[Step], bool] = is_changed
    """Whether a second copy of the weights is held."""
    batch_memory: Callable[[Kind, Step, Size], float] = token_memory
    """Bytes that a batch takes while the whole model is loaded."""
    layer_memory: Callable[[Size], float] = lambda size: 0.0
    """Bytes that are held of every layer whose weights are in memory, beyond the weights."""
    memory: float | None = None
    """Bytes of the whole process, where no model decides."""
    writes: Callable[[Kind, Step, Size], float] = hidden_states
    """Bytes left on disk at most, where they are many."""
    own_process: bool = False
    """Whether it runs foreign code, so that launcher=inline runs it in a worker process."""
    packing: Packing = Packing.ONE
    packed_as: Callable[[Step], str | None] = lambda step: None
    """Name of another kind into whose Slurm jobs the step goes; None for its own."""

    @property
    def needs_whole_model(self) -> bool:
        """Whether it runs the model and cannot do so with one decoder layer in memory at a time."""
        return self.reads is Reads.MODEL and not self.checkpoint_reads

    def loads_model(self, step: Step) -> bool:
        """Whether `step` runs the model. A cost that does not depend on a text is counted without it."""
        on = {"calibration", "text", "benchmark"}
        return self.reads is Reads.MODEL and not on.isdisjoint(step.runtime)


KINDS: dict[str, Kind] = {}
"""All kinds of step by name; filled by the package."""


def needed_kind(name: str) -> Kind:
    """The kind of step that a criterion or an allocation needs. UserError with the nearest name when there is none."""
    if name not in KINDS:
        raise unknown("step in needs", name, KINDS)
    return KINDS[name]
