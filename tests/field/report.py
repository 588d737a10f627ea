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
        f"**{len(swept)} of {len(jobs)} jobs were swept. Plain PyTorch trains {len(swept) - found[NOTHING]} of them; "
        f"{share_right(found):.0%} of those are right** ({asked} of {found[RIGHT]} with `micro_batch=4`, for which a "
        "refusal had asked).\n",
        _table(jobs, verdicts),
    ]
    for column in _WORST_FIRST:
        parts += _listed(column, [verdict for verdict in swept if verdict["column"] == column])
    parts.append(f"\n## No reference ({found[NOTHING]})\n\n{_NO_REFERENCE}\n")
    for verdict in sorted((each for each in swept if each["column"] == NOTHING), key=lambda each: str(each["job"])):
        parts.append(f"- {verdict['job']}: {_brief(verdict['reason'], 110)}")
    return "\n".join(parts) + "\n"


def _table(jobs: tuple[Job, ...], verdicts: Mapping[str, Verdict]) -> str:
    rows = [f"| library: what is learnt | {' | '.join(COLUMNS)} | not swept |", f"|---|{'---:|' * (len(COLUMNS) + 1)}"]
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

Models that nobody here chose: every class in the auto mappings of transformers for heads that are trained, one small
variant of every family of timm, torchvision's models of images, segmentation and videos, the denoisers of diffusers.
`tests/field` derives a tiny configuration of each from the library's own configuration classes, and its samples from
the signature of `forward`: sentences of unequal length with a mask and with labels that are ignored, pictures, sound.

Each job runs three steps of SGD with clipping on 8 samples a step: in plain PyTorch, in a process that has not imported
Varuna; then with Varuna in 1x1, 3x1 and 2x2 (stages x replicas), each rank a process. The columns:

- **right**: losses and gradient norms equal those of plain PyTorch in all three plans, to 1e-5 (or to three times what
  plain PyTorch itself makes of first parameters that are off by 3e-6, and then to 1e-5 in the first loss), and 3x1
  equals 1x1 bit for bit. Where the model is refused with a message that names `micro_batch=`, it is tried again with
  `micro_batch=4` (and `per_micro_batch=True`, where the message names it) against plain PyTorch with gradient
  accumulation over 4, on samples of equal length.
- **refused**: a `VarunaError` before the first step that says where or what, and a way out.
- **refused poorly**: the same in words that only this project or torch's developers understand.
- **wrong**, **hang** (a plan not done within 45 seconds of an idle machine, or all of it within 120), **crash**: never
  to be seen.
- **no reference**: plain PyTorch was not got to train it, so nothing is judged.

`make test-field` runs all of it, resumes where it was cut, and takes `FAMILY=` and `SAMPLE=`; `make test` runs a
sample of it. The order is drawn once for all, so what a cut sweep has done is a sample of the whole.
"""
_NO_REFERENCE = """Mostly pictures, sound and text in a form of the family's own, or fields that contradict each
other once they are small: gaps of the harness. Some classes have no loss of their own, and some families no small
variant."""
