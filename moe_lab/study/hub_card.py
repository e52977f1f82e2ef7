"""What the hub shows of an exported model: the model card with its YAML front matter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moe_lab.config import COMPRESSED, BenchmarkConfig, ExportConfig, ModelConfig, RecoveryConfig
from moe_lab.errors import UserError
from moe_lab.grid import Cell
from moe_lab.models.files import HUB_ID
from moe_lab.paths import PREFIX, local
from moe_lab.pruning.export.card import ORIGINAL, split_card
from moe_lab.recovery.settings import is_trained
from moe_lab.results import Result

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCardData

TAGS = ("moe", "pruning", "moe_lab")
ANOTHER_RATIO = """## Another ratio

The folder `moe_lab` has the scores of all experts of the original and the statistics they were computed from. Another
model can be cut from them without calibrating again:

```python
import moe_lab
from huggingface_hub import snapshot_download

scores = moe_lab.load_scores(snapshot_download("{repository}", allow_patterns="moe_lab/*"))
plan = moe_lab.plan(scores, ratio={ratio})
moe_lab.export("{base}", plan, "another")
```
"""


@dataclass(frozen=True)
class Measured:
    """One result of the exported model."""

    benchmark: BenchmarkConfig
    result: Result
    original: Result | None
    """The same result of the unpruned model, if it was evaluated."""
    harness: str
    """Harness and its version."""
    of_export: bool = True
    """False for a result from before the weights were rounded to the format of the export."""

    @property
    def items(self) -> str:
        """Number of items, such as `1,172`; `20 of 1,172` where a limit was set."""
        n, expected = self.result["n"], self.result["expected"]
        return f"{n:,}" if expected in (None, n) else f"{n:,} of {expected:,}"


def base_model(model: ModelConfig) -> str | None:
    """The id of a model on the hub. None for a shipped model, and for a folder outside the hub's cache."""
    if model.path.startswith(PREFIX):
        return None
    folder = local(model.path)
    if not folder.is_dir():
        return model.path if HUB_ID.fullmatch(model.path) else None
    cached = folder.resolve().parent
    if cached.name != "snapshots" or not cached.parent.name.startswith("models--"):
        return None
    return cached.parent.name.removeprefix("models--").replace("--", "/")


def _source(model: ModelConfig) -> str:
    """What readers of the card load the original from. A path on this machine is of no use to them."""
    shipped = model.path if model.path.startswith(PREFIX) else None
    return base_model(model) or shipped or "FOLDER_OF_THE_ORIGINAL"


def hub_card(card: str, repository: str, cell: Cell, export: ExportConfig, measured: Sequence[Measured]) -> str:
    """The model card on the hub, made from that of the exported folder.

    The base model, tags and `measured` results are added to its front matter. Raises UserError when that of the
    original is not valid YAML.
    """
    front, text = split_card(card)
    own, heading, original = text.partition(ORIGINAL)
    own = own.replace("from_pretrained(folder", f'from_pretrained("{repository}"')
    ratio = 0.5 if cell.ratio != 0.5 else 0.25
    another = ANOTHER_RATIO.format(repository=repository, ratio=ratio, base=_source(cell.model))
    sections = [own.strip(), _results_section(cell, measured), another.strip()]
    if heading:
        sections.append(f"{heading}{original}".strip())
    fields = _front_matter(front, repository, measured)
    base = base_model(cell.model)
    fields["base_model"] = base
    fields["base_model_relation"] = _relation(cell.recovery, export) if base else None
    yaml = fields.to_yaml()
    return f"---\n{yaml}\n---\n\n" + "\n\n".join(sections) + "\n"


