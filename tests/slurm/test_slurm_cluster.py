"""Studies on a real cluster of one node, without accounting. What does not get in the way of others runs at once."""

from __future__ import annotations

import json
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
from cluster import Cluster
from scenarios import (
    PASS,
    SLURM,
    STEPS,
    play_agnostic,
    play_inline,
    play_limited,
    play_overlapping,
    play_planted,
)
from studies import asked, command, jobs, moe_lab, ran, results

from moe_lab.results import read_record
from tests.test_secrets import leaks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


SCENES: dict[str, Callable[[Cluster, Path], Any]] = {
    "limited": play_limited,
    "overlapping": play_overlapping,
    "agnostic": play_agnostic,
    "inline": lambda _, folder: play_inline(folder),
    "planted": lambda _, folder: play_planted(folder),
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


def test_overlapping_studies_do_shared_steps_once(played: Played) -> None:
    instant, texts = played("overlapping")
    assert instant.done_once() == {"model": 1, "scores": 1, "plan": 5, "cost": 6}
    assert sum(text.count("plan: 3 jobs, 3 steps") for text in texts) >= 2, "MaxArraySize is 3"
    wide, broken = (read_record(instant.store, name) or {} for name in ("wide", "broken"))
    assert len(wide["cells"]) == 5 and all(cell["cost"] for cell in wide["cells"])
    there = Counter((cell["cell"]["criterion"], cell["cost"] is not None) for cell in broken["cells"])
    assert there == {("none", True): 1, ("random", True): 4, ("magnitude", False): 4}


def test_a_mistake_is_told_where_it_happened(played: Played) -> None:
    store = played("overlapping")[0].store
    why = asked(store, "why", "broken")
    assert "broken on purpose" in why and "needs weights/" in why
    assert "broken on purpose" in asked(store, "why", "weights/")
    assert "failed" in asked(store, "status", "broken")


def test_the_main_experiment_gives_the_numbers_of_one_process(played: Played) -> None:
    """Bit for bit, in the same store: the same steps, the same files, but for when and where they were made."""
    mine, theirs = results(played("agnostic")), results(played("inline"))
    own = {name: content for name, content in theirs.items() if name.split("/")[1] in {n.split("/")[1] for n in mine}}
    assert mine == own
    counted = Counter(file.parts[-3] for file in played("agnostic").glob("*/*/step.json"))
    assert counted["evaluate"] == 10 and counted["plan"] == 4 and counted["statistics"] == 1


def test_each_step_of_the_main_experiment_ran_once(played: Played) -> None:
    store = played("agnostic")
    steps = {str(path.parent.relative_to(store)) for path in store.glob("*/*/step.json")}
    assert ran(store) == Counter(steps), "every step was given to a worker once"
    (last,) = [run for run in (store / "runs" / "task_agnostic").iterdir()]
    assert steps == {folder for _, folder, _ in json.loads((last / "run.json").read_text())["steps"]}
    submitted = Counter(job["kind"] for job in json.loads((last / "jobs.json").read_text()))
    assert submitted["evaluate"] == 2, "five models in jobs of three at most"
    record = read_record(store, "task_agnostic")
    assert record and len(record["cells"]) == 5 and all(all(cell["evaluate"].values()) for cell in record["cells"])


def test_parts_of_a_pass_are_jobs_and_give_the_plan_of_one_process(
    cluster: Cluster, tmp_path: Path, played: Played
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
    [theirs] = played("inline").glob(f"plan/{label}-????????????/plan.json")
    assert json.loads(mine.read_text())["layers"] == json.loads(theirs.read_text())["layers"]
    again = moe_lab(store, *words, "launcher=inline")  # one process finds what the jobs made
    assert again.returncode == 0 and ran(store) == Counter({**ran(store), **passes}), again.stderr


def test_a_time_limit_interrupts_and_requeues_so_often(played: Played) -> None:
    """A step goes on inside where its time ended; after max_requeues the next command takes it up."""
    scene = played("limited")
    log = "".join(file.read_text() for file in scene.instant.store.glob(f"runs/*/*/jobs/{scene.job}*_log.*"))
    assert scene.restarted["Restarts"] == scene.ended["Restarts"] == "1"
    assert "this job is timed-out" in log and "Job not requeued" in log
    assert "failed; the same command" in scene.why
    assert set(scene.again) == {"cost", "evaluate", "record"}
    assert scene.instant.done_once() == STEPS and len(scene.instant.begun("cost")) == 5


def test_no_file_of_submitted_jobs_has_a_secret(played: Played, folder: Path) -> None:
    """Neither what jobs are handed, nor their copy of the code, their logs, the record or the report.

    Slurm itself keeps the environment that a job is submitted with, in its spool, which is not searched.
    """
    done, store = played("planted"), folder / "planted"
    assert done.returncode == 0 and "record" in jobs(done.stdout), done.stderr
    assert leaks(store, done) == []
    record = read_record(store, "study")
    assert record and len(record["cells"]) == 2 and all(all(cell["evaluate"].values()) for cell in record["cells"])
    assert list(store.glob("runs/study/*/jobs/*_submitted.pkl")) and (store / "reports/study/report.html").exists()


def test_jobs_run_the_code_as_it_was_when_they_were_submitted(cluster: Cluster, played: Played, tmp_path: Path) -> None:
    """What is edited while jobs are in the queue, even in the folder they start in, does not matter."""
    tmp_path.chmod(0o755)
    checkout, store = tmp_path / "checkout", tmp_path / "store"
    for name in ("moe_lab", "analysis", "conf", "hydra_plugins"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    (before,) = played("inline").glob("plan/*-random-*")
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
