"""How big a model is, as far as that is known without loading it: as expected, or from the files of its folder."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path

from moe_lab.config import ModelConfig
from moe_lab.models.checkpoint import open_checkpoint, read_json, stated_dtype
from moe_lab.models.files import expert_shape, has_pickles_only
from moe_lab.paths import resolve

EXPERTS = re.compile(r"\.(\d+)\.(?:\w+\.)*(?:experts|input_linear)\b")
"""A tensor of routed experts in a checkpoint, with the number of its decoder layer."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Size:
    """What costs follow from."""

    parameters: int
    """All parameters."""
    moe_layers: int
    """Decoder layers with routed experts."""
    experts: int
    """Routed experts of such a layer."""
    top_k: int
    """Routed experts a token is given to."""
    hidden: int
    """Numbers in the residual stream of a token."""
    width: int
    """Channels of a routed expert."""
    bytes_per_parameter: int
    """In the precision the model is loaded in."""

    @property
    def expert(self) -> int:
        """Parameters of a routed expert; biases are left out."""
        return 3 * self.hidden * self.width

    @property
    def active(self) -> int:
        """Parameters a token is multiplied with, and the embeddings; biases of experts are left out."""
        return self.parameters - self.moe_layers * (self.experts - self.top_k) * self.expert

    @property
    def bytes(self) -> int:
        """Of the weights once loaded."""
        return self.parameters * self.bytes_per_parameter


def size_of(settings: ModelConfig) -> Size | None:
    """The size of a model; None when it is neither on this machine nor said what it should be.

    What is expected counts before what is there: a folder that differs from it is refused (`expected.check_expected`).
    """
    if (expected := settings.expected) is None:
        return _size_of_folder(settings.path, settings.dtype)
    return Size(
        parameters=expected.parameters,
        moe_layers=expected.moe_layers,
        experts=expected.experts,
        top_k=settings.top_k or expected.top_k,
        hidden=expected.hidden,
        width=expected.width,
        bytes_per_parameter=BYTES.get(settings.dtype, 2),
    )


@lru_cache(maxsize=64)
def _size_of_folder(path: str, dtype: str) -> Size | None:
    shape = expert_shape(ModelConfig(name=path, path=path))
    folder = Path(resolve(path)).expanduser()
    if shape is None or "width" not in shape or has_pickles_only(folder):
        return None
    config = read_json(folder / "config.json")
    config = config.get("text_config", config)
    if not isinstance(hidden := config.get("hidden_size"), int):
        return None
    tensors = open_checkpoint(folder).tensors
    stored = BYTES.get(stated_dtype(config), 4)
    return Size(
        parameters=sum(prod(entry.shape) for entry in tensors.values()),
        moe_layers=len({match[1] for name in tensors if (match := EXPERTS.search(name))}),
        experts=shape["n_experts"],
        top_k=shape["top_k"],
        hidden=hidden,
        width=shape["width"],
        bytes_per_parameter=BYTES.get(dtype, stored),
    )
