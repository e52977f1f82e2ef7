"""The same prompt gives the same greedy text from a loaded model and from a server of its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from asking import write

from moe_lab.config import BackendConfig, JudgeConfig, ModelConfig
from moe_lab.evaluation.answers import render
from moe_lab.evaluation.engines.hf import LoadedModel
from moe_lab.evaluation.engines.server import serving
from moe_lab.evaluation.judge import Judge
from moe_lab.models.load import load_model
from moe_lab.paths import resolve

pytestmark = pytest.mark.slow

COMMAND = "transformers serve {checkpoint} --host 127.0.0.1 --port {port} --device cpu --dtype float32"
TEMPLATE = "{{ bos_token or '' }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def prompts(name: str, count: int) -> list[str]:
    lines = Path(resolve(f"pocket:benchmarks/{name}.jsonl")).read_text().splitlines()[:count]
    return [json.loads(line)["prompt"] for line in lines]


@pytest.fixture
def chatty(tmp_path: Path, subject: LoadedModel) -> Path:
    """The shipped model with a chat template, and settings of generation that would change every text."""
    folder = tmp_path / "chatty"
    folder.mkdir()
    for file in Path(resolve("pocket:olmoe")).iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").unlink()
    penalised = {
        **settings,
        "repetition_penalty": 3.0,
        "do_sample": True,
        "temperature": 2.0,
        "no_repeat_ngram_size": 2,
    }
    (folder / "generation_config.json").write_text(json.dumps(penalised))
    return folder


@pytest.mark.slow
def test_both_back_ends_write_the_same(chatty: Path, tmp_path: Path) -> None:
    """A judge can be behind the server as well, though this one has nothing to say."""
    pytest.importorskip("fastapi", reason="transformers serve needs it: pip install transformers[serving]")
    model = ModelConfig(name="chatty", path=str(chatty), threads=1)
    loaded = LoadedModel(*load_model(model))
    asked = [*prompts("gsm8k", 3), *prompts("wildbench", 3), *prompts("humaneval", 4)]
    endings = {prompt[-1] for prompt in asked}
    stop = ("\ndef ", ")", "\n\n", *(f"{end} " for end in endings))
    chats = [[{"role": "user", "content": prompt}] for prompt in asked[:4]]
    with serving(chatty, BackendConfig("server", COMMAND, 60), model, "n") as served:
        assert write(served, asked, batch_size=4) == write(loaded, asked, batch_size=4)
        assert write(served, asked, 40, stop=stop) == write(loaded, asked, 40, stop=stop)
        rendered = [render(served, chat) for chat in chats]
        assert rendered == [render(loaded, chat) for chat in chats]
        texts = write(served, rendered, 16, chat=True)
        assert texts == write(loaded, rendered, 16, chat=True) and any(texts)
        judge = Judge(JudgeConfig(served.name, served.url, max_tokens=8), tmp_path / "cache")
        (verdict,) = judge.verdicts(["Give a score."], tolerated=1)
        assert verdict.score is None and "without a usable score" in verdict.reply, "it was asked, and it answered"
