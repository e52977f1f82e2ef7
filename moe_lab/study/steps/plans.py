"""Steps that make a plan, which determines the retained experts and channels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from moe_lab import allocation, criteria, results
from moe_lab.allocation import IdentifiedAllocation, list_file, shapes
from moe_lab.allocation.grouping import GROUPINGS
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
from moe_lab.study.resources import Resources, text_pass
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
    plugin_locations,
    score,
)

TIES = "ties.json"
"""File of a plan: layer -> number of experts, or channels, whose scores are equal at the cut."""


def _layer_facts(cell: Cell) -> dict[str, int] | None:
    """n_experts, top_k, n_group, topk_group and, if known, width of an MoE layer of the model. They
    are from config.json or `model.expected`; None if neither states n_experts and top_k. n_group
    and topk_group are always 1 here; the step that makes the plan reads the true numbers."""
    shape = expert_shape(cell.model)
    return {**shape, "n_group": 1, "topk_group": 1} if shape else None


def _settings_with_ratio(cell: Cell) -> dict[str, Any]:
    """Name of a setting -> value, for the settings of the cell's allocation and for `ratio`."""
    return {**vars(cell.allocation), "ratio": cell.ratio}


def check_ratio(cell: Cell) -> None:
    """Raise UserError when the model cannot be pruned by the cell's ratio. Nothing is checked while
    `_layer_facts` returns None, because the number of experts is not known yet."""
    if facts := _layer_facts(cell):
        # layer 0 stands for all layers, which are assumed to be equal
        allocation.check_fits(
            _settings_with_ratio(cell), {0: facts}, criteria.get(cell.criterion.name).granularity
        )


def removed_share(cell: Cell) -> float:
    """The share of experts that the cell's plan removes: the ratio, rounded to whole experts.

    The ratio itself is returned for channels, which are so many that rounding hardly matters, and
    if the number of experts is not known yet. It is also returned for allocation=list: the file
    allocation.path has the numbers of experts, and the step that makes the plan compares them with
    the ratio."""
    facts = _layer_facts(cell)
    is_listed = cell.allocation.name == "list"
    if facts is None or is_listed or criteria.get(cell.criterion.name).granularity == "channel":
        return cell.ratio
    # layer 0 stands for all layers, which are assumed to be equal
    layer_limits = limits({0: facts}, cell.allocation.multiple_of)[0]
    return 1 - layer_limits.retained_at(cell.ratio) / layer_limits.n_experts


def check_engine(cell: Cell) -> None:
    """Raise UserError when the cell has calibration.engine=streamed, and the plan needs a step that
    must have the whole model in memory. This is checked for the step that makes the plan, such as
    a search, and for the input steps of the allocation."""
    if cell.calibration.engine != "streamed":
        return
    name = cell.allocation.name
    # "by" stands for the scores of a criterion, and is not a kind of step
    kinds = [allocation.get(name).step, *(need for need in input_roles(cell) if need != "by")]
    if any(KINDS[kind].whole_model for kind in kinds):
        raise UserError(
            f"allocation={name} compares whole models, and calibration.engine=streamed has one "
            "decoder layer in memory: expected calibration.engine=resident, or an allocation from "
            "sums, such as uniform"
        )


def check_channels_removable(cell: Cell) -> None:
    """Raise UserError when the cell's plan would change channels of experts, but the experts of the
    model's family do not allow this. Nothing is checked if config.json is not available. The
    experts are checked again when the plan is applied to the model."""
    if drops_whole_experts(cell):
        return
    # the end of a sentence about the experts, such as "have biases"; None if nothing is in the way
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
    """Check the plan in the file allocation.path. Nothing is checked if the file has no plan.

    Raise UserError when the plan merges experts, but their channels are not matched to each other
    yet ("aligned"). Raise UserError also when the plan was made for another model than the cell's.
    Here, the models are compared only if the cell's model is a folder on this machine. The step
    that makes the cell's plan compares them in any case."""
    plan = plan_in(cell.allocation)
    if plan is None:
        return
    folder = Path(resolve(cell.model.path)).expanduser()
    if cell.allocation.replacement == "none":  # otherwise a further step aligns the plan
        plan.check_aligned()
    if plan.provenance.get("model_sha256") and folder.is_dir():
        # UserError unless `fingerprint(folder)` is the model_sha256 of the plan
        plan.check_origin([("model_sha256", partial(fingerprint, folder))], cell.model.path)


