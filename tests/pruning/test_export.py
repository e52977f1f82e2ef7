from __future__ import annotations

import errno
import json
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import tiny
import torch
from example_steps import exported
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_lab.config import ExportConfig
from moe_lab.errors import UserError
from moe_lab.models.files import fingerprint
from moe_lab.pruning.export import export, write
from moe_lab.pruning.export.card import model_card
from moe_lab.pruning.export.rewrite import Changes
from moe_lab.pruning.export.rewrite import rewrite as rewrite_export
from moe_lab.pruning.plan import Plan


def test_files_beside_the_weights(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = tiny.save("olmoe", folder, shard="60KB")
    (folder / "README.md").write_text("---\nlicense: mit\nbase_model: a/b\n---\n# Nice model\nIt talks.\n")
    (folder / "pytorch_model.bin").write_bytes(b"old")
    (folder / "config.json").write_text(json.dumps({**json.loads((folder / "config.json").read_text()), "note": "ä"}))
    plan = Plan(tiny.plan(model, 0.5).experts, dict.fromkeys(range(3), 16), {"model": "little", "criterion": "man"})
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
        "---\nlicense: mit\n---\n\n# model, pruned\n\n24 of 48 routed experts are kept: 8 in each of 3"
    )
    assert '"criterion": "man"' in card and plan.digest in card and card.endswith("# Nice model\nIt talks.\n")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    found = {}
    for shard in sorted(set(index["weight_map"].values())):
        with safe_open(out / shard, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            found.update({key: (shard, file.get_tensor(key).nbytes) for key in file.keys()})  # noqa: SIM118
    assert {key: shard for key, (shard, _) in found.items()} == index["weight_map"]
    assert sum(size for _, size in found.values()) == index["metadata"]["total_size"]


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("qwen3_moe", {}, {"num_experts": 8, "num_local_experts": 8}),  # readers differ in the field that they look up
        ("hunyuan_v1_moe", {"num_experts": [16] * 3, "moe_topk": [4] * 3}, {"num_experts": [8] * 3}),
    ],
)
def test_every_count_is_written_as_it_was(
    name: str, before: dict[str, Any], after: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny.save(name, tmp_path / "model")
    config = {**json.loads((tmp_path / "model" / "config.json").read_text()), **before}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    out = export(tmp_path / "model", tiny.plan(model, 0.5), tmp_path / "out")
    assert json.loads((out / "config.json").read_text()) == {**config, **after}
    three = Plan(dict.fromkeys(range(3), (0, 1, 2)), dict.fromkeys(range(3), 16))
    with pytest.raises(UserError, match=r"3 of 16 experts.*top_k=4"):
        export(tmp_path / "model", three, tmp_path / "no")


def test_kernel_copy_and_buffered_copy_give_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_layers_for_extra_tokens_are_left_out(tmp_path: Path) -> None:
    model = tiny.save("deepseek_v3", tmp_path / "model")
    plan = tiny.plan(model, 0.5)
    clean = export(tmp_path / "model", plan, tmp_path / "clean")

    def add(tensors: dict[str, torch.Tensor]) -> None:
        last = {name: tensor for name, tensor in tensors.items() if ".layers.2." in name}
        tensors.update({name.replace(".layers.2.", ".layers.3."): tensor.clone() for name, tensor in last.items()})
        tensors.update(
            {name.replace("model.layers.2.", "mtp.layers.0."): tensor.clone() for name, tensor in last.items()}
        )
        tensors.update({name: torch.ones(2) for name in ("mtp.fc.weight", "model.layers.3.eh_proj.weight")})

    rewrite(tmp_path / "model", add)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert not [name for name in loaded if "mtp" in name or ".layers.3." in name], "no statistics can be gathered"
    out = export(tmp_path / "model", plan, tmp_path / "out")
    assert load_file(out / "model.safetensors").keys() == load_file(clean / "model.safetensors").keys()
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 0
    (said,) = [line for line in (out / "README.md").read_text().splitlines() if "multi-token prediction" in line]
    assert "`model.layers.3`, `mtp`" in said and "transformers does not load them" in said
    assert "multi-token prediction" not in (clean / "README.md").read_text()


@pytest.mark.parametrize("name", ["model.layers.3.eh_proj.weight", "mtp.fc.weight", "model.mtp_block.0.norm.weight"])
def test_layers_for_extra_tokens_without_experts_are_kept(name: str, tmp_path: Path) -> None:
    """With the field by which programs know of them."""
    model = tiny.save("deepseek_v3", tmp_path / "model")
    rewrite(tmp_path / "model", lambda tensors: tensors.update({name: torch.ones(2)}))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    out = export(tmp_path / "model", tiny.plan(model, 0.5), tmp_path / "out")
    assert name in load_file(out / "model.safetensors")
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == 1
    assert "multi-token prediction" not in (out / "README.md").read_text()


def test_a_decoder_layer_beyond_those_of_the_configuration_is_not_taken_for_one_of_extra_tokens(
    tmp_path: Path,
) -> None:
    tiny.save("olmoe", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    plan = tiny.plan(tiny.build("olmoe", num_hidden_layers=2), 0.5)
    with pytest.raises(UserError, match=r"layers \[0, 1, 2\]"):
        export(tmp_path / "model", plan, tmp_path / "out")


def test_what_transformers_reads_in_folders_is_kept(tmp_path: Path) -> None:
    """Further chat templates, also where the weights are written again, and a change of them is another model."""
    model = tiny.save("olmoe", tmp_path / "model")
    plan, template = tiny.plan(model, 0.5), "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    unlike = fingerprint(tmp_path / "model")
    for name in ("additional_chat_templates/tool_use.jinja", "custom_generate/generate.py", "original/params.json"):
        (tmp_path / "model" / name).parent.mkdir()
        (tmp_path / "model" / name).write_text(f"{template} tools")
    assert fingerprint(tmp_path / "model") != unlike
    out = export(tmp_path / "model", plan, tmp_path / "out")
    changes = Changes(lambda name, tensor: {name: tensor}, "Nothing was changed.")
    again = rewrite_export(out, changes, tmp_path / "again")
    for folder in (out, again):
        assert AutoTokenizer.from_pretrained(folder).chat_template["tool_use"].endswith("tools")
        assert (folder / "custom_generate" / "generate.py").is_file() and not (folder / "original").exists()


@pytest.mark.parametrize(
    "card",
    [
        "---\nlicense: mit\n---\nBody",
        "\n\n---\nlicense: mit\n---\nBody",
        "---\nlicense: mit\n---   \nBody",
        "---\nlicense: mit\n---",
        "---\nlicense: mit\n----\nBody",
        "Text\n---\nlicense: mit\n---\nBody",
        "---\nlicense: mit\nBody",
        "---\nlicense: mit\ntags: [moe]\n--- more\n---\nBody",
    ],
)
def test_the_front_matter_that_the_hub_reads_is_kept(card: str) -> None:
    sizes = {"before": 1, "written": 1, "zeros": 0, "left_out": ()}
    text = model_card(uniform(), "m", card, shape="natural", kind="stock", **sizes)
    found, expected = (REGEX_YAML_BLOCK.search(each) for each in (text, card))
    assert (found and found[2]) == (expected and expected[2])
    assert ("Body" in text) == ("Body" in card)


EXPERT = "model.layers.1.mlp.experts.{}.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.update({"model.layers.1.mlp.scale": torch.ones(16)}),
            r"layers\.1\.mlp\.scale \(16,\) belongs to a MoE",
        ),
        (lambda t: t.pop("model.layers.1.mlp.gate.weight"), "layer 1 has 0 router weights, expected 1"),
        (lambda t: t.pop(EXPERT.format(3)), "experts of layer 1 do not all have the same"),
        (lambda t: t.update({EXPERT.format(16): torch.ones(24, 32)}), "its layer 1 has 16 experts"),
        (
            lambda t: t.update({"model.layers.1.mlp.gate.weight": torch.ones(8, 32)}),
            r"gate\.weight has shape \(8, 32\)",
        ),
        (
            lambda t: [t.pop(key) for key in list(t) if ".layers.1.mlp" in key],
            r"about layers \[0, 1, 2\], .*layers \[0, 2\]",
        ),
    ],
)
def test_checkpoints_that_do_not_fit(tmp_path: Path, change: Callable[[Any], object], message: str) -> None:
    model = tiny.save("olmoe", tmp_path / "model")
    rewrite(tmp_path / "model", change)
    with pytest.raises(UserError, match=message):
        export(tmp_path / "model", tiny.plan(model, 0.5), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_plans_that_do_not_fit(tmp_path: Path) -> None:
    tiny.save("deepseek_v3:grouped", tmp_path / "model")
    kept = tuple(range(8))
    for plan, message in [
        (Plan({1: kept, 2: kept}, {1: 16, 2: 16}), r"keeps \[4, 4, 0, 0\] experts of the 4 groups"),
        (
            Plan({1: (0, 4, 8, 12), 2: (0, 4, 8, 12)}, {1: 16, 2: 16}),
            "keeps 4 of 16 experts, but its router needs at least 8",
        ),
        (Plan({1: kept, 2: kept}, {1: 8, 2: 8}), r"layers of 8 experts, and model\.layers\.1\."),
        (tiny.plan(tiny.build("deepseek_v3:grouped", num_hidden_layers=4), 0.5), r"about layers \[1, 2, 3\]"),
    ]:
        with pytest.raises(UserError, match=message):
            export(tmp_path / "model", plan, tmp_path / "out")


def test_target_must_be_free(tmp_path: Path) -> None:
    model = tiny.save("olmoe", tmp_path / "model")
    (tmp_path / "empty").mkdir()
    export(tmp_path / "model", tiny.plan(model, 0.5), tmp_path / "empty")
    with pytest.raises(UserError, match="empty exists already"):
        export(tmp_path / "model", tiny.plan(model, 0.5), tmp_path / "empty")


def test_disk_that_fills_up_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.save("olmoe", tmp_path / "model")

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "copy_file_range", full)
    with pytest.raises(OSError, match="full"):
        export(tmp_path / "model", tiny.plan(model, 0.5), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


HIDDEN, WIDTH, COUNT = 1024, 768, 8


def hollow(folder: Path, kind: str = "F32") -> int:
    """A checkpoint of two layers whose experts hold 151 MB of zeros, and take no room on the disk; gives its size.

    With experts of the type F8_E4M3 it is a quantised one, with scales, of a quarter of that.
    """
    header: dict[str, Any] = {}
    position = 0
    for layer in range(2):
        matrices = {"gate": [WIDTH, HIDDEN], "up": [WIDTH, HIDDEN], "down": [HIDDEN, WIDTH]}
        tensors = [
            (f"experts.{expert}.{role}_proj.weight", matrices[role]) for expert in range(COUNT) for role in matrices
        ]
        scales = [(f"{name}_scale_inv", [6, 8]) for name, _ in tensors if kind != "F32"]
        for name, sides in [("gate.weight", [COUNT, 8]), ("gate.e_score_correction_bias", [COUNT]), *tensors, *scales]:
            dtype = kind if name.endswith("_proj.weight") else "F32"
            end = position + (4 if dtype == "F32" else 1) * math.prod(sides)
            header[f"model.layers.{layer}.mlp.{name}"] = {
                "dtype": dtype,
                "shape": sides,
                "data_offsets": [position, end],
            }
            position = end
    text = json.dumps(header).encode()
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)
    settings = {"num_experts": COUNT, "num_experts_per_tok": 2, "num_hidden_layers": 2, "intermediate_size": WIDTH}
    about = {} if kind == "F32" else {"quantization_config": {"quant_method": "fp8", "ignore": ["lm_head"]}}
    (folder / "config.json").write_text(json.dumps({"model_type": "olmoe", **settings, **about}))
    return position


