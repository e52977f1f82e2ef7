"""How families of models store their experts, in memory and on disk. No torch.

Model names appear only in this file, in the ports named below and in conf/model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from moe_lab.errors import UserError

COUNT_FIELDS = ("n_routed_experts", "moe_num_experts", "num_local_experts", "num_experts")
"""Configuration fields that hold the number of routed experts."""
TOP_K_FIELDS = ("num_experts_per_tok", "moe_k", "moe_topk")
"""Configuration fields that hold the number of experts a token is routed to."""
WIDTH_FIELDS = ("moe_intermediate_size", "intermediate_size")
"""Configuration fields that hold the number of channels of a routed expert; the first that is
present counts."""
ALSO_COUNTS = {"qwen3_moe": ("num_experts", "num_local_experts")}
"""model_type -> all count fields that programs look up in its config.json: transformers 5 writes
num_local_experts, but transformers 4 and servers read num_experts and would use its default."""
ROUTERS = ("gate", "router")
"""Attribute names of the router of a MoE block."""
DISK_SHARED = ("shared_expert.", "shared_experts.", "shared_mlp.", "shared_expert_gate.")
"""Prefixes of the tensors of a MoE block that pruning does not change."""
PREDICTION_LAYER = re.compile(r"(?:model\.)?mtp\.|.*?\.(?=eh_proj\.)")
"""Prefix of the tensors of an extra prediction layer: mtp. with a numbering of its own, or that of
a numbered layer with the projection eh_proj."""
NOT_LOADED = re.compile(
    r"(?:^|\.)mtp(?:_\w+)?\.|\.eh_proj\.|rotary_emb\.inv_freq$"
    r"|\.(?:[qkv]|kv|kv_cache|prob|input|output|activation)(?:_global)?_scale$|\.weight_shape$"
)
"""Parts of the names of tensors that a checkpoint may have and its model lacks: tensors of extra
prediction layers, frequencies that the configuration determines, scales for rounding activations
and caches, and shapes of packed weights."""
NOVICES = "approximate_experts"
"""Field of config.json in which vLLM reads, for each decoder layer, which experts are constants."""
NOVICE_TENSOR = ".approx_value"
"""End of the name of a tensor (H,) that vLLM reads in place of an expert, as its constant."""
PRUNED = "pruned_"
"""Prefix of the model_type of exports whose layers differ in shape, before that of the family."""


class Port(NamedTuple):
    """Code for a family that transformers cannot load: exported_code/<file>.py, modeling_<file>.py
    in exports, with the classes <base>Config and <base>ForCausalLM."""

    file: str
    base: str


PORTS = {"deepseek": Port("deepseek_moe", "Deepseek")}
"""model_type -> the port that loads it, even if the checkpoint contains code."""


def port_files(kind: str) -> dict[str, str]:
    """File name -> source code of the port for the model_type `kind`; {} without a port."""
    if kind not in PORTS:
        return {}
    file = Path(__file__).parents[1] / "exported_code" / f"{PORTS[kind].file}.py"
    return {f"modeling_{PORTS[kind].file}.py": file.read_text(encoding="utf-8")}


class Axes(NamedTuple):
    """How a tensor holds projections of experts. Axes are counted from the end, so that they are
    the same for a stack and for one expert."""

    roles: tuple[str, ...]
    """gate, up, down, gate_bias, up_bias or down_bias; several roles share the axis of channels."""
    channels: int | None
    """The axis of channels, -1 or -2; None for the bias of down, which has no channels."""
    interleaved: bool = False
    """Whether the order along the axis of channels is gate_0, up_0, gate_1, up_1."""

    @property
    def is_bias(self) -> bool:
        """Whether the tensor holds biases."""
        return self.roles[0].endswith("_bias")


def split(tensor: Any, axes: Axes) -> dict[str, Any]:
    """Role -> its view of `tensor`, of torch or numpy. A projection is (..., I, H), a bias is
    (..., I), and the bias of down is (..., H)."""
    if axes.channels is None:
        return {role: tensor for role in axes.roles}
    if not axes.is_bias and axes.channels == -1:
        tensor = tensor.swapaxes(-1, -2)
    hidden_axis = () if axes.is_bias else (slice(None),)  # biases have no axis H
    n_roles = len(axes.roles)
    width = tensor.shape[-1 if axes.is_bias else -2] // n_roles
    views = {}
    for position, role in enumerate(axes.roles):
        role_channels = (
            slice(position, None, n_roles)
            if axes.interleaved
            else slice(position * width, (position + 1) * width)
        )
        views[role] = tensor[(..., role_channels, *hidden_axis)]
    return views


class ExpertTensor(NamedTuple):
    """What a tensor of routed experts in a checkpoint holds."""

    block: str
    """Prefix of the names of all tensors of the block, ending in a dot."""
    layer: int
    expert: int | None = None
    """None for a stack of all experts."""
    axes: Axes | None = None
    """None if the tensor does not hold plain projections, but, for example, scales or packed
    numbers."""


_GATE = Axes(("gate",), -2)
_UP = Axes(("up",), -2)
_DOWN = Axes(("down",), -1)
GATE_UP = Axes(("gate", "up"), -2)


EXPERT_TENSORS = {
    **dict.fromkeys(("gate_proj.weight", "w1.weight"), _GATE),
    **dict.fromkeys(("up_proj.weight", "w3.weight"), _UP),
    **dict.fromkeys(("down_proj.weight", "w2.weight"), _DOWN),
}
"""Tensors of one expert on disk, below experts.<number>."""
STACKED = {
    "input_linear.weight": "gate_up_proj",
    "output_linear.weight": "down_proj",
    "experts.fc1.weight": "gate_up_proj",
    "experts.fc2.weight": "down_proj",
    "experts.w13_weight": "gate_up_proj",
    "experts.w2_weight": "down_proj",
}
"""Tensors of all experts on disk, below the block -> their names in memory, where those differ."""
INTERLEAVED = ("experts.w13_weight",)
"""Tensors of all experts on disk whose channels are interleaved, but not in memory."""


@dataclass(frozen=True, eq=False)
class Family:
    """A family of models; by default its experts are stacks (E, 2 I, H) and (E, H, I) in memory."""

    kind: str = ""
    """model_type of its configurations; that of a text part ends in _text."""
    stacks: Mapping[str, Axes] = field(
        default_factory=lambda: {"gate_up_proj": GATE_UP, "down_proj": _DOWN}
    )
    """Tensors of the experts module, also below `experts.` on disk. Hidden states are multiplied by
    the first tensor."""
    channel_obstacle: str | None = None
    """Why channels of its experts cannot be removed or reordered, as the end of a sentence that
    begins with "its experts"; None if they can."""
    fixed_top_k: bool = False
    """Whether its routers compute gates by a formula that is only valid for its top_k."""

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of all projections and biases of an expert."""
        return tuple(role for axes in self.stacks.values() for role in axes.roles)

    def split(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Role -> view of its projection or bias, shaped as by the function `split`. `tensors`:
        name of a stack -> the whole stack, or the tensor of one expert in it."""
        views: dict[str, Any] = {}
        for name, tensor in tensors.items():
            views |= split(tensor, self.stacks[name])
        return views

    def expert_tensors(self, names: Iterable[str]) -> dict[str, ExpertTensor]:
        """Name of a tensor of routed experts -> what it holds. `names`: names of all tensors of a
        checkpoint. Tensors of extra prediction layers are left out. UserError for a decoder layer
        with several MoE blocks."""
        names = list(names)
        prefixes = prediction_prefixes(names)
        tensors = self._expert_tensors(name for name in names if not name.startswith(prefixes))
        # prefix of the block's tensors -> decoder layer
        blocks = {tensor.block: tensor.layer for tensor in tensors.values()}
        if len(set(blocks.values())) != len(blocks):
            raise UserError(f"a decoder layer has several MoE blocks: {', '.join(sorted(blocks))}")
        return tensors

    def prediction_experts(self, names: Collection[str]) -> dict[str, ExpertTensor]:
        """What `expert_tensors` returns, for the extra prediction layers alone."""
        prefixes = prediction_prefixes(names)
        return self._expert_tensors(name for name in names if name.startswith(prefixes))

    def _expert_tensors(self, names: Iterable[str]) -> dict[str, ExpertTensor]:
        """Name of a tensor of routed experts -> what it holds."""
        tensors = {}
        for name in names:
            match = _EXPERT_TENSOR.fullmatch(name)
            # some families name the tensors of shared experts like stacks of routed experts
            if not match or match["block"].endswith(DISK_SHARED):
                continue
            block = match["block"]
            layer = int(match["layer"])
            if match["expert"]:
                axes = EXPERT_TENSORS.get(match["part"])
                tensors[name] = ExpertTensor(block, layer, int(match["expert"]), axes)
            else:
                stack = match["stack"]
                axes = self.stacks.get(STACKED.get(stack, stack.removeprefix("experts.")))
                if axes and stack in INTERLEAVED:
                    axes = axes._replace(interleaved=True)
                tensors[name] = ExpertTensor(block, layer, axes=axes)
        return tensors


def _transposed_stacks(*, interleaved: bool = False) -> dict[str, Axes]:
    """Name of a stack -> its axes, for transposed experts with biases. Transposed: hidden states h
    are multiplied as h @ W, not as h @ W.T."""
    return {
        "gate_up_proj": Axes(("gate", "up"), -1, interleaved),
        "gate_up_proj_bias": Axes(("gate_bias", "up_bias"), -1, interleaved),
        "down_proj": Axes(("down",), -2),
        "down_proj_bias": Axes(("down_bias",), None),
    }


FAMILIES = (
    Family("gpt_oss", _transposed_stacks(interleaved=True), channel_obstacle="have biases"),
    Family(
        "aria",
        {name: axes for name, axes in _transposed_stacks().items() if not axes.is_bias},
        channel_obstacle="are stored transposed",
    ),
    Family(
        "nemotron_h",
        {"up_proj": _UP, "down_proj": _DOWN},
        channel_obstacle="have no gate projection",
    ),
    Family("inkling2", channel_obstacle="are stored interleaved"),
    Family("phimoe", fixed_top_k=True),
)
"""Families that differ from the default `Family()`."""


def family_of(kind: str | None) -> Family:
    """The family of a model_type."""
    kind = (kind or "").removeprefix(PRUNED).removesuffix("_text")
    return next((family for family in FAMILIES if kind == family.kind), Family())


_EXPERT_TENSOR = re.compile(
    r"(?P<block>(?:\w+\.)*?layers\.(?P<layer>\d+)\.(?:\w+\.)*?)"
    r"(?:experts\.(?P<expert>\d+)\.(?P<part>.+)|(?P<stack>"
    r"experts\.(?:gate_up_proj|up_proj|down_proj)(?:_bias|_blocks|_scales|_scale_inv)?"
    rf"|(?:{'|'.join(map(re.escape, STACKED))})(?:_scale)?))"
)
"""Name of a tensor of one expert, or of a stack of all experts of a block."""


def prediction_prefixes(names: Iterable[str]) -> tuple[str, ...]:
    """Prefixes of the names of the tensors of extra prediction layers, sorted. `names`: names of
    all tensors of a checkpoint."""
    matches = map(PREDICTION_LAYER.match, names)
    return tuple(sorted({match[0] for match in matches if match}))
