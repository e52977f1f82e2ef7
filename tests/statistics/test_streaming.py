"""A pass that has one decoder layer in memory gives the sums of one that has the whole model."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from moe_lab.config import ModelConfig
from moe_lab.errors import UserError
from moe_lab.models.streamed import StreamedModel, open_streamed
from moe_lab.statistics import Statistics, streaming
from moe_lab.statistics.damage import DamageTap, SimilarityTap
from moe_lab.statistics.forward import ForwardTap
from moe_lab.statistics.gradients import GradientTap, WeightGradientTap, gather_gradients
from moe_lab.statistics.observe import gather
from moe_lab.statistics.streaming import stream, stream_back
from tests.campaign.models import reconfigure

pytestmark = pytest.mark.slow

PASSES: dict[str, tuple[Callable[..., Statistics], Callable[..., Statistics]]] = {
    "forward": (partial(gather, tap=ForwardTap), partial(stream, tap=ForwardTap)),
    "damage": (partial(gather, tap=DamageTap), partial(stream, tap=DamageTap)),
    "similarity": (partial(gather, tap=SimilarityTap), partial(stream, tap=SimilarityTap)),
    "gradients": (partial(gather_gradients, tap=GradientTap), partial(stream_back, tap=GradientTap)),
    "weight_gradients": (partial(gather_gradients, tap=WeightGradientTap), partial(stream_back, tap=WeightGradientTap)),
}
FORWARD = PASSES["forward"]
BATCHES = tiny.batches()
QUERY = "model.layers.1.self_attn.q_proj.weight"


def resident(read: Callable[..., Statistics], name: str) -> Statistics:
    return read(tiny.build(name), batches=BATCHES, fingerprint={})


def opened(name: str, folder: Path) -> StreamedModel:
    tiny.save(name, folder)
    return StreamedModel(folder, dtype=torch.float32, device="cpu")


def assert_equal(found: Statistics, expected: Statistics) -> None:
    """To the bit forward; backward, autograd may add up what several experts say of a token in another order."""
    tolerance = 1e-6 if "gradients" in expected.header["kind"] else 0.0
    assert found.header == expected.header and found.layers.keys() == expected.layers.keys()
    for layer, sums in expected.layers.items():
        assert found.layers[layer].keys() == sums.keys()
        for name, values in sums.items():
            error = (found.layers[layer][name] - values).abs().max()
            assert error <= tolerance * values.abs().max(), (layer, name)


@pytest.mark.parametrize("kind", PASSES)
@pytest.mark.parametrize(
    "name", ["olmoe", "qwen3_next", "deepseek", "deepseek_v3:grouped", "ernie4_5_moe", "gpt_oss", "jamba", "minimax"]
)
def test_the_sums_are_the_same(name: str, kind: str, tmp_path: Path) -> None:
    whole, layered = PASSES[kind]
    expected = resident(whole, name)
    model = opened(name, tmp_path / "model")
    assert_equal(layered(model, batches=BATCHES, out=tmp_path / "out", fingerprint={}, budget=2000), expected)
    assert all(weight.is_meta for weight in model.layers.parameters()), "no layer is left behind"


@pytest.mark.parametrize("kind", PASSES)
def test_a_killed_pass_goes_on_from_its_last_layer(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, layered = PASSES[kind]
    expected = resident(whole, "deepseek_v2")
    model = opened("deepseek_v2", tmp_path / "model")
    finish = streaming.FinishedLayers.add
    done: list[tuple[str, int]] = []

    def dying(self: Any, phase: str, number: int, sums: Any) -> None:
        if len(done) % 2:
            done.append(("killed", number))
            raise tiny.Killed
        finish(self, phase, number, sums)
        done.append((phase, number))

    monkeypatch.setattr(streaming.FinishedLayers, "add", dying)
    for _ in range(20):
        with suppress(tiny.Killed):
            found = layered(model, batches=BATCHES, out=tmp_path / "out", fingerprint={}, budget=0)
            break
    assert_equal(found, expected)
    finished = [entry for entry in done if entry[0] != "killed"]
    assert len(finished) == len(set(finished)) and len(done) > len(finished), "nothing is done twice"


def test_only_one_layer_is_there_at_a_time_and_another_text_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = opened("olmoe", tmp_path / "model"), tmp_path / "out"
    FORWARD[1](model, batches=BATCHES[:1], out=out, fingerprint={}, budget=0)
    there, read = [], streaming.LayerPass.read

    def counting(*given: Any) -> torch.Tensor:
        there.append(sum(not next(layer.parameters()).is_meta for layer in model.layers))
        return read(*given)

    monkeypatch.setattr(streaming.LayerPass, "read", counting)
    found = FORWARD[1](model, batches=BATCHES, out=out, fingerprint={}, budget=0)
    assert set(there) == {1}
    assert_equal(found, resident(FORWARD[0], "olmoe"))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda tensors: tensors.pop(QUERY), "missing"),
        (lambda tensors: tensors[QUERY].fill_(float("inf")), "holds inf"),
        (lambda tensors: tensors.update({QUERY: torch.zeros(3, 3)}), "config.json asks for"),
    ],
)
def test_damaged_weights_are_named(damage: Any, says: str, tmp_path: Path) -> None:
    tiny.save("olmoe", tmp_path / "model")
    damage(tensors := load_file(tmp_path / "model" / "model.safetensors"))
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(UserError, match=re.escape(says)) as caught:
        model = StreamedModel(tmp_path / "model", dtype=torch.float32, device="cpu")
        FORWARD[1](model, batches=BATCHES, out=tmp_path / "out", fingerprint={}, budget=0)
    assert QUERY in str(caught.value)


def test_what_cannot_be_streamed_is_said_first(tmp_path: Path) -> None:
    tiny.save("olmoe", tmp_path)
    with pytest.raises(UserError, match=r"model\.device=balanced"):
        open_streamed(ModelConfig(name="m", path=str(tmp_path), device="balanced"))
    reconfigure(tmp_path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(UserError, match="stored as fp8"):
        open_streamed(ModelConfig(name="m", path=str(tmp_path)))


def test_a_head_in_the_files_is_used_though_the_configuration_says_that_it_is_the_embedding(tmp_path: Path) -> None:
    """transformers then leaves the two as they are stored."""
    whole = tiny.save("olmoe", tmp_path, tie_word_embeddings=False)
    reconfigure(tmp_path, tie_word_embeddings=True)
    streamed = StreamedModel(tmp_path, dtype=torch.float32, device="cpu").model
    assert torch.equal(streamed.lm_head.weight, whole.lm_head.weight)
    assert torch.equal(streamed.model.embed_tokens.weight, whole.model.embed_tokens.weight)


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that any tensor has which is computed while this is open."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for output in result if isinstance(result, tuple | list) else [result]:
            if isinstance(output, torch.Tensor):
                self.elements = max(self.elements, output.numel())
        return result


@pytest.mark.parametrize("padding", [0, 100])
def test_the_memory_of_a_long_row_grows_with_its_tokens_not_with_their_pairs(padding: int, tmp_path: Path) -> None:
    length = 16_384
    tiny.save("olmoe", tmp_path / "model", max_position_embeddings=length, num_hidden_layers=2)
    model = StreamedModel(tmp_path / "model", dtype=torch.float32, device="cpu")
    ids = torch.randint(3, tiny.VOCABULARY, (1, length), generator=torch.Generator().manual_seed(0))
    valid = (torch.arange(length) < length - padding)[None]
    with LargestTensor() as largest:
        sums = stream(model, ForwardTap, [(ids, valid)], out=tmp_path / "out", fingerprint={}, budget=0)
    assert int(sums.layers[1]["tokens"].sum()) == (length - padding) * model.model.config.num_experts_per_tok
    assert largest.elements < length * 500 < length**2


@pytest.mark.parametrize("name", ["olmoe", "qwen3_next", "deepseek_v2", "jamba", "minimax"])
def test_padding_on_the_right_changes_no_sums_without_a_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference masks the padding, in the model's own forward."""
    (ids, _), *_ = tiny.batches()
    valid = torch.arange(ids.shape[1]) < torch.arange(ids.shape[1] - len(ids), ids.shape[1])[:, None]
    model = tiny.build(name)

    def masked(model: Any, ids: torch.Tensor, valid: torch.Tensor) -> Any:
        return model.base_model(input_ids=ids, attention_mask=valid.long(), use_cache=False)

    found = gather(model, tap=ForwardTap, batches=[(ids, valid)], fingerprint={})
    monkeypatch.setattr("moe_lab.statistics.observe.run", masked)
    expected = gather(model, tap=ForwardTap, batches=[(ids, valid)], fingerprint={})
    for layer, sums in expected.layers.items():
        for key, values in sums.items():
            error = (found.layers[layer][key] - values).abs().max()
            assert error <= 1e-5 * values.abs().max(), (layer, key)
