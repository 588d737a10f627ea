"""Docs and docstrings name only what exists, and nothing is left to be filled in."""

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / each for each in ("README.md", "CONTRIBUTING.md", "AGENTS.md")), *ROOT.glob("docs/**/*.md")])
SOURCES = sorted(
    path for folder in ("varuna", "examples", "benchmarks", "tests") for path in ROOT.glob(f"{folder}/**/*.py")
)

PLACEHOLDER = re.compile(r"@[A-Z][A-Z0-9_]*@|\b(?:TODO|FIXME|XXX)\b")
ABSENT = re.compile(r"\bDESIGN\b|\breference/[\w-]+\.(?:md|py)")  # notes that never were part of this repository
RAISES = re.compile(r"^ +Raises:\n((?: +\S.*\n)+)", re.M)
QUESTION = re.compile(r"\A(?:What|How|Where|When|Who|Whose|Which|Why)\b", re.I)
LINK = re.compile(r"\]\(([^)\s]+)\)")
TREE_PATH = re.compile(r"(?<![\w/.{>-])(?:varuna|tests|benchmarks|examples|docs)/(?!s\b)[\w./*-]*\w")
TEST_FILE = re.compile(r"(?<![\w/])test_\w+\.py")
DOTTED = re.compile(r"`(?:python -m )?(\w+(?:\.\w+)+)(?<!\.json)`")
CODE = re.compile(r"^ *```.*?^ *```", re.M | re.S)
PACKAGES = sorted(path.parent.name for path in ROOT.glob("varuna/*/__init__.py"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of what people read: whole pages; docstrings and comments of sources."""
    text = path.read_text()
    if path.suffix == ".md":
        yield from enumerate(text.splitlines(), 1)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from enumerate(node.value.value.splitlines(), node.lineno)
    for number, line in enumerate(text.splitlines(), 1):
        if (comment := re.search(r"(?:^|\s)#\s(.*)", line)) is not None:
            yield number, comment[1]


def found(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    return [
        f"{name(path)}:{number}: {hit[0]}"
        for path in paths
        if pattern.search(path.read_text())
        for number, text in prose(path)
        for hit in pattern.finditer(text)
    ]


def exists(path: str) -> bool:
    return any(True for _ in ROOT.glob(path.rstrip("/."))) if "*" in path else (ROOT / path.rstrip(".")).exists()


@cache
def defines(module: Path, attribute: str) -> bool:
    return re.search(rf"^(?:class|def|async def)?\s*{attribute}\b", module.read_text(), re.M) is not None


def is_there(dotted: str) -> bool:
    """Whether ``a.b.c`` is a package, a module, or a name in one."""
    first, *rest = dotted.split(".")
    place = ROOT / first if first in ("varuna", "benchmarks", "tests") else ROOT / "varuna" / first
    for at, part in enumerate(rest):
        if (place / part).is_dir():
            place = place / part
        elif (module := place / f"{part}.py").is_file():
            return at == len(rest) - 1 or defines(module, rest[at + 1])
        else:
            return at == len(rest) - 1 and f'"{part}"' in (place / "__init__.py").read_text()
    return True


def anchors(page: Path) -> set[str]:
    """Anchors of headings, as GitHub derives them."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_patterns_find_what_they_are_for() -> None:
    assert PLACEHOLDER.search("| 8 | @SCALE@ |")
    assert PLACEHOLDER.search("# TODO: say more")
    assert ABSENT.search("as in DESIGN §5")
    assert ABSENT.search("(``reference/pytorch.md`` §4)")
    assert TREE_PATH.findall("see `varuna/engine/pipeline/input_stash.py`, 3 examples/s, /usr/tests/x") == [
        "varuna/engine/pipeline/input_stash.py"
    ]
    assert DOTTED.findall("`core.plan` and `python -m benchmarks.real_plans`") == [
        "core.plan",
        "benchmarks.real_plans",
    ]
    assert is_there("core.plan.Plan")
    assert not is_there("core.plan.Scheme")
    assert not is_there("core.scheme")
    assert not exists("varuna/engine/nowhere.py")


def test_nothing_is_left_to_be_filled_in() -> None:
    assert found(PLACEHOLDER, [path for path in PAGES + SOURCES if path != Path(__file__)]) == []


def test_nothing_cites_notes_that_are_not_in_this_repository() -> None:
    assert found(ABSENT, [path for path in PAGES + SOURCES if path != Path(__file__)]) == []


def test_docstrings_define_or_say_what_is_done_and_begin_with_no_question() -> None:
    questions = [
        f"{name(path)}:{node.lineno}: {node.value.value.splitlines()[0]}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and QUESTION.search(node.value.value)
    ]
    assert questions == []


def test_docstrings_name_errors_that_exist() -> None:
    trees = {path: ast.parse(path.read_text()) for path in SOURCES if path.is_relative_to(ROOT / "varuna")}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    known = {*dir(builtins), *(node.name for node in nodes if isinstance(node, ast.ClassDef))}
    known |= {each.name for node in nodes if isinstance(node, ast.ImportFrom) for each in node.names}
    named = {
        f"{name(path)}: {error}"
        for path in trees
        for section in RAISES.findall(path.read_text())
        for error in re.findall(r"^ +([A-Z]\w+): ", section, re.M)
        if error not in known
    }
    assert named == set()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_within_the_repository_leads_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(CODE.sub("", page.read_text())):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        other = (page.parent / file).resolve() if file else page
        if not other.exists() or (anchor and anchor not in anchors(other)):
            broken.append(target)
    assert broken == []


def test_every_file_that_is_named_exists() -> None:
    tests = {path.name for path in ROOT.glob("tests/**/test_*.py")}
    paths = [line for line in found(TREE_PATH, PAGES + SOURCES) if not exists(line.rpartition(": ")[2])]
    assert paths == []
    assert [line for line in found(TEST_FILE, PAGES) if line.rpartition(": ")[2] not in tests] == []


def test_every_module_that_a_page_names_exists() -> None:
    named = [(name(page), dotted) for page in PAGES for dotted in DOTTED.findall(page.read_text())]
    ours = [(page, dotted) for page, dotted in named if dotted.split(".")[0] in (*PACKAGES, "varuna", "benchmarks")]
    assert [(page, dotted) for page, dotted in ours if not is_there(dotted)] == []
    assert len(ours) > 50, "the pattern finds no modules any more"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert pages - set(LINK.findall(index)) == {"README.md"}


def test_pages_are_few_enough_words_to_be_read() -> None:
    """All pages together stay within 50,000 words, so that each fact keeps one home."""
    words = {page: len(page.read_text().split()) for page in (*PAGES, ROOT / "CHANGELOG.md")}
    assert sum(words.values()) <= 50_000
    assert words[ROOT / "README.md"] <= 800


def test_agents_get_a_page_that_they_read_at_once_and_that_leads_to_the_rules() -> None:
    page = (ROOT / "AGENTS.md").read_text()
    assert len(page.splitlines()) <= 60
    assert {"CONTRIBUTING.md", "examples/nano_varuna.py", "docs/rooms.md", "docs/glossary.md"} <= set(
        LINK.findall(page)
    )
    targets = set(re.findall(r"`make ([\w-]+)", page))
    rules = set(re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(), re.M))
    assert {"install", "unit", "test", "check", "docs"} <= targets <= rules
    folders = re.findall(r"^\| (`varuna/.+?) \|", page, re.M)
    named = {name for row in folders for name in re.findall(r"`(?:varuna/)?(\w+)`", row)}
    assert set(PACKAGES) - {"replay", "process", "membership", "trackers", "integrations", "testing", "demo"} <= named
