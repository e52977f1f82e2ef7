"""Studies on a real cluster of one node, without accounting. What does not get in the way of others
runs at once."""

import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import preloaded
import pytest
from cluster import JOB_SECONDS, STEP_COUNTS, TWO_RATIOS, Cluster, InstantStudies
from processes import wait_until
from studies import command, executed_steps, jobs, moe_lab, results, study_output

from moe_lab.paths import cache_folder
from moe_lab.result_files import read_record
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
    "calibration.batch_tokens=1",
]
"""A calibration pass of 32 batches."""
DRAWN = ["criterion=random", "suite.benchmarks=[]"]
"""A plan, and nothing else."""


def submit(store: Path, *settings: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end that submits jobs of a Python that has already imported the large
    libraries. Options: those of `moe_lab`."""
    python = f"launcher.python={preloaded.python()}"
    return moe_lab(store, *settings, *SLURM, python, **options)


def inline(_: Cluster, store: Path) -> Path:
    """A store with the results of one process."""
    for arguments in (AGNOSTIC, PASS):
        result = moe_lab(store, *arguments, "launcher=inline")
        assert result.returncode == 0, result.stderr
    return store


def agnostic(cluster: Cluster, store: Path) -> Path:
    """A store in which jobs did all of the main experiment."""
    result = submit(store, *AGNOSTIC)
    assert result.returncode == 0 and "record" in jobs(result.stdout), result.stderr
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
    result = submit(store, *settings, environment={**os.environ, **PLANTED})
    assert result.returncode == 0 and "record" in jobs(result.stdout), result.stderr
    [run] = runs(Store(store), "study")
    assert leaks(store, result) == leaks(run.logs, result) == []
    record = read_record(store, "study")
    assert record
    assert len(record["cells"]) == 2
    assert all(all(cell["evaluate"].values()) for cell in record["cells"])
    assert list(run.logs.glob("*_submitted.pkl"))
    assert (store / "reports/study/report.html").exists()
    assert not [*store.rglob("*.pkl"), *store.rglob("*.py")], "nothing that is executed"


def limited(cluster: Cluster, folder: Path) -> None:
    """A step goes on inside where its job's time ended; after max_requeues, here one, the next
    command takes it up.

    The first time it is the job's real limit, brought down while it runs. Slurm looks twice a
    minute, and a job that is past its limit when Slurm looks is killed without the signal: the new
    limit leaves one to two minutes, however long the job took to begin.
    """
    instant = InstantStudies(cluster, folder)
    arguments = [
        TWO_RATIOS,
        "study=limited",
        "launcher.max_requeues=1",
        "launcher.signal_seconds=59",
    ]
    arguments += ["+resources.jobs={cost: {minutes: 10}}"]
    instant.hold("cost")
    job = instant.submit(*arguments)["cost"]
    instant.wait_for("cost")
    cluster.command_output(
        "scontrol", "update", f"jobid={job}", f"timelimit={cluster.run_minutes(job) + 2}"
    )
    instant.wait_for("cost", 2)
    assert cluster.job_fields(job)["Restarts"] == "1"
    cluster.command_output("scancel", "--signal=USR2", job)
    wait_until(lambda: cluster.job_fields(job)["JobState"] == "FAILED", JOB_SECONDS, "it goes on")
    assert cluster.job_fields(job)["Restarts"] == "1"
    log = "".join(file.read_text() for file in cache_folder("jobs").glob(f"*/{job}*_log.*"))
    assert "this job is timed-out" in log
    assert "Job not requeued" in log
    assert "failed; the same command" in study_output(instant.store, "why", "limited")
    instant.release()
    instant.wait_for_the_end()
    assert set(instant.submit(*arguments)) == {"cost", "evaluate", "record"}
    instant.wait_for_the_end()
    assert instant.finished_step_counts() == STEP_COUNTS
    assert len(instant.processes_of("cost")) == 5


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
    outputs = [run.communicate(timeout=JOB_SECONDS) for run in (wide, broken)]
    assert (wide.returncode, broken.returncode) == (0, 0), outputs
    assert sum(printed.count("plan: 3 job(s), 3 step(s)") for printed, _ in outputs) >= 2, (
        "MaxArraySize is 3"
    )
    instant.release()
    instant.wait_for_the_end()
    assert instant.finished_step_counts() == {"model": 1, "scores": 1, "plan": 5, "cost": 6}
    cells = {name: (read_record(instant.store, name) or {})["cells"] for name in ("wide", "broken")}
    assert len(cells["wide"]) == 5
    assert all(cell["cost"] for cell in cells["wide"])
    cells_by_criterion = Counter(
        (cell["cell"]["criterion"], cell["cost"] is not None) for cell in cells["broken"]
    )
    assert cells_by_criterion == {("none", True): 1, ("random", True): 4, ("magnitude", False): 4}
    why = study_output(instant.store, "why", "broken")
    assert "broken on purpose" in why
    assert "needs weights/" in why
    assert "broken on purpose" in study_output(instant.store, "why", "weights/")
    assert "failed" in study_output(instant.store, "status", "broken")


SCENARIOS: dict[str, Callable[[Cluster, Path], Any]] = {
    "limited": limited,
    "overlapping": overlapping,
    "agnostic": agnostic,
    "inline": inline,
    "secretive": secretive,
}
Scenario = Callable[[str], Any]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the stores of all scenarios."""
    return tmp_path_factory.mktemp("scenarios")


@pytest.fixture(scope="module")
def scenario(request: pytest.FixtureRequest, cluster: Cluster, folder: Path) -> Iterator[Scenario]:
    """Name -> result of a scenario. All are started at once, unless a single test is run."""
    with ThreadPoolExecutor() as pool:
        started = cache(lambda name: pool.submit(SCENARIOS[name], cluster, folder / name))
        if sum(item.path == request.path for item in request.session.items) > 1:
            for name in SCENARIOS:
                started(name)
        yield lambda name: started(name).result()
        cluster.command_output("scancel", "--user=root")


@pytest.mark.parametrize("name", ["overlapping", "secretive"])
def test_scenario_runs_beside_the_others(name: str, scenario: Scenario) -> None:
    scenario(name)


@pytest.fixture(scope="module")
def agnostic_store(scenario: Scenario) -> Path:
    """The store in which jobs did all of the main experiment."""
    store: Path = scenario("agnostic")
    return store


def test_jobs_give_the_results_of_one_process(scenario: Scenario, agnostic_store: Path) -> None:
    """Bit for bit, in a store of their own: the same steps and the same files, but for when and
    where they were computed."""
    by_jobs = results(agnostic_store)
    names = {path.split("/")[1] for path in by_jobs}
    in_process = results(scenario("inline"))
    assert by_jobs == {
        path: content for path, content in in_process.items() if path.split("/")[1] in names
    }


def test_each_step_of_the_main_experiment_is_done_once(agnostic_store: Path) -> None:
    files = agnostic_store.glob("*/*/step.json")
    steps = {str(path.parent.relative_to(agnostic_store)) for path in files}
    kinds = Counter(step.partition("/")[0] for step in steps)
    assert kinds["evaluate"] == kinds["generate"] == kinds["grade"] == 9
    assert kinds["plan"] == 8
    assert kinds["statistics"] == 1
    assert executed_steps(agnostic_store) == Counter(steps)
    [run] = runs(Store(agnostic_store), "task_agnostic")
    assert run.plan
    assert steps == set(run.plan["steps"])


PASS_IN_PARTS = [*PASS, "calibration.parts=3"]


@pytest.fixture(scope="module")
def parts_store(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in which jobs did a pass in parts."""
    store = tmp_path_factory.mktemp("parts") / "store"
    result = submit(store, *PASS_IN_PARTS, "wait=true")
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if " statistics: " in line]
    assert [line.split(": ")[1] for line in lines] == ["3 job(s), 3 step(s)", "1 job(s), 1 step(s)"]
    return store


def passes(store: Path) -> dict[str, int]:
    """Folder -> executions of the steps of the pass and of its parts."""
    executions = executed_steps(store)
    return {name: executions[name] for name in executions if name.startswith("statistics/")}


def test_parts_of_a_pass_are_done_once(parts_store: Path) -> None:
    assert len(passes(parts_store)) == 4
    assert set(passes(parts_store).values()) == {1}


def test_a_pass_in_parts_gives_the_same_plan(parts_store: Path, scenario: Scenario) -> None:
    [file] = parts_store.glob("plan/*/plan.json")
    label = file.parent.name.rpartition("-")[0]
    [inline_file] = scenario("inline").glob(f"plan/{label}-????????????/plan.json")
    plan, inline_plan = (json.loads(path.read_text()) for path in (file, inline_file))
    assert plan["layers"] == inline_plan["layers"]


def test_one_process_finds_the_results_of_jobs(parts_store: Path) -> None:
    passes_before = passes(parts_store)
    result = moe_lab(parts_store, *PASS_IN_PARTS, "launcher=inline")
    assert result.returncode == 0, result.stderr
    assert passes(parts_store) == passes_before


def test_a_pass_is_saved_when_its_job_is_requeued(cluster: Cluster, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    store = tmp_path / "store"
    text.write_text("Anna has a dog. The dog sleeps in the barn at night.\n\n" * 40_000)
    result = submit(
        store,
        "criterion=man",
        "suite.benchmarks=[]",
        "calibration=text",
        f"calibration.path={text}",
        "calibration.tokens=262144",
        "calibration.batch_tokens=1",
    )
    wait_until(
        lambda: list(store.glob("partial/*/progress.json")), JOB_SECONDS, "the pass does not begin"
    )
    cluster.command_output("scontrol", "requeue", jobs(result.stdout)["statistics"])
    wait_until(
        lambda: list(store.glob("partial/*/checkpoint.safetensors")),
        JOB_SECONDS,
        "nothing is saved",
    )
    cluster.command_output("scancel", *jobs(result.stdout).values())
    cluster.wait_for_the_end(store)


def test_a_study_inside_a_job_submits_jobs_of_its_own(cluster: Cluster, tmp_path: Path) -> None:
    """The SLURM_* variables of the job around them do not change what they request."""
    arguments = [
        "salloc",
        "--mem-per-cpu=500M",
        *command(tmp_path / "store", *DRAWN, *SLURM, "wait=true"),
    ]
    result = subprocess.run(
        arguments, capture_output=True, text=True, cwd=tmp_path, env=cluster.environment
    )
    assert result.returncode == 0 and list(tmp_path.glob("store/plan/*/plan.json")), result.stderr


def test_why_shows_errors_of_a_job_that_dies_before_python(
    cluster: Cluster, tmp_path: Path
) -> None:
    """It shows the last lines of the job's stderr, here of a line of `setup`."""
    setup = "resources.every.setup=['echo no such module >&2', 'false']"
    result = submit(tmp_path / "store", *DRAWN, "study=dead", setup)
    assert result.returncode == 0, result.stderr
    cluster.wait_for_the_end(tmp_path / "store")
    why = study_output(tmp_path / "store", "why", "dead")
    status = study_output(tmp_path / "store", "status", "dead")
    assert "| no such module" in why
    assert "is failed" in why
    assert "jobs that ended without their steps: 6" in status
    assert "record: missing: job" in why


@contextmanager
def drained(cluster: Cluster) -> Iterator[None]:
    """A cluster whose jobs stay in the queue."""
    node = f"nodename={cluster.host}"
    cluster.command_output("scontrol", "update", node, "state=drain", "reason=test")
    yield
    cluster.command_output("scontrol", "update", node, "state=resume")


def test_jobs_run_the_code_as_it_was_submitted(
    cluster: Cluster, scenario: Scenario, tmp_path: Path
) -> None:
    """Edits while jobs are in the queue, even in their working directory, have no effect."""
    tmp_path.chmod(0o755)  # jobs may enter
    checkout = tmp_path / "checkout"
    for name in ("moe_lab", "analysis", "conf", "hydra_plugins"):
        shutil.copytree(ROOT / name, checkout / name, symlinks=True)
    finished = scenario("inline")
    store = tmp_path / "store"
    shutil.copytree(finished, store)
    cells = (read_record(store, "task_agnostic") or {})["cells"]
    drawn = [cell for cell in cells if cell["cell"]["criterion"] == "random"]
    [plan] = [cell["plan"] for cell in drawn if cell["cell"]["seed"] == 42]
    shutil.rmtree(store / plan)
    with drained(cluster):
        result = subprocess.run(
            command(store, *DRAWN, "study=copied", *SLURM),
            cwd=checkout,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0 and set(jobs(result.stdout)) == {"plan", "record"}, (
            result.stderr
        )
        for file in checkout.glob("moe_lab/study/**/*.py"):
            file.write_text("raise RuntimeError('edited')\n")
    cluster.wait_for_the_end(store)
    assert results(store) == results(finished)


def test_a_job_out_of_time_is_requeued_once(scenario: Scenario) -> None:
    """The last, since it waits for Slurm's own time."""
    scenario("limited")
