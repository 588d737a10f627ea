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
_ALIKE = 60
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
    unknown = sorted((each for each in swept if each["column"] == NOTHING), key=lambda each: str(each["job"]))
    parts.append(f"\n## No reference ({found[NOTHING]})\n\n{_NO_REFERENCE}")
    for cause, said in _WHY_NOT.items():
        of_cause = [verdict for verdict in unknown if _why_not(verdict["reason"]) == cause]
        if of_cause:
            names = ", ".join(str(verdict["job"]) for verdict in of_cause)
            parts.append(f"\n### {cause} ({len(of_cause)})\n\n{said}\n\n{names}")
    return "\n".join(parts) + "\n"


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
        lines.append(f"- {several}{jobs}: {_brief(members[0]['reason'], _SHOWN)}")
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
segmentation and videos, and the denoisers of diffusers. `tests/field` derives a tiny configuration of each from the
library's own configuration classes, and samples from the signature of `forward` and a trial of the model. The modules
are unmodified. Where `forward` wants another form than a tensor for each name, a module around it makes that, as a user
would write it (`tests/field/wrapped.py`, `tests/field/placed.py`).

Each job runs three steps of SGD with clipping on 8 samples a step: in plain PyTorch, in a process that has not imported
Varuna; then with Varuna in 1x1, 3x1 and 2x2 (stages x replicas), each rank a process. A model of two sections is judged
in 2x1 in place of 3x1. The columns:

- **right**: losses and gradient norms equal those of plain PyTorch in all three plans, to 1e-5 (or to three times what
  plain PyTorch itself makes of first parameters that are off by 3e-6; the first loss to once that), and 3x1 equals 1x1
  bit for bit. What a refusal asks for is done, as a user would: `micro_batch=4` (and `per_micro_batch=True`) against
  plain PyTorch with gradient accumulation over 4, on samples of equal length; `cut=` with as many as it says.
- **refused**: a `VarunaError` before the first step that says where or what, and a way out.
- **refused poorly**: the same in words that only this project or torch's developers understand.
- **wrong**, **hang** (a plan not done within 45 seconds of an idle machine; or all of it not within 120 nor, as long as
  it computes, within ten minutes of processor time), **crash**: never to be seen.
- **no reference**: the sweep could not train it with plain PyTorch, so nothing is judged.

`make test-field` runs all of it, resumes where it was cut, and takes `FAMILY=` and `SAMPLE=`; `make test` runs a
sample of it. The order is drawn once for all, so what a cut sweep has done is a sample of the whole. Models in tiny
configurations show whether a computation is captured, cut and weighed rightly; they do not show speed or memory.
"""
_NO_REFERENCE = """The sweep could not train these models with plain PyTorch, so there is nothing to compare with.
They count neither as right nor as refused. `tests/field/verdicts.jsonl` has what each said."""
_WHY_NOT = {
    "No loss of their own": "The class takes no targets, or says itself that it cannot be trained.",
    "Another library is missing": "It is not part of the sweep's environment.",
    "Not on a CPU": "An operation of the model has no gradient there, and the sweep runs on CPUs.",
    "Too large": "There is no variant small enough for a sweep, or it takes too long.",
    "Gaps of this harness": "Inputs in a form of the family's own, or fields that contradict each other once they are "
    "small.",
}
"""Causes, in the order of the page, and what to say of each."""
