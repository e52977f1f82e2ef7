"""Steps that make a plan: which experts, and which of their channels, are kept."""

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
from moe_lab.study.steps.files import STATISTICS, Files, engine, read_text
from moe_lab.study.steps.passes import Facts, Loaded, loaded_as
from moe_lab.study.steps.scores import (
    CHANNEL_SCORES,
    Scores,
    chance_and_gate,
    evidence,
    evidence_of,
    plugged,
    score,
)

TIES = "ties.json"
"""File of a plan with the scores that were equal at the cut: layer -> number of experts, or
channels."""


def _known_layer(cell: Cell) -> dict[str, int] | None:
    """Facts of a layer that config.json has, if any. The step itself checks groups of experts, so
    one group is assumed here."""
    shape = expert_shape(cell.model)
    return {**shape, "n_group": 1, "topk_group": 1} if shape else None


def _settings(cell: Cell) -> dict[str, Any]:
    return {**vars(cell.allocation), "ratio": cell.ratio}


def check_ratio(cell: Cell) -> None:
    """Raise UserError when the ratio is not feasible."""
    if layer := _known_layer(cell):
        allocation.check_fits(
            _settings(cell), {0: layer}, criteria.get(cell.criterion.name).granularity
        )


def removed_share(cell: Cell) -> float:
    """The share of whole experts that is removed for the cell's ratio; the ratio itself where that
    is not known before the plan is made, and for channels, of which there are so many that hardly
    anything is rounded."""
    layer = _known_layer(cell)
    is_listed = cell.allocation.name == "list"
    if layer is None or is_listed or criteria.get(cell.criterion.name).granularity == "channel":
        return cell.ratio
    (limit,) = limits({0: layer}, cell.allocation.multiple_of).values()
    return 1 - limit.retained_at(cell.ratio) / limit.count


def check_engine(cell: Cell) -> None:
    """Raise UserError for calibration.engine=streamed with an allocation that needs the whole model
    in memory. Such an allocation runs the rest of the model again for every candidate."""
    if cell.calibration.engine != "streamed":
        return
    name = cell.allocation.name
    steps = [allocation.get(name).step, *(need for need in evidence_of(cell) if need != "by")]
    if any(KINDS[step].whole_model for step in steps):
        raise UserError(
            f"allocation={name} compares whole models, and calibration.engine=streamed has one "
            "decoder layer in memory: expected calibration.engine=resident, or an allocation from "
            "sums, such as uniform"
        )


def check_layout(cell: Cell) -> None:
    """Raise UserError when the plan needs the channels of experts that are stored in a way in which
    they have none.

    Checked only where the type of the model is known without loading it; a plan checks again when
    it meets the model.
    """
    if drops_whole_experts(cell) or not (
        reason := family_of(config_of(cell.model).get("model_type")).unfit
    ):
        return
    setting = f"criterion={cell.criterion.name}"
    if cell.allocation.replacement != "none":
        setting = f"allocation.replacement={cell.allocation.replacement}"
    raise UserError(
        f"{setting} changes channels of experts, and those of model={cell.model.name} {reason}: "
        "expected a criterion of whole experts and allocation.replacement=none"
    )


def check_plan_file(cell: Cell) -> None:
    """Raise UserError when allocation.path is a plan that still has to be aligned, or one of
    another model. The model is checked only if it is a folder on this machine; the step checks
    again."""
    plan = plan_in(cell.allocation)
    folder = Path(resolve(cell.model.path)).expanduser()
    if plan is None:
        return
    if cell.allocation.replacement == "none":  # otherwise, a step of its own aligns it
        plan.check_aligned()
    if plan.provenance.get("model_sha256") and folder.is_dir():
        plan.check_origin([("model_sha256", partial(fingerprint, folder))], cell.model.path)


def plan_in(settings: AllocationConfig) -> Any:
    """The plan in the file allocation.path; None without a file, and for a list of numbers."""
    from moe_lab.pruning.plan import Plan

    path = settings.path
    return Plan.load(path) if path is not None and list_file.is_plan(list_file.read(path)) else None


