"""All jobs of all libraries, in one fixed order."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from tests.field import denoisers, huggingface, libraries, pictures, provoked
from tests.field.jobs import Attempt, Job, Prepared

FEW = (
    Job("transformers", "mixtral", "MixtralForCausalLM", "tokens"),
    Job("timm", "deit", "deit_tiny_patch16_224", "class"),
    Job("diffusers", "PixArtTransformer2DModel", "PixArtTransformer2DModel", "noise"),
    Job("transformers", "distilbert", "DistilBertForMaskedLM", "tokens"),
    Job("transformers", "vit_msn", "ViTMSNForImageClassification", "image"),
    Job("torchvision", "alexnet", "alexnet", "class"),
)
"""One of each library and of each kind of model: decoder, experts, encoder, attention on pictures, convolutions,
diffusion. Each of them trains right, in seconds."""


def all_jobs() -> Iterator[Job]:
    """``FEW``, then one of every family, then a second of every family that has one; kinds of targets take turns.

    Among equals the order is drawn once and for all, so wherever a sweep is cut, what is done is a sample of the whole.
    """
    few = [job for job in FEW if libraries.has_all() or job.library == "transformers"]
    yield from few
    yield from (job for job in _in_order() if job not in few)


def _in_order() -> tuple[Job, ...]:
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


def chosen(jobs: Iterable[Job], *, part: str, names: list[str], first: int | None, breadth: bool) -> tuple[Job, ...]:
    """Return some of the jobs, in their order, and look no further than the last of them."""
    found: Iterable[Job] = (job for job in jobs if part in job.name and (not names or job.name in names))
    if breadth:
        heads: dict[tuple[str, str], Job] = {}
        for job in found:
            heads.setdefault((job.library, job.family), job)
        found = heads.values()
    return tuple(islice(found, first))
