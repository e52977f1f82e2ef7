"""Exports of every kind, loaded by a process that has transformers and the folder, and no moe_lab."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from identities.plans import random_plan
from safetensors.torch import load_file, save_file

from moe_lab.pruning.export import export
from moe_lab.pruning.prune import prune

pytestmark = pytest.mark.slow

NAMES = ("olmoe", "deepseek_v3", "ernie4_5_moe", "granitemoe", "jamba", "deepseek")
PLANS = {"even": "even", "counts": "uneven", "widths": "one width", "ragged": "ragged"}
CASES = ("counts", "widths", "ragged")
PORTED = "deepseek"
"""A family that transformers lacks: it needs code for layers of one shape too."""
EVEN = ("olmoe", "deepseek_v3", "ernie4_5_moe", PORTED)
EXPORTS = [*((name, case) for name in NAMES for case in CASES), *((name, "even") for name in EVEN)]
FOR_OLDER = [*((name, "even") for name in EVEN), *(("olmoe", case) for case in CASES)]
OLDER, OLDERS = Path(__file__).parents[2] / ".venv-older", ("4.57.3", "5.0.0")
WITHOUT_MOE_LAB = """
import json, sys
from pathlib import Path
sys.modules["moe_lab"] = None
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging
logging.set_verbosity_error()
logging.disable_progress_bar()
root = Path(sys.argv[1])
tokens = load_file(root / "tokens.safetensors")["tokens"]

def load(folder, trust=True):
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, experts_implementation="eager", output_loading_info=True, trust_remote_code=trust
    )
    assert not any(report.values()), report
    with torch.no_grad():
        return model, model(input_ids=tokens).logits.contiguous()

def refusal(folder):
    try:
        load(folder, trust=False)
    except Exception as error:
        return str(error)

for folder in sorted(path for path in root.iterdir() if (path / "config.json").exists()):
    try:
        model, found = load(folder)
        model.save_pretrained(folder / "again")
        again, found_again = load(folder / "again")
        save_file({"logits": found, "again": found_again}, folder / "found.safetensors")
        again.set_experts_implementation("grouped_mm")
        used = {getattr(part, "config", again.config)._experts_implementation for part in again.modules()}
        said = {"implementations": sorted(used), "refused": [refusal(folder), refusal(folder / "again")]}
    except Exception as error:
        import traceback
        said = {"error": traceback.format_exc()}
    (folder / "said.json").write_text(json.dumps(said))
"""
WITH_OLDER = """
import json, sys
from pathlib import Path
sys.modules["moe_lab"] = None
import torch, transformers
from safetensors.torch import load_file
transformers.utils.logging.set_verbosity_error()
root, said = Path(sys.argv[1]), {"version": transformers.__version__}
tokens = load_file(root / "tokens.safetensors")["tokens"]
for folder in (root / name for name in sys.argv[2:]):
    for trust in (False, True):
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust)
            with torch.no_grad():
                logits = model.eval().float()(input_ids=tokens).logits
            expected = load_file(folder / "expected.safetensors")["logits"]
            answer = float((logits - expected).abs().max())
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        said[f"{folder.name} {trust}"] = answer
print("RESULT " + json.dumps(said))
"""


def run_alone(script: str, root: Path, *words: str, **environment: str) -> str:
    """Run Python code about the exports in `root` in a process of its own; what it printed."""
    alone = {"PATH": "", "HOME": str(root), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-c", script, str(root), *words]
    done = subprocess.run(command, cwd=root, env=alone, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {key: value for file in folder.glob("model*.safetensors") for key, value in load_file(file).items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every architecture and case, exported here and loaded there."""
    root = tmp_path_factory.mktemp("exports")
    save_file({"tokens": tiny.tokens()}, root / "tokens.safetensors")
    for name in NAMES:
        source = tmp_path_factory.mktemp(name)
        model = tiny.save(name, source, shard="60KB")
        for case in [case for other, case in EXPORTS if other == name]:
            plan = random_plan(model, PLANS[case], share=None if case == "counts" else 0.75, width=(8, 24, 16))
            out = export(source, plan, root / f"{name}-{case}")
            save_file({"logits": tiny.logits(prune(model, plan)).contiguous()}, out / "expected.safetensors")
    run_alone(WITHOUT_MOE_LAB, root)
    return root


@pytest.mark.parametrize(("name", "case"), EXPORTS)
def test_loads_without_moe_lab_and_equals_the_pruned_model(folders: Path, name: str, case: str) -> None:
    folder = folders / f"{name}-{case}"
    said = json.loads((folder / "said.json").read_text())
    assert "error" not in said, said["error"]
    expected = load_file(folder / "expected.safetensors")["logits"]
    found = load_file(folder / "found.safetensors")
    assert torch.equal(found["logits"], expected)
    # files of save_pretrained are not aligned: mapped weights give the same numbers only up to the last bit
    torch.testing.assert_close(found["again"], expected, rtol=0, atol=1e-5)
    ours, theirs = weights(folder), weights(folder / "again")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert said["implementations"] == ["grouped_mm"]
    if case == "even" and name != PORTED:
        assert said["refused"] == [None, None]
        return
    assert all("trust_remote_code=True" in refused for refused in said["refused"])


@pytest.mark.skipif(not OLDER.exists(), reason="no older transformers: `make older` installs them")
@pytest.mark.parametrize("version", OLDERS)
def test_older_versions_load_stock_exports_and_refuse_the_others(version: str, folders: Path) -> None:
    names = [f"{name}-{case}" for name, case in FOR_OLDER]
    printed = run_alone(WITH_OLDER, folders, *names, PYTHONPATH=str(OLDER / version), HOME=str(folders / version))
    said = json.loads(printed.rpartition("RESULT ")[2])
    assert said["version"] == version
    for name, case in FOR_OLDER:
        answers = [said[f"{name}-{case} {trust}"] for trust in (False, True)]
        if case == "even" and name != PORTED:
            assert all(isinstance(answer, float) and answer < 1e-5 for answer in answers), (name, answers)
        else:
            refused, trusted = answers  # with trust, it is refused too or right, and never a model of random experts
            assert isinstance(refused, str), (name, case, answers)
            assert isinstance(trusted, str) or trusted < 1e-5, (name, case, answers)
