"""Submitting a thousand cells, with commands of Slurm that only count: what it takes, and how many
calls."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from processes import of_children, within
from studies import command, jobs
from submitit.core.utils import DelayedSubmission

from moe_lab.errors import UserError
from moe_lab.study.slurm import scheduler

pytestmark = pytest.mark.slow

CALLS = 20
SECONDS = 10
Done = subprocess.CompletedProcess[str]
SBATCH = """\
#!/bin/sh
echo "$@" >> {folder}/sbatch.calls
env >> {folder}/sbatch.env
cp "$1" {folder}/$(wc -l < {folder}/sbatch.calls).sh
number=$(wc -l < {folder}/sbatch.calls)
[ $number -ge "${{REFUSE_AT:-999}}" ] && [ $number -lt "${{REFUSE_UNTIL:-999}}" ] &&
echo "sbatch: error: $REFUSE" >&2 && exit 1
echo Submitted batch job $(wc -l < {folder}/sbatch.calls)
"""
IMPATIENT = """
import runpy
from moe_lab.study.slurm import submit
submit.PAUSES = (0.0, 0.0)
runpy.run_module("moe_lab", run_name="__main__")
"""
OTHERS = '#!/bin/sh\necho "$@" >> {folder}/{name}.calls\nenv >> {folder}/{name}.env\n'


@pytest.fixture
def counting(tmp_path: Path) -> Mapping[str, str]:
    """An environment in which sbatch gives ids away and the other commands do nothing, and all
    leave a trace."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "squeue", "scancel", "scontrol", "srun", "sinfo"):
        text = SBATCH if name == "sbatch" else OTHERS
        (folder / name).write_text(text.format(folder=folder, name=name))
        (folder / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }


def calls(folder: Path, name: str) -> list[str]:
    path = folder / "bin" / f"{name}.calls"
    return path.read_text().splitlines() if path.exists() else []


def typed(folder: Path, environment: Mapping[str, str], *words: str) -> Done:
    """What comes of a command that submits jobs, on a store of its own."""
    python, _, _, *typed = command(
        folder / "store", "suite.benchmarks=[pocket_boolq]", "launcher=slurm", *words
    )
    return subprocess.run(
        [python, "-c", IMPATIENT, *typed],
        capture_output=True,
        text=True,
        cwd=folder,
        env=dict(environment),
    )


def scripts(folder: Path, done: Done) -> dict[str, str]:
    """Kind -> script of the jobs that a command submitted."""
    assert done.returncode == 0, done.stderr
    return {
        kind: (folder / "bin" / f"{number}.sh").read_text()
        for kind, number in jobs(done.stdout).items()
    }


def test_a_thousand_cells(tmp_path: Path, counting: Mapping[str, str]) -> None:
    ratios = ",".join(f"{number / 250:.3f}" for number in range(1, 201))
    grid = ["criterion=man,reap,frequency,magnitude,random", f"ratio={ratios}"]
    with within(SECONDS, of_children):
        done = typed(tmp_path, counting, *grid)
    assert done.returncode == 0, done.stderr
    assert "1001 cells" in done.stderr
    assert len(calls(tmp_path, "sbatch")) == len(jobs(done.stdout)) <= CALLS


