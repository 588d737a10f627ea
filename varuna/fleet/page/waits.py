"""Reasons of the waits in a generation's steps, from those that were looked at. Pure."""

from varuna.fleet.state.run_events import WaitsSplit


class Waits:
    """Sums over the steps of the newest generation of which ranks have told."""

    def __init__(self) -> None:
        self._newest: WaitsSplit | None = None
        self._looks = 0
        self._transfer_s: list[float] = []
        self._idle_s: list[float] = []
        self._uncertain_s = 0.0

    def take(self, split: WaitsSplit) -> None:
        """One more step was looked at; of an older generation nothing counts any more."""
        if self._newest is None or split.generation > self._newest.generation:
            self._looks, self._uncertain_s = 0, 0.0
            self._transfer_s, self._idle_s = [0.0] * len(split.transfer_s), [0.0] * len(split.idle_s)
        elif split.generation < self._newest.generation:
            return
        self._newest, self._looks = split, self._looks + 1
        self._uncertain_s = max(self._uncertain_s, split.uncertain_s)
        for stage, (transfer_s, idle_s) in enumerate(zip(split.transfer_s, split.idle_s, strict=True)):
            self._transfer_s[stage] += transfer_s
            self._idle_s[stage] += idle_s

    def describe(self) -> dict[str, object] | None:
        """As plain values: of each stage's waits, the share in which the message was on its way; None before a look."""
        if self._newest is None:
            return None
        pairs = zip(self._transfer_s, self._idle_s, strict=True)
        return {
            "generation": self._newest.generation,
            "step": self._newest.step,
            "looks": self._looks,
            "uncertain_s": self._uncertain_s,
            "transfer_share": [round(transfer_s / (transfer_s + idle_s or 1.0), 4) for transfer_s, idle_s in pairs],
        }
