"""The phases of a run, as its manager sees it.

The life of a generation::

    Idle ──assign──> Running ──loss, suspicion, regroup──> Stopping ──verdict──> Idle
                        └──────everybody left──────> Finishing ──> Ended <── failure, from anywhere
                                                         └──the script's next training──> Idle
"""

from dataclasses import dataclass

from varuna.core.messages import Flag
from varuna.fleet.state.causes import Blocked, EndCause, Rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """No generation; what every joined worker holds is known."""

    since_s: float
    in_flight: int = 0
    """Steps that were begun and lost when the last generation ended: 0 or 1."""
    rejected: Rejected | None = None
    blocked: Blocked | None = None
    """The reason why it lasts, once people know."""
    waits: bool = False
    """People know that state is out of sight and waited for."""
    gathers_until_s: float = float("-inf")
    """Until then the first generation certainly waits for workers that are warming up."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A worker says that a link broke."""

    at_s: float
    worker: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A generation forms or trains."""

    began_s: float = 0.0
    """On the clock for silence."""
    suspicion: Suspicion | None = None
    flags: frozenset[Flag] = frozenset()
    """Flags that rank 0 was asked to raise in the next vote."""
    regroup: EndCause | None = None
    """The reason why there will be a planned morph after the next vote, if so."""
    considered: frozenset[str] = frozenset()
    """Newcomers that are not worth a morph."""
    considered_s: float = 0.0
    stopped: str | None = None
    """The first member that stopped by itself."""
    longest_wait_s: float = 0.0
    """For which a rank waited for its peers, and then went on."""
    still_step: int = -1
    """Newest step when it was told that training stands still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """A generation is over; its members answer what they hold."""

    planned: bool
    deadline_s: float
    """On the clock for silence."""
    hold_at_s: float | None = None
    """Time to say Hold to those that should stop by themselves; None once it was said."""
    applying: frozenset[str] = frozenset()
    """Laggards that were told the verdict and have not answered."""
    committed: bool = False
    """The verdict was COMMIT."""
    suspicion: Suspicion | None = None
    """The suspicion that was reported before it was over."""
    waits: bool = False
    """People know that state is out of sight and waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finishing:
    """All steps are done; the scripts run to their ends."""

    deadline_s: float | None = None
    """Set once rank 0's process is gone."""
    orphaned_s: float | None = None
    """Since when nobody is left who has ended the training, while the script has not come to its end."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The run is over."""

    exit_code: int
    text: str


Phase = Idle | Running | Stopping | Finishing | Ended
