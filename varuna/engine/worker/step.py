"""One step of a formed generation: F, R, B, reduce, vote, apply."""

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
        check: gets the totals and the vote before anybody else; what it raises keeps the step from being applied.
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
    stage.optimizer.prepare()
    with generation.phase("reduce", step):
        generation.reducer.finish(step)
    vector = cast_vote(layout_of(stage), stage, generation.replica, stage.work.losses.numbers(), dict(flags()))
    if plan.is_cut and combines:
        with generation.phase("share", step):
            _apply_tentatively(generation, step, vector)
    with generation.phase("vote", step):
        summed = generation.reducer.vote(step, vector)
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
    """Between updates the state is whole, whatever memory an action was refused; sums know what they have half of.

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
    """Let nobody apply a step whose sums do not contain each micro-batch exactly once: it runs again, from zero.

    Raises:
        LinkError: they do not; all ranks read the same vote, so all of them raise it.
    """
    wrong = layout_of(stage).unproven(summed)
    if wrong:
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
    if overflowed(stage.job.dtype, totals):
        return
    exchange = generation.reducer.exchange(step)
    stage.still.close_for_update()
    stage.apply_tentatively(scale_of(stage, totals), exchange)
    stage.local_exchange.used |= exchange.used
