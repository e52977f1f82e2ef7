"""The shapes an export can have, what they cannot express, config.json, and loading without
moe_lab."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from identities.plans import random_plan
from processes import read_alone
from safetensors.torch import load_file, save_file
from tiny import load, logits, weights

from moe_lab.config import ExportConfig, ModelConfig, RecoveryConfig
from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.pruning.export import export
from moe_lab.pruning.export.settings import wrong
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune
from tests.campaign.models import reconfigure


def config_of(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())
    return (
        {**config, "num_nextn_predict_layers": 0}
        if "num_nextn_predict_layers" in config
        else config
    )


def check_close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(logits(found), logits(expected), rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "name", ["olmoe", "mixtral", "deepseek_v3", "jamba", "phimoe", "granitemoe"]
)
def test_masked_channels_have_the_original_shape(name: str, tmp_path: Path) -> None:
    model = tiny.save(name, tmp_path / "model")
    plan = random_plan(model, "ragged", share=1.0)
    out = export(tmp_path / "model", plan, tmp_path / "out", shape="masked")
    assert config_of(out) == config_of(tmp_path / "model")
    before, after = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "model", out)
    )
    assert {name: value.shape for name, value in before.items()} == {
        name: value.shape for name, value in after.items()
    }
    reference = copy.deepcopy(model)
    for layer in moe_layers(reference):
        gone = ~torch.from_numpy(plan.layers[layer.index].channels)
        layer.experts.gate_up_proj[torch.cat((gone, gone), 1)] = 0
        layer.experts.down_proj.transpose(1, 2)[gone] = 0
    masked = load(out)
    expected = reference.state_dict()
    # channels stay in place
    assert all(torch.equal(masked.state_dict()[name], expected[name]) for name in expected)
    check_close(masked, prune(model, plan))


def masking_is_refused(folder: Path) -> str:
    """What is said before anything runs."""
    model = ModelConfig(name="m", path=str(folder))
    return " ".join(wrong(ExportConfig("masked"), model, RecoveryConfig(), "expert", verify=False))


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
    assert not masking_is_refused(tmp_path / "model")
    out = export(tmp_path / "model", plan, tmp_path / "out", shape="masked")
    assert config_of(out) == config_of(tmp_path / "model")
    masked = load(out)
    check_close(masked, prune(model, plan))
    layer = moe_layers(masked)[0]
    gone = sorted(set(range(16)) - set(plan.layers[layer.index].retained))
    assert all(not weight[gone].any() and weight.any() for weight in layer.experts.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masked_experts_in_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny.save("gpt_oss", tmp_path / "model", dtype=dtype)
    out = load(
        export(tmp_path / "model", tiny.plan(model, 0.5), tmp_path / "out", shape="masked"),
        dtype=dtype,
    )
    biases = [layer.router.bias for layer in moe_layers(out)]
    assert all(int((bias < -9000).sum()) == 8 and bool(bias.isfinite().all()) for bias in biases)


@pytest.mark.parametrize(("name", "layer"), [("olmoe", 0), ("ernie4_5_moe", 1)])
def test_routers_without_a_bias_cannot_be_masked(name: str, layer: int, tmp_path: Path) -> None:
    model = tiny.save(name, tmp_path / "model")
    with pytest.raises(
        UserError, match=rf"export=masked.* layer {re.escape(str(layer))}\b.* export=natural"
    ):
        export(tmp_path / "model", tiny.plan(model, 0.5), tmp_path / "out", shape="masked")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert "no bias" in masking_is_refused(tmp_path / "model")


@pytest.mark.parametrize("name", ["olmoe", "glm4_moe", "hunyuan_v1_moe", "granitemoe"])
def test_padded_to_the_widest_expert_of_each_layer(name: str, tmp_path: Path) -> None:
    model = tiny.save(name, tmp_path / "model")
    plan = random_plan(model, "ragged", share=0.8)
    for position, layer_plan in enumerate(plan.layers.values()):
        # each layer is narrower than the one before it
        layer_plan.channels[:, 18 - 8 * position :] = False
    out = export(tmp_path / "model", plan, tmp_path / "out", shape="padded")
    padded = load(out, trust_remote_code=True)
    pruned = prune(model, plan)
    check_close(padded, pruned)
    zeros = 0
    for layer in moe_layers(padded):
        widths = plan.layers[layer.index].widths
        assert layer.width == -(-max(widths) // 4) * 4 < 24  # rows of 16 bytes
        zeros += 3 * 32 * 4 * (layer.width * len(widths) - sum(widths))
    assert zeros and f"{zeros:,} bytes" in (out / "README.md").read_text()
    padded.set_experts_implementation("grouped_mm")
    check_close(padded, pruned, 1e-4)


@pytest.mark.parametrize(
    ("name", "shape", "stock"),
    [
        *((name, "natural", True) for name in ("olmoe", "qwen2_moe", "jamba")),
        ("dots1", "natural", False),
        ("qwen3_moe", "padded", True),
    ],
)
def test_one_width_is_stock_where_the_family_can_say_it(
    name: str, shape: str, stock: bool, tmp_path: Path
) -> None:
    model = tiny.save(name, tmp_path / "model")
    plan = random_plan(model, "ragged" if shape == "padded" else "one width", share=0.8, width=12)
    for layer in plan.layers.values() if shape == "padded" else ():
        layer.channels[:, 18:] = False
    out = export(tmp_path / "model", plan, tmp_path / "out", shape=shape)
    assert {file.name for file in out.glob("*.py")} == (
        set() if stock else {"pruned.py", "ragged.py"}
    )
    if shape == "padded":
        changed = {"moe_intermediate_size": 20, "num_local_experts": 13, "num_experts": 13}
        assert config_of(out) == {**config_of(tmp_path / "model"), **changed}
    check_close(
        load(out, trust_remote_code=not stock), prune(model, plan), 1e-5 if shape == "padded" else 0
    )


def test_config_is_edited_and_not_written_anew(tmp_path: Path) -> None:
    """Fields of others stay, old remote code is no longer pointed at, the global numbers are those
    of the original."""
    model = tiny.save("qwen3_moe", tmp_path / "model")
    old = {"AutoConfig": "configuration_old.Old", "AutoModelForCausalLM": "modeling_old.Old"}
    reconfigure(
        tmp_path / "model", note="ä", rope_theta=1e6, output_router_logits=True, auto_map=old
    )
    kept = {0: tuple(range(16)), 1: tuple(range(9)), 2: (0, 3, 5, 7, 8)}
    after = config_of(
        export(
            tmp_path / "model", Plan.of_experts(kept, dict.fromkeys(range(3), 16)), tmp_path / "out"
        )
    )
    assert after == {
        **config_of(tmp_path / "model"),
        "pruned": {
            "format": 2,
            "stock": {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]},
            "layers": {str(layer): {"experts": len(ids)} for layer, ids in kept.items()},
        },
        "model_type": "pruned_qwen3_moe",
        "architectures": ["PrunedForCausalLM"],
        "auto_map": {
            "AutoConfig": "pruned.PrunedConfig",
            "AutoModelForCausalLM": "pruned.PrunedForCausalLM",
        },
        "output_router_logits": False,
    }
    plan = random_plan(model, "ragged", share=1.0)
    about = config_of(export(tmp_path / "model", plan, tmp_path / "ragged"))["pruned"]["layers"]
    assert about == {
        str(at): {"experts": 16, "widths": list(plan.layers[at].widths)} for at in kept
    }


def test_what_cannot_be_exported_is_named(tmp_path: Path) -> None:
    model = tiny.save("olmoe", tmp_path / "model")
    source = tmp_path / "model"
    ragged = random_plan(model, "ragged")
    uneven = random_plan(model, "uneven")

    def refused(field: str, plan: Plan, source: Path = source, shape: str = "natural") -> None:
        with pytest.raises(UserError, match=field):
            export(source, plan, tmp_path / "out", shape=shape)
        assert not list(tmp_path.glob("*out*"))

    refused(r"export=mask\b.* masked\?", uneven, shape="mask")
    refused("28 channels", random_plan(tiny.build("olmoe", intermediate_size=28), "ragged"))
    refused(
        "model_type=pruned_olmoe", tiny.plan(model, 0.5), export(source, uneven, tmp_path / "first")
    )
    reconfigure(source, model_type="homemade")
    for plan in (uneven, random_plan(model, "one width", share=1.0, width=12)):
        refused("model_type=homemade", plan)
    reconfigure(source, model_type="olmoe")
    experts = {
        name: value.to(torch.float8_e4m3fn)
        for name, value in weights(source).items()
        if "experts" in name
    }
    tiny.rewrite(source, lambda tensors: tensors.update(experts))
    refused("F8_E4M3", ragged)


# ---- loaded by a process that has transformers and the folder, and no moe_lab

NAMES = ("olmoe", "deepseek_v3", "ernie4_5_moe", "granitemoe", "jamba", "deepseek")
PLANS = {"even": "even", "counts": "uneven", "widths": "one width", "ragged": "ragged"}
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
        found = logits(model)
        model.save_pretrained(folder / "again")
        again = load(folder / "again")
        save_file({"logits": found, "again": logits(again)}, folder / "found.safetensors")
        again.set_experts_implementation("grouped_mm")
        configs = [getattr(part, "config", again.config) for part in again.modules()]
        used = {config._experts_implementation for config in configs}
        refused = [refusal(folder), refusal(folder / "again")]
        said = {"implementations": sorted(used), "refused": refused}
    except Exception as error:
        import traceback
        said = {"error": traceback.format_exc()}
    (folder / "said.json").write_text(json.dumps(said))
"""
WITH_OLDER = """
said = {"version": transformers.__version__}
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
        said[f"{folder.name} {trust}"] = answer
print("RESULT " + json.dumps(said))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every architecture and case, exported here and loaded there."""
    root = tmp_path_factory.mktemp("exports")
    save_file({"tokens": tiny.tokens()}, root / "tokens.safetensors")
    for name in NAMES:
        source = tmp_path_factory.mktemp(name)
        model = tiny.save(name, source, shard="60KB")
        for case in [case for other, case in EXPORTS if other == name]:
            plan = random_plan(
                model, PLANS[case], share=None if case == "counts" else 0.75, width=(8, 24, 16)
            )
            out = export(source, plan, root / f"{name}-{case}")
            save_file(
                {"logits": tiny.logits(prune(model, plan)).contiguous()},
                out / "expected.safetensors",
            )
    read_alone(WITHOUT_MOE_LAB, root)
    return root


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), EXPORTS)
def test_loads_without_moe_lab_and_equals_the_pruned_model(
    folders: Path, name: str, case: str
) -> None:
    folder = folders / f"{name}-{case}"
    said = json.loads((folder / "said.json").read_text())
    assert "error" not in said, said["error"]
    expected = load_file(folder / "expected.safetensors")["logits"]
    found = load_file(folder / "found.safetensors")
    assert torch.equal(found["logits"], expected)
    # files of save_pretrained are not aligned: mapped weights give equal numbers up to the last bit
    torch.testing.assert_close(found["again"], expected, rtol=0, atol=1e-5)
    ours = weights(folder)
    theirs = weights(folder / "again")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert said["implementations"] == ["grouped_mm"]
    if case == "even" and name != PORTED:
        assert said["refused"] == [None, None]
        return
    assert all("trust_remote_code=True" in refused for refused in said["refused"])


@pytest.mark.slow
@pytest.mark.skipif(not OLDER.exists(), reason="no older transformers: `make older` installs them")
@pytest.mark.parametrize("version", OLDERS)
def test_older_versions_load_stock_exports_and_refuse_the_others(
    version: str, folders: Path
) -> None:
    names = [f"{name}-{case}" for name, case in FOR_OLDER]
    printed = read_alone(
        WITH_OLDER, folders, *names, PYTHONPATH=str(OLDER / version), HOME=str(folders / version)
    )
    said = json.loads(printed.rpartition("RESULT ")[2])
    assert said["version"] == version
    for name, case in FOR_OLDER:
        answers = [said[f"{name}-{case} {trust}"] for trust in (False, True)]
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
