"""`python -m moe_lab.inspect model=NAME`: whether a model is supported, and what applies to it, without its weights."""

from __future__ import annotations

import moe_lab.interrupt  # noqa: F401 - first, for Ctrl-C during the other imports

# isort: split
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moe_lab.config import Config, ModelConfig
from moe_lab.errors import UserError, end_with, user_errors
from moe_lab.grid import Cell
from moe_lab.models.config_json import Size, size_of

USAGE = """python -m moe_lab.inspect model=NAME [model.path=FOLDER] [calibration=NAME] [ratio=0.25,0.5] [...]

Whether a model is supported or why not, its layers, experts, routers and parameters by part, its loading memory,
what a calibration pass takes, and which criteria and exports apply. Takes the settings of `python -m moe_lab`; reads
no weight."""
RATIOS = (0.25, 0.5)
GIB = 2**30
Row = tuple[str, str]


def main(words: list[str]) -> int:
    """Print the facts on a model. Exit code 0 if it is supported, 1 if it is not, 2 for a user's mistake."""
    if not words or {"-h", "--help"} & set(words):
        print(USAGE)
        return 0
    try:
        title, rows, supported = describe(*_composed(words))
    except UserError as error:
        print(f"moe_lab: {error}", file=sys.stderr)
        return 2
    table = Table(show_header=False, title=title)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)
    return 0 if supported else 1


def _composed(words: list[str]) -> tuple[Config, Cell, list[float]]:
    """The study of a command line, the cell that is described, and the ratios that are asked for."""
    from moe_lab.compose import compose, started

    with started():
        config, requests = compose(words)
    cells = [cell for cells, _ in requests for cell in cells]
    if len(models := {cell.model.name for cell in cells}) > 1:
        raise UserError(f"model={','.join(sorted(models))}: expected one model")
    ratios = list(dict.fromkeys(cell.ratio for cell in cells))
    return config, cells[0], ratios if any(word.startswith("ratio=") for word in words) else list(RATIOS)


def describe(config: Config, cell: Cell, ratios: Sequence[float] = RATIOS) -> tuple[str, list[Row], bool]:
    """Describe the model of a cell: (title, rows of (name, text), whether moe_lab supports the model)."""
    from moe_lab.calibration import settings as calibrations
    from moe_lab.models.files import configuration_folder

    calibrations.check(cell.calibration)
    title = f"{cell.model.name}: {cell.model.path}"
    folder = configuration_folder(cell.model)
    if folder is None and cell.model.expected is None:
        return title, [("configuration", f"{_ABSENT}; give a folder, or a hub id that can be reached")], False
    if folder is None:
        sentence = f"{_ABSENT}: this is what is expected of it; routers and exports are told once config.json is there"
        return title, [("configuration", sentence), *_costs(config, cell, ratios, None)], True
    try:
        from moe_lab.models import facts  # loads torch

        about = facts.describe(folder, cell.model)
    except UserError as error:
        return title, [("supported", f"no: {error}")], False
    cell = replace(cell, model=_sized(cell.model, about))
    costs = _costs(config, cell, ratios, about)
    return title, [("supported", "yes"), *_architecture(about), *costs, *_uses(cell.model, about)], True


_ABSENT = "neither on this machine nor to be had from the hub"


def _sized(model: ModelConfig, about: Mapping[str, Any]) -> ModelConfig:
    """The model; without weights to determine the size, the shape from config.json becomes `model.expected`."""
    from moe_lab.models.checkpoint import INDEX, SINGLE
    from moe_lab.paths import resolve

    folder = Path(resolve(model.path)).expanduser()
    if model.expected is not None or any((folder / name).is_file() for name in (SINGLE, INDEX)):
        return model
    return replace(model, expected=about["shape"])


def _architecture(about: Mapping[str, Any]) -> Iterator[Row]:
    parameters = about["parameters"]
    total = sum(parameters.values())
    yield "architecture", f"{about['model_type']}, {about['layers']} decoder layers, {len(about['moe'])} with experts"
    for words in dict.fromkeys(about["moe"].values()):
        layers = [layer for layer, other in about["moe"].items() if other == words]
        yield f"layers {_span(layers)}", words
    for part, count in parameters.items():
        yield f"parameters, {part}", f"{count:,} ({count / total:.1%})"
    yield "parameters, all", f"{total:,}"


