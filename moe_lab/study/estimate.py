"""About how much memory and time a step takes: estimates to size jobs and budgets by, right within a factor of a few.

Everything they rest on stands in this file. One forward pass multiplies a token with the model's active parameters,
2 x active FLOPs a token; everything else is told as a number of forward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_lab.config import ModelConfig
from moe_lab.models.config_json import Size, size_of
from moe_lab.paths import PREFIX
from moe_lab.search.settings import EvolutionSettings, FitnessSettings
from moe_lab.study.estimate_memory import BASE, LAYERED, PROMPT, is_layered, layered_memory, resident_memory, text_of
from moe_lab.study.identity import Step


@dataclass(frozen=True)
class Speed:
    """What a machine does in a second."""

    flops: float
    """While it reads text in the model's precision."""
    bytes: float
    """Of weights while it generates: a batch of tokens needs nearly all experts at every step."""
    layer: float
    """Seconds, not less, that a layer takes for one token of each sequence of a batch."""


GPU = Speed(flops=5e13, bytes=1e12, layer=1e-3)
"""One data-centre GPU. FLOPs from EvoESAP's Table 3, whose searches are a known number of forward passes over 262,144
tokens on L40S: 5.8 h for 1,404 of OLMoE, 6.7 h for 844 of DeepSeek-V2-Lite, 5.0 h for 564 of ERNIE and 5.2 h for 284 of
Qwen3 come to 4.5, 4.9, 5.0 and 2.7 x 1e13. Bytes and layers are rules of thumb: that GPU's memory moves 0.9e12 bytes a
second, a newer one's four times as many, and a layer of experts is tens of kernels of 20 microseconds."""
CPU = Speed(flops=3e10, bytes=5e9, layer=1e-3)
"""One core, where the shipped models run: a tenth to a half of what its arithmetic units could do."""

DISK = 1e9
"""Bytes a second at which weights are read from disk."""
SUMMED = 2e8
"""Bytes of weights a second that a CPU reads and sums up."""
START = 20.0
"""Seconds until a process has imported torch and transformers."""
SMALL = 0.5
"""Seconds of a step that neither loads a model nor reads a checkpoint, and of the start of one that does."""
PREFIX_REUSE = 0.75
"""Share of a forward pass that a candidate of a search takes: layers it shares with its parent are not run again."""
CHOICES = 4
"""Sequences that a multiple choice reads for an item."""
ITEMS = 1000
"""Items of a benchmark that does not say how many it has."""

_GRADING = 4 * 2**30
"""Bytes that grading may take: a program it runs is let have no more."""
GPU_FROM = 2**30
"""Bytes of weights from which a model is put on a GPU."""


@dataclass(frozen=True)
class Estimate:
    """What one step takes, about."""

    memory: float
    """Bytes at its largest moment, weights included; on the GPUs if it uses them."""
    seconds: float
    """Of work, the loading of the model left out."""
    loading: float
    """Seconds until the model is loaded, once for all steps of one process."""
    on_gpu: bool
    """Whether its model is big enough for a GPU to be worth it."""


def estimate(step: Step) -> Estimate | None:
    """What `step` takes; None when it depends on a model of which nothing is known."""
    if step.kind == "grade":
        benchmark = step.runtime["benchmark"]
        once = GRADED_SHIPPED if str(benchmark["task"]).startswith(PREFIX) else GRADED
        return Estimate(_GRADING, SMALL + once * items(benchmark), SMALL, False)
    if not loads_model(step) and step.kind not in STREAMED:
        return Estimate(BASE, SMALL, SMALL, False)
    size = size_of(ModelConfig(**step.runtime["model"]))
    if size is None:
        return None
    if step.kind in STREAMED:
        return Estimate(2 * BASE, SMALL + size.bytes / SUMMED, SMALL, False)
    on_gpu = size.bytes >= GPU_FROM and step.runtime["model"]["device"] != "cpu"
    seconds = SMALL + WORK[step.kind](step, size, GPU if on_gpu else CPU)
    reading = size.bytes / DISK
    if is_layered(step):  # each pass reads the checkpoint anew
        return Estimate(layered_memory(step, size), seconds + LAYERED[step.kind] * reading, START, on_gpu)
    return Estimate(resident_memory(step, size), seconds, START + reading, on_gpu)


def loads_model(step: Step) -> bool:
    """Whether a step runs the model. A cost that does not depend on a text is counted without it."""
    return step.kind in WORK and (step.kind != "cost" or "text" in step.runtime)


