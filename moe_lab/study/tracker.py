"""Log a study to the experiment tracker Weights & Biases, with one run for each cell."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from moe_lab.config import TrackerConfig
from moe_lab.errors import UserError, check_known, reason_in
from moe_lab.json_files import Document, digest
from moe_lab.result_files import ID_DIGITS, start_of
from moe_lab.study.store import Store


def check() -> None:
    """Raise UserError if the variable WANDB_MODE is an unknown mode."""
    mode = os.environ.get("WANDB_MODE", "online")
    check_known("WANDB_MODE", mode, ("online", "offline", "disabled"))


RUN_VARIABLES = (
    "RUN_ID",
    "NAME",
    "RUN_NAME",
    "RUN_GROUP",
    "RESUME",
    "RESUME_FROM",
    "FORK_FROM",
    "SWEEP_ID",
    "SWEEP_PARAM_PATH",
    "LAUNCH",
    "LAUNCH_CONFIG_PATH",
)
"""Names, without the prefix WANDB_, of environment variables that override arguments of
`wandb.init`. The shell of a `wandb agent` has these variables."""


@patch.dict(os.environ)  # the variables are restored at the end
def log(settings: TrackerConfig, store: Store, record: Document) -> str:
    """Log the cells that have results of all their benchmarks to wandb, each as one run. Returns a
    sentence for the user. `record`: the record of the study.

    If a cell was logged before, its run at wandb is continued. In the mode "offline", cells that
    were logged offline before are left out. WANDB_MODE or `wandb offline` sets the mode. Without a
    key, the mode is "offline". Raises UserError with the error of wandb.
    """
    for name in RUN_VARIABLES:
        os.environ.pop(f"WANDB_{name}", None)
    import wandb

    # with these settings, wandb prints nothing and uploads only logged values
    switches = (
        "silent",
        "disable_code",
        "disable_git",
        "disable_job_creation",
        "x_disable_meta",
        "x_disable_stats",
    )
    quiet: dict[str, Any] = {**dict.fromkeys(switches, True), "console": "off", "init_timeout": 30}
    # set before login and init, which otherwise print where the key is stored
    wandb_settings = wandb.setup(wandb.Settings(**quiet)).settings
    needs_login = wandb_settings.mode == "online" and "WANDB_MODE" not in os.environ
    mode: Any = (
        "offline"
        if needs_login and not wandb.login(prompt=False, verify=False)
        else wandb_settings.mode
    )
    cells = [
        entry for entry in record["cells"] if mode != "disabled" and all(entry["evaluate"].values())
    ]
    try:
        for entry in cells:
            step_starts = sorted(start_of(folder) for folder in entry["evaluate"].values())
            # a run of wandb has one group, so a cell of two studies has two runs
            run_id = digest([record["study"], entry["cell"], step_starts])[:ID_DIGITS]
            if mode == "offline" and any(
                Path(wandb_settings.wandb_dir).glob(f"offline-run-*-{run_id}")
            ):
                continue
            options = {"id": run_id, "group": record["study"], "mode": mode, "settings": quiet}
            _log_cell(settings, store, entry, options)
    except wandb.Error as error:
        raise UserError(
            f"tracker=wandb failed ({reason_in(error)}): WANDB_MODE=offline needs no server"
        ) from error
    finally:
        wandb.teardown()  # waits until the process of wandb has written or sent everything
    return (
        f"tracker: {len(cells)} of {len(record['cells'])} cells are logged ({mode}, in "
        f"{wandb_settings.wandb_dir})"
    )


def _log_cell(
    settings: TrackerConfig, store: Store, entry: Document, options: Mapping[str, Any]
) -> None:
    """Log a cell as one run of wandb. `entry`: the cell's entry in the record. `options`: further
    arguments of `wandb.init`."""
    import wandb

    from moe_lab.analysis.render import vega

    # results are read before the run begins, so that a damaged result leaves no empty run
    numbers, losses = _cell_results(store, entry)
    arguments: Any = {
        **options,
        "project": settings.project,
        # the step's label
        "name": Path(str(entry["cost"] or entry["model"])).name[: -ID_DIGITS - 1],
        "resume": "allow",
        "config": {**entry["cell"], "protocol": entry["protocol"], "plan": entry["plan"]},
    }
    with wandb.init(**arguments) as run:
        # a continued run already has the first `run.step` losses
        for step in range(run.step, len(losses)):
            run.log({"recovery/loss": losses[step]}, step=step)
        run.summary.update(numbers)
        report = store.root.absolute() / "reports" / options["group"]
        if (page := report / "report.html").is_file():
            run.summary["report"] = page.as_uri()
        # last, because the number of steps in a run is the number of losses that it has
        if (chart := report / "figures" / "ranking.json").is_file():
            run.log({"ranking": wandb.Html(vega.draw(chart, "svg").decode())})


def _cell_results(store: Store, entry: Document) -> tuple[dict[str, float], list[float]]:
    """Returns (numbers, losses) of a cell:

    - numbers: name -> score or cost
    - losses: loss in each step of fine-tuning; [] without fine-tuning"""

    def read(folder: str | None, file: str) -> Document:
        """A JSON file of a step; {} without the step."""
        document: Document = json.loads(store.content(folder, file)) if folder else {}
        return document

    cost = read(entry["cost"], "cost.json")
    # a dictionary has the FLOPs of each part of the model
    numbers = {f"cost/{name}": value for name, value in cost.items() if not isinstance(value, dict)}
    for step_folder in entry["evaluate"].values():
        for result in read(step_folder, "result.json")["results"]:
            numbers[f"scores/{result['benchmark']}/{result['metric']}"] = result["score"]
    return numbers, read(entry["finetune"], "finetune.json").get("loss", [])
