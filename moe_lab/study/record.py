"""The record of a study, studies/NAME.json, which the analysis reads: its cells and the folders of their results."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import moe_lab
from moe_lab import criteria
from moe_lab.allocation.protection import SUPER
from moe_lab.config import AllocationConfig, Config
from moe_lab.errors import UserError, masked
from moe_lab.json_files import Number, write_json
from moe_lab.paths import check_name
from moe_lab.results import STUDY_SHAPE
from moe_lab.study.graph import CellSteps, Graph
from moe_lab.study.remote import Remote, remote_of
from moe_lab.study.step import Step, canonical
from moe_lab.study.store import DIGITS, Store

SCHEMA = 1
PREPARATION = ("model", "statistics", "scores", "plan", "finetune", "export")
"""Steps of a cell that are not results themselves, so that their errors are not listed in the record."""


@dataclass(frozen=True)
class Study:
    """A study to run: settings, graph of steps, and store."""

    config: Config
    graph: Graph
    store: Store
    add: bool = False
    """Whether its cells are added to the recorded cells of the study, instead of replacing them."""
    before: float | None = None
    """`created` of the stored record when this run started; None if there was none."""


def record_path(store: Store, study: str) -> Path:
    """The file of the study's record."""
    return store.root / "studies" / f"{study}.json"


def created(store: Store, study: str) -> float | None:
    """When the stored record was written, in seconds since the epoch; None without a record.

    A run that finds another time at its end than at its start knows that another run has written the record meanwhile.
    """
    written: float | None = (read(store, study) or {}).get("created")
    return written


def write(study: Study, failed: Mapping[str, Mapping[str, Any]], elsewhere: Mapping[str, Any] | None = None) -> str:
    """Write studies/<study>.json: every cell with the folders of its steps, and with error messages of failed steps.

    Cells that another run of the study has recorded since this one began (`study.before`) are kept. With `study.add`
    all recorded cells are kept: each job of a multirun knows only its own cells. Those of `elsewhere`, a record of
    another machine (`unseen`), are kept too. Returns a sentence on cells of another run, or "".
    """
    store, config, graph = study.store, study.config, study.graph

    def place(step: Step | None) -> str | None:
        return str(store.path(step).relative_to(store.root)) if step and store.path(step).exists() else None

    def errors(cell: CellSteps) -> dict[str, str]:
        results = {name: step for name, step in cell.named().items() if name not in PREPARATION}
        steps = {**cell.evaluate, **results}
        return {name: str(failed[step.id]["message"]) for name, step in steps.items() if step and step.id in failed}

    called = _models(graph)
    cells = [
        {
            "cell": {"model": called[cell.cell.model.name, cell.cell.protocol.name], **_names(cell)},
            "protocol": cell.cell.protocol.name,
            **{name: place(step) for name, step in cell.named().items()},
            "evaluate": {name: place(step) for name, step in cell.evaluate.items()},
            "errors": errors(cell),
        }
        for cell in graph.cells
    ]
    document = {
        "schema": SCHEMA,
        "study": config.study,
        "created": time.time(),
        "moe_lab": moe_lab.__version__,
        "config": masked(asdict(config)),
        "cells": cells,
        **{figure: {name: place(step) for name, step in steps.items()} for figure, steps in graph.figures().items()},
    }
    path = record_path(store, config.study)
    with store.lock(path.with_suffix(".lock")):
        here = read(store, config.study)
        if here and not study.add and here["created"] == study.before:
            here = None
        unlike = 0
        for old in filter(None, (here, elsewhere)):
            document, more = _joined(old, document)
            unlike += more
        write_json(path, document)
    return "" if study.add else _about_another(config.study, len(document["cells"]) - len(cells), unlike)


def _about_another(study: str, more: int, unlike: int) -> str:
    if unlike:
        return (
            f"study={study}: another run of it has ended meanwhile, and {unlike} of its cells are called as cells of "
            "this run and have other settings: the record has those of this run; give one of the runs another study="
        )
    return f"study={study}: another run of it has ended meanwhile: its {more} other cells are kept" if more else ""


