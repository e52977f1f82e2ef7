"""Print the page of all settings: `python docs/settings_page.py > docs/settings.md`."""

from __future__ import annotations

from collections.abc import Iterable

from moe_lab.config.table import Setting, settings

HEAD = """# Settings

Settings are typed as `GROUP.SETTING=VALUE`, such as `calibration.tokens=4096`, and stand in
the files of `conf/` without the name of their group. Those of most use come first. This page is
printed by `python docs/settings_page.py`.
"""


def page() -> str:
    """The page of settings in Markdown: the basic ones, then the others by group."""
    every = settings()
    parts = [HEAD, "## Basic settings\n", _rows(setting for setting in every if setting.basic)]
    for group in dict.fromkeys(setting.group for setting in every):
        parts += [
            f"## {group or 'Study'}\n",
            _rows(one for one in every if one.group == group and not one.basic),
        ]
    return "\n".join(parts)


def _rows(listed: Iterable[Setting]) -> str:
    rows = [
        f"| `{one.key}` | {f'`{one.default}`' if one.default else ''} | {one.meaning} |\n"
        for one in listed
    ]
    return "".join(["| setting | default | meaning |\n|---|---|---|\n", *rows])


if __name__ == "__main__":
    print(page(), end="")
