"""A step: its identity, the job that a process gets in order to do it, and its provenance or error."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import resource
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import moe_lab
from moe_lab.config import BackendConfig, BenchmarkConfig, CalibrationConfig, ExportConfig, ModelConfig, RecoveryConfig
from moe_lab.errors import DISK_FULL, Unavailable, UserError
from moe_lab.evaluation.harness import installed
from moe_lab.evaluation.sandbox.policy import Policy
from moe_lab.json_files import Damaged, read_json
from moe_lab.paths import shortened
from moe_lab.secrets import mask

if TYPE_CHECKING:
    from moe_lab.study.store import Store

LONGEST_LABEL = 200
"""Most bytes of a label: it leaves room for longer names that are made from a folder's name."""


def canonical(document: Any) -> str:
    """JSON text that is equal for equal documents: sorted keys, no spaces, no NaN."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(document: Any) -> str:
    """sha256 of the canonical JSON of `document`, in hexadecimal."""
    return sha256(canonical(document).encode()).hexdigest()


MEANING = "2"
"""Changes the id of every step. It goes up where results of earlier versions may be wrong, so that none is found again;
CHANGELOG.md says which."""


@dataclass(frozen=True, eq=False)
class Part:
    """Settings that change a result. Many steps share one part, so that its digest is computed once."""

    settings: Mapping[str, Any]

    @cached_property
    def digest(self) -> str:
        return digest(self.settings)


@dataclass(frozen=True, eq=False)
class Step:
    """One cached, restartable piece of work.

    `parts` and `inputs` are its identity, by role. `runtime` (device, batch size, paths, permissions) determines how
    it is done on this machine and never its result; `label` makes its folder readable. `merges` are steps that each do
    a share of the work; this step then only merges their results. They are not in its identity, because the result is
    the same up to rounding however the work is divided.
    """

    kind: str
    label: str
    parts: Mapping[str, Part] = field(default_factory=dict)
    inputs: Mapping[str, Step] = field(default_factory=dict)
    runtime: Mapping[str, Any] = field(default_factory=dict)
    merges: Sequence[Step] = ()

    @property
    def needs(self) -> tuple[Step, ...]:
        """The steps that have to be finished before this one starts."""
        return (*self.inputs.values(), *self.merges)

    @cached_property
    def id(self) -> str:
        """sha256 over kind, parts, inputs and `MEANING`."""
        lines = [f"{role}={part.digest}" for role, part in self.parts.items()]
        lines += [f"{role}<{step.id}" for role, step in self.inputs.items()]
        return sha256("\n".join([MEANING, self.kind, *sorted(lines)]).encode()).hexdigest()

    @cached_property
    def folder(self) -> str:
        """Path inside the store: kind, readable label, and enough of the id to be unique."""
        return f"{self.kind}/{shortened(self.label, LONGEST_LABEL)}-{self.id[:12]}"

    def document(self) -> dict[str, Any]:
        """The identity in full, as stored beside the result."""
        return {
            "id": self.id,
            "kind": self.kind,
            "settings": {role: dict(part.settings) for role, part in self.parts.items()},
            "inputs": {role: step.folder for role, step in self.inputs.items()},
        }


def unmerged(steps: Iterable[Step], finished: Set[str]) -> list[Step]:
    """`steps` without those that are merged into a finished step. `finished`: ids of finished steps."""
    steps = list(steps)
    merged = {share.id for step in steps if step.id in finished for share in step.merges}
    return [step for step in steps if step.id not in merged]


NO_ROOM = "the disk of the store is full: make room and start the same command again, what is finished is kept"
TRANSIENT = {*DISK_FULL, errno.EIO, errno.ENOMEM, errno.EROFS, errno.ESTALE, errno.ENODEV, errno.ENOTCONN}
"""Numbers of errors that are the machine's fault, not the work's: the next run tries the step again."""


def log_of(store: Store, name: str) -> Path:
    """File with what the step `name` (kind/label-id) printed in worker processes; there is none if it printed
    nothing."""
    return store.root / "logs" / f"{name}.log"


@dataclass(frozen=True)
class Job:
    """A step as a process gets it: what to do (`kind`, `settings`, `inputs`), how (`runtime`, `merges`), and where
    (`scratch` for the result, `partial` for files to resume from)."""

    kind: str
    name: str
    settings: dict[str, Any]
    runtime: dict[str, Any]
    inputs: dict[str, str]
    scratch: str
    partial: str
    log: str
    """File for what is printed meanwhile."""
    merges: list[str] = field(default_factory=list)
    """Folders of the steps whose results are merged, in their order; empty for a step that does all of its work."""

    @classmethod
    def of(cls, step: Step, store: Store, scratch: Path) -> Job:
        """The job that fills `scratch` with the result of `step`."""
        return cls(
            kind=step.kind,
            name=step.folder,
            settings={role: dict(part.settings) for role, part in step.parts.items()},
            runtime=dict(step.runtime),
            inputs={role: str(store.path(needed).absolute()) for role, needed in step.inputs.items()},
            scratch=str(scratch.absolute()),
            partial=str(store.partial(step).absolute()),
            log=str(log_of(store, step.folder).absolute()),
            merges=[str(store.path(share).absolute()) for share in step.merges],
        )

    @cached_property
    def model(self) -> ModelConfig:
        """The model, and how it is loaded."""
        return ModelConfig(**self.runtime["model"])

    @cached_property
    def text(self) -> CalibrationConfig:
        """The text that is read: the calibration set, or the step's other text."""
        return CalibrationConfig(**(self.runtime.get("calibration") or self.runtime["text"]))

    @cached_property
    def benchmark(self) -> BenchmarkConfig:
        """The benchmark that the model is evaluated on."""
        return BenchmarkConfig(**self.runtime["benchmark"])

    @cached_property
    def backend(self) -> BackendConfig:
        """What generates texts."""
        return BackendConfig(**self.runtime["backend"])

    @cached_property
    def recovery(self) -> RecoveryConfig:
        """How a pruned model is fine-tuned."""
        return RecoveryConfig(**self.runtime["recovery"])

    @cached_property
    def export(self) -> ExportConfig:
        """How a checkpoint is written."""
        return ExportConfig(**self.runtime["export"])

    @cached_property
    def policy(self) -> Policy:
        """Permissions of the programs that are run for grading."""
        return Policy(**self.runtime["policy"])

    def input(self, role: str, file: str) -> Path:
        """A file of the finished step in `role`."""
        return Path(self.inputs[role]) / file

    def output(self, file: str) -> Path:
        """A file of this step's result."""
        return Path(self.scratch) / file


