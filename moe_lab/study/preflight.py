"""Check a study before anything heavy is loaded; all problems are reported together.

Each check is in the module of its subject. This module calls the checks in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from moe_lab import allocation, criteria
from moe_lab.allocation import listed
from moe_lab.allocation.grouping import GROUPINGS, REPLACEMENTS
from moe_lab.calibration import settings as calibrations
from moe_lab.calibration import sources
from moe_lab.config import BenchmarkConfig, CalibrationConfig, Config, ExportConfig, ResourcesConfig, TrackerConfig
from moe_lab.errors import UserError, user_errors
from moe_lab.evaluation import back_ends, suite
from moe_lab.evaluation.harness import HARNESSES
from moe_lab.grid import Cell, Request
from moe_lab.models import config_json, files
from moe_lab.pruning.form import no_replacements
from moe_lab.recovery import settings as recoveries
from moe_lab.study import sync
from moe_lab.study.launch import check_device
from moe_lab.study.steps import KINDS
from moe_lab.study.steps.costs import wrong_timing
from moe_lab.study.steps.evaluation import backend_of
from moe_lab.study.steps.plans import check_engine, check_plan_file
from moe_lab.study.steps.scores import check_weights, reads_text

TEXT_CHECKS: Mapping[str, Callable[[CalibrationConfig], object]] = {
    "search": sources.check_answers,
    "instructions": sources.check_answers,
    "distill": sources.first_record,
    "fit": sources.first_record,
}
"""Use of a text of a cell -> check of its documents; others are not always read."""


def preflight(config: Config, requests: Iterable[Request]) -> list[str]:
    """One sentence per problem with the settings, each once; empty when they are valid.

    Does not check what this machine has; see `lacking`.
    """
    sentences: list[str] = []
    for cells, benchmarks in requests:
        sentences += _wrong_settings(config)
        sentences += _wrong_choices(cells, benchmarks)
        sentences += _wrong_together(config, cells, benchmarks)
        sentences += _wrong_allocations(cells)
    return list(dict.fromkeys(sentences))


def lacking(config: Config, requests: Iterable[Request]) -> list[str]:
    """One sentence for everything that the study's benchmarks and models need and that is missing or not allowed
    here."""
    policy, requests = suite.policy(config), list(requests)
    sentences = [sentence for _, benchmarks in requests for sentence in suite.lacking(benchmarks, policy)]
    if config.launcher.name != "slurm":  # nodes of a cluster may have devices that this machine lacks
        for device in dict.fromkeys(cell.model.device for cells, _ in requests for cell in cells):
            sentences += user_errors(check_device, device)
    if config.launcher.python is None:  # an interpreter in a container has programs of its own
        sentences += user_errors(back_ends.check_installed, backend_of(config))
        if config.export.format == "gguf":
            from moe_lab.pruning.export import gguf

            sentences += user_errors(gguf.converter, config.export)
    return list(dict.fromkeys(sentences))


def _wrong_settings(config: Config) -> Iterator[str]:
    yield from user_errors(sync.check, config.store)
    # What follows is only imported by studies that use it.
    if config.tracker != TrackerConfig():
        from moe_lab.study import tracking

        yield from user_errors(tracking.check, config.tracker)
    if config.push is not None:
        from moe_lab.study import push

        yield from user_errors(push.check, config)
    if config.resources != ResourcesConfig():
        from moe_lab.study.slurm import resources

        yield from user_errors(resources.check, config.resources)


def _wrong_choices(cells: Sequence[Cell], benchmarks: Sequence[BenchmarkConfig]) -> Iterator[str]:
    """Problems of each choice on its own."""
    yield from suite.wrong(benchmarks)
    for cell in _each(cells, "model"):
        yield from user_errors(files.check, cell.model)
        yield from user_errors(config_json.check_expected, cell.model)
        yield from user_errors(config_json.check_top_k, cell.model)
    for cell in _each(cells, "criterion"):
        yield from user_errors(criteria.check, cell.criterion.name, cell.criterion.parameters)
    for cell in _each([cell for cell in cells if not _is_known(cell) or reads_text(cell)], "calibration"):
        yield from calibrations.wrong(cell.calibration, sources.first_record)
    for cell in _each(cells, "recovery"):
        yield from user_errors(recoveries.check_none, cell.recovery)
        yield from user_errors(recoveries.check, cell.recovery)
    for cell in _each(cells, "allocation"):
        yield from user_errors(allocation.check_by, cell.allocation)
    uses = {(role, id(text)): text for cell in cells for role, text in cell.texts.items()}
    for (role, _), text in uses.items():
        yield from calibrations.wrong(text, TEXT_CHECKS.get(role))


def _wrong_together(config: Config, cells: Sequence[Cell], benchmarks: Sequence[BenchmarkConfig]) -> Iterator[str]:
    """Problems of choices that are valid on their own but cannot be combined."""
    models = [cell.model for cell in _each(cells, "model")]
    yield from back_ends.wrong(config.backend, benchmarks, models)
    for model in models:
        yield from wrong_timing(config, model)
    if config.objective is not None:
        from moe_lab.study import objective

        yield from user_errors(objective.check, config.objective, benchmarks)
    yield from _wrong_templates(cells, benchmarks)
    for cell in _each([cell for cell in cells if _is_known(cell) and reads_text(cell)], "model", "calibration"):
        if cell.calibration.engine == "streamed":
            yield from user_errors(config_json.check_plain_weights, cell.model, "calibration.engine=streamed")
    for cell in _each(cells, "model", "criterion", "recovery"):
        criterion = criteria.CRITERIA.get(cell.criterion.name)
        if criterion:
            yield from user_errors(check_weights, criterion.name, cell.model)
        yield from user_errors(recoveries.check_model, cell.recovery, cell.model)
    if config.export != ExportConfig() or config.verify:
        yield from _wrong_exports(config, cells)
    yield from _wrong_replacements(config, cells)
    if config.export.format == "gguf" and config.backend.name != "hf":
        backend = config.backend.name
        yield f"backend={backend} reads a folder, and export.format=gguf writes one file: expected backend=hf"


def _wrong_exports(config: Config, cells: Sequence[Cell]) -> Iterator[str]:
    """Problems of exports with the models, criteria and recoveries."""
    from moe_lab.pruning.export import settings

    for cell in _each(cells, "model", "criterion", "recovery"):
        criterion = criteria.CRITERIA.get(cell.criterion.name)
        granularity = criterion.granularity if criterion else None
        yield from settings.wrong(config.export, cell.model, cell.recovery, granularity, verify=config.verify)


def _wrong_templates(cells: Sequence[Cell], benchmarks: Sequence[BenchmarkConfig]) -> Iterator[str]:
    """Problems of benchmarks and texts with the chat templates of models."""
    for benchmark in (benchmark for benchmark in benchmarks if benchmark.chat):
        harness = HARNESSES.get(benchmark.harness)
        tools = harness is not None and harness.gives_tools
        user = f"benchmark {benchmark.name}"
        other = "" if tools else f", or protocol.benchmarks.{benchmark.name}.chat=false to have the text continued"
        for cell in _each(cells, "model"):
            yield from user_errors(config_json.check_chat_template, cell.model, user, tools, other)
    for cell in _each([cell for cell in cells if not _is_known(cell) or reads_text(cell)], "model", "calibration"):
        yield from user_errors(calibrations.check_chat_template, cell.calibration, cell.model)
    for cell in _each(cells, "model", "allocation", "recovery"):
        for text in (text for role, text in cell.texts.items() if role in TEXT_CHECKS):
            yield from user_errors(calibrations.check_chat_template, text, cell.model)


def _wrong_replacements(config: Config, cells: Sequence[Cell]) -> Iterator[str]:
    """Problems of plans whose dropped experts are replaced.

    Where tokens are still routed to these, only code of transformers can compute the model.
    """
    replacing = {cell.model.name: (cell.model, by) for cell in cells if (by := _replaces(cell))}
    shape = config.export.shape
    for model, by in replacing.values() if shape is not None else ():
        if method := config_json.quantization(model):
            yield (
                f"export={shape}: {by} makes experts of other weights, and those of {model.name} are stored as "
                f"{method}: expected a checkpoint in bfloat16 or float32"
            )
    by = next((by for cell in cells if (by := _replaces(cell)) and _routes_to_replaced(cell)), None)
    if by is None:
        return
    if shape not in (None, "natural"):
        yield str(no_replacements(shape))
    if config.export.format != "safetensors":
        yield f"export.format={config.export.format} has no place for {by}: expected export.format=safetensors"
    if config.backend.name == "vllm":
        yield (
            f"backend=vllm cannot compute {by}: expected backend=hf, or backend=server with a server that runs the "
            "code of an export"
        )


def _replaces(cell: Cell) -> str | None:
    """The setting by which dropped experts of the cell are replaced, if any."""
    settings = cell.allocation
    if settings.replacement != "none":
        return f"allocation.replacement={settings.replacement}"
    with suppress(UserError):  # of a file that cannot be read, which another check reports
        if settings.path is not None and listed.replaces(listed.read(settings.path)):
            return f"the plan allocation.path={settings.path}, which replaces experts,"
    return None


def _routes_to_replaced(cell: Cell) -> bool:
    """Whether tokens are routed to experts that the cell's plan replaces: to constants, or to those of a group."""
    settings = cell.allocation
    if settings.replacement != "none":
        grouping = GROUPINGS.get(settings.replacement)
        return grouping is None or grouping.rows == "all"
    return settings.path is not None and listed.routes_to_replaced(listed.read(settings.path))


