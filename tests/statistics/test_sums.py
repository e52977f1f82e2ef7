from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_lab.errors import UserError
from moe_lab.statistics.file import header, read
from moe_lab.statistics.sums import Statistics, check_finite, coverage, unseen

numbers = st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3)


def statistics(values: list[float], start: int) -> Statistics:
    tensor = torch.tensor(values, dtype=torch.float64)
    layers = {2: {"tokens": tensor, "channel_max": tensor}, 5: {"tokens": 2 * tensor, "channel_max": -tensor}}
    return Statistics(layers, {"kind": "forward", "fingerprint": {"model": "m"}, "rows": [[start, start + 1]]})


def same(first: Statistics, second: Statistics) -> bool:
    return first.header == second.header and all(
        torch.allclose(tensor, second.layers[layer][name], rtol=1e-12, atol=1e-6)
        for layer, named in first.layers.items()
        for name, tensor in named.items()
    )


@given(numbers, numbers, numbers)
def test_merging_knows_no_order(a: list[float], b: list[float], c: list[float]) -> None:
    x, y, z = statistics(a, 0), statistics(b, 1), statistics(c, 7)
    assert same(x.merge(y), y.merge(x))
    assert same(x.merge(y).merge(z), x.merge(z.merge(y)))
    whole = z.merge(x).merge(y)
    assert whole.header["rows"] == [[0, 2], [7, 8]]
    assert torch.allclose(whole.layers[2]["tokens"], torch.tensor([a, b, c], dtype=torch.float64).sum(0), atol=1e-6)
    assert torch.equal(whole.layers[5]["channel_max"], (-torch.tensor([a, b, c], dtype=torch.float64)).amax(0))


def test_what_does_not_belong_together_is_not_merged() -> None:
    one, two = statistics([1, 2, 3], 0), statistics([1, 2, 3], 1)
    two.header["fingerprint"] = {"model": "n"}
    with pytest.raises(UserError, match=r"different fingerprint .*model is 'm' in one and 'n' in the other"):
        one.merge(two)
    with pytest.raises(UserError, match="row 0 is in both"):
        one.merge(statistics([1, 2, 3], 0))
    two = statistics([1, 2, 3], 1)
    two.header["kind"] = "damage"
    with pytest.raises(UserError, match=r"different kind .*'forward' and 'damage'"):
        one.merge(two)
    two = statistics([1, 2, 3], 1)
    del two.layers[5]["channel_max"]
    with pytest.raises(UserError, match="layer 5 has channel_max on one side only"):
        one.merge(two)
    del two.layers[5]
    with pytest.raises(UserError, match=r"layers \[2, 5\] and \[2\]"):
        one.merge(two)


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    saved = statistics([1, 2, 3], 0)
    saved.layers[2]["layer_loss"] = torch.tensor(0.25, dtype=torch.float64)
    saved.save(tmp_path / "new" / "sums.safetensors")
    loaded = Statistics.load(tmp_path / "new" / "sums.safetensors")
    assert same(saved, loaded)
    assert loaded.layers[2]["layer_loss"].shape == ()
    assert header(tmp_path / "new" / "sums.safetensors") == saved.header
    assert read(tmp_path / "new" / "sums.safetensors")[5]["tokens"].tolist() == [2, 4, 6]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["sums.safetensors"]


def test_bad_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sums.safetensors"
    with pytest.raises(UserError, match="cannot be read"):
        Statistics.load(path)
    statistics([1, 2, 3], 0).save(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, match="cannot be read"):
        read(path)
    monkeypatch.setattr("moe_lab.statistics.sums.SCHEMA", 99)
    statistics([1, 2, 3], 0).save(path)
    with pytest.raises(UserError, match="schema 99"):
        read(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sums.safetensors"
    statistics([1, 2, 3], 0).save(path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        statistics([4, 5, 6], 0).save(path)
    assert same(Statistics.load(path), statistics([1, 2, 3], 0))
    assert [file.name for file in tmp_path.iterdir()] == ["sums.safetensors"]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_named(value: float) -> None:
    broken = statistics([1, 2, 3], 0)
    broken.layers[5]["tokens"][1] = value
    with pytest.raises(UserError, match="layer 5, expert 1: tokens of batch 7"):
        check_finite(broken.layers, "batch 7")


def test_coverage_lists_every_expert() -> None:
    found = statistics([4, 0, 2], 0)
    assert coverage(found)[:3] == [(2, 0, 4), (2, 1, 0), (2, 2, 2)]
    assert len(coverage(found)) == 6
    assert unseen(found) == {2: [1], 5: [1]}
