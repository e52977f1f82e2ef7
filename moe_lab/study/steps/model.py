"""The step with facts about a model, and `Loaded`, what all steps that run a model have in common."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from moe_lab.config import ModelConfig
from moe_lab.json_files import write_json
from moe_lab.models.config_json import experts_implementation
from moe_lab.study.step import Parts, Step, once
from moe_lab.study.steps.files import Files


class Facts(Step):
    """Layers, experts and parameters of a model, from its configuration alone, and a hash of its files."""

    kind = "model"
    per_job = "steps"
    model: ModelConfig

    def label(self) -> str:
        return self.model.name

    def work(self, files: Files) -> None:
        from moe_lab.models.facts import facts
        from moe_lab.models.files import fingerprint, local_folder

        folder = local_folder(self.model)
        commit = folder.resolve().name if folder.resolve().parent.name == "snapshots" else None  # of the hub's cache
        about = {**facts(self.model), "sha256": fingerprint(folder), "commit": commit}
        write_json(files.out / "facts.json", about)


@dataclass(frozen=True)
class Arithmetic:
    """How a model's numbers are computed, where that changes bits."""

    device: str
    """cpu or cuda."""
    dtype: str
    """Precision of the loaded weights; "stored" for that of the files."""
    experts: str
    """The implementation of experts."""


@cache
def arithmetic(device: str, dtype: str) -> Arithmetic:
    """How numbers are computed with `model.dtype` on a device that is resolved; the same object for equal settings."""
    kind = "cpu" if device == "cpu" else "cuda"
    usual = "float32" if kind == "cpu" else "stored"
    return Arithmetic(kind, usual if dtype == "auto" else dtype, experts_implementation(device))


class Loaded(Parts):
    """A model as it is loaded. Which one it is the step with its facts identifies."""

    facts: Facts
    arithmetic: Arithmetic
    model: ModelConfig
    runtime = frozenset({"model"})


@once
def loaded_as(model: ModelConfig) -> Loaded:
    """The model as steps load it."""
    return Loaded(Facts(model), arithmetic(model.device, model.dtype), model)
