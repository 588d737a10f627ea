"""A first guess at every shape P x D, in a few microseconds: which ones are worth a closer look."""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from operator import sub
from typing import NamedTuple

from varuna.planner.asking.request import PlanRequest
from varuna.planner.effort import EFFORT
from varuna.planner.pricing.network import link_of, reduce_s
from varuna.planner.pricing.profile import Profile

_VOTE_BYTES = 1024  # about: its latency is what counts
_DEPTH_FACTOR = 2  # micro-batches in flight per stage, where memory has a use for keeping
_LIGHT = 0.5  # of the median section's work or state
_STATE_SHARE = 18  # bytes of state that a byte of a tied parameter stands for, at most


class Shape(NamedTuple):
    """P stages x D replicas at m examples per micro-batch."""

    stages: int
    replicas: int
    micro_batch: int


class Depth(NamedTuple):
    """P stages with any number of replicas."""

    stages: int
    micro_batch: int


def longest_run(shape: Shape, global_batch: int) -> int:
    """N of the replica with the most micro-batches."""
    micro_batches = -(-global_batch // shape.micro_batch)
    return -(-micro_batches // shape.replicas)


def is_short(shape: Shape, global_batch: int) -> bool:
    """Return whether a step has few enough actions to be simulated quickly, and for their order to count."""
    return shape.stages * longest_run(shape, global_batch) <= EFFORT.short_forwards


class Guess(NamedTuple):
    """A shape, and about the fewest seconds that a step of it takes."""

    step_s: float
    bottleneck_s: float
    shape: Shape


class Guesser:
    """Guesses for one micro-batch size."""

    def __init__(self, request: PlanRequest, profile: Profile, *, may_keep: bool) -> None:
        """Prepare what is the same for every depth.

        Args:
            request: model, workers, and what the user fixed.
            profile: of the sections.
            may_keep: whether activations of some sections may be kept.
        """
        self.request, self.profile, self.may_keep = request, profile, may_keep
        backward_s = (profile.input_s if may_keep else profile.backward_s).before[-1]
        self._way_s_all = profile.forward_s.before[-1] + backward_s
        all_bytes = sum(profile.boundary_bytes) + sum(profile.gradient_boundary_bytes)
        mean_bytes = all_bytes / max(1, profile.sections - 1)
        links = [link_of(profile.calibration, crosses=crosses) for crosses in (True, False)]
        self._hops_s = [
            2 * (link.latency_of(mean_bytes / 2) + link.jitter.mean_s) + mean_bytes / link.bytes_per_s for link in links
        ]  # there and back, across VMs and within one
        heavy = _heavy(profile.work_s.values)
        self._work, self._recompute = (
            _Windows([sums.values[i] for i in heavy]) for sums in (profile.work_s, profile.recompute_s)
        )
        divided = profile.optimizer_bytes.values if profile.calibration.optimizer.sharded else [0.0] * profile.sections
        self._lendable_bytes = sum(divided)
        needs = [state - lent for state, lent in zip(profile.resident_bytes.values, divided, strict=True)]
        if request.tentative:
            copies = zip(profile.own_bytes.values, divided, strict=True)
            needs = [need + own - lent for need, (own, lent) in zip(needs, copies, strict=True)]
        self._odd = list(accumulate((1 / (_DEPTH_FACTOR * b + 1) for b in range(profile.sections + 1)), initial=0.0))
        self._needs = _Windows([needs[i] for i in _heavy(needs)])

    def least_score(self, stages: int) -> float:
        """A score below that of any guess: all workers in use, and rings that take no time."""
        request = self.request
        micro_batches = -(-request.global_batch // self.profile.micro_batch)
        bottleneck_s, way_s = self._bottleneck_s(stages), self._way_s(stages)
        if request.objective == "dollar":
            return stages * (micro_batches * bottleneck_s + way_s)
        return -(-micro_batches // min(request.count // stages, micro_batches)) * bottleneck_s + way_s

    def guesses(self, stages: int) -> list[Guess]:
        """P stages that are perfectly balanced, and keep what memory could hold: the best D, and others near it.

        What rings really cost depends on the balance, so that another D may turn out better.
        """
        scored = sorted(self._by_replicas(stages), key=lambda pair: pair[0])
        best_score, best = scored[0]
        found, short = [best], []
        for score, guess in scored[1:]:
            few, many = sorted((guess.shape.replicas, best.shape.replicas))
            is_far = many >= 2 * few
            if is_short(guess.shape, self.request.global_batch):
                short += [guess] if score <= best_score * EFFORT.near_if_short else []
            elif score <= best_score * (EFFORT.near if is_far else EFFORT.as_good):
                found.append(guess)
        return [*found[: EFFORT.replicas], *short]

    def _by_replicas(self, stages: int) -> Iterator[tuple[float, Guess]]:
        """Scores and guesses for ever fewer replicas, while computing alone could still win."""
        profile, request = self.profile, self.request
        micro_batches = -(-request.global_batch // profile.micro_batch)
        bottleneck_s, way_s = self._bottleneck_s(stages), self._way_s(stages)
        reduced_bytes = profile.reduced_bytes.before[-1] / stages
        backward_s = profile.backward_s.before[-1] / stages  # of the last micro-batch, which hides reductions
        best_score = float("inf")
        most = min(request.count // stages, micro_batches)
        each = -(-micro_batches // most)
        while request.score(stages, each * bottleneck_s) < best_score * EFFORT.near_if_short:
            replicas = -(-micro_batches // each) if request.leaves_idle else most
            step_s = each * bottleneck_s + way_s
            step_s += max(0.0, self._ring_s(reduced_bytes, stages, replicas, replicas) - backward_s)
            step_s += self._ring_s(_VOTE_BYTES, stages, replicas, stages * replicas)
            score = request.score(stages * replicas, step_s)
            best_score = min(best_score, score)
            yield score, Guess(step_s, bottleneck_s, Shape(stages, replicas, profile.micro_batch))
            if replicas == 1 or not request.leaves_idle:
                return
            each = min(micro_batches, max(each + 1, int(each * EFFORT.faster)))

    def _ring_s(self, size_bytes: float, stages: int, replicas: int, members: int) -> float:
        return reduce_s(
            self.profile.calibration,
            size_bytes,
            stages=stages,
            replicas=replicas,
            gpus_per_vm=self.request.vm_size,
            members=members,
        )

    def fits(self, stages: int) -> bool:
        """Return whether P stages may fit: all together, and the one with S / P sections or more."""
        limit_bytes = self.request.limit_bytes
        if limit_bytes is None:
            return True
        profile = self.profile
        room = limit_bytes - profile.calibration.hardware.reserved_bytes
        tied_bytes = sum(tied.size_bytes for tied in profile.calibration.tied)
        if self._state_bytes(stages) - _STATE_SHARE * tied_bytes > stages * room:
            return False
        return stages == 1 or self._needs.fullest(stages) <= room

    def _state_bytes(self, stages: int) -> float:
        """Least bytes of all stages together; replicas that divide optimizer state hold 2 of D parts of it each."""
        spared = 1 - 2 / max(2, self.request.count // stages)
        return self.profile.resident_bytes.before[-1] - spared * self._lendable_bytes

    def _bottleneck_s(self, stages: int) -> float:
        """Least seconds of the slowest stage: one has S / P sections or more, and the mean has 1 / P of the work."""
        profile, share = self.profile, self.recomputed(stages)
        mean_s = (profile.work_s.before[-1] + share * profile.recompute_s.before[-1]) / stages
        window_s = self._work.fullest(stages) + share * self._recompute.fullest(stages)
        return max(window_s, mean_s) + 2 * profile.calibration.action_s

    def recomputed(self, stages: int) -> float:
        """Share of the work that is recomputed, if all stages were average."""
        limit_bytes = self.request.limit_bytes
        if not self.may_keep or limit_bytes is None:
            return (stages - 1) / (stages + 1)
        profile = self.profile
        state = self._state_bytes(stages)
        activations = profile.activation_bytes.before[-1] / stages
        room = limit_bytes - profile.calibration.hardware.reserved_bytes - state / stages - activations
        boundary = min(profile.boundary_bytes[:-1], default=0)
        if not activations:
            return 0.0
        # Of b stages from here to the last, 2 b + 2 boundaries are held, and 2 b + 1 sets of activations may be kept:
        # the share recomputed is 1 - (room - (2 b + 2) boundary) / ((2 b + 1) activations), within 0 and 1.
        rest = room - boundary
        none_from = stages + 1 if room <= 0 or not boundary else int((room / boundary - _DEPTH_FACTOR) / _DEPTH_FACTOR)
        none_from = min(max(2, none_from + 1), stages + 1) if room > 0 else 2  # first b for which nothing is kept
        all_below = (rest / (activations + boundary) - 1) / _DEPTH_FACTOR  # all is kept up to there
        some_from = min(max(2, math.ceil(all_below)), none_from)
        share = stages + 1.0 - none_from
        share += (none_from - some_from) * (1 + boundary / activations)
        share -= (self._odd[none_from] - self._odd[some_from]) * rest / activations
        return share / stages

    def _way_s(self, stages: int) -> float:
        """Seconds of the first micro-batch's way in and the last one's way out."""
        if stages == 1:
            return 0.0
        outer = (stages - 1) // self.request.vm_size
        across_s, within_s = self._hops_s
        return self._way_s_all * (stages - 1) / stages + outer * across_s + (stages - 1 - outer) * within_s


def _heavy(figures: Sequence[float]) -> list[int]:
    """Number of sections that are not light; light ones may join any stage at no cost."""
    least = sorted(figures)[len(figures) // 2] * _LIGHT
    return [i for i, figure in enumerate(figures) if figure >= least]


class _Windows:
    """The least sum over any n consecutive sections, for each n."""

    def __init__(self, figures: Sequence[float]) -> None:
        self._sums = list(accumulate(figures, initial=0.0))
        self._known: dict[int, float] = {}

    def fullest(self, stages: int) -> float:
        """The least sum of the fullest stage: one of P holds S / P consecutive sections or more."""
        length = -(-(len(self._sums) - 1) // stages)
        least = self._known.get(length)
        if least is None:
            least = self._known[length] = min(map(sub, self._sums[length:], self._sums))
        return least
