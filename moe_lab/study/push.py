"""Upload the exported model of a study to the hub when the study has ended: push=OWNER/NAME.

All files go up in one commit, so that nobody loads half a model. The hub's client does not send files again that the
repository has already.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_lab.config import COMPRESSED, Config, ExportConfig, ModelConfig
from moe_lab.errors import MASK, Unavailable, UserError
from moe_lab.grid import Cell
from moe_lab.models.files import HUB_ID, files_of
from moe_lab.paths import local
from moe_lab.pruning.export.card import ORIGINAL, split_card
from moe_lab.pruning.export.write import CARD, NOT_COPIED
from moe_lab.recovery import is_trained
from moe_lab.results import Result
from moe_lab.study.graph import CellSteps, Graph, unpruned
from moe_lab.study.record import Study
from moe_lab.study.schedule import Schedule, say
from moe_lab.study.step import Step

AGAIN = "the export is kept, and the same command uploads it"
TAGS = ("moe", "pruning", "moe_lab")
TABLE = """Benchmarks are asked as in the protocol `{protocol}` of moe_lab. Scores have their standard error over items.

| benchmark | metric | shots | this model | original | items | harness |
|---|---|---|---|---|---|---|
"""


def exported(config: Config, graph: Graph) -> CellSteps:
    """The one cell that the study exports. Raises UserError when there is none, or more."""
    cells = [cell for cell in graph.cells if cell.export]
    if len(cells) != 1:
        labels = [cell.plan.label() for cell in cells[:3] if cell.plan]
        raise UserError(
            f"push={config.push} uploads one pruned model, and this study exports {len(cells)} "
            f"({', '.join(labels)}): expected one cell, in a study of its own"
        )
    return cells[0]


def push(study: Study, repository: str, schedule: Schedule) -> int:
    """Upload the study's exported model to `repository`. Returns the exit code: 1 if it was not uploaded."""
    cell = exported(study.config, study.graph)
    assert cell.export
    try:
        for step in (cell.export, *cell.evaluate.values()):
            if step.id not in schedule.finished:
                raise UserError(f"push={repository}: nothing was uploaded, because {step.folder} is not finished")
            if not study.store.readable(step):
                raise UserError(f"push={repository}: {step.folder} is damaged: start the same command again")
        checkpoint = study.store.path(cell.export) / "checkpoint"
        files = {file.relative_to(checkpoint).as_posix(): file for file in files_of(checkpoint)}
        original = files[CARD].read_text(encoding="utf-8")
        card = hub_card(original, repository, cell.cell, study.config.export, list(_results(study, cell)))
        say(f"push: uploading {len(files)} files to {repository}")
        say(f"push: {_upload(repository, {**files, CARD: card.encode()})}")
    except UserError as error:
        say(f"moe_lab: {error}", style="red")
        return 1
    return 0


def _results(study: Study, cell: CellSteps) -> Iterator[str]:
    """Rows of a table with the results of a cell, and those of its unpruned model where they are in the store. A result
    from before the weights were rounded to the format of the export is not one of the uploaded model."""
    store, whole = study.store, unpruned(cell.cell)
    originals: Mapping[str, Step] = next((other.evaluate for other in study.graph.cells if other.cell == whole), {})

    def content(step: Step) -> Any:
        return json.loads(store.content(step.folder, "result.json"))

    rounds = study.config.export.format in COMPRESSED
    for name, step in cell.evaluate.items():
        if rounds and not reads_export(step, cell.export):
            continue
        found, known = content(step), []
        if name in originals and store.done(originals[name]):
            known = content(originals[name])["results"]
        original = {(result["benchmark"], result["metric"]): _score(result) for result in known}
        harness = " ".join(filter(None, (found["protocol"]["harness"], found["protocol"].get("version"))))
        for result in found["results"]:
            name_and_metric = result["benchmark"], result["metric"]
            scores = _score(result), original.get(name_and_metric, "not evaluated")
            of = f" of {result['expected']:,}" if result["expected"] not in (None, result["n"]) else ""
            direction = " (less is better)" if result["scale"] != "score" else ""
            metric = f"{result['metric']}{direction}"
            columns = [result["benchmark"], metric, step.benchmark.shots, *scores, f"{result['n']:,}{of}", harness]
            yield f"| {' | '.join(map(str, columns))} |"


def _score(result: Result) -> str:
    error = f" ± {result['stderr']:.4f}" if result["stderr"] is not None else ""
    return f"{result['score']:.4f}{error}"


def reads_export(evaluation: Step, export: Step | None) -> bool:
    """Whether a benchmark was run on the exported checkpoint: by a server or an engine that loaded it."""
    asked = (evaluation, *evaluation.inputs.values())  # of a graded benchmark, the step that generated the texts
    read = {needed.id for step in asked for needed in step.inputs.values()}
    return export is not None and export.id in read


