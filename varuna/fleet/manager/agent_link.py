"""The manager's side of one agent: its session, its workers, and how it behaves."""

from varuna.core.messages import Relay
from varuna.fleet.net.agent_session import AgentSession, Outgoing
from varuna.fleet.net.beats import BeatMemory
from varuna.fleet.net.host_facts import HostView
from varuna.fleet.net.protocol import DownBody, DownItem

ITEMS_WAITING = 4096
"""An agent that leaves this many messages unconfirmed is given up."""
_BURST_FRAMES, _FRAMES_PER_S = 2000.0, 500.0
_BURST_BYTES, _BYTES_PER_S = 64.0 * 2**20, 8.0 * 2**20


class AgentLink:
    """One life of one agent; used on the server's event loop only."""

    def __init__(self, node: str, session: str, now_s: float) -> None:
        self.node = node
        self.session: AgentSession[DownBody] = AgentSession(session, DownItem, ITEMS_WAITING)
        self.workers: set[str] = set()
        self.heard_s = now_s
        self.host = HostView()
        self.beats = BeatMemory()
        self.relay: Relay | None = None
        """The machine's port, where it joins connections of machines that cannot reach each other."""
        self.ended_abruptly = False
        """Its newest connection was ended from the other side, without a goodbye."""
        self.malformed = 0
        """Connections in a row that a malformed message has ended, without an item between them that could be read."""
        self._progress_s = now_s  # newest moment at which nothing waited, or something was confirmed
        self._budget, self._budget_bytes, self._budget_s = _BURST_FRAMES, _BURST_BYTES, now_s

    def connect(self, cursor: int) -> Outgoing[DownBody]:
        """A new connection; the other side has everything up to ``cursor``."""
        self.ended_abruptly, self.beats = False, BeatMemory()
        return self.session.connect(cursor)

    def send(self, body: DownBody, now_s: float) -> None:
        """Queue a message, for this connection or the next one.

        Raises:
            ChannelFullError: nothing was confirmed for too long.
        """
        if not self.session.waiting:
            self._progress_s = now_s
        self.session.send(body)

    def confirm(self, number: int, now_s: float) -> None:
        """The agent has everything up to ``number``.

        Raises:
            ValueError: it was never sent.
        """
        if self.session.confirm(number) or not self.session.waiting:
            self._progress_s = now_s

    def is_stalled(self, now_s: float, patience_s: float) -> bool:
        """Whether it is silent, or takes in nothing of what it is sent."""
        deaf = bool(self.session.waiting) and now_s - self._progress_s > patience_s
        return deaf or now_s - self.heard_s > patience_s

    def pause_s(self, now_s: float, frame_bytes: int = 0) -> float:
        """Return the seconds to read nothing from who floods us: its TCP window then holds it back, and nobody else."""
        passed_s, self._budget_s = now_s - self._budget_s, now_s
        self._budget = min(_BURST_FRAMES, self._budget + passed_s * _FRAMES_PER_S) - 1
        self._budget_bytes = min(_BURST_BYTES, self._budget_bytes + passed_s * _BYTES_PER_S) - frame_bytes
        return max(0.0, -self._budget / _FRAMES_PER_S, -self._budget_bytes / _BYTES_PER_S)
