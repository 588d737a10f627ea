"""Reports of sweeps, for people: a line per verdict, a summary, and the page in the docs."""

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tests.field.eager import UNTRAINABLE
from tests.field.jobs import Job
from tests.field.judge import BAD, COLUMNS, CRASH, HANG, NOTHING, POOR, REFUSED, RIGHT, WRONG

Verdict = Mapping[str, Any]
_SHOWN = 320
_QUOTED = 160
_ALIKE = 60
_NOT_RUN = "not run"
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
    """Name the date, the commit and the libraries' versions that the results are of."""
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
    right = [verdict for verdict in swept if verdict["column"] == RIGHT]
    least = "at least " if any(verdict["asked"] is None for verdict in right) else ""  # verdicts read off an older page
    asked = f"{least}{sum(bool(verdict['asked']) for verdict in right)}"
    parts = [
        _BEGINNING,
        f"Written by `make field-table` ({found_with}). {_ages(swept)}\n",
        f"**{len(swept)} of {len(jobs)} jobs have been run. Plain PyTorch trains {len(swept) - found[NOTHING]} of "
        f"them; {share_right(found):.0%} of those are right** ({asked} of {found[RIGHT]} with `micro_batch=4`, as a "
        "refusal had suggested).\n",
        _table(jobs, verdicts),
    ]
    for column in _WORST_FIRST:
        parts += _listed(column, [verdict for verdict in swept if verdict["column"] == column])
    unknown = Counter(_why_not(each["reason"]) for each in swept if each["column"] == NOTHING)
    rows = [f"| {cause} | {unknown[cause]} | {said} |" for cause, said in _WHY_NOT.items() if unknown[cause]]
    parts.append(f"\n## No reference ({found[NOTHING]})\n\n{_NO_REFERENCE}\n\n| cause | jobs | |\n|---|---:|---|")
    return "\n".join([*parts, *rows]) + "\n"


def _why_not(reason: str) -> str:
    """Name the cause among those of ``_WHY_NOT`` that kept plain PyTorch from training."""
    no_loss, library, device, large, gap = _WHY_NOT
    if UNTRAINABLE.search(reason):
        return no_loss
    if "ImportError" in reason:
        return library
    if "not support backward on CPU" in reason:
        return device
    return large if re.search(r"too large for a sweep|not done after", reason) and "Error" not in reason else gap


def _ages(verdicts: Sequence[Verdict]) -> str:
    """Count the commits that verdicts are of: what was mended since is judged again only where that was asked for."""
    commits = len({verdict["commit"] for verdict in verdicts})
    return f"A sweep takes hours: its verdicts are of {commits} commits, which `tests/field/verdicts.jsonl` names."


def _table(jobs: tuple[Job, ...], verdicts: Mapping[str, Verdict]) -> str:
    """The columns that some job is in, and the names of the others."""
    groups: dict[str, list[Job]] = {}
    for job in sorted(jobs, key=lambda job: job.library):
        groups.setdefault(job.library, []).append(job)
    groups["**all**"] = list(jobs)
    every = counts({"column": _NOT_RUN} | dict(verdicts.get(job.name, {})) for job in jobs)
    shown = [column for column in (*COLUMNS, _NOT_RUN) if every[column]]
    rows = [f"| library | {' | '.join(shown)} |", f"|---|{'---:|' * len(shown)}"]
    for name, members in groups.items():
        found = counts({"column": _NOT_RUN} | dict(verdicts.get(job.name, {})) for job in members)
        rows.append(f"| {name} | {' | '.join(str(found[column] or '') for column in shown)} |")
    none = [column for column in COLUMNS if column not in shown]
    return "\n".join([*rows, *([f"\nNo job is in {', '.join(none)}."] if none else [])])


def _listed(column: str, verdicts: Sequence[Verdict]) -> list[str]:
    """One entry for all jobs of which the same is said, but for where it happens; the commonest first."""
    if not verdicts:
        return []
    groups: dict[str, list[Verdict]] = {}
    for verdict in sorted(verdicts, key=lambda each: str(each["job"])):
        groups.setdefault(_likeness(verdict["reason"]), []).append(verdict)
    lines = [f"\n## {column.capitalize()} ({len(verdicts)})\n"]
    for members in sorted(groups.values(), key=len, reverse=True):
        jobs = ", ".join(str(verdict["job"]) for verdict in members)
        several = f"{len(members)} models, " if len(members) > 1 else ""
        lines.append(f"- {several}{jobs}: {_brief(members[0]['reason'], _QUOTED)}")
    return lines


def _likeness(reason: str) -> str:
    """The beginning of a reason without numbers, names and places."""
    words = re.sub(r"\S*[/_.]\S+|\(.*?\)|\d+", "", reason.partition(": ")[2])
    return " ".join(words.split())[:_ALIKE]


def _brief(text: str, most: int) -> str:
    text = " ".join(text.split()).replace("<", "&lt;").replace("|", "/")
    return text if len(text) <= most else f"{text[:most].rstrip()} …"


_BEGINNING = """# The field

A program tries Varuna on models that its authors did not choose, and writes this page: every class in the auto mappings
of transformers for heads that are trained, one small variant of every family of timm, torchvision's models of images,
segmentation and videos, and the denoisers of diffusers. Each is unmodified, in a tiny configuration, with made-up
samples, which says nothing of speed or memory.

Each job runs three steps of SGD with clipping in plain PyTorch, then with Varuna in 1x1, 3x1 and 2x2 (stages x
replicas; with two sections 2x1 in place of 3x1), each rank a process:

- **right**: losses and gradient norms equal those of plain PyTorch in all three plans, to 1e-5 (or to three times what
  plain PyTorch itself makes of first parameters that are off by 3e-6), and 3x1 equals 1x1 bit for bit. What a refusal
  asks for is done, as a user would: `micro_batch=4` against plain PyTorch with gradient accumulation over 4, or `cut=`.
- **refused**: an error before the first step that says where or what, and a way out. **Refused poorly**: in words that
  only this project or torch's developers understand.
- **wrong**, **hang**, **crash**: never to be seen.
- **no reference**: the sweep could not train it with plain PyTorch.

`make test-field` runs all of it and resumes where it was cut; `make test` runs a sample.
"""
_NO_REFERENCE = "These count neither as right nor as refused. `tests/field/verdicts.jsonl` has what each said."
_WHY_NOT = {
    "No loss of their own": "The class takes no targets, or says itself that it cannot be trained.",
    "Another library is missing": "It is not part of the sweep's environment.",
    "Not on a CPU": "An operation of the model has no gradient there, and the sweep runs on CPUs.",
    "Too large": "There is no variant small enough for a sweep, or it takes too long.",
    "Gaps of this harness": "Inputs in a form of the family's own, or fields that contradict each other once they are "
    "small.",
}
"""Causes, in the order of the page, and what to say of each."""
