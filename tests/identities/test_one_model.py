"""A masked, a pruned and an exported model are the same model under a plan; and the layouts of
experts in memory and on disk that moe_lab knows are those of transformers."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import naive
import pytest
import tiny
import torch
import transformers
from identities.plans import KINDS, check_refused, random_plan
from safetensors.torch import save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from moe_lab.errors import UserError
from moe_lab.models.checkpoint import open_checkpoint
from moe_lab.models.discover import MoELayer, moe_layers
from moe_lab.models.families import (
    FAMILIES,
    Family,
    family_of,
    split,
)
from moe_lab.models.load import load_model
from moe_lab.models.streamed import open_streamed
from moe_lab.pruning.cost import parameters_and_bytes
from moe_lab.pruning.export import export
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune
from moe_lab.statistics import Statistics, weights

WAYS = [way for ways in KINDS.values() for way in ways]


FORMS = tiny.one_of_each(tiny.structure)
CASES = [
    (name, kind, way)
    for name in tiny.ARCHITECTURES
    for kind, ways in KINDS.items()
    for way in ways
    # a plan in whose layers both the numbers of experts and their weights differ, of each family
    if way == "merged rows" or name in tiny.one_of_each(tiny.arithmetic)
]


def is_possible(name: str, kind: str) -> bool:
    return kind == "experts" or not family_of(tiny.config(name).model_type).channel_obstacle


VARIANTS = [case for case in CASES if is_possible(*case[:2])]
REFUSED = [(name, way) for name, kind, way in CASES if not is_possible(name, kind)]
Outputs = tuple[torch.Tensor, torch.Tensor]


def outputs(model: Any) -> Outputs:
    """Logits, and tokens that are generated with a cache."""
    with torch.no_grad():
        logits = model.eval()(input_ids=tiny.tokens()).logits
    return logits, model.generate(
        tiny.tokens(2, 5), max_new_tokens=5, do_sample=False, eos_token_id=None
    )


def are_equal(first: Outputs, second: Outputs) -> bool:
    return all(torch.equal(*pair) for pair in zip(first, second, strict=True))


@pytest.mark.parametrize(("name", "kind", "way"), VARIANTS)
def test_a_masked_a_pruned_and_an_exported_model_are_the_same(
    name: str, kind: str, way: str, tmp_path: Path
) -> None:
    """Equal to the bit, except where channels are masked: they are multiplied in another order.
    Masking and pruning leave the model as it was, and the size of the pruned one is known without
    weights."""
    model = tiny.save(name, tmp_path / "model", shard="60KB")
    plan = random_plan(model, way)
    original = outputs(model)
    with mask(model, plan):
        masked = outputs(model)
    pruned_model = prune(model, plan)
    pruned = outputs(pruned_model)
    assert not torch.equal(masked[0], original[0]) or way == "uneven"
    if kind == "experts":
        assert torch.equal(pruned[0], masked[0])
    assert (pruned[0] - masked[0]).abs().max() <= 1e-5
    assert torch.equal(pruned[1], masked[1])

    checkpoint = export(tmp_path / "model", plan, tmp_path / "out")
    assert_same_model(tiny.load(checkpoint, trust_remote_code=True), pruned_model, pruned)
    assert Plan.load(checkpoint / "plan.json") == plan
    assert are_equal(outputs(model), original)

    with torch.device("meta"):
        empty = type(model)(model.config)
    parameters = sum(map(torch.numel, pruned_model.parameters()))
    assert parameters_and_bytes(empty, prune(empty, plan))["parameters"] == parameters


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_the_config_of_an_evenly_pruned_model_gives_its_shapes(name: str) -> None:
    model = tiny.build(name)
    pruned = prune(model, random_plan(model, "even"))
    shapes, expected = (
        {path: tensor.shape for path, tensor in network.state_dict().items()}
        for network in (type(model)(pruned.config), pruned)
    )
    assert shapes == expected


@pytest.mark.parametrize(("name", "way"), REFUSED)
def test_models_that_cannot_lose_channels_refuse_such_plans(
    name: str, way: str, tmp_path: Path
) -> None:
    model = tiny.save(name, tmp_path / "model", shard="60KB")
    plan = random_plan(model, way)
    with pytest.raises(UserError, match="cannot be removed"), mask(model, plan):
        pass
    with pytest.raises(UserError, match="cannot be removed"):
        prune(model, plan)
    check_refused(tmp_path / "model", "cannot be removed", plan)


def assert_same_model(loaded: Any, pruned: Any, expected_outputs: Outputs) -> None:
    weights = loaded.state_dict()
    expected = pruned.state_dict()
    assert weights.keys() == expected.keys()
    assert not tiny.differing(weights, expected)
    assert are_equal(outputs(loaded), expected_outputs)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("olmoe", torch.float16),
        ("deepseek_v3:grouped", torch.bfloat16),
        ("granitemoe", torch.bfloat16),
    ],
)
def test_an_export_in_half_precision_is_the_pruned_model(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Sums of merged experts are rounded alike, to nearest."""
    model = tiny.save(name, tmp_path / "model", dtype=dtype)
    for way in WAYS:
        plan = random_plan(model, way, seed=1)
        pruned = prune(model, plan)
        loaded = tiny.load(export(tmp_path / "model", plan, tmp_path / way), trust_remote_code=True)
        assert loaded.dtype is dtype
        assert_same_model(loaded, pruned, outputs(pruned))


