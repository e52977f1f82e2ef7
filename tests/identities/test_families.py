"""What moe_lab says of a family's experts, in memory and on disk, is what transformers computes with them."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import naive
import pytest
import tiny
import torch
from safetensors.torch import load_file

from moe_lab.errors import UserError
from moe_lab.models.checkpoint import open_checkpoint
from moe_lab.models.discover import MoELayer, moe_layers
from moe_lab.models.families import FAMILIES, Family, family_of, split
from moe_lab.statistics import weights


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
def test_files_hold_what_the_memory_holds(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each projection of each expert is found once and equals that in memory; and so do sums over the files."""
    model = naive.model(name)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    tensors = {name: tensor for file in tmp_path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    layers = {layer.index: layer for layer in moe_layers(model)}
    found: dict[tuple[int, int, str], torch.Tensor] = {}
    kinds: dict[int, list[str]] = {index: [] for index in layers}
    for path, place in layers[max(layers)].family.places(tensors).items():
        kinds[place.layer].append(place.kind)
        if place.axes is None:
            assert place.kind in ("router", "vector", "shared"), path
            continue
        stack = tensors[path] if place.expert is None else tensors[path][None]
        for number, one in enumerate(stack):
            for role, view in split(one, place.axes).items():
                key = place.layer, number if place.expert is None else place.expert, role
                assert key not in found
                found[key] = view
    assert all(of_layer.count("router") == 1 for of_layer in kinds.values())
    for index, layer in layers.items():
        for expert in range(layer.n_experts):
            for role, view in layer.projections(expert).items():
                assert torch.equal(found.pop((index, expert, role)), view), (index, expert, role)
    assert not found
    _check_sums(tmp_path, list(layers.values()), monkeypatch)


def _check_sums(folder: Path, layers: list[MoELayer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over the weights in `folder` are those of the weights in memory, in fp64, also block by block."""
    by_expert, by_channel = (
        weights.weigh_experts(folder, fingerprint={}),
        weights.weigh_channels(folder, fingerprint={}),
    )
    compared = [weights.compare_experts(folder, fingerprint={})]
    monkeypatch.setattr(weights, "BLOCK", 100)
    compared.append(weights.compare_experts(folder, fingerprint={}))
    for sums in (by_expert, by_channel, *compared):
        assert list(sums.layers) == [layer.index for layer in layers]
    for layer in layers:
        experts = [layer.projections(expert) for expert in range(layer.n_experts)]
        matrices = {role: torch.stack([one[role] for one in experts]).double() for role in ("gate", "up", "down")}
        flat = torch.cat([matrix.flatten(1) for matrix in matrices.values()], 1)
        inward = torch.cat((matrices["gate"].flatten(1), matrices["up"].flatten(1)), 1)
        expected: dict[str, Any] = {"abs_sum": flat.abs().sum(1), "square_sum": flat.square().sum(1)}
        expected |= {f"channel_{role}_square": matrix.square().sum(2) for role, matrix in matrices.items()}
        expected["channel_down_abs"] = matrices["down"].abs().sum(2)
        sums = by_expert.layers[layer.index] | by_channel.layers[layer.index]
        assert sums.pop("count") == flat.shape[1] and sums.keys() == expected.keys()
        expected["weight_distance_square"] = (inward[:, None] - inward).square().sum(2)
        for one in compared:
            for key, value in (sums | one.layers[layer.index]).items():
                assert value.dtype == torch.float64 and naive.relative(value, expected[key]) < 1e-6, key


def test_classes_say_what_the_source_of_transformers_says() -> None:
    """Of every family whose decorator of experts has arguments, and of no other."""
    stated = {}
    models = Path(str(find_spec("transformers").origin)).with_name("models")  # type: ignore[union-attr]
    for file in models.glob("*/modeling_*.py"):
        for arguments in re.findall(r"^@use_experts_implementation\((.*?)\)\nclass", file.read_text(), re.M | re.S):
            given = dict(re.findall(r"(\w+)=(True|False)", arguments))
            stated[file.parent.name] = {name: value == "True" for name, value in given.items()}
    usual = {
        "is_transposed": False,
        "is_concatenated": True,
        "has_gate": True,
        "has_bias": False,
        "has_post_expert_norm": False,
    }
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
        of_classes[family.kinds[0]] = {name: mark for name, mark in marks.items() if mark != usual[name]}
        assert all(family_of(kind) is family for kind in family.kinds)
    installed = {kind: marks for kind, marks in of_classes.items() if marks and (models / kind).is_dir()}
    assert installed == {kind: marks for kind, marks in stated.items() if marks}


def test_several_moe_blocks_in_a_decoder_layer_are_refused() -> None:
    with pytest.raises(UserError, match="several MoE blocks"):
        Family().places(f"model.layers.0.{block}.experts.0.w1.weight" for block in ("moe", "mlp"))


def test_layers_that_predict_several_tokens_are_no_layers_of_the_decoder(tmp_path: Path) -> None:
    tiny.save("olmoe", tmp_path)
    names = list(open_checkpoint(tmp_path).tensors)
    extra = ["mtp.layers.0.mlp.experts.0.up_proj.weight", "model.layers.3.mlp.experts.0.up_proj.weight"]
    places = Family().places([*names, *extra, "model.layers.3.eh_proj.weight"])
    assert places.keys() == Family().places(names).keys()
