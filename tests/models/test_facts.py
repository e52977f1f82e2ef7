"""What is told of a model before it is loaded, and the layers with routed experts of every
architecture."""

import json
import re
import runpy
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import choices
import naive
import pytest
import tiny
import torch
from identities.plans import random_plan
from omegaconf import OmegaConf
from transformers import AutoConfig, AutoModelForCausalLM

import moe_lab
from moe_lab import inspect
from moe_lab.config import ModelConfig
from moe_lab.errors import UserError, run_and_exit
from moe_lab.models import config_json
from moe_lab.models.config_json import Size, expert_shape, size_of, stated_numbers
from moe_lab.models.discover import moe_layers, routed_layers
from moe_lab.models.facts import STREAMED, architecture, describe, facts
from moe_lab.models.families import TOP_K_FIELDS, family_of
from moe_lab.models.load import load_model, set_top_k
from moe_lab.models.streamed import open_streamed
from moe_lab.paths import resolve
from moe_lab.pruning.export import export
from moe_lab.pruning.mask import mask
from moe_lab.pruning.prune import prune
from moe_lab.statistics.forward import ForwardHook
from moe_lab.statistics.streaming import stream
from tests.campaign.models import reconfigure

PUBLISHED = """
olmoe_1b_7b olmoe vocab_size=50304 hidden_size=2048 intermediate_size=1024 num_hidden_layers=16
    num_attention_heads=16 num_key_value_heads=16 num_experts=64 num_experts_per_tok=8
deepseek_moe_16b deepseek vocab_size=102400 hidden_size=2048 intermediate_size=10944
    moe_intermediate_size=1408 num_hidden_layers=28 num_attention_heads=16 num_key_value_heads=16
    n_routed_experts=64 n_shared_experts=2 num_experts_per_tok=6 first_k_dense_replace=1
deepseek_v2_lite,deepseek_v2_lite_chat deepseek_v2 vocab_size=102400 hidden_size=2048
    intermediate_size=10944
    moe_intermediate_size=1408 num_hidden_layers=27 num_attention_heads=16 num_key_value_heads=16
    kv_lora_rank=512
    q_lora_rank=null qk_nope_head_dim=128 qk_rope_head_dim=64 v_head_dim=128 n_routed_experts=64
    n_shared_experts=2 num_experts_per_tok=6 first_k_dense_replace=1
ernie_21b_a3b ernie4_5_moe vocab_size=103424 hidden_size=2560 intermediate_size=12288
    moe_intermediate_size=1536 num_hidden_layers=28 num_attention_heads=20 num_key_value_heads=4
    moe_num_experts=64 moe_k=6 moe_num_shared_experts=2 moe_layer_start_index=1
    tie_word_embeddings=true
qwen3_30b_a3b,qwen3_30b_a3b_instruct,qwen3_30b_a3b_thinking qwen3_moe vocab_size=151936
    hidden_size=2048
    intermediate_size=6144 moe_intermediate_size=768 num_hidden_layers=48 num_attention_heads=32
    num_key_value_heads=4 head_dim=128 num_experts=128 num_experts_per_tok=8 norm_topk_prob=true
qwen1_5_moe,qwen1_5_moe_chat qwen2_moe vocab_size=151936 hidden_size=2048 intermediate_size=5632
    moe_intermediate_size=1408 shared_expert_intermediate_size=5632 num_hidden_layers=24
    num_attention_heads=16
    num_key_value_heads=16 num_experts=60 num_experts_per_tok=4
qwen2_57b_a14b qwen2_moe vocab_size=151936 hidden_size=3584 intermediate_size=18944
    moe_intermediate_size=2560
    shared_expert_intermediate_size=20480 num_hidden_layers=28 num_attention_heads=28
    num_key_value_heads=4
    num_experts=64 num_experts_per_tok=8
mixtral_8x7b mixtral vocab_size=32000 hidden_size=4096 intermediate_size=14336 num_hidden_layers=32
    num_attention_heads=32 num_key_value_heads=8 num_local_experts=8 num_experts_per_tok=2
qwen3_235b_a22b qwen3_moe vocab_size=151936 hidden_size=4096 intermediate_size=12288
    moe_intermediate_size=1536 num_hidden_layers=94 num_attention_heads=64 num_key_value_heads=4
    head_dim=128
    num_experts=128 num_experts_per_tok=8 norm_topk_prob=true
glm_4_5_air glm4_moe vocab_size=151552 hidden_size=4096 intermediate_size=10944
    moe_intermediate_size=1408
    num_hidden_layers=46 num_attention_heads=96 num_key_value_heads=8 head_dim=128
    attention_bias=true
    n_routed_experts=128 n_shared_experts=1 num_experts_per_tok=8 first_k_dense_replace=1
gpt_oss_20b gpt_oss vocab_size=201088 hidden_size=2880 intermediate_size=2880 num_attention_heads=64
    num_key_value_heads=8 head_dim=64 num_experts_per_tok=4 num_hidden_layers=24
    num_local_experts=32
gpt_oss_120b gpt_oss vocab_size=201088 hidden_size=2880 intermediate_size=2880
    num_attention_heads=64
    num_key_value_heads=8 head_dim=64 num_experts_per_tok=4 num_hidden_layers=36
    num_local_experts=128
deepseek_v3 deepseek_v3 vocab_size=129280 hidden_size=7168 intermediate_size=18432
    moe_intermediate_size=2048
    num_hidden_layers=61 num_attention_heads=128 num_key_value_heads=128 q_lora_rank=1536
    kv_lora_rank=512
    qk_nope_head_dim=128 qk_rope_head_dim=64 v_head_dim=128 n_routed_experts=256 n_shared_experts=1
    n_group=8
    topk_group=4 num_experts_per_tok=8 first_k_dense_replace=3
"""
"""Names in conf/model, their family in transformers, and what their config.json says of shapes."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {}
for names, kind, *pairs in map(str.split, PUBLISHED.strip().replace("\n    ", " ").split("\n")):
    shapes = {field: json.loads(value) for field, value in (pair.split("=") for pair in pairs)}
    MODELS |= {name: (kind, shapes) for name in names.split(",")}


TEXTS = [" ".join(f"w{number + row}" for number in range(90)) for row in range(4)]


def configured(name: str) -> Any:
    return choices.read_choice(ModelConfig, "model", name)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_expected_facts_are_those_that_transformers_builds(name: str) -> None:
    """Without weights; and the numbers that its configuration states are among them."""
    kind, shapes = MODELS[name]
    config = AutoConfig.for_model(kind, **shapes)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    expected = configured(name).expected
    assert expected == architecture(built)
    numbers = stated_numbers({**config.to_dict(), **shapes})
    assert len(numbers) == 5
    assert numbers.items() <= asdict(expected).items()


def test_every_model_with_expectations_is_a_published_one() -> None:
    files = {
        file.stem
        for file in (choices.CONF / "model").glob("*.yaml")
        if "expected" in OmegaConf.load(file)
    }
    assert files == {*MODELS}


def test_size_is_read_from_headers_or_expected(
    tmp_path: Path,
) -> None:
    tiny.save("deepseek_v2", tmp_path, dtype=torch.bfloat16)
    model = tiny.build("deepseek_v2")
    parameters = sum(weight.numel() for weight in model.parameters())
    assert size_of(ModelConfig(name="t", path=str(tmp_path))) == Size(
        parameters, 3, 2, 16, 4, 32, 24, 2
    )
    as_float = size_of(ModelConfig(name="t", path=str(tmp_path), dtype="float32"))
    assert as_float is not None
    assert as_float.bytes == 4 * parameters
    dense = replace(as_float, layers=as_float.layers + 1)  # a layer without experts
    assert dense.kv_cache_bytes(9) == pytest.approx(as_float.kv_cache_bytes(9) * 4 / 3)
    assert expert_shape(configured("olmoe_1b_7b")) == {"n_experts": 64, "top_k": 8, "width": 1024}
    nowhere = ModelConfig(name="x", path="a/b")
    assert expert_shape(nowhere) is None
    assert size_of(nowhere) is None


@pytest.mark.parametrize("look", [facts, lambda settings: describe(Path(settings.path), settings)])
def test_wrong_expected_fact_is_named_with_its_value(tmp_path: Path, look: Any) -> None:
    tiny.save("deepseek_v2", tmp_path)
    right = architecture(tiny.build("deepseek_v2"))
    settings = ModelConfig(name="t", path=str(tmp_path), expected=right)
    look(settings)
    changes = [{name: value + 1} for name, value in asdict(right).items()]
    for changed in (*changes, {"experts": 8, "parameters": right.parameters - 1}):
        (name, wrong), *_ = changed.items()
        with pytest.raises(UserError) as caught:
            look(replace(settings, expected=replace(right, **changed)))
        assert f"has {name}={getattr(right, name)}, but model.expected.{name}={wrong}" in str(
            caught.value
        )


def test_parts_add_up_to_the_model(tmp_path: Path) -> None:
    for name in ("deepseek_v2", "ernie4_5_moe", "qwen2_moe"):
        model = tiny.build(name)
        tiny.save(name, tmp_path / name)
        description = describe(tmp_path / name, ModelConfig(name=name, path=str(tmp_path / name)))
        assert sum(description["parameters"].values()) == sum(
            weight.numel() for weight in model.parameters()
        )
        experts = sum(
            weight.numel()
            for layer in routed_layers(model)
            for weight in layer.experts.parameters()
        )
        assert description["parameters"]["experts"] == experts
        assert description["parameters"]["shared experts"] > 0


def inspected(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit code of `moe-lab inspect`, and its output in one line."""
    with pytest.raises(SystemExit) as ended:
        run_and_exit(lambda: inspect.main(list(arguments)))
    code = int(str(ended.value.code))
    printed = capsys.readouterr()
    return code, " ".join((printed.out + printed.err).replace("│", " ").split())


