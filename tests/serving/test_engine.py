"""Plans as masks on an engine of vLLM: the same as the masked model, as the plan's export is in
test_vllm.py."""

import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from processes import is_running, wait_until
from pyarrow import parquet
from scipy.stats import chi2_contingency
from studies import run_on_boolq
from test_vllm import (
    FAMILIES,
    NEEDS_VLLM,
    PROMPTS,
    Models,
    ask,
    expected,
    exported,
    fewer,
    preloaded_vllm,
)

from moe_lab.config import BackendConfig, ModelConfig, Sampling
from moe_lab.errors import Unavailable, UserError
from moe_lab.evaluation.engines import GenerationSettings, Prompt, vllm
from moe_lab.evaluation.engines.hf import LoadedModel
from moe_lab.models.load import load_model
from moe_lab.paths import resolve
from moe_lab.pruning.layer_plan import LayerPlan
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.result_files import read_record

pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return exported(FAMILIES, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def said(models: Models) -> dict[str, Any]:
    """What engines answer under `plans_of` a model; also one whose masks do nothing."""
    model, plan, folder = models["olmoe"]
    usual = under_plans(model, plan, folder)
    # the first, before routers of the process are patched
    runs = {"no effect": {**usual, "unmasked": True}}
    return ask(runs | {name: under_plans(*parts) for name, parts in models.items()})


def plans_of(model: Any, uneven: Plan) -> list[Plan | None]:
    """No plan, one whose layers differ, one whose layers do not, and none again."""
    return [None, uneven, fewer(model, 2), None]


def under_plans(model: Any, plan: Plan, exported: Path) -> dict[str, Any]:
    plans = [
        sorted(engine_plan.retained.items()) if engine_plan else []
        for engine_plan in plans_of(model, plan)
    ]
    return {"folder": str(exported.parent / "model"), "plans": plans}


def check_masked(replies: Any, model: Any, plan: Plan) -> None:
    """The replies under each plan are those of the masked model."""
    assert not isinstance(replies, str), replies
    for engine_plan, reply in zip(plans_of(model, plan), replies, strict=True):
        with mask(model, engine_plan) if engine_plan else nullcontext():
            right = expected(model)
        assert (torch.tensor(reply["losses"]) - right.flatten()).abs().max() < 1e-4
        assert (torch.tensor(reply["sums"]) - right.sum(1)).abs().max() < 1e-3
    first, of_uneven, of_uniform, again = (torch.tensor(reply["losses"]) for reply in replies)
    assert min((first - of_uneven).abs().max(), (of_uneven - of_uniform).abs().max()) > 1e-3
    assert (first - again).abs().max() < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_masks_on_one_engine_are_the_masked_model(
    name: str, models: Models, said: dict[str, Any]
) -> None:
    model, plan, _ = models[name]
    check_masked(said[name], model, plan)


def test_masks_are_in_a_compiled_engine(models: Models) -> None:
    """Traced and serialised as for Inductor, whose C++ would take twice as long to compile as all
    else."""
    model, plan, folder = models["olmoe"]
    tracing = {"mode": "DYNAMO_TRACE_ONCE", "backend": "aot_eager"}
    arguments = {"enforce_eager": False, "compilation_config": tracing}
    compiled = {**under_plans(model, plan, folder), "arguments": arguments}
    check_masked(ask({"compiled": compiled}, TORCHDYNAMO_DISABLE="0")["compiled"], model, plan)


def test_masks_without_effect_are_refused(said: dict[str, Any]) -> None:
    assert isinstance(said["no effect"], str)
    assert "no effect" in said["no effect"]


def study(store: Path, name: str, *overrides: str) -> str:
    """Runs a study of the shipped model; returns what its worker printed."""
    process = run_on_boolq(
        store, "launcher=inline", "allow_code_execution=true", f"study={name}", *overrides
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return "".join(log.read_text() for log in (store / "logs").rglob("*.log"))


def outcomes(store: Path, name: str) -> dict[tuple[str, ...], list[Any]]:
    """(criterion, ratio, benchmark) -> outcome and answer loss of every item."""
    results = {}
    for cell in (read_record(store, name) or {})["cells"]:
        for benchmark, folder in cell["evaluate"].items():
            rows = parquet.read_table(store / folder / "samples.parquet").to_pylist()
            values = [(row["outcome"], row["answer_loss"]) for row in rows]
            results[(cell["cell"]["criterion"], cell["cell"]["ratio"], benchmark)] = values
    return results


def test_study_gets_the_same_answers_from_vllm(tmp_path: Path) -> None:
    """Two plans of experts and the unpruned model on one engine; tests/study/test_methods.py has an
    export on one."""
    text = (
        "criterion=reap",
        "ratio=0.25,0.5",
        "suite.benchmarks=[pocket_humaneval,pocket_arc_easy,pocket_gsm8k]",
    )
    log = study(tmp_path, "masks", *text, "backend=vllm", f"interpreters.vllm={preloaded_vllm()}")
    assert log.count("vLLM starts with") == 1
    study(tmp_path, "loaded", *text)
    by_vllm = outcomes(tmp_path, "masks")
    by_transformers = outcomes(tmp_path, "loaded")
    assert by_vllm.keys() == by_transformers.keys() and len(by_vllm) == 3 * 3
    for key, values in by_vllm.items():
        for (outcome, loss), (right, right_loss) in zip(values, by_transformers[key], strict=True):
            assert outcome == right, key
            assert loss == pytest.approx(right_loss, abs=1e-4), key


USER = f"""
import sys
sys.path[:0] = {sys.path}
from test_engine import GenerationSettings, Prompt, opened
engine = opened(forked=False)
print(engine.process.pid, flush=True)
for _ in range(10000):
    engine.generate([Prompt("", (5, 6, 7), GenerationSettings(64))] * 64, 64)
"""


def test_engine_ends_with_its_process() -> None:
    """And so does the folder in which it has moe_lab for the processes that it starts."""
    with subprocess.Popen([sys.executable, "-c", USER], stdout=subprocess.PIPE, text=True) as user:
        assert user.stdout
        engine = int(user.stdout.readline())
        assert is_running(engine)
        (folder,) = Path(tempfile.gettempdir()).glob(f"moe_lab-vllm-{engine}-*")
        user.kill()
    wait_until(lambda: not is_running(engine))
    assert not folder.exists()


ENGINE = vllm.OpenEngine()


def opened(*, forked: bool = True, **arguments: Any) -> vllm.VllmModel:
    model = ModelConfig(name="m", path="pocket:olmoe", threads=1)
    python = preloaded_vllm() if forked else None
    backend = BackendConfig("vllm", ready_seconds=280, arguments=arguments, python=python)
    return ENGINE.open(Path(resolve(model.path)), backend, model, None)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 2.0, "top_k": 9, "top_p": 0.8},
        {"temperature": 2.0, "top_p": 0.9, "min_p": 0.1},
    ],
)
def test_texts_are_distributed_as_those_of_the_loaded_model(sampling: dict[str, float]) -> None:
    """By a chi-squared test of 2,000 texts of each, without rare texts."""
    settings = GenerationSettings(2, sampling=Sampling(**sampling).resolved({}))  # type: ignore[arg-type]
    prompts = [Prompt("", (5, 6, 7, 8), settings, seed=seed) for seed in range(2000)]
    model = ModelConfig(name="m", path="pocket:olmoe", threads=1)
    counts = [
        Counter(text.text for text in engine.generate(prompts, 2000))
        for engine in (opened(), LoadedModel(*load_model(model)))
    ]
    common = [text for text, count in (counts[0] + counts[1]).most_common() if count > 20]
    assert len(common) > 5
    table = [[of[text] for text in common] for of in counts]
    assert chi2_contingency(table).pvalue > 1e-3


