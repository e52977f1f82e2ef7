"""The shapes an export can have, what they cannot express, config.json, and loading without
moe_lab."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from identities.plans import check_refused, random_plan
from processes import run_without_moe_lab
from safetensors.torch import load_file, save_file
from tiny import load, logits, weights
from transformers import AutoConfig

from moe_lab.config import ModelConfig
from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.models.families import COUNT_FIELDS
from moe_lab.models.load import load_model
from moe_lab.pruning.export import export
from moe_lab.pruning.layer_plan import LayerPlan
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune
from moe_lab.pruning.selection import replace_by_constants
from tests.campaign.models import reconfigure


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def check_close(result: Any, expected: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(logits(result), logits(expected), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "name",
    [
        "olmoe",
        "mixtral",
        "deepseek_v3",
        "jamba",
        "phimoe",
        "granitemoe",
    ],
)
def test_masked_channels_are_zeros_in_tensors_of_the_original_shape(
    name: str, tmp_path: Path
) -> None:
    model = tiny.save(name, tmp_path / "model")
    plan = random_plan(model, "ragged", share=1.0)
    folder = export(tmp_path / "model", plan, tmp_path / "out", shape="masked")
    assert config_of(folder) == config_of(tmp_path / "model")
    assert tensor_shapes(folder) == tensor_shapes(tmp_path / "model")
    masked = load(folder)
    # channels stay in place
    assert not tiny.differing(with_zeros(model, plan).state_dict(), masked.state_dict())
    check_close(masked, prune(model, plan))


def tensor_shapes(folder: Path) -> dict[str, torch.Size]:
    return {key: value.shape for key, value in load_file(folder / "model.safetensors").items()}


def with_zeros(model: Any, plan: Plan) -> Any:
    """A copy of the model with zeros as weights of the dropped channels."""
    reference = copy.deepcopy(model)
    for layer in moe_layers(reference):
        dropped = ~torch.from_numpy(plan.layers[layer.index].channels)
        layer.experts.gate_up_proj[torch.cat((dropped, dropped), 1)] = 0
        layer.experts.down_proj.transpose(1, 2)[dropped] = 0
    return reference


BARRING = (
    "deepseek_v3",
    "deepseek_v3:grouped",
    "glm4_moe",
    "minimax_m2",
    "lfm2_moe",
    "afmoe",
    "gpt_oss",
    "dots1",
)


@pytest.mark.parametrize(
    ("name", "way"), [*((name, "even") for name in BARRING), ("glm4_moe", "ragged")]
)
def test_masked_experts_are_never_chosen(name: str, way: str, tmp_path: Path) -> None:
    model = tiny.save(name, tmp_path / "model")
    plan = random_plan(model, way, share=0.5)
    folder = export(tmp_path / "model", plan, tmp_path / "out", shape="masked")
    assert config_of(folder) == config_of(tmp_path / "model")
    masked = load(folder)
    check_close(masked, prune(model, plan))
    layer = moe_layers(masked)[0]
    gone = sorted(set(range(16)) - set(plan.layers[layer.index].retained))
    assert all(not weight[gone].any() and weight.any() for weight in layer.experts.parameters())


@pytest.mark.parametrize("name", ["olmoe", "deepseek_v3"])
def test_constants_stand_where_vllm_looks_for_them(name: str, tmp_path: Path) -> None:
    """Names as in vLLM 0.33: the plan can be read back from config.json and the weights."""
    model = tiny.save(name, tmp_path / "model")
    plan = random_plan(model, "constants")
    folder = export(tmp_path / "model", plan, tmp_path / "out", shape="masked")
    expected = load_file(tmp_path / "model" / "model.safetensors")
    tensors = load_file(folder / "model.safetensors")
    novices = config_of(folder)["approximate_experts"]
    assert config_of(folder) == {**config_of(tmp_path / "model"), "approximate_experts": novices}
    layers = {}
    for layer in moe_layers(model):
        outputs = torch.zeros(layer.n_experts, layer.hidden)
        retained = set(range(layer.n_experts))
        for expert in novices[str(layer.index)]:
            retained.remove(expert)
            prefix = f"model.layers.{layer.index}.mlp.experts.{expert}"
            outputs[expert] = tensors.pop(f"{prefix}.approx_value")
            for role in ("gate", "up", "down"):
                del expected[f"{prefix}.{role}_proj.weight"]
        whole = LayerPlan(layer.n_experts, tuple(sorted(retained)))
        layers[layer.index] = replace_by_constants(whole, outputs.numpy(), layer.width)
    assert Plan(layers) == plan
    assert tensors.keys() == expected.keys()
    assert not tiny.differing(tensors, expected)
    with pytest.raises(UserError, match="only vLLM reads: expected export=natural"):
        load_model(ModelConfig("m", str(folder)))


def test_constants_beside_stacked_experts_are_refused(tmp_path: Path) -> None:
    plan = random_plan(tiny.save("granitemoe", tmp_path / "model"), "constants")
    check_refused(tmp_path / "model", "in one tensor, .* export=natural", plan, "masked")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masked_experts_in_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny.save("gpt_oss", tmp_path / "model", dtype=dtype)
    model_of_export = load(
        export(tmp_path / "model", tiny.plan(model, 0.5), tmp_path / "out", shape="masked"),
        dtype=dtype,
    )
    biases = [layer.router.bias for layer in moe_layers(model_of_export)]
    assert all(int((bias < -9000).sum()) == 8 and bool(bias.isfinite().all()) for bias in biases)


@pytest.mark.parametrize(("name", "layer"), [("olmoe", 0), ("ernie4_5_moe", 1)])
def test_routers_without_a_bias_cannot_be_masked(name: str, layer: int, tmp_path: Path) -> None:
    model = tiny.save(name, tmp_path / "model")
    with pytest.raises(UserError, match=rf"export=masked.* layer {layer}\b.* export=natural"):
        export(tmp_path / "model", tiny.plan(model, 0.5), tmp_path / "out", shape="masked")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("name", ["olmoe", "glm4_moe", "hunyuan_v1_moe", "granitemoe"])
def test_padded_to_the_widest_expert_of_each_layer(name: str, tmp_path: Path) -> None:
    model = tiny.save(name, tmp_path / "model")
    plan = random_plan(model, "ragged", share=0.8)
    for position, layer_plan in enumerate(plan.layers.values()):
        # each layer is narrower than the one before it
        layer_plan.channels[:, 14 - 6 * position :] = False
    folder = export(tmp_path / "model", plan, tmp_path / "out", shape="padded")
    padded = load(folder, trust_remote_code=True)
    pruned = prune(model, plan)
    check_close(padded, pruned)
    for layer in moe_layers(padded):
        widths = plan.layers[layer.index].widths
        assert layer.width == -(-max(widths) // 8) * 8 < 24
    assert "Experts are filled with zero channels" in (folder / "README.md").read_text()
    padded.set_experts_implementation("grouped_mm")
    check_close(padded, pruned, 1e-4)


@pytest.mark.parametrize(
    ("name", "stock"),
    [
        ("olmoe", True),
        ("qwen2_moe", True),
        ("jamba", True),
        ("dots1", False),
    ],
)
def test_experts_of_one_width_need_code_only_in_some_families(
    name: str, stock: bool, tmp_path: Path
) -> None:
    """In those whose config.json has no field for it."""
    model = tiny.save(name, tmp_path / "model")
    plan = random_plan(model, "one width", share=0.8, width=16)
    folder = export(tmp_path / "model", plan, tmp_path / "out", shape="natural")
    assert code_files(folder) == (set() if stock else {"pruned.py", "ragged.py"})
    check_close(load(folder, trust_remote_code=not stock), prune(model, plan), 0)


def test_experts_padded_to_one_width_need_no_code(tmp_path: Path) -> None:
    model = tiny.save("qwen3_moe", tmp_path / "model")
    plan = random_plan(model, "ragged", share=0.8, width=12)
    for layer in plan.layers.values():
        layer.channels[:, 14:] = False
    folder = export(tmp_path / "model", plan, tmp_path / "out", shape="padded")
    assert code_files(folder) == set()
    changed = {"moe_intermediate_size": 16, "num_local_experts": 13, "num_experts": 13}
    assert config_of(folder) == {**config_of(tmp_path / "model"), **changed}
    check_close(load(folder, trust_remote_code=False), prune(model, plan), 1e-5)


def code_files(folder: Path) -> set[str]:
    return {file.name for file in folder.glob("*.py")}


def test_config_of_uneven_export_keeps_the_other_fields(tmp_path: Path) -> None:
    """Fields of others stay, old remote code is no longer pointed at, the global numbers are those
    of the original."""
    tiny.save("qwen3_moe", tmp_path / "model")
    old_code = {"AutoConfig": "configuration_old.Old", "AutoModelForCausalLM": "modeling_old.Old"}
    fields = {"note": "ä", "rope_theta": 1e6, "output_router_logits": True}
    reconfigure(tmp_path / "model", auto_map=old_code, **fields)
    retained = {0: tuple(range(16)), 1: tuple(range(9)), 2: (0, 3, 5, 7, 8)}
    plan = Plan.of_experts(retained, dict.fromkeys(range(3), 16))
    assert config_of(export(tmp_path / "model", plan, tmp_path / "out")) == {
        **config_of(tmp_path / "model"),
        "pruned": {
            "format": 2,
            "stock": {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]},
            "layers": {str(layer): {"experts": len(ids)} for layer, ids in retained.items()},
        },
        "per_layer_config": {"1": {"num_local_experts": 9}, "2": {"num_local_experts": 5}},
        "model_type": "pruned_qwen3_moe",
        "architectures": ["PrunedForCausalLM"],
        "auto_map": {
            "AutoConfig": "pruned.PrunedConfig",
            "AutoModelForCausalLM": "pruned.PrunedForCausalLM",
        },
        "output_router_logits": False,
    }


@pytest.mark.parametrize(
    ("name", "way"),
    [("olmoe", "one width"), *((name, "uneven") for name in ("mixtral", "deepseek_v3", "jamba"))],
)
def test_transformers_knows_the_sizes_of_each_layer(name: str, way: str, tmp_path: Path) -> None:
    """By the fields of the family."""
    model = tiny.save(name, tmp_path / "model")
    plan = random_plan(model, way, width=(8, 24, 16))
    config = config_of(export(tmp_path / "model", plan, tmp_path / "out"))
    read = AutoConfig.for_model(**config | config["pruned"]["stock"])
    for number, layer in plan.layers.items():
        fields = read.per_layer_config[number]
        assert {len(layer.retained)} == {
            getattr(fields, field) for field in COUNT_FIELDS if hasattr(fields, field)
        }
        assert not layer.widths or {fields.intermediate_size} == {*layer.widths}


@pytest.fixture
def olmoe(tmp_path: Path) -> Any:
    return tiny.save("olmoe", tmp_path / "model")


def test_unknown_shapes_are_refused(olmoe: Any, tmp_path: Path) -> None:
    plan = random_plan(olmoe, "uneven")
    check_refused(tmp_path / "model", r"export=mask\b.* masked\?", plan, shape="mask")


@pytest.mark.usefixtures("olmoe")
def test_plans_for_other_widths_are_refused(tmp_path: Path) -> None:
    wider = random_plan(tiny.build("olmoe", intermediate_size=28), "ragged")
    check_refused(tmp_path / "model", r"\(16, 28, 32\) in the plan", wider)


def test_exports_are_not_exported_again(olmoe: Any, tmp_path: Path) -> None:
    folder = export(tmp_path / "model", random_plan(olmoe, "uneven"), tmp_path / "first")
    check_refused(folder, "model_type=pruned_olmoe", tiny.plan(olmoe, 0.5))


@pytest.mark.parametrize("way", ["uneven", "one width"])
def test_unknown_families_cannot_have_layers_that_differ(
    way: str, olmoe: Any, tmp_path: Path
) -> None:
    plan = random_plan(olmoe, way, share=None if way == "uneven" else 1.0, width=16)
    reconfigure(tmp_path / "model", model_type="homemade")
    check_refused(tmp_path / "model", "model_type=homemade", plan)


def test_channels_of_fp8_weights_are_not_removed(olmoe: Any, tmp_path: Path) -> None:
    experts = {
        name: value.to(torch.float8_e4m3fn)
        for name, value in weights(tmp_path / "model").items()
        if "experts" in name
    }
    tiny.rewrite(tmp_path / "model", lambda tensors: tensors.update(experts))
    check_refused(tmp_path / "model", "F8_E4M3", random_plan(olmoe, "ragged"))


# ---- loaded by a process that has transformers and the folder, and no moe_lab

NAMES = ("olmoe", "deepseek_v3", "ernie4_5_moe", "granitemoe", "jamba", "deepseek")
PLANS = {
    "even": "even",
    "counts": "uneven",
    "widths": "one width",
    "ragged": "ragged",
}
CASES = ("counts", "widths", "ragged")
PORTED = "deepseek"
"""A family that transformers lacks: it needs code for layers of one shape too."""
EVEN = ("olmoe", "deepseek_v3", "ernie4_5_moe", PORTED)
EXPORTS = [*((name, case) for name in NAMES for case in CASES), *((name, "even") for name in EVEN)]
FOR_OLDER = [*((name, "even") for name in EVEN), *(("olmoe", case) for case in CASES)]
OLDER = Path(__file__).parents[2] / ".venv-older"
OLDERS = ("4.57.3", "5.0.0")
WITHOUT_MOE_LAB = """
def logits(model):
    with torch.no_grad():
        return model(input_ids=tokens).logits.contiguous()

