"""The range of torch is the same wherever it has to be written."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.other_torch import NEWEST, OLDEST
from varuna.core.version import TORCH, TORCH_RANGE, is_tested_torch, series

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("version", "expected"),
    [("2.13.0+cpu", (2, 13)), ("2.15", (2, 15)), ("3.0.0a0+git", (3, 0)), ("2.9rc1", (0, 0)), ("", (0, 0))],
)
def test_the_series_of_a_version(version: str, expected: tuple[int, int]) -> None:
    assert series(version) == expected


def test_versions_inside_and_outside_of_the_range() -> None:
    tested = [each for each in ("2.10.1", "2.11.0", "2.13.0+cpu", "2.15.3", "2.16.0", "3.0") if is_tested_torch(each)]
    assert tested == ["2.11.0", "2.13.0+cpu", "2.15.3"]


def test_the_package_asks_for_the_range() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"torch{TORCH_RANGE}" in extras["torch"]


@pytest.mark.parametrize(
    ("file", "pattern"), [("Makefile", r"PINNED_TORCH := (\S+)"), ("deploy/Dockerfile", r"torch==(\S+)")]
)
def test_what_is_pinned_lies_in_the_range(file: str, pattern: str) -> None:
    pinned = re.findall(pattern, (ROOT / file).read_text())
    assert pinned
    assert all(map(is_tested_torch, pinned))


def test_nightly_tries_both_ends_of_the_range() -> None:
    oldest, (major, after_minor) = TORCH
    assert (series(OLDEST), series(NEWEST)) == (oldest, (major, after_minor - 1))
    named = re.findall(r"^(?:OLDEST|NEWEST)_TORCH := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert named == [OLDEST, NEWEST]


def test_documents_name_the_range() -> None:
    (_, first), (_, after) = TORCH
    for page in ("README.md", "docs/dependencies.md", "docs/doctor.md"):
        assert re.search(rf"2\.{first} to 2\.{after - 1}\b", (ROOT / page).read_text()), page
