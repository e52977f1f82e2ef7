"""Which widths of experts a family's own module can have. No torch."""

from __future__ import annotations

from collections.abc import Sequence

RAGGED_FIELD = "expert_widths"
"""Our own field of config.json: layer (as text) -> channels of each expert, for layers whose experts differ."""
KERNEL_BYTES = 16
"""transformers' grouped matrix products need rows of weights that are a multiple of so many bytes."""


def is_stock(widths: Sequence[int], element_size: int) -> bool:
    """Whether experts of these widths, in numbers of `element_size` bytes, fit a family's own module: all the same, not
    0, and of aligned rows."""
    return len(set(widths)) == 1 and widths[0] > 0 and widths[0] * element_size % KERNEL_BYTES == 0
