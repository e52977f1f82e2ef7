"""A step: its identity, inputs and work; and its provenance or error."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import platform
import re
import resource
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, fields
from functools import cache, cached_property, wraps
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, dataclass_transform

import moe_lab
from moe_lab.config import LauncherConfig, ModelConfig
from moe_lab.config.base import identity
from moe_lab.errors import DISK_FULL, Unavailable, UserError, mask
from moe_lab.evaluation.interpreters import installed
from moe_lab.json_files import Damaged, read_json
from moe_lab.machine import processor
from moe_lab.models.config_json import ROOM, Size
from moe_lab.paths import shortened

Result = TypeVar("Result")
BASE = 600 * 2**20
"""Bytes of Python with torch and transformers loaded."""
LONGEST_LABEL = 200
"""Most bytes of a label: it leaves room for longer names that are made from a folder's name."""


def canonical(document: Any) -> str:
    """JSON text that is equal for equal documents: sorted keys, no spaces, no NaN."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(document: Any) -> str:
    """sha256 of the canonical JSON of `document`, in hexadecimal."""
    return sha256(canonical(document).encode()).hexdigest()


MEANING = "4"
"""Changes the id of every step. It goes up where results of earlier versions may be wrong, so that
none is found again; CHANGELOG.md says which."""


class Identified(NamedTuple):
    """The identity of a setting: a JSON document, and its sha256."""

    document: Any
    digest: str


def once(function: Callable[..., Result]) -> Callable[..., Result]:
    """The function, called once for equal arguments: words and numbers count by value, objects by
    identity. These are kept, so that no identity is used again."""
    known: dict[tuple[Any, ...], tuple[Any, Result]] = {}

    @wraps(function)
    def remembered(*arguments: Any) -> Result:
        key = tuple(
            [
                (type(part), part) if isinstance(part, (str, int, float)) else id(part)
                for part in arguments
            ]
        )
        if key not in known:
            known[key] = (arguments, function(*arguments))
        return known[key][1]

    return remembered


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """A context in which Python does not search for garbage; what is there at its end it leaves
    alone later, too. It stays until the command ends, and half of the time of a large study would
    go into searching it again and again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@once
def identified(setting: Any) -> Identified:
    """The identity of a setting. Many steps share a group of settings, so that it is computed once
    for each object."""
    document = identity(setting)
    return Identified(document, digest(document))


Said = tuple["Step | Identified", str]
"""An input step, or the identity of a setting; and the line that says so in the text whose hash is
an id."""


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field,))
class Parts:
    """Fields that several steps have in common, as one field of each: its fields count as those of
    the step. A class that is derived from it is a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, eq=False)(cls)

    runtime: ClassVar[frozenset[str]] = frozenset()
    """Fields that determine how the work is done (device, paths, permissions), and not what comes
    out."""

    @cached_property
    def said(self) -> dict[str, Said]:
        """Role -> input step or identity of a setting, with its line, of all that is said. Kept, as
        many steps share these fields; of a step itself, only once it is asked for."""
        return _said(self)


def _said(parts: Parts) -> dict[str, Said]:
    said: dict[str, Said] = {}
    for name in _fields(type(parts)):  # type: ignore[arg-type]
        value = getattr(parts, name)
        if isinstance(value, Parts) and not isinstance(value, Step):
            said.update(value.said)
        elif value is not None:
            for role, part in value.items() if type(value) is dict else ((name, value),):
                if isinstance(part, Step):
                    said[role] = part, f"{role}<{part.id}"
                else:
                    setting = identified(part)
                    said[role] = setting, f"{role}={setting.digest}"
    return said


class Step(Parts):
    """One cached, restartable piece of work. A kind of step is a subclass.

    Fields that are steps are its inputs; all other fields, by `identity`, are its settings. Both
    together are its own identity, except the fields named in `runtime`. A field that is None says
    nothing, that of `Parts` counts as the fields in it, and that of a dictionary of steps as its
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
        said = _said(self).values()  # not kept: steps are many
        lines = [MEANING, self.kind, *sorted([line for _, line in said])]
        object.__setattr__(self, "id", sha256("\n".join(lines).encode()).hexdigest())
        inputs = [part for part, _ in said if type(part) is not Identified]
        object.__setattr__(self, "needs", (*inputs, *self.merges))

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
        return {role: part for role, (part, _) in self.said.items() if isinstance(part, Step)}

    @property
    def settings(self) -> dict[str, Any]:
        """Role -> identity of a setting."""
        return {
            role: part.document
            for role, (part, _) in self.said.items()
            if isinstance(part, Identified)
        }

    @property
    def folder(self) -> str:
        """Path inside the store: kind, readable label, and enough of the id to be unique."""
        return f"{self.kind}/{shortened(self.label(), LONGEST_LABEL)}-{self.id[:12]}"

    def document(self) -> dict[str, Any]:
        """The identity in full, as stored beside the result for readers."""
        inputs = {role: step.folder for role, step in self.inputs.items()}
        return {"id": self.id, "kind": self.kind, "settings": self.settings, "inputs": inputs}

    def __getstate__(self) -> dict[str, Any]:
        """Fields and identity: another process, maybe later and on another machine, does not find
        it out again."""
        return {**self.__dict__, "said": self.said}


