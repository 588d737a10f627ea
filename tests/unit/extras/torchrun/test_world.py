"""Torchrun agents that make up the world."""

from varuna.extras.torchrun.report import NodeState, TorchrunAnswer, TorchrunReport
from varuna.extras.torchrun.world import TorchrunWorld, answer, heard, passed, stopped


class Nodes:
    """Nodes that report as real ones do, on a clock that the test moves."""

    def __init__(self, least: int = 1, most: int = 2, world: TorchrunWorld | None = None) -> None:
        self.least, self.most, self.now_s = least, most, 100.0
        self.world = world or TorchrunWorld()
        self.reports: dict[str, TorchrunReport] = {}

    def say(self, node: str, state: NodeState = "joins", leaves: str = "") -> TorchrunAnswer:
        report = self.reports.get(node) or TorchrunReport(
            version="1", run_id="r", least=self.least, most=self.most, state=state
        )
        report = report.model_copy(update={"state": state, "leaves": leaves})
        self.world = heard(self.world, node, report, self.now_s)
        told = answer(self.world, node)
        if told.members:  # it begins to work
            report = report.model_copy(update={"state": "works", "world": told.world, "members": told.members})
        self.reports[node] = report
        return told

    def repeat(self, seconds: float, *silent: str) -> None:
        """All that are there go on as they do."""
        for _ in range(int(seconds)):
            self.now_s += 1.0
            for node, report in list(self.reports.items()):
                if node not in silent and report.state in ("joins", "works"):
                    self.say(node, report.state)
            self.world = passed(self.world, self.now_s)

    def begin(self, *names: str) -> None:
        for name in names:
            self.say(name)
        self.repeat(5)
        assert all(self.reports[name].state == "works" for name in names)


def test_a_world_forms_with_the_most_at_once_and_with_the_least_after_a_moment() -> None:
    nodes = Nodes(least=1, most=2)
    assert nodes.say("a").says == "more nodes, for a moment"
    assert nodes.say("b").members == ("a", "b")
    assert nodes.say("a").members == ("a", "b")
    alone = Nodes(least=1, most=2)
    alone.say("a")
    alone.repeat(2)
    assert alone.world.number == -1
    alone.repeat(2)
    assert alone.world.members == ("a",)


def test_a_node_that_falls_silent_is_lost_and_the_others_are_told_to_stop_then_to_wait_for_the_least() -> None:
    nodes = Nodes(least=2, most=3)
    nodes.begin("a", "b")
    nodes.repeat(5, "b")
    assert nodes.say("a", "works").waiting == 0
    nodes.repeat(2, "b")
    assert nodes.world.broken == "b was not heard for 6 s"
    assert nodes.say("a", "works").waiting > 0
    assert nodes.say("a", "joins").says == "2 nodes, the least of --nnodes; 1 there: a"
    nodes.say("c")
    nodes.repeat(4, "b")
    assert (nodes.world.number, nodes.world.members) == (1, ("a", "c"))
    assert nodes.say("b", "works").waiting > 0  # it was only away: its world is gone


def test_who_comes_later_is_admitted_if_there_is_room_and_else_takes_the_place_of_a_lost_one() -> None:
    nodes = Nodes(least=1, most=2)
    nodes.begin("a")
    nodes.say("b")
    nodes.repeat(2)
    assert nodes.say("a", "works").waiting == 0  # others may follow
    nodes.repeat(2)
    assert nodes.say("a", "works").waiting == 1
    nodes.say("a", "joins")
    nodes.repeat(1)
    assert nodes.world.members == ("a", "b")
    assert nodes.say("c").is_spare
    nodes.repeat(30)
    assert nodes.world.number == 1
    nodes.say("b", "failed")
    assert nodes.world.broken == "b has left: its workers have failed"
    nodes.say("a", "joins")
    nodes.repeat(4)
    assert nodes.world.members == ("a", "c")


def test_nodes_that_restart_their_workers_wait_for_all_others_of_their_world() -> None:
    nodes = Nodes()
    nodes.begin("a", "b")
    told = nodes.say("a", "joins")
    assert told.says == "b to stop the workers of world 0"
    assert nodes.say("b", "works").waiting == 1
    assert nodes.say("b", "joins").world == 1


def test_a_machine_that_will_be_taken_away_is_in_no_further_world() -> None:
    nodes = Nodes()
    nodes.begin("a", "b")
    assert nodes.say("b", "works", leaves="spot notice: terminate").waiting == 1
    assert (
        nodes.say("b", "joins", leaves="spot notice: terminate").over == "this machine leaves: spot notice: terminate"
    )
    nodes.say("b", "departed")
    nodes.say("a", "joins")
    nodes.repeat(4)
    assert nodes.world.members == ("a",)


def test_a_manager_that_knows_nothing_takes_over_the_world_that_is_at_work() -> None:
    nodes = Nodes(most=3)
    nodes.begin("a", "b")
    number = nodes.world.number
    nodes.world = TorchrunWorld(opens_s=nodes.now_s + 6.0)
    assert nodes.say("c").says == "more nodes, for a moment"  # c comes first, and nobody else has been heard
    assert nodes.say("a", "works").waiting == 0
    assert (nodes.world.number, nodes.world.members, nodes.world.broken) == (number, ("a", "b"), "")
    lost = Nodes(world=TorchrunWorld())
    lost.reports = {"a": nodes.reports["a"]}
    lost.repeat(8)
    assert lost.world.broken == "b was not heard for 6 s"  # it died while there was no manager


def test_the_run_is_over_when_nodes_have_finished_and_none_of_their_world_is_left() -> None:
    nodes = Nodes()
    nodes.begin("a", "b")
    assert nodes.say("c").is_spare
    nodes.say("b", "finished")
    assert nodes.say("a", "works").waiting == 0
    assert nodes.say("c").over == "node b has finished: no other world is formed"
    nodes.repeat(8, "a", "b")  # a dies at the end
    assert (nodes.world.over, nodes.world.exit_code) == (
        "torchrun: 1 of 2 nodes have finished, 1 were lost at the end",
        0,
    )
    nodes = Nodes()
    nodes.begin("a", "b")
    nodes.say("a", "failed")
    nodes.say("b", "failed")
    assert (nodes.world.exit_code, "the workers of all 2 nodes have failed" in nodes.world.over) == (1, True)
    waiting = Nodes(least=2)
    waiting.say("a")
    waiting.repeat(8, "a")
    assert waiting.world.over == ""
    assert answer(stopped(Nodes().world, "stopped", 0), "a") == TorchrunAnswer()


def test_a_stop_reaches_all_nodes() -> None:
    nodes = Nodes()
    nodes.begin("a", "b")
    nodes.world = stopped(nodes.world, "requested with `varuna stop`", 0)
    assert nodes.say("a", "works").waiting == 1
    assert nodes.say("a", "joins").over == "requested with `varuna stop`"
