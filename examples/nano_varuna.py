"""Varuna in one file: elastic pipeline training that survives SIGKILL, with torch and the standard library only.

    python examples/nano_varuna.py                                    2 stages x 2 replicas; one worker is killed
    python examples/nano_varuna.py --plan 4x1 --fault 2@0:vote        rank 2 is killed in the vote of the first step
    python examples/nano_varuna.py --plan 1x3 --fault 1@3:B --freeze  rank 1 is stopped in step 3 (SIGSTOP)

This file is the specification, and it runs. Read it from the top: words, manager, worker, links; then sections,
schedules, plans, and a demonstration. Docstrings end with what they are about in the paper (*Varuna: Scalable, Low-cost
Training of Massive Deep Learning Models*, EuroSys 2022), and in the product: [Auto-partitioning | partition.cut.cuts].

**The idea.** An unmodified model becomes a flat graph, which is cut into *sections*, once for a run. All state belongs
to a section: parameters, optimizer state, sums of gradients. A *plan* groups sections into P *stages*, and runs D
*replicas* of this pipeline. The *global batch*, which the user fixes, flows through as *micro-batches*. If a worker is
lost, the others *morph*: they form the next *generation*, under another plan. No number depends on P, and with D only
the order of a sum changes, so the losses go on as if nothing had happened.

**The schedule**: the paper's order for 4 stages and 5 micro-batches. A column is the time of one F; R (*recompute*)
takes as long, and B twice. On the last stage B follows F, and needs no R. If a gradient is late, an F runs meanwhile.

    stage 0  F0 F1 F2 F3 F4 R0 .. .. .. .. B0 -- R1 B1 -- R2 B2 -- R3 .. .. .. B3 -- R4 B4 --
    stage 1  .. F0 F1 F2 F3 F4 R0 .. B0 -- R1 B1 -- R2 B2 -- R3 .. .. .. B3 -- R4 B4 -- .. ..
    stage 2  .. .. F0 F1 F2 R0 B0 -- R1 B1 -- R2 B2 -- F3 F4 R3 .. B3 -- R4 B4 -- .. .. .. ..
    stage 3  .. .. .. F0 B0 -- F1 B1 -- F2 B2 -- .. .. .. F3 B3 -- F4 B4 -- .. .. .. .. .. ..

**The commit.** A step ends with a *vote*: each rank tells all others its losses, and which micro-batches its sums
contain. Only a rank that has all votes may apply the step. So after a loss, either some survivor has them, and the
others get them from it (COMMIT), or none has, and the step runs again (RETRY). Both ways all are at one step again.

**The morph**: rank 1 of plan 2x2 is killed, and three workers continue as 3x1. State moves only where it is missing,
from a rank that has it. With D = 1, each rank keeps a copy of the sections of the rank before it.

    generation 1, plan 2x2                 generation 2, plan 3x1
    w0  rank 0  stage 0  sections 0 1 2    w0  rank 0  stage 0  sections 0 1, keeps 4 5    4 and 5 come from w3
    w1  rank 1  stage 1  sections 3 4 5    lost
    w2  rank 2  stage 0  sections 0 1 2    w2  rank 1  stage 1  sections 2 3, keeps 0 1    3 comes from w3
    w3  rank 3  stage 1  sections 3 4 5    w3  rank 2  stage 2  sections 4 5, keeps 2 3    2 comes from w0

**Left out**, and in the product: checkpoints on disk (here, a section that no rank has ends the run), a manager that
dies, workers that join, machines that do not trust each other, GPUs, half precision, buffers that steps change, a short
last micro-batch, clipping, schedulers, and what survivors have already added up of a broken step.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import heapq
import json
import math
import multiprocessing as mp
import operator
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import accumulate, chain, combinations, pairwise
from multiprocessing.connection import Connection, wait
from pydoc_data.topics import topics
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.split_module import split_module

START_S = 120.0  # until all workers have captured the model
WAIT_S = 60.0  # the longest wait within a generation; the manager notices a loss long before
LEASE_S = 6.0  # how long a silent worker counts as alive
BEAT_S = 0.5  # between two heartbeats of a worker

T = TypeVar("T")
Say = Callable[[str], object]  # told what happens
Batch = dict[str, Tensor]  # by name: inputs of the model, values that cross a cut, or state

# -- 1. Words --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A training as its user describes it: independent of P and D. [Correctness-preserving morphing | job.spec]"""

    build: Callable[[], nn.Module]  # the model: given a sample's tensors by name, it returns a mean cross-entropy
    dataset: Callable[[], Any]  # has a length, and samples by number: tensors by name
    optimizer: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
    global_batch: int  # M, examples of a step: the same in every plan
    micro_batch: int  # m, examples that flow through the pipeline together
    steps: int
    sections: int = 6  # the most that the model is cut into
    seed: int = 0

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step, over all replicas."""
        return self.global_batch // self.micro_batch


@dataclass(frozen=True)
class Plan:
    """D pipelines of P stages. [Problem setting and constraints | core.plan]"""

    replicas: int
    starts: tuple[int, ...]  # first section of each stage
    sections: int
    micro_batches: int  # of a step, over all replicas

    def __str__(self) -> str:
        return f"{self.stages}x{self.replicas}"

    @property
    def stages(self) -> int:
        """P."""
        return len(self.starts)

    @property
    def workers(self) -> int:
        """P * D. Rank r is stage r % P of replica r // P, so the stages of a pipeline are neighbours."""
        return self.stages * self.replicas

    def sections_of(self, stage: int) -> range:
        """Sections that a stage runs."""
        return range(self.starts[stage], (*self.starts, self.sections)[stage + 1])

    def rank_of(self, replica: int, section: int) -> int:
        """Rank that runs a section in a replica."""
        return replica * self.stages + sum(start <= section for start in self.starts) - 1

    def kept_by(self, stage: int) -> range:
        """Sections that a rank keeps a copy of: with D = 1, those of the stage before its own."""
        alone = self.replicas == 1 and self.stages > 1
        return self.sections_of((stage - 1) % self.stages) if alone else range(0)

    def held_by(self, rank: int) -> set[int]:
        """Sections whose state a rank has: that it runs, or keeps. A spare, beyond P * D, has none."""
        stage = rank % self.stages
        return {*self.sections_of(stage), *self.kept_by(stage)} if rank < self.workers else set()

    def micro_batches_of(self, replica: int) -> range:
        """Micro-batches that a replica runs: all as many, or the first ones one more."""
        base, extra = divmod(self.micro_batches, self.replicas)
        first = replica * base + min(replica, extra)
        return range(first, first + base + (replica < extra))


@dataclass(frozen=True)
class Generation:
    """One life of the links between workers, under one plan. [engine.worker.generation]"""

    number: int
    plan: Plan
    members: dict[str, tuple[str, int]]  # workers by rank, spares last, and where their links end
    moves: tuple[tuple[int, int, int], ...]  # a section, whose state goes from a rank to a rank