@pytest.mark.parametrize(
    ("way", "first_type"),
    [
        *((way, torch.float32) for way in WAYS),
        ("merged", torch.float16),
        ("merged rows", torch.float64),
    ],
)
def test_experts_stored_in_several_precisions(
    first_type: torch.dtype, way: str, tmp_path: Path
) -> None:
    """Copies are exact, and sums are rounded to the type that the file has for the retained
    expert."""
    tiny.save("olmoe", tmp_path / "model")
    types = (first_type, torch.bfloat16)

    def alternate_types(tensors: dict[str, torch.Tensor]) -> None:
        for path, tensor in tensors.items():
            if match := re.search(r"experts\.(\d+)\.(\w)", path):
                tensors[path] = tensor.to(types[(int(match[1]) + (match[2] == "u")) % 2])

    tiny.rewrite(tmp_path / "model", alternate_types)
    model = tiny.load(tmp_path / "model", dtype=torch.float32)
    plan = random_plan(model, way, seed=1)
    checkpoint = export(tmp_path / "model", plan, tmp_path / "out")
    loaded = tiny.load(checkpoint, trust_remote_code=True, dtype=torch.float32)
    rounding = 2**-8 if way.startswith("merged") else 0
    expected = prune(model, plan).state_dict()
    for path, tensor in loaded.state_dict().items():
        torch.testing.assert_close(tensor, expected[path], rtol=rounding, atol=rounding / 1000)


ROUTING = re.compile(
    r"\.(gate|router)\.((layer|wg|gate)\.)?weight$|(router\.|correction_|expert_)bias$"
)


NARROW = {"dtype": "bfloat16", "trust_remote_code": True}


