"""Exports: their files, what does not fit, memory, and the comparison with the masked model."""

import errno
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from example_steps import exported
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from identities.plans import random_plan
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import rewrite
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from moe_lab.config import ExportConfig
from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.models.files import fingerprint
from moe_lab.pruning.export import export, write
from moe_lab.pruning.export.card import model_card
from moe_lab.pruning.export.rewrite import Changes
from moe_lab.pruning.export.rewrite import rewrite as rewrite_export
from moe_lab.pruning.export.verify import TOLERANCE, verify
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune
from tests.campaign.models import reconfigure


def test_files_beside_the_weights(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = tiny.save("olmoe", folder, shard="60KB")
    (folder / "README.md").write_text(
        "---\nlicense: mit\nbase_model: a/b\n---\n# Nice model\nIt talks.\n"
    )
    (folder / "pytorch_model.bin").write_bytes(b"old")
    reconfigure(folder, note="ä")
    plan = Plan.of_experts(
        tiny.plan(model, 0.5).retained,
        dict.fromkeys(range(3), 16),
        {"model": "little", "criterion": "man"},
    )
    out = export(folder, plan, tmp_path / "deep" / "pruned")
    names = {file.name for file in folder.iterdir()} - {"pytorch_model.bin"} | {"plan.json"}
    assert {file.name for file in out.iterdir()} == names
    assert [path.name for path in out.parent.iterdir()] == ["pruned"]
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, out))
    assert list(before) == list(after) and after == {**before, "num_experts": 8}
    assert Plan.load(out / "plan.json") == plan
    card = (out / "README.md").read_text()
    assert card.startswith(
        "---\nlicense: mit\n---\n\n# model, pruned\n\n24 of 48 routed experts are retained: 8 in "
        "each of 3"
    )
    assert (
        '"criterion": "man"' in card
        and plan.digest in card
        and card.endswith("# Nice model\nIt talks.\n")
    )
    index = json.loads((out / "model.safetensors.index.json").read_text())
    found = {}
    for shard in sorted(set(index["weight_map"].values())):
        with safe_open(out / shard, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            found.update({key: (shard, file.get_tensor(key).nbytes) for key in file.keys()})  # noqa: SIM118
    assert {key: shard for key, (shard, _) in found.items()} == index["weight_map"]
    assert sum(size for _, size in found.values()) == index["metadata"]["total_size"]


def test_every_count_is_written_as_it_was(tmp_path: Path) -> None:
    """Configurations of Hunyuan list numbers by layer."""
    model = tiny.save("hunyuan_v1_moe", tmp_path / "model")
    reconfigure(tmp_path / "model", moe_topk=[4] * 3)
    before = json.loads((tmp_path / "model" / "config.json").read_text())
    out = export(tmp_path / "model", tiny.plan(model, 0.5), tmp_path / "out")
    assert json.loads((out / "config.json").read_text()) == {**before, "num_experts": 8}
    three = Plan.of_experts(dict.fromkeys(range(3), (0, 1, 2)), dict.fromkeys(range(3), 16))
    with pytest.raises(UserError, match=r"3 of 16 experts.*top_k=4"):
        export(tmp_path / "model", three, tmp_path / "no")


def test_kernel_copy_and_buffered_copy_give_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.save("granitemoe", tmp_path / "model", shard="60KB")
    plan = tiny.plan(model, 0.5)
    first = export(tmp_path / "model", plan, tmp_path / "first")

    def refuse(*_: Any) -> int:
        raise OSError(errno.EXDEV, "other disk")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    monkeypatch.setattr(write, "BUFFER", 1000)
    second = export(tmp_path / "model", plan, tmp_path / "second")
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes()


def test_layers_for_extra_tokens_are_left_out(tmp_path: Path) -> None:
    model = tiny.save("deepseek_v3", tmp_path / "model")
    plan = tiny.plan(model, 0.5)
    clean = export(tmp_path / "model", plan, tmp_path / "clean")

    def add(tensors: dict[str, torch.Tensor]) -> None:
        last = {name: tensor for name, tensor in tensors.items() if ".layers.2." in name}
        for prefix in ("model.layers.3.", "mtp.layers.0."):
            tensors.update(
                {
                    name.replace("model.layers.2.", prefix): tensor.clone()
                    for name, tensor in last.items()
                }
            )
        tensors.update(
            {name: torch.ones(2) for name in ("mtp.fc.weight", "model.layers.3.eh_proj.weight")}
        )

    rewrite(tmp_path / "model", add)
    reconfigure(tmp_path / "model", num_nextn_predict_layers=1)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert not [name for name in loaded if "mtp" in name or ".layers.3." in name], (
        "no statistics can be gathered"
    )
    out = export(tmp_path / "model", plan, tmp_path / "out")
    assert (
        load_file(out / "model.safetensors").keys() == load_file(clean / "model.safetensors").keys()
    )
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 0
    assert "`model.layers.3`, `mtp`" in (out / "README.md").read_text()


@pytest.mark.parametrize(
    "name", ["model.layers.3.eh_proj.weight", "mtp.fc.weight", "model.mtp_block.0.norm.weight"]
)
def test_layers_for_extra_tokens_without_experts_are_kept(name: str, tmp_path: Path) -> None:
    """With the field by which programs know of them."""
    model = tiny.save("deepseek_v3", tmp_path / "model")
    rewrite(tmp_path / "model", lambda tensors: tensors.update({name: torch.ones(2)}))
    reconfigure(tmp_path / "model", num_nextn_predict_layers=1)
    out = export(tmp_path / "model", tiny.plan(model, 0.5), tmp_path / "out")
    assert name in load_file(out / "model.safetensors")
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert "multi-token prediction" not in (out / "README.md").read_text()


def test_what_transformers_reads_in_folders_is_kept(tmp_path: Path) -> None:
    """Further chat templates, also where the weights are written again, and a change of them is
    another model."""
    model = tiny.save("olmoe", tmp_path / "model")
    plan = tiny.plan(model, 0.5)
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    unlike = fingerprint(tmp_path / "model")
    for name in (
        "additional_chat_templates/tool_use.jinja",
        "custom_generate/generate.py",
        "original/params.json",
    ):
        (tmp_path / "model" / name).parent.mkdir()
        (tmp_path / "model" / name).write_text(f"{template} tools")
    assert fingerprint(tmp_path / "model") != unlike
    out = export(tmp_path / "model", plan, tmp_path / "out")
    changes = Changes(lambda name, tensor: {name: tensor}, "Nothing was changed.")
    again = rewrite_export(out, changes, tmp_path / "again")
    for folder in (out, again):
        assert AutoTokenizer.from_pretrained(folder).chat_template["tool_use"].endswith("tools")
        assert (folder / "custom_generate" / "generate.py").is_file() and not (
            folder / "original"
        ).exists()


@pytest.mark.parametrize(
    "card",
    [
        "\n\n---\nlicense: mit\n---   \nBody",
        "---\nlicense: mit\n---",
        "---\nlicense: mit\n----\nBody",
        "Text\n---\nlicense: mit\n---\nBody",
        "---\nlicense: mit\nBody",
        "---\nlicense: mit\ntags: [moe]\n--- more\n---\nBody",
    ],
)
def test_the_front_matter_that_the_hub_reads_is_kept(card: str) -> None:
    sizes = {"unpruned_bytes": 1, "written": 1, "zeros": 0, "left_out": ()}
    text = model_card(
        Plan.of_experts({0: (0,)}, {0: 2}), "m", card, shape="natural", kind="stock", **sizes
    )
    found, expected = (REGEX_YAML_BLOCK.search(each) for each in (text, card))
    assert (found and found[2]) == (expected and expected[2])
    assert ("Body" in text) == ("Body" in card)


BLOCK = "model.layers.1.mlp"
GATE = f"{BLOCK}.gate.weight"
EXPERT = f"{BLOCK}.experts.{{}}.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.update({f"{BLOCK}.scale": torch.ones(16)}),
            r"layers\.1\.mlp\.scale \(16,\) belongs to a MoE",
        ),
        (lambda t: t.pop(GATE), "layer 1 has 0 router weights, expected 1"),
        (lambda t: t.pop(EXPERT.format(3)), "experts of layer 1 do not all have the same"),
        (lambda t: t.update({EXPERT.format(16): torch.ones(24, 32)}), "its layer 1 has 16 experts"),
        (lambda t: t.update({GATE: torch.ones(8, 32)}), r"gate\.weight has shape \(8, 32\)"),
        (
            lambda t: [t.pop(key) for key in list(t) if BLOCK in key],
            r"has layers \[0, 1, 2\], .*layers \[0, 2\]",
        ),
    ],
)
def test_checkpoints_that_do_not_fit(
    tmp_path: Path, change: Callable[[Any], object], message: str
) -> None:
    model = tiny.save("olmoe", tmp_path / "model")
    rewrite(tmp_path / "model", change)
    with pytest.raises(UserError, match=message):
        export(tmp_path / "model", tiny.plan(model, 0.5), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_plans_that_do_not_fit(tmp_path: Path) -> None:
    tiny.save("deepseek_v3:grouped", tmp_path / "model")
    low = tuple(range(8))
    four = (0, 4, 8, 12)
    counts = {1: 16, 2: 16}
    for plan, message in [
        (
            Plan.of_experts({1: low, 2: low}, counts),
            r"retains \[4, 4, 0, 0\] experts of the 4 groups",
        ),
        (
            Plan.of_experts({1: four, 2: four}, counts),
            "retains 4 of 16 experts, but its router needs at least 8",
        ),
        (
            Plan.of_experts({1: low, 2: low}, {1: 8, 2: 8}),
            r"layers of 8 experts, and model\.layers\.1\.",
        ),
        (
            tiny.plan(tiny.build("deepseek_v3:grouped", num_hidden_layers=4), 0.5),
            r"has layers \[1, 2, 3\]",
        ),
    ]:
        with pytest.raises(UserError, match=message):
            export(tmp_path / "model", plan, tmp_path / "out")
    # its third layer is not one that predicts further tokens
    reconfigure(tmp_path / "model", num_hidden_layers=2)
    with pytest.raises(UserError, match=r"layers \[1, 2\]"):
        export(
            tmp_path / "model",
            Plan.of_experts({1: tuple(range(0, 16, 2))}, {1: 16}),
            tmp_path / "out",
        )


GROUPS = {"n_routed_experts": 32, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8}


@pytest.mark.parametrize(
    ("name", "made", "missing", "kept", "message"),
    [
        ("mixtral", {}, ("num_local_experts",), range(6), r"layers\.0\."),
        ("mixtral", {}, ("num_experts_per_tok",), range(1), "top_k=2"),
        (
            "deepseek_v3",
            GROUPS,
            ("n_group", "topk_group", "num_experts_per_tok"),
            range(24),
            "of the 8 groups",
        ),
    ],
)
def test_fields_that_config_json_leaves_to_their_defaults(
    name: str,
    made: dict[str, int],
    missing: tuple[str, ...],
    kept: range,
    message: str,
    tmp_path: Path,
) -> None:
    """What prune would refuse, or nothing could load, is not written."""
    model = tiny.save(name, tmp_path / "model", **made)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    shortened = {field: value for field, value in config.items() if field not in missing}
    (tmp_path / "model" / "config.json").write_text(json.dumps(shortened))
    counts = {layer.index: layer.n_experts for layer in moe_layers(model)}
    with pytest.raises(UserError, match=message):
        export(
            tmp_path / "model",
            Plan.of_experts(dict.fromkeys(counts, tuple(kept)), counts),
            tmp_path / "out",
        )
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("lost", ["model.norm.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_a_checkpoint_that_lacks_a_weight_is_not_exported(lost: str, tmp_path: Path) -> None:
    """Nothing could load the export."""
    model = tiny.save("olmoe", tmp_path / "model")
    rewrite(tmp_path / "model", lambda weights: weights.pop(lost))
    counts = {layer.index: layer.n_experts for layer in moe_layers(model)}
    with pytest.raises(UserError, match=lost):
        export(
            tmp_path / "model",
            Plan.of_experts(dict.fromkeys(counts, tuple(range(8))), counts),
            tmp_path / "out",
        )
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("way", ["even", "uneven", "ragged"])
def test_a_composite_is_exported_right_or_not_at_all(way: str, tmp_path: Path) -> None:
    """The fields of its experts are below text_config."""
    text = {**tiny.COMMON, **tiny.ARCHITECTURES["qwen3_next"]}
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 32,
        "out_hidden_size": 32,
    }
    whole = Qwen3_5MoeForConditionalGeneration(
        Qwen3_5MoeConfig(text_config=text, vision_config=vision)
    )
    tiny.randomize(whole)
    whole.save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", experts_implementation="eager")
    plan = random_plan(model, way)
    if way != "even":
        with pytest.raises(UserError, match="export"):
            export(tmp_path / "model", plan, tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
        return
    out = export(tmp_path / "model", plan, tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(out, experts_implementation="eager")
    assert torch.equal(tiny.logits(exported), tiny.logits(prune(model, plan)))


def test_a_full_target_is_refused_and_a_full_disk_left_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.save("olmoe", tmp_path / "model")
    plan = tiny.plan(model, 0.5)
    (tmp_path / "empty").mkdir()
    export(tmp_path / "model", plan, tmp_path / "empty")
    with pytest.raises(UserError, match="empty exists already"):
        export(tmp_path / "model", plan, tmp_path / "empty")

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "copy_file_range", full)
    with pytest.raises(OSError, match="full"):
        export(tmp_path / "model", plan, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"model", "empty"}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint whose experts hold 151 MB, and its model."""
    folder = tmp_path_factory.mktemp("large")
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 768,
        "num_hidden_layers": 2,
        "num_local_experts": 8,
    }
    return folder, tiny.save("minimax_m2", folder, num_experts_per_tok=2, **sizes)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads peak memory from /proc")
@pytest.mark.parametrize(
    ("way", "shape", "share"),
    [
        ("even", "natural", 0.5),
        ("even", "masked", 1),
        ("uneven", "natural", None),
        ("ragged", "natural", 1.0),
    ],
)
def test_the_step_needs_neither_torch_nor_memory(
    way: str, shape: str, share: float | None, large: tuple[Path, Any], tmp_path: Path
) -> None:
    """An export step in a process of its own, whose memory grows by far less than the 151 MB it
    reads."""
    source, model = large
    (tmp_path / "plan").mkdir()
    random_plan(model, way, share=share).save(tmp_path / "plan" / "plan.json")
    work = exported(source, tmp_path, ExportConfig(shape))
    (tmp_path / "work.pkl").write_bytes(pickle.dumps(work))
    code = f"""
import pickle, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})  # where the example's plan step is
import moe_lab.pruning.export  # loaded by the step, and no memory of its work
from moe_lab.study.steps import perform
def peak():
    status = open("/proc/self/status")
    return int(next(line.split()[1] for line in status if line.startswith("VmHWM")))
before = peak()  # mostly libraries, of which the kernel maps as much as it likes
perform(*pickle.load(open({str(tmp_path / "work.pkl")!r}, "rb")))
assert not {{"torch", "transformers"}} & set(sys.modules)
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 10_000  # kB
    written = tmp_path / "scratch" / "checkpoint" / "model.safetensors"
    assert written.stat().st_size > (source / "model.safetensors").stat().st_size / 3
    assert not (tmp_path / "partial").exists()
    written.unlink()


# ---- verify=true

ROUNDING = TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("name", "way", "shape", "moved_by", "bound"),
    [
        *(
            (name, "even", "natural", 0, 0)
            for name in ("deepseek_v3:grouped", "gpt_oss", "qwen3_moe")
        ),
        ("qwen3_moe", "even", "natural", 8, 0),  # weights may begin anywhere in a file
        ("deepseek_v3:grouped", "even", "masked", 0, ROUNDING),
        ("qwen3_moe", "ragged", "natural", 0, ROUNDING),
        ("qwen3_moe", "one width", "natural", 0, ROUNDING),
    ],
)
def test_whole_experts_agree_to_the_bit_and_others_within_rounding(
    name: str, way: str, shape: str, moved_by: int, bound: float, tmp_path: Path
) -> None:
    plan = random_plan(tiny.save(name, tmp_path / "model"), way)
    rewrite(tmp_path / "model", lambda tensors: None, moved_by)
    export(tmp_path / "model", plan, tmp_path / "export", shape=shape)
    assert verify(tmp_path / "model", plan, tmp_path / "export") <= bound


