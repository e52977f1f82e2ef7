from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch

from moe_lab.config import ModelConfig
from moe_lab.errors import UserError
from moe_lab.models import experts
from moe_lab.models.load import load_model
from tests.campaign.models import reconfigure


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    tiny.save("olmoe", folder, dtype=torch.bfloat16)
    return folder


def settings(path: object, **changes: object) -> ModelConfig:
    return ModelConfig(name="m", path=str(path), **changes)  # type: ignore[arg-type]


def test_loaded_model_is_ready_to_be_scored(original: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = load_model(settings(original, device="cpu", threads=1))
    assert model.dtype == torch.float32 and not model.training
    assert set(model.get_experts_implementation().values()) == {experts.CPU_EXPERTS}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert tokenizer.pad_token == "</s>" and model.generation_config.pad_token_id is not None
    assert capfd.readouterr() == ("", "")
    expected = tiny.build("olmoe", dtype=torch.bfloat16).float()
    assert torch.equal(model(input_ids=tiny.tokens()).logits, expected(input_ids=tiny.tokens()).logits)


def test_precision_can_be_chosen(original: Path) -> None:
    model, _ = load_model(settings(original, dtype="bfloat16", device="cpu"))
    assert model.dtype == torch.bfloat16 and set(model.get_experts_implementation().values()) == {"eager"}


@pytest.mark.cuda
def test_cuda_keeps_the_stored_precision(original: Path) -> None:
    model, _ = load_model(settings(original))
    assert model.dtype == torch.bfloat16 and model.device.type == "cuda"
    assert set(model.get_experts_implementation().values()) == {"grouped_mm"}


def test_shipped_model_loads() -> None:
    model, tokenizer = load_model(settings("pocket:olmoe", device="cpu"))
    assert len(tokenizer) <= model.config.vocab_size and tokenizer.pad_token is not None


def test_unsupported_models_are_refused_before_weights_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reconfigure(folder, model_type="llama", num_experts=1, num_experts_per_tok=1)
    monkeypatch.setattr("moe_lab.models.load._weights", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(UserError, match="no routed experts"):
        load_model(settings(folder))


def test_a_device_that_is_not_here_is_refused(original: Path) -> None:
    with pytest.raises(UserError, match=r"model\.device=cuda:99: this machine has \d+ CUDA devices"):
        load_model(settings(original, device="cuda:99"))
