"""One replica's stage at work: asks the policy, runs the action, hands on what it makes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from varuna.core.errors import DataError
from varuna.core.plan import Plan
from varuna.data.loader import Loader
from varuna.data.samples import MicroBatch, SampleSource, verify_digests
from varuna.engine.groups import Groups
from varuna.engine.inbox import Inbox
from varuna.engine.inputs import examples_of
from varuna.engine.links import Receiver, Sender
from varuna.engine.message import Layout
from varuna.engine.reduce import Reducer
from varuna.engine.section import Examples, Tape
from varuna.engine.stage import Stage
from varuna.observe.bus import span
from varuna.schedule.actions import Action, Kind
from varuna.schedule.policy import Policy, make_policy

_ACTIVATION_TAG, _GRADIENT_TAG = 1, 2

WeightFunction = Callable[[dict[str, Tensor]], float | Tensor]


@dataclass
class _Flight:
    """A micro-batch between its F and its B on this stage."""

    values: dict[str, Tensor]
    examples: Examples
    weight: float = 0.0
    tapes: list[Tape] = field(default_factory=list)


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
        self._stage, self._plan, self._rank = stage, plan, rank
        self._inbox, self._reducer, self._weight, self._steps = inbox, reducer, weight, steps
        self._replica = plan.place_of(rank).replica
        self._mine = plan.micro_batches_of(self._replica)
        split = stage.job.model.split
        self._into = split.crossings[stage.sections.start]
        self._out = () if stage.is_last else split.crossings[stage.sections.stop]
        self._keys = self._input_keys()
        self._loader = Loader(source, deliver=self._deliver, lookahead=4) if self._reads_inputs else None
        self._requested = stage.next_step
        self._inputs_in = self._gradients_in = 0
        self._open_links(groups)
        self.activity = "starting"
        self.losses: list[tuple[int, list[float]]] = []
        """(global micro-batch, [weighted loss, weight, metric sums...]) of the step; last stage only"""

    def _input_keys(self) -> tuple[str, ...] | None:
        """Inputs to read; None for all of them, which the user's weight may want."""
        if self._stage.is_last and self._weight is not None:
            return None
        graphs = (self._stage.job.model.sections[section] for section in self._stage.sections)
        return tuple(dict.fromkeys(key for graph in graphs for key in graph.inputs))

    @property
    def _reads_inputs(self) -> bool:
        return self._keys is None or bool(self._keys)

    def _open_links(self, groups: Groups) -> None:
        stage, rank = self._stage, self._rank
        self._upstream = self._downstream = None
        if stage.index > 0:
            name = f"of rank {rank} with rank {rank - 1} (stage {stage.index - 1})"
            self._upstream = Sender(groups.world, rank - 1, _GRADIENT_TAG, self._inbox, name)
            expected = self._expected("activation", self._into_layout, range(len(self._mine)))
            Receiver(groups.world, rank - 1, _ACTIVATION_TAG, self._inbox, name, expected)
        if not stage.is_last:
            name = f"of rank {rank} with rank {rank + 1} (stage {stage.index + 1})"
            self._downstream = Sender(groups.world, rank + 1, _ACTIVATION_TAG, self._inbox, name)
            expected = self._expected("gradient", self._gradient_layout, self._policy().backward_order)
            Receiver(groups.world, rank + 1, _GRADIENT_TAG, self._inbox, name, expected)

    def _expected(
        self, kind: str, layout: Callable[[int], Layout], order: range | tuple[int, ...]
    ) -> Iterator[tuple[tuple[str, int, int], int]]:
        for step in range(self._stage.next_step, self._steps):
            for local in order:
                yield (kind, step, self._mine[local]), layout(self._mine[local]).size_bytes

    def _policy(self) -> Policy:
        plan, stage = self._plan, self._stage.index
        return make_policy(
            plan.policy,
            stage=stage,
            stages=plan.stages,
            micro_batches=len(self._mine),
            stash_limit=plan.stash_limits[stage],
        )

    # -- layouts of messages, by global micro-batch -----------------------------------------------------

    def _into_layout(self, micro_batch: int) -> Layout:
        return Layout(self._into, len(self._plan.samples_of(micro_batch)), digests=True)

    def _out_layout(self, micro_batch: int) -> Layout:
        return Layout(self._out, len(self._plan.samples_of(micro_batch)), digests=True)

    def _gradient_layout(self, micro_batch: int) -> Layout:
        return _differentiable(self._out_layout(micro_batch))

    # -- the step ----------------------------------------------------------------------------------------

    def run(self, step: int) -> None:
        """Run every F, R and B of ``step``; the sums of finished sections are on their way to the replicas.

        Raises:
            GenerationEnded: the manager ended the generation.
            LinkError: a link broke, or nothing came within the bound.
            DataError: stages disagree on a sample, or it is not what the model was captured with.
        """
        self._request(step)
        self._stage.clear_gradients()
        self.losses = []
        self._inputs_in = self._gradients_in = 0
        policy = self._policy()
        flights: dict[int, _Flight] = {}
        left = len(self._mine)
        while not policy.finished:
            self._inbox.check()
            arrived = self._arrived(step, policy)
            action = policy.next(*arrived)
            if action is None:
                self._wait(step, policy, arrived)
                continue
            self.activity = f"step {step}: {action}"
            micro_batch = self._mine[action.micro_batch]
            with span(action.kind.value, rank=self._rank, stage=self._stage.index, step=step, index=micro_batch):
                if action.kind is Kind.FORWARD:
                    flights[micro_batch] = self._forward(step, micro_batch, policy.keeps(action.micro_batch))
                elif action.kind is Kind.RECOMPUTE:
                    self._recompute(step, micro_batch, flights[micro_batch])
                else:
                    left -= 1
                    self._backward(step, micro_batch, flights.pop(micro_batch), is_final=left == 0)
            policy.done(action)

    def close(self) -> None:
        """Drop queued work; threads end when their queues are empty or their groups abandoned."""
        for sender in (self._upstream, self._downstream):
            if sender is not None:
                sender.close()
        if self._loader is not None:
            self._loader.close(timeout_s=0.0)

    def _request(self, step: int) -> None:
        """Read this step's micro-batches, and the next step's behind them."""
        while self._loader is not None and self._requested <= min(step + 1, self._steps - 1):
            base = self._requested * self._plan.global_batch
            work = [(j, [base + offset for offset in self._plan.samples_of(j)]) for j in self._mine]
            self._loader.request(self._requested, work, self._keys)
            self._requested += 1

    def _deliver(self, step: int, micro_batch: int, batch: MicroBatch | BaseException) -> None:
        self._inbox.put(("batch", step, micro_batch), batch)

    def _arrived(self, step: int, policy: Policy) -> tuple[int, int]:
        """How many inputs and gradients have come so far, in the order of their use; both only grow."""
        total = len(self._mine)
        while self._inputs_in < total and self._has_input(step, self._mine[self._inputs_in]):
            self._inputs_in += 1
        order = policy.backward_order
        while self._gradients_in < total and (
            self._stage.is_last or self._inbox.has(("gradient", step, self._mine[order[self._gradients_in]]))
        ):
            self._gradients_in += 1
        return self._inputs_in, self._gradients_in

    def _has_input(self, step: int, micro_batch: int) -> bool:
        activation_here = self._stage.index == 0 or self._inbox.has(("activation", step, micro_batch))
        return activation_here and (self._loader is None or self._inbox.has(("batch", step, micro_batch)))

    def _wait(self, step: int, policy: Policy, arrived: tuple[int, int]) -> None:
        def describe() -> str:
            awaited = policy.awaited()
            what = "activation or input" if awaited.kind is Kind.FORWARD else "gradient"
            whole = Action(awaited.stage, awaited.kind, self._mine[awaited.micro_batch])
            return f"the {what} of {whole} (step {step}, rank {self._rank}, replica {self._replica})"

        self.activity = f"waits for {describe()}"
        self._inbox.wait(lambda: self._arrived(step, policy) != arrived, describe)

    # -- actions -----------------------------------------------------------------------------------------

    def _forward(self, step: int, micro_batch: int, keep: bool) -> _Flight:
        stage, digests = self._stage, None
        batch = self._take_batch(step, micro_batch)
        values: dict[str, Tensor] = {}
        if stage.index > 0:
            buffer = self._inbox.take(("activation", step, micro_batch), lambda: f"activation {micro_batch}")
            layout = self._into_layout(micro_batch)
            values, digests = layout.unpack(buffer, stage.job.device), layout.digests_of(buffer)
            self._compare(batch, digests)
        if batch is not None:
            digests = list(batch.digests)
        flight = _Flight(values, self._examples(micro_batch, batch))
        if keep:
            out, results, flight.tapes = stage.record(values, flight.examples, step, micro_batch)
        else:
            out, results = stage.forward(values, flight.examples, step, micro_batch)
        if self._downstream is not None:
            self._downstream.send(self._out_layout(micro_batch).pack(out, digests or []))
        else:
            flight.weight = self._note(micro_batch, results, flight.examples, batch)
        return flight

    def _recompute(self, step: int, micro_batch: int, flight: _Flight) -> None:
        _, _, flight.tapes = self._stage.record(flight.values, flight.examples, step, micro_batch)

    def _backward(self, step: int, micro_batch: int, flight: _Flight, *, is_final: bool) -> None:
        stage = self._stage
        if stage.is_last:
            loss = stage.job.model.sections[-1].makes[0]
            seed = torch.tensor(flight.weight, dtype=stage.job.dtype, device=stage.job.device)
            gradients = {loss: seed} if flight.weight else {}
        else:
            buffer = self._inbox.take(("gradient", step, micro_batch), lambda: f"gradient {micro_batch}")
            gradients = self._gradient_layout(micro_batch).unpack(buffer, stage.job.device)

        def section_done(section: int) -> None:
            if is_final:
                self._reducer.section_done(step, section)

        received = stage.backward(flight.tapes, gradients, section_done)
        if self._upstream is not None:
            self._upstream.send(_differentiable(self._into_layout(micro_batch)).pack(received))

    # -- inputs and losses -------------------------------------------------------------------------------

    def _take_batch(self, step: int, micro_batch: int) -> MicroBatch | None:
        if self._loader is None:
            return None
        batch: MicroBatch = self._inbox.take(("batch", step, micro_batch), lambda: f"the samples of {micro_batch}")
        self._loader.taken()
        return batch

    def _compare(self, batch: MicroBatch | None, theirs: list[int]) -> None:
        if batch is not None and any(theirs):
            verify_digests(batch, theirs, who=f"an earlier stage (below stage {self._stage.index})")

    def _examples(self, micro_batch: int, batch: MicroBatch | None) -> Examples:
        job = self._stage.job
        return examples_of(batch, len(self._plan.samples_of(micro_batch)), job.model.inputs, job.device)

    def _note(
        self, micro_batch: int, results: tuple[Tensor, ...], examples: Examples, batch: MicroBatch | None
    ) -> float:
        """Keep loss, weight and metric sums of a micro-batch for the vote; returns the weight."""
        model = self._stage.job.model
        loss, sums = results[0].detach(), results[1 + model.counts_targets :]
        if self._weight is not None and batch is not None:
            weight = float(self._weight(batch.tensors))
        else:
            weight = float(results[1]) if model.counts_targets else float(examples.size)
        if not 0 <= weight < float("inf"):
            raise DataError(f"the weight of micro-batch {micro_batch} is {weight}: weight(batch) must be finite, >= 0")
        weighted = float(loss) * weight if weight else 0.0  # a mean over no targets is NaN and counts nothing
        self.losses.append((micro_batch, [weighted, weight, *(float(value) for value in sums)]))
        return weight


def _differentiable(layout: Layout) -> Layout:
    return Layout(tuple(c for c in layout.crossings if c.differentiable), layout.examples, digests=False)
