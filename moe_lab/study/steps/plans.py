"""Steps that make a plan, which determines the retained experts and channels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, Self

import numpy

from moe_lab import allocation, criteria, result_files
from moe_lab.allocation import IdentifiedAllocation, list_file, protection, shapes
from moe_lab.allocation.grouping import GROUPINGS, required_passes
from moe_lab.allocation.problem import limits
from moe_lab.calibration import IdentifiedText
from moe_lab.config import AllocationConfig
from moe_lab.criteria import IdentifiedCriterion
from moe_lab.errors import UserError
from moe_lab.grid import Cell
from moe_lab.json_files import write_sealed
from moe_lab.models.config_json import config_of, expert_shape
from moe_lab.models.families import family_of
from moe_lab.models.files import fingerprint
from moe_lab.paths import resolve
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.selection import count_ties, plan_from_scores
from moe_lab.statistics import FUNCTIONS, merge_passes, read
from moe_lab.study.resources import (
    Resources,
    channel_product_bytes,
    expert_weight_bytes,
    no_bytes,
    text_pass,
)
from moe_lab.study.step import KINDS, Step, StepFields
from moe_lab.study.steps import tables
from moe_lab.study.steps.files import STATISTICS, Files, read_text, text_passes
from moe_lab.study.steps.passes import Facts, ModelIdentity, loaded_field
from moe_lab.study.steps.scores import (
    CHANNEL_SCORES,
    Scores,
    gate_and_seed,
    input_roles,
    input_step,
    plan_kinds,
    plugin_locations,
    score,
)

TIES = "ties.json"
"""File of a plan: layer -> number of experts, or channels, whose scores are equal at the cut."""


def _layer_facts(cell: Cell) -> dict[str, int] | None:
    """Facts of an MoE layer of the model: "n_experts", "top_k", "n_group", "topk_group" and, if
    known, "width". None if "n_experts" and "top_k" are not known yet."""
    shape = expert_shape(cell.model)
    # the step that makes the plan reads the true n_group and topk_group
    return {**shape, "n_group": 1, "topk_group": 1} if shape else None


def _settings_with_ratio(cell: Cell) -> dict[str, Any]:
    return {**vars(cell.allocation), "ratio": cell.ratio}


def check_ratio(cell: Cell) -> None:
    """Raise UserError when the model cannot be pruned by the cell's ratio."""
    if facts := _layer_facts(cell):
        # layer 0 stands for all layers, which are assumed to be equal
        allocation.check_fits(
            _settings_with_ratio(cell), {0: facts}, criteria.get(cell.criterion.name).granularity
        )


def removed_share(cell: Cell) -> float:
    """The share of experts that the cell's plan removes: the ratio, rounded to whole experts. It is
    the ratio itself for channels, for allocation=list, and while the number of experts is not
    known."""
    facts = _layer_facts(cell)
    is_listed = cell.allocation.name == "list"
    if facts is None or is_listed or criteria.get(cell.criterion.name).granularity == "channel":
        return cell.ratio
    # layer 0 stands for all layers, which are assumed to be equal
    layer_limits = limits({0: facts}, cell.allocation.multiple_of)[0]
    return 1 - layer_limits.retained_at(cell.ratio) / layer_limits.n_experts


def check_engine(cell: Cell) -> None:
    """Raise UserError when the cell has calibration.engine=streamed, and the plan needs a step that
    must have the whole model in memory."""
    if cell.calibration.engine != "streamed":
        return
    if any(kind.whole_model for kind in plan_kinds(cell)):
        raise UserError(
            f"allocation={cell.allocation.name} compares whole models, and "
            "calibration.engine=streamed has one decoder layer in memory: expected "
            "calibration.engine=resident, or an allocation from sums, such as uniform"
        )


def check_channels_removable(cell: Cell) -> None:
    """Raise UserError when the cell's plan would change channels of experts, but the experts of the
    model's family do not allow this."""
    if drops_whole_experts(cell):
        return
    # such as "have biases"
    reason = family_of(config_of(cell.model).get("model_type")).channel_obstacle
    if not reason:
        return
    setting = f"criterion={cell.criterion.name}"
    if cell.allocation.replacement != "none":
        setting = f"allocation.replacement={cell.allocation.replacement}"
    raise UserError(
        f"{setting} changes channels of experts, and those of model={cell.model.name} {reason}: "
        "expected a criterion of whole experts and allocation.replacement=none"
    )


