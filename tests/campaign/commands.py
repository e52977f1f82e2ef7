"""Wrong command lines: each ends with its exit code and a sentence that names the field or the value, and no trace.

Everything of `python -m moe_lab` here is a dry run, so that a line that is taken by mistake runs nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints
from unittest import mock

from pydantic import ConfigDict, TypeAdapter, ValidationError
from synthetic import write_store

from moe_lab.config import CellConfig, Config, JudgeConfig
from moe_lab.paths import conf
from moe_lab.study.store import Store, write_json


@dataclass(frozen=True)
class Command:
    """One command line, and words of which its message must have one: the field that is wrong, or its value."""

    module: str
    words: tuple[str, ...]
    names: tuple[str, ...]
    code: int = 2

    def __str__(self) -> str:
        return f"{self.module} {' '.join(self.words)}"


@dataclass(frozen=True)
class Ended:
    """How a command line ended."""

    code: int
    said: str

    @property
    def has_trace(self) -> bool:
        """Python's, or what Hydra puts in front of one."""
        return any(words in self.said for words in ("Traceback (most recent call last)", "Error executing job"))


NEAREST = {
    "a criterion nobody knows": (["criterion=reep"], "did you mean reap?"),
    "a model nobody knows": (["model=pocket_olmo"], "did you mean pocket_olmoe?"),
    "a suite nobody knows": (["suite=pocket61"], "did you mean pocket16?"),
    "an experiment nobody knows": (["+experiment=task_agnostik"], "did you mean task_agnostic?"),
    "a setting nobody knows": (["ratoi=0.5"], "did you mean ratio?"),
    "a nested setting nobody knows": (["calibration.lenght=5"], "did you mean calibration.length?"),
    "a ratio above one": (["ratio=1.5"], "ratio=1.5: expected a number below 1"),
    "a ratio that is a word": (["ratio=much"], "ratio=much: expected a number"),
    "several values of what has one": (["suite=quick,code"], "names several files"),
    "a gate nobody knows": (["gate=modle"], "did you mean model?"),
    "a launcher nobody knows": (["launcher.name=lokal"], "did you mean local?"),
    "a folder that is not there": (["model=local", "model.path=/no/such/folder"], "/no/such/folder"),
    "a model without its folder": (["model=local"], "model.path is not set"),
    "a text without its file": (["calibration=text"], "calibration.path is not set"),
    "a packing nobody knows": (["calibration.packing=reep"], "did you mean reap?"),
    "a search with one layer in memory": (
        ["calibration.engine=streamed", "allocation=evolutionary"],
        "allocation=evolutionary compares whole models, and calibration.engine=streamed has one decoder layer",
    ),
    "ablations with one layer in memory": (
        [
            "calibration.engine=streamed",
            "criterion=channel_activation",
            "allocation=coverage",
            "+allocation.parameters.prior=loss",
        ],
        "allocation=coverage compares whole models",
    ),
    "an allocation nobody knows": (["allocation.name=unifrom"], "did you mean uniform?"),
    "parameters that are not the criterion's": (["criterion=man", "+criterion.parameters.c=1"], "criterion.parameters"),
    "programs without permission": (["suite=pocket16"], "allow_code_execution"),
    "a folder that Hydra cannot write": (["hydra.run.dir=/proc/x"], "/proc/x"),
    "a key that is none": (["++a.b.c=1"], "setting=a is unknown"),
    "more than top-k removed": (["ratio=0.95"], "0.906 is the largest"),
}
"""Mistakes in one line, and what the message says of them; tests/test_main.py also limits their time."""

