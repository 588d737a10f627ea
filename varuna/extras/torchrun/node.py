"""A torchrun agent's part in a run: it joins as machines do, reports once a second, and learns which world it is in."""

import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from varuna.core.errors import FleetError
from varuna.core.version import __version__
from varuna.extras.torchrun.report import MAX_REASON, NodeState, TorchrunAnswer, TorchrunReport
from varuna.fleet.agent.agent_folder import AgentFolder
from varuna.fleet.agent.join import admit
from varuna.fleet.agent.moved_manager import MovedManager
from varuna.fleet.net.client import ManagerRemote, UnreachableError, reason
from varuna.fleet.net.join_string import JoinString

_REPORT_S = 1.0
_ASK_S = 0.2  # while it waits for a world
_SAID_AFTER_S = 5.0
_GOODBYE_S = 10.0
_ANSWER_S = 5.0


class WaitedTooLong(Exception):
    """A bound has passed."""


class WorldOver(Exception):
    """The end of worlds for this node; ``code`` is 0 if that is as it should be."""

    def __init__(self, why: str, code: int) -> None:
        super().__init__(why)
        self.code = code


@dataclass(frozen=True)
class Placed:
    """A world that this node is in."""

    world: int
    rank: int
    size: int
    store: str
    """host:port; empty on rank 0, which opens it and offers it"""


