"""Facts of layers as in facts.json, and settings of allocations as in a cell."""

from typing import Any


def layer(
    n_experts: int,
    *,
    top_k: int = 1,
    n_group: int = 1,
    topk_group: int | None = None,
    width: int = 8,
) -> Any:
    return {
        "n_experts": n_experts,
        "top_k": top_k,
        "n_group": n_group,
        "topk_group": topk_group or n_group,
        "width": width,
        "expert_parameters": 3 * width * 4,
    }


def settings(name: str, ratio: float, multiple_of: int = 1, **parameters: Any) -> dict[str, Any]:
    return {"name": name, "ratio": ratio, "multiple_of": multiple_of, "parameters": parameters}
