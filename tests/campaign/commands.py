"""Wrong command lines: each ends with its exit code and a sentence that names the field or the
value, and no trace.

Everything of `python -m moe_lab` here is a dry run, so that a line that is taken by mistake runs
nothing. Values that the type of a setting refuses are tests/test_settings.py's; processes of their
own are tests/test_main.py's.
"""

import contextlib
import importlib
import inspect
import io
import re
import shlex
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

from synthetic import write_store

from moe_lab.__main__ import VERBS
from moe_lab.errors import run_and_exit
from moe_lab.json_files import write_sealed
from moe_lab.paths import conf
from moe_lab.study.store import Store


@dataclass(frozen=True)
class Command:
    """One command line. Its message must contain one of `names`: the wrong field, or its value."""

    module: str
    arguments: tuple[str, ...]
    names: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.module} {' '.join(self.arguments)}"


@dataclass(frozen=True)
class Outcome:
    """The exit code and the output of a command line."""

    code: int
    output: str

    def __str__(self) -> str:
        lines = self.output.strip().splitlines() or ["nothing"]
        return f"exit code {self.code}: {lines[-1][:200] if self.has_trace else lines[0][:200]}"

    @property
    def has_trace(self) -> bool:
        """Whether the output has a trace of Python, or the line that Hydra prints before one."""
        return any(
            mark in self.output
            for mark in ("Traceback (most recent call last)", "Error executing job")
        )

    def is_refusal(self, names: Sequence[str]) -> bool:
        """Whether the command was refused: exit code 2, no trace, and one of `names` in the
        output."""
        return self.code == 2 and not self.has_trace and any(name in self.output for name in names)


MISTAKES = {
    "a criterion nobody knows": (["criterion=reep"], "did you mean reap?"),
    "a model nobody knows": (["model=pocket_olmo"], "did you mean pocket_olmoe?"),
    "an experiment nobody knows": (["+experiment=task_agnostik"], "did you mean task_agnostic?"),
    "a setting nobody knows": (["ratoi=0.5"], "did you mean ratio?"),
    "a nested setting nobody knows": (["calibration.lenght=5"], "did you mean calibration.length?"),
    "a ratio above one": (["ratio=1.5"], "ratio=1.5: expected a number below 1"),
    "a ratio that is a word": (["ratio=much"], "ratio=much: expected a number"),
    "several values of what has one": (["suite=quick,code"], "names several files"),
    "a gate nobody knows": (["gate=modle"], "did you mean model?"),
    "a folder that is not there": (
        ["model=local", "model.path=/no/such/folder", "criterion=aimer"],
        "/no/such/folder",
    ),
    "a model without its folder": (["model=local"], "model.path is not set"),
    "a text without its file": (["calibration=text"], "calibration.path is not set"),
    "a packing nobody knows": (["calibration.packing=reep"], "did you mean reap?"),
    "parameters that are not the criterion's": (
        ["criterion=man", "+criterion.parameters.c=1"],
        "criterion.parameters",
    ),
    "programs without permission": (["suite=pocket16"], "allow_code_execution"),
    "a folder that Hydra cannot write": (["hydra.run.dir=/proc/x"], "/proc/x"),
    "a key that is none": (["++a.b.c=1"], "setting=a is unknown"),
    "more than top-k removed": (["ratio=0.95"], "0.906 is the largest"),
    "a list for a number": (
        ["calibration.tokens=[1,2]"],
        "calibration.tokens=[1, 2]: expected a whole number",
    ),
    "a list for a name in a list": (["plugins=[[os]]"], "plugins.0="),
    "a comma in a path": (["store=a,b"], "\"store='a,b'\""),
    "an axis as a setting": (["grid.criterion=[man]"], "setting=grid is unknown"),
    "lists in lists": (["ratio={a: " + "[" * 40 + "1" + "]" * 40 + "}"], "ratio="),
    "an interval": (["calibration.tokens=interval(1,2)"], "names no values"),
    "a group that cannot be none": (["suite=null"], "suite=null is unknown"),
    "a setting with hyphens": (["--criterion", "reap"], "--criterion: expected criterion=reap"),
    "a format as a shape": (["export=gguf"], "expected export.format=gguf"),
    "a benchmark nobody knows": (["suite=mmul"], "did you mean mmlu?"),
    "a text nobody has": (["calibration=no/such.txt"], "no/such.txt"),
    "a resource nobody knows": (
        ["resources.jobs={scores:{gpu:1}}"],
        "resources.jobs.scores.gpu is not a setting",
    ),
}
"""Description of a mistake -> (arguments, part of the message). tests/test_main.py also limits the
time of these commands."""

