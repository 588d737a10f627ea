"""World of torchrun agents: it stands until a node of it is lost, leaves, or another arrives.

A pure state machine: report of a node, time -> world. The manager can hear again all that it knows: nodes repeat the
number and the members of their world in each report, so a manager that starts anew takes over the world at work.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from varuna.extras.torchrun.report import TorchrunAnswer, TorchrunReport

LEASE_S = 6.0
"""Seconds of silence after which a node is lost."""
LAST_CALL_S = 3.0
"""After the newest arrival: others may follow, and each change costs all nodes a restart of their workers."""


@dataclass(frozen=True)
class TorchrunNode:
    """A node as of its newest report; times in seconds."""

    report: TorchrunReport
    heard_s: float
    since_s: float
    """since when it is in this state"""

    @property
    def joins(self) -> bool:
        """Whether it can be in the next world."""
        return self.report.state == "joins" and not self.report.leaves


@dataclass(frozen=True)
class TorchrunWorld:
    """The newest world, and all nodes that are there."""

    number: int = -1
    members: tuple[str, ...] = ()
    """by rank"""
    store: str = ""
    broken: str = "no world has been formed yet"
    """The reason why its nodes have to form the next one; empty while it stands."""
    nodes: Mapping[str, TorchrunNode] = field(default_factory=dict)
    finished: tuple[str, ...] = ()
    """members whose workers have ended well"""
    failed: tuple[str, ...] = ()
    over: str = ""
    exit_code: int = 0
    opens_s: float = 0.0
    """No world is formed before: a manager that starts again has to hear from those that work."""


def heard(world: TorchrunWorld, node: str, report: TorchrunReport, now_s: float) -> TorchrunWorld:
    """Return the world after a report."""
    before = world.nodes.get(node)
    same = before is not None and before.report.state == report.state and before.report.world == report.world
    since_s = before.since_s if before is not None and same else now_s
    world = _adopted(world, report, now_s)
    if report.state in ("joins", "works"):
        world = replace(world, nodes={**world.nodes, node: TorchrunNode(report, now_s, since_s)})
    else:
        world = _left(world, node, report)
    if node in world.members:
        world = _checked(world, node, report)
    return passed(world, now_s)


def passed(world: TorchrunWorld, now_s: float) -> TorchrunWorld:
    """Return the world after time has passed."""
    # in this order: a loss or an arrival breaks the world, and only then can the next one form
    return _formed(_arrivals(_without_lost(world, now_s), now_s), now_s)


def stopped(world: TorchrunWorld, reason: str, exit_code: int) -> TorchrunWorld:
    """Return the world after the run was ended from elsewhere."""
    return replace(world, over=world.over or reason, exit_code=exit_code)


def answer(world: TorchrunWorld, node: str) -> TorchrunAnswer:
    """Return the answer for a node."""
    there = world.nodes.get(node)
    if there is None:
        return TorchrunAnswer()
    if world.over:
        return TorchrunAnswer(waiting=1, over=world.over, exit_code=world.exit_code)
    report, is_member = there.report, node in world.members
    if report.state == "works":
        stands = is_member and report.world == world.number and not world.broken
        return TorchrunAnswer(waiting=0 if stands else max(1, sum(each.joins for each in world.nodes.values())))
    if report.leaves:
        return TorchrunAnswer(over=f"this machine leaves: {report.leaves}")
    if world.finished:
        return TorchrunAnswer(over=f"node {world.finished[0]} has finished: no other world is formed")
    if is_member and report.world < world.number and not world.broken:
        return TorchrunAnswer(world=world.number, members=world.members, store=world.store)
    if not world.broken and len(world.members) >= _bounds(world)[1]:
        return TorchrunAnswer(is_spare=True, says=f"a place: {len(world.members)} nodes, the most, are at work")
    return TorchrunAnswer(says=_lacking(world))


# -- steps of ``heard`` -------------------------------------------------------------------------------------


def _adopted(world: TorchrunWorld, report: TorchrunReport, now_s: float) -> TorchrunWorld:
    """Adopt a world that a manager before this one has formed."""
    if report.world <= world.number or not report.members:
        return world
    nodes = dict(world.nodes)
    for name in report.members:  # each has a lease to be heard
        absent = report.model_copy(update={"state": "works", "store": "", "leaves": ""})
        nodes.setdefault(name, TorchrunNode(absent, now_s, now_s))
    return replace(world, number=report.world, members=report.members, store="", broken="", nodes=nodes)


def _left(world: TorchrunWorld, node: str, report: TorchrunReport) -> TorchrunWorld:
    """Let a node leave for good."""
    nodes = {name: each for name, each in world.nodes.items() if name != node}
    world = replace(world, nodes=nodes)
    if node not in world.members:
        return world
    if report.state == "finished":
        world = replace(world, finished=(*world.finished, node))
    elif not world.finished:
        what = "its workers have failed" if report.state == "failed" else report.leaves or "its torchrun was stopped"
        world = replace(world, broken=world.broken or f"{node} has left: {what}")
    if report.state == "failed":
        world = replace(world, failed=(*world.failed, node))
    return _ended(world)


def _ended(world: TorchrunWorld) -> TorchrunWorld:
    """End the run once the newest world is empty, and a node of it has finished or all have failed."""
    if world.over or not world.members or any(name in world.nodes for name in world.members):
        return world
    if world.finished:
        lost = len(world.members) - len(world.finished)
        text = (
            f"{len(world.finished)} of {len(world.members)} nodes have finished"
            + f", {lost} were lost at the end" * bool(lost)
        )
        return replace(world, over=f"torchrun: {text}", exit_code=1 if world.failed else 0)
    if set(world.failed) >= set(world.members):
        text = f"torchrun: the workers of all {len(world.members)} nodes have failed. Look at their output."
        return replace(world, over=text, exit_code=1)
    return world


def _checked(world: TorchrunWorld, node: str, report: TorchrunReport) -> TorchrunWorld:
    """Update the world by a member's report."""
    if report.world == world.number and node == world.members[0] and report.store:
        world = replace(world, store=report.store)
    if world.broken or world.finished:
        return world
    if report.state == "joins" and report.world == world.number:
        return replace(world, broken=f"workers of {node} have ended")
    if report.leaves:
        return replace(world, broken=f"{node} will leave: {report.leaves}")
    return world


