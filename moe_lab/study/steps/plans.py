"""Steps that make a plan: which experts, and which of their channels, are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from moe_lab import allocation, criteria, plugins, results
from moe_lab.allocation import listed, protection
from moe_lab.config import AllocationConfig
from moe_lab.errors import UserError
from moe_lab.grid import Cell
from moe_lab.models.config_json import expert_shape, model_type
from moe_lab.models.families import family_of
from moe_lab.models.files import fingerprint
from moe_lab.paths import resolve
from moe_lab.search import evolution
from moe_lab.search.settings import EvolutionSettings, parse, search_settings
from moe_lab.search.subsets import check_removals
from moe_lab.study.step import Job, Part, Step, digest
from moe_lab.study.steps import tables
from moe_lab.study.steps.alignment import aligned
from moe_lab.study.steps.builder import Builder, evidence_of, scoring
from moe_lab.study.steps.engine import Streamed, engine
from moe_lab.study.steps.inputs import STATISTICS, expert_scores, facts, model_and_tokenizer, sums, write_table
from moe_lab.study.steps.kind import KINDS, Kind, Packing, Reads, Settings, text_units
from moe_lab.study.steps.scores import CHANNEL_SCORES, score, scores_step


def allocation_identity(settings: AllocationConfig, ratio: float) -> dict[str, Any]:
    """What identifies an allocation: its settings, the ratio, a plugin's source, and the content of the files it names.

    The label is left out, since it does not change the plan.
    """
    identity = {**asdict(settings), "ratio": ratio}
    for name in ("label", "protect", "protect_layers"):
        del identity[name]
    identity |= protection.identity(vars(settings))
    if settings.replacement == "none":  # as in stores from before there was a choice
        del identity["replacement"]
    if source := allocation.get(settings.name).source:
        identity["source"] = source
    if settings.path is not None:
        identity["path"] = digest(listed.read(settings.path))
    return identity


def _known_layer(cell: Cell) -> dict[str, int] | None:
    """Facts of a layer that config.json has. None where it has none, and for ratio_basis=model, which needs the number
    of all parameters. The step itself checks groups of experts, so one group is assumed here."""
    shape = expert_shape(cell.model) if cell.allocation.ratio_basis == "routed" else None
    return {**shape, "n_group": 1, "topk_group": 1} if shape else None


def check_ratio(cell: Cell) -> None:
    """Raise UserError when the ratio is not feasible, also with the experts that a file protects."""
    if layer := _known_layer(cell):
        settings = {**asdict(cell.allocation), "ratio": cell.ratio}
        granularity = criteria.get(cell.criterion.name).granularity
        allocation.fits(settings, {0: layer}, granularity)
        protect = protection.identity(settings).get("protect")
        if isinstance(protect, dict) and granularity not in allocation.get(cell.allocation.name).uneven:
            alike = {"layers": dict.fromkeys(map(int, protect), layer)}
            layers = protection.with_protected({"protect": protect}, alike, {})["layers"]
            allocation.fits(settings, layers, granularity)


def check_layout(cell: Cell) -> None:
    """Raise UserError when the plan needs the channels of experts that are stored in a way in which they have none.

    Checked only where the type of the model is known without loading it; a plan checks again when it meets the model.
    """
    if drops_whole_experts(cell) or not (reason := family_of(model_type(cell.model)).unfit):
        return
    setting = f"criterion={cell.criterion.name}"
    if cell.allocation.replacement != "none":
        setting = f"allocation.replacement={cell.allocation.replacement}"
    raise UserError(
        f"{setting} changes channels of experts, and those of model={cell.model.name} {reason}: expected a criterion "
        "of whole experts and allocation.replacement=none"
    )


def check_plan_file(cell: Cell) -> None:
    """Raise UserError when allocation.path is a plan that still has to be aligned, or one of another model.

    The model is checked only if it is a folder on this machine; the step checks again.
    """
    from moe_lab.pruning.plan import Plan
    from moe_lab.pruning.replace import check_aligned

    path, folder = cell.allocation.path, Path(resolve(cell.model.path)).expanduser()
    if path is None or not listed.is_plan(listed.read(path)):
        return
    plan = Plan.load(path)
    if cell.allocation.replacement == "none":  # otherwise, a step of its own aligns it
        check_aligned(plan)
    if plan.provenance.get("model_sha256") and folder.is_dir():
        plan.check_origin(fingerprint(folder), cell.model.path)


def drops_whole_experts(cell: Cell) -> bool:
    """Whether the cell's plan removes experts from the router and keeps all channels of the others."""
    from moe_lab.pruning.plan import Plan

    if cell.allocation.replacement != "none":
        return False
    path = cell.allocation.path
    if path is not None and listed.is_plan(listed.read(path)):
        return not Plan.load(path).channels
    return criteria.get(cell.criterion.name).granularity == "expert"


