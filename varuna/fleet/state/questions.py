"""Questions that the shell answers for the state machine, which never waits for an answer.

A question goes out as ``Ask``, an instruction. Whoever executes it works the answer out where nobody waits for it, and
posts it as ``AnswerReceived``, an event. The rule that asked is tried again then, and finds the answer. It counts only
while its question is open: when a generation begins, or something makes old answers doubtful, open questions are
forgotten, and what still matters is asked again under a new number.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from varuna.core.devices import WorkerGroups
from varuna.core.plan import Plan
from varuna.core.sums import StoredSums


class Checkpoint(NamedTuple):
    """A committed checkpoint: its folder, the steps that it contains, and the m that it was written with."""

    folder: str
    step: int
    micro_batch: int
    sums: StoredSums | None = None
    """saved sums of the step after it"""


@dataclass(frozen=True, slots=True)
class WhichPlan:
    """The best plan for these workers."""

    workers: WorkerGroups
    micro_batch: int | None
    losses_per_hour: float = 0.0
    """That the plan is for."""


@dataclass(frozen=True, slots=True)
class WhichCheckpoint:
    """The newest committed checkpoint, now that generation ``after`` is over."""

    after: int
    saved_step: int
    """Steps in the newest checkpoint that is known; with another number, the answer is another one."""


Question = WhichPlan | WhichCheckpoint


@dataclass(frozen=True, slots=True)
class Planned:
    """The best plan, as an answer."""

    plan: Plan
    running_s: float
    """Seconds of a step of the plan that runs, by what was known when this one was made; 0 if none runs."""


@dataclass(frozen=True, slots=True)
class Unplannable:
    """No plan fits, as an answer."""

    complaint: str
    running_s: float


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """The newest checkpoint; None before the first."""

    checkpoint: Checkpoint | None


@dataclass(frozen=True, slots=True)
class Unusable:
    """The question cannot be answered, now or later: the run ends."""

    text: str
    exit_code: int


Answer = Planned | Unplannable | FoundCheckpoint | Unusable


@dataclass(frozen=True, slots=True)
class OpenQuestion:
    """An open question."""

    number: int
    at_s: float


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Questions of the present generation, and the answers that it was given."""

    number: int = 0
    """Asked so far, by all generations."""
    open: Mapping[Question, OpenQuestion] = field(default_factory=dict)
    answers: Mapping[Question, Answer] = field(default_factory=dict)

    def with_question(self, question: Question, now_s: float) -> "Questions":
        """These, with one more that is open."""
        number = self.number + 1
        return replace(self, number=number, open={**self.open, question: OpenQuestion(number, now_s)})

    def with_answer(self, question: Question, answer: Answer) -> "Questions":
        """These, with an answer to an open one."""
        still_open = {other: known for other, known in self.open.items() if other != question}
        return replace(self, open=still_open, answers={**self.answers, question: answer})

    def anew(self) -> "Questions":
        """None: answers may not hold any more."""
        return Questions(number=self.number)


class UnansweredError(Exception):
    """A rule needs an answer that is not there yet: it changes nothing, and is tried again once it is."""
