"""From a shape to a plan: balanced sections, in-flight depths, kept sections, and every stage's bytes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from varuna.core.plan import Pipeline, Plan
from varuna.core.units import format_bytes
from varuna.planner.asking.request import PlanRequest
from varuna.planner.balance import Weigh, balance_stages
from varuna.planner.estimate import Guess, Shape, is_short, longest_run
from varuna.planner.pricing.costs import Pricer
from varuna.planner.pricing.profile import Profile
from varuna.planner.pricing.spans import Replication, Spans
from varuna.planner.pricing.stage_size import Size, Sizer, entry_bytes
from varuna.schedule.policy import stash_limit
from varuna.simulator.bounds import lower_bounds_s
from varuna.simulator.costs import PipelineCosts

_FLEXIBLE = ("varuna", "adaptive")  # policies that keep any in-flight limit
# n_k = factor x (P - k) + 2. Steps of deep pipelines exceed their bound by about a share, and one more per N / P.
_EXCESS = {2: (0.02, 0.1), 3: (0.005, 0.05), 1: (0.03, 0.3)}  # the likely best first
_PRECISION = 1e-3  # of balancing
_DEEP = 16  # stages
_MUCH = 0.1  # of a worker's memory: a smaller stash is not worth a look at plans that move it away


_Way = tuple[tuple[int, ...], bool, Replication, int]
"""Wanted depths, whether the stash may move, what D changes, and N if early stages get more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltPlan:
    """Stages that fit, their costs, and their bound; ``Builder.plan`` makes a plan of it."""

    shape: Shape
    starts: tuple[int, ...]
    sizes: tuple[Size, ...]
    split_last: int
    costs: PipelineCosts
    factor: int
    """Factor of its wanted in-flight depths."""
    stash_moves: bool
    """Whether its stash was allowed to wait in host memory."""
    leans: bool
    """Whether early stages got more work, as the way to them and back is shorter."""
    bound_s: float
    promise_s: float
    """Seconds that it will probably take at least: small in-flight depths never reach the bound in short steps."""
    is_short: bool
    """Whether the step is short, so that its promise is the bound itself: pruning by less could pick a worse plan."""
    unlimited_s: float
    """The bound without in-flight limits: what greater depths could bring."""


def sizes_of(sizers: Sequence[Sizer], starts: tuple[int, ...], sections: int) -> tuple[Size, ...]:
    """The sizes of stages that fit, none deeper than the next stage allows.

    Args:
        sizers: by stage.
        starts: first section of each.
        sections: of the model.
    """
    ends = (*starts[1:], sections)
    sizes: list[Size] = []
    most = None
    for k in reversed(range(len(starts))):
        size = sizers[k].size(k, starts[k], ends[k], most=most)
        assert size is not None, "the balance fits"
        sizes.append(size)
        most = size.depth + sizers[k].waiting[k]  # more than that would pile up here
    return tuple(reversed(sizes))


