"""From a shape to a plan: balanced sections, in-flight depths, kept sections, and every stage's bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from varuna.core.plan import Pipeline, Plan
from varuna.core.units import format_bytes
from varuna.planner.asking.request import PlanRequest
from varuna.planner.balance import Weigh, balance_stages
from varuna.planner.estimate import Guess, Guesser, Shape, is_short, longest_run
from varuna.planner.pricing.costs import Pricer
from varuna.planner.pricing.predict import SHORTEST_S
from varuna.planner.pricing.profile import profile
from varuna.planner.pricing.spanning import join_classes, stages_of
from varuna.planner.pricing.spans import Replication, Spans
from varuna.planner.pricing.stage_size import Size, Sizer, entry_bytes
from varuna.schedule.policy import stash_limit
from varuna.simulator.bounds import lower_bounds_s
from varuna.simulator.costs import PipelineCosts

_FLEXIBLE = ("varuna", "adaptive")  # policies that keep any in-flight limit
# n_k = factor x (P - k) + 2. Steps of deep pipelines exceed their bound by about a share, and one more per N / P.
_EXCESS = {2: (0.02, 0.1), 3: (0.005, 0.05), 1: (0.03, 0.3)}  # the likely best first
_PRECISION = 1e-3  # of balancing
_NEAR = 1.05  # a guess at the slowest stage's time, over what it would be if sections could be divided
_DEEP = 16  # stages
_MUCH = 0.1  # of a worker's memory: a smaller stash is not worth a look at plans that move it away


_Way = tuple[tuple[str, ...], tuple[int, ...], bool, tuple[Replication, ...], int]
"""Classes by stage, wanted depths, whether the stash may move, what D changes, and N if early stages get more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltPlan:
    """Stages that fit, their costs, and their bound; ``Builder.plan`` makes a plan of it."""

    shape: Shape
    classes: tuple[str, ...]
    """of the devices, by stage"""
    starts: tuple[int, ...]
    sizes: tuple[Size, ...]
    split_last: int
    costs: PipelineCosts
    factor: int
    """Factor of its wanted in-flight depths."""
    stash_moves: bool
    """Whether its stash was allowed to wait in host memory."""
    front_loaded: bool
    """Whether early stages got more work, as the way to them and back is shorter."""
    bound_s: float
    promise_s: float
    """Seconds that it will probably take at least: small in-flight depths never reach the bound in short steps."""
    is_short: bool
    """Whether the step is short, so that its promise is the bound itself: pruning by less could pick a worse plan."""
    unlimited_s: float
    """The bound without in-flight limits: what greater depths could bring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """A shape that does not fit."""

    shape: Shape
    reason: str
    missing_bytes: int


class _Part:
    """Workers of one class: what their stages take and need."""

    def __init__(self, request: PlanRequest, micro_batch: int) -> None:
        self.request = request
        self.profile = profile(request.calibration, micro_batch, streams_frozen=request.streams_frozen)
        self.pricer = Pricer(self.profile, gpus_per_vm=request.vm_size)
        self.work_s = max(self.profile.work_s.before[-1], SHORTEST_S)
        self._spans: dict[Replication, Spans] = {}

    def cuts_s(self) -> list[float]:
        """Serialisation over the cut before each section, in the dearer direction, between VMs."""
        rate = self.profile.calibration.across_vms.link.bytes_per_s
        there, back = self.profile.boundary_bytes[:-1], self.profile.gradient_boundary_bytes[:-1]
        return [0.0, *(max(pair) / rate for pair in zip(there, back, strict=True))]

    def replication(self, shape: Shape) -> Replication:
        """Return what the number of replicas D changes about a stage's memory."""
        sharing = shape.replicas if self.profile.calibration.optimizer.sharded else 1
        adds_copies = shape.replicas > 1 and not self.request.memory_apart
        saving = shape.replicas if self.request.memory_apart else 0
        if not self.profile.statistics_bytes.before[-1]:
            return Replication(sharing, adds_copies, saving=saving)
        every = longest_run(Shape(shape.stages, 1, shape.micro_batch), self.request.global_batch)
        most = every if self.request.are_unequal else longest_run(shape, self.request.global_batch)  # unlike shares
        return Replication(sharing, adds_copies, noting=most, all_noting=every, saving=saving)

    def spans(self, replication: Replication) -> Spans:
        """Spans within the memory of a worker."""
        if replication not in self._spans:
            limits = {"limit_bytes": self.request.limit_bytes, "host_limit_bytes": self.request.host_limit_bytes}
            self._spans[replication] = self.spans_within(replication, **limits)
        return self._spans[replication]

    def spans_within(self, replication: Replication, **limits: int | None) -> Spans:
        """Spans within other limits."""
        splits, one_memory = self.request.policy == "adaptive", not self.request.memory_apart
        return Spans(self.profile, **limits, replication=replication, splits=splits, one_memory=one_memory)


