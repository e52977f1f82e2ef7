"""Studies on a real cluster of one node, without accounting. What does not get in the way of others runs at once."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import preloaded
import pytest
from cluster import LONG, Cluster
from instant_studies import InstantStudies
from scenarios import (
    PASS,
    SLURM,
    STEPS,
    Limited,
    Overlapping,
    a_checkout,
    play_agnostic,
    play_inline,
    play_interrupted,
    play_planted,
)
from studies import asked, command, jobs, moe_lab, ran, results

from moe_lab.results import read_record
from tests.test_secrets import leaks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (Path(__file__).parents[2] / "moe_lab/pocket/data/olmoe/model.safetensors").exists(),
        reason="no shipped model",
    ),
]


SCENES = ("limited", "overlapping", "agnostic", "one_process", "interrupted", "planted")


@pytest.fixture(scope="module", autouse=True)
def all_at_once(request: pytest.FixtureRequest) -> None:
    """Start the scenarios that tests to come want."""
    wanted = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}
    for name in SCENES:
        if name in wanted:
            request.getfixturevalue(name)


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as threads:
        yield threads


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all scenarios have their stores."""
    return tmp_path_factory.mktemp("scenarios")


@pytest.fixture(scope="module")
def limited(cluster: Cluster, pool: ThreadPoolExecutor, folder: Path) -> Iterator[Future[Limited]]:
    yield pool.submit((scenario := Limited(InstantStudies(cluster, folder / "limited"))).play)
    scenario.instant.end()


@pytest.fixture(scope="module")
def overlapping(cluster: Cluster, pool: ThreadPoolExecutor, folder: Path) -> Iterator[Future[Overlapping]]:
    yield pool.submit((scenario := Overlapping(InstantStudies(cluster, folder / "overlapping"))).play)
    scenario.instant.end()


@pytest.fixture(scope="module")
def agnostic(cluster: Cluster, pool: ThreadPoolExecutor, folder: Path) -> Future[Path]:
    return pool.submit(play_agnostic, cluster, folder / "agnostic")


@pytest.fixture(scope="module")
def one_process(pool: ThreadPoolExecutor, folder: Path) -> Future[Path]:
    return pool.submit(play_inline, folder / "inline")


@pytest.fixture(scope="module")
def interrupted(cluster: Cluster, pool: ThreadPoolExecutor, folder: Path) -> Future[tuple[Path, list[int]]]:
    return pool.submit(play_interrupted, cluster, folder / "interrupted")


@pytest.fixture(scope="module")
def planted(cluster: Cluster, pool: ThreadPoolExecutor, folder: Path) -> Future[subprocess.CompletedProcess[str]]:
    return pool.submit(play_planted, folder / "planted")


def test_overlapping_studies_do_shared_steps_once(overlapping: Future[Overlapping]) -> None:
    played = overlapping.result()
    instant = played.instant
    assert instant.done_once() == {"model": 1, "scores": 1, "plan": 5, "cost": 6}
    assert sum(text.count("plan: 3 jobs, 3 steps") for text in played.printed) >= 2, "MaxArraySize is 3"
    wide, broken = (instant.record(name) for name in ("wide", "broken"))
    assert len(wide["cells"]) == 5 and all(cell["cost"] for cell in wide["cells"])
    there = Counter((cell["cell"]["criterion"], cell["cost"] is not None) for cell in broken["cells"])
    assert there == {("none", True): 1, ("random", True): 4, ("magnitude", False): 4}


def test_a_mistake_is_told_where_it_happened(overlapping: Future[Overlapping]) -> None:
    store = overlapping.result().instant.store
    why = asked(store, "why", "broken")
    assert "broken on purpose" in why and "needs weights/" in why
    assert "broken on purpose" in asked(store, "why", "weights/")
    assert "failed" in asked(store, "status", "broken")


def test_the_main_experiment_gives_the_numbers_of_one_process(
    agnostic: Future[Path], one_process: Future[Path]
) -> None:
    """Bit for bit, in the same store: the same steps, the same files, but for when and where they were made."""
    mine, theirs = results(agnostic.result()), results(one_process.result())
    own = {name: content for name, content in theirs.items() if name.split("/")[1] in {n.split("/")[1] for n in mine}}
    assert mine == own
    counted = Counter(file.parts[-3] for file in agnostic.result().glob("*/*/step.json"))
    assert counted["evaluate"] == 10 and counted["plan"] == 4 and counted["statistics"] == 1


def test_each_step_of_the_main_experiment_ran_once(agnostic: Future[Path]) -> None:
    store = agnostic.result()
    steps = {str(path.parent.relative_to(store)) for path in store.glob("*/*/step.json")}
    assert ran(store) == Counter(steps), "every step was given to a worker once"
    (last,) = [run for run in (store / "runs" / "task_agnostic").iterdir()]
    assert steps == {folder for _, folder, _ in json.loads((last / "run.json").read_text())["steps"]}
    submitted = Counter(job["kind"] for job in json.loads((last / "jobs.json").read_text()))
    assert submitted["evaluate"] == 2, "five models in jobs of three at most"
    record = read_record(store, "task_agnostic")
    assert record and len(record["cells"]) == 5 and all(all(cell["evaluate"].values()) for cell in record["cells"])