class Vote(NamedTuple):
    """The report of a rank, or of all together, at the end of a step. [core.vote]"""

    losses: list[list[float]]  # micro-batch, its mean loss, its weight: the number of its targets
    added: list[list[float]]  # section, and a micro-batch whose gradients are in that section's sums

    @property
    def weight(self) -> float:
        """Targets of the global batch."""
        return math.fsum(weight for _, _, weight in self.losses)

    @property
    def loss(self) -> float:
        """Mean loss of the global batch. ``math.fsum`` rounds once, so that the order does not matter."""
        return math.fsum(loss * weight for _, loss, weight in self.losses) / self.weight


class Report(NamedTuple):
    """The state of a worker between two generations. [core.messages]"""

    address: tuple[str, int]  # of its links
    applied: int  # steps that its state contains
    vote: Vote | None  # of all ranks, on the last of them
    sections: tuple[int, ...]  # whose state it has


@dataclass(frozen=True)
class Fault:
    """A signal that a rank sends itself at some place. [testing.faults]"""

    rank: int
    step: int
    place: str  # one of PLACES
    signal: int = signal.SIGKILL
    generation: int = 1


PLACES = ("move", "F", "R", "B", "reduce", "keep", "vote", "apply", "applied")


class NanoError(Exception):
    """The run cannot go on: what was needed, what was found, what to do. [core.errors]"""


class Interrupted(Exception):
    """A generation is over: the manager says so, or a link broke. [engine.base.inbox]"""


# -- 2. The manager --------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """A whole run, to look at afterwards. [testing.ranks]"""

    losses: dict[int, float] = field(default_factory=dict)  # by step
    generations: list[tuple[str, int]] = field(default_factory=list)  # plan, and its first step
    lost: list[str] = field(default_factory=list)  # who, where, why
    verdicts: list[str] = field(default_factory=list)


def train(job: Job, plan: Plan, faults: Sequence[Fault] = (), room: float = math.inf, say: Say = print) -> Outcome:
    """Train; morph when a worker is lost. Each has ``room`` bytes for state. [Varuna Manager | fleet.manager.loop]"""
    model, outcome = capture(job), Outcome()
    fleet = Fleet(job, plan.workers, faults, outcome)
    try:
        reports = fleet.gather("hello", START_S)
        plan = plan if len(reports) == plan.workers else best_plan(model, job, len(reports), room)
        while True:
            generation = form(plan, len(outcome.generations) + 1, reports)
            outcome.generations.append((str(plan), max(report.applied for report in reports.values())))
            members, moves = " ".join(generation.members), len(generation.moves)
            say(f"step {outcome.generations[-1][1]}: plan {plan} on {members}; sections moved: {moves}")
            known = len(outcome.lost)
            if (why := fleet.run(generation)) is None:
                return outcome
            reports = fleet.settle()
            say("\n".join(outcome.lost[known:] or [why]) + f"\n{outcome.verdicts[-1]}")
            plan = best_plan(model, job, len(reports), room)
    finally:
        fleet.close()


class Fleet:
    """The workers, each a process. Orders: generation, go (all are ready), end, verdict, leave. Answers: hello (a
    report), ready, applied (step, loss), done, stopped (why), report, failed (why), beat (what it does): pickled, on
    pipes of manager and worker alone. [Varuna Manager | fleet.manager.loop, fleet.workers, fleet.machine.leases]
    """

    def __init__(self, job: Job, workers: int, faults: Sequence[Fault], outcome: Outcome) -> None:
        self._outcome, self._listened_s = outcome, time.monotonic()
        self._processes, self._pipes = dict[str, Any](), dict[str, Connection]()  # pipes: of those that are not lost
        self._heard_s, self._doing = dict[str, float](), dict[str, str]()
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.export", "torch._dynamo"])  # imported once for all workers
        for name in (f"w{number}" for number in range(workers)):
            self._pipes[name], theirs = context.Pipe()
            self._processes[name] = context.Process(target=work, args=(name, job, theirs, faults), daemon=True)
            self._processes[name].start()
            theirs.close()  # the worker's own is the only one then, and its end is noticed

    def run(self, generation: Generation) -> str | None:
        """Run a generation; returns None if all steps are done, or why it ended before."""
        try:
            self.tell("generation", generation)
            self.gather("ready", WAIT_S, list(generation.members), together=True)
            self.tell("go", generation.number)
            self.gather("done", WAIT_S, list(generation.members)[: generation.plan.workers], together=True)
        except Interrupted as why:
            self.tell("end", generation.number)
            return str(why)
        self.tell("leave")
        return None

    def settle(self) -> dict[str, Report]:
        """Decide on one verdict after a loss, which all survivors carry out; return what they have then."""
        applied, vote = decide(self.gather("report", WAIT_S))
        verdict = f"RETRY: step {applied} runs again" if vote is None else f"COMMIT: all apply step {applied - 1}"
        self._outcome.verdicts.append(verdict)
        if vote is not None:
            self._outcome.losses[applied - 1] = vote.loss
        self.tell("verdict", (applied, vote))
        return self.gather("report", WAIT_S)

    def tell(self, order: str, what: Any = None) -> None:
        for name, pipe in list(self._pipes.items()):
            try:
                pipe.send((order, what))
            except OSError:
                self._lose(name, "its process ended")

    def gather(self, kind: str, bound_s: float, names: Sequence[str] = (), *, together: bool = False) -> dict[str, Any]:
        """An answer from each worker that is not lost; ``together``: Interrupted, if one is. Steps renew the bound."""
        names, found, deadline_s = names or tuple(self._pipes), dict[str, Any](), time.monotonic() + bound_s
        while missing := [name for name in names if name in self._pipes and name not in found]:
            if time.monotonic() > deadline_s:
                doing = ", ".join(self._doing.get(name, f"{name}, starting") for name in missing)
                raise NanoError(f"no '{kind}' in {bound_s:g} s from: {doing}. Look what keeps these processes")
            for name, answer, what in self._hear():
                if answer == kind:
                    found[name] = what
                elif answer == "applied":
                    self._outcome.losses[what[0]], deadline_s = what[1], time.monotonic() + bound_s
                elif answer == "stopped" and together:
                    raise Interrupted(what)
            if together and not self._pipes.keys() >= {*names}:
                raise Interrupted("a worker is lost")
        return {name: found[name] for name in names if name in self._pipes}

    def _hear(self) -> Iterator[tuple[str, str, Any]]:
        """Yield answers that have come; a worker that is gone or silent is lost."""
        if time.monotonic() - self._listened_s > LEASE_S / 2:  # the manager itself was stopped: it blames no worker
            self._heard_s.clear()
        names = {pipe: name for name, pipe in self._pipes.items()}
        for name in [names[pipe] for pipe in wait(list(names), BEAT_S) if isinstance(pipe, Connection)]:
            try:
                answer, what = self._pipes[name].recv()
            except (EOFError, OSError):
                self._lose(name, "its process ended")
                continue
            self._heard_s[name] = time.monotonic()
            if answer == "failed":
                raise NanoError(what)
            self._doing[name] = what if answer == "beat" else self._doing.get(name, name)
            yield name, answer, what
        self._listened_s = time.monotonic()
        for name in list(self._pipes):
            if self._listened_s - self._heard_s.get(name, self._listened_s) > LEASE_S:
                self._lose(name, f"it was silent for {LEASE_S:g} s")

    def _lose(self, name: str, why: str) -> None:
        """Kill a lost worker first, so that it never comes back to send something; then forget it."""
        self._processes[name].kill()
        self._processes[name].join()
        self._pipes.pop(name).close()
        self._outcome.lost.append(f"{self._doing.get(name, name)}: lost, since {why}")

    def close(self) -> None:
        for process in self._processes.values():
            process.join(2.0 if sys.exc_info()[0] is None else 0.0)
            process.kill()
            process.join()