def drops_whole_experts(cell: Cell) -> bool:
    """Whether the cell's plan removes experts from the router and keeps all channels of the
    others."""
    if cell.allocation.replacement != "none":
        return False
    if plan := plan_in(cell.allocation):
        return not plan.has_channels
    return criteria.get(cell.criterion.name).granularity == "expert"


def check_schedules(cell: Cell) -> None:
    """Raise UserError for unknown parameters of a search and values that cannot work, and when no
    schedule removes as much as the ratio says."""
    from moe_lab.search.evolution import parse, space_to_search

    parameters = parse(cell.allocation.parameters)
    check_ratio(cell)
    if layer := _known_layer(cell):
        space_to_search(_settings(cell), {"layers": {0: layer, 1: layer}}, parameters)


def check_choices(cell: Cell) -> None:
    """Raise UserError when the ratio is not feasible, or allows more choices than the limit."""
    check_ratio(cell)
    if layer := _known_layer(cell):
        limit = {
            name: value for name, value in cell.allocation.parameters.items() if name == "limit"
        }
        shapes.check_removals(
            {0: layer}, cell.ratio, multiple_of=cell.allocation.multiple_of, **limit
        )


def check_sequential(cell: Cell) -> None:
    """Raise UserError unless the criterion reads forward statistics and, besides them, only
    weights. Nothing else is known of a layer right after the layers below it were pruned."""

    def fits(needs: Sequence[str]) -> bool:
        return "statistics" in needs and not any(
            KINDS[need].reads_text for need in needs if need != "statistics"
        )

    fitting = [name for name, criterion in criteria.CRITERIA.items() if fits(criterion.needs)]
    if (name := cell.criterion.name) not in fitting:
        raise UserError(
            "allocation=sequential scores each layer by its forward statistics, and "
            f"criterion={name} reads {' and '.join(criteria.get(name).needs) or 'none'}: expected "
            f"one of {', '.join(fitting)}"
        )


class PlanRequest(StepFields):
    """The plan that a cell wants, whatever step makes it."""

    allocation: IdentifiedAllocation
    ratio: float
    evidence: dict[str, Step]
    """What the allocation reads besides the cell's scores: role -> step."""
    name: str
    """Label of the step."""
    runtime = frozenset({"name"})

    @property
    def merges_experts(self) -> bool:
        """Whether experts that are dropped are merged into others, so that the pruned model has
        weights of its own."""
        return self.allocation.replacement in GROUPINGS

    @property
    def allocated(self) -> dict[str, Any]:
        """The allocation that identifies the step, and the ratio. Files count by the content they
        had then."""
        return {**self.identity_entries["allocation"].value, "ratio": self.ratio}

    def facts_of(self, model: Facts, files: Files) -> dict[str, Any]:
        """The facts of a model, with the experts that the plan must keep."""
        facts = files.facts(model)
        if self.allocated["protect"] is None:
            return facts
        from moe_lab.allocation import protection
        from moe_lab.statistics import read

        largest = read(
            files.path(self.evidence["statistics"], STATISTICS), only=protection.STATISTIC
        )
        return protection.with_protected(self.allocated, facts, largest)

    def origin(self, model: Mapping[str, Any]) -> dict[str, Any]:
        """Provenance of the plan. `model`: the facts of the model."""
        origin = {"allocation": self.allocated, "model_sha256": model["sha256"]}
        if self.allocated["protect"] is not None:
            from moe_lab.allocation import protection

            origin |= protection.provenance(model)
        return origin


def plan_request(cell: Cell) -> PlanRequest:
    """The plan that a cell wants."""
    chosen = cell.allocation
    where = "" if chosen.name == "uniform" else f"-{chosen.name}"
    where += f"-{chosen.replacement}" if chosen.replacement != "none" else ""
    where += "-protected" if chosen.protect is not None else ""
    name = f"{cell.model.name}-{cell.calibration.name}-{cell.criterion.name}{where}-{cell.ratio:g}"
    needed = {need: evidence(need, cell) for need in evidence_of(cell)}
    return PlanRequest(IdentifiedAllocation.of(chosen), cell.ratio, needed, name)


