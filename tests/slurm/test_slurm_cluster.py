"""Studies on a real cluster of one node, without accounting. What does not get in the way of others
runs at once."""

import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import preloaded
import pytest
from cluster import LONG, STEPS, TWO, Cluster, InstantStudies, until
from studies import command, executed_steps, jobs, moe_lab, results, study_output

from moe_lab.paths import cache as cache_of
from moe_lab.results import read_record
from moe_lab.study.runs import runs
from moe_lab.study.store import Store
from tests.test_secrets import PLANTED, SERVER, leaks, served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SLURM = ["launcher=slurm", "launcher.cells_per_job=3"]
AGNOSTIC = [
    "+experiment=task_agnostic",
    "model=pocket_olmoe",
    "suite.benchmarks=[pocket_boolq,pocket_gsm8k]",
    "criterion=man,reap,aimer,random",
    "calibration=pocket_code",
]
"""The main experiment, smaller: one model, one calibration set, some criteria, two benchmarks."""
PASS = [
    "criterion=man",
    "suite.benchmarks=[]",
    "study=pass",
    "calibration.tokens=16384",
    "calibration.batch_size=1",
]
"""A calibration pass of 32 batches."""
DRAWN = ["criterion=random", "suite.benchmarks=[]"]
"""A plan, and nothing else."""


def inline(_: Cluster, store: Path) -> Path:
    """A store with the results of one process."""
    for words in (AGNOSTIC, PASS):
        done = moe_lab(store, *words, "launcher=inline")
        assert done.returncode == 0, done.stderr
    return store


def agnostic(cluster: Cluster, store: Path) -> Path:
    """A store in which jobs did all of the main experiment."""
    done = moe_lab(store, *AGNOSTIC, *SLURM, f"launcher.python={preloaded.python()}")
    assert done.returncode == 0 and "record" in jobs(done.stdout), done.stderr
    assert not list(store.glob("evaluate/*/step.json")), (
        "the command returns when jobs are submitted"
    )
    cluster.wait_for_the_end(store)
    return store


def secretive(_: Cluster, store: Path) -> None:
    """No file of submitted jobs has a secret: not what they are handed, their logs, the record, the
    report.

    The command's environment has some. Slurm keeps it in its spool, which is not searched.
    """
    settings = [
        served(SERVER, "{port} {name} {checkpoint}"),
        "backend=server",
        "criterion=random",
        "suite.benchmarks=[pocket_mbpp]",
        "suite.limit=2",
        "allow_code_execution=true",
        "resources.every.setup=['test -n $HF_TOKEN']",
        "report=true",
        "wait=true",
    ]
    done = moe_lab(store, *settings, *SLURM, environment={**os.environ, **PLANTED})
    assert done.returncode == 0 and "record" in jobs(done.stdout), done.stderr
    [run] = runs(Store(store), "study")
    assert leaks(store, done) == leaks(run.logs, done) == []
    record = read_record(store, "study")
    assert (
        record
        and len(record["cells"]) == 2
        and all(all(cell["evaluate"].values()) for cell in record["cells"])
    )
    assert list(run.logs.glob("*_submitted.pkl")) and (store / "reports/study/report.html").exists()
    assert not [*store.rglob("*.pkl"), *store.rglob("*.py")], "nothing that is executed"


def limited(cluster: Cluster, folder: Path) -> None:
    """A step goes on inside where its job's time ended; after max_requeues, here one, the next
    command takes it up.

    The first time it is the job's real limit, brought down while it runs. Slurm looks twice a
    minute, and a job that is past its limit when Slurm looks is killed without the signal: the new
    limit leaves one to two minutes, however long the job took to begin.
    """
    instant = InstantStudies(cluster, folder)
    words = [TWO, "study=limited", "launcher.max_requeues=1", "launcher.signal_seconds=59"]
    words += ["+resources.jobs={cost: {minutes: 10}}"]
    instant.hold("cost")
    job = instant.submit(*words)["cost"]
    instant.wait_for("cost")
    cluster.ask("scontrol", "update", f"jobid={job}", f"timelimit={cluster.minutes(job) + 2}")
    instant.wait_for("cost", 2)
    assert cluster.job(job)["Restarts"] == "1"
    cluster.ask("scancel", "--signal=USR2", job)
    until(lambda: cluster.job(job)["JobState"] == "FAILED", LONG, "it goes on")
    assert cluster.job(job)["Restarts"] == "1"
    log = "".join(file.read_text() for file in cache_of("jobs").glob(f"*/{job}*_log.*"))
    assert "this job is timed-out" in log and "Job not requeued" in log
    assert "failed; the same command" in study_output(instant.store, "why", "limited")
    instant.release()
    instant.wait_for_the_end()
    assert set(instant.submit(*words)) == {"cost", "evaluate", "record"}
    instant.wait_for_the_end()
    assert instant.done_once() == STEPS and len(instant.begun("cost")) == 5


