"""A step as it is handed to whoever does it: plain JSON, so that it crosses process and machine borders."""

from __future__ import annotations

import contextlib
import errno
import subprocess
import traceback
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import moe_lab
from moe_lab.config import BackendConfig, BenchmarkConfig, CalibrationConfig, ModelConfig, RecoveryConfig
from moe_lab.errors import DISK_FULL, Unavailable, UserError, mask
from moe_lab.evaluation.sandbox.policy import Policy
from moe_lab.json_files import Damaged, read_json
from moe_lab.study.identity import Step, digest
from moe_lab.study.store import NO_ROOM, Store

TRANSIENT = {*DISK_FULL, errno.EIO, errno.ENOMEM, errno.EROFS, errno.ESTALE, errno.ENODEV, errno.ENOTCONN}
"""Errors of the machine, not of the work: a rerun simply tries again."""


@dataclass(frozen=True)
class Job:
    """What to do (`kind`, `settings`, `inputs`), how (`runtime`), where (`scratch`, and `partial` to resume from)."""

    kind: str
    name: str
    settings: dict[str, Any]
    runtime: dict[str, Any]
    inputs: dict[str, str]
    scratch: str
    partial: str

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
        )

    @cached_property
    def model(self) -> ModelConfig:
        """The model, and how it is loaded."""
        return ModelConfig(**self.runtime["model"])

    @cached_property
    def text(self) -> CalibrationConfig:
        """The text that is read: the calibration set, or the one that a step has instead."""
        return CalibrationConfig(**(self.runtime.get("calibration") or self.runtime["text"]))

    @cached_property
    def benchmark(self) -> BenchmarkConfig:
        """What the model is asked."""
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
    def policy(self) -> Policy:
        """What graded programs may do."""
        return Policy(**self.runtime["policy"])

    def input(self, role: str, file: str) -> Path:
        """A file of the finished step in `role`."""
        return Path(self.inputs[role]) / file

    def output(self, file: str) -> Path:
        """A file of this step's result."""
        return Path(self.scratch) / file


def error_document(error: BaseException) -> dict[str, Any]:
    """An exception as JSON: the sentence for people, the trace for the log, and whether a rerun should try again."""
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
"""In a copy of the package: what `code_state` was where it was copied from."""


@lru_cache(maxsize=1)
def code_state() -> dict[str, Any]:
    """Version of moe_lab; in a checkout also the commit and a digest of what was edited since."""
    noted = Path(moe_lab.__file__).parent / NOTED
    with contextlib.suppress(FileNotFoundError, Damaged):
        copied: dict[str, Any] = read_json(noted, {"version": str})
        return copied
    state: dict[str, Any] = {"version": moe_lab.__version__}
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # installed, not a checkout
        edited = _git("diff", "HEAD", "--", ".")
        state |= {"commit": _git("rev-parse", "HEAD").strip(), "edits": digest(edited)[:12] if edited else None}
    return state


def edits() -> str:
    """What was edited in the package since the commit, as a diff; "" for nothing, and outside a checkout."""
    if code_state().get("edits") is None:
        return ""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):  # a copy
        return _git("diff", "HEAD", "--", ".")
    return ""


def _git(*words: str) -> str:
    folder = Path(moe_lab.__file__).parent
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout
