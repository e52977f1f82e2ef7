"""Check a study before anything heavy is loaded, and report all problems together.

Checks are functions in the modules of their subjects that raise UserError, or return a sentence for
each problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from moe_lab import allocation, criteria, recovery
from moe_lab import calibration as calibrations
from moe_lab.allocation.grouping import GROUPINGS
from moe_lab.calibration import sources
from moe_lab.config import (
    BenchmarkConfig,
    Config,
    ExportConfig,
    LauncherConfig,
    ModelConfig,
)
from moe_lab.errors import UserError, check_known, user_errors
from moe_lab.evaluation import engines
from moe_lab.evaluation.harness import benchmark_errors, harness_of
from moe_lab.evaluation.items import may_think
from moe_lab.grid import Cell, Request, is_shipped
from moe_lab.models import config_json, files
from moe_lab.models.checkpoint import read_json_if_there
from moe_lab.paths import conf, local_path, store_folder
from moe_lab.pruning import check_replacement
from moe_lab.pruning.plan import ROUNDED
from moe_lab.study.estimates import check_device, check_memory, disk_problems
from moe_lab.study.resources import Check
from moe_lab.study.step import KINDS, Step
from moe_lab.study.steps.costs import timing_mistakes
from moe_lab.study.steps.plans import (
    check_engine,
    check_plan_file,
    plan_in,
    removed_share,
    trial_allocation,
    trial_plan,
)
from moe_lab.study.steps.scores import check_weights, reads_text

AVERAGE = "Avg"
"""Value of `objective` for the mean over benchmarks; other values are names of results."""
WITH_ANSWERS = ("search", "instructions")
"""Roles of texts of a cell in which the answers of documents are read."""


def preflight(config: Config, requests: Sequence[Request]) -> list[str]:
    """One sentence for each problem with the settings of a study."""
    sentences = list(_settings_problems(config))
    for cells, benchmarks in requests:
        sentences += benchmark_errors(benchmarks)
        sentences += engines.setting_errors(
            config.backend, benchmarks, [cell.model for cell in _deduplicate(cells, "model")]
        )
        for groups, check in CELL_CHECKS:
            # `groups` are the groups of settings that the check reads, such as "model": cells that
            # share them are checked once
            for cell in _deduplicate(cells, *groups):
                sentences += user_errors(check, cell, config)
        sentences += _text_problems(cells)
        sentences += _held_out_problems(cells, benchmarks)
        for cell, benchmark in product(_deduplicate(cells, "model"), benchmarks):
            sentences += user_errors(_check_template, cell, benchmark)
            sentences += user_errors(_check_texts, cell, benchmark)
        sentences += user_errors(_check_objective, config, benchmarks)
    if not sentences:  # trials take seconds, and assume that all settings are valid
        for cells, _ in requests:
            sentences += user_errors(_trial_refusals, cells, config)
    return list(dict.fromkeys(sentences))


def remark_sentences(config: Config, requests: Sequence[Request]) -> Iterator[str]:
    """A sentence for each choice of a study that a user may not expect."""
    cells = [cell for request_cells, _ in requests for cell in request_cells]
    user_models = dict.fromkeys(cell.model.name for cell in cells if not is_shipped(cell.model))
    if config.suite.benchmarks is None and user_models:
        yield (
            f"model={','.join(user_models)} is not evaluated, as no suite is named: add "
            "suite=perplexity suite.path=FILE"
        )
    job_configs = [config.resources.of_model(cell.model) for cell in _deduplicate(cells, "model")]
    # entries of `resources.models` that no model uses; the name of a shipped model is no mistake
    unused_names = [name for name, job in config.resources.models.items() if job not in job_configs]
    if unknown_names := [
        name for name in unused_names if not (conf() / "model" / f"{name}.yaml").is_file()
    ]:
        yield f"resources.models: no model of this study has the name {', '.join(unknown_names)}"
    yield from _thought_remarks(requests)
    roundings: dict[str, None] = {}
    for cell in _deduplicate(cells, "model", "criterion", "allocation", "ratio"):
        removed_ratio = removed_share(cell)  # the ratio, rounded to whole experts
        if abs(removed_ratio - cell.ratio) > ROUNDED:
            roundings[f"{cell.model.name} {cell.ratio:g} -> {removed_ratio:.3g}"] = None
    if roundings:
        ratios = ", ".join(roundings)
        yield f"ratio is rounded to whole experts (model requested -> removed): {ratios}"


def _thought_remarks(requests: Iterable[Request]) -> Iterator[str]:
    """Sentences about models whose thoughts may be cut, because a benchmark gives thoughts fewer
    tokens than usual, or more than the model can read."""
    for cells, benchmarks in requests:
        for cell, benchmark in product(_deduplicate(cells, "model"), benchmarks):
            model = cell.model
            if not (benchmark.chat and benchmark.max_new_tokens and _may_think(model)):
                continue
            usual = BenchmarkConfig.thinking_tokens
            most = _most_tokens(model, benchmark)
            if benchmark.thinking_tokens < usual or benchmark.longest_text >= most:
                yield (
                    f"model={model.name} may write thoughts, for which benchmark {benchmark.name} "
                    f"has thinking_tokens={benchmark.thinking_tokens} (usual: {usual}) beside "
                    f"max_new_tokens={benchmark.max_new_tokens}, and at most {most} tokens with "
                    "the prompt"
                )


def _may_think(model: ModelConfig) -> bool:
    """Whether a model may write thoughts, by its settings and its chat template."""
    arguments = model.template_arguments.items()
    if any("think" in name and value is False for name, value in arguments):
        return bool(model.thinking)
    return may_think(model, config_json.chat_templates(model))


def _most_tokens(model: ModelConfig, benchmark: BenchmarkConfig) -> float:
    """Most tokens of a prompt and its text together; infinite if nothing limits them."""
    config = config_json.config_of(model)
    length = config.get("text_config", config).get("max_position_embeddings")
    return min(filter(None, (benchmark.max_length, length)), default=math.inf)


def missing_requirements(steps: Sequence[Step], launcher: LauncherConfig) -> list[str]:
    """One sentence for each requirement of `steps` that this machine does not meet, such as a
    package, a permission or the device of a model."""
    checks: list[Check] = []
    for step in steps:
        resources = step.resources()
        checks += resources.start_checks
        if launcher.python is None:  # otherwise the steps run in another Python than this one
            checks += resources.installation_checks
        # jobs of a cluster run on nodes with other devices than this machine
        if launcher.name != "slurm" and resources.model and resources.runs_model:
            checks.append((check_device, resources.model.device))
    return _distinct_problems(checks)


def failure_forecast(store: Path, steps: Sequence[Step], launcher: LauncherConfig) -> list[str]:
    """A sentence if the disk of `store` is too small for the results of `steps`, and for each
    model of the user that steps could not run. Unless launcher=slurm, also sentences about steps
    that would load a model on the CPU, although its weights exceed the main memory."""
    checks: list[Check] = []
    for step in steps:
        resources = step.resources()
        model = resources.model
        # with `launcher.python`, the steps run in another Python than this one
        if model and resources.runs_model and not is_shipped(model) and launcher.python is None:
            streams = resources.runs_layers or resources.weights == "layers"
            checks.append((files.check_use, model, streams))
        if launcher.name != "slurm":
            checks.append((check_memory, step))
    return [*disk_problems(store, steps), *_distinct_problems(checks)]


def _distinct_problems(checks: Iterable[Check]) -> list[str]:
    """One sentence for each problem that `checks` find. A check with the same arguments, compared
    by id(), is made once."""
    distinct_checks: dict[tuple[Any, ...], Check] = {}
    for check, *arguments in checks:
        distinct_checks[check, *map(id, arguments)] = (check, *arguments)
    problems: list[str] = []
    for check, *arguments in distinct_checks.values():
        problems += user_errors(check, *arguments)
    return list(dict.fromkeys(problems))


def _deduplicate(cells: Iterable[Cell], *fields: str) -> list[Cell]:
    """`cells` without those whose `fields` are the same objects as in an earlier cell."""
    cell_of: dict[Any, Cell] = {}
    for cell in cells:
        cell_of.setdefault(tuple(id(getattr(cell, field)) for field in fields), cell)
    return list(cell_of.values())


def _settings_problems(config: Config) -> Iterator[str]:
    """A sentence for each problem with a setting that all cells share."""
    yield from user_errors(store_folder, config.store)
    if config.also:
        from moe_lab.study.other_stores import open_other

        for path in config.also:
            yield from user_errors(open_other, path)
    if config.tracker.name != "none":
        from moe_lab.study import tracker

        yield from user_errors(tracker.check)
    for kind in config.resources.jobs:
        yield from user_errors(check_known, "resources.jobs", kind, KINDS)
    if config.export.format == "gguf" and config.backend.name != "hf":
        backend = config.backend.name
        yield (
            f"backend={backend} reads a folder, and export.format=gguf writes one file: "
            "expected backend=hf"
        )


def _check_gpu_number(cell: Cell, config: Config) -> None:
    """Raise UserError for a device such as cuda:1 unless launcher=inline: other launchers choose
    the GPUs of each process."""
    device = cell.model.device
    launcher = config.launcher.name
    # cuda:0 is the same as cuda
    if int(device.partition(":")[2] or 0) and launcher != "inline":
        raise UserError(
            f"model.device={device}: a process of launcher={launcher} has GPUs of its own: "
            "expected cuda"
        )


def _check_objective(config: Config, benchmarks: Sequence[BenchmarkConfig]) -> None:
    """Raise UserError when the study cannot return the number that `objective` names."""
    if config.objective is None:
        return
    names = [AVERAGE, *(result for benchmark in benchmarks for result in benchmark.reports)]
    check_known("objective", config.objective, names)
    if config.launcher.name == "slurm" and not config.wait:
        raise UserError(
            f"objective={config.objective} is known when the jobs of a study have ended: expected "
            "wait=true with launcher=slurm"
        )


def _text_problems(cells: Iterable[Cell]) -> Iterator[str]:
    """A sentence for each problem with a text that a model reads. The default calibration set is
    only for models that ship with moe_lab."""
    # (role of a text, id() of the text, id() of the model) -> (role, text, model)
    readings = {}
    for cell in _deduplicate(cells, "model", "calibration", "criterion", "allocation", "recovery"):
        texts = {**cell.texts, "calibration": cell.calibration}
        # `reads_text` raises UserError for an unknown criterion or allocation
        with suppress(UserError):
            if not reads_text(cell):
                del texts["calibration"]
            elif cell.calibration.is_default and not is_shipped(cell.model):
                reader = f"criterion={cell.criterion.name} with allocation={cell.allocation.name}"
                yield (
                    f"calibration is not set, and {reader} reads a text: add calibration=text "
                    "calibration.path=FILE"
                )
        for role, text in texts.items():
            readings[role, id(text), id(cell.model)] = (role, text, cell.model)
    for role, text, model in readings.values():
        # a mixture has several sets, which are checked one by one
        for _, single_set in calibrations.shares_and_sets(text):
            if role in WITH_ANSWERS:
                yield from user_errors(sources.check_answers, single_set)
            # the text for FLOPs is read only if experts differ in width
            if role != "flops":
                yield from user_errors(calibrations.check_first_document, single_set, model)
        if role == "calibration" and text.engine == "streamed":
            yield from user_errors(config_json.check_dequantised, model)


def _held_out_problems(
    cells: Sequence[Cell], benchmarks: Sequence[BenchmarkConfig]
) -> Iterator[str]:
    """A sentence for each held-out text of a benchmark that calibration reads too."""
    readers: list[Cell] = []
    # `reads_text` raises UserError for an unknown criterion or allocation
    with suppress(UserError):
        readers = [cell for cell in cells if reads_text(cell)]
    for cell, benchmark in product(_deduplicate(readers, "model"), benchmarks):
        if benchmark.held_out:
            from moe_lab.calibration.batches import check_held_out

            yield from user_errors(check_held_out, benchmark.held_out, cell.model)


def _check_template(cell: Cell, benchmark: BenchmarkConfig) -> None:
    """Raise UserError when a benchmark has chat=true and the model has no chat template, or none
    that accepts the tools of the benchmark."""
    harness = harness_of(benchmark)
    if benchmark.chat:
        # a benchmark with tools needs chat=true
        alternative = (
            ""
            if harness.gives_tools
            else f", or protocol.benchmarks.{benchmark.name}.chat=false to have the text continued"
        )
        config_json.check_chat_template(
            cell.model,
            f"benchmark {benchmark.name}",
            tools=harness.gives_tools,
            alternative=alternative,
        )


def _check_texts(cell: Cell, benchmark: BenchmarkConfig) -> None:
    """Raise UserError when the texts of a benchmark leave no room for a prompt, and when several
    answers to an item would be the same."""
    model = cell.model
    new_tokens = benchmark.longest_text if model.thinking else benchmark.max_new_tokens
    most = _most_tokens(model, benchmark)
    if new_tokens >= most:
        raise UserError(
            f"benchmark {benchmark.name}: texts of {new_tokens} tokens leave none of {most} to a "
            f"prompt: expected less than {most} as max_new_tokens and thinking_tokens together"
        )
    folder = local_path(model.path)
    if benchmark.max_new_tokens and (folder.is_dir() or not benchmark.chat):
        own: dict[str, Any] = {}
        if benchmark.chat and _may_think(model):
            own = engines.sampling_defaults(read_json_if_there(folder / "generation_config.json"))
        benchmark.sampling.resolved(own)


def _export_problems(cell: Cell, config: Config) -> Iterator[str]:
    """A sentence for each problem with the export of the pruned model of a cell."""
    if config.export == ExportConfig() and not config.verify:
        return
    from moe_lab.pruning.export import check_uneven, export_conflicts

    criterion = criteria.CRITERIA.get(cell.criterion.name)
    allocation_rule = allocation.get(cell.allocation.name)
    granularity = criterion.granularity if criterion else None
    yield from export_conflicts(config.export, cell.model, cell.recovery, verify=config.verify)
    # the allocation gives layers unequal numbers of experts, or experts unequal numbers of channels
    if granularity in allocation_rule.uneven:
        yield from user_errors(check_uneven, config.export, allocation_rule.name)


def _trial_refusals(cells: Iterable[Cell], config: Config) -> Iterator[str]:
    """A sentence for each file of scores or of a plan that does not fit its model, and for each
    export that would be refused when the plan is made. For each model, one plan is tried of those
    that can be exported alike."""
    shape = config.export.shape
    trials: dict[Any, Cell] = {}
    for cell in _deduplicate(cells, "model", "criterion", "allocation"):
        rule = trial_allocation(cell)
        criterion = criteria.get(cell.criterion.name)
        has_file = criterion.name in criteria.FROM_FILE
        scores = cell.criterion.parameters if has_file else criterion.granularity
        # facts of the layers have the trained top_k
        if cell.model.top_k is None and (shape or rule.path or has_file):
            trials.setdefault((id(cell.model), f"{rule} {scores}"), cell)
    for cell in trials.values():
        folder = files.folder_with_weights(cell.model)
        if folder is not None:
            from moe_lab.pruning.export import check_export

            make_plan = partial(trial_plan, cell)
            trust = cell.model.trust_remote_code
            yield from user_errors(check_export, folder, make_plan, shape, trust)


def _replacement_problems(cell: Cell, config: Config) -> Iterator[str]:
    """A sentence for each problem with a plan that replaces dropped experts by constants or by
    merged experts. If the router still chooses dropped experts, the model runs only in
    transformers."""
    settings = cell.allocation
    shape = config.export.shape
    if settings.replacement != "none":
        setting = f"allocation.replacement={settings.replacement}"
        grouping = GROUPINGS.get(settings.replacement)
        # A replacement without a grouping puts constants in place of dropped experts. With
        # rows="all", the router keeps the rows of all merged experts.
        constants = grouping is None
        merged = grouping is not None and grouping.rows == "all"
    elif (plan := plan_in(settings.path)) is not None and (
        plan.has_constants or plan.merged_layers
    ):
        setting = f"the plan allocation.path={settings.path}"
        constants, merged = plan.has_constants, plan.shares_experts
    else:
        return
    if shape is not None and (method := config_json.quantization(cell.model)):
        yield (
            f"export={shape}: {setting} makes experts of other weights, and those of "
            f"{cell.model.name} are stored as {method}: expected a checkpoint in bfloat16 or "
            "float32"
        )
    yield from user_errors(check_replacement, shape, constants, merged)
    if constants and shape == "masked" and config.verify:
        yield (
            f"verify=true loads the export in transformers, and vLLM alone reads the constants of "
            f"export=masked with {setting}: expected export=natural, or verify=false"
        )
    routes_to_dropped = constants or merged
    if routes_to_dropped and config.export.format != "safetensors":
        yield (
            f"export.format={config.export.format} has no place for {setting}: expected "
            "export.format=safetensors"
        )
    if routes_to_dropped and config.backend.name == "vllm":
        yield (
            f"backend=vllm cannot compute {setting}: expected backend=hf, or backend=server with a "
            "server that runs the code of an export"
        )


def _plan_problems(cell: Cell, _: Config) -> Iterator[str]:
    """A sentence for each problem with the plan of a cell."""
    step_class: Any = KINDS[allocation.get(cell.allocation.name).step]
    for check in step_class.checks:
        yield from user_errors(check, cell)


def _recovery_problems(cell: Cell, _: Config) -> Iterator[str]:
    """A sentence for each problem with the recovery of a cell."""
    yield from user_errors(recovery.check, cell.recovery)
    yield from user_errors(recovery.check_model, cell.recovery, cell.model)
    yield from user_errors(recovery.check_merging, cell.recovery, cell.allocation, cell.ratio)


CELL_CHECKS: Sequence[tuple[tuple[str, ...], Callable[[Cell, Config], object]]] = (
    (("model",), lambda cell, _: files.check_model_path(cell.model)),
    (("model",), _check_gpu_number),
    (
        ("criterion",),
        lambda cell, _: criteria.check(cell.criterion.name, cell.criterion.parameters),
    ),
    (("criterion", "model"), lambda cell, _: check_weights(cell.criterion, cell.model)),
    (
        ("allocation", "criterion"),
        lambda cell, _: allocation.check(
            cell.allocation, criteria.get(cell.criterion.name).granularity
        ),
    ),
    (("recovery", "model", "allocation", "ratio"), _recovery_problems),
    (("calibration", "criterion", "allocation"), lambda cell, _: check_engine(cell)),
    (("model", "allocation"), lambda cell, _: check_plan_file(cell)),
    (("model", "criterion", "allocation", "ratio"), _plan_problems),
    (
        ("model",),
        lambda cell, config: (
            config.timing and timing_mistakes(config.launcher, config.timed, cell.model)
        ),
    ),
    (("model", "criterion", "recovery", "allocation"), _export_problems),
    (("model", "allocation"), _replacement_problems),
)
"""Pairs (names of groups of settings, check). A check raises UserError or returns sentences. Cells
with the same values in these groups are checked once."""
