"""Engines compute texts and likelihoods, batch by batch: the loaded model (`hf.py`), a process of
vLLM (`vllm.py`) or a server (`server.py`). `answers.py` calls them. Imports neither torch nor
openai, for the preflight.
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
from pathlib import Path
from string import Template
from typing import Any

from moe_lab.config import BackendConfig, BenchmarkConfig, ModelConfig
from moe_lab.errors import UserError, mask, user_errors
from moe_lab.evaluation.harness import harness_of
from moe_lab.machine import check_has, interpreter
from moe_lab.models.checkpoint import read_json_if_there
from moe_lab.models.config_json import check_trained_top_k, config_of, eos_tokens
from moe_lab.models.families import PORTS

TOKEN_SECONDS = 1.0
"""Seconds per token that a slow server or engine may take."""
# prompt tokens decoded together with the first new ones: some tokenizers drop a leading space
_CONTEXT_TOKENS = 4
_LOG_LINES = 60
"""Lines of a log that are printed when a server or an engine fails."""
_LONGEST = 600
"""Characters of an error that are quoted."""
_ERROR = re.compile(r"(?:\([^)]*\) )?(?:ERROR [^\]]*\] )?([A-Za-z_][\w.]*(?:Error|Exception): .+)")
"""The last line of a stack trace, alone or as vLLM logs it: after the name of a process, a time and
a line of code."""
CAUSED = "root cause"
"""Part of vLLM's message for an error that another error caused."""

Likelihood = tuple[float, bool]
"""The summed log-likelihood of tokens in nats, and whether each was the likeliest."""


@dataclass(frozen=True)
class Row:
    """Token ids whose likelihood from index `start` on is wanted. The last one is not read."""

    tokens: tuple[int, ...]
    start: int
    """At least 1."""


@dataclass(frozen=True)
class Prompt:
    """A prompt that a text continues."""

    text: str
    tokens: tuple[int, ...]
    answer: Row | None = None
    """A right answer after the prompt. An engine may compute its likelihood with the text, at less
    cost than alone."""


@dataclass(frozen=True)
class GenerationSettings:
    """How texts are generated: always greedily, regardless of a checkpoint's sampling settings and
    penalties."""

    max_tokens: int
    """Largest number of tokens of a text."""
    stop: tuple[str, ...] = ()
    """Texts at which generation may end; the caller cuts a text that continues. Prompts are not
    searched for them."""
    chat: bool = False
    """Whether prompts are conversations, which a chat template has written with all special
    tokens."""
    batch_size: int = 64
    """Prompts in one forward pass, or requests under way at the same time."""
    marks: tuple[tuple[int, str], ...] = ()
    """Special tokens, id and text, that are retained in a text: the caller searches it for them."""


@dataclass(frozen=True)
class GeneratedText:
    """The text after a prompt."""

    text: str
    """It has no special tokens but `GenerationSettings.marks`, and no end token."""
    ended: str = "end"
    """end (by an end token or a stop text) or limit (by `GenerationSettings.max_tokens`)."""
    likelihood: Likelihood | None = None
    """Of the prompt's answer, if it was computed."""


class Engine(ABC):
    """One model, under the plan that is evaluated."""

    tokenizer: Any
    """The model's tokenizer."""
    template_arguments: Mapping[str, Any]
    """Arguments of its chat template besides the messages."""
    max_length: int | None
    """Tokens the model can read, prompt and answer together; None when its configuration does not
    say."""
    batches = 1
    """Batch sizes of prompts that are generated in one call."""
    scores = True
    """Whether it computes likelihoods."""

    @abstractmethod
    def generate(
        self, prompts: Sequence[Prompt], generation: GenerationSettings
    ) -> list[GeneratedText]:
        """The text after each prompt. Raises FloatingPointError where a chosen token has no finite
        likelihood."""

    def score(self, rows: Sequence[Row], batch_size: int) -> list[Likelihood]:
        """The likelihood of each row."""
        raise UserError(
            f"{type(self).__name__} computes no likelihoods: expected backend=hf or backend=vllm"
        )


