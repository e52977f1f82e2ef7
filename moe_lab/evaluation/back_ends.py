"""Back ends: their settings and checks, the command line of a server, and what a log ends with.

No torch and no openai, for the preflight.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import string
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from moe_lab.config import BackendConfig, BenchmarkConfig, ModelConfig
from moe_lab.config.identity import identity
from moe_lab.errors import UserError, unknown, user_errors
from moe_lab.evaluation.suite import has_two_phases
from moe_lab.models.config_json import check_trained_top_k, config_of
from moe_lab.models.families import PORTS
from moe_lab.secrets import mask

PLACING = frozenset(
    {
        "cpu_offload_gb",
        "data_parallel_size",
        "disable_log_stats",
        "gpu_memory_utilization",
        "max_parallel_loading_workers",
        "pipeline_parallel_size",
        "swap_space",
        "tensor_parallel_size",
    }
)
"""Arguments of vllm.LLM that say where a model is and how much memory it may take: no part of the identity of a
step."""
PLACES = ("checkpoint", "port", "name")
"""Placeholders of a command line; the name is optional."""
_NEEDED = ("checkpoint", "port")
_LOG_LINES = 60
"""Lines of a log that are printed when a server or an engine fails."""
_LONGEST = 600
"""Characters of an error that are quoted."""
_ERROR = re.compile(r"(?:\([^)]*\) )?(?:ERROR [^\]]*\] )?([A-Za-z_][\w.]*(?:Error|Exception): .+)")
"""The last line of a stack trace, alone or as vLLM logs it: after the name of a process, a time and a place."""
ELSEWHERE = "root cause"
"""What vLLM says in an error that another one caused."""
_HINTS = {"transformers": "transformers[serving]"}


@identity.register
def _(backend: BackendConfig) -> Any:
    """Its name; of a server the command line, of vLLM the arguments but for `PLACING`."""
    if backend.name == "server":
        return {"name": backend.name, "command": backend.command}
    if backend.name == "vllm":
        arguments = {name: value for name, value in backend.arguments.items() if name not in PLACING}
        return {"name": backend.name, "arguments": arguments}
    return {"name": backend.name}


def check_command(backend: BackendConfig) -> None:
    """Raise UserError for a command line that cannot start a server."""
    if backend.name == "server":
        command_line(backend, Path("checkpoint"), 0, "name")


def wrong(
    backend: BackendConfig,
    benchmarks: Iterable[BenchmarkConfig],
    models: Iterable[ModelConfig],
) -> Iterator[str]:
    """A sentence for each mistake in the back end, and for each benchmark or model that it cannot serve."""
    yield from user_errors(check_command, backend)
    for benchmark in benchmarks:
        by_loaded_model = benchmark.max_new_tokens and not has_two_phases(benchmark)
        if by_loaded_model and backend.name == "server":
            yield (
                f"backend={backend.name}: benchmark {benchmark.name} generates with the loaded model, "
                "whatever the back end: leave it out, or set backend=hf"
            )
            break
    if backend.name == "hf":
        return
    for model in models:
        yield from user_errors(check_trained_top_k, model, f"backend={backend.name}")
        if backend.name == "vllm" and (kind := config_of(model).get("model_type")) in PORTS:
            yield f"backend=vllm: the transformers of vLLM has no model_type={kind} ({model.name}): expected backend=hf"


def command_line(backend: BackendConfig, checkpoint: Path, port: int, name: str) -> list[str]:
    """The command's words with placeholders filled, each in its word. Raises UserError for a wrong placeholder."""
    command = backend.command
    if not command:
        raise UserError("backend.command is not set: expected the command line of a server, such as vllm's")
    try:
        split = shlex.split(command)
        places = {place for word in split for _, place, _, _ in string.Formatter().parse(word) if place is not None}
    except ValueError as error:
        raise UserError(f"backend.command={command} cannot be read: {error}") from None
    for place in sorted(places - set(PLACES)):
        raise unknown("backend.command: place", f"{{{place}}}", [f"{{{each}}}" for each in PLACES])
    for place in _NEEDED:
        if place not in places:
            raise UserError(f"backend.command={command} has no {{{place}}}: expected {{checkpoint}} and {{port}} in it")
    filled = [word.format(checkpoint=checkpoint, port=port, name=name) for word in split]
    return [re.sub(r"\$(\w+)", _variable, word) for word in filled]


def _variable(match: re.Match[str]) -> str:
    """The value of an environment variable in a command line."""
    if (value := os.environ.get(match[1])) is None:
        raise UserError(f"backend.command: there is no environment variable {match[1]} here: export it where steps run")
    return value


def check_installed(backend: BackendConfig) -> None:
    """Raise UserError when vLLM, or the program that backend.command starts, is not on this machine."""
    try:
        check_command(backend)
    except UserError:  # which `wrong` reports
        return
    if backend.name == "vllm":
        from moe_lab.evaluation.interpreters import check_has, interpreter

        check_has("vllm", interpreter("vllm", backend.python, "backend=vllm"))
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


def last_lines(log: str) -> str:
    """The last error and the last line of a log, as part of a sentence; the last two lines if it has no error.

    Prints more lines to standard error.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    print(mask("\n".join(lines[-_LOG_LINES:])), file=sys.stderr, flush=True)
    errors = [match[1][:_LONGEST] for line in lines if (match := _ERROR.match(line))]
    causes = [error for error in errors if ELSEWHERE not in error] or errors
    if causes:
        return "; ".join(dict.fromkeys([causes[-1], lines[-1]]))
    return "; ".join(lines[-2:]) or "it said nothing"
