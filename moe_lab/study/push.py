"""Upload the exported model of a study to the hub when the study has ended: push=OWNER/NAME.

All files go up in one commit, so that nobody loads half a model. The hub's client does not send files again that the
repository has already.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from moe_lab.config import Config
from moe_lab.errors import Unavailable, UserError
from moe_lab.models.files import files_of
from moe_lab.pruning.export.write import CARD, NOT_COPIED
from moe_lab.results import Result
from moe_lab.secrets import MASK
from moe_lab.study.graph import CellSteps, Graph, unpruned
from moe_lab.study.hub_card import ROUNDED, Measured, base_model, hub_card
from moe_lab.study.progress import say
from moe_lab.study.record import Study
from moe_lab.study.schedule import Schedule
from moe_lab.study.step import Step
from moe_lab.study.steps.files import NO_SUMS, STATISTICS
from moe_lab.study.store import Store

SCORES = ("scores.parquet", "scores.safetensors")
"""Files of a step of scores, of experts or of channels."""
DATA = "moe_lab"
"""Folder in the repository with what `moe_lab.load_scores` reads."""
AGAIN = "the export is kept, and the same command uploads it"


def check(config: Config) -> None:
    """Raise UserError for a name that the hub refuses, and when the study exports nothing."""
    assert config.push is not None
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(config.push)
    except HFValidationError as error:
        raise UserError(f"push={config.push} is not a name of a repository: {str(error).splitlines()[0]}") from None
    if "/" not in config.push:
        raise UserError(f"push={config.push} names no owner: expected OWNER/NAME")
    if config.export.shape is None:
        raise UserError(f"push={config.push} uploads an export, and this study writes none: add export=natural")


def check_graph(config: Config, graph: Graph) -> None:
    """Raise UserError unless the study exports exactly one cell."""
    cells = [cell for cell in graph.cells if cell.export]
    if len(cells) != 1:
        named = ", ".join(cell.plan.label() for cell in cells[:3] if cell.plan)
        more = ", ..." if len(cells) > 3 else ""
        raise UserError(
            f"push={config.push} uploads one pruned model, and this study exports {len(cells)} ({named}{more}): "
            "expected one cell, in a study of its own"
        )


def show(study: Study, repository: str, done: Collection[str]) -> None:
    """Print what would be uploaded to `repository`, for a dry run."""
    from huggingface_hub import get_token

    cell = _exported(study)
    assert cell.export and cell.plan
    state = "finished" if cell.export.id in done else "not made yet"
    benchmarks = ", ".join(cell.evaluate) or "no benchmark"
    base = base_model(cell.cell.model) or "none on the hub"
    say(
        f"push={repository}: would upload the export of {cell.plan.label()} ({state}), its scores and statistics, and "
        f"a model card with results on {benchmarks}; base model: {base}"
    )
    if get_token() is None:
        say("push: there is no token of the hub here: `hf auth login` or HF_TOKEN")


def push(study: Study, repository: str, schedule: Schedule) -> int:
    """Upload the study's exported model to `repository`. Returns the exit code: 1 if it was not uploaded."""
    store = study.store
    cell = _exported(study)
    try:
        for step in _needed(cell):
            if step.id not in schedule.finished:
                raise UserError(f"push={repository}: nothing was uploaded, because {step.folder} is not finished")
            if not store.readable(step):
                raise UserError(f"push={repository}: {step.folder} is damaged: start the same command again")
        files = dict(_files(store, cell))
        original = files[CARD].read_text(encoding="utf-8")
        card = hub_card(original, repository, cell.cell, study.config.export, list(_measured(study, cell)))
        say(f"push: uploading {len(files)} files to {repository}")
        say(f"push: {_upload(repository, {**files, CARD: card.encode()})}")
    except UserError as error:
        say(f"moe_lab: {error}", style="red")
        return 1
    return 0


def _exported(study: Study) -> CellSteps:
    return next(cell for cell in study.graph.cells if cell.export)


def _needed(cell: CellSteps) -> list[Step]:
    """The steps whose files are uploaded, or are on the card."""
    assert cell.export and cell.plan and cell.scores
    steps = [cell.model, cell.scores, cell.plan, *dict(_sums(cell)).values(), cell.export, *cell.evaluate.values()]
    return list({step.id: step for step in steps}.values())


