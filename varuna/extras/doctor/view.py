"""Findings as text: a line each, and for several machines a table of their links."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from varuna.core.units import counted
from varuna.extras.doctor.judging.finding import Finding, Severity, is_healthy
from varuna.process.plain_console import PlainConsole

if TYPE_CHECKING:
    from varuna.extras.doctor.judging.facts import FleetFacts

_MARKS = {
    Severity.OK: Text("ok", style="green"),
    Severity.WARNING: Text("warning", style="yellow"),
    Severity.FAULT: Text("fault", style="red"),
}
_WIDEST = 8
"""Machines whose links fit into a table."""


@contextmanager
def looking() -> Iterator[None]:
    """Show on a terminal that something is being done, in this block."""
    with PlainConsole(stderr=True).status("looking at this machine"):
        yield


def show(
    title: str,
    findings: Sequence[Finding],
    more: Mapping[str, object],
    as_json: bool,
    *,
    healthy: bool = True,
) -> bool:
    """Show findings; return whether all is well.

    Args:
        title: above them.
        findings: to show.
        more: fields of the JSON form.
        as_json: print that.
        healthy: whether all else is.
    """
    is_well = healthy and is_healthy(findings)
    if as_json:
        _print_json(findings, more, is_well)
    else:
        console = PlainConsole()
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), title=title, title_justify="left")
        for finding in findings:
            table.add_row(_MARKS[finding.level], finding.subject, _said(finding))
        console.print(table)
        elsewhere = "" if healthy else "; the first machine shows what else is not"
        console.print(_verdict(findings, is_well).append(elsewhere))
    return is_well


def show_fleet(facts: "FleetFacts", findings: Sequence[Finding], as_json: bool) -> bool:
    """Show the findings of several machines; return whether all is well."""
    is_well = is_healthy(findings)
    if as_json:
        links = {to: {by: link.model_dump() for by, link in row.items()} for to, row in facts.links.items()}
        _print_json(findings, {"machines": [each.name for each in facts.machines], "links": links}, is_well)
    else:
        console = PlainConsole()
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for finding, machines in merged(findings):
            table.add_row(_MARKS[finding.level], machines, finding.subject, _said(finding))
        console.print(table)
        if 1 < len(facts.machines) <= _WIDEST and any(facts.links.values()):
            console.print("links, from row to column:")
            console.print(_matrix(facts))
        console.print(_verdict(findings, is_well))
    return is_well


def merged(findings: Sequence[Finding]) -> list[tuple[Finding, str]]:
    """Merge what several machines say alike, and all that is well on a machine, into one row each; the worst last.

    The end of what is printed is what one sees first.
    """
    rows: dict[Finding, list[str]] = {}
    well: dict[str, list[str]] = {}
    for finding in findings:
        if finding.machine and finding.level is Severity.OK:
            subjects = well.setdefault(finding.machine, [])
            if finding.subject not in subjects:
                subjects.append(finding.subject)
            continue
        names = rows.setdefault(dataclasses.replace(finding, machine=""), [])
        names.extend([finding.machine] if finding.machine else [])
    alike: dict[tuple[str, ...], list[str]] = {}
    for machine, subjects in well.items():
        alike.setdefault(tuple(subjects), []).append(machine)
    shown = [
        (Finding(Severity.OK, "machine", ", ".join(subjects)), ", ".join(machines))
        for subjects, machines in alike.items()
    ]
    shown += [(finding, ", ".join(names) or "all") for finding, names in rows.items()]
    order = list(_MARKS)
    return sorted(shown, key=lambda row: order.index(row[0].level))


def _print_json(findings: Sequence[Finding], more: Mapping[str, object], is_well: bool) -> None:
    rows = [{**dataclasses.asdict(finding), "level": finding.level.value} for finding in findings]
    print(json.dumps({**more, "healthy": is_well, "findings": rows}, indent=1))


def _said(finding: Finding) -> Text:
    return Text.assemble(finding.text, *([("\n" + finding.remedy, "dim")] if finding.remedy else []))


def _verdict(findings: Sequence[Finding], is_well: bool) -> Text:
    faults = sum(finding.level is Severity.FAULT for finding in findings)
    warnings = sum(finding.level is Severity.WARNING for finding in findings)
    counts = f"{counted(faults, 'fault')}, {counted(warnings, 'warning')}"
    return Text.assemble(("ready", "green") if is_well else ("not ready", "red"), f": {counts}")


def _matrix(facts: "FleetFacts") -> Table:
    """Return a table of bandwidth and latency from row to column."""
    from varuna.extras.doctor.judging.judge_machine import delay, speed

    first, *others = [machine.name for machine in facts.machines]
    names = [first, *sorted(others)]
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for source in names:
        cells = []
        for target in names:
            link = facts.links.get(target, {}).get(source)
            reached = facts.reaches.get(source, {}).get(target)
            if source == target:
                cells.append(Text())
            elif reached is not None and reached.problem:
                cells.append(Text("blocked", style="red"))
            elif link is None or link.problem:
                cells.append(Text("-", style="red"))
            else:
                cells.append(Text.assemble(speed(link.bytes_per_s), (f"\n{delay(link.latency_s)}", "dim")))
        table.add_row(source, *cells)
    return table
