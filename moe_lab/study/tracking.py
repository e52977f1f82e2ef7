"""Log the results of a study to an experiment tracker (wandb): a copy to look at; the results stay in the store."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_lab.config import TrackerConfig
from moe_lab.errors import UserError, unknown

TRACKERS = ("none", "wandb")
MODES = ("online", "offline")
PROJECT = re.compile(r"[^/\\#?%:]{1,128}")
"""Names that wandb accepts for a project. Checked before the study, because wandb would refuse only at its end."""


def check(settings: TrackerConfig) -> None:
    """Raise UserError for an unknown tracker or mode, a project name that wandb refuses, and mode=online without a
    key."""
    if settings.name not in TRACKERS:
        raise unknown("tracker", settings.name, TRACKERS)
    if settings.mode is not None and settings.mode not in MODES:
        raise unknown("tracker.mode", settings.mode, MODES)
    if settings.name == "wandb" and not PROJECT.fullmatch(settings.project):
        raise UserError(f"tracker.project={settings.project}: expected 1 to 128 characters without / \\ # ? % or :")
    if settings.name == "wandb" and settings.mode == "online" and not _has_key():
        raise UserError("tracker.mode=online needs a key: run `wandb login` once, or set tracker.mode=offline")


def _has_key() -> bool:
    """Whether wandb finds credentials by itself, in the environment or in .netrc. Asks neither the user nor the
    server."""
    import wandb

    wandb.setup(_quiet())  # before login, which would print where it found a key
    return wandb.login(prompt=False, verify=False)


def log_study(
    settings: TrackerConfig, study: Mapping[str, Any], tables: Mapping[str, Path], figures: Sequence[Path]
) -> None:
    """Log a study's cells, its tables (name -> CSV file) and its figures (PNG files) as one run of the tracker.

    `study` is the study's record in the store. Prints nothing. Raises UserError when the tracker is unknown or
    refuses; all results stay in the store.
    """
    check(settings)
    if settings.name == "none":
        return
    import pandas
    import wandb

    wandb.setup(_quiet())  # before init, which would print where it found a key
    try:
        with wandb.init(
            project=settings.project,
            name=study["study"],
            mode=_mode(settings),
            config={key: value for key, value in study.items() if key not in ("cells", "families", "damages")},
            settings=_quiet(),
        ) as run:
            run.log({"cells": _cells(study)})
            run.log({f"tables/{name}": wandb.Table(dataframe=pandas.read_csv(file)) for name, file in tables.items()})
            run.log({f"figures/{file.stem}": wandb.Image(str(file)) for file in figures})
    except wandb.Error as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"tracker=wandb was not told ({reason}): everything is in the store; tracker.mode=offline needs no server"
        ) from error
    finally:
        wandb.teardown()  # only then has its background process written or sent everything


def _mode(settings: TrackerConfig) -> Any:
    """Mode of wandb: from the settings, else from WANDB_MODE, else online when there is a key, offline otherwise."""
    return settings.mode or os.environ.get("WANDB_MODE") or ("online" if _has_key() else "offline")


def _quiet() -> Any:
    """Settings of wandb without output, and without upload of anything but logged values: no console, code or command
    line."""
    import wandb

    return wandb.Settings(
        silent=True,
        console="off",
        init_timeout=30,
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        x_disable_meta=True,
        x_disable_stats=True,
    )


def _cells(study: Mapping[str, Any]) -> Any:
    """Table with a row per cell: its axes, and the folders of its plan and evaluations in the store, if any."""
    import wandb

    rows = [
        {
            **cell["cell"],
            "plan": cell.get("plan"),
            **{f"evaluate/{name}": folder for name, folder in cell.get("evaluate", {}).items()},
        }
        for cell in study["cells"]
    ]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    return wandb.Table(columns=columns, data=[[row.get(column) for column in columns] for row in rows])
