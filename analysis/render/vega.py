"""Drawing of charts by Vega, without pandas."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from moe_lab.json_files import write_text
from moe_lab.paths import cache_folder

VEGA_LITE = "6.4"
"""Version of Vega-Lite for which charts are declared; vl-convert brings it."""


def library() -> str:
    """The JavaScript of Vega, Vega-Lite and vega-embed, for a page without network. It is kept in
    the user's cache, because putting it together takes more than a second."""
    import vl_convert

    file = cache_folder("vega") / f"{version('vl-convert-python')}.js"
    with suppress(OSError):
        return file.read_text("utf-8")
    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, bundle)
    return bundle


def draw(chart: Path, file_format: str) -> bytes:
    """The chart in the Vega-Lite file `chart` as svg, pdf or png."""
    import vl_convert

    render = getattr(vl_convert, f"vegalite_to_{file_format}")
    content = render(chart.read_text("utf-8"), vl_version=VEGA_LITE)
    return content if isinstance(content, bytes) else content.encode()
