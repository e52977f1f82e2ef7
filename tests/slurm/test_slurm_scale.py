"""Submitting a thousand cells, with commands of Slurm that only count: what it takes, and how many
calls."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import preloaded
import pytest
from processes import children_seconds, time_limit
from studies import command, jobs
from submitit.core.utils import DelayedSubmission

from moe_lab.errors import UserError
from moe_lab.study.slurm import scheduler

pytestmark = pytest.mark.slow

CALLS = 20
SECONDS = 10
Result = subprocess.CompletedProcess[str]
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
WITHOUT_PAUSES = """
import runpy
from moe_lab.study.slurm import submit
submit.PAUSES = (0.0, 0.0)
runpy.run_module("moe_lab", run_name="__main__")
"""


def install_fake_slurm(folder: Path) -> dict[str, str]:
    """An environment in which sbatch prints job ids, the other commands of Slurm do nothing, and
    each writes its arguments and environment into `folder`/bin."""
    programs = folder / "bin"
    programs.mkdir()
    for name in ("sbatch", "squeue", "scancel", "scontrol", "srun", "sinfo"):
        text = SBATCH if name == "sbatch" else OTHER_COMMAND
        (programs / name).write_text(text.format(folder=programs, name=name))
        (programs / name).chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }


OTHER_COMMAND = '#!/bin/sh\necho "$@" >> {folder}/{name}.calls\nenv >> {folder}/{name}.env\n'


@pytest.fixture
def fake_slurm(tmp_path: Path) -> Mapping[str, str]:
    """The environment of `install_fake_slurm` in the test's folder."""
    return install_fake_slurm(tmp_path)


def calls(folder: Path, name: str) -> list[str]:
    path = folder / "bin" / f"{name}.calls"
    return path.read_text().splitlines() if path.exists() else []


