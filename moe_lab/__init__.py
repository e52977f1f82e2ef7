"""moe_lab: score, prune and evaluate Mixture-of-Experts language models.

    model, tokenizer = moe_lab.load("pocket:olmoe")
    statistics = moe_lab.calibrate(model, tokenizer, "notes.txt", tokens=32_768)
    scores = moe_lab.score("reap", statistics)
    plan = moe_lab.plan(scores, ratio=0.25)
    with moe_lab.mask(model, plan):
        moe_lab.evaluate(model, tokenizer, "pocket_arc_easy")
    moe_lab.export("pocket:olmoe", plan, "pruned")

These functions need neither a configuration nor a store, and take any model of transformers with
routed experts. The same settings give the same scores and plans as in a study. Importing moe_lab is
cheap: torch is imported by the function that needs it.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    import pandas as pd

    from moe_lab.pruning.plan import Plan
    from moe_lab.statistics import Statistics

__version__ = "0.1.0"
__all__ = [
    "ModelStatistics",
    "Plan",
    "align",
    "calibrate",
    "evaluate",
    "export",
    "load",
    "mask",
    "plan",
    "prune",
    "results",
    "score",
]


def __getattr__(name: str) -> Any:
    """The class `Plan`."""
    if name != "Plan":
        raise AttributeError(f"module moe_lab has no attribute {name}")
    # imported at the first use, because importing numpy takes time
    from moe_lab.pruning.plan import Plan

    return Plan


def __dir__() -> list[str]:
    """The public interface."""
    return __all__


_Function = TypeVar("_Function", bound=Callable[..., Any])
_TEXT = ("startswith", "a text, such as a name, a path or a hub id")
_EXPECTED = {
    "model": ("named_modules", "a loaded model, as moe_lab.load returns it"),
    "tokenizer": ("convert_ids_to_tokens", "a loaded tokenizer, as moe_lab.load returns it"),
    "statistics": ("facts", "the result of moe_lab.calibrate"),
    "scores": ("attrs", "a data frame, as moe_lab.score returns it"),
    "ratio": ("__float__", "a number"),
    "plan": ("removed_share", "the result of moe_lab.plan"),
}
"""Parameter of public functions that is no text -> (attribute of all possible values, expected
value)."""


def _checked(function: _Function) -> _Function:
    """Decorator that raises UserError for arguments of a wrong type."""
    import inspect

    parameters = inspect.signature(function)

    @wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        for name, value in parameters.bind(*arguments, **keywords).arguments.items():
            parameter = parameters.parameters[name]
            is_text = parameter.annotation in ("str", "str | None")
            attribute, expected = _TEXT if is_text else _EXPECTED.get(name, ("__class__", ""))
            is_default = value is parameter.default
            if not is_default and not hasattr(value, attribute):
                from moe_lab.errors import UserError

                setting = f"{function.__name__}: {name}"
                raise UserError(f"{setting} is of type {type(value).__name__}: expected {expected}")
        return function(*arguments, **keywords)

    return cast(_Function, call)


@dataclass(frozen=True, eq=False, repr=False)
class ModelStatistics:
    """Statistics of a model, the result of `calibrate`."""

    sums: Mapping[str, Mapping[int, Mapping[str, Any]]]
    """Name of a pass, such as "gradients" -> decoder layer -> name -> sums, fp64 arrays of the
    shapes in `moe_lab.statistics`."""
    facts: Mapping[str, Any]
    """Parameters of the model, and the numbers of experts, channels and groups of each layer; see
    `models.facts`."""
    text: Mapping[str, Any]
    """Report on the text that was read: tokens of each source, number of rows, length of rows."""
    identity: Mapping[str, str]
    """Digests that differ between models of the same shape; see `models.identity`."""

    def __repr__(self) -> str:
        n_layers = len(self.facts["layers"])
        return f"ModelStatistics({n_layers} layers; passes: {', '.join(self.sums)})"

    def __deepcopy__(self, memory: Any) -> ModelStatistics:
        """These statistics themselves, because pandas deep-copies the `attrs` of a data frame."""
        return self


@_checked
def load(path: str, **settings: Any) -> tuple[Any, Any]:
    """Load (model, tokenizer). The model is in eval mode, and its weights are frozen.

    `path`: a folder with a transformers checkpoint, a hub id, or `pocket:NAME` for a shipped model.
    `settings`: fields of `moe_lab.config.ModelConfig`, such as dtype="bfloat16" or device="cuda".
    UserError when the model cannot be loaded.
    """
    from moe_lab.config import ModelConfig
    from moe_lab.config.base import validated
    from moe_lab.models.load import load_model
    from moe_lab.paths import PREFIX, name_of_path

    # the shipped models are so small that one thread is fastest
    threads = 1 if path.startswith(PREFIX) else None
    fields = {"name": name_of_path(path), "path": path, "threads": threads, **settings}
    return load_model(validated(ModelConfig, fields, group="", origin="load"))


@_checked
def calibrate(
    model: Any,
    tokenizer: Any,
    text: str | os.PathLike[str] | Sequence[str],
    *,
    criteria: str | Sequence[str] = ("reap",),
    replacement: str = "none",
    seed: int = 42,
    any_tokenizer: bool = False,
    **settings: Any,
) -> ModelStatistics:
    """Gather the statistics of a model that `criteria` need: sums over the tokens of a text, and
    for some criteria sums over the model's weights. The model must be in memory.

    `text`: path of a file, hub id of a data set, or list of documents. `replacement`: as in `plan`.
    `settings`: fields of `moe_lab.config.CalibrationConfig`. Defaults: tokens=32_768,
    packing="chunk", and length=512 or the tokenizer's limit if the limit is lower.

    Raises UserError for an unknown criterion, invalid settings, or a text that is too short. Raises
    UserError if the vocabulary of `tokenizer` differs from that in the model's checkpoint, unless
    `any_tokenizer` is set.
    """
    from moe_lab import criteria as registry
    from moe_lab.allocation import grouping
    from moe_lab.models.facts import model_facts
    from moe_lab.models.identity import model_digests

    # each pass once; one name of a criterion is a list of one
    criteria = [criteria] if isinstance(criteria, str) else criteria
    passes = dict.fromkeys(name for criterion in criteria for name in registry.get(criterion).needs)
    passes |= dict.fromkeys(grouping.required_passes(replacement))
    facts = model_facts(model)
    calibration = _calibration(model, tokenizer, text, seed, settings, "calibrate", any_tokenizer)
    with _eval_mode(model):
        sums = {name: _run_pass(name, model, calibration.batches) for name in passes}
    digests = {name: compute() for name, compute in model_digests(model)}
    return ModelStatistics(sums, facts, calibration.report, digests)


def _calibration(
    model: Any,
    tokenizer: Any,
    text: Any,
    seed: int,
    settings: Mapping[str, Any],
    caller: str,
    any_tokenizer: bool,
) -> Any:
    """The `calibration.batches.Calibration` of a text that `model` reads. `caller`: name of the
    public function that error messages mention. The other arguments, and errors, are those of
    `calibrate`."""
    from moe_lab.calibration import with_batch_tokens
    from moe_lab.calibration.batches import batches
    from moe_lab.config import CalibrationConfig
    from moe_lab.config.base import validated
    from moe_lab.models.identity import check_tokenizer
    from moe_lab.paths import valid_name

    if not any_tokenizer:
        check_tokenizer(model, tokenizer)
    with _text_file(text) as path:
        defaults = {
            "name": valid_name(Path(path).stem),
            "path": path,
            "packing": "chunk",
            "tokens": 32_768,
            "length": min(512, tokenizer.model_max_length),
            "seed": seed,
        }
        checked: CalibrationConfig = validated(
            CalibrationConfig, {**defaults, **settings}, group="", origin=caller
        )
        return batches(with_batch_tokens(checked, model.device.type), tokenizer)


@contextmanager
def _eval_mode(model: Any) -> Iterator[None]:
    """A context in which the model is in eval mode, and the progress of passes is shown."""
    from moe_lab import progress

    is_training = model.training
    model.eval()
    try:
        with progress.shown():
            yield
    finally:
        model.train(is_training)


@contextmanager
def _text_file(text: str | os.PathLike[str] | Sequence[str]) -> Iterator[str]:
    """A context that yields a path or a hub id. Documents are written to a temporary file of JSON
    lines."""
    if isinstance(text, (str, os.PathLike)):
        yield os.fspath(text)
        return
    # imported here so that `import moe_lab` is fast: evaluation imports it in many processes
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "documents.jsonl"
        file.write_text(
            "".join(json.dumps({"text": document}) + "\n" for document in text), encoding="utf-8"
        )
        yield str(file)


def _run_pass(name: str, model: Any, batches: Any) -> dict[int, dict[str, Any]]:
    """Sums that the pass `name` computes: layer -> name of a sum -> numpy array. `batches`: pairs
    (token ids, valid) of tensors (B, S)."""
    from pkgutil import resolve_name

    from moe_lab.statistics import FUNCTIONS, WITH_BACKWARD
    from moe_lab.statistics.gradients import collect_gradient_statistics
    from moe_lab.statistics.observe import collect_statistics

    function = resolve_name(FUNCTIONS[name])
    if not isinstance(function, type):  # no hook, but a function that reads weights
        sums: Statistics = function(model, device=str(model.device))
    elif name in WITH_BACKWARD:
        sums = collect_gradient_statistics(model, function, batches)
    else:
        sums = collect_statistics(model, function, batches)
    return {
        layer: {sum_name: tensor.numpy() for sum_name, tensor in tensors.items()}
        for layer, tensors in sums.layers.items()
    }


@_checked
def score(
    criterion: str,
    statistics: ModelStatistics,
    *,
    gate: str = "model",
    seed: int = 42,
    **parameters: Any,
) -> pd.DataFrame:
    """Score the experts or the channels of a model by a criterion. Experts or channels with lower
    scores are removed first.

    Returns a data frame with the columns "layer", "expert" and "score" (fp64), one row per expert.
    If the criterion scores channels, there is also a column "channel", and one row per channel.
    `attrs["statistics"]` of the data frame is `statistics`.

    `gate`: name of the gate value by which the criterion weights expert outputs; "model" is the
    gate value that the model itself uses. `parameters`: those of the criterion. Raises UserError
    for statistics without the sums that the criterion needs.
    """
    import numpy as np
    import pandas as pd

    from moe_lab import criteria
    from moe_lab.errors import UserError
    from moe_lab.statistics import merge_passes

    needs = criteria.get(criterion).needs
    if missing := [need for need in needs if need not in statistics.sums]:
        raise UserError(
            f"criterion={criterion} reads {', '.join(missing)}, which these statistics do not "
            f"have: calibrate with criteria=[..., {criterion!r}]"
        )
    facts = statistics.facts["layers"]
    # every layer, also for criteria that need no pass; only the passes that the criterion needs,
    # because others may have sums of the same names
    passes = [{layer: {} for layer in facts}, *[statistics.sums[need] for need in needs]]
    table = criteria.score(
        criterion,
        merge_passes(passes),
        facts,
        gate=gate,
        seed=seed,
        parameters=parameters,
    )
    frames = []
    for layer, values in table.items():  # values: (E,), or (E, I) for channels
        # one row of ids for each dimension of `values`; for (E,), zip leaves out "channel"
        ids = np.indices(values.shape).reshape(values.ndim, -1)
        columns = dict(zip(("expert", "channel"), ids, strict=False))
        frames.append(pd.DataFrame({"layer": layer, **columns, "score": values.ravel()}))
    scores = pd.concat(frames, ignore_index=True)
    scores.attrs["statistics"] = statistics
    return scores


@_checked
def plan(
    scores: pd.DataFrame,
    ratio: float,
    allocation: str = "uniform",
    *,
    statistics: ModelStatistics | None = None,
    multiple_of: int = 1,
    replacement: str = "none",
    protect: str | None = None,
    **parameters: Any,
) -> Plan:
    """The plan that removes the share `ratio` of the routed experts, or of their channels.

    `scores`: the result of `score`, or your own data frame with the same columns. Low scores are
    removed first. `statistics`: needed if `scores` is not from `score`. `allocation`: the rule that
    decides how much of each layer is removed; rules that run the model work only in a study.
    `parameters`: those of the allocation and of the replacement. Other arguments: fields of
    AllocationConfig.

    A plan with replacement m_smoe or ream must be aligned by `align`. Warns when rounding changes
    the removed share, and when a removed and a retained score are equal. UserError for an
    infeasible ratio, and for missing or duplicate rows."""
    from moe_lab.allocation import (
        IdentifiedAllocation,
        check,
        check_evidence,
        granularity_of,
        protection,
    )
    from moe_lab.config import AllocationConfig
    from moe_lab.config.base import validated
    from moe_lab.errors import UserError
    from moe_lab.pruning.selection import count_ties, plan_from_scores
    from moe_lab.statistics.score_files import scores_table

    if (statistics := statistics or scores.attrs.get("statistics")) is None:
        raise UserError(
            "plan: these scores have no statistics of their model attached: give statistics="
        )
    values = scores_table(scores, statistics.facts["layers"], "plan")
    fields = {"multiple_of": multiple_of, "replacement": replacement, "protect": protect}
    fields |= {"name": allocation, "parameters": parameters}
    config: AllocationConfig = validated(
        AllocationConfig, fields, "allocation", f"allocation={allocation}"
    )
    check(config, granularity_of(values))
    settings = {**IdentifiedAllocation.of(config).identity, "ratio": ratio}
    check_evidence(settings, statistics.sums)
    facts = protection.add_super_experts(
        settings, statistics.facts, statistics.sums.get("statistics", {})
    )
    protected = protection.protected_entry(facts)
    provenance = {"allocation": settings, **statistics.identity, **protected}
    plan = plan_from_scores(
        settings, values, facts["layers"], statistics.sums, provenance=provenance
    )
    _warn_of_rounding_and_ties(plan, ratio, count_ties(plan, values, facts["layers"]))
    return plan


def _warn_of_rounding_and_ties(plan: Plan, ratio: float, tie_counts: Mapping[int, int]) -> None:
    """Warn the caller of `plan` when rounding changed the removed share, and when scores are equal
    at the cut. `tie_counts`: layer -> number of equal scores."""
    from moe_lab.pruning.plan import ROUNDED

    if abs(plan.removed_share - ratio) > ROUNDED:
        warnings.warn(
            f"plan: ratio={ratio:g} is rounded: {plan.removed_share:.3g} is removed", stacklevel=4
        )
    if tie_counts:
        warnings.warn(
            f"plan: {sum(tie_counts.values())} scores in {len(tie_counts)} layers are equal at the "
            "cut, where the lowest ids are dropped",
            stacklevel=4,
        )


@_checked
def align(
    model: Any,
    plan: Plan,
    tokenizer: Any = None,
    text: str | os.PathLike[str] | Sequence[str] | None = None,
    *,
    seed: int = 42,
    any_model: bool = False,
    any_tokenizer: bool = False,
    **settings: Any,
) -> Plan:
    """A copy of `plan` that also states, for each expert that is merged into another expert (the
    owner), which channel of the expert is added to which channel of the owner.

    Without a text, channels are matched by weights, as in M-SMoE (arXiv 2310.01334). With a text,
    channels are matched by weights and by activations on the text, as in REAM (arXiv 2604.04356).

    `text`, `seed`, `any_tokenizer` and `settings`: as in `calibrate`. `any_model`: as in `mask`.
    Raises UserError when the plan does not fit the model or merges no experts.
    """
    from moe_lab.errors import UserError
    from moe_lab.models.discover import moe_layers
    from moe_lab.pruning.alignment import align_by_activations, align_by_weights, alignment_hook
    from moe_lab.statistics.observe import collect_statistics

    if not plan.merged_layers:
        raise UserError(
            "align: the plan merges no experts, expected one that does, such as by "
            "replacement=m_smoe"
        )
    if text is None and settings:
        raise UserError(
            f"align: {', '.join(settings)} are settings of a text, and there is none: give text="
        )
    if text is not None and tokenizer is None:
        raise UserError("align: a text is read with the model's tokenizer: give tokenizer=")
    layers = moe_layers(model)
    plan.check_model(layers)
    _check_origin(plan, model, any_model)
    if text is None:
        return align_by_weights(plan, layers)
    calibration = _calibration(model, tokenizer, text, seed, settings, "align", any_tokenizer)
    with _eval_mode(model):
        return align_by_activations(
            plan, collect_statistics(model, alignment_hook(plan), calibration.batches).layers
        )


@_checked
def evaluate(
    model: Any,
    tokenizer: Any,
    benchmarks: str | Sequence[str],
    *,
    limit: int | None = None,
    data_root: str = "~/.cache/moe_lab/data",
    **policy: Any,
) -> pd.DataFrame:
    """Evaluate a model in memory, which may be pruned or masked.

    Returns a data frame with one row for each result, and the fields of
    `moe_lab.result_files.Result` as columns. `benchmarks`: names of benchmarks or suites. `limit`:
    number of items of each benchmark; None for all. `data_root`: the folder of mirrors, see
    docs/evaluation.md. `policy`: fields of `moe_lab.evaluation.Policy`, such as
    allow_code_execution=True.

    Raises UserError for an unknown name, missing data, missing permissions, and for benchmarks that
    compare a model with the unpruned one.
    """
    import tempfile

    import pandas as pd

    from moe_lab.errors import UserError
    from moe_lab.evaluation import Policy, mirror, run
    from moe_lab.evaluation.answers import collect_answers
    from moe_lab.evaluation.engines.hf import LoadedModel

    engine = LoadedModel(model, tokenizer)
    results = []
    names = [benchmarks] if isinstance(benchmarks, str) else benchmarks
    for named in mirror.named_benchmarks(names):
        if named.compares_logits:
            raise UserError(f"evaluate: {named.name} compares two models: use it in a study")
        benchmark = replace(named, limit=limit, root=data_root)
        with _eval_mode(model), tempfile.TemporaryDirectory() as folder:
            (answers,) = collect_answers(engine, [(benchmark, run.list_items(benchmark))])
            results += run.grade(answers, benchmark, Path(folder), policy=Policy(**policy))
    return pd.DataFrame(results)


@_checked
@contextmanager
def mask(model: Any, plan: Plan, *, any_model: bool = False) -> Iterator[None]:
    """A context in which `model` computes what `prune(model, plan)` would compute; see
    `moe_lab.pruning.mask.mask`.

    Raises UserError for a plan that was made for another model, or before the weights of this model
    were changed. With `any_model`, the plan only has to fit the model's layers and their numbers of
    experts and channels.
    """
    from moe_lab.pruning.mask import mask as mask_model

    _check_origin(plan, model, any_model)
    with mask_model(model, plan):
        yield


@_checked
def prune(model: Any, plan: Plan, *, any_model: bool = False) -> Any:
    """A smaller copy of `model`, with only the experts and channels that `plan` retains; see
    `moe_lab.pruning.prune.prune`. `any_model`: as in `mask`."""
    from moe_lab.pruning.prune import prune as prune_model

    _check_origin(plan, model, any_model)
    return prune_model(model, plan)


def _check_origin(plan: Plan, model: Any, any_model: bool) -> None:
    """Raise UserError for a plan that was made for another model, unless `any_model` is set."""
    from moe_lab.models.identity import model_digests

    if not any_model:
        plan.check_origin(model_digests(model), "this model")


@_checked
def export(
    source: str,
    plan: Plan,
    out: str | os.PathLike[str],
    *,
    shape: str = "natural",
    tokenizer: str | None = None,
    any_model: bool = False,
    trust_remote_code: bool = False,
) -> Path:
    """Write the checkpoint of `source`, pruned by `plan`, into the new or empty folder `out`.
    Returns its absolute path.

    `source`: as `path` in `load`. `shape`: natural (only retained experts and channels), masked
    (the original shape, with zeros for what is removed) or padded; see `moe_lab.pruning.export`.
    `tokenizer`: folder, hub id or `pocket:NAME` of another tokenizer for the export. Without
    `any_model`, raises UserError when the plan was made for a checkpoint with another fingerprint.
    """
    from moe_lab.config import ModelConfig
    from moe_lab.models.files import local_folder, tokenizer_folder
    from moe_lab.pruning.export import export as write

    settings = ModelConfig(name="source", path=source, tokenizer=tokenizer)
    folder = local_folder(settings)
    return write(
        folder,
        plan,
        out,
        shape=shape,
        any_model=any_model,
        trust_remote_code=trust_remote_code,
        tokenizer=tokenizer_folder(settings, folder),
    )


def results(
    store: str | os.PathLike[str], study: str | None = None, rows: str = "item"
) -> pd.DataFrame:
    """The results of a study as a data frame with one row for each item, or each cell; see
    `moe_lab.analysis.load.table.table`. Raises UserError for an unknown study."""
    from moe_lab.analysis.load.table import table

    return table(os.fspath(store), study, rows)
