"""``varuna doctor``: checks a run from outside."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from varuna.cli import options

if TYPE_CHECKING:
    from varuna.doctor.diagnose import Finding

_MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "fault": "[red]fault[/]"}


def doctor(
    run: options.RunDir = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Do not read the newest checkpoint, only check that it is complete.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Check a run from outside: samples, checkpoint, leases, disks, open ports, clocks.

    Changes nothing. Reads every byte of the newest checkpoint and compares it
    with its checksum. Exit code 1 if something is broken, 0 if there are only
    warnings.
    """
    from varuna.doctor.diagnose import diagnose, is_healthy
    from varuna.doctor.gather import gather
    from varuna.fleet.run_folder.connection_file import find

    folder, access = find(run)
    findings = diagnose(gather(folder, access, reads=not quick))
    if as_json:
        rows = [{**dataclasses.asdict(finding), "level": finding.level.value} for finding in findings]
        print(json.dumps({"run": str(folder), "healthy": is_healthy(findings), "findings": rows}, indent=1))
    else:
        _show(folder, findings)
    if not is_healthy(findings):
        raise typer.Exit(1)


def _show(folder: Path, findings: "tuple[Finding, ...]") -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), title=f"run {folder}", title_justify="left")
    for finding in findings:
        remedy = f"\n[dim]{escape(finding.remedy)}[/]" if finding.remedy else ""
        table.add_row(_MARKS[finding.level.value], finding.subject, escape(finding.text) + remedy)
    Console().print(table)