def plan_in(settings: AllocationConfig) -> Any:
    """The plan (a `Plan`) in the file allocation.path. None if allocation.path is null, or if the
    file has a number of experts for each layer instead of a plan."""
    from moe_lab.pruning.plan import Plan

    path = settings.path
    if path is None or not list_file.is_plan(list_file.read(path)):
        return None
    return Plan.load(path)


def drops_whole_experts(cell: Cell) -> bool:
    """Whether the cell's plan drops whole experts and does nothing else. Such a plan merges no
    experts, replaces none by constants, and retains all channels of the other experts."""
    if cell.allocation.replacement != "none":
        return False
    if plan := plan_in(cell.allocation):
        return not plan.has_channels  # a plan that merges or replaces experts also has channels
    return criteria.get(cell.criterion.name).granularity == "expert"


def check_schedules(cell: Cell) -> None:
    """Raise UserError for invalid parameters of an evolutionary search. Raise UserError also when
    no schedule that the search can try removes the share `cell.ratio` of the experts. A schedule is
    a number of experts to remove for each layer."""
    from moe_lab.search.evolution import parse, space_to_search

    parameters = parse(cell.allocation.parameters)
    check_ratio(cell)
    if facts := _layer_facts(cell):
        # Called only for its UserErrors. Layers 0 and 1 stand for all layers, which are assumed to
        # be equal. There are two, as a search moves removals from one layer to another.
        space_to_search(_settings_with_ratio(cell), {"layers": {0: facts, 1: facts}}, parameters)


def check_choices(cell: Cell) -> None:
    """Raise UserError when the model cannot be pruned by the cell's ratio, or when there are more
    than allocation.parameters.limit ways to choose the removed experts of a layer."""
    check_ratio(cell)
    if facts := _layer_facts(cell):
        # {} if the parameter "limit" is not set, so that `removals_within_limit` uses its default
        limit_argument = {
            name: value for name, value in cell.allocation.parameters.items() if name == "limit"
        }
        # called only for its UserError; layer 0 stands for all layers
        shapes.removals_within_limit(
            {0: facts}, cell.ratio, multiple_of=cell.allocation.multiple_of, **limit_argument
        )


