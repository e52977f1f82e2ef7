"""Steps that turn what was measured into scores and plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moe_lab.config import CalibrationConfig
from moe_lab.study.job import Job
from moe_lab.study.kinds import tables
from moe_lab.study.kinds.shared import (
    evidence,
    expert_scores,
    facts,
    is_streamed,
    model_and_tokenizer,
    rows,
    streamed_model,
    sums,
    write_table,
)

CHANNEL_SCORES = "scores.safetensors"


def scores(job: Job) -> None:
    """A score per expert, or per channel; higher means keep."""
    from moe_lab import criteria

    found = _score(job, evidence(job), facts(job)["layers"])
    if criteria.get(job.settings["criterion"]["criterion"]).granularity == "channel":
        from safetensors.numpy import save_file

        save_file({str(layer): values for layer, values in found.items()}, job.output(CHANNEL_SCORES))
        write_table(job.output("expert_concentration.parquet"), tables.CONCENTRATION, tables.concentration(found))
        return
    table = [(layer, expert, float(value)) for layer, values in found.items() for expert, value in enumerate(values)]
    write_table(job.output("scores.parquet"), ("layer", "expert", "score"), table)


def _score(job: Job, inputs: dict[int, dict[str, Any]], layers: dict[int, dict[str, Any]]) -> dict[int, Any]:
    """Layer -> scores by the job's criterion, of the layers whose facts are given, from their sums and weights."""
    from moe_lab import criteria

    settings = job.settings["criterion"]
    return criteria.score(
        settings["criterion"],
        inputs,
        experts={layer: about["n_experts"] for layer, about in layers.items()},
        widths={layer: about["width"] for layer, about in layers.items()},
        gate=settings.get("gate"),
        seed=settings.get("seed"),
        parameters=settings["parameters"],
    )


def family(job: Job) -> None:
    """S(b, alpha, beta) of every expert for all 17 combinations that mean something."""
    from moe_lab import criteria

    table = criteria.family(evidence(job), gate=job.settings["family"]["gate"])
    write_table(job.output("family.parquet"), ("layer", "expert", "b", "alpha", "beta", "score"), table)


def plan(job: Job) -> None:
    """How many experts each layer loses, and which; or how many channels each expert loses, and which."""
    from moe_lab.allocation import listed
    from moe_lab.pruning.plan import Plan, router_limits

    scored = _channel_scores(job)
    made = _channel_plan(job, scored) if scored else _expert_plan(job)
    path = job.runtime["path"]
    if path is not None and listed.is_plan(listed.read(path)):  # which has passed as an allocation: that very plan
        made = Plan.load(path)
        made.check(**router_limits(facts(job)["layers"]))
        if sha256 := facts(job).get("sha256"):  # which facts of older stores lack
            made.check_origin(sha256, "this model")
    made.save(job.output("plan.json"))
    if scored and made.channels:
        write_table(job.output("budgets.parquet"), tables.BUDGETS, tables.budgets(scored, made.channels))


def _channel_scores(job: Job) -> dict[int, Any]:
    """Layer -> scores of its channels (E, I); empty where experts were scored."""
    from safetensors.numpy import load_file

    file = job.input("scores", CHANNEL_SCORES)
    return {int(layer): values for layer, values in load_file(file).items()} if file.exists() else {}


def _expert_plan(job: Job) -> Any:
    from moe_lab.allocation import allocate
    from moe_lab.pruning.plan import make_plan, router_limits

    model = facts(job)
    scored = expert_scores(job)
    remove = allocate(_settings(job), model["layers"], scored, _evidence(job), model)
    return make_plan(scored, remove, **router_limits(model["layers"]), provenance=_provenance(job))


def _channel_plan(job: Job, scored: dict[int, Any]) -> Any:
    from moe_lab.allocation import budgets, zero_expert
    from moe_lab.pruning.plan import make_channel_plan, router_limits

    model, settings = facts(job), _settings(job)
    keep = budgets(settings, model["layers"], scored, _evidence(job), model)
    limits = router_limits(model["layers"])
    return make_channel_plan(scored, keep, zero_expert=zero_expert(settings), **limits, provenance=_provenance(job))