def plan_step(builder: Builder, cell: Cell) -> Step:
    """The step that makes the cell's plan, of the kind that its allocation needs."""
    return aligned(builder, cell, KINDS[allocation.get(cell.allocation.name).step].step(builder, cell))


def _allocation_part(builder: Builder, cell: Cell) -> Part:
    key = ("allocation", cell.allocation, cell.ratio)
    return builder.once(key, lambda: Part(allocation_identity(cell.allocation, cell.ratio)))


def _inputs(builder: Builder, cell: Cell) -> dict[str, Step]:
    """Input steps of a plan: the model, and what the allocation reads besides scores."""
    return {"model": builder.model(cell.model), **{need: builder.evidence(need, cell) for need in evidence_of(cell)}}


def _label(cell: Cell) -> str:
    where = "" if cell.allocation.name == "uniform" else f"-{cell.allocation.name}"
    where += f"-{cell.allocation.replacement}" if cell.allocation.replacement != "none" else ""
    where += "-protected" if cell.allocation.protect is not None else ""
    return f"{cell.model.name}-{cell.calibration.name}-{cell.criterion.name}{where}-{cell.ratio:g}"


def _from_scores(builder: Builder, cell: Cell) -> Step:
    """The step that makes a plan from scores without running the model."""
    chosen = allocation.get(cell.allocation.name)
    runtime: dict[str, Any] = {"path": cell.allocation.path}
    if chosen.source:
        runtime["plugins"] = [plugins.place(one) for one in chosen.functions.values() if one]
    inputs = {"scores": scores_step(builder, cell), **_inputs(builder, cell)}
    return Step("plan", _label(cell), {"allocation": _allocation_part(builder, cell)}, inputs, runtime)


def plan(job: Job) -> None:
    """Decide how many experts each layer loses, and which; or how many channels each expert loses, and which."""
    from moe_lab.pruning.plan import Plan

    scored = _channel_scores(job)
    result = _channel_plan(job, scored) if scored else _expert_plan(job)
    path = job.runtime["path"]
    if path is not None and listed.is_plan(listed.read(path)):  # it passed as an allocation: use it unchanged
        result = Plan.load(path)
        result.check(_facts(job)["layers"])
        if sha256 := facts(job).get("sha256"):  # facts in older stores have none
            result.check_origin(sha256, "this model")
    result.save(job.output("plan.json"))
    if scored and result.channels:
        write_table(job.output("budgets.parquet"), results.BUDGETS, tables.budgets(scored, result.channels))


PLAN = Kind(
    name="plan",
    work=plan,
    step=_from_scores,
    checks=(check_ratio, check_layout),
    packing=Packing.SMALL,
)


def _channel_scores(job: Job) -> dict[int, Any]:
    """Layer -> scores of its channels (E, I); empty where experts were scored."""
    from safetensors.numpy import load_file

    file = job.input("scores", CHANNEL_SCORES)
    return {int(layer): values for layer, values in load_file(file).items()} if file.exists() else {}


def _expert_plan(job: Job) -> Any:
    from moe_lab.pruning.plan import make_plan
    from moe_lab.pruning.replace import replace_dropped

    model = _facts(job)
    scored = expert_scores(job)
    settings, found = _settings(job), _evidence(job)
    remove = allocation.allocate(settings, model["layers"], scored, found, model)
    result = make_plan(scored, remove, model["layers"], provenance=_provenance(job, model))
    return replace_dropped(result, settings, scored, found, model["layers"])


def _channel_plan(job: Job, scored: dict[int, Any]) -> Any:
    from moe_lab.pruning.plan import make_channel_plan

    model, settings = _facts(job), _settings(job)
    keep = allocation.budgets(settings, model["layers"], scored, _evidence(job), model)
    zero = allocation.zero_expert(settings)
    return make_channel_plan(scored, keep, model["layers"], zero_expert=zero, provenance=_provenance(job, model))


