"""What an agent knows of its own machine: where it is, when it will be taken away, why, or that it may be. Pure."""

from dataclasses import dataclass

from varuna.fleet.net.protocol import MAX_REASON, AdviceSeen, MachineSeen, SpotNoticeSeen, SpotSeen, ZoneSeen
from varuna.fleet.notices.notice import Preemptible, ZoneNotice


@dataclass(frozen=True)
class SpotWarning:
    """This machine will be taken away in ``in_s`` seconds."""

    in_s: float
    reason: str


@dataclass(frozen=True)
class RiskWarning:
    """This machine may be taken away soon, says its cloud."""

    reason: str


Foreseen = SpotWarning | RiskWarning | Preemptible | ZoneNotice
"""What an agent learns of its machine's place and future."""


class OwnDeparture:
    """Of several deadlines the earliest counts, and of several advices the first."""

    def __init__(self) -> None:
        self._until_s: float | None = None
        self._reason = self._advice = ""
        self._is_spot, self._signals = False, 0
        self._zone = ""

    @property
    def is_near(self) -> bool:
        """Whether this machine will be taken away."""
        return self._until_s is not None

    def learn(self, foreseen: Foreseen, now_s: float) -> str:
        """Take it down; what it is in words, or nothing if it says no more than what was known."""
        match foreseen:
            case SpotWarning(in_s=in_s, reason=reason) if self._until_s is None or now_s + in_s < self._until_s:
                self._until_s, self._reason = now_s + in_s, reason
                return f"this machine will leave in {in_s:.0f} s ({reason})"
            case RiskWarning(reason=reason) if not self._advice:
                self._advice = reason
                return f"this machine may be taken away soon ({reason})"
            case Preemptible() if not self._is_spot:
                self._is_spot = True
                return "this machine may be taken away at any time: its cloud rents it as such"
            case ZoneNotice(zone=zone) if not self._zone:
                self._zone = zone
                return f"this machine is in {zone}"
        return ""

    def note_signal(self) -> bool:
        """Note a SIGTERM or SIGINT; returns whether it is the second one. A cloud's own notice is not the first."""
        self._signals += 1
        return self._signals > 1

    def is_over(self, now_s: float) -> bool:
        """Whether the deadline has passed."""
        return self._until_s is not None and now_s >= self._until_s

    def to_say(self, now_s: float) -> list[MachineSeen]:
        """What the manager should know; again, if it has started anew."""
        said: list[MachineSeen] = []
        if self._zone:
            said.append(ZoneSeen(zone=self._zone))
        if self._is_spot:
            said.append(SpotSeen())
        if self._advice:
            said.append(AdviceSeen(reason=self._advice[:MAX_REASON]))
        if self._until_s is not None:
            said.append(SpotNoticeSeen(in_s=max(0.0, self._until_s - now_s), reason=self._reason[:MAX_REASON]))
        return said
