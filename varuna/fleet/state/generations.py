"""Generations of the present training: which there were, and how the newest one ended."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from varuna.fleet.state.causes import EndCause
from varuna.fleet.state.morph_gain import FirstStep
from varuna.fleet.state.run_events import GenerationRecord
from varuna.fleet.state.worker import changed


@dataclass(frozen=True, kw_only=True)
class Generations:
    """Generations, and what the next one follows from."""

    began: int = 0
    """The first generation of the present training."""
    history: tuple[GenerationRecord, ...] = ()
    micro_batch: int | None = None
    """m of the run, once chosen."""
    planned_for: Mapping[str, int] = field(default_factory=dict)
    """Workers that the newest plan could have used, by class of device."""
    departed: frozenset[str] = frozenset()
    """Workers that said Leaving to the newest one."""
    causes: tuple[EndCause, ...] = ()
    """The reasons why the newest generation ended."""
    broke_s: float = 0.0
    """Time at which the generation before the newest broke."""
    planned: bool = False
    """Whether it was a planned morph that ended it."""
    first_step: FirstStep | None = None
    """After such a morph, until the next step says how long one takes."""
    replan: bool = False
    """The next generation asks the planner, whatever ran before."""
    failed: int = 0
    """Generations in a row that broke before a step without anybody's death."""
    failing_since_s: float | None = None
    """Time at which the first of them did, those before newcomers were dropped included; on the clock for silence."""

    def with_next(self, record: GenerationRecord, *, broke_s: float, planned: bool) -> "Generations":
        """These, and one more that begins."""
        return changed(
            self,
            history=(*self.history, record),
            departed=frozenset(),
            causes=(),
            broke_s=broke_s,
            planned=planned,
            replan=False,
        )

    def with_record(self, record: GenerationRecord) -> "Generations":
        """These, with more that is known of the newest one."""
        return changed(self, history=(*self.history[:-1], record))

    def with_cause(self, *causes: EndCause) -> "Generations":
        """These, with another reason why the newest one ends, or has ended."""
        return changed(self, causes=(*self.causes, *causes))

    def stopping(self, now_s: float, *, planned: bool) -> "Generations":
        """These, the newest of which is over."""
        return changed(self, broke_s=now_s, planned=planned)

    def replanning(self) -> "Generations":
        """These, before one that must not go on with the plan that ran."""
        return changed(self, replan=True)

    def with_progress(self) -> "Generations":
        """These, after a step, or a death that says why there was none."""
        return changed(self, failed=0, failing_since_s=None)
