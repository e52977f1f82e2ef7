"""From the files of a model, or of an export of ours, to one that can be scored: where they are,
which model they are, and what is read of them."""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event
from time import monotonic
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import httpx
import pytest
import tiny
import torch
import transformers
from identities.plans import random_plan
from processes import time_limit
from tiny import logits, settings
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

import moe_lab
from moe_lab.calibration import local_tokenizer
from moe_lab.config import CriterionConfig, ModelConfig
from moe_lab.errors import Unavailable, UserError
from moe_lab.models import config_json, experts, files, load, streamed
from moe_lab.models.checkpoint import INDEX
from moe_lab.models.config_json import size_of
from moe_lab.models.discover import moe_layers, routed_layers
from moe_lab.models.facts import facts
from moe_lab.models.files import (
    IdentifiedModel,
    check_model_path,
    fingerprint,
    hub_fingerprint,
    local_folder,
    model_files,
)
from moe_lab.models.load import load_model
from moe_lab.models.streamed import StreamedModel
from moe_lab.paths import private_cache, resolve, shipped_paths, user_cache
from moe_lab.pruning.export import export
from moe_lab.pruning.export.write import rewrite
from moe_lab.pruning.mask import mask
from moe_lab.pruning.plan import Plan
from moe_lab.pruning.prune import prune
from moe_lab.serving import vllm_plugin
from moe_lab.study.steps.scores import check_weights
from tests.campaign.models import reconfigure


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("halved")
    tiny.save("olmoe", folder, dtype=torch.bfloat16)
    return folder


