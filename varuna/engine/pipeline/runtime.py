"""One replica's stage at work: asks the policy, runs the action, hands on what it makes.

samples, activation                  gradient of the next stage
     |                                    |
     F --> activation (last stage: loss)  v
     +-- tapes of kept sections --------> B, or I and later W --> gradient for the stage before
     v                                    ^   |
   stash of inputs --> R --> tapes -------+   v
                                            bucket of each section --(last B of the step)--> reducer

Micro-batches have two numbers. Policy and actions count within the replica, from 0 to N - 1 in the order of the F's;
everything else (flights, stash, keys in the inbox) has the number within the global batch: ``_mine[local]``.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from varuna.core.errors import LinkError, VarunaError
from varuna.core.plan import Plan
from varuna.core.times import Interval
from varuna.data.samples import SampleSource
from varuna.engine.base.inbox import GenerationEnded, Inbox
from varuna.engine.base.spans import span
from varuna.engine.base.wait_bounds import Awaited
from varuna.engine.links.groups import Groups
from varuna.engine.links.links import Receiver, Sender
from varuna.engine.links.trips import ArrivalTimes
from varuna.engine.pipeline.forward_pass import TRAINING, ForwardPass
from varuna.engine.pipeline.input_stash import InputStash, StashedInput
from varuna.engine.pipeline.lookahead import lookahead_of
from varuna.engine.pipeline.reduce import Reducer
from varuna.engine.pipeline.timeline import Messages, StepTimes, taken
from varuna.engine.stage.section import Examples
from varuna.engine.stage.stage import DeferredWeightGrad, Stage
from varuna.engine.stage.tape import Tape
from varuna.partition.batch_weight import WeightFunction
from varuna.schedule.actions import Action, Kind
from varuna.schedule.buffers import GRADIENTS_COMING, MESSAGES_LEAVING
from varuna.schedule.policy import Policy, make_policy

_GRADIENT_TAG = 2
_FEW = 3
"""Up to this many sections, one backward for all costs as much as the calls of autograd that it saves."""


@dataclass
class Flight:
    """A micro-batch between its F and its B, or its W, on this stage."""

    examples: Examples
    """without its samples"""
    weight: float = 0.0
    """the gradient of the global batch's sum with respect to the loss"""
    tapes: list[Tape] = field(default_factory=list)
    left: list[DeferredWeightGrad] = field(default_factory=list)


