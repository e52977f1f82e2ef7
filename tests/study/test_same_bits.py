"""Each kind of step that runs a model leaves the same bits when it is run twice: on the CPU, and
with -m cuda on a GPU by the same code."""

import re
from pathlib import Path

import pytest
from example_steps import cell_of, perform_with_inputs, step_of
from studies import results, start, study_request

from moe_lab.config import CalibrationConfig, ModelConfig
from moe_lab.study.store import Store

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.cuda))
KINDS = (
    "statistics",
    "gradients",
    "weight_gradients",
    "damage",
    "similarity",
    "ablation",
    "scaling",
    "weights",
    "channel_weights",
    "weight_distances",
    "alignment",
    "activation_alignment",
    "profile",
    "export",
)
TEXT = CalibrationConfig(
    name="text",
    path="pocket:calibration/general.jsonl",
    packing="chunk",
    length=48,
    tokens=3 * 48,
    batch_tokens=96,
    seed=3,
)


def bits(folder: Path, kind: str = "") -> dict[str, bytes]:
    """Path -> content of the files of all steps of a kind, without times."""
    return {
        path: re.sub(rb'"seconds": [\d.]+', b"", content)
        for path, content in results(folder).items()
        if path.startswith(kind)
    }


@pytest.fixture(scope="module", params=DEVICES)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two stores with steps of all KINDS."""
    model = ModelConfig(name="pocket", path="pocket:olmoe", device=request.param, threads=1)
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    for folder in folders:
        store = Store(folder).create()
        for kind in KINDS:
            perform_with_inputs(store, step_of(kind, cell_of(model, TEXT)))
    return folders


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_has_the_same_bits_twice(runs: list[Path], kind: str) -> None:
    first, second = (bits(folder, f"{kind}/") for folder in runs)
    assert first
    assert first == second


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_a_study_has_the_same_bits_twice(device: str, tmp_path: Path) -> None:
    """Its steps search, fine-tune, take likelihoods and generate."""
    study = study_request(
        "suite.benchmarks=[pocket_boolq,pocket_gsm8k]",
        "calibration=pocket_general",
        "calibration.tokens=512",
        "calibration.length=64",
        "suite.limit=8",
        "allocation=pocket_evolutionary",
        "allocation.parameters.population=5",
        "allocation.parameters.generations=1",
        "recovery=pocket_dora",
        "recovery.epochs=0.01",
        f"model.device={device}",
    )
    stores = (tmp_path / "first", tmp_path / "second")
    assert [start(store, study) for store in stores] == [0, 0]
    first, second = map(bits, stores)
    assert {path.partition("/")[0] for path in first} >= {"search", "finetune", "evaluate"}
    assert first == second
