"""The text of a report's page, as a reader could find it in the page's files."""

import gzip
import html
import re
from base64 import b64decode
from pathlib import Path


def page_text(page: Path) -> str:
    """The page with the data beside it, without the library of charts."""
    source = re.sub(
        r"<script>.*?vegaEmbed.*?</script>", "", page.read_text(encoding="utf-8"), count=1
    )
    beside = [path.read_text(encoding="utf-8") for path in page.parent.glob("data/*.js")]
    # packed["NAME"] = "BASE64";
    data = [gzip.decompress(b64decode(text.split('"')[3])).decode() for text in beside]
    return html.unescape("".join([source, *data])).replace("\u00a0", " ")
