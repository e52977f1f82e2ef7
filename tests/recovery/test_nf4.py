"""Weights in 4 bits, in memory and in exports of recovered models, which a process without moe_lab
loads."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from identities.plans import random_plan
from processes import run_without_moe_lab
from safetensors.torch import load_file, save_file

from moe_lab import errors
from moe_lab.config import ModelConfig, RecoveryConfig
from moe_lab.errors import UserError
from moe_lab.exported_code.ragged import RaggedExperts
from moe_lab.models.discover import is_experts, linear_modules
from moe_lab.models.load import load_model
from moe_lab.pruning.export import export
from moe_lab.pruning.plan import Plan
from moe_lab.recovery import check
from moe_lab.recovery.apply import (
    TENSORS,
    FourBitLinear,
    FourBitMatrices,
    FourBitMatrix,
    quantize,
    recovered,
    storage_bytes,
)
from moe_lab.recovery.export import write_recovered

functional = pytest.importorskip("bitsandbytes.functional")

PARTS = ["experts", "shared_experts", "attention"]


def expert_bytes(model: Any) -> int:
    return sum(storage_bytes(module) for module in model.modules() if is_experts(module))


def dequantized(model: Any, original: Any) -> Any:
    """`original` with the weights that the quantised `model` of the same shape stands for."""
    plain = copy.deepcopy(original)
    for path, experts in plain.named_modules():
        for name, tensor in experts.named_parameters(recurse=False) if is_experts(experts) else ():
            stack = getattr(model.get_submodule(path), name)
            if isinstance(stack, FourBitMatrices):
                matrices = [stack[expert] for expert in range(len(stack))]
                tensor.data = torch.cat(matrices) if tensor.dim() == 2 else torch.stack(matrices)
    for part in ("shared_experts", "attention"):
        for name, module in linear_modules(plain, part):
            if isinstance(result := model.get_submodule(name), FourBitLinear):
                module.weight.data = result.weight()
    return plain


@pytest.mark.parametrize(
    "shape",
    [
        (48, 32),
        (7, 9),
        (300, 64),
        (1, 64),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_error_is_at_most_half_the_widest_gap(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    # rows that end inside a block (32 and 9 columns) are what the CPU kernel of bitsandbytes
    # gets wrong
    # half of the widest gap between two values of NF4 (QLoRA, appendix E)
    widest = (1 - 0.6961928009986877) / 2
    generator = torch.Generator().manual_seed(0)
    matrices = [
        (torch.randn(shape, generator=generator) * scale).to(dtype) for scale in (1, 0.01, 30)
    ]
    stack = FourBitMatrices(map(FourBitMatrix, matrices))
    for number, matrix in enumerate(matrices):
        result = stack[number]
        assert result.shape == matrix.shape
        assert result.dtype == dtype
        largest = torch.cat(
            [b.abs().max().expand(len(b)) for b in matrix.double().reshape(-1).split(64)]
        )
        error = result.double() - matrix
        # a scale, which is rounded too, is off by 2 % at most
        assert bool((error.abs().reshape(-1) <= (widest + 0.02) * largest + 1e-9).all())
        assert float(error.std()) < 0.1 * float(matrix.double().std()), (
            "what NF4 costs normal numbers, and no more"
        )


def test_bits_are_those_of_bitsandbytes() -> None:
    matrix = torch.randn(128, 192, generator=torch.Generator().manual_seed(1))
    packed, state = functional.quantize_4bit(
        matrix, blocksize=64, quant_type="nf4", compress_statistics=True
    )
    second = FourBitMatrix(matrix)
    stack = FourBitMatrices([FourBitMatrix(torch.zeros(4, 64)), second])
    assert torch.equal(second.packed, packed)
    assert torch.equal(second.scales, state.absmax)
    assert torch.equal(second.nested, state.state2.absmax)
    assert torch.equal(second.mean, state.offset)
    assert torch.equal(stack[torch.tensor(1)], functional.dequantize_4bit(packed, state))
    assert not bool(stack[0].any())


@pytest.mark.parametrize("name", [*tiny.one_of_each(tiny.structure), "olmoe ragged"])
def test_model_computes_with_the_weights_it_stands_for(name: str) -> None:
    """Ragged experts, too, of which one is empty."""
    family, _, ragged = name.partition(" ")
    model = tiny.build(family)
    plan = random_plan(model, ragged) if ragged else tiny.plan(model, 0.0)
    plain, stored = (recovered(model, plan, modules=modules, tuned=None) for modules in ((), PARTS))
    result = tiny.logits(stored)
    expected = tiny.logits(plain)
    assert torch.equal(result, tiny.logits(dequantized(stored, plain)))
    assert 1e-3 < float((result - expected).abs().max()) < 8
    names = {key for key in stored.state_dict() if "packed" not in key}
    assert {
        key for key in plain.state_dict() if "router" in key or "gate.w" in key or "head" in key
    } <= names
    assert any(isinstance(module, RaggedExperts) for module in stored.modules()) == bool(ragged)
    assert expert_bytes(stored) < expert_bytes(plain) / (7 if ragged else 5)


def test_quantisation_is_repeatable_and_leaves_its_input() -> None:
    model = tiny.build("deepseek_v3")
    original = tiny.cloned_state(model)
    plan = tiny.plan(model, 0.0)
    once, again = (recovered(model, plan, modules=PARTS[:2], tuned=None) for _ in range(2))
    assert not tiny.differing(model.state_dict(), original)
    assert not tiny.differing(once.state_dict(), again.state_dict())
    shared = {
        key
        for key, value in once.named_parameters()
        if value is dict(model.named_parameters()).get(key)
    }
    assert {"lm_head.weight", "model.layers.1.self_attn.o_proj.weight"} <= shared


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"bitsandbytes: pip install bitsandbytes"):
        check(RecoveryConfig(name="nf4", bits=4))


# ---- exports

CASES = {
    "dora": ("qwen2_moe", "even", True, []),
    "dora_nf4": ("qwen2_moe", "even", True, PARTS),
    "nf4": ("deepseek_v3", "even", False, ["experts", "shared_experts"]),
    "dora_nf4_composite": ("composite", "even", True, ["attention"]),
    "nf4_uneven": ("qwen3_moe", "uneven", False, ["experts", "attention"]),
    "dora_nf4_ragged": ("olmoe", "ragged", True, ["experts", "attention"]),
    "dora_transposed": ("gpt_oss", "even", True, ["experts"]),
}
WITHOUT_MOE_LAB = """
for folder in folders:
    model = load(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=tokens).logits.contiguous()
    save_file({"logits": logits}, folder / "found.safetensors")
