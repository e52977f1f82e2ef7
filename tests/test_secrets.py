"""Secrets: planted in settings and in the environment, and looked for in everything that a study writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from hydra import compose, initialize_config_dir
from processes import quoted

from moe_lab.compose import Groups, addable, from_environment, register, requests
from moe_lab.config import BackendConfig
from moe_lab.errors import MASK, UserError, is_secret, mask, masked
from moe_lab.evaluation.back_ends import command_line
from moe_lab.paths import conf
from moe_lab.secret_settings import hidden, identified, revealed, shell
from moe_lab.study import record
from moe_lab.study.graph import build
from moe_lab.study.record import Study
from moe_lab.study.runs import begin
from moe_lab.study.slurm import submit
from moe_lab.study.slurm.pack import Pack, Record
from moe_lab.study.slurm.resources import resources
from moe_lab.study.store import Store

SERVER = Path(__file__).parent / "evaluation" / "endpoint.py"
PLANTED = ("PLANTED-password", "PLANTED-key", "PLANTED-header", "PLANTED-argument", "PLANTED-token", "PLANTED-plain")
QUOTE, ESCAPED = "'", "\\'"
"""A quotation mark, and how Hydra reads it in a quoted value."""
SMALL = [
    "suite.benchmarks=[pocket_mbpp]",
    "suite.limit=2",
    "allow_code_execution=true",
    "calibration.tokens=1024",
    "calibration.length=128",
    "launcher.processes=1",
    "backend=server",
]


def secrets(planted: tuple[str, ...], command: str) -> tuple[list[str], dict[str, str]]:
    """Settings that hold most of the secrets, and an environment that holds the others."""
    password, key, header, argument, token, plain = planted
    command = command.replace(QUOTE, ESCAPED)
    return [
        f"judge.url=https://user:{password}@host/v1",
        f"judge.extra.api_key={key}",
        f"judge.extra.headers={{Authorization:Bearer {header}}}",
        f"backend.command='{command} --api-key {argument} --more \"${{oc.env:HF_TOKEN}}\" ${{oc.env:PLAIN}}'",
    ], {"HF_TOKEN": token, "PLAIN": plain}


def moe_lab(folder: Path, *settings: str, **environment: str) -> subprocess.CompletedProcess[str]:
    told = {"WANDB_DIR": str(folder), "WANDB_CACHE_DIR": str(folder / "cache"), "HOME": str(folder)}
    return subprocess.run(
        [sys.executable, "-m", "moe_lab", *settings, *SMALL, f"store={folder / 'store'}"],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **told, **environment},
    )


def leaks(folder: Path, done: subprocess.CompletedProcess[str], planted: tuple[str, ...] = PLANTED) -> list[str]:
    """Where secrets are to be read."""
    texts = {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file() and not file.is_symlink()}
    texts |= {"printed": (done.stdout + done.stderr).encode()}
    return [f"{secret} in {name}" for name, text in texts.items() for secret in planted if secret.encode() in text]


@pytest.mark.slow
def test_no_file_of_a_study_has_a_secret_and_another_secret_changes_no_step(tmp_path: Path) -> None:
    command = f"{quoted(SERVER)} {{port}} {{name}} {{checkpoint}}"
    settings, environment = secrets(PLANTED, command)
    ratios = ["-m", "ratio=0.5", "tracker=wandb", "tracker.mode=offline"]
    done = moe_lab(tmp_path, *ratios, *settings, **environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "store/reports/study/report.html").exists() and list((tmp_path / "wandb").glob("offline-run-*"))
    assert leaks(tmp_path, done) == []
    page = (tmp_path / "store/reports/study/report.html").read_text()
    assert "${oc.env:HF_TOKEN}" in page and f"https://user:{MASK}@host/v1" in page

    others = tuple(secret.replace("PLANTED", "OTHER") for secret in PLANTED[:-1])
    settings, environment = secrets((*others, PLANTED[-1]), command)
    done = moe_lab(tmp_path, "ratio=0.5", "study=again", "dry_run=true", *settings, **environment)
    assert done.returncode == 0 and "11 steps, 11 of them" in done.stderr, done.stderr


@pytest.mark.slow
def test_a_server_that_prints_its_secrets_and_ends_is_quoted_without_them(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text("import sys\nsys.exit(f'started with {sys.argv}')\n")
    settings, environment = secrets((*PLANTED[:-1], "x"), f"{quoted('server.py')} {{port}} {{checkpoint}}")
    done = moe_lab(tmp_path, "criterion=random", "report=false", *settings, **environment)
    assert done.returncode == 2 and "started with" in done.stderr, done.stderr
    assert leaks(tmp_path, done, PLANTED[:-1]) == []


@pytest.mark.parametrize(
    "words",
    [
        ["judge.extr.api_key=PLANTED-key"],
        ["judge.max_tokens=https://user:PLANTED-password@host"],
        ["backend.command='vllm --api-key PLANTED-argument'", "model.template_arguments.api_key=PLANTED-key"],
    ],
)
def test_mistakes_do_not_print_secrets(words: list[str], tmp_path: Path) -> None:
    done = moe_lab(tmp_path, *words)
    assert done.returncode == 2 and leaks(tmp_path, done) == [], done.stderr


def test_what_jobs_are_handed_has_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps and settings as submitit stores them, what stands in their script, and the copy of the code."""
    settings, environment = secrets(PLANTED, "serve {port} {checkpoint}")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    settings += [
        "resources.every.setup=['export HF_TOKEN=PLANTED-token']",
        "+resources.jobs={scores:{setup:['export HF_TOKEN=${oc.env:HF_TOKEN}']}}",
        "launcher.python='env WANDB_API_KEY=PLANTED-key python'",
    ]
    register()
    with initialize_config_dir(str(conf()), version_base="1.3"):
        composed = compose("config", overrides=[addable(word) for word in [*SMALL, *settings]])
        config, wanted = requests(composed, Groups(), settings)
    graph = build(config, wanted)
    steps, store = graph.steps(), Store(tmp_path / "store")
    store.create()
    study = Study(config, graph, store, False, written=from_environment(composed))
    with begin(store, "study", steps) as run:
        handed = [Pack(str(tmp_path), steps, 1, "study/1"), Record(study, run)]
    asks = [resources([step], config.resources, lambda step: None) for step in steps if step.kind in ("scores", "plan")]
    script = [shell(line) for ask in asks for line in ask["setup"]] + [shell(str(config.launcher.python))]
    record.write(study, run, {})
    texts = [cloudpickle.dumps(handed), "\n".join(script).encode(), (run.folder / "record.json").read_bytes()]
    texts += [json.dumps([step.document() for step in steps]).encode()]
    assert [secret for secret in PLANTED[:-1] for text in texts if secret.encode() in text] == []
    environment = {**os.environ, "HF_TOKEN": "PLANTED-token"}
    for line in script[:-1]:
        told = subprocess.run(
            ["bash", "-c", f"{line}; echo $HF_TOKEN"], env=environment, capture_output=True, text=True
        )
        assert told.stdout == "PLANTED-token\n"


