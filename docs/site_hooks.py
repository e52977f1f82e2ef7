"""What `make docs` adds to the pages of this folder: README.md, files that pages link to, and a
reference of the code.

MkDocs calls these functions (`hooks` in mkdocs.yml). The reference has a page for every package,
and a file outside docs/ becomes a page because a page links to it, so that nothing here needs a
change when either changes.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
PACKAGES = ("moe_lab", "moe_lab/analysis")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The order of pages: README.md, guides in the groups of its table, then the reference."""
    config.nav = [
        "index.md",
        *({group: pages} for group, pages in guides().items()),
        {"Reference": [f"reference/{name}.md" for name in reference()]},
    ]
    return config


def guides() -> dict[str, list[str]]:
    """Group -> its guides, from the table of README.md whose rows are (group, or "" for that of the
    row above; purpose; links)."""
    groups: dict[str, list[str]] = {}
    rows = re.findall(
        r"^\|([^|]*)\|[^|]*\|(.*docs/.*)\|$", (ROOT / "README.md").read_text("utf-8"), re.M
    )
    for group, links in rows:
        pages = groups.setdefault(group.strip() or [*groups][-1], [])
        pages += re.findall(r"\]\(docs/([^)\s#/]+\.md)", links)
    return groups


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README.md as the first page, what pages link to outside docs/, and the reference."""
    pages = {"index.md": with_links((ROOT / "README.md").read_text("utf-8"), ROOT, "index.md")}
    for guide in sorted((ROOT / "docs").glob("*.md")):
        pages[guide.name] = with_links(guide.read_text("utf-8"), guide.parent, guide.name)
    for text in list(pages.values()):
        for target in re.findall(r"\]\((files/[^)\s#]+)\.md", text):
            pages[f"{target}.md"] = shown(ROOT / target.removeprefix("files/"))
    pages |= {f"reference/{name}.md": page for name, page in reference().items()}
    for name, text in pages.items():
        if (old := files.get_file_from_path(name)) is not None:
            files.remove(old)
        files.append(File.generated(config, name, content=text))
    return files


def with_links(text: str, folder: Path, page: str) -> str:
    """A page whose links to files lead to where the site has them."""

    def place(match: re.Match[str]) -> str:
        path = (folder / match[2]).resolve()
        if path.is_relative_to(ROOT / "docs"):
            target = path.relative_to(ROOT / "docs").as_posix()
        else:
            target = f"files/{path.relative_to(ROOT).as_posix()}.md"
        return match[1] + posixpath.relpath(target, posixpath.dirname(page) or ".") + match[3]

    return LINK.sub(place, text)


def shown(path: Path) -> str:
    """A file outside docs/ as a page; a folder as its programs, one after the other."""
    if path.suffix == ".md":
        return path.read_text("utf-8")
    programs = sorted(path.glob("*.py")) if path.is_dir() else [path]
    texts = [
        f"## {program.name}\n\n```python\n{program.read_text('utf-8')}```\n" for program in programs
    ]
    return f"# {path.relative_to(ROOT).as_posix()}\n\n" + "\n".join(texts)


def reference() -> dict[str, str]:
    """Name of a package -> its page: what each of its modules defines, from the docstrings."""
    pages = {}
    for package in PACKAGES:
        for init in sorted((ROOT / package).rglob("__init__.py")):
            name = ".".join(init.parent.relative_to(ROOT).parts)
            modules = [name, *(f"{name}.{path.stem}" for path in sorted(init.parent.glob("*.py")))]
            described = [
                f"::: {module}"
                for module in modules
                if not module.endswith(("__init__", "__main__"))
            ]
            pages[name] = f"# {name}\n\n" + "\n\n".join(described) + "\n"
    return pages
