"""A plan gives one model, whether it masks a model, prunes it, or is exported and loaded again; and
what moe_lab says of a family's experts, in memory and on disk, is what transformers computes with
them."""

import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import naive
import pytest
import tiny
import torch
from identities.plans import KINDS, random_plan
from safetensors.torch import load_file, save_file

from moe_lab.errors import UserError
from moe_lab.models.checkpoint import open_checkpoint
from moe_lab.models.discover import MoELayer, moe_layers
from moe_lab.models.families import (
    DISK_ROUTER_WEIGHTS,
    DISK_ROUTING_VECTORS,
    FAMILIES,
    Family,
    family_of,
    split,
)
from moe_lab.models.load import load_model
from moe_lab.models.streamed import open_streamed
from moe_lab.pruning.cost import size
from moe_lab.pruning.export import export
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune
from moe_lab.statistics import Statistics, weights

WAYS = [
    (name, kind, way) for name in tiny.ARCHITECTURES for kind, ways in KINDS.items() for way in ways
]


def answers(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and tokens that are written with a cache."""
    with torch.no_grad():
        logits = model.eval()(input_ids=tiny.tokens()).logits
    return logits, model.generate(
        tiny.tokens(2, 5), max_new_tokens=5, do_sample=False, eos_token_id=None
    )


@pytest.mark.parametrize(("name", "kind", "way"), WAYS)
def test_masked_pruned_and_exported_are_one_model(
    name: str, kind: str, way: str, tmp_path: Path
) -> None:
    """To the bit; but masked channels are multiplied in another order than those that are left."""
    model = tiny.save(name, tmp_path / "model", shard="60KB")
    plan = random_plan(model, way)
    before = answers(model)
    if kind != "experts" and moe_layers(model)[0].family.unfit:
        for refused in (lambda: mask(model, plan).__enter__(), lambda: prune(model, plan)):
            with pytest.raises(UserError, match="cannot be removed"):
                refused()
        with pytest.raises(UserError, match="cannot be removed"):
            export(tmp_path / "model", plan, tmp_path / "out")
        return
    with mask(model, plan):
        masked = answers(model)
    pruned = prune(model, plan)
    found = answers(pruned)
    assert not torch.equal(masked[0], before[0]) or way == "uneven"
    if kind == "experts":
        assert torch.equal(found[0], masked[0])
    assert (found[0] - masked[0]).abs().max() <= 1e-5 and torch.equal(found[1], masked[1])
    out = export(tmp_path / "model", plan, tmp_path / "out")
    _check_loaded(tiny.load(out, trust_remote_code=True), pruned, found)
    assert Plan.load(out / "plan.json") == plan
    with torch.device("meta"):
        empty = type(model)(model.config)
    assert size(empty, prune(empty, plan))["parameters"] == sum(
        map(torch.numel, pruned.parameters())
    )
    assert all(torch.equal(*pair) for pair in zip(answers(model), before, strict=True))
    if way == "even":
        shapes = {
            name: tensor.shape for name, tensor in type(model)(pruned.config).state_dict().items()
        }
        assert shapes == {name: tensor.shape for name, tensor in pruned.state_dict().items()}


def _check_loaded(loaded: Any, pruned: Any, found: tuple[torch.Tensor, torch.Tensor]) -> None:
    theirs = loaded.state_dict()
    ours = pruned.state_dict()
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[key], ours[key]) for key in ours)
    assert all(torch.equal(*pair) for pair in zip(answers(loaded), found, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["olmoe", "deepseek_v3:grouped", "granitemoe"])
def test_an_export_in_half_precision_is_the_pruned_model(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Sums of merged experts are rounded alike, to nearest."""
    model = tiny.save(name, tmp_path / "model", dtype=dtype)
    for way in (way for ways in KINDS.values() for way in ways):
        plan = random_plan(model, way, seed=1)
        pruned = prune(model, plan)
        loaded = tiny.load(export(tmp_path / "model", plan, tmp_path / way), trust_remote_code=True)
        assert loaded.dtype is dtype
        _check_loaded(loaded, pruned, answers(pruned))


@pytest.mark.parametrize("way", [way for ways in KINDS.values() for way in ways])
@pytest.mark.parametrize(
    "types",
    [
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.bfloat16),
    ],
)
def test_experts_stored_in_several_precisions(
    types: tuple[torch.dtype, ...], way: str, tmp_path: Path
) -> None:
    """Copies are exact, and sums are rounded to the type that the file has for the expert that
    stays."""
    tiny.save("olmoe", tmp_path / "model")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if match := re.search(r"experts\.(\d+)\.(\w)", name):
                tensors[name] = tensor.to(types[(int(match[1]) + (match[2] == "u")) % 2])

    tiny.rewrite(tmp_path / "model", change)
    model = tiny.load(tmp_path / "model", dtype=torch.float32)
    plan = random_plan(model, way, seed=1)
    out = export(tmp_path / "model", plan, tmp_path / "out")
    loaded = tiny.load(out, trust_remote_code=True, dtype=torch.float32)
    rounding = 2**-8 if way.startswith("merged") else 0
    expected = prune(model, plan).state_dict()
    for name, tensor in loaded.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=rounding, atol=rounding / 1000)