def test_a_copy_of_the_code_has_no_secret_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("moe_lab", "conf/judge"):
        (tmp_path / "own" / name).mkdir(parents=True)
    (tmp_path / "own/conf/judge/mine.yaml").write_text("name: mine\nextra: {api_key: PLANTED-key}\n")
    monkeypatch.setattr(submit.moe_lab, "__file__", str(tmp_path / "own" / "moe_lab" / "__init__.py"))
    submit.take_snapshot(tmp_path / "copy")
    assert "mine" in (copy := (tmp_path / "copy/conf/judge/mine.yaml").read_text()) and "PLANTED" not in copy


@pytest.mark.parametrize(
    "name", ["api_key", "HF_TOKEN", "Authorization", "x-api-key", "clientSecret", "password", "key"]
)
def test_what_is_called_like_a_secret_is_one(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["max_tokens", "eos_token", "key_variable", "tokenizer", "special_tokens", "top_k"])
def test_what_is_called_almost_like_a_secret_is_none(name: str) -> None:
    assert not is_secret(name)


TEXTS = [
    "https://user:{}@host/v1",
    "https://host/v1?token={}&x=1",
    "env HF_TOKEN={} python",
    "vllm serve x --api-key {} --port 1",
    "Authorization: Bearer {}",
    "{{'api_key': ['{}'], 'x': 3}}",
    "judge.extra={{api_key:{},x:1}}",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("secret", ["PW", "sk-0123456789"])
def test_a_secret_in_a_text_is_masked_and_comes_back_where_it_is_used(text: str, secret: str) -> None:
    written = text.format(secret)
    assert mask(written) == text.format(MASK)
    kept = hidden(written, "backend.command")
    assert secret not in kept and revealed(kept) == written and mask(kept) == text.format(MASK)
    assert identified(kept) == text.format(MASK) and secret not in shell(kept)


def test_documents_are_masked_by_their_keys() -> None:
    document: dict[str, Any] = {"extra": {"api_key": "PW", "headers": {"Authorization": "x"}, "max_tokens": 3}}
    assert masked(document) == {"extra": {"api_key": MASK, "headers": {"Authorization": MASK}, "max_tokens": 3}}
    kept = hidden(document, "judge")
    assert revealed(kept) == document and masked(kept) == masked(document)
    assert identified(kept) == {"extra": {"headers": {}, "max_tokens": 3}}


def test_a_plain_variable_of_the_environment_counts_and_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for effort in ("low", "high"):
        monkeypatch.setenv("EFFORT", effort)
        found.append(identified({"effort": "${oc.env:EFFORT}"}))
        assert effort not in str(found[-1])
    assert found[0] != found[1]


def test_a_command_takes_secrets_as_words_and_other_variables_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("START", "serve {checkpoint}")
    monkeypatch.setenv("HF_TOKEN", "a {b} c")
    backend = BackendConfig("server", "${oc.env:START} {port} --token ${oc.env:HF_TOKEN}")
    assert command_line(backend, Path("x"), 7, "n") == ["serve", "x", "7", "--token", "a {b} c"]
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match="HF_TOKEN"):
        command_line(backend, Path("x"), 7, "n")