def save_in_bfloat16(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Write a model in bfloat16 except for its routing, whose biases are moved by 7; the tensors of
    its routing, by path."""
    tiny.save(name, folder)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for path, tensor in tensors.items():
            is_routing = ROUTING.search(path)
            moved = tensor + 7 if is_routing and "bias" in path else tensor
            tensors[path] = moved.to(torch.float32 if is_routing else torch.bfloat16)

    tiny.rewrite(folder, change)
    return {path: tensor for path, tensor in tiny.weights(folder).items() if ROUTING.search(path)}


@pytest.mark.parametrize("name", FORMS)
def test_routing_is_loaded_in_the_precision_of_the_files(name: str, tmp_path: Path) -> None:
    """The other tensors are loaded in bfloat16. The model is loaded at once, and layer by layer
    twice."""
    routing = save_in_bfloat16(name, tmp_path)
    model = load_model(tiny.settings(tmp_path, **NARROW))[0]
    streamed = open_streamed(tiny.settings(tmp_path, **NARROW))[0]
    for layer in moe_layers(model) * 2:
        expected = {
            tensor.numel(): tensor for path, tensor in routing.items() if f".{layer.index}." in path
        }
        with streamed.layer(layer.index):
            for part in (*layer.routing, *streamed.moe_layers[layer.index].routing):
                tensor = part.tensor
                assert tensor.dtype == torch.float32
                assert torch.equal(tensor, expected[tensor.numel()].view_as(tensor))
    assert model.get_input_embeddings().weight.dtype == torch.bfloat16


@pytest.mark.parametrize("name", FORMS)
def test_masks_and_exports_keep_the_precision_of_routing(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_in_bfloat16(name, folder)
    model = load_model(tiny.settings(folder, **NARROW))[0]
    plan = random_plan(model, "even")
    expected = tiny.logits(prune(model, plan))
    with mask(model, plan):
        assert torch.equal(tiny.logits(model), expected)
    exported, _ = load_model(tiny.settings(export(folder, plan, tmp_path / "out"), **NARROW))
    assert torch.equal(tiny.logits(exported), expected)


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_experts_compute_what_the_model_computes(name: str) -> None:
    """Each expert alone, with a gate of 1, gives the same bits."""
    for layer in moe_layers(naive.model(name)):
        states = torch.randn(5, layer.hidden, generator=torch.Generator().manual_seed(0))
        states = states.to(layer.experts.down_proj.dtype)
        for expert in range(layer.n_experts):
            index = torch.full((5, 1), expert)
            with torch.no_grad():
                expected = layer.experts(states, index, torch.ones(5, 1, dtype=states.dtype))
            assert torch.equal(layer.expert_output(states, expert), expected)


Projections = dict[tuple[int, int, str], torch.Tensor]


def projections_of(family: Family, tensors: dict[str, torch.Tensor]) -> Projections:
    """(layer, expert, role) -> projection in the tensors of a checkpoint, in which each is once."""
    projections: Projections = {}
    for path, expert_tensor in family.expert_tensors(tensors).items():
        assert expert_tensor.axes is not None, path
        is_stack = expert_tensor.expert is None
        for number, matrix in enumerate(tensors[path] if is_stack else [tensors[path]]):
            expert = number if expert_tensor.expert is None else expert_tensor.expert
            for role, view in split(matrix, expert_tensor.axes).items():
                assert (expert_tensor.layer, expert, role) not in projections
                projections[expert_tensor.layer, expert, role] = view
    return projections


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_files_have_the_projections_of_the_model(name: str, tmp_path: Path) -> None:
    layers = save_naive(name, tmp_path)
    projections = projections_of(layers[-1].family, tiny.weights(tmp_path))
    for layer in layers:
        for expert in range(layer.n_experts):
            for role, expected in layer.projections(expert).items():
                key = (layer.index, expert, role)
                assert torch.equal(projections.pop(key), expected), key
    assert not projections


def save_naive(name: str, folder: Path) -> list[MoELayer]:
    """Write a model into several files; its MoE layers."""
    model = naive.model(name)
    model.save_pretrained(folder, max_shard_size="60KB")
    return moe_layers(model)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("in_memory", [False, True])
def test_sums_over_weights(
    name: str, in_memory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums over the weights of a model or of its files are those of its layers, also block by
    block."""
    layers = save_naive(name, tmp_path)
    source: weights.Source = naive.model(name) if in_memory else tmp_path
    by_expert = weights.expert_weight_sums(source)
    by_channel = weights.channel_weight_sums(source)
    distances = [weights.compare_experts(source)]
    monkeypatch.setattr(weights, "BLOCK", 100)
    distances.append(weights.compare_experts(source))
    for statistics in (by_expert, by_channel, *distances):
        assert list(statistics.layers) == [layer.index for layer in layers]
    for layer in layers:
        expected = expected_sums(layer)
        sums = by_expert.layers[layer.index] | by_channel.layers[layer.index]
        assert sums.keys() == expected.keys() - {"weight_distance_square"}
        assert sums.pop("count") == expected.pop("count")
        for statistics in distances:
            for key, value in (sums | statistics.layers[layer.index]).items():
                assert value.dtype == torch.float64
                assert naive.relative_error(value, expected[key]) < 1e-6, key


def expected_sums(layer: MoELayer) -> dict[str, Any]:
    """Sums over the weights of each expert of a layer, in fp64."""
    experts = [layer.projections(expert) for expert in range(layer.n_experts)]
    matrices = {
        role: torch.stack([projections[role] for projections in experts]).double()
        for role in ("gate", "up", "down")
    }
    flat = torch.cat([matrix.flatten(1) for matrix in matrices.values()], 1)
    inward = torch.cat((matrices["gate"].flatten(1), matrices["up"].flatten(1)), 1)
    return {
        "abs_sum": flat.abs().sum(1),
        "square_sum": flat.square().sum(1),
        **{f"channel_{role}_square": matrix.square().sum(2) for role, matrix in matrices.items()},
        "channel_down_abs": matrices["down"].abs().sum(2),
        "count": flat.shape[1],
        "weight_distance_square": (inward[:, None] - inward).square().sum(2),
    }


TRANSFORMERS_MODELS = Path(transformers.__file__).with_name("models")
DEFAULTS = {
    "is_transposed": False,
    "has_bias": False,
    "is_concatenated": True,
    "has_gate": True,
}
"""Argument of transformers' use_experts_implementation -> default."""


def arguments_in_source() -> dict[str, dict[str, bool]]:
    """Model type -> arguments of the decorator of its experts in the source of transformers."""
    arguments = {}
    decorator = r"^@use_experts_implementation\((.*?)\)\nclass"
    for file in TRANSFORMERS_MODELS.glob("*/modeling_*.py"):
        for text in re.findall(decorator, file.read_text(), re.M | re.S):
            values = dict(re.findall(r"(\w+)=(True|False)", text))
            arguments[file.parent.name] = {name: value == "True" for name, value in values.items()}
    return arguments


def arguments_of(family: Family) -> dict[str, bool]:
    """The arguments that transformers would need for the experts of a family, without defaults."""
    stack = next(iter(family.stacks.values()))
    arguments = {
        "is_transposed": stack.channels == -1,
        "is_concatenated": not stack.interleaved,
        "has_gate": "gate" in stack.roles,
        "has_bias": "down_bias" in family.roles,
    }
    return {name: value for name, value in arguments.items() if value != DEFAULTS[name]}


def test_families_agree_with_the_source_of_transformers() -> None:
    """All families of causal language models whose decorator of experts has arguments, and no
    other."""
    of_families = {family.kind: arguments_of(family) for family in FAMILIES}
    causal = {kind.removesuffix("_text") for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    in_source = arguments_in_source()
    assert {kind: arguments for kind, arguments in of_families.items() if arguments} == {
        kind: arguments for kind, arguments in in_source.items() if arguments and kind in causal
    }


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.kind)
def test_each_kind_has_its_family(family: Family) -> None:
    assert family_of(f"{family.kind}_text") is family_of(family.kind) is family


def test_layers_that_predict_tokens_are_not_of_the_decoder(tmp_path: Path) -> None:
    tiny.save("olmoe", tmp_path)
    paths = list(open_checkpoint(tmp_path).tensors)
    prediction_layers = [
        "mtp.layers.0.mlp.experts.0.up_proj.weight",
        "model.layers.3.mlp.experts.0.up_proj.weight",
        "model.layers.3.eh_proj.weight",
    ]
    expert_tensors = Family().expert_tensors([*paths, *prediction_layers])
    assert expert_tensors.keys() == Family().expert_tensors(paths).keys()


def test_a_layer_has_one_block_of_experts() -> None:
    paths = [f"model.layers.0.{block}.experts.0.w1.weight" for block in ("moe", "mlp")]
    with pytest.raises(UserError, match="several MoE blocks"):
        Family().expert_tensors(paths)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_stacked_experts_are_summed_at_once(dtype: torch.dtype) -> None:
    stack = torch.randn(5, 70, 2048, generator=torch.Generator().manual_seed(0)).to(dtype)
    for sums, power in zip(weights.rows_absolute_and_square(stack), (1, 2), strict=True):
        assert naive.relative_error(sums, stack.double().abs().pow(power).sum((1, 2))) < 1e-6


WEIGHT_READERS = (weights.expert_weight_sums, weights.channel_weight_sums, weights.compare_experts)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["olmoe", "gpt_oss"])
@pytest.mark.parametrize("read", WEIGHT_READERS)
def test_cuda_sums_are_those_of_the_cpu(
    read: Callable[..., Statistics], name: str, tmp_path: Path
) -> None:
    naive.model(name).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="60KB")
    cpu, cuda = (read(tmp_path, device=device).layers for device in ("cpu", "cuda"))
    assert cpu.keys() == cuda.keys()
    for layer, expected in cpu.items():
        assert cuda[layer].keys() == expected.keys()
        for statistic, sums in expected.items():
            assert naive.relative_error(cuda[layer][statistic], sums) < 1e-6


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    naive.model("olmoe").save_pretrained(tmp_path)
    return tmp_path