WORDS = {"''": "", "null": None, "word": "word", "0": 0, "-1": -1, "1.5": 1.5, "nan": math.nan, "inf": math.inf}
"""What is typed for every field whose type refuses it -> the value that it means."""
FIELDS = """
export | naturel masked '' all
export.converter export=natural export.format=gguf | nowhere.py '' README.md
push export=natural | me '' a/b/c a/b..c
flops_text | pocket_excrpt '' c5
data_root suite=mc8 | /no/such/folder
store | README.md
interpreters.vllm backend=vllm | 3 /no/such README.md
interpreters.vlm | python
plugins | [no_such_module] [os.path]
study | all .hidden a/b ../up 'a b' 'a;b'
model.name | a/b ../up
model.expected | word {layers:4}
model.path | /no/such/folder pocket:olmeo 'two words' README.md
model.revision | main v1
model.device | tpu cdua cuda:99 cuda:-1 cuda:word
model.top_k | 33
criterion.name | '' word
criterion.parameters | {c:1} {b:word}
criterion.parameters.b criterion=s_family | word nan null
criterion.parameters.alpha criterion=s_family | word
calibration.path | '' /no/such/file.txt /no/such/file.jsonl pocket:calibration/genral.jsonl moe_lab
calibration.sources | [{calibration:nobody,share:0.5}] [{calibration:pocket_code}]
calibration.engine | streem
calibration.length | 10000000
calibration.tokens | 10
calibration.parts | 100000
allocation.name | unifrom ''
allocation.multiple_of | 1000
allocation.by allocation=global | reep '' heapr
allocation.search allocation=pocket_evolutionary | nobody ''
allocation.path allocation=list | '' /no/such/plan.json moe_lab README.md
allocation.parameters | {unknown:1}
allocation.parameters.generations allocation=pocket_evolutionary | 0 -1 word 1.5 nan
allocation.parameters.population allocation=pocket_evolutionary | 0 -1 word
allocation.parameters.prior allocation=coverage criterion=channel_activation | word 1
recovery.instructions recovery=pocket_dora | nobody ''
recovery.distill recovery=pocket_router_kd | nobody ''
recovery.fit recovery=pocket_merge_fit allocation=hc_smoe | nobody ''
recovery.temperature recovery=pocket_router_kd | inf
recovery.learning_rate recovery=pocket_dora | inf
suite.benchmarks | [pocket_bolq] ['']
suite.path suite=perplexity | /no/such/file.txt '' moe_lab
protocol.benchmarks | {pocket_bolq:{shots:1}} {pocket_boolq:{shot:1}} {pocket_boolq:{shots:word}}
protocol.benchmarks | {pocket_boolq:{shots:-1}} {pocket_boolq:{batch_size:0}} {pocket_boolq:{limit:1}}
judge.max_tokens | word 1.5
judge.extra | word
backend.command SERVER | '' vllm 'vllm {checkpoint}'
backend.command SERVER | 'vllm {checkpont} {port}' 'a "b'
backend.command SERVER | '/no/such/program {checkpoint} {port}'
launcher.name | lokal
resources.jobs | {statistic:{gpus:1}} {statistics:{gpu:1}} {nobody/every:{gpus:1}}
resources.models | {m:{gpu:1}}
timed.batch_sizes timing=true launcher=inline | [0] [word]
"""
"""FIELD [what is set besides] | further values that it cannot have, each to be named in a message. SERVER is longer."""
SERVER = ["backend=server", "suite.benchmarks=[pocket_humaneval]", "allow_code_execution=true"]

GROUPS = (
    "model criterion calibration allocation recovery export suite protocol judge backend launcher resources tracker"
)
LINES = """
nonsense | nonsense
ratio | ratio
ratio= | ratio
--ratio=0.5 | --ratio
--no-such-option | --no-such-option
+_target_=os.system | _target_
+a=1 | a
+model.nobody=1 | nobody
+calibration.nobody=1 | nobody
+grid.nobody=[1] | nobody
+suite.nobody=1 | nobody
+launcher.gpus=1 | gpus
~model | model
~calibration.length | length
+experiment=null | experiment
+experiment=[a,b] | a
+experiment=task_agnostic,heapr | experiment
experiment=heapr | experiment
+experiment=heapr +experiment=coverage | experiment
model= | model
criterion=man,reep | reep
ratio=0.25,5 | ratio
suite=quick,code | suite
seed=1,x | seed
ratio=[0.25 | [0.25
ratio={a | {a
criterion='man | criterion
model.path=${nothing} model=local | nothing
ratio=${seed} | ratio
ratio=${oc.env:HOME} | ratio
study=${nothing} | nothing
hydra.nobody=1 | nobody
hydra/launcher=nobody | nobody
hydra.searchpath=nobody | nobody
hydra.searchpath=[file:///no/such/folder] criterion=mine | mine
--config-name=nobody | nobody
--config-dir=/no/such/folder | /no/such/folder
-m criterion=man,reep | reep
-m ratio=0.25,2 | ratio
-m ratio=range(3) | ratio
-m criterion=glob(zz*) | criterion
-m calibration.length=0,1 | calibration.length
suite=mc8 data_root=/no/such/folder | mirror
suite=writing | wildbench
suite=code | humaneval
suite=perplexity | suite.path
suite=pocket16 | allow_code_execution
calibration=mix | calibration.sources
calibration=text | calibration.path
model=local | model.path
allocation=list | allocation.path
allocation=pocket_evolutionary allocation.search=pocket_code | pocket:calibration/code.jsonl
recovery=pocket_dora recovery.instructions=pocket_code | pocket:calibration/code.jsonl
criterion=man allocation=coverage | coverage
allocation=evolutionary calibration.engine=streamed | streamed
calibration.field=a calibration.template=b | calibration.template
backend=server export=padded recovery=nf4 | recovery
export=padded recovery=nf4 | export
export=natural recovery=nf4 verify=true | verify
export=natural model.top_k=2 | model.top_k
timing=true | timing
timing=true launcher=slurm | timed.device
backend=server suite=pocket16 allow_code_execution=true | pocket_wildbench
model=deepseek_v3 calibration=c4 model.device=cpu suite.benchmarks=[] | model
"""
"""Words | what the message must name."""

