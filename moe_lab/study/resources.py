"""Resources of steps: memory, disk, GPUs and amount of work, computed from the sizes of the model,
the text and the benchmark.

Estimates of memory are right to within a factor of two.
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
from moe_lab.json_files import canonical
from moe_lab.models.config_json import (
    GPU_COUNTS,
    WEIGHT_OVERHEAD,
    Size,
    config_of,
    size_of,
    tensor_parallel_sizes,
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
DISTILLED = 5
"""Number of fp32 tensors of the size of a batch's logits that a distillation holds at once, the
logits included; measured."""
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
    them."""

    model: ModelConfig | None = None
    """The model whose files the step reads."""
    weights: Literal["none", "files", "layers", "model", "server"] = "none"
    """Which weights of the model are in memory. files: a piece of the files at a time. layers: two
    decoder layers at a time, to run the model. model: all weights, to run the model. server: all
    weights, in a server that the step starts."""
    runs_layers: bool = False
    """Whether a step that holds the whole model runs it from a decoder layer on: like one that
    holds two layers, it needs layers that give hidden states alone."""
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
    """Whether the step runs foreign code."""
    units: float = 1.0
    """Amount of work, in tokens or items where the step reads these. The seconds of steps of one
    kind are proportional to it."""
    pace: Sequence[Any] = ()
    """JSON document of what determines the seconds per unit, besides the kind of the step and its
    model."""
    job: str | None = None
    """Kind of the Slurm jobs that this step is part of; None for its own kind."""
    steps_per_job: Literal["one", "short", "cells", "models"] = "one"
    """Which steps share a Slurm job. one: each step has its own job. short: many steps share a job.
    cells: `launcher.cells_per_job` steps share a job. models: all steps of `launcher.cells_per_job`
    pruned models share a job. These are pruned from one model."""
    start_checks: Sequence[Check] = ()
    """Checks on the machine where the study is started, such as of permissions."""
    installation_checks: Sequence[Check] = ()
    """Checks of what is installed where the step runs."""

    @property
    def rate_key(self) -> str:
        """Text that is equal for steps of one kind with the same seconds per unit."""
        model = [self.model.name, self.model.device] if self.model else []
        return canonical([*model, *self.pace])

    @property
    def runs_model(self) -> bool:
        """Whether the step runs the model."""
        return self.weights in WEIGHTS_TO_RUN

    def fits(self, gpus: int, gpu_memory: float) -> bool:
        """Whether the memory of `gpus` GPUs, each with `gpu_memory` GiB, is enough for the step. A
        step can use nine tenths of the memory of a GPU."""
        return not self.on_gpu or (self.memory or 0.0) <= gpus * 0.9 * gpu_memory * GIB

    def gpus(self, gpu_memory: float) -> int:
        """Number of GPUs for the step, if each has `gpu_memory` GiB: the smallest of `gpu_counts`
        whose memory is enough, or else the largest."""
        if not self.on_gpu:
            return 0
        return next(
            (count for count in self.gpu_counts if self.fits(count, gpu_memory)),
            self.gpu_counts[-1],
        )


def runs_on_gpu(model: ModelConfig, size: Size) -> bool:
    """Whether a model runs on GPUs if the machine has any. `size`: size of the model."""
    return size.bytes >= GPU_FROM if model.device == "auto" else model.device != "cpu"


def expert_weight_bytes(size: Size) -> float:
    """Bytes of the weights of all routed experts of one layer in fp32. The gradients of these
    weights take as many bytes."""
    # 4 bytes per weight, and `size.expert` weights per expert
    return 4.0 * size.experts * size.expert


def channel_product_bytes(size: Size) -> float:
    """Bytes of the sums that the step `ActivationAlignment` gathers in one layer: for each routed
    expert, a matrix (`size.width`, `size.width`) in fp64."""
    return 8.0 * size.experts * size.width**2


def no_bytes(size: Size) -> float:
    """No bytes, whatever the size of the model."""
    return 0.0


