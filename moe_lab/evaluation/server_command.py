"""The command line that backend=server starts, and its checks. Without torch or openai, for the preflight."""

from __future__ import annotations

import os
import shlex
import shutil
import string
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from moe_lab.config import BackendConfig, BenchmarkConfig, ModelConfig
from moe_lab.errors import ENVIRONMENT, UserError, unknown, user_errors
from moe_lab.evaluation.suite import has_two_phases
from moe_lab.models.config_json import check_trained_top_k
from moe_lab.secret_settings import filled, revealed

BACKENDS = ("hf", "server")
PLACES = ("checkpoint", "port", "name")
"""Placeholders of a command line; the name is optional."""
_NEEDED = ("checkpoint", "port")
_HINTS = {"transformers": "transformers[serving]"}


def check_command(backend: BackendConfig) -> None:
    """Raise UserError for impossible settings of the back end."""
    if backend.name not in BACKENDS:
        raise unknown("backend.name", backend.name, BACKENDS)
    if backend.name == "server":
        if backend.continuous:
            raise UserError("backend.continuous=true is for backend=hf: a server batches in its own way")
        command_line(backend, Path("checkpoint"), 0, "name")
        if not backend.ready_seconds > 0:
            raise UserError(f"backend.ready_seconds={backend.ready_seconds}: expected a number above 0")


def wrong(
    backend: BackendConfig,
    benchmarks: Iterable[BenchmarkConfig],
    models: Iterable[ModelConfig],
) -> Iterator[str]:
    """A sentence for each mistake in the back end, and for each benchmark or model that it cannot serve."""
    yield from user_errors(check_command, backend)
    for benchmark in benchmarks:
        by_loaded_model = benchmark.max_new_tokens and not has_two_phases(benchmark)
        if by_loaded_model and (backend.name == "server" or backend.continuous):
            yield (
                f"backend={backend.name}: benchmark {benchmark.name} generates with the loaded model, "
                "whatever the back end: leave it out, or set backend=hf backend.continuous=false"
            )
            break
    if backend.name != "server":
        return
    for model in models:
        yield from user_errors(check_trained_top_k, model, "backend=server")


def command_line(backend: BackendConfig, checkpoint: Path, port: int, name: str) -> list[str]:
    """The command's words with placeholders filled, each in its word. Raises UserError for a wrong placeholder."""
    command = backend.command
    if not command:
        raise UserError("backend.command is not set: expected the command line of a server, such as vllm's")
    try:
        # Secrets are filled in last, so that they are neither split nor searched for placeholders.
        split = shlex.split(ENVIRONMENT.sub(lambda secret: f"${{{secret[0][1:]}}}", filled(command)))
        places = {place for word in split for _, place, _, _ in string.Formatter().parse(word) if place is not None}
    except ValueError as error:
        raise UserError(f"backend.command={command} cannot be read: {error}") from None
    for place in sorted(places - set(PLACES)):
        raise unknown("backend.command: place", f"{{{place}}}", [f"{{{each}}}" for each in PLACES])
    for place in _NEEDED:
        if place not in places:
            raise UserError(f"backend.command={command} has no {{{place}}}: expected {{checkpoint}} and {{port}} in it")
    return [revealed(word.format(checkpoint=checkpoint, port=port, name=name)) for word in split]


def check_installed(backend: BackendConfig) -> None:
    """Raise UserError when the program that backend.command starts is not on this machine."""
    try:
        check_command(backend)
    except UserError:  # which `wrong` reports
        return
    if backend.name != "server":
        return
    program, *_ = command_line(backend, Path("checkpoint"), 0, "name")
    if shutil.which(program, path=search_path()) is None:
        raise UserError(
            f"backend.command starts {program}, and there is no such program here: install it, such as with pip "
            f"install {_HINTS.get(program, program)}, or write its path into backend.command"
        )


def search_path() -> str:
    """The PATH in which programs are searched: first the folder of this interpreter, then the usual PATH."""
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))
