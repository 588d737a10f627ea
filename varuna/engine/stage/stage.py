"""A stage on one rank: its sections' parameters, gradient buffers, optimizer and computations.

        section i           i + 1        ...   the ``keep`` last
F  -->  no graph       -->  no graph     -->   tape          -->  activation for the next stage
R  -->  tape           -->  tape               (have tapes)
B  <--  tape           <--  tape         <--   tape          <--  gradient from the next stage
          |                   |                  |
        bucket i            bucket i + 1       bucket             sums over micro-batches, by section
          +-- reduced over the replicas, voted on, then ``apply``: x scale, optimizer, copies to compute with

Sections have their numbers in the model on every rank; ``position`` counts within the stage. Of the first
``gradient_free`` sections only F runs. I is B without gradients of weights, which W adds to the buckets later.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from varuna.checkpoint.io.section_state import AVERAGE, SectionState
from varuna.core.errors import UsageError
from varuna.core.plan import Plan
from varuna.core.sums import HeldSums
from varuna.data.randomness import SeededTurn
from varuna.engine.base.still import StateGate
from varuna.engine.device.host_copies import DONE, HOST, Ready
from varuna.engine.graphs.compiled import Compiler
from varuna.engine.stage import load_state
from varuna.engine.stage.buffer_statistics import Statistics
from varuna.engine.stage.cross_stage import Exchange, LateExchange, LocalExchange, StageExchange, installed
from varuna.engine.stage.frozen_stream import stream_of, streamed_by
from varuna.engine.stage.gradient_bucket import Bucket, squared_norms
from varuna.engine.stage.guards import BranchResults
from varuna.engine.stage.job import Job
from varuna.engine.stage.joining import links_of
from varuna.engine.stage.offload import OffloadedOptimizer, optimizer_of
from varuna.engine.stage.optimizer import StageOptimizer, call_before_step
from varuna.engine.stage.parameter_groups import NO_STEERING, Steering
from varuna.engine.stage.precision import ComputeCopies, HalfGradients
from varuna.engine.stage.section import Examples, SectionRunner, Tensors, flow_on
from varuna.engine.stage.sharded_optimizer import ShardedOptimizerState
from varuna.engine.stage.sums import ResumedStep, StepShare, Sums, TiedTotals
from varuna.engine.stage.tape import Tape, backward, crossing, join_tapes, joined_values, take_row
from varuna.partition import after_step
from varuna.partition.cut.split_backward import PendingWeights
from varuna.partition.held_names import owned_elsewhere
from varuna.partition.model import PartitionedModel
from varuna.partition.parameter_marks import put_marks

Results = tuple[Tensor, ...]
DeferredWeightGrad = tuple[int, int, PendingWeights | None]
"""A section, a micro-batch, and the weight gradients that I left for W; None: I ran it whole."""


class Stage:
    """Sections of one stage of a pipeline, on this rank's device."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        stage: int,
        states: Mapping[int, SectionState],
        next_step: int,
        *,
        replica: int = 0,
        begun: ResumedStep | None = None,
        missing: frozenset[int] = frozenset(),
        steering: Steering = NO_STEERING,
    ) -> None:
        """Take over the state of every section of the stage.

        Args:
            job: what the user asked for.
            plan: the generation's plan.
            stage: which stage of it.
            states: at least one state for each of its sections; storages are taken over, not copied.
            next_step: steps that the states contain.
            replica: which replica of the stage; decides what of shared optimizer state is here.
            begun: the first step, if another generation has begun it.
            missing: sections whose optimizer state comes later: see ``complete``.
            steering: what the training loop has told the optimizer and its scheduler.
        """
        self.job = job
        self.plan, self.index, self.sections = plan, stage, plan.pipeline_of(replica).sections_of(stage)
        self.is_last, self.next_step = self.sections.stop == plan.sections, next_step
        self.still = StateGate(None if missing else next_step)  # copies of it, and saves, wait until it is whole
        self.sharding = ShardedOptimizerState(plan, job, stage, replica, missing)
        self.gradient_free = len(range(self.sections.start, min(self.sections.stop, job.model.gradient_free)))
        """number of first sections with nothing to train in them or before them: F only, never R or B"""
        graphs = [job.model.sections[section] for section in self.sections]
        streamed = streamed_by(plan, job.model, self.sections)
        self.parameters = load_state.parameters_of(
            graphs,
            states,
            trainable=job.model.trainable,
            held=self.sharding.held,
            whole=self.sharding.whole,
            dtype=job.dtype,
            device=job.device,
            masters_at=HOST if job.masters_away else job.device,
            dtypes=job.model.dtypes,
            followed=() if job.model.following is None else job.model.following.written,
            streamed=streamed,
        )
        self.stream = stream_of(graphs, self.parameters, streamed, job.traffic.frozen)
        put_marks(self.parameters.items(), job.marks)
        self.buffers = load_state.buffers_of(graphs, states, job.dtype, job.device)
        self.statistics = Statistics(graphs, plan, job.traffic.sums, begun)
        self.truths, self.buckets = BranchResults(), dict[int, Bucket]()
        flats = {} if begun is None else begun.flats
        self._gradients: dict[str, Tensor] = {}  # as the optimizer gets them
        held, tied = dict[int, dict[str, Tensor]](), {parameter.name for parameter in job.model.facts.tied}
        self._compute = ComputeCopies(self.parameters, job.dtype, job.device, resting=streamed)
        for graph in graphs:
            leaves = {
                # A tied one has a leaf in each section: gradients are added in section order, wherever stages begin.
                name: self._compute[name].detach().requires_grad_() if name in tied else self._compute[name]
                for name in dict.fromkeys(graph.parameters)
                if name in job.model.trainable
            }
            self.buckets[graph.index] = Bucket(leaves, job.device, flats.get(graph.index))
            held[graph.index] = {**{name: self._compute[name] for name in graph.parameters}, **leaves}
        self.work = StepShare(plan, replica, next_step, begun, job.traffic.links)
        self.sums = Sums(self.buckets, plan, begun, outlast=job.sums_outlast, copies=job.traffic.sums)
        self.variants = [
            [self._runner(model, section, held[section], job.buffers, job.compiler) for section in self.sections]
            for model in job.model.graphs
        ]
        """the sections' graphs for each declared length, the longest first"""
        self._links = [links_of(model.split) for model in job.model.graphs]
        self.tied = [p for p in job.model.facts.tied if p.name in self.parameters and p.name in job.model.trainable]
        self.totals = TiedTotals(self.sums)
        self._look_for_gradients()
        self._halves = HalfGradients(self.parameters, self._gradients if job.dtype is torch.float32 else {})
        updated = [(name, value) for name, value in self.named_parameters() if name in self.sharding.updated]
        known = load_state.optimizer_state_of(states, self.sharding.whole)
        self.optimizer = optimizer_of(job, graphs, updated, known, next_step, self._gradients, steering)
        self._show(self._gradients)
        # Where ``p.data`` is put back if the user's code assigns it: links and sections have views of this memory.
        self._homes = {name: value.detach() for name, value in self.parameters.items()}
        # A tied parameter counts once, in the stage that has its lowest section.
        foreign = {p.name for p in self.tied if p.owner not in self.sections}
        named = (*self.parameters.items(), *self.optimizer.parameters.items())
        self.owned = frozenset(id(value) for name, value in named if name not in foreign)
        """ids of the parameters that this stage counts in what is shared with other stages"""
        self.loss_scale = load_state.loss_scale_of(states) if job.dtype is torch.float16 else None
        self.local_exchange = LocalExchange()
        self.copied: Ready = DONE
        """until then the state is being copied: the next update waits for it, nothing else does"""
        self._asked: tuple[int, frozenset[str]] = (-1, frozenset())  # the step for which ``frozen`` was asked last
        self._undo: Callable[[], None] | None = None  # puts back what was before a tentative step

    def _look_for_gradients(self) -> None:
        """Find them in the buckets; those of tied parameters in that of their first section here."""
        for tied in self.tied:
            home = next(section for section in tied.sections if section in self.sections)
            self.totals.views[tied.name] = self.buckets[home].views[tied.name]
        for bucket in self.buckets.values():
            self._gradients |= bucket.views
        self._gradients |= self.totals.views

    def evaluation_runners(
        self, model: PartitionedModel, buffers: Mapping[str, Tensor], *, averaged: bool
    ) -> list[SectionRunner]:
        """Make the sections of the same model in evaluation mode, over this stage's parameters and newest buffers.

        Args:
            model: cut as the job's model.
            buffers: those that training has no use for, or that other stages update.
            averaged: over averages of the parameters, where the optimizer keeps any.
        """
        known = {**self.job.buffers, **buffers}
        held = {name: self._compute[name] for name in self.parameters}
        held = _with_averages(held, self.optimizer) if averaged else held
        return [self._runner(model, section, held, known, None) for section in self.sections]

    def _runner(
        self,
        model: PartitionedModel,
        section: int,
        held: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        compiler: Compiler | None,
    ) -> SectionRunner:
        job, graph = self.job, model.sections[section]
        # The stage's own come last: they are the newest.
        known = {**buffers, **self.buffers}
        fixed = [known[name] for name in graph.buffers]
        fixed += [model.constants[name].to(job.device) for name in graph.constants]
        tensors = Tensors(tuple(held[name] for name in graph.parameters), tuple(fixed), self.stream)
        crossings = {c.name: c for into in model.split.crossings for c in into}
        return SectionRunner(
            graph,
            tensors,
            crossings,
            job.seed,
            halved=partial(job.halves.of, model),
            note=self.statistics.keep_found,
            compiled=None if compiler is None else compiler.of,
            guard=self.truths.keep_results,
        )

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return trainable parameters by the model's own names, each once, in the order of sections."""
        return [(name, value) for name, value in self.parameters.items() if name in self.job.model.trainable]

    # -- computation -------------------------------------------------------------------------------

    def forward(
        self,
        values: Mapping[str, Tensor],
        examples: Examples,
        step: int,
        micro_batch: int,
        *,
        keep: int = 0,
        split: bool = False,
        joined: bool = False,
    ) -> tuple[dict[str, Tensor], Results, list[Tape], dict[str, Tensor]]:
        """Run F; return what crosses into the next stage, or the last one's results, what was kept, and R's input.

        Args:
            values: what has crossed into the stage.
            examples: the micro-batch.
            step: keys the randomness, with ``micro_batch``.
            micro_batch: its global number.
            keep: how many of the last sections keep their graph, so that R need not run them again.
            split: the B of kept sections is to run in two halves.
            joined: kept sections may have one graph.
        """
        flowing: dict[str, Tensor] = dict(values)
        made: Results = ()
        tapes: list[Tape] = []
        # The first ``gradient_free`` sections have no B, so a graph of theirs would be of no use.
        first_kept = max(len(self.sections) - keep, self.gradient_free)
        begin: dict[str, Tensor] = {}
        for position, runner in enumerate(self.variants[examples.variant]):
            # R begins behind the sections that B never reaches, with what crosses into the first that it does.
            if position == self.gradient_free < first_kept:
                begin = flowing
            # A kept section runs as in R, by the same seeds: its tape serves B as R's would.
            if position < first_kept:
                made = runner.forward(flowing, examples, step, micro_batch)
            else:
                made = self._record(runner, tapes, flowing, examples, step, micro_batch, split=split, joined=joined)
            flowing = flow_on(self.job.model.graphs[examples.variant], flowing, runner, made)
        return flowing, made, tapes, begin

    def record(
        self,
        values: Mapping[str, Tensor],
        examples: Examples,
        step: int,
        micro_batch: int,
        *,
        keep: int = 0,
        first: int = 0,
        split: bool = False,
        joined: bool = False,
    ) -> list[Tape]:
        """Run R; return tapes of the sections from ``first`` on, but for the ``keep`` last, whose F kept theirs."""
        flowing: dict[str, Tensor] = dict(values)
        tapes: list[Tape] = []
        for runner in self.variants[examples.variant][first : len(self.sections) - keep]:
            made = self._record(runner, tapes, flowing, examples, step, micro_batch, split=split, joined=joined)
            flowing = flow_on(self.job.model.graphs[examples.variant], flowing, runner, made)
        return tapes

    def _record(
        self,
        runner: SectionRunner,
        tapes: list[Tape],
        values: Mapping[str, Tensor],
        examples: Examples,
        step: int,
        micro_batch: int,
        *,
        split: bool,
        joined: bool,
    ) -> Results:
        """Run a section with a graph, behind ``tapes``; returns what it makes, without."""
        if split or not joined or runner.is_compiled:
            tapes.append(runner.record(values, examples, step, micro_batch, split=split))
            return crossing(tapes[-1].made)
        section = runner.section.index
        links = self._links[examples.variant][section]
        taken = joined_values(tapes, section, links)
        tape = runner.record(values, examples, step, micro_batch, joined=taken)
        if taken:
            join_tapes(tapes, tape, links, taken)
        else:
            tapes.append(tape)
        return crossing(tape.made)

    def backward(
        self, tapes: list[Tape], gradients: dict[str, Tensor], section_done: Callable[[int], None]
    ) -> dict[str, Tensor]:
        """Run B: consume the tapes from the last section to the first; return gradients of what was received."""
        while tapes:
            if tapes[-1].row is not None:
                row = take_row(tapes)
                backward(row, gradients, self._adding)
                for tape in row:
                    section_done(tape.section.index)
                continue
            tape = tapes.pop()
            section = tape.section.index
            with self.sums.adding(section, tape.micro_batch):
                backward((tape,), gradients)
                # A tape that was recorded for two halves may still be run as a whole: then W's part follows at once.
                if tape.pending is not None:
                    tape.pending.flush()
                self.buckets[section].collect()
            section_done(section)
        self._skip(section_done)
        return gradients

    @contextmanager
    def _adding(self, tape: Tape) -> Iterator[None]:
        """Run the backward of a section, one of several that have one graph, in this block."""
        with self.sums.adding(tape.section.index, tape.micro_batch):
            yield
            self.buckets[tape.section.index].collect()

    def _skip(self, section_done: Callable[[int], None]) -> None:
        # They have no backward, but the reducer counts on a call for every section, the last first.
        for section in reversed(self.sections[: self.gradient_free]):
            section_done(section)

    def input_backward(
        self, tapes: list[Tape], gradients: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], list[DeferredWeightGrad]]:
        """Run I; return the gradients of what was received, and the weight gradients that are left for W.

        Sections that cannot be split run whole.
        """
        left: list[DeferredWeightGrad] = []
        while tapes:
            tape = tapes.pop()
            section = tape.section.index
            with self.sums.adding(section, tape.micro_batch, whole=tape.pending is None):
                backward([tape], gradients)
                self.buckets[section].collect()
            # From the last section to the first, as in B: the reducer gets them from W in that order, too.
            left.append((section, tape.micro_batch, tape.pending))
        return gradients, left

    def weight_backward(self, left: list[DeferredWeightGrad], section_done: Callable[[int], None]) -> None:
        """Run W: consume what ``input_backward`` left, from the last section to the first."""
        for section, micro_batch, pending in left:
            if pending is not None:
                with self.sums.adding(section, micro_batch, rest=True):
                    pending.flush()
                    self.buckets[section].collect()
            section_done(section)
        self._skip(section_done)
        left.clear()

    # -- gradients -----------------------------------------------------------------------------------

    def clear_gradients(self) -> None:
        """Start a step: set all sums to zero, but for those that a broken one has left."""
        self.sums.begin()
        self._halves.hide()
        self.statistics.clear()
        self.truths.clear()

    @property
    def gradient_scale(self) -> float:
        """Gradients are kept times this power of two; 1 but in fp16."""
        return self.loss_scale.value / self.job.unit if self.loss_scale is not None else 1.0

    def held_sums(self) -> HeldSums | None:
        """Seal and return the sums that another generation may go on from, if this one ended within a step."""
        found, without, m = self.sums.seal(), self.sums.without, self.plan.micro_batch
        if not self.sums.outlast or not (found or without):
            return None
        return HeldSums(micro_batch=m, sections=found, without=without, losses=self.work.known)

    def squared_norms(self) -> dict[int, float]:
        """Return the squared L2 norm of each section's reduced gradients; a tied parameter counts at its owner only."""
        norms = squared_norms(self.buckets, self.tied, self.totals.known, but=self._frozen)
        return {section: norm / self.gradient_scale**2 for section, norm in norms.items()}

    def apply(self, step: int, scale: float, exchange: Exchange | None = None, *, overflowed: bool = False) -> None:
        """Scale the reduced gradients and step the optimizer: once per step, whatever is asked again.

        Args:
            step: to be applied.
            scale: factor of the gradients.
            exchange: answers ``all_reduce_shared`` instead of the engine: the tracer's.
            overflowed: some gradient of the job is not finite, in fp16: nothing is updated.
        """
        # The manager's verdict may ask for a step that is applied here already.
        if step < self.next_step:
            return
        assert step == self.next_step, f"step {step} cannot be applied on top of {self.next_step}"
        if overflowed:
            self.roll_back()
        # Else it was applied before the vote, and the vote only confirms it.
        elif self._undo is None:
            with installed(exchange or (LateExchange(self.owned) if self.plan.is_cut else self.local_exchange)):
                self._update(scale)
        self._undo = None
        if self.loss_scale is not None:
            self.loss_scale = self.loss_scale.after(overflowed)
        self.job.traffic.saves.compute_after(self.copied)
        # Only now: buffers and the user's ``after_step`` have no undo, and the step is certain.
        self.statistics.apply(self.buffers)
        _run_after_step(self.job, self.parameters, self.buffers, self._compute, step)
        self.optimizer.advance()
        self.sharding.applied(overflowed=overflowed)
        self.sums.discard()
        self.work.end()
        self.next_step = step + 1

    def apply_tentatively(self, scale: float, exchange: StageExchange) -> None:
        """Apply a step before the vote on it, since the user's code talks to other stages meanwhile.

        ``apply`` then commits it without talking to anyone, and ``roll_back`` undoes it. Whatever is raised, the
        stage is as it was.
        """
        assert self._undo is None
        # Before anything changes: the vote may still say no, or another stage fail.
        self._undo = self.optimizer.copies()
        try:
            with installed(exchange):
                self._update(scale)
            exchange.finish()
        except BaseException:
            self.roll_back()
            raise

    def roll_back(self) -> None:
        """Undo a tentative step, bit for bit; nothing to do without one."""
        if self._undo is not None:
            self._undo()
            self._undo = None
            self._put_back()
            self._compute.refresh(self.parameters)

    def _update(self, scale: float) -> None:
        self.job.traffic.saves.compute_after(self.copied)
        # In fp16 the sums are scaled by a power of two, so this division costs no bit.
        scale /= self.gradient_scale
        self.sums.discard()
        # After ``discard``: over the section's own sum, from which another worker could have resumed.
        self.totals.place_totals()
        for bucket in self.buckets.values():
            bucket.flat.mul_(scale)
        self._show(self.totals.views)
        self._halves.show()
        frozen = self._frozen
        for name in frozen:
            self.parameters[name].grad = None
            # None, not zero: optimizers skip such parameters, moments and weight decay included.
            del self._gradients[name]
        is_torchs = self.job.before_step is None and self.optimizer.is_torchs
        # Keyed by the step: all replicas draw the same, under any plan.
        with nullcontext() if is_torchs else SeededTurn(self.job.seed, "update", self.next_step):
            call_before_step(self.job.before_step, self.named_parameters(), self.next_step)
            with self.sharding.without_exchange():
                self.optimizer.update(self._compute.refresh)
        if frozen or not is_torchs:
            self._put_back()

    def _put_back(self) -> None:
        """Give parameters their own memory again, and sums of gradients new memory.

        The user's code may have assigned ``p.data``, of which sections and links have views. It may also have assigned
        ``p.grad`` or its ``data``, to which backwards add, or keep it for the next step. Values stay.
        """
        for name, home in self._homes.items():
            parameter = self.parameters[name]
            if parameter.requires_grad is not (name in self.job.model.trainable):
                raise UsageError(
                    f"before_step= or the optimizer changed requires_grad of {name}. Which parameters can be trained "
                    "is decided before step 0: to leave some as they are in some steps, pass frozen=, a function of "
                    "the parameter's name and the step."
                )
            if parameter.data_ptr() != home.data_ptr():
                home.copy_(parameter.detach())
                parameter.data = home
        for parameter in self.parameters.values():
            parameter.grad = None
        self._gradients.clear()
        self.totals.views.clear()
        for bucket in self.buckets.values():
            bucket.renew()
        self._look_for_gradients()
        self._show(self._gradients)

    @property
    def _frozen(self) -> frozenset[str]:
        """Names of parameters that the user does not train in this step, asked once."""
        frozen, (step, _) = self.job.frozen, self._asked
        if frozen is not None and step != self.next_step:
            names = frozenset(name for name, _ in self.named_parameters() if frozen(name, self.next_step))
            self._asked = self.next_step, names
        return self._asked[1]

    def _show(self, gradients: Mapping[str, Tensor]) -> None:
        """Put gradients where the user's code looks for them; not where a parameter is a copy, or in another memory."""
        if not self.job.masters_away:
            for name, gradient in gradients.items():
                if self.parameters[name].dtype is gradient.dtype:
                    self.parameters[name].grad = gradient

    def exchanged_parameters(self) -> dict[int, list[Tensor]]:
        """Return, for each section that only some replicas update, the tensors that it computes with and they write."""
        sections, trainable = self.job.model.sections, self.job.model.trainable
        return {
            section: [self._compute[name] for name in dict.fromkeys(sections[section].parameters) if name in trainable]
            for section in self.sharding.sends
        }

    # -- state ---------------------------------------------------------------------------------------

    def complete(self, rest: SectionState) -> None:
        """Take over the rest of the state of a section that was ``missing``; before the update that needs it."""
        load_state.put_parameters(rest, self.parameters)
        self.optimizer.put_state(load_state.optimizer_state_of({rest.section: rest}, (rest.section,)))
        self.sharding.missing -= {rest.section}
        if not self.sharding.missing:
            self.still.open_at(self.next_step)

    def state_of(self, section: int, *, owned_only: bool = False) -> SectionState:
        """Return a section's state as references (not copies); without optimizer state where other replicas have it.

        ``owned_only`` leaves out copies of what another section owns.
        """
        sections, tied = self.job.model.sections, self.job.model.facts.tied
        foreign = owned_elsewhere(sections, tied, section) if owned_only else frozenset[str]()
        return load_state.state_in(
            section,
            {
                name: self.parameters[name]
                for name in dict.fromkeys(sections[section].parameters)
                if name not in foreign
            },
            {name: self.buffers[name] for name in sections[section].updated if name not in foreign},
            self.optimizer.state_of if section in self.sharding.whole else None,
            self.loss_scale,
        )


def _with_averages(computed: Mapping[str, Tensor], optimizer: StageOptimizer | OffloadedOptimizer) -> dict[str, Tensor]:
    """Return the values that sections compute with, by parameter: averages where there are any."""
    found = {name: optimizer.state_of(name)[0].get(AVERAGE) for name in computed}
    return {
        name: value if (average := found[name]) is None else average.to(value.device, value.dtype)
        for name, value in computed.items()
    }


def _run_after_step(
    job: Job, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], compute: ComputeCopies, step: int
) -> None:
    """Let ``after_step`` change a stage's parameters and buffers: once a step is certain, so nothing is ever undone.

    Args:
        job: has the function, and what its dry run showed.
        parameters: all of the stage, after the optimizer.
        buffers: those that steps change.
        compute: copies of parameters, to be renewed.
        step: that was applied.

    Raises:
        UsageError: it computes with what the stage does not hold.
    """
    function, following = job.after_step, job.model.following
    if function is not None and following is not None:
        after_step.run(function, following, parameters, buffers, step, seed=job.seed, device=job.device)
        compute.refresh({name: value for name, value in parameters.items() if name in following.written})
