"""What an agent knows of its own machine's end: when it will be taken away, why, or that it may be. Pure."""

from dataclasses import dataclass

from varuna.fleet.net.protocol import MAX_REASON, AdviceSeen, SpotNoticeSeen


@dataclass(frozen=True)
class SpotWarning:
    """This machine will be taken away in ``in_s`` seconds."""

    in_s: float
    reason: str


@dataclass(frozen=True)
class RiskWarning:
    """This machine may be taken away soon, says its cloud."""

    reason: str


class OwnDeparture:
    """Of several deadlines the earliest counts, and of several advices the first."""

    def __init__(self) -> None:
        self._until_s: float | None = None
        self._reason = self._advice = ""
        self._signals = 0

    @property
    def is_near(self) -> bool:
        """Whether this machine will be taken away."""
        return self._until_s is not None

    def note(self, warning: SpotWarning, now_s: float) -> bool:
        """Note a deadline; returns whether it is the earliest so far."""
        until_s = now_s + warning.in_s
        if self._until_s is not None and until_s >= self._until_s:
            return False
        self._until_s, self._reason = until_s, warning.reason
        return True

    def note_advice(self, warning: RiskWarning) -> bool:
        """Note a risk; returns whether it is news."""
        is_news = not self._advice
        self._advice = self._advice or warning.reason
        return is_news

    def note_signal(self) -> bool:
        """Note a SIGTERM or SIGINT; returns whether it is the second one. A cloud's own notice is not the first."""
        self._signals += 1
        return self._signals > 1

    def is_over(self, now_s: float) -> bool:
        """Whether the deadline has passed."""
        return self._until_s is not None and now_s >= self._until_s

    def to_say(self, now_s: float) -> list[SpotNoticeSeen | AdviceSeen]:
        """What the manager should know; again, if it has started anew."""
        said: list[SpotNoticeSeen | AdviceSeen] = []
        if self._advice:
            said.append(AdviceSeen(reason=self._advice[:MAX_REASON]))
        if self._until_s is not None:
            said.append(SpotNoticeSeen(in_s=max(0.0, self._until_s - now_s), reason=self._reason[:MAX_REASON]))
        return said
