"""llms.txt: what the site has, for programs that read it, after the convention of llmstxt.org.

A title, a line on what it is about, and a list of pages for each heading of docs/README.md, with the first sentence of
each. It links to the pages as Markdown, which lie beside the built ones.
"""

import re
import shutil
from collections.abc import Mapping
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from docs.site.nav import Entry, entries

TITLE = re.compile(r"^# (.+)$", re.M)
CODE = re.compile(r"^ *```.*?^ *```", re.M | re.S)
NO_PARAGRAPH = re.compile(r"[#|>!<a-z]|- |\d+\. |    |`[^`]*`$")
"""Begins headings, tables, pictures, lists and code, or goes on with a sentence that code has interrupted."""
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`]|\*\*)|:$")
NOTES = "Notes"
"""Heading whose pages may be left out, where there is room for few."""


def write_llms(pages: Path, site: Path, made_from_code: Mapping[str, str]) -> Path:
    """Put llms.txt, and the pages as Markdown, into the built site.

    Args:
        pages: the folder that the site was built of.
        site: the built site.
        made_from_code: pages that no list has, by title.
    """
    for page in pages.rglob("*.md"):
        target = site / page.relative_to(pages)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(page, target)
    file = site / "llms.txt"
    file.write_text(llms_text(pages, made_from_code))
    return file


def llms_text(pages: Path, made_from_code: Mapping[str, str]) -> str:
    """The text of llms.txt, from the folder of pages; what is made from the code comes last under Reference."""
    index = (pages / "README.md").read_text()
    listed = [*entries(index), *(Entry("Reference", 0, title, page) for title, page in made_from_code.items())]
    order = list(dict.fromkeys(entry.section for entry in listed))
    listed.sort(key=lambda entry: order.index(entry.section))
    lines = ["# Varuna", "", f"> {first_sentence(index)}"]
    for section, group in groupby(listed, attrgetter("section")):
        lines += ["", f"## {'Optional' if section == NOTES else section}", ""]
        lines += [_item(entry, (pages / entry.page).read_text()) for entry in group]
    return "\n".join(lines) + "\n"


def _item(entry: Entry, page: str) -> str:
    found = TITLE.search(page)
    sentence = first_sentence(page)
    return f"- [{plain(found[1]) if found else entry.title}]({entry.page})" + (f": {sentence}" if sentence else "")


def first_sentence(page: str) -> str:
    """The first sentence of a page's first paragraph, without links and emphasis; empty if it has none.

    It may have ended with a colon, where a list or code follows.
    """
    for block in re.split(r"\n\s*\n", CODE.sub("", TITLE.sub("", page, count=1)).strip("\n")):
        if block.strip() and not NO_PARAGRAPH.match(block):
            return plain(END.split(LINK.sub(r"\1", " ".join(block.split())), maxsplit=1)[0])
    return ""


def plain(text: str) -> str:
    """Markdown without links, emphasis, and code marks."""
    return re.sub(r"\*\*|(?<![\w*])\*(?=\w)|(?<=\w)\*(?![\w*])|`", "", LINK.sub(r"\1", text)).strip()
