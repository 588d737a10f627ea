"""The difference between a worker's job and the run's, in words that say what to change."""

from collections.abc import Iterable
from dataclasses import fields, is_dataclass

from varuna.core.model import JobFacts
from varuna.core.sample_digest import OF_SETS, begin_alike
from varuna.core.value import Value


def job_difference(theirs: JobFacts, ours: JobFacts) -> str | None:
    """Name the first field in which a worker's job differs from the run's; None: they are the same job."""
    ours = ours.for_comparison()
    if begin_alike(theirs.first_samples, ours.first_samples):  # also if they were rounded differently
        theirs = theirs.model_copy(update={"first_samples": ours.first_samples})
    found = first_difference("job", theirs.for_comparison(), ours)
    if found is None:
        return None
    field, its, the_runs = found
    if field == "job.initialisation":
        return (
            f"its model begins with other values than the run's ({field}: {its}, {the_runs}). What the script builds "
            "itself must be the same on every worker: seed whatever draws, such as with torch.manual_seed(0)"
        )
    if field == "job.optimizer":
        return (
            f"its optimizer has other options than the run's: {its}, {the_runs}. What follows from results of an "
            "earlier training of the script must be the same on a worker that comes later: keep those results in "
            "what state= names, or ask trainer.evaluate after the loop"
        )
    if field == "job.first_samples":
        return (
            f"its dataset has other samples than the run's. Give all workers the same data and libraries. {OF_SETS} "
            "everywhere"
        )
    if field == "job.torch":
        return f"it has torch {its}, but the run {the_runs}: other versions round differently"
    return f"its {field} is {its!r}, but the run's is {the_runs!r}"


def first_difference(path: str, theirs: object, ours: object) -> tuple[str, object, object] | None:
    """Find the deepest differing field of two values, with its path."""
    if theirs == ours:
        return None
    if type(theirs) is type(ours):
        for name in _names(ours):
            if found := first_difference(f"{path}.{name}", getattr(theirs, name), getattr(ours, name)):
                return found
    if isinstance(theirs, tuple) and isinstance(ours, tuple) and len(theirs) == len(ours):
        for index, pair in enumerate(zip(theirs, ours, strict=True)):
            if found := first_difference(f"{path}[{index}]", *pair):
                return found
    return path, theirs, ours


def _names(value: object) -> Iterable[str]:
    """Return names of the fields of a value of ours; none of anything else."""
    if isinstance(value, Value):
        return type(value).model_fields
    return [field.name for field in fields(value)] if is_dataclass(value) else ()