def decide(reports: Mapping[str, Report]) -> tuple[int, Vote | None]:
    """COMMIT: all apply the last step; or RETRY, None. [Correctness-preserving morphing | fleet.machine.commit]"""
    if not reports:
        raise NanoError("all workers are lost, and a run needs one. Start it again; the product has checkpoints")
    newest = max(reports.values(), key=lambda report: report.applied)
    all_have_it = all(report.applied == newest.applied for report in reports.values())
    return newest.applied, None if all_have_it else newest.vote


def form(plan: Plan, number: int, reports: Mapping[str, Report]) -> Generation:
    """Seat workers near their state; the rest moves. [Correctness-preserving morphing | fleet.machine.placement]"""
    holders = {k: [name for name in reports if k in reports[name].sections] for k in range(plan.sections)}
    if lost := [k for k, names in holders.items() if not names]:
        raise NanoError(f"nobody has sections {lost} any more. Start again; the product goes back to a checkpoint")
    free, members = list(reports), list[str]()
    for rank in range(plan.workers):
        own = {*plan.sections_of(rank % plan.stages)}
        members.append(max(free, key=lambda name: len(own.intersection(reports[name].sections))))
        free.remove(members[-1])
    members += free
    moves = [
        (k, members.index(holders[k][0]), rank)
        for rank, name in enumerate(members)
        for k in sorted(plan.held_by(rank).difference(reports[name].sections))
    ]
    return Generation(number, plan, {name: reports[name].address for name in members}, tuple(moves))


# -- 3. A worker -----------------------------------------------------------------------------------------------------


def work(name: str, job: Job, pipe: Connection, faults: Sequence[Fault]) -> None:
    """Be a worker, until the manager says leave, or is gone. [engine.worker.session]"""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the manager's
    torch.set_num_threads(1)  # operations add up in an order that depends on it
    worker = Worker(name, job, pipe, faults)
    try:
        worker.live()
    except Exception as error:  # noqa: BLE001 - whatever it is, the manager has to hear of it
        worker.tell("failed", f"{worker.doing}: {type(error).__name__}: {error}")


