"""The files that define a task in lm-eval's format, and a guard that the task reads no other files.
Imports neither lm-eval nor torch."""

from __future__ import annotations

import ast
import os
import re
import sys
import sysconfig
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec, source_from_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

from moe_lab.config import BenchmarkConfig
from moe_lab.errors import UserError, check_known, unknown_name_error
from moe_lab.source_code import SITE, file_of, local_files_and_versions

_TASK = re.compile(r"^[\"']?(?:task|group)[\"']?: *[\"']?([\w-]+)[\"']? *$", re.MULTILINE)
"""The name of a task or group in lm-eval's own definition files."""


def task_folder(benchmark: BenchmarkConfig) -> Path:
    """The folder of lm-eval with the definition of benchmark.task: parameters.folder or, by
    default, the folder that is named like the task. UserError when the folder or the task does not
    exist."""
    package = find_spec("lm_eval")
    # if lm-eval is not installed, `Harness.missing_requirements` has reported this before
    assert package is not None and package.origin is not None
    root = Path(package.origin).parent / "tasks"
    name = str(benchmark.parameters.get("folder", benchmark.task))
    folder = root / name
    # lm-eval would need ten seconds to index the 14,000 files in `root`
    if not folder.is_dir() or folder == root:
        parent = folder.parent if folder.parent.is_dir() and folder != root else root
        folder_names = [str(path.relative_to(root)) for path in parent.iterdir() if path.is_dir()]
        raise unknown_name_error(
            f"benchmark {benchmark.name}: parameters.folder", name, folder_names
        )
    task_names: set[str] = set()
    for file in folder.rglob("*.yaml"):
        task_names.update(_TASK.findall(file.read_text(encoding="utf-8")))
    check_known(f"benchmark {benchmark.name}: task", benchmark.task, task_names)
    return folder


def definition_files(task: Path) -> tuple[list[Path], dict[str, str]]:
    """(files, versions) of a task that is defined in the file `task`. `versions`: distribution ->
    version, for the installed packages that the task's code imports.

    `files` are the definition and all definitions that it includes; the modules named by
    `!function` in the definitions; all local modules that those modules import; and the data files
    named in the modules. UserError for a file that is missing or unreadable.
    """
    files: dict[Path, None] = {}  # an ordered set
    versions: dict[str, str] = {}
    pending = [task]
    while pending:
        file = pending.pop().resolve()
        if file in files:
            continue
        files[file] = None
        included_files, functions = _references(file)
        pending += [file.parent / name for name in included_files]
        for module in sorted({function.rpartition(".")[0] for function in functions}):
            source = file_of(module, file.parent)
            if source is None:
                raise UserError(
                    f"{file}: !function {module}: expected a module {module}.py in {file.parent}"
                )
            module_files, package_versions = local_files_and_versions(module, source)
            versions |= package_versions
            for path in module_files.values():  # module_files: name of a module -> file
                files |= dict.fromkeys((path.resolve(), *_data_files(path)))
    return list(files), versions


