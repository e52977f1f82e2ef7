"""Exports: their files, what does not fit, memory, and the comparison with the masked model."""

import errno
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tiny
import torch
from example_steps import export_step_and_files
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from identities.plans import check_refused, random_plan
from safetensors.torch import load_file
from tiny import rewrite
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)
from transformers.modeling_layers import MtpModel

from moe_lab.config import ExportConfig
from moe_lab.errors import UserError
from moe_lab.models.discover import moe_layers
from moe_lab.models.files import fingerprint
from moe_lab.models.transformers_private import NameMapping
from moe_lab.pruning.export import chunks, export
from moe_lab.pruning.export.card import model_card
from moe_lab.pruning.export.verify import TOLERANCE, verify
from moe_lab.pruning.export.write import KEEP_LIST, PLAN_FILES
from moe_lab.pruning.export.write import rewrite as rewrite_export
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune
from moe_lab.study.steps.plans import plan_in
from tests.campaign.models import reconfigure


def test_export_has_a_card_an_index_and_the_files_of_the_checkpoint(tmp_path: Path) -> None:
    source = tmp_path / "model"
    model = tiny.save("olmoe", source, shard="60KB")
    (source / "README.md").write_text(
        "---\nlicense: mit\nbase_model: a/b\n---\n# Nice model\nIt talks.\n"
    )
    (source / "pytorch_model.bin").write_bytes(b"old")
    plan = replace(tiny.plan(model, 0.5), provenance={"criterion": "man"})
    folder = export(source, plan, tmp_path / "deep" / "pruned")
    names = {file.name for file in source.iterdir()} - {"pytorch_model.bin"} | {*PLAN_FILES}
    names -= {"plan.npz"}
    assert {file.name for file in folder.iterdir()} == names
    assert [path.name for path in folder.parent.iterdir()] == ["pruned"]
    assert (folder / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert Plan.load(folder / "plan.json") == plan
    layers = {number: {"n_experts": layer.n_experts} for number, layer in plan.layers.items()}
    assert plan_in(str(folder / KEEP_LIST), layers) == plan
    with pytest.raises(UserError, match="layers"):
        plan_in(str(folder / KEEP_LIST), {0: {"n_experts": 16}})
    card = (folder / "README.md").read_text()
    assert card.startswith(
        "---\nlicense: mit\n---\n\n# model, pruned\n\n24 of 48 routed experts are retained: 8 in "
        "each of 3"
    )
    assert '"criterion": "man"' in card
    assert plan.digest in card
    assert card.endswith("# Nice model\nIt talks.\n")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = {name: load_file(folder / name) for name in set(index["weight_map"].values())}
    assert index["weight_map"] == {key: name for name in shards for key in shards[name]}
    sizes = [tensor.nbytes for tensors in shards.values() for tensor in tensors.values()]
    assert index["metadata"]["total_size"] == sum(sizes)


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def test_numbers_listed_by_layer_stay_lists(tmp_path: Path) -> None:
    """Configurations of Hunyuan list numbers by layer."""
    model = tiny.save("hunyuan_v1_moe", tmp_path / "model")
    reconfigure(tmp_path / "model", moe_topk=[4] * 3)
    original = read_config(tmp_path / "model")
    folder = export(tmp_path / "model", tiny.plan(model, 0.5), tmp_path / "out")
    assert read_config(folder) == {**original, "num_experts": 8}
    three = Plan.of_experts(dict.fromkeys(range(3), (0, 1, 2)), dict.fromkeys(range(3), 16))
    with pytest.raises(UserError, match=r"3 of 16 experts.*top_k=4"):
        export(tmp_path / "model", three, tmp_path / "no")


def test_files_are_the_same_whatever_the_size_of_copied_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.save("granitemoe", tmp_path / "model", shard="60KB")
    plan = tiny.plan(model, 0.5)
    first = export(tmp_path / "model", plan, tmp_path / "first")
    monkeypatch.setattr(chunks, "BUFFER", 1000)
    second = export(tmp_path / "model", plan, tmp_path / "second")
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes()


PREDICTED = "model.layers.3."
"""Prefix of the layer for extra tokens."""


def add_prediction_layer(tensors: dict[str, torch.Tensor]) -> None:
    """A layer for extra tokens: the last layer with other numbers, and what comes before it."""
    hidden = len(tensors["model.norm.weight"])
    for name in [name for name in tensors if ".layers.2." in name]:
        tensors[name.replace("model.layers.2.", PREDICTED)] = tensors[name].roll(1, 0)
    tensors[f"{PREDICTED}eh_proj.weight"] = torch.randn(hidden, 2 * hidden) / hidden**0.5
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{PREDICTED}{name}.weight"] = torch.ones(hidden)


@pytest.fixture(params=["deepseek_v3", "deepseek_v3:grouped", "glm4_moe"])
def predicting(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Writes a checkpoint with a layer for extra tokens; the model without this layer."""
    model = tiny.save(request.param, tmp_path / "model")
    rewrite(tmp_path / "model", add_prediction_layer)
    reconfigure(tmp_path / "model", num_nextn_predict_layers=1)
    # transformers has the numbers of the published models here
    pattern = PREDICTED.replace(".", r"\.") + ".*"
    monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", [pattern])
    return model


def drafted(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """(output of the layer for extra tokens for random hidden states, tokens that the model
    generates with drafts of this layer)."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, experts_implementation="eager"
    )
    ids = tiny.tokens(1, 8)
    predictor = MtpModel.from_pretrained(model)
    hidden = torch.randn(1, 8, model.config.hidden_size, generator=torch.manual_seed(0))
    positions = torch.arange(1, 9)[None]
    with torch.no_grad():
        output = predictor.forward_layer(0, hidden, positions, None, input_ids=ids)
        options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
        generated = model.generate(ids, use_mtp=True, **options)
        assert torch.equal(generated, model.generate(ids, **options))
    return output, generated


@pytest.mark.parametrize("way", ["uneven", "constants"])
def test_layers_for_extra_tokens_stay_whole_where_layers_differ(
    predicting: Any, way: str, tmp_path: Path
) -> None:
    plan = random_plan(predicting, way, seed=1)
    folder = export(tmp_path / "model", plan, tmp_path / "out")
    assert torch.equal(drafted(folder)[0], drafted(tmp_path / "model")[0])
    assert "multi-token prediction" not in (folder / "README.md").read_text()


def test_experts_for_extra_tokens_keep_their_width(tmp_path: Path) -> None:
    """The configuration of the family has one width for all experts."""
    model = tiny.save("qwen3_next", tmp_path / "model")

    def add_layer(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".layers.2." in name]:
            tensors[name.replace("model.layers.2.", "mtp.layers.0.")] = tensors[name].clone()

    plan = random_plan(model, "one width", share=1.0)
    for kind in ("qwen3_next", "pruned_qwen3_next"):
        folder = export(tmp_path / "model", plan, tmp_path / kind)
        assert read_config(folder)["model_type"] == kind
        rewrite(tmp_path / "model", add_layer)
    original = load_file(tmp_path / "model" / "model.safetensors")
    exported = load_file(folder / "model.safetensors")
    assert all(torch.equal(exported[name], original[name]) for name in original if "mtp" in name)


def test_layers_for_extra_tokens_lose_as_many_experts_as_all_others(
    predicting: Any, tmp_path: Path
) -> None:
    """Those with the smallest rows of the router, in each of its groups."""
    plan = tiny.plan(predicting, 0.5)
    folder = export(tmp_path / "model", plan, tmp_path / "out")
    assert read_config(folder)["num_nextn_predict_layers"] == 1
    assert f"{PREDICTED}mlp.experts predict" in (folder / "README.md").read_text()
    whole, pruned = (load_file(path / "model.safetensors") for path in (tmp_path / "model", folder))
    router = f"{PREDICTED}mlp.gate.weight"
    n_group = predicting.config.n_group
    norms = whole[router].abs().sum(1).reshape(n_group, -1)
    count = norms.shape[1] // 2
    best = norms.topk(count).indices + torch.arange(n_group)[:, None] * norms.shape[1]
    retained = best.flatten().sort().values
    assert torch.equal(pruned[router], whole[router][retained])
    bias = f"{PREDICTED}mlp.gate.e_score_correction_bias"
    assert torch.equal(pruned[bias], whole[bias][retained])
    for new, old in enumerate(retained.tolist()):
        up = f"{PREDICTED}mlp.experts.{{}}.up_proj.weight"
        assert torch.equal(pruned[up.format(new)], whole[up.format(old)])
    drafted(folder)


CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture
def with_subfolders(tmp_path: Path) -> Plan:
    """Writes a checkpoint with folders that transformers reads and one that it does not; a plan for
    it. The model without them has another fingerprint."""
    plan = tiny.plan(tiny.save("olmoe", tmp_path / "model"), 0.5)
    (tmp_path / "model" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    without_folders = fingerprint(tmp_path / "model")
    for name in (
        "additional_chat_templates/tool_use.jinja",
        "custom_generate/generate.py",
        "original/params.json",
    ):
        (tmp_path / "model" / name).parent.mkdir()
        (tmp_path / "model" / name).write_text(f"{CHAT_TEMPLATE} tools")
    assert fingerprint(tmp_path / "model") != without_folders
    return plan


@pytest.mark.parametrize("rewritten", [False, True])
def test_subfolders_that_transformers_reads_are_copied(
    rewritten: bool, with_subfolders: Plan, tmp_path: Path
) -> None:
    """Further chat templates, also where the weights are written again."""
    folder = export(tmp_path / "model", with_subfolders, tmp_path / "out")
    if rewritten:
        folder = rewrite_export(folder, {}, "Nothing was changed.", tmp_path / "again")
    assert AutoTokenizer.from_pretrained(folder).chat_template["tool_use"].endswith("tools")
    assert (folder / "custom_generate" / "generate.py").is_file()
    assert not (folder / "original").exists()


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
def test_front_matter_of_the_card_is_kept(card: str) -> None:
    sizes = {"unpruned_bytes": 1, "written": 1, "predicting": ()}
    text = model_card(
        Plan.of_experts({0: (0,)}, {0: 2}), "m", card, shape="natural", kind="stock", **sizes
    )
    block, expected = (REGEX_YAML_BLOCK.search(content) for content in (text, card))
    assert (block and block[2]) == (expected and expected[2])
    assert ("Body" in text) == ("Body" in card)


BLOCK = "model.layers.1.mlp"
GATE = f"{BLOCK}.gate.weight"
EXPERT = f"{BLOCK}.experts.{{}}.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.update({f"{BLOCK}.scale": torch.ones(16)}),
            r"layers\.1\.mlp\.scale belongs to a MoE",
        ),
        (lambda t: t.pop(GATE), rf"missing .*{GATE}"),
        (lambda t: t.pop(EXPERT.format(3)), r"layers\.1\.mlp\.experts\."),
        (lambda t: t.update({EXPERT.format(16): torch.ones(24, 32)}), r"layers\.1\.mlp\.experts\."),
        (lambda t: t.update({GATE: torch.ones(8, 32)}), r"gate\.weight has 256 numbers"),
        (
            lambda t: [t.pop(key) for key in list(t) if BLOCK in key and key != GATE],
            r"missing .*first is model\.layers\.1\.mlp\.experts\.",
        ),
    ],
)
def test_checkpoints_of_other_tensors_are_not_exported(
    tmp_path: Path, change: Callable[[Any], object], message: str
) -> None:
    model = tiny.save("olmoe", tmp_path / "model")
    rewrite(tmp_path / "model", change)
    check_refused(tmp_path / "model", message, tiny.plan(model, 0.5))


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (16, r"retains \[4, 4, 0, 0\] experts of the 4 groups"),
        (8, r"another model: .*layer 1 are \(8, 24, 32\)"),
    ],
)
def test_plans_of_other_experts_are_not_exported(count: int, message: str, tmp_path: Path) -> None:
    tiny.save("deepseek_v3:grouped", tmp_path / "model")
    plan = Plan.of_experts(dict.fromkeys((1, 2), range(8)), dict.fromkeys((1, 2), count))
    check_refused(tmp_path / "model", message, plan)