def _without_lost(world: TorchrunWorld, now_s: float) -> TorchrunWorld:
    """Drop the nodes that are silent."""
    lost = [name for name, node in world.nodes.items() if now_s > node.heard_s + LEASE_S]
    if not lost:
        return world
    world = replace(world, nodes={name: node for name, node in world.nodes.items() if name not in lost})
    gone = [name for name in lost if name in world.members]
    if gone and not world.broken and not world.finished:
        world = replace(world, broken=f"{', '.join(gone)} was not heard for {LEASE_S:.0f} s")
    return _ended(world)


def _arrivals(world: TorchrunWorld, now_s: float) -> TorchrunWorld:
    """Give up a world that has room for those that have arrived, once no more of them come."""
    if world.broken or world.finished or len(world.members) >= _bounds(world)[1]:
        return world
    newcomers = {name: node for name, node in world.nodes.items() if node.joins and name not in world.members}
    if not newcomers or now_s < max(node.since_s for node in newcomers.values()) + LAST_CALL_S:
        return world
    return replace(world, broken=f"{', '.join(newcomers)} arrived")


def _formed(world: TorchrunWorld, now_s: float) -> TorchrunWorld:
    """Form the next world, if there are enough nodes, and all that are at work have stopped."""
    if not world.broken or world.over or world.finished or now_s < world.opens_s or _at_work(world):
        return world
    joining = {name: node for name, node in world.nodes.items() if node.joins}
    least, most = _bounds(world)
    if len(joining) < least or (
        len(joining) < most and now_s < max(node.since_s for node in joining.values()) + LAST_CALL_S
    ):
        return world
    ranks = {name: rank for rank, name in enumerate(world.members)}
    order = sorted(joining, key=lambda name: (ranks.get(name, len(ranks)), joining[name].since_s, name))
    return replace(
        world, number=world.number + 1, members=tuple(order[:most]), store="", broken="", failed=(), finished=()
    )


def _at_work(world: TorchrunWorld) -> list[str]:
    return [name for name, node in world.nodes.items() if node.report.state == "works"]


def _bounds(world: TorchrunWorld) -> tuple[int, int]:
    """Return the least and most nodes: the strictest of what the nodes say."""
    reports = [node.report for node in world.nodes.values()]
    least = max((report.least for report in reports), default=1)
    return least, max(least, min((report.most for report in reports), default=1))


def _lacking(world: TorchrunWorld) -> str:
    """Say what the next world waits for."""
    if stopping := _at_work(world):
        return f"{', '.join(stopping)} to stop the workers of world {world.number}"
    least, _ = _bounds(world)
    joining = [name for name, node in world.nodes.items() if node.joins]
    if len(joining) < least:
        return f"{least} nodes, the least of --nnodes; {len(joining)} there: {', '.join(joining)}"
    return "more nodes, for a moment"
