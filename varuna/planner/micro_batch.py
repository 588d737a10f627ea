"""m: how many examples flow through the pipeline together."""

from collections.abc import Iterator

from varuna.calibration.format import Calibration
from varuna.core.errors import UsageError
from varuna.planner.asking.request import PlanRequest

_MICRO_BATCHES = 32  # wanted per step: fills pipelines of up to about 8 stages, and feeds 32 replicas
_WORTH = 0.99  # the lowest m is chosen whose examples take no longer than the best m's over this
_STALE = 0.97  # an m twice as large that takes more than this share per example is not much better


def check_micro_batch(global_batch: int, requested: int) -> int:
    """A requested m that is within the global batch.

    Raises:
        UsageError: it is not.
    """
    if not 1 <= requested <= global_batch:
        raise UsageError(
            f"micro_batch={requested} was requested, but a step has {global_batch} examples. Choose micro_batch "
            f"between 1 and {global_batch}, or leave it out."
        )
    return requested


def choose_micro_batch(global_batch: int, requested: int | None) -> int:
    """Choose m where nothing was measured: the same for any number of workers, so that it holds for the whole run.

    Raises:
        UsageError: the requested m is not within the global batch.
    """
    if requested is None:
        return max(1, global_batch // _MICRO_BATCHES)
    return check_micro_batch(global_batch, requested)


def candidate_sizes(request: PlanRequest) -> Iterator[tuple[int, ...]]:
    """Sets of sizes, each to be tried only if nothing fits with those before.

    First the requested m; or those measured, up to where F(m) / m stops improving (paper §"Parametrized
    Simulation"), with a micro-batch for each worker where none may idle, and the nominal choice where measuring ended
    before; or that alone where only one was measured, or where another m would be another training run. Then ever
    smaller ones, if they may be.

    Raises:
        UsageError: a requested m is not within the global batch.
    """
    model = request.calibration.model
    measured = request.calibration.sizes
    if request.micro_batch is not None:
        sizes: tuple[int, ...] = (check_micro_batch(request.global_batch, request.micro_batch),)
    elif len(measured) == 1 or model.batch_dependent:
        sizes = (choose_micro_batch(request.global_batch, None),)
    else:
        most = request.global_batch if request.leaves_idle else max(1, request.global_batch // request.count)
        within = [m for m in measured if m <= most] or [1]
        sizes = tuple(within[: _last_that_improves(request.calibration, within) + 1])
        nominal = choose_micro_batch(request.global_batch, None)
        if sizes[-1] < nominal <= most and _is_cut_short(request.calibration, nominal):
            sizes = (*sizes, nominal)
    yield sizes
    is_fixed = model.batch_dependent or (request.micro_batch is not None and not request.lowers_micro_batch)
    size = sizes[0]
    while size > 1 and not is_fixed and request.limit_bytes is not None:
        size //= 2
        yield (size,)


def _last_that_improves(calibration: Calibration, sizes: list[int]) -> int:
    """Index of the lowest m than which no larger one is better per example by 1 %."""
    per_example = [_per_example_s(calibration, m) for m in sizes]
    return next(i for i, seconds in enumerate(per_example) if seconds * _WORTH <= min(per_example))


def _per_example_s(calibration: Calibration, micro_batch: int) -> float:
    return (calibration.compute_s(micro_batch) + 2 * calibration.action_s) / micro_batch


def knows_sizes(calibration: Calibration, global_batch: int) -> bool:
    """Return whether enough sizes were tried: all within the batch, or up to where larger ones stopped being better."""
    sizes = calibration.sizes
    if global_batch <= max(calibration.sized_for, *(size if len(sizes) > 1 else 0 for size in sizes)):
        return True
    return _stops_improving(calibration)


def _stops_improving(calibration: Calibration) -> bool:
    """Return whether the last two of the sizes were hardly better than the one before."""
    last = [_per_example_s(calibration, m) for m in calibration.sizes[-3:]]
    return len(last) == 3 and min(last[1:]) > _STALE * last[0]


def _is_cut_short(calibration: Calibration, nominal: int) -> bool:
    """Return whether time or memory ended before sizes as large as the nominal choice were tried."""
    return calibration.sizes[-1] < nominal and not _stops_improving(calibration)


def describe_sizes(calibration: Calibration, micro_batch: int) -> str:
    """One line that says why m is what it is: ``"micro-batches of 8: 1,129 examples/s; 1: 246, 2: 480"``."""
    rates = {m: f"{1 / _per_example_s(calibration, m):,.0f}" for m in {*calibration.sizes, micro_batch}}
    others = ", ".join(f"{m}: {rates[m]}" for m in calibration.sizes if m != micro_batch)
    return f"micro-batches of {micro_batch}: {rates[micro_batch]} examples/s on one worker; {others}"
