"""Log the results of a study to an experiment tracker (wandb): a copy to look at; the results stay in the store."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_lab.config import TrackerConfig
from moe_lab.errors import UserError


def _has_key() -> bool:
    """Whether wandb finds credentials by itself, in the environment or in .netrc. Asks neither the user nor the
    server."""
    import wandb

    wandb.setup(_quiet())  # before login, which would print where it found a key
    return wandb.login(prompt=False, verify=False)


def log_study(
    settings: TrackerConfig, study: Mapping[str, Any], tables: Mapping[str, Path], figures: Sequence[Path]
) -> None:
    """Log a study's cells, its tables (name -> CSV file) and its figures (PNG files) as one run of wandb.

    `study` is the study's record in the store. Prints nothing. Raises UserError when the tracker refuses; all results
    stay in the store. WANDB_MODE says whether it is told now; without it, it is where there is a key.
    """
    import pandas
    import wandb

    mode: Any = None if "WANDB_MODE" in os.environ or _has_key() else "offline"
    about = {key: value for key, value in study.items() if key not in ("cells", "families", "damages")}
    rows = [
        {**cell["cell"], "plan": cell.get("plan")}
        | {f"evaluate/{name}": folder for name, folder in cell["evaluate"].items()}
        for cell in study["cells"]
    ]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    wandb.setup(_quiet())  # before init, which would print where it found a key
    try:
        with wandb.init(
            project=settings.project, name=study["study"], mode=mode, config=about, settings=_quiet()
        ) as run:
            run.log({"cells": wandb.Table(columns, [[row.get(column) for column in columns] for row in rows])})
            run.log({f"tables/{name}": wandb.Table(dataframe=pandas.read_csv(file)) for name, file in tables.items()})
            run.log({f"figures/{file.stem}": wandb.Image(str(file)) for file in figures})
    except wandb.Error as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"tracker=wandb was not told ({reason}): everything is in the store; WANDB_MODE=offline needs no server"
        ) from error
    finally:
        wandb.teardown()  # only then has its background process written or sent everything


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
