"""Resources of steps: memory, disk, GPUs and amount of work, computed from the sizes of the model,
the text and the benchmark.

Each kind of step returns one `Resources`, made by a function of this module; launchers, Slurm and
the forecast read nothing else. Estimates of memory are right to within a factor of two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Literal, NamedTuple

from moe_lab.config import (
    BackendConfig,
    BenchmarkConfig,
    CalibrationConfig,
    ModelConfig,
    RecoveryConfig,
)
from moe_lab.config.pruning import DEVICE_MAPS
from moe_lab.models.config_json import (
    GPU_COUNTS,
    OVERHEAD,
    Size,
    config_of,
    size_of,
    tensor_parallel,
)

GIB = 2**30
PROCESS = 600 * 2**20
"""Bytes of a process with Python, torch and transformers loaded."""
PROGRAMS = 4.0 * GIB
"""Bytes of a step that runs programs written by a model, or compares a text with benchmarks."""
GPU_FROM = GIB
"""Minimum bytes of weights for which device=auto puts a model on a GPU."""
CHANNEL_SUMS = 7
"""Maximum number of sums per channel that a pass gathers."""
DISTILLED = 4
"""Number of fp32 tensors of the size of a batch's logits that a distillation holds at once, besides
the logits; measured."""
ITEMS = 1000
"""Assumed items of a benchmark that does not state their number."""
PROMPT = 128
"""Assumed tokens of a prompt, or of a question with one of its answers."""
BYTES_PER_TOKEN = 16
"""Bytes per token of a generated text in the store, which holds each text with its prompt as JSON,
and again among the samples."""

WEIGHTS_TO_RUN = ("layers", "model", "server")
"""Values of `Resources.weights` for steps that run the model."""
Check = tuple[Any, ...]
"""A function, which raises UserError or returns sentences about problems, followed by its
arguments."""
Bytes = Callable[[Size], float]
"""Size of a model -> bytes."""


class Resources(NamedTuple):
    """Resources and amount of work of one step. A NamedTuple, as a large study makes millions of
    them, and a dataclass takes five times as long."""

    model: ModelConfig | None = None
    """The model whose files the step reads."""
    weights: Literal["none", "files", "layers", "model", "server"] = "none"
    """Which weights of the model are in memory. none: no weights. files: a piece of the files at a
    time. layers: a decoder layer at a time, to run the model. model: all weights, to run the model.
    server: all weights, in a server that the step starts."""
    memory: float | None = PROCESS
    """Peak memory in bytes, weights included; None for a model of unknown size. It is memory of
    GPUs if `on_gpu`, otherwise main memory."""
    on_gpu: bool = False
    """Whether the step uses GPUs; True also if the size of its model is unknown."""
    gpu_counts: Sequence[int] = GPU_COUNTS
    """Possible numbers of GPUs, ascending."""
    disk: float = 0.0
    """Upper bound of the bytes that the step writes; 0 where they are few."""
    isolated: bool = False
    """Whether the step runs foreign code, so that launcher=inline uses a worker process for it."""
    units: float = 1.0
    """Amount of work, in tokens or items where the step reads these. The seconds of steps of one
    kind are proportional to it."""
    pace: Sequence[Any] = ()
    """JSON document of what determines the seconds per unit: steps of one kind with equal pace take
    equal seconds per unit."""
    job: str | None = None
    """Kind of the Slurm jobs that this step is part of; None for its own kind."""
    steps_per_job: Literal["one", "short", "cells", "models"] = "one"
    """Which steps share a Slurm job. one: each step has its own job. short: many steps share a job,
    as each takes seconds. cells: `launcher.cells_per_job` steps share a job. models: all steps of
    `launcher.cells_per_job` pruned models share a job. These are pruned from one model, whose
    weights are loaded once."""
    conditions: Sequence[Check] = ()
    """Checks on the machine where the study is started, such as of permissions."""
    programs: Sequence[Check] = ()
    """Checks of what is installed where the step runs. They are made if the step runs in this
    Python (launcher.python=null)."""

    @property
    def runs_model(self) -> bool:
        """Whether the step runs the model, instead of only reading its files."""
        return self.weights in WEIGHTS_TO_RUN

    def fits(self, gpus: int, gpu_memory: float) -> bool:
        """Whether `gpus` GPUs of `gpu_memory` GiB hold the step. A step can use nine tenths of the
        memory of a GPU. True for a step on the CPU, and for a step of unknown memory."""
        return not self.on_gpu or (self.memory or 0.0) <= gpus * 0.9 * gpu_memory * GIB

    def gpus(self, gpu_memory: float) -> int:
        """Number of GPUs of `gpu_memory` GiB for the step: the smallest of `gpu_counts` with which
        the step fits, or else the largest; 0 for a step on the CPU."""
        if not self.on_gpu:
            return 0
        return next(
            (count for count in self.gpu_counts if self.fits(count, gpu_memory)),
            self.gpu_counts[-1],
        )


def on_gpu(model: ModelConfig, size: Size) -> bool:
    """Whether a model is put on a GPU if the machine has one: with device=auto, if the weights have
    at least GPU_FROM bytes; otherwise, if `model.device` is a GPU. `size`: that of the model."""
    return size.bytes >= GPU_FROM if model.device == "auto" else model.device != "cpu"


def loaded_weights(size: Size) -> Resources:
    """Resources of a step that only holds the weights of a model of this size on GPUs."""
    return Resources(memory=OVERHEAD * size.bytes, on_gpu=True)


def expert_weights(size: Size) -> float:
    """Bytes of the weights of all experts of one layer in fp32, which are also the bytes of the
    gradients of these weights."""
    return 4.0 * size.experts * size.expert


def channel_products(size: Size) -> float:
    """Bytes of the products of channels of one layer in fp64: a matrix (I, I) for each expert."""
    return 8.0 * size.experts * size.width**2


def _resources_of_model(
    model: ModelConfig, memory: Bytes, disk: Bytes | None = None, **fields: Any
) -> Resources:
    """Resources of a step, with `memory` and `disk` computed from the size of the model. The step
    uses GPUs if it runs the model and the model is put on a GPU. If the size is unknown, memory is
    None, disk is 0, and the step uses GPUs. `fields`: other fields of `Resources`."""
    size = size_of(model)
    if size is None:
        return Resources(model=model, memory=None, on_gpu=True, **fields)
    is_on_gpu = fields.get("weights") in WEIGHTS_TO_RUN and on_gpu(model, size)
    written = disk(size) if disk else 0.0
    return Resources(model=model, memory=memory(size), on_gpu=is_on_gpu, disk=written, **fields)


def _gpu_counts(model: ModelConfig) -> Sequence[int]:
    """Possible numbers of GPUs for transformers: GPU_COUNTS with device=auto or a device map, which
    divide the model among several GPUs; otherwise one GPU."""
    return GPU_COUNTS if model.device in ("auto", *DEVICE_MAPS) else GPU_COUNTS[:1]


def read_files(model: ModelConfig, pace: Sequence[Any]) -> Resources:
    """Resources of a step that reads the files of a model once, a piece at a time. Its memory is
    assumed to be that of two processes, whatever the model."""
    return _resources_of_model(model, lambda _: 2.0 * PROCESS, weights="files", pace=pace)


def merged_sums(model: ModelConfig, text: CalibrationConfig, pace: Sequence[Any]) -> Resources:
    """Resources of a step that adds up the sums of the shares of a pass. Memory holds two sets of
    sums, and the file that is written."""

    def memory(size: Size) -> float:
        layer_sums = size.experts * (CHANNEL_SUMS * size.width + size.hidden)
        # two sets and the file, each with 8 bytes (fp64) for each number
        return PROCESS + 3 * 8.0 * size.moe_layers * layer_sums

    return _resources_of_model(model, memory, units=float(text.tokens), pace=pace)


def text_pass(
    model: ModelConfig,
    text: CalibrationConfig,
    pace: Sequence[Any],
    *,
    rows: tuple[int, int] | None = None,
    engine: str | None = None,
    backward: bool = False,
    copies: int = 1,
    per_layer: Bytes | None = None,
    extra_bytes: Bytes | None = None,
) -> Resources:
    """Resources of a step that runs a model over a text.

    rows: the first row of the share of the text that the step reads, and the row after its last
    row; None for the whole text.
    engine: used instead of `text.engine`. backward: whether gradients flow back through the layers.
    copies: number of copies of the weights in memory. per_layer: bytes, besides the weights, for
    every layer whose weights are in memory. extra_bytes: further bytes, once for all layers.
    """
    is_layered = (engine or text.engine) == "streamed"
    tokens = (rows[1] - rows[0]) * text.length if rows else text.tokens
    batch_tokens = min(text.batch_size * text.length, tokens)

    def disk(size: Size) -> float:
        return size.hidden_states(tokens, backward=backward) if is_layered else 0.0

    def memory(size: Size) -> float:
        layer_bytes = per_layer(size) if per_layer else 0.0
        fixed_bytes = extra_bytes(size) if extra_bytes else 0.0
        if is_layered:
            batch_bytes = batch_tokens * size.activations()
            base_bytes = PROCESS + size.layer_weights() + layer_bytes + batch_bytes
            state_bytes = 0.0
            if model.device == "cpu":
                # hidden states take at most as much memory as all else, and then go to the disk
                state_bytes = min(base_bytes, disk(size))
            return base_bytes + state_bytes + fixed_bytes
        # gradients need the activations of all layers
        activations = size.activations(size.moe_layers if backward else 1)
        batch_bytes = batch_tokens * (size.logits + activations)
        return (
            PROCESS
            + OVERHEAD * size.bytes * copies
            + size.moe_layers * layer_bytes
            + batch_bytes
            + fixed_bytes
        )

    return _resources_of_model(
        model,
        memory,
        disk,
        weights="layers" if is_layered else "model",
        gpu_counts=GPU_COUNTS[:1] if is_layered else _gpu_counts(model),
        units=float(tokens),
        pace=pace,
    )


def finetuning(
    model: ModelConfig,
    text: CalibrationConfig,
    recovery: RecoveryConfig,
    pace: Sequence[Any],
    *,
    copies: int,
) -> Resources:
    """Resources of a step that fine-tunes a model on a text, or, with `recovery.fit`, fits merged
    experts. A fit gathers sums (I, I) and (I, H) in fp64 for each merged expert, and writes them to
    the disk. The number of merged experts is assumed to be half the number of experts. Distillation
    adds the logits of the teacher. `copies`: number of copies of the weights in memory."""
    is_fit = recovery.fit is not None
    is_distilled = recovery.distill is not None
    batch_tokens = min(text.batch_size * text.length, text.tokens)

    def sum_bytes(size: Size) -> float:
        if not is_fit:
            return 0.0
        return 8.0 * size.moe_layers * size.experts / 2 * size.width * (size.width + size.hidden)

    def extra_bytes(size: Size) -> float:
        teacher_bytes = DISTILLED * batch_tokens * size.logits if is_distilled else 0.0
        return teacher_bytes + sum_bytes(size)

    text_resources = text_pass(
        model,
        text,
        pace,
        engine="resident",
        backward=not is_fit,
        copies=copies,
        extra_bytes=extra_bytes,
    )
    size = size_of(model)
    return text_resources._replace(
        disk=sum_bytes(size) if size else 0.0,
        units=text_resources.units * (1 if is_fit else recovery.epochs),
        pace=[*pace, recovery.train, is_distilled, is_fit],
    )


def export(
    model: ModelConfig, pace: Sequence[Any], *, is_changed: bool, is_converted: bool
) -> Resources:
    """Resources of a step that writes a checkpoint. `is_changed`: weights are changed, for which
    the disk holds a second checkpoint. `is_converted`: the checkpoint is converted to GGUF, for
    which the disk holds one more. In either case memory also holds three times the fp32 weights of
    a decoder layer."""

    def memory(size: Size) -> float:
        layer_bytes = (
            4 / size.bytes_per_parameter * size.layer_weights(3)
            if is_changed or is_converted
            else 0.0
        )
        return 2 * PROCESS + layer_bytes

    def disk(size: Size) -> float:
        # True counts as one checkpoint
        return float(size.bytes) * (1 + is_changed + is_converted)

    return _resources_of_model(model, memory, disk, weights="files", pace=pace)


def items(benchmark: BenchmarkConfig) -> int:
    """Number of items of a benchmark that a model is given: all items, but at most the limit. If
    the number of all items is unknown, it is assumed to be ITEMS."""
    count = benchmark.expected or ITEMS
    return min(benchmark.limit or count, count)


def benchmark_pace(benchmark: BenchmarkConfig) -> list[Any]:
    """Settings of a benchmark that determine the seconds per item, for `Resources.pace`."""
    return [benchmark.name, benchmark.shots, benchmark.chat, benchmark.max_new_tokens]


def benchmark_run(
    model: ModelConfig,
    benchmark: BenchmarkConfig,
    backend: BackendConfig,
    model_id: str,
    *,
    copies: int,
    programs: Sequence[Check] = (),
) -> Resources:
    """Resources of a step that runs a model on the items of a benchmark. Units are tokens that the
    model reads and writes; an item and each of its shots are assumed to have PROMPT tokens. Memory
    holds `copies` copies of the weights. For each item of a batch it also holds the keys and values
    of a generated text; if the benchmark generates no text, the logits of a prompt. `model_id`:
    identity of the model, for `Resources.pace`. `programs`: checks of what is installed, for
    `Resources.programs`."""
    new_tokens = benchmark.max_new_tokens

    def memory(size: Size) -> float:
        item_bytes = size.cache(PROMPT + new_tokens) if new_tokens else PROMPT * size.logits
        return PROCESS + OVERHEAD * size.bytes * copies + benchmark.batch_size * item_bytes

    return _resources_of_model(
        model,
        memory,
        weights="server" if backend.name == "server" else "model",
        gpu_counts=_vllm_counts(model, backend) if backend.name == "vllm" else _gpu_counts(model),
        isolated=True,
        units=float(items(benchmark) * (PROMPT * (1 + benchmark.shots) + new_tokens)),
        pace=[model_id, backend.name, *benchmark_pace(benchmark)],
        job="evaluate",
        steps_per_job="models",
        programs=programs,
    )


def answer_bytes(benchmark: BenchmarkConfig) -> float:
    """Bytes of the generated texts of a benchmark, if each has the maximum length."""
    return float(items(benchmark) * benchmark.max_new_tokens * BYTES_PER_TOKEN)


def _vllm_counts(model: ModelConfig, backend: BackendConfig) -> Sequence[int]:
    """Possible numbers of GPUs for vLLM: only the product of the backend's arguments that are named
    ..._parallel_size. Without such arguments: the numbers among which vLLM can divide the model's
    tensors."""
    sizes = [size for name, size in backend.arguments.items() if name.endswith("parallel_size")]
    return [prod(sizes)] if sizes else tensor_parallel(config_of(model))
