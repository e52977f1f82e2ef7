"""Statistics or weights -> scores, higher always meaning keep. No torch.

Every module in this folder is a place for criteria.
"""

from importlib import import_module
from pkgutil import iter_modules

from moe_lab.criteria.experts import family as family
from moe_lab.criteria.registry import CRITERIA as CRITERIA
from moe_lab.criteria.registry import Criterion as Criterion
from moe_lab.criteria.registry import check as check
from moe_lab.criteria.registry import get as get
from moe_lab.criteria.registry import ranking as ranking
from moe_lab.criteria.registry import reads_text as reads_text
from moe_lab.criteria.registry import score as score

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