def submit(
    folder: Path, environment: Mapping[str, str], *settings: str, python: str = ""
) -> Result:
    """The result of a command that submits a study of the store in `folder`, by default in a Python
    that has already imported the large libraries."""
    _, _, _, *arguments = command(
        folder / "store", "suite.benchmarks=[pocket_boolq]", "launcher=slurm", *settings
    )
    (folder / "without_pauses.py").write_text(WITHOUT_PAUSES)
    return subprocess.run(
        [python or preloaded.python(), "-m", "without_pauses", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=dict(environment),
    )


def scripts(folder: Path, result: Result) -> dict[str, str]:
    """Kind -> script of the jobs that a command submitted."""
    assert result.returncode == 0, result.stderr
    return {
        kind: (folder / "bin" / f"{number}.sh").read_text()
        for kind, number in jobs(result.stdout).items()
    }


def test_a_thousand_cells_are_submitted_in_few_calls(
    tmp_path: Path, fake_slurm: Mapping[str, str]
) -> None:
    ratios = ",".join(f"{number / 250:.3f}" for number in range(1, 201))
    grid = ["criterion=man,reap,frequency,magnitude,random", f"ratio={ratios}"]
    with time_limit(SECONDS, children_seconds):
        result = submit(tmp_path, fake_slurm, *grid, python=sys.executable)
    assert result.returncode == 0, result.stderr
    assert "1001 cells" in result.stderr
    assert len(calls(tmp_path, "sbatch")) == len(jobs(result.stdout)) <= CALLS


JOBS = {
    "evaluate": "{partition: gpu, minutes: 7, setup: [module load cuda], gpu_type: a100, "
    "sbatch: {nodelist: n7, mem_per_gpu: 9G, gres: 'nvme:1'}}",
    "statistics": "{memory: 0, gpu_type: h100}",
    "plan": "{gpus: 0, sbatch: {mem_per_gpu: 9G, gres: 'nvme:1', account: null, hold: false}}",
}
"""Kind of jobs -> its resources in the study of `submission`."""


def test_a_dry_run_prints_the_scripts_that_a_run_submits(
    tmp_path: Path, fake_slurm: Mapping[str, str]
) -> None:
    settings = ["criterion=man,magnitude", "launcher.cells_per_job=1", "resources.every.gpus=1"]
    printed = submit(tmp_path, fake_slurm, *settings, "dry_run=true").stdout
    assert calls(tmp_path, "sbatch") == []
    submitted = "".join(scripts(tmp_path, submit(tmp_path, fake_slurm, *settings)).values())
    for pattern, name in ((r"(/jobs)/[^/\s]+", r"\1/RUN"), (r"\S+/start.py", "start.py")):
        submitted = re.sub(pattern, name, submitted)
    assert printed.split() == submitted.split()
    assert submitted.count("#!/bin/bash") > 5


def test_the_documented_example_needs_four_changes(
    tmp_path: Path, fake_slurm: Mapping[str, str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "slurm.md").read_text()
    [example] = re.findall(r"complete example.*?```bash\n(.*?)```", page, re.DOTALL)
    assert example.count("# change") == 4
    example = example.replace("/shared/me", str(tmp_path)).replace("{account: me}", "{nice: 7}")
    script = f'set -e\nmoe-lab() {{ {shlex.quote(sys.executable)} -m moe_lab "$@"; }}\n{example}'
    result = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path, env={**fake_slurm}
    )
    assert "--nice=7" in scripts(tmp_path, result)["evaluate"]
    assert "statistics" in result.stdout.split("study: ")[-1]


class Submission(NamedTuple):
    """The jobs of a study: the folder of its store, kind -> id of the array, kind -> script."""

    folder: Path
    ids: dict[str, str]
    scripts: dict[str, str]

    def dependency(self, kind: str) -> tuple[str, set[str]]:
        """The condition under which an array starts, and the kinds of the arrays it waits for."""
        option = self.scripts[kind].split("--dependency=")[1].split()[0]
        condition, *ids = option.split(":")
        kinds = {number: kind for kind, number in self.ids.items()}
        return condition, {kinds[number] for number in ids}


@pytest.fixture(scope="module")
def submission(tmp_path_factory: pytest.TempPathFactory) -> Submission:
    """A study of three cells whose jobs have resources of their own."""
    folder = tmp_path_factory.mktemp("submission")
    resources = ", ".join(f"{kind}: {settings}" for kind, settings in JOBS.items())
    result = submit(
        folder,
        install_fake_slurm(folder),
        "criterion=man,magnitude",
        "launcher.parallel=3",
        "launcher.cells_per_job=1",
        "launcher.stale_minutes=7.5",
        f"+resources.jobs={{{resources}}}",
        "model.device=cuda",
    )
    return Submission(folder, jobs(result.stdout), scripts(folder, result))


def test_arrays_depend_on_the_arrays_of_their_inputs(submission: Submission) -> None:
    """Jobs whose inputs fail leave the queue. The record waits for all jobs, failed or not."""
    assert "--dependency" not in submission.scripts["model"]
    assert submission.dependency("statistics") == ("afterok", {"model"})
    condition, kinds = submission.dependency("plan")
    assert condition == "afterok"
    assert "scores" in kinds
    assert submission.dependency("evaluate")[1] == {"plan", "model", "cost", "items"}
    others = submission.ids.keys() - {"record"}
    assert submission.dependency("record") == ("afterany", others)
    assert all("--kill-on-invalid-dep=yes" in script for script in submission.scripts.values())


def test_settings_of_jobs_are_in_their_scripts(submission: Submission) -> None:
    """Each once. Memory and GPUs are requested by one option; null and false leave one out."""
    scripts = submission.scripts
    settings = ("--array=0-2%3", "--partition=gpu", "--nodelist=n7", "--time=7")
    for option in (*settings, "\nmodule load cuda\n"):
        assert scripts["evaluate"].count(option) == 1
    for absent in ("--partition", "None", "hold"):
        assert absent not in scripts["plan"]
    assert re.findall(r"--mem[^=]*", scripts["plan"]) == ["--mem"]
    assert "--mem-per-gpu=9G" in scripts["evaluate"]
    assert "--mem=" not in scripts["evaluate"] + scripts["statistics"]
    for kind, options in (
        ("evaluate", ["--gres=gpu:a100:1,nvme:1"]),
        ("statistics", ["--gres=gpu:h100:1"]),
        ("plan", ["--gres=nvme:1"]),
        ("record", []),
    ):
        assert sorted(re.findall(r"--gp\S+|--gres\S+", scripts[kind])) == options


def test_jobs_get_the_settings_of_the_launcher(submission: Submission) -> None:
    (file,) = submission.folder.glob("cache/moe_lab/jobs/*/1_submitted.pkl")
    assert DelayedSubmission.load(file).function.launcher.stale_minutes == 7.5


DISPLAY_VARIABLES = {
    "SQUEUE_STATES": "RUNNING",
    "SINFO_PARTITION": "x",
    "SCANCEL_STATE": "RUNNING",
    "SCONTROL_FUTURE": "1",
    "SACCT_LOCAL": "1",
    "SLURM_TIME_FORMAT": "relative",
}
JOB_VARIABLES = {
    "SBATCH_TIMELIMIT": "1",
    "SBATCH_QOS": "x",
    "SLURM_MEM_PER_CPU": "500",
}
"""What a shell, or the job that it is in, would say against what moe_lab says of jobs; the qos is
set below."""
SITE_VARIABLES = {"SBATCH_ACCOUNT": "me", "SBATCH_RESERVATION": "x"}
PATH_VARIABLES = {"SLURM_CONF": "/x", "HOME": "/x"}


def test_variables_of_the_shell_are_hidden_from_slurm(
    tmp_path: Path, fake_slurm: Mapping[str, str]
) -> None:
    """Variables that change the output of its commands or override the settings of jobs."""
    shell = {**fake_slurm, **DISPLAY_VARIABLES, **JOB_VARIABLES, **SITE_VARIABLES, **PATH_VARIABLES}
    scripts(tmp_path, submit(tmp_path, shell, "criterion=man", "resources.every.sbatch={qos:long}"))
    for program in ("squeue", "sinfo", "scontrol", "sbatch"):
        lines = (tmp_path / "bin" / f"{program}.env").read_text().split("\n")
        variables = dict(line.split("=", 1) for line in lines if "=" in line)
        assert not set(DISPLAY_VARIABLES) & set(variables)
        assert PATH_VARIABLES.items() <= variables.items()
    assert SITE_VARIABLES.items() <= variables.items()
    assert not set(JOB_VARIABLES) & set(variables)
    assert variables["HF_HUB_OFFLINE"] == "1"


def test_a_multirun_is_one_submission(tmp_path: Path, fake_slurm: Mapping[str, str]) -> None:
    arguments = ["-m", "hydra/launcher=study", "criterion=man,magnitude", "ratio=0.25,0.5"]
    result = submit(tmp_path, fake_slurm, *arguments)
    assert result.returncode == 0 and "5 cells" in result.stderr, result.stderr
    assert list(jobs(result.stdout)).count("record") == 1
    assert len(list((tmp_path / "store" / "runs").glob("*/*"))) == 1
    assert all("under way" not in line for line in result.stderr.splitlines())


def test_slurm_page_shows_the_printed_plan(tmp_path: Path, fake_slurm: Mapping[str, str]) -> None:
    arguments = [
        sys.executable,
        "-m",
        "moe_lab",
        "+experiment=task_agnostic",
        "launcher=slurm",
        f"store={tmp_path}/store",
    ]
    result = subprocess.run(
        arguments, capture_output=True, text=True, cwd=tmp_path, env=dict(fake_slurm)
    )
    page = (Path(__file__).parents[2] / "docs" / "slurm.md").read_text()
    assert result.returncode == 0 and result.stdout in page, result.stdout


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        ("Socket timed out on send/recv operation", "has not answered"),
        ("accounting storage says no", "or resources.models"),
    ],
)
def test_a_refusal_cancels_accepted_jobs(
    refusal: str, message: str, tmp_path: Path, fake_slurm: Mapping[str, str]
) -> None:
    """Job 4 is cancelled too, which Slurm accepted although sbatch reported an error."""
    listing = (
        'case "$*" in *%o*) printf "4|$(ls -d '
        f'{tmp_path}/cache/moe_lab/jobs/0*)/x.sh\\n9|/x/jobs/x.sh\\n";; esac'
    )
    (tmp_path / "bin" / "squeue").write_text(f"#!/bin/sh\n{listing}\n")
    error = f"Batch job submission failed: {refusal}"
    environment = {**fake_slurm, "REFUSE_AT": "4", "REFUSE": error}
    result = submit(tmp_path, environment, "resources.every.sbatch={account:ours}")
    assert result.returncode == 2
    assert refusal in result.stderr
    assert "account=ours" in result.stderr
    assert message in result.stderr
    cancelled = {job for line in calls(tmp_path, "scancel") for job in line.split()}
    assert cancelled == {"1", "2", "3", "4"}
    assert not list((tmp_path / "store" / "runs").glob("*/*"))


