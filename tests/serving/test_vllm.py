"""What a real vLLM engine serves of an export is the masked model; what it would serve wrong, the
plugin refuses.

`make vllm` makes the environment. vLLM on a CPU runs head sizes of 32 and more, so that the tiny
models are a little larger here.
"""

import json
import os
import shutil
import subprocess
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from typing import Any

import preloaded
import psutil
import pytest
import tiny
import torch
from identities.plans import random_plan
from processes import wait_until
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from moe_lab.config import BackendConfig, ModelConfig
from moe_lab.errors import Unavailable
from moe_lab.evaluation.engines import Engine, GenerationSettings, Prompt
from moe_lab.evaluation.engines.hf import LoadedModel
from moe_lab.evaluation.engines.server import served_model
from moe_lab.models.discover import moe_layers
from moe_lab.paths import user_cache
from moe_lab.pruning.export import export
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan

ROOT = Path(__file__).parents[2]
# torch compiles nothing below a path with a space
PYTHON = (ROOT / ".venv-vllm").resolve() / "bin" / "python"
NEEDS_VLLM = pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no vLLM: `make vllm` installs it"),
    pytest.mark.timeout(900),  # a fixture starts twenty engines, some seconds each
]

HEADS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
LATENT = {
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
DEEPSEEK_V3 = {**HEADS, **LATENT, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
FAMILIES: dict[str, dict[str, Any]] = {
    "olmoe": {**HEADS, "intermediate_size": 64},
    "qwen2_moe": HEADS,
    "qwen3_moe": {**HEADS, "head_dim": 32, "moe_intermediate_size": 64},
    "mixtral": HEADS,
    "deepseek_v2": {**HEADS, **LATENT, "moe_intermediate_size": 64},
    "deepseek_v3": DEEPSEEK_V3,
    "ernie4_5_moe": HEADS,
    "deepseek_v3:grouped": DEEPSEEK_V3,
    "glm4_moe": {**HEADS, "head_dim": 32},
}
PORTED = "deepseek"
"""A family that transformers lacks, so that its own code has to be trusted."""
STOCK = ("olmoe", "mixtral", "qwen3_moe", PORTED)
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_MLA_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # each process would compile the function that ranks log-probabilities
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONPATH": str(ROOT),
}
IN_PROCESS = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
Models = dict[str, tuple[Any, Plan, Path]]
PROMPTS = tiny.tokens(3, 20).tolist()


def fewer(model: Any, *counts: int) -> Plan:
    """Layers without their first experts, of each of the router's groups: as many as `counts` says
    in turn."""
    layers = moe_layers(model)
    retained = {}
    for layer, count in zip(layers, cycle(counts), strict=False):
        size = layer.n_experts // layer.n_group
        retained[layer.index] = tuple(
            expert for expert in range(layer.n_experts) if expert % size >= count
        )
    return Plan.of_experts(retained, {layer.index: layer.n_experts for layer in layers})


def narrower(model: Any) -> Plan:
    """Another width in each layer, one for all of its experts."""
    widths = [layer.width - 8 * position for position, layer in enumerate(moe_layers(model))]
    return random_plan(model, "one width", share=1.0, width=widths)


def expected(model: Any) -> torch.Tensor:
    """Log-probability of each token of the prompts but the first."""
    ids = torch.tensor(PROMPTS)
    with torch.no_grad():
        scores = model(input_ids=ids).logits.log_softmax(-1)
    return scores[:, :-1].gather(2, ids[:, 1:, None])[..., 0]


def serve(folders: dict[str, Path], **environment: str) -> dict[str, Any]:
    """What vLLM's own engine for each folder says: log-probabilities, or why it refuses."""
    runs = {
        name: {"folder": str(folder), "trusted": name == PORTED} for name, folder in folders.items()
    }
    return ask(runs, **environment)


def preloaded_vllm() -> str:
    """The Python of vLLM, with vLLM in memory."""
    return str(preloaded.python(str(PYTHON), preloaded.VLLM_LIBRARIES, **IN_PROCESS))


def ask(runs: dict[str, dict[str, Any]], **environment: str) -> dict[str, Any]:
    """Name -> what vllm_program.py answers for a run in the environment of vLLM."""
    process = subprocess.run(
        [preloaded_vllm(), "-m", "vllm_program"],
        input=json.dumps({"prompts": PROMPTS, "runs": list(runs.values())}),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        env={**os.environ, "XDG_CACHE_HOME": str(user_cache()), **IN_PROCESS, **environment},
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, process.stderr[-5000:]
    return dict(zip(runs, json.loads(lines[-1].removeprefix("RESULT ")), strict=True))


def difference(answer: Any, model: Any) -> float:
    """Largest difference of a log-probability; a refusal fails."""
    assert not isinstance(answer, str), answer
    return float((torch.tensor(answer) - expected(model)).abs().max())


def with_expert(folder: Path, out: Path, expert: int, source: int | None) -> Path:
    """A copy of an export with one expert of layer 0 replaced by a copy of another one; None: by
    nothing."""
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    for role in ("gate_proj", "up_proj", "down_proj"):
        key = f"model.layers.0.mlp.experts.{{}}.{role}.weight"
        tensors.pop(key.format(expert), None)
        if source is not None:
            tensors[key.format(expert)] = tensors[key.format(source)].clone()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def exported(families: dict[str, dict[str, Any]], root: Path) -> Models:
    """Name -> the model, a plan whose layers differ, and its natural export."""
    models_by_name = {}
    for name, changes in families.items():
        folder = root / str(len(models_by_name))
        model = tiny.save(name, folder / "model", **changes)
        plan = fewer(model, 1, 2)
        models_by_name[name] = (model, plan, export(folder / "model", plan, folder / "uneven"))
    return models_by_name


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Of all families, and of some with layers of different widths."""
    made = exported({**FAMILIES, PORTED: HEADS}, tmp_path_factory.mktemp("models"))
    for name in ("olmoe", "qwen3_moe", "deepseek_v2"):
        model, _, folder = made[name]
        plan = narrower(model)
        made[f"{name}, widths"] = (
            model,
            plan,
            export(folder.parent / "model", plan, folder.parent / "narrower"),
        )
    return made


@pytest.fixture(scope="module")
def served(models: Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What engines with the plugin say of these exports, and of some that cannot be served."""
    folders = {name: folder for name, (_, _, folder) in models.items()}
    wrong = tmp_path_factory.mktemp("wrong")
    olmoe, _, folder = models["olmoe"]
    folders["missing"] = with_expert(folder, wrong / "missing", 3, None)
    folders["surplus"] = with_expert(folder, wrong / "surplus", 15, 3)  # of 15, counted from 0
    folders["ragged"] = export(
        folder.parent / "model", random_plan(olmoe, "ragged", share=1.0), wrong / "ragged"
    )
    folders["constants"] = export(
        folder.parent / "model",
        random_plan(olmoe, "constants"),
        wrong / "constants",
        shape="masked",
    )
    folders["newer"] = shutil.copytree(folder, wrong / "newer")
    config = json.loads((folder / "config.json").read_text())
    config["pruned"]["format"] = 3
    (wrong / "newer/config.json").write_text(json.dumps(config))
    folders["empty"] = wrong / "empty"
    folders["empty"].mkdir()
    gpt_oss = tiny.save("gpt_oss", wrong / "gpt_oss", **HEADS, head_dim=32)
    folders["gpt_oss"] = export(wrong / "gpt_oss", fewer(gpt_oss, 1, 2), wrong / "gpt_oss_uneven")
    return serve(folders)


@pytest.mark.parametrize("name", [*FAMILIES, PORTED, "olmoe, widths", "qwen3_moe, widths"])
def test_uneven_exports_are_served_as_the_masked_model(
    name: str, models: Models, served: dict[str, Any]
) -> None:
    model, plan, folder = models[name]
    assert "pruned" in json.loads((folder / "config.json").read_text())
    with mask(model, plan):
        assert difference(served[name], model) < 1e-4
    assert difference(served[name], model) > 1e-3  # and not as the unpruned one


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("missing", ["layer 0", "[3]"]),
        ("surplus", ["layer 0", "[15]"]),
        ("ragged", ["padded"]),
        ("newer", ["pruned.format=3"]),
        ("constants", ["vLLM 0.33"]),
        ("empty", ["config.json"]),
        ("gpt_oss", ["GptOssForCausalLM", "export=masked"]),
        ("deepseek_v2, widths", ["n_shared_experts", "export=masked"]),
    ],
)
def test_plugin_refuses_exports_that_vllm_serves_wrong(
    name: str, parts: list[str], served: dict[str, Any]
) -> None:
    assert isinstance(served[name], str) and all(part in served[name] for part in parts), served[
        name
    ]


