"""The architectures that conf/model expects are those of the published models, and others are refused."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import choices
import pytest
import tiny
import torch
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM

from moe_lab.config import ExpectedConfig, ModelConfig
from moe_lab.errors import UserError
from moe_lab.models.config_json import Size, expert_shape, size_of, stated_numbers
from moe_lab.models.facts import architecture, describe, facts

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf" / "model"
TABLES = ROOT / "analysis" / "published"
GIB = 2**30

PUBLISHED = """
olmoe_1b_7b olmoe vocab_size=50304 hidden_size=2048 intermediate_size=1024 num_hidden_layers=16
    num_attention_heads=16 num_key_value_heads=16 num_experts=64 num_experts_per_tok=8
deepseek_moe_16b deepseek vocab_size=102400 hidden_size=2048 intermediate_size=10944
    moe_intermediate_size=1408 num_hidden_layers=28 num_attention_heads=16 num_key_value_heads=16
    n_routed_experts=64 n_shared_experts=2 num_experts_per_tok=6 first_k_dense_replace=1
deepseek_v2_lite deepseek_v2 vocab_size=102400 hidden_size=2048 intermediate_size=10944
    moe_intermediate_size=1408 num_hidden_layers=27 num_attention_heads=16 num_key_value_heads=16 kv_lora_rank=512
    q_lora_rank=null qk_nope_head_dim=128 qk_rope_head_dim=64 v_head_dim=128 n_routed_experts=64
    n_shared_experts=2 num_experts_per_tok=6 first_k_dense_replace=1
deepseek_v2_lite_chat deepseek_v2 vocab_size=102400 hidden_size=2048 intermediate_size=10944
    moe_intermediate_size=1408 num_hidden_layers=27 num_attention_heads=16 num_key_value_heads=16 kv_lora_rank=512
    q_lora_rank=null qk_nope_head_dim=128 qk_rope_head_dim=64 v_head_dim=128 n_routed_experts=64
    n_shared_experts=2 num_experts_per_tok=6 first_k_dense_replace=1
ernie_21b_a3b ernie4_5_moe vocab_size=103424 hidden_size=2560 intermediate_size=12288
    moe_intermediate_size=1536 num_hidden_layers=28 num_attention_heads=20 num_key_value_heads=4
    moe_num_experts=64 moe_k=6 moe_num_shared_experts=2 moe_layer_start_index=1 tie_word_embeddings=true
qwen3_30b_a3b qwen3_moe vocab_size=151936 hidden_size=2048 intermediate_size=6144 moe_intermediate_size=768
    num_hidden_layers=48 num_attention_heads=32 num_key_value_heads=4 head_dim=128 num_experts=128
    num_experts_per_tok=8 norm_topk_prob=true
qwen3_30b_a3b_instruct qwen3_moe vocab_size=151936 hidden_size=2048 intermediate_size=6144
    moe_intermediate_size=768 num_hidden_layers=48 num_attention_heads=32 num_key_value_heads=4 head_dim=128
    num_experts=128 num_experts_per_tok=8 norm_topk_prob=true
qwen3_30b_a3b_thinking qwen3_moe vocab_size=151936 hidden_size=2048 intermediate_size=6144
    moe_intermediate_size=768 num_hidden_layers=48 num_attention_heads=32 num_key_value_heads=4 head_dim=128
    num_experts=128 num_experts_per_tok=8 norm_topk_prob=true
qwen1_5_moe qwen2_moe vocab_size=151936 hidden_size=2048 intermediate_size=5632 moe_intermediate_size=1408
    shared_expert_intermediate_size=5632 num_hidden_layers=24 num_attention_heads=16 num_key_value_heads=16
    num_experts=60 num_experts_per_tok=4
qwen1_5_moe_chat qwen2_moe vocab_size=151936 hidden_size=2048 intermediate_size=5632
    moe_intermediate_size=1408 shared_expert_intermediate_size=5632 num_hidden_layers=24 num_attention_heads=16
    num_key_value_heads=16 num_experts=60 num_experts_per_tok=4
qwen2_57b_a14b qwen2_moe vocab_size=151936 hidden_size=3584 intermediate_size=18944 moe_intermediate_size=2560
    shared_expert_intermediate_size=20480 num_hidden_layers=28 num_attention_heads=28 num_key_value_heads=4
    num_experts=64 num_experts_per_tok=8
