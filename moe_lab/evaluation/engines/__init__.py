"""Engines compute texts and likelihoods, batch by batch: the loaded model (`hf.py`), a process of
vLLM (`vllm.py`) or a server (`server.py`). This module imports neither torch nor openai, so that
the preflight is fast.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from string import Template
from types import MappingProxyType
from typing import Any

from moe_lab.config import GREEDY, BackendConfig, BenchmarkConfig, ModelConfig, Sampling
from moe_lab.errors import UserError, mask, user_errors
from moe_lab.evaluation.items import Likelihood
from moe_lab.machine import check_has, interpreter
from moe_lab.models.checkpoint import read_json_if_there
from moe_lab.models.config_json import check_trained_top_k, config_of, eos_tokens
from moe_lab.models.families import PORTS

GREEDY_SAMPLING = Sampling().resolved({})
TOKEN_SECONDS = 1.0
"""Seconds per token that a slow server or engine may take."""
_CONTEXT = "a"
"""Text whose tokens are decoded before new tokens: some tokenizers drop the space that begins a
text. The end of the prompt cannot be used, because tokenizers that write characters as bytes decode
adjacent bytes together, and one broken character would damage all of them."""
_LOG_LINES = 60
"""Lines of a log that are printed when a server or an engine fails."""
_MOST_CHARACTERS = 600
"""Most characters of an error that are quoted."""
_ERROR = re.compile(r"(?:\([^)]*\) )?(?:ERROR [^\]]*\] )?([A-Za-z_][\w.]*(?:Error|Exception): .+)")
"""The last line of a stack trace, alone or as vLLM logs it: after the name of a process, a time and
a line of code."""
CAUSE_MARK = "root cause"
"""Part of vLLM's messages of errors that another error caused."""

Tokens = tuple[int, ...]
"""Token ids."""


@dataclass(frozen=True)
class Row:
    """Tokens to score: the row's likelihood is that of all tokens from index `start` on. The last
    token is predicted, not read."""

    tokens: Tokens
    start: int
    """Index of the first predicted token, at least 1."""


@dataclass(frozen=True)
class GenerationSettings:
    """How a text is generated, regardless of a checkpoint's sampling settings and penalties."""

    max_tokens: int
    """Largest number of tokens of the text."""
    stop: tuple[str, ...] = ()
    """Stop texts. Generation may end after a stop text, and need not: the caller cuts off what
    follows. Prompts are not searched for stop texts."""
    chat: bool = False
    """Whether a chat template has written the prompt, with all special tokens."""
    marks: tuple[tuple[int, str], ...] = ()
    """(id, text) of special tokens that stay in the text. All others are removed."""
    sampling: Sampling = GREEDY_SAMPLING
    """Settings without nulls."""

    @cached_property
    def longest_stop(self) -> int:
        """Bytes of the longest stop text, and so the largest number of its tokens."""
        return max((len(text.encode()) for text in self.stop), default=0)


@dataclass(frozen=True)
class Prompt:
    """A prompt that a text continues."""

    text: str
    tokens: Tokens
    generation: GenerationSettings
    seed: int = 0
    """Seed of the random numbers of the text, if it is sampled."""


@dataclass(frozen=True)
class GeneratedText:
    """The text after a prompt."""

    text: str
    """The text without an end token, and without special tokens but `GenerationSettings.marks`."""
    ended: str = "end"
    """Why the text ended: end (an end token or a stop text) or limit (`max_tokens` tokens)."""


class Engine(ABC):
    """A model to evaluate, with the plan of its pruning applied."""

    tokenizer: Any
    """The model's tokenizer."""
    template_arguments: Mapping[str, Any]
    """Arguments of the model's chat template besides the messages."""
    max_length: int | None
    """Most tokens that the model can read, prompt and answer together; None if its configuration
    does not say."""
    batches = 1
    """Number of batches whose prompts `generate` gets in one call."""
    scores = True
    """Whether the engine computes likelihoods."""
    sampling_defaults: Mapping[str, Any] = MappingProxyType({})
    """Sampling settings of the model's generation_config.json; {} for greedy generation."""

    @abstractmethod
    def generate(self, prompts: Sequence[Prompt], batch_size: int) -> list[GeneratedText]:
        """Generate a text after each prompt. FloatingPointError if a chosen token has no finite
        likelihood. `batch_size`: prompts in one forward pass, or requests under way at the same
        time."""

    def score(self, rows: Sequence[Row], batch_size: int) -> list[Likelihood]:
        """The likelihood of each row. UserError if the engine computes no likelihoods."""
        raise UserError(
            f"{type(self).__name__} computes no likelihoods: expected backend=hf or backend=vllm"
        )


def generated_text(
    tokenizer: Any,
    new_tokens: Sequence[int],
    generation: GenerationSettings,
    end_token_ids: Collection[int],
) -> GeneratedText:
    """The text of the `new_tokens`, which follow a prompt, up to the first end token. Special
    tokens are left out, except for `generation.marks`."""
    # number of tokens before the end token
    length = next(
        (index for index, token in enumerate(new_tokens) if token in end_token_ids), len(new_tokens)
    )
    marks = dict(generation.marks)  # id of a special token to keep -> its text
    context = encode(tokenizer, _CONTEXT, add_special=False)
    context_text = _decode(tokenizer, context)
    text = ""
    start = 0
    # the tokens between two marks are decoded together
    mark_indices = [index for index in range(length) if new_tokens[index] in marks]
    for end in (*mark_indices, length):
        decoded = _decode(tokenizer, [*context, *new_tokens[start:end]])
        text += decoded[len(context_text) :]
        if end < length:
            text += marks[new_tokens[end]]
        start = end + 1  # after the mark
    reached_limit = len(new_tokens) >= generation.max_tokens and length == len(new_tokens)
    return GeneratedText(text, "limit" if reached_limit else "end")


