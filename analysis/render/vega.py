"""Drawing of charts by Vega. It needs no pandas, so that a process for it starts quickly."""

from __future__ import annotations

from functools import cache
from pathlib import Path

VEGA_LITE = "6.4"
"""Version of Vega-Lite for which charts are declared; vl-convert brings it."""


@cache
def library() -> str:
    """The JavaScript of Vega, Vega-Lite and vega-embed, for a page without network."""
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def draw(path: Path) -> None:
    """Write a chart to a file in the format of its suffix: svg, pdf or png. The chart is in the
    file of the same name that ends in .json."""
    import vl_convert

    render = getattr(vl_convert, f"vegalite_to_{path.suffix[1:]}")
    content = render(path.with_suffix(".json").read_text("utf-8"), vl_version=VEGA_LITE)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