def overlapping(cluster: Cluster, folder: Path) -> None:
    """Two studies do shared steps once, and in one of them a criterion's input cannot be had.

    Both are submitted before any step is done.
    """
    instant = InstantStudies(cluster, folder)
    instant.hold("model")
    (instant.folder / "break-weights").touch()
    (instant.folder / "apart").touch()
    wide = instant.start("study=wide", "ratio=0.1,0.2,0.3,0.4")
    broken = instant.start("study=broken", "ratio=0.2,0.3,0.4,0.5", "criterion=random,magnitude")
    said = [run.communicate(timeout=LONG) for run in (wide, broken)]
    assert (wide.returncode, broken.returncode) == (0, 0), said
    assert sum(printed.count("plan: 3 jobs, 3 steps") for printed, _ in said) >= 2, (
        "MaxArraySize is 3"
    )
    instant.release()
    instant.wait_for_the_end()
    assert instant.done_once() == {"model": 1, "scores": 1, "plan": 5, "cost": 6}
    cells = {name: (read_record(instant.store, name) or {})["cells"] for name in ("wide", "broken")}
    assert len(cells["wide"]) == 5 and all(cell["cost"] for cell in cells["wide"])
    there = Counter(
        (cell["cell"]["criterion"], cell["cost"] is not None) for cell in cells["broken"]
    )
    assert there == {("none", True): 1, ("random", True): 4, ("magnitude", False): 4}
    why = study_output(instant.store, "why", "broken")
    assert "broken on purpose" in why and "needs weights/" in why
    assert "broken on purpose" in study_output(instant.store, "why", "weights/")
    assert "failed" in study_output(instant.store, "status", "broken")


