from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from example_steps import cell_of, done

from moe_lab.config import CalibrationConfig, CriterionConfig, ModelConfig
from moe_lab.statistics import read
from moe_lab.study.steps.passes import Facts, Gradients, StatisticsPass, Weights
from moe_lab.study.steps.scores import Scores
from moe_lab.study.store import Store

MODEL = ModelConfig(name="pocket", path="pocket:olmoe", device="cpu", threads=1)
TEXT = CalibrationConfig(
    name="text",
    path="pocket:calibration/general.jsonl",
    packing="chunk",
    length=128,
    tokens=1024,
    batch_size=2,
    seed=42,
)
CELL = cell_of(MODEL, TEXT, criterion=CriterionConfig(name="heapr"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("steps")).create()


@pytest.fixture(scope="module")
def made(store: Store) -> dict[str, Path]:
    """The steps of a model and of a pass over 8 rows in 4 batches."""
    return {"model": done(store, Facts(MODEL)), "statistics": done(store, StatisticsPass.of(CELL))}


def test_figures_get_the_numbers_of_the_sums(made: dict[str, Path]) -> None:
    folder = made["statistics"]
    sums = read(folder / "statistics.safetensors")
    experts = pd.read_parquet(folder / "experts.parquet").set_index(["layer", "expert"])
    layer, one = max(sums), sums[max(sums)]
    assert len(experts) == sum(len(named["tokens"]) for named in sums.values())
    for expert in (0, len(one["tokens"]) - 1):
        row = experts.loc[(layer, expert)]
        assert row["tokens"] == one["tokens"][expert] and row["channels"] == one["channel_square"].shape[1]
        assert row["gate_sum"] == one["sums_model"][expert, 1, 0] and row["norm_sum"] == one["sums_model"][expert, 0, 1]
        assert row["channel_square"] == pytest.approx(sum(one["channel_square"][expert].tolist()))
    losses = pd.read_parquet(folder / "layers.parquet").set_index("layer")["layer_loss"]
    assert losses.to_dict() == {layer: float(named["layer_loss"]) for layer, named in sums.items()}
    roots = [(square / row["tokens"]) ** 0.5 for square in one["channel_square"][expert].tolist()]
    assert row["channel_root_sum"] == pytest.approx(sum(roots))
    entropies = pd.read_parquet(folder / "entropy.parquet")
    assert set(entropies["layer"]) == set(sums) and entropies["entropy"].max() == 1
    top_k = json.loads((made["model"] / "facts.json").read_text())["layers"][str(layer)]["top_k"]
    tokens = entropies.groupby("layer")["tokens"].sum().to_dict()
    assert {at: count * top_k for at, count in tokens.items()} == {at: sums[at]["tokens"].sum() for at in sums}


def test_weights_gradients_and_scores_leave_their_tables(made: dict[str, Path], store: Store) -> None:
    weights, gradients, scores = (done(store, kind.of(CELL)) for kind in (Weights, Gradients, Scores))
    files = {"weights": weights, "gradients": gradients, "expert_concentration": scores}
    found = {
        name: pd.read_parquet(folder / f"{name}.parquet").set_index(["layer", "expert"])
        for name, folder in files.items()
    }
    for name, table in found.items():
        assert table.index.nunique() == sum(experts_of(made).values()), name
    layer = max(read(weights / "statistics.safetensors"))
    one = read(weights / "statistics.safetensors")[layer]
    assert found["weights"].loc[(layer, 3)].tolist() == [one["abs_sum"][3], one["square_sum"][3], one["count"]]
    squares = read(gradients / "statistics.safetensors")[layer]["channel_gradient_square"][3]
    assert found["gradients"].loc[(layer, 3), "gradient_square"] == pytest.approx(sum(squares.tolist()))
    curve = found["expert_concentration"].loc[(layer, 3), "score"].tolist()
    assert curve[0] == 0 and curve[-1] == pytest.approx(1) and curve == sorted(curve)


def experts_of(made: dict[str, Path]) -> dict[str, int]:
    layers = json.loads((made["model"] / "facts.json").read_text())["layers"]
    return {layer: about["n_experts"] for layer, about in layers.items()}
