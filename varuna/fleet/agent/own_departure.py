"""An agent's knowledge of its own machine: its place, when and why it will be taken away, or that it may be. Pure."""

from varuna.core.node_notices import NodeNotice, Preemptible, PreemptionNotice, RebalanceAdvice, ZoneNotice


class OwnDeparture:
    """Of each kind of notice the first counts, and of several deadlines the earliest."""

    def __init__(self) -> None:
        self._known: dict[type[NodeNotice], NodeNotice] = {}
        self._until_s = float("inf")
        self._signals = 0

    @property
    def is_near(self) -> bool:
        """Whether this machine will be taken away."""
        return PreemptionNotice in self._known

    def note_notice(self, notice: NodeNotice, now_s: float) -> str:
        """Note a notice; return it in words, or nothing if it says no more than what was known."""
        if isinstance(notice, PreemptionNotice):
            if now_s + notice.in_s >= self._until_s:
                return ""
            self._until_s = now_s + notice.in_s
        elif type(notice) in self._known:
            return ""
        self._known[type(notice)] = notice
        match notice:
            case PreemptionNotice(in_s=in_s, reason=reason):
                return f"this machine will leave in {in_s:.0f} s ({reason})"
            case RebalanceAdvice(reason=reason):
                return f"this machine may be taken away soon ({reason})"
            case Preemptible():
                return "this machine may be taken away at any time: its cloud rents it as such"
            case ZoneNotice(zone=zone):
                return f"this machine is in {zone}"

    def note_signal(self) -> bool:
        """Note a SIGTERM or SIGINT; returns whether it is the second one. A cloud's own notice is not the first."""
        self._signals += 1
        return self._signals > 1

    def is_over(self, now_s: float) -> bool:
        """Whether the deadline has passed."""
        return now_s >= self._until_s

    def to_say(self, now_s: float) -> list[NodeNotice]:
        """Return the notices that the manager should have; all of them again, if it has started anew."""
        left_s = max(0.0, self._until_s - now_s)
        return [
            notice.model_copy(update={"in_s": left_s}) if isinstance(notice, PreemptionNotice) else notice
            for notice in self._known.values()
        ]