class Worker:
    """A process that computes, through all generations; ``doing`` says where it is. [engine.worker]"""

    def __init__(self, name: str, job: Job, pipe: Connection, faults: Sequence[Fault]) -> None:
        self.name, self.job, self.doing = name, job, f"{name}, capturing the model"
        self._pipe, self._speaking, self._faults = pipe, threading.Lock(), faults
        self._orders: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._links = Links()
        threading.Thread(target=self._beat, daemon=True).start()
        threading.Thread(target=self._listen, daemon=True).start()

    def live(self) -> None:
        """Do as the manager says; this wait ends when the manager does."""
        self._model, self._data = capture(self.job), self.job.dataset()
        self._held = {section.index: SectionState(self.job, self._model, section) for section in self._model.sections}
        self._applied, self._vote = 0, None  # type: int, Vote | None
        self.tell("hello", self._report())
        while (order := self._orders.get())[0] != "leave":
            match order:
                case "generation", generation:
                    self._run(generation)
                case "end", _:
                    self.tell("report", self._report())
                case "verdict", (applied, vote):
                    if self._applied < applied:
                        self._apply(vote)
                    self.tell("report", self._report())

    def _report(self) -> Report:
        return Report(self._links.address, self._applied, self._vote, tuple(sorted(self._held)))

    def tell(self, answer: str, what: Any = None) -> None:
        with self._speaking:
            self._pipe.send((answer, what))

    def _beat(self) -> None:
        while True:
            self.tell("beat", self.doing)
            time.sleep(BEAT_S)

    def _listen(self) -> None:
        """Hear the manager, also while this worker waits for others: "end" ends such waits."""
        while True:
            try:
                order, what = self._pipe.recv()
            except (EOFError, OSError):
                os._exit(1)  # a worker without a manager has nothing to do
            if order == "go":
                self._links.inbox_of(what).put(("go",), {})
            else:
                if order == "end":
                    self._links.inbox_of(what).interrupt("the manager has ended the generation")
                self._orders.put((order, what))

    def _run(self, generation: Generation) -> None:
        """Take a seat in a generation, and run its steps, to the end or to a loss. [engine.worker.generation]"""
        self._generation, self._plan = generation, generation.plan
        self._rank = list(generation.members).index(self.name)
        self._replica, self._stage = divmod(self._rank, self._plan.stages)
        self._is_last = self._stage == self._plan.stages - 1
        peers = range(self._stage, self._plan.workers, self._plan.stages)
        self._other_replicas = [rank for rank in peers if rank != self._rank]
        self._links.begin(generation, self._rank)
        try:
            self._move_state()
            self.tell("ready")
            self._take(("go",), "all ranks to have their state")  # until then no rank drops what others may need
            self._held = {k: state for k, state in self._held.items() if k in self._plan.held_by(self._rank)}
            if self._rank < self._plan.workers:
                for step in range(self._applied, self.job.steps):
                    self._run_step(step)
                self.tell("done")
        except Interrupted as why:
            self.tell("stopped", str(why))

    def _move_state(self) -> None:
        """Send and get sections' state. [Continuous Checkpointing | engine.worker.state_transfer]"""
        self._note(self._applied, "moving state")
        self._reach("move", self._applied)
        for k, source, target in self._generation.moves:
            if source == self._rank:
                self._links.send(target, ("state", k), self._held[k].tensors())
        for k, source, target in self._generation.moves:
            if target == self._rank:
                state = SectionState(self.job, self._model, self._model.sections[k])
                state.load(self._take(("state", k), f"section {k} from rank {source}"))
                self._held[k] = state

    def _note(self, step: int, action: str) -> None:
        seat = f"stage {self._stage}" if self._rank < self._plan.workers else "spare"
        self.doing = f"{self.name} (plan {self._plan}, rank {self._rank}, {seat}), step {step}, {action}"

    def _take(self, key: Key, awaited: str) -> Batch:
        return self._links.inbox.wait(lambda: self._links.inbox.pop(key), lambda: f"{self.doing}: waited for {awaited}")

    def _reach(self, place: str, step: int) -> None:
        """Strike, if this is where a fault is."""
        for fault in self._faults:
            here = self._generation.number, self._rank, step, place
            if here == (fault.generation, fault.rank, fault.step, fault.place):
                time.sleep(2 * BEAT_S)  # what was sent before has left, and the manager knows where this worker is
                os.kill(os.getpid(), fault.signal)

    def _run_step(self, step: int) -> None:
        """Actions, sums, tied gradients, copies, the vote, the update. [Design overview | engine.worker.step]"""
        for state in self._held.values():
            state.begin()
        self._losses: list[list[float]] = []
        self._run_actions(step)
        self._note(step, "reducing gradients")
        self._reduce(step)
        self._sum_tied(step)
        self._note(step, "copying sums to a neighbour")
        self._keep(step)
        self._note(step, "voting")
        vote = self._cast_vote(step)
        self._reach("apply", step)
        self._apply(vote)
        self._reach("applied", step)
        self.tell("applied", (step, vote.loss))

    def _run_actions(self, step: int) -> None:
        """Ask the policy whenever something arrives. [Tuning pipeline efficiency | engine.pipeline.runtime]"""
        mine, inbox = self._plan.micro_batches_of(self._replica), self._links.inbox
        self._stash: dict[int, tuple[Batch, Batch]] = {}  # what F was given: R needs it again
        self._tapes: list[Tape] = []  # of the one micro-batch that has its activations
        policy = Policy(self._stage, self._plan.stages, len(mine))

        def next_action() -> Action | None:
            activations = policy.forwards + inbox.count("activation", step) if self._stage else len(mine)
            gradients = len(mine) if self._is_last else policy.backwards + inbox.count("gradient", step)
            return policy.next(activations, gradients)

        while policy.backwards < len(mine):
            self._note(step, f"action {self._stage}F{policy.forwards} or {self._stage}B{policy.backwards}")
            action = inbox.wait(next_action, lambda: f"{self.doing}: waited for what a neighbour sends for it")
            self._note(step, f"action {self._stage}{action.kind}{action.micro_batch}")
            micro_batch = mine[action.micro_batch]
            if action.kind == "B":
                self._backward(step, micro_batch, is_final=micro_batch == mine[-1])
            else:
                self._forward(step, micro_batch, action.kind, keeps=policy.keeps(action))
            policy.done(action)

    def _forward(self, step: int, micro_batch: int, kind: str, *, keeps: bool) -> None:
        """F or R, from what F was given. F makes a graph, too, and drops it: some kernels differ by whether one is
        wanted, but F and R must not. [engine.stage.section, engine.graphs.gradient_kernels]
        """
        if kind == "F":
            arrived = self._take(("activation", step, micro_batch), "what is here") if self._stage else {}
            self._stash[micro_batch] = arrived, read(self.job, self._data, step, micro_batch)
        (values, batch), tapes = self._stash[micro_batch], list[Tape]()
        for k in self._plan.sections_of(self._stage):
            section = self._model.sections[k]
            seed = number_from(self.job.seed, step, micro_batch, k)  # R draws what F drew, in every plan
            tapes.append(run_section(section, self._held[k], values, batch, seed))
            values = {**values, **{name: value.detach().contiguous() for name, value in tapes[-1][2].items()}}
            values = {name: values[name] for name in section.passes_on}
            self._reach(kind, step)
        self._tapes = tapes if keeps else []
        if kind == "F" and self._is_last:
            self._losses.append([micro_batch, float(values["loss"]), float(values["weight"])])
        elif kind == "F":
            self._links.send(self._rank + 1, ("activation", step, micro_batch), values)

    def _backward(self, step: int, micro_batch: int, *, is_final: bool) -> None:
        """B, from the last section to the first; complete sums leave for the other replicas. [engine.stage.section]"""
        if self._is_last:
            gradients = {"loss": torch.tensor(self._losses[-1][2])}  # its weight: what is added up are sums, not means
        else:
            gradients = self._take(("gradient", step, micro_batch), "what is here")
        for tape in reversed(self._tapes):
            run_backward(tape, gradients)
            state = self._held[tape[0].index]
            state.added.append(micro_batch)
            self._reach("B", step)
            for rank in self._other_replicas if is_final else ():
                self._links.send(rank, ("sum", step, state.index, self._rank), {"flat": state.flat})
        self._tapes = []
        del self._stash[micro_batch]
        if self._stage:
            self._links.send(self._rank - 1, ("gradient", step, micro_batch), gradients)

    def _reduce(self, step: int) -> None:
        """Add up all replicas' sums, by rank. [Synchronization of shared state | engine.pipeline.reduce]"""
        self._reach("reduce", step)
        for k in reversed(self._plan.sections_of(self._stage)):
            parts = {self._rank: self._held[k].flat}
            for rank in self._other_replicas:
                parts[rank] = self._take(("sum", step, k, rank), f"the sums of section {k} from rank {rank}")["flat"]
            self._held[k].flat.copy_(reduce(torch.add, [parts[rank] for rank in sorted(parts)]))

    def _sum_tied(self, step: int) -> None:
        """Give all sections that use a tied parameter the sum of their gradients, added in the order of sections: one
        update of equal values. A plain loop adds them for each micro-batch: by this rounding, and no other, its losses
        differ from those with D = 1. [Synchronization of shared state | engine.pipeline.reduce]
        """
        for name, users in self._model.tied.items():
            home = {k: self._plan.rank_of(self._replica, k) for k in users}
            own = [k for k in users if home[k] == self._rank]
            parts = {k: self._held[k].gradients[name].clone() for k in own}
            for k in own:
                for rank in {*home.values()} - {self._rank}:
                    self._links.send(rank, ("tied", step, name, k), {"part": parts[k]})
            for k in (k for k in users if own and k not in own):
                parts[k] = self._take(("tied", step, name, k), f"{name} of section {k} from rank {home[k]}")["part"]
            for k in own:
                self._held[k].gradients[name].copy_(reduce(torch.add, [parts[user] for user in users]))

    def _keep(self, step: int) -> None:
        """Send the sums, if D = 1, to the rank that keeps a copy of these sections, and take those of its own copies,
        which the update changes, too. So copies are of the newest step, and no step is undone. The product sends state
        and sums, since another device may round otherwise. [engine.copies]
        """
        kept, plan = self._plan.kept_by(self._stage), self._plan
        for k in plan.sections_of(self._stage) if kept else ():
            self._links.send((self._rank + 1) % plan.stages, ("kept", step, k), {"flat": self._held[k].flat})
            self._reach("keep", step)
        for k in kept:
            self._held[k].flat.copy_(self._take(("kept", step, k), f"the sums of section {k} to keep")["flat"])

    def _cast_vote(self, step: int) -> Vote:
        """Tell all ranks what this one has, and wait for theirs: who has all of it may apply the step. A rank votes
        when its sums, and those that it keeps, are complete: once all have voted, each can apply the step by itself.
        [Correctness-preserving morphing | core.vote, engine.pipeline.reduce]
        """
        plan, others = self._plan, [rank for rank in range(self._plan.workers) if rank != self._rank]
        votes = [Vote(self._losses, [[k, j] for k in plan.sections_of(self._stage) for j in self._held[k].added])]
        tensors = {name: torch.tensor(rows, dtype=torch.float64) for name, rows in votes[0]._asdict().items()}
        for rank in others:
            self._links.send(rank, ("vote", step, self._rank), tensors)
            self._reach("vote", step)
        for rank in others:
            theirs = self._take(("vote", step, rank), f"the vote of rank {rank}")
            votes.append(Vote(**{name: rows.tolist() for name, rows in theirs.items()}))
        whole = Vote(*(sorted(chain(*rows)) for rows in zip(*votes, strict=True)))
        if whole.added != [[k, j] for k in range(plan.sections) for j in range(plan.micro_batches)]:
            raise NanoError(f"a section has not added each micro-batch once: {whole.added}. This is a bug: report it")
        return whole

    def _apply(self, vote: Vote) -> None:
        """Apply a step to all state that is here, copies too. [engine.pipeline.apply]"""
        for state in self._held.values():
            state.apply(1.0 / vote.weight)
        self._applied, self._vote = self._applied + 1, vote