def test_arrays_wait_for_what_they_need(tmp_path: Path, counting: Mapping[str, str]) -> None:
    own = (
        "evaluate: {partition: gpu, minutes: 7, sbatch: {nodelist: n7, mem_per_gpu: 9G, gres: "
        "'nvme:1'}"
    )
    own += ", setup: [module load cuda], gpu_type: a100}"
    own += ", statistics: {memory: 0, sbatch: {gres: 'gpu:h100:1'}}"
    own += (
        ", plan: {gpus: 0, sbatch: {mem_per_gpu: 9G, gres: 'gpu:1,nvme:1', account: null, "
        "hold: false}}"
    )
    parallel = ["criterion=man,magnitude", "launcher.parallel=3", "launcher.cells_per_job=1"]
    parallel += ["launcher.stale_minutes=7.5"]
    done = typed(tmp_path, counting, *parallel, f"+resources.jobs={{{own}}}", "model.device=cuda")
    written = scripts(tmp_path, done)
    ids = jobs(done.stdout)
    assert "--dependency" not in written["model"]
    after = {
        kind: script.split("--dependency=")[1].split()[0]
        for kind, script in written.items()
        if kind != "model"
    }
    assert after["statistics"] == f"afterok:{ids['model']}"
    assert after["plan"].split(":")[0] == "afterok" and ids["scores"] in after["plan"].split(":")
    assert {ids["plan"], ids["model"], ids["cost"]} == set(after["evaluate"].split(":")[1:])
    condition, *all_jobs = after["record"].split(":")
    assert condition == "afterany" and set(all_jobs) == set(ids.values()) - {ids["record"]}
    assert all("--kill-on-invalid-dep=yes" in script for script in written.values())
    for word in (
        "--array=0-2%3",
        "--partition=gpu",
        "--nodelist=n7",
        "--time=7",
        "\nmodule load cuda\n",
    ):
        assert written["evaluate"].count(word) == 1
    assert "--partition" not in written["plan"] and re.findall(r"--mem[^=]*", written["plan"]) == [
        "--mem"
    ]
    assert "--mem-per-gpu=9G" in written["evaluate"]
    assert "--mem=" not in written["evaluate"] + written["statistics"]
    asked = {kind: re.findall(r"--gp\S+|--gres\S+", script) for kind, script in written.items()}
    assert sorted(asked["evaluate"]) == ["--gpus-per-node=a100:1", "--gres=nvme:1"]
    assert "None" not in written["plan"] and "hold" not in written["plan"]
    assert (asked["statistics"], asked["plan"], asked["record"]) == (
        ["--gres=gpu:h100:1"],
        ["--gres=nvme:1"],
        [],
    )
    job = DelayedSubmission.load(next(tmp_path.glob("cache/moe_lab/jobs/*/1_submitted.pkl")))
    assert job.function.launcher.stale_minutes == 7.5


SHOWN = {
    **{
        "SQUEUE_STATES": "RUNNING",
        "SQUEUE_PARTITION": "x",
        "SQUEUE_NAMES": "x",
        "SQUEUE_FORMAT2": "jobid",
    },
    **{
        "SINFO_PARTITION": "x",
        "SCANCEL_STATE": "RUNNING",
        "SCONTROL_FUTURE": "1",
        "SACCT_LOCAL": "1",
    },
    **{"SLURM_CLUSTERS": "x", "SLURM_TIME_FORMAT": "relative"},
}
OVERRIDING = {
    **{
        "SBATCH_JOB_NAME": "x",
        "SBATCH_ARRAY_INX": "0-9",
        "SBATCH_TIMELIMIT": "1",
        "SBATCH_MEM_PER_NODE": "1",
    },
    **{
        "SBATCH_GRES": "gpu:1",
        "SBATCH_GPUS_PER_NODE": "1",
        "SBATCH_OUTPUT": "x",
        "SBATCH_WAIT": "1",
    },
    **{
        "SBATCH_NO_REQUEUE": "1",
        "SBATCH_CLUSTERS": "x",
        "SBATCH_QOS": "x",
        "SBATCH_EXPORT": "NONE",
    },
    **{
        "SLURM_MEM_PER_CPU": "500",
        "SLURM_NTASKS": "2",
        "SLURM_EXPORT_ENV": "NONE",
        "SLURM_GPUS_PER_NODE": "1",
    },
}
"""What a shell, or the job that it is in, would say against what moe_lab says of jobs; the qos is
set below."""
USUAL = {"SBATCH_ACCOUNT": "me", "SBATCH_RESERVATION": "x"}
FOUND = {"SLURM_CONF": "/x", "HOME": "/x"}