OTHERS = """
moe_lab.study | usage
moe_lab.study statos | statos
moe_lab.study status | name
moe_lab.study status nobody | nobody
moe_lab.study status sweap store=STORE | sweap
moe_lab.study verify nobody store=STORE | nobody
moe_lab.study verify sweep store=/no/such/store | /no/such/store
moe_lab.study verify sweep store=README.md | README.md
moe_lab.study verify sweep STORE extra | extra
moe_lab.study status sweep stor=STORE | stor
moe_lab.study verify sweep apply=true store=STORE | apply
moe_lab.study gc apply_all=true store=STORE | apply
moe_lab.study gc sweep store=STORE | sweep
moe_lab.study gc store=/no/such/store | /no/such/store
moe_lab.study status '' store=STORE | unknown
moe_lab.study --no-such-option | command
moe_lab.inspect nobody | nobody
moe_lab.inspect model=pocket_olmo | pocket_olmoe
moe_lab.inspect model=local model.path=/no/such/folder | /no/such/folder
moe_lab.inspect model=pocket_olmoe calibration=c5 | c5
moe_lab.inspect model=pocket_olmoe ratoi=1 | ratio
moe_lab.inspect model=pocket_olmoe ratio=2 | ratio
moe_lab.inspect model=pocket_olmoe,pocket_qwen3_moe | model
moe_lab.inspect -m model=pocket_olmoe | -m
analysis rnaks store=STORE | ranks
analysis unified.tabl5 store=STORE | unified.table5
analysis ranks stor=STORE | store
analysis ranks study=sweap store=STORE | sweep
analysis ranks store= | store
analysis ranks out= store=STORE | out
analysis ranks store=/no/such/store | /no/such/store
analysis ranks store=README.md | README.md
analysis ranks out=/dev/null/out store=STORE | /dev/null/out
analysis ranks compare=maybe store=STORE | compare
analysis ranks --compare store=STORE | --compare
analysis --no-such-option store=STORE | --no-such-option
analysis report study=nobody store=STORE | nobody
analysis report study=sweep,nobody store=STORE | nobody
moe_lab.evaluation.mirror nobody | nobody
moe_lab.evaluation.mirror mc8 --no-such-option | --no-such-option
tools.pocket.train nobody | nobody
"""
"""Module and words, in which STORE stands for a store with the study `sweep` | what the message must name."""


def every_command() -> list[Command]:
    """All of them, each once; of those that are listed twice the first, whose message is to say more."""
    listed = [*_mistakes(), *_typed(), *_fields(), *_groups(), *_lines(), *_others()]
    return list({str(row): row for row in reversed(listed)}.values())[::-1]


def _mistakes() -> Iterator[Command]:
    for words, says in NEAREST.values():
        yield Command("moe_lab", tuple(words), (says,))


def _typed() -> Iterator[Command]:
    """Every field with the words that its type refuses."""
    for group in (Config, CellConfig):
        for field, kind in _fields_of(group):
            of = TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False))
            for word, value in WORDS.items():
                is_number = isinstance(value, float | int)
                if _refuses(of, value) and not (is_number and not _refuses(of, "text")):  # a text may be digits
                    yield Command("moe_lab", (f"{field}={word}",), _named(field, word))


