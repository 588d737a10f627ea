"""Signs in a vote that keep its step from being applied: NaN, or ranks that measured different things."""

import math
from collections.abc import Sequence

from varuna.core.errors import DivergedError, LinkError, UsageError
from varuna.core.plan import Plan
from varuna.core.vote import StepTotals, VoteLayout
from varuna.data.samples import SampleSource
from varuna.engine.stage.parameter_groups import Written

_NAMED = 3
"""Micro-batches whose samples a message lists."""
_TELLING = 2
"""Micro-batches of one rank that are not by chance all those whose samples are odd."""


def check_finite(
    totals: StepTotals, vector: Sequence[float], *, layout: VoteLayout, source: SampleSource, plan: Plan, step: int
) -> None:
    """Refuse a step before it is applied. All ranks read the same vote, so all of them refuse, or none.

    Args:
        totals: of the step.
        vector: the summed vote.
        layout: of the vote.
        source: where the samples come from, for the message.
        plan: of the micro-batches.
        step: of the samples.

    Raises:
        DivergedError: the loss or the norm of the gradients is NaN or infinite.
    """
    if is_finite(totals):
        return
    losses = (vector[layout.micro_batch(i)] for i in range(plan.micro_batches))
    odd = [i for i, loss in enumerate(losses) if not math.isfinite(loss)]
    base = step * plan.global_batch
    listed = [list(source.indices([base + offset for offset in plan.samples_of(i)])) for i in odd[:_NAMED]]
    where = f"It came from the dataset indices {', '.join(map(str, listed))}" if listed else "Each loss was finite"
    more = f", and from {len(odd) - _NAMED} more micro-batches" if len(odd) > _NAMED else ""
    raise DivergedError(
        f"step {step} has loss {totals.loss:.6g} and gradient norm {totals.grad_norm:.6g}. {where}{more}. The step was "
        "not applied, so the newest checkpoint is a good one. Look at these samples, lower the learning rate, or pass "
        'clip_grad_norm=. To train on regardless, pass on_nan="continue".'
    )


def check_replicas(
    totals: StepTotals, vector: Sequence[float], *, layout: VoteLayout, plan: Plan, step: int, rank: int
) -> None:
    """Blame the rank whose losses, and no others, are not finite, and all of them: not the samples do so.

    Args:
        totals: of a step that is not finite, though replicas hold the same state.
        vector: the summed vote.
        layout: of the vote.
        plan: of the micro-batches.
        step: of the samples.
        rank: this one.

    Raises:
        DivergedError: it is this one.
        LinkError: it is another one.
    """
    odd = [i for i in range(plan.micro_batches) if not math.isfinite(vector[layout.micro_batch(i)])]
    for replica in range(plan.replicas):
        # In a pipeline of several ranks any may have made the losses odd, so none is blamed.
        if len(odd) < _TELLING or odd != list(plan.micro_batches_of(replica)) or len(plan.ranks_of(replica)) > 1:
            continue
        other = plan.rank_of(replica, 0)
        text = f"step {step} has loss {totals.loss:.6g} again: all {len(odd)} losses of rank {other}, and no others"
        if other == rank:
            raise DivergedError(f"{text}. Its machine or device may compute wrongly.")
        raise LinkError(f"{text}. It is left out")


def check_measured(vector: Sequence[float], mark: float, *, layout: VoteLayout, plan: Plan) -> None:
    """Refuse a step if ranks have called ``step_scheduler`` differently: their learning rates would differ.

    Args:
        vector: the summed vote.
        mark: what this rank added to it.
        layout: of the vote.
        plan: of the step.

    Raises:
        UsageError: other ranks added something else.
    """
    if vector[layout.flag("measured")] != mark * plan.workers:
        raise UsageError(
            "trainer.step_scheduler(value) was called with different values, or on some workers only, so their "
            "learning rates would differ. Call it on every worker after the same steps, with what is the same on all "
            "of them: step.loss, or the loss of trainer.evaluate."
        )


def check_written(
    vector: Sequence[float], written: Written | None, *, layout: VoteLayout, plan: Plan, rank: int
) -> None:
    """Refuse a step if the loops of two ranks have written different options into the optimizer's groups.

    Args:
        vector: the summed vote.
        written: by this rank's loop.
        layout: of the vote.
        plan: of the step.
        rank: this one.

    Raises:
        UsageError: they have.
    """
    mark, ranks = 0.0 if written is None else written.mark, plan.workers
    more = vector[layout.flag("written")] - mark * ranks
    if not more:
        return
    # If one rank r wrote w where the others wrote m: more = w - m, and rest - m * (1 + ... + D P) = (w - m) (r + 1).
    numbered, rest = ranks * (ranks + 1) / 2, vector[layout.flag("written_by")]
    odd = (rest - mark * numbered) / more - 1
    # The other way round: this rank wrote m, and all others the same w.
    if ranks > 2 and (rest - mark * numbered) * (ranks - 1) == more * (numbered - rank - 1):
        differing = f"this worker, rank {rank}, differs from all others"
    else:
        named = f"rank {odd:.0f} differs" if odd.is_integer() and 0 <= odd < ranks else "several ranks differ"
        differing = f"{named} from this worker, rank {rank}"
    raise UsageError(
        "the script wrote different options into its optimizer's param_groups on different workers, so their updates "
        f"would differ: {differing}, which has {written or 'written none'}. The step was not applied. Compute them on "
        "every worker from what is the same on all: step.index, step.loss, or what state= keeps; not from time, rank, "
        "step.is_main or random numbers."
    )


def is_finite(totals: StepTotals) -> bool:
    """Return whether a step's loss and the norm of its gradients are numbers."""
    return math.isfinite(totals.loss) and math.isfinite(totals.grad_norm)