def _joined(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """The new document, extended by cells, benchmarks and steps of figures that only the old one has.

    Also returns how many cells have the same name in both documents but different results; those of the new are kept.
    """
    cells = {canonical(cell["cell"]): cell for cell in new["cells"]}
    others, unlike = [], 0
    for cell in old["cells"]:
        name = canonical(cell["cell"])
        if name not in cells:
            others.append(cell)
        elif _alike(cell, cells[name]):
            cells[name] = _with_benchmarks(cell, cells[name])
        else:
            unlike += 1
    figures = ("families", "damages")
    kept = {name: {**(old.get(name) or {}), **(new.get(name) or {})} for name in figures}
    return {**new, "cells": others + list(cells.values()), **kept}, unlike


def _alike(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether two entries of one cell are compatible: no field names different steps. Folders end in the step's id."""
    places = [(old.get(name), new[name]) for name in new if name not in ("cell", "protocol", "evaluate", "errors")]
    places += [(old["evaluate"].get(name), place) for name, place in new["evaluate"].items()]
    return all(one is None or other is None or one[-12:] == other[-12:] for one, other in places)


def _with_benchmarks(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The new entry of a cell, extended by results that only the old entry has."""
    places = {name: place if place is not None else old.get(name) for name, place in new.items()}
    benchmarks = dict.fromkeys([*old["evaluate"], *new["evaluate"]])
    evaluate = {name: new["evaluate"].get(name) or old["evaluate"].get(name) for name in benchmarks}
    errors = {**(old.get("errors") or {}), **(new.get("errors") or {})}
    still = {name: error for name, error in errors.items() if {**places, **evaluate}.get(name) is None}
    return {**places, "evaluate": evaluate, "errors": still}


def _models(graph: Graph) -> dict[tuple[str, str], str]:
    """(model, protocol) -> name of the model in the record.

    Scores of different protocols are not comparable. So for each protocol but its first, a model is recorded as a model
    of its own, with the protocol in its name.
    """
    by_model: dict[str, dict[str, str]] = {}
    for cell in graph.cells:
        words = by_model.setdefault(cell.cell.model.name, {})
        protocol = cell.cell.protocol.name
        words.setdefault(protocol, f"{cell.cell.model.name} ({protocol})" if words else cell.cell.model.name)
    return {(model, protocol): word for model, words in by_model.items() for protocol, word in words.items()}


def _names(steps: CellSteps) -> dict[str, Any]:
    cell = steps.cell
    chosen = criteria.CRITERIA.get(cell.criterion.name)
    return {
        "criterion": _called(cell.criterion.name, cell.criterion.parameters),
        "granularity": chosen.granularity if chosen else "none",
        "calibration": cell.calibration.name,
        "allocation": allocation_name(cell.allocation),
        "recovery": cell.recovery.name,
        "ratio": cell.ratio,
        "gate": cell.gate,
        "seed": cell.seed,
    }


def _called(name: str, parameters: Mapping[str, Any]) -> str:
    """Name of a choice in the record: its name, followed by its parameters if it has any."""
    values = ",".join(f"{key}={value}" for key, value in sorted(parameters.items()))
    return f"{name}({values})" if values else name


def allocation_name(allocation: AllocationConfig) -> str:
    """Name of an allocation in the record: its label, or its name and settings; then what replaces dropped experts, and
    what is protected."""
    name = allocation.label or _called(allocation.name, _differing(allocation))
    if allocation.replacement != "none":
        name = f"{name}, replacement={allocation.replacement}"
    if allocation.protect is None:
        return name
    layers = allocation.protect_layers
    share = "" if layers == AllocationConfig().protect_layers else f", protect_layers={layers:g}"
    return f"{name}, protect={Path(allocation.protect).name}{share if allocation.protect == SUPER else ''}"


def _differing(allocation: AllocationConfig) -> dict[str, Any]:
    """Settings that distinguish an allocation from others of its name: parameters, and fields that are not default."""
    usual = AllocationConfig()
    words = ("multiple_of", "ratio_basis", "by", "search", "path")
    own = {word: getattr(allocation, word) for word in words if getattr(allocation, word) != getattr(usual, word)}
    return {**own, **allocation.parameters}


def read(store: Store, study: str) -> dict[str, Any] | None:
    """The study's record; None when there is none, or when it is damaged."""
    content: dict[str, Any] | None = store.read(
        record_path(store, study), STUDY_SHAPE, "written again when the study ends"
    )
    return content


PLACE = re.compile(rf"\w+/[^/]+-[0-9a-f]{{{DIGITS}}}")
"""KIND/NAME of a finished step."""


def places(document: Mapping[str, Any]) -> dict[str, None]:
    """KIND/NAME of all finished steps that a record names anywhere, each once."""
    names: dict[str, None] = {}
    _with_places(document, lambda place: names.setdefault(place) or place)
    return names


def _with_places(document: Mapping[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """The record with `change` applied to the KIND/NAME of each finished step."""

    def changed(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: changed(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [changed(inner) for inner in value]
        return change(value) if isinstance(value, str) and PLACE.fullmatch(value) else value

    return {name: value if name == "config" else changed(value) for name, value in document.items()}


SEEN_SHAPE = {"created": Number}


def _seen_path(store: Store, study: str) -> Path:
    """The file with `created` of the remote's record of which this machine's was made, or which it was copied to.

    Clocks of machines differ, so records are told apart by when they were written, and not put in order by it.
    """
    return record_path(store, study).with_suffix(".seen")


def _seen(store: Store, study: str) -> float | None:
    document = store.read(_seen_path(store, study), SEEN_SHAPE, "both records are joined")
    return document["created"] if document else None


def unseen(remote: Remote, study: str) -> dict[str, Any] | None:
    """The remote's record of the study when another machine has written it since this one last did, or saw it."""
    here = created(remote.store, study)
    theirs: dict[str, Any] | None = remote.read(_remote_path(study), STUDY_SHAPE)
    if theirs and (here is None or theirs["created"] not in (here, _seen(remote.store, study))):
        return theirs
    return None


def take(remote: Remote, study: str) -> None:
    """Replace the study's record by that of another machine, if there is an `unseen` one.

    A record of this machine that could not be shared is kept: the two are joined, and so they are at the end of a run.
    """
    store, path = remote.store, record_path(remote.store, study)
    with store.lock(path.with_suffix(".lock")):
        if theirs := unseen(remote, study):
            here = read(store, study)
            if here and here["created"] != _seen(store, study):
                write_json(path, _joined(theirs, here)[0])
            else:
                write_json(path, theirs)
                write_json(_seen_path(store, study), {"created": theirs["created"]})


def complete(remote: Remote, study: str) -> None:
    """Pull the steps that only the record has, of cells that another machine added; they may have other labels here."""
    store = remote.store
    named = places(read(store, study) or {})
    remote.pull(place for place in named if not store.place(place, place[-DIGITS:]).exists())
    path = record_path(store, study)
    with store.lock(path.with_suffix(".lock")):
        if document := read(store, study):
            here = _with_places(
                document, lambda place: str(store.place(place, place[-DIGITS:]).relative_to(store.root))
            )
            if here != document:
                write_json(path, here)


def share(remote: Remote, study: str) -> None:
    """Copy the study's record to the remote."""
    if document := read(remote.store, study):
        remote.write(_remote_path(study), document)
        write_json(_seen_path(remote.store, study), {"created": document["created"]})


def pull(store: Store, study: str) -> int:
    """`python -m moe_lab.study pull NAME store=URL`: the study's record and all steps that it names.

    Returns 1 when some of the steps are not there. Raises UserError for a store without a remote, and when the remote
    has no study of that name.
    """
    check_name("study", study)
    remote = remote_of(store)
    if remote is None:
        raise UserError(f"store={store.root} is a folder, and pull copies from the URL of a store: expected store=URL")
    if remote.read(_remote_path(study), STUDY_SHAPE) is None:
        raise UserError(f"study={study}: {remote.url} has no record of it")
    store.create()
    take(remote, study)
    complete(remote, study)
    named = places(read(store, study) or {})
    there = sum((store.root / place).exists() for place in named)
    print(f"{study}: {there} of the {len(named)} steps that it names are in {store.root}")
    return 1 if there < len(named) else 0


def _remote_path(study: str) -> str:
    return f"studies/{study}.json"
