"""Hydra launcher `study`: the jobs of a multirun become the cells of one study, so that steps that
they share run once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

ConfigStore.instance().store(
    group="hydra/launcher",
    name="study",
    node={"_target_": "hydra_plugins.moe_lab_study.launcher.StudyLauncher"},
    provider="moe_lab",
)


class StudyLauncher(Launcher):
    """Composes the settings of all jobs, and runs them as one study."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        self.config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        from moe_lab.compose import run_jobs

        hydra = self.config.hydra
        # a sweeper launches some jobs at a time
        values = run_jobs(hydra, job_overrides, add=initial_job_idx > 0, report_later=True)
        # sweepers write their results there
        Path(hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
        return [
            JobReturn(list(overrides), status=JobStatus.COMPLETED, _return_value=value)
            for overrides, value in zip(job_overrides, values, strict=True)
        ]
