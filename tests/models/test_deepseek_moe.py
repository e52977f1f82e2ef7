"""The port of the first DeepSeekMoE computes what its paper and its published code say, and is used
without asking."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from tiny import logits, settings
from torch.nn.functional import silu
from transformers import LlamaConfig, LlamaForCausalLM

from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.models.load import load_model
from moe_lab.pruning.export import export
from moe_lab.pruning.export.verify import verify
from tests.campaign.models import reconfigure

PUBLISHED = json.loads("""{
    "architectures": ["DeepseekForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekConfig",
        "AutoModel": "modeling_deepseek.DeepseekModel",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekForCausalLM"
    },
    "aux_loss_alpha": 0.001, "hidden_act": "silu", "initializer_range": 0.02, "moe_layer_freq": 1,
    "norm_topk_prob": false, "pretraining_tp": 1, "rms_norm_eps": 1e-06, "rope_scaling": null,
    "rope_theta": 10000,
    "scoring_func": "softmax", "seq_aux": true, "tie_word_embeddings": false,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.36.0", "use_cache": true
}""")
"""What the published config.json says besides shapes."""
LLAMA = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
LLAMA += ("num_key_value_heads", "rms_norm_eps", "attention_bias")


@torch.no_grad()
def naive(folder: Path) -> torch.Tensor:
    """Logits (B, S, V) of all tokens in fp64, from the files alone: a Llama with the paper's MoE
    blocks."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    weights = {name: tensor.double() for name, tensor in tensors.items()}
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    model = LlamaForCausalLM(
        LlamaConfig(**{field: config[field] for field in LLAMA}, rope_parameters=rope)
    ).double()
    for number, layer in enumerate(model.model.layers):
        if number >= config["first_k_dense_replace"] and number % config["moe_layer_freq"] == 0:
            layer.mlp = PaperBlock(f"model.layers.{number}.mlp", config, weights)
    lost, beyond = model.load_state_dict(weights, strict=False)
    assert not lost
    assert all(".mlp." in name for name in beyond)
    logits: torch.Tensor = model.eval()(tiny.tokens()).logits
    return logits


class PaperBlock(torch.nn.Module):
    """Equations 9 to 11 of Dai et al. (2024), token after token, expert after expert."""

    def __init__(self, at: str, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.at = at
        self.said = config
        self.weights = weights

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.moe(row) for row in hidden.flatten(0, -2)]).view_as(hidden)

    def mlp(self, prefix: str, row: torch.Tensor) -> torch.Tensor:
        gate, up, down = (
            self.weights[f"{prefix}.{part}_proj.weight"] for part in ("gate", "up", "down")
        )
        return down @ (silu(gate @ row) * (up @ row))

    def moe(self, row: torch.Tensor) -> torch.Tensor:
        affinity = (self.weights[f"{self.at}.gate.weight"] @ row).softmax(0)
        chosen = sorted(range(len(affinity)), key=lambda expert: -float(affinity[expert]))
        chosen = chosen[: self.said["num_experts_per_tok"]]
        total = sum(affinity[expert] for expert in chosen) if self.said["norm_topk_prob"] else 1
        mixed = sum(
            affinity[expert] / total * self.mlp(f"{self.at}.experts.{expert}", row)
            for expert in chosen
        )
        return (
            mixed + self.mlp(f"{self.at}.shared_experts", row)
            if self.said["n_shared_experts"]
            else mixed
        )


def publish(folder: Path, **changes: Any) -> Any:
    """A tiny checkpoint as the published one: its layout, its config.json, its code, which fails
    when imported."""
    model = tiny.save("deepseek", folder, **changes)
    config = json.loads((folder / "config.json").read_text())
    for field in ("rope_parameters", "head_dim", "mlp_bias", "dtype"):
        config.pop(field, None)
    (folder / "config.json").write_text(json.dumps({**config, **PUBLISHED, **changes}))
    for name in ("configuration_deepseek.py", "modeling_deepseek.py"):
        (folder / name).write_text(
            "from transformers.utils.import_utils import is_torch_fx_available\n"
        )
    return model


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_topk_prob": True, "n_shared_experts": None},
        {"moe_layer_freq": 2},
        {},
    ],
)
def test_the_forward_pass_is_the_papers(tmp_path: Path, changes: dict[str, Any]) -> None:
    publish(tmp_path, **changes)
    assert "model.layers.2.mlp.experts.3.up_proj.weight" in load_file(
        tmp_path / "model.safetensors"
    )
    for trust in (False, True):  # its own code is never run
        model, _ = load_model(settings(tmp_path, trust_remote_code=trust))
    assert len(moe_layers(model)) == (1 if "moe_layer_freq" in changes else 2)
    expected = naive(tmp_path)
    assert expected.abs().max() > 1
    torch.testing.assert_close(logits(model).double(), expected, rtol=0, atol=2e-5)
    limits = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    assert torch.equal(
        model.generate(tiny.tokens(), **limits),
        model.generate(tiny.tokens(), use_cache=False, **limits),
    )


def test_gates_are_of_the_models_precision() -> None:
    """The published code takes its softmax in bfloat16; later models of the family take theirs in
    fp32."""
    layer = moe_layers(tiny.build("deepseek", dtype=torch.bfloat16))[0]
    hidden = torch.randn(50, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    _, gates, chosen = layer.router(hidden)
    softmax = (hidden @ layer.router.weight.T).softmax(-1)
    assert gates.dtype == torch.bfloat16
    assert torch.equal(gates, softmax.gather(1, chosen))


def test_another_scoring_function_is_refused(tmp_path: Path) -> None:
    publish(tmp_path)
    reconfigure(tmp_path, scoring_func="sigmoid")
    with pytest.raises(UserError, match=r"config\.json is damaged: .*scoring_func") as caught:
        load_model(settings(tmp_path))
    assert "\n" not in str(caught.value)


def test_export_keeps_the_model_type_and_loads(tmp_path: Path) -> None:
    model = publish(tmp_path / "model")
    plan = tiny.plan(model, 0.5)
    folder = export(tmp_path / "model", plan, tmp_path / "pruned")
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["n_routed_experts"]) == ("deepseek", 8)
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_deepseek_moe.DeepseekForCausalLM"
    assert (folder / "modeling_deepseek_moe.py").is_file()
    assert "moe_lab needs none" in (folder / "README.md").read_text()
    result = [
        logits(load_model(settings(folder, trust_remote_code=trust))[0]) for trust in (False, True)
    ]
    assert torch.equal(*result)
    assert verify(tmp_path / "model", plan, folder) == 0
    # transformers remembers on a class whether its experts can be chosen, and classes inherit
    assert not LlamaForCausalLM._can_set_experts_implementation()
    assert type(model)._can_set_experts_implementation()
