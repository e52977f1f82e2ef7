"""Secrets: refused in settings, taken from the environment, and looked for in everything that a study writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import quoted

from moe_lab.config import BackendConfig
from moe_lab.errors import MASK, UserError, is_secret, mask, masked
from moe_lab.evaluation.back_ends import command_line
from moe_lab.study.slurm import submit

SERVER = Path(__file__).parent / "evaluation" / "endpoint.py"
PLANTED = ("PLANTED-key", "PLANTED-token")
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


def secrets(command: str) -> tuple[list[str], dict[str, str]]:
    """Settings that name two secrets, and an environment that holds them."""
    command = command.replace(QUOTE, ESCAPED)
    words = [f"backend.command='{command} --api-key $API_KEY --more $HF_TOKEN'"]
    return words, dict(zip(("API_KEY", "HF_TOKEN"), PLANTED, strict=True))


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
    settings, environment = secrets(f"{quoted(SERVER)} {{port}} {{name}} {{checkpoint}}")
    ratios = ["-m", "ratio=0.5", "tracker=wandb", "tracker.mode=offline"]
    done = moe_lab(tmp_path, *ratios, *settings, **environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "store/reports/study/report.html").exists() and list((tmp_path / "wandb").glob("offline-run-*"))
    assert leaks(tmp_path, done) == []
    assert "--more $HF_TOKEN" in (tmp_path / "store/reports/study/report.html").read_text()
    done = moe_lab(tmp_path, "ratio=0.5", "study=again", "dry_run=true", *settings, API_KEY="x", HF_TOKEN="y")
    assert done.returncode == 0 and "11 steps, 11 of them" in done.stderr, done.stderr


@pytest.mark.slow
def test_a_server_that_prints_its_secrets_and_ends_is_quoted_without_them(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text("import sys\nsys.exit(f'started with {sys.argv}')\n")
    settings, environment = secrets(f"{quoted('server.py')} {{port}} {{checkpoint}}")
    done = moe_lab(tmp_path, "criterion=random", "report=false", *settings, **environment)
    assert done.returncode == 2 and "started with" in done.stderr, done.stderr
    assert leaks(tmp_path, done) == []


TYPED = [
    ["judge.extr.api_key=PLANTED-key"],
    ["judge.url=https://user:PLANTED-key@host"],
    ["judge.extra.headers={Authorization:'Bearer PLANTED-key'}"],
    ["backend.command='vllm --api-key PLANTED-key'", "model.template_arguments.api_key=PLANTED-token"],
    ["resources.every.setup=['export HF_TOKEN=PLANTED-token']"],
    ["launcher.python='env WANDB_API_KEY=PLANTED-key python'"],
    ["store=s3://user:PLANTED-key@bucket/path"],
    ["-m", "ratio=0.25,0.5", "judge.extra.token=PLANTED-token"],
]


@pytest.mark.parametrize("words", TYPED, ids=" ".join)
def test_a_secret_in_a_setting_is_refused_and_not_printed(words: list[str], tmp_path: Path) -> None:
    done = moe_lab(tmp_path, *words)
    assert done.returncode == 2 and "Traceback" not in done.stderr and leaks(tmp_path, done) == [], done.stderr


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
def test_a_secret_in_a_text_is_masked_and_the_name_of_a_variable_is_not(text: str, secret: str) -> None:
    assert mask(text.format(secret)) == text.format(MASK)
    assert mask(text.format("$NAME")) == text.format("$NAME") or "://user" in text or "Bearer" in text


def test_documents_are_masked_by_their_keys() -> None:
    document: dict[str, Any] = {"extra": {"api_key": "PW", "headers": {"Authorization": "x"}, "max_tokens": 3}}
    assert masked(document) == {"extra": {"api_key": MASK, "headers": {"Authorization": MASK}, "max_tokens": 3}}


def test_a_command_takes_each_variable_as_part_of_one_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "a {b} $c")
    backend = BackendConfig("server", "serve {checkpoint} {port} --token=$HF_TOKEN")
    assert command_line(backend, Path("x"), 7, "n") == ["serve", "x", "7", "--token=a {b} $c"]
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UserError, match="HF_TOKEN"):
        command_line(backend, Path("x"), 7, "n")
