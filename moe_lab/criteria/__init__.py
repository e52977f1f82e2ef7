"""Statistics or weights -> scores, higher always meaning keep. Every module in this folder is a place for criteria."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