# cached, because all plans of a model get the same questions
@lru_cache(maxsize=1 << 13)
def encode(tokenizer: Any, text: str, add_special: bool) -> Tokens:
    """Token ids of `text`. `add_special`: whether the tokenizer adds its special tokens."""
    return tuple(tokenizer([text], add_special_tokens=add_special, verbose=False).input_ids[0])


def _decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of the tokens without special tokens."""
    text: str = tokenizer.decode(
        tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text


def end_token_ids(checkpoint: Path, tokenizer: Any) -> list[int]:
    """Ids of the tokens that end a text: the tokenizer's end token, and the end tokens in the
    checkpoint's generation_config.json. If this file has none, those in config.json count."""
    ends = read_json_if_there(checkpoint / "generation_config.json").get("eos_token_id")
    if ends is None:
        ends = read_json_if_there(checkpoint / "config.json").get("eos_token_id")
    return eos_tokens(ends, tokenizer)


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Sampling` that the content of a generation_config.json sets; {} if it asks for
    greedy generation."""
    do_sample = generation_config.get("do_sample")
    # without do_sample, servers sample at temperatures above 0
    if not (generation_config.get("temperature") if do_sample is None else do_sample):
        return {}
    stated = {
        name: generation_config[name] for name in GREEDY if generation_config.get(name) is not None
    }
    return {"temperature": 1.0, **stated}


def appended_tokens(tokenizer: Any) -> list[int]:
    """Ids of the tokens, such as an end token, that a tokenizer appends to every text."""
    plain_tokens = encode(tokenizer, _CONTEXT, add_special=False)  # of any text
    all_tokens = encode(tokenizer, _CONTEXT, add_special=True)
    return list(all_tokens[all_tokens.index(plain_tokens[0]) + len(plain_tokens) :])


def check_finite(number: float, name: str) -> None:
    """Raise FloatingPointError if `number` is not finite. `name`: what the number is, "logit" or
    "log-likelihood"."""
    if not math.isfinite(number):
        raise FloatingPointError(
            f"the {name} of a token is {number}, expected a finite number: the model's weights or "
            "model.dtype make it overflow"
        )


# Settings of an engine.


def setting_errors(
    backend: BackendConfig, benchmarks: Iterable[BenchmarkConfig], models: Iterable[ModelConfig]
) -> Iterator[str]:
    """Yield an error message for each wrong setting of the back end, and for each benchmark and
    each model that the back end does not support."""
    if backend.name == "hf":
        return
    for benchmark in benchmarks:
        if benchmark.compares_logits:
            yield (
                f"backend={backend.name} returns no logits, which benchmark {benchmark.name} "
                "compares with those of the unpruned model: omit it, or set backend=hf"
            )
    if backend.name == "server":
        # check the command with any checkpoint, port and name
        yield from user_errors(command_line, backend, Path("checkpoint"), 0, "name")
    for model in models:
        yield from user_errors(check_trained_top_k, model, f"backend={backend.name}")
        # PORTS: families of models whose code is in moe_lab, not in transformers
        if backend.name == "vllm" and (kind := config_of(model).get("model_type")) in PORTS:
            yield (
                f"backend=vllm: the transformers of vLLM has no model_type={kind} ({model.name}): "
                "expected backend=hf"
            )


def command_line(backend: BackendConfig, checkpoint: Path, port: int, name: str) -> list[str]:
    """The program and arguments of backend.command, with {checkpoint}, {port}, {name} and
    environment variables replaced. UserError for a command without {checkpoint} or {port}, a
    command that a shell could not split, and an environment variable that is not set."""
    line = backend.command or ""
    if "{checkpoint}" not in line or "{port}" not in line:
        raise UserError(
            f"backend.command={backend.command}: expected the command of a server, with "
            "{checkpoint} and {port}"
        )
    try:
        arguments = [Template(argument).substitute(os.environ) for argument in shlex.split(line)]
    except ValueError as error:
        raise UserError(f"backend.command={line} cannot be read: {error}") from None
    except KeyError as error:
        raise UserError(
            f"backend.command: the environment variable {error.args[0]} is not set: export it "
            "where steps run"
        ) from None
    for field, value in {"{checkpoint}": checkpoint, "{port}": port, "{name}": name}.items():
        arguments = [argument.replace(field, str(value)) for argument in arguments]
    return arguments


def check_installed(backend: BackendConfig) -> None:
    """Raise UserError when vLLM, or the program that backend.command starts, is not installed on
    this machine."""
    if backend.name == "vllm":
        check_has("vllm", interpreter("vllm", backend.python, "backend=vllm"))
    elif backend.name == "server":
        # the program does not depend on the checkpoint, the port and the name
        program, *_ = command_line(backend, Path("checkpoint"), 0, "name")
        if shutil.which(program, path=search_path()) is None:
            raise UserError(
                f"backend.command starts {program}, and no such program is installed: install it, "
                "or write its path into backend.command"
            )


def search_path() -> str:
    """The PATH for programs that moe_lab starts."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))


def error_summary(log: str) -> str:
    """The last error in a log and the last line of the log. Also prints the last `_LOG_LINES`
    lines to standard error."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    print(mask("\n".join(lines[-_LOG_LINES:])), file=sys.stderr, flush=True)
    errors = [match[1][:_MOST_CHARACTERS] for line in lines if (match := _ERROR.match(line))]
    causes = [error for error in errors if CAUSE_MARK not in error] or errors
    if causes:
        # `fromkeys` drops the repetition if the last line is the error
        return "; ".join(dict.fromkeys([causes[-1], lines[-1]]))
    return "; ".join(lines[-2:]) or "its log is empty"
