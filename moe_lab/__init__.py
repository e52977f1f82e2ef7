"""moe_lab: score, prune and evaluate Mixture-of-Experts language models.

    model, tokenizer = moe_lab.load("pocket:olmoe")
    statistics = moe_lab.calibrate(model, tokenizer, "notes.txt", tokens=32_768)
    scores = moe_lab.score("reap", statistics)
    plan = moe_lab.plan(scores, ratio=0.25)
    with moe_lab.mask(model, plan):
        ...
    moe_lab.export("pocket:olmoe", plan, "pruned")

These functions need neither a configuration nor a store, and take any model of transformers with
routed experts. They use the same code as the steps of a study, so the same settings give the same
scores and plans. Importing moe_lab is cheap: torch is imported by the function that needs it.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
    "export",
    "load",
    "mask",
    "plan",
    "prune",
    "score",
]


def __getattr__(name: str) -> Any:
    """`moe_lab.Plan`, imported at the first use."""
    if name != "Plan":  # imported late, as it imports numpy
        raise AttributeError(f"module moe_lab has no attribute {name}")
    from moe_lab.pruning.plan import Plan

    return Plan


@dataclass(frozen=True, eq=False)
class ModelStatistics:
    """Statistics of a model, the result of `calibrate`."""

    layers: Mapping[int, Mapping[str, Any]]
    """Decoder layer -> name -> sums, fp64 arrays of the shapes in `moe_lab.statistics`."""
    sums: Mapping[str, Mapping[int, Mapping[str, Any]]]
    """Name of a pass, such as statistics or gradients -> the sums in `layers` that the pass has
    computed, in the form of `layers`."""
    facts: Mapping[str, Any]
    """Parameters of the model, and the numbers of experts, channels and groups of each layer; see
    `models.facts`."""
    text: Mapping[str, Any]
    """Report on the text that was read: tokens of each source, number of rows, length of rows."""
    identity: Mapping[str, str]
    """Digests that differ between models of the same shape. Plans have these digests in their
    provenance. See `models.identity`."""

    def __deepcopy__(self, memory: Any) -> ModelStatistics:
        return self  # pandas deep-copies the attributes of a data frame, and the arrays are large


def load(path: str, **settings: Any) -> tuple[Any, Any]:
    """Load a model and its tokenizer. Returns (model, tokenizer). The model is in eval mode, and
    its weights are frozen.

    `path`: a folder with a transformers checkpoint, a hub id, or `pocket:NAME` for a shipped model.
    `settings`: fields of `moe_lab.config.ModelConfig`, such as dtype="bfloat16", device="cuda" or
    revision. Raises UserError, with one sentence, when the model cannot be loaded.
    """
    from moe_lab.config import ModelConfig
    from moe_lab.config.base import valid
    from moe_lab.models.load import load_model
    from moe_lab.paths import PREFIX, as_name

    # of the hub id AUTHOR/NAME, of a folder, or of pocket:NAME
    last_part = path.rstrip("/").rpartition("/")[2]
    name = as_name(last_part.rpartition(":")[2])
    # the shipped models are so small that one thread is fastest
    threads = 1 if path.startswith(PREFIX) else None
    defaults = {"name": name, "path": path, "threads": threads}
    return load_model(valid(ModelConfig, {**defaults, **settings}, "", "load"))


def calibrate(
    model: Any,
    tokenizer: Any,
    text: str | os.PathLike[str] | Sequence[str],
    *,
    criteria: Sequence[str] = ("reap",),
    replacement: str = "none",
    seed: int = 42,
    any_tokenizer: bool = False,
    **settings: Any,
) -> ModelStatistics:
    """The statistics that `criteria` need. These are sums over the tokens of a text, and for some
    criteria sums over the weights.

    Most criteria of whole experts need one forward pass; heapr and others also need a backward
    pass. The model is not changed, and its weights are read from memory.

    `text`: a file, a hub id, or a list of documents. `replacement`: the replacement of dropped
    experts that `plan` will get, since some replacements need further statistics. `settings`:
    fields of `moe_lab.config.CalibrationConfig`. Defaults: tokens=32_768 in rows of length=512 (or
    the tokenizer's limit if this is lower), packing="chunk" (one stream).

    Raises UserError for a criterion that does not exist, settings that cannot work, a text that is
    too short or has tokens without an embedding, and a model without routed experts. Without
    `any_tokenizer`, raises UserError for a tokenizer whose vocabulary or added tokens differ from
    the checkpoint from which the model was loaded.
    """
    from moe_lab import criteria as registry
    from moe_lab.allocation import grouping
    from moe_lab.models.facts import model_facts
    from moe_lab.models.identity import check_tokenizer, model_digests
    from moe_lab.statistics import merge_passes

    # the passes that are needed, each once and in order
    needs = dict.fromkeys(need for criterion in criteria for need in registry.get(criterion).needs)
    needs |= dict.fromkeys(grouping.needs(replacement))
    facts = model_facts(model)
    if not any_tokenizer:
        check_tokenizer(model, tokenizer)
    calibration = _calibration(tokenizer, text, seed, settings, "calibrate")
    with _eval_mode(model):
        sums = {str(need): _run_pass(need, model, calibration.rows) for need in needs}
    # every layer has an entry, also if no pass was needed
    empty_layers: Mapping[int, Mapping[str, Any]] = {layer: {} for layer in facts["layers"]}
    layers = merge_passes([empty_layers, *sums.values()])
    digests = {name: compute() for name, compute in model_digests(model)}
    return ModelStatistics(layers, sums, facts, calibration.report, digests)


def _calibration(
    tokenizer: Any, text: Any, seed: int, settings: Mapping[str, Any], caller: str
) -> Any:
    """The batches of a text, with the defaults of `calibrate`. `settings`: fields of
    CalibrationConfig. `caller`: name of the public function, for messages."""
    from moe_lab.calibration.batches import batches
    from moe_lab.config import CalibrationConfig
    from moe_lab.config.base import valid
    from moe_lab.paths import as_name

    with _text_file(text) as path:
        defaults = {
            "name": as_name(Path(path).stem),
            "path": path,
            "packing": "chunk",
            "tokens": 32_768,
            "seed": seed,
        }
        defaults["length"] = min(512, tokenizer.model_max_length)
        return batches(valid(CalibrationConfig, {**defaults, **settings}, "", caller), tokenizer)


@contextmanager
def _eval_mode(model: Any) -> Iterator[None]:
    """A context in which the model is in eval mode. Its end restores the mode."""
    is_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(is_training)


@contextmanager
def _text_file(text: str | os.PathLike[str] | Sequence[str]) -> Iterator[str]:
    """A context with the path of a text. A list of documents is written to a temporary file in JSON
    lines."""
    if isinstance(text, (str, os.PathLike)):
        yield os.fspath(text)
        return
    # imported here to keep the import of moe_lab small for processes that run programs of models
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "documents.jsonl"
        file.write_text(
            "".join(json.dumps({"text": document}) + "\n" for document in text), encoding="utf-8"
        )
        yield str(file)


def _run_pass(name: str, model: Any, batches: Any) -> dict[int, dict[str, Any]]:
    """Run the pass `name` and return its sums: layer -> name of a sum -> numpy array. The pass
    reads `batches`, or only the weights of the model."""
    from moe_lab.statistics.damage import DamageHook, SimilarityHook
    from moe_lab.statistics.forward import ForwardHook
    from moe_lab.statistics.gradients import GradientHook, WeightGradientHook, gather_gradients
    from moe_lab.statistics.observe import gather
    from moe_lab.statistics.weights import compare_experts, weigh_channels, weigh_experts

    passes: Mapping[str, Callable[[], Statistics]] = {
        "statistics": lambda: gather(model, ForwardHook, batches),
        "damage": lambda: gather(model, DamageHook, batches),
        "similarity": lambda: gather(model, SimilarityHook, batches),
        "gradients": lambda: gather_gradients(model, GradientHook, batches),
        "weight_gradients": lambda: gather_gradients(model, WeightGradientHook, batches),
        "weights": lambda: weigh_experts(model),
        "channel_weights": lambda: weigh_channels(model),
        "weight_distances": lambda: compare_experts(model, device=str(model.device)),
    }
    sums = passes[name]()
    return {
        layer: {sum_name: tensor.numpy() for sum_name, tensor in tensors.items()}
        for layer, tensors in sums.layers.items()
    }


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

    Returns a data frame with the columns layer, expert and score (fp64), one row per expert. For a
    criterion of channels, there is also a column channel, and one row per channel. The attribute
    `attrs` of the data frame has the statistics, which `plan` reads.

    `gate`: the weight by which expert outputs are multiplied. `seed`: seed of random criteria.
    `parameters`: parameters of the criterion. Raises UserError for an unknown criterion or
    parameter, and for statistics without the sums that the criterion needs.
    """
    import numpy as np
    import pandas as pd

    from moe_lab import criteria
    from moe_lab.errors import UserError

    layers = statistics.facts["layers"]
    missing = [need for need in criteria.get(criterion).needs if need not in statistics.sums]
    if missing:
        raise UserError(
            f"criterion={criterion} reads {', '.join(missing)}, which these statistics do not "
            f"have: calibrate with criteria=[..., {criterion!r}]"
        )
    table = criteria.score(
        criterion,
        statistics.layers,
        experts={layer: facts["n_experts"] for layer, facts in layers.items()},
        widths={layer: facts["width"] for layer, facts in layers.items()},
        gate=gate,
        seed=seed,
        parameters=parameters,
    )
    frames = []
    for layer, values in table.items():  # values: (E,), or (E, I) for channels
        ids = np.indices(values.shape).reshape(values.ndim, -1)
        columns = dict(zip(("expert", "channel"), ids, strict=False))
        frames.append(pd.DataFrame({"layer": layer, **columns, "score": values.ravel()}))
    scores = pd.concat(frames, ignore_index=True)
    scores.attrs["statistics"] = statistics
    return scores


def _scores_table(scores: pd.DataFrame, layers: Mapping[int, Mapping[str, Any]]) -> dict[int, Any]:
    """Layer -> scores (E,), or (E, I) for channels, from a data frame. Its rows may be in any
    order, and its numbers may be strings, like keys of JSON objects. `layers`: layer -> facts.
    UserError unless there is exactly one row for each expert, or for each channel."""
    import numpy as np
    import pandas as pd

    from moe_lab.errors import UserError

    id_columns = ["expert", "channel"] if "channel" in scores else ["expert"]
    columns = ["layer", *id_columns, "score"]
    missing = [name for name in columns if name not in scores]
    if missing:
        raise UserError(
            f"plan: the scores have columns {', '.join(map(str, scores))}, without {missing[0]}: "
            f"expected {', '.join(columns)}"
        )
    numbers = scores[columns].astype(object).apply(pd.to_numeric, errors="coerce").astype(float)
    if set(numbers["layer"]) != set(layers):
        names = sorted(scores["layer"].astype(str).unique())
        raise UserError(
            f"plan: the scores are of another model: layers {', '.join(names)}, expected "
            f"{[*layers]}"
        )
    table = {}
    for layer, facts in layers.items():
        shape = [int(facts[size]) for size in ("n_experts", "width")[: len(id_columns)]]
        rows = numbers[numbers["layer"] == layer].sort_values(id_columns)
        if not np.array_equal(
            rows[id_columns].to_numpy().T, np.indices(shape).reshape(len(shape), -1)
        ):
            ranges = " and each ".join(
                f"{name} from 0 to {count - 1}"
                for name, count in zip(id_columns, shape, strict=True)
            )
            raise UserError(
                f"plan: the scores of layer {layer} have {len(rows)} rows: expected one for each "
                f"{ranges}"
            )
        table[layer] = rows["score"].to_numpy().reshape(shape)
    return table


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

    `scores`: a data frame of `score`, or your own with the columns layer, expert, (channel,) score,
    and one row per expert or channel, numbered from 0. Lower scores are removed first.
    `allocation`: how the budget is shared among layers and experts; allocations that search need a
    study. `statistics`: statistics of the model, if `scores` is not from `score`. Other arguments:
    parameters of the allocation, and fields of `moe_lab.config.AllocationConfig`.

    A plan with replacement m_smoe or ream must be aligned by `align` before it is used. Warns when
    rounding changes the removed share, and when scores are equal at the cut. UserError for a ratio
    that is not feasible, and for scores without exactly one row per expert or channel of the model.
    """
    from moe_lab.allocation import check_evidence, protection
    from moe_lab.errors import UserError
    from moe_lab.pruning.plan import ROUNDED
    from moe_lab.pruning.selection import plan_from_scores, ties

    statistics = statistics or scores.attrs.get("statistics")
    if statistics is None:
        raise UserError(
            "plan: these scores have no statistics of their model attached: give statistics="
        )
    values = _scores_table(scores, statistics.facts["layers"])
    fields = {"multiple_of": multiple_of, "replacement": replacement, "protect": protect}
    fields |= {"name": allocation, "parameters": parameters}
    if "channel" in scores:
        identity = _allocation_identity(fields, "channel")
    else:
        identity = _allocation_identity(fields, "expert")
    settings = {**identity, "ratio": ratio}
    check_evidence(settings, statistics.sums)
    facts = protection.with_protected(
        settings, statistics.facts, statistics.sums.get("statistics", {})
    )
    provenance = {"allocation": settings, **statistics.identity, **protection.provenance(facts)}
    plan = plan_from_scores(
        settings, values, facts["layers"], statistics.sums, provenance=provenance
    )
    if abs(plan.removed - ratio) > ROUNDED:
        warnings.warn(
            f"plan: ratio={ratio:g} is rounded: {plan.removed:.3g} is removed", stacklevel=2
        )
    if tie_counts := ties(plan, values, facts["layers"]):
        warnings.warn(
            f"plan: {sum(tie_counts.values())} scores in {len(tie_counts)} layers are equal at the "
            "cut, where the lowest ids are dropped",
            stacklevel=2,
        )
    return plan


def _allocation_identity(
    fields: Mapping[str, Any], granularity: Literal["expert", "channel"]
) -> dict[str, Any]:
    """The identity of an allocation, which is part of a plan's provenance. `fields`: fields of
    AllocationConfig. UserError for fields that are not valid for scores of this granularity."""
    from moe_lab import allocation
    from moe_lab.config import AllocationConfig
    from moe_lab.config.base import valid

    config: AllocationConfig = valid(
        AllocationConfig, fields, "allocation", f"allocation={fields['name']}"
    )
    allocation.check(config, granularity)
    return allocation.IdentifiedAllocation.of(config).identity


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
    """The plan `plan` with matched channels: for each merged expert, which of its channels is added
    to which channel of its owner. Plans of some replacements cannot be used before this.

    Without a text, channels are matched by weights, as in M-SMoE (arXiv 2310.01334). With a text,
    they are matched by weights and by activations on the text, as in REAM (arXiv 2604.04356). The
    model is not changed.

    `text`, `any_tokenizer` and `settings`: as in `calibrate`. `any_model`: as in `mask`. Raises
    UserError when the plan does not fit the model or merges no experts, for a text without a
    tokenizer, and for settings without a text.
    """
    from moe_lab.errors import UserError
    from moe_lab.models.discover import moe_layers
    from moe_lab.models.identity import check_tokenizer
    from moe_lab.pruning.alignment import align_by_activations, align_by_weights, alignment_hook
    from moe_lab.statistics.observe import gather

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
    if not any_tokenizer:
        check_tokenizer(model, tokenizer)
    calibration = _calibration(tokenizer, text, seed, settings, "align")
    with _eval_mode(model):
        return align_by_activations(
            plan, gather(model, alignment_hook(plan), calibration.rows).layers
        )


@contextmanager
def mask(model: Any, plan: Plan, *, any_model: bool = False) -> Iterator[None]:
    """A context in which `model` computes what `prune(model, plan)` would compute. The weights of
    the model are not changed.

    A plan has a digest of the weights for which it was made. If the weights were loaded from a
    checkpoint, the plan also has the fingerprint of the checkpoint. Raises UserError for a plan of
    another model, or when the weights were changed after the plan was made. With `any_model=True`,
    only layers and counts must agree. For a plan without digests, only layers and counts are
    compared, with a warning. See `moe_lab.pruning.mask.mask` for how exactly results agree, and for
    further errors.
    """
    from moe_lab.pruning.mask import mask as mask_model

    _check_origin(plan, model, any_model)
    with mask_model(model, plan):
        yield


def prune(model: Any, plan: Plan, *, any_model: bool = False) -> Any:
    """A smaller copy of `model`, with only the experts and channels that `plan` retains; see
    `moe_lab.pruning.prune.prune`. `any_model`: as in `mask`."""
    from moe_lab.pruning.prune import prune as prune_model

    _check_origin(plan, model, any_model)
    return prune_model(model, plan)


def _check_origin(plan: Plan, model: Any, any_model: bool) -> None:
    """Raise UserError for a plan of another model. With `any_model`, nothing is checked."""
    from moe_lab.models.identity import model_digests

    if not any_model:
        plan.check_origin(model_digests(model), "this model")


def export(
    source: str,
    plan: Plan,
    out: str | os.PathLike[str],
    *,
    shape: str = "natural",
    any_model: bool = False,
) -> Path:
    """Write the checkpoint of `source`, pruned by `plan`, into the new folder `out`. Returns `out`.

    `source`: as `path` in `load`. `shape`: natural (only what is retained), masked (the shape of
    the original, with zeros) or padded; see `moe_lab.pruning.export`. `any_model`: as in `mask`,
    but the fingerprint of the checkpoint is compared. Needs at most about 50 MB of memory.
    """
    from moe_lab.config import ModelConfig
    from moe_lab.models.files import local_folder
    from moe_lab.pruning.export import export as write

    folder = local_folder(ModelConfig(name="source", path=source))
    return write(folder, plan, out, shape=shape, any_model=any_model)
