"""Drawing of charts by Vega, in a process of its own that works while the next figure is made.

`python -m moe_lab.analysis.render.vega` reads names of files to write, one a line, such as
figures/ranking.svg; the chart in Vega-Lite is in the file of the same name that ends in .json. It
answers each line with a line of JSON: null, or the traceback of an error.
"""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from pathlib import Path

VEGA_LITE = "6.4"
"""Version of Vega-Lite for which charts are declared; vl-convert brings it."""


def library() -> str:
    """The JavaScript of Vega, Vega-Lite and vega-embed, for a page without network."""
    import vl_convert

    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def draw(path: Path) -> None:
    """Write a chart to a file in the format of its suffix, from the JSON beside it."""
    import vl_convert

    render = getattr(vl_convert, f"vegalite_to_{path.suffix[1:]}")
    content = render(path.with_suffix(".json").read_text("utf-8"), vl_version=VEGA_LITE)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


class Drawings:
    """Charts that a process of its own draws, which starts with the first of them."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._paths: list[Path] = []

    def add(self, path: Path) -> None:
        """Have a chart drawn to a file, see `draw`."""
        if self._process is None:
            command = [sys.executable, "-m", __name__]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, encoding="utf-8")
        assert self._process.stdin is not None
        print(path, file=self._process.stdin, flush=True)
        self._paths.append(path)

    def finish(self) -> dict[Path, str | None]:
        """Wait until all charts are drawn. Returns file -> traceback of its error, or None."""
        if self._process is None:
            return {}
        answers, _ = self._process.communicate()
        errors = [json.loads(line) for line in answers.splitlines()]
        lost = ["The process that draws figures ended."] * (len(self._paths) - len(errors))
        return dict(zip(self._paths, [*errors, *lost], strict=True))


def main() -> None:
    """Draw the charts whose names are on stdin, until it ends."""
    for line in sys.stdin:
        error = None
        try:
            draw(Path(line.rstrip("\n")))
        except (ValueError, OSError):
            error = traceback.format_exc()
        print(json.dumps(error), flush=True)


if __name__ == "__main__":
    main()