def save_plan(
    plan: Any, model: Mapping[str, Any], files: Files, ties: Mapping[int, int] | None = None
) -> None:
    """Write a plan, if it fits the model with these facts. `ties`: as `pruning.plan.ties`, if there
    are any."""
    plan.check(model["layers"])
    plan.save(files.out / "plan.json")
    if ties:
        write_sealed(files.out / TIES, {str(layer): count for layer, count in ties.items()})


Checks = tuple[Callable[[Cell], None], ...]
"""Functions that raise UserError for a cell whose plan cannot be made."""


class FromScores(Step):
    """A plan from scores, without running the model. Decides how many experts each layer loses, and
    which; or how many channels each expert loses, and which."""

    kind = "plan"
    small = True
    checks: ClassVar[Checks] = (check_ratio, check_layout)
    request: PlanRequest
    facts: Facts
    scores: Scores

    def label(self) -> str:
        return self.request.name

    def resources(self) -> Resources:
        return Resources(pace=[self.facts.id], pack="short")

    @classmethod
    def of(cls, cell: Cell) -> Self:
        """The plan of a cell."""
        return cls(
            plan_request(cell), loaded_as(cell.model).facts, Scores.of(cell), plugins=plugged(cell)
        )

    def work(self, files: Files) -> None:
        from safetensors.numpy import load

        from moe_lab.pruning.selection import plan_from_scores, ties

        model = self.request.facts_of(self.facts, files)
        about = {**self.request.origin(model), "scores": self.scores.folder.rpartition("/")[2]}
        settings = {
            **self.request.allocated,
            "path": self.request.allocation.path,
        }  # the identity has the content of the file
        evidence: dict[str, Any] = files.sums(self.request.evidence)
        if "by" in self.request.evidence:
            evidence["by"] = files.expert_scores(self.request.evidence["by"])
        granularity = criteria.get(self.scores.criterion.name).granularity
        if granularity == "channel":
            channels = load(files.read(self.scores, CHANNEL_SCORES))
            scored: dict[int, Any] = {int(layer): values for layer, values in channels.items()}
        else:
            scored = files.expert_scores(self.scores)
        plan = plan_from_scores(settings, scored, model["layers"], evidence, provenance=about)
        tied = ties(plan, scored, model["layers"])
        # it passed as an allocation: use it unchanged
        if given := plan_in(self.request.allocation):
            plan = given
            tied = {}
            plan.check_origin([("model_sha256", lambda: str(model["sha256"]))], "this model")
        save_plan(plan, model, files, tied)
        if granularity == "channel" and plan.has_channels:
            masks = {
                number: layer.channels
                for number, layer in plan.layers.items()
                if layer.channels is not None
            }
            files.table("budgets.parquet", results.BUDGETS, tables.budgets(scored, masks))


class Search(Step):
    """A plan by evolutionary search, which starts from scores and compares candidates on a text;
    and its history."""

    kind = "search"
    small = True
    whole_model = True
    checks: ClassVar[Checks] = (check_schedules,)
    loaded: Loaded
    text: IdentifiedText
    request: PlanRequest
    scores: Scores
    seed: int

    def label(self) -> str:
        return self.request.name

    def resources(self) -> Resources:
        """P + (T - 1)(P - m) candidates, each on the text (P: population, T: generations, m:
        elites)."""
        from moe_lab.search.evolution import parse

        search = parse(self.request.allocation.parameters)
        candidates = search.population + (search.generations - 1) * (
            search.population - search.elites
        )
        run = text_pass(self.loaded.model, self.text, self.loaded.pace, engine="resident")
        return run._replace(units=candidates * run.units)

    @classmethod
    def of(cls, cell: Cell) -> Self:
        """The search of a cell, on its search text."""
        text = IdentifiedText.of(cell.texts["search"])
        return cls(loaded_as(cell.model), text, plan_request(cell), Scores.of(cell), cell.seed)

    def work(self, files: Files) -> None:
        from moe_lab.search.run import search as run

        network, tokenizer = files.models.loaded(self.loaded.model)
        run(
            network,
            tokenizer,
            facts=self.request.facts_of(self.loaded.facts, files),
            scores=files.expert_scores(self.scores),
            settings=self.request.allocated,
            text=self.text,
            out=files.out,
            partial=files.partial,
            seed=self.seed,
        )