"""


def tune(model: Any, plan: Plan, folder: Path) -> Path:
    """Write other weights for the experts, routers and shared experts of the pruned model, as
    fine-tuning does."""
    pruned = recovered(model, plan, modules=(), tuned=None)
    generator = torch.Generator().manual_seed(3)
    changed = {
        name: weight + 0.02 * torch.randn(weight.shape, generator=generator)
        for name, weight in pruned.named_parameters()
        if ("experts." in name and "bias" not in name)
        or "gate.weight" in name
        or "router.weight" in name
    }
    folder.mkdir()
    save_file(changed, folder / TENSORS)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case, exported here and loaded there."""
    root = tmp_path_factory.mktemp("exports")
    save_file({"tokens": tiny.tokens()}, root / "tokens.safetensors")
    for case, (name, plan_case, tuned, modules) in CASES.items():
        source = root.parent / f"source-{case}"
        sizes = {"hidden_size": 64} | (
            {"shared_expert_intermediate_size": 32} if name == "qwen2_moe" else {}
        )
        if name == "composite":
            model = tiny.save_composite(source / "model", **sizes)
        else:
            model = tiny.save(name, source / "model", shard="200KB", **sizes)
        plan = random_plan(model, plan_case)
        files = tune(model, plan, source / "tuned") if tuned else None
        export(source / "model", plan, source / "natural")
        if case == "dora_nf4_ragged":
            shutil.copytree(source / "natural", source.parent / "ragged")
        case_folder = write_recovered(
            source / "natural",
            root / case,
            dtype=torch.float32,
            modules=modules,
            tuned=files,
            sentence="It was tuned.",
        )
        network = recovered(model, plan, modules=modules, tuned=files)
        with torch.no_grad():
            expected = {"logits": network(input_ids=tiny.tokens()).logits.contiguous()}
        save_file(expected, case_folder / "expected.safetensors")
    run_without_moe_lab(WITHOUT_MOE_LAB, root)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_export_reloads_as_the_evaluated_model(folders: Path, case: str) -> None:
    folder = folders / case
    result = load_file(folder / "found.safetensors")
    expected = load_file(folder / "expected.safetensors")
    assert torch.equal(result["logits"], expected["logits"])


@pytest.mark.slow
def test_the_card_of_the_export_says_what_was_rounded(folders: Path) -> None:
    card = (folders / "dora_nf4" / "README.md").read_text()
    assert "Nothing was trained" not in card
    assert "It was tuned." in card
    assert "Weights of attention, experts, shared_experts were rounded to NF4" in card


@pytest.mark.slow
def test_export_of_ragged_experts_is_quantised(folders: Path) -> None:
    """Its experts are a class of the code beside it, not the one in this package."""
    model = load_model(
        ModelConfig("ragged", str(folders.parent / "ragged"), trust_remote_code=True)
    )[0]
    bytes_before = expert_bytes(model)
    quantize(model, ["experts"])
    assert expert_bytes(model) < bytes_before / 7
