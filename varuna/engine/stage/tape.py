"""Tapes that forwards leave for backwards, and the backward of one section, or of several that have one graph."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from varuna.engine.graphs.user_place import note_place
from varuna.engine.stage.joining import Links
from varuna.partition.cut.split import SectionGraph
from varuna.partition.cut.split_backward import PendingWeights

_GONE = torch.empty(0)


class Row:
    """Sections that have one graph."""

    def __init__(self, begin: int) -> None:
        """Begin with one, whose graph another one continues."""
        self.begin = begin
        self.reach: Callable[[int], None] | None = None
        """while a backward runs, called with each section whose gradients come"""

    def watch_gradient(self, value: Tensor, maker: int) -> None:
        """Let the gradient of a value be what a message would make of it, and tell that it comes."""
        value.register_hook(partial(self._pass, maker))  # type: ignore[no-untyped-call]

    def _pass(self, maker: int, gradient: Tensor) -> Tensor:
        if self.reach is not None:
            self.reach(maker)
        return dense(gradient)


class Tape(NamedTuple):
    """The record of one section's forward that its B needs."""

    section: SectionGraph
    taken: dict[str, Tensor]
    """its leaves; not what it takes from sections before it in one graph"""
    made: list[Tensor]
    """something empty in place of what sections behind it have taken in one graph"""
    pending: PendingWeights | None = None
    """takes its weight gradients for later; None: they come with the input gradients"""
    micro_batch: int = 0
    row: Row | None = None
    """sections whose graph it continues; None: it begins one"""

    @property
    def begin(self) -> int:
        """The first section of its graph."""
        return self.section.index if self.row is None else self.row.begin


Inside = Callable[[Tape], AbstractContextManager[None]]


def crossing(made: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return values as they cross a section boundary, also within a stage: without a graph, and ``dense``.

    A message makes them so; they must not be others where no message is sent.
    """
    return tuple(dense(value.detach()) for value in made)


def dense(value: Tensor) -> Tensor:
    """Return a value as a message would make it: contiguous, without pending conjugation or negation."""
    found = value.contiguous()
    return found.resolve_conj().resolve_neg() if found.is_conj() or found.is_neg() else found


# -- sections with one graph ---------------------------------------------------------------------------------


def joined_values(tapes: Sequence[Tape], section: int, links: Links) -> dict[str, Tensor]:
    """Find the values that a section takes with their graph; none: it begins one.

    Args:
        tapes: of the sections before it that were recorded just now.
        section: its number.
        links: how it may go on their graph.
    """
    if not tapes or (begin := tapes[-1].begin) < links.earliest:
        return {}
    found = {link.name: tapes[link.maker - section].made[link.place] for link in links.taken if link.maker >= begin}
    # A message would hand on a copy of a value that is not dense, so such a value cuts the graph within a stage, too.
    return found if all(value.requires_grad and dense(value) is value for value in found.values()) else {}


def join_tapes(tapes: list[Tape], tape: Tape, links: Links, taken: Mapping[str, Tensor]) -> None:
    """Put a tape behind those that hold some of its values, which they need not hold any more."""
    row = tapes[-1].row or Row(tapes[-1].begin)
    for name, maker, place in links.taken:
        if name in taken:
            row.watch_gradient(taken[name], maker)
            # From the end: ``tapes`` has the sections just before this one, with consecutive numbers.
            tapes[maker - tape.section.index].made[place] = _GONE
    tapes.append(tape._replace(row=row))


def take_row(tapes: list[Tape]) -> list[Tape]:
    """Remove the last sections that have one graph, and return them from the last to the first."""
    row = [tapes.pop()]
    while row[-1].row is not None:
        row.append(tapes.pop())
    return row


# -- backward ------------------------------------------------------------------------------------------------


def backward(row: Sequence[Tape], gradients: dict[str, Tensor], inside: Inside | None = None) -> None:
    """Run the backward of sections of one graph; in ``gradients``, those of what they took replace what they made.

    ``gradients`` sums the contributions of later sections first, so the order of additions does not depend
    on where stages begin. Gradients of parameters accumulate in the leaves.

    Args:
        row: of the sections, from the last to the first: one, but for those that are joined.
        gradients: by name.
        inside: what the part of each section is run in, if anything.
    """
    pairs = [
        (made, gradient)
        for tape in row
        for name, made in zip(tape.section.makes, tape.made, strict=True)
        # Values that later sections do not use have none, and may not require any.
        if (gradient := gradients.pop(name, None)) is not None and made.requires_grad
    ]
    passage = None if inside is None else _Passage(row, inside)
    try:
        if passage is not None:
            with passage.all():
                _run_backward(pairs)
        else:
            _run_backward(pairs)
    except Exception as error:
        note_place(error, row[0 if passage is None else passage.at].section)
        raise
    for tape in row:
        for name, taken in tape.taken.items():
            if taken.grad is not None:
                known = gradients.get(name)
                # Later sections have added theirs before, since backwards go from the last to the first.
                gradients[name] = dense(taken.grad) if known is None else known + taken.grad
                taken.grad = None


def _run_backward(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Call ``torch.autograd.backward`` without its preparations, which cost as much as a small graph.

    They fill in what is not given, and compare shapes; the engine itself refuses gradients that do not fit.
    """
    if pairs:
        made, gradients = zip(*pairs, strict=True)
        _engine_run_backward(made, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)


class _Passage:
    """The way of a backward through sections: what belongs to each happens around its part of it."""

    def __init__(self, row: Sequence[Tape], inside: Inside) -> None:
        self._row, self._inside = row, inside
        self.at = 0
        """place in the row of the section that runs"""
        self._around = inside(row[0])

    @contextmanager
    def all(self) -> Iterator[None]:
        """Let autograd run in this block; at its end all parts are through."""
        first, last = self._row[0], self._row[-1].section.index
        if first.row is not None:
            first.row.reach = self._reach
        self._around.__enter__()
        try:
            yield
            self._reach(last)
        except BaseException as error:
            self._around.__exit__(type(error), error, error.__traceback__)
            raise
        finally:
            if first.row is not None:
                first.row.reach = None  # or tapes would hold themselves
        self._around.__exit__(None, None, None)

    def _reach(self, section: int) -> None:
        """Note that autograd begins with a section, and so is through with those after it."""
        while self._row[self.at].section.index > section:
            self._around.__exit__(None, None, None)
            self.at += 1
            self._around = self._inside(self._row[self.at])
            self._around.__enter__()
