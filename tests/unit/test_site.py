"""The documentation as a site: its order of pages, what is made from the code, and what would leave the site.

The site itself is built by ``make docs``, which is part of ``make check``.
"""

import re
from pathlib import Path

from docs.site.built import fetched_from_elsewhere, torn
from docs.site.commands import commands, help_page
from docs.site.llms import first_sentence, llms_text, write_llms
from docs.site.messages import error_classes, messages, texts
from docs.site.nav import entries, nav
from docs.site.python import python_page
from docs.site.staging import without_links_to_sources
from varuna import __all__ as face
from varuna.fleet.engines.registry import kinds

ROOT = Path(__file__).parents[2]
ERRORS = (ROOT / "docs" / "errors.md").read_text()
VARIABLE = re.compile(r"""["'](VARUNA_[A-Z_]+)["']""")
QUOTED = re.compile(r"^- `(?P<words>.+?)`: .+$", re.M)


def quotations(page: str) -> list[str]:
    """The messages that the page's lists begin with."""
    return QUOTED.findall(page)


def is_said(words: str, said: set[str]) -> bool:
    pieces = [re.escape(piece.strip()) for piece in words.split("…")]
    pattern = re.compile(".*".join(pieces), re.S)
    return any(pattern.search(text) for text in said)


def test_every_page_is_in_the_order_of_pages() -> None:
    listed = {entry.page for entry in entries((ROOT / "docs/README.md").read_text())}
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    missing = sorted(pages - listed)
    assert not missing, f"add an item '- [Title](page.md): what it is for' to a list in docs/README.md for {missing}"


def test_items_below_an_item_are_a_group() -> None:
    index = "## How to\n\n- [One](one.md): first\n    - [`two`](sub/two.md)\n- [Three](three.md)\n\n## Reference\n"
    assert nav(index, {"Python": "made/python.md"}) == [
        {"Home": "README.md"},
        {"How to": [{"One": ["one.md", {"two": "sub/two.md"}]}, {"Three": "three.md"}]},
        {"Reference": [{"Made from the code": [{"Python": "made/python.md"}]}]},
    ]


def test_what_a_browser_would_fetch_from_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<link rel="canonical" href="https://us"><a href="https://link">no</a><img src="here.svg">'
        '<link rel="stylesheet" href="https://fonts"><script src="//cdn/x.js"></script>'
        '<style>a { background: url("http://picture") }</style>'
    )
    (tmp_path / "b.css").write_text("@font-face { src: url(https://font) } a { background: url(data:x) }")
    assert fetched_from_elsewhere(tmp_path) == [
        "a.html: https://fonts",
        "a.html: //cdn/x.js",
        "a.html: http://picture",
        "b.css: https://font",
    ]
    assert torn(tmp_path) == []
    (tmp_path / "a.html").write_text("<code>x</code><code class='y'>cut")
    assert torn(tmp_path) == ["a.html"]


def test_links_to_sources_become_their_names() -> None:
    text = "[`examples/x.py`](../../examples/x.py), [the tests](../../tests/y), [here](../cli.md#varuna-run)"
    assert without_links_to_sources(text, ROOT / "docs" / "run-on", ROOT) == (
        "`examples/x.py`, the tests (`tests/y`), [here](../cli.md#varuna-run)"
    )


def test_the_page_of_python_has_the_public_face() -> None:
    """Errors have a page of their own."""
    page = python_page(ROOT)
    sections = set(re.findall(r"^## varuna\.(\w+)$", page, re.M))
    assert sections == {name for name in face if not name.endswith("Error")} - {"__version__"}
    assert "| `global_batch` | examples per optimizer step" in page
    assert "### Trainer.evaluate" in page


def test_the_page_of_commands_has_every_command_and_engine() -> None:
    page = help_page(ROOT)
    for heading in ("varuna run", "varuna checkpoints export", "varuna run --on slurm"):
        assert f"\n## {heading}\n" in page
    assert "| `--workers`, `-n` | Worker processes to keep alive" in page


def test_the_page_on_commands_has_no_option_that_does_not_exist() -> None:
    page = (ROOT / "docs/cli.md").read_text()
    given = {option for _, each in commands() for parameter in each.params for option in getattr(parameter, "opts", ())}
    of_engines = {f"--{option.name}" for kind in kinds().values() for option in kind.options}
    stale = set(re.findall(r"`(--[a-z-]+)", page)) - given - of_engines
    assert not stale, f"no command has {sorted(stale)}: mend docs/cli.md"


