"""Print docs/settings.md: `python -m moe_lab.config > docs/settings.md`."""

from moe_lab.config.table import page

if __name__ == "__main__":
    print(page(), end="")
