"""Plans as masks on an engine of vLLM: the same as the masked model, and as the plan's export served alone."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import preloaded
import pytest
import tiny
import torch
from processes import is_running, until
from pyarrow import parquet
from test_vllm import FAMILIES, PROMPTS, PYTHON, Models, ask, expected, fewer

from moe_lab.config import BackendConfig, ModelConfig
from moe_lab.errors import Unavailable, UserError
from moe_lab.evaluation.engines import Prompt, Writing, vllm
from moe_lab.paths import resolve
from moe_lab.pruning.export import export
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no vLLM: `make vllm` installs it"),
    pytest.mark.timeout(900),  # a fixture starts twenty engines, some seconds each
]
PLANS = ("no plan", "uneven", "uniform", "no plan again")
EXPORTED = ("olmoe", "deepseek_v3:grouped")
"""Families whose export is compared with the mask word by word; exports of all are the masked model in test_vllm.py."""


def as_request(plan: Plan | None) -> list[Any]:
    return [] if plan is None else sorted(plan.experts.items())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Name -> the model, a plan whose layers differ, and its natural export."""
    made = {}
    for name, changes in FAMILIES.items():
        folder = tmp_path_factory.mktemp("model")
        model = tiny.save(name, folder / "model", **changes)
        plan = fewer(model, 1, 2)
        made[name] = (model, plan, export(folder / "model", plan, folder / "uneven"))
    return made


@pytest.fixture(scope="module")
def said(models: Models) -> dict[str, Any]:
    """What engines answer under each of PLANS, and what engines for the export of the uneven plan do."""
    runs = {name: under_plans(*parts) for name, parts in models.items()}
    runs |= {f"{name}, export": {"folder": str(models[name][2]), "plans": [[]]} for name in EXPORTED}
    return answers(runs)


@pytest.fixture(scope="module")
def said_otherwise(models: Models) -> dict[str, Any]:
    """What a compiled engine answers, one whose masks do nothing, and one with the plan of another model."""
    model, plan, folder = models["olmoe"]
    usual = under_plans(model, plan, folder)
    wrong = Plan({**plan.experts, 7: (0, 1)}, {**plan.n_experts, 7: 4})
    return answers(
        {
            "no effect": {**usual, "unmasked": True},  # the first, before routers of the process are patched
            "another model": {**usual, "plans": [as_request(wrong)]},
            "compiled": {**usual, "arguments": {"enforce_eager": False}},
        }
    )


def under_plans(model: Any, plan: Plan, exported: Path) -> dict[str, Any]:
    plans = [as_request(each) for each in (None, plan, fewer(model, 2), None)]
    return {"folder": str(exported.parent / "model"), "plans": plans}


def answers(runs: dict[str, Any]) -> dict[str, Any]:
    replies = ask("masked_engine.py", {"prompts": PROMPTS, "runs": list(runs.values())})
    return dict(zip(runs, replies, strict=True))


def check_masked(replies: Any, model: Any, plan: Plan) -> None:
    """The replies under each of PLANS are those of the masked model."""
    assert not isinstance(replies, str), replies
    for each, reply in zip((None, plan, fewer(model, 2), None), replies, strict=True):
        with mask(model, each) if each else nullcontext():
            right = expected(model)
        assert (torch.tensor(reply["losses"]) - right.flatten()).abs().max() < 1e-4
        assert (torch.tensor(reply["sums"]) - right.sum(1)).abs().max() < 1e-3
    first, of_uneven, of_uniform, again = (torch.tensor(reply["losses"]) for reply in replies)
    assert min((first - of_uneven).abs().max(), (of_uneven - of_uniform).abs().max()) > 1e-3
    assert (first - again).abs().max() < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_masks_on_one_engine_are_the_masked_model(name: str, models: Models, said: dict[str, Any]) -> None:
    model, plan, _ = models[name]
    check_masked(said[name], model, plan)


def test_masks_are_in_a_compiled_engine(models: Models, said_otherwise: dict[str, Any]) -> None:
    model, plan, _ = models["olmoe"]
    check_masked(said_otherwise["compiled"], model, plan)


@pytest.mark.parametrize("name", EXPORTED)
def test_a_mask_is_the_export_of_its_plan(name: str, said: dict[str, Any]) -> None:
    (served,) = said[f"{name}, export"]
    masked = said[name][PLANS.index("uneven")]
    assert masked["tokens"] == served["tokens"]
    assert (torch.tensor(masked["losses"]) - torch.tensor(served["losses"])).abs().max() < 1e-4
    assert masked["likeliest"] == served["likeliest"]


def test_masks_that_have_no_effect_are_refused(said_otherwise: dict[str, Any]) -> None:
    refused = said_otherwise["no effect"]
    assert isinstance(refused, str) and "no effect" in refused


def test_the_plan_of_another_model_is_refused(said_otherwise: dict[str, Any]) -> None:
    refused = said_otherwise["another model"]
    assert isinstance(refused, str) and "layer 7" in refused