class Runtime:
    """Links, loader and step loop of one rank in one generation."""

    def __init__(
        self,
        stage: Stage,
        plan: Plan,
        rank: int,
        *,
        groups: Groups,
        inbox: Inbox,
        reducer: Reducer,
        source: SampleSource,
        weight: WeightFunction | None,
        steps: int,
    ) -> None:
        """Open the links and start to read ahead.

        Args:
            stage: this rank's stage.
            plan: the generation's plan.
            rank: this rank.
            groups: the generation's groups.
            inbox: the generation's inbox.
            reducer: takes sections whose last backward is through.
            source: reads samples.
            weight: the user's weight of a micro-batch, if any.
            steps: length of the run: nothing is read beyond.
        """
        self._stage, self._plan, self._rank, self._source = stage, plan, rank, source
        self._inbox, self._reducer, self._weight, self._steps = inbox, reducer, weight, steps
        self._replica = plan.place_of(rank).replica
        self._pipeline = plan.pipeline_of(self._replica)
        self._mine = stage.work.of(stage.next_step)
        self._graphs = stage.job.model.graphs
        self._stash, job = InputStash(()), stage.job
        self._forward_pass = ForwardPass(
            stage,
            plan,
            rank,
            model=job.model,
            buffers=job.buffers,
            groups=groups,
            inbox=inbox,
            source=source,
            weight=weight,
            steps=range(stage.next_step, steps),
            purpose=TRAINING,
            work_of=stage.work.of,
        )
        self._whole = self._forward_pass.whole
        self._layouts, self._downstream = self._forward_pass.layouts, self._forward_pass.downstream
        self._requested = stage.next_step
        self._inputs_in = self._gradients_in = self._forwards = 0
        self._kept = len(self._pipeline.kept_sections_of(stage.index))
        # By their number: the first step of a generation may be the rest of one, with fewer of them (core.sums).
        self._orders: dict[int, tuple[int, ...]] = {}  # of backwards, by how many micro-batches a step has here
        self._copies, self.lookahead = job.traffic.links, lookahead_of(job.traffic.streams, inbox)
        self._open_gradient_links(groups)
        self._acting: tuple[int, Action] | None = None  # step and action, set for each, read by heartbeats
        self.times: StepTimes | None = None
        """of the newest whole step"""
        self.phases: list[Interval] = []
        """of the step, after its actions"""

    def _open_gradient_links(self, groups: Groups) -> None:
        stage, rank, forward_pass = self._stage, self._rank, self._forward_pass
        self._upstream: Sender | None = None
        self._receivers = [] if forward_pass.upstream is None else [forward_pass.upstream]
        if stage.index > 0:
            # Gradients have connections of their own: one carries a message at a time (``Groups.gradients``).
            where = (groups.gradients, rank - 1, _GRADIENT_TAG, self._inbox, forward_pass.link_name(rank - 1))
            self._upstream = Sender(*where, groups.direct.sends.get(rank - 1), trips=forward_pass.trips_up)
        if not stage.is_last:
            steps = range(stage.next_step, self._steps)
            expected = forward_pass.expected("gradient", self._layouts.gradient_in, self._backward_order, steps)
            where = (groups.gradients, rank + 1, _GRADIENT_TAG, self._inbox, forward_pass.link_name(rank + 1))
            channel = groups.direct.receives.get(rank + 1)
            trips, places = forward_pass.trips_down, GRADIENTS_COMING
            self._receivers.append(Receiver(*where, expected, self._copies, channel, places=places, trips=trips))

    def _policy(self, micro_batches: int) -> Policy:
        pipeline, stage = self._pipeline, self._stage.index
        return make_policy(
            self._plan.policy,
            stage=stage,
            stages=pipeline.stages,
            micro_batches=micro_batches,
            stash_limit=pipeline.stash_limits[stage],
            split_last=min(pipeline.split_last, micro_batches),
            empties=pipeline.empties,
            keeps_all=pipeline.keeps_all(stage),
        )

    def _backward_order(self, step: int) -> list[int]:
        """Return global micro-batches of a step in the order of their gradients."""
        mine = self._forward_pass.order_of(step)
        if len(mine) not in self._orders:
            self._orders[len(mine)] = self._policy(len(mine)).backward_order
        return [mine[local] for local in self._orders[len(mine)]]

    def _new_stash(self, policy: Policy) -> InputStash:
        """Make an empty stash for one step, keyed by global micro-batch."""
        order = [self._mine[local] for local in policy.backward_order]
        if not self._pipeline.stash_on_device:
            return InputStash(order)
        places = self._pipeline.stash_on_device[self._stage.index]
        return InputStash(order, places=places, copies=self._stage.job.traffic.stash)

    # -- the step ----------------------------------------------------------------------------------------

    def run(self, step: int) -> None:
        """Run every action of ``step``; the sums of finished sections are on their way to the replicas.

        Raises:
            GenerationEnded: the manager ended the generation.
            LinkError: a link broke, or nothing came within the bound.
            DataError: stages disagree on a sample, or it is not as the model was captured.
        """
        begin_s = time.monotonic()
        # First: samples are read while this rank waits for counts of the step.
        self._request(step)
        self._forward_pass.variants.forget(step)
        self._whole.begin(step, lambda table: self._reducer.add_up(step, table))
        if self._whole.counts:
            self._forward_pass.waited(time.monotonic() - begin_s)
        # Only stages whose sections read the counts need all of them before their first F.
        if self._whole.reads:
            self._whole.wait_for_others(lambda: self._reducer.added_up(step))
        self._forward_pass.await_order(step)
        self._stage.clear_gradients()
        self._stage.work.begin(step)
        self.phases.clear()
        self._inputs_in = self._gradients_in = self._forwards = 0
        self._mine = self._forward_pass.order_of(step)
        policy, order = self._policy(len(self._mine)), self._backward_order(step)
        # Those that the policy will run as I and W: their F or R must record for two halves.
        split_last = min(self._plan.first.split_last, len(order))
        # No stage waits for the input gradient of stage 0.
        self._split = frozenset(order[len(order) - split_last :] if self._stage.index else ())
        self._stash = self._new_stash(policy)
        flights: dict[int, Flight] = {}
        lookahead = self.lookahead
        lookahead.begin(step, begin_s)
        try:
            self._act_all(step, policy, flights)
        except (GenerationEnded, LinkError):
            self._finish_halves(flights)
            raise
        self._whole.wait_for_others(lambda: self._reducer.added_up(step))
        self.times = lookahead.finish()
        self._stage.truths.check(self._source, self._plan, step)

    def _act_all(self, step: int, policy: Policy, flights: dict[int, Flight]) -> None:
        lookahead = self.lookahead
        while not policy.finished:
            # Each time: the end of a generation is noticed even where nothing has to be waited for.
            self._inbox.check()
            arrived = self._arrived(step, policy)
            action = policy.next(*arrived)
            if action is None:
                awaited = policy.awaited()
                self._wait(step, policy, arrived, awaited)
                lookahead.waited(awaited)
                continue
            lookahead.begin_action()
            self._acting = step, action
            name, micro_batch = action.kind.value, self._mine[action.micro_batch]
            with span(name, rank=self._rank, stage=self._stage.index, step=step, index=micro_batch):
                self._act(step, action, policy, flights)
            policy.done(action)
            lookahead.end_action(action)

    def _finish_halves(self, flights: dict[int, Flight]) -> None:
        """Run the W of every I: else the sums of its sections, which have half of a micro-batch, are lost."""
        if self._stage.sums.outlast:
            for flight in flights.values():
                self._stage.weight_backward(flight.left, lambda section: None)

    @property
    def activity(self) -> str:
        """Text that says what the stage does; for any thread."""
        acting = self._acting
        return "starting" if acting is None else f"step {acting[0]}: {acting[1]}"

    def take_trips(self) -> list[ArrivalTimes]:
        """Take the times of messages to and from the next stage since the last call: both ends of a link find them."""
        trips = self._forward_pass.trips_down
        return [] if trips is None else trips.drain()

    def take_messages(self) -> Messages:
        """Take the messages of the step that has just ended."""
        down, up = self._downstream, self._upstream
        order = self._orders[len(self._mine)]
        assert self.times is not None
        return Messages(
            micro_batches=tuple(self._mine),
            activations=list(enumerate(down.take_begun())) if down is not None else [],
            gradients=list(zip(order, up.take_begun(), strict=False)) if up is not None else [],
            arrivals=[a for each in self._receivers for a in taken(each.arrivals, self.times.step, self._mine)],
        )

    def close(self) -> None:
        """Drop queued work; threads end when their queues are empty or their groups abandoned."""
        if self._upstream is not None:
            self._upstream.close()
        self._forward_pass.close()
        self.lookahead.close()

    def _request(self, step: int) -> None:
        """Read this step's micro-batches, then the next step's, or of as many steps as are read at once."""
        while self._requested <= min(step + self._forward_pass.steps_ahead, self._steps - 1):
            self._forward_pass.request(self._requested, self._requested * self._plan.global_batch)
            self._requested += 1

    def _arrived(self, step: int, policy: Policy) -> tuple[int, int]:
        """Count the inputs and gradients that have come so far, in the order of their use; both only grow.

        An input counts once its F has a place for what it makes: the next stage, or the network, may be late. Its
        receiver takes whatever comes, so that this waits for no action of any stage, and no order can block itself.
        """
        total = len(self._mine)
        while self._inputs_in < total and self._forward_pass.has_input(step, self._mine[self._inputs_in]):
            self._inputs_in += 1
        order = policy.backward_order
        # The last stage makes its own gradients, so all of them count as here.
        while self._gradients_in < total and (
            self._stage.is_last or self._inbox.has(("gradient", step, self._mine[order[self._gradients_in]]))
        ):
            self._gradients_in += 1
        # Without a place, an F would leave a message more than the plan has memory for: its input does not count yet.
        return min(self._inputs_in, self._forwards + self._places), self._gradients_in

    @property
    def _places(self) -> int:
        """Number of forwards that may still run before the next stage has taken messages."""
        return len(self._mine) if self._downstream is None else max(0, MESSAGES_LEAVING - self._downstream.waiting)

    def _wait(self, step: int, policy: Policy, arrived: tuple[int, int], awaited: Action) -> None:
        whole = Action(awaited.stage, awaited.kind, self._mine[awaited.micro_batch])

        def describe() -> Awaited:
            if awaited.kind is not Kind.FORWARD:
                return Awaited(f"the gradient of {whole} (step {step})", (self._rank + 1,))
            if not self._forward_pass.has_samples(step, whole.micro_batch):
                # No peer is named: no other rank is to blame, however long it takes.
                return Awaited(f"the samples of {whole} (step {step})")
            if not self._places:
                return Awaited(f"places for the activation of {whole} (step {step})", (self._rank + 1,))
            return Awaited(f"the activation of {whole} (step {step})", (self._rank - 1,))

        lacks_samples = awaited.kind is Kind.FORWARD and not self._forward_pass.has_samples(step, whole.micro_batch)
        begin_s = time.monotonic()
        self._inbox.wait(lambda: self._arrived(step, policy) != arrived, describe)
        if lacks_samples:
            self._forward_pass.waited(time.monotonic() - begin_s)

    # -- actions -----------------------------------------------------------------------------------------

    def _act(self, step: int, action: Action, policy: Policy, flights: dict[int, Flight]) -> None:
        micro_batch = self._mine[action.micro_batch]
        split = micro_batch in self._split
        try:
            self._run(step, action, micro_batch, policy, flights, split=split)
        except VarunaError:
            raise
        except Exception as error:
            base = step * self._plan.global_batch
            indices = self._source.indices([base + offset for offset in self._plan.samples_of(micro_batch)])
            error.add_note(f"step {step}, the batch of dataset indices {list(indices)}; this step is not applied")
            raise

    def _run(
        self,
        step: int,
        action: Action,
        micro_batch: int,
        policy: Policy,
        flights: dict[int, Flight],
        *,
        split: bool,
    ) -> None:
        # Backwards go in one order, so after the last of it each section's sum is whole, and its reduction can begin.
        is_final = action.micro_batch == policy.backward_order[-1]
        joined = not is_final and len(self._stage.sections) > _FEW  # of the last one, sections are reduced one by one
        if action.kind is Kind.FORWARD:
            # ``policy.keeps`` speaks of this F alone; ``_kept`` of every F, as far as the plan has memory for it.
            keep = len(self._stage.sections) if policy.keeps(action.micro_batch) else self._kept
            flights[micro_batch] = self._forward(step, micro_batch, keep=keep, split=split, joined=joined)
        elif action.kind is Kind.RECOMPUTE:
            self._recompute(step, micro_batch, flights[micro_batch], split=split, joined=joined)
        elif action.kind is Kind.BACKWARD:
            self._backward(step, micro_batch, flights.pop(micro_batch), is_final=is_final)
        elif action.kind is Kind.INPUT:
            self._input_backward(step, micro_batch, flights[micro_batch])
        else:
            self._weight_backward(step, flights.pop(micro_batch), is_final=is_final)

    def _forward(self, step: int, micro_batch: int, *, keep: int, split: bool, joined: bool) -> Flight:
        stage, forward_pass = self._stage, self._forward_pass
        # Before F brings in another input: the plan has room for one that is on its way out (STASH_IN_TRANSIT).
        self._stash.finish_copy()
        arrived = forward_pass.take_inputs(step, micro_batch)
        examples = arrived.examples
        # Without samples: the stash may move them to the host, and a reference here would keep them on the device.
        flight = Flight(examples._replace(inputs={}))
        self.lookahead.computing()
        out, results, flight.tapes, begin = stage.forward(
            arrived.values, examples, step, micro_batch, keep=keep, split=split, joined=joined
        )
        self.lookahead.computed()
        # If every section's tape is kept there is no R, and the input has no use.
        if keep < len(stage.sections):
            self._stash.put_input(micro_batch, StashedInput(begin, dict(examples.inputs)))
        if stage.is_last:
            sums = forward_pass.sums(micro_batch, results, arrived)
            stage.work.losses.add(micro_batch, sums)
            flight.weight = sums.factor
        else:
            with self._sending(step, micro_batch):
                forward_pass.hand_on(step, micro_batch, out, arrived)
            self._forwards += 1
        return flight

    def _recompute(self, step: int, micro_batch: int, flight: Flight, *, split: bool, joined: bool) -> None:
        # F has left tapes of the last sections, if the plan keeps them: R runs those before them only.
        kept, waiting = len(flight.tapes), self._stash.take_input(micro_batch)
        self.lookahead.computing()
        recomputed = self._stage.record(
            waiting.values,
            flight.examples._replace(inputs=waiting.samples),
            step,
            micro_batch,
            keep=kept,
            first=self._stage.gradient_free,
            split=split,
            joined=joined,
        )  # fmt: skip
        self.lookahead.computed()
        flight.tapes = [*recomputed, *flight.tapes]

    def _backward(self, step: int, micro_batch: int, flight: Flight, *, is_final: bool) -> None:
        gradients = self._gradients(step, micro_batch, flight)
        self.lookahead.computing()
        received = self._stage.backward(flight.tapes, gradients, self._done(step, is_final))
        self.lookahead.computed()
        self._send_upstream(step, micro_batch, flight.examples.size, received)

    def _input_backward(self, step: int, micro_batch: int, flight: Flight) -> None:
        gradients = self._gradients(step, micro_batch, flight)
        self.lookahead.computing()
        received, flight.left = self._stage.input_backward(flight.tapes, gradients)
        self.lookahead.computed()
        self._send_upstream(step, micro_batch, flight.examples.size, received)

    def _weight_backward(self, step: int, flight: Flight, *, is_final: bool) -> None:
        self.lookahead.computing()
        self._stage.weight_backward(flight.left, self._done(step, is_final))
        self.lookahead.computed()

    def _done(self, step: int, is_final: bool) -> Callable[[int], None]:
        """Return what to call when a section has finished a micro-batch: after the last it starts the reduction."""
        return (lambda section: self._reducer.section_done(step, section)) if is_final else (lambda section: None)

    def _gradients(self, step: int, micro_batch: int, flight: Flight) -> dict[str, Tensor]:
        """Return the gradients of what the stage made, by name."""
        stage = self._stage
        if stage.is_last:
            if not flight.tapes:
                return {}  # nothing in the whole model is trained
            loss = self._graphs[flight.examples.variant].sections[-1].makes[0]
            # Gradients are those of the batch's weighted sum; its divisor is known after the vote only (``scale_of``).
            scaled = flight.weight * stage.gradient_scale
            seed = torch.full((), scaled, dtype=flight.tapes[-1].made[0].dtype, device=stage.job.device)
            return {loss: seed} if flight.weight else {}
        buffer = self._inbox.take(  # it is here: the policy saw it arrive
            ("gradient", step, micro_batch),
            lambda: Awaited(f"the gradient of micro-batch {micro_batch} (step {step})", (self._rank + 1,)),
        )
        layout = self._layouts.gradient_in(step, micro_batch, flight.examples.size)
        return layout.unpack(buffer, self._forward_pass.copies_of(layout))

    def _send_upstream(self, step: int, micro_batch: int, rows: int, gradients: dict[str, Tensor]) -> None:
        if self._upstream is not None:
            layout = self._layouts.gradient_out(step, micro_batch, rows)
            with self._sending(step, micro_batch):
                self._upstream.send(layout.pack(gradients, copies=self._forward_pass.copies_of(layout)))

    def _sending(self, step: int, micro_batch: int) -> AbstractContextManager[None]:
        return span("send", rank=self._rank, stage=self._stage.index, step=step, index=micro_batch)