def _span(layers: list[int]) -> str:
    """Layer numbers as ranges: 1-26, or 0, 2-4."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _costs(config: Config, cell: Cell, ratios: Sequence[float], about: Mapping[str, Any] | None) -> Iterator[Row]:
    """Rows on memory; for a model that is not on this machine also its layers and parameters, as expected."""
    size = size_of(cell.model)
    if size is None:
        return
    if about is None:
        yield "layers", f"{size.moe_layers} of {size.experts} experts, top-{size.top_k}, {size.width:,} channels each"
        yield "parameters, all", f"{size.parameters:,}"
    yield "loading memory", f"{2 * size.parameters / GIB:.2f} GiB in bfloat16"
    for ratio in ratios:
        gone = int(size.experts * ratio) * _of_one_expert(size, about)
        yield f"without {ratio:.0%} of the experts", f"{2 * (size.parameters - gone) / GIB:.2f} GiB"
    yield from _calibration(config, cell)


def _of_one_expert(size: Size, about: Mapping[str, Any] | None) -> int:
    """Parameters removed with one expert of each MoE layer, including router rows and, where known, biases."""
    if about is None:
        return size.moe_layers * (size.expert + size.hidden)
    return sum(
        sum(tensor.numel() for tensor in (*layer.experts.parameters(), *(part.tensor for part in layer.routing)))
        // layer.n_experts
        for layer in about["moe_layers"]
    )


def _calibration(config: Config, cell: Cell) -> Iterator[Row]:
    """Rows on the estimated memory of a forward pass, and of a forward and backward pass, over the calibration set."""
    from moe_lab.study.devices import resolved
    from moe_lab.study.estimates import gpus, memory_of
    from moe_lab.study.steps.passes import Gradients, Pass, StatisticsPass

    text = replace(cell.calibration, seed=cell.seed)
    named = replace(cell, model=resolved(cell.model, config), calibration=text)
    parts = f" in {text.parts} parts" if text.parts > 1 else ""
    kinds: dict[str, type[Pass]] = {"forward": StatisticsPass, "forward and backward": Gradients}
    for words, kind in kinds.items():
        step = kind.of(named)
        memory = memory_of(step.merges[-1] if step.merges else step)  # the last part has the most rows
        if memory is None:
            continue
        count = gpus(memory, config.resources.gpu_memory)
        where = f"{count} GPU{'s' * (count > 1)} of {config.resources.gpu_memory:g} GiB" if count else "the CPU"
        yield (
            f"calibration, {words}",
            f"about {memory.bytes / GIB:.1f} GiB on {where}, over {text.tokens:,} tokens of {text.name}{parts}",
        )


def _uses(model: ModelConfig, about: Mapping[str, Any]) -> Iterator[Row]:
    from moe_lab import criteria
    from moe_lab.models.config_json import quantization
    from moe_lab.pruning.export.layout import can_bar
    from moe_lab.pruning.export.quantised import check_quantised
    from moe_lab.pruning.form import SHAPES

    method = quantization(model)
    stored = f"its weights are stored as {method}" if method else None
    unfit = about["moe_layers"][0].family.unfit
    uncut = f"its experts {unfit}" if unfit else None
    for granularity, reason in (("expert", None), ("channel", uncut)):
        names = [
            name
            for name, criterion in sorted(criteria.CRITERIA.items())
            if criterion.granularity == granularity and not (method and criterion.needs_plain_weights) and not reason
        ]
        yield f"criteria of {granularity}s", ", ".join(names) or f"none, for {reason or stored}"
    shapes = [
        shape
        for shape in SHAPES
        if (shape != "masked" or can_bar(about["routing"])) and not [*user_errors(check_quantised, method, shape)]
    ]
    yield "exports", ", ".join(shapes)


if __name__ == "__main__":
    end_with(partial(main, sys.argv[1:]))
