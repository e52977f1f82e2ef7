"""A step: its inputs, settings, identity and work. A kind of step is a subclass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, fields
from functools import cached_property
from hashlib import sha256
from typing import Any, ClassVar, NamedTuple, dataclass_transform

from moe_lab.config.base import identity
from moe_lab.json_files import Document, digest
from moe_lab.paths import shorten
from moe_lab.result_files import ID_DIGITS
from moe_lab.study.resources import Resources

LONGEST_LABEL = 200
"""Maximum bytes of a label. File systems allow names of 255 bytes, and names of logs and scratch
folders are longer than the label."""

MEANING = "4"
"""Part of the id of every step. It is raised when results of earlier versions may be wrong, so that
these results are not found."""


class IdentityEntry(NamedTuple):
    """What a field contributes to the identity of a step."""

    value: Any
    """The input step, or the JSON document of a setting."""
    line: str
    """Line that stands for the field in the text whose hash is the id of the step."""


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field,))
class StepFields:
    """A group of fields that several kinds of steps share. The fields of the group count as fields
    of the step. Subclasses become frozen dataclasses."""

    runtime: ClassVar[tuple[str, ...]] = ()
    """Fields that determine how the work is done (device, paths, permissions), and not its
    result."""
    _identity_fields: ClassVar[tuple[str, ...]] = ()
    """Names of the fields that determine the identity."""

    def __init_subclass__(cls) -> None:
        """Make the subclass a frozen dataclass, and set its `_identity_fields`."""
        dataclass(frozen=True, eq=False)(cls)
        runtime = {name for base in cls.__mro__ for name in vars(base).get("runtime", ())}
        as_dataclass: Any = cls  # type checkers do not see that it is a dataclass
        cls._identity_fields = tuple(
            member.name
            for member in fields(as_dataclass)
            if member.init and member.name not in runtime
        )

    @cached_property
    def identity_entries(self) -> dict[str, IdentityEntry]:
        """Role -> what a field contributes to the identity of the step, for all fields that are not
        None and not in `runtime`. The role is the name of the field, or a key of a field that is a
        dictionary. A group of fields contributes its own entries."""
        return self.collect_entries()

    def collect_entries(self) -> dict[str, IdentityEntry]:
        """Compute `identity_entries` without caching them."""
        entries: dict[str, IdentityEntry] = {}
        for name in self._identity_fields:
            value = getattr(self, name)
            if type(value) is dict:
                for role, role_value in value.items():
                    entries.update(_entries(role, role_value))
            elif value is not None:
                entries.update(_entries(name, value))
        return entries


def _entries(role: str, value: Any) -> Mapping[str, IdentityEntry]:
    """Role -> entry, for the value of a field or of a key of a dictionary."""
    if isinstance(value, Step):
        return {role: IdentityEntry(value, f"{role}<{value.id}")}
    if isinstance(value, StepFields):
        return value.identity_entries
    document = identity(value)
    return {role: IdentityEntry(document, f"{role}={digest(document)}")}


class Step(StepFields):
    """One cached, restartable piece of work. A kind of step is a subclass.

    Fields whose values are steps are the inputs. All other fields are settings. If a field is a
    group (`StepFields`) or a dictionary, each of its values is an input or a setting. Fields that
    are None, and fields in `runtime`, are neither. Inputs and settings together are the identity of
    the step."""

    kind: str = field(default="", init=False)
    """Name of the kind in settings and tables, and of its folder in the store. A class with several
    kinds has a dictionary `kinds` instead: name of a kind -> what is particular to the kind. Each
    step of such a class sets its own `kind`."""
    reads_text: ClassVar[bool] = False
    """Whether a criterion or an allocation that needs such a step depends on the calibration
    set."""
    whole_model: ClassVar[bool] = False
    """Whether the step needs all weights in memory at once, so that calibration.engine=streamed
    cannot run it."""
    small: ClassVar[bool] = False
    """Whether the result may be moved to a pack. This requires that the result is usually small,
    and that only `Files.read` reads the result."""

    merged_steps: tuple[Step, ...] = field(default=(), kw_only=True)
    """Steps that each do a share of the work; this step then only merges their results."""
    plugins: tuple[Mapping[str, str], ...] = field(default=(), kw_only=True)
    """Locations of the plugins that `work` calls, see `plugins.module_location`."""
    id: str = field(init=False)
    """sha256 over kind, settings, inputs and `MEANING`."""
    needs: tuple[Step, ...] = field(init=False, repr=False)
    """The steps that have to be finished before this one starts."""
    runtime: ClassVar[tuple[str, ...]] = ("kind", "merged_steps", "plugins")

    def __post_init__(self) -> None:
        """Set `id` and `needs`."""
        # the property `identity_entries` is cached: many steps would keep it and never use it again
        entries = self.collect_entries().values()
        lines = [MEANING, self.kind, *sorted([entry.line for entry in entries])]
        object.__setattr__(self, "id", sha256("\n".join(lines).encode()).hexdigest())
        inputs = [entry.value for entry in entries if isinstance(entry.value, Step)]
        object.__setattr__(self, "needs", (*inputs, *self.merged_steps))

    def label(self) -> str:
        """The readable part of the name of the step's folder."""
        raise NotImplementedError

    def resources(self) -> Resources:
        """Resources and amount of work of the step; by default those of a step that takes about a
        second and runs no model."""
        # such steps of one model take about the same time
        return Resources(pace=[getattr(self, "facts", self).id], steps_per_job="short")

    def work(self, files: Any) -> None:
        """Read the results of the inputs, and write the result of this step to the folder
        `files.out`. `files`: a `steps.files.Files`."""
        raise NotImplementedError

    @property
    def inputs(self) -> dict[str, Step]:
        """Role -> step whose result this step reads, without `merged_steps`."""
        entries = self.identity_entries.items()
        return {role: entry.value for role, entry in entries if isinstance(entry.value, Step)}

    @property
    def settings(self) -> Document:
        """Role -> JSON document of the setting."""
        entries = self.identity_entries.items()
        return {role: entry.value for role, entry in entries if not isinstance(entry.value, Step)}

    @property
    def id_start(self) -> str:
        """First digits of the id, in the name of the step's folder."""
        return self.id[:ID_DIGITS]

    @property
    def folder(self) -> str:
        """Path inside the store."""
        return f"{self.kind}/{shorten(self.label(), LONGEST_LABEL)}-{self.id_start}"

    def __getstate__(self) -> dict[str, Any]:
        """Fields and identity entries. The process that unpickles the step must not compute the
        entries again: files may have changed by then."""
        return {**self.__dict__, "identity_entries": self.identity_entries}


def identity_document(step: Step) -> Document:
    """The identity of a step as a JSON document. "settings": role -> JSON document. "inputs": role
    -> folder of the input step."""
    inputs = {role: needed.folder for role, needed in step.inputs.items()}
    return {"id": step.id, "kind": step.kind, "settings": step.settings, "inputs": inputs}


KINDS: dict[str, type[Step]] = {}
"""All kinds of step by name; filled when `moe_lab.study.steps` is imported."""


def unmerged(steps: Iterable[Step], finished: Set[str]) -> list[Step]:
    """`steps` without the steps whose results were merged by a finished step. `finished`: ids of
    finished steps."""
    steps = list(steps)
    merged_ids = {part.id for step in steps if step.id in finished for part in step.merged_steps}
    return [step for step in steps if step.id not in merged_ids]