def hub_card(card: str, repository: str, cell: Cell, export: ExportConfig, results: Sequence[str]) -> str:
    """The model card on the hub, made from that of the exported folder.

    The base model and tags are added to its front matter, and a section with the rows of `results` to its text. Raises
    UserError when the front matter of the original is not valid YAML.
    """
    from huggingface_hub import ModelCardData
    from yaml import YAMLError, safe_load

    front, text = split_card(card)
    try:
        fields = safe_load(front) or {}
        tags = fields.get("tags") or []
    except (YAMLError, AttributeError):
        raise UserError(f"push={repository}: the front matter of the original's README.md is no YAML fields") from None
    fields = {"library_name": "transformers", "pipeline_tag": "text-generation", **fields}
    fields["tags"] = [*([tags] if isinstance(tags, str) else tags), *TAGS]
    fields["base_model"] = base = base_model(cell.model)
    if base and is_trained(cell.recovery):  # the hub has no word for pruning
        fields["base_model_relation"] = "finetune"
    elif base and (cell.recovery.bits == 4 or export.format in COMPRESSED):
        fields["base_model_relation"] = "quantized"
    own, heading, original = text.partition(ORIGINAL)
    sections = [
        own.replace("from_pretrained(folder", f'from_pretrained("{repository}"').strip(),
        _section(cell, results),
        f"{heading}{original}",
    ]
    return f"---\n{ModelCardData(**fields).to_yaml()}\n---\n\n" + "\n\n".join(sections).strip() + "\n"


def base_model(model: ModelConfig) -> str | None:
    """The id of a model on the hub; None for a shipped model, and for a folder of this machine."""
    return model.path if HUB_ID.fullmatch(model.path) and not local(model.path).is_dir() else None


def _section(cell: Cell, results: Sequence[str]) -> str:
    """The section of the card about how the model was pruned, and its results."""
    allocation = cell.allocation
    choices = {
        "criterion": cell.criterion.name,
        "calibration set": cell.calibration.name,
        "ratio": f"{cell.ratio:g}",
        "allocation": allocation.name,
        "replacement of dropped experts": allocation.replacement,
        "protected experts": allocation.protect or "none",
        "seed": cell.seed,
        "recovery": cell.recovery.name,
    }
    named = ", ".join(f"{what} `{choice}`" for what, choice in choices.items() if choice != "none")
    about = f"## Results\n\nPruned by moe_lab: {named}.\n\n"
    if not results:
        return f"{about}This checkpoint was not evaluated."
    return f"{about}{TABLE.format(protocol=cell.protocol.name)}" + "\n".join(results)


def _upload(repository: str, files: Mapping[str, Path | bytes]) -> str:
    """Upload files (path in the repository -> file or content) in one commit. Returns the repository's address.

    Raises UserError when the repository has another model, and Unavailable, without the token in the message, when the
    hub cannot be reached or refuses.
    """
    from httpx import HTTPError
    from huggingface_hub import CommitOperationAdd, HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    token = get_token()
    if token is None:
        raise Unavailable(f"push={repository}: there is no token of the hub: `hf auth login` or HF_TOKEN; {AGAIN}")
    hub = HfApi()
    try:
        address = str(hub.create_repo(repository, exist_ok=True))
        info = hub.model_info(repository, files_metadata=True)
        added = [CommitOperationAdd(path, content) for path, content in files.items()]
        _check_same(repository, {file.path_in_repo: file.upload_info.sha256.hex() for file in added}, info)
        # The hub refuses the commit if the repository has changed since it was looked at.
        hub.create_commit(repository, added, commit_message="Pruned by moe_lab", parent_commit=info.sha)
    except UserError:
        raise
    except (OSError, HTTPError, ValueError, RuntimeError) as error:  # RuntimeError: of hf_xet
        # Where one file was not sent, the cause says why.
        cause = error if isinstance(error, HfHubHTTPError) else error.__cause__ or error
        # The query of an address may be a signature.
        reason = re.sub(r"\?\S+", "", " ".join(str(cause).split())).replace(token, MASK) or type(cause).__name__
        raise Unavailable(f"push={repository}: the upload failed: {reason}; {AGAIN}") from None
    return address


def _check_same(repository: str, digests: Mapping[str, str], info: Any) -> None:
    """Raise UserError when the repository has weights that are not among `digests` (path -> sha256)."""
    for file in info.siblings or []:
        path = str(file.rfilename)
        if Path(path).suffix in NOT_COPIED and (file.lfs is None or file.lfs.sha256 != digests.get(path)):
            raise UserError(
                f"push={repository}: the repository has another model ({path} is not of this export): name another "
                f"repository, or remove the model there; {AGAIN}"
            )
