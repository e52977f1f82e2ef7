from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from moe_lab.config import ModelConfig
from moe_lab.errors import UserError
from moe_lab.models import experts
from moe_lab.models.load import load_model


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


def rewrite(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return apply


def reconfigure(**changes: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return apply


EXPERT = "model.layers.1.mlp.experts.5.up_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            rewrite(lambda t: t[EXPERT].view(-1)[7:9].fill_(float("nan"))),
            r"model\.layers\.1\.mlp\.experts\.gate_up_proj \(layer 1, expert 5\) holds nan at 2 places",
        ),
        (
            rewrite(lambda t: t["model.layers.0.mlp.gate.weight"].view(-1)[:1].fill_(float("-inf"))),
            r"weights: model\.layers\.0\.mlp\.gate\.weight holds -inf at 1 places",
        ),
        (rewrite(lambda t: t.pop("model.norm.weight")), r"1 weights are missing .* the first is model\.norm\.weight"),
        (reconfigure(num_experts=12), r"has shape \(16, .*\), but config\.json asks for \(12, "),
        (reconfigure(model_type="llama", num_experts=1), "model_type=llama is not supported: it has no routed experts"),
        (reconfigure(model_type="jetmoe"), "model_type=jetmoe is not supported: it does not hand its experts"),
        (reconfigure(model_type="bert", num_experts=1), "model_type=bert is not supported: it has no routed experts"),
        (
            reconfigure(model_type="novel"),
            "model_type=novel is not supported: transformers has no causal language model",
        ),
        (
            reconfigure(model_type="novel", auto_map={"AutoConfig": "x.Y"}),
            r"its own code is used with model\.trust_remote_code=true",
        ),
        (reconfigure(num_hidden_layers="three"), r"config\.json .*num_hidden_layers=.three"),
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer that can be loaded"),
        (lambda f: [file.unlink() for file in f.glob("tokenizer*")], "has no tokenizer that can be loaded"),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(
    folder: Path, damage: Callable[[Path], object], message: str
) -> None:
    damage(folder)
    with pytest.raises(UserError, match=message) as caught:
        load_model(settings(folder, device="cpu"))
    assert "\n" not in str(caught.value)


def test_unsupported_models_are_refused_before_weights_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reconfigure(model_type="llama", num_experts=1)(folder)
    monkeypatch.setattr("moe_lab.models.load._weights", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(UserError, match="no routed experts"):
        load_model(settings(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float23"}, r"model\.dtype=float23 is unknown: did you mean float32"),
        ({"device": "cdua"}, r"model\.device=cdua is unknown: did you mean cuda"),
        ({"device": "cuda:99"}, r"model\.device=cuda:99: this machine has \d+ CUDA devices"),
    ],
)
def test_unknown_settings(original: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_model(settings(original, **change))
