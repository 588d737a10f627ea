"""What is wrong with built pages: what they would fetch from another host, and headings that were cut."""

import re
from html.parser import HTMLParser
from pathlib import Path

ELSEWHERE = re.compile(r"(?:https?:)?//", re.I)
IN_STYLE = re.compile(r"""(?:url\(|@import)\s*['"]?((?:https?:)?//[^'")\s]+)""", re.I)
OPENED = re.compile(r"<code[ >]")
FETCHING = {
    "script": ("src",),
    "img": ("src", "srcset"),
    "iframe": ("src",),
    "source": ("src", "srcset"),
    "video": ("src", "poster"),
    "audio": ("src",),
    "object": ("data",),
    "embed": ("src",),
    "image": ("href", "xlink:href"),
    "use": ("href", "xlink:href"),
    "link": ("href",),
}
"""Attributes by element that make a browser fetch; where a link leads when it is clicked does not count."""
NAMED_ONLY = {"canonical", "alternate", "license", "author", "prev", "next"}
"""``rel`` of a ``link`` that fetches nothing."""


def fetched_from_elsewhere(site: Path) -> list[str]:
    """``page: address`` for each such place in pages, styles and pictures."""
    found = []
    for path in sorted(site.rglob("*")):
        if path.suffix in (".html", ".svg"):
            parser = _Fetches()
            parser.feed(path.read_text())
            found += [f"{path.relative_to(site)}: {address}" for address in parser.found]
        elif path.suffix == ".css":
            found += [f"{path.relative_to(site)}: {address}" for address in IN_STYLE.findall(path.read_text())]
    return found


def torn(site: Path) -> list[str]:
    """Pages on which a heading was cut in the middle of code, so that all that follows is set as code."""
    pages = ((path, path.read_text()) for path in sorted(site.rglob("*.html")))
    return [str(path.relative_to(site)) for path, text in pages if len(OPENED.findall(text)) != text.count("</code>")]


class _Fetches(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "link" and set(given.get("rel", "").split()) <= NAMED_ONLY:
            return
        self.found += [given[name] for name in FETCHING.get(tag, ()) if ELSEWHERE.match(given.get(name, "").strip())]
        self.found += IN_STYLE.findall(given.get("style", ""))

    def handle_data(self, data: str) -> None:
        if self.lasttag == "style":
            self.found += IN_STYLE.findall(data)