class Reconstruction(Step):
    """The plan that reproduces the layers' outputs best, by trying all choices of experts in each
    layer."""

    kind = "reconstruction"
    small = True
    reads_text = True
    checks: ClassVar[Checks] = (check_choices,)
    loaded: Loaded
    text: IdentifiedText
    request: PlanRequest
    seed: int

    def label(self) -> str:
        return self.request.name

    def resources(self) -> Resources:
        return text_pass(self.loaded.model, self.text, self.loaded.pace)

    @classmethod
    def of(cls, cell: Cell) -> Self:
        """The plan of a cell, on its calibration set."""
        text = IdentifiedText.of(cell.calibration)
        return cls(loaded_as(cell.model), text, plan_request(cell), cell.seed)

    def work(self, files: Files) -> None:
        from moe_lab.pruning.plan import Plan
        from moe_lab.search.reconstruction import COLUMNS, reconstruct

        model = self.request.facts_of(self.loaded.facts, files)
        settings = self.request.allocated
        best = reconstruct(
            engine(self.loaded.model, self.text, files).read,
            facts=model,
            ratio=settings["ratio"],
            multiple_of=settings["multiple_of"],
            **settings["parameters"],
        )
        counts = {layer: facts["n_experts"] for layer, facts in model["layers"].items()}
        plan = Plan.of_experts(best.retained, counts, self.request.origin(model))
        save_plan(plan, model, files)
        files.table("errors.parquet", COLUMNS, best.errors)


class Sequential(Step):
    """A plan made layer by layer: each layer is scored on the output of the pruned layers below it.

    Each layer loses whole experts as by allocation=uniform, or channels as by allocation=layerwise.
    It is always streamed, since it never needs more than one layer.
    """

    kind = "sequential"
    small = True
    reads_text = True
    checks: ClassVar[Checks] = (check_sequential, check_ratio, check_layout)
    loaded: Loaded
    text: IdentifiedText
    request: PlanRequest
    criterion: IdentifiedCriterion
    sums: dict[str, Step]
    """Sums over weights that the criterion reads."""
    gate: str | None
    seed: int | None

    def label(self) -> str:
        return self.request.name

    def resources(self) -> Resources:
        return text_pass(self.loaded.model, self.text, self.loaded.pace, engine="streamed")

    @classmethod
    def of(cls, cell: Cell) -> Self:
        """The plan of a cell, on its calibration set."""
        needs = [
            need for need in criteria.get(cell.criterion.name).needs if not KINDS[need].reads_text
        ]
        sums = {need: evidence(need, cell) for need in needs}
        text = IdentifiedText.of(cell.calibration)
        criterion = IdentifiedCriterion.of(cell.criterion)
        common = loaded_as(cell.model), text, plan_request(cell)
        return cls(*common, criterion, sums, *chance_and_gate(cell), plugins=plugged(cell))

    def work(self, files: Files) -> None:
        from moe_lab.models.streamed import open_streamed
        from moe_lab.pruning.selection import plan_from_scores, ties
        from moe_lab.search.sequential import prune_sequentially
        from moe_lab.statistics import merge_passes

        streamed, tokenizer = open_streamed(self.loaded.model)
        model = self.request.facts_of(self.loaded.facts, files)
        read = {
            role: step
            for role, step in {**self.sums, **self.request.evidence}.items()
            if role != "statistics"
        }
        weights = merge_passes(files.sums(read).values())
        granularity = criteria.get(self.criterion.name).granularity
        settings = {
            **self.request.allocated,
            "name": "uniform" if granularity == "expert" else "layerwise",
        }

        tied: dict[int, int] = {}

        def choose(layer: int, sums: Any) -> Any:
            here = {layer: model["layers"][layer]}
            scored = score(self, {layer: {**weights.get(layer, {}), **sums}}, here)
            plan = plan_from_scores(settings, scored, here, {}, provenance={})
            tied.update(ties(plan, scored, here))
            return plan

        plan = prune_sequentially(
            streamed,
            read_text(self.text, tokenizer, files),
            choose,
            out=files.partial,
            provenance={
                "criterion": self.settings["criterion"],
                "text": self.settings["text"],
                **self.request.origin(model),
            },
        )
        save_plan(plan, model, files, tied)