def _sums(cell: CellSteps) -> Iterator[tuple[str, Step]]:
    """(role, step) of each step with sums that the scores, or the allocation, were computed from."""
    assert cell.plan and cell.scores
    for step in (cell.scores, cell.plan):
        for role, needed in step.inputs.items():
            if role not in NO_SUMS:
                yield role, needed


def _files(store: Store, cell: CellSteps) -> Iterator[tuple[str, Path]]:
    """(path in the repository, file in the store) of everything that is uploaded."""
    assert cell.export and cell.scores
    checkpoint = store.path(cell.export) / "checkpoint"
    for file in files_of(checkpoint):
        yield file.relative_to(checkpoint).as_posix(), file
    yield f"{DATA}/facts.json", store.path(cell.model) / "facts.json"
    for name in SCORES:
        if (file := store.path(cell.scores) / name).is_file():
            yield f"{DATA}/{name}", file
    for role, step in _sums(cell):
        if (file := store.path(step) / STATISTICS).is_file():
            yield f"{DATA}/{role}.safetensors", file


def _measured(study: Study, cell: CellSteps) -> Iterator[Measured]:
    """The results of a cell, with those of its unpruned model where they are in the store."""
    store, whole = study.store, unpruned(cell.cell)
    originals: Mapping[str, Step] = next((other.evaluate for other in study.graph.cells if other.cell == whole), {})
    for name, step in cell.evaluate.items():
        content = _results(store, step)
        original = {}
        if name in originals and store.done(originals[name]):
            original = {_key(one): one for one in _results(store, originals[name])["results"]}
        harness = " ".join(filter(None, (content["protocol"]["harness"], content["protocol"].get("version"))))
        of_export = study.config.export.format not in ROUNDED or reads_export(step, cell.export)
        for result in content["results"]:
            yield Measured(step.benchmark, result, original.get(_key(result)), harness, of_export)


def reads_export(evaluation: Step, export: Step | None) -> bool:
    """Whether a benchmark was run on the exported checkpoint: by a server or an engine that loaded it."""
    asked = (evaluation, *evaluation.inputs.values())  # of a graded benchmark, the step that generated the texts
    read = {needed.id for step in asked for needed in step.inputs.values()}
    return export is not None and export.id in read


def _results(store: Store, step: Step) -> Any:
    return json.loads((store.path(step) / "result.json").read_text())


def _key(result: Result) -> tuple[str, str]:
    return result["benchmark"], result["metric"]


def _upload(repository: str, files: Mapping[str, Path | bytes]) -> str:
    """Upload files (path in the repository -> file or content) in one commit. Returns the repository's address.

    Raises UserError when the repository has another model, and Unavailable, without the token in the message, when the
    hub cannot be reached or refuses.
    """
    from httpx import HTTPError
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    token = get_token()
    if token is None:
        raise Unavailable(f"push={repository}: there is no token of the hub: `hf auth login` or HF_TOKEN; {AGAIN}")
    hub = HfApi()
    # The hub's client warns of Parquet files in a repository of models, where scores belong here.
    warnings.filterwarnings("ignore", "It seems that you are about to commit a data file")
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
        reason = _reason(error).replace(token, MASK)
        raise Unavailable(f"push={repository}: the upload failed: {reason}; {AGAIN}") from None
    return address


def _check_same(repository: str, digests: Mapping[str, str], info: Any) -> None:
    """Raise UserError when the repository has weights that are not among `digests` (path -> sha256)."""
    for file in info.siblings or []:
        path = str(file.rfilename)
        is_weights = Path(path).suffix in NOT_COPIED and not path.startswith(f"{DATA}/")
        if is_weights and (file.lfs is None or file.lfs.sha256 != digests.get(path)):
            raise UserError(
                f"push={repository}: the repository has another model ({path} is not of this export): name another "
                f"repository, or remove the model there; {AGAIN}"
            )


def _reason(error: BaseException) -> str:
    """What the hub or the network said, on one line."""
    from huggingface_hub.errors import HfHubHTTPError

    while error.__cause__ and not isinstance(error, HfHubHTTPError):  # where one file was not sent, the cause says why
        error = error.__cause__
    # The query of an address may be a signature. httpx adds a link that explains the status code.
    text = re.sub(r"\?\S+| For more information check: \S+", "", " ".join(str(error).split()))
    return text or type(error).__name__
