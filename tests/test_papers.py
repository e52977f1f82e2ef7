"""Variants of single papers: each against the paper's text or a run of its released code, found by
its name alone."""

import json
import subprocess
import sys
from pathlib import Path

import numpy
import pandas
import pytest
from studies import run_on_boolq

from moe_lab import criteria
from moe_lab.allocation import coverage
from moe_lab.allocation.shapes import smooth
from moe_lab.errors import UserError
from moe_lab.papers import easy_ep, super_experts
from moe_lab.result_files import read_record


def test_a_variant_is_found_without_the_other_papers() -> None:
    code = (
        "import sys; from moe_lab import criteria; criteria.get('camera.paper'); "
        "print(*[name for name in sys.modules if name.startswith('moe_lab.papers.')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["moe_lab.papers.camera"]


@pytest.mark.parametrize("name", ["camera.papr", "camra.paper", "./camera.paper"])
def test_unknown_variants_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="criterion="):
        criteria.get(name)


def test_camera_has_two_norms_as_in_its_text() -> None:
    """CAMERA (arXiv 2508.02322), as HEAPr quotes it in Section 4.2."""
    phi = numpy.array([[3.0, 1.0], [-4.0, 2.0], [0.0, -2.0]])
    down = numpy.array([[2.0, 0.0], [1.0, 5.0]])
    layer = {
        "channel_square": (phi**2).sum(axis=0)[None],
        "channel_max": abs(phi).max(axis=0)[None],
        "channel_down_square": (down**2).sum(axis=0)[None],
    }
    facts = {0: {"n_experts": 1, "width": 2}}
    scores = criteria.score("camera.paper", {0: layer}, facts, parameters={"alpha": 0.5})
    # (5 + .5 * 4) * sqrt(5) and (3 + .5 * 2) * 5
    assert scores[0] == pytest.approx(numpy.array([[7 * 5**0.5, 20.0]]), rel=1e-12)


def test_easy_ep_averages_shares_of_layers_over_domains() -> None:
    """EASY-EP's code for several domains divides scores by the sum of their layer."""
    keys = {"layer": [0, 0, 1, 1], "expert": [0, 1, 0, 1]}
    code = pandas.DataFrame({**keys, "score": [1.0, 3.0, 10.0, 10.0]})
    maths = pandas.DataFrame({**keys, "score": [200.0, 200.0, 0.0, 5.0]})
    mean = easy_ep.mean_over_domains([code, maths.sample(frac=1, random_state=0)])
    expected = pandas.DataFrame({**keys, "score": [0.375, 0.625, 0.25, 0.75]})
    pandas.testing.assert_frame_equal(mean, expected)


def test_smoothings_of_moe_slimming() -> None:
    """Tables 7 and 15, Appendix C.3.3. Of its code: sqrt and clip, four times; of its text:
    log(1 + 5 l) of the raw losses."""
    losses = numpy.array([0.02, 0.5, 3.0, 0.1, 0.4])
    x = losses
    for _ in range(4):
        x = numpy.sqrt(x)
        deviation = numpy.sqrt(((x - x.mean()) ** 2).sum() / 4)
        x = numpy.clip(x, x.mean() - deviation, x.mean() + deviation)
    released = smooth(losses, "moe_slimming.four_roots")
    assert released / released.mean() == pytest.approx(x / x.mean(), rel=1e-12)
    raw = smooth(losses, "moe_slimming.log")
    assert raw == pytest.approx(numpy.log(1 + 5 * losses), rel=1e-12)
    assert smooth(10 * losses, "moe_slimming.log") / raw != pytest.approx(numpy.full(5, 2.0))


def aligned(order: str, budgets: list[list[int]], width: int, **settings: int) -> list[list[int]]:
    scores = {layer: numpy.zeros((len(row), width)) for layer, row in enumerate(budgets)}
    rows = {layer: numpy.array(row) for layer, row in enumerate(budgets)}
    alignment = coverage.Alignment(**settings, order=order)
    return [row.tolist() for row in coverage.align(rows, scores, alignment).values()]


def test_an_expert_gets_at_most_one_block_by_the_text() -> None:
    """MoE-Slimming, Appendix A.2: three blocks are lost, but only two experts are active."""
    budgets = [[7, 7, 7, 7, 20, 11]]
    settings = {"block": 8, "min_channels": 8}
    assert aligned("moe_slimming.one_block", budgets, 32, **settings) == [[0, 0, 0, 0, 24, 16]]
    assert aligned("remainder", budgets, 32, **settings) == [[0, 0, 0, 0, 32, 24]]


@pytest.mark.parametrize(
    ("budgets", "width", "block", "released"),
    [
        ([[300, 130, 100, 260, 500, 384]], 512, 128, [[384, 128, 0, 256, 512, 384]]),
        ([[30, 29, 31, 30], [3, 2, 9, 10]], 32, 8, [[24, 24, 32, 24], [8, 0, 16, 16]]),
        (
            [[7, 6, 7, 5], [15, 7, 7, 23], [30, 31, 6, 7]],
            32,
            8,
            [[8, 8, 8, 8], [16, 8, 0, 24], [32, 32, 8, 0]],
        ),
    ],
)
def test_blocks_are_assigned_as_by_the_released_code(
    budgets: list[list[int]], width: int, block: int, released: list[list[int]]
) -> None:
    """Results of adjust_with_align of yifu-ding/MoE-Slimming, ae08eb4. The blocks of all layers are
    divided by the room of the layers, and an expert without channels can get one."""
    settings = {"block": block, "min_channels": block}
    assert aligned("moe_slimming.headroom", budgets, width, **settings) == released


def test_super_experts_by_the_released_code() -> None:
    """Super experts (arXiv 2507.23279), equation 8 in the released code: the percentile is that of
    the layers below the end, and a tenth is rounded down."""
    layers = {0: numpy.ones(300), 1: numpy.ones(300), 2: numpy.full(300, 5000.0)}
    layers[0][3] = 745.0
    layers[1][4] = 74.2  # above 74, below 74.5
    assert super_experts.released(layers, 2) == {0: [3], 1: [4]}


@pytest.mark.slow
def test_a_study_with_variants(tmp_path: Path) -> None:
    """Names of variants are in ids and in the record, and a second run finds every step."""
    settings = ["criterion=camera.paper", "allocation=coverage", "ratio=.25"]
    settings += ["+allocation.parameters.layer_smoothing=moe_slimming.four_roots"]
    assert run_on_boolq(tmp_path / "store", *settings).returncode == 0
    (cell,) = [
        cell for cell in (read_record(tmp_path / "store", "study") or {})["cells"] if cell["plan"]
    ]
    assert "camera.paper" in json.dumps(cell)
    step = json.loads((tmp_path / "store" / cell["plan"] / "step.json").read_text())
    assert "moe_slimming.four_roots" in json.dumps(step)