@cache
def _fields(parts: type[Parts]) -> tuple[str, ...]:
    """The fields of a class that count, without those that it and the classes it is derived from
    name in `runtime`."""
    runtime = {name for each in parts.__mro__ for name in vars(each).get("runtime", ())}
    return tuple(field.name for field in fields(parts) if field.init and field.name not in runtime)  # type: ignore[arg-type]


KINDS: dict[str, type[Step]] = {}
"""All kinds of step by name; filled when `moe_lab.study.steps` is imported."""


def unmerged(steps: Iterable[Step], finished: Set[str]) -> list[Step]:
    """`steps` without those that are merged into a finished step. `finished`: ids of finished
    steps."""
    steps = list(steps)
    merged = {share.id for step in steps if step.id in finished for share in step.merges}
    return [step for step in steps if step.id not in merged]


NO_ROOM = (
    "the disk of the store is full: make room and start the same command again, what is "
    "finished is kept"
)
TRANSIENT = {
    *DISK_FULL,
    errno.EIO,
    errno.ENOMEM,
    errno.EROFS,
    errno.ESTALE,
    errno.ENODEV,
    errno.ENOTCONN,
}
"""Numbers of errors that are the machine's fault, not the work's: the next run tries the step
again."""


def error_document(error: BaseException) -> dict[str, Any]:
    """An exception as JSON: a message for the user, the trace for the log, and whether a rerun
    should try again."""
    text = str(error) or type(error).__name__
    transient = isinstance(error, (MemoryError, Unavailable)) or (
        isinstance(error, OSError) and error.errno in TRANSIENT
    )
    if type(error).__name__ in ("OutOfMemoryError", "MemoryError"):
        text = f"out of memory: a smaller batch_size, or a device with more of it, helps ({text})"
        transient = True
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        text = NO_ROOM
    return {
        "message": mask(text),
        "type": type(error).__name__,
        "user": isinstance(error, UserError) or transient,
        "transient": transient,
        "environment": _is_of_environment(error),
        "trace": ""
        if isinstance(error, UserError)
        else mask("".join(traceback.format_exception(error))),
        "code": code_state(),
    }


MISSING_SYMBOL = re.compile(
    "undefined symbol|cannot open shared object file|symbol not found|No module named|cannot "
    "import name"
)
"""In messages of exceptions; also in those of other processes, which arrive as texts."""


def _is_of_environment(error: BaseException | None) -> bool:
    """Whether an exception, or its cause, is about what is installed: a package, a name in one, or
    a library."""
    while error is not None:
        of_module = isinstance(error, AttributeError) and isinstance(error.obj, ModuleType)
        if isinstance(error, ImportError) or of_module or MISSING_SYMBOL.search(str(error)):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


NOTED = "code_state.json"
"""File in a copy of the package for Slurm jobs with the `code_state` of the original."""


@cache
def code_state() -> dict[str, Any]:
    """Version of moe_lab; in a checkout also the commit and a digest of edits and new files that
    are not committed."""
    noted = Path(moe_lab.__file__).parent / NOTED
    with contextlib.suppress(FileNotFoundError, Damaged):
        copied: dict[str, Any] = read_json(noted, {"version": str})
        return copied
    state: dict[str, Any] = {"version": moe_lab.__version__}

    def git(*words: str) -> str:  # also in a checkout that a colleague owns
        line = ("git", "-c", "safe.directory=*", *words)
        done = subprocess.run(line, cwd=noted.parent, capture_output=True, check=True)
        return done.stdout.decode(errors="surrogateescape")

    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # no git, or not a checkout
        # an environment may lie in a checkout of something else
        git("ls-files", "--error-unmatch", "__init__.py")
        edited = git("diff", "HEAD", "--", ".")
        new = git("ls-files", "--others", "--exclude-standard", "-z").split("\0")[:-1]
        files = {
            file: path
            for file in new
            if (path := noted.parent / file).is_file() and os.access(path, os.R_OK)
        }
        edited += "".join(
            f"{file} {sha256(path.read_bytes()).hexdigest()}" for file, path in files.items()
        )
        state |= {
            "commit": git("rev-parse", "HEAD").strip(),
            "edits": digest(edited)[:12] if edited else None,
        }
    return state


PACKAGES = (
    *("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "datasets"),
    *("lm-eval", "evalplus", "bitsandbytes"),
)


DRIVER = Path("/proc/driver/nvidia/version")


def provenance(start: float) -> dict[str, Any]:
    """Provenance of a step that began at `start` (seconds since the epoch): code, versions,
    machine, time, memory; and threads of torch, and names, driver and peak bytes of the GPUs that
    it used, each None in a process that used none.
    """
    torch: Any = sys.modules.get("torch")
    on_gpu = torch is not None and torch.cuda.is_initialized()
    gpus = range(torch.cuda.device_count()) if on_gpu else ()
    driver = torch.version.cuda if on_gpu else None
    return {
        "code": code_state(),
        "python": platform.python_version(),
        "versions": {name: installed(name) for name in PACKAGES},
        "host": socket.gethostname(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "processor": processor(),
        "started": start,
        "seconds": round(time.time() - start, 3),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024),
        "threads": torch.get_num_threads() if torch else None,
        "gpus": [torch.cuda.get_device_name(number) for number in gpus] if on_gpu else None,
        "driver": DRIVER.read_text().splitlines()[0] if on_gpu and DRIVER.is_file() else driver,
        "peak_gpu_memory_bytes": sum(map(torch.cuda.max_memory_allocated, gpus))
        if on_gpu
        else None,
    }