def _resources_of_model(
    model: ModelConfig, memory: Bytes, disk: Bytes = no_bytes, **fields: Any
) -> Resources:
    """Resources of a step whose memory depends on `model`. `memory`: bytes in memory. `disk`: bytes
    that the step writes, unless they are few. `fields`: the other fields of `Resources`."""
    size = size_of(model)
    if size is None:
        return Resources(model=model, memory=None, on_gpu=True, **fields)
    is_on_gpu = fields.get("weights") in WEIGHTS_TO_RUN and runs_on_gpu(model, size)
    return Resources(model=model, memory=memory(size), on_gpu=is_on_gpu, disk=disk(size), **fields)


def _gpu_counts(model: ModelConfig) -> Sequence[int]:
    """Numbers of GPUs on which the library transformers can run a model."""
    return GPU_COUNTS if model.device in ("auto", *DEVICE_MAPS) else GPU_COUNTS[:1]


def file_reading(model: ModelConfig) -> Resources:
    """Resources of a step that reads the files of a model once, a piece at a time."""
    return _resources_of_model(model, lambda _: 2.0 * PROCESS, weights="files")


def merged_sums(model: ModelConfig, text: CalibrationConfig) -> Resources:
    """Resources of a step that merges the sums of the shares of a pass over `text`."""

    def memory(size: Size) -> float:
        # for each expert: CHANNEL_SUMS numbers per channel, and a vector of the hidden size
        sums_per_layer = size.experts * (CHANNEL_SUMS * size.width + size.hidden)
        # 3: total, one share, and file; 8 bytes: a number in fp64
        return PROCESS + 3 * 8.0 * size.moe_layers * sums_per_layer

    return _resources_of_model(model, memory, units=float(text.tokens))


def text_pass(
    model: ModelConfig,
    text: CalibrationConfig,
    *,
    rows: tuple[int, int] | None = None,
    engine: str | None = None,
    backward: bool = False,
    copies: int = 1,
    logits: int = 1,
    per_layer: Bytes = no_bytes,
    extra_bytes: Bytes = no_bytes,
) -> Resources:
    """Resources of a step that runs a model over a text.

    rows: (start, end) of the rows of the text that the step reads, `end` excluded; None for all
    rows. engine: overrides `text.engine`. copies: number of copies of the weights in memory.
    logits: number of tensors of the size of a batch's logits. per_layer: bytes that are added for
    each layer in memory. extra_bytes: bytes that are added once.
    """
    is_streamed = (engine or text.engine) == "streamed"
    tokens = (rows[1] - rows[0]) * text.length if rows else text.tokens
    batch_tokens = min(text.batch_rows * text.length, tokens)

    def disk(size: Size) -> float:
        return size.hidden_states(tokens, backward=backward) if is_streamed else 0.0

    def memory(size: Size) -> float:
        if is_streamed:  # while one layer runs, the next one is read
            batch_bytes = batch_tokens * size.activations()
            base_bytes = PROCESS + size.layer_weights(2) + per_layer(size) + batch_bytes
            state_bytes = 0.0
            if model.device == "cpu":
                # Streaming keeps hidden states in main memory as long as there is room, and the
                # others on the disk. Assumed: states take at most as much as all else together.
                state_bytes = min(base_bytes, disk(size))
            return base_bytes + state_bytes + extra_bytes(size)
        # a backward pass needs the activations of all layers
        activations = size.activations(size.moe_layers if backward else 1)
        batch_bytes = batch_tokens * (logits * size.logit_bytes + activations)
        return (
            PROCESS
            + WEIGHT_OVERHEAD * size.bytes * copies
            + size.moe_layers * per_layer(size)
            + batch_bytes
            + extra_bytes(size)
        )

    return _resources_of_model(
        model,
        memory,
        disk,
        weights="layers" if is_streamed else "model",
        gpu_counts=GPU_COUNTS[:1] if is_streamed else _gpu_counts(model),
        units=float(tokens),
    )