def error_document(error: BaseException) -> dict[str, Any]:
    """An exception as JSON: a message for the user, the trace for the log, and whether a rerun should try again."""
    text = str(error) or type(error).__name__
    transient = isinstance(error, (MemoryError, Unavailable)) or (
        isinstance(error, OSError) and error.errno in TRANSIENT
    )
    if type(error).__name__ in ("OutOfMemoryError", "MemoryError"):
        text, transient = f"out of memory: a smaller batch_size, or a device with more of it, helps ({text})", True
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        text = NO_ROOM
    return {
        "message": mask(text),
        "type": type(error).__name__,
        "user": isinstance(error, UserError) or transient,
        "transient": transient,
        "trace": "" if isinstance(error, UserError) else mask("".join(traceback.format_exception(error))),
        "code": code_state(),
    }


NOTED = "code_state.json"
"""File in a copy of the package for Slurm jobs with the `code_state` of the original."""


@lru_cache(maxsize=1)
def code_state() -> dict[str, Any]:
    """Version of moe_lab; in a checkout also the commit and a digest of uncommitted edits."""
    noted = Path(moe_lab.__file__).parent / NOTED
    with contextlib.suppress(FileNotFoundError, Damaged):
        copied: dict[str, Any] = read_json(noted, {"version": str})
        return copied
    state: dict[str, Any] = {"version": moe_lab.__version__}
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # no git, or not a checkout
        edited = _git("diff", "HEAD", "--", ".")
        state |= {"commit": _git("rev-parse", "HEAD").strip(), "edits": digest(edited)[:12] if edited else None}
    return state


def edits() -> str:
    """Uncommitted edits of the package as a diff; "" without edits, and outside a checkout."""
    if code_state().get("edits") is None:
        return ""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # a copy of the package has no repository
        return _git("diff", "HEAD", "--", ".")
    return ""


def _git(*words: str) -> str:
    folder = Path(moe_lab.__file__).parent
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout


PACKAGES = ("torch", "transformers", "lm-eval", "evalplus", "safetensors", "numpy", "bitsandbytes", "peft")


def provenance(start: float) -> dict[str, Any]:
    """Provenance of a step that began at `start` (seconds since the epoch): code, versions, machine, time, memory."""
    return {
        "code": code_state(),
        "python": platform.python_version(),
        "versions": {name: installed(name) for name in PACKAGES},
        "host": socket.gethostname(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "started": start,
        "seconds": round(time.time() - start, 3),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        * (1 if sys.platform == "darwin" else 1024),
        "peak_gpu_memory_bytes": _gpu_peak(),
    }


def _gpu_peak() -> int | None:
    """Peak bytes that torch allocated on each GPU, added up; None in a process that used no GPU."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return sum(int(torch.cuda.max_memory_allocated(number)) for number in range(torch.cuda.device_count()))
