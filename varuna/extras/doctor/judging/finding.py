"""Findings of checks: how bad each is, in words, and what to do next."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

NAMED = 6
"""Most subjects of a finding that are named."""


class Severity(Enum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    level: Severity
    subject: str
    text: str
    remedy: str = ""
    machine: str = ""
    """the machine that it is about; empty: this one, or all"""


def ok(subject: str, text: str) -> Finding:
    """Make a finding that nothing is to be done."""
    return Finding(Severity.OK, subject, text)


def warning(subject: str, text: str, remedy: str) -> Finding:
    """Make a finding that a run works, but not as well as it could, or not for long."""
    return Finding(Severity.WARNING, subject, text, remedy)


def fault(subject: str, text: str, remedy: str) -> Finding:
    """Make a finding that a run fails."""
    return Finding(Severity.FAULT, subject, text, remedy)


def is_healthy(findings: Sequence[Finding]) -> bool:
    """Return whether nothing is broken; warnings do not count."""
    return all(finding.level is not Severity.FAULT for finding in findings)


def listed(names: Sequence[str]) -> str:
    """Join names as ``"a, b and c"``."""
    if len(names) > NAMED:
        return f"{', '.join(names[:NAMED])} and {len(names) - NAMED} more"
    return ", ".join(names[:-1]) + f" and {names[-1]}" if len(names) > 1 else names[0]