def _facts(job: Job) -> dict[str, Any]:
    """The facts of the job's model, with the experts that its plan must keep."""
    from moe_lab.statistics.sums import read

    settings, largest = job.settings["allocation"], {}
    if settings.get("protect") == protection.SUPER:
        largest = read(job.input("statistics", STATISTICS), only=protection.STATISTIC)
    return protection.with_protected(settings, facts(job), largest)


def _settings(job: Job) -> dict[str, Any]:
    """The allocation's settings, with the path of the file of allocation=list. Its identity has a hash of the content
    instead."""
    return {**job.settings["allocation"], "path": job.runtime["path"]}


def _evidence(job: Job) -> dict[str, Any]:
    """Inputs of the allocation besides the scores, by name: layer -> sums, or layer -> another criterion's scores."""
    other = {"by": expert_scores(job, "by")} if "by" in job.inputs else {}
    return {**sums(job), **other}


def _provenance(job: Job, model: dict[str, Any]) -> dict[str, Any]:
    scores = job.inputs["scores"].rsplit("/", 2)[-1]
    about = {"allocation": job.settings["allocation"], "scores": scores, "model_sha256": model.get("sha256")}
    return {**about, **protection.provenance(model)}


def _search_step(builder: Builder, cell: Cell) -> Step:
    """The step that searches for a plan: it starts from scores and compares candidates on the search text."""
    text = builder.seeded(cell.texts["search"], cell.seed)
    inputs = {"scores": scores_step(builder, cell), **_inputs(builder, cell)}
    return _running("search", builder, cell, text, inputs)


def _running(kind: str, builder: Builder, cell: Cell, text: Any, inputs: dict[str, Step]) -> Step:
    parts = {
        "allocation": _allocation_part(builder, cell),
        "text": builder.text_part(text),
        "seed": builder.once(("seed", cell.seed), lambda: Part({"seed": cell.seed})),
    }
    return Step(kind, _label(cell), parts, inputs, builder.runtime(model=cell.model, text=text))


def search(job: Job) -> None:
    """Find a plan by evolutionary search; write it with the history of the search."""
    from moe_lab.search.run import search as run

    network, tokenizer = model_and_tokenizer(job)
    run(
        network,
        tokenizer,
        facts=_facts(job),
        scores=expert_scores(job),
        settings=job.settings["allocation"],
        text=job.text,
        out=Path(job.scratch),
        partial=Path(job.partial),
        fingerprint=job.settings,
        seed=job.settings["seed"]["seed"],
    )


def _candidates(settings: Settings) -> float:
    """Work of a search: P + (T - 1)(P - m) candidates, each on the text (P: population, T: generations, m: elites)."""
    parameters = settings["allocation"]["parameters"]
    population, elites, generations = (
        int(parameters.get(name, getattr(EvolutionSettings, name))) for name in ("population", "elites", "generations")
    )
    return (population + (generations - 1) * (population - elites)) * text_units(settings)


def check_search_parameters(cell: Cell) -> None:
    """Raise UserError for unknown parameters of a search, and for values that cannot work."""
    parse(cell.allocation.parameters)


def check_schedules(cell: Cell) -> None:
    """Raise UserError when no schedule removes as much as the ratio says."""
    check_ratio(cell)
    if layer := _known_layer(cell):
        settings = {**asdict(cell.allocation), "ratio": cell.ratio}
        search = search_settings(settings, {"layers": {0: layer, 1: layer}}, cell.seed)
        evolution.check(search.problem, search.evolution)


SEARCH = Kind(
    name="search",
    work=search,
    step=_search_step,
    checks=(check_search_parameters, check_schedules),
    reads=Reads.MODEL,
    units=_candidates,
)


def _reconstruction_step(builder: Builder, cell: Cell) -> Step:
    """The step that compares all choices of experts on the calibration set, without scores."""
    text = builder.seeded(cell.calibration, cell.seed)
    return _running("reconstruction", builder, cell, text, _inputs(builder, cell))


def reconstruction(job: Job) -> None:
    """Find the plan that reproduces the layers' outputs best, by trying all choices in each layer."""
    from moe_lab.pruning.plan import Plan
    from moe_lab.search.reconstruction import COLUMNS, reconstruct

    model, settings = _facts(job), job.settings["allocation"]
    best = reconstruct(
        engine(job).read,
        facts=model,
        ratio=allocation.routed_ratio(settings["ratio"], settings["ratio_basis"], model),
        multiple_of=settings["multiple_of"],
        **settings["parameters"],
    )
    counts = {layer: about["n_experts"] for layer, about in model["layers"].items()}
    about = {"allocation": settings, "model_sha256": model.get("sha256"), **protection.provenance(model)}
    result = Plan(best.kept, counts, about)
    result.check(model["layers"])
    result.save(job.output("plan.json"))
    write_table(job.output("errors.parquet"), COLUMNS, best.errors)


