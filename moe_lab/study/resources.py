"""What a step needs of a machine, and how much work it is: computed from the sizes of its model,
text and benchmark.

Each kind of step gives one `Resources`, made by a function of this module; launchers, Slurm and the
forecast read nothing else. Estimates of memory are right to within a factor of two.
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
from moe_lab.models.config_json import GPU_COUNTS, ROOM, Size, config_of, size_of, tensor_parallel

GIB = 2**30
PROCESS = 600 * 2**20
"""Bytes of a process with Python, torch and transformers loaded."""
PROGRAMS = 4.0 * GIB
"""Bytes of a step that runs programs which a model wrote, or compares a text with benchmarks."""
GPU_FROM = GIB
"""Bytes of weights from which Slurm's jobs are asked to put a model on a GPU."""
CHANNEL_SUMS = 7
"""Sums of each channel that a pass gathers, at most."""
DISTILLED = 4
"""fp32 tensors of the size of a batch's logits that a distillation holds at once, besides the
logits; measured."""
ITEMS = 1000
"""Items of a benchmark that does not say how many it has."""
PROMPT = 128
"""Tokens of a prompt, or of a question with one of its answers."""
BYTES_PER_TOKEN = 16
"""Bytes per token of a generated text as stored: with its prompt, as JSON, and once more among the
samples."""

RUN = ("layers", "model", "server")
"""Ways of holding weights in which the model is run."""
Check = tuple[Any, ...]
"""A function that raises UserError or gives sentences, and its arguments."""
Bytes = Callable[[Size], float]
"""Bytes that depend on the size of a model."""


class Resources(NamedTuple):
    """What one step needs, and how much work it is. A large study makes millions of these: a tuple
    takes a fifth of the time of a dataclass."""

    model: ModelConfig | None = None
    """The model whose files it reads."""
    weights: Literal["none", "files", "layers", "model", "server"] = "none"
    """What it holds of the model's weights: nothing; a piece of the files at a time; a decoder
    layer at a time, or all, to run the model; or all, in a server that it starts."""
    memory: float | None = PROCESS
    """Peak in bytes, weights included, of GPU memory if `on_gpu`, else of main memory; None for a
    model of unknown size."""
    on_gpu: bool = False
    """Whether it uses GPUs; if the size of its model is not known, it may."""
    gpu_counts: Sequence[int] = GPU_COUNTS
    """Numbers of GPUs among which it can be divided, ascending."""
    disk: float = 0.0
    """Upper bound of the bytes that it writes, counted only where they are many."""
    isolated: bool = False
    """Whether foreign code runs in it, so that launcher=inline does it in a worker process."""
    units: float = 1.0
    """Amount of work, in tokens or items where it reads these; seconds of steps of a kind are
    proportional to it."""
    pace: Sequence[Any] = ()
    """What decides the seconds of a unit, JSON-ready: steps of one kind with equal values take
    equally long."""
    job: str | None = None
    """The kind of the Slurm jobs that also do this step; None: jobs of its own kind."""
    pack: Literal["one", "short", "cells", "models"] = "one"
    """Steps of one Slurm job: one; many, where each takes seconds; `launcher.cells_per_job` steps;
    or those about as many pruned models of one model, whose weights are loaded once."""
    conditions: Sequence[Check] = ()
    """What must hold where it is started, such as permissions."""
    programs: Sequence[Check] = ()
    """What must be installed where it runs: checked if that is this machine's Python
    (launcher.python=null)."""

    @property
    def runs_model(self) -> bool:
        """Whether the model is run."""
        return self.weights in RUN

    def fits(self, gpus: int, gpu_memory: float) -> bool:
        """Whether so many GPUs of `gpu_memory` GiB hold it, when a tenth of each cannot be used."""
        return not self.on_gpu or (self.memory or 0.0) <= gpus * 0.9 * gpu_memory * GIB

    def gpus(self, gpu_memory: float) -> int:
        """How many GPUs of `gpu_memory` GiB it is given: as few as hold it, or else as many as it
        can be divided among; 0 for a step on the CPU."""
        if not self.on_gpu:
            return 0
        return next(
            (count for count in self.gpu_counts if self.fits(count, gpu_memory)),
            self.gpu_counts[-1],
        )


def on_gpu(model: ModelConfig, size: Size) -> bool:
    """Whether a model of this size is put on a GPU, where there may be one."""
    return size.bytes >= GPU_FROM if model.device == "auto" else model.device != "cpu"


def loaded_weights(size: Size) -> Resources:
    """The GPUs that hold the weights of a model of this size."""
    return Resources(memory=ROOM * size.bytes, on_gpu=True)


def expert_weights(size: Size) -> float:
    """The weights, or their gradients, of all experts of a layer in fp32."""
    return 4.0 * size.experts * size.expert


def channel_products(size: Size) -> float:
    """Products of the channels of at most every expert of a layer, in fp64."""
    return 8.0 * size.experts * size.width**2


def _about_model(
    model: ModelConfig, memory: Bytes, disk: Bytes | None = None, **others: Any
) -> Resources:
    """Resources with memory and disk space by the size of the model, and other fields."""
    size = size_of(model)
    if size is None:
        return Resources(model=model, memory=None, on_gpu=True, **others)
    is_on_gpu = others.get("weights") in RUN and on_gpu(model, size)
    written = disk(size) if disk else 0.0
    return Resources(model=model, memory=memory(size), on_gpu=is_on_gpu, disk=written, **others)


