from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from moe_lab import criteria
from moe_lab.config import CalibrationConfig, ModelConfig
from moe_lab.statistics.sums import read
from moe_lab.study import steps
from moe_lab.study.step import Job
from moe_lab.study.steps import convergence

MODEL = asdict(ModelConfig(name="pocket", path="pocket:olmoe", threads=1))
TEXT = {"name": "text", "path": "pocket:calibration/general.jsonl", "packing": "chunk", "length": 128, "tokens": 1024}


def perform(root: Path, kind: str, settings: dict[str, Any], **inputs: Path) -> Path:
    text = asdict(CalibrationConfig(**TEXT, batch_size=2, seed=42, snapshots=settings.pop("snapshots", 0)))
    folder = root / f"{kind}{len(list(root.iterdir()))}"
    (folder / "partial").mkdir(parents=True)
    names = {role: str(path) for role, path in inputs.items()}
    job = Job(kind, kind, settings, {"model": MODEL, "calibration": text}, names, str(folder), str(folder / "partial"))
    steps.perform(job)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Steps over 8 rows in 4 batches: with three snapshots asked of the pass, and without any."""
    root = tmp_path_factory.mktemp("steps")
    model = perform(root, "model", {})
    found = {"model": model}
    for name, snapshots in (("with", 4), ("without", 0)):
        statistics = perform(root, "statistics", {"snapshots": snapshots})
        asked = {"convergence": {"gate": "model", "snapshots": 4}}
        found[f"statistics {name}"] = statistics
        found[name] = perform(root, "convergence", asked, model=model, statistics=statistics)
    return found


def test_the_pass_leaves_what_a_pass_of_its_own_would(made: dict[str, Path]) -> None:
    first, second = (pd.read_parquet(made[name] / "convergence.parquet") for name in ("with", "without"))
    pd.testing.assert_frame_equal(first, second)
    assert first["tokens"].nunique() == 4 and first.groupby("tokens").size().nunique() == 1
    assert not (made["with"] / "snapshots.json").exists() and (made["without"] / "snapshots.json").exists()


def test_the_last_scores_are_those_of_the_whole_text(made: dict[str, Path]) -> None:
    frame = pd.read_parquet(made["with"] / "convergence.parquet")
    last = frame[frame["tokens"] == frame["tokens"].max()]
    sums = read(made["statistics with"] / "statistics.safetensors")
    experts = {layer: len(named["tokens"]) for layer, named in sums.items()}
    assert set(last["criterion"]) == set(criteria.of_experts_from("statistics")) >= {"reap", "man", "mone", "frequency"}
    assert {"exact_damage", "aimer", "random", "s_family", "channel_activation"}.isdisjoint(last["criterion"])
    for name, found in last.groupby("criterion"):
        expected = criteria.score(str(name), sums, experts=experts, gate="model")
        assert found["score"].tolist() == [float(value) for layer in expected for value in expected[layer]], name
    reads = frame[frame["criterion"] == "frequency"].groupby("tokens")["score"].sum()
    assert reads.is_monotonic_increasing and reads.nunique() == 4


def test_the_pass_with_snapshots_sums_up_the_same(made: dict[str, Path]) -> None:
    files = [made[f"statistics {name}"] / "statistics.safetensors" for name in ("with", "without")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_figures_get_the_numbers_of_the_sums(made: dict[str, Path]) -> None:
    folder = made["statistics with"]
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


def test_weights_gradients_and_scores_leave_their_tables(made: dict[str, Path], tmp_path: Path) -> None:
    weights, gradients = perform(tmp_path, "weights", {}), perform(tmp_path, "gradients", {})
    asked = {"criterion": {"criterion": "heapr", "parameters": {}}}
    scores = perform(tmp_path, "scores", asked, model=made["model"], gradients=gradients)
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


def naive_best(scores: np.ndarray, share: float) -> set[int]:
    """The best share of a layer's channels, rounded up, of equal ones those of higher index."""
    flat = scores.ravel().tolist()
    order = sorted(range(len(flat)), key=lambda at: (flat[at], at), reverse=True)
    return set(order[: math.ceil(share * len(flat))])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30))
def test_shared_channels_are_those_of_two_sets(pairs: list[tuple[int, int]]) -> None:
    one, other = (np.array([pair[side] for pair in pairs], float)[None] for side in (0, 1))
    found = convergence.shared(convergence.ranks(one), convergence.ranks(other))
    for share, same in zip(convergence.SHARES, found, strict=True):
        final = naive_best(other, share)
        assert same == len(naive_best(one, share) & final) / len(final)


def without_channels(folder: Path) -> None:
    """Take the sums of channels out of snapshots, as those of an older moe_lab have none."""
    for file in folder.glob("snapshot-*.safetensors"):
        with safe_open(file, framework="np") as opened:
            kept = {key: opened.get_tensor(key) for key in opened.keys() if "channel_" not in key}  # noqa: SIM118
            about = opened.metadata()
        save_file(kept, file, about)


@pytest.mark.parametrize(
    ("criterion", "role"), [("heapr", "gradients"), ("channel_activation", "statistics"), ("camera", "statistics")]
)
def test_channels_are_followed_through_the_pass(tmp_path: Path, criterion: str, role: str) -> None:
    """With the snapshots of the pass, without any, and with an older version's: the same, which is what scoring each
    part by itself gives."""
    model = perform(tmp_path, "model", {})
    weights = {"channel_weights": perform(tmp_path, "channel_weights", {})} if criterion == "camera" else {}
    asked = {"criterion": criterion, "parameters": {}, "gate": None, "snapshots": 4}
    frames, passes = [], []
    for snapshots, older in ((4, False), (0, False), (4, True)):
        passes.append(perform(tmp_path, role, {"snapshots": snapshots}))
        if older:
            without_channels(passes[-1])
        found = perform(
            tmp_path, "channel_convergence", {"convergence": asked}, model=model, **{role: passes[-1]}, **weights
        )
        frames.append(pd.read_parquet(found / "convergence.parquet"))
    pd.testing.assert_frame_equal(frames[0], frames[1])
    pd.testing.assert_frame_equal(frames[0], frames[2])
    assert frames[0]["tokens"].nunique() == 3 and set(frames[0]["criterion"]) == {criterion}

    facts = json.loads((model / "facts.json").read_text())["layers"]
    shape = {"experts": {}, "widths": {}}
    for layer, about in facts.items():
        shape["experts"][int(layer)], shape["widths"][int(layer)] = about["n_experts"], about["width"]

    def scored(file: Path) -> np.ndarray:
        sums = read(file)
        for folder in weights.values():
            sums = {layer: {**named, **read(folder / "statistics.safetensors")[layer]} for layer, named in sums.items()}
        return criteria.score(criterion, sums, **shape)[1]

    first, last = scored(passes[0] / "snapshot-1-of-4.safetensors"), scored(passes[0] / "statistics.safetensors")
    row = frames[0].query("layer == 1 and kept == 0.5").sort_values("tokens").iloc[0]
    final = naive_best(last, 0.5)
    assert row["same"] == len(naive_best(first, 0.5) & final) / len(final) and 0.5 < row["same"] < 1
    assert row["channels"] == last.size