def generated_text(
    tokenizer: Any,
    prompt_tokens: Sequence[int],
    new_tokens: Sequence[int],
    generation: GenerationSettings,
    ends: Collection[int],
) -> GeneratedText:
    """The `new_tokens`, up to the first end token, as the text that continues the
    `prompt_tokens`."""
    length = next(
        (index for index, token in enumerate(new_tokens) if token in ends), len(new_tokens)
    )
    marks = dict(generation.marks)
    tokens = [*prompt_tokens[-_CONTEXT_TOKENS:], *new_tokens[:length]]
    text = ""
    start = len(prompt_tokens[-_CONTEXT_TOKENS:])
    marked = [index for index in range(start, len(tokens)) if tokens[index] in marks]
    for end in (*marked, len(tokens)):
        context = max(0, start - _CONTEXT_TOKENS)
        prefix = _decoded(tokenizer, tokens[context:start])
        text += _decoded(tokenizer, tokens[context:end])[len(prefix) :]
        if end < len(tokens):
            text += marks[tokens[end]]
        start = end + 1
    return GeneratedText(
        text,
        "limit"
        if len(new_tokens) >= generation.max_tokens and length == len(new_tokens)
        else "end",
    )


def _decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    text: str = tokenizer.decode(
        tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text


def end_tokens(checkpoint: Path, tokenizer: Any) -> list[int]:
    """The tokens that end a text: those of the checkpoint's generation settings, and the
    tokenizer's."""
    files = (checkpoint / name for name in ("generation_config.json", "config.json"))
    first, second = (read_json_if_there(file).get("eos_token_id") for file in files)
    return eos_tokens(second if first is None else first, tokenizer)


def appended_tokens(tokenizer: Any) -> list[int]:
    """The tokens, such as an end token, that a tokenizer adds after every text."""
    text, whole = (
        tokenizer(["a"], add_special_tokens=special, verbose=False).input_ids[0]
        for special in (False, True)
    )
    return list(whole[whole.index(text[0]) + len(text) :])


def check_finite(number: float, name: str) -> None:
    """Raise FloatingPointError for a logit or log-likelihood that is no finite number, though it
    would give a text."""
    if not math.isfinite(number):
        raise FloatingPointError(
            f"the {name} of a token is {number}, expected a finite number: the model's weights or "
            "precision make it overflow"
        )


# Settings of an engine.


def wrong(
    backend: BackendConfig, benchmarks: Iterable[BenchmarkConfig], models: Iterable[ModelConfig]
) -> Iterator[str]:
    """A sentence for each mistake in the back end, and for each benchmark or model that it cannot
    serve."""
    if backend.name == "hf":
        return
    if backend.name == "server":
        yield from user_errors(command_line, backend, Path("checkpoint"), 0, "name")
        for benchmark in benchmarks:
            if benchmark.max_new_tokens and not harness_of(benchmark).two_phases:
                yield (
                    f"backend={backend.name}: benchmark {benchmark.name} generates with the loaded "
                    "model, whatever the back end: omit it, or set backend=hf"
                )
    for model in models:
        yield from user_errors(check_trained_top_k, model, f"backend={backend.name}")
        if backend.name == "vllm" and (kind := config_of(model).get("model_type")) in PORTS:
            yield (
                f"backend=vllm: the transformers of vLLM has no model_type={kind} ({model.name}): "
                "expected backend=hf"
            )


def command_line(backend: BackendConfig, checkpoint: Path, port: int, name: str) -> list[str]:
    """The arguments of backend.command, with the values of {checkpoint}, {port}, {name} and of
    environment variables. UserError for a command without one of the first two, or with a variable
    that is not set."""
    line = backend.command or ""
    if "{checkpoint}" not in line or "{port}" not in line:
        raise UserError(
            f"backend.command={backend.command}: expected a server's, with {{checkpoint}} and "
            "{port}"
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
    """Raise UserError when vLLM, or the program that backend.command starts, is not on this
    machine."""
    if backend.name == "vllm":
        check_has("vllm", interpreter("vllm", backend.python, "backend=vllm"))
    elif backend.name == "server":
        program, *_ = command_line(backend, Path("checkpoint"), 0, "name")
        if shutil.which(program, path=search_path()) is None:
            raise UserError(
                f"backend.command starts {program}, and no such program is installed: install it, "
                "or write its path into backend.command"
            )


def search_path() -> str:
    """The PATH in which programs are searched: first the folder of this interpreter, then the usual
    PATH."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))


def last_lines(log: str) -> str:
    """The last error and the last line of a log, as part of a sentence; the last two lines if it
    has no error. More lines are printed to standard error."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    print(mask("\n".join(lines[-_LOG_LINES:])), file=sys.stderr, flush=True)
    errors = [match[1][:_LONGEST] for line in lines if (match := _ERROR.match(line))]
    causes = [error for error in errors if CAUSED not in error] or errors
    if causes:
        return "; ".join(dict.fromkeys([causes[-1], lines[-1]]))
    return "; ".join(lines[-2:]) or "its log is empty"
