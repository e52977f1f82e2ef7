"""Checks of a study before anything heavy is loaded; all problems are reported together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from moe_lab import allocation, criteria
from moe_lab.allocation import listed
from moe_lab.calibration import settings as calibrations
from moe_lab.calibration import sources
from moe_lab.config import BenchmarkConfig, Config
from moe_lab.errors import UserError, masked, unknown, user_errors
from moe_lab.evaluation import server_command, suite
from moe_lab.evaluation.sandbox.policy import check_sandbox
from moe_lab.grid import Cell, plain
from moe_lab.models import config_json, files
from moe_lab.models.config_json import check_expected
from moe_lab.paths import check_name, resolve
from moe_lab.pruning.export import layout
from moe_lab.pruning.export.form import SHAPES
from moe_lab.pruning.plan import Plan
from moe_lab.recovery import settings as recoveries
from moe_lab.search import evolution
from moe_lab.search.settings import parse as parse_search
from moe_lab.search.settings import search_settings
from moe_lab.search.subsets import check_removals
from moe_lab.secret_settings import LATE
from moe_lab.study import tracking
from moe_lab.study.launch import visible_gpus
from moe_lab.study.slurm import resources
from moe_lab.study.steps import KINDS
from moe_lab.study.steps.builder import evidence_of, reads_text
from moe_lab.study.steps.costs import device_here

RESERVED = {"study": ("all",), "criterion": ("none",), "calibration": ("none",), "allocation": ("none",)}
"""Group -> names that stand for every study, or for what an unpruned model lacks."""
ANSWERED = ("search", "instructions")
"""Texts that are of no use without answers."""


def preflight(config: Config, requests: Iterable[tuple[Sequence[Cell], Sequence[BenchmarkConfig]]]) -> list[str]:
    """One sentence per problem of what is asked for, each once; empty when the study could start somewhere."""
    return list(
        dict.fromkeys(sentence for cells, benchmarks in requests for sentence in _check(config, cells, benchmarks))
    )


def lacking(config: Config, requests: Iterable[tuple[Sequence[Cell], Sequence[BenchmarkConfig]]]) -> list[str]:
    """One sentence for everything that its benchmarks and its models need and is not here, or not allowed."""
    policy, requests = suite.policy(config), list(requests)
    problems = [sentence for _, benchmarks in requests for sentence in suite.lacking(benchmarks, policy)]
    if config.launcher.name != "slurm":  # whose nodes have what this machine may lack
        for named in dict.fromkeys(cell.model.device for cells, _ in requests for cell in cells):
            problems += user_errors(partial(_check_device, named))
    if config.launcher.python is None:  # an interpreter in a container has programs of its own
        problems += user_errors(partial(server_command.check_installed, config.backend))
    return list(dict.fromkeys(problems))


def _check_device(named: str) -> None:
    """UserError when the CUDA device of model.device is not on this machine; torch, which takes seconds, is asked only
    where the driver does not already list it. What spreads a model over devices takes those there are, the CPU too."""
    kind, _, number = named.partition(":")
    if kind == "cuda" and (number or "0").isdigit() and int(number or 0) >= len(visible_gpus()):
        device_here(named)


def _check(config: Config, cells: Sequence[Cell], benchmarks: Sequence[BenchmarkConfig]) -> Iterator[str]:
    yield from _check_names(config, cells, benchmarks)
    yield from _check_secrets(config, cells)
    yield from _check_words(config)
    if config.export not in (None, *SHAPES):
        yield str(unknown("export", config.export, SHAPES))
    yield from user_errors(partial(tracking.check, config.tracker))
    yield from user_errors(partial(resources.check, config.resources))
    yield from suite.wrong(benchmarks)
    for cell in _each(cells, "model"):
        yield from user_errors(partial(files.check, cell.model))
        yield from user_errors(partial(check_expected, cell.model))
        for benchmark in (benchmark for benchmark in benchmarks if benchmark.chat):
            yield from user_errors(partial(config_json.check_chat_template, cell.model, benchmark.name))
    for cell in _each(cells, "criterion"):
        yield from user_errors(partial(criteria.check, cell.criterion.name, cell.criterion.parameters))
    yield from _check_calibrations(cells)
    for cell in _each(cells, "recovery"):
        yield from user_errors(partial(recoveries.check_none, cell.recovery))
        yield from user_errors(partial(recoveries.check, cell.recovery))
    yield from _check_backend(config, cells, benchmarks)
    yield from _check_top_k(config, cells)
    yield from _check_timing(config)
    for role, text in {id(text): (role, text) for cell in cells for role, text in cell.texts.items()}.values():
        yield from user_errors(partial(calibrations.check, text))
        if role in ANSWERED:
            for _, part in calibrations.parts(text):
                yield from user_errors(partial(sources.check_answers, part))
    yield from _check_plain_weights(config, cells)
    yield from _check_masked(config, cells)
    yield from _check_engines(cells)
    yield from _check_allocations(cells)


def _check_calibrations(cells: Sequence[Cell]) -> Iterator[str]:
    """Settings of the calibration sets that are read, and the first record of each."""
    for cell in _each([cell for cell in cells if not _is_known(cell) or reads_text(cell)], "calibration"):
        wrong = list(user_errors(partial(calibrations.check, cell.calibration)))
        yield from wrong
        for _, part in [] if wrong else calibrations.parts(cell.calibration):
            yield from user_errors(partial(sources.check_first, part))


def _check_backend(config: Config, cells: Sequence[Cell], benchmarks: Sequence[BenchmarkConfig]) -> Iterator[str]:
    """Checkpoints, as they are exported and served, hold what pruning leaves, before it is recovered."""
    yield from user_errors(partial(server_command.check_command, config.backend))
    by_model = [one for one in benchmarks if not suite.has_two_phases(one) and one.max_new_tokens]
    if by_model and (config.backend.name == "server" or config.backend.continuous):
        yield (
            f"backend={config.backend.name}: benchmark {by_model[0].name} generates with the loaded model, "
            "whatever the back end: leave it out, or set backend=hf backend.continuous=false"
        )
    for cell in (cell for cell in _each(cells, "recovery") if cell.recovery.name != "none"):
        if config.backend.name == "server":
            yield f"backend=server serves what is exported, before recovery={cell.recovery.name}: expected backend=hf"
        if config.export:
            yield (
                f"export={config.export} writes what pruning leaves, before recovery={cell.recovery.name}: expected "
                "recovery=none in a study that exports, or export=null"
            )


def _check_top_k(config: Config, cells: Sequence[Cell]) -> Iterator[str]:
    """Another number of experts a token must be there, and is set once a model is loaded: its files do not have it."""
    for cell in (cell for cell in _each(cells, "model") if cell.model.top_k is not None):
        top_k, shape = cell.model.top_k or 0, config_json.expert_shape(cell.model)
        if shape and not 1 <= top_k <= shape["n_experts"]:
            yield f"model.top_k={top_k}: {cell.model.path} has {shape['n_experts']} experts in a layer to choose from"
        asked = {"backend=server": config.backend.name == "server", f"export={config.export}": config.export}
        for what in (name for name, wanted in asked.items() if wanted):
            yield f"{what} gives a checkpoint that routes as it was trained, not by model.top_k={top_k}: expected null"


def _check_timing(config: Config) -> Iterator[str]:
    """What is timed runs alone, and on a device whose name is known before."""
    if not config.timing:
        return
    timed = config.timed
    numbers = {**plain(timed), "batch_sizes": min(timed.batch_sizes, default=0)}
    numbers["prompt_lengths"] = min(timed.prompt_lengths, default=0)
    for name in (name for name, number in numbers.items() if name != "device" and number < 1):
        yield f"timed.{name}={getattr(timed, name)}: expected whole numbers from 1 on"
    if config.launcher.name == "local" and config.launcher.processes != 1:
        yield "timing=true beside other work would measure that too: expected launcher=inline, or launcher.processes=1"
    if config.launcher.name == "slurm" and timed.device is None:
        yield "timing=true with launcher=slurm needs timed.device: expected the name of the nodes' GPU, as jobs see it"


def _check_masked(config: Config, cells: Sequence[Cell]) -> Iterator[str]:
    """Whole experts cannot be dropped in the shape of the original where routers have no way to say so; found here as
    far as models are on this machine."""
    dropping = [cell for cell in cells if _is_known(cell) and criteria.get(cell.criterion.name).granularity == "expert"]
    for cell in _each(dropping, "model") if config.export == "masked" else ():
        folder = Path(resolve(cell.model.path)).expanduser()
        if (folder / "config.json").is_file():
            yield from user_errors(partial(layout.check_masked, folder))


def _check_names(config: Config, cells: Sequence[Cell], benchmarks: Sequence[BenchmarkConfig]) -> Iterator[str]:
    """Names become parts of paths, so they are looked at before anything is joined to one."""
    yield from user_errors(partial(check_name, "study", config.study, RESERVED["study"]))
    for group in ("model", "criterion", "calibration", "allocation", "recovery"):
        for name in dict.fromkeys(getattr(cell, group).name for cell in cells):
            yield from user_errors(partial(check_name, f"{group}.name", name, RESERVED.get(group, ())))
    for benchmark in benchmarks:
        yield from user_errors(partial(check_name, "benchmark.name", benchmark.name))


OPEN = {
    "model": ("path", "template_arguments", "search"),
    "criterion": ("parameters",),
    "calibration": ("path",),
    "allocation": ("path", "parameters"),
}
"""Group -> fields that take anything, and whose values are stored as they are."""


def _check_secrets(config: Config, cells: Sequence[Cell]) -> Iterator[str]:
    """A secret that would be stored: results are shown to people who must not know it."""
    places = [
        (f"{group}.{name}", getattr(getattr(cell, group), name))
        for group, names in OPEN.items()
        for cell in _each(cells, group)
        for name in names
    ]
    places += [("interpreters", config.interpreters), ("protocol.benchmarks", config.protocol.benchmarks)]
    for field, value in [*places, ("resources.every.sbatch", config.resources.every.sbatch)]:
        if masked(value) != value:
            yield (
                f"{field}={masked(value)} has a secret in it and would be stored with the results: expected none, for "
                f"only {', '.join(LATE)} may have one"
            )


def _check_words(config: Config) -> Iterator[str]:
    for name in ("store", "data_root"):
        if not getattr(config, name).strip():
            yield f"{name} is empty: expected a folder, such as {name}={getattr(Config(), name)}"
    yield from user_errors(partial(check_sandbox, config.sandbox))
    if config.retry not in (None, "failed"):
        yield f"retry={config.retry} is unknown: expected failed or null"


def _is_known(cell: Cell) -> bool:
    """Whether the names of the cell stand for something; where they do not, another sentence says so."""
    return cell.criterion.name in criteria.CRITERIA and cell.allocation.name in allocation.ALLOCATIONS


def _check_allocations(cells: Sequence[Cell]) -> Iterator[str]:
    """Each allocation with the criteria it is to be used with, then with the ratios and models."""
    for cell in {(id(c.criterion), id(c.allocation)): c for c in cells if _is_known(c)}.values():
        yield from user_errors(
            partial(allocation.check, cell.allocation, criteria.get(cell.criterion.name).granularity)
        )
        if allocation.get(cell.allocation.name).step == "search":
            yield from user_errors(partial(parse_search, cell.allocation.parameters))
        if allocation.get(cell.allocation.name).step == "sequential":
            yield from user_errors(partial(_check_sequential, cell.criterion.name))
        if cell.allocation.by is not None:
            yield from user_errors(partial(_check_by, cell.allocation.by))
    for cell in _each([cell for cell in cells if not _is_known(cell)], "allocation"):
        yield from user_errors(partial(allocation.check, cell.allocation))
    for cell in {(id(c.model), id(c.criterion), id(c.allocation), c.ratio): c for c in cells if _is_known(c)}.values():
        yield from user_errors(partial(_try_ratio, cell))
    for cell in {(id(c.model), c.allocation.path): c for c in cells if c.allocation.path}.values():
        yield from user_errors(partial(_check_origin, cell))


def _check_origin(cell: Cell) -> None:
    """UserError when allocation.path is the plan of another model, as far as the model is on this machine; the plan
    step looks again."""
    path, folder = str(cell.allocation.path), Path(resolve(cell.model.path)).expanduser()
    if not folder.is_dir() or not listed.is_plan(listed.read(path)):
        return
    plan = Plan.load(path)
    if plan.provenance.get("model_sha256"):
        plan.check_origin(files.fingerprint(folder), cell.model.path)


def _check_sequential(name: str) -> None:
    """UserError unless the criterion reads forward statistics, and of the rest nothing but weights: that is all a layer
    has when those below it have just been pruned."""
    fitting = [one for one, about in criteria.CRITERIA.items() if _fits_sequential(about.needs)]
    if name not in fitting:
        raise UserError(
            f"allocation=sequential scores each layer by its forward statistics, and criterion={name} reads "
            f"{' and '.join(criteria.get(name).needs) or 'none'}: expected one of {', '.join(fitting)}"
        )


def _fits_sequential(needs: Sequence[str]) -> bool:
    return "statistics" in needs and not any(KINDS[need].reads_text for need in needs if need != "statistics")


def _check_by(name: str) -> None:
    """UserError unless allocation.by names a criterion of experts that needs no parameters."""
    criteria.check(name, {})
    if criteria.get(name).granularity != "expert":
        raise UserError(f"allocation.by={name} scores channels, expected a criterion that scores experts")


def _try_ratio(cell: Cell) -> None:
    """UserError when the ratio cannot be had, as far as config.json tells; the plan step knows the groups too.

    A share of all parameters (ratio_basis=model) is left to the plan step, which knows how many there are.
    """
    shape = config_json.expert_shape(cell.model)
    if shape is None or cell.allocation.ratio_basis != "routed":
        return
    layer = {**shape, "n_group": 1, "topk_group": 1}
    settings = {**plain(cell.allocation), "ratio": cell.ratio}
    allocation.fits(settings, {0: layer}, criteria.get(cell.criterion.name).granularity)
    step = allocation.get(cell.allocation.name).step
    if step == "search":
        search = search_settings(settings, {"layers": {0: layer, 1: layer}}, cell.seed)
        evolution.check(search.problem, search.evolution)
    if step == "reconstruction":
        limit = {name: value for name, value in cell.allocation.parameters.items() if name == "limit"}
        check_removals({0: layer}, cell.ratio, multiple_of=cell.allocation.multiple_of, **limit)


def _check_plain_weights(config: Config, cells: Sequence[Cell]) -> Iterator[str]:
    """A quantised checkpoint can be read and masked; whatever needs its weights as numbers cannot be done."""
    for cell in cells:
        if cell.criterion.name not in criteria.CRITERIA or (method := config_json.quantization(cell.model)) is None:
            continue
        criterion = criteria.get(cell.criterion.name)
        wants = {
            f"criterion={criterion.name}": criterion.needs_plain_weights,
            f"recovery={cell.recovery.name}": cell.recovery.name != "none",
            f"export={config.export}": config.export is not None,
            "timing=true": config.timing,
        }
        for what in (name for name, wanted in wants.items() if wanted):
            yield (
                f"{what} needs plain weights, but model={cell.model.name} is stored as {method}: expected a checkpoint "
                "in bfloat16 or float32"
            )


def _check_engines(cells: Sequence[Cell]) -> Iterator[str]:
    """With one decoder layer in memory sums are gathered layer by layer; what runs the rest of the model anew for every
    candidate needs all of it."""
    for cell in cells:
        if cell.calibration.engine != "streamed" or not _is_known(cell):
            continue
        chosen = allocation.get(cell.allocation.name)
        searches = KINDS[chosen.step].needs_whole_model
        if searches or any(KINDS[need].needs_whole_model for need in evidence_of(cell) if need != "by"):
            what = "compares whole models" if searches else "reads the loss of the whole model with one part changed"
            yield (
                f"allocation={chosen.name} {what}, and calibration.engine=streamed has one decoder layer in memory: "
                "expected calibration.engine=resident, or an allocation from sums, such as uniform"
            )


def _each(cells: Sequence[Cell], group: str) -> Iterator[Cell]:
    """One cell for every object of a group."""
    yield from {id(getattr(cell, group)): cell for cell in cells}.values()