def _references(file: Path) -> tuple[list[str], list[str]]:
    """The file names after `include`, and the function names after `!function`, in a
    definition."""
    functions: list[str] = []

    class Loader(yaml.CSafeLoader):  # in C: every step with a task of lm-eval reads its definition
        pass

    # collect the names of functions, and import no code
    Loader.add_constructor(
        "!function", lambda loader, node: functions.append(loader.construct_scalar(node))
    )
    try:
        definition = yaml.load(file.read_bytes(), Loader)
    except OSError as error:
        raise UserError(
            f"{file} cannot be read: {error.strerror}, expected a file of lm-eval's format"
        ) from None
    except yaml.YAMLError as error:
        raise UserError(f"{file} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(definition, dict):
        raise UserError(
            f"{file}: expected a task in lm-eval's format, such as doc_to_text: question"
        )
    included_files = definition.get("include", [])
    return [included_files] if isinstance(included_files, str) else included_files, functions


def _data_files(module_file: Path) -> Iterator[Path]:
    """Yield the files that a module names: each string in the code that is the path of an existing
    file, relative to the folder of the module."""
    try:
        tree = ast.parse(module_file.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise UserError(f"{module_file} is not Python: {error}") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            with suppress(OSError, ValueError):  # a string that cannot be a path
                if (file := module_file.parent.joinpath(node.value).resolve()).is_file():
                    yield file


_PROGRAM_EVENTS = (
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.system",
    "pty.spawn",
    "subprocess.Popen",
    "socket.connect",
)
"""Audit events of starting a program or a connection."""
_LIBRARIES = [
    *(
        Path(sysconfig.get_path(name)).resolve()
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    ),
    *(Path(folder).resolve() for folder in ("/etc", "/proc", "/sys", "/usr/lib", "/usr/share")),
]
"""Folders of Python, of installed packages and of the system."""
_observers: list[_Observer] = []


class _Observer:
    """Records the files that the current thread and threads started later read, and prevents these
    threads from starting programs. `reader`: the subject of error messages, "benchmark NAME"."""

    def __init__(self, reader: str) -> None:
        self.reader = reader
        self.files: set[str] = set()
        # kept, because the code that started a program may catch the error
        self.refusal: UserError | None = None
        running_threads = {thread.native_id for thread in threading.enumerate()}
        self.ignored_threads = running_threads - {threading.get_native_id()}

    def notice(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Record the file that an audit event opens. UserError for an event of _PROGRAM_EVENTS,
        which prevents the start."""
        if threading.get_native_id() in self.ignored_threads:
            return
        if event == "open":
            path, _, flags = arguments
            # O_TRUNC empties the file, and O_EXCL creates it: there is nothing to read
            writes_only = flags & os.O_ACCMODE == os.O_WRONLY or flags & (os.O_TRUNC | os.O_EXCL)
            if isinstance(path, str | bytes) and not writes_only:
                self.files.add(os.path.abspath(os.fsdecode(path)))
        elif event == "sqlite3.connect":
            database = os.fsdecode(arguments[0])
            if database.startswith("file:"):
                database = unquote(urlsplit(database).path)
            self.files.add(os.path.abspath(database))
        elif event in _PROGRAM_EVENTS:
            self.refusal = UserError(
                f"{self.reader} calls {event}{arguments[:2]} while its items are made, and files "
                "read by this call do not identify the items: expected code that reads files itself"
            )
            raise self.refusal


@cache
def _install_hook() -> None:
    """Pass audit events to all observers from now on. Python cannot remove a hook."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        for observer in _observers:
            observer.notice(event, arguments)

    sys.addaudithook(hook)


@contextmanager
def restrict_reads_to(files: Collection[Path], reader: str) -> Iterator[None]:
    """A context in which the code of a task may read only `files` and the files of Python and of
    packages. `files` identify the items of the task. At the end, the task's modules are removed
    from sys.modules.

    UserError when another file is read, and when a program or a connection is started. The message
    begins with `reader`. Files opened by native code are not detected.
    """
    identifying_files = {str(file.resolve()) for file in files}
    modules_before = _module_files()
    observer = _Observer(reader)
    _install_hook()
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)
        modules = _module_files()
        # packages that were imported before, which need not be in one of _LIBRARIES
        package_files = {
            file for name, file in modules.items() if name.partition(".")[0] in modules_before
        }
        sources = {_source(path) for path in observer.files}
        files_read = {str(file) for file in sources if file.is_file() and not _is_of_library(file)}
        other_files = files_read - identifying_files - package_files
        # the next task may have modules with the same names
        for name, file in modules.items():
            if file in identifying_files | other_files:
                del sys.modules[name]
    if observer.refusal:
        raise observer.refusal
    if other_files:
        raise UserError(
            f"{reader} reads {', '.join(sorted(other_files))}, which does not identify the items: "
            "expected files that its code imports, or names by a literal path relative to its "
            "folder"
        )


def _module_files() -> dict[str, str]:
    """Name of a module -> its file, for each imported module with a file."""
    # a copy of the items, because reading an attribute of a module may import other modules
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    return {name: file for name, file in files.items() if file}


def _source(path: str) -> Path:
    """The absolute path of a file; for a compiled file in __pycache__, that of its source file."""
    with suppress(ValueError):
        path = source_from_cache(path)
    return Path(path).resolve()


def _is_of_library(file: Path) -> bool:
    """Whether a file belongs to Python, an installed package or the system."""
    return bool(SITE.intersection(file.parts)) or any(
        file.is_relative_to(folder) for folder in _LIBRARIES
    )