def _fields_of(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Name and type of every field that a user sets, of a group of settings and the groups in it."""
    types = get_type_hints(group, include_extras=True)
    for field in fields(group):
        unset = getattr(group, "internal", ()) or ()
        if field.name in (*unset, "dry_run") or types[field.name] == JudgeConfig | None:  # every command is a dry run
            continue
        if is_dataclass(types[field.name]):
            yield from _fields_of(types[field.name], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, types[field.name]


def _refuses(of: TypeAdapter[Any], value: Any) -> bool:
    try:
        of.validate_python(value)
    except ValidationError:
        return True
    return False


def _fields() -> Iterator[Command]:
    for line in FIELDS.strip().splitlines():
        left, values = line.split(" | ")
        field, *besides = left.split()
        besides = SERVER if besides == ["SERVER"] else besides
        for value in shlex.split(values, posix=False):  # quotes are for Hydra
            yield Command("moe_lab", (*besides, f"{field}={value}"), _named(field, value))


def _named(field: str, value: str) -> tuple[str, ...]:
    """How a message may name a field: in full, or by its last word; what chooses from a group, by the group; or by its
    value, where that is a word of its own."""
    group, _, last = field.rpartition(".")
    values = re.findall(r"[\w/.-]{4,}|ratio", value) or (["= is unknown"] if "''" in value else [])
    return (field, f"{last}=", *((f"{group}=",) if last == "name" else ()), *values)


def _groups() -> Iterator[Command]:
    """Every group with a name of none of its files, a misspelt one, none at all, and a field that is none."""
    for group in GROUPS.split():
        first = sorted(file.stem for file in (conf() / group).glob("*.yaml"))[0]
        for name in (f"{first}s", "nobody", "null"):
            yield Command("moe_lab", (f"{group}={name}",), (f"{group}={name}",))
        yield Command("moe_lab", (f"{group}.nam=word",), (f"{group}.nam",))


def _lines() -> Iterator[Command]:
    for line in LINES.strip().splitlines():
        words, names = line.split(" | ")
        yield Command("moe_lab", tuple(words.split()), (names,))


def _others() -> Iterator[Command]:
    for line in OTHERS.strip().splitlines():
        words, names = line.split(" | ")
        module, *rest = shlex.split(words)
        yield Command(module, tuple(rest), (names,))


def arguments(command: Command, folder: Path) -> list[str]:
    """The words that are typed, in a folder with a store."""
    words = [word.replace("STORE", str(folder / "store")) for word in command.words]
    if command.module != "moe_lab":
        return words
    if not any(word.startswith("store=") for word in words):
        words.append(f"store={folder / 'other'}")
    return [*words, "dry_run=true"]


def here(command: Command, folder: Path) -> Ended:
    """How the command ends when the function that the command line calls is called in this process."""
    words = arguments(command, folder)
    printed = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(folder))
        stack.enter_context(contextlib.redirect_stdout(printed))
        stack.enter_context(contextlib.redirect_stderr(printed))
        stack.enter_context(mock.patch.object(sys, "argv", [command.module, *words]))
        try:
            code = _main(command.module, words)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except Exception:  # noqa: BLE001 - a trace that a user would see
            traceback.print_exc()
            code = 1
    return Ended(code or 0, printed.getvalue())


def as_expected(command: Command, ended: Ended) -> bool:
    return ended.code == command.code and not ended.has_trace and any(name in ended.said for name in command.names)


def _main(module: str, words: list[str]) -> int | None:
    """What `python -m MODULE` calls."""
    if module in ("moe_lab", "moe_lab.study"):
        return importlib.import_module(f"{module}.__main__").main()
    if module == "analysis":
        return importlib.import_module("analysis.__main__").main(words)
    if module == "moe_lab.evaluation.mirror":
        return importlib.import_module("moe_lab.evaluation.mirror").main(words)
    main = importlib.import_module(module).main
    return main(words) if module == "moe_lab.inspect" else main()


def started(command: Command, folder: Path) -> Ended:
    """How the command ends in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", command.module, *arguments(command, folder)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    return Ended(done.returncode, done.stdout + done.stderr)


def a_folder(folder: Path) -> Path:
    """A folder to type commands in: with a store in which there is the study `sweep`, a text, and a folder."""
    write_store(folder / "store", name="sweep", criteria=("reap", "man"), calibrations=("pocket_code",), items=8)
    run = folder / "store" / "runs" / "sweep" / "20260101-000000-000000000-0000"
    run.mkdir(parents=True)
    write_json(run / "run.json", {"study": "sweep", "time": 0.0, "code": {}, "steps": []})
    Store(folder / "store").create()
    (folder / "README.md").write_text("words\n")
    (folder / "moe_lab").mkdir()
    return folder


End = Callable[[Command, Path], Ended]


def answers(end: End, rows: Sequence[Command], processes: int = 1) -> dict[Command, Ended]:
    """How each of `rows` ended, by `here` or `started`."""
    with tempfile.TemporaryDirectory(prefix="moe_lab_campaign-") as name, ThreadPoolExecutor(processes) as pool:
        folder = a_folder(Path(name))
        return dict(zip(rows, pool.map(lambda row: end(row, folder), rows), strict=True))
