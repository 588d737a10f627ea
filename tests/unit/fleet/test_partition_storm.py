"""Any cables are cut, for any time and in any order: what the manager decides, against what machines truly hold.

Every machine has a cable to the manager and one to each other machine. What is said over a cable that is out waits, as
it does in an agent's channel; a step is done only if all cables between its machines are in.
"""

import random
from collections.abc import Iterable
from itertools import combinations

import pytest

from tests.depth import by_depth
from tests.unit.fleet.simulated_fleet import SECTIONS, STEPS, SimulatedFleet, SimulatedWorker, one_stage
from tests.unit.fleet.support import Driver, make_job, sends, two_stages
from varuna.core.messages import Beat, Hold
from varuna.fleet.machine import advance
from varuna.fleet.machine.exits import expire
from varuna.fleet.machine.transition import Transition
from varuna.fleet.manager.reconcile import node_of
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.inputs import Heard, MessageReceived, NodeParted, Tick
from varuna.fleet.state.outputs import Instruction, Kill
from varuna.fleet.state.phases import Ended, Running
from varuna.fleet.state.run_events import WorkerLost
from varuna.fleet.state.worker import WorkerStatus

TICK_S = 0.2
STALLED_S = 15.0  # after so long a manager drops a connection
RESET_S = 0.6  # after so long it takes an agent for parted whose connection was reset
WARM_S = 3.0