# -- 4. Links --------------------------------------------------------------------------------------------------------

Key = tuple[Any, ...]  # kind of a message, its step, and what else tells it from others


class Inbox:
    """Messages that have arrived; all waits are here, with a bound. [engine.base.inbox, engine.base.wait_bounds]"""

    def __init__(self) -> None:
        self._messages, self._news, self._why_over = dict[Key, Batch](), threading.Condition(), ""

    def put(self, key: Key, tensors: Batch) -> None:
        with self._news:
            self._messages[key] = tensors
            self._news.notify_all()

    def interrupt(self, why: str) -> None:
        """End all waits for what is not here."""
        with self._news:
            self._why_over = self._why_over or why
            self._news.notify_all()

    def pop(self, key: Key) -> Batch | None:
        return self._messages.pop(key, None)

    def count(self, kind: str, step: int) -> int:
        return sum(key[:2] == (kind, step) for key in list(self._messages))

    def wait(self, ready: Callable[[], T | None], waiting: Callable[[], str]) -> T:
        """The first result of ``ready`` that is not None; it is asked again after each message."""
        deadline_s = time.monotonic() + WAIT_S
        with self._news:
            while (result := ready()) is None:
                if self._why_over:
                    raise Interrupted(self._why_over)
                if time.monotonic() > deadline_s:
                    raise NanoError(f"{waiting()}, which did not come in {WAIT_S:g} s. Look what keeps its sender")
                self._news.wait(1.0)
        return result


class Links:
    """TCP, each direction with a thread of its own. [Overlapping computation and communication | engine.links.links]"""

    def __init__(self) -> None:
        self._inboxes, self._queues = dict[int, Inbox](), dict[int, queue.SimpleQueue[bytes | None]]()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._server.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def begin(self, generation: Generation, rank: int) -> None:
        """Let go of the old links; a new one begins with its first message."""
        for each in self._queues.values():
            each.put(None)
        self._queues, self._generation, self._rank = {}, generation, rank
        self.inbox = self.inbox_of(generation.number)

    def inbox_of(self, number: int) -> Inbox:
        """Return the inbox of a generation, which others may have begun already."""
        return self._inboxes.setdefault(number, Inbox())

    def send(self, rank: int, key: Key, tensors: Batch) -> None:
        """Write a message, and leave it to the link's thread."""
        if rank not in self._queues:
            self._queues[rank] = queue.SimpleQueue()
            self._queues[rank].put(packed((self._generation.number, self._rank), {}))
            address = list(self._generation.members.values())[rank]
            arguments = (rank, address, self._queues[rank], self.inbox)
            threading.Thread(target=self._send_all, args=arguments, daemon=True).start()
        self._queues[rank].put(packed(key, tensors))

    def _send_all(self, rank: int, address: tuple[str, int], messages: Any, inbox: Inbox) -> None:
        try:
            with socket.create_connection(address, timeout=WAIT_S) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while (message := messages.get()) is not None:
                    connection.sendall(len(message).to_bytes(8, "little") + message)
        except OSError as error:
            inbox.interrupt(f"the link to rank {rank} broke: {error}")

    def _accept(self) -> None:
        while True:
            connection, _ = self._server.accept()
            threading.Thread(target=self._receive_all, args=(connection,), daemon=True).start()

    def _receive_all(self, connection: socket.socket) -> None:
        inbox, sender = Inbox(), -1
        try:
            with connection, connection.makefile("rb") as stream:
                while len(size := stream.read(8)) == 8:
                    key, tensors = unpacked(stream.read(int.from_bytes(size, "little")))
                    if sender < 0:  # the first message says who is at the other end
                        inbox, sender = self.inbox_of(key[0]), key[1]
                    else:
                        inbox.put(key, tensors)
        except (OSError, ValueError):
            pass  # it broke within a message
        inbox.interrupt(f"the link from rank {sender} broke")


def packed(key: Key, tensors: Mapping[str, Tensor]) -> bytes:
    """A message: a line of JSON, then the bytes of the tensors. [engine.links.message]"""
    dense = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    table = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in dense.items()]
    line = json.dumps([key, table]).encode() + b"\n"
    return line + b"".join(ctypes.string_at(tensor.data_ptr(), tensor.nbytes) for tensor in dense.values())


def unpacked(message: bytes) -> tuple[Key, Batch]:
    """The inverse of ``packed``. [engine.links.message]"""
    line, _, data = message.partition(b"\n")
    key, table = json.loads(line)
    tensors, place = Batch(), 0
    for name, dtype, shape in table:
        tensors[name] = tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        begin, place = place, place + tensor.nbytes
        if place > len(data):
            raise ValueError("the message was broken off")
        ctypes.memmove(tensor.data_ptr(), data[begin:place], tensor.nbytes)
    return tuple(key), tensors


# -- 5. From a model to sections -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    """Operations between two cut-points: run, moved and updated as one. [Auto-partitioning | partition.cut.split]"""

    index: int
    module: nn.Module
    arguments: tuple[str, ...]  # of the module: values of earlier sections, inputs of the model, constants, parameters
    parameters: dict[str, str]  # by argument, the parameter's name
    makes: tuple[str, ...]  # values that it returns
    passes_on: tuple[str, ...]  # values that cross the cut behind it, also those of earlier sections
    flops: float  # of F of a micro-batch
    sends_bytes: float  # across the cut behind it, for a micro-batch
    elements: int  # of its parameters


@dataclass(frozen=True)
class Model:
    """A captured model: its sections, and what they begin with. [partition.model]"""

    sections: tuple[Section, ...]
    values: dict[str, Tensor]  # of parameters before step 0, by name
    constants: dict[str, Tensor]  # buffers and the like, by argument

    @property
    def tied(self) -> dict[str, list[int]]:
        """Parameters that several sections use, and which sections these are. [core.model]"""
        users = {name: [s.index for s in self.sections if name in s.parameters.values()] for name in self.values}
        return {name: indices for name, indices in users.items() if len(indices) > 1}