def _gpu_counts(model: ModelConfig) -> Sequence[int]:
    """transformers divides layers, by a device map alone."""
    return GPU_COUNTS if model.device in ("auto", *DEVICE_MAPS) else GPU_COUNTS[:1]


def read_files(model: ModelConfig, pace: Sequence[Any]) -> Resources:
    """Reads the files of a model once, a piece of them at a time."""
    return _about_model(model, lambda _: 2.0 * PROCESS, weights="files", pace=pace)


def merged_sums(model: ModelConfig, text: CalibrationConfig, pace: Sequence[Any]) -> Resources:
    """Adds up the sums of the shares of a pass: two sets in memory, and the file that is
    written."""

    def memory(size: Size) -> float:
        layer = size.experts * (CHANNEL_SUMS * size.width + size.hidden)
        return PROCESS + 3 * 8.0 * size.moe_layers * layer

    return _about_model(model, memory, units=float(text.tokens), pace=pace)


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
    """Runs a model over a text.

    rows: the first row of a share of the text, and its end. engine: if it is not that of the text.
    backward: whether gradients come back through the layers. copies: of the weights in memory.
    per_layer: bytes held for every layer whose weights are in memory, besides these.
    extra_bytes: bytes held once.
    """
    is_layered = (engine or text.engine) == "streamed"
    tokens = (rows[1] - rows[0]) * text.length if rows else text.tokens
    batch_tokens = min(text.batch_size * text.length, tokens)

    def disk(size: Size) -> float:
        return size.hidden_states(tokens, backward=backward) if is_layered else 0.0

    def memory(size: Size) -> float:
        layer, fixed_bytes = (rule(size) if rule else 0.0 for rule in (per_layer, extra_bytes))
        if is_layered:
            base_bytes = PROCESS + size.layer_weights() + layer + batch_tokens * size.activations()
            # hidden states take at most half of the main memory, and are written beyond that
            return (
                base_bytes
                + (min(base_bytes, disk(size)) if model.device == "cpu" else 0.0)
                + fixed_bytes
            )
        batch = batch_tokens * (size.logits + size.activations(size.moe_layers if backward else 1))
        return PROCESS + ROOM * size.bytes * copies + size.moe_layers * layer + batch + fixed_bytes

    return _about_model(
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
    """Changes weights on a text, or fits merged experts: their sums are an expert in fp64 for two
    that are merged."""
    is_fit = recovery.fit is not None
    batch_tokens = min(text.batch_size * text.length, text.tokens)

    def sums(size: Size) -> float:
        return (
            8.0 * size.moe_layers * size.experts / 2 * size.width * (size.width + size.hidden)
            if is_fit
            else 0.0
        )

    def more(size: Size) -> float:
        teacher = DISTILLED * batch_tokens * size.logits if recovery.distill is not None else 0.0
        return teacher + sums(size)

    passes = text_pass(
        model, text, pace, engine="resident", backward=not is_fit, copies=copies, extra_bytes=more
    )
    size = size_of(model)
    return passes._replace(
        disk=sums(size) if size else 0.0,
        units=passes.units * (1 if is_fit else recovery.epochs),
        pace=[*pace, recovery.train, recovery.distill is not None, is_fit],
    )


def export(
    model: ModelConfig, pace: Sequence[Any], *, is_changed: bool, is_converted: bool
) -> Resources:
    """Writes a checkpoint. One whose weights are changed is written first without the changes, and
    one in GGUF is converted from another; then a decoder layer is held three times in fp32."""

    def memory(size: Size) -> float:
        layers = (
            4 / size.bytes_per_parameter * size.layer_weights(3)
            if is_changed or is_converted
            else 0.0
        )
        return 2 * PROCESS + layers

    def disk(size: Size) -> float:
        return float(size.bytes) * (1 + is_changed + is_converted)

    return _about_model(model, memory, disk, weights="files", pace=pace)


def items(benchmark: BenchmarkConfig) -> int:
    """Items of a benchmark that a model is given, about."""
    count = benchmark.expected or ITEMS
    return min(benchmark.limit or count, count)


def benchmark_pace(benchmark: BenchmarkConfig) -> list[Any]:
    """What decides the seconds of an item."""
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
    """Runs a model on the items of a benchmark: units are tokens that are read and written. Of a
    batch it holds the keys and values where texts are generated, else the logits of prompts.
    `copies`: of the weights."""
    written = benchmark.max_new_tokens

    def memory(size: Size) -> float:
        row = size.cache(PROMPT + written) if written else PROMPT * size.logits
        return PROCESS + ROOM * size.bytes * copies + benchmark.batch_size * row

    return _about_model(
        model,
        memory,
        weights="server" if backend.name == "server" else "model",
        gpu_counts=_vllm_counts(model, backend) if backend.name == "vllm" else _gpu_counts(model),
        isolated=True,
        units=float(items(benchmark) * (PROMPT * (1 + benchmark.shots) + written)),
        pace=[model_id, backend.name, *benchmark_pace(benchmark)],
        job="evaluate",
        pack="models",
        programs=programs,
    )


def answer_bytes(benchmark: BenchmarkConfig) -> float:
    """Bytes of the generated texts of a benchmark, if each has the maximum length."""
    return float(items(benchmark) * benchmark.max_new_tokens * BYTES_PER_TOKEN)


def _vllm_counts(model: ModelConfig, backend: BackendConfig) -> Sequence[int]:
    sizes = [size for name, size in backend.arguments.items() if name.endswith("parallel_size")]
    return [prod(sizes)] if sizes else tensor_parallel(config_of(model))
