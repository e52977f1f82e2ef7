"""How fast a model reads prompts and writes answers on the device it is on, and what memory that takes."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from moe_lab.config import TimingConfig
from moe_lab.errors import UserError

COLUMNS = ("batch_size", "prompt_length", "new_tokens", "repeat", "prefill_seconds", "decode_seconds", "working_bytes")
"""prefill_seconds   from the prompts (batch_size x prompt_length tokens) to the first new token of each
decode_seconds    for new_tokens further tokens of each, one after the other
working_bytes     of memory beyond the weights at the largest moment of a request; NaN where the system does not tell"""

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


@torch.inference_mode()
def measure(model: Any, tokens: torch.Tensor, settings: TimingConfig) -> list[tuple[Any, ...]]:
    """Rows of COLUMNS: every batch size with every prompt length, `asked.repeats` times after `asked.warmup` requests.

    Prompts are cut from `tokens` (N,), one after the other, from the start again where they end. Answers are the most
    likely tokens, of `asked.new_tokens` whatever they are; keys and values are kept. UserError for a prompt that leaves
    too little room.
    """
    _check_room(model, settings)
    return [
        row
        for size in settings.batch_sizes
        for length in settings.prompt_lengths
        for row in _rows(model, tokens, settings, size, length)
    ]


def _check_room(model: Any, settings: TimingConfig) -> None:
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = max(settings.prompt_lengths) + settings.new_tokens + 1
    if most is not None and longest > most:
        raise UserError(
            f"timed.prompt_lengths={max(settings.prompt_lengths)} with timed.new_tokens={settings.new_tokens} makes "
            f"{longest} tokens: the model reads {most} at most"
        )


def _rows(
    model: Any, tokens: torch.Tensor, settings: TimingConfig, size: int, length: int
) -> Iterator[tuple[Any, ...]]:
    ids = _prompts(tokens, size, length).to(model.device)

    def request() -> tuple[float, float]:
        return _request(model, ids, settings.new_tokens)

    working = _working_bytes(model.device, request)
    for _ in range(settings.warmup - 1):
        request()
    for repeat in range(settings.repeats):
        yield (size, length, settings.new_tokens, repeat, *request(), working)


def _prompts(tokens: torch.Tensor, size: int, length: int) -> torch.Tensor:
    """(size, length) of `tokens`, repeated as often as needed."""
    times = -(-size * length // len(tokens))
    return tokens.repeat(times)[: size * length].view(size, length)


def _request(model: Any, ids: torch.Tensor, new_tokens: int) -> tuple[float, float]:
    """Seconds until the first new token of each prompt, and from there to the last."""
    start = _now(model.device)
    output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    chosen = output.logits[:, -1:].argmax(-1)
    first = _now(model.device)
    for _ in range(new_tokens):
        output = model(input_ids=chosen, past_key_values=output.past_key_values, use_cache=True, logits_to_keep=1)
        chosen = output.logits[:, -1:].argmax(-1)
    return first - start, _now(model.device) - first


def _now(device: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    if device.type == "cuda":
        for number in range(torch.cuda.device_count()):
            torch.cuda.synchronize(number)
    return time.perf_counter()


def _working_bytes(device: torch.device, request: Callable[[], object]) -> float:
    """What `request` takes beyond what is held before it: as torch allocates it on GPUs, in pages on the CPU."""
    if device.type == "cuda":
        gpus = range(torch.cuda.device_count())
        before = sum(torch.cuda.memory_allocated(number) for number in gpus)
        for number in gpus:
            torch.cuda.reset_peak_memory_stats(number)
        request()
        return float(sum(torch.cuda.max_memory_allocated(number) for number in gpus) - before)
    try:
        ctypes.CDLL(None).malloc_trim(0)  # gives back what is free, which the request would take again unseen
        _RESET.write_text(_RESET_PEAK)
    except (AttributeError, OSError):  # another system than Linux, or one that does not let a process do so
        request()
        return float("nan")
    before = _stated("VmHWM")
    request()
    return float(_stated("VmHWM") - before)


def _stated(field: str) -> int:
    """Bytes of memory of this process that the system states."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
