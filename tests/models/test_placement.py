"""Where a model lives and how its experts are run changes nothing: several places, a CUDA device,
the functions of the CPU; and main memory is seen as far as the machine, or the control group of a
job, gives it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import naive
import pytest
import tiny
import torch
from accelerate import cpu_offload
from identities.plans import plan_without_alignment, random_plan
from tiny import logits
from transformers import AutoModelForCausalLM

import moe_lab
from moe_lab import machine
from moe_lab.config import ModelConfig
from moe_lab.errors import UserError
from moe_lab.models import experts
from moe_lab.models.discover import moe_layers
from moe_lab.models.load import load_model
from moe_lab.pruning.export import export
from moe_lab.pruning.mask import mask
from moe_lab.pruning.prune import prune
from moe_lab.statistics import Layers, Statistics
from moe_lab.statistics.forward import ForwardHook
from moe_lab.statistics.gradients import GradientHook, collect_gradient_statistics
from moe_lab.statistics.observe import Observer, collect_statistics

ARCHITECTURES = ["qwen3_moe", "deepseek_v3:grouped", "gpt_oss"]
GIB = 2**30


def forward(model: Any, out: Path) -> Layers:
    ids = tiny.tokens()
    with Observer(model, ForwardHook) as observer:
        observer.run_batch(ids, ids != 5)
    for hook in observer.hooks:  # nothing was carried to another device while it was summed
        home = hook.layer.router.weight.device
        assert all(part.device == home for part in hook.sums.values()) or home.type == "meta"
    return observer.layers()


def backward(model: Any, out: Path) -> Layers:
    ids = tiny.tokens()
    return collect_gradient_statistics(model, GradientHook, [(ids, ids != 5)], out=out).layers


def split(model: Any) -> dict[str, str]:
    """One MoE layer on the disk, all else in memory."""
    last = moe_layers(model)[-1].index
    parts = [name for name, _ in model.model.named_children() if name != "layers"]
    device_map = {f"model.{name}": "cpu" for name in parts} | {"lm_head": "cpu"}
    return device_map | {
        f"model.layers.{n}": "disk" if n == last else "cpu" for n in range(len(model.model.layers))
    }


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_layer_on_disk_is_observed_and_not_masked(name: str, tmp_path: Path) -> None:
    plain = tiny.save(name, tmp_path / "model", shard="60KB")
    spread = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model",
        device_map=split(plain),
        offload_folder=tmp_path / "offload",
        experts_implementation="eager",
    )
    spread.eval().requires_grad_(False)
    last = moe_layers(spread)[-1]
    assert last.experts.down_proj.is_meta
    assert "disk" in set(spread.hf_device_map.values())
    for read in (forward, backward):
        naive.assert_sums_close(read(spread, tmp_path / "b"), read(plain, tmp_path / "a"))
    with (
        pytest.raises(UserError, match=r"are offloaded.*load the model without"),
        mask(spread, tiny.plan(plain, 0.5)),
    ):
        pass


def test_plans_do_not_change_experts_that_are_offloaded() -> None:
    """Their weights are there only while they run, so what is made of them before would be made of
    nothing."""
    plain = tiny.build("olmoe")
    spread = tiny.build("olmoe")
    for layer in moe_layers(spread):
        cpu_offload(layer.experts)
    even, narrow, merged = (random_plan(plain, way) for way in ("even", "ragged", "merged"))
    attempts = [lambda plan=plan: prune(spread, plan) for plan in (even, narrow, merged)]
    attempts += [lambda plan=plan: mask(spread, plan).__enter__() for plan in (even, merged)]
    for attempt in (*attempts, lambda: moe_lab.align(spread, plan_without_alignment(merged))):
        with pytest.raises(UserError, match=r"layers\.0\.mlp\.experts.*offloaded"):
            attempt()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_two_devices_sum_what_one_does(name: str, tmp_path: Path) -> None:
    tiny.save(name, tmp_path / "model")
    fields = {"name": "m", "path": str(tmp_path / "model"), "dtype": "float32"}
    single, divided = (
        load_model(ModelConfig(**fields, device=device))[0] for device in ("cuda:0", "balanced")
    )  # type: ignore[arg-type]
    assert len({layer.router.weight.device for layer in moe_layers(divided)}) == 2
    for read in (forward, backward):
        expected = read(single, tmp_path / "a")
        result = read(divided, tmp_path / "b")
        for layer, tensors in expected.items():
            for statistic, sums in tensors.items():
                assert torch.allclose(result[layer][statistic], sums, rtol=1e-5, atol=1e-6), (
                    layer,
                    statistic,
                )


@pytest.mark.parametrize(
    ("line", "limit", "least"),
    [
        ("0::/job/step", "job/memory.max", 3 * GIB),
        ("0::/job/step", "job/step/memory.max", 3 * GIB),
        ("9:memory:/job/step", "memory/job/memory.limit_in_bytes", 3 * GIB),
        ("9:cpu:/job/step", "cpu/job/memory.limit_in_bytes", 64 * GIB),
    ],
)
def test_memory_of_a_job_is_that_of_its_control_group(
    line: str, limit: str, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        machine.os, "sysconf", {"SC_PHYS_PAGES": 64 * GIB, "SC_PAGE_SIZE": 1}.__getitem__
    )
    monkeypatch.setattr(machine, "CONTROL_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(machine, "LIMITS", tmp_path / "limits")
    # clusters need not limit the group
    for setting, expected in (("0", 64 * GIB), ("10240", 10 * GIB)):
        monkeypatch.setenv("SLURM_MEM_PER_NODE", setting)
        assert machine.main_memory() == expected
    (tmp_path / "groups").write_text(f"3:cpu:/\n{line}\n")
    (file := tmp_path / "limits" / limit).parent.mkdir(parents=True)
    for stated, expected in (("max", 10 * GIB), (str(3 * GIB), min(least, 10 * GIB))):
        file.write_text(f"{stated}\n")
        assert machine.main_memory() == expected
    monkeypatch.setenv(machine.WORKERS, "3")
    assert machine.main_memory() == expected / 3, "others have the rest"


def test_processors_of_a_process_are_those_of_its_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.setattr(machine, "CONTROL_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(machine, "LIMITS", tmp_path)
    (tmp_path / "groups").write_text("0::/job/step\n")
    (tmp_path / "job/step").mkdir(parents=True)
    for quota, expected in (("max 100000", 8), ("50000 100000", 1), ("250000 100000", 3)):
        (tmp_path / "job/cpu.max").write_text(f"{quota}\n")
        assert machine.cores() == expected
    for workers, expected in (("1", 3), ("2", 1), ("9", 1)):
        monkeypatch.setenv(machine.WORKERS, workers)
        assert machine.cores() == expected, "others have the rest"
    monkeypatch.setenv(machine.WORKERS, "1")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "2")
    assert machine.cores() == 2


@pytest.mark.parametrize(
    ("is_cpu", "device", "pinned"),
    [(True, "cuda", True), (True, "cpu", False), (False, "cuda", False)],
)
def test_copies_from_the_cpu_to_a_gpu_are_pinned_and_not_waited_for(
    is_cpu: bool, device: str, pinned: bool
) -> None:
    batch = Mock(is_cpu=is_cpu)
    copy = experts.to_device(batch, torch.device(device))
    assert batch.pin_memory.called == pinned
    if pinned:
        batch.pin_memory().to.assert_called_once_with(torch.device("cuda"), non_blocking=True)
        assert copy is batch.pin_memory().to()


ON_CUDA = ["olmoe", "deepseek_v3", "gpt_oss", "qwen3_moe", "ernie4_5_moe"]


@pytest.mark.cuda
@pytest.mark.parametrize("name", ON_CUDA)
@pytest.mark.parametrize(
    ("read", "hook"),
    [(collect_statistics, ForwardHook), (collect_gradient_statistics, GradientHook)],
)
def test_sums_are_those_of_the_cpu(read: Callable[..., Statistics], hook: type, name: str) -> None:
    def sums(device: str) -> dict[int, dict[str, torch.Tensor]]:
        return read(tiny.build(name).to(device), hook, tiny.batches()).layers

    naive.assert_sums_close(sums("cuda"), sums("cpu"), 1e-4)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ON_CUDA)
def test_mask_pruned_model_and_export_agree(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny.save(name, tmp_path / "model", dtype=dtype).to("cuda")
    plan = tiny.plan(model, 0.5)
    with mask(model, plan):
        masked = logits(model)
    assert torch.equal(masked, logits(prune(model, plan)))
    folder = export(tmp_path / "model", plan, tmp_path / "out")
    settings = ModelConfig(
        name="m", path=str(folder), dtype=str(dtype).removeprefix("torch."), device="cuda"
    )
    reloaded, _ = load_model(settings)
    reloaded.set_experts_implementation("eager")
    assert torch.equal(masked, logits(reloaded))


def with_cpu_experts(name: str, **changes: Any) -> tuple[Any, str]:
    """A model that may use `cpu_experts`, and the implementation that it uses."""
    model = tiny.build(name, **changes)
    layers = moe_layers(model)
    experts.use_cpu_experts(model, layers)
    return model, str(layers[0].experts.config._experts_implementation)


# which has biases
@pytest.mark.parametrize("name", [name for name in tiny.ARCHITECTURES if name != "gpt_oss"])
def test_experts_on_the_cpu_have_the_bits_of_the_eager_forward(name: str) -> None:
    """Of many, few and one token."""
    model, implementation = with_cpu_experts(name)
    assert implementation == experts.CPU_EXPERTS
    inputs = tiny.tokens(6, 60), tiny.tokens(), tiny.tokens(1, 1)
    results = [tiny.logits(model, ids) for ids in inputs]
    model.set_experts_implementation("eager")
    for ids, result in zip(inputs, results, strict=True):
        assert torch.equal(result, tiny.logits(model, ids))


def test_other_experts_stay_eager(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Those with biases, of other precisions, and of a family that computes otherwise."""
    assert with_cpu_experts("gpt_oss")[1] == "eager"
    assert with_cpu_experts("olmoe", dtype=torch.bfloat16)[1] == "eager"
    model, implementation = with_cpu_experts("olmoe")
    model.save_pretrained(tmp_path)
    assert implementation not in (tmp_path / "config.json").read_text()
    model.set_experts_implementation("eager")
    layer, *_ = moe_layers(model)
    eager = layer.experts.forward
    monkeypatch.setattr(layer.experts, "forward", lambda hidden, *route: eager(hidden * 2, *route))
    experts.use_cpu_experts(model, [layer])
    assert layer.experts.config._experts_implementation == "eager"