def _front_matter(front: str, repository: str, measured: Sequence[Measured]) -> ModelCardData:
    """The fields of the exported folder's card, with tags and the results of the export."""
    from huggingface_hub import ModelCardData
    from yaml import YAMLError, safe_load

    try:
        fields = safe_load(front) or {}
    except YAMLError as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"push={repository}: the front matter of the original's README.md is no YAML: {reason}"
        ) from None
    if not isinstance(fields, dict):
        raise UserError(f"push={repository}: the front matter of the original's README.md is no list of fields")
    tags = fields.get("tags") or []
    data = ModelCardData(
        **{
            "library_name": "transformers",
            "pipeline_tag": "text-generation",
            **fields,
            "tags": [*([tags] if isinstance(tags, str) else tags), *TAGS],
        }
    )
    if results := [_eval_result(one) for one in measured if one.of_export]:
        data.model_name, data.eval_results = repository.rpartition("/")[2], results
    return data


def _relation(recovery: RecoveryConfig, export: ExportConfig) -> str | None:
    """The hub's word for the relation to the base model, such as finetune or quantized; it has none for pruning."""
    if is_trained(recovery):
        return "finetune"
    return "quantized" if recovery.bits == 4 or export.format in COMPRESSED else None


def _eval_result(measured: Measured) -> EvalResult:
    """One entry of `model-index`. A shipped benchmark has no data set on the hub, so its name stands for it."""
    from huggingface_hub import EvalResult

    benchmark, result = measured.benchmark, measured.result
    shipped = " (shipped with moe_lab)" if benchmark.task.startswith(PREFIX) else ""
    about = {"items": result["n"], "items_of_benchmark": result["expected"], "standard_error": result["stderr"]}
    limited = "" if result["expected"] in (None, result["n"]) else f", {measured.items} items"
    return EvalResult(
        task_type="text-generation",
        dataset_type=benchmark.data or benchmark.name,
        dataset_name=f"{result['benchmark']}{shipped}",
        dataset_config=benchmark.subset,
        dataset_split=benchmark.split,
        metric_type=result["metric"],
        metric_name=f"{result['metric']}, {benchmark.shots}-shot{limited}",
        metric_value=result["score"],
        metric_args={name: value for name, value in about.items() if value is not None},
    )


def _results_section(cell: Cell, measured: Sequence[Measured]) -> str:
    recovery = f", then recovery `{cell.recovery.name}`" if cell.recovery.name != "none" else ""
    protect = cell.allocation.protect
    protected = f", protected experts `{Path(protect).name}`" if protect is not None else ""
    if cell.allocation.replacement != "none":
        protected = f", dropped experts replaced by `{cell.allocation.replacement}`{protected}"
    lines = [
        "## Results",
        "",
        f"Pruned by moe_lab: criterion `{cell.criterion.name}`, calibration set `{cell.calibration.name}`, ratio "
        f"{cell.ratio:g}, allocation `{cell.allocation.name}`{protected}, seed {cell.seed}{recovery}.",
    ]
    if not measured:
        return "\n".join([*lines, "", "It was not evaluated."])
    lines += [
        f"Scores are given with their standard error over items; benchmarks are asked as in the protocol "
        f"`{cell.protocol.name}` of moe_lab.",
        "",
        "| benchmark | metric | shots | this model | original | items | harness |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in measured:
        original = _score(one.original) if one.original else "not evaluated"
        lines.append(
            f"| {one.result['benchmark']} | {one.result['metric']} | {one.benchmark.shots} | {_score(one.result)}"
            f"{'' if one.of_export else ' (before rounding)'} | {original} | {one.items} | {one.harness} |"
        )
    if not all(one.of_export for one in measured):
        lines += ["", "*Before rounding*: measured before the weights were rounded to the format of this checkpoint."]
    if any(" of " in one.items for one in measured):
        lines += ["", "Where items are given as *n of N*, only n of the benchmark's N items were evaluated."]
    return "\n".join(lines)


def _score(result: Result) -> str:
    error = f" ± {result['stderr']:.4f}" if result["stderr"] is not None else ""
    return f"{result['score']:.4f}{error}"
