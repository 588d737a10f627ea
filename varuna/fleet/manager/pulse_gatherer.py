"""Pulses of many agents on their way to the manager's thread: it is woken for those of a moment, not for each."""

import asyncio
from collections.abc import Callable, Mapping

from varuna.core.messages import Beat
from varuna.fleet.manager.mailbox import Pulses
from varuna.fleet.manager.reconcile import Reconciliation
from varuna.fleet.state.inputs import Event

_GATHER_S = 0.05


class PulseGatherer:
    """Used on one event loop only; what it is given goes on in the same order.

    Args:
        post: takes what happens; returns at once.
    """

    def __init__(self, post: Callable[[Event | Reconciliation | Pulses], None]) -> None:
        self._post = post
        self._pulses: list[tuple[str, Mapping[str, Beat]]] = []

    def hear(self, node: str, beats: Mapping[str, Beat]) -> None:
        """Pass an agent's pulse on, within 50 ms."""
        if not self._pulses:
            asyncio.get_running_loop().call_later(_GATHER_S, self._pass_on)
        self._pulses.append((node, beats))

    def post(self, event: Event | Reconciliation) -> None:
        """Pass an event on at once, after the pulses before it."""
        self._pass_on()
        self._post(event)

    def _pass_on(self) -> None:
        if self._pulses:
            self._post(Pulses(tuple(self._pulses)))
            self._pulses = []
