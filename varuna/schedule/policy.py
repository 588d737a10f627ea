"""Policies: the one object that decides a stage's next action, in the simulator and in the engine.

A policy sees what has arrived, never a clock. Forwards run in micro-batch order and backwards in
``backward_order`` whatever the interleaving, so that links have a known order and gradients add up in
a fixed one.

A micro-batch counts from 0 within the replica, N of them. ``_forwards`` and ``_backwards`` count what is done: they
are the indices of the next one, among the F's and in ``backward_order``.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

from varuna.core.errors import UsageError
from varuna.schedule.actions import Action, Kind, Orders, Row
from varuna.schedule.adaptive import AdaptivePolicy
from varuna.schedule.orders import gpipe, one_f_one_b, varuna
from varuna.schedule.usage import kept, usage


class Policy(Protocol):
    """Decides for one stage and one step: ask ``next``, run the action, report ``done``."""

    stage: int
    backward_order: tuple[int, ...]

    @property
    def finished(self) -> bool:
        """Whether every backward is done."""
        ...

    def next(self, activations_in: int, gradients_in: int) -> Action | None:
        """Return the action to run now; None: wait for an arrival.

        Args:
            activations_in: micro-batches whose input has arrived; N on stage 0.
            gradients_in: gradients that have arrived, in ``backward_order``; N on the last stage.
        """
        ...

    def done(self, action: Action) -> None:
        """Report that the action ``next`` gave has run."""
        ...

    def choose(self, activations_in: int, gradients_in: int) -> Kind | None:
        """Return the kind of the action that ``next`` gives; a simulation, which asks 100,000 times, needs no more."""
        ...

    def count(self, kind: Kind) -> None:
        """Report that the action whose kind ``choose`` gave has run."""
        ...

    def keeps(self, micro_batch: int) -> bool:
        """Return whether the F of ``micro_batch`` keeps its graph; ask between ``next`` and ``done`` of that F."""
        ...

    def awaited(self) -> Action:
        """Return the action that an unfinished stage waits to run, for error messages."""
        ...


class ListPolicy:
    """Follows a static order of actions exactly."""

    def __init__(self, row: Row) -> None:
        self.stage = row[0].stage
        self.backward_order = tuple(action.micro_batch for action in row if action.kind is Kind.BACKWARD)
        self._row = row
        self._kept = kept(row)
        self._position = 0
        self._backwards = 0

    @property
    def finished(self) -> bool:
        """Whether every action has run."""
        return self._position == len(self._row)

    def next(self, activations_in: int, gradients_in: int) -> Action | None:
        """Return the next action of the list if its inputs have arrived, else None."""
        return None if self.choose(activations_in, gradients_in) is None else self._row[self._position]

    def done(self, action: Action) -> None:
        """Record that ``action`` has run."""
        self.count(action.kind)

    def choose(self, activations_in: int, gradients_in: int) -> Kind | None:
        """Return the kind of the next action, or None to wait."""
        if self.finished:
            return None
        _, kind, micro_batch = self._row[self._position]
        if kind is Kind.FORWARD:
            return kind if micro_batch < activations_in else None
        if kind is Kind.BACKWARD:
            # Gradients arrive in the list's own order of B's, so their number tells whether the next one is here.
            return kind if self._backwards < gradients_in else None
        return kind

    def count(self, kind: Kind) -> None:
        """Record that an action of this kind has run."""
        self._position += 1
        self._backwards += kind is Kind.BACKWARD

    def keeps(self, micro_batch: int) -> bool:
        """Return whether B directly follows F in the list, so that F keeps its graph."""
        return micro_batch in self._kept

    def awaited(self) -> Action:
        """Return the next action of the list."""
        return self._row[self._position]


class OpportunisticPolicy:
    """The paper's policy (§"Tuning pipeline efficiency"): the static order, but what is ready runs rather than waits.

    Of a static order only the interleaving matters: how many B's come before each F. It stays live under
    any stash limits of at least 1: among the micro-batches that are not through, the lowest finds every
    stage that it has not entered empty, and its R and B come first everywhere else.
    """

    def __init__(self, stage: int, backwards_before: tuple[int, ...], *, stages: int, stash_limit: int) -> None:
        self.stage = stage
        self.backward_order = tuple(range(len(backwards_before)))
        self._backwards_before = backwards_before
        self._count = len(self.backward_order)
        self._limit = stash_limit
        self._is_last = self.stage == stages - 1
        self._forwards = 0
        self._backwards = 0
        self._live = False  # the activations of the next B are there
        self._is_late = False  # a gradient was not there when the order wanted it, though a forward could have run

    @property
    def finished(self) -> bool:
        """Whether every backward is done."""
        return self._backwards == self._count

    def next(self, activations_in: int, gradients_in: int) -> Action | None:
        """Return the ready action that the order would run first.

        Once a gradient has been late, an R without gradient runs only if no F is ready: gradients will be late again.
        """
        kind = self.choose(activations_in, gradients_in)
        if kind is None:
            return None
        return Action(self.stage, kind, self._forwards if kind is Kind.FORWARD else self._backwards)

    def choose(self, activations_in: int, gradients_in: int) -> Kind | None:
        """Return the kind of the next action, or None to wait."""
        forwards, backwards = self._forwards, self._backwards
        gradient_here = backwards < forwards and backwards < gradients_in
        has_room = forwards < self._count and forwards - backwards < self._limit
        forward_here = has_room and forwards < activations_in
        if self._live:  # rule 2: nothing but its B
            # Late only if a forward was ready: otherwise the wait cost nothing.
            self._is_late = self._is_late or (forward_here and not gradient_here)
            return Kind.BACKWARD if gradient_here else None
        # The order has this F next if all B's that it puts before it are done.
        forward_is_listed = has_room and self._backwards_before[forwards] <= backwards
        # Rule 3 prefers a backward that is ready; where none is, the paper runs an F that is not due yet.
        if forward_here and (forward_is_listed or (self._is_late and not gradient_here)):
            return Kind.FORWARD
        # Rule 1, R ahead of its gradient: not while the order expects a forward first, which it would block.
        if gradient_here or (backwards < forwards and not forward_is_listed):
            return Kind.RECOMPUTE
        return None

    def done(self, action: Action) -> None:
        """Record that ``action`` has run."""
        self.count(action.kind)

    def count(self, kind: Kind) -> None:
        """Record that an action of this kind has run."""
        if kind is Kind.FORWARD:
            self._live = self.keeps(self._forwards)
            self._forwards += 1
        elif kind is Kind.RECOMPUTE:
            self._live = True
        else:
            self._live = False
            self._backwards += 1

    def keeps(self, micro_batch: int) -> bool:
        """Return whether nothing can run between this F and its B, so that keeping its activations costs nothing."""
        # No F can come between: the last stage has its gradient at once, the stash is full, or this F is the last.
        is_alone = self._is_last or self._limit == 1 or micro_batch == self._count - 1
        return is_alone and micro_batch == self._backwards

    def awaited(self) -> Action:
        """Return the next forward if there is room for its input, else the next B, which lacks its gradient."""
        has_room = self._forwards < self._count and self._forwards - self._backwards < self._limit
        if not self._live and has_room:
            return Action(self.stage, Kind.FORWARD, self._forwards)
        return Action(self.stage, Kind.BACKWARD, self._backwards)


_ORDERS: dict[str, Callable[[int, int], Orders]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "varuna": varuna,
    "varuna-strict": varuna,
}

POLICIES = (*_ORDERS, "adaptive")
"""Names that ``make_policy`` knows."""

_OF_ANY_LIMIT = ("varuna", "adaptive")


def make_policy(
    name: str,
    *,
    stage: int,
    stages: int,
    micro_batches: int,
    stash_limit: int,
    split_last: int = 0,
    empties: bool = False,
    keeps_all: bool = False,
) -> Policy:
    """Make a policy for one stage and one step.

    ``varuna`` and ``adaptive`` respect any limit of at least 1. The others follow a list that cannot bend without
    deadlock: they refuse a limit below what their list needs, which ``stash_limit`` tells.

    Args:
        name: one of ``POLICIES``.
        stage: which stage it decides for.
        stages: P.
        micro_batches: N of this replica.
        stash_limit: most micro-batches in flight on this stage.
        split_last: how many of the last backwards are split into I and W; ``adaptive`` only.
        empties: the stage before the last runs empty again and again; ``adaptive`` only.
        keeps_all: the stage has nothing to recompute: no R's. Not for the paper's policies.

    Raises:
        UsageError: no such policy, or something that it cannot do.
    """
    check_policy(name)
    if split_last and name != "adaptive":
        raise UsageError(f"policy {name!r} never splits a backward. Use the policy 'adaptive', or split_last=0.")
    if empties and name != "adaptive":
        raise UsageError(f"policy {name!r} lets no stage run empty. Use the policy 'adaptive', or empties=False.")
    if keeps_all and name.startswith("varuna"):
        raise UsageError(
            f"policy {name!r} is the paper's, which recomputes on every stage but the last. Use the policy 'adaptive' "
            "to keep the activations of all sections of a stage."
        )
    if name in _OF_ANY_LIMIT:
        if stash_limit < 1:
            raise UsageError(f"a stash limit of {stash_limit} on stage {stage} lets nothing run. Give at least 1.")
        if name == "adaptive":
            return AdaptivePolicy(
                stage,
                stages=stages,
                micro_batches=micro_batches,
                stash_limit=stash_limit,
                split_last=split_last,
                empties=empties,
                keeps_all=keeps_all,
            )
        listed = _interleaving(stages, micro_batches)[stage]
        return OpportunisticPolicy(stage, listed, stages=stages, stash_limit=stash_limit)
    row = _orders(name, stages, micro_batches)[stage]
    needed = usage(row).stash
    if stash_limit < needed:
        raise UsageError(
            f"policy {name!r} keeps {needed} micro-batches in flight on stage {stage} of {stages}, above the stash "
            f"limit of {stash_limit}. Raise the limit, or use a policy that works with any limit: 'varuna' or "
            "'adaptive'."
        )
    # A list without its R's: ``kept`` then finds every micro-batch, so each F keeps its graph.
    return ListPolicy(tuple(action for action in row if action.kind is not Kind.RECOMPUTE) if keeps_all else row)


def stash_limit(stages: int, stage: int, micro_batches: int, policy: str = "varuna") -> int:
    """Return the default in-flight depth n_k: what a list needs; else 3 (P - k) + 2.

    That cap costs at most 0.4 % on all but the worst networks, where P - k + 2 costs 30 %
    (docs/schedules.md).

    Args:
        stages: P.
        stage: k, in [0, P).
        micro_batches: N of one replica.
        policy: one of ``POLICIES``.

    Raises:
        UsageError: no such policy.
    """
    check_policy(policy)
    depth = {"gpipe": micro_batches, "1f1b": stages - stage}.get(policy, 3 * (stages - stage) + 2)
    return min(micro_batches, depth)


def split_last(stages: int, micro_batches: int, policy: str) -> int:
    """Return the default number of backwards to split: the last P, whose results find the stages before them waiting.

    Fewer lose up to 4 % of a short step. Splitting all gains another 1 % on slow networks only, if I and W take
    no longer than B, and loses where they do (docs/schedules.md).

    Raises:
        UsageError: no such policy.
    """
    check_policy(policy)
    return min(stages, micro_batches) if policy == "adaptive" else 0


def check_policy(name: str) -> None:
    """Refuse a name that is not in ``POLICIES``.

    Raises:
        UsageError: there is no such policy.
    """
    if name not in POLICIES:
        raise UsageError(f"there is no schedule policy {name!r}. Choose one of {', '.join(POLICIES)}.")


# The simulator makes the policies of all stages one by one; a large order takes tens of megabytes.
@lru_cache(maxsize=1)
def _orders(name: str, stages: int, micro_batches: int) -> Orders:
    return _ORDERS[name](stages, micro_batches)


@lru_cache(maxsize=4)
def _interleaving(stages: int, micro_batches: int) -> tuple[tuple[int, ...], ...]:
    """Count the B's that come before each F in the paper's order, by stage."""
    return tuple(map(_backwards_before_each_forward, varuna(stages, micro_batches)))


def _backwards_before_each_forward(row: Row) -> tuple[int, ...]:
    counts: list[int] = []
    backwards = 0
    for action in row:
        if action.kind is Kind.FORWARD:
            counts.append(backwards)
        backwards += action.kind is Kind.BACKWARD
    return tuple(counts)