def finetuning(
    model: ModelConfig, text: CalibrationConfig, recovery: RecoveryConfig, *, copies: int
) -> Resources:
    """Resources of a step that fine-tunes a pruned model on a text. If `recovery.fit` is set, the
    step fits the merged experts instead. `copies`: number of copies of the weights in memory."""
    is_fit = recovery.fit is not None

    def sum_bytes(size: Size) -> float:
        if not is_fit:
            return 0.0
        # For each merged expert, a fit gathers fp64 sums (width, width) and (width, hidden). Half
        # of the experts are assumed to be merged.
        return 8.0 * size.moe_layers * size.experts / 2 * size.width * (size.width + size.hidden)

    text_resources = text_pass(
        model,
        text,
        engine="resident",
        backward=not is_fit,
        copies=copies,
        logits=DISTILLED if recovery.distill else 1,
        extra_bytes=sum_bytes,
    )
    size = size_of(model)
    return text_resources._replace(
        disk=sum_bytes(size) if size else 0.0,
        units=text_resources.units * (1 if is_fit else recovery.epochs),
        pace=[recovery.train, recovery.text_setting],
    )


def checkpoint_export(model: ModelConfig, *, is_changed: bool, is_converted: bool) -> Resources:
    """Resources of a step that writes a checkpoint of a pruned model. `is_changed`: whether the
    weights differ from those of the unpruned model, such as after fine-tuning. `is_converted`:
    whether the checkpoint is converted to GGUF."""

    def memory(size: Size) -> float:
        # three decoder layers in fp32; `layer_weights` are bytes in the stored precision
        layer_bytes = (
            4 / size.bytes_per_parameter * size.layer_weights(3)
            if is_changed or is_converted
            else 0.0
        )
        return 2 * PROCESS + layer_bytes

    def disk(size: Size) -> float:
        # each of the two puts one more checkpoint on the disk
        return float(size.bytes) * (1 + is_changed + is_converted)

    return _resources_of_model(model, memory, disk, weights="files", pace=[is_converted])


def answer_count(benchmark: BenchmarkConfig) -> int:
    """Number of answers to a benchmark: one or several to each item."""
    samples = benchmark.sampling.samples if benchmark.max_new_tokens else 1
    items = benchmark.expected or ITEMS
    return min(benchmark.limit or items, items) * samples


def benchmark_pace(benchmark: BenchmarkConfig) -> list[Any]:
    """The settings of a benchmark that determine the seconds per item."""
    return [benchmark.name, benchmark.shots, benchmark.chat, benchmark.max_new_tokens]


def benchmark_run(
    model: ModelConfig,
    benchmarks: Sequence[BenchmarkConfig],
    backend: BackendConfig,
    *,
    copies: int,
    installation_checks: Sequence[Check],
) -> Resources:
    """Resources of a step that runs a model on the items of benchmarks, which share batches if
    there are several. `copies`: number of copies of the weights in memory. The amount of work is
    the number of tokens that the model reads and generates."""
    new_tokens = max(benchmark.longest_text for benchmark in benchmarks)
    first_benchmark, *_ = benchmarks

    def memory(size: Size) -> float:
        item_bytes = (
            size.kv_cache_bytes(PROMPT + new_tokens) if new_tokens else PROMPT * size.logit_bytes
        )
        batch_bytes = first_benchmark.batch_size * item_bytes
        return PROCESS + WEIGHT_OVERHEAD * size.bytes * copies + batch_bytes

    units = 0
    pace: list[Any] = [backend.name]
    for benchmark in benchmarks:
        tokens = PROMPT * (1 + benchmark.shots) + benchmark.longest_text
        units += answer_count(benchmark) * tokens
        pace += benchmark_pace(benchmark)
    return _resources_of_model(
        model,
        memory,
        weights="server" if backend.name == "server" else "model",
        gpu_counts=_vllm_counts(model, backend) if backend.name == "vllm" else _gpu_counts(model),
        isolated=True,
        units=float(units),
        pace=pace,
        job="evaluate",
        steps_per_job="models",
        installation_checks=installation_checks,
    )


def answer_bytes(benchmark: BenchmarkConfig) -> float:
    """Bytes of the texts that a model generates for a benchmark, if each text has the maximum
    length."""
    return float(answer_count(benchmark) * benchmark.longest_text * BYTES_PER_TOKEN)


def _vllm_counts(model: ModelConfig, backend: BackendConfig) -> Sequence[int]:
    """Numbers of GPUs on which vLLM can run a model."""
    sizes = [size for name, size in backend.arguments.items() if name.endswith("parallel_size")]
    return [prod(sizes)] if sizes else tensor_parallel_sizes(config_of(model))