def uniform() -> Plan:
    return Plan(dict.fromkeys(range(2), (0, 2, 4, 6)), dict.fromkeys(range(2), COUNT))


def uneven() -> Plan:
    return Plan({0: (1, 3, 5), 1: (0, 1, 2, 3, 7)}, dict.fromkeys(range(2), COUNT))


def ragged() -> Plan:
    kept = numpy.random.default_rng(0).random((2, COUNT, WIDTH)) < 0.5
    return Plan(dict.fromkeys(range(2), tuple(range(COUNT))), dict.fromkeys(range(2), COUNT), {}, dict(enumerate(kept)))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads peak memory from /proc")
@pytest.mark.parametrize(
    ("kind", "make", "shape", "share"),
    [
        ("F32", uniform, "natural", 0.5),
        ("F32", uniform, "masked", 1),
        ("F32", uneven, "natural", 0.5),
        ("F32", ragged, "natural", 0.5),
        ("F8_E4M3", uniform, "natural", 0.5),
        ("F8_E4M3", uneven, "natural", 0.5),
    ],
)
def test_the_step_needs_neither_torch_nor_memory(
    kind: str, make: Callable[[], Plan], shape: str, share: float, tmp_path: Path
) -> None:
    """An export step in a process of its own, whose memory grows by far less than the 151 MB it reads."""
    size = hollow(tmp_path / "model", kind)
    (tmp_path / "plan").mkdir()
    make().save(tmp_path / "plan" / "plan.json")
    work = exported(tmp_path / "model", tmp_path, ExportConfig(shape))
    (tmp_path / "work.pkl").write_bytes(pickle.dumps(work))
    code = f"""
import pickle, sys
sys.path.insert(0, {str(Path(__file__).parents[1])!r})  # where the example's plan step is
from moe_lab.study.steps import perform
def peak():
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
before = peak()  # mostly libraries, of which the kernel maps as much as it likes
perform(*pickle.load(open({str(tmp_path / "work.pkl")!r}, "rb")))
assert not {{"torch", "transformers"}} & set(sys.modules)
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 10_000  # kB
    written = (tmp_path / "scratch" / "checkpoint" / "model.safetensors").stat().st_size
    assert written == pytest.approx(share * size, rel=0.02)
    assert not (tmp_path / "partial").exists()
