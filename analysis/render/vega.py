"""Drawing of charts by Vega, without pandas."""

from __future__ import annotations

from pathlib import Path

VEGA_LITE = "6.4"
"""Version of Vega-Lite for which charts are declared; vl-convert brings it."""


def library() -> str:
    """The JavaScript of Vega, Vega-Lite and vega-embed, for a page without network."""
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def draw(chart: Path, file_format: str) -> bytes:
    """The chart in the Vega-Lite file `chart` as svg, pdf or png."""
    import vl_convert

    render = getattr(vl_convert, f"vegalite_to_{file_format}")
    content = render(chart.read_text("utf-8"), vl_version=VEGA_LITE)
    return content if isinstance(content, bytes) else content.encode()
