"""Measure an event's cost to the manager's state machine, by the size of the fleet: it must not grow with it.

    python benchmarks/machine_cost.py [--workers 100 1000 10000] [--stages 8]

Each machine has one worker. All of them join, train, and beat once a second; then all but one are silent while steps go
on; then one dies, the others answer what they hold, and the next generation is assigned. Printed: microseconds of
processor time per event (of a tick, the median), and seconds of a whole morph in the machine, from the death to the
last assignment, with all messages written as JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable

from varuna.core.devices import size_of
from varuna.core.messages import Beat, FromWorker, Hello, StopReport, Vote, Voted, to_worker
from varuna.core.model import JobFacts, ModelFacts, SectionFacts
from varuna.core.plan import Pipeline, Plan
from varuna.core.vote import VoteLayout
from varuna.fleet.machine.advance import advance
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.inputs import (
    AnswerReceived,
    Event,
    Heard,
    MessageReceived,
    Tick,
    WorkerExited,
    WorkerSpawned,
)
from varuna.fleet.state.outputs import Ask, Instruction, Send
from varuna.fleet.state.phases import Running
from varuna.fleet.state.questions import Answer, FoundCheckpoint, Planned, WhichPlan

SECTIONS = 32


def job_facts() -> JobFacts:
    section = SectionFacts(
        label="block",
        forward_s=1e-3,
        parameter_bytes=2**20,
        trainable_bytes=2**20,
        optimizer_bytes=2**21,
        activation_bytes=2**20,
        boundary_bytes=2**16,
    )
    return JobFacts(
        model=ModelFacts(digest="d", sections=(section,) * SECTIONS), global_batch=2**14, seed=0, steps=10**6
    )


def plan_for(job: JobFacts, workers: int, *, stages: int) -> Plan:
    return Plan(
        micro_batch=1,
        global_batch=job.global_batch,
        pipelines=(
            Pipeline(
                replicas=workers // stages,
                bounds=(*tuple(stage * SECTIONS // stages for stage in range(stages)), SECTIONS),
                stash_limits=(2,) * stages,
            ),
        ),
        step_s=1.0,
    )


class World:
    """A fleet in virtual time."""

    def __init__(self, workers: int, stages: int) -> None:
        self.names = [f"n{number}-vm.0" for number in range(workers)]
        self.job = job_facts()
        config = FleetConfig(workers=workers, elastic=True, gather_s=10**6)
        self.now_s = 0.0
        self.fleet = Fleet.empty(config, 0.0)
        self.stages = stages

    def feed(self, event: Event) -> list[Instruction]:
        self.fleet, instructions = advance(self.fleet, event, self.now_s)
        for ask in [each for each in instructions if isinstance(each, Ask)]:
            answer: Answer = FoundCheckpoint(None)
            if isinstance(ask.question, WhichPlan):
                answer = Planned(plan_for(ask.job, size_of(ask.question.workers), stages=self.stages), running_s=1.0)
            instructions += self.feed(AnswerReceived(ask.question, ask.number, answer))
        return instructions

    def timed(self, events: Iterable[Event]) -> tuple[float, list[Instruction]]:
        """Microseconds of processor time per event, and all instructions."""
        events, said = list(events), list[Instruction]()
        began_s = time.process_time()
        for event in events:
            said += self.feed(event)
        return 1e6 * (time.process_time() - began_s) / max(1, len(events)), said

    def live(self) -> list[str]:
        return [name for name in self.names if name in self.fleet.workers]

    def said(self, message: Callable[[str], FromWorker]) -> list[Event]:
        return [MessageReceived(name, message(name)) for name in self.live()]

    def beats(self, step: int) -> list[Event]:
        """A second passes: every worker says which step it does."""
        self.now_s += 1.0
        generation = self.fleet.generation
        return self.said(
            lambda name: Beat(generation=generation, step=step, activity="runs a step", forward_s=1e-3, backward_s=2e-3)
        )

    def vote(self, step: int) -> Event:
        plan = self.fleet.record.plan
        layout = VoteLayout(sections=plan.sections, micro_batches=plan.micro_batches)
        vector = (1.0,) * layout.size
        vote = Vote(generation=self.fleet.generation, step=step, vector=vector, wall_s=1.0)
        return MessageReceived(self.fleet.members[0], Voted(vote=vote))

    def held(self, step: int) -> list[Event]:
        record = self.fleet.record
        sections = {
            name: tuple(record.plan.first.sections_of(record.plan.place_of(rank).stage))
            for rank, name in enumerate(record.grid)
        }
        return self.said(
            lambda name: StopReport(
                generation=record.generation,
                next_step=step if name in sections else None,
                sections=sections.get(name, ()),
            )
        )


def measure(workers: int, stages: int) -> dict[str, float]:
    world = World(workers, stages)
    found: dict[str, float] = {"workers": workers}
    found["spawned_us"], _ = world.timed(WorkerSpawned(name, name[:-2]) for name in world.names)
    hello = [MessageReceived(name, Hello(worker=name, pid=1, version="1", job=world.job)) for name in world.names]
    found["hello_us"], _ = world.timed(hello)
    world.timed(world.beats(0))
    began_s = time.process_time()
    world.timed([Tick()])
    world.now_s += 2.0
    world.timed([Tick()])
    found["form_s"] = time.process_time() - began_s
    assert isinstance(world.fleet.phase, Running), world.fleet.phase
    found["voted_us"], _ = world.timed([world.vote(0)])
    beats, ticks, heard = [], [], []
    for step in range(3):
        world.feed(world.vote(step + 1))
        beats.append(world.timed(world.beats(step + 1))[0])
        heard.append(world.timed(Heard((name[:-2],)) for name in world.live())[0])
        for _ in range(5):
            ticks.append(world.timed([Tick()])[0])
            world.now_s += 0.2
    found |= {"beat_us": min(beats), "node_heard_us": min(heard), "tick_us": min(ticks)}
    silent = []
    for step in range(5, 15):
        world.feed(world.vote(step))
        for _ in range(5):
            silent.append(world.timed([Tick()])[0])
            world.now_s += 0.2
    found["silent_tick_us"] = statistics.median(silent)
    world.timed(world.beats(15))
    began_s = time.process_time()
    said = world.feed(WorkerExited(world.names[-1], -9))
    cost_us, more = world.timed(world.held(15))
    found["held_us"] = cost_us
    said += more + world.feed(Tick())
    assert world.fleet.generation == 1, world.fleet.phase
    found["morph_machine_s"] = time.process_time() - began_s
    texts = [to_worker.dump_json(each.message) for each in said if isinstance(each, Send)]
    found["morph_s"] = time.process_time() - began_s
    found["messages"], found["messages_mib"] = len(texts), sum(map(len, texts)) / 2**20
    return {name: round(value, 3) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, nargs="+", default=[100, 1000, 10000])
    parser.add_argument("--stages", type=int, default=8)
    args = parser.parse_args()
    for workers in args.workers:
        print(json.dumps(measure(workers, args.stages)), flush=True)


if __name__ == "__main__":
    main()