def test_slurm_is_not_told_what_the_shell_shows_or_would_override(
    tmp_path: Path, counting: Mapping[str, str]
) -> None:
    shell = {**counting, **SHOWN, **OVERRIDING, **USUAL, **FOUND}
    scripts(tmp_path, typed(tmp_path, shell, "criterion=man", "resources.every.sbatch={qos:long}"))
    for name in ("squeue", "sinfo", "scontrol", "sbatch"):
        lines = (tmp_path / "bin" / f"{name}.env").read_text().split("\n")
        variables = dict(line.split("=", 1) for line in lines if "=" in line)
        assert not set(SHOWN) & set(variables), name
        assert {**FOUND, **(USUAL if name == "sbatch" else {})}.items() <= variables.items(), name
    assert not set(OVERRIDING) & set(variables) and variables["HF_HUB_OFFLINE"] == "1"


def test_a_multirun_is_one_submission(tmp_path: Path, counting: Mapping[str, str]) -> None:
    words = ["-m", "hydra/launcher=study", "criterion=man,magnitude", "ratio=0.25,0.5"]
    done = typed(tmp_path, counting, *words)
    assert done.returncode == 0 and "5 cells" in done.stderr, done.stderr
    assert (
        list(jobs(done.stdout)).count("record")
        == 1
        == len(list((tmp_path / "store" / "runs").glob("*/*")))
    )
    assert all("under way" not in line for line in done.stderr.splitlines())


def test_the_page_on_slurm_shows_what_is_printed(
    tmp_path: Path, counting: Mapping[str, str]
) -> None:
    words = [
        sys.executable,
        "-m",
        "moe_lab",
        "+experiment=task_agnostic",
        "launcher=slurm",
        f"store={tmp_path}/store",
    ]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=dict(counting))
    page = (Path(__file__).parents[2] / "docs" / "slurm.md").read_text()
    assert done.returncode == 0 and done.stdout in page, done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "Invalid account or account/partition combination specified",
            "resources.every.sbatch.account",
        ),
        ("QOSMaxSubmitJobPerUserLimit", "launcher.cells_per_job"),
        (
            (
                "QOSMaxWallDurationPerJobLimit sbatch: error: Job violates (job submit limit, "
                "user's "
                "size)"
            ),
            "ask for less",
        ),
        ("Socket timed out on send/recv operation", "has not answered"),
        ("accounting storage says no", "or resources.models"),
    ],
)
def test_a_refusal_takes_back_accepted_jobs(
    words: str, says: str, tmp_path: Path, counting: Mapping[str, str]
) -> None:
    """And what was accepted although sbatch has not said so: 4 here."""
    refusing = {**counting, "REFUSE_AT": "4", "REFUSE": f"Batch job submission failed: {words}"}
    shown = (
        'case "$*" in *%o*) printf "4|$(ls -d '
        f'{tmp_path}/cache/moe_lab/jobs/0*)/x.sh\\n9|/x/jobs/x.sh\\n";; esac'
    )
    (tmp_path / "bin" / "squeue").write_text(f"#!/bin/sh\n{shown}\n")
    done = typed(tmp_path, refusing, "resources.every.sbatch={account:ours}")
    assert done.returncode == 2 and words in done.stderr and "account=ours" in done.stderr
    assert says in done.stderr
    cancelled = {word for line in calls(tmp_path, "scancel") for word in line.split()}
    assert cancelled == {"1", "2", "3", "4"}
    assert not list((tmp_path / "store" / "runs").glob("*/*"))


def test_a_controller_that_is_away_for_a_moment_gets_each_array_once(
    tmp_path: Path, counting: Mapping[str, str]
) -> None:
    """It has taken 4 without saying so, and 5 when sbatch was tried again."""
    script = f"$(ls -d {tmp_path}/cache/moe_lab/jobs/0*)/x.sh"
    shown = f'case "$*" in *%o*) for job in 1 4 5; do echo "$job|{script}"; done;; esac'
    (tmp_path / "bin" / "squeue").write_text(f"#!/bin/sh\n{shown}\n")
    away = {
        "REFUSE_AT": "4",
        "REFUSE_UNTIL": "5",
        "REFUSE": "Unable to contact slurm controller (connect failure)",
    }
    done = typed(tmp_path, {**counting, **away})
    assert done.returncode == 0, done.stderr
    arrays = jobs(done.stdout).values()
    assert "4" not in arrays and len(arrays) == len(calls(tmp_path, "sbatch")) - 1
    assert calls(tmp_path, "scancel") == ["4"]