mixtral_8x7b mixtral vocab_size=32000 hidden_size=4096 intermediate_size=14336 num_hidden_layers=32
    num_attention_heads=32 num_key_value_heads=8 num_local_experts=8 num_experts_per_tok=2
qwen3_235b_a22b qwen3_moe vocab_size=151936 hidden_size=4096 intermediate_size=12288
    moe_intermediate_size=1536 num_hidden_layers=94 num_attention_heads=64 num_key_value_heads=4 head_dim=128
    num_experts=128 num_experts_per_tok=8 norm_topk_prob=true
glm_4_5_air glm4_moe vocab_size=151552 hidden_size=4096 intermediate_size=10944 moe_intermediate_size=1408
    num_hidden_layers=46 num_attention_heads=96 num_key_value_heads=8 head_dim=128 attention_bias=true
    n_routed_experts=128 n_shared_experts=1 num_experts_per_tok=8 first_k_dense_replace=1
gpt_oss_20b gpt_oss vocab_size=201088 hidden_size=2880 intermediate_size=2880 num_attention_heads=64
    num_key_value_heads=8 head_dim=64 num_experts_per_tok=4 num_hidden_layers=24 num_local_experts=32
gpt_oss_120b gpt_oss vocab_size=201088 hidden_size=2880 intermediate_size=2880 num_attention_heads=64
    num_key_value_heads=8 head_dim=64 num_experts_per_tok=4 num_hidden_layers=36 num_local_experts=128
deepseek_v3 deepseek_v3 vocab_size=129280 hidden_size=7168 intermediate_size=18432 moe_intermediate_size=2048
    num_hidden_layers=61 num_attention_heads=128 num_key_value_heads=128 q_lora_rank=1536 kv_lora_rank=512
    qk_nope_head_dim=128 qk_rope_head_dim=64 v_head_dim=128 n_routed_experts=256 n_shared_experts=1 n_group=8
    topk_group=4 num_experts_per_tok=8 first_k_dense_replace=3
"""
"""Name in conf/model, its family in transformers, and what its config.json says of shapes."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {}
for line in PUBLISHED.replace("\n    ", " ").split("\n"):
    if words := line.split():
        pairs = (word.split("=") for word in words[2:])
        MODELS[words[0]] = words[1], {field: json.loads(value) for field, value in pairs}


PRINTED = ("olmoe_1b_7b", "deepseek_v2_lite_chat", "ernie_21b_a3b", "qwen3_30b_a3b_instruct")
"""The models of the papers' tables of memory and architecture."""


@cache
def built(name: str) -> Any:
    """A published model without weights."""
    kind, shapes = MODELS[name]
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shapes))


def configured(name: str) -> ModelConfig:
    found: ModelConfig = choices.choose(ModelConfig, "model", name)
    return found


def expected(name: str) -> ExpectedConfig:
    found = configured(name).expected
    assert found is not None
    return found


@pytest.mark.parametrize("name", sorted(MODELS))
def test_what_is_expected_is_what_transformers_builds(name: str) -> None:
    assert asdict(expected(name)) == asdict(architecture(built(name)))


def test_every_model_with_expectations_is_a_published_one() -> None:
    files = {file.stem for file in CONF.glob("*.yaml") if "expected" in OmegaConf.load(file)}
    assert files == {*MODELS}


def test_the_model_that_transformers_lacks_has_the_parameters_counted_by_hand() -> None:
    hidden, width, layers, dense = 2048, 1408, 28, 3 * 2048 * 10944
    embeddings, norms, attention = 2 * 102400 * hidden, (2 * layers + 1) * hidden, 4 * hidden**2
    moe = (64 + 2) * 3 * hidden * width + 64 * hidden
    counted = embeddings + norms + layers * attention + dense + (layers - 1) * moe
    assert expected("deepseek_moe_16b").parameters == counted


def printed(paper: str, table: str) -> dict[str, dict[str, float]]:
    """Model -> what a table prints of it."""
    found: dict[str, dict[str, float]] = {}
    with (TABLES / f"{paper}.csv").open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            if row["table"] == table:
                found.setdefault(row["model"], {})[row["benchmark"]] = float(row["value"])
    return found


