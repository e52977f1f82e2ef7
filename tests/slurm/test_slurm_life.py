"""Jobs that are cancelled, killed or requeued, and nodes that are lost, with steps that take no
time: every step is computed once."""

import os
import random
import signal

import pytest
from cluster import (
    INSTANT_SETTINGS,
    JOB_SECONDS,
    STEP_COUNTS,
    TWO_RATIOS,
    InstantStudies,
)
from processes import wait_until
from studies import study_output

from moe_lab.result_files import read_record

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_same_command_goes_on_after_failures_of_the_cluster(
    instant: InstantStudies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each failure the same command goes on; in the end every part of every step was computed
    once."""
    one_job_or_step_is_cancelled(instant)
    a_worker_is_killed_and_all_is_cancelled(instant)
    run = instant.start(TWO_RATIOS, "study=instant", "wait=true")
    begun = len(instant.processes_of("cost"))
    instant.hold("cost")
    instant.wait_for("cost", begun + 1)
    (job,) = instant.cluster.command_output(
        "squeue", "-h", "-t", "R", "-n", "instant.cost", "-o", "%i"
    ).split()
    a_job_is_requeued_and_the_controller_restarted(instant, job, begun + 2, monkeypatch)
    the_node_is_drained_and_lost(instant, job)
    errors = run.communicate(timeout=JOB_SECONDS)[1]
    assert run.returncode == 0, errors
    assert instant.finished_step_counts() == STEP_COUNTS
    assert study_output(instant.store, "why", "instant") == "instant: all 7 steps are done\n", (
        "nor is a record missing"
    )


def one_job_or_step_is_cancelled(instant: InstantStudies) -> None:
    """wait=true ends when all jobs have, and says what is missing."""
    instant.hold("scores", "cost")
    run = instant.start(TWO_RATIOS, "study=instant", "wait=true")
    for kind in ("scores", "cost"):
        instant.wait_for(kind)
    wait_until(
        lambda: "instant.record" in instant.cluster.command_output("squeue", "-h", "-o", "%j"),
        JOB_SECONDS,
        "not all is submitted",
    )
    assert instant.submit(TWO_RATIOS, "study=instant") == {}, (
        "what is in the queue is not submitted again"
    )
    first, second = random.sample(["scores", "cost"], 2)
    (job,) = instant.cluster.command_output(
        "squeue", "-h", "-n", f"instant.{first}", "-o", "%i"
    ).split()
    instant.cluster.command_output("scancel", job)
    wait_until(
        lambda: instant.cluster.job_fields(job)["JobState"] == "CANCELLED",
        JOB_SECONDS,
        "it is not cancelled",
    )
    assert "cancelled; the same command" in study_output(instant.store, "why", f"{first}/")
    assert instant.cluster.command_output("squeue", "-h", "-t", "R", "-o", "%j").split() == [
        f"instant.{second}"
    ]
    assert "cancelled 1 jobs" in study_output(instant.store, "cancel", f"{second}/")
    errors = run.communicate(timeout=JOB_SECONDS)[1]
    assert run.returncode == 1 and "the same command goes on from here" in errors, errors


def a_worker_is_killed_and_all_is_cancelled(instant: InstantStudies) -> None:
    """The other steps of the job are done, by another worker."""
    instant.release()
    instant.hold("plan", "cost")
    instant.submit(TWO_RATIOS, "study=instant")
    os.kill(instant.wait_for("plan"), signal.SIGKILL)
    instant.wait_for("plan", 2)
    assert len({step for step, _ in instant.lines("begun") if step.startswith("plan/")}) == 2
    instant.wait_for("cost", 2)
    assert "cancelled 4 jobs" in study_output(instant.store, "cancel", "instant")
    instant.wait_for_the_end()
    instant.release()


def a_job_is_requeued_and_the_controller_restarted(
    instant: InstantStudies, job: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the controller is away the store is asked all the same."""
    cluster = instant.cluster
    cluster.command_output("scontrol", "requeue", job)
    wait_until(
        lambda: cluster.job_fields(job)["JobState"] == "PENDING", JOB_SECONDS, "it is not requeued"
    )
    cluster.end("slurmctld")
    with monkeypatch.context() as patched:
        impatient = cluster.folder / "impatient.conf"
        impatient.write_text(cluster.configuration.read_text() + "MessageTimeout=2\n")
        patched.setenv("SLURM_CONF", str(impatient))
        assert "does not answer" in study_output(instant.store, "status", "instant")
    cluster.launch("slurmctld", "-D")
    instant.wait_for("cost", times)


def the_node_is_drained_and_lost(instant: InstantStudies, job: str) -> None:
    """Jobs that run on a drained node go on; pending jobs start when the node is back; the job of a
    lost node is requeued."""
    cluster = instant.cluster
    node = f"nodename={instant.cluster.host}"
    cluster.command_output("scontrol", "update", node, "state=drain", "reason=test")
    assert "drain" in cluster.command_output("sinfo", "-h", "-o", "%T")
    assert cluster.job_fields(job)["JobState"] == "RUNNING"
    cluster.command_output("scontrol", "update", node, "state=down", "reason=test")
    wait_until(
        lambda: cluster.job_fields(job)["JobState"] == "PENDING", JOB_SECONDS, "it is not requeued"
    )
    assert "is PENDING (" in study_output(instant.store, "why", "instant")
    instant.release()
    cluster.command_output("scontrol", "update", node, "state=resume")


def test_jobs_of_hydras_own_launcher_share_steps(instant: InstantStudies) -> None:
    """The launcher submits one study per job; steps that the studies share are computed once."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    settings = ["launcher=inline", "study=both", "ratio=0.25,0.5"]
    launcher = [
        "-m",
        "hydra/launcher=submitit_slurm",
        "hydra.launcher.mem_gb=1",
        "hydra.launcher.timeout_min=5",
    ]
    instant.hold("model")
    run = instant.start_command(*launcher, *INSTANT_SETTINGS, *settings)
    wait_until(
        lambda: (
            len(instant.cluster.command_output("squeue", "-h", "-r", "-t", "R").splitlines()) == 2
        ),
        JOB_SECONDS,
        "no two jobs run",
    )
    instant.release()
    printed, errors = run.communicate(timeout=JOB_SECONDS)
    assert run.returncode == 0, printed + errors
    assert instant.finished_step_counts() == STEP_COUNTS
    assert len((read_record(instant.store, "both") or {})["cells"]) == 3
