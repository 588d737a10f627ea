"""Causes for which a captured model differs from plain PyTorch, by what probing found."""

from collections.abc import Sequence
from dataclasses import dataclass

from varuna.checks.compare import Difference

_SHOWN = 3


@dataclass(frozen=True)
class Evidence:
    """Unusual facts about a job; a field is empty where nothing is unusual."""

    hooks: tuple[str, ...] = ()
    """on gradients, with their places"""
    carried: tuple[str, ...] = ()
    """attributes with tensors that one forward leaves and the next depends on"""
    draws: tuple[str, ...] = ()
    """from Python or NumPy in forward, where the loss depends on what is drawn"""
    written: tuple[str, ...] = ()
    """parameters that forward writes"""
    counters: tuple[str, ...] = ()
    """plain numbers that forward changes, where the loss depends on them"""
    repeats: bool = True
    """plain PyTorch computes the same twice from the same batch and draws"""
    reentrant: tuple[str, ...] = ()
    """places of calls of ``torch.utils.checkpoint`` with ``use_reentrant=True``"""
    complex_values: bool = False
    """activations are complex numbers"""
    strided: bool = False
    """the graph contains ``as_strided``"""
    differences: Sequence[Difference] = ()


@dataclass(frozen=True)
class Cause:
    """The fault and the remedy, each in a sentence or two."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what} {self.remedy}"


_CAPTURED_ONCE = "Varuna captures forward() once and runs that graph in every step"


def refused(evidence: Evidence) -> Cause | None:
    """A cause that no captured run can handle, even if the samples show no difference; None if there is none."""
    if evidence.hooks:
        return Cause(
            f"the model has hooks on gradients ({_some(evidence.hooks)}). {_CAPTURED_ONCE}: no hook would be called.",
            "Change or log gradients (wandb.watch) in Trainer(before_step=...), which sees them with their parameters' "
            "names, or write an operation with the gradient that you want as a torch.autograd.Function.",
        )
    if evidence.written:
        return Cause(
            f"forward() writes the parameter {_some(evidence.written)} in place, as a moving average does. What it "
            "writes would depend on the number of micro-batches and stages.",
            "Update it in Trainer(after_step=...), which runs once per step, after the optimizer, "
            "and sees all parameters, frozen ones too.",
        )
    if evidence.carried:
        return Cause(
            f"the loss depends on what forward() has left in {_some(evidence.carried)} when it ran before. "
            "The micro-batches of a batch run on several workers, and the next batch has other samples, so nothing of "
            "one forward() is there for the next.",
            "Let forward() begin with a value of its own (a hidden state of zeros, such as self.hidden = None in its "
            "first line), and let dataset[i] return a window with all the context that matters. What the model itself "
            "learns from step to step belongs into a buffer (register_buffer) or into Trainer(after_step=...).",
        )
    if evidence.draws:
        return Cause(
            f"the loss depends on numbers that forward() draws from {_some(evidence.draws)}. {_CAPTURED_ONCE}: one "
            "draw would be used for the whole run.",
            "Draw in dataset[i], whose randomness Varuna seeds, and pass the numbers as inputs; or draw tensors with "
            "torch (torch.rand) and choose with torch.where.",
        )
    if evidence.counters:
        return Cause(
            f"the loss depends on a number that forward() itself changes: {_some(evidence.counters)}. "
            f"{_CAPTURED_ONCE}: the number would never change.",
            'Compute it from the samples; or from the step, which is batch["step"] in loss= and a parameter named step '
            "of forward().",
        )
    return None


def cause_of(evidence: Evidence) -> Cause:
    """The likely cause of differences."""
    certain = refused(evidence)
    if certain is not None:
        return certain
    if not evidence.repeats:
        return Cause(
            "plain PyTorch itself gives a different result for the same batch with the same random draws: "
            "forward() or the loss has its own source of randomness, or depends on earlier calls.",
            "Look for separate generators (numpy.random.default_rng, torch.Generator, random.Random), the time, "
            "or state kept between calls. Draw with torch's global generator, which Varuna seeds.",
        )
    return _by_what_differs(evidence)


def _by_what_differs(evidence: Evidence) -> Cause:
    missing = any(each.missing for each in evidence.differences)
    if missing and evidence.reentrant:
        return Cause(
            f"gradient checkpointing with use_reentrant=True ({_some(evidence.reentrant)}) was captured without the "
            "gradients of what it wraps.",
            "Switch gradient checkpointing off: Varuna recomputes by itself. Or pass use_reentrant=False.",
        )
    if evidence.complex_values:
        return Cause(
            "activations are complex, and their gradients were lost or changed where the model was cut.",
            "Cut elsewhere with cut=[...], or keep real and imaginary parts as real tensors (torch.view_as_real).",
        )
    if evidence.strided:
        return Cause(
            "the model reads memory with as_strided() and captured strides, but values that cross a cut get a new "
            "layout.",
            "Write it with unfold, reshape or indexing, or cut elsewhere with cut=[...].",
        )
    kinds = {each.what for each in evidence.differences}
    if kinds == {"metric"}:
        return Cause(
            "metrics= computes it from something that was captured once: Python numbers, or draws.",
            "Compute it by tensor operations from the output and the batch, and add it up (.sum()).",
        )
    if kinds == {"buffer"}:
        return Cause(
            "forward() changes that buffer in a way that was not captured.",
            "Update it by operations in place (add_, copy_, lerp_) on the registered buffer.",
        )
    if missing:
        return Cause(
            "in the captured graph no gradient reaches that parameter: something between it and the loss detaches.",
            f"Look for torch.no_grad(), .data and .detach() on the way. {_REPORT}",
        )
    return Cause("the cause is unknown.", _REPORT)


_REPORT = (
    "Please report it with the model's class; varuna inspect --verify repeats this check without training, and "
    "other cuts (cut=) may help until then."
)


def _some(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