class Wired(SimulatedFleet):
    """Machines with two workers each, that start another worker when one is killed."""

    def __init__(self, machines: int, *, stages: int, checkpoints: bool, choose: random.Random) -> None:
        self.choose = choose
        self.nodes = [f"n{number}" for number in range(machines)]
        self.away: dict[str, float] = {}  # by machine: since when its cable to the manager is out
        self.cut: set[frozenset[str]] = set()  # pairs of machines
        self.parted: set[str] = set()
        self.doomed: set[str] = set()  # to be killed as soon as their machine hears of it
        self.due: list[tuple[float, str]] = []  # when a new worker is warm
        self.progress_s: dict[str, float] = {}
        self.suffered: set[str] = set()  # machines whose cables to others have been out
        config = FleetConfig(workers=2 * machines, elastic=True, replace=False, wait_s=float("inf"))
        job = make_job(sections=SECTIONS, steps=STEPS * 10)
        driver = Driver(config, plan={1: one_stage, 2: two_stages}[stages], job=job)
        super().__init__(driver, checkpoints=checkpoints)
        for node in self.nodes:
            for _ in range(2):
                self.start(node)
        self.step_s = choose.choice([0.2, 1.0, 9.0])
        self.parts_s = choose.choice([RESET_S, STALLED_S])
        self.voted_s = 0.0
        while len(self.recorded) < 2:  # the run knows how long its ranks wait for each other
            self.pass_time()

    def start(self, node: str) -> None:
        super().start(node)
        self.hello(list(self.workers.values())[-1])

    # -- cables

    def unplug(self, nodes: Iterable[str]) -> None:
        """From the manager."""
        for node in nodes:
            self.away.setdefault(node, self.driver.now_s)

    def plug(self, nodes: Iterable[str]) -> None:
        for node in nodes:
            cut_s = self.driver.now_s - self.away.pop(node, self.driver.now_s)
            self.parted.discard(node)
            if cut_s > 8 and self.choose.random() < 0.5:
                self.feed(NodeParted(node))  # the end of the old connection arrives before the new one

    def part(self, pairs: Iterable[frozenset[str]]) -> None:
        """From each other."""
        self.cut |= set(pairs)
        self.suffered |= {node for pair in self.cut for node in pair}

    def heal(self) -> None:
        self.cut.clear()
        self.plug(list(self.away))

    def is_cut(self, one: str, others: Iterable[str]) -> bool:
        return any(frozenset({node_of(one), node_of(other)}) in self.cut for other in others)

    # -- what needs a cable

    def carry_out(self, instruction: Instruction) -> None:
        if isinstance(instruction, Kill):
            self.doomed.add(instruction.worker)
        else:
            super().carry_out(instruction)

    def vote(self) -> None:
        grid = self.driver.fleet.record.grid if self.driver.fleet.history else ()
        now_s = self.driver.now_s
        if now_s >= self.voted_s + self.step_s and not any(self.is_cut(name, grid) for name in grid):
            before = dict(self.votes)
            super().vote()
            if self.votes != before:
                self.voted_s = now_s
                self.progress_s.update(dict.fromkeys(grid, now_s))

    def waits_s(self, worker: SimulatedWorker) -> float:
        """The last rank computes for as long as a step takes, and all others wait for it."""
        now_s, grid = self.driver.now_s, self.driver.fleet.record.grid if self.driver.fleet.history else ()
        computes = (worker.name,) == grid[-1:] and now_s < self.voted_s + self.step_s
        return 0.0 if worker.stopped or computes else now_s - self.progress_s.get(worker.name, now_s)

    def learn(self, worker: SimulatedWorker) -> None:
        if worker.assignment is not None and not self.is_cut(worker.name, self.members(worker.assignment)):
            super().learn(worker)

    def fetch(self, worker: SimulatedWorker) -> None:
        if worker.assignment is not None and not self.is_cut(worker.name, self.members(worker.assignment)):
            super().fetch(worker)

    def pass_time(self) -> None:
        """A fifth of a second: everybody does what its cables allow."""
        self.driver.now_s += TICK_S
        now_s = self.driver.now_s
        names = list(self.workers)
        self.choose.shuffle(names)
        for worker in (self.workers[name] for name in names):
            node, generation = node_of(worker.name), worker.generation
            if node not in self.away:
                if worker.name in self.doomed and worker.alive:
                    worker.alive = False
                    worker.outbox.clear()
                    self.due.append((now_s + WARM_S, node))
                while worker.outbox:
                    self.deliver(worker)
                while worker.alive and worker.inbox:
                    self.obey(worker)
            for _ in range(4):
                self.fetch(worker)
            self.learn(worker)
            if worker.generation != generation:
                self.progress_s[worker.name] = now_s
        self.vote()
        for due_s, node in list(self.due):
            if now_s >= due_s and node not in self.away:
                self.due.remove((due_s, node))
                self.start(node)
        self.beat()

    def beat(self) -> None:
        now_s = self.driver.now_s
        for node in self.nodes:
            if node in self.away:
                if now_s - self.away[node] > self.parts_s and node not in self.parted:
                    self.parted.add(node)
                    self.feed(NodeParted(node))
                continue
            for worker in list(self.workers.values()):
                if node_of(worker.name) == node and worker.alive and worker.name in self.driver.fleet.workers:
                    step = worker.next_step or 0
                    beat = Beat(generation=worker.generation, step=step, activity="", waits_s=self.waits_s(worker))
                    self.feed(MessageReceived(worker.name, beat))
            self.feed(Heard((node,)))
        self.feed(Tick())

    # -- what must hold

    def lost(self) -> set[str]:
        return {event.worker for event in self.driver.told(WorkerLost)}

    def check_progress(self, bound_s: float = 60.0) -> None:
        """All cables are in: within a bound new steps are recorded, and every machine takes part again."""
        goal = self.driver.now_s + bound_s
        before = len(self.recorded)
        while self.driver.now_s < goal:
            self.pass_time()
        fleet = self.driver.fleet
        assert isinstance(fleet.phase, Running), (fleet.phase, self.driver.end)
        assert self.recorded[-1] + 1 >= min(before, 5), "steps are recorded"
        assert fleet.recorded.step >= 0
        newest = max(w.next_step or 0 for w in self.workers.values() if w.alive)
        assert newest - fleet.recorded.step <= 2
        assert not any(worker.standing is WorkerStatus.UNREACHABLE for worker in fleet.workers.values())
        assert {worker.node for worker in fleet.workers.values()} == set(self.nodes)
        alive = {name for name, worker in self.workers.items() if worker.alive}
        assert alive == set(fleet.workers), "who lives belongs to the run, and who does not, does not"


def world_of(seed: int) -> tuple[Wired, random.Random]:
    choose = random.Random(seed)
    machines = choose.randint(2, 4)
    world = Wired(machines, stages=choose.choice([1, 2]), checkpoints=choose.random() < 0.5, choose=choose)
    if seed % 2:  # plans and checkpoints are found while time passes
        late = random.Random(seed)
        world.driver.answers = lambda: late.random() < 0.3
    return world, choose