def gpus(found: Estimate, gpu_memory: float) -> int:
    """GPUs that hold a step when each has `gpu_memory` GiB, a tenth of it out of reach."""
    return int(-(-found.memory // (0.9 * gpu_memory * 2**30))) if found.on_gpu else 0


def hours(steps: Iterable[Step], gpu_memory: float) -> tuple[float, float]:
    """(hours of work one after the other, GPU-hours) of steps, each model loaded once for all steps of a kind.

    A model over several GPUs keeps all of them while one works. Steps of unknown models count nothing.
    """
    work = gpu_work = 0.0
    loaded = set()
    for step in steps:
        if (found := estimate(step)) is not None:
            model = (step.kind, str(step.runtime.get("model", {}).get("name")))
            seconds = found.seconds + (0 if model in loaded else found.loading)
            loaded.add(model)
            work, gpu_work = work + seconds, gpu_work + seconds * gpus(found, gpu_memory)
    return work / 3600, gpu_work / 3600


Work = Callable[[Step, Size, Speed], float]
"""Seconds that the work of a step takes a machine, for a model of some size."""


def _passes(count: float) -> Work:
    """So many forward passes over the step's text."""
    return lambda step, size, speed: count * _reading(text_of(step)["tokens"], size, speed)


def _reading(tokens: float, size: Size, speed: Speed) -> float:
    return 2 * size.active * tokens / speed.flops


def _token(size: Size, speed: Speed) -> float:
    """For one more token of each sequence of a batch."""
    return size.moe_layers * speed.layer + size.bytes / speed.bytes


def _ablation(step: Step, size: Size, speed: Speed) -> float:
    """For each expert, the layers from its own on."""
    return _reading(text_of(step)["tokens"], size, speed) * size.experts * (size.moe_layers + 1) / 2


def _scaling(step: Step, size: Size, speed: Speed) -> float:
    """For each layer, the layers from it on."""
    return _reading(text_of(step)["tokens"], size, speed) * (size.moe_layers + 1) / 2


def _search(step: Step, size: Size, speed: Speed) -> float:
    """P + (T - 1)(P - m) candidates, and the model itself once a generation, as its answers are not kept.

    By speculative decoding, each candidate and the model that judges it generate from every row instead.
    """
    asked = step.parts["allocation"].settings["parameters"]
    population, elites, generations = (
        int(asked.get(name, getattr(EvolutionSettings, name))) for name in ("population", "elites", "generations")
    )
    candidates = population + (generations - 1) * (population - elites)
    if asked.get("fitness") == "spec_dec":
        rows = -(-int(text_of(step)["tokens"]) // int(text_of(step)["length"]))
        tokens = rows * int(asked.get("max_new_tokens", FitnessSettings.max_new_tokens))
        return 2 * candidates * tokens * _token(size, speed)
    return _passes(PREFIX_REUSE * candidates + generations)(step, size, speed)


def _finetune(step: Step, size: Size, speed: Speed) -> float:
    """Forward, forward again for what was not kept, and backward at twice the price."""
    return _passes(4 * float(step.runtime["recovery"]["epochs"]))(step, size, speed)


def _evaluate(step: Step, size: Size, speed: Speed) -> float:
    """Prompts are read; answers are generated to the limit, one token of each sequence of a batch at a time."""
    benchmark = step.runtime["benchmark"]
    asked = items(benchmark)
    sequences = asked if benchmark["max_new_tokens"] else CHOICES * asked
    batches = -(-asked // int(benchmark["batch_size"]))
    written = batches * int(benchmark["max_new_tokens"]) * _token(size, speed)
    return _reading(sequences * PROMPT, size, speed) + written


def _timing(step: Step, size: Size, speed: Speed) -> float:
    """Prompts are read and answers written, for every batch size with every length."""
    asked = step.parts["timing"].settings
    read = sum(
        _reading(count * length, size, speed) for count in asked["batch_sizes"] for length in asked["prompt_lengths"]
    )
    settings = len(asked["batch_sizes"]) * len(asked["prompt_lengths"])
    written = settings * asked["new_tokens"] * _token(size, speed)
    return float((asked["warmup"] + asked["repeats"]) * (read + written))


def items(benchmark: Mapping[str, Any]) -> int:
    """How many items of a benchmark are asked, about."""
    return min(int(benchmark["limit"] or ITEMS * ITEMS), int(benchmark["expected"] or ITEMS))


WORK: Mapping[str, Work] = {
    "statistics": _passes(1.1),
    "gradients": _passes(3.3),
    "weight_gradients": _passes(4),
    "damage": _passes(1.5),
    "ablation": _ablation,
    "scaling": _scaling,
    "search": _search,
    "reconstruction": _passes(4),
    "sequential": _passes(2.1),
    "finetune": _finetune,
    "convergence": _passes(1.1),
    "channel_convergence": _passes(3.3),
    "cost": _passes(1),
    "profile": _passes(3.3),
    "timing": _timing,
    "evaluate": _evaluate,
    "generate": _evaluate,
}
"""Kind of step that loads the model -> seconds of its work."""
STREAMED = ("weights", "channel_weights", "export")
"""Kinds of step that read the checkpoint once, on the CPU, and never hold more than a piece of it."""
GRADED = 2.0
"""Seconds of one core that grading a text takes, most of them tests of a program."""
GRADED_SHIPPED = 0.02
"""The same for the small programs that answer shipped benchmarks."""
KINDS = (*WORK, *STREAMED, "grade", "model", "scores", "family", "plan")
"""All kinds of step; the last ones take seconds and little memory."""


def memory(steps: Iterable[Step]) -> str:
    """The memory of the largest of some steps, in words."""
    found = [estimate(step) for step in steps]
    known = [one.memory for one in found if one is not None]
    unknown = " or more" if len(known) < len(found) else ""
    return f"{max(known) / 2**30:.1f} GiB{unknown}" if known else "unknown" if found else ""