def test_each_array_is_submitted_once_if_the_controller_is_away(
    tmp_path: Path, fake_slurm: Mapping[str, str]
) -> None:
    """The controller accepted job 4 although sbatch reported an error, and job 5 when sbatch was
    repeated."""
    script = f"$(ls -d {tmp_path}/cache/moe_lab/jobs/0*)/x.sh"
    listing = f'case "$*" in *%o*) for job in 1 4 5; do echo "$job|{script}"; done;; esac'
    (tmp_path / "bin" / "squeue").write_text(f"#!/bin/sh\n{listing}\n")
    refusal = {
        "REFUSE_AT": "4",
        "REFUSE_UNTIL": "5",
        "REFUSE": "Unable to contact slurm controller (connect failure)",
    }
    result = submit(tmp_path, {**fake_slurm, **refusal})
    assert result.returncode == 0, result.stderr
    arrays = jobs(result.stdout).values()
    assert "4" not in arrays
    assert len(arrays) == len(calls(tmp_path, "sbatch")) - 1
    assert calls(tmp_path, "scancel") == ["4"]


PRINT_CANCEL_ERROR = "echo scancel: error: Kill job error on job id"


def install_scancel(folder: Path, *lines: str) -> None:
    (folder / "bin" / "scancel").write_text("\n".join(["#!/bin/sh", *lines, "exit 1", ""]))


