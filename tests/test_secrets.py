"""Secrets: refused in settings, and those of the environment looked for in everything that a study
writes."""

import re
import subprocess
from pathlib import Path

import preloaded
import pytest
from processes import python_command

from moe_lab.config import Config
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
    command = f"{python_command(program)} {rest}".replace("'", "\\'")
    return f"backend.command='{command}'"


def moe_lab(folder: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    variables = {
        "WANDB_MODE": "offline",
        "WANDB_DIR": folder,
        "WANDB_CACHE_DIR": folder / "cache",
        "HOME": folder,
    }
    environment = {name: str(value) for name, value in variables.items()} | PLANTED
    return preloaded.run(
        folder, "moe_lab", *settings, *SMALL.split(), f"store={folder / 'store'}", **environment
    )


def leaks(folder: Path, result: subprocess.CompletedProcess[str]) -> list[str]:
    """The files and outputs that contain planted secrets."""
    texts = {
        str(file): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and not file.is_symlink()
    }
    texts |= {"printed": (result.stdout + result.stderr).encode()}
    return [name for name, text in texts.items() if b"PLANTED" in text]


def test_no_file_of_a_study_has_a_secret_of_its_environment(tmp_path: Path) -> None:
    command = served(SERVER, "{port} {name} {checkpoint} --api-key $HF_TOKEN")
    result = moe_lab(tmp_path, "-m", "ratio=0.5", "tracker=wandb", command)
    assert result.returncode == 0, result.stderr
    assert list((tmp_path / "wandb").glob("offline-run-*"))
    assert leaks(tmp_path, result) == []
    assert "--api-key $HF_TOKEN" in (tmp_path / "store/reports/study/report.html").read_text()


def test_output_of_a_failed_server_is_quoted_without_secrets(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(
        "import os, sys\nsys.exit(f'started with {sorted(os.environ.items())}')\n"
    )
    command = served("server.py", "{port} {checkpoint}")
    result = moe_lab(tmp_path, "criterion=random", "report=false", command)
    assert result.returncode == 2
    assert "started with" in result.stderr
    assert f"('HF_TOKEN', '{MASK}')" in result.stderr
    assert leaks(tmp_path, result) == []


def test_secrets_of_the_environment_are_masked(
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
    assert sentence.startswith("resources.every.setup ")
    assert "PLANTED" not in sentence


TYPED = [
    ["judge.extr.api_key=TYPED-key"],
    ["judge.url=https://user:TYPED-key@host"],
    ["backend.command='vllm --api-key TYPED-key'", "model.template_arguments.api_key=TYPED-token"],
    ["resources.every.setup=['export HF_TOKEN=TYPED-token']"],
    ["-m", "ratio=0.25,0.5", "judge.extra={token: TYPED-token}"],
]


@pytest.mark.parametrize("arguments", TYPED, ids=" ".join)
def test_a_secret_in_a_setting_is_refused(arguments: list[str], tmp_path: Path) -> None:
    """The setting is named; the secret is neither printed nor stored."""
    result = moe_lab(tmp_path, *arguments)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr and "TYPED" not in result.stderr, result.stderr
    secrets = [argument for argument in arguments if "TYPED" in argument]
    for name in (re.sub(r"\W*([\w.]+)=.*", r"\1", secret) for secret in secrets):
        assert (name if len(secrets) > 1 else name.partition(".")[0]) in result.stderr
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


def test_secret_texts_and_names_are_refused_by_the_name_of_their_setting() -> None:
    for text in SECRET:
        settings = {"jobs": {"plan": {"setup": ["module load cuda", text]}}}
        (sentence,) = storage_problems(settings, "resources")
        assert sentence.startswith("resources.jobs.plan.setup ")
        assert text not in sentence
    names = ("api_key", "HF_TOKEN", "Authorization", "x-api-key", "auth_token", "password")
    for name in names:
        (sentence,) = storage_problems({"extra": {"headers": {name: "abc"}}}, "judge")
        assert sentence.startswith(f"judge.extra.headers.{name} ")
    plain_names = (
        "max_tokens",
        "eos_token",
        "key_variable",
        "tokenizer",
        "special_tokens",
        "top_k",
    )
    plain = {**dict.fromkeys(plain_names, "abc"), "setup": PLAIN}
    assert list(storage_problems(plain, "extra")) == []


def test_a_password_in_a_url_is_refused() -> None:
    with pytest.raises(ValueError, match="has a secret in it"):
        Config(store="s3://user:pw@bucket/x")
