"""Schedule of the demo's kills and of a worker's return. Pure: committed steps in, acts out."""

from enum import Enum


class Act(Enum):
    """Something to do to the run."""

    KILL_LAST = "kill the worker of the last rank"
    KILL_FIRST = "kill the worker of rank 0, which reports the steps"
    RETURN = "start a worker"


ACTS = (Act.KILL_LAST, Act.KILL_FIRST, Act.RETURN)


class Disturbance:
    """Plays the acts in order, each once its step is committed and the morph before it is over."""

    def __init__(self, steps: int) -> None:
        # A worker needs some seconds to warm up, so it is called back early enough to join before the end.
        self._due = (steps // 7, 2 * steps // 7, 2 * steps // 7 + 1)
        self._played = 0

    def after(self, step: int, morphs_done: int) -> Act | None:
        """The act that follows the commit of ``step``, if any; ``morphs_done`` morphs are complete by then."""
        if self._played == len(ACTS) or step < self._due[self._played] or morphs_done < self._played:
            return None
        self._played += 1
        return ACTS[self._played - 1]
