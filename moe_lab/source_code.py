"""Digests of Python code from outside moe_lab. The digest of a module covers all modules that the
module imports. Does not import torch."""

from __future__ import annotations

import ast
import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
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
    "analysis",
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
_distributions = cache(metadata.packages_distributions)
"""Function that returns: top package -> names of the distributions that installed it."""


def source_of(function: Callable[..., Any]) -> str:
    """Digest of the code that defines a function: of its module or, for a function that was typed
    into an interpreter, of its bytecode. "" for a function of moe_lab."""
    name = function.__module__
    if name.startswith("moe_lab."):
        return ""
    if getattr(sys.modules.get(name), "__file__", None) is None:
        return sha256(function.__code__.co_code).hexdigest()
    return module_digest(name)


@cache
def module_digest(name: str) -> str:
    """Digest of an imported module, computed at the first call from the code on disk."""
    return digest_of(name, Path(str(sys.modules[name].__file__)))


def digest_of(name: str, file: Path) -> str:
    """sha256 of all that `code_of` returns for the module `name` in `file`: the content of local
    modules, and versions of installed packages."""
    files, versions = code_of(name, file)
    digests = {module: sha256(path.read_bytes()).hexdigest() for module, path in files.items()}
    return sha256(json.dumps([digests, versions], sort_keys=True).encode()).hexdigest()


def code_of(name: str, file: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """(files, versions) of the module `name` in `file`, and of the modules that it imports directly
    or indirectly. `files`: module -> file, for local modules. `versions`: distribution -> version,
    for installed packages.

    Local modules are the module itself, modules in the same folder or package, including all parts
    of a namespace package, and packages that are installed as editable. The code is parsed and not
    run. Imports are all import statements, also inside functions; if the code contains
    `import_module` or `__import__`, every literal text may be the name of an imported module. Data
    files are left out.
    """
    own_top = name.partition(".")[0]
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
        for imported_name in (module, *_imports(path.read_bytes(), package)):
            top = imported_name.partition(".")[0]
            if top in IGNORED:
                continue
            folders = _folders_on_path(top)
            if top == own_top or not folders:
                folders = [root, *folders]
            files = dict(_files(imported_name, folders))
            is_installed = any(
                SITE.intersection(path.parts) for path in [*files.values()] or folders
            )
            if top != own_top and is_installed and (top_versions := _versions(top)):
                versions |= top_versions
            else:
                pending += files.items()
    return local, versions


def file_of(name: str, folder: Path) -> Path | None:
    """The file of the module `name`, which is searched in `folder` and then on sys.path; None if it
    is not found. The module is not imported."""
    return dict(_files(name, [folder, *_folders_on_path(name.partition(".")[0])])).get(name)


def folder_of(name: str, file: Path) -> Path:
    """The folder of sys.path from which the module `name` in `file` is imported."""
    # a package is one folder above its file
    depth = name.count(".") + (file.name == "__init__.py")
    return file.absolute().parents[depth]


def _imports(content: bytes, package: str) -> Iterator[str]:
    """Absolute names of all that a module imports. `content`: code of the module. `package`: the
    package to which relative names are relative. For `from a import b` the name is a.b, which may
    be a module, or a value in the module a."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):  # an import of the module would fail, too
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
    if b"import_module" in content or b"__import__" in content:
        # in import_module(".b", "a"), the name is relative to a package that another text names
        yield from {_absolute(name, parent) for name, parent in product(texts, (package, *texts))}


def _absolute(name: str, package: str) -> str:
    """The absolute form of a name that a module in `package` imports. A relative name begins with
    dots: one for `package` itself, and one more for each package above."""
    level = len(name) - len(name.lstrip("."))  # number of dots
    if not level:
        return name
    parent = package.rsplit(".", level - 1)[0]
    return f"{parent}.{name[level:]}".strip(".")


def _files(name: str, folders: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """(name, file) of each package that contains the module `name`, and of the module itself. Each
    file is searched in `folders`, in order; names without a file are left out."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        paths = [folder.joinpath(*parts[:count]) for folder in folders]
        files = [
            file
            for path in paths
            for file in (path / "__init__.py", path.with_name(f"{path.name}.py"))
        ]
        if file := next(filter(Path.is_file, files), None):
            yield ".".join(parts[:count]), file


def _folders_on_path(top: str) -> list[Path]:
    """The folders of sys.path from which the top module or package `top` is imported. A namespace
    package may have several folders. [] if Python does not find `top`."""
    with contextlib.suppress(ValueError):  # an imported module without a specification
        if spec := find_spec(top):
            return [
                Path(path).parent for path in spec.submodule_search_locations or [spec.origin or ""]
            ]
    return []


def _versions(package: str) -> dict[str, str]:
    """Distribution -> version, for the distributions that installed the package `package`."""
    # most distributions have the name of their package; the search for others takes long
    with contextlib.suppress(metadata.PackageNotFoundError):
        return {package: metadata.version(package)}
    return {name: metadata.version(name) for name in _distributions().get(package, ())}
