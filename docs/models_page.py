"""Print the page of published models: `python docs/models_page.py FOLDER > docs/models.md`.

FOLDER has OWNER--NAME_config.json for each model, and OWNER--NAME_hf_quant_config.json if the
model has that file.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from moe_lab.config import AllocationConfig, CriterionConfig, ModelConfig
from moe_lab.inspect import describe
from moe_lab.models.checkpoint import read_json
from moe_lab.models.config_json import QUANTISATION_FIELDS, quantization_section
from moe_lab.models.load import skeleton
from moe_lab.models.transformers_private import NameMapping
from moe_lab.pruning.export import check_export
from moe_lab.study.steps.plans import trial_plan

HEAD = """# Published models

This page lists what `moe-lab inspect` says of the `config.json` of {count} published
models, among them dense ones. The files were collected by ai-dynamo/aiconfigurator (Apache-2.0);
no weights were read. Other models may be supported too: `inspect` says so of any model.

Of each supported family, natural exports of the first model here were checked as before a study,
for a plan with equal and for one with unequal numbers of experts, with the names and shapes of all
tensors in bfloat16.

This page is printed by `python docs/models_page.py FOLDER`, where FOLDER has these files. It takes
about ten minutes.

| model | family | weights | supported |
|---|---|---|---|
"""


def page(folder: Path) -> str:
    """The page in Markdown. `folder`: as in the docstring of this module. UserError if an export of
    a supported model is refused."""
    rows = []
    exported: set[str] = set()
    with TemporaryDirectory() as temporary:
        for model in models(folder, Path(temporary)):
            kind = kind_of(model)
            rows.append(row(model))
            if rows[-1].endswith("| yes |\n") and kind not in exported:
                exported.add(kind)
                _check_exports(model)
    return "".join([HEAD.format(count=len(rows)), *rows])


def kind_of(model: Path) -> str:
    """The model_type of the model in the folder `model`."""
    return str(read_json(model / "config.json")["model_type"])


def models(folder: Path, target: Path) -> Iterator[Path]:
    """For each model, a new folder below `target` with its files. `folder`: as in the docstring of
    this module."""
    for file in sorted(folder.glob("*_config.json")):
        prefix = file.name.removesuffix("config.json")
        if prefix.endswith("_hf_quant_"):
            continue
        model = target / prefix.removesuffix("_")
        model.mkdir()
        for part in folder.glob(f"{prefix}*"):
            shutil.copy(part, model / part.name.removeprefix(prefix))
        yield model


def row(model: Path) -> str:
    """The row of the model in the folder `model`."""
    config = read_json(model / "config.json")
    weights = quantization_section(config, model).get("method", "plain")
    _, rows, _ = describe(ModelConfig(name="local", path=str(model)))
    answer = dict(rows)["supported"].replace(f"{model}/", "")
    kind = kind_of(model)
    answer = answer.replace(f"model_type={kind} is not supported: ", "")
    return f"| {model.name.replace('--', '/')} | `{kind}` | {weights} | {answer} |\n"


def _check_exports(model: Path) -> None:
    """Raise UserError if a natural export is refused, of a plan with equal or with unequal numbers
    of experts. Changes the files in the folder `model`, see `_add_weights`."""
    _add_weights(model)
    for allocation in ("uniform", "global"):
        cell: Any = SimpleNamespace(
            criterion=CriterionConfig("random"), allocation=AllocationConfig(allocation), ratio=0.25
        )
        make_plan = partial(trial_plan, cell)
        check_export(model, make_plan, "natural", trust_remote_code=False)
    (model / "model.safetensors").unlink()


def _add_weights(model: Path) -> None:
    """Write a file with the names and shapes of all weights, unquantised. In place of numbers, the
    file has a hole, which takes no space on the disk."""
    config = read_json(model / "config.json")
    for section in (config, config.get("text_config", {})):
        for field in QUANTISATION_FIELDS:
            section.pop(field, None)
    (model / "config.json").write_text(json.dumps(config))
    (model / "hf_quant_config.json").unlink(missing_ok=True)
    network = skeleton(model)
    header = {}
    end = 0
    for name, tensor in NameMapping(network, ()).to_checkpoint(network.state_dict()).items():
        start = end
        end += 2 * tensor.numel()
        shape = list(tensor.shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (model / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


if __name__ == "__main__":
    print(page(Path(sys.argv[1])), end="")