def _wrong_allocations(cells: Sequence[Cell]) -> Iterator[str]:
    """Problems of each allocation with the criteria and recoveries it is used with, then with the ratios and models."""
    known = [cell for cell in cells if _is_known(cell)]
    for cell in _each([cell for cell in cells if not _is_known(cell)], "allocation"):
        yield from user_errors(allocation.check, cell.allocation)
    for cell in _each(known, "criterion", "allocation"):
        granularity = criteria.get(cell.criterion.name).granularity
        yield from user_errors(allocation.check, cell.allocation, granularity)
    for cell in _each(known, "calibration", "allocation"):
        yield from user_errors(check_engine, cell)
    for cell in _each(cells, "recovery", "allocation", "ratio"):
        yield from user_errors(recoveries.check_merging, cell.recovery, cell.allocation, cell.ratio)
    for cell in _each(known, "model", "allocation"):
        yield from user_errors(check_plan_file, cell)
    for cell in _each(known, "model", "criterion", "allocation", "ratio"):
        kind: Any = KINDS[allocation.get(cell.allocation.name).step]
        for check in kind.checks:
            yield from user_errors(check, cell)


def _is_known(cell: Cell) -> bool:
    """Whether the cell's criteria, allocation and replacement exist; other checks report those that do not."""
    chosen, settings = (cell.criterion.name, cell.allocation.by or cell.criterion.name), cell.allocation
    return (
        criteria.CRITERIA.keys() >= set(chosen)
        and settings.name in allocation.ALLOCATIONS
        and settings.replacement in REPLACEMENTS
    )


def _each(cells: Iterable[Cell], *groups: str) -> Iterator[Cell]:
    """One cell for every distinct combination of the values that cells have in these groups."""
    distinct: dict[Any, Cell] = {}
    for cell in cells:
        distinct.setdefault(tuple(id(getattr(cell, group)) for group in groups), cell)
    yield from distinct.values()
