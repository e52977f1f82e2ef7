"""What is told of a model from its configuration is what the model does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tiny
import torch

from moe_lab import inspect
from moe_lab.config import ModelConfig
from moe_lab.models.discover import routed_layers
from moe_lab.models.facts import describe
from tests.campaign.models import reconfigure

ROUTERS = {
    "olmoe": "OlmoeTopKRouter, the best 4, norm_topk_prob=False",
    "mixtral": "MixtralTopKRouter, the best 2",
    "deepseek": "DeepseekGate, the best 4, scoring_func=softmax, norm_topk_prob=False",
    "deepseek_v3:grouped": (
        "DeepseekV3TopkRouter, the best 4, chosen with a correction bias, from 2 of 4 groups, norm_topk_prob=True"
    ),
    "afmoe": "AfmoeTokenChoiceRouter, the best 4, chosen with a correction bias",
}


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_routers_are_described_from_the_configuration(name: str, tmp_path: Path) -> None:
    tiny.config(name).save_pretrained(tmp_path)
    about = describe(tmp_path, ModelConfig(name="m", path=str(tmp_path)))
    for layer in about["moe_layers"]:
        _, router = about["moe"][layer.index].split("; ")
        assert f", the best {layer.top_k}" in router and router == ROUTERS.get(name, router)


def test_parts_add_up_to_the_model(tmp_path: Path) -> None:
    for name in ("deepseek_v2", "ernie4_5_moe", "qwen2_moe"):
        model = tiny.build(name)
        tiny.save(name, tmp_path / name)
        found = describe(tmp_path / name, ModelConfig(name=name, path=str(tmp_path / name)))
        assert sum(found["parameters"].values()) == sum(weight.numel() for weight in model.parameters())
        experts = sum(weight.numel() for layer in routed_layers(model) for weight in layer.experts.parameters())
        assert found["parameters"]["routed experts"] == experts and found["parameters"]["shared experts"] > 0


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = inspect.main(list(words))
    return code, " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_a_model_is_told_in_rows(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = told(capsys, "model=pocket_olmoe", "ratio=0.5")
    rows = ("supported yes", "layers 0-3 32 experts of 64 channels", "3,688,576", "without 50%", "heapr", "padded")
    assert code == 0 and all(words in said for words in rows)


def test_a_published_model_is_told_without_the_hub(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = told(capsys, "model=qwen3_30b_a3b_instruct", "calibration=c4")
    assert code == 0 and "48 of 128 experts, top-8" in said and "80 GiB" in said
    needed = re.findall(r"calibration, forward about (\S+) GiB on 2 GPUs", said)
    _, in_parts = told(capsys, "model=qwen3_30b_a3b_instruct", "calibration=c4", "calibration.parts=4")
    assert needed and re.findall(r"calibration, forward about (\S+) GiB on 2 GPUs", in_parts) == needed


def test_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.save("olmoe", tmp_path)
    reconfigure(tmp_path, model_type="jetmoe")
    code, said = told(capsys, "model=local", f"model.path={tmp_path}")
    assert code == 1 and "no: model_type=jetmoe is not supported" in said
    assert told(capsys, "model=pocket_olmo")[0] == 2
    code, said = told(capsys, "model=local", "model.path=nobody/nothing")
    assert code == 1 and "give a folder" in said and "expected" not in said


def test_a_configuration_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with torch.device("meta"):
        model = tiny.AutoModelForCausalLM.from_config(tiny.config("gpt_oss", hidden_size=1024, intermediate_size=2048))
    model.config.save_pretrained(tmp_path)
    code, said = told(capsys, "model=local", f"model.path={tmp_path}", "ratio=0.5")
    layers = routed_layers(model)
    gone = sum(weight.numel() for layer in layers for weight in layer.experts.parameters()) // 2
    gone += sum(part.tensor.numel() for layer in layers for part in layer.routing) // 2
    left = sum(weight.numel() for weight in model.parameters()) - gone
    assert code == 0 and f"without 50% of the experts {2 * left / 2**30:.2f} GiB" in said
    rows = ("calibration, forward about", "channels none, for its experts have biases", "exports natural, masked")
    assert all(words in said for words in rows)


@pytest.mark.parametrize(("name", "masked"), [("olmoe", False), ("ernie4_5_moe", False), ("deepseek_v3", True)])
def test_exports_that_its_router_cannot_have_are_left_out(
    name: str, masked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.save(name, tmp_path)
    code, said = told(capsys, "model=local", f"model.path={tmp_path}")
    assert code == 0 and "heapr" in said
    assert ("exports natural, masked, padded" if masked else "exports natural, padded") in said