SCENES: dict[str, Callable[[Cluster, Path], Any]] = {
    "limited": limited,
    "overlapping": overlapping,
    "agnostic": agnostic,
    "inline": inline,
    "secretive": secretive,
}
Played = Callable[[str], Any]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all scenarios have their stores."""
    return tmp_path_factory.mktemp("scenarios")


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest, cluster: Cluster, folder: Path) -> Iterator[Played]:
    """What comes of a scenario. All are started at once, unless a single test is run."""
    with ThreadPoolExecutor() as pool:
        started = cache(lambda name: pool.submit(SCENES[name], cluster, folder / name))
        if sum(item.path == request.path for item in request.session.items) > 1:
            for name in SCENES:
                started(name)
        yield lambda name: started(name).result()
        cluster.ask("scancel", "--user=root")


@pytest.mark.parametrize("scene", ["overlapping", "secretive"])
def test_what_befalls_studies_while_others_run(scene: str, played: Played) -> None:
    played(scene)


def test_the_main_experiment_gives_the_numbers_of_one_process(played: Played) -> None:
    """Bit for bit, in the same store: the same steps, the same files, but for when and where they
    were made."""
    mine = results(played("agnostic"))
    theirs = results(played("inline"))
    own = {
        name: content
        for name, content in theirs.items()
        if name.split("/")[1] in {n.split("/")[1] for n in mine}
    }
    assert mine == own
    store = played("agnostic")
    steps = {str(path.parent.relative_to(store)) for path in store.glob("*/*/step.json")}
    counted = Counter(step.partition("/")[0] for step in steps)
    assert counted["evaluate"] == 18 and counted["plan"] == 8 and counted["statistics"] == 1
    assert executed_steps(store) == Counter(steps), "every step was given to a worker once"
    (last,) = [run for run in (store / "runs" / "task_agnostic").iterdir()]
    assert steps == set(json.loads((last / "run.json").read_text())["steps"])
    submitted = Counter(
        row["job"]["kind"] for row in json.loads((last / "jobs.json").read_text())["jobs"]
    )
    assert submitted["evaluate"] == 3, "nine models in jobs of three at most"
    record = read_record(store, "task_agnostic")
    assert (
        record
        and len(record["cells"]) == 9
        and all(all(cell["evaluate"].values()) for cell in record["cells"])
    )


def test_parts_of_a_pass_are_jobs_and_give_the_same_plan(
    cluster: Cluster, tmp_path: Path, played: Played
) -> None:
    store = tmp_path / "store"
    words = [*PASS, "calibration.parts=3"]
    done = moe_lab(store, *words, *SLURM, f"launcher.python={preloaded.python()}", "wait=true")
    assert done.returncode == 0, done.stderr
    submitted = [
        line.split(": ")[1] for line in done.stdout.splitlines() if " statistics: " in line
    ]
    assert submitted == ["3 jobs, 3 steps", "1 job, 1 step"]
    passes = {
        name: times
        for name, times in executed_steps(store).items()
        if name.startswith("statistics/")
    }
    assert len(passes) == 4 and set(passes.values()) == {1}
    [mine] = store.glob("plan/*/plan.json")
    label = mine.parent.name.rpartition("-")[0]
    [theirs] = played("inline").glob(f"plan/{label}-????????????/plan.json")
    assert json.loads(mine.read_text())["layers"] == json.loads(theirs.read_text())["layers"]
    again = moe_lab(store, *words, "launcher=inline")  # one process finds what the jobs made
    assert again.returncode == 0 and executed_steps(store) == Counter(
        {**executed_steps(store), **passes}
    ), again.stderr


def test_a_pass_is_saved_when_its_job_is_requeued(cluster: Cluster, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    store = tmp_path / "store"
    text.write_text("Anna has a dog. The dog sleeps in the barn at night.\n\n" * 40_000)
    words = ["criterion=man", "suite.benchmarks=[]", "calibration=text", f"calibration.path={text}"]
    done = moe_lab(store, *words, "calibration.tokens=262144", "calibration.batch_size=1", *SLURM)
    until(lambda: list(store.glob("partial/*/progress.json")), LONG, "the pass does not begin")
    cluster.ask("scontrol", "requeue", jobs(done.stdout)["statistics"])
    until(lambda: list(store.glob("partial/*/checkpoint.safetensors")), LONG, "nothing is saved")
    cluster.ask("scancel", *jobs(done.stdout).values())
    cluster.wait_for_the_end(store)


def test_jobs_of_a_study_that_is_started_inside_a_job_are_its_own(
    cluster: Cluster, tmp_path: Path
) -> None:
    """What the job around it was asked for, which SLURM_* say, is not what they are."""
    words = [
        "salloc",
        "--mem-per-cpu=500M",
        *command(tmp_path / "store", *DRAWN, *SLURM, "wait=true"),
    ]
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=tmp_path, env=cluster.environment
    )
    assert done.returncode == 0 and list(tmp_path.glob("store/plan/*/plan.json")), done.stderr


def test_a_job_that_dies_before_python_starts_is_explained(
    cluster: Cluster, tmp_path: Path
) -> None:
    """By the last lines of its own errors, of a line of `setup` here."""
    setup = "resources.every.setup=['echo no such module >&2', 'false']"
    done = moe_lab(tmp_path / "store", *DRAWN, "study=dead", setup, *SLURM)
    assert done.returncode == 0, done.stderr
    cluster.wait_for_the_end(tmp_path / "store")
    why, status = (study_output(tmp_path / "store", word, "dead") for word in ("why", "status"))
    assert all("| no such module" in said for said in (why, status))
    assert "is failed" in why and "jobs that ended without their steps: 6" in status
    assert "record: missing: job" in why


def test_jobs_run_the_code_as_it_was_when_they_were_submitted(
    cluster: Cluster, played: Played, tmp_path: Path
) -> None:
    """What is edited while jobs are in the queue, even in the folder they start in, does not
    matter."""
    tmp_path.chmod(0o755)
    checkout = tmp_path / "checkout"
    store = tmp_path / "store"
    for name in ("moe_lab", "analysis", "conf", "hydra_plugins"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    cells = (read_record(played("inline"), "task_agnostic") or {})["cells"]
    drawn = {
        cell["cell"]["seed"]: cell["plan"]
        for cell in cells
        if cell["cell"]["criterion"] == "random"
    }
    before = played("inline") / drawn[42]
    shutil.copytree(before.parents[1], store)
    shutil.rmtree(store / before.relative_to(before.parents[1]))
    cluster.ask("scontrol", "update", f"nodename={cluster.host}", "state=drain", "reason=test")
    done = subprocess.run(
        command(store, *DRAWN, "study=copied", *SLURM), cwd=checkout, capture_output=True, text=True
    )
    assert done.returncode == 0 and set(jobs(done.stdout)) == {"plan", "record"}, done.stderr
    for file in checkout.glob("moe_lab/study/**/*.py"):
        file.write_text("raise RuntimeError('edited')\n")
    cluster.ask("scontrol", "update", f"nodename={cluster.host}", "state=resume")
    cluster.wait_for_the_end(store)
    assert results(store) == results(before.parents[1])


def test_a_job_that_is_out_of_time_is_requeued_once(played: Played) -> None:
    """The last, since it waits for Slurm's own time."""
    played("limited")