def capture(job: Job) -> Model:
    """Build the model, export it as one flat graph, and cut that. [Auto-partitioning | partition.capture.capture]"""
    if job.global_batch % job.micro_batch:
        raise NanoError(f"global_batch={job.global_batch} is no multiple of micro_batch={job.micro_batch}. Change one")
    torch.manual_seed(job.seed)
    module = job.build()
    program = torch.export.export(module, (), read(job, job.dataset(), 0, 0), strict=False)
    signature = program.graph_signature
    operations = [node.target for node in program.graph.nodes if node.op == "call_function"]
    wrong = [str(each) for each in operations if hasattr(each, "_schema") and each._schema.is_mutable]
    if wrong := wrong + [str(each) for each in operations if "batch_norm" in str(each)]:
        raise NanoError(f"forward() changes tensors in place: {', '.join(wrong)}. Use varuna.Trainer")
    return_weight_too(program.graph)
    first = {id(parameter): name for name, parameter in module.named_parameters()}  # of a tied one: the first name
    named = {node: first[id(module.get_parameter(name))] for node, name in signature.inputs_to_parameters.items()}
    values = {name: module.get_parameter(name).detach() for name in first.values()}
    known = {**program.state_dict, **program.constants}
    fixed = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    constants = {node: known[name].detach() for node, name in fixed.items()}
    return Model(cut(program.graph_module, named, values, job.sections), values, constants)


def return_weight_too(graph: Graph) -> None:
    """Let the graph return its loss, and the number of targets that this is a mean of. Weighted so, losses of
    micro-batches add up to that of the global batch, also where some targets are padding. [partition.loss]
    """
    output = next(node for node in graph.nodes if node.op == "output")
    loss = output.args[0][0]
    given = dict(zip(("input", "target", "weight", "reduction", "ignore_index"), loss.args, strict=False))
    is_other = given.get("weight") is not None or given.get("reduction", 1) != 1
    if loss.target is not torch.ops.aten.cross_entropy_loss.default or is_other:
        raise NanoError(f"the loss is {loss.target}, and must be an unweighted mean cross-entropy. Use varuna.Trainer")
    with graph.inserting_before(output):
        counts = graph.call_function(torch.ops.aten.ne.Scalar, (given["target"], given.get("ignore_index", -100)))
        weight = graph.call_function(torch.ops.aten.sum.default, (counts,))
    output.args = ((loss, weight),)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))


def cut(root: GraphModule, named: Mapping[str, str], values: Batch, wanted: int) -> tuple[Section, ...]:
    """Cut a graph into at most ``wanted`` sections, each with a module of its own. [partition.cut.split]"""
    learned = list[Node]()  # operations that depend on parameters
    for node in root.graph.nodes:
        if node.op == "call_function" and any(s in learned or s.name in named for s in node.all_input_nodes):
            learned.append(node)
    flops, live = [flops_of(node) for node in learned], live_bytes(learned)
    ends = [-1, *cut_points(flops, live, wanted - 1), len(learned) - 1]
    spans = [slice(before + 1, end + 1) for before, end in pairwise(ends)]
    home = {node: k for k, span in enumerate(spans) for node in learned[span]}
    for node in reversed(root.graph.nodes):  # all others are made where they are used first
        home.setdefault(node, min((home[user] for user in node.users), default=len(spans) - 1))
    parent = split_module(root, root, home.__getitem__)
    calls = [node for node in parent.graph.nodes if node.op == "call_module"]
    makes = [[user.name for user in call.users if user.target is operator.getitem] or [call.name] for call in calls]
    last_use = {node.name: k for k, call in enumerate(calls) for node in call.args}
    passes_on = [[name for name in chain(*makes[: k + 1]) if last_use.get(name, 0) > k] for k in range(len(calls))]
    makes[-1] = passes_on[-1] = ["loss", "weight"]
    sections = []
    for k, (call, span) in enumerate(zip(calls, spans, strict=True)):
        own = {node.name: named[node.name] for node in call.args if node.name in named}
        module, arguments = parent.get_submodule(call.target), tuple(node.name for node in call.args)
        costs = sum(flops[span]), live[ends[k + 1]], sum(values[name].numel() for name in {*own.values()})
        sections.append(Section(k, module, arguments, own, tuple(makes[k]), tuple(passes_on[k]), *costs))
    return tuple(sections)


def flops_of(operation: Node) -> float:
    """Work of an operation, by its shapes alone: the same on all machines. [partition.graph.costs]"""
    value, first = operation.meta["val"], operation.all_input_nodes[0].meta["val"]
    elements = float(value.numel()) if isinstance(value, Tensor) else 0.0
    if str(operation.target).startswith(("aten.linear", "aten.matmul", "aten.mm", "aten.bmm")):
        return 2 * elements * int(first.shape[-1])
    if str(operation.target).startswith("aten.scaled_dot_product_attention"):
        return 4 * elements * int(first.shape[-2])
    return elements


def live_bytes(operations: Sequence[Node]) -> list[float]:
    """Bytes that a cut behind each operation would have to send. [partition.cut.cuts]"""
    place = {operation: i for i, operation in enumerate(operations)}
    live = [0.0] * len(operations)
    for operation, i in place.items():
        value = operation.meta["val"]
        size = value.nbytes if isinstance(value, Tensor) else math.inf  # a tuple cannot cross
        for j in range(i, max((place.get(user, i) for user in operation.users), default=i)):
            live[j] += size
    return live


def cut_points(flops: Sequence[float], live: Sequence[float], wanted: int) -> list[int]:
    """Near each equal share of the work, where fewest bytes are alive. [Auto-partitioning | partition.cut.cuts]"""
    reached = list(accumulate(flops))
    share, chosen = reached[-1] / (wanted + 1), set[int]()
    for goal in (share * number for number in range(1, wanted + 1)):
        near = [i for i in range(len(flops) - 1) if abs(reached[i] - goal) <= share / 2 and 0 < live[i] < math.inf]
        chosen.update(sorted(near, key=lambda i: (live[i], abs(reached[i] - goal)))[:1])
    return sorted(chosen)


# -- 6. A section at work --------------------------------------------------------------------------------------------


Tape = tuple[Section, Batch, Batch]  # what B needs of a section: itself, the values that it took, and those it made


def run_section(section: Section, state: SectionState, values: Batch, batch: Batch, seed: int) -> Tape:
    """Run a section on leaves of its own, so that it computes the same bits wherever stages begin. What it draws
    depends on run, step, micro-batch and section alone. [Implementation | engine.stage.section, data.randomness]
    """
    known = {**batch, **state.fixed}
    taken = {name: values[name].detach() for name in section.arguments if name in values}
    for value in taken.values():
        value.requires_grad_(value.is_floating_point())
    torch.manual_seed(seed)
    made = section.module(*(taken[name] if name in taken else known[name] for name in section.arguments))
    return section, taken, dict(zip(section.makes, made if isinstance(made, tuple) else (made,), strict=True))


def run_backward(tape: Tape, gradients: Batch) -> None:
    """B of a section: its own sums grow, and ``gradients`` become those of what it took. [engine.stage.section]"""
    _, taken, made = tape
    pairs = [(value, gradients.pop(name)) for name, value in made.items() if name in gradients]
    pairs = [(value, gradient) for value, gradient in pairs if value.requires_grad]
    torch.autograd.backward([value for value, _ in pairs], [gradient for _, gradient in pairs])
    for name, value in taken.items():
        if value.grad is not None:
            gradients[name] = gradients[name] + value.grad if name in gradients else value.grad