def made_plan(
    request: PlanRequest,
    shape: Shape,
    starts: tuple[int, ...],
    sizes: Sequence[Size],
    sizers: Sequence[Sizer],
) -> Plan:
    """A plan of these stages; ``sizers`` are by stage."""
    sections = request.calibration.section_count
    ends = (*starts[1:], sections)
    details = [sizers[k].detail(k, starts[k], ends[k], size) for k, size in enumerate(sizes)]
    return Plan(
        micro_batch=shape.micro_batch,
        global_batch=request.global_batch,
        pipelines=(
            Pipeline(
                replicas=shape.replicas,
                bounds=(*starts, sections),
                stash_limits=tuple(size.depth for size in sizes),
                kept=tuple(size.kept for size in sizes) if any(size.kept for size in sizes) else (),
                stash_on_device=tuple(size.depth - size.moved for size in sizes)
                if any(size.moved for size in sizes)
                else (),
                memory_bytes=tuple(detail.total for detail in details),
                host_bytes=tuple(detail.host for detail in details) if any(detail.host for detail in details) else (),
            ),
        ),
        policy=request.policy,
        streams_frozen=request.streams_frozen,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """A shape that does not fit."""

    shape: Shape
    reason: str
    missing_bytes: int


class Builder:
    """Builds the plans of one micro-batch size."""

    def __init__(self, request: PlanRequest, profile: Profile) -> None:
        self.request, self.profile = request, profile
        self._spans: dict[Replication, Spans] = {}
        self.pricer = Pricer(profile, gpus_per_vm=request.vm_size)
        self._balanced: dict[_Way, tuple[tuple[int, ...], tuple[Size, ...]] | None] = {}

    @property
    def may_keep(self) -> bool:
        """Whether the policy runs stages that keep some sections and recompute others."""
        return self.request.policy == "adaptive"

    def first(self, guess: Guess) -> BuiltPlan | OutOfMemory:
        """The plan of a shape with the in-flight depths that are most often best; shallower ones if it does not fit."""
        likely, shallowest = self.factors[0], min(self.factors)
        for moves in (False, True)[: 1 + self.request.memory_apart]:
            for factor in dict.fromkeys((likely, shallowest)):
                built = self._build(guess.shape, factor, guess.bottleneck_s * 1.05, stash_moves=moves, leans=False)
                if built is not None:
                    return built
        return self.misfit(guess.shape)

    def others(self, built: BuiltPlan) -> Iterator[BuiltPlan]:
        """Plans of this shape with other depths, a stash in host memory, or more work in early stages, if different."""
        pace_s = max(stage.forward_s + stage.recompute_s + stage.backward_s for stage in built.costs.stages)
        seen = {(built.starts, built.sizes)}
        ways = [(factor, built.stash_moves, False) for factor in self.factors if factor != built.factor]
        if self.request.memory_apart and not built.stash_moves and self._has_large_stash(built):
            ways += [(factor, True, False) for factor in self.factors]
        if built.is_short and built.shape.stages > 1:
            ways += [(factor, moves, True) for factor, moves, _ in ((built.factor, built.stash_moves, False), *ways)]
        for factor, moves, leans in ways:
            other = self._build(built.shape, factor, pace_s, stash_moves=moves, leans=leans)
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

    @cached_property
    def cuts_s(self) -> tuple[float, ...]:
        """Serialisation over the cut before each section, in the dearer direction, between VMs."""
        profile = self.profile
        rate = profile.calibration.across_vms.link.bytes_per_s
        there, back = profile.boundary_bytes[:-1], profile.gradient_boundary_bytes[:-1]
        return (0.0, *(max(pair) / rate for pair in zip(there, back, strict=True)))

    @property
    def factors(self) -> tuple[int, ...]:
        """Of wanted in-flight depths, the likely best first."""
        return tuple(_EXCESS) if self.may_keep and self.request.limit_bytes is not None else (3,)

    def _build(self, shape: Shape, factor: int, hint_s: float, *, stash_moves: bool, leans: bool) -> BuiltPlan | None:
        longest = longest_run(shape, self.request.global_batch) if leans else 0
        way = (self.wanted_depths(shape, factor), stash_moves, self.replication(shape), longest)
        if way not in self._balanced:  # with another D it is mostly the same
            sizer = self.sizer(*way[:3])
            starts = balance_stages(
                self._leaning(sizer, shape.stages, longest) if leans else sizer.seconds,
                sections=self.profile.sections,
                stages=shape.stages,
                cuts_s=self.cuts_s,
                hint_s=hint_s,
                least_s=self.profile.work_s.before[-1] / shape.stages,
                precision=_PRECISION,
            )
            self._balanced[way] = (starts, self._sizes(sizer, starts)) if starts else None
        balanced = self._balanced[way]
        return None if balanced is None else self._bounded(shape, *balanced, factor, stash_moves, leans)

    def _leaning(self, sizer: Sizer, stages: int, micro_batches: int) -> Weigh:
        """Seconds of a stage, and its share in the way of the first micro-batch to it and of the last one from it.

        A stage that is busy all the time still begins late and is not the last to end: of few micro-batches, early
        stages may take longer for each, and may need to, since they keep least.
        """
        way_s = self.profile.work_s.before[-1] / stages / micro_batches

        def weigh(stage: int, start: int, stop: int) -> float:
            return sizer.seconds(stage, start, stop) + stage * way_s

        return weigh

    def moved(self, built: BuiltPlan, starts: tuple[int, ...], factor: int) -> BuiltPlan | None:
        """The same shape with other boundaries or in-flight depths; None if it does not fit."""
        sizer = self.sizer(self.wanted_depths(built.shape, factor), built.stash_moves, self.replication(built.shape))
        ends = (*starts[1:], self.profile.sections)
        if any(sizer.size(k, starts[k], ends[k]) is None for k in range(built.shape.stages)):
            return None
        return self._bounded(built.shape, starts, self._sizes(sizer, starts), factor, built.stash_moves, built.leans)

    def misfit(self, shape: Shape) -> OutOfMemory:
        """Say why a shape does not fit, and how many bytes it lacks, balanced as if there were enough memory."""
        sizer = self.sizer(
            self.wanted_depths(shape, 1), self.request.memory_apart, self.replication(shape), unlimited=True
        )
        mean_s = (self.profile.work_s.before[-1] + self.profile.recompute_s.before[-1]) / shape.stages
        starts = balance_stages(sizer.seconds, sections=self.profile.sections, stages=shape.stages, hint_s=mean_s)
        spans = list(pairwise((*starts, self.profile.sections)))
        needs = [sizer.least_bytes(k, start, stop) for k, (start, stop) in enumerate(spans)]
        found, where = self.request.limit_bytes or 0, ""
        host_needs, host_found = [sizer.host_bytes(*span) for span in spans], self.request.host_limit_bytes
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
        shape = built.shape
        sizer = self.sizer(self.wanted_depths(shape, built.factor), built.stash_moves, self.replication(shape))
        made = made_plan(self.request, shape, built.starts, built.sizes, [sizer] * shape.stages)
        return made.with_each_pipeline(split_last=built.split_last).model_copy(update={"step_s": built.bound_s})

    def promised(self, plan: Plan) -> Plan:
        """The plan with the memory that it needs: of its own depths, and with as many W's as it lets wait."""
        pipeline = plan.first
        shape = Shape(plan.stages, plan.replicas, plan.micro_batch)
        sizer = self.sizer(plan.first.stash_limits, bool(plan.first.stash_on_device), self.replication(shape))
        stay = plan.first.stash_on_device or plan.first.stash_limits
        memory_bytes = []
        for stage, depth in enumerate(plan.first.stash_limits):
            span, size = (
                pipeline.sections_of(stage),
                Size(depth, len(pipeline.kept_sections_of(stage)), depth - stay[stage]),
            )
            detail = sizer.detail(stage, span.start, span.stop, size, split_last=plan.first.split_last)
            memory_bytes.append(detail.total)
        return plan.with_each_pipeline(memory_bytes=tuple(memory_bytes))

    def _sizes(self, sizer: Sizer, starts: tuple[int, ...]) -> tuple[Size, ...]:
        return sizes_of([sizer] * len(starts), starts, self.profile.sections)

    def _bounded(
        self,
        shape: Shape,
        starts: tuple[int, ...],
        sizes: tuple[Size, ...],
        factor: int,
        stash_moves: bool,
        leans: bool,
    ) -> BuiltPlan:
        split_last = self.split_last_of(shape)
        costs = self.pricer.costs(
            starts,
            sizes,
            replicas=shape.replicas,
            micro_batches=-(-self.request.global_batch // shape.micro_batch),
            splits=split_last > 0,
        )
        longest = longest_run(shape, self.request.global_batch)
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
            starts=starts,
            sizes=sizes,
            split_last=split_last,
            costs=costs,
            factor=factor,
            stash_moves=stash_moves,
            leans=leans,
            bound_s=bound_s,
            promise_s=bound_s if short else bound_s * (1 + excess),
            is_short=short,
            unlimited_s=unlimited_s,
        )

    def split_last_of(self, shape: Shape) -> int:
        """Backwards to split when plans are compared: P where sections can be split, else 0."""
        splits = any(kind.splits for kind in self.profile.calibration.kinds.values())
        return (
            min(shape.stages, longest_run(shape, self.request.global_batch))
            if self.may_keep and splits and shape.stages > 1
            else 0
        )

    def wanted_depths(self, shape: Shape, factor: int) -> tuple[int, ...]:
        """Wanted in-flight depths: the policy's own, or shallower ones that leave memory for keeping."""
        stages = shape.stages
        longest = longest_run(shape, self.request.global_batch)
        if self.request.policy not in _FLEXIBLE:
            return tuple(stash_limit(stages, k, longest, self.request.policy) for k in range(stages))
        depths = [min(longest, factor * (stages - k) + 2) for k in range(stages)]
        depths[-1] = 1  # its gradients are always there: a second micro-batch in flight would never be used
        return tuple(depths)

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

    def _limited(self, replication: Replication) -> Spans:
        if replication not in self._spans:
            limits = {"limit_bytes": self.request.limit_bytes, "host_limit_bytes": self.request.host_limit_bytes}
            self._spans[replication] = self._spans_of(replication, **limits)
        return self._spans[replication]

    def _spans_of(self, replication: Replication, **limits: int | None) -> Spans:
        one_memory = not self.request.memory_apart
        return Spans(self.profile, **limits, replication=replication, splits=self.may_keep, one_memory=one_memory)

    def sizer(
        self, wanted: tuple[int, ...], stash_moves: bool, replication: Replication, *, unlimited: bool = False
    ) -> Sizer:
        """Make the sizer of stages with these in-flight depths.

        Args:
            wanted: depths, by stage.
            stash_moves: what waits for R may wait in host memory.
            replication: what the number of replicas D changes.
            unlimited: whatever memory there is.
        """
        flexible = self.request.policy in _FLEXIBLE
        stages = len(wanted)
        least = tuple(min(depth, stages - k) for k, depth in enumerate(wanted)) if flexible else wanted
        return Sizer(
            self._spans_of(replication) if unlimited else self._limited(replication),
            wanted=wanted,
            least=least,
            may_keep=self.may_keep,
            stash_moves=stash_moves,
            tentative=self.request.tentative,
        )
