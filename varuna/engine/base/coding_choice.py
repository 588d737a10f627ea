"""Whether what a connection sends is encoded: only while that is faster, by measurement. Pure.

The line is looked at whenever a large body is about to be written. If the socket still holds many of those before, the
body *waits for the line*, which has been busy since then; how many bytes have left meanwhile tells how fast it is. Some
bodies make a window, and after each window there is a choice::

    plain --- most bytes wait for the line --------------------------------------------------->  encoded
      ^                                                                                          |
      +--- few wait; or they do not pass faster than without (then it stays plain for longer     |
           each time); or 32 windows are over, and the plain line is measured anew --------------+

What encoding costs and saves is measured for each kind of message as well: one that should not gain crosses as it is.
"""

from typing import NamedTuple

from varuna.engine.base.codec import PLAIN, Form

_BODIES, _WINDOW_S = 4, 0.25
"""Least of a window: shorter ones tell more of the processor's other work than of the line."""
_ON_SHARE, _OFF_SHARE = 0.5, 0.25
"""Of the bytes of a window that wait for the line: encoding begins from the one on, and ends below the other."""
_MOST_SENT, _MOST_WORK, _MOST_S = 0.9, 0.75, 0.95
"""For encoding: what may be left of a message's bytes; what encoding and decoding may take of the seconds of a byte on
the line, as tried; and what a byte may take of them once it is encoded."""
_HOPELESS_S = 1e-9
"""For a byte of a line: nothing encodes and decodes so fast, and the line is not worth a try."""
_STAYS = 32
_FIRST_PAUSE, _LONGEST_PAUSE, _LONGER = 8, 128, 4


class Window(NamedTuple):
    """Some large bodies, one after another."""

    bodies: int = 0
    seconds: float = 0.0
    """from the first one to the last one"""
    size_bytes: int = 0
    waited_bytes: int = 0
    """of bodies that found the line busy"""
    written_bytes: int = 0
    """to the socket, for these bodies"""
    busy_s: float = 0.0
    """for which the line was busy all the time"""
    passed_bytes: int = 0
    """that left the socket meanwhile"""

    @property
    def is_full(self) -> bool:
        """Whether there is a choice to make."""
        return self.bodies >= _BODIES and self.seconds >= _WINDOW_S

    @property
    def share(self) -> float:
        """Share of its bytes that waited for the line, in [0, 1]."""
        return self.waited_bytes / max(1, self.size_bytes)

    @property
    def s_per_byte(self) -> float:
        """Seconds for a byte of a message, encoded or not; 0: unknown."""
        passed_bytes = self.passed_bytes * self.size_bytes / max(1, self.written_bytes)
        return self.busy_s / passed_bytes if passed_bytes > 0 else 0.0


class Choice(NamedTuple):
    """Whether bodies are encoded until the next window is full."""

    encodes: bool = False
    plain_s_per_byte: float = 0.0
    """of the line without encoding, as it was last; 0: unknown"""
    windows: int = 0
    """for which it stays so at least (plain) or at most (encoded)"""
    pause: int = _FIRST_PAUSE
    """windows without encoding, should it not pay"""


class Fit(NamedTuple):
    """The effect of encoding on a kind of message."""

    form: Form = PLAIN
    ratio: float = 1.0
    """its bytes by the encoded ones"""
    s_per_byte: float = 0.0
    """to encode and to decode it"""


def chosen(before: Choice, seen: Window) -> Choice:
    """Return the choice after a window."""
    if not before.encodes:
        plain = before._replace(plain_s_per_byte=seen.s_per_byte or before.plain_s_per_byte)
        if plain.windows:
            return plain._replace(windows=plain.windows - 1)
        waits = seen.share >= _ON_SHARE and plain.plain_s_per_byte > _HOPELESS_S
        return plain._replace(encodes=True, windows=_STAYS) if waits else plain
    if seen.share < _OFF_SHARE:
        return before._replace(encodes=False, windows=0)
    if seen.s_per_byte > _MOST_S * before.plain_s_per_byte:
        pause = min(_LONGER * before.pause, _LONGEST_PAUSE)
        return before._replace(encodes=False, windows=before.pause, pause=pause)
    if before.windows <= 1:
        return before._replace(encodes=False, windows=0, pause=_FIRST_PAUSE)
    return before._replace(windows=before.windows - 1, pause=_FIRST_PAUSE)


def pays(fit: Fit, plain_s_per_byte: float) -> bool:
    """Return whether a kind of message should pass a line faster encoded, while other parts are worked on."""
    return _MOST_SENT * fit.ratio >= 1 and fit.s_per_byte <= _MOST_WORK * plain_s_per_byte
