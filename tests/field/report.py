"""What sweeps found, for people: a line per verdict, a summary, and the page in the docs."""

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tests.field.jobs import Job
from tests.field.judge import BAD, COLUMNS, CRASH, HANG, NOTHING, POOR, REFUSED, RIGHT, WRONG

Verdict = Mapping[str, Any]
_SHOWN = 320
_HERE = re.compile(r"/\S*/(?=site-packages/|tests/field/|varuna/)|/\S*/\.field/")
"""Folders of the machine of a sweep."""
_WORST_FIRST = (WRONG, HANG, CRASH, POOR, REFUSED)


def line(verdict: Verdict) -> str:
    """One verdict."""
    asked = " (with micro_batch=)" if verdict["column"] == RIGHT and verdict["asked"] else ""
    return f"{verdict['column']:14} {verdict['job']}{asked} ({verdict['seconds']:.0f} s) {verdict['reason'][:_SHOWN]}"


def counts(verdicts: Iterable[Verdict]) -> Counter[str]:
    """Of each column."""
    return Counter(verdict["column"] for verdict in verdicts)


def share_right(found: Mapping[str, int]) -> float:
    """Of what plain PyTorch was got to train."""
    trained = sum(number for column, number in found.items() if column != NOTHING)
    return found.get(RIGHT, 0) / trained if trained else 0.0


def summary(verdicts: Sequence[Verdict]) -> str:
    """Counts, and how to see again what is not right."""
    found = counts(verdicts)
    lines = [", ".join(f"{found[column]} {column}" for column in COLUMNS if found[column]) or "nothing to judge"]
    for verdict in verdicts:
        if verdict["column"] in (*BAD, POOR):
            lines.append(f"again: python -m tests.field --fresh --loud --job {verdict['job']}")
    return "\n".join(lines)


def versions(commit: str) -> str:
    """What the results were found with."""
    found = []
    for name in ("torch", "transformers", "timm", "torchvision", "diffusers"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return f"{time.strftime('%Y-%m-%d', time.gmtime())}, commit {commit}, {', '.join(found)}"


def page(jobs: tuple[Job, ...], verdicts: Mapping[str, Verdict], found_with: str) -> str:
    """The whole of ``docs/field.md``."""
    swept = [verdicts[job.name] for job in jobs if job.name in verdicts]
    found = counts(swept)
    asked = sum(bool(verdict["asked"]) for verdict in swept if verdict["column"] == RIGHT)
    parts = [
        _BEGINNING,
        f"Written by `make field-table` ({found_with}).\n",
        f"**{len(swept)} of {len(jobs)} jobs have been run. Plain PyTorch trains {len(swept) - found[NOTHING]} of "
        f"them; {share_right(found):.0%} of those are right** ({asked} of {found[RIGHT]} with `micro_batch=4`, as a "
        "refusal had suggested).\n",
        _table(jobs, verdicts),
    ]
    for column in _WORST_FIRST:
        parts += _listed(column, [verdict for verdict in swept if verdict["column"] == column])
    parts.append(f"\n## No reference ({found[NOTHING]})\n\n{_NO_REFERENCE}\n")
    for verdict in sorted((each for each in swept if each["column"] == NOTHING), key=lambda each: str(each["job"])):
        parts.append(f"- {verdict['job']}: {_brief(verdict['reason'], 110)}")
    return "\n".join(parts) + "\n"


def _table(jobs: tuple[Job, ...], verdicts: Mapping[str, Verdict]) -> str:
    rows = [f"| library: task | {' | '.join(COLUMNS)} | not run |", f"|---|{'---:|' * (len(COLUMNS) + 1)}"]
    groups: dict[str, list[Job]] = {}
    for job in sorted(jobs, key=lambda job: (job.library, job.kind)):
        groups.setdefault(f"{job.library}: {job.kind}", []).append(job)
    groups["**all**"] = list(jobs)
    for name, members in groups.items():
        found = counts(verdicts[job.name] for job in members if job.name in verdicts)
        missing = sum(job.name not in verdicts for job in members)
        numbers = [str(found[column] or "") for column in COLUMNS]
        rows.append(f"| {name} | {' | '.join(numbers)} | {missing or ''} |")
    return "\n".join(rows)


def _listed(column: str, verdicts: Sequence[Verdict]) -> list[str]:
    if not verdicts:
        return []
    lines = [f"\n## {column.capitalize()} ({len(verdicts)})\n"]
    for verdict in sorted(verdicts, key=lambda each: (each["reason"], each["job"])):
        lines.append(f"- {verdict['job']}: {_brief(verdict['reason'], _SHOWN)}")
    return lines


def _brief(text: str, most: int) -> str:
    text = _HERE.sub("", " ".join(text.split())).replace("<", "&lt;").replace("|", "/")
    return text if len(text) <= most else f"{text[:most].rstrip()} …"


_BEGINNING = """# The field

This page shows how Varuna does on models that nobody here chose: every class in the auto mappings of transformers for
heads that are trained, one small variant of every family of timm, torchvision's models for images, segmentation and
video, and the denoisers of diffusers. `tests/field` derives a tiny configuration of each from the library's own
configuration classes, and samples from the signature of `forward`: sentences of unequal length with a mask and with
ignored labels, pictures, sound.

Each job runs three steps of SGD with clipping, with 8 samples per step: first in plain PyTorch, in a process that has
not imported Varuna; then with Varuna as 1x1, 3x1 and 2x2 (stages x replicas), each rank in its own process. The
columns:

- **right**: losses and gradient norms equal those of plain PyTorch in all three plans, to 1e-5, and 3x1 equals 1x1
  bit for bit. (If plain PyTorch itself changes by more when its first parameters change by 3e-6, three times that
  change is allowed, and 1e-5 in the first loss.) If a model is refused with a message that names `micro_batch=`, it
  is tried again with `micro_batch=4` (and `per_micro_batch=True`, if the message names it) against plain PyTorch with
  gradient accumulation over 4 samples of equal length.
- **refused**: a `VarunaError` before the first step that says where or what, and what to do.
- **refused poorly**: the same, in words that only developers of Varuna or torch understand.
- **wrong**, **hang** (a plan takes more than 45 seconds on an idle machine, or all plans more than 120), **crash**:
  these should never occur.
- **no reference**: the harness could not get plain PyTorch to train the model, so there is nothing to compare with.

`make test-field` runs all jobs, resumes where it was interrupted, and takes `FAMILY=` and `SAMPLE=`; `make test` runs
a sample. The order of jobs is random but fixed, so an interrupted sweep is a random sample of all jobs.
"""
_NO_REFERENCE = """Mostly pictures, sound and text in a format of the family's own, or configurations that contradict
themselves once they are small: gaps of the harness, not of Varuna. Some classes have no loss of
their own, and some families have no small variant."""