def test_a_wrong_router_is_named(tmp_path: Path) -> None:
    plan = tiny.plan(tiny.save("qwen3_moe", tmp_path / "model"), 0.25)
    export(tmp_path / "model", plan, tmp_path / "export")
    rewrite(tmp_path / "export", lambda tensors: tensors[GATE].copy_(tensors[GATE].flip(0)))
    with pytest.raises(
        UserError, match=r"decoder layer 1 of .*export gives something else than the masked model"
    ):
        verify(tmp_path / "model", plan, tmp_path / "export")


@pytest.mark.parametrize("channels", [False, True])
def test_a_large_residual_hides_no_wrong_expert(channels: bool, tmp_path: Path) -> None:
    """One number of each hidden state is as large as in trained models; experts do not add to
    it."""
    model = tiny.save("qwen3_moe", tmp_path / "model", dtype=torch.bfloat16)
    plan = random_plan(model, "one width", width=16) if channels else tiny.plan(model, 0.25)
    rewrite(tmp_path / "model", grow)
    export(tmp_path / "model", plan, tmp_path / "export")
    clean = verify(tmp_path / "model", plan, tmp_path / "export")
    assert clean <= (TOLERANCE[torch.bfloat16] / 2 if channels else 0)
    rewrite(tmp_path / "export", swap)
    with pytest.raises(UserError, match="decoder layer 1 of"):
        verify(tmp_path / "model", plan, tmp_path / "export")


def grow(tensors: dict[str, torch.Tensor]) -> None:
    """The first number of each hidden state becomes 100, as no layer reads or writes it; the norms
    make up for it."""
    tensors["model.embed_tokens.weight"][:, 0] = 100
    for name, tensor in tensors.items():
        if name.endswith(
            ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")
        ):
            tensor.mul_(100 / len(tensor) ** 0.5)[0] = 0
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0


def swap(tensors: dict[str, torch.Tensor]) -> None:
    """Two experts of layer 1 trade places."""
    for part in ("gate_proj", "up_proj", "down_proj"):
        one, other = (f"model.layers.1.mlp.experts.{expert}.{part}.weight" for expert in (1, 2))
        tensors[one], tensors[other] = tensors[other], tensors[one]
