"""What is told of a model from its configuration is what the model does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tiny
import torch

from moe_lab import inspect
from moe_lab.config import ModelConfig
from moe_lab.models.discover import routed_layers
from moe_lab.models.facts import describe, gate_rule

BIAS = "chosen with a correction bias"
RULES = {  # as their papers and configurations say
    "olmoe": "softmax, the best 4",
    "mixtral": "renormalized softmax, the best 2",
    "qwen2_moe": "softmax, the best 4",
    "qwen3_moe": "renormalized softmax, the best 4",
    "deepseek": "softmax, the best 4",
    "deepseek_v2:grouped": "softmax times 16, the best 4, from 2 of 4 groups",
    "deepseek_v3:grouped": f"renormalized sigmoid times 2.5, the best 4, {BIAS}, from 2 of 4 groups",
    "ernie4_5_moe": f"renormalized softmax, the best 4, {BIAS}",
    "gpt_oss": "renormalized softmax, the best 4",
    "phimoe": "a rule of its own, the best 2",
    "dots1": f"sigmoid, the best 4, {BIAS}",
    "afmoe": f"renormalized sigmoid, the best 4, {BIAS}",
}


@pytest.mark.parametrize("name", RULES)
def test_the_gate_rule_is_found_without_weights(name: str) -> None:
    with torch.device("meta"):
        model = tiny.AutoModelForCausalLM.from_config(tiny.config(name))
    assert gate_rule(routed_layers(model)[-1]) == RULES[name]


def test_every_router_can_be_asked() -> None:
    for name in set(tiny.ARCHITECTURES) - set(RULES):
        assert f"the best {routed_layers(tiny.build(name))[0].top_k}" in gate_rule(routed_layers(tiny.build(name))[0])


def test_parts_add_up_to_the_model(tmp_path: Path) -> None:
    for name in ("deepseek_v2", "ernie4_5_moe", "qwen2_moe"):
        model = tiny.build(name)
        tiny.save(name, tmp_path / name)
        found = describe(tmp_path / name, ModelConfig(name=name, path=str(tmp_path / name)))
        assert sum(found["parameters"].values()) == sum(weight.numel() for weight in model.parameters())
        experts = sum(weight.numel() for layer in routed_layers(model) for weight in layer.experts.parameters())
        assert found["parameters"]["routed experts"] == experts and found["parameters"]["shared experts"] > 0


def test_a_model_is_told_in_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.main(["model=pocket_olmoe", "grid.ratio=[0.5]"]) == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for words in (
        "supported yes",
        "layers 0-3 32 experts of 64 channels",
        "3,688,576",
        "without 50%",
        "heapr",
        "padded",
    ):
        assert words in said


def test_a_published_model_is_told_without_the_hub(capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect.main(["model=qwen3_30b_a3b_instruct", "calibration=c4"]) == 0
    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "48 of 128 experts, top-8" in said and "80 GiB" in said
    needed = re.findall(r"calibration, forward about (\S+) GiB on 2 GPUs", said)
    assert inspect.main(["model=qwen3_30b_a3b_instruct", "calibration=c4", "calibration.parts=4"]) == 0
    in_parts = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert needed and re.findall(r"calibration, forward about (\S+) GiB on 2 GPUs", in_parts) == needed


def test_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.save("olmoe", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "jetmoe"}))
    assert inspect.main(["model=local", f"model.path={tmp_path}"]) == 1
    assert "no: model_type=jetmoe is not supported" in " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert inspect.main(["model=pocket_olmo"]) == 2
    assert "did you mean pocket_olmoe?" in capsys.readouterr().err


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = inspect.main(list(words))
    return code, " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_a_configuration_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with torch.device("meta"):
        model = tiny.AutoModelForCausalLM.from_config(tiny.config("gpt_oss", hidden_size=1024, intermediate_size=2048))
    model.config.save_pretrained(tmp_path)
    code, said = told(capsys, "model=local", f"model.path={tmp_path}", "grid.ratio=[0.5]")
    layers = routed_layers(model)
    gone = sum(weight.numel() for layer in layers for weight in layer.experts.parameters()) // 2
    gone += sum(part.tensor.numel() for layer in layers for part in layer.routing) // 2
    left = sum(weight.numel() for weight in model.parameters()) - gone
    assert code == 0 and f"without 50% of the experts {2 * left / 2**30:.2f} GiB" in said
    for words in (
        "calibration, forward about",
        "channels none, for its experts have biases",
        "exports natural, masked",
    ):
        assert words in said


def test_a_model_that_is_nowhere_is_not_called_expected(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = told(capsys, "model=local", "model.path=nobody/nothing")
    assert code == 1 and "give a folder" in said and "expected" not in said


@pytest.mark.parametrize(("name", "masked"), [("olmoe", False), ("ernie4_5_moe", False), ("deepseek_v3", True)])
def test_exports_that_its_router_cannot_have_are_left_out(
    name: str, masked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.save(name, tmp_path)
    code, said = told(capsys, "model=local", f"model.path={tmp_path}")
    assert code == 0 and "heapr" in said
    assert ("exports natural, masked, padded" if masked else "exports natural, padded") in said