def test_the_page_on_environment_variables_has_all_of_them() -> None:
    page = set(re.findall(r"`(VARUNA_[A-Z_]+)`", (ROOT / "docs/environment.md").read_text()))
    code = {name for path in (ROOT / "varuna").rglob("*.py") for name in VARIABLE.findall(path.read_text())}
    assert page == code, "docs/environment.md and the code differ"


def test_messages_are_found_in_the_code() -> None:
    found = {(each.error, each.text) for each in messages(ROOT)}
    assert ("FleetError", "no manager answered at … for … s") in found
    assert len(found) > 400
    assert {"VarunaError", "ObjectMissing", "SlurmAwayError"} <= set(error_classes(ROOT))


def test_the_page_of_errors_names_every_class() -> None:
    missing = [name for name in error_classes(ROOT) if f"`{name}`" not in ERRORS and name != "VarunaError"]
    assert not missing, f"say in docs/errors.md when {missing} is raised"


def test_what_the_page_of_errors_quotes_is_said() -> None:
    said = {" ".join(text.split()) for text in texts(ROOT)}
    assert is_said("no plan fits: a pipeline needs … worker", said)
    assert not is_said("no plan fits: a pipeline wants … worker", said)
    quoted = quotations(ERRORS)
    assert len(quoted) > 25
    stale = [words for words in quoted if not is_said(words, said)]
    assert not stale, f"no message of the code has these words any more: mend docs/errors.md: {stale}"


def test_the_first_sentence_of_a_page_is_that_of_its_first_paragraph() -> None:
    table = "| a | b |\n|---|---|\n\n- an item. Too.\n\n"
    code = "```\nvaruna run\n\nRuns. It.\n```\n\nwhich goes on.\n\n`a command`\n\n"
    text = "**`precision`** says [what\n`step.loss` is](x.md), e.g. *bf16*. More of it. And:\n"
    assert first_sentence(f"# Title\n\n{table}{code}{text}") == "precision says what step.loss is, e.g. bf16."
    assert first_sentence("# Title\n\nWrite this:\n\n```\nx\n```\n") == "Write this"
    assert first_sentence("# Title\n\n" + table) == ""


def test_llms_txt_lists_pages_by_heading_with_their_first_sentences(tmp_path: Path) -> None:
    pages, site = tmp_path / "pages", tmp_path / "site"
    (pages / "sub").mkdir(parents=True)
    index = "# Docs\n\nVaruna **trains**. It does more.\n\n## How to\n\n- [One](one.md): first\n"
    index += "    - [`two`](sub/two.md)\n\n"
    (pages / "README.md").write_text(index + "## Reference\n\n- [Three](three.md)\n\n## Notes\n\n- [Old](old.md)\n")
    (pages / "one.md").write_text("# Number `one`\n\nIt is first. Of two.\n")
    (pages / "sub/two.md").write_text("No title, but a sentence.\n")
    (pages / "three.md").write_text("# Three\n\n| table |\n")
    (pages / "old.md").write_text("# Old\n\nLong ago.\n")
    (pages / "made.md").write_text("# Made\n\nBy a program.\n")
    assert llms_text(pages, {"Made": "made.md"}) == (
        "# Varuna\n\n> Varuna trains.\n"
        "\n## How to\n\n- [Number one](one.md): It is first.\n- [two](sub/two.md): No title, but a sentence.\n"
        "\n## Reference\n\n- [Three](three.md)\n- [Made](made.md): By a program.\n"
        "\n## Optional\n\n- [Old](old.md): Long ago.\n"
    )
    text = write_llms(pages, site, {"Made": "made.md"}).read_text()
    linked = re.findall(r"\]\(([^)]+)\)", text)
    assert linked == ["one.md", "sub/two.md", "three.md", "made.md", "old.md"]
    assert all((site / page).read_text() == (pages / page).read_text() for page in linked)


def test_llms_txt_has_every_page() -> None:
    text = llms_text(ROOT / "docs", {})
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")} - {"README.md"}
    assert set(re.findall(r"^- \[[^\]]+\]\(([^)]+)\)", text, re.M)) == pages
    assert text.startswith("# Varuna\n\n> Varuna trains PyTorch models that are too big")