FIELDS = """
store | README.md
plugins | [no_such_module] [os.path]
model.expected | word {layers:4}
model.path | /no/such/folder pocket:olmeo 'two words' README.md
model.device | tpu cdua cuda:99 cuda:-1 cuda:word
model.top_k | 33
criterion.parameters | {c:1} {b:word}
criterion.parameters.b criterion=s_family | word nan null
criterion.parameters.alpha criterion=s_family | word
calibration.path | '' /no/such/file.txt /no/such/file.jsonl pocket:calibration/genral.jsonl
calibration.sources | [{calibration:nobody,share:0.5}] [{calibration:pocket_code}]
calibration.tokens | 10
allocation.by allocation=global | reep '' heapr
allocation.search allocation=pocket_evolutionary | nobody ''
allocation.path allocation=list | '' /no/such/plan.json moe_lab README.md
allocation.parameters | {unknown:1}
allocation.parameters.generations allocation=pocket_evolutionary | 0 -1 word 1.5 nan
allocation.parameters.prior allocation=coverage criterion=channel_activation | word 1
recovery.instructions recovery=pocket_dora | nobody ''
recovery.distill recovery=pocket_router_kd | nobody ''
recovery.fit recovery=pocket_merge_fit allocation=hc_smoe | nobody ''
suite.benchmarks | [pocket_bolq] ['']
suite.path suite=perplexity | /no/such/file.txt '' moe_lab
protocol.benchmarks | {pocket_boolq:{shots:-1}} {pocket_boolq:{batch_size:0}} {pocket_boolq:{limit:1}}
judge.extra | word
backend.command SERVER | '' '/no/such/program {checkpoint} {port}'
timed.batch_sizes timing=true launcher=inline | [0] [word]
"""  # noqa: E501
"""Lines `FIELD [further settings] | invalid values of the field`; a message must name the field or
the value. The further setting SERVER stands for the list SERVER."""
SERVER = ["backend=server", "suite.benchmarks=[pocket_humaneval]", "allow_code_execution=true"]

GROUPS = (
    "model criterion calibration allocation recovery export suite protocol judge backend "
    "launcher resources tracker"
)
LINES = """
nonsense | nonsense
ratio | ratio
--ratio=0.5 | --ratio
--no-such-option | --no-such-option
+_target_=os.system | _target_
+model.nobody=1 | nobody
+grid.nobody=[1] | setting=grid
+launcher.gpus=1 | gpus
~model | model
+experiment=null | experiment
+experiment=[a,b] | a
experiment=heapr | experiment
+experiment=heapr +experiment=coverage | experiment
ratio=[0.25 | [0.25
model.path=${nothing} model=local | nothing
ratio=${oc.env:HOME} | ratio
study=${nothing} | nothing
hydra.nobody=1 | nobody
hydra/launcher=nobody | nobody
hydra.searchpath=nobody | nobody
hydra.searchpath=[file:///no/such/folder] criterion=mine | mine
--config-name=nobody | nobody
--config-dir=/no/such/folder | /no/such/folder
-m criterion=man,reep | reep
-m ratio=range(3) | ratio
-m criterion=glob(zz*) | criterion
-m calibration.length=0,1 | calibration.length
suite=mc8 data_root=/no/such/folder | mirror
suite=writing | wildbench
calibration=mix | sources=
allocation=pocket_evolutionary allocation.search=pocket_code | pocket:calibration/code.jsonl
recovery=pocket_dora recovery.instructions=pocket_code | pocket:calibration/code.jsonl
calibration.field=a calibration.template=b | template=b
export=natural model.top_k=2 | model.top_k
timing=true | timing
timing=true launcher=slurm | timed.device
backend=server suite=pocket16 allow_code_execution=true | pocket_wildbench
"""
"""Lines `arguments of moe_lab | part of the message`."""

OTHER_COMMANDS = """
moe_lab statos | statos
moe_lab status | name
moe_lab status nobody | nobody
moe_lab verify sweep store=README.md | README.md
moe_lab status sweep stor=STORE | stor
moe_lab gc store=/no/such/store | /no/such/store
moe_lab status '' store=STORE | unknown
moe_lab status sweep --no-such-option | --no-such-option
moe_lab inspect nobody | nobody
moe_lab inspect model=pocket_olmo | did you mean pocket_olmoe?
moe_lab inspect model=local model.path=/no/such/folder | /no/such/folder
moe_lab inspect model=pocket_olmoe calibration=c5 | c5
moe_lab inspect model=pocket_olmoe ratoi=1 | ratio
analysis rnaks store=STORE | did you mean ranks? (`moe-lab report help`
analysis unified.tabl5 store=STORE | unified.table5
analysis ranks stor=STORE | did you mean store?
analysis ranks study=sweeep store=STORE | did you mean sweep?
analysis ranks out= store=STORE | out= has no value
analysis ranks store=nowhere | store=nowhere does not exist
analysis ranks store=README.md | README.md
analysis ranks out=/dev/null/out store=STORE | /dev/null/out
analysis unified.table1.publishd store=STORE | did you mean unified.table1.published?
analysis --no-such-option store=STORE | --no-such-option
analysis report study=sweep,nobody store=STORE | nobody
analysis report format=pfd store=STORE | did you mean pdf?
tools.pocket.train nobody | nobody
"""
"""Lines `module and arguments | part of the message`. STORE stands for a store with the study
`sweep`."""
FIXED_COUNT = len(MISTAKES) + len(OTHER_COMMANDS.strip().splitlines())
"""Number of commands that run in every campaign: the first ones of `all_commands`."""