def _settings(job: Job) -> dict[str, Any]:
    """The allocation's settings; the file of allocation=list by its place, where its identity has its content."""
    return {**job.settings["allocation"], "path": job.runtime["path"]}


def _evidence(job: Job) -> dict[str, Any]:
    """What the allocation reads besides the scores, by name: layer -> sums, or another criterion's scores."""
    other = {"by": expert_scores(job, "by")} if "by" in job.inputs else {}
    return {**sums(job), **other}


def _provenance(job: Job) -> dict[str, Any]:
    scores = job.inputs["scores"].rsplit("/", 2)[-1]
    return {"allocation": job.settings["allocation"], "scores": scores, "model_sha256": facts(job).get("sha256")}


def search(job: Job) -> None:
    """A plan found by evolutionary search, with the history of the search."""
    from moe_lab.search.run import search as run

    network, tokenizer = model_and_tokenizer(job)
    run(
        network,
        tokenizer,
        facts=facts(job),
        scores=expert_scores(job),
        settings=job.settings["allocation"],
        text=CalibrationConfig(**job.runtime["text"]),
        out=Path(job.scratch),
        partial=Path(job.partial),
        fingerprint=job.settings,
        seed=job.settings["seed"]["seed"],
    )


def reconstruction(job: Job) -> None:
    """The plan that reproduces the layers' outputs best, of all there are."""
    from moe_lab.allocation import routed_ratio
    from moe_lab.pruning.plan import Plan, router_limits
    from moe_lab.search.reconstruction import COLUMNS, reconstruct
    from moe_lab.statistics.streaming import stream

    reading: dict[str, Any] = {}
    if is_streamed(job, "text"):
        network, tokenizer, reading["budget"] = streamed_model(job, "text")
        reading["read"] = stream
    else:
        network, tokenizer = model_and_tokenizer(job)
    model, settings = facts(job), job.settings["allocation"]
    found = reconstruct(
        network,
        rows(job, tokenizer, "text"),
        facts=model,
        ratio=routed_ratio(settings["ratio"], settings["ratio_basis"], model),
        multiple_of=settings["multiple_of"],
        fingerprint=job.settings,
        out=Path(job.partial),
        **reading,
        **settings["parameters"],
    )
    counts = {layer: about["n_experts"] for layer, about in model["layers"].items()}
    made = Plan(found.kept, counts, {"allocation": settings, "model_sha256": model.get("sha256")})
    made.check(**router_limits(model["layers"]))
    made.save(job.output("plan.json"))
    write_table(job.output("errors.parquet"), COLUMNS, found.errors)


def sequential(job: Job) -> None:
    """A plan made layer after layer: each layer is scored on what the pruned layers below it give.

    A layer loses the share of uniform, of whole experts, or of layerwise, of channels.
    """
    from moe_lab import criteria
    from moe_lab.allocation import allocate, budgets, zero_expert
    from moe_lab.pruning.plan import make_channel_plan, make_plan, router_limits
    from moe_lab.search.sequential import prune_sequentially

    network, tokenizer, budget = streamed_model(job, "text")
    model, weights, settings = facts(job), evidence(job), job.settings["allocation"]
    of_channels = criteria.get(job.settings["criterion"]["criterion"]).granularity == "channel"

    def choose(layer: int, sums: Any) -> Any:
        here = {layer: model["layers"][layer]}
        scored = _score(job, {layer: {**weights.get(layer, {}), **sums}}, here)
        if not of_channels:
            remove = allocate({**settings, "name": "uniform"}, here, scored, model=model)
            return make_plan(scored, remove, **router_limits(here), provenance={})
        keep = budgets({**settings, "name": "layerwise"}, here, scored, model=model)
        return make_channel_plan(scored, keep, zero_expert=zero_expert(settings), **router_limits(here), provenance={})

    made = prune_sequentially(
        network,
        rows(job, tokenizer, "text"),
        choose,
        fingerprint=job.settings,
        out=Path(job.partial),
        budget=budget,
        provenance={**job.settings, "model_sha256": model.get("sha256")},
    )
    made.check(**router_limits(model["layers"]))
    made.save(job.output("plan.json"))