def test_jobs_that_cannot_be_cancelled_are_reported_and_recorded(
    tmp_path: Path, fake_slurm: Mapping[str, str]
) -> None:
    print_errors = (
        f"{PRINT_CANCEL_ERROR} 1: Invalid job id specified >&2",
        f"{PRINT_CANCEL_ERROR} 2: Access denied >&2",
    )
    install_scancel(tmp_path, *print_errors)
    result = submit(tmp_path, {**fake_slurm, "REFUSE_AT": "4", "REFUSE": "it is full"})
    assert result.returncode == 2
    assert re.search(r"moe_lab: .*it is full.*on job id 2: Access denied", result.stderr)
    [file] = (tmp_path / "store" / "runs").glob("*/*/jobs.json")
    assert len({row["job"]["array"] for row in json.loads(file.read_text())["jobs"]}) == 3


def test_cancel_tries_all_jobs_and_raises_if_some_remain(
    tmp_path: Path, fake_slurm: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", fake_slurm["PATH"])
    monkeypatch.setattr(scheduler, "IDS_PER_CALL", 1)
    install_scancel(
        tmp_path,
        f"echo $1 >> {tmp_path}/ids",
        f"[ $1 = 2 ] && {PRINT_CANCEL_ERROR} 2: Access denied >&2",
    )
    with pytest.raises(UserError, match=r"some jobs are not cancelled.*says: nothing"):
        scheduler.cancel("123")
    assert (tmp_path / "ids").read_text().split() == ["1", "2", "3"]


def test_cancel_accepts_jobs_that_have_ended(
    tmp_path: Path, fake_slurm: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", fake_slurm["PATH"])
    install_scancel(tmp_path, f"{PRINT_CANCEL_ERROR} 1: Invalid job id specified >&2")
    scheduler.cancel(["1"])


def test_files_of_jobs_stay_when_slurm_stops_answering(
    tmp_path: Path, fake_slurm: Mapping[str, str]
) -> None:
    """Slurm may have accepted the second job. squeue answers once."""
    marker = tmp_path / "answered"
    (tmp_path / "bin" / "squeue").write_text(
        f"#!/bin/sh\n[ -e {marker} ] && echo timed out >&2 && exit 1\ntouch {marker}\n"
    )
    result = submit(tmp_path, {**fake_slurm, "REFUSE_AT": "2", "REFUSE": "Socket timed out"})
    assert result.returncode == 2
    assert "see squeue" in result.stderr
    assert "jobs may remain in the queue" in result.stderr
    assert calls(tmp_path, "scancel") == ["1"], "the job whose id is known"
    assert len(list(tmp_path.glob("store/runs/*/0*"))) == 1
    assert len(list(tmp_path.glob("cache/moe_lab/jobs/0*"))) == 1


def test_a_hanging_squeue_is_reported(
    fake_slurm: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin" / "squeue").write_text("#!/bin/sh\nexec sleep 100\n")
    monkeypatch.setenv("PATH", fake_slurm["PATH"])
    monkeypatch.setattr(scheduler, "ANSWER_SECONDS", 0.1)
    with pytest.raises(UserError, match=r"squeue has not answered for 0\.1 s"):
        scheduler.queue()


@pytest.mark.parametrize(
    ("squeue", "message"),
    [
        (None, "squeue cannot be started (there is no such program)"),
        ("no program", "squeue cannot be started (Exec format error)"),
    ],
)
def test_a_machine_without_slurm_is_reported(
    squeue: str | None, message: str, tmp_path: Path
) -> None:
    """Also where PATH has a folder that may not be read, as after `su`, which hides that there is
    no such program."""
    hidden = tmp_path / "hidden"
    programs = tmp_path / "programs"
    programs.mkdir()
    hidden.mkdir(mode=0o000)
    if squeue is not None:
        (programs / "squeue").write_bytes(b"\0" + squeue.encode())
        (programs / "squeue").chmod(0o755)
    result = submit(tmp_path, {**os.environ, "PATH": f"{hidden}:{programs}"})
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