def test_uniform_exports_need_no_plugin(models: Models) -> None:
    """vLLM's own classes read them."""
    plans = {name: (name, tiny.plan(models[name][0], 0.25)) for name in STOCK}
    merging = random_plan(models["qwen3_moe"][0], "merged rows", share=0.75)
    plans["merged"] = ("qwen3_moe", merging)
    folders = {}
    for case, (name, plan) in plans.items():
        folder = models[name][2].parent
        folders[case] = export(folder / "model", plan, folder / f"uniform-{case}")
    served = serve(folders, VLLM_PLUGINS="")
    for case, (name, plan) in plans.items():
        model = models[name][0]
        with mask(model, plan):
            assert difference(served[case], model) < 1e-4, case


VLLM_SERVER = (
    f"{PYTHON} -m vllm.entrypoints.openai.api_server --model {{checkpoint}} --served-model-name "
    "{name} "
    "--port {port} --dtype float32 --enforce-eager --max-model-len 128 --max-num-seqs 4"
)


def processes(group: int) -> list[psutil.Process]:
    """The processes of a group that have not ended."""
    result = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                result.append(process)
    return result


def written(engine: Engine, prompts: list[str], stop: tuple[str, ...] = ()) -> list[str]:
    settings = GenerationSettings(12, stop)
    request = [
        Prompt(prompt, tuple(engine.tokenizer(prompt).input_ids), settings) for prompt in prompts
    ]
    return [text.text for text in engine.generate(request, 64)]


