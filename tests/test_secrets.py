"""Secrets: refused in settings, and those of the environment looked for in everything that a study
writes."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import preloaded
import pytest
from processes import quoted

from moe_lab.config import BackendConfig, Config
from moe_lab.config.base import storage_problems
from moe_lab.errors import MASK, UserError
from moe_lab.study.provenance import error_document

pytestmark = pytest.mark.slow

SERVER = Path(__file__).parent / "evaluation" / "endpoint.py"
PLANTED = {
    "HF_TOKEN": "PLANTED-token",
    "VLLM_API_KEY": "PLANTED-key-of-a-server",
    "OPENAI_API_KEY": "PLANTED-key",
    "MY_PASSWORD": "PLANTED-password",
}
"""What the environment of a study has."""
SMALL = """suite.benchmarks=[pocket_mbpp] suite.limit=2 allow_code_execution=true backend=server
calibration.tokens=1024 calibration.length=128 launcher.processes=1"""


def served(program: object, rest: str) -> str:
    """The setting of a command of this Python that serves."""
    command = f"{quoted(program)} {rest}".replace("'", "\\'")
    return f"backend.command='{command}'"


def moe_lab(folder: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    told = {
        "WANDB_MODE": "offline",
        "WANDB_DIR": folder,
        "WANDB_CACHE_DIR": folder / "cache",
        "HOME": folder,
    }
    environment = {name: str(value) for name, value in told.items()} | PLANTED
    return preloaded.run(
        folder, "moe_lab", *settings, *SMALL.split(), f"store={folder / 'store'}", **environment
    )


def leaks(folder: Path, done: subprocess.CompletedProcess[str]) -> list[str]:
    """Where planted secrets are to be read."""
    texts = {
        str(file): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and not file.is_symlink()
    }
    texts |= {"printed": (done.stdout + done.stderr).encode()}
    return [name for name, text in texts.items() if b"PLANTED" in text]


def test_no_file_of_a_study_has_a_secret_of_its_environment(tmp_path: Path) -> None:
    command = served(SERVER, "{port} {name} {checkpoint} --api-key $HF_TOKEN")
    done = moe_lab(tmp_path, "-m", "ratio=0.5", "tracker=wandb", command)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "wandb").glob("offline-run-*")) and leaks(tmp_path, done) == []
    assert "--api-key $HF_TOKEN" in (tmp_path / "store/reports/study/report.html").read_text()


def test_a_server_that_prints_its_secrets_and_ends_is_quoted_without_them(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(
        "import os, sys\nsys.exit(f'started with {sorted(os.environ.items())}')\n"
    )
    command = served("server.py", "{port} {checkpoint}")
    done = moe_lab(tmp_path, "criterion=random", "report=false", command)
    assert done.returncode == 2
    assert "started with" in done.stderr
    assert f"('HF_TOKEN', '{MASK}')" in done.stderr
    assert leaks(tmp_path, done) == []


def test_errors_and_settings_do_not_show_secrets_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "PLANTED-token")
    monkeypatch.setenv("SOME_KEY", "1")  # too short to be told from other text
    assert str(UserError("11 refused PLANTED-token")) == f"11 refused {MASK}"
    document = error_document(OSError("GET https://host?token=PLANTED-token"))
    assert "PLANTED" not in str(document)
    assert MASK in document["message"]
    assert MASK in document["trace"]
    (sentence,) = storage_problems({"setup": ["export OTHER=PLANTED-token"]}, "resources.every")
    assert sentence.startswith("resources.every.setup ") and "PLANTED" not in sentence


TYPED = [
    ["judge.extr.api_key=TYPED-key"],
    ["judge.url=https://user:TYPED-key@host"],
    ["backend.command='vllm --api-key TYPED-key'", "model.template_arguments.api_key=TYPED-token"],
    ["resources.every.setup=['export HF_TOKEN=TYPED-token']"],
    ["-m", "ratio=0.25,0.5", "judge.extra={token: TYPED-token}"],
]


@pytest.mark.parametrize("words", TYPED, ids=" ".join)
def test_a_secret_in_a_setting_is_refused_and_neither_printed_nor_stored(
    words: list[str], tmp_path: Path
) -> None:
    done = moe_lab(tmp_path, *words)
    named = [re.sub(r"\W*([\w.]+)=.*", r"\1", word) for word in words if "TYPED" in word]
    assert done.returncode == 2 and "Traceback" not in done.stderr and "TYPED" not in done.stderr, (
        done.stderr
    )
    assert all(
        (name if len(named) > 1 else name.partition(".")[0]) in done.stderr for name in named
    )
    assert not any(tmp_path.iterdir())


SECRET = [
    "s3://key@bucket/x",
    "vllm serve x --api-key abc --port 1",
    "vllm serve x --hf-token=abc",
    "env HF_TOKEN=abc python",
    "Authorization: Bearer abc",
    "export OPENAI_API_KEY='abc'",
    "sk-0123456789abcdef",
]
PLAIN = [
    "https://host:8000/v1",
    "s3://bucket/a@b",
    "vllm serve {checkpoint} --tokenizer x --max-num-batched-tokens 8192",
    "vllm serve x --api-key $VLLM_API_KEY",
    "export HF_TOKEN=$OTHER_TOKEN",
    "module load cuda",
    "the key to a token is a secret",
    "",
]


def test_secrets_are_refused_by_the_names_of_their_settings() -> None:
    for text in SECRET:
        (sentence,) = storage_problems(
            {"jobs": {"plan": {"setup": ["module load cuda", text]}}}, "resources"
        )
        assert sentence.startswith("resources.jobs.plan.setup ") and text not in sentence, text
    for name in ("api_key", "HF_TOKEN", "Authorization", "x-api-key", "auth_token", "password"):
        (sentence,) = storage_problems({"extra": {"headers": {name: "abc"}}}, "judge")
        assert sentence.startswith(f"judge.extra.headers.{name} ")
    others = ("max_tokens", "eos_token", "key_variable", "tokenizer", "special_tokens", "top_k")
    assert list(storage_problems({**dict.fromkeys(others, "abc"), "setup": PLAIN}, "extra")) == []
    with pytest.raises(ValueError, match="has a secret in it"):
        Config(store="s3://user:pw@bucket/x")
    with pytest.raises(ValueError, match="has a secret in it"):
        replace(BackendConfig(), command="x --token t")