def refusal(folder):
    try:
        load(folder, trust=False)
    except Exception as error:
        return str(error)

for folder in folders:
    try:
        model = load(folder)
        result = logits(model)
        model.save_pretrained(folder / "again")
        again = load(folder / "again")
        save_file({"logits": result, "again": logits(again)}, folder / "result.safetensors")
        again.set_experts_implementation("grouped_mm")
        configs = [getattr(part, "config", again.config) for part in again.modules()]
        used = {config._experts_implementation for config in configs}
        refused = [refusal(folder), refusal(folder / "again")]
        report = {"implementations": sorted(used), "refused": refused}
    except Exception as error:
        import traceback
        report = {"error": traceback.format_exc()}
    (folder / "report.json").write_text(json.dumps(report))
"""
WITH_OLDER = """
report = {"version": transformers.__version__}
for folder in (root / name for name in sys.argv[2:]):
    for trust in (False, True):
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust)
            with torch.no_grad():
                logits = model.eval().float()(input_ids=tokens).logits
            expected = load_file(folder / "expected.safetensors")["logits"]
            answer = float((logits - expected).abs().max())
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        report[f"{folder.name} {trust}"] = answer
print("RESULT " + json.dumps(report))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every architecture and case, exported by this process and loaded by one without moe_lab."""
    root = tmp_path_factory.mktemp("exports")
    save_file({"tokens": tiny.tokens()}, root / "tokens.safetensors")
    for name in NAMES:
        source = tmp_path_factory.mktemp(name)
        model = tiny.save(name, source, shard="60KB")
        for case in [case for family, case in EXPORTS if family == name]:
            share = None if case == "counts" else 0.75
            plan = random_plan(model, PLANS[case], share=share, width=(8, 24, 16))
            folder = export(source, plan, root / f"{name}-{case}")
            expected = tiny.logits(prune(model, plan)).contiguous()
            save_file({"logits": expected}, folder / "expected.safetensors")
    run_without_moe_lab(WITHOUT_MOE_LAB, root)
    return root


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), EXPORTS)
def test_loads_without_moe_lab_and_equals_the_pruned_model(
    folders: Path, name: str, case: str
) -> None:
    folder = folders / f"{name}-{case}"
    report = json.loads((folder / "report.json").read_text())
    assert "error" not in report, report["error"]
    expected = load_file(folder / "expected.safetensors")["logits"]
    result = load_file(folder / "result.safetensors")
    assert torch.equal(result["logits"], expected)
    # files of save_pretrained are not aligned: mapped weights give equal numbers up to the last bit
    torch.testing.assert_close(result["again"], expected, rtol=0, atol=1e-5)
    ours = weights(folder)
    theirs = weights(folder / "again")
    assert ours.keys() == theirs.keys()
    assert not tiny.differing(ours, theirs)
    assert report["implementations"] == ["grouped_mm"]
    if case == "even" and name != PORTED:
        assert report["refused"] == [None, None]
        return
    assert all("trust_remote_code=True" in refused for refused in report["refused"])


@pytest.mark.slow
@pytest.mark.skipif(not OLDER.exists(), reason="no older transformers: `make older` installs them")
@pytest.mark.parametrize("version", OLDERS)
def test_older_versions_load_stock_exports_and_refuse_the_others(
    version: str, folders: Path
) -> None:
    names = [f"{name}-{case}" for name, case in FOR_OLDER]
    printed = run_without_moe_lab(
        WITH_OLDER, folders, *names, PYTHONPATH=str(OLDER / version), HOME=str(folders / version)
    )
    report = json.loads(printed.rpartition("RESULT ")[2])
    assert report["version"] == version
    for name, case in FOR_OLDER:
        answers = [report[f"{name}-{case} {trust}"] for trust in (False, True)]
        if case == "even" and name != PORTED:
            assert all(isinstance(answer, float) and answer < 1e-5 for answer in answers), (
                name,
                answers,
            )
        else:
            # with trust, it is refused too or right, and never a model of random experts
            refused, trusted = answers
            assert isinstance(refused, str), (name, case, answers)
            assert isinstance(trusted, str) or trusted < 1e-5, (name, case, answers)