def check_plan_file(cell: Cell) -> None:
    """Raise UserError when the plan in the file allocation.path merges experts whose channels are
    not matched to each other yet, or was made for another model. The models are compared only if
    the cell's model is a folder on this machine."""
    plan = plan_in(cell.allocation.path)
    if plan is None:
        return
    folder = Path(resolve(cell.model.path)).expanduser()
    plan.check_aligned()
    if plan.provenance.get("model_sha256") and folder.is_dir():
        plan.check_origin([("model_sha256", partial(fingerprint, folder))], cell.model.path)


def plan_in(path: str | None, layers: Mapping[int, Mapping[str, Any]] | None = None) -> Any:
    """The plan (a `Plan`) in the file `path`, or None if the file has numbers of experts instead
    of a plan. A file with retained experts is a plan for a model with these `layers` (layer ->
    facts); without `layers`, the plan is None."""
    content = {} if path is None else list_file.read(path)
    if path is not None and list_file.is_plan(content):
        return Plan.load(path)
    if layers is None or list_file.is_schedule(content):
        return None
    retained = {int(layer): sorted(experts) for layer, experts in content.items()}
    return Plan.of_experts(retained, {layer: facts["n_experts"] for layer, facts in layers.items()})


def trial_allocation(cell: Cell) -> AllocationConfig:
    """A rule that needs no sums, whose plans can be exported if those of the cell can be."""
    settings = cell.allocation
    granularity = criteria.get(cell.criterion.name).granularity
    # what replaces dropped experts is stored in layers that differ
    is_uneven = (
        granularity in allocation.get(settings.name).uneven or settings.replacement != "none"
    )
    name = "global" if is_uneven else "uniform"
    return AllocationConfig(
        name=name if settings.path is None else "list",
        multiple_of=settings.multiple_of,
        path=settings.path,
        # experts that are merged are tried as dropped ones
        replacement="none" if settings.replacement in GROUPINGS else settings.replacement,
    )


def trial_plan(cell: Cell, layers: Mapping[int, Mapping[str, Any]]) -> Any:
    """A `Plan` by the `trial_allocation` of the cell: from its file, or else from the scores in the
    file of the cell's criterion, or from random ones. `layers`: layer -> facts. UserError for a
    file that does not fit a model with these layers."""
    rule = trial_allocation(cell)
    if cell.criterion.name in criteria.FROM_FILE:
        scores = score(cell, {}, layers)
    else:
        of_channels = criteria.get(cell.criterion.name).granularity == "channel"
        sizes = ("n_experts", "width") if of_channels else ("n_experts",)
        scores = {
            layer: numpy.random.default_rng(layer).random([facts[size] for size in sizes])
            for layer, facts in layers.items()
        }
    if plan := plan_in(rule.path, layers):
        plan.check(layers)
        return plan
    sums = {
        layer: {"tokens": [0], "output_sum": numpy.zeros((facts["n_experts"], facts["hidden"]))}
        for layer, facts in layers.items()
    }
    settings = {**vars(rule), "ratio": cell.ratio}
    return plan_from_scores(settings, scores, layers, {"statistics": sums}, provenance={})


def drops_whole_experts(cell: Cell) -> bool:
    """Whether the cell's plan drops whole experts and does nothing else."""
    if cell.allocation.replacement != "none":
        return False
    if plan := plan_in(cell.allocation.path):
        return not plan.has_channels  # merged and null experts are False rows of channels
    return criteria.get(cell.criterion.name).granularity == "expert"


def check_schedules(cell: Cell) -> None:
    """Raise UserError for invalid parameters of an evolutionary search, and when no candidate of
    the search can remove the share `cell.ratio` of the experts."""
    from moe_lab.search.evolution import parse, space_to_search

    parameters = parse(cell.allocation.parameters)
    check_ratio(cell)
    if facts := _layer_facts(cell):
        # called only for its UserErrors; two layers, as a search moves removals between layers
        space_to_search(_settings_with_ratio(cell), {"layers": {0: facts, 1: facts}}, parameters)


def check_choices(cell: Cell) -> None:
    """Raise UserError when the model cannot be pruned by the cell's ratio, or when there are more
    than allocation.parameters.limit ways to choose the removed experts of a layer."""
    check_ratio(cell)
    if facts := _layer_facts(cell):
        # empty if "limit" is not set, so that the default applies
        limit_argument = {
            name: value for name, value in cell.allocation.parameters.items() if name == "limit"
        }
        # called only for its UserError; layer 0 stands for all layers
        shapes.removals_within_limit(
            {0: facts}, cell.ratio, multiple_of=cell.allocation.multiple_of, **limit_argument
        )


