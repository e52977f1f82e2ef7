"""Load plugins. A plugin is a module outside this repository that defines criteria, allocations or
outputs of the analysis. It is named by `plugins=[...]` or an entry point."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path

from moe_lab.allocation import ALLOCATIONS
from moe_lab.criteria import CRITERIA
from moe_lab.errors import UserError, reason_in
from moe_lab.source_code import folder_of, function_digest, module_digest, plugin_modules


def load(modules: Iterable[str] = ()) -> list[str]:
    """Import `modules` and the installed plugins. Returns the names of the modules. UserError for a
    module that cannot be imported, that registers neither a criterion nor an allocation nor an
    output, or that registers a name which exists already."""
    names = plugin_modules(modules)
    for module in names:
        try:
            import_module(module)
        except UserError:  # the module registers a name that exists already
            raise
        except Exception as error:  # noqa: BLE001 - a foreign module may raise anything
            raise UserError(
                f"plugins: {module} cannot be imported ({reason_in(error)}), expected a module "
                "on Python's path"
            ) from None
        functions: list[Callable[..., object]] = [
            criterion.function for criterion in CRITERIA.values()
        ]
        functions += [
            function
            for allocation in ALLOCATIONS.values()
            for function in allocation.functions.values()
            if function  # None where a step decides
        ]
        if (analysis := sys.modules.get("moe_lab.analysis.registry")) is not None:
            functions += [output.make for output in analysis.REGISTERED.values()]
        # the functions may be in a module that `module` imports, so only top packages are compared
        if not any(
            function.__module__.split(".")[0] == module.split(".")[0] for function in functions
        ):
            raise UserError(
                f"plugins: {module} registers nothing, expected a function under @criterion(...) "
                "or a call of moe_lab.allocation.register(...): docs/new_criterion.md"
            )
    return names


def plugin_files(modules: Iterable[str]) -> dict[Path, Path]:
    """Path relative to a folder of sys.path -> full path, for all files and folders of the plugins'
    top packages. `modules`: as for `load`."""
    files: dict[Path, Path] = {}
    for module in load(modules):
        top = sys.modules[module.partition(".")[0]]
        for path in map(Path, getattr(top, "__path__", None) or [str(top.__file__)]):
            # if `path` is a file, rglob finds nothing
            files |= {file.relative_to(path.parent): file for file in (path, *path.rglob("*"))}
    return files


def module_location(function: Callable[..., object]) -> dict[str, str]:
    """Where the module of a plugin's function is. "module": name. "folder": the folder of sys.path
    from which the module is imported. "source": digest of the whole module."""
    name = function.__module__
    folder = folder_of(name, Path(sys.modules[name].__file__ or ""))
    return {"module": name, "folder": str(folder), "source": function_digest(function)}


def import_modules_at(locations: Iterable[Mapping[str, str]]) -> None:
    """Import the modules at `locations`, which are results of `module_location`. UserError if the
    code of a module has changed since."""
    for location in locations:
        name = location["module"]
        if location["folder"] not in sys.path:
            sys.path.append(location["folder"])  # at the end: shadows no other modules
        import_module(name)
        # the digest is part of the ids of steps, so changed code needs new ids
        if module_digest(name) != location["source"]:
            raise UserError(
                f"plugins: the code of {name} has changed since this study was started: start it "
                "again"
            )
