from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from moe_lab.errors import UserError
from moe_lab.statistics import Statistics, check_finite, header, read
from moe_lab.study.steps.tables import coverage


def statistics(values: list[float]) -> Statistics:
    tensor = torch.tensor(values, dtype=torch.float64)
    layers = {2: {"tokens": tensor, "channel_max": tensor}, 5: {"tokens": 2 * tensor, "channel_max": -tensor}}
    return Statistics(layers, {"kind": "forward", "fingerprint": {"model": "m"}})


def same(first: Statistics, second: Statistics) -> bool:
    return first.header == second.header and all(
        torch.allclose(tensor, second.layers[layer][name], rtol=1e-12, atol=1e-6)
        for layer, named in first.layers.items()
        for name, tensor in named.items()
    )


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    saved = statistics([1, 2, 3])
    saved.layers[2]["layer_loss"] = torch.tensor(0.25, dtype=torch.float64)
    saved.save(tmp_path / "new" / "sums.safetensors")
    loaded = Statistics.load(tmp_path / "new" / "sums.safetensors")
    assert same(saved, loaded)
    assert loaded.layers[2]["layer_loss"].shape == ()
    assert header(tmp_path / "new" / "sums.safetensors") == saved.header
    assert read(tmp_path / "new" / "sums.safetensors")[5]["tokens"].tolist() == [2, 4, 6]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["sums.safetensors"]


def test_bad_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "sums.safetensors"
    with pytest.raises(UserError, match="cannot be read"):
        Statistics.load(path)
    statistics([1, 2, 3]).save(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, match="cannot be read"):
        read(path)
    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(UserError, match="expected a file of statistics"):
        read(path)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_named(value: float) -> None:
    broken = statistics([1, 2, 3])
    broken.layers[5]["tokens"][1] = value
    with pytest.raises(UserError, match="layer 5, expert 1: tokens of batch 7"):
        check_finite(broken.layers, "batch 7")


def test_coverage_lists_every_expert() -> None:
    found = statistics([4, 0, 2])
    assert coverage(found.layers)[:3] == [(2, 0, 4), (2, 1, 0), (2, 2, 2)]
    assert len(coverage(found.layers)) == 6