BESIDE: dict[str, float] = {
    "olmoe_1b_7b": 0,
    "deepseek_v2_lite_chat": 2 * 163_840 * 64,
    "ernie_21b_a3b": 2 * 27 * 64 * 2560,
    "qwen3_30b_a3b_instruct": 2 * 262_144 * 128,
}
"""Bytes that the printed loading memory has beside bf16 parameters: a server's table of rotary angles (positions x
numbers of a head that turn), or routers in fp32."""


@pytest.mark.parametrize(("paper", "share"), [("unified", 2), ("evoesap", 4)])
def test_loading_memory_is_what_the_papers_print(paper: str, share: int) -> None:
    for name in PRINTED:
        known, memory = expected(name), printed(paper, "3")[name]
        gone = known.moe_layers * (known.experts // share) * (3 * known.hidden * known.width + known.hidden)
        ours = {"before": 2 * known.parameters, "after": 2 * (known.parameters - gone)}
        for when, size in ours.items():
            there = memory[f"loading_memory_{when}_gb"]
            assert there == pytest.approx((size + BESIDE[name]) / GIB, abs=0.015)  # the bar and a rounded number


def test_the_architecture_table_of_the_paper_holds() -> None:
    for name, table in printed("unified", "4").items():
        known = expected(name)
        assert known.experts == table["experts_per_layer"] and known.top_k == table["active_experts_topk"]
        assert known.moe_layers == table["moe_layers"]
        assert known.layers - known.moe_layers == table["dense_layers"]
        assert known.shared_width == table["shared_experts"] * known.width
        assert known.parameters / 1e9 == pytest.approx(table["total_params_b"], abs=1)


def test_shapes_of_a_model_that_is_not_here_are_the_expected_ones() -> None:
    assert expert_shape(configured("olmoe_1b_7b")) == {"n_experts": 64, "top_k": 8, "width": 1024}
    assert expert_shape(ModelConfig(name="x", path="a/b")) is None
    assert size_of(ModelConfig(name="x", path="a/b")) is None


def test_the_size_of_a_folder_is_read_from_its_headers(tmp_path: Path) -> None:
    tiny.save("deepseek_v2", tmp_path, dtype=torch.bfloat16)
    model = tiny.build("deepseek_v2")
    parameters = sum(weight.numel() for weight in model.parameters())
    assert size_of(ModelConfig(name="t", path=str(tmp_path))) == Size(parameters, 2, 16, 4, 32, 24, 2)
    as_float = size_of(ModelConfig(name="t", path=str(tmp_path), dtype="float32"))
    assert as_float is not None and as_float.bytes == 4 * parameters


@pytest.mark.parametrize(
    "name", ["parameters", "layers", "moe_layers", "experts", "top_k", "hidden", "width", "shared_width"]
)
def test_a_model_that_differs_is_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    tiny.save("deepseek_v2", tmp_path)
    right = architecture(tiny.build("deepseek_v2"))
    settings = ModelConfig(name="t", path=str(tmp_path), expected=right)
    assert facts(settings)["parameters"] == right.parameters
    there = getattr(right, name)
    settings = replace(settings, expected=replace(right, **{name: there + 1}))
    message = f"has {name}={there}, but model.expected.{name}={there + 1}"
    with pytest.raises(UserError, match=message):
        facts(settings)
    with pytest.raises(UserError, match=message):
        describe(tmp_path, settings)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_configurations_of_published_models_are_what_is_expected(name: str) -> None:
    kind, shapes = MODELS[name]
    numbers = stated_numbers({**AutoConfig.for_model(kind, **shapes).to_dict(), **shapes})
    assert len(numbers) == 5 and numbers.items() <= asdict(expected(name)).items()


def test_the_most_telling_difference_is_named(tmp_path: Path) -> None:
    tiny.save("deepseek_v2", tmp_path)
    right = architecture(tiny.build("deepseek_v2"))
    other = replace(right, experts=8, parameters=right.parameters - 1)
    with pytest.raises(UserError, match=r"has experts=16, but model\.expected\.experts=8"):
        facts(ModelConfig(name="t", path=str(tmp_path), expected=other))
