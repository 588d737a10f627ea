"""Lays out what the site is made of: the pages of docs/, those made from the code, and the settings with the order."""

import json
import re
import shutil
from pathlib import Path

from docs.site.commands import help_page
from docs.site.messages import messages_page
from docs.site.nav import nav
from docs.site.python import python_page

LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)(#[^)]*)?\)")
GENERATED = {
    "Python": ("generated/python.md", python_page),
    "All help texts": ("generated/commands.md", help_page),
    "All messages": ("generated/messages.md", messages_page),
}


def stage(root: Path, into: Path) -> Path:
    """Fill the folder ``into``; returns the file with the builder's settings."""
    shutil.rmtree(into, ignore_errors=True)
    pages = into / "pages"
    shutil.copytree(root / "docs", pages, ignore=shutil.ignore_patterns("site", "__pycache__"))
    shutil.copy(root / "docs" / "site" / "site.css", pages)
    for page in pages.rglob("*.md"):
        place = (root / "docs" / page.relative_to(pages)).parent
        page.write_text(without_links_to_sources(page.read_text(), place, root))
    (pages / "generated").mkdir()
    for path, write in GENERATED.values():
        (pages / path).write_text(write(root))
    order = nav((root / "docs" / "README.md").read_text(), {title: path for title, (path, _) in GENERATED.items()})
    config = into / "mkdocs.yml"
    config.write_text(f"{(root / 'docs/site/zensical.yml').read_text()}\nnav: {json.dumps(order)}\n")
    return config


def without_links_to_sources(text: str, place: Path, root: Path) -> str:
    """Files of the repository outside docs/ are named, not linked: they are not on the site."""

    def named(link: re.Match[str]) -> str:
        target = (place / link[2]).resolve()
        if target.is_relative_to(root / "docs"):
            return link[0]
        path = target.relative_to(root).as_posix()
        return link[1] if path in link[1] else f"{link[1]} (`{path}`)"

    return LINK.sub(named, text)