def test_jobs_that_stay_are_noted(
    tmp_path: Path, counting: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scancel = tmp_path / "bin" / "scancel"
    says = "echo scancel: error: Kill job error on job id"
    scancel.write_text(
        f"#!/bin/sh\n({says} 1: Invalid job id specified; {says} 2: Access denied) >&2\nexit 1\n"
    )
    done = typed(tmp_path, {**counting, "REFUSE_AT": "4", "REFUSE": "it is full"})
    assert done.returncode == 2 and re.search(
        r"moe_lab: .*it is full.*on job id 2: Access denied", done.stderr
    )
    [noted] = (tmp_path / "store" / "runs").glob("*/*/jobs.json")
    assert len({row["job"]["array"] for row in json.loads(noted.read_text())["jobs"]}) == 3
    monkeypatch.setenv("PATH", counting["PATH"])
    monkeypatch.setattr(scheduler, "AT_ONCE", 1)
    scancel.write_text(
        f"#!/bin/sh\necho $1 >> {tmp_path}/asked\n[ $1 = 2 ] && {says} 2: Access denied >&2\nexit "
        "1\n"
    )
    with pytest.raises(UserError, match=r"some jobs are not cancelled.*says: nothing"):
        scheduler.cancel("123")
    assert (tmp_path / "asked").read_text().split() == ["1", "2", "3"]
    scancel.write_text(f"#!/bin/sh\n{says} 1: Invalid job id specified >&2\nexit 1\n")
    scheduler.cancel(["1"])  # it has ended


def test_a_scheduler_that_falls_silent_may_have_taken_jobs(
    tmp_path: Path, counting: Mapping[str, str]
) -> None:
    """Their files stay. It answers once about jobs."""
    silent = (
        f"#!/bin/sh\n[ -e {tmp_path}/silent ] && echo timed out >&2 && exit 1\ntouch "
        f"{tmp_path}/silent\n"
    )
    (tmp_path / "bin" / "squeue").write_text(silent)
    done = typed(tmp_path, {**counting, "REFUSE_AT": "2", "REFUSE": "Socket timed out"})
    assert (
        done.returncode == 2
        and "see squeue" in done.stderr
        and "jobs may remain in the queue" in done.stderr
    )
    assert calls(tmp_path, "scancel") == ["1"], "that one is known"
    assert (
        len(list(tmp_path.glob("store/runs/*/0*")))
        == len(list(tmp_path.glob("cache/moe_lab/jobs/0*")))
        == 1
    )


def test_a_hanging_squeue_is_told(
    counting: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\nexec sleep 100\n")
    monkeypatch.setenv("PATH", counting["PATH"])
    monkeypatch.setattr(scheduler, "LIMIT", 0.1)
    with pytest.raises(UserError, match=r"squeue has not answered for 0\.1 s"):
        scheduler.queue()


@pytest.mark.parametrize(
    ("squeue", "says"),
    [
        (None, "there is no squeue here"),
        ("no program", "squeue cannot be started (Exec format error)"),
    ],
)
def test_a_machine_without_slurm_is_told(squeue: str | None, says: str, tmp_path: Path) -> None:
    """Also where PATH has a folder that may not be read, as after `su`, which hides that there is
    no such program."""
    hidden = tmp_path / "hidden"
    programs = tmp_path / "programs"
    programs.mkdir()
    hidden.mkdir(mode=0o000)
    if squeue is not None:
        (programs / "squeue").write_bytes(b"\0" + squeue.encode())
        (programs / "squeue").chmod(0o755)
    done = typed(tmp_path, {**os.environ, "PATH": f"{hidden}:{programs}"})
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