def test_plans_of_other_layers_are_not_exported(tmp_path: Path) -> None:
    tiny.save("deepseek_v3:grouped", tmp_path / "model")
    deeper = tiny.plan(tiny.build("deepseek_v3:grouped", num_hidden_layers=4), 0.5)
    check_refused(tmp_path / "model", r"has layers \[1, 2, 3\]", deeper)
    # its third layer is not one that predicts further tokens
    reconfigure(tmp_path / "model", num_hidden_layers=2)
    shallower = Plan.of_experts({1: tuple(range(0, 16, 2))}, {1: 16})
    check_refused(tmp_path / "model", r"not use .*model\.layers\.2\.", shallower)


@pytest.mark.parametrize(
    ("name", "missing", "retained", "message"),
    [
        ("mixtral", {"num_experts_per_tok"}, range(1), "top_k=2"),
        ("deepseek_v3", {"n_group", "topk_group"}, range(8), "top_k=4, n_group=8"),
    ],
)
def test_missing_fields_of_config_json_have_their_defaults(
    name: str, missing: set[str], retained: range, message: str, tmp_path: Path
) -> None:
    """What prune would refuse is not written."""
    model = tiny.save(name, tmp_path / "model")
    remove_fields(tmp_path / "model", missing)
    counts = {layer.index: layer.n_experts for layer in moe_layers(model)}
    plan = Plan.of_experts(dict.fromkeys(counts, tuple(retained)), counts)
    check_refused(tmp_path / "model", message, plan)