def test_inspect_lists_what_is_known_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = inspected(capsys, "model=pocket_olmoe")
    assert code == 0
    assert "supported yes" in output
    assert "layers 0-3 32 experts of 64 channels" in output
    assert "norm_topk_prob=False" in output
    assert "3,688,576" in output
    assert "loading memory 0.01 GiB" in output
    assert "heapr" in output
    assert "padded" in output


def test_inspect_shows_how_a_set_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    text = ("calibration=pocket_function_calls", "calibration.length=16")
    code, output = inspected(capsys, "model=pocket_function_calls", *text)
    assert code == 0
    assert "messages" in output and "left_out" in output


def test_inspect_reads_models_that_are_not_local(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = inspected(capsys, "model=qwen3_30b_a3b_instruct")
    assert code == 0
    assert "expected experts 128" in output


@pytest.mark.parametrize(
    ("name", "router", "biased"),
    [
        (
            "deepseek_v3:grouped",
            "the best 4, chosen with a correction bias, from 2 of 4 groups",
            False,
        ),
        ("gpt_oss", "best 4", True),
    ],
)
def test_inspect_describes_routers_and_biases_of_experts(
    name: str, router: str, biased: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.config(name).save_pretrained(tmp_path)
    code, output = inspected(capsys, "model=local", f"model.path={tmp_path}")
    assert code == 0
    assert router in output
    assert ("correction bias" in output) == ("correction bias" in router)
    assert "exports natural, masked" in output
    no_channels = "channels none, for its experts have biases" in output
    assert ("heapr" in output) != no_channels == biased


def test_inspect_names_an_unsupported_family(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.config("olmoe").save_pretrained(tmp_path)
    reconfigure(tmp_path, model_type="jetmoe")
    code, output = inspected(capsys, "model=local", f"model.path={tmp_path}")
    assert code == 1
    assert "no: model_type=jetmoe is not supported" in output


def test_inspect_reports_a_missing_model(capsys: pytest.CaptureFixture[str]) -> None:
    code, output = inspected(capsys, "model=local", "model.path=nobody/nothing")
    assert code == 1
    assert "give a folder" in output
    assert "expected experts" not in output


REGISTRY = tiny.registry_kinds()


@pytest.mark.parametrize("kind", REGISTRY)
def test_inspect_is_right_about_all_families_of_the_registry(kind: str, tmp_path: Path) -> None:
    """What is supported is calibrated, exported, also in one of the listed shapes in turn, and
    loaded again with the weights of the pruned model. All else is refused before there are
    weights."""
    config = tiny.registry_config(kind)
    folder = tmp_path / "model"
    config.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(resolve("pocket:olmoe"), file), folder)
    settings = tiny.settings(folder, trust_remote_code=True)
    _, rows, is_supported = inspect.describe(settings)
    described = dict(rows)
    if not is_supported:
        assert re.match(rf"no: model_type={kind} is not supported: \w+", described["supported"])
        return
    built = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tiny.randomize(built)
    built.save_pretrained(folder)
    assert dict(inspect.describe(settings)[1]) == described
    model, tokenizer = load_model(settings)
    statistics = moe_lab.calibrate(model, tokenizer, TEXTS, tokens=128, length=64)
    shapes = described["exports"].split(", ")
    shape = shapes[REGISTRY.index(kind) % len(shapes)]
    has_channels = not described["criteria of channels"].startswith("none")
    is_ragged = shape == "padded" and has_channels
    plans = {shape: random_plan(model, "ragged") if is_ragged else tiny.plan(model, 0.25)}
    plans["natural"] = random_plan(model, "uneven")
    assert {*statistics.facts["layers"]} == {*plans["natural"].layers}
    if STREAMED in described:
        with pytest.raises(UserError, match="run one by one"):
            open_streamed(settings)
    else:
        streamed, _ = open_streamed(settings)
        sums = stream(streamed, ForwardHook, [naive.batch()], out=tmp_path / "streamed")
        naive.assert_sums_close(sums.layers, naive.hook_sums(model, ForwardHook), 1e-5)
    for shape, plan in plans.items():
        loaded, _ = load_model(
            tiny.settings(
                export(folder, plan, tmp_path / shape, shape=shape), trust_remote_code=True
            )
        )
        with mask(model, plan):
            torch.testing.assert_close(tiny.logits(loaded), tiny.logits(model))
        if shape == "natural":
            assert not tiny.differing(prune(model, plan).state_dict(), loaded.state_dict())


@pytest.mark.slow
def test_page_of_published_models_is_up_to_date(
    published_data: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """For one model of each family."""
    name = "configs/openai--gpt-oss-20b_config.json"
    folder = published_data(name, "ai-dynamo/aiconfigurator").parent
    docs = Path(__file__).parents[2] / "docs"
    page = runpy.run_path(str(docs / "models_page.py"))
    models = {page["kind_of"](model): model for model in page["models"](folder, tmp_path)}
    lines = (docs / "models.md").read_text("utf-8").splitlines(keepends=True)
    assert {*map(page["row"], models.values())} <= {*lines}, "python docs/models_page.py"


def skeleton(kind: str, **settings: object) -> torch.nn.Module:
    """A model without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **{**tiny.COMMON, "intermediate_size": 16, **settings})
        )


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        ("llama", {}, "no routed experts"),
        (
            "llama4_text",
            {"num_local_experts": 4, "intermediate_size_mlp": 16, "head_dim": 8},
            "experts registry",
        ),
        ("jetmoe", {"num_local_experts": 4, "kv_channels": 8}, "experts registry"),
    ],
)
def test_families_outside_the_registry_are_refused_by_name(
    kind: str, settings: dict[str, object], says: str
) -> None:
    with pytest.raises(UserError, match=rf"model_type={re.escape(kind)} .*{re.escape(says)}"):
        moe_layers(skeleton(kind, **settings))


def test_unknown_experts_and_routers_are_refused() -> None:
    model = tiny.build("olmoe")
    experts = model.model.layers[1].mlp.experts
    experts.down_proj = torch.nn.Parameter(experts.down_proj.flatten(0, 1))
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.experts is not a stack of experts"):
        moe_layers(model)
    model = tiny.build("olmoe")
    model.model.layers[1].mlp.gate.register_buffer("scale", torch.ones(16))
    with pytest.raises(UserError, match=r"layers.1.mlp.experts is routed by scale \(16,\)"):
        moe_layers(model)


def test_family_of_experts_is_that_of_the_text_model() -> None:
    model = tiny.build("gpt_oss")
    text_config = model.config
    model.config = SimpleNamespace(model_type="images", get_text_config=lambda: text_config)
    assert {layer.family for layer in moe_layers(model)} == {family_of("gpt_oss")}


def test_experts_are_found_in_a_module_without_configuration() -> None:
    layers = tiny.build("olmoe").model.layers
    assert len(moe_layers(layers)) == len(layers)


def test_top_k_override_of_a_router_for_two_experts_is_refused() -> None:
    with pytest.raises(UserError, match=r"model\.top_k=1: .* made for 2"):
        set_top_k(tiny.build("phimoe"), 1)


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in tiny.ARCHITECTURES if name != "phimoe"])
def test_top_k_override_equals_a_model_built_so(name: str) -> None:
    """Also masked, pruned and without weights."""
    model = tiny.build(name)
    top_k = routed_layers(model)[0].top_k - 1
    fields = tiny.ARCHITECTURES[name].keys() & set(TOP_K_FIELDS)
    built = tiny.build(name, **dict.fromkeys(fields, top_k))
    if routed_layers(built)[0].top_k != top_k:
        pytest.skip("its number is not among the settings of the tiny model")
    built.load_state_dict(model.state_dict())
    original = tiny.logits(model)
    set_top_k(model, top_k)
    assert torch.equal(tiny.logits(model), tiny.logits(built))
    assert not torch.allclose(original, tiny.logits(model)), "another number is another function"
    plan = tiny.plan(model, 0.25)
    with mask(model, plan):
        masked = tiny.logits(model)
    assert torch.equal(masked, tiny.logits(prune(model, plan)))
    empty = model.to("meta")
    set_top_k(empty, top_k - 1 or 1)
    assert {layer.top_k for layer in routed_layers(empty)} == {top_k - 1 or 1}


def test_top_k_override_is_another_model(tmp_path: Path) -> None:
    expected = architecture(tiny.save("olmoe", tmp_path))
    settings = ModelConfig(name="m", path=str(tmp_path), device="cpu", top_k=2, expected=expected)
    assert settings.name == "m_top2"
    assert ModelConfig(**vars(settings)) == settings
    assert {described["top_k"] for described in facts(settings)["layers"].values()} == {2}
    assert config_json.expert_shape(settings) == {"n_experts": 16, "top_k": 2, "width": 24}
    without_files = ModelConfig(name="m", path="a/b", top_k=2, expected=expected)
    assert config_json.expert_shape(without_files) == {"n_experts": 16, "top_k": 2, "width": 24}
    assert without_files.expected.top_k == 4, "the settings stay as they are"
    loaded = load_model(settings)[0]
    streamed = open_streamed(settings)[0]
    assert {layer.top_k for layer in [*routed_layers(loaded), *streamed.moe_layers.values()]} == {2}
    with pytest.raises(UserError, match=r"model\.top_k=17: layer 0 gives a token 1 to 16 experts"):
        load_model(ModelConfig(name="m", path=str(tmp_path), device="cpu", top_k=17))
