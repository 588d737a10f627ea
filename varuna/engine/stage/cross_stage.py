"""Values that depend on parameters of several stages: ``all_reduce_shared`` and ``owned``.

A user's code (``before_step``, the optimizer) sees the parameters of one stage. What it computes over "all"
parameters is then a stage's part only; ``all_reduce_shared`` makes it whole. While the engine applies a step it
installs an exchange for its thread; elsewhere, and with one stage, both functions change nothing.
"""

import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import reduce
from pathlib import Path
from types import FrameType
from typing import Protocol

import torch
from torch import Tensor

from varuna.core.errors import UsageError
from varuna.data.randomness import present_turn

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
_OPS = tuple(_COMBINE)
_ACTIVE, _LENGTH, _OP, _SITE = range(4)
_PACKAGES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


class Exchange(Protocol):
    """An exchange between stages that answers the two functions while a step is applied."""

    def all_reduce(self, tensor: Tensor, op: str) -> Tensor:
        """Combine the stages' parts."""

    def owns(self, parameter: Tensor) -> bool:
        """Return whether this stage counts ``parameter``."""


class _Installed(threading.local):
    exchange: Exchange | None = None


_installed = _Installed()


def all_reduce_shared(tensor: Tensor, op: str = "sum") -> Tensor:
    """Combine a small tensor over the pipeline's stages; call it in ``before_step`` or in an optimizer's ``step``.

    Every stage contributes what it computed over its own parameters, and all get the same result. All stages must
    call it at the same places of the code, in every step; a stage without anything to train need not. With one
    stage, and outside a Varuna run, the tensor itself comes back.

    Args:
        tensor: this stage's part, of the same length on all stages; it is not changed.
        op: ``"sum"``, ``"max"`` or ``"min"``. Count parameters for which ``owned`` is true, or a sum counts a
            tied parameter once per stage that holds it.

    Raises:
        UsageError: an unknown ``op``, or stages that call it at different places or with different lengths.
    """
    if op not in _COMBINE:
        raise UsageError(f'all_reduce_shared(op={op!r}): op must be one of "sum", "max" and "min"')
    exchange = _installed.exchange
    if exchange is None:
        return tensor
    turn = present_turn()
    with nullcontext() if turn is None else turn.paused():  # another stage may be a thread, which draws too
        return exchange.all_reduce(tensor, op)


def owned(parameter: Tensor) -> bool:
    """Return whether this stage counts a parameter: false for the copy of a tied parameter that another stage owns."""
    exchange = _installed.exchange
    return exchange is None or exchange.owns(parameter)


@contextmanager
def installed(exchange: Exchange) -> Iterator[None]:
    """Let ``exchange`` answer on this thread."""
    before = _installed.exchange
    _installed.exchange = exchange
    try:
        yield
    finally:
        _installed.exchange = before


@contextmanager
def no_exchange(reason: str) -> Iterator[None]:
    """Refuse ``all_reduce_shared`` on this thread; ``owned`` still answers."""
    with installed(_Forbidden(_installed.exchange, reason)):
        yield


class _Forbidden:
    """The exchange for code that cannot be run in step with other stages."""

    def __init__(self, usual: Exchange | None, reason: str) -> None:
        self._usual, self._reason = usual, reason

    def all_reduce(self, tensor: Tensor, op: str) -> Tensor:
        """Refuse the call.

        Raises:
            UsageError: always.
        """
        raise UsageError(self._reason)

    def owns(self, parameter: Tensor) -> bool:
        """Answer as outside a run."""
        return self._usual is None or self._usual.owns(parameter)


class LocalExchange:
    """The exchange for one stage: nothing to combine, but the use is noted, since a morph may bring more stages."""

    def __init__(self) -> None:
        self.used = False

    def all_reduce(self, tensor: Tensor, op: str) -> Tensor:
        """Note the call and return the tensor itself."""
        self.used = True
        return tensor

    def owns(self, parameter: Tensor) -> bool:
        """Return True: one stage owns everything."""
        return True