@pytest.mark.parametrize("seed", range(by_depth(3, 30)))
def test_cables_to_the_manager_cost_nobody_anything(seed: int) -> None:
    world, choose = world_of(seed)
    for _ in range(choose.randint(1, 6)):
        world.unplug(choose.sample(world.nodes, choose.randint(1, len(world.nodes))))
        if choose.random() < 0.3:
            world.unplug(world.nodes)
        for _ in range(int(choose.choice([1, 3, 7, 15, 40]) / TICK_S)):
            world.pass_time()
            if choose.random() < 0.02:
                world.plug(choose.sample(world.nodes, 1))
        if choose.random() < 0.7:
            world.heal()
        for _ in range(choose.randint(0, 30)):
            world.pass_time()
    trained = max(worker.next_step or 0 for worker in world.workers.values())
    world.heal()
    world.check_progress(30)
    assert not world.lost()
    assert world.generations == [0]
    assert not sends(world.driver.done, Hold)
    assert world.recorded == list(range(len(world.recorded)))
    assert len(world.recorded) > trained


@pytest.mark.parametrize("seed", range(by_depth(3, 40)))
def test_whatever_cables_are_out_only_who_held_the_others_up_is_given_up_and_no_step_comes_twice(seed: int) -> None:
    world, choose = world_of(1000 + seed)
    pairs = [frozenset(pair) for pair in combinations(world.nodes, 2)]
    for _ in range(choose.randint(1, 5)):
        match choose.randrange(4):
            case 0:  # machines without any cable
                gone = choose.sample(world.nodes, choose.randint(1, len(world.nodes) - 1))
                world.unplug(gone)
                world.part(pair for pair in pairs if pair & set(gone))
            case 1:  # two sides, the manager on one
                far = set(choose.sample(world.nodes, choose.randint(1, len(world.nodes) - 1)))
                world.unplug(far)
                world.part(pair for pair in pairs if len(pair & far) == 1)
            case 2:  # single cables between machines
                world.part(choose.sample(pairs, choose.randint(1, len(pairs))))
            case _:
                world.unplug(choose.sample(world.nodes, choose.randint(1, len(world.nodes))))
        for _ in range(int(choose.choice([1, 4, 8, 20, 60]) / TICK_S)):
            world.pass_time()
            if choose.random() < 0.01:
                world.plug(choose.sample(world.nodes, 1))
        if choose.random() < 0.6:
            world.heal()
        for _ in range(choose.randint(0, 60)):
            world.pass_time()
        assert not isinstance(world.driver.fleet.phase, Ended), world.driver.end
    world.heal()
    world.check_progress()
    assert {node_of(name) for name in world.lost()} <= world.suffered


def test_cables_between_machines_alone_cost_nobody_but_time() -> None:
    world, choose = world_of(2000)
    world.part([frozenset(choose.sample(world.nodes, 2))])
    for _ in range(300):
        world.pass_time()
    world.heal()
    world.check_progress(30)
    assert not world.lost()
    assert world.generations == [0]


@pytest.mark.parametrize("seed", [3001, pytest.param(3002, marks=pytest.mark.nightly)])
def test_the_rules_end_after_passes_that_workers_and_phases_bound(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    under_way, workers = list[Transition](), 0

    def count(transition: Transition) -> None:
        nonlocal workers
        if under_way != [transition]:  # another event
            under_way[:], workers = [transition], len(transition.fleet.workers)
            passes.append(0)
        passes[-1] += 1
        assert passes[-1] <= 1 + 2 * (workers * len(WorkerStatus) + 5)
        expire(transition)  # the first rule

    monkeypatch.setattr(advance, "expire", count)
    world, choose = world_of(seed)
    for _ in range(4):
        world.unplug(choose.sample(world.nodes, choose.randint(1, len(world.nodes))))
        for _ in range(60):
            world.pass_time()
        world.heal()
        for _ in range(10):
            world.pass_time()
    assert max(passes) > 1, "rules follow from rules"
    assert max(passes) < 8, "though not many"
