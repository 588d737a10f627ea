"""The one validator that every order passes, planned or executed."""

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from varuna.schedule.actions import Action, Kind


class Usage(NamedTuple):
    """What a stage holds at its worst."""

    stash: int
    """Micro-batches whose forward is done and whose backward is not."""
    live: int
    """Sets of activations, recomputed or kept."""


def usage(row: Sequence[Action]) -> Usage:
    """Peaks over a row in which every B has activations: from its R, or kept by the F right before it."""
    stash = live = stash_peak = live_peak = 0
    for i, action in enumerate(row):
        if action.kind is Kind.BACKWARD:
            stash -= 1
            live -= 1
            continue
        if action.kind is Kind.FORWARD:
            stash += 1
            stash_peak = max(stash_peak, stash)
        if action.kind is Kind.RECOMPUTE or _keeps(row, i):
            live += 1
            live_peak = max(live_peak, live)
    return Usage(stash_peak, live_peak)


def kept(row: Sequence[Action]) -> frozenset[int]:
    """Micro-batches whose F is directly followed by their own B, so that no R is needed."""
    return frozenset(action.micro_batch for i, action in enumerate(row) if _keeps(row, i))


def validate(
    orders: Sequence[Sequence[Action]],
    *,
    micro_batches: int,
    backward_order: Sequence[int] | None = None,
    stash_limits: Sequence[int] | None = None,
) -> None:
    """Check a step of a whole pipeline, a row for each stage.

    Args:
        orders: what each stage runs, stage 0 first.
        micro_batches: N of this replica.
        backward_order: micro-batches in the order of their B's on every stage; 0 to N - 1 if None.
        stash_limits: most micro-batches in flight, by stage; unlimited if None.

    Raises:
        ValueError: names the action and the rule that it breaks.
    """
    backwards = tuple(range(micro_batches)) if backward_order is None else tuple(backward_order)
    for stage, row in enumerate(orders):
        _check_sequence(row, stage, Kind.FORWARD, tuple(range(micro_batches)))
        _check_sequence(row, stage, Kind.BACKWARD, backwards)
        _check_activations(row)
        if stash_limits is not None:
            _check_stash(row, stash_limits[stage])
    _check_dependencies(orders)


def _keeps(row: Sequence[Action], index: int) -> bool:
    action = row[index]
    return (
        action.kind is Kind.FORWARD
        and index + 1 < len(row)
        and row[index + 1] == (action.stage, Kind.BACKWARD, action.micro_batch)
    )


def _check_sequence(row: Sequence[Action], stage: int, kind: Kind, expected: tuple[int, ...]) -> None:
    """Every micro-batch once, in the stated order, on its own stage."""
    foreign = next((action for action in row if action.stage != stage), None)
    if foreign is not None:
        _refuse(foreign, f"stands in the row of stage {stage}")
    found = [action for action in row if action.kind is kind]
    for action, micro_batch in zip(found, expected, strict=False):
        if action.micro_batch != micro_batch:
            _refuse(action, f"is out of order: {Action(stage, kind, micro_batch)} is next")
    if len(found) > len(expected):
        _refuse(found[len(expected)], "is one too many")
    if len(found) < len(expected):
        _refuse(Action(stage, kind, expected[len(found)]), "is missing")


def _check_activations(row: Sequence[Action]) -> None:
    """An R exactly where activations were dropped, and never two sets of them."""
    stashed: set[int] = set()
    live: int | None = None
    for i, action in enumerate(row):
        if action.kind is Kind.BACKWARD:
            if live != action.micro_batch:
                _refuse(action, "has no activations: its R is missing")
            stashed.remove(action.micro_batch)
            live = None
            continue
        if action.kind is Kind.FORWARD:
            stashed.add(action.micro_batch)
        elif action.micro_batch not in stashed:
            _refuse(action, "has no stashed input: its F is not done, or its B is")
        if action.kind is Kind.RECOMPUTE or _keeps(row, i):
            if live is not None:
                _refuse(action, f"makes a second set of activations beside that of micro-batch {live}")
            live = action.micro_batch


def _check_stash(row: Sequence[Action], limit: int) -> None:
    in_flight = 0
    for action in row:
        in_flight += (action.kind is Kind.FORWARD) - (action.kind is Kind.BACKWARD)
        if in_flight > limit:
            _refuse(action, f"puts {in_flight} micro-batches in flight, above the stash limit of {limit}")


def _check_dependencies(orders: Sequence[Sequence[Action]]) -> None:
    """Run the table: F needs the F before it in the pipeline, B the B behind it."""
    last = len(orders) - 1
    done: set[Action] = set()
    positions = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for stage, row in enumerate(orders):
            while positions[stage] < len(row):
                action = row[positions[stage]]
                if action.kind is Kind.FORWARD and stage and action._replace(stage=stage - 1) not in done:
                    break
                if action.kind is Kind.BACKWARD and stage < last and action._replace(stage=stage + 1) not in done:
                    break
                done.add(action)
                positions[stage] += 1
                moved = True
    for row, position in zip(orders, positions, strict=True):
        if position < len(row):
            _refuse(row[position], "can never run: the order deadlocks")


def _refuse(action: Action, rule: str) -> NoReturn:
    raise ValueError(f"{action} {rule}")
