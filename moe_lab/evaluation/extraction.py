"""The program in what a chat model says: code between fences, before EvalPlus's sanitizer looks at it."""

from __future__ import annotations

import re
import textwrap

_FENCE = "```"


def fenced_program(text: str, entry_point: str) -> str:
    """The last fenced block of `text` that defines the function `entry_point`; without one the longest block, and
    without a fence all of the text. A block that was cut off counts to the end."""
    blocks = _blocks(text)
    definition = re.compile(rf"^\s*(async\s+)?def\s+{re.escape(entry_point)}\b", re.MULTILINE)
    defining = [block for block in blocks if definition.search(block)]
    return defining[-1] if defining else max(blocks, key=len, default=text)


def _blocks(text: str) -> list[str]:
    blocks: list[list[str]] = []
    inside = False
    for line in text.splitlines():
        if line.lstrip().startswith(_FENCE):
            inside = not inside
            if inside:
                blocks.append([])
        elif inside:
            blocks[-1].append(line)
    return [textwrap.dedent("\n".join(block)) for block in blocks]
