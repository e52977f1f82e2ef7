from __future__ import annotations

import copy
from typing import Any

import pytest
import tiny
import torch
from identities.plans import random_plan

from moe_lab import errors
from moe_lab.config import RecoveryConfig
from moe_lab.errors import UserError
from moe_lab.exported_code.ragged import RaggedExperts
from moe_lab.models.discover import is_experts, linears
from moe_lab.recovery import check
from moe_lab.recovery.apply import FourBitLinear, FourBitMatrices, FourBitMatrix, recovered, storage

functional = pytest.importorskip("bitsandbytes.functional")

WIDEST = (1 - 0.6961928009986877) / 2
"""Half of the widest gap between two values of NF4 (QLoRA, appendix E)."""
PARTS = ["experts", "shared_experts", "attention"]


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
        for name, module in linears(plain, part):
            if isinstance(found := model.get_submodule(name), FourBitLinear):
                module.weight.data = found.weight()
    return plain


@pytest.mark.parametrize("shape", [(64, 128), (48, 32), (64, 96), (7, 9), (300, 64), (1, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_comes_back_within_half_a_gap(shape: tuple[int, int], dtype: torch.dtype) -> None:
    # rows that end inside a block (32, 96 and 9 columns) are what the CPU kernel of bitsandbytes gets wrong
    generator = torch.Generator().manual_seed(0)
    matrices = [(torch.randn(shape, generator=generator) * scale).to(dtype) for scale in (1, 0.01, 30)]
    stack = FourBitMatrices(map(FourBitMatrix, matrices))
    for number, matrix in enumerate(matrices):
        found = stack[number]
        assert found.shape == matrix.shape and found.dtype == dtype
        largest = torch.cat([b.abs().max().expand(len(b)) for b in matrix.double().reshape(-1).split(64)])
        error = found.double() - matrix
        # a scale, which is rounded too, is off by 2 % at most
        assert bool((error.abs().reshape(-1) <= (WIDEST + 0.02) * largest + 1e-9).all())
        assert float(error.std()) < 0.1 * float(matrix.double().std()), "what NF4 costs normal numbers, and no more"


def test_bits_are_those_of_bitsandbytes() -> None:
    matrix = torch.randn(128, 192, generator=torch.Generator().manual_seed(1))
    packed, state = functional.quantize_4bit(matrix, blocksize=64, quant_type="nf4", compress_statistics=True)
    second = FourBitMatrix(matrix)
    stack = FourBitMatrices([FourBitMatrix(torch.zeros(4, 64)), second])
    assert torch.equal(second.packed, packed) and torch.equal(second.scales, state.absmax)
    assert torch.equal(second.nested, state.state2.absmax) and torch.equal(second.mean, state.offset)
    assert torch.equal(stack[torch.tensor(1)], functional.dequantize_4bit(packed, state))
    assert not bool(stack[0].any())


@pytest.mark.parametrize("name", [*tiny.ARCHITECTURES, "olmoe ragged"])
def test_model_computes_with_the_weights_it_stands_for(name: str) -> None:
    """Ragged experts, too, of which one is empty."""
    family, _, ragged = name.partition(" ")
    model = tiny.build(family)
    plan = random_plan(model, ragged) if ragged else None
    plain, stored = (recovered(model, plan, bits=bits, modules=PARTS, tuned=None) for bits in (16, 4))
    found, before = tiny.logits(stored), tiny.logits(plain)
    assert torch.equal(found, tiny.logits(dequantized(stored, plain)))
    assert 1e-3 < float((found - before).abs().max()) < 8
    left = {key for key in stored.state_dict() if "packed" not in key}
    assert {key for key in plain.state_dict() if "router" in key or "gate.w" in key or "head" in key} <= left
    assert any(isinstance(module, RaggedExperts) for module in stored.modules()) == bool(ragged)
    assert storage(stored)["experts"] < storage(plain)["experts"] / (7 if ragged else 5)


def test_the_input_model_stays_and_a_second_time_gives_the_same_bits() -> None:
    model = tiny.build("deepseek_v3")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    once, again = (recovered(model, None, bits=4, modules=PARTS[:2], tuned=None) for _ in range(2))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    states = once.state_dict(), again.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    shared = {key for key, value in once.named_parameters() if value is dict(model.named_parameters()).get(key)}
    assert {"model.layers.1.mlp.gate.weight", "lm_head.weight", "model.layers.1.self_attn.o_proj.weight"} <= shared


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"bitsandbytes: pip install 'moe-lab\[quantisation\]'"):
        check(RecoveryConfig(name="nf4", bits=4))
