"""All jobs of all libraries, in one fixed order."""

import hashlib
from collections import Counter
from collections.abc import Iterator

from tests.field import denoisers, huggingface, pictures, provoked
from tests.field.jobs import Attempt, Job, Prepared


def all_jobs() -> tuple[Job, ...]:
    """One of every family, then a second of every family that has one, and so on; kinds of targets take turns.

    Among equals the order is drawn once and for all, so wherever a sweep is cut, what is done is a sample of the whole.
    """
    found = [*huggingface.jobs(), *pictures.jobs(), *denoisers.jobs()]
    heads: Counter[tuple[str, str]] = Counter()
    rounds = []
    for job in found:
        rounds.append((heads[job.library, job.family], hashlib.blake2b(job.name.encode()).digest(), job))
        heads[job.library, job.family] += 1
    turns: Counter[tuple[int, str, str]] = Counter()
    ordered = []
    for head, draw, job in sorted(rounds, key=lambda each: each[:2]):
        ordered.append((head, turns[head, job.library, job.kind], draw, job))
        turns[head, job.library, job.kind] += 1
    return tuple(job for *_, job in sorted(ordered, key=lambda each: each[:3]))


def ways(attempt: Attempt) -> Iterator[Prepared]:
    """Builder and dataset, for each way to make samples."""
    libraries = {"transformers": huggingface.ways, "diffusers": denoisers.ways, "provoked": provoked.ways}
    return libraries.get(attempt.job.library, pictures.ways)(attempt)


def chosen(jobs: tuple[Job, ...], *, part: str, names: list[str], first: int | None, breadth: bool) -> tuple[Job, ...]:
    """Some of the jobs, in their order."""
    found = [job for job in jobs if part in job.name and (not names or job.name in names)]
    if breadth:
        heads: dict[tuple[str, str], Job] = {}
        for job in found:
            heads.setdefault((job.library, job.family), job)
        found = list(heads.values())
    return tuple(found[:first])
