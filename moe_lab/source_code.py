"""Modules with code from outside moe_lab: names of plugins, and digests. The digest of a module
covers all modules that the module imports. Does not import torch."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from hashlib import sha256
from importlib import metadata
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

SITE = {"site-packages", "dist-packages"}
"""Names of the folders into which packages are installed."""
IGNORED = {
    *sys.stdlib_module_names,
    "moe_lab",
    "numpy",
    "pandas",
    "pydantic",
    "safetensors",
    "scipy",
    "torch",
    "transformers",
}
"""Modules of Python, of moe_lab, and of libraries that moe_lab requires. Their versions are in the
provenance of steps, and not in ids."""
MODULE_NAME = re.compile(r"\.*[^\W\d]\w*(\.[^\W\d]\w*)*")
"""Pattern of an absolute or relative name of a module."""
ENTRY_POINTS = "moe_lab.plugins"
"""Group of entry points whose modules every command imports."""
_distributions = cache(metadata.packages_distributions)
"""Returns top package -> names of the distributions that installed it."""


@cache
def _installed_plugins() -> list[str]:
    # reads the metadata of every installed distribution, and each command asks several times
    return [point.module for point in metadata.entry_points(group=ENTRY_POINTS)]


def plugin_modules(modules: Iterable[str]) -> list[str]:
    """Names of the installed plugins and of `modules`, the value of the setting `plugins`."""
    return list(dict.fromkeys([*_installed_plugins(), *modules]))


def function_digest(function: Callable[..., Any]) -> str:
    """Digest of the module that defines `function`. For a function that was typed into an
    interpreter, the digest of the function's bytecode. "" for a function of moe_lab."""
    name = function.__module__
    if name.startswith("moe_lab."):
        return ""
    # the module of an interpreter has no file
    if getattr(sys.modules.get(name), "__file__", None) is None:
        return sha256(function.__code__.co_code).hexdigest()
    return module_digest(name)


@cache
def module_digest(name: str) -> str:
    """`code_digest` of the imported module `name`."""
    return code_digest(name, Path(str(sys.modules[name].__file__)))


def code_digest(name: str, file: Path) -> str:
    """sha256 of the files and versions that `local_files_and_versions` returns for the module
    `name` in `file`."""
    files, versions = local_files_and_versions(name, file)
    digests = {module: sha256(path.read_bytes()).hexdigest() for module, path in files.items()}
    return sha256(json.dumps([digests, versions], sort_keys=True).encode()).hexdigest()


def local_files_and_versions(name: str, file: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """(files, versions) of the module `name` in `file`, and of all modules that this module imports
    directly or indirectly. `files`: module -> file, for local modules. `versions`: distribution ->
    version, for installed packages.

    Local modules are the module `name`, the modules in its folder or package (or in another folder
    of its namespace package), and packages that are installed as editable.
    """
    # top: the part of a module's name before the first dot
    main_top = name.partition(".")[0]
    root = folder_of(name, file)
    local: dict[str, Path] = {}
    versions: dict[str, str] = {}
    pending = [(name, file)]
    while pending:
        module, path = pending.pop()
        if module in local:
            continue
        local[module] = path
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        # importing a module also imports the packages that contain it, so `module` is in the loop
        for imported_name in (module, *_imports(path.read_bytes(), package)):
            top = imported_name.partition(".")[0]
            if top in IGNORED:
                continue
            folders = _folders_on_path(top)
            if top == main_top or not folders:
                folders = [root, *folders]
            files = dict(_files(imported_name, folders))
            # a namespace package has no file, so its folders say whether it is installed
            is_installed = any(SITE.intersection(path.parts) for path in files.values() or folders)
            if top != main_top and is_installed and (top_versions := _versions(top)):
                versions |= top_versions
            else:
                pending += files.items()
    return local, versions


def folder_of(name: str, file: Path) -> Path:
    """The folder of sys.path from which the module `name` in `file` is imported."""
    # the file of a package is __init__.py, one folder deeper than the file of a module
    depth = name.count(".") + (file.name == "__init__.py")
    return file.absolute().parents[depth]


def _imports(content: bytes, package: str) -> Iterator[str]:
    """Absolute names of everything that a module imports. `content`: the code of the module.
    `package`: the package in which relative imports begin. `from a import b` gives the name "a.b",
    whether b is a module or a value in the module a."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):  # Python could not import this module
        return
    texts = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                module = f"{node.module}." if node.module else ""
                for alias in node.names:
                    yield _absolute("." * node.level + module + alias.name, package)
            case ast.Constant(str(text)) if MODULE_NAME.fullmatch(text):
                texts.add(text)
    # then every string may be the name of an imported module
    if b"import_module" in content or b"__import__" in content:
        # import_module(".b", "a") imports a.b, so any other string may be the package
        yield from {_absolute(name, parent) for name, parent in product(texts, (package, *texts))}


def _absolute(name: str, package: str) -> str:
    """The absolute form of a name that a module in `package` imports."""
    level = len(name) - len(name.lstrip("."))
    if not level:
        return name
    parent = package.rsplit(".", level - 1)[0]
    return f"{parent}.{name[level:]}".strip(".")  # no dot after an empty `parent`


def _files(name: str, folders: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Yield (name, file) of each package that contains the module `name`, and of the module
    itself."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        paths = [folder.joinpath(*parts[:count]) for folder in folders]
        # in each folder, a package comes before a module with the same name, as in imports
        files = [
            file
            for path in paths
            for file in (path / "__init__.py", path.with_name(f"{path.name}.py"))
        ]
        if file := next(filter(Path.is_file, files), None):
            yield ".".join(parts[:count]), file


def _folders_on_path(top: str) -> list[Path]:
    """The folders of sys.path from which the top module or package `top` is imported."""
    # find_spec raises ValueError for an imported module whose __spec__ is None
    with contextlib.suppress(ValueError):
        if spec := find_spec(top):
            return [
                Path(path).parent for path in spec.submodule_search_locations or [spec.origin or ""]
            ]
    return []


def _versions(package: str) -> dict[str, str]:
    """Distribution -> version, for the distributions that installed the package `package`."""
    # most distributions have the name of their package; listing all distributions takes long
    with contextlib.suppress(metadata.PackageNotFoundError):
        return {package: metadata.version(package)}
    return {name: metadata.version(name) for name in _distributions().get(package, ())}