def check_sequential(cell: Cell) -> None:
    """Raise UserError unless the criterion needs forward statistics, and needs no other sums over a
    text. Only forward statistics are computed again once earlier layers are pruned."""

    def can_use(needs: Sequence[str]) -> bool:
        return "statistics" in needs and not any(
            KINDS[need].reads_text for need in needs if need != "statistics"
        )

    usable = [known for known, criterion in criteria.CRITERIA.items() if can_use(criterion.needs)]
    if (name := cell.criterion.name) not in usable:
        raise UserError(
            "allocation=sequential scores each layer by its forward statistics, and "
            f"criterion={name} reads {' and '.join(criteria.get(name).needs) or 'none'}: expected "
            f"one of {', '.join(usable)}"
        )


class PlanSetup(StepFields):
    """Settings and input steps of a cell's plan."""

    allocation: IdentifiedAllocation
    ratio: float
    evidence: dict[str, Step]
    """Role -> input step that the allocation reads besides the cell's scores."""
    name: str
    """Label of the step."""
    merges_experts: bool = False
    """Whether dropped experts are merged into retained ones."""
    runtime = ("name", "merges_experts")

    @property
    def allocation_settings(self) -> dict[str, Any]:
        """Name of a setting -> value: the ratio, and the settings of the allocation that identify
        the step. The value of "path" is a digest of the content of the file."""
        return {**self.identity_entries["allocation"].value, "ratio": self.ratio}

    def facts_of(self, facts_step: Facts, files: Files) -> dict[str, Any]:
        """The result of `facts_step`. With allocation.protect, the facts of each layer also have
        the key "protected": ids of experts that the plan must retain."""
        facts = files.facts(facts_step)
        if self.allocation_settings["protect"] is None:
            return facts
        statistics = read(
            files.path(self.evidence["statistics"], STATISTICS), only=protection.STATISTIC
        )
        return protection.add_super_experts(self.allocation_settings, facts, statistics)

    def origin(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Provenance of the plan: settings of the allocation, the hash of the model's files and,
        with allocation.protect, the ids of protected experts. `facts`: the result of `facts_of`."""
        return {
            "allocation": self.allocation_settings,
            "model_sha256": facts["sha256"],
            **protection.protected_entry(facts),
        }


def plan_setup(cell: Cell) -> PlanSetup:
    """Settings, input steps and label of a cell's plan."""
    settings = cell.allocation
    parts = [cell.model.name, cell.calibration.name, cell.criterion.name]
    if settings.name != "uniform":
        parts.append(settings.name)
    if settings.replacement != "none":
        parts.append(settings.replacement)
    if settings.protect is not None:
        parts.append("protected")
    name = "-".join([*parts, f"{cell.ratio:g}"])
    inputs = {role: input_step(role, cell) for role in input_roles(cell)}
    merges = settings.replacement in GROUPINGS
    if plan := plan_in(settings.path):
        merges = merges or bool(plan.merged_layers)
    return PlanSetup(IdentifiedAllocation.of(settings), cell.ratio, inputs, name, merges)


def save_plan(
    plan: Any, facts: Mapping[str, Any], files: Files, ties: Mapping[int, int] | None = None
) -> None:
    """Write a plan, and `ties` if there are any. UserError if the plan does not fit the model.
    `ties`: layer -> number of experts or channels with tied scores."""
    plan.check(facts["layers"])
    plan.save(files.out / "plan.json")
    if ties:
        write_sealed(files.out / TIES, {str(layer): count for layer, count in ties.items()})


Checks = tuple[Callable[[Cell], None], ...]
"""Functions that raise UserError for a cell whose plan cannot be made."""


class CellPlan(Step):
    """A step that makes the plan of a cell."""

    small = True
    checks: ClassVar[Checks]
    setup: PlanSetup

    def label(self) -> str:
        return self.setup.name


class FromScores(CellPlan):
    """A plan made from scores, or read from a file, without running the model."""

    kind = "plan"
    checks = (check_ratio, check_channels_removable)
    facts: Facts
    scores: Scores

    @classmethod
    def of(cls, cell: Cell) -> Self:
        return cls(
            plan_setup(cell),
            loaded_field(cell.model).facts,
            Scores.of(cell),
            plugins=plugin_locations(cell),
        )

    def work(self, files: Files) -> None:
        """Write the plan made from scores, or the plan in the file allocation.path. For scores of
        channels, also write a table of budgets."""
        from safetensors.numpy import load

        facts = self.setup.facts_of(facts_step=self.facts, files=files)
        origin = {**self.setup.origin(facts), "scores": Path(self.scores.folder).name}
        # `plan_from_scores` reads a schedule; "path" in `allocation_settings` is only a digest
        settings = {**self.setup.allocation_settings, "path": self.setup.allocation.path}
        evidence: dict[str, Any] = files.sums(self.setup.evidence)
        if "by" in self.setup.evidence:
            evidence["by"] = files.expert_scores(self.setup.evidence["by"])
        granularity = criteria.get(self.scores.criterion.name).granularity
        if granularity == "channel":
            channels = load(files.read(self.scores, CHANNEL_SCORES))
            scores: dict[int, Any] = {int(layer): values for layer, values in channels.items()}
        else:
            scores = files.expert_scores(self.scores)
        if plan := plan_in(self.setup.allocation.path, facts["layers"]):
            list_file.check_ratio(plan.removed_share, self.setup.ratio)
            plan.check_origin([("model_sha256", lambda: str(facts["sha256"]))], "this model")
            plan = plan if plan.provenance else replace(plan, provenance=origin)
            tie_counts = {}
        else:
            plan = plan_from_scores(settings, scores, facts["layers"], evidence, provenance=origin)
            tie_counts = count_ties(plan, scores, facts["layers"])
        save_plan(plan, facts, files, tie_counts)
        if granularity == "channel" and plan.has_channels:
            masks = {
                number: layer.channels
                for number, layer in plan.layers.items()
                if layer.channels is not None
            }
            files.table("budgets.parquet", result_files.BUDGETS, tables.budgets(scores, masks))


class Search(CellPlan):
    """A plan that an evolutionary search finds, and the history of the search."""

    kind = "search"
    whole_model = True
    checks = (check_schedules,)
    loaded: ModelIdentity
    text: IdentifiedText
    scores: Scores
    seed: int

    def resources(self) -> Resources:
        """Resources of one pass over the text for each candidate. Elites are not evaluated again in
        the next generation."""
        from moe_lab.search.evolution import parse

        search = parse(self.setup.allocation.parameters)
        candidates = search.population + (search.generations - 1) * (
            search.population - search.elites
        )
        one_pass = text_pass(self.loaded.model, self.text, engine="resident")
        # drafts are written by the whole model
        runs_layers = search.fitness != "spec_dec"
        return one_pass._replace(units=candidates * one_pass.units, runs_layers=runs_layers)

    @classmethod
    def of(cls, cell: Cell) -> Self:
        text = IdentifiedText.of(cell.texts["search"])
        seed = cell.allocation.parameters.get("seed", cell.seed)
        return cls(plan_setup(cell), loaded_field(cell.model), text, Scores.of(cell), seed)

    def work(self, files: Files) -> None:
        from moe_lab.search.run import search

        network, tokenizer = files.models.load(self.loaded.model)
        search(
            network,
            tokenizer,
            facts=self.setup.facts_of(facts_step=self.loaded.facts, files=files),
            scores=files.expert_scores(self.scores),
            settings=self.setup.allocation_settings,
            text=self.text,
            out=files.out,
            partial=files.partial,
            seed=self.seed,
        )


class Reconstruction(CellPlan):
    """The plan whose pruned layers have outputs closest to those of the unpruned layers. All
    possible sets of retained experts are compared in each layer."""

    kind = "reconstruction"
    reads_text = True
    checks = (check_choices,)
    loaded: ModelIdentity
    text: IdentifiedText
    seed: int

    def resources(self) -> Resources:
        return text_pass(self.loaded.model, self.text)

    @classmethod
    def of(cls, cell: Cell) -> Self:
        text = IdentifiedText.of(cell.calibration)
        return cls(plan_setup(cell), loaded_field(cell.model), text, cell.seed)

    def work(self, files: Files) -> None:
        from moe_lab.search.reconstruction import choice_errors

        facts = self.setup.facts_of(facts_step=self.loaded.facts, files=files)
        settings = self.setup.allocation_settings
        errors_by_layer = choice_errors(
            text_passes(self.loaded.model, self.text, files).collect_statistics,
            facts=facts,
            ratio=settings["ratio"],
            multiple_of=settings["multiple_of"],
            **settings["parameters"],
        )
        # the first of equal ones, which drops the lower ids
        retained = {
            layer: min(errors, key=errors.__getitem__) for layer, errors in errors_by_layer.items()
        }
        counts = {number: layer["n_experts"] for number, layer in facts["layers"].items()}
        plan = Plan.of_experts(retained, counts, self.setup.origin(facts))
        save_plan(plan, facts, files)


class Sequential(CellPlan):
    """A plan that is made layer by layer. A layer is scored by its forward statistics when all
    earlier layers are already pruned, and their dropped experts replaced.

    Each layer retains as many experts as with allocation=uniform, or as many channels as with
    allocation=layerwise. The model is always streamed. The channels of merged experts are matched.
    """

    kind = "sequential"
    reads_text = True
    checks = (check_sequential, check_ratio, check_channels_removable)
    loaded: ModelIdentity
    text: IdentifiedText
    criterion: IdentifiedCriterion
    sums: dict[str, Step]
    """Sums over weights that the criterion reads."""
    gate: str | None
    seed: int | None

    def resources(self) -> Resources:
        merges = self.setup.merges_experts
        return text_pass(
            self.loaded.model,
            self.text,
            engine="streamed",
            per_layer=channel_product_bytes if merges else no_bytes,
            extra_bytes=expert_weight_bytes if merges else no_bytes,
        )

    @classmethod
    def of(cls, cell: Cell) -> Self:
        setup = plan_setup(cell)
        # Super experts are those of the unpruned model. Other sums over the text are computed by
        # `work` itself.
        evidence = {
            role: step
            for role, step in setup.evidence.items()
            if not step.reads_text or (role == "statistics" and cell.allocation.protect)
        }
        # without the step of the forward statistics, which `work` computes itself
        weight_steps = {
            kind: input_step(kind, cell)
            for kind in criteria.get(cell.criterion.name).needs
            if not KINDS[kind].reads_text
        }
        text = IdentifiedText.of(cell.calibration)
        criterion = IdentifiedCriterion.of(cell.criterion)
        return cls(
            replace(setup, evidence=evidence),
            loaded_field(cell.model),
            text,
            criterion,
            weight_steps,
            *gate_and_seed(cell),
            plugins=plugin_locations(cell),
        )

    def work(self, files: Files) -> None:
        from moe_lab.models.streamed import open_streamed
        from moe_lab.search.sequential import prune_sequentially

        streamed, tokenizer = open_streamed(self.loaded.model)
        facts = self.setup.facts_of(facts_step=self.loaded.facts, files=files)
        weight_steps = {**self.sums, **self.setup.evidence}
        # statistics of the unpruned model; `choose` gets those of the model pruned so far
        weight_steps.pop("statistics", None)
        weight_sums = merge_passes(files.sums(weight_steps).values())
        granularity = criteria.get(self.criterion.name).granularity
        # allocation=sequential has no rule for a single layer, so `choose` uses one of these two
        settings = {
            **self.setup.allocation_settings,
            "name": "uniform" if granularity == "expert" else "layerwise",
        }

        replacement = settings["replacement"]
        grouping = GROUPINGS.get(replacement)
        tie_counts: dict[int, int] = {}

        def choose(layer: int, sums: Any) -> Any:
            """The plan of a layer. `sums`: sums of the layer over the text, by name."""
            layer_facts = {layer: facts["layers"][layer]}
            all_sums = {layer: {**weight_sums.get(layer, {}), **sums}}
            scores = score(self, all_sums, layer_facts)
            evidence = dict.fromkeys(required_passes(replacement), all_sums)
            plan = plan_from_scores(settings, scores, layer_facts, evidence, provenance={})
            tie_counts.update(count_ties(plan, scores, layer_facts))
            return plan

        plan = prune_sequentially(
            streamed,
            read_text(self.text, tokenizer, files),
            choose,
            hooks=[
                resolve_name(FUNCTIONS[kind])
                for kind in dict.fromkeys(("statistics", *required_passes(replacement)))
                if KINDS[kind].reads_text
            ],
            align=grouping.align if grouping else None,
            out=files.partial,
            provenance={
                "criterion": self.settings["criterion"],
                "text": self.settings["text"],
                **self.setup.origin(facts),
            },
        )
        save_plan(plan, facts, files, tie_counts)