UP_PROJECTION = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize("read", WEIGHT_READERS)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.inf, r"layer 1, expert 3: weights .*\.up_proj"),
        (None, "layer"),
        ("fp8", "F8_E4M3"),
    ],
)
def test_broken_missing_and_quantised_weights_are_reported(
    read: Callable[..., Statistics], value: object, message: str, folder: Path
) -> None:
    matrix = torch.ones(24, 32)
    if isinstance(value, float):
        matrix[3, 4] = value
    broken = matrix.to(torch.float8_e4m3fn) if value == "fp8" else matrix
    tiny.rewrite(
        folder,
        lambda tensors: (
            tensors.pop(UP_PROJECTION) if value is None else tensors.update({UP_PROJECTION: broken})
        ),
    )
    with pytest.raises(UserError, match=message):
        read(folder)


@pytest.mark.parametrize("read", WEIGHT_READERS)
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


PROJECTION = "model.layers.{}.mlp.experts.{}.{}_proj.weight"


def test_experts_of_unequal_widths_are_refused(folder: Path) -> None:
    narrow = {PROJECTION.format(1, expert, "down"): torch.ones(32, 23) for expert in range(16)}
    tiny.rewrite(folder, lambda tensors: tensors.update(narrow))
    with pytest.raises(UserError, match="experts of layer 1 have unequal widths"):
        weights.channel_weight_sums(folder)


def test_projections_of_unknown_names_are_refused(folder: Path) -> None:
    unknown = {PROJECTION.format(0, 0, "side"): torch.ones(4, 4)}
    tiny.rewrite(folder, lambda tensors: tensors.update(unknown))
    with pytest.raises(UserError, match=r"side_proj\.weight"):
        weights.channel_weight_sums(folder)