def test_loaded_model_is_ready_to_be_scored(
    halved: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = load_model(settings(halved, threads=1))
    assert capfd.readouterr() == ("", "")
    assert model.dtype == torch.float32
    assert not model.training
    assert set(model.get_experts_implementation().values()) == {experts.CPU_EXPERTS}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert tokenizer.pad_token == "</s>"
    assert model.generation_config.pad_token_id is not None


def test_loaded_weights_are_those_of_the_checkpoint(halved: Path) -> None:
    model, _ = load_model(settings(halved, threads=1))
    expected = tiny.build("olmoe", dtype=torch.bfloat16).float()
    ids = tiny.tokens()
    assert torch.equal(model(input_ids=ids).logits, expected(input_ids=ids).logits)


def test_model_is_loaded_in_the_dtype_of_its_settings(halved: Path) -> None:
    model, _ = load_model(settings(halved, dtype="bfloat16"))
    assert model.dtype == torch.bfloat16
    assert set(model.get_experts_implementation().values()) == {"eager"}


@pytest.mark.parametrize(
    "device", ["cuda:99", *([] if torch.cuda.is_available() else ["balanced"])]
)
def test_missing_device_is_refused(device: str, halved: Path) -> None:
    message = rf"model\.device={re.escape(device)}: this machine has \d+ CUDA devices"
    with pytest.raises(UserError, match=message):
        load_model(settings(halved, device=device))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_model_beyond_gpu_memory_is_refused(halved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "resolve_device", lambda _: "balanced")
    with pytest.raises(UserError, match=r"model\.device=balanced: .* does not fit on the GPUs"):
        load_model(settings(halved, device="balanced"))


def test_loading_a_model_turns_inexact_and_unordered_products_of_gpus_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    torch.backends.cuda.enable_cudnn_sdp(True)
    tiny.save("olmoe", tmp_path)
    load_model(tiny.settings(tmp_path))
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.cuda
def test_cuda_keeps_the_stored_precision(halved: Path) -> None:
    model, _ = load_model(settings(halved, device="auto"))
    assert model.dtype == torch.bfloat16
    assert model.device.type == "cuda"
    assert set(model.get_experts_implementation().values()) == {"grouped_mm"}


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
    ],
)
@pytest.mark.parametrize(
    "name",
    [
        "olmoe",
        "mixtral",
        "jamba",
        "deepseek_v3",
        "lfm2_moe",
        "gpt_oss",
    ],
)
def test_layers_have_the_models_weights(
    name: str, stored: torch.dtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    tiny.build(name).to(stored).save_pretrained(tmp_path)
    full_model = tiny.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    model = StreamedModel(tmp_path, dtype=dtype, device="cpu")
    for number in (1, 2, 1):
        with model.layer(number) as layer:
            expected = full_model.get_submodule(f"{model.layers_path}.{number}")
            tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
            for tensor, weight in (*expected.named_parameters(), *expected.named_buffers()):
                assert (
                    torch.equal(tensors[tensor], weight) and tensors[tensor].dtype == weight.dtype
                ), tensor


def test_bfloat16_narrows_routers_but_not_biases(tmp_path: Path) -> None:
    """Of a checkpoint that is stored in one precision."""
    tiny.save("minimax_m2", tmp_path)
    model, _ = load_model(settings(tmp_path, dtype="bfloat16"))
    types = {part.name: part.tensor.dtype for part in moe_layers(model)[0].routing}
    assert types == {"weight": torch.bfloat16, "e_score_correction_bias": torch.float32}


@pytest.mark.parametrize("shape", [(24, 30), (24, 1), (12, 32)])
def test_projections_of_another_shape_are_not_stretched(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    tiny.save("olmoe", tmp_path)
    others = {
        f"model.layers.1.mlp.experts.{number}.up_proj.weight": torch.ones(shape)
        for number in range(16)
    }
    tiny.rewrite(tmp_path, lambda tensors: tensors.update(others))
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.experts"):
        tiny.streamed(tmp_path)


def test_tensors_are_read_once_and_freed_when_they_are_converted(tmp_path: Path) -> None:
    tiny.save("olmoe", tmp_path)
    reading = patch.object(
        StreamedModel, "_read_tensor", autospec=True, side_effect=StreamedModel._read_tensor
    )
    loading = patch.object(streamed, "load_tensors", side_effect=streamed.load_tensors)
    with reading as read, loading as loaded:
        model = tiny.streamed(tmp_path)
        for number in range(3):
            with model.layer(number, next_number=number + 1):
                pass
    names = [call.args[1] for call in read.call_args_list]
    assert sorted(names) == sorted(model.checkpoint.tensors)
    assert len(loaded.call_args_list) == 4
    for call in loaded.call_args_list:
        for name, tensor in call.args[1].items():
            with pytest.raises(KeyError, match=name):
                tensor[...]


def test_only_the_layer_that_is_read_next_stays_in_memory(tmp_path: Path) -> None:
    tiny.save("olmoe", tmp_path)
    model = tiny.streamed(tmp_path)
    with model.layer(0, next_number=1):
        assert list(model._pending) == [1]
    with model.layer(2):
        assert not model._pending


CASES = [
    (name, kind) for name in ("olmoe", "deepseek_v3", "deepseek") for kind in ("uneven", "ragged")
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> SimpleNamespace:
    """An export of one architecture."""
    name, kind = request.param
    root = tmp_path_factory.mktemp(f"{name}-{kind}")
    plan = random_plan(
        tiny.save(name, root / "source"), kind, share=0.8 if kind == "ragged" else None
    )
    return SimpleNamespace(
        name=name,
        kind=kind,
        folder=export(root / "source", plan, root / f"{name}_{kind}"),
        plan=plan,
    )


def test_its_facts_are_its_own(case: SimpleNamespace) -> None:
    result = facts(settings(case.folder, trust_remote_code=True))
    pruned = prune(tiny.build(case.name), case.plan)
    assert result["parameters"] == sum(weight.numel() for weight in pruned.parameters())
    for layer in routed_layers(pruned):
        described = result["layers"][layer.index]
        assert described["n_experts"] == len(case.plan.layers[layer.index].retained)
        assert described.get("widths", [layer.width] * layer.n_experts) == list(layer.widths)
        assert described["width"] == round(sum(layer.widths) / layer.n_experts)
        assert described["expert_parameters"] == round(
            3 * layer.hidden * sum(layer.widths) / layer.n_experts
        )
    json.dumps(result)


def test_only_stacks_can_be_pruned_again(case: SimpleNamespace) -> None:
    model, _ = load_model(settings(case.folder, trust_remote_code=True))
    counts = {layer.index: layer.n_experts for layer in routed_layers(model)}
    again = Plan.of_experts(
        {index: tuple(range(count - 1)) for index, count in counts.items()}, counts, {}
    )
    if case.kind == "uneven":
        with mask(model, again):
            masked = logits(model)
        assert torch.equal(masked, logits(prune(model, again)))
        return
    refused = (
        r"model_type=pruned_\w+ can be evaluated, but neither scored nor pruned: .*experts "
        r"is not a stack|packed experts, which can be evaluated, but neither scored nor pruned"
    )
    for attempt in (
        lambda: prune(model, again),
        lambda: mask(model, again).__enter__(),
        lambda: check_weights(CriterionConfig(name="reap"), settings(case.folder)),
    ):
        with pytest.raises(UserError, match=refused):
            attempt()


def test_without_trust_one_sentence_says_what_to_set(case: SimpleNamespace, tmp_path: Path) -> None:
    """Layers that transformers has need none, whatever the configuration maps."""
    for attempt in (load_model, facts):
        with pytest.raises(
            UserError, match=r"model_type=pruned_.*model\.trust_remote_code=true"
        ) as caught:
            attempt(settings(case.folder))
        assert "\n" not in str(caught.value)
    tiny.save("olmoe", tmp_path)
    reconfigure(tmp_path, auto_map={"AutoConfig": "x.Y"})
    load_model(settings(tmp_path))


COUNTS = {0: 8, 1: 9, 2: 10}
"""Layer -> number of experts in the export."""


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of a model, beside the model."""
    folder = tmp_path_factory.mktemp("uneven")
    tiny.save("olmoe", folder / "model")
    retained = {layer: tuple(range(count)) for layer, count in COUNTS.items()}
    plan = Plan.of_experts(retained, dict.fromkeys(range(3), 16))
    return export(folder / "model", plan, folder / "out")


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def test_vllm_plugin_reads_exports_as_models_of_their_family(uneven: Path) -> None:
    """vLLM's own classes are none of its business."""
    stock = read_config(uneven.parent / "model")
    assert vllm_plugin.family_config("x", stock) == stock
    assert vllm_plugin.family_config("x", read_config(uneven)) == {
        **stock,
        "architectures": ["PrunedOlmoeForCausalLM"],
        "num_experts": 10,
        vllm_plugin.LAYERS: {str(layer): {"num_experts": count} for layer, count in COUNTS.items()},
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 3}, "pruned.format=3"),
        ({"layers": {"0": {"experts": 2, "widths": [1, 2]}}}, "export=padded"),
    ],
)
def test_vllm_plugin_refuses_exports_that_vllm_would_serve_wrong(
    change: dict[str, Any], message: str, uneven: Path
) -> None:
    config = read_config(uneven)
    config["pruned"].update(change)
    with pytest.raises(ValueError, match="export") as error:
        vllm_plugin.family_config(str(uneven), config)
    text = str(error.value)
    assert message in text
    assert str(uneven) in text
    assert "\n" not in text


