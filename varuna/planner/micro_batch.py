"""m: how many examples flow through the pipeline together."""

from collections.abc import Iterator

from varuna.calibration.format import Calibration
from varuna.core.errors import UsageError
from varuna.planner.pricing.profile import compute_s
from varuna.planner.request import PlanRequest

_MICRO_BATCHES = 32  # wanted per step: fills pipelines of up to about 8 stages, and feeds 32 replicas
_BETTER = 0.97  # a larger m must lower F(m) / m at least to this share


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
    Simulation"); or the nominal choice where only one was, or where
    another m would be another training run. Then ever smaller ones, if they may be.

    Raises:
        UsageError: a requested m is not within the global batch.
    """
    model = request.calibration.model
    measured = sorted({m for kind in request.calibration.kinds.values() for m in kind.micro_batches})
    if request.micro_batch is not None:
        sizes: tuple[int, ...] = (check_micro_batch(request.global_batch, request.micro_batch),)
    elif len(measured) == 1 or model.batch_dependent:
        sizes = (choose_micro_batch(request.global_batch, None),)
    else:
        within = [m for m in measured if m <= request.global_batch] or [1]
        sizes = tuple(within[: _where_it_stops_improving(request.calibration, within) + 1])
    yield sizes
    is_fixed = model.batch_dependent or (request.micro_batch is not None and not request.lowers_micro_batch)
    size = sizes[0]
    while size > 1 and not is_fixed and request.limit_bytes is not None:
        size //= 2
        yield (size,)


def _where_it_stops_improving(calibration: Calibration, sizes: list[int]) -> int:
    """Index of the lowest m from which no larger one is much better per example."""
    per_example = [(compute_s(calibration, m) + 3 * calibration.action_s) / m for m in sizes]
    best = 0
    for i, seconds in enumerate(per_example):
        if seconds < per_example[best] * _BETTER:
            best = i
    return best
