"""A step: its inputs, settings and work. A kind of step is a subclass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import field
from hashlib import sha256
from typing import Any, ClassVar, Literal

from moe_lab.config import LauncherConfig, ModelConfig
from moe_lab.models.config_json import ROOM, Size
from moe_lab.paths import shortened
from moe_lab.study.identity import MEANING, IdentityEntry, StepFields

BASE = 600 * 2**20
"""Bytes of Python with torch and transformers loaded."""
LONGEST_LABEL = 200
"""Most bytes of a label: it leaves room for longer names that are made from a folder's name."""


class Step(StepFields):
    """One cached, restartable piece of work. A kind of step is a subclass.

    Fields that are steps are its inputs; all other fields, by `config.base.identity`, are its
    settings. Both, except the fields named in `runtime`, are its identity. A field that is None
    does not count, one of `StepFields` counts as the fields in it, and a dictionary as its
    entries."""

    kind: ClassVar[str] = ""
    """The folder in the store, and the name in settings and tables. It registers the class."""
    loads: ClassVar[Literal["nothing", "checkpoint", "model"]] = "nothing"
    """What it reads of a model: no weights, as it works on files of other steps, and may concern
    several models; the files once, with a piece of them in memory at a time; or the model, which is
    run."""
    reads_text: ClassVar[bool] = False
    """Whether a criterion or an allocation that needs such a step depends on the calibration
    set."""
    streams: ClassVar[bool] = False
    """Whether it can run the model with one decoder layer in memory at a time
    (calibration.engine=streamed)."""
    small: ClassVar[bool] = False
    """Whether its result is small as a rule, and read by `Files.read` alone: then it may be kept in
    a pack."""
    foreign: ClassVar[bool] = False
    """Whether it runs foreign code; launcher=inline then runs it in a worker process."""
    per_job: ClassVar[Literal["", "steps", "cells"]] = ""
    """What one Slurm job does: one step; many, where each takes seconds; or those of
    `launcher.cells_per_job` pruned models of one model, whose weights are loaded once (as many
    steps, where they load no model)."""
    process_memory: ClassVar[float] = BASE
    """Bytes of the whole process of a step that loads nothing."""

    merges: tuple[Step, ...] = field(default=(), kw_only=True)
    """Steps that each do a share of the work; this step then only merges their results."""
    plugins: tuple[Mapping[str, str], ...] = field(default=(), kw_only=True)
    """Where the plugins are that its work calls, as by `plugins.place`."""
    id: str = field(init=False)
    """sha256 over kind, settings, inputs and `MEANING`."""
    needs: tuple[Step, ...] = field(init=False, repr=False)
    """The steps that have to be finished before this one starts."""
    runtime: ClassVar[frozenset[str]] = frozenset({"merges", "plugins"})

    def __post_init__(self) -> None:
        # a study has many steps, and few are asked for theirs
        entries = self.collect_entries().values()
        lines = [MEANING, self.kind, *sorted([entry.line for entry in entries])]
        object.__setattr__(self, "id", sha256("\n".join(lines).encode()).hexdigest())
        inputs = [entry.value for entry in entries if isinstance(entry.value, Step)]
        object.__setattr__(self, "needs", (*inputs, *self.merges))

    def entries_as(self, role: str) -> Mapping[str, IdentityEntry]:
        """An input counts by its id."""
        return {role: IdentityEntry(self, f"{role}<{self.id}")}

    def conditions(self, launcher: LauncherConfig) -> Iterable[tuple[Any, ...]]:
        """What must hold where it is started, such as permissions: checks, which raise UserError or
        give sentences, and their arguments. `launcher.python`: that it runs where other programs
        are installed."""
        return ()

    def label(self) -> str:
        """The readable part of its folder's name."""
        raise NotImplementedError

    def work(self, files: Any) -> None:
        """Do it: read finished steps, write to `files.out` (`Files` of steps/files.py). Imports
        torch inside."""
        raise NotImplementedError

    @property
    def about(self) -> ModelConfig | None:
        """The model whose weights it reads; None for a step that works on files of other steps."""
        return None

    @property
    def runs_model(self) -> bool:
        """Whether it loads the model and runs it."""
        return self.loads == "model" and not self.merges

    @property
    def is_layered(self) -> bool:
        """Whether it runs the model with one decoder layer in memory at a time."""
        return False

    def memory(self, size: Size) -> float:
        """Bytes that a step holds which reads a model of this size, at most."""
        return BASE + ROOM * size.bytes

    def disk(self, size: Size) -> float:
        """Upper bound of the bytes that it writes about a model of this size, counted only where
        they are many."""
        return 0.0

    def units(self) -> float:
        """Amount of work: the seconds that steps of this kind take are proportional to it."""
        return 1.0

    def pace(self) -> list[Any]:
        """What decides the seconds of a unit, JSON-ready: steps of one kind with equal values take
        equally long."""
        return [self.inputs.get("facts", self).id]  # of the model

    def job(self) -> str:
        """The kind of the Slurm jobs that also do this step."""
        return self.kind

    @property
    def inputs(self) -> dict[str, Step]:
        """Role -> step whose result it reads."""
        values = {role: entry.value for role, entry in self.identity_entries.items()}
        return {role: value for role, value in values.items() if isinstance(value, Step)}

    @property
    def settings(self) -> dict[str, Any]:
        """Role -> JSON document of a setting."""
        values = {role: entry.value for role, entry in self.identity_entries.items()}
        return {role: value for role, value in values.items() if not isinstance(value, Step)}

    @property
    def folder(self) -> str:
        """Path inside the store: kind, readable label, and enough of the id to be unique."""
        return f"{self.kind}/{shortened(self.label(), LONGEST_LABEL)}-{self.id[:12]}"

    def document(self) -> dict[str, Any]:
        """The identity in full, as stored beside the result for readers."""
        inputs = {role: step.folder for role, step in self.inputs.items()}
        return {"id": self.id, "kind": self.kind, "settings": self.settings, "inputs": inputs}

    def __getstate__(self) -> dict[str, Any]:
        """Fields and identity, which another process does not compute again: files may have changed
        by then."""
        return {**self.__dict__, "identity_entries": self.identity_entries}


KINDS: dict[str, type[Step]] = {}
"""All kinds of step by name; filled when `moe_lab.study.steps` is imported."""


def unmerged(steps: Iterable[Step], finished: Set[str]) -> list[Step]:
    """`steps` without those that are merged into a finished step. `finished`: ids of finished
    steps."""
    steps = list(steps)
    merged = {share.id for step in steps if step.id in finished for share in step.merges}
    return [step for step in steps if step.id not in merged]
