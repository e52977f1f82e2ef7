"""`moe-lab inspect model=NAME` prints whether a model is supported, and which criteria
and exports apply to the model, without reading weights. With calibration=NAME it prints how the
model reads this set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from moe_lab.config import CalibrationConfig, ModelConfig
from moe_lab.errors import UserError, user_errors

USAGE = """moe-lab inspect model=NAME [model.path=FOLDER] [...]

Whether a model is supported or why not, its layers, experts, routers and parameters by part, its
loading memory, and which criteria and exports apply. Takes the settings of `moe-lab run`;
reads no weight. A dry run prints the memory that steps need.

With calibration=NAME [calibration.path=FILE] [...]: the first rows of the set as the model reads
them, the forms of its records, and what was left out."""
TableRow = tuple[str, str]
"""(name, text) of a row of the printed table."""


def main(arguments: list[str]) -> int:
    """Print a description of the model that `arguments` name. Returns the exit code: 0 if the model
    is supported, 1 if it is not supported."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    from moe_lab.compose import compose, hydra_context

    with hydra_context():
        _, requests = compose(arguments)
    models = {cell.model.name: cell.model for cells, _ in requests for cell in cells}
    if len(models) > 1:
        raise UserError(f"model={','.join(sorted(models))}: expected one model")
    title, rows, is_supported = describe(*models.values())  # the only model
    if any(argument.startswith("calibration") for argument in arguments):
        cell = requests[0][0][0]
        rows = [*text_rows(replace(cell.calibration, seed=cell.seed), cell.model)]
    table = Table(show_header=False, title=title)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)
    return 0 if is_supported else 1


def text_rows(text: CalibrationConfig, model: ModelConfig) -> Iterator[TableRow]:
    """Rows about a calibration set: the report on its first three rows of tokens, and their texts.
    UserError if the set cannot be read, or if the model is not on this machine."""
    from moe_lab.calibration import local_tokenizer
    from moe_lab.calibration.batches import batches

    tokenizer = local_tokenizer(model)
    if tokenizer is None:
        raise UserError(f"model.path={model.path}: expected a folder with a tokenizer.json")
    first_rows = replace(text, tokens=min(text.tokens, 3 * text.length), batch_tokens=1)
    calibration = batches(first_rows, tokenizer)
    yield from ((name, str(value)) for name, value in calibration.report.items())
    yield from (("row", tokenizer.decode(ids[valid])) for ids, valid in calibration.batches)


def describe(model: ModelConfig) -> tuple[str, list[TableRow], bool]:
    """(title, rows, whether moe_lab supports the model) of the description of a model. Without a
    config.json, the rows come from `model.expected`."""
    from moe_lab.models.config_json import expected_numbers
    from moe_lab.models.files import configuration_folder

    title = f"{model.name}: {model.path}"
    folder = configuration_folder(model)
    if folder is None:
        expected = expected_numbers(model)
        sentence = (
            "neither on this machine nor to be had from the hub; give a folder, or a hub id that "
            "can be reached"
        )
        numbers = [(f"expected {name}", f"{number:,}") for name, number in expected.items()]
        return title, [("configuration", sentence), *numbers], bool(expected)
    try:
        from moe_lab.models import facts  # loads torch

        metadata = facts.describe(folder, model)
    except UserError as error:
        return title, [("supported", f"no: {error}")], False
    rows = [("supported", "yes"), *_architecture_rows(metadata), *_use_rows(model, metadata)]
    return title, rows, True


def _architecture_rows(facts: Mapping[str, Any]) -> Iterator[TableRow]:
    """Rows about the layers and parameters of a model. `facts`: result of
    `models.facts.describe`."""
    parameters = facts["parameters"]
    total = sum(parameters.values())
    architecture = (
        f"{facts['model_type']}, {facts['layers']} decoder layers, {len(facts['moe'])} with experts"
    )
    yield "architecture", architecture
    for description in dict.fromkeys(facts["moe"].values()):
        layers = [layer for layer, text in facts["moe"].items() if text == description]
        # first and last layer of each run of adjacent layers
        starts = [layer for layer in layers if layer - 1 not in layers]
        ends = [layer for layer in layers if layer + 1 not in layers]
        spans = [
            f"{start}-{end}" if end > start else str(start)
            for start, end in zip(starts, ends, strict=True)
        ]
        yield f"layers {', '.join(spans)}", description
    for part, count in parameters.items():
        yield f"parameters, {part}", f"{count:,} ({count / total:.1%})"
    yield "parameters, all", f"{total:,}"
    yield "loading memory", f"{2 * total / 2**30:.2f} GiB in bfloat16"


def _use_rows(model: ModelConfig, facts: Mapping[str, Any]) -> Iterator[TableRow]:
    """Rows with the criteria and the export shapes that apply to a model. `facts`: result of
    `models.facts.describe`."""
    from moe_lab import criteria
    from moe_lab.models.config_json import DEQUANTISED, quantization
    from moe_lab.pruning import FORMS
    from moe_lab.pruning.export import check_quantised
    from moe_lab.pruning.export.layout import can_bar

    method = quantization(model)
    if method:
        reading = (
            "dequantised when they are read"
            if method in DEQUANTISED
            else "loaded if transformers can, and not by calibration.engine=streamed"
        )
        yield "weights", f"stored as {method}, {reading}"
    # why criteria that need plain weights do not apply; None if they do
    storage = f"its weights are stored as {method}" if method else None
    # such as "have biases"; None if their channels can be removed
    experts_obstacle = facts["moe_layers"][0].family.channel_obstacle
    channel_obstacle = f"its experts {experts_obstacle}" if experts_obstacle else None
    # obstacle: why no criterion of the granularity applies
    for granularity, obstacle in (("expert", None), ("channel", channel_obstacle)):
        names = [
            name
            for name, criterion in sorted(criteria.CRITERIA.items())
            if criterion.granularity == granularity
            and not (method and criterion.needs_plain_weights)
            and not obstacle
        ]
        yield f"criteria of {granularity}s", ", ".join(names) or f"none, for {obstacle or storage}"
    shapes = [
        shape
        for shape in FORMS
        # a masked checkpoint needs a router with biases, which keep tokens from dropped experts
        if (shape != "masked" or can_bar(facts["routing"]))
        and not [*user_errors(check_quantised, method, shape)]
    ]
    yield "exports", ", ".join(shapes)
    for use, sentence in facts["obstacles"].items():
        yield use, f"no: {sentence}"
