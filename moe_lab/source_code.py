"""Digests of Python code from outside moe_lab: of a module with all that it imports. No torch."""

from __future__ import annotations

import ast
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from functools import cache
from hashlib import sha256
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SITE = {"site-packages", "dist-packages"}
"""Names of the folders into which packages are installed."""
IGNORED = {
    *sys.stdlib_module_names,
    *("moe_lab", "analysis", "numpy", "pandas", "pydantic", "safetensors", "scipy", "torch", "transformers"),
}
"""Python, moe_lab, and libraries that moe_lab requires: their versions are in the provenance of steps, and in no id."""
_distributions = cache(metadata.packages_distributions)


def source_of(function: Callable[..., Any]) -> str:
    """Digest of the module of a function from outside moe_lab; "" for functions of moe_lab."""
    name = function.__module__
    if name.startswith("moe_lab."):
        return ""
    if getattr(sys.modules.get(name), "__file__", None) is None:  # typed into an interpreter
        return sha256(function.__code__.co_code).hexdigest()
    return module_digest(name)


@cache
def module_digest(name: str) -> str:
    """Digest of an imported module, as its code is on disk at the first call."""
    return digest_of(name, Path(str(sys.modules[name].__file__)))


def digest_of(name: str, file: Path) -> str:
    """sha256 over the code of the module `name` in `file` and of all that it imports, as by `code_of`."""
    files, versions = code_of(name, file)
    local = {module: sha256(path.read_bytes()).hexdigest() for module, path in files.items()}
    return sha256(json.dumps([local, versions], sort_keys=True).encode()).hexdigest()


def code_of(name: str, file: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Name -> file of the module `name` in `file` and of all local modules that it imports, directly or not; and
    name -> version of the installed packages.

    Local modules are those in the same folder or package, and packages that are installed as editable. Nothing is run:
    imports are found in the text, inside functions too, as statements or calls of `import_module` with a literal name.
    Data files do not count.
    """
    own, root = name.partition(".")[0], folder_of(name, file)
    local: dict[str, Path] = {}
    versions: dict[str, str] = {}
    pending = [(name, file)]
    while pending:
        module, path = pending.pop()
        if module in local:
            continue
        local[module] = path
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for imported in (module, *_imports(path.read_bytes(), package)):
            top = imported.partition(".")[0]
            if top in IGNORED:
                continue
            folder = root if top == own else _folder_on_path(top) or root
            if top != own and (installed := SITE.intersection(folder.parts) and _versions(top)):
                versions |= installed
            else:
                pending += _files(imported, folder)
    return local, versions


def file_of(name: str, folder: Path) -> Path | None:
    """The file of a module below `folder`, or else where Python finds it. Nothing is imported."""
    for place in (folder, _folder_on_path(name.partition(".")[0])):
        files = dict(_files(name, place)) if place else {}
        if name in files:
            return files[name]
    return None


def folder_of(name: str, file: Path) -> Path:
    """The folder of sys.path below which the module `name` in `file` is."""
    depth = name.count(".") + (file.name == "__init__.py")
    return file.absolute().parents[depth]


def _imports(content: bytes, package: str) -> Iterator[str]:
    """Absolute names that a module in `package` imports. `from a import b` is a.b, a module or a value in one."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):  # whoever imports it fails
        return
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                module = f"{node.module}." if node.module else ""
                for alias in node.names:
                    yield _absolute("." * node.level + module + alias.name, package)
            case ast.Call(
                ast.Name("import_module" | "__import__") | ast.Attribute(attr="import_module"),
                [ast.Constant(str(name)), *_],
            ):
                yield _absolute(name, package)


def _absolute(name: str, package: str) -> str:
    """The absolute form of a name that a module in `package` imports, perhaps with leading dots."""
    level = len(name) - len(name.lstrip("."))
    if not level:
        return name
    parent = package.rsplit(".", level - 1)[0]
    return f"{parent}.{name[level:]}".strip(".")


def _files(name: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """The module `name` below `folder` and the packages around it, each with its file, as far as there is one."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        path = folder.joinpath(*parts[:count])
        for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
            if file.is_file():
                yield ".".join(parts[:count]), file
                break


def _folder_on_path(top: str) -> Path | None:
    """The folder that a package or a module is imported from, if it is known."""
    with contextlib.suppress(ValueError):  # an imported module without a specification
        if spec := find_spec(top):
            places = [*(spec.submodule_search_locations or ()), spec.origin or ""]
            return Path(places[0]).parent
    return None


def _versions(package: str) -> dict[str, str]:
    """Distribution -> version, of those that installed a package."""
    with contextlib.suppress(metadata.PackageNotFoundError):  # most are called like their package; a search takes long
        return {package: metadata.version(package)}
    return {name: metadata.version(name) for name in _distributions().get(package, ())}