def remove_fields(folder: Path, names: set[str]) -> None:
    config = read_config(folder)
    for name in config.keys() & names:
        del config[name]
    (folder / "config.json").write_text(json.dumps(config))


def test_changed_defaults_are_stated(tmp_path: Path) -> None:
    model = tiny.save("mixtral", tmp_path / "model", num_local_experts=8)
    remove_fields(tmp_path / "model", {"num_local_experts"})
    original = read_config(tmp_path / "model")
    plan = tiny.plan(model, 0.25)
    folder = export(tmp_path / "model", plan, tmp_path / "out")
    assert read_config(folder) == {**original, "num_local_experts": 6}
    assert torch.equal(tiny.logits(tiny.load(folder)), tiny.logits(prune(model, plan)))


@pytest.mark.parametrize("missing", ["model.norm.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_checkpoint_without_a_weight_is_not_exported(missing: str, tmp_path: Path) -> None:
    """Nothing could load the export."""
    plan = tiny.plan(tiny.save("olmoe", tmp_path / "model"), 0.5)
    rewrite(tmp_path / "model", lambda weights: weights.pop(missing))
    check_refused(tmp_path / "model", missing, plan)


@pytest.fixture
def composite(tmp_path: Path) -> Any:
    """The text model of a model of texts and images, which is saved in `tmp_path`."""
    return tiny.save_composite(tmp_path / "model")


@pytest.mark.parametrize("kind", ["even", "uneven", "ragged"])
def test_text_model_of_a_composite_is_exported(kind: str, composite: Any, tmp_path: Path) -> None:
    plan = random_plan(composite, kind)
    folder = export(tmp_path / "model", plan, tmp_path / "out")
    pruned = prune(composite, plan)
    reloaded = tiny.load(folder, trust_remote_code=True)
    assert not tiny.differing(pruned.state_dict(), reloaded.state_dict())
    assert torch.equal(tiny.logits(reloaded), tiny.logits(pruned))
    if kind == "even":
        assert AutoModelForImageTextToText.from_pretrained(folder).model.visual
    else:
        stock = json.loads((folder / "config.json").read_text())["pruned"]["stock"]
        assert stock["architectures"] == ["Qwen3_5MoeForCausalLM"]
    reloaded.save_pretrained(tmp_path / "again")
    again = tiny.load(tmp_path / "again", trust_remote_code=True)
    assert not tiny.differing(pruned.state_dict(), again.state_dict())


def test_tensors_are_stored_by_the_names_of_the_checkpoint(composite: Any, tmp_path: Path) -> None:
    stored = tiny.weights(tmp_path / "model")
    tensors = NameMapping(composite, stored).to_checkpoint(composite.state_dict())
    assert len(tensors) > len(composite.state_dict())
    assert not tiny.differing(tensors, stored)


@pytest.mark.parametrize(
    ("out", "folder"),
    [
        ("empty", "empty"),
        ("empty/.", "empty"),
        ("link", "empty"),
        ("new", "other/new"),
        ("~/p", "p"),
    ],
)
def test_folder_of_an_export(
    out: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty folder stays the same, as it may be a mounted disk, and a link stays a link."""
    plan = tiny.plan(tiny.save("olmoe", tmp_path / "model"), 0.5)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "new").symlink_to("other/new")
    inode = (tmp_path / "empty").stat().st_ino
    monkeypatch.chdir(tmp_path / "empty")
    path = "." if out == "empty/." else out if out.startswith("~") else tmp_path / out
    assert export(tmp_path / "model", plan, path) == tmp_path / folder
    assert tiny.load(tmp_path / folder)
    assert not list(tmp_path.rglob("*.unfinished"))
    assert (tmp_path / "empty").stat().st_ino == inode
    with pytest.raises(UserError, match=f"{folder} exists already"):
        export(tmp_path / "model", plan, path)
    with pytest.raises(UserError, match="out cannot be made"):
        export(tmp_path / "model", plan, tmp_path / folder / "config.json/out")


@pytest.mark.parametrize("encoding", ["gbk", "utf-8-sig", "utf-16"])
def test_card_of_the_original_may_have_any_encoding(encoding: str, tmp_path: Path) -> None:
    plan = tiny.plan(tiny.save("olmoe", tmp_path / "model"), 0.5)
    (tmp_path / "model/README.md").write_text("---\nlicense: mit\n---\n模型", encoding)
    export(tmp_path / "model", plan, tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlicense: mit\n---\n\n# model, pruned")


def test_full_disk_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tiny.plan(tiny.save("olmoe", tmp_path / "model"), 0.5)
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        export(tmp_path / "model", plan, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


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


EXPORT_STEP = """
import pickle, sys
sys.path.insert(0, sys.argv[1])  # where the example's plan step is
import moe_lab.pruning.export  # loaded by the step, and no memory of its work
from moe_lab.study.steps import perform
def peak():
    status = open("/proc/self/status")
    return int(next(line.split()[1] for line in status if line.startswith("VmHWM")))
before = peak()  # mostly libraries, of which the kernel maps as much as it likes
perform(*pickle.load(open(sys.argv[2], "rb")))
assert not {"torch", "transformers"} & set(sys.modules)
print(peak() - before)
"""
"""Prints by how many kB the memory of the process has grown."""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads peak memory from /proc")
@pytest.mark.parametrize(
    ("way", "shape", "share"),
    [
        ("even", "masked", 1),
        ("uneven", "natural", None),
        ("ragged", "natural", 1.0),
    ],
)
def test_export_step_loads_no_torch_and_needs_little_memory(
    way: str, shape: str, share: float | None, large: tuple[Path, Any], tmp_path: Path
) -> None:
    """In a process of its own, whose memory grows by far less than the 151 MB it reads."""
    source, model = large
    (tmp_path / "plan").mkdir()
    random_plan(model, way, share=share).save(tmp_path / "plan" / "plan.json")
    file = tmp_path / "work.pkl"
    file.write_bytes(pickle.dumps(export_step_and_files(source, tmp_path, ExportConfig(shape))))
    command = [sys.executable, "-c", EXPORT_STEP, str(Path(__file__).parents[1]), str(file)]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(process.stdout) < 10_000  # kB
    written = tmp_path / "scratch" / "checkpoint" / "model.safetensors"
    assert written.stat().st_size > (source / "model.safetensors").stat().st_size / 3
    assert not (tmp_path / "partial").exists()
    written.unlink()


# ---- verify=true

ROUNDING = TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("name", "way", "shape", "misalignment", "bound"),
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
def test_verify_finds_no_difference_beyond_rounding(
    name: str, way: str, shape: str, misalignment: int, bound: float, tmp_path: Path
) -> None:
    plan = random_plan(tiny.save(name, tmp_path / "model"), way)
    rewrite(tmp_path / "model", lambda tensors: None, misalignment)
    export(tmp_path / "model", plan, tmp_path / "export", shape=shape)
    assert verify(tmp_path / "model", plan, tmp_path / "export") <= bound


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
    """Exchange the weights of two experts of layer 1."""
    for part in ("gate_proj", "up_proj", "down_proj"):
        first, second = (f"model.layers.1.mlp.experts.{index}.{part}.weight" for index in (1, 2))
        tensors[first], tensors[second] = tensors[second], tensors[first]


def flip(tensors: dict[str, torch.Tensor]) -> None:
    """Reverse the order of the router's rows of layer 1."""
    tensors[GATE] = tensors[GATE].flip(0)


@pytest.mark.parametrize(("channels", "damage"), [(False, swap), (True, swap), (False, flip)])
def test_verify_finds_wrong_weights_below_a_large_residual(
    channels: bool, damage: Callable[[Any], None], tmp_path: Path
) -> None:
    """One number of each hidden state is as large as in trained models; experts do not add to
    it."""
    model = tiny.save("qwen3_moe", tmp_path / "model", dtype=torch.bfloat16)
    plan = random_plan(model, "one width", width=16) if channels else tiny.plan(model, 0.25)
    rewrite(tmp_path / "model", grow)
    export(tmp_path / "model", plan, tmp_path / "export")
    clean = verify(tmp_path / "model", plan, tmp_path / "export")
    assert clean <= (TOLERANCE[torch.bfloat16] / 2 if channels else 0)
    rewrite(tmp_path / "export", damage)
    with pytest.raises(
        UserError, match=r"decoder layer 1 of .*export gives something else than the masked model"
    ):
        verify(tmp_path / "model", plan, tmp_path / "export")


def test_verify_calls_experts_in_a_latent_space(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(tiny.registry_config("nemotron_h"))
    tiny.randomize(model)
    model.save_pretrained(tmp_path / "model")
    plan = random_plan(model, "uneven")
    assert verify(tmp_path / "model", plan, export(tmp_path / "model", plan, tmp_path / "out")) == 0