class SectionState:
    """All that a morph moves of a section; tied parameters have a copy in each. [engine.stage.gradient_bucket]"""

    def __init__(self, job: Job, model: Model, section: Section) -> None:
        self.index, self.added, self.flat = section.index, list[int](), torch.zeros(section.elements)
        names = dict.fromkeys(section.parameters.values())
        self._parameters = {name: nn.Parameter(model.values[name].clone()) for name in names}
        self._optimizer: Any = job.optimizer(list(self._parameters.items())) if names else None
        parts = torch.split(self.flat, [parameter.numel() for parameter in self._parameters.values()]) if names else ()
        self.gradients = {name: part.view_as(self._parameters[name]) for name, part in zip(names, parts, strict=True)}
        for name, parameter in self._parameters.items():
            parameter.grad = self.gradients[name]
        self.fixed = {**model.constants, **{node: self._parameters[name] for node, name in section.parameters.items()}}

    def begin(self) -> None:
        """Begin a step: the sums are zero, and each B adds to them in place."""
        self.flat.zero_()
        self.added.clear()

    def apply(self, scale: float) -> None:
        """Update the parameters with the mean of the gradients."""
        self.flat.mul_(scale)
        if self._optimizer is not None:
            self._optimizer.step()

    def tensors(self) -> Batch:
        """Return all that makes another copy equal to this one; those of the optimizer are ``parameter/key``."""
        found: Batch = {**self._parameters}
        for name, parameter in self._parameters.items() if self._optimizer else ():
            found.update({f"{name}/{key}": value for key, value in self._optimizer.state[parameter].items()})
        return found

    def load(self, tensors: Batch) -> None:
        """Become equal to another copy."""
        for name, value in tensors.items():
            parameter, _, key = name.partition("/")
            if key:
                self._optimizer.state[self._parameters[parameter]][key] = value
            else:
                self._parameters[parameter].data.copy_(value)


def read(job: Job, data: Any, step: int, micro_batch: int) -> Batch:
    """The samples of a micro-batch, the same in every plan: each epoch is shuffled anew. [data.loader, data.order]"""
    first, samples = step * job.global_batch + micro_batch * job.micro_batch, []
    for epoch, place in (divmod(position, len(data)) for position in range(first, first + job.micro_batch)):
        generator = torch.Generator().manual_seed(number_from(job.seed, epoch))
        samples.append(data[int(torch.randperm(len(data), generator=generator)[place])])
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def number_from(*parts: int) -> int:
    """A seed for dropout and order, the same in every process. Those of the product are others. [data.randomness]"""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


# -- 7. The schedule -------------------------------------------------------------------------------------------------


class Action(NamedTuple):
    """F, R or B of a micro-batch of the replica. [schedule.actions]"""

    stage: int
    kind: str
    micro_batch: int


