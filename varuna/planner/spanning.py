"""Pipelines whose stages run on devices of several classes: a class that holds no pipeline alone works in all.

Each pipeline has as many stages of each class as there are devices for; those of one class are neighbours. Sections go
to stages by what they take there, so that all stages are about as fast, and by the memory of each stage's device.
"""

from collections.abc import Iterator, Sequence
from operator import attrgetter

from varuna.planner.asking.request import PlanRequest
from varuna.planner.build import Builder, BuiltPlan
from varuna.planner.estimate import Shape
from varuna.planner.micro_batch import candidate_sizes
from varuna.planner.order import with_best_order
from varuna.planner.pricing.predict import SHORTEST_S, Simulated, simulated

_MOST_TRIED = 6
"""Plans that are simulated, those with the least bounds first."""
_MOST_SIZES = 2
"""Values of m that are tried at once: the best of those that were measured."""
_MOST_NUMBERS = 8
"""Numbers of pipelines that are looked at."""


def spanning(request: PlanRequest, micro_batches: Sequence[int]) -> list[Simulated]:
    """The best such plans by depth, the fastest first; none if no such pipeline fits.

    Args:
        request: with several classes.
        micro_batches: values of m to try; none: those of the slowest class, and smaller ones until something fits.
    """
    if micro_batches:
        return _with_sizes(request, list(dict.fromkeys(micro_batches)))
    tries = (_with_sizes(request, sizes[-_MOST_SIZES:]) for sizes in candidate_sizes(request.as_slowest()))
    return next(filter(None, tries), [])


def _with_sizes(request: PlanRequest, micro_batches: Sequence[int]) -> list[Simulated]:
    """Over all classes; if none fits, over all but one of three or more, which may hold no section."""
    builders = {size: Builder(request, size) for size in micro_batches}
    several = request.classes
    found = list(_built(builders, several))
    if not found and len(several) > 2:
        less = [tuple(each for each in several if each is not one) for one in several]
        found = [built for classes in less for built in _built(builders, classes)]
    found.sort(key=attrgetter("bound_s"))
    best: dict[int, Simulated] = {}
    for built in found[:_MOST_TRIED]:
        if best and built.bound_s >= min(each.step_s for each in best.values()):
            break
        tried = with_best_order(simulated(built.costs, builders[built.shape.micro_batch].plan(built)))
        known = best.get(tried.plan.stages)
        if known is None or tried.step_s < known.step_s:
            best[tried.plan.stages] = tried
    return sorted(best.values(), key=attrgetter("step_s"))


def _built(builders: dict[int, Builder], classes: Sequence[str]) -> Iterator[BuiltPlan]:
    """Yield all that fit, with the numbers of pipelines that look best.

    The class with the most memory comes first in a pipeline, as early stages keep most, or last.
    """
    for micro_batch, builder in builders.items():
        by_memory = sorted(classes, key=lambda name: -(builder.request.of_class(name).limit_bytes or 0))
        for order in (by_memory, by_memory[::-1]):
            parts = [builder.request.of_class(name) for name in order]
            for replicas, counts in _numbers(parts, micro_batch):
                shape = Shape(sum(counts), replicas, micro_batch)
                by_stage = tuple(name for name, count in zip(order, counts, strict=True) for _ in range(count))
                tried = (builder.build(shape, factor, classes=by_stage) for factor in builder.factors(order[0]))
                yield from (built for built in tried if built is not None)


def _numbers(parts: Sequence[PlanRequest], micro_batch: int) -> list[tuple[int, tuple[int, ...]]]:
    """Numbers of pipelines that look best, and the stages of each class that one of them has."""
    micro_batches = -(-parts[0].global_batch // micro_batch)
    works_s = [max(part.calibration.compute_s(micro_batch), SHORTEST_S) for part in parts]
    found: dict[tuple[int, ...], int] = {}
    for replicas in range(min(micro_batches, *(part.count for part in parts)), 0, -1):
        counts = tuple(part.count // replicas for part in parts)
        whole_vms = all(count % part.vm_size == 0 for count, part in zip(counts, parts, strict=True))
        if whole_vms and sum(counts) <= parts[0].calibration.section_count:
            found.setdefault(counts, replicas)

    def guess_s(counts: tuple[int, ...]) -> float:
        """Seconds of a step, if sections could be divided and messages took no time."""
        stage_s = 1 / sum(count / work_s for count, work_s in zip(counts, works_s, strict=True))
        return (-(-micro_batches // found[counts]) + sum(counts) - 1) * stage_s

    return [(found[counts], counts) for counts in sorted(found, key=guess_s)[:_MOST_NUMBERS]]
