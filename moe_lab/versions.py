"""Which version of a package is installed."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def installed(package: str) -> str | None:
    """The version of `package`; None without it. Looked up once: reading a package's metadata takes milliseconds."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
