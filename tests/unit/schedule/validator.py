"""The one validator that every order passes, planned or executed."""

import re
from collections.abc import Sequence
from typing import NoReturn

from varuna.schedule.actions import Action, Kind, Row
from varuna.schedule.usage import kept

_ACTION = re.compile(r"(\d+)([FRBIW])(\d+)")
_BACKWARD_BEGINS = (Kind.BACKWARD, Kind.INPUT)
_BACKWARD_ENDS = (Kind.BACKWARD, Kind.WEIGHT)


def parse_action(text: str) -> Action:
    """Parse an action in text form, such as ``"2F0"``: stage 2, forward, micro-batch 0.

    Raises:
        ValueError: the text is not an action.
    """
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an action; write stage, F, R, B, I or W, and micro-batch, such as 2F0")
    return Action(int(match[1]), Kind(match[2]), int(match[3]))


def parse_row(text: str) -> Row:
    """Parse the actions of a stage, such as ``"1F0 1B0"``."""
    return tuple(map(parse_action, text.split()))


def validate(
    orders: Sequence[Sequence[Action]],
    *,
    micro_batches: int,
    backward_order: Sequence[int] | None = None,
    stash_limits: Sequence[int] | None = None,
    live_limits: Sequence[int] | None = None,
) -> None:
    """Check a step of a whole pipeline, a row for each stage.

    Gradients must leave a stage in ``backward_order`` (its B's and I's) and must be added up in it (its B's and
    W's), whatever runs in between.

    Args:
        orders: what each stage runs, stage 0 first.
        micro_batches: N of this replica.
        backward_order: micro-batches in the order of their backwards on every stage; 0 to N - 1 if None.
        stash_limits: most micro-batches in flight, by stage; unlimited if None.
        live_limits: most sets of activations, by stage; 1 each if None.

    Raises:
        ValueError: names the action and the rule that it breaks.
    """
    backwards = tuple(range(micro_batches)) if backward_order is None else tuple(backward_order)
    for stage, row in enumerate(orders):
        foreign = next((action for action in row if action.stage != stage), None)
        if foreign is not None:
            _refuse(foreign, f"is in the row of stage {stage}")
        _check_sequence(row, stage, (Kind.FORWARD,), tuple(range(micro_batches)))
        _check_sequence(row, stage, _BACKWARD_BEGINS, backwards)
        _check_sequence(row, stage, _BACKWARD_ENDS, backwards)
        _check_activations(row, 1 if live_limits is None else live_limits[stage])
        if stash_limits is not None:
            _check_stash(row, stash_limits[stage])
    _check_dependencies(orders)


def _check_sequence(row: Sequence[Action], stage: int, kinds: tuple[Kind, ...], expected: tuple[int, ...]) -> None:
    """Check that every micro-batch occurs once, in the stated order."""
    found = [action for action in row if action.kind in kinds]
    for action, micro_batch in zip(found, expected, strict=False):
        if action.micro_batch != micro_batch:
            _refuse(action, f"is out of order: {Action(stage, kinds[0], micro_batch)} is next")
    if len(found) > len(expected):
        _refuse(found[len(expected)], "is one too many")
    if len(found) < len(expected):
        _refuse(Action(stage, kinds[0], expected[len(found)]), "is missing")


def _check_activations(row: Sequence[Action], limit: int) -> None:
    """Check that each backward finds activations, recomputed at most once, and that sets stay within ``limit``."""
    keeps = kept(row)
    stashed: set[int] = set()
    live: set[int] = set()
    halves: set[int] = set()
    for action in row:
        _, kind, micro_batch = action
        if kind is Kind.FORWARD:
            stashed.add(micro_batch)
        elif kind is Kind.RECOMPUTE and micro_batch not in stashed:
            _refuse(action, "has no stashed input: its F is not done, or its backward is")
        elif kind is Kind.WEIGHT and micro_batch not in halves:
            _refuse(action, "is half a backward whose I is missing")
        elif kind in _BACKWARD_BEGINS and micro_batch not in live:
            _refuse(action, "has no activations: its R is missing")
        if kind is Kind.RECOMPUTE or (kind is Kind.FORWARD and micro_batch in keeps):
            if len(live) >= limit or micro_batch in live:
                held = ", ".join(map(str, sorted(live)))
                _refuse(action, f"makes one set of activations too many beside that of micro-batch {held}")
            live.add(micro_batch)
        elif kind is Kind.INPUT:
            halves.add(micro_batch)
            stashed.remove(micro_batch)
        elif kind in _BACKWARD_ENDS:
            live.remove(micro_batch)
            stashed.discard(micro_batch)


def _check_stash(row: Sequence[Action], limit: int) -> None:
    in_flight = 0
    for action in row:
        in_flight += (action.kind is Kind.FORWARD) - (action.kind in _BACKWARD_ENDS)
        if in_flight > limit:
            _refuse(action, f"puts {in_flight} micro-batches in flight, above the stash limit of {limit}")


def _check_dependencies(orders: Sequence[Sequence[Action]]) -> None:
    """Run the table: F needs the previous stage's F of its micro-batch, B and I need the next stage's B or I."""
    last = len(orders) - 1
    forwards: list[set[int]] = [set() for _ in orders]
    backwards: list[set[int]] = [set() for _ in orders]
    positions = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for stage, row in enumerate(orders):
            while positions[stage] < len(row):
                _, kind, micro_batch = row[positions[stage]]
                if kind is Kind.FORWARD:
                    if stage and micro_batch not in forwards[stage - 1]:
                        break
                    forwards[stage].add(micro_batch)
                elif kind in _BACKWARD_BEGINS:
                    if stage < last and micro_batch not in backwards[stage + 1]:
                        break
                    backwards[stage].add(micro_batch)
                positions[stage] += 1
                moved = True
    for row, position in zip(orders, positions, strict=True):
        if position < len(row):
            _refuse(row[position], "can never run: the order deadlocks")


def _refuse(action: Action, rule: str) -> NoReturn:
    raise ValueError(f"{action} {rule}")