ROUTING = tuple(f".{name}" for name in (*DISK_ROUTER_WEIGHTS, *DISK_ROUTING_VECTORS))


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_routing_keeps_the_precision_of_the_files(name: str, tmp_path: Path) -> None:
    """In a model that is stored and loaded in bfloat16 otherwise, whole, by layers, masked, pruned
    and exported."""
    folder = tmp_path / "model"
    narrow = {"dtype": "bfloat16", "trust_remote_code": True}
    tiny.save(name, folder)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for path, tensor in tensors.items():
            tensors[path] = tensor + 7 if path.endswith(ROUTING) and "bias" in path else tensor
            tensors[path] = tensors[path].to(
                torch.float32 if path.endswith(ROUTING) else torch.bfloat16
            )

    tiny.rewrite(folder, change)
    stored = {
        path: tensor for path, tensor in tiny.weights(folder).items() if path.endswith(ROUTING)
    }
    model = load_model(tiny.settings(folder, **narrow))[0]
    by_layer = open_streamed(tiny.settings(folder, **narrow))[0]
    for layer in moe_layers(model):
        in_files = {
            tensor.numel(): tensor for path, tensor in stored.items() if f".{layer.index}." in path
        }
        for _ in range(2):
            with by_layer.layer(layer.index):
                for part in (*layer.routing, *by_layer.moe[layer.index].routing):
                    assert part.tensor.dtype == torch.float32
                    assert torch.equal(
                        part.tensor, in_files[part.tensor.numel()].view_as(part.tensor)
                    )
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16
    plan = random_plan(model, "even")
    expected = tiny.logits(prune(model, plan))
    with mask(model, plan):
        assert torch.equal(tiny.logits(model), expected)
    exported, _ = load_model(tiny.settings(export(folder, plan, tmp_path / "out"), **narrow))
    assert torch.equal(tiny.logits(exported), expected)


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_experts_compute_what_the_model_computes(name: str) -> None:
    """To the bit: each expert alone, with a gate of 1."""
    for layer in moe_layers(naive.model(name)):
        states = torch.randn(5, layer.hidden, generator=torch.Generator().manual_seed(0))
        states = states.to(layer.experts.down_proj.dtype)
        for expert in range(layer.n_experts):
            index = torch.full((5, 1), expert)
            with torch.no_grad():
                expected = layer.experts(states, index, torch.ones(5, 1, dtype=states.dtype))
            assert torch.equal(layer.expert_output(states, expert), expected)


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_files_hold_what_the_memory_holds(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each projection of each expert is found once and equals that in memory; and so do sums over
    the files."""
    model = naive.model(name)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    tensors = {
        name: tensor
        for file in tmp_path.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    layers = {layer.index: layer for layer in moe_layers(model)}
    found: dict[tuple[int, int, str], torch.Tensor] = {}
    kinds: dict[int, list[str]] = {index: [] for index in layers}
    for path, block_tensor in layers[max(layers)].family.block_tensors(tensors).items():
        kinds[block_tensor.layer].append(block_tensor.kind)
        if block_tensor.axes is None:
            assert block_tensor.kind in ("router", "vector", "shared"), path
            continue
        stack = tensors[path] if block_tensor.expert is None else tensors[path][None]
        for number, one in enumerate(stack):
            for role, view in split(one, block_tensor.axes).items():
                key = (
                    block_tensor.layer,
                    number if block_tensor.expert is None else block_tensor.expert,
                    role,
                )
                assert key not in found
                found[key] = view
    assert all(of_layer.count("router") == 1 for of_layer in kinds.values())
    for index, layer in layers.items():
        for expert in range(layer.n_experts):
            for role, view in layer.projections(expert).items():
                assert torch.equal(found.pop((index, expert, role)), view), (index, expert, role)
    assert not found
    for source in (tmp_path, model):
        with monkeypatch.context() as patches:
            _check_sums(source, list(layers.values()), patches)


def _check_sums(
    source: weights.Source, layers: list[MoELayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums over the weights of `source` are those of the weights in memory, in fp64, also block by
    block."""
    by_expert = weights.weigh_experts(source)
    by_channel = weights.weigh_channels(source)
    compared = [weights.compare_experts(source)]
    monkeypatch.setattr(weights, "BLOCK", 100)
    compared.append(weights.compare_experts(source))
    for sums in (by_expert, by_channel, *compared):
        assert list(sums.layers) == [layer.index for layer in layers]
    for layer in layers:
        experts = [layer.projections(expert) for expert in range(layer.n_experts)]
        matrices = {
            role: torch.stack([one[role] for one in experts]).double()
            for role in ("gate", "up", "down")
        }
        flat = torch.cat([matrix.flatten(1) for matrix in matrices.values()], 1)
        inward = torch.cat((matrices["gate"].flatten(1), matrices["up"].flatten(1)), 1)
        expected: dict[str, Any] = {
            "abs_sum": flat.abs().sum(1),
            "square_sum": flat.square().sum(1),
        }
        expected |= {
            f"channel_{role}_square": matrix.square().sum(2) for role, matrix in matrices.items()
        }
        expected["channel_down_abs"] = matrices["down"].abs().sum(2)
        sums = by_expert.layers[layer.index] | by_channel.layers[layer.index]
        assert sums.pop("count") == flat.shape[1] and sums.keys() == expected.keys()
        expected["weight_distance_square"] = (inward[:, None] - inward).square().sum(2)
        for one in compared:
            for key, value in (sums | one.layers[layer.index]).items():
                assert (
                    value.dtype == torch.float64 and naive.relative(value, expected[key]) < 1e-6
                ), key


def test_classes_say_what_the_source_of_transformers_says() -> None:
    """Of every family whose decorator of experts has arguments, and of no other."""
    stated = {}
    models = Path(str(find_spec("transformers").origin)).with_name("models")  # type: ignore[union-attr]
    for file in models.glob("*/modeling_*.py"):
        for arguments in re.findall(
            r"^@use_experts_implementation\((.*?)\)\nclass", file.read_text(), re.M | re.S
        ):
            given = dict(re.findall(r"(\w+)=(True|False)", arguments))
            stated[file.parent.name] = {name: value == "True" for name, value in given.items()}
    usual = dict.fromkeys(("is_transposed", "has_bias", "has_post_expert_norm"), False)
    usual |= dict.fromkeys(("is_concatenated", "has_gate"), True)
    of_classes = {}
    for family in FAMILIES:
        first = next(iter(family.stacks.values()))
        marks = {
            "is_transposed": first.channels == -1,
            "is_concatenated": not first.interleaved,
            "has_gate": "gate" in first.roles,
            "has_bias": "down_bias" in family.roles,
            "has_post_expert_norm": family.unfit == "are followed by a norm",
        }
        of_classes[family.kinds[0]] = {
            name: mark for name, mark in marks.items() if mark != usual[name]
        }
        assert all(family_of(kind) is family for kind in family.kinds)
    installed = {
        kind: marks for kind, marks in of_classes.items() if marks and (models / kind).is_dir()
    }
    assert installed == {kind: marks for kind, marks in stated.items() if marks}


def test_layers_that_predict_tokens_are_not_of_the_decoder_and_have_one_block_of_experts(
    tmp_path: Path,
) -> None:
    tiny.save("olmoe", tmp_path)
    names = list(open_checkpoint(tmp_path).tensors)
    extra = [
        "mtp.layers.0.mlp.experts.0.up_proj.weight",
        "model.layers.3.mlp.experts.0.up_proj.weight",
    ]
    block_tensors = Family().block_tensors([*names, *extra, "model.layers.3.eh_proj.weight"])
    assert block_tensors.keys() == Family().block_tensors(names).keys()
    with pytest.raises(UserError, match="several MoE blocks"):
        Family().block_tensors(
            f"model.layers.0.{block}.experts.0.w1.weight" for block in ("moe", "mlp")
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_stacked_experts_are_summed_at_once(dtype: torch.dtype) -> None:
    stack = torch.randn(5, 70, 2048, generator=torch.Generator().manual_seed(0)).to(dtype)
    for sums, power in zip(weights.rows_absolute_and_square(stack), (1, 2), strict=True):
        assert naive.relative(sums, stack.double().abs().pow(power).sum((1, 2))) < 1e-6


READS = (weights.weigh_experts, weights.weigh_channels, weights.compare_experts)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["olmoe", "gpt_oss"])
def test_cuda_sums_are_those_of_the_cpu(name: str, tmp_path: Path) -> None:
    naive.model(name).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="60KB")
    for read in READS:
        expected, found = (read(tmp_path, device=device).layers for device in ("cpu", "cuda"))
        assert expected.keys() == found.keys()
        for layer, named in expected.items():
            assert named.keys() == found[layer].keys()
            assert all(
                naive.relative(found[layer][statistic], sums) < 1e-6
                for statistic, sums in named.items()
            )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    naive.model("olmoe").save_pretrained(tmp_path)
    return tmp_path