# ---- where files are, and what tells one model from another


def test_paths_that_lead_nowhere() -> None:
    for path in ("/nowhere/at/all", "no folder", "nobody"):
        with pytest.raises(UserError, match="is no folder: expected a folder, a hub id"):
            check_model_path(settings(path))
    with pytest.raises(UserError, match="is no folder"):
        fingerprint("/nowhere")
    check_model_path(settings("nobody/nothing"))
    with pytest.raises(
        UserError, match=r"model\.path=nobody/nothing .* no such model at revision v1"
    ):
        local_folder(settings("nobody/nothing", revision="v1"))


NOT_LOADED = [
    "README.md",
    "pytorch_model.bin",
    "notes.txt",
    "results_2026-11-30.json",
    "trainer_state.json",
    "._config.json",
    "._modeling.py",
    "._model-00003-of-00007.safetensors",
    "consolidated.safetensors",
    "model.fp16.safetensors",
    "checkpoint-500/config.json",
    "original/model.safetensors",
    "wandb/run.py",
    "requirements.txt",
]


def test_fingerprint_depends_on_content_alone(folder: Path, original: Path) -> None:
    original_fingerprint = fingerprint(original)
    for name in NOT_LOADED:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    check_model_path(settings(folder))
    assert fingerprint(folder) == original_fingerprint, "these files are never loaded"
    for file in ("config.json", "tokenizer.json", "model-00003-of-00007.safetensors"):
        data = bytearray((original / file).read_bytes())
        data[-1] ^= 1
        (folder / file).write_bytes(data)
        assert fingerprint(folder) != original_fingerprint, file
        shutil.copy(original / file, folder)
    for file in ("chat_template.jinja", "encoding/messages.py", "custom_generate/generate.py"):
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text("")
        assert fingerprint(folder) != original_fingerprint, file
        (folder / file).unlink()


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A folder with a tokenizer that has a token and a chat template more than that of models."""
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["w900"])
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_model_has_the_tokenizer_of_another_folder(
    folder: Path, other: Path, tmp_path: Path
) -> None:
    chosen = settings(folder, tokenizer=str(other))
    loaded = [load_model(chosen), streamed.open_streamed(chosen), (None, local_tokenizer(chosen))]
    plan = tiny.plan(loaded[0][0], 0.25)
    out = moe_lab.export(str(folder), plan, tmp_path / "out", tokenizer=str(other))
    loaded.append(load_model(settings(out)))
    assert all("w900" in tokenizer.get_vocab() for _, tokenizer in loaded)
    assert config_json.chat_templates(chosen) == {"default": "{{ messages }}"}


def test_tokenizer_of_another_folder_identifies_the_model(folder: Path, other: Path) -> None:
    identities = []
    for file in ("notes.txt", "chat_template.jinja", "tokenizer_config.json"):
        identities.append(IdentifiedModel.of(settings(folder, tokenizer=str(other))).identity)
        (other / file).write_text("{}")
    assert identities[0] == identities[1] != identities[2]
    assert identities[0].keys() - IdentifiedModel.of(settings(folder)).identity == {"tokenizer"}


@pytest.mark.parametrize("name", ["tokenizer", "empty", "nowhere", "o/p/q"])
def test_what_is_no_tokenizer_is_refused_before_weights_are_read(
    name: str, folder: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(other.parent)
    Path("empty").mkdir()
    (other / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(load, "_load_weights", lambda *_: pytest.fail("weights were read"))
    monkeypatch.setattr(streamed, "StreamedModel", lambda *_, **__: pytest.fail("weights"))
    for read in (load_model, streamed.open_streamed):
        with pytest.raises(UserError, match=name):
            read(settings(folder, tokenizer=name))


def test_tokenizer_of_the_hub_is_downloaded_without_weights(
    folder: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    download = Mock(return_value=str(other))
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert "w900" in load_model(settings(folder, tokenizer="o/name"))[1].get_vocab()
    assert download.call_args.kwargs["allow_patterns"] == [*files.TOKENIZER]


def test_files_of_all_tokenizers_are_part_of_the_model(folder: Path) -> None:
    """Of those that transformers has for a language model with experts."""
    families = Path(transformers.__file__).parent / "models"
    names = set()
    for kind, tokenizer in TOKENIZER_MAPPING_NAMES.items():
        code = families / kind / f"modeling_{kind}.py"
        # a class of which an installed package is missing raises ImportError
        with suppress(ImportError, AttributeError):
            if code.is_file() and "use_experts_implementation" in code.read_text():
                names |= set(getattr(transformers, tokenizer).vocab_files_names.values())
    assert {"tokenizer.json", "vocab.json", "merges.txt"} <= names
    for name in names:
        (folder / name).write_text("")
    assert names <= set(model_files(folder)[0])


def test_shards_in_a_folder_below_are_loaded_and_exported(folder: Path, tmp_path: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    (folder / "below").mkdir()
    for shard in set(index["weight_map"].values()):
        (folder / shard).rename(folder / "below" / shard)
    below = {name: f"below/{shard}" for name, shard in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps({**index, "weight_map": below}))
    model, _ = load_model(settings(folder))
    plan = tiny.plan(model, 0.25)
    moe_lab.export(str(folder), plan, tmp_path / "out")
    exported, _ = load_model(settings(tmp_path / "out"))
    assert torch.equal(logits(exported), logits(prune(model, plan)))
    rewrite(tmp_path / "out", {}, "", tmp_path / "again")
    assert torch.equal(logits(load_model(settings(tmp_path / "again"))[0]), logits(exported))
    for outside in ("/etc/passwd", "../model/below/x", "below/../../x"):
        (folder / INDEX).write_text(json.dumps({"weight_map": {"a": outside}}))
        with pytest.raises(UserError, match=f"{outside}: expected a file in"):
            check_model_path(settings(folder))


ON_THE_HUB = ModelConfig(name="n", path="owner/name")


@pytest.fixture
def snapshot(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoint in the hub's cache, which holds weights as links to files named by their
    sha256."""
    root = tmp_path / "hub/models--owner--name"
    commit = "c0ffee" * 6 + "c0de"
    (root / "refs").mkdir(parents=True)
    (root / "refs/main").write_text(commit)
    (root / "snapshots" / commit).mkdir(parents=True)
    (root / "blobs").mkdir()
    for file in folder.iterdir():
        blob = root / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, blob)
        (root / "snapshots" / commit / file.name).symlink_to(blob)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    hub_fingerprint.cache_clear()
    return root / "snapshots" / commit


