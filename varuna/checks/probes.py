"""Experiments with the user's module that tell one cause of a difference from another."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from varuna.checks.compare import Noise, noise_of
from varuna.checks.module_state import attributes, changed, number_at, plain_values, replaced, same_attributes
from varuna.checks.outcome import Draws, Outcome, Part, loss_again, plainly
from varuna.checks.reading import Place
from varuna.core.errors import ModelError, VarunaError
from varuna.data.samples import SampleSource
from varuna.partition.capture.capture import LossModule
from varuna.partition.watching.explaining import user_frame
from varuna.partition.watching.side_effects import Respond, Seen
from varuna.process.console import say_once

_KEYS = range(1, 5)
"""Further seeds of Python's and NumPy's generators."""
ENDS = (0.0, 1.0 - 1e-9)
"""The extremes of draws between 0 and 1, on either side of any threshold."""
_COUNTED = (10, 1_000, 1_000_001)
"""Values that a counter is set to, beyond most warm-ups."""
_MOVED = 2
"""Number of times that parameters are moved by their last bit."""


def noise(losses: LossModule, parts: Sequence[Part], expected: Outcome, draws: Draws) -> Noise:
    """Measure how far loss, gradients and buffers move when parameters and inputs do by their last bit."""
    return noise_of(expected, [_moved(losses, parts, key, draws) for key in range(_MOVED)])


def _moved(losses: LossModule, parts: Sequence[Part], key: int, draws: Draws) -> Outcome:
    generator = torch.Generator().manual_seed(key)
    parameters = [(value.detach(), value.detach().clone()) for value in losses.model.parameters()]
    inputs = [
        Part({name: _by_last_bit(value, generator) for name, value in part.tensors.items()}, part.indices, part.weight)
        for part in parts
    ]
    try:
        for value, _ in parameters:
            value.copy_(_by_last_bit(value, generator))
        return plainly(losses, inputs, draws=draws)
    finally:
        for value, kept in parameters:
            value.copy_(kept)


def _by_last_bit(value: Tensor, generator: torch.Generator) -> Tensor:
    """Move values up or down by about one unit in the last place; whole numbers (masks, classes) stay."""
    if not value.is_floating_point() or (value == value.round()).all():
        return value
    signs = torch.randint(0, 2, value.shape, generator=generator, dtype=torch.int8) * 2 - 1
    return value * (1 + torch.finfo(value.dtype).eps * signs.to(value.dtype))


def fewest_samples(losses: LossModule, source: SampleSource, whole: int = 2) -> int:
    """Number of samples that plain PyTorch needs at least: 2 where ``squeeze()`` drops the batch of one.

    Args:
        losses: the model with its loss.
        source: of the samples.
        whole: of every micro-batch, where its loss may need all: the largest k of them.

    Raises:
        ModelError: it fails for as many as well.
    """
    failed: Exception | None = None
    for count in dict.fromkeys((1, 2, whole)):
        try:
            with same_attributes(losses.model):
                _once(losses, source, count)
        except VarunaError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the model's own code raises
            failed = failed or error
            continue
        if failed is not None:
            say_once(
                f"plain PyTorch fails on a batch of one sample ({_told(failed)}): checked on more; a micro-batch of "
                "one is computed as a part of a larger batch"
            )
        return count
    assert failed is not None
    where = user_frame(failed)
    raise ModelError(
        f"the model could not be run on the first samples{f' at {where}' if where else ''}: {_line(failed)}. Try the "
        "same in plain PyTorch, in training mode, on a collated batch of dataset samples."
    ) from failed


def _once(losses: LossModule, source: SampleSource, count: int) -> None:
    batch = source.micro_batch([position % (source.size or count) for position in range(count)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # training will say them
        loss_again(losses, Part(batch.tensors, batch.indices, 1.0))


def _told(error: Exception) -> str:
    where = user_frame(error)
    return f"{_line(error)}{f' at {where}' if where else ''}"


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def deciding_draws(losses: LossModule, part: Part, seen: Seen) -> tuple[str, ...]:
    """Draws from Python and NumPy, if the loss depends on them: dropped layers with a chance of 0 do not."""
    if not seen.draws:
        return ()
    same = loss_again(losses, part)
    tries: list[Callable[[], float]] = [lambda key=key: loss_again(losses, part, key=key) for key in _KEYS]  # type: ignore[misc]
    tries += [lambda end=end: loss_again(losses, part, respond=answer_near(end)) for end in ENDS]  # type: ignore[misc]
    return tuple(seen.draws) if any(_differs(each, same) for each in tries) else ()


def _differs(attempt: Callable[[], float], same: float) -> bool:
    """Return whether another draw changes the loss, or makes the model fail."""
    try:
        found = attempt()
    except Exception:  # noqa: BLE001 - whatever the model's own code raises
        return True
    return found != same and not (found != found and same != same)


def answer_near(end: float) -> Respond:
    """Make every draw between two numbers return one near their end."""

    def respond(name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        drawn = original(*args, **kwargs)
        if name in ("random", "random_sample", "rand") or (name == "uniform" and not (args or kwargs)):
            return drawn * 0 + end
        if name == "uniform" and len(args) >= 2:
            return drawn * 0 + args[0] + (args[1] - args[0]) * end
        return drawn

    return respond


def carried_attributes(losses: LossModule, part: Part) -> tuple[str, ...]:
    """Attributes with tensors that one forward leaves and the next depends on: its loss is another one."""
    with same_attributes(losses.model), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of checkpointing, for one, which misses gradients here
        before = attributes(losses.model)
        same = loss_again(losses, part)
        left = replaced(losses.model, before)
        if not left or not _differs(lambda: loss_again(losses, part), same):
            return ()
    with same_attributes(losses.model), warnings.catch_warnings():  # unless the loss is another one each time
        warnings.simplefilter("ignore", UserWarning)
        return () if _differs(lambda: loss_again(losses, part), same) else tuple(left)


def deciding_counters(losses: LossModule, part: Part, moved: Mapping[str, tuple[Any, Any]]) -> tuple[str, ...]:
    """Numbers of modules, among ``moved``, that change with every forward, and that the loss depends on."""
    if not moved:
        return ()
    before = plain_values(losses.model)
    loss_again(losses, part)
    counting = [path for path in changed(before, plain_values(losses.model)) if path in moved]
    places = [(number_at(losses.model, path), moved[path][0]) for path in counting]
    return deciding_places(losses, part, [(place, old) for place, old in places if place is not None])


def deciding_places(losses: LossModule, part: Part, before: Iterable[tuple[Place, Any]]) -> tuple[str, ...]:
    """Numbers that have changed since ``before``, and that the loss depends on."""
    moved = [(place, old) for place, old in before if place.value() != old and not isinstance(old, bool)]
    if not moved:
        return ()
    same = loss_again(losses, part)
    found = []
    for place, old in moved:
        newest = place.value()
        values = (newest, *(type(newest)(each) for each in (1, *_COUNTED)))
        if any(_differs(partial(_placed, losses, part, place, value), same) for value in values):
            found.append(f"{place.name} (from {old} to {newest} in the first samples)")
        place.write(newest)
    return tuple(found)


def _placed(losses: LossModule, part: Part, place: Place, value: Any) -> float:
    place.write(value)
    return loss_again(losses, part)