def check_sequential(cell: Cell) -> None:
    """Raise UserError unless the criterion needs forward statistics, which the step `statistics`
    computes. The criterion may also need sums over weights, but no other step that reads a text:
    only the forward statistics are computed again once earlier layers are pruned."""

    def can_use(needs: Sequence[str]) -> bool:
        """Whether a criterion can be used. `needs`: kinds of the steps that the criterion needs."""
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
    """Settings and input steps of a cell's plan, for every kind of step that makes a plan."""

    allocation: IdentifiedAllocation
    ratio: float
    evidence: dict[str, Step]
    """Role -> input step that the allocation reads besides the cell's scores."""
    name: str
    """Label of the step."""
    runtime = frozenset({"name"})

    @property
    def merges_experts(self) -> bool:
        """Whether dropped experts are merged into retained ones, which changes weights."""
        return self.allocation.replacement in GROUPINGS

    @property
    def allocation_settings(self) -> dict[str, Any]:
        """Name of a setting -> value: the ratio, and those settings of the allocation that are part
        of the identity of the step. The value of "path" is not a path: it is the digest that the
        content of the file had when the id of the step was computed."""
        return {**self.identity_entries["allocation"].value, "ratio": self.ratio}

    def facts_of(self, facts_step: Facts, files: Files) -> dict[str, Any]:
        """The result of `facts_step`, the step with the facts of the model. With
        allocation.protect, the facts of each layer also have the key "protected": ids of experts
        that the plan must retain."""
        facts = files.facts(facts_step)
        if self.allocation_settings["protect"] is None:
            return facts
        from moe_lab.allocation import protection
        from moe_lab.statistics import read

        statistics = read(
            files.path(self.evidence["statistics"], STATISTICS), only=protection.STATISTIC
        )
        return protection.add_super_experts(self.allocation_settings, facts, statistics)

    def origin(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Provenance of the plan: settings of the allocation, the hash of the model's files and,
        with allocation.protect, the ids of protected experts. `facts`: the facts of the model, from
        `facts_of`."""
        origin = {"allocation": self.allocation_settings, "model_sha256": facts["sha256"]}
        if self.allocation_settings["protect"] is not None:
            from moe_lab.allocation import protection

            origin |= protection.protected_entry(facts)
        return origin


def plan_setup(cell: Cell) -> PlanSetup:
    """The settings and input steps of a cell's plan, and the label of the step that makes the
    plan."""
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
    return PlanSetup(IdentifiedAllocation.of(settings), cell.ratio, inputs, name)


def save_plan(
    plan: Any, facts: Mapping[str, Any], files: Files, ties: Mapping[int, int] | None = None
) -> None:
    """Write a plan, and `ties` if there are any. UserError if the plan does not fit the model.
    `facts`: facts of the model. `ties`: layer -> number of experts or channels with tied scores,
    the result of `pruning.selection.count_ties`."""
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

    def resources(self) -> Resources:
        """Resources of a step that takes seconds. As the time depends on the model, `pace` has the
        id of the step with the facts of the model."""
        return Resources(pace=[self.facts.id], steps_per_job="short")

    @classmethod
    def of(cls, cell: Cell) -> Self:
        """The step that makes a cell's plan."""
        return cls(
            plan_setup(cell),
            loaded_field(cell.model).facts,
            Scores.of(cell),
            plugins=plugin_locations(cell),
        )

    def work(self, files: Files) -> None:
        """Write the plan made from scores. If the file allocation.path has a plan, write that plan
        instead. If the scores are scores of channels and the plan states which channels are
        retained, also write a table of budgets: which share of a layer's channels and of their
        scores is retained."""
        from safetensors.numpy import load

        from moe_lab.pruning.selection import count_ties, plan_from_scores

        facts = self.setup.facts_of(self.facts, files)
        origin = {**self.setup.origin(facts), "scores": Path(self.scores.folder).name}
        # `plan_from_scores` reads the file allocation.path, so it needs the path. In
        # `allocation_settings`, the value of "path" is only a digest.
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
        plan = plan_from_scores(settings, scores, facts["layers"], evidence, provenance=origin)
        tie_counts = count_ties(plan, scores, facts["layers"])
        # If the file allocation.path has a plan, `plan_from_scores` has used only the numbers of
        # experts or channels in it, and has checked them. The plan to write is that of the file.
        if plan_of_file := plan_in(self.setup.allocation):
            plan = plan_of_file
            tie_counts = {}
            # UserError unless facts["sha256"] is the model_sha256 of the plan
            plan.check_origin([("model_sha256", lambda: str(facts["sha256"]))], "this model")
        save_plan(plan, facts, files, tie_counts)
        if granularity == "channel" and plan.has_channels:
            masks = {
                number: layer.channels
                for number, layer in plan.layers.items()
                if layer.channels is not None
            }
            files.table("budgets.parquet", results.BUDGETS, tables.budgets(scores, masks))


class Search(CellPlan):
    """A plan that an evolutionary search finds, and the history of the search. The search starts
    from scores, and evaluates candidates on a text."""

    kind = "search"
    whole_model = True
    checks = (check_schedules,)
    loaded: ModelIdentity
    text: IdentifiedText
    scores: Scores
    seed: int

    def resources(self) -> Resources:
        """Resources of P + (T - 1)(P - m) passes over the text, one for each candidate. P is the
        population, T the number of generations, and m the number of elites. Elites are not
        evaluated again in the next generation."""
        from moe_lab.search.evolution import parse

        search = parse(self.setup.allocation.parameters)
        candidates = search.population + (search.generations - 1) * (
            search.population - search.elites
        )
        one_pass = text_pass(self.loaded.model, self.text, self.loaded.pace, engine="resident")
        return one_pass._replace(units=candidates * one_pass.units)

    @classmethod
    def of(cls, cell: Cell) -> Self:
        """The step that searches for a cell's plan. Candidates are evaluated on the text "search"
        of the cell."""
        text = IdentifiedText.of(cell.texts["search"])
        return cls(plan_setup(cell), loaded_field(cell.model), text, Scores.of(cell), cell.seed)

    def work(self, files: Files) -> None:
        """Search for the plan. Write the plan and the records of the search."""
        from moe_lab.search.run import search

        network, tokenizer = files.models.load(self.loaded.model)
        search(
            network,
            tokenizer,
            facts=self.setup.facts_of(self.loaded.facts, files),
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
        return text_pass(self.loaded.model, self.text, self.loaded.pace)

    @classmethod
    def of(cls, cell: Cell) -> Self:
        """The step that makes a cell's plan on its calibration set."""
        text = IdentifiedText.of(cell.calibration)
        return cls(plan_setup(cell), loaded_field(cell.model), text, cell.seed)

    def work(self, files: Files) -> None:
        """Write the plan whose retained experts reconstruct the outputs of the layers best. Also
        write a table with the error of every set of experts that was compared."""
        from moe_lab.pruning.plan import Plan
        from moe_lab.search.reconstruction import COLUMNS, reconstruct

        facts = self.setup.facts_of(self.loaded.facts, files)
        settings = self.setup.allocation_settings
        result = reconstruct(
            # a function, which `reconstruct` calls once to run the model over the text
            text_passes(self.loaded.model, self.text, files).collect_statistics,
            facts=facts,
            ratio=settings["ratio"],
            multiple_of=settings["multiple_of"],
            **settings["parameters"],
        )
        counts = {number: layer["n_experts"] for number, layer in facts["layers"].items()}
        plan = Plan.of_experts(result.retained, counts, self.setup.origin(facts))
        save_plan(plan, facts, files)
        files.table("errors.parquet", COLUMNS, result.errors)


class Sequential(CellPlan):
    """A plan that is made layer by layer. A layer is scored by its forward statistics when all
    earlier layers are already pruned.

    Each layer retains as many experts as with allocation=uniform, or as many channels as with
    allocation=layerwise. The model is always streamed, since only one layer is needed at a time.
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
        return text_pass(self.loaded.model, self.text, self.loaded.pace, engine="streamed")

    @classmethod
    def of(cls, cell: Cell) -> Self:
        """The step that makes a cell's plan on its calibration set. If the criterion needs sums
        over weights, they are inputs of the step. The forward statistics, which the criterion also
        needs, are computed in the step itself."""
        weight_steps = {
            kind: input_step(kind, cell)
            for kind in criteria.get(cell.criterion.name).needs
            if not KINDS[kind].reads_text
        }
        text = IdentifiedText.of(cell.calibration)
        criterion = IdentifiedCriterion.of(cell.criterion)
        return cls(
            plan_setup(cell),
            loaded_field(cell.model),
            text,
            criterion,
            weight_steps,
            *gate_and_seed(cell),
            plugins=plugin_locations(cell),
        )

    def work(self, files: Files) -> None:
        """Prune the model layer by layer, and write the plan."""
        from moe_lab.models.streamed import open_streamed
        from moe_lab.pruning.selection import count_ties, plan_from_scores
        from moe_lab.search.sequential import prune_sequentially
        from moe_lab.statistics import merge_passes

        streamed, tokenizer = open_streamed(self.loaded.model)
        facts = self.setup.facts_of(self.loaded.facts, files)
        weight_steps = {**self.sums, **self.setup.evidence}
        # the step `statistics` runs the unpruned model; `choose` gets statistics for which all
        # earlier layers are pruned
        weight_steps.pop("statistics", None)
        weight_sums = merge_passes(files.sums(weight_steps).values())
        granularity = criteria.get(self.criterion.name).granularity
        # allocation=sequential has no rule for a single layer, so `choose` uses one of these two
        settings = {
            **self.setup.allocation_settings,
            "name": "uniform" if granularity == "expert" else "layerwise",
        }

        tie_counts: dict[int, int] = {}

        def choose(layer: int, sums: Any) -> Any:
            """The plan of the layer with the number `layer`. `sums`: forward statistics of the
            layer, by name."""
            layer_facts = {layer: facts["layers"][layer]}
            scores = score(self, {layer: {**weight_sums.get(layer, {}), **sums}}, layer_facts)
            plan = plan_from_scores(settings, scores, layer_facts, evidence={}, provenance={})
            tie_counts.update(count_ties(plan, scores, layer_facts))
            return plan

        plan = prune_sequentially(
            streamed,
            read_text(self.text, tokenizer, files),
            choose,
            out=files.partial,
            provenance={
                "criterion": self.settings["criterion"],
                "text": self.settings["text"],
                **self.setup.origin(facts),
            },
        )
        save_plan(plan, facts, files, tie_counts)
