"""Print the page of all settings: `python docs/settings_page.py > docs/settings.md`."""

from __future__ import annotations

from collections.abc import Iterable

from moe_lab.config.table import Setting, settings

HEAD = """# Settings

A setting is typed as `GROUP.SETTING=VALUE`, for example:

    moe-lab run calibration.tokens=4096 ratio=0.5

`GROUP=NAME` chooses the file `conf/GROUP/NAME.yaml` ([usage.md](usage.md#settings)), in which the
names of settings are written without their group. An empty default means that the setting must be
set, in most cases by such a file. The settings that are used most come first, the others follow by
group.

This page is printed by `python docs/settings_page.py`.
"""


def page() -> str:
    """The page of settings in Markdown: the basic ones, then the others by group."""
    all_settings = settings()
    basic = [setting for setting in all_settings if setting.basic]
    others = [setting for setting in all_settings if not setting.basic]
    parts = [HEAD, "## Basic settings\n", _rows(basic)]
    for group in dict.fromkeys(setting.group for setting in others):
        parts += [
            f"## {group or 'Study'}\n",
            _rows(setting for setting in others if setting.group == group),
        ]
    return "\n".join(parts)


def _rows(listed: Iterable[Setting]) -> str:
    rows = []
    for setting in listed:
        default = f"`{setting.default}`" if setting.default else ""
        rows.append(f"| `{setting.key}` | {default} | {setting.meaning} |\n")
    return "".join(["| setting | default | meaning |\n|---|---|---|\n", *rows])


if __name__ == "__main__":
    print(page(), end="")