def all_commands() -> list[Command]:
    """All commands; the first FIXED_COUNT run in every campaign."""
    return [*_listed_commands(), *_field_commands(), *_group_commands()]


def _listed_commands() -> Iterator[Command]:
    for arguments, message in MISTAKES.values():
        yield Command("moe_lab", tuple(arguments), (message,))
    for line in [
        *OTHER_COMMANDS.strip().splitlines(),
        *(f"moe_lab {line}" for line in LINES.strip().splitlines()),
    ]:
        command, name = line.split(" | ")
        module, *arguments = shlex.split(command)
        yield Command(module, tuple(arguments), (name,))


def _field_commands() -> Iterator[Command]:
    for line in FIELDS.strip().splitlines():
        field, values = line.split(" | ")
        field, *further_settings = field.split()
        further_settings = SERVER if further_settings == ["SERVER"] else further_settings
        for value in shlex.split(values, posix=False):  # quotes are for Hydra
            yield Command(
                "moe_lab", (*further_settings, f"{field}={value}"), _possible_names(field, value)
            )


def _possible_names(field: str, value: str) -> tuple[str, ...]:
    """Texts of which a message about a field must have one: the full name of the field, its last
    part, its group if the field is the name of a group's file, or the value if it is
    distinctive."""
    group, _, last = field.rpartition(".")
    values = re.findall(r"[\w/.-]{4,}|ratio", value) or (["= is unknown"] if "''" in value else [])
    return (field, f"{last}=", *((f"{group}=",) if last == "name" else ()), *values)


def _group_commands() -> Iterator[Command]:
    """Commands for every group: with two names of no file, with null, and with an unknown field."""
    for group in GROUPS.split():
        first = sorted(file.stem for file in (conf() / group).glob("*.yaml"))[0]
        for name in (f"{first}s", "nobody", "null"):
            yield Command("moe_lab", (f"{group}={name}",), (f"{group}={name}",))
        yield Command("moe_lab", (f"{group}.nam=word",), (f"{group}.nam",))


def arguments_in(command: Command, folder: Path) -> list[str]:
    """The arguments of a command in a folder with a store."""
    arguments = [argument.replace("STORE", str(folder / "store")) for argument in command.arguments]
    if command.module != "moe_lab" or arguments[0] in VERBS:
        return arguments
    if not any(argument.startswith("store=") for argument in arguments):
        arguments.append(f"store={folder / 'other'}")
    return [*arguments, "dry_run=true"]


def outcome_of(command: Command, folder: Path) -> Outcome:
    """Run the main function of the command's module in this process. Returns its outcome."""
    arguments = arguments_in(command, folder)
    with (
        contextlib.chdir(folder),
        contextlib.redirect_stdout(io.StringIO()) as output,
        contextlib.redirect_stderr(output),
        mock.patch.object(sys, "argv", [command.module, *arguments]),
    ):
        try:
            is_package = command.module in ("moe_lab", "analysis")
            main = importlib.import_module(
                f"{command.module}.__main__" if is_package else command.module
            ).main
            has_parameters = inspect.signature(main).parameters
            run_and_exit(partial(main, arguments) if has_parameters else main)
        except SystemExit as system_exit:
            code = system_exit.code if isinstance(system_exit.code, int) else 1
        except Exception:  # noqa: BLE001 - a trace that a user would see
            traceback.print_exc()
            code = 1
    return Outcome(code or 0, output.getvalue())


def failures(rows: Sequence[Command]) -> list[str]:
    """A sentence for each of `rows` that is not refused as it should be.

    The commands run in a folder that has a store with the study `sweep`, a text and a folder.
    """
    with tempfile.TemporaryDirectory(prefix="moe_lab_campaign-") as name:
        folder = Path(name)
        write_store(folder / "store", name="sweep", criteria=("reap", "man"))
        run = folder / "store" / "runs" / "sweep" / "20260101-000000-000000000-0000"
        run.mkdir(parents=True)
        write_sealed(
            run / "run.json", {"study": "sweep", "time": 0.0, "code": {}, "steps": [], "inputs": []}
        )
        Store(folder / "store").create()
        (folder / "README.md").write_text("words\n")
        (folder / "moe_lab").mkdir()
        outcomes = [(row, outcome_of(row, folder)) for row in rows]
        return [
            f"{row}: {outcome}" for row, outcome in outcomes if not outcome.is_refusal(row.names)
        ]