def study(store: Path, name: str, *overrides: str) -> str:
    """Runs a study of the shipped model; returns what it and its worker printed."""
    command = preloaded.command("-m", "moe_lab", "model=pocket_olmoe", f"store={store}", f"study={name}", *overrides)
    fixed = ["launcher=inline", "report=false", "allow_code_execution=true", "suite.limit=8", "calibration.tokens=2048"]
    done = subprocess.run([*command, *fixed], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return "".join(log.read_text() for log in (store / "logs").rglob("*.log"))


def outcomes(store: Path) -> dict[tuple[str, ...], list[Any]]:
    """(model and plan, benchmark, back end) -> outcome and answer loss of every item."""
    found = {}
    for kind in ("evaluate", "grade"):
        for folder in (store / kind).iterdir():
            step = json.loads((folder / "step.json").read_text())
            asked = step["inputs"]["generate"] if kind == "grade" else folder.name
            asked = store / ("generate" if kind == "grade" else kind) / Path(asked).name
            backend = "vllm" if (asked / "backend.json").exists() else "hf"
            rows = parquet.read_table(folder / "samples.parquet").to_pylist()
            values = [(row["outcome"], row["answer_loss"]) for row in rows]
            found[(folder.name.rpartition("-")[0], rows[0]["benchmark"], backend)] = values
    return found


def test_a_study_gets_the_same_answers_from_vllm(tmp_path: Path) -> None:
    """Two plans of experts and the unpruned model on one engine; a plan of channels is exported, and served alone."""
    benchmarks = "suite.benchmarks=[pocket_humaneval,pocket_arc_easy,pocket_gsm8k]"
    plans = ("criterion=reap", "ratio=0.25,0.5", benchmarks)
    channels = ("criterion=camera", "ratio=0.25", benchmarks)
    log = study(tmp_path, "masks", *plans, "backend=vllm")
    assert log.count("vLLM starts with") == 1
    log = study(tmp_path, "exported", *channels, "backend=vllm")
    assert log.count("vLLM starts with") == 2 and list((tmp_path / "export").iterdir())
    study(tmp_path, "loaded", *plans)
    study(tmp_path, "loaded_channels", *channels)
    found = outcomes(tmp_path)
    by_vllm = {key[:2]: values for key, values in found.items() if key[2] == "vllm"}
    by_transformers = {key[:2]: values for key, values in found.items() if key[2] == "hf"}
    assert len(by_vllm) == 4 * 3 and by_vllm.keys() == by_transformers.keys()
    for key, values in by_vllm.items():
        for (outcome, loss), (right, right_loss) in zip(values, by_transformers[key], strict=True):
            assert outcome == right, key
            assert loss == pytest.approx(right_loss, abs=1e-4), key


OPEN = """
import sys
from pathlib import Path
from moe_lab.config import BackendConfig, ModelConfig
from moe_lab.evaluation.engines import Prompt, Writing, vllm
from moe_lab.paths import resolve
model = ModelConfig(name="m", path="pocket:olmoe", threads=1)
engine = vllm.opened(Path(resolve(model.path)), BackendConfig("vllm"), model, None)
print(engine.process.process.pid, flush=True)
for _ in range(10000):
    engine.generate([Prompt("", (5, 6, 7))] * 64, Writing(64))
"""


def shown_by(engine: int) -> list[Path]:
    """Temporary folders of a process, in which it has moe_lab for the processes that it starts."""
    return list(Path(tempfile.gettempdir()).glob(f"moe_lab-vllm-{engine}-*"))


def test_an_engine_ends_with_the_process_that_uses_it() -> None:
    with subprocess.Popen([sys.executable, "-c", OPEN], stdout=subprocess.PIPE, text=True) as user:
        assert user.stdout
        engine = int(user.stdout.readline())
        assert is_running(engine)
        (folder,) = shown_by(engine)
        assert folder.exists()
        user.kill()
    until(lambda: not is_running(engine))
    assert not folder.exists()


def opened(**arguments: Any) -> vllm.VllmModel:
    model = ModelConfig(name="m", path="pocket:olmoe", threads=1)
    backend = BackendConfig("vllm", ready_seconds=280, arguments=arguments)
    return vllm.opened(Path(resolve(model.path)), backend, model, None)


def test_an_engine_that_dies_is_reported_and_the_next_one_starts() -> None:
    subject = opened(max_num_seqs=1)  # one text after the other, so that most are left when the first is there
    texts = subject.process.items("generate", 200, prompts=[[5, 6]] * 64, most=200, stop=[], ends=[])
    next(texts)
    subject.process.process.kill()
    with pytest.raises(Unavailable, match="vLLM ended"):
        list(texts)
    channels = Plan({0: (0, 1)}, {0: 2}, {}, {0: numpy.ones((2, 8), bool)})
    again = opened()
    assert again.process is not subject.process and again.generate([Prompt("", (5, 6))], Writing(2))
    with pytest.raises(UserError, match="channels"):
        again.process.set_plan(channels)
    vllm.close()
    assert again.process.process.poll() is not None


def test_several_devices_take_the_mask(models: Models) -> None:
    """Two processes of vLLM, each with half of every expert. They import this moe_lab, wherever it is installed."""
    _, plan, folder = models["olmoe"]
    model = ModelConfig(name="m", path=str(folder.parent / "model"), threads=1)
    arguments = {"tensor_parallel_size": 2, "max_model_len": 128, "max_num_seqs": 4}
    backend = BackendConfig("vllm", ready_seconds=280, arguments=arguments)
    engine = vllm.Process(Path(model.path), backend, model)
    try:
        engine.set_plan(plan)
        starts = [place for ids in PROMPTS for place in range(1, len(ids))]
        rows = [ids[: place + 1] for ids in PROMPTS for place in range(1, len(ids))]
        found = sorted(engine.items("log_likelihoods", 0.0, rows=rows, starts=starts))
    finally:
        engine.close()
    olmoe = models["olmoe"][0]
    with mask(olmoe, plan):
        right = expected(olmoe).flatten()
    assert (torch.tensor([value for _, value, _ in found]) - right).abs().max() < 1e-4


def test_too_little_memory_is_reported_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0")  # a share of all main memory
    with pytest.raises(Unavailable, match="memory"):
        opened(gpu_memory_utilization=1.0)
    assert not vllm._OPEN
    with pytest.raises(Unavailable, match="memory"):  # at once
        opened(gpu_memory_utilization=1.0)