class Builder:
    """Builds the plans of one micro-batch size, whose pipelines run on one class of devices or on several."""

    def __init__(self, request: PlanRequest, micro_batch: int) -> None:
        self.request = request
        self._parts = {name: _Part(request.for_class(name), micro_batch) for name in request.classes or ("",)}
        self._first = next(iter(self._parts.values()))  # for what is the same for all
        self.profile = self._first.profile
        self._cuts_s = [max(cuts) for cuts in zip(*(part.cuts_s() for part in self._parts.values()), strict=True)]
        self._balanced: dict[_Way, tuple[tuple[int, ...], tuple[Size, ...]] | None] = {}

    @property
    def may_keep(self) -> bool:
        """Whether the policy runs stages that keep some sections and recompute others."""
        return self.request.policy == "adaptive"

    @cached_property
    def guesser(self) -> Guesser:
        """Guesses at shapes on one class."""
        return Guesser(self.request, self.profile, may_keep=self.may_keep)

    def factors(self, name: str = "") -> tuple[int, ...]:
        """Of wanted in-flight depths, the likely best first, if early stages, which hold most, are on this class."""
        is_limited = self._parts.get(name, self._first).request.limit_bytes is not None
        return tuple(_EXCESS) if self.may_keep and is_limited else (3,)

    def first(self, guess: Guess) -> BuiltPlan | OutOfMemory:
        """The plan of a shape with the in-flight depths that are most often best; shallower ones if it does not fit."""
        likely, shallowest = self.factors()[0], min(self.factors())
        for moves in (False, True)[: 1 + self.request.memory_apart]:
            for factor in dict.fromkeys((likely, shallowest)):
                built = self.build(guess.shape, factor, guess.bottleneck_s * 1.05, stash_moves=moves)
                if built is not None:
                    return built
        return self.misfit(guess.shape)

    def others(self, built: BuiltPlan) -> Iterator[BuiltPlan]:
        """Plans of this shape with other depths, a stash in host memory, or more work in early stages, if different."""
        pace_s = max(stage.forward_s + stage.recompute_s + stage.backward_s for stage in built.costs.stages)
        seen = {(built.starts, built.sizes)}
        ways = [(factor, built.stash_moves, False) for factor in self.factors() if factor != built.factor]
        if self.request.memory_apart and not built.stash_moves and self._has_large_stash(built):
            ways += [(factor, True, False) for factor in self.factors()]
        if built.is_short and built.shape.stages > 1:
            ways += [(factor, moves, True) for factor, moves, _ in ((built.factor, built.stash_moves, False), *ways)]
        for factor, moves, front_loaded in ways:
            other = self.build(built.shape, factor, pace_s, stash_moves=moves, front_loaded=front_loaded)
            if other is not None and (other.starts, other.sizes) not in seen:
                seen.add((other.starts, other.sizes))
                yield other

    def _has_large_stash(self, built: BuiltPlan) -> bool:
        limit_bytes = self.request.limit_bytes
        ends = (*built.starts[1:], self.profile.sections)
        return limit_bytes is not None and any(
            size.depth * entry_bytes(self.profile, range(start, stop)) > _MUCH * limit_bytes
            for start, stop, size in zip(built.starts, ends, built.sizes, strict=True)
        )

    def build(
        self,
        shape: Shape,
        factor: int,
        hint_s: float | None = None,
        *,
        classes: tuple[str, ...] = (),
        stash_moves: bool = False,
        front_loaded: bool = False,
    ) -> BuiltPlan | None:
        """The plan of a shape, balanced; None if it does not fit.

        Args:
            shape: P x D.
            factor: of in-flight depths.
            hint_s: a guess at the slowest stage's time.
            classes: of devices by stage, where they are several.
            stash_moves: what waits for R may wait in host memory.
            front_loaded: early stages get more.
        """
        classes = classes or (next(iter(self._parts)),) * shape.stages
        longest = longest_run(shape, self.request.global_batch) if front_loaded else 0
        wanted = self._wanted_depths(shape, factor)
        way = (classes, wanted, stash_moves, self._replications(shape), longest)
        if way not in self._balanced:  # with another D it is mostly the same
            sizer = self._sizer(*way[:4])
            least_s = 1 / sum(1 / self._parts[name].work_s for name in classes)
            starts = balance_stages(
                _front_loading(sizer, least_s / longest) if front_loaded else sizer.seconds,
                sections=self.profile.sections,
                stages=shape.stages,
                cuts_s=self._cuts_s,
                hint_s=least_s * _NEAR if hint_s is None else hint_s,
                least_s=least_s,
                precision=_PRECISION,
            )
            self._balanced[way] = (starts, sizer.sizes(starts)) if starts else None
        balanced = self._balanced[way]
        return None if balanced is None else self._bounded(shape, classes, *balanced, factor, stash_moves, front_loaded)

    def moved(self, built: BuiltPlan, starts: tuple[int, ...], factor: int) -> BuiltPlan | None:
        """The same shape with other boundaries or in-flight depths; None if it does not fit."""
        sizer = self._sizer_of(built, factor)
        ends = (*starts[1:], self.profile.sections)
        if any(sizer.size(k, starts[k], ends[k]) is None for k in range(built.shape.stages)):
            return None
        sizes = sizer.sizes(starts)
        return self._bounded(built.shape, built.classes, starts, sizes, factor, built.stash_moves, built.front_loaded)

    def misfit(self, shape: Shape) -> OutOfMemory:
        """Say why a shape does not fit, and how many bytes it lacks, balanced as if there were enough memory."""
        spans = [self._first.spans_within(self._first.replication(shape))] * shape.stages
        sizer = self._sizer_within(spans, self._wanted_depths(shape, 1), self.request.memory_apart)
        mean_s = (self.profile.work_s.before[-1] + self.profile.recompute_s.before[-1]) / shape.stages
        starts = balance_stages(sizer.seconds, sections=self.profile.sections, stages=shape.stages, hint_s=mean_s)
        stages = list(pairwise((*starts, self.profile.sections)))
        needs = [sizer.least_bytes(k, start, stop) for k, (start, stop) in enumerate(stages)]
        found, where = self.request.limit_bytes or 0, ""
        host_needs = [sizer.host_bytes(k, start, stop) for k, (start, stop) in enumerate(stages)]
        host_found = self.request.host_limit_bytes
        if host_found is not None and max(host_needs) > host_found and (not found or max(needs) <= found):
            needs, found, where = host_needs, host_found, " of host memory"
        worst = max(needs)
        return OutOfMemory(
            shape=shape,
            reason=f"stage {needs.index(worst)} of P={shape.stages} needs {format_bytes(worst)}{where} but each worker "
            f"has {format_bytes(found)}: {format_bytes(worst - found)} too little",
            missing_bytes=worst - found,
        )

    def plan(self, built: BuiltPlan) -> Plan:
        """Return the plan of ``built``, with its lower bound as ``step_s``."""
        sizer, sizes, sections = self._sizer_of(built, built.factor), built.sizes, self.profile.sections
        ends = (*built.starts[1:], sections)
        details = [sizer.detail(k, built.starts[k], ends[k], size) for k, size in enumerate(sizes)]
        return Plan(
            micro_batch=built.shape.micro_batch,
            global_batch=self.request.global_batch,
            pipelines=(
                Pipeline(
                    replicas=built.shape.replicas,
                    bounds=(*built.starts, sections),
                    stash_limits=tuple(size.depth for size in sizes),
                    kept=tuple(size.kept for size in sizes) if any(size.kept for size in sizes) else (),
                    stash_on_device=tuple(size.depth - size.moved for size in sizes)
                    if any(size.moved for size in sizes)
                    else (),
                    split_last=built.split_last,
                    memory_bytes=tuple(detail.total for detail in details),
                    host_bytes=tuple(each.host for each in details) if any(each.host for each in details) else (),
                    stage_classes=built.classes if len(self._parts) > 1 else (),
                ),
            ),
            policy=self.request.policy,
            streams_frozen=self.request.streams_frozen,
            step_s=built.bound_s,
        )

    def promised(self, plan: Plan) -> Plan:
        """The plan with the memory that it needs: of its own depths, and with as many W's as it lets wait."""
        pipeline = plan.first
        shape = Shape(plan.stages, plan.replicas, plan.micro_batch)
        spans = [self._first.spans(self._first.replication(shape))] * shape.stages
        sizer = self._sizer_within(spans, pipeline.stash_limits, bool(pipeline.stash_on_device))
        stay = pipeline.stash_on_device or pipeline.stash_limits
        memory_bytes = []
        for stage, depth in enumerate(pipeline.stash_limits):
            span = pipeline.sections_of(stage)
            size = Size(depth, len(pipeline.kept_sections_of(stage)), depth - stay[stage])
            detail = sizer.detail(stage, span.start, span.stop, size, split_last=pipeline.split_last)
            memory_bytes.append(detail.total)
        return plan.with_each_pipeline(memory_bytes=tuple(memory_bytes))

    def _bounded(
        self,
        shape: Shape,
        classes: tuple[str, ...],
        starts: tuple[int, ...],
        sizes: tuple[Size, ...],
        factor: int,
        stash_moves: bool,
        front_loaded: bool,
    ) -> BuiltPlan:
        split_last, longest = self._split_last(shape), longest_run(shape, self.request.global_batch)
        costs = self._costs(shape, classes, starts, sizes, splits=split_last > 0)
        bound_s, unlimited_s = lower_bounds_s(
            costs,
            micro_batches=longest,
            stash_limits=[[size.depth for size in sizes], [longest] * shape.stages],
            policy=self.request.policy,
            split_last=split_last,
        )
        share, short_share = _EXCESS.get(factor, (0.0, 0.0))
        excess = share + short_share * shape.stages / longest
        excess *= min(1.0, (shape.stages - 1) / _DEEP)
        short = is_short(shape, self.request.global_batch)
        return BuiltPlan(
            shape=shape,
            classes=classes,
            starts=starts,
            sizes=sizes,
            split_last=split_last,
            costs=costs,
            factor=factor,
            stash_moves=stash_moves,
            front_loaded=front_loaded,
            bound_s=bound_s,
            promise_s=bound_s if short else bound_s * (1 + excess),
            is_short=short,
            unlimited_s=unlimited_s,
        )

    def _costs(
        self, shape: Shape, classes: tuple[str, ...], starts: tuple[int, ...], sizes: tuple[Size, ...], *, splits: bool
    ) -> PipelineCosts:
        micro_batches = -(-self.request.global_batch // shape.micro_batch)

        def priced(name: str, own: Sequence[int] | None = None) -> PipelineCosts:
            return self._parts[name].pricer.costs(
                starts, sizes, replicas=shape.replicas, micro_batches=micro_batches, splits=splits, own=own
            )

        if len(self._parts) == 1:
            return priced(classes[0])
        return join_classes({name: priced(name, own) for name, own in stages_of(classes).items()}, classes)

    def _split_last(self, shape: Shape) -> int:
        """Backwards to split when plans are compared: P where sections can be split, else 0."""
        splits = any(kind.splits for kind in self.profile.calibration.kinds.values())
        return (
            min(shape.stages, longest_run(shape, self.request.global_batch))
            if self.may_keep and splits and shape.stages > 1
            else 0
        )

    def _wanted_depths(self, shape: Shape, factor: int) -> tuple[int, ...]:
        """Wanted in-flight depths: the policy's own, or shallower ones that leave memory for keeping."""
        stages = shape.stages
        longest = longest_run(shape, self.request.global_batch)
        if self.request.policy not in _FLEXIBLE:
            return tuple(stash_limit(stages, k, longest, self.request.policy) for k in range(stages))
        depths = [min(longest, factor * (stages - k) + 2) for k in range(stages)]
        depths[-1] = 1  # its gradients are always there: a second micro-batch in flight would never be used
        return tuple(depths)

    def _replications(self, shape: Shape) -> tuple[Replication, ...]:
        return tuple(part.replication(shape) for part in self._parts.values())

    def _sizer_of(self, built: BuiltPlan, factor: int) -> Sizer:
        wanted = self._wanted_depths(built.shape, factor)
        return self._sizer(built.classes, wanted, built.stash_moves, self._replications(built.shape))

    def _sizer(
        self, classes: tuple[str, ...], wanted: tuple[int, ...], stash_moves: bool, each: tuple[Replication, ...]
    ) -> Sizer:
        spans = {name: part.spans(own) for (name, part), own in zip(self._parts.items(), each, strict=True)}
        return self._sizer_within([spans[name] for name in classes], wanted, stash_moves)

    def _sizer_within(self, spans: list[Spans], wanted: tuple[int, ...], stash_moves: bool) -> Sizer:
        """Make the sizer of stages with these spans and in-flight depths; their stash may wait in host memory."""
        flexible = self.request.policy in _FLEXIBLE
        least = tuple(min(depth, len(wanted) - k) for k, depth in enumerate(wanted)) if flexible else wanted
        return Sizer(
            spans,
            wanted=wanted,
            least=least,
            may_keep=self.may_keep,
            stash_moves=stash_moves,
            tentative=self.request.tentative,
        )


def _front_loading(sizer: Sizer, way_s: float) -> Weigh:
    """Seconds of a stage, and its share in the way of the first micro-batch to it and of the last one from it.

    A stage that is busy all the time still begins late and is not the last to end: of few micro-batches, early
    stages may take longer for each, and may need to, since they keep least.
    """

    def weigh(stage: int, start: int, stop: int) -> float:
        return sizer.seconds(stage, start, stop) + stage * way_s

    return weigh
