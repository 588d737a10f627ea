"""Causes for which a captured model trains otherwise than plain PyTorch: each with its test and its words.

Those of ``CERTAIN`` are refused wherever they are found (``probes``, ``shapes_only``), since samples may show no
difference; the others explain a difference.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from varuna.checks.compare import Difference
from varuna.core.errors import ModelError
from varuna.partition.model import PartitionedModel

_SHOWN = 3


class Cause(NamedTuple):
    """The fault and the remedy, each in a sentence or two."""

    what: str
    """with ``{}`` where names of what was found belong"""
    remedy: str

    def told(self, names: Sequence[str] = ()) -> str:
        """The words, with some of the names."""
        return f"{self.what.replace('{}', some_of(names))} {self.remedy}"


def some_of(names: Sequence[str]) -> str:
    """The first names, and the number of the others."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


Found = Mapping[Cause, Sequence[str]]
"""Certain causes with names of what was found; empty where nothing was"""

_CAPTURED_ONCE = "Varuna captures forward() once and runs that graph in every step"

HOOKS = Cause(
    f"the model has hooks on gradients ({{}}). {_CAPTURED_ONCE}: no hook would be called.",
    "Change or log gradients (wandb.watch) in Trainer(before_step=...), which sees them with their parameters' "
    "names, or write an operation with the gradient that you want as a torch.autograd.Function.",
)
WRITTEN = Cause(
    "forward() writes the parameter {} in place, as a moving average does. What it "
    "writes would depend on the number of micro-batches and stages.",
    "Update it in Trainer(after_step=...), which runs once per step, after the optimizer, "
    "and sees all parameters, frozen ones too.",
)
CARRIED = Cause(
    "the loss depends on what forward() has left in {} when it ran before. "
    "The micro-batches of a batch run on several workers, and the next batch has other samples, so nothing of "
    "one forward() is there for the next.",
    "Let forward() begin with a value of its own (a hidden state of zeros, such as self.hidden = None in its "
    "first line), and let dataset[i] return a window with all the context that matters. What the model itself "
    "learns from step to step belongs into a buffer (register_buffer) or into Trainer(after_step=...).",
)
DRAWS = Cause(
    f"the loss depends on numbers that forward() draws from {{}}. {_CAPTURED_ONCE}: one "
    "draw would be used for the whole run.",
    "Draw in dataset[i], whose randomness Varuna seeds, and pass the numbers as inputs; or draw tensors with "
    "torch (torch.rand) and choose with torch.where.",
)
COUNTERS = Cause(
    f"the loss depends on a number that forward() itself changes: {{}}. {_CAPTURED_ONCE}: "
    "the number would never change.",
    'Compute it from the samples; or from the step, which is batch["step"] in loss= and a parameter named step '
    "of forward().",
)
CERTAIN = (HOOKS, WRITTEN, CARRIED, DRAWS, COUNTERS)

NOT_REPEATED = Cause(
    "plain PyTorch itself gives a different result for the same batch with the same random draws: "
    "forward() or the loss has its own source of randomness, or depends on earlier calls.",
    "Look for separate generators (numpy.random.default_rng, torch.Generator, random.Random), the time, "
    "or state kept between calls. Draw with torch's global generator, which Varuna seeds.",
)
_REENTRANT = Cause(
    "gradient checkpointing with use_reentrant=True ({}) was captured without the gradients of what it wraps.",
    "Switch gradient checkpointing off: Varuna recomputes by itself. Or pass use_reentrant=False.",
)
_COMPLEX = Cause(
    "activations are complex, and their gradients were lost or changed where the model was cut.",
    "Cut elsewhere with cut=[...], or keep real and imaginary parts as real tensors (torch.view_as_real).",
)
_METRIC = Cause(
    "metrics= computes it from something that was captured once: Python numbers, or draws.",
    "Compute it by tensor operations from the output and the batch, and add it up (.sum()).",
)
_BUFFER = Cause(
    "forward() changes that buffer in a way that was not captured.",
    "Update it by operations in place (add_, copy_, lerp_) on the registered buffer.",
)
_REPORT = (
    "Please report it with the model's class; varuna inspect --verify repeats this check without training, and "
    "other cuts (cut=) may help until then."
)
_DETACHED = Cause(
    "in the captured graph no gradient reaches that parameter: something between it and the loss detaches.",
    f"Look for torch.no_grad(), .data and .detach() on the way. {_REPORT}",
)
_UNKNOWN = Cause("the cause is unknown.", _REPORT)


def certain_words(found: Found) -> str | None:
    """Words of the first cause that no captured run can handle; None if there is none."""
    return next((cause.told(found[cause]) for cause in CERTAIN if found.get(cause)), None)


def refuse_certain(found: Found, finding: str = "") -> None:
    """Refuse such a cause, after what was found first.

    Raises:
        ModelError: there is one.
    """
    if (words := certain_words(found)) is not None:
        raise ModelError(continued(finding, words))


def continued(finding: str, words: str) -> str:
    """Words of a cause that follow another sentence."""
    return f"{finding} {words[0].upper()}{words[1:]}" if finding else words


def likely_words(odd: Sequence[Difference], model: PartitionedModel, reentrant: Sequence[str]) -> str:
    """Words of the likely cause of differences.

    Args:
        odd: the differences.
        model: as captured.
        reentrant: places of calls of ``torch.utils.checkpoint`` with ``use_reentrant=True``.
    """
    missing, kinds = any(each.missing for each in odd), {each.what for each in odd}
    tests: tuple[tuple[Cause, object], ...] = (
        (_REENTRANT, missing and reentrant),
        (_COMPLEX, any(crossing.dtype.is_complex for into in model.split.crossings for crossing in into)),
        (_METRIC, kinds == {"metric"}),
        (_BUFFER, kinds == {"buffer"}),
        (_DETACHED, missing),
        (_UNKNOWN, True),
    )
    return next(cause.told(reentrant) for cause, holds in tests if holds)


def without_autocast(operations: Iterable[str]) -> str:
    """Advise to leave autocast out; empty if none of a graph's operations is a region of it."""
    if "wrap_with_autocast" not in operations:
        return ""
    return (
        "Part of it is computed within torch.autocast, which Varuna does not look into, and where sums over "
        "micro-batches are rounded otherwise than sums over the batch: leave torch.autocast out of forward() and "
        'loss=, and pass precision="bf16" to varuna.Trainer. '
    )