STOP_TEXTS = ("w3 w4", "w5 w6", "w7 w8", "w9 w10", "w11 w12")
TEXT_PROMPTS = ["w20 w21 w22", "w30 w40"]


def test_vllm_server_reads_an_export_whose_layers_differ(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It also stops at more texts than it takes, and says why its engine was killed."""
    model, plan, folder = models["olmoe"]
    tokenizer = AutoTokenizer.from_pretrained(folder, pad_token="<pad>")
    with mask(model, plan):
        local = written(LoadedModel(model, tokenizer), TEXT_PROMPTS)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    backend = BackendConfig(name="server", command=VLLM_SERVER, ready_seconds=280)
    config = ModelConfig(name="m", path=str(folder))
    with served_model(folder, backend, config, "m") as server:
        texts = written(server, TEXT_PROMPTS)
        last_word = texts[0].split()[-1]
        stopped = written(server, TEXT_PROMPTS, (*STOP_TEXTS, last_word))
        group = server.exit_reason.args[0].process.pid  # type: ignore[attr-defined]
        (engine,) = (process for process in processes(group) if "EngineCor" in process.name())
        engine.kill()
        with pytest.raises(Unavailable, match=r"^.*EngineCore.*$"):  # one line
            written(server, TEXT_PROMPTS)
    wait_until(lambda: not processes(group))  # all are told to end, and none is waited for
    # the two decode spaces in their ways
    assert [text.split() for text in texts] == [text.split() for text in local]
    assert [text.partition(last_word)[0] for text in stopped] == [
        text.partition(last_word)[0] for text in texts
    ]