class LateExchange:
    """The exchange for a step that was voted on before it is applied: a collective in it could not be undone."""

    def __init__(self, owned: frozenset[int]) -> None:
        self._owned = owned

    def all_reduce(self, tensor: Tensor, op: str) -> Tensor:
        """Refuse the call.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "varuna.all_reduce_shared was not called in the first step of this run, but is called now. Call it in "
            "every step, even if its result is not needed: the stages must know before a step whether they will "
            "communicate."
        )

    def owns(self, parameter: Tensor) -> bool:
        """See ``owned``."""
        return id(parameter) in self._owned


class StageExchange:
    """Combines over the stages of a generation while a step is applied tentatively.

    Every call is two rounds: first each stage says whether it takes part, with which length, operation and line of
    code; then come the values. A stage whose step is done answers until all are done, so no stage waits for one that
    never calls.
    """

    def __init__(self, rows: Callable[[Tensor], Tensor], owned: frozenset[int]) -> None:
        """Answer for one step on one rank.

        Args:
            rows: takes this stage's row (float64) and returns those of all stages, equal on all ranks; may raise
                what ends the generation.
            owned: ids of the parameters that this stage counts.
        """
        self._rows, self._owned = rows, owned
        self._failure: BaseException | None = None
        self.used = False
        """any stage called"""

    def all_reduce(self, tensor: Tensor, op: str) -> Tensor:
        """Answer one call of the user's: see ``all_reduce_shared``."""
        part = tensor.detach().to("cpu", torch.float64).reshape(-1)
        header = torch.zeros(4, dtype=torch.float64)
        header[_ACTIVE], header[_LENGTH], header[_OP], header[_SITE] = 1, part.numel(), _OPS.index(op), _site()
        combined = self._round(header, part)
        assert combined is not None
        return combined.reshape(tensor.shape).to(tensor.device, tensor.dtype)

    def owns(self, parameter: Tensor) -> bool:
        """Return what ``owned`` is to answer."""
        return id(parameter) in self._owned

    def finish(self) -> None:
        """Answer the other stages until all have applied their step.

        Raises:
            GenerationEnded: the generation ended, now or in a call whose exception the user's code swallowed.
            LinkError: as above, for a broken link.
            UsageError: as ``all_reduce_shared``.
        """
        while self._round(torch.zeros(4, dtype=torch.float64), None) is not None:
            pass

    def _round(self, header: Tensor, part: Tensor | None) -> Tensor | None:
        """Run both rounds; return None if no stage calls."""
        if self._failure is not None:
            raise self._failure
        try:
            return self._combine(header, part)
        except BaseException as error:
            self._failure = error
            raise

    def _combine(self, header: Tensor, part: Tensor | None) -> Tensor | None:
        headers = self._rows(header)
        active = headers[headers[:, _ACTIVE] > 0]
        if not len(active):
            return None
        self.used = True
        # On all ranks alike, since all have the same rows: no stage waits for one that has raised.
        if not bool((active == active[0]).all()):
            raise UsageError(
                "stages called varuna.all_reduce_shared at different places, with different lengths or "
                "operations. All stages must make the same calls in the same order: do not call it per parameter "
                "or under a local condition."
            )
        length = int(active[0, _LENGTH])
        # The rows, not their sum: additions go in the order of stages, which no all-reduce promises.
        rows = self._rows(torch.zeros(length, dtype=torch.float64) if part is None else part)
        return reduce(_COMBINE[_OPS[int(active[0, _OP])]], rows[headers[:, _ACTIVE] > 0].unbind())


def _site() -> int:
    """Return a number for the line that calls: 32 bits, exact in float64."""
    # The line of the user's code: the first frame outside of torch and Varuna.
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        frame = frame.f_back
    return 0 if frame is None else zlib.crc32(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}".encode())
