"""The site's order of pages: that of the lists in docs/README.md."""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

HEADING = re.compile(r"## (.+)")
LISTED = re.compile(r"(?P<indent> *)- \[(?P<title>[^\]]+)\]\((?P<page>[^)#]+\.md)\)")


class Entry(NamedTuple):
    """An item of a list in the index."""

    section: str
    depth: int
    title: str
    page: str
    """as seen from docs/"""


def entries(index: str) -> Iterator[Entry]:
    """The pages that are items of the index's lists, in order."""
    section = ""
    for line in index.splitlines():
        if heading := HEADING.fullmatch(line):
            section = heading[1]
        elif found := LISTED.match(line):
            yield Entry(section, len(found["indent"]) // 4, found["title"].strip("`"), found["page"])


def nav(index: str, made_from_code: Mapping[str, str]) -> list[object]:
    """The index itself, then a tab for each heading; an item with items below it is a group. Pages that are made from
    the code (path by title) come first under Reference.
    """
    tabs: dict[str, list[object]] = {}
    group: list[object] = []
    for entry in entries(index):
        tab = tabs.setdefault(entry.section, [])
        if entry.depth == 0:
            group = [entry.page]
            tab.append({entry.title: group})
        else:
            group.append({entry.title: entry.page})
    tabs.setdefault("Reference", []).append(
        {"Made from the code": [{title: path} for title, path in made_from_code.items()]}
    )
    return [{"Home": "README.md"}, *({section: [_flat(item) for item in tab]} for section, tab in tabs.items())]


def _flat(item: object) -> object:
    """A group of one page is that page."""
    assert isinstance(item, dict)
    [(title, pages)] = item.items()
    return {title: pages[0]} if len(pages) == 1 and isinstance(pages[0], str) else item
