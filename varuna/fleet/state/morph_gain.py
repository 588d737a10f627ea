"""Whether a switch to a faster plan pays: what it saves until the next change, against what it costs. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from varuna.core.model import JobFacts
from varuna.core.plan import Plan

# Recorded spot clusters change every 4 to 22 minutes; the shortest is assumed until the run knows better.
_PRIOR_GAP_S = 250.0
_PRIOR_HANDSHAKE_S = 1.0
_STALLS_KEPT = 5
LINK_BYTES_PER_S = 1.1e9
"""Of a link that nobody has measured: 10 Gb/s Ethernet, less framing."""
# Of all changes: losses are as frequent as gains.
_LOSSES = 0.5


@dataclass(frozen=True, slots=True)
class FirstStep:
    """The first step after a planned morph: its update may have waited for optimizer state from other ranks."""

    took_s: float
    """From the end of the generation before it to its vote."""
    share: float
    """Of a whole step, which it ran."""

    def stall_s(self, step_s: float) -> float:
        """Return the seconds for which the morph stalled training, if a whole step takes ``step_s``."""
        return max(0.0, self.took_s - self.share * step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class MorphHistory:
    """A run's experience of change: how often it comes, and how long a planned morph stalls training."""

    began_s: float
    changes: int = 0
    changed_s: float = float("-inf")
    stalls_s: tuple[float, ...] = ()

    def changed(self, now_s: float, burst_s: float) -> "MorphHistory":
        """Count a worker that came or went; those within ``burst_s`` count as one change."""
        count = self.changes + (now_s > self.changed_s + burst_s)
        return replace(self, changes=count, changed_s=now_s)

    def stalled(self, stall_s: float) -> "MorphHistory":
        """Note how long a planned morph stalled training."""
        return replace(self, stalls_s=(*self.stalls_s, stall_s)[-_STALLS_KEPT:])

    def corrected(self, stall_s: float) -> "MorphHistory":
        """Replace the newest stall."""
        return replace(self, stalls_s=(*self.stalls_s[:-1], stall_s))

    def gap_s(self, now_s: float) -> float:
        """Expected time to the next change: the mean gap so far, the prior counting as one more."""
        return (_PRIOR_GAP_S + now_s - self.began_s) / (1 + self.changes)

    def stall_s(self, job: JobFacts, plan: Plan) -> float:
        """Expected stall of a planned morph: the mean of the last ones; before the first, a stage's state on a link."""
        if self.stalls_s:
            return sum(self.stalls_s) / len(self.stalls_s)
        return _PRIOR_HANDSHAKE_S + state_s(job, plan, None)


def state_s(job: JobFacts, plan: Plan, link_bytes_per_s: float | None) -> float:
    """Seconds that a stage's state takes on a link, of which nothing may be known."""
    return _stage_s(
        plan, [each.parameter_bytes + each.optimizer_bytes for each in job.model.sections], link_bytes_per_s
    )


def sums_s(job: JobFacts, plan: Plan, link_bytes_per_s: float | None) -> float:
    """The same of a stage's sums of gradients."""
    return _stage_s(plan, [each.summed_bytes for each in job.model.sections], link_bytes_per_s)


def _stage_s(plan: Plan, section_bytes: Sequence[int], link_bytes_per_s: float | None) -> float:
    stages = (sum(section_bytes[each] for each in slot.sections) for slot in plan.slots)
    return max(stages) / (link_bytes_per_s or LINK_BYTES_PER_S)


@dataclass(frozen=True, slots=True)
class MorphEstimate:
    """Gain and cost of a switch, in seconds of training."""

    saved_s: float
    stall_s: float
    faster: float
    """Share of the step time that goes away."""
    spared_s: float = 0.0
    """Seconds that the loss of a section's only holder would cost, times its likelihood."""

    @property
    def pays(self) -> bool:
        """Whether the switch gains more than it costs."""
        return self.saved_s + self.spared_s > self.stall_s

    def is_worth(self, least: float) -> bool:
        """Return whether it pays, and for more than a share ``least`` of the step time, or for safety."""
        return self.pays and (self.faster > least or self.spared_s > 0)

    def __str__(self) -> str:
        if self.faster <= 0 and not self.spared_s:
            return "a plan with more workers would not be faster"
        relation, safety = "more" if self.pays else "not more", "a second holder of each section"
        morph = f"the {self.stall_s:.1f} s that a morph takes"
        percent = round(100 * self.faster)
        if percent < 0:
            lost = f"the {-self.saved_s:.1f} s that steps {-percent} % slower cost before the next change is expected"
            return f"{safety} is worth {self.spared_s:.1f} s, {relation} than {morph} and {lost}"
        if percent == 0 and self.spared_s:
            return f"{safety} is worth {self.spared_s:.1f} s, {relation} than {morph}; steps take as long as now"
        faster = f"{percent} % faster" if percent else "less than 1 % faster"
        saved = f"steps {faster} save {self.saved_s:.1f} s before the next change is expected"
        also = f", and {safety} {self.spared_s:.1f} s" if self.spared_s else ""
        return f"{saved}{also}, {relation} than {morph}"


def estimate_morph(old: Plan, new: Plan, *, computing_s: float, stall_s: float, exposed_s: float) -> MorphEstimate:
    """Weigh a switch from ``old`` to ``new``; another prediction of the same work is no gain.

    Args:
        old: what runs.
        new: what could.
        computing_s: time that ``old`` would spend in steps before the next change.
        stall_s: what the switch costs.
        exposed_s: work that the loss of a section's only holder would undo.
    """
    faster = 1 - new.step_s / old.step_s if old.step_s > 0 and not new.same_work(old) else 0.0
    gains_safety = old.replicas == 1 < new.replicas
    return MorphEstimate(computing_s * faster, stall_s, faster, _LOSSES * exposed_s if gains_safety else 0.0)
