"""The parts of ``make test``, one after the other; at the end, the cost of each part and the slowest tests.

``python -m tests.parts`` runs all of them and ``python -m tests.parts unit`` one; ``--write`` also updates
``tests/costs.md``. With NIGHTLY=1 each part runs at its full depth.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

from tests.depth import IS_NIGHTLY
from tests.other_torch import NEWEST, OLDEST

ROOT = Path(__file__).parents[1]
REPORTS = ROOT / "build" / "tests"
COSTS = ROOT / "tests" / "costs.md"
SLOWEST = 15

COMPUTING = tuple(f"tests/scenarios/test_{name}.py" for name in ("families", "gallery", "scale_on_paper", "inductor"))
"""Scenarios that compute in one process; the others start workers, and wait for much of their time."""

RUNS = "tests/unit/testing"
"""Whole runs, whose workers are threads."""


@dataclass(frozen=True)
class Part:
    """Tests that one command runs."""

    name: str
    command: tuple[str, ...]
    """after ``python -m``"""

    @property
    def report(self) -> Path:
        """Durations as JUnit XML, which pytest writes."""
        return REPORTS / f"{self.name}.xml"

    def line(self) -> list[str]:
        """The whole command."""
        report = (f"--junitxml={self.report}", "-o", "junit_duration_report=total")
        return [sys.executable, "-m", *self.command, *(report if self.command[0] == "pytest" else ())]


def parts() -> tuple[Part, ...]:
    """Return all parts, the quickest to fail first."""
    few = ("--sample", "6", "--briefly", "--at-once", "2", "--begun-within", "60")
    field = ("--sample", "16", "--begun-within", "200") if IS_NIGHTLY else few
    others = (OLDEST, NEWEST) if IS_NIGHTLY else ()
    return (
        Part("unit", ("pytest", "-q", "-n", "auto", "--dist", "worksteal", "tests/unit", f"--ignore={RUNS}")),
        Part("in-process", ("pytest", "-q", "-n", "auto", "--dist", "worksteal", RUNS, *COMPUTING)),
        Part("field", ("tests.field", "--fresh", *field)),
        Part(
            "processes",
            (
                *("pytest", "-q", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder", "tests/scenarios"),
                *(f"--ignore={path}" for path in COMPUTING),
            ),
        ),
        *(Part(f"torch-{each}", ("tests.other_torch", each, "--field", "6")) for each in others),
        *(Part("null-gpu", ("tests.other_torch", each, "--null-gpu")) for each in others[-1:]),
    )


@dataclass(frozen=True)
class Cost:
    """The time that a part took."""

    part: str
    wall_s: float
    tests: dict[str, float]
    """seconds of each test, with its fixtures"""


def durations(report: Path) -> Iterator[tuple[str, float]]:
    """Yield each test of a report with its seconds."""
    for case in ElementTree.parse(report).iter("testcase"):
        yield f"{case.get('classname', '').replace('.', '/')}::{case.get('name')}", float(case.get("time", 0))


def run(part: Part) -> tuple[int, Cost]:
    """Run a part; return its exit status and its cost."""
    part.report.unlink(missing_ok=True)
    begun_s = time.monotonic()
    status = subprocess.run(part.line(), cwd=ROOT, check=False).returncode
    wall_s = time.monotonic() - begun_s
    return status, Cost(part.name, wall_s, dict(durations(part.report)) if part.report.exists() else {})


def slowest(costs: list[Cost]) -> list[tuple[float, str]]:
    """Return the slowest tests of all parts, the slowest first."""
    return sorted(((seconds, name) for cost in costs for name, seconds in cost.tests.items()), reverse=True)[:SLOWEST]


def table(costs: list[Cost]) -> str:
    """Render the parts and the slowest tests as Markdown."""
    rows = [f"| {cost.part} | {len(cost.tests) or ''} | {cost.wall_s:.0f} |" for cost in costs]
    whole = f"| all | {sum(len(cost.tests) for cost in costs)} | {sum(cost.wall_s for cost in costs):.0f} |"
    tests = [f"| {seconds:.1f} | `{name}` |" for seconds, name in slowest(costs)]
    return "\n".join(
        ["| part | tests | seconds |", "|---|---|---|", *rows, whole, "", "| seconds | test |", "|---|---|", *tests]
    )


def page(costs: list[Cost]) -> str:
    """Render ``tests/costs.md``."""
    return (
        f"# What the tests cost\n\nMeasured on {date.today()} with {os.cpu_count()} cores by "
        "`python -m tests.parts --write`. Parts are wall time; a test's seconds contain its fixtures, and tests "
        "that ran beside it slow it down.\n\n" + table(costs) + "\n"
    )


def main() -> int:
    """Run parts until one fails, or all of them at nightly depth; return the first failure's exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.parts", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(part.name for part in parts()))
    parser.add_argument("--write", action="store_true", help="update tests/costs.md")
    arguments = parser.parse_args()
    known = {part.name: part for part in parts()}
    if unknown := [name for name in arguments.parts if name not in known]:
        parser.error(f"needs parts of {', '.join(known)}; found {', '.join(unknown)}")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored behind nohup: tests press Ctrl-C
    REPORTS.mkdir(parents=True, exist_ok=True)
    costs, status = [], 0
    for part in [known[name] for name in arguments.parts] or known.values():
        failed, cost = run(part)
        costs.append(cost)
        if failed:
            status = status or failed
            print(f"\nThe part {part.name!r} failed (exit status {failed}).", file=sys.stderr)
            if not IS_NIGHTLY:
                break
    print(f"\n{table(costs)}", flush=True)
    if arguments.write and not status:
        COSTS.write_text(page(costs))
    return status


if __name__ == "__main__":
    sys.exit(main())
