"""GGUF files: converted by llama.cpp's own converter, without rounding, or refused in a
sentence."""

import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import preloaded
import pytest
import tiny
import torch
from example_steps import export_step_and_files
from identities.plans import random_plan
from processes import is_running, wait_until
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from moe_lab.config import ExportConfig, RecoveryConfig
from moe_lab.errors import Unavailable, UserError
from moe_lab.paths import resolve
from moe_lab.pruning.export import export, gguf
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune
from moe_lab.recovery.apply import TENSORS
from moe_lab.study.steps import perform
from moe_lab.study.steps.files import Files
from moe_lab.study.steps.recovery import Export

pytestmark = pytest.mark.slow

needs_converter = pytest.mark.skipif(
    not gguf.FETCHED.is_file(), reason="no converter to GGUF: make llama"
)
WRITES = "Path(options.outfile).write_bytes(Path(options.model, 'config.json').read_bytes())"


@pytest.fixture
def fake(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a converter that does what a line of code says."""

    def write(code: str) -> Path:
        path = tmp_path / "fake" / "convert_hf_to_gguf.py"
        path.parent.mkdir(exist_ok=True)
        options = "".join(
            f"    parser.add_argument('--{name}')\n"
            for name in ("outfile", "outtype", "model-name")
        )
        path.write_text(
            "import argparse, os, signal, sys, time\nfrom pathlib import Path\ndef main():\n"
            f"    parser = argparse.ArgumentParser()\n    parser.add_argument('model')\n{options}"
            f"    options = parser.parse_args()\n    {code}\n"
        )
        return path

    return write


@pytest.fixture
def ask(fake: Callable[[str], Path], tmp_path: Path) -> Callable[..., tuple[Export, Files]]:
    """Makes a step that exports a tiny model, in `tmp_path`, by a converter that does what a line
    of code says."""
    model = tiny.save("olmoe", tmp_path / "model")
    (tmp_path / "plan").mkdir()

    def ask(
        code: str, way: str = "even", recovery: RecoveryConfig | None = None
    ) -> tuple[Export, Files]:
        random_plan(model, way).save(tmp_path / "plan" / "plan.json")
        return export_step_and_files(
            tmp_path / "model", tmp_path, ExportConfig("natural", "gguf", str(fake(code))), recovery
        )

    return ask


@pytest.mark.parametrize(
    ("code", "way", "error", "message"),
    [
        (
            "print('reading'); sys.exit('it has no such tensor')",
            "even",
            UserError,
            "it has no such tensor",
        ),
        ("os.kill(os.getpid(), signal.SIGKILL)", "even", Unavailable, "signal 9"),
        ("import x_y", "even", UserError, "x_y"),
        (WRITES, "ragged", UserError, "export=masked"),
    ],
)
def test_failed_conversion_leaves_no_files(
    code: str,
    way: str,
    error: type[UserError],
    message: str,
    ask: Callable[..., Any],
    tmp_path: Path,
) -> None:
    request = ask(code, way)
    with pytest.raises(
        error, match=rf"^export.format=gguf: .*{re.escape(message)}[^\n]*$"
    ) as raised:
        perform(*request)
    assert type(raised.value) is error
    assert not any((tmp_path / "scratch").iterdir())
    assert not (tmp_path / "partial").exists()


PERFORM = """
import pickle, sys
from moe_lab.study.steps import perform
perform(*pickle.load(open(sys.argv[1], "rb")))
"""


def stop_conversion(request: tuple[Export, Files], folder: Path, number: signal.Signals) -> None:
    """Perform a step in another process, which is stopped while its converter sleeps."""
    file = folder / "work.pkl"
    file.write_bytes(pickle.dumps(request))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", PERFORM, str(file)], env=environment)
    unfinished = folder / "scratch" / ".checkpoint.unfinished" / "model.gguf"
    wait_until(lambda: unfinished.exists() and unfinished.read_text())
    converter = int(unfinished.read_text())
    assert is_running(converter)
    process.send_signal(number)
    process.wait()
    wait_until(lambda: not is_running(converter))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_stopped_conversion_can_be_repeated(
    number: signal.Signals,
    ask: Callable[..., Any],
    fake: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    request = ask("Path(options.outfile).write_text(str(os.getpid())); time.sleep(1000)")
    stop_conversion(request, tmp_path, number)
    folder = tmp_path / "scratch" / "checkpoint"
    assert not folder.exists()
    shutil.rmtree(tmp_path / "scratch")  # as the store does
    (tmp_path / "scratch").mkdir()
    fake(WRITES)
    perform(*request)
    check_gguf_files(folder)


def check_gguf_files(folder: Path) -> None:
    """The folder has a file of what `WRITES` converts, and no weights besides."""
    assert (folder / "model.gguf").read_bytes() == (folder / "config.json").read_bytes()
    names = {"README.md", "config.json", "generation_config.json", "plan.json", "tokenizer.json"}
    names |= {"model.gguf", "reap_selection.json", "tokenizer_config.json"}
    assert {file.name for file in folder.iterdir()} == names


def test_recovered_weights_are_converted(ask: Callable[..., Any], tmp_path: Path) -> None:
    copies = "import shutil; shutil.copy(f'{options.model}/model.safetensors', options.outfile)"
    request = ask(copies, "even", RecoveryConfig(name="dora", instructions="x"))
    (tmp_path / "finetune").mkdir()
    name = "model.layers.1.mlp.gate.weight"
    plan = Plan.load(tmp_path / "plan" / "plan.json")
    tuned = prune(tiny.build("olmoe"), plan).get_parameter(name) + 1
    save_file({name: tuned}, tmp_path / "finetune" / TENSORS)
    perform(*request)
    folder = tmp_path / "scratch" / "checkpoint"
    assert torch.equal(load_file(folder / gguf.FILE)[name], tuned)
    assert "gguf_file=" in (folder / "README.md").read_text()
    assert "DoRA" in (folder / "README.md").read_text()


def unconverted(folder: Path, dtype: torch.dtype, embedding: torch.dtype) -> dict[str, Any]:
    """Writes a checkpoint of one layer of two experts; its tensors."""
    layer = "model.layers.0.mlp"
    # the converter's fp32
    vectors = {f"{layer}.gate.weight": torch.zeros(2, 4), "model.norm.weight": torch.zeros(4)}
    experts = {
        f"{layer}.experts.{expert}.up_proj.weight": torch.zeros(4, 4, dtype=dtype)
        for expert in "01"
    }
    embeddings = {"model.embed_tokens.weight": torch.zeros(4, 4, dtype=embedding)}
    folder.mkdir()
    for name, text in (("README.md", ""), ("config.json", "{}")):
        (folder / name).write_text(text)
    tensors = {**embeddings, **vectors, **experts}
    save_file(tensors, folder / "model.safetensors")
    return tensors


@pytest.mark.parametrize(
    ("dtype", "embedding", "kind"),
    [
        (torch.float32, torch.float32, "f32"),
        (torch.bfloat16, torch.bfloat16, "bf16"),
        (torch.float16, torch.float16, "f16"),
        (torch.bfloat16, torch.float16, "f32"),
    ],
)
def test_no_number_is_rounded(
    dtype: torch.dtype,
    embedding: torch.dtype,
    kind: str,
    fake: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    tensors = unconverted(tmp_path / "model", dtype, embedding)
    path = fake("Path(options.outfile).write_text(options.outtype + options.model_name)")
    folder = gguf.convert(tmp_path / "model", tmp_path / "out", path, "N")
    assert (folder / "model.gguf").read_text() == f"{kind}N"
    fp64 = {"x": torch.zeros(2, dtype=torch.float64)}
    save_file({**tensors, **fp64}, tmp_path / "model" / "model.safetensors")
    with pytest.raises(UserError, match="x is of type F64"):
        gguf.convert(tmp_path / "model", tmp_path / "other", path, "N")
    assert not (tmp_path / "other").exists()


def test_missing_converter_is_reported_with_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "FETCHED", tmp_path / "convert_hf_to_gguf.py")
    with pytest.raises(UserError, match=r"^export.format=gguf: .*export.converter=PATH"):
        gguf.converter(ExportConfig("natural", "gguf"))


def test_pre_tokenizer_is_named_if_llama_cpp_has_it(tmp_path: Path) -> None:
    shipped: dict[str, Any] = json.loads(
        Path(resolve("pocket:olmoe"), "tokenizer.json").read_text()
    )
    model = shipped["model"]
    digits_last = {"type": "Sequence", "pretokenizers": [gguf.BYTE_LEVEL, gguf.DIGITS]}
    for changes, name in (
        ({}, "smollm"),
        ({"pre_tokenizer": gguf.BYTE_LEVEL}, "gpt-2"),
        ({"pre_tokenizer": {**gguf.BYTE_LEVEL, "add_prefix_space": True}}, None),
        ({"pre_tokenizer": digits_last}, None),
        ({"pre_tokenizer": None}, None),
        ({"normalizer": {"type": "NFC"}}, None),
        ({"model": {**model, "type": "Unigram"}}, None),
        ({"model": {**model, "ignore_merges": True}}, None),
        ({"model": {**model, "merges": [*model["merges"], ["Ċ", "Ċ"]]}}, None),
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps({**shipped, **changes}))
        assert gguf.pre_tokenizer(tmp_path) == name, changes


# With llama.cpp's converter.


def converted(
    folder: Path, plan: Plan, tokenizer: str, shape: str = "natural"
) -> tuple[Path, Path]:
    """An export of `folder`/model with the tokenizer of a shipped model, and its GGUF file."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(Path(resolve(f"pocket:{tokenizer}"), file), folder / "model" / file)
    written = export(folder / "model", plan, folder / "written", shape=shape)
    gguf_folder = gguf.convert(
        written, folder / "gguf", gguf.converter(ExportConfig(shape, "gguf")), "N"
    )
    return written, gguf_folder / gguf.FILE


def expert_stack(tensors: dict[str, torch.Tensor], layer: int, part: str) -> torch.Tensor:
    """The weights of all experts of a layer, by ascending index."""
    key = f"model.layers.{layer}.mlp.experts.{{}}.{part}_proj.weight"
    count = sum(key.format(number) in tensors for number in range(16))
    return torch.stack([tensors[key.format(number)] for number in range(count)])


@needs_converter
@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("deepseek", "natural"),
        ("deepseek_v3", "masked"),
        ("olmoe", "padded"),
        ("qwen3_next", "natural"),
    ],
)
def test_experts_are_stored_unchanged(
    family: str, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family that moe_lab has ported, experts that are barred, narrower ones, no layers for extra
    tokens."""
    monkeypatch.syspath_prepend(str(gguf.PACKAGES))
    from gguf import GGUFReader

    model = tiny.save(family, tmp_path / "model", vocab_size=1024)
    plan = random_plan(model, "ragged", share=1.0) if shape == "padded" else tiny.plan(model, 0.5)
    written, path = converted(tmp_path, plan, "olmoe", shape)
    file = GGUFReader(path)
    stored = {tensor.name: torch.tensor(tensor.data.copy()) for tensor in file.tensors}
    tensors = load_file(written / "model.safetensors")
    fields = {name: field.contents() for name, field in file.fields.items()}
    (count,) = [value for name, value in fields.items() if name.endswith(".expert_count")]
    assert fields["tokenizer.ggml.pre"] == "smollm"
    assert fields["general.name"] == "N"
    for layer, retained in plan.retained.items():
        assert count == (plan.layers[layer].n_experts if shape == "masked" else len(retained))
        for part in ("gate", "up", "down"):
            stack = expert_stack(tensors, layer, part)
            assert torch.equal(stored[f"blk.{layer}.ffn_{part}_exps.weight"], stack)
        if shape == "masked":
            bias = stored[f"blk.{layer}.exp_probs_b.bias"]
            barred = (bias == -10000).nonzero().flatten().tolist()
            assert barred == sorted(set(range(count)) - set(retained))


GGUF_STUDY = (
    "model=pocket_qwen3_moe",
    "criterion=aimer",
    "suite.benchmarks=[]",
    "export=natural",
    "export.format=gguf",
    "verify=true",
    "report=false",
    "store=store",
    "launcher=inline",
)
LARGEST_DIFFERENCE = """
import sys, torch, moe_lab
from moe_lab import Plan, load, mask
from transformers import AutoConfig, AutoModelForCausalLM
folder = sys.argv[1]
config = AutoConfig.from_pretrained(folder)
settings = dict(config=config, dtype=torch.float32, experts_implementation="eager")
read = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", **settings).eval()
assert read.config.num_experts == 12
tokens = torch.arange(512).view(4, 128)
model = load("pocket:qwen3_moe")[0]
with torch.no_grad(), mask(model, Plan.load(f"{folder}/plan.json")):
    print((model(tokens).logits - read(tokens).logits).abs().max().item())
"""
"""Of the logits of a GGUF file and those of the model that is masked by its plan."""


@needs_converter
def test_study_writes_gguf_with_the_logits_of_the_evaluated_model(tmp_path: Path) -> None:
    study = preloaded.run(tmp_path, "moe_lab", *GGUF_STUDY)
    assert study.returncode == 0, study.stderr
    (folder,) = tmp_path.glob("store/export/*/checkpoint")
    assert f"export: {folder} (verified" in study.stderr
    assert not list(folder.glob("*.safetensors"))
    assert not list(tmp_path.glob("store/partial/*"))
    process = subprocess.run(
        [sys.executable, "-c", LARGEST_DIFFERENCE, str(folder)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(gguf.PACKAGES), *sys.path])},
    )
    assert process.returncode == 0, process.stderr
    assert float(process.stdout.split()[-1]) == 0.0


PROMPTS = [
    "Tom has 12 apples,\n\n  and 3.5 pears.\n",
    "def f(x):\n    return x**2  # \t it's 2 \r\n",
]
SERVE = """
import json, sys, urllib.request
import xllamacpp
file, prompts, texts = json.load(sys.stdin)
settings = xllamacpp.CommonParams()
settings.model.path, settings.n_ctx, settings.n_parallel, settings.verbosity = file, 256, 1, -1
settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
settings.cpuparams.n_threads = 1
server = xllamacpp.Server(settings)

def ask(path, **content):
    where = urllib.request.Request(server.listening_address + path, json.dumps(content).encode())
    return json.load(urllib.request.urlopen(where))

tokens = [ask("/tokenize", content=text, add_special=False)["tokens"] for text in texts]
likely = []
for prompt in prompts:
    sampling = dict(n_predict=4, n_probs=20, temperature=-1, cache_prompt=False)
    reply = ask("/completion", prompt=prompt, **sampling)
    first = reply["completion_probabilities"][0]["top_logprobs"]
    likely.append([(token["id"], token["logprob"]) for token in first])
json.dump({"likely": likely, "tokens": tokens}, open(sys.argv[1], "w"))
"""


def random_texts() -> list[str]:
    letters = random.Random(0)
    alphabet = "ab  \n\n\n\t\r 12½².,'s't é日\u00a0\u2003_-()"
    texts = ["".join(letters.choices(alphabet, k=letters.randint(1, 60))) for _ in range(400)]
    return [*texts, "a special token: <|pad|>", *PROMPTS]


needs_llama_cpp = pytest.mark.skipif(
    not (gguf.PACKAGES / "xllamacpp").is_dir(), reason="no compiled llama.cpp: make llama"
)


@needs_converter
@needs_llama_cpp
@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe"])
def test_llama_cpp_reads_text_and_computes_logits_as_transformers_does(
    family: str, tmp_path: Path
) -> None:
    """In fp32, since llama.cpp also rounds activations when weights are in bf16."""
    source = resolve(f"pocket:{family}")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    written, path = converted(tmp_path, tiny.plan(model, 0.5), family)
    tokenizer = AutoTokenizer.from_pretrained(source)
    texts = random_texts()
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    subprocess.run(
        [sys.executable, "-c", SERVE, str(tmp_path / "reply.json")],
        input=json.dumps([str(path), prompts, texts]),
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(gguf.PACKAGES)},
    )
    reply = json.loads((tmp_path / "reply.json").read_text())
    assert reply["tokens"] == [tokenizer.encode(text) for text in texts]
    pruned = AutoModelForCausalLM.from_pretrained(written).eval()
    for prompt, likely in zip(prompts, reply["likely"], strict=True):
        with torch.no_grad():
            expected = pruned(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        assert len(likely) == 20
        for token, value in likely:
            assert value == pytest.approx(expected[token].item(), abs=1e-4)
