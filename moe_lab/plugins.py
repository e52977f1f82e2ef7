"""Load plugins: modules outside this repository with criteria or allocations, named by
`plugins=[...]` or an entry point."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

from moe_lab.allocation import ALLOCATIONS
from moe_lab.criteria import CRITERIA
from moe_lab.errors import UserError
from moe_lab.source_code import folder_of, module_digest, source_of

ENTRY_POINTS = "moe_lab.plugins"
"""Group of entry points whose modules every command imports."""


def load(modules: Iterable[str] = ()) -> list[str]:
    """Import the modules of all entry points, and `modules`, and return the names of all. Raises
    UserError for a module that cannot be imported, registers nothing, or registers a name that is
    taken."""
    names = list(
        dict.fromkeys([*(point.module for point in entry_points(group=ENTRY_POINTS)), *modules])
    )
    for module in names:
        try:
            import_module(module)
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - a foreign module may raise anything
            reason = f"{type(error).__name__}: {error}"
            raise UserError(
                f"plugins: {module} cannot be imported ({reason}), expected a module on Python's "
                "path"
            ) from None
        functions: list[Callable[..., object]] = [
            criterion.function for criterion in CRITERIA.values()
        ]
        functions += [
            function
            for allocation in ALLOCATIONS.values()
            for function in allocation.functions.values()
            if function
        ]
        if not any(
            function.__module__.split(".")[0] == module.split(".")[0] for function in functions
        ):
            raise UserError(
                f"plugins: {module} registers nothing, expected a function under @criterion(...) "
                "or a call of moe_lab.allocation.register(...): docs/new_criterion.md"
            )
    return names


def sources(modules: Iterable[str]) -> dict[Path, Path]:
    """Files of each plugin's top package, or its single module file: path below a folder of
    sys.path -> file."""
    files: dict[Path, Path] = {}
    for module in load(modules):
        top = sys.modules[module.partition(".")[0]]
        for path in map(Path, getattr(top, "__path__", None) or [str(top.__file__)]):
            files |= {file.relative_to(path.parent): file for file in (path, *path.rglob("*"))}
    return files


def module_location(function: Callable[..., object]) -> dict[str, str]:
    """The module of a function as `import_modules_at` needs it: its name, the folder from which it
    is imported, and the digest of its code."""
    name = function.__module__
    folder = folder_of(name, Path(sys.modules[name].__file__ or ""))
    return {"module": name, "folder": str(folder), "source": source_of(function)}


def import_modules_at(locations: Iterable[Mapping[str, str]]) -> None:
    """Import modules from locations given by `module_location`. Their folders come last on
    sys.path, so that they shadow nothing. UserError for a module whose code has changed since its
    location was taken, because ids of steps include the digest of that time."""
    for location in locations:
        name = location["module"]
        if location["folder"] not in sys.path:
            sys.path.append(location["folder"])
        import_module(name)
        if module_digest(name) != location["source"]:
            raise UserError(
                f"plugins: the code of {name} has changed since this study was started: start it "
                "again"
            )