UP = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize(
    ("value", "named"),
    [(torch.inf, r"layer 1, expert 3: weights .*\.up_proj"), (None, "layer"), ("fp8", "F8_E4M3")],
)
def test_weights_that_are_broken_missing_or_quantised_are_named(
    read: Callable[..., Statistics], value: object, named: str, folder: Path
) -> None:
    matrix = torch.ones(24, 32)
    if isinstance(value, float):
        matrix[3, 4] = value
    broken = matrix.to(torch.float8_e4m3fn) if value == "fp8" else matrix
    tiny.rewrite(
        folder, lambda tensors: tensors.pop(UP) if value is None else tensors.update({UP: broken})
    )
    with pytest.raises(UserError, match=named):
        read(folder)


@pytest.mark.parametrize("read", READS)
def test_folders_without_experts_are_refused(
    read: Callable[..., Statistics], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "num_hidden_layers": 2})
    )
    save_file(
        {"model.layers.0.mlp.up_proj.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(UserError, match="no weights of routed experts"):
        read(tmp_path)


def test_projections_of_several_widths_or_unknown_names_are_refused(folder: Path) -> None:
    experts = "model.layers.{}.mlp.experts.{}.{}_proj.weight".format
    narrow = {experts(1, number, "down"): torch.ones(32, 23) for number in range(16)}
    tiny.rewrite(folder, lambda tensors: tensors.update(narrow))
    with pytest.raises(UserError, match="experts of layer 1 have unequal widths"):
        weights.weigh_channels(folder)
    tiny.rewrite(folder, lambda tensors: tensors.update({experts(0, 0, "side"): torch.ones(4, 4)}))
    with pytest.raises(UserError, match=r"side_proj\.weight"):
        weights.weigh_channels(folder)