def test_dead_engine_is_reported_and_the_next_starts() -> None:
    # one text after the other, so that most are left when the first is there
    subject = opened(max_num_seqs=1)
    request = {"tokens": [5, 6], "temperature": 0, "max_tokens": 200, "stop": []}
    texts = subject.items("generate", 200, requests=[request] * 64, end_token_ids=[])
    next(texts)
    subject.process.kill()
    with pytest.raises(Unavailable, match="vLLM ended"):
        list(texts)
    channels = Plan({0: LayerPlan(2, (0, 1), numpy.ones((2, 8), bool))})
    again = opened()
    assert again.process is not subject.process
    assert again.generate([Prompt("", (5, 6), GenerationSettings(2))], 1)
    with pytest.raises(UserError, match="channels"):
        again.set_plan(channels)
    with pytest.raises(Unavailable, match="layer 7"):
        again.set_plan(Plan.of_experts({7: (0, 1)}, {7: 2}))
    ENGINE.close()
    assert again.process.poll() is not None


def test_several_devices_take_the_mask(models: Models) -> None:
    """Two processes of vLLM, each with half of every expert. They import this moe_lab, wherever it
    is installed."""
    olmoe, plan, folder = models["olmoe"]
    model = ModelConfig(name="m", path=str(folder.parent / "model"), threads=1)
    arguments = {"tensor_parallel_size": 2, "max_model_len": 128, "max_num_seqs": 4}
    backend = BackendConfig("vllm", ready_seconds=280, arguments=arguments, python=preloaded_vllm())
    engine = vllm.VllmModel(Path(model.path), backend, model)
    try:
        engine.set_plan(plan)
        rows = [ids[:length] for ids in PROMPTS for length in range(2, len(ids) + 1)]
        starts = [len(row) - 1 for row in rows]
        result = sorted(engine.items("log_likelihoods", 0.0, rows=rows, starts=starts))
    finally:
        engine.close()
    with mask(olmoe, plan):
        right = expected(olmoe).flatten()
    assert (torch.tensor([value for _, value, _ in result]) - right).abs().max() < 1e-4


def test_too_little_memory_is_reported_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "0")  # a share of all main memory
    with pytest.raises(Unavailable, match="memory"):
        opened(gpu_memory_utilization=1.0)
    assert ENGINE.engine is None
    with pytest.raises(Unavailable, match="memory"):  # at once
        opened(gpu_memory_utilization=1.0)