def check_choices(cell: Cell) -> None:
    """Raise UserError when the ratio is not feasible, or allows more choices than the limit."""
    check_ratio(cell)
    if layer := _known_layer(cell):
        limit = {name: value for name, value in cell.allocation.parameters.items() if name == "limit"}
        check_removals({0: layer}, cell.ratio, multiple_of=cell.allocation.multiple_of, **limit)


RECONSTRUCTION = Kind(
    name="reconstruction",
    work=reconstruction,
    step=_reconstruction_step,
    checks=(check_choices,),
    reads=Reads.MODEL,
    reads_text=True,
    checkpoint_reads=1,
)


def _sequential_step(builder: Builder, cell: Cell) -> Step:
    """The step that makes a plan layer by layer; always streamed, since it never needs more than one layer."""
    criterion, plugged = scoring(cell)
    text = replace(builder.seeded(cell.calibration, cell.seed), engine="streamed")
    inputs = {"model": builder.model(cell.model)}
    weights = [need for need in criteria.get(cell.criterion.name).needs if not KINDS[need].reads_text]
    for need in (*weights, *evidence_of(cell)):
        inputs[need] = builder.evidence(need, cell)
    part = _allocation_part(builder, cell)
    return Step(
        "sequential",
        _label(cell),
        {"allocation": part, "criterion": criterion, "text": builder.text_part(text)},
        inputs,
        {**builder.runtime(model=cell.model, text=text), **plugged},
    )


def sequential(job: Job) -> None:
    """Make a plan layer by layer: each layer is scored on the output of the pruned layers below it.

    Each layer loses whole experts as by allocation=uniform, or channels as by allocation=layerwise.
    """
    from moe_lab.pruning.plan import make_channel_plan, make_plan
    from moe_lab.search.sequential import prune_sequentially
    from moe_lab.statistics.sums import by_layer

    passes = Streamed(job)
    model = _facts(job)
    weights = by_layer(sums(job, besides=["statistics"]).values())
    settings, criterion = job.settings["allocation"], job.settings["criterion"]
    of_channels = criteria.get(criterion["criterion"]).granularity == "channel"

    def choose(layer: int, sums: Any) -> Any:
        here = {layer: model["layers"][layer]}
        scored = score(criterion, {layer: {**weights.get(layer, {}), **sums}}, here)
        if not of_channels:
            remove = allocation.allocate({**settings, "name": "uniform"}, here, scored, model=model)
            return make_plan(scored, remove, here, provenance={})
        keep = allocation.budgets({**settings, "name": "layerwise"}, here, scored, model=model)
        return make_channel_plan(scored, keep, here, zero_expert=allocation.zero_expert(settings), provenance={})

    result = prune_sequentially(
        passes.model,
        passes.text,
        choose,
        fingerprint=job.settings,
        out=Path(job.partial),
        budget=passes.budget,
        provenance={**job.settings, "model_sha256": model.get("sha256"), **protection.provenance(model)},
    )
    result.check(model["layers"])
    result.save(job.output("plan.json"))


def check_sequential(cell: Cell) -> None:
    """Raise UserError unless the criterion reads forward statistics and, besides them, only weights.

    Nothing else is known of a layer right after the layers below it were pruned.
    """
    fitting = [name for name, about in criteria.CRITERIA.items() if _fits_sequential(about.needs)]
    if (name := cell.criterion.name) not in fitting:
        raise UserError(
            f"allocation=sequential scores each layer by its forward statistics, and criterion={name} reads "
            f"{' and '.join(criteria.get(name).needs) or 'none'}: expected one of {', '.join(fitting)}"
        )


def _fits_sequential(needs: Sequence[str]) -> bool:
    return "statistics" in needs and not any(KINDS[need].reads_text for need in needs if need != "statistics")


SEQUENTIAL = Kind(
    name="sequential",
    work=sequential,
    step=_sequential_step,
    checks=(check_sequential, check_ratio, check_layout),
    reads=Reads.MODEL,
    reads_text=True,
    checkpoint_reads=1,
)
