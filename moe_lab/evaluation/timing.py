"""Measure how fast a model reads prompts and generates tokens on its device, and how much memory
this takes."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from moe_lab.config import TimingConfig
from moe_lab.errors import UserError
from moe_lab.models.transformers_private import CACHE

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")
REPEATS = 7
"""Timed requests: enough for medians and quartiles."""


@torch.inference_mode()
def measure(model: Any, tokens: torch.Tensor, settings: TimingConfig) -> list[tuple[Any, ...]]:
    """Time `REPEATS` requests, after a warm-up of two, for each batch size and each prompt length.
    Returns a row for each timed request; `result_files.TIMINGS` has the names of its columns.

    Prompts are cut from `tokens` (N,). Generation is greedy, with a cache of keys and values. Each
    prompt gets a first new token and `settings.new_tokens` further tokens, even after an end token.
    Raises UserError if the model cannot read the longest prompt and its new tokens.
    """
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = max(settings.prompt_lengths) + settings.new_tokens + 1  # 1: the first new token
    if limit is not None and longest > limit:
        raise UserError(
            f"timed.prompt_lengths={max(settings.prompt_lengths)} with "
            f"timed.new_tokens={settings.new_tokens} makes {longest} tokens: the model reads "
            f"{limit} at most"
        )
    rows: list[tuple[Any, ...]] = []
    for batch_size, length in product(settings.batch_sizes, settings.prompt_lengths):
        # rounded up
        copies = -(-batch_size * length // len(tokens))
        ids = tokens.repeat(copies)[: batch_size * length].view(batch_size, length)
        request = partial(_time_request, model, ids.to(model.device), settings.new_tokens)
        # The first request compiles and allocates; its memory is measured.
        working_bytes = _working_bytes(model.device, request)
        request()
        for repeat in range(REPEATS):
            seconds = request()
            rows.append((batch_size, length, settings.new_tokens, repeat, *seconds, working_bytes))
    return rows


def _time_request(model: Any, ids: torch.Tensor, new_tokens: int) -> tuple[float, float]:
    """Generate tokens after the prompts `ids` (B, S). Returns (seconds until all prompts have their
    first new token, seconds for the `new_tokens` tokens after the first new token)."""
    start = first_token_time = _now(model.device)
    inputs = {"input_ids": ids}
    for number in range(new_tokens + 1):
        output = model(**inputs, use_cache=True, logits_to_keep=1)
        inputs = {"input_ids": output.logits[:, -1:].argmax(-1), CACHE: output[CACHE]}
        if number == 0:
            first_token_time = _now(model.device)
    return first_token_time - start, _now(model.device) - first_token_time


def _now(device: torch.device) -> float:
    """Wait until the GPUs have finished their work, and return the time in seconds. If `device`
    is a GPU, the model may use all GPUs."""
    if device.type == "cuda":
        for number in range(torch.cuda.device_count()):
            torch.cuda.synchronize(number)
    return time.perf_counter()


def _working_bytes(device: torch.device, request: Callable[[], object]) -> float:
    """Peak memory during `request`, less the memory in use before the request, in bytes. NaN if
    the peak of resident memory cannot be reset."""
    if device.type == "cuda":
        gpus = range(torch.cuda.device_count())
        bytes_before = sum(map(torch.cuda.memory_allocated, gpus))
        for number in gpus:
            torch.cuda.reset_peak_memory_stats(number)
        request()
        return float(sum(map(torch.cuda.max_memory_allocated, gpus)) - bytes_before)
    try:
        # Give free memory back to the system: using it again would not raise the peak.
        ctypes.CDLL(None).malloc_trim(0)
        _RESET.write_text("5")  # which resets the peak of resident memory
    except (AttributeError, OSError):  # not Linux, or not permitted
        request()
        return float("nan")
    bytes_before = _peak_bytes()
    request()
    return float(_peak_bytes() - bytes_before)


def _peak_bytes() -> int:
    """Peak resident memory of this process since the peak was reset, in bytes."""
    # such as "VmHWM:    1234 kB", where kB means 1024 bytes
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