def test_an_interrupted_pass_goes_on_where_it_was(
    interrupted: Future[tuple[Path, list[int]]], one_process: Future[Path]
) -> None:
    """To the very sums of one that was not interrupted, no group of batches read twice."""
    store, saved = interrupted.result()
    assert saved == sorted(set(saved)) and saved[0] < 32 and len(saved) > 1, saved
    (mine,) = [content for name, content in results(store).items() if name.endswith("statistics.safetensors")]
    assert mine in results(one_process.result()).values()


def test_parts_of_a_pass_are_jobs_and_give_the_plan_of_one_process(
    cluster: Cluster, tmp_path: Path, one_process: Future[Path]
) -> None:
    store = tmp_path / "store"
    words = [*PASS, "calibration.parts=3"]
    done = moe_lab(store, *words, *SLURM, f"launcher.python={preloaded.python()}", "wait=true")
    assert done.returncode == 0, done.stderr
    assert [line.split(": ")[1] for line in done.stdout.splitlines() if " statistics: " in line] == [
        "3 jobs, 3 steps",
        "1 job, 1 step",
    ]
    passes = {name: times for name, times in ran(store).items() if name.startswith("statistics/")}
    assert len(passes) == 4 and set(passes.values()) == {1}
    [mine] = store.glob("plan/*/plan.json")
    label = mine.parent.name.rpartition("-")[0]
    [theirs] = one_process.result().glob(f"plan/{label}-????????????/plan.json")
    assert json.loads(mine.read_text())["layers"] == json.loads(theirs.read_text())["layers"]
    again = moe_lab(store, *words, "launcher=inline")  # one process finds what the jobs made
    assert again.returncode == 0 and ran(store) == Counter({**ran(store), **passes}), again.stderr


def test_a_time_limit_interrupts_and_requeues_so_often(limited: Future[Limited]) -> None:
    """A step goes on inside where its time ended; after max_requeues the next command takes it up."""
    played = limited.result()
    log = played.instant.log("limited", played.first["cost"])
    assert played.restarted["Restarts"] == played.ended["Restarts"] == "1"
    assert "this job is timed-out" in log and "Job not requeued" in log
    assert "failed; the same command" in played.why
    assert set(played.again) == {"cost", "evaluate", "record"}
    assert played.instant.done_once() == STEPS and len(played.instant.begun("cost")) == 5


def test_no_file_of_submitted_jobs_has_a_secret(
    planted: Future[subprocess.CompletedProcess[str]], folder: Path
) -> None:
    """Neither what jobs are handed, nor their copy of the code, their logs, the record or the report.

    Slurm itself keeps the environment that a job is submitted with, in its spool, which is not searched.
    """
    done, store = planted.result(), folder / "planted"
    assert done.returncode == 0 and "record" in jobs(done.stdout), done.stderr
    assert leaks(store, done) == []
    record = read_record(store, "study")
    assert record and len(record["cells"]) == 2 and all(all(cell["evaluate"].values()) for cell in record["cells"])
    assert list(store.glob("runs/study/*/jobs/*_submitted.pkl")) and (store / "reports/study/report.html").exists()


def test_jobs_run_the_code_as_it_was_when_they_were_submitted(
    cluster: Cluster, one_process: Future[Path], tmp_path: Path
) -> None:
    """What is edited while jobs are in the queue, even in the folder they start in, does not matter."""
    tmp_path.chmod(0o755)
    checkout, store = a_checkout(tmp_path / "checkout"), tmp_path / "store"
    (before,) = one_process.result().glob("plan/*-random-*")
    shutil.copytree(before.parents[1], store)
    shutil.rmtree(store / before.relative_to(before.parents[1]))
    cluster.ask("scontrol", "update", f"nodename={cluster.host}", "state=drain", "reason=test")
    words = ["criterion=random", "suite.benchmarks=[]", "study=copied"]
    done = subprocess.run(command(store, *words, *SLURM), cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0 and set(jobs(done.stdout)) == {"plan", "record"}, done.stderr
    for file in checkout.glob("moe_lab/study/**/*.py"):
        file.write_text("raise RuntimeError('edited')\n")
    cluster.ask("scontrol", "update", f"nodename={cluster.host}", "state=resume")
    cluster.wait_for_the_end(store)
    assert results(store) == results(before.parents[1])


REFUSED = {
    "resources.every.partition=nope": ("invalid partition specified: nope", "partition=nope"),
    "+resources.jobs={plan: {partition: nope}}": ("invalid partition specified: nope", "resources.jobs.plan"),
    "resources.every.sbatch={constraint:h100}": ("Invalid feature specification", "constraint=h100"),
}
"""What is asked for -> what is said, in the scheduler's words, and what was asked for."""


def test_what_cannot_be_had_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    """Also where the first arrays were taken already."""
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
    left = cluster.ask("squeue", "-h", "-t", "pending,running", "-o", "%F").split()
    assert set(left) <= set(before), "something was left in the queue"
