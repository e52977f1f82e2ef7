"""Hydra launcher `study`: the jobs of a multirun become the cells of one study, so that steps that
they share run once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
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
        from moe_lab.compose import check_sweeper, compose
        from moe_lab.config.base import Mistakes
        from moe_lab.study.run import objective_value, run

        hydra = self.config.hydra
        searchpath = [text for text in hydra.overrides.hydra if "searchpath" in text]
        configs = []
        requests_of_jobs = []
        with Mistakes() as mistakes:
            if not job_overrides:
                texts = " ".join(hydra.overrides.task)
                mistakes.append(f"{texts} sweeps over nothing: expected patterns that match a name")
            for overrides in job_overrides:
                with mistakes.caught():
                    config, requests = compose([*searchpath, *overrides], hydra.job.config_name)
                    configs.append(config)
                    requests_of_jobs.append(requests)
        check_sweeper(hydra.runtime.choices, configs[0])
        # sweepers write their results there
        Path(hydra.sweep.dir).mkdir(parents=True, exist_ok=True)
        all_requests = list(chain.from_iterable(requests_of_jobs))
        # a sweeper launches some jobs at a time
        add = initial_job_idx > 0
        result = run(configs[0], all_requests, add=add, report_later=True)
        return [
            JobReturn(
                list(overrides),
                status=JobStatus.COMPLETED,
                _return_value=objective_value(result, requests),
            )
            for overrides, requests in zip(job_overrides, requests_of_jobs, strict=True)
        ]
