"""Pipelines whose stages run on devices of several classes: a class that holds no pipeline alone works in all.

Each pipeline has as many stages of each class as there are devices for; those of one class are neighbours. Sections go
to stages by what they take there, so that all stages are about as fast, and by the memory of each stage's device.
"""

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

from varuna.core.plan import Plan
from varuna.planner.asking.request import PlanRequest
from varuna.planner.balance import balance_stages
from varuna.planner.build import Builder, made_plan, sizes_of
from varuna.planner.estimate import Shape, longest_run
from varuna.planner.micro_batch import candidate_sizes
from varuna.planner.order import with_best_order
from varuna.planner.pricing.predict import SHORTEST_S, Simulated, simulated
from varuna.planner.pricing.profile import profile
from varuna.planner.pricing.spanning import joined, stages_of
from varuna.planner.pricing.stage_size import Size, Sizer
from varuna.simulator.bounds import lower_bounds_s
from varuna.simulator.costs import PipelineCosts

_MOST_TRIED = 6
"""Plans that are simulated, those with the least bounds first."""
_MOST_SIZES = 2
"""Values of m that are tried at once: the best of those that were measured."""
_MOST_NUMBERS = 8
"""Numbers of pipelines that are looked at."""
_PRECISION = 1e-3  # of balancing
_NEAR = 1.05
"""A guess at the slowest stage's time, over what it would be if sections could be divided."""


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
    several = request.classes
    found = _built(request, several, micro_batches)
    if not found and len(several) > 2:
        less = [tuple(each for each in several if each is not one) for one in several]
        found = [built for classes in less for built in _built(request, classes, micro_batches)]
    found.sort(key=attrgetter("bound_s"))
    best: dict[int, Simulated] = {}
    for built in found[:_MOST_TRIED]:
        if best and built.bound_s >= min(each.step_s for each in best.values()):
            break
        tried = with_best_order(simulated(built.costs, built.plan(request)))
        known = best.get(tried.plan.stages)
        if known is None or tried.step_s < known.step_s:
            best[tried.plan.stages] = tried
    return sorted(best.values(), key=attrgetter("step_s"))


def _built(request: PlanRequest, classes: Sequence[str], micro_batches: Sequence[int]) -> "list[_Built]":
    """All that fit.

    The class with the most memory comes first in a pipeline, as early stages keep most, or last.
    """
    by_memory = sorted(classes, key=lambda name: -(request.of_class(name).limit_bytes or 0))
    return [
        built
        for micro_batch in micro_batches
        for order in (by_memory, by_memory[::-1])
        for built in _Spanning(request, order, micro_batch).built()
    ]


class _Built(NamedTuple):
    """A plan before it is simulated."""

    shape: Shape
    classes: tuple[str, ...]
    """by stage"""
    starts: tuple[int, ...]
    sizes: tuple[Size, ...]
    sizers: tuple[Sizer, ...]
    costs: PipelineCosts
    split_last: int
    bound_s: float

    def plan(self, request: PlanRequest) -> Plan:
        """It, with the bound as its time."""
        made = made_plan(request, self.shape, self.starts, self.sizes, self.sizers)
        named = made.each(split_last=self.split_last, stage_classes=self.classes)
        return named.model_copy(update={"step_s": self.bound_s})


class _Spanning:
    """Plans with this m, whose classes follow each other in this order."""

    def __init__(self, request: PlanRequest, classes: Sequence[str], micro_batch: int) -> None:
        self._classes, self._micro_batch = classes, micro_batch
        self._micro_batches = -(-request.global_batch // micro_batch)
        parts = [request.of_class(name) for name in classes]
        self._there = [part.count for part in parts]
        self._builders = {
            name: Builder(part, profile(part.calibration, micro_batch, streams_frozen=part.streams_frozen))
            for name, part in zip(classes, parts, strict=True)
        }
        self._vm_sizes = [part.vm_size for part in parts]
        self._any = self._builders[classes[0]]  # for what is the same in all
        self._sections = request.calibration.section_count
        self._works_s = {
            name: max(builder.profile.work_s.before[-1], SHORTEST_S) for name, builder in self._builders.items()
        }
        self._cuts_s = [max(each) for each in zip(*(one.cuts_s for one in self._builders.values()), strict=True)]

    def built(self) -> Iterator[_Built]:
        """Those that fit, with the numbers of pipelines that look best."""
        counts = self._counts()
        for replicas in sorted(counts, key=lambda replicas: self._guess_s(replicas, counts[replicas]))[:_MOST_NUMBERS]:
            each = counts[replicas]
            yield from self._with(Shape(sum(each), replicas, self._micro_batch), each)

    def _guess_s(self, replicas: int, counts: tuple[int, ...]) -> float:
        """Seconds of a step, if sections could be divided and messages took no time."""
        stage_s = 1 / sum(count / work_s for count, work_s in zip(counts, self._works_s.values(), strict=True))
        return (-(-self._micro_batches // replicas) + sum(counts) - 1) * stage_s

    def _counts(self) -> dict[int, tuple[int, ...]]:
        """By number of pipelines: stages of each class that one of them has."""
        most = min(self._micro_batches, *self._there)
        found: dict[tuple[int, ...], int] = {}
        for replicas in range(most, 0, -1):
            counts = tuple(there // replicas for there in self._there)
            whole_vms = all(count % vm == 0 for count, vm in zip(counts, self._vm_sizes, strict=True))
            if whole_vms and sum(counts) <= self._sections:
                found.setdefault(counts, replicas)
        return {replicas: counts for counts, replicas in found.items()}

    def _with(self, shape: Shape, counts: tuple[int, ...]) -> Iterator[_Built]:
        classes = tuple(name for name, count in zip(self._classes, counts, strict=True) for _ in range(count))
        for factor in self._any.factors:
            built = self._one(shape, classes, factor)
            if built is not None:
                yield built

    def _one(self, shape: Shape, classes: tuple[str, ...], factor: int) -> _Built | None:
        """With in-flight depths by this factor; None if the stages do not fit."""
        by_class = {
            name: builder.sizer(builder.wanted_depths(shape, factor), False, builder.replication(shape))
            for name, builder in self._builders.items()
        }
        sizers = tuple(by_class[name] for name in classes)
        least_s = 1 / sum(1 / self._works_s[name] for name in classes)
        starts = balance_stages(
            lambda stage, start, stop: sizers[stage].seconds(stage, start, stop),
            sections=self._sections,
            stages=shape.stages,
            cuts_s=self._cuts_s,
            hint_s=least_s * _NEAR,
            least_s=least_s,
            precision=_PRECISION,
        )
        if not starts:
            return None
        sizes, split_last = sizes_of(sizers, starts, self._sections), self._any.split_last_of(shape)
        costs = joined(
            {
                name: self._builders[name].pricer.costs(
                    starts,
                    sizes,
                    replicas=shape.replicas,
                    micro_batches=self._micro_batches,
                    splits=split_last > 0,
                    own=own,
                )
                for name, own in stages_of(classes).items()
            },
            classes,
        )
        [bound_s] = lower_bounds_s(
            costs,
            micro_batches=longest_run(shape, self._any.request.global_batch),
            stash_limits=[[size.depth for size in sizes]],
            policy=self._any.request.policy,
            split_last=split_last,
        )
        return _Built(shape, classes, starts, sizes, sizers, costs, split_last, bound_s)
