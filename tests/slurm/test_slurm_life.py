"""What clusters do to jobs and nodes, and what people do to jobs, with steps that take no time: nothing is lost."""

from __future__ import annotations

import os
import random
import signal

import pytest
from cluster import LONG, until
from little import Little
from scenes import STEPS, TWO
from studies import asked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_same_command_survives_what_clusters_do(little: Little, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each blow the same command goes on; in the end every part of every step was done, and none twice."""
    one_job_or_step_is_cancelled(little)
    a_worker_is_killed_and_all_is_cancelled(little)
    run = little.start(TWO, "study=little", "wait=true")
    begun = len(little.begun("cost"))
    little.hold("cost")
    little.wait_for("cost", begun + 1)
    (job,) = little.cluster.ask("squeue", "-h", "-t", "R", "-n", "little.cost", "-o", "%i").split()
    a_job_is_requeued_and_the_controller_restarted(little, job, begun + 2, monkeypatch)
    the_node_is_drained_and_lost(little, job)
    errors = run.communicate(timeout=LONG)[1]
    assert run.returncode == 0, errors
    assert little.done_once() == STEPS
    assert "all 7 steps are done" in asked(little.store, "why", "little")


def one_job_or_step_is_cancelled(little: Little) -> None:
    """wait=true ends when all jobs have, and says what is missing."""
    little.hold("scores", "cost")
    run = little.start(TWO, "study=little", "wait=true")
    for kind in ("scores", "cost"):
        little.wait_for(kind)
    until(lambda: "little.record" in little.cluster.ask("squeue", "-h", "-o", "%j"), LONG, "not all is submitted")
    assert little.submit(TWO, "study=little") == {}, "what is in the queue is not submitted again"
    first, second = random.sample(["scores", "cost"], 2)
    (job,) = little.cluster.ask("squeue", "-h", "-n", f"little.{first}", "-o", "%i").split()
    little.cluster.ask("scancel", job)
    until(lambda: little.cluster.job(job)["JobState"] == "CANCELLED", LONG, "it is not cancelled")
    assert "cancelled; the same command" in asked(little.store, "why", f"{first}/")
    assert little.cluster.ask("squeue", "-h", "-t", "R", "-o", "%j").split() == [f"little.{second}"]
    assert "cancelled 1 jobs" in asked(little.store, "cancel", f"{second}/")
    errors = run.communicate(timeout=LONG)[1]
    assert run.returncode == 1 and "the same command goes on from here" in errors, errors


def a_worker_is_killed_and_all_is_cancelled(little: Little) -> None:
    """The other steps of the job are done, by another worker."""
    little.release()
    little.hold("plan", "cost")
    little.submit(TWO, "study=little")
    os.kill(little.wait_for("plan"), signal.SIGKILL)
    little.wait_for("plan", 2)
    assert len({step for step, _ in little.lines("begun") if step.startswith("plan/")}) == 2
    little.wait_for("cost", 2)
    assert "cancelled 4 jobs" in asked(little.store, "cancel", "little")
    little.wait_for_the_end()
    little.release()


def a_job_is_requeued_and_the_controller_restarted(
    little: Little, job: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the controller is away the store is asked all the same."""
    cluster = little.cluster
    cluster.ask("scontrol", "requeue", job)
    until(lambda: cluster.job(job)["JobState"] == "PENDING", LONG, "it is not requeued")
    cluster.end("slurmctld")
    with monkeypatch.context() as patched:
        patched.setenv("SLURM_CONF", str(cluster.impatient))
        assert "does not answer" in asked(little.store, "status", "little")
    cluster.launch("slurmctld", "-D")
    little.wait_for("cost", times)


def the_node_is_drained_and_lost(little: Little, job: str) -> None:
    """What runs on a drained node goes on there, what waits is started when it is back; a lost node's job again."""
    cluster, node = little.cluster, f"nodename={little.cluster.host}"
    cluster.ask("scontrol", "update", node, "state=drain", "reason=test")
    assert "drain" in cluster.ask("sinfo", "-h", "-o", "%T") and cluster.job(job)["JobState"] == "RUNNING"
    cluster.ask("scontrol", "update", node, "state=down", "reason=test")
    until(lambda: cluster.job(job)["JobState"] == "PENDING", LONG, "it is not requeued")
    assert "is PENDING (" in asked(little.store, "why", "little")
    little.release()
    cluster.ask("scontrol", "update", node, "state=resume")
