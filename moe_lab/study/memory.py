"""Bytes that parts of a step's work hold, from the size of a model: weights, a batch, hidden states, sums."""

from __future__ import annotations

from moe_lab.config import CalibrationConfig
from moe_lab.models.config_json import Size

STATES = 8 * 2**30
"""Bytes of hidden states that a streamed pass keeps in memory, of those on disk: what every machine with a large model
has to spare."""

BASE = 600 * 2**20
"""Bytes of Python with torch and transformers loaded."""
ROOM = 1.1
"""Factor on the weights for sums, buffers and fragmentation."""
LOGITS = 2**19
"""Upper bound of the bytes of one token's logits: about 130,000 words in fp32."""
DISTILLED = 4
"""fp32 tensors of the size of a batch's logits that a distillation holds at once, besides the logits; measured."""
CACHE = 4
"""Bytes of keys and values of one token and layer, as a multiple of the hidden size; less where heads share them."""
CHANNEL_SUMS = 7
"""Sums of each channel that a pass gathers, at most."""
PROMPT = 128
"""Tokens of a prompt, or of a question with one of its answers."""


def weights(size: Size, models: int = 1) -> float:
    """Bytes of the weights of so many models of this size."""
    return ROOM * size.bytes * models


def layer_weights(size: Size, layers: int = 1) -> float:
    """Bytes of so many decoder layers, with embeddings and the vocabulary head."""
    routed = size.experts * size.expert
    rest = size.parameters - size.moe_layers * routed
    ends = min(rest, 2 * LOGITS // 4 * size.hidden)
    return ROOM * size.bytes_per_parameter * (layers * (routed + (rest - ends) / size.moe_layers) + ends)


def logits(size: Size) -> float:
    """Bytes of one token's logits. The number of parameters bounds the size of the vocabulary."""
    return min(LOGITS, 4 * size.parameters / size.hidden)


def tokens_of(text: CalibrationConfig, rows: tuple[int, int] | None = None) -> int:
    """Tokens of a text, or of some of its rows: of the first up to the end."""
    return (rows[1] - rows[0]) * text.length if rows else text.tokens


def batch_tokens(text: CalibrationConfig, rows: tuple[int, int] | None = None) -> int:
    """Tokens of a batch."""
    return min(text.batch_size * text.length, tokens_of(text, rows))


def activations(size: Size, layers: float = 1) -> float:
    """Bytes per token of the activations that so many layers keep."""
    return size.bytes_per_parameter * layers * (20 * size.hidden + 6 * size.top_k * size.width)


def cache(size: Size, tokens: int) -> float:
    """Bytes of the keys and values of so many tokens."""
    return float(tokens * CACHE * size.hidden * size.moe_layers)


def hidden_states(size: Size, tokens: int, *, backward: bool) -> float:
    """Bytes of the hidden states that enter decoder layers.

    A forward pass keeps those of two layers at a time. With gradients those of all layers are kept, and the gradients
    of two.
    """
    layers = size.moe_layers + 2 if backward else 2
    return float(tokens) * size.hidden * size.bytes_per_parameter * layers


def merging(size: Size) -> float:
    """Bytes while sums of several steps are added up: two sets of them in memory, and the file that is written."""
    sums = CHANNEL_SUMS * size.width + size.hidden
    return 3 * 8.0 * size.moe_layers * size.experts * sums
