"""The files that a task in lm-eval's format is made of, without lm-eval. No torch."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from moe_lab.errors import UserError
from moe_lab.source_code import code_of, file_of


def definition_files(task: Path) -> tuple[list[Path], dict[str, str]]:
    """The files that define a task, and the versions of the installed packages that its code imports.

    They are its own file, those that it includes, the code that these name by `!function` with all local modules that
    it imports, and the data files that this code names, relative to its folder. UserError for one that is missing or
    cannot be read.
    """
    files: dict[Path, None] = {}
    versions: dict[str, str] = {}
    pending = [task]
    while pending:
        file = pending.pop().resolve()
        if file in files:
            continue
        files[file] = None
        included, functions = _references(file)
        pending += [file.parent / name for name in included]
        for module in sorted({function.rpartition(".")[0] for function in functions}):
            source = file_of(module, file.parent)
            if source is None:
                raise UserError(f"{file}: !function {module}: expected a module {module}.py in {file.parent}")
            code, installed = code_of(module, source)
            versions |= installed
            for path in code.values():
                files |= dict.fromkeys((path.resolve(), *_data_files(path)))
    return list(files), versions


def _references(file: Path) -> tuple[list[str], list[str]]:
    """What a definition names by `include`, and by `!function`."""
    functions: list[str] = []

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: functions.append(loader.construct_scalar(node)))
    try:
        definition: Any = yaml.load(file.read_bytes(), Loader)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}, expected a file of lm-eval's format") from None
    except yaml.YAMLError as error:
        raise UserError(f"{file} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(definition, dict):
        raise UserError(f"{file}: expected a task in lm-eval's format, such as doc_to_text: question")
    included = definition.get("include", [])
    return [included] if isinstance(included, str) else included, functions


def _data_files(code: Path) -> Iterator[Path]:
    """Files that a module names by a literal text, relative to its folder."""
    try:
        tree = ast.parse(code.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{code} is not Python: {error}") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            with contextlib.suppress(OSError, ValueError):  # a text that is no path
                if (file := code.parent.joinpath(node.value).resolve()).is_file():
                    yield file