def static_orders(stages: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Order each stage's actions, where F and R take one quantum of time, and B two. In each quantum a stage does
    the first of these that it can: finish a B; begin the B of its R (rule 2: nothing comes in between); run R, if the
    next stage has begun that B (rule 1: it ends as the gradient comes); run F (rule 3). [Tuning pipeline efficiency |
    schedule.orders]
    """
    orders, ending = [list[Action]() for _ in range(stages)], [False] * stages
    done = [dict.fromkeys("FRB", 0) for _ in range(stages)]
    while any(own["B"] < micro_batches for own in done):
        before = [dict(own) for own in done]  # what a quantum brings about shows in the next one
        for k, own in enumerate(done):
            begun = before[k + 1]["B"] if k < stages - 1 else own["F"]
            kind = "B" if own["R"] > own["B"] else "R" if own["R"] < begun else "F"
            if ending[k]:
                ending[k] = False
            elif kind != "F" or own["F"] < (before[k - 1]["F"] if k else micro_batches):
                orders[k].append(Action(k, kind, own[kind]))
                own[kind] += 1
                own["R"] += kind == "F" and k == stages - 1  # the last stage keeps the activations of its F
                ending[k] = kind == "B"
    return tuple(map(tuple, orders))


class Policy:
    """The static order, or an F while a gradient is late. [Tuning pipeline efficiency | schedule.policy]"""

    def __init__(self, stage: int, stages: int, micro_batches: int) -> None:
        self.stage, self._count, self._is_last = stage, micro_batches, stage == stages - 1
        self._limit = min(micro_batches, 3 * (stages - stage) + 2)  # of inputs that are stashed from F to B
        kinds = [action.kind for action in static_orders(stages, micro_batches)[stage]]
        self._backwards_before = [kinds[:i].count("B") for i, kind in enumerate(kinds) if kind == "F"]
        self.forwards = self.backwards = 0
        self._has_activations = self._is_late = False

    def next(self, activations_in: int, gradients_in: int) -> Action | None:
        """The action to run now, or None: wait until something arrives."""
        has_gradient = self.backwards < min(self.forwards, gradients_in)
        has_room = self.forwards < self._count and self.forwards - self.backwards < self._limit
        has_input = has_room and self.forwards < activations_in
        is_listed = has_room and self._backwards_before[self.forwards] <= self.backwards
        if self._has_activations:  # rule 2
            self._is_late = self._is_late or (has_input and not has_gradient)
            return self._action("B") if has_gradient else None
        if has_input and (is_listed or (self._is_late and not has_gradient)):
            return self._action("F")
        if has_gradient or (self.backwards < self.forwards and not is_listed):  # rule 3; rule 1
            return self._action("R")
        return None

    def keeps(self, action: Action) -> bool:
        """Return whether activations stay for B: those of R, and of an F if nothing comes between it and its B."""
        is_alone = self._is_last or self._limit == 1 or action.micro_batch == self._count - 1
        return action.kind == "R" or (action.kind == "F" and is_alone and action.micro_batch == self.backwards)

    def done(self, action: Action) -> None:
        """Note that an action has run."""
        self._has_activations = self.keeps(action)
        self.forwards += action.kind == "F"
        self.backwards += action.kind == "B"

    def _action(self, kind: str) -> Action:
        return Action(self.stage, kind, self.forwards if kind == "F" else self.backwards)


# -- 8. Plans --------------------------------------------------------------------------------------------------------

FLOPS_PER_S, BYTES_PER_S, LATENCY_S = 50e9, 1e8, 1e-4  # assumed; the product measures (varuna.calibration)
STATE_BYTES = 16  # of each element of a parameter: its value, its gradient, and two moments of Adam
Span = tuple[Action, float, float]  # an action, and when it begins and ends, in seconds


def simulate(micro_batches: int, forward_s: Sequence[float], link_s: Sequence[float]) -> list[Span]:
    """A step of a pipeline, decided by the policies that workers ask. [Parametrized simulation | simulator.step]"""
    last, busy_s, spans = len(forward_s) - 1, [0.0] * len(forward_s), list[Span]()
    policies = [Policy(k, last + 1, micro_batches) for k in range(last + 1)]
    arrived = [{"F": 0 if k else micro_batches, "B": 0 if k < last else micro_batches} for k in range(last + 1)]
    events = [(0.0, "ready", k) for k in range(last + 1)]  # when, what arrives (or nothing does), and where
    while events:
        now_s, what, k = heapq.heappop(events)
        if what != "ready":
            arrived[k][what] += 1
        if now_s < busy_s[k] or (action := policies[k].next(arrived[k]["F"], arrived[k]["B"])) is None:
            continue
        policies[k].done(action)
        busy_s[k] = now_s + forward_s[k] * (2 if action.kind == "B" else 1)
        spans.append((action, now_s, busy_s[k]))
        heapq.heappush(events, (busy_s[k], "ready", k))
        neighbour = k + {"F": 1, "R": 0, "B": -1}[action.kind]
        if neighbour != k and 0 <= neighbour <= last:
            heapq.heappush(events, (busy_s[k] + link_s[min(k, neighbour)], action.kind, neighbour))
    return spans


def step_s(model: Model, plan: Plan) -> float:
    """Predicted time of a step: the pipeline's, and that of sums over replicas. [planner.pricing]"""
    stages = [[model.sections[k] for k in plan.sections_of(stage)] for stage in range(plan.stages)]
    forward_s = [sum(section.flops for section in own) / FLOPS_PER_S for own in stages]
    link_s = [own[-1].sends_bytes / BYTES_PER_S + LATENCY_S for own in stages]
    sums_s = max(4 * sum(section.elements for section in own) for own in stages) * (plan.replicas - 1) / BYTES_PER_S
    return max(end_s for _, _, end_s in simulate(len(plan.micro_batches_of(0)), forward_s, link_s)) + sums_s


def state_bytes(model: Model, plan: Plan) -> int:
    """State of the largest stage. Copies are not counted: they lie in host memory. [planner.pricing]"""
    stages = (plan.sections_of(stage) for stage in range(plan.stages))
    return STATE_BYTES * max(sum(model.sections[k].elements for k in own) for own in stages)


def make_plan(model: Model, job: Job, stages: int, replicas: int) -> Plan:
    """The plan of a shape with the fastest slowest stage. [Parametrized simulation | planner.balance]"""
    count, flops = len(model.sections), [section.flops for section in model.sections]
    if not (0 < stages <= count and 0 < replicas <= job.micro_batches):
        limit = f"{count} sections and {job.micro_batches} micro-batches"
        raise NanoError(f"{limit} are too few for {stages} stages and {replicas} replicas. Choose a smaller plan")

    def slowest(starts: tuple[int, ...]) -> float:
        *works, last = (sum(flops[begin:end]) for begin, end in pairwise((*starts, count)))
        return max([4 * work for work in works] + [3 * last])

    starts = min(((0, *rest) for rest in combinations(range(1, count), stages - 1)), key=slowest)
    return Plan(replicas, starts, count, job.micro_batches)


def best_plan(model: Model, job: Job, workers: int, room: float) -> Plan:
    """The fastest plan that fits, each P with all the replicas it can. [Parametrized simulation | planner.sweep]"""
    depths = range(1, min(workers, len(model.sections)) + 1)
    plans = [make_plan(model, job, stages, min(workers // stages, job.micro_batches)) for stages in depths]
    fitting = [plan for plan in plans if state_bytes(model, plan) <= room]
    if not fitting:
        raise NanoError(f"no plan for {workers} workers needs {room:,.0f} bytes of state or less. Start more workers")
    return min(fitting, key=lambda plan: step_s(model, plan))


# -- 9. The demonstration: a small GPT, on the text of Python's own manual -------------------------------------------

LENGTH, WIDTH, HEADS, LAYERS = 32, 64, 4, 4


class GPT(nn.Module):
    """A language model over bytes whose head is tied to its embedding, in plain PyTorch. It knows nothing of Varuna."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss."""
        x = self.tokens(tokens) + self.places(torch.arange(LENGTH))
        x = self.layers(x, nn.Transformer.generate_square_subsequent_mask(LENGTH), is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def text() -> list[Batch]:
    """Windows of bytes of the manual, and the bytes that follow these. [data]"""
    manual = torch.frombuffer(bytearray("".join(topics.values())[:100_000].encode()), dtype=torch.uint8).long()
    return [{"tokens": window[:-1], "targets": window[1:]} for window in manual.unfold(0, LENGTH + 1, LENGTH)]


DEMONSTRATION = Job(GPT, text, partial(torch.optim.AdamW, lr=3e-3), global_batch=32, micro_batch=4, steps=12)
ROOM = 0.7  # of the model's state, in each worker: it takes at least two to hold the model


def plain_loop(job: Job) -> list[float]:
    """Losses of the same training in one process, in plain PyTorch; all micro-batches count alike."""
    torch.manual_seed(job.seed)
    model, data, losses = job.build(), job.dataset(), list[float]()
    optimizer = job.optimizer(list(model.named_parameters()))
    for step in range(job.steps):
        parts = [model(**read(job, data, step, j)) / job.micro_batches for j in range(job.micro_batches)]
        optimizer.zero_grad()
        for part in parts:
            part.backward()
        optimizer.step()
        losses.append(math.fsum(part.item() for part in parts))
    return losses


def main() -> int:
    """Train with workers of which one is lost, and compare the losses with those of a plain loop."""
    parser = argparse.ArgumentParser(description="Varuna in one file: lose a worker, and go on with the same losses.")
    parser.add_argument("--plan", default="2x2", help="stages x replicas of the first generation (2x2)")
    places = f"RANK@STEP:PLACE of generation 1, of 2, ...; nothing: no fault (1@5:B). Places: {', '.join(PLACES)}"
    parser.add_argument("--fault", nargs="*", default=["1@5:B"], metavar="FAULT", help=places)
    parser.add_argument("--freeze", action="store_true", help="stop workers (SIGSTOP) instead of killing them")
    given, job, begin_s = parser.parse_args(), DEMONSTRATION, time.monotonic()
    strike = signal.SIGSTOP if given.freeze else signal.SIGKILL
    torch.set_num_threads(1)
    model = capture(job)
    whole = STATE_BYTES * sum(section.elements for section in model.sections)
    try:
        parts = [fault.replace("@", ":").split(":") for fault in given.fault]
        faults = [Fault(int(rank), int(step), place, strike, n) for n, (rank, step, place) in enumerate(parts, 1)]
        plan = make_plan(model, job, *map(int, given.plan.split("x")))
        room = max(ROOM * whole, state_bytes(model, plan))
        print(f"{whole:,} bytes of state in {len(model.sections)} sections; a worker has room for {room:,.0f}")
        outcome = train(job, plan, faults, room)
    except (NanoError, ValueError) as error:
        parser.error(str(error))
    if len(outcome.lost) < len(faults):
        parser.error(f"a fault did not happen: choose a rank and a step of plan {plan}, and one of {', '.join(PLACES)}")
    print("\nstep        loss  plain loop  difference")
    differences = []
    for step, expected in enumerate(plain_loop(job)):
        differences.append(abs(outcome.losses[step] / expected - 1))
        print(f"{step:4}  {outcome.losses[step]:.8f}  {expected:.8f}  {differences[-1]:10.1e}")
    print(f"largest difference: {max(differences):.1e} of the loss, in {time.monotonic() - begin_s:.0f} s")
    return int(max(differences) > 1e-5)


if __name__ == "__main__":
    sys.exit(main())