class TorchrunAgent:
    """A torchrun agent's side of the rendezvous.

    Threads may read ``waiting``; everything else is for the one thread of torchrun's agent.

    Args:
        invited: gives the JOIN string.
        join_file: where that comes from, if it comes from a file: a manager that moves says so there.
        run_id: of torchrun.
        least: nodes of a world.
        most: nodes of a world.
        patience_s: bound on each wait.
        tell: shows a line.
    """

    def __init__(
        self,
        invited: Callable[[], JoinString],
        join_file: Path | None,
        *,
        run_id: str,
        least: int,
        most: int,
        patience_s: float,
        tell: Callable[[str], None],
    ) -> None:
        self._invited, self._join_file, self._patience_s, self._tell = invited, join_file, patience_s, tell
        self._report = TorchrunReport(version=__version__, run_id=run_id, least=least, most=most, state="joins")
        self._lock, self._asking, self._gone = threading.Lock(), threading.Lock(), threading.Event()
        self._remote: ManagerRemote | None = None
        self._moved = MovedManager(None, "")
        self.node = ""
        """Name that the manager gives this node."""
        self.waiting = 0
        """More than 0: this node's workers have to stop for another world."""
        self._refused = ""

    @property
    def place(self) -> str:
        """Address of the manager, for messages."""
        return f"{self._remote.host}:{self._remote.port}" if self._remote is not None else self._invited().address

    # -- what torchrun asks ----------------------------------------------------------------------------------

    def join(self) -> Placed:
        """Wait for a world that this node is in; its workers do not run.

        Raises:
            WaitedTooLong: what is needed has not come in time.
            WorldOver: there is no further world.
            FleetError: the manager refuses this node.
        """
        begin_s = asked_s = time.monotonic()
        if self._remote is None:
            self._enter(begin_s + self._patience_s)
        self._update(state="joins", store="")
        told = ""
        while True:
            answer = self._ask()
            if self._refused:
                raise FleetError(self._refused)
            if answer is None:
                waits = f"an answer of the manager at {self.place}"
            elif answer.over:
                raise WorldOver(answer.over, answer.exit_code)
            elif self.node in answer.members:
                rank = answer.members.index(self.node)
                if rank == 0 or answer.store:
                    self.waiting = 0
                    self._update(state="works", world=answer.world, members=answer.members)
                    return Placed(answer.world, rank, len(answer.members), answer.store)
                waits = f"{answer.members[0]} to open the store of world {answer.world}"
            else:
                waits = answer.says
                asked_s = time.monotonic() if answer.is_spare else asked_s
            now_s = time.monotonic()
            if now_s > asked_s + self._patience_s:
                raise WaitedTooLong(
                    f"torchrun node {self.node} has waited {self._patience_s:.0f} s for {waits}. Start what is "
                    "missing, then this torchrun again; --rdzv-conf join_timeout=SECONDS waits longer."
                )
            if waits != told and now_s > begin_s + _SAID_AFTER_S:
                self._tell(f"torchrun node {self.node} waits for {waits}")
                told = waits
            time.sleep(_ASK_S)

    def offer_store(self, store: str) -> None:
        """Tell the manager of the store that rank 0 has opened; others hear of it by this report or the next one."""
        self._update(store=store)
        self._ask()

    def leave_soon(self, why: str) -> None:
        """Note that this machine will be taken away; any thread may call it."""
        self._update(leaves=why[:MAX_REASON])

    def leave(self, state: NodeState) -> None:
        """Say that this node is gone, once; wait at most 10 s for the manager to hear it."""
        if self._gone.is_set() or self._remote is None:
            return
        self._gone.set()
        self._update(state=state)
        deadline_s = time.monotonic() + _GOODBYE_S
        while self._ask() is None and not self._refused:
            if time.monotonic() > deadline_s:
                self._tell(f"the manager at {self.place} did not hear that torchrun node {self.node} has {state}")
                return
            time.sleep(_ASK_S)

    # -- the manager -----------------------------------------------------------------------------------------

    def _enter(self, deadline_s: float) -> None:
        """Become a machine of the run.

        Raises:
            WaitedTooLong: no manager answers.
            FleetError: the manager refuses it.
        """
        folder = Path(tempfile.mkdtemp(prefix="varuna-torchrun-"))
        complained = False
        try:
            while True:
                try:
                    invitation = self._invited()
                    card = admit(invitation, AgentFolder(folder))
                    break
                except UnreachableError as error:
                    if time.monotonic() > deadline_s:
                        raise WaitedTooLong(f"{error} Waited {self._patience_s:.0f} s for the manager.") from error
                    if not complained:
                        self._tell(f"{error} Trying again for {self._patience_s:.0f} s.")
                    complained = True
                    time.sleep(_REPORT_S)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self.node = card.identity.node
        self._moved = MovedManager(self._join_file, card.fingerprint)
        self._remote = ManagerRemote(
            invitation.host, invitation.port, card.certificate_pem, card.identity.secret, _ANSWER_S
        )
        threading.Thread(target=self._stay, name="varuna-torchrun", daemon=True).start()

    def _stay(self) -> None:
        """Report while workers run: torchrun's own thread asks for nothing then."""
        is_away = False
        while not self._gone.wait(_REPORT_S):
            if self._report.state != "works":
                continue
            asked, answer = self._report.world, self._ask()
            if answer is not None and (self._report.state, self._report.world) == ("works", asked):
                self.waiting = answer.waiting
            elif self._refused:
                self.waiting = 1
            if (answer is None) != is_away:
                is_away = not is_away
                what = "lost the manager; workers continue" if is_away else "reached the manager again"
                self._tell(f"torchrun node {self.node} {what} ({self.place})")

    def _update(self, **news: object) -> None:
        with self._lock:
            self._report = self._report.model_copy(update=news)

    def _ask(self) -> TorchrunAnswer | None:
        """Report, and return what to do; None if no manager answers now. Reports arrive in their order."""
        with self._asking:
            return self._exchange()

    def _exchange(self) -> TorchrunAnswer | None:
        remote = self._remote
        assert remote is not None
        try:
            reply = remote.post(f"/torchrun?node={self.node}", self._report.model_dump(mode="json"))
            if reply.status == 200:
                return TorchrunAnswer.model_validate_json(reply.body)
            if reply.status < 500:
                self._refused = f"the manager at {self.place} refused torchrun node {self.node}: {reason(reply.body)}"
        except ValidationError as error:
            self._refused = f"the manager at {self.place} sent an answer that this version does not understand: {error}"
        except FleetError:  # it is away, or another program is where it was
            if (moved := self._moved.newest()) is not None:
                self._remote = replace(remote, host=moved.host, port=moved.port)
        return None
