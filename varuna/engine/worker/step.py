"""One step of a formed generation: F, R, B, reduce, vote, apply.

runtime.run       F, R, B of this rank's micro-batches; sums of finished sections are on their way
reducer.finish    all sums are totals over the replicas, tied parameters over their sections
cast_vote         this rank's slots: norms, counts, losses, flags
tentative apply   if the user's update combines values over stages, or may: it needs peers, so before the vote
reducer.vote      every rank that has the result has the same vector, and may apply the step
_prove, check     all ranks read the same vector: all refuse the step, or none does
remember          from here on this rank can tell the result to the manager, and so to survivors
apply_vote        the state is that of step + 1; without peers, so nothing can interrupt it
gather            a sharded optimizer: new parameters from the replicas that updated them
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from varuna.core.errors import LinkError
from varuna.core.messages import Vote
from varuna.core.vote import StepTotals
from varuna.engine.device.faults import DeviceFull, fault_of
from varuna.engine.pipeline.apply import apply_vote, layout_of, overflowed, scale_of
from varuna.engine.pipeline.reduce import cast_vote
from varuna.engine.shown.recent_steps import RanStep, RecentSteps
from varuna.engine.stage.stage import Stage
from varuna.engine.worker.generation import Generation
from varuna.engine.worker.reporting import Reporter


def run_step(
    generation: Generation,
    step: int,
    *,
    flags: Callable[[], Mapping[str, float]],
    combines: bool,
    check: Callable[[StepTotals, Sequence[float]], None],
    remember: Callable[[Vote], None],
    reporter: Reporter,
    recent: RecentSteps,
) -> tuple[Vote, StepTotals]:
    """Run and apply ``step``. Nothing may interrupt between the vote's result and the apply.

    Args:
        generation: a formed one.
        step: the stage's next one.
        flags: asked when the vote begins: what this rank says in it besides norms and losses.
        combines: apply before the vote, for a job whose steps talk across stages (or may: the first one finds out).
        check: gets the totals and the vote before ``remember``; what it raises keeps the step from being applied.
        remember: gets the vote before it is applied.
        reporter: hears what the step took.
        recent: the same, of this one step.

    Raises:
        GenerationEnded: the manager ended the generation.
        LinkError: a link broke, or nothing came within the bound.
        DeviceFull: the device has too little memory for the actions of the step.
        WorkerError: replicas hold different states.
        DataError: stages disagree on a sample, or it is not what the model was captured with.
    """
    stage, plan = generation.stage, generation.plan
    begin_s = time.monotonic()
    stage.still.note_begin(step)
    with _sparing_the_worker(generation, step):
        generation.runtime.run(step)
    generation.wait_until_whole()  # after the last activation; gradients are still being reduced
    # Offloaded state begins to come in while sums are still on their way.
    stage.optimizer.prepare()
    with generation.phase("reduce", step):
        generation.reducer.finish(step)
    # After ``finish``: norms are of totals. Flags are asked as late as possible, so they wait for no other step.
    vector = cast_vote(layout_of(stage), stage, generation.replica, stage.work.losses.numbers(), dict(flags()))
    if plan.is_cut and combines:
        with generation.phase("share", step):
            _apply_tentatively(generation, step, vector)
    with generation.phase("vote", step):
        summed = generation.reducer.vote(step, vector)
    # Before ``remember``: a vote that was remembered is a step that survivors may commit.
    _prove(stage, step, summed)
    check(layout_of(stage).read(summed), summed)
    vote = Vote(
        generation=generation.assignment.generation,
        step=step,
        vector=summed,
        wall_s=time.monotonic() - begin_s,
        tally=layout_of(stage).tally(summed),
    )
    remember(vote)
    with generation.phase("apply", step):
        totals = apply_vote(stage, step, summed)
    if stage.sharding.sends and not overflowed(stage.job.dtype, totals):
        with generation.phase("gather", step):
            generation.reducer.gather(step)
    if totals.compare:
        with generation.phase("compare", step):
            generation.comparison.run(step)
    _report(generation, reporter, recent, begin_s)
    return vote, totals


@contextmanager
def _sparing_the_worker(generation: Generation, step: int) -> Iterator[None]:
    """Turn a lack of device memory into ``DeviceFull``: between updates the state is whole, and sums know what is half.

    Raises:
        DeviceFull: it was.
    """
    try:
        yield
    except RuntimeError as error:
        fault = fault_of(error)
        if fault is None or not fault.is_memory:
            raise
        raise DeviceFull(generation.inbox.who, step, fault) from error


def _prove(stage: Stage, step: int, summed: Sequence[float]) -> None:
    """Refuse a step whose sums do not contain each micro-batch exactly once: it runs again, from zero.

    Raises:
        LinkError: they do not; all ranks read the same vote, so all of them raise it.
    """
    wrong = layout_of(stage).unproven(summed)
    if wrong:
        # Else a survivor would resume from these sums, and the next vote show the same.
        stage.sums.distrust()
        named = ", ".join(str(section) for section in wrong[:8])
        raise LinkError(
            f"the sums of gradients of sections {named} do not contain each micro-batch of step {step} exactly once; "
            "nothing of it is applied, and it runs again from the beginning"
        )


def _report(generation: Generation, reporter: Reporter, recent: RecentSteps, begin_s: float) -> None:
    runtime, reductions = generation.runtime, generation.reducer.reductions
    assert runtime.times is not None
    runtime.times = runtime.times._replace(phases=tuple(runtime.phases))
    sums = tuple(reductions.popleft() for _ in range(len(reductions)))
    reporter.add_times(
        runtime.times,
        step_s=time.monotonic() - begin_s,
        messages=runtime.take_trips(),
        reductions=[(carry.size_bytes, carry.seconds) for carry in sums],
        voters=generation.plan.workers,
        compressed=generation.groups.compressed,
        relayed=generation.groups.world.relayed,
    )
    assignment = generation.assignment
    recent.add_step(RanStep(assignment.generation, assignment.rank, runtime.times, runtime.take_messages(), sums))


def _apply_tentatively(generation: Generation, step: int, vector: Tensor) -> None:
    stage = generation.stage
    totals = layout_of(stage).read(generation.reducer.tally(step, vector))
    # All ranks read the same totals, so all skip the exchange, in which each waits for the others.
    if overflowed(stage.job.dtype, totals):
        return
    exchange = generation.reducer.exchange(step)
    stage.still.close_for_update()
    stage.apply_tentatively(scale_of(stage, totals), exchange)
    stage.local_exchange.used |= exchange.used