@pytest.mark.usefixtures("snapshot")
def test_model_in_the_hub_cache_has_the_identity_of_a_folder(folder: Path) -> None:
    assert hub_fingerprint(ON_THE_HUB.path, ON_THE_HUB.revision) == fingerprint(folder)
    size = size_of(ModelConfig(name="n", path=str(folder)))
    assert size
    assert size_of(ON_THE_HUB) == size


@pytest.fixture(params=[True, False], ids=["stated", "unstated"])
def remote(
    request: pytest.FixtureRequest, folder: Path, snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Whether the hub states the files of a model, with the sha256 of weights, whose weights are
    not in the cache."""
    stated: dict[str, tuple[int, str]] = {"README.md": (1, ""), "old/a.safetensors": (1, "")}
    for file in folder.glob("*.safetensors"):
        stated[file.name] = file.stat().st_size, hashlib.sha256(file.read_bytes()).hexdigest()
    for link in snapshot.glob("*.safetensors"):
        link.unlink()
    monkeypatch.setattr(files, "configuration_folder", lambda _: snapshot)
    for module in (files, config_json):
        monkeypatch.setattr(module, "stated_files", lambda *_: stated if request.param else None)
    hub_fingerprint.cache_clear()
    config_json._numbers_from_files.cache_clear()
    return bool(request.param)


def test_model_on_the_hub_has_the_fingerprint_and_about_the_size_of_a_folder(
    remote: bool, folder: Path
) -> None:
    expected = fingerprint(folder) if remote else None
    assert hub_fingerprint(ON_THE_HUB.path, ON_THE_HUB.revision) == expected

    local = size_of(ModelConfig(name="n", path=str(folder)))
    size = size_of(ON_THE_HUB)
    assert size is None if not remote else size.bytes == pytest.approx(local.bytes, rel=0.1)


def test_large_file_is_hashed_again_only_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "REMEMBERED_FROM", 3)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    read = []
    digest = hashlib.file_digest
    monkeypatch.setattr(
        files.hashlib, "file_digest", lambda *arguments: (read.append(1), digest(*arguments))[1]
    )
    (file := tmp_path / "weights").write_bytes(b"one two")

    def is_read(times: int) -> bool:
        return (
            files.sha256_of(file) == hashlib.sha256(b"one two").hexdigest() and len(read) == times
        )

    assert is_read(1)
    assert is_read(1)
    os.utime(file, (1, 1))
    assert is_read(2)
    for record in tmp_path.glob("cache/moe_lab/hashes/*"):
        record.write_text("{")
    assert is_read(3)


def test_unreachable_hub_states_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    no_network = Mock(side_effect=httpx.ConnectError("Name or service not known"))
    monkeypatch.setattr(files, "is_hub_reachable", lambda: True)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", no_network)
    assert files.stated_files("owner/unreachable", None, "model") is None
    assert no_network.called


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mock]:
    """The requests to the hub, of which HF_HUB_OFFLINE allows none in tests."""
    request = Mock()
    monkeypatch.setattr(files, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr("huggingface_hub.get_session", lambda: SimpleNamespace(head=request))
    files._is_reachable.cache_clear()
    yield request
    files._is_reachable.cache_clear()


def test_hub_is_not_asked_offline(head: Mock) -> None:
    assert not files.is_hub_reachable()
    assert not head.called


@pytest.mark.parametrize("reply", ["prompt", "timeout", "silent"])
def test_hub_is_asked_once_without_waiting(
    reply: str, head: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    never = Event()
    head.side_effect = {
        "prompt": lambda *_, **__: None,
        "timeout": httpx.ConnectTimeout("timed out"),
        "silent": lambda *_, **__: never.wait(60),
    }[reply]
    with time_limit(2, monotonic):
        assert files.is_hub_reachable() is (reply == "prompt") is files.is_hub_reachable()
    assert head.call_count == 1
    never.set()


def test_model_of_an_unreachable_hub_is_unavailable(
    head: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    head.side_effect = httpx.ConnectTimeout("timed out")
    with pytest.raises(Unavailable, match=r"model\.path=owner/unreachable"):
        files.local_folder(ModelConfig(name="m", path="owner/unreachable"))


def test_shipped_models_and_files_are_found_and_other_paths_stay() -> None:
    assert (Path(resolve("pocket:olmoe")) / "config.json").is_file()
    assert Path(resolve("pocket:calibration/general.jsonl")).is_file()
    assert all(path.exists() for path in shipped_paths().values())
    for path in ("allenai/OLMoE-1B-7B-0924", "/some/folder", "model"):
        assert resolve(path) == path
    for path, nearest in (
        ("olmo", "olmoe"),
        ("calibration/genral.jsonl", "calibration/general.jsonl"),
    ):
        with pytest.raises(UserError, match=f"did you mean pocket:{re.escape(nearest)}"):
            resolve(f"pocket:{path}")
    with pytest.raises(UserError, match="did you mean pocket:olmoe"):
        resolve("pocket:../data/olmoe")


def test_caches_are_temporary_where_home_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is the user's alone, as anybody may write there."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert user_cache() == tmp_path / "home" / ".cache"
    # root may write anywhere
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    folder = user_cache()
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(UserError, match="XDG_CACHE_HOME"):  # nodes would not see it
        private_cache("jobs")
    somebody = os.getuid() + 1
    folder.rename(tmp_path / f"moe_lab-{somebody}")
    monkeypatch.setattr(os, "getuid", lambda: somebody)
    with pytest.raises(UserError, match="XDG_CACHE_HOME"):
        user_cache()
