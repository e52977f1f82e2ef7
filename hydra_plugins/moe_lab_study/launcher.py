"""Hydra launcher `study`: all jobs of a multirun become the cells of one study, so that shared steps run once."""

from __future__ import annotations

from collections.abc import Sequence

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
    """Composes every job, and hands all of them to one study."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.loader, self.config = hydra_context.config_loader, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from moe_lab.compose import ask
        from moe_lab.errors import UserError

        if not job_overrides:
            words = " ".join(self.config.hydra.overrides.task)
            raise UserError(f"{words} sweeps over nothing: expected patterns that match a name")
        jobs = [self.loader.load_sweep_config(self.config, list(overrides)) for overrides in job_overrides]
        code = ask(jobs)
        return [
            JobReturn(overrides=list(overrides), status=JobStatus.COMPLETED, _return_value=code)
            for overrides in job_overrides
        ]
