"""Statistics or weights -> scores, higher always meaning keep. No torch.

Every module in this folder is a place for criteria.
"""

from importlib import import_module
from pkgutil import iter_modules

from moe_lab.criteria.experts import family
from moe_lab.criteria.registry import (
    CRITERIA,
    Criterion,
    check,
    get,
    ranking,
    reads_text,
    score,
)

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = [
    "CRITERIA",
    "Criterion",
    "check",
    "family",
    "get",
    "ranking",
    "reads_text",
    "score",
]
