"""Studies on a real cluster of one node, without accounting. What does not get in the way of others runs at once."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cluster import LONG, Cluster
from little import Little
from scenes import SLURM, STEPS, Limited, Overlapping, agnostic, inline, interrupted
from studies import asked, command, jobs, ran, results

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (Path(__file__).parents[2] / "moe_lab/pocket/data/olmoe/model.safetensors").exists(),
        reason="no shipped model",
    ),
]


@pytest.fixture(scope="module")
def scenes(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Future[Any]]]:
    """All scenes, started together."""
    folders = {}
    for name in ("limited", "overlapping", "agnostic", "inline", "interrupted"):
        folders[name] = tmp_path_factory.mktemp(name)
        folders[name].chmod(0o755)
    limited = Limited(Little(cluster, folders["limited"]))
    overlapping = Overlapping(Little(cluster, folders["overlapping"]))
    with ThreadPoolExecutor() as pool:
        yield {
            "limited": pool.submit(limited.play),
            "overlapping": pool.submit(overlapping.play),
            "agnostic": pool.submit(agnostic, cluster, folders["agnostic"] / "store"),
            "inline": pool.submit(inline, folders["inline"] / "store"),
            "interrupted": pool.submit(interrupted, cluster, folders["interrupted"] / "store"),
        }
        limited.little.end()
        overlapping.little.end()


def test_overlapping_studies_do_shared_steps_once(scenes: Mapping[str, Future[Any]]) -> None:
    played = scenes["overlapping"].result()
    little = played.little
    assert little.done_once() == {"model": 1, "scores": 1, "plan": 5, "cost": 6}
    assert sum(text.count("plan: 3 jobs, 3 steps") for text in played.printed) >= 2, "MaxArraySize is 3"
    wide, broken = (little.record(name) for name in ("wide", "broken"))
    assert len(wide["cells"]) == 5 and all(cell["cost"] for cell in wide["cells"])
    there = Counter((cell["cell"]["criterion"], cell["cost"] is not None) for cell in broken["cells"])
    assert there == {("none", True): 1, ("random", True): 4, ("magnitude", False): 4}


def test_a_mistake_is_told_where_it_happened(scenes: Mapping[str, Future[Any]]) -> None:
    store = scenes["overlapping"].result().little.store
    why = asked(store, "why", "broken")
    assert "broken on purpose" in why and "needs weights/" in why
    assert "broken on purpose" in asked(store, "logs", "weights/")
    assert "failed" in asked(store, "status", "broken")


def test_the_main_experiment_gives_the_numbers_of_one_process(scenes: Mapping[str, Future[Any]]) -> None:
    """Bit for bit, in the same store: the same steps, the same files, but for when and where they were made."""
    mine, theirs = results(scenes["agnostic"].result()), results(scenes["inline"].result())
    own = {name: content for name, content in theirs.items() if name.split("/")[1] in {n.split("/")[1] for n in mine}}
    assert mine == own
    counted = Counter(name.split("/")[0] for name in mine if name.endswith("step.json"))
    assert counted["evaluate"] == 10 and counted["plan"] == 4 and counted["statistics"] == 1


def test_each_step_of_the_main_experiment_ran_once(scenes: Mapping[str, Future[Any]]) -> None:
    store = scenes["agnostic"].result()
    steps = {str(path.parent.relative_to(store)) for path in store.glob("*/*/manifest.json")}
    assert ran(store) == Counter(steps), "every step was given to a worker once"
    (last,) = [run for run in (store / "runs" / "task_agnostic").iterdir()]
    assert steps == {folder for _, folder, _ in json.loads((last / "run.json").read_text())["steps"]}
    record = json.loads((store / "studies" / "task_agnostic.json").read_text())
    assert len(record["cells"]) == 5 and all(all(cell["evaluate"].values()) for cell in record["cells"])


def test_an_interrupted_pass_goes_on_where_it_was(scenes: Mapping[str, Future[Any]]) -> None:
    """To the very sums of one that was not interrupted, no group of batches read twice."""
    store, saved = scenes["interrupted"].result()
    assert saved == sorted(set(saved)) and saved[0] < 32 and len(saved) > 1, saved
    (mine,) = [content for name, content in results(store).items() if name.endswith("statistics.safetensors")]
    assert mine in results(scenes["inline"].result()).values()


def test_a_time_limit_interrupts_and_requeues_so_often(scenes: Mapping[str, Future[Any]]) -> None:
    """A step goes on inside where its time ended; after max_requeues the next command takes it up."""
    played = scenes["limited"].result()
    log = played.little.log("limited", played.first["cost"])
    assert played.restarted["Restarts"] == played.ended["Restarts"] == "1"
    assert "this job is timed-out" in log and "Job not requeued" in log
    assert "failed; the same command" in played.why
    assert set(played.again) == {"cost", "evaluate", "record"}
    assert played.little.done_once() == STEPS and len(played.little.begun("cost")) == 5


def test_jobs_run_the_code_as_it_was_when_they_were_submitted(
    cluster: Cluster, scenes: Mapping[str, Future[Any]], tmp_path: Path
) -> None:
    """snapshot=true: what is edited while jobs are in the queue, even in the folder they start in, does not matter."""
    tmp_path.chmod(0o755)
    checkout, store = tmp_path / "checkout", tmp_path / "store"
    root = Path(__file__).parents[2]
    for name in ("moe_lab", "analysis", "conf", "hydra_plugins"):
        shutil.copytree(root / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    (before,) = scenes["inline"].result().glob("plan/*-random-*")
    shutil.copytree(before.parents[1], store)
    shutil.rmtree(store / before.relative_to(before.parents[1]))
    cluster.ask("scontrol", "update", f"nodename={cluster.host}", "state=drain", "reason=test")
    words = ["criterion=random", "suite.benchmarks=[]", "study=snapshot", "snapshot=true"]
    done = subprocess.run(command(store, *words, *SLURM), cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0 and set(jobs(done.stdout)) == {"plan", "record"}, done.stderr
    for file in checkout.glob("moe_lab/study/**/*.py"):
        file.write_text("raise RuntimeError('edited')\n")
    cluster.ask("scontrol", "update", f"nodename={cluster.host}", "state=resume")
    cluster.wait_for_the_end(store)
    assert results(store) == results(before.parents[1])


REFUSED = {
    "resources.every.partition=nope": ("invalid partition specified: nope", "resources.every.partition"),
    "+resources.jobs={plan: {partition: nope}}": ("invalid partition specified: nope", "resources.jobs of plan"),
    "resources.every.constraint=h100": ("Invalid feature specification", "resources.every.constraint"),
    "+resources.jobs={plan: {cpus: 9}}": ("no node of partition debug has that: sinfo shows gpus=2 cpus=8", "plan"),
    "resources.every.memory=900": ("ask for memory=900.0, and no node of partition debug", "resources.every.memory"),
    "resources.every.gpus=3": ("ask for gpus=3 cpus=24, and no node of partition debug", "resources.every.gpus"),
    "resources.every.minutes=90": ("ask for minutes=90, and no node", "resources.every.minutes"),
}
"""What is asked for -> what is said, in the scheduler's words or figures, and the setting to change."""


def test_what_cannot_be_had_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    """Also where the first arrays were taken already, and what Slurm would take and leave waiting for ever."""
    cluster.ask("scontrol", "update", "partition=debug", "maxtime=60")
    before = cluster.ask("squeue", "-h", "-o", "%F").split()
    words = ["criterion=random", "suite.benchmarks=[]", *SLURM]
    runs = {
        asked: subprocess.Popen(
            command(tmp_path / str(number), *words, asked), cwd=tmp_path, text=True, stderr=subprocess.PIPE
        )
        for number, asked in enumerate(REFUSED)
    }
    for number, (asked_for, run) in enumerate(runs.items()):
        errors = run.communicate(timeout=LONG)[1]
        said, key = REFUSED[asked_for]
        assert run.returncode == 2 and said in errors and key in errors and "Traceback" not in errors, errors
        assert not list((tmp_path / str(number) / "runs").glob("*/*"))
    cluster.ask("scontrol", "update", "partition=debug", "maxtime=infinite")
    left = cluster.ask("squeue", "-h", "-t", "pending,running", "-o", "%F").split()
    assert set(left) <= set(before), "something was left in the queue"