@pytest.fixture
def torch_of_a_gpu_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Other processes import a torch that finds two GPUs, whatever drivers are listed; the file
    notes each import."""
    imports = tmp_path / "imports"
    lines = [
        "class cuda:",
        "    device_count = staticmethod(lambda: 2)",
        f"open({str(imports)!r}, 'a').write('x')",
    ]
    (tmp_path / "torch.py").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "version", lambda _: "2.13.0+cu130")
    cached = (machine.gpu_count, machine.package_version)
    for function in cached:
        function.cache_clear()
    yield imports
    for function in cached:
        function.cache_clear()


def test_gpus_are_those_that_torch_finds(
    torch_of_a_gpu_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the driver lists none, as in WSL2 and of AMD. torch is asked once."""
    assert machine.visible_gpus() == machine.visible_gpus() == ["0", "1"]
    assert len(torch_of_a_gpu_machine.read_text()) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f2c,MIG-7a,-1")
    assert machine.visible_gpus() == ["GPU-8f2c", "MIG-7a"]


def test_torch_without_gpus_is_not_asked(
    torch_of_a_gpu_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "version", lambda _: "2.13.0+cpu")
    assert machine.visible_gpus() == []
    assert not torch_of_a_gpu_machine.exists()


def test_torch_that_cannot_be_imported_has_no_gpu(
    torch_of_a_gpu_machine: Path, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so')")
    assert machine.visible_gpus() == []
