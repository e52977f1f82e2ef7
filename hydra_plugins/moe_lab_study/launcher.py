"""Hydra launcher `study`: all jobs of a multirun become the cells of one study, so that shared
steps run once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from moe_lab.study.steps.files import Models

ConfigStore.instance().store(
    group="hydra/launcher",
    name="study",
    node={"_target_": "hydra_plugins.moe_lab_study.launcher.StudyLauncher"},
    provider="moe_lab",
)


class StudyLauncher(Launcher):
    """Composes every job, and hands all of them to one study."""

    models: Models | None = None

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        from moe_lab.compose import check_sweeper, compose
        from moe_lab.config.base import Mistakes
        from moe_lab.study.objective import objective_value
        from moe_lab.study.run import check_and_run
        from moe_lab.study.steps.files import Models

        hydra = self.config.hydra
        searchpath = [word for word in hydra.overrides.hydra if "searchpath" in word]
        asked = []
        with Mistakes() as mistakes:
            if not job_overrides:
                words = " ".join(hydra.overrides.task)
                mistakes.append(f"{words} sweeps over nothing: expected patterns that match a name")
            for overrides in job_overrides:
                with mistakes.caught():
                    asked.append(compose([*searchpath, *overrides], hydra.job.config_name))
        config = asked[0][0]
        check_sweeper(hydra.runtime.choices, config)
        # sweepers write what they found there
        Path(hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
        every = [request for _, requests in asked for request in requests]
        self.models = self.models or Models()
        # a sweeper launches some jobs at a time
        ended = check_and_run(config, every, add=initial_job_idx > 0, models=self.models)
        return [
            JobReturn(
                list(overrides),
                status=JobStatus.COMPLETED,
                _return_value=objective_value(ended, requests),
            )
            for overrides, (_, requests) in zip(job_overrides, asked, strict=True)
        ]
