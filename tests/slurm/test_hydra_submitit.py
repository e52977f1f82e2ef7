"""Hydra's own Slurm launcher, which makes one study per job: the store keeps what they share single."""

from __future__ import annotations

import pytest
from cluster import LONG, until
from instant_studies import WORDS, InstantStudies

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_jobs_of_hydras_own_launcher_share_steps(instant: InstantStudies) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    words = ["launcher=inline", "study=both", "ratio=0.25,0.5"]
    own = ["-m", "hydra/launcher=submitit_slurm", "hydra.launcher.mem_gb=1", "hydra.launcher.timeout_min=5"]
    instant.hold("model")
    run = instant.type(*own, *WORDS, *words)
    until(lambda: len(instant.cluster.ask("squeue", "-h", "-r", "-t", "R").splitlines()) == 2, LONG, "no two jobs run")
    instant.release()
    printed, errors = run.communicate(timeout=LONG)
    assert run.returncode == 0, printed + errors
    assert instant.done_once() == {"model": 1, "scores": 1, "plan": 2, "cost": 3}
    assert len(instant.record("both")["cells"]) == 3
