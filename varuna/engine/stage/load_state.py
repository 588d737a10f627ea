"""Parts of a stage, taken from the states of its sections: parameters, buffers, optimizer state, loss scale."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from varuna.checkpoint.io.section_state import JSON, SectionState
from varuna.core.precision import LossScale
from varuna.engine.device.host_copies import HOST
from varuna.engine.stage.precision import cast, is_cast
from varuna.partition.cut.split import SectionGraph

LOSS_SCALE = "run/loss_scale"
States = Mapping[int, SectionState]


def parameters_of(
    graphs: Sequence[SectionGraph],
    states: States,
    *,
    trainable: Container[str],
    held: Container[int],
    whole: Container[int],
    dtype: torch.dtype,
    device: torch.device,
    masters_at: torch.device,
    dtypes: Mapping[str, torch.dtype],
    followed: Container[str] = (),
    streamed: Container[str] = (),
) -> dict[str, nn.Parameter]:
    """Make one parameter per name, in the order of sections; a tied one from the lowest that is whole, or updated.

    Args:
        graphs: of the stage's sections.
        states: of them; storages are taken over where device and dtype are right.
        trainable: names of the parameters that are trained.
        held: sections that are updated here: their trained parameters are fp32.
        whole: those of them whose optimizer state is here; values of the others may be as they are computed with.
        dtype: of computation, and of all other parameters.
        device: of all other parameters.
        masters_at: of those that are updated here.
        dtypes: of those that a run in fp32 keeps in others.
        followed: parameters that ``after_step`` writes: they are fp32, too.
        streamed: those that stay in host memory.
    """
    lowest: dict[str, int] = {}

    def standing(section: int) -> tuple[bool, bool]:
        return section in whole, section in held

    for graph in reversed(graphs):
        for name in graph.parameters:
            # From the last section to the first: of equals, the lowest wins.
            if name not in lowest or standing(graph.index) >= standing(lowest[name]):
                lowest[name] = graph.index
    parameters: dict[str, nn.Parameter] = {}
    for name in dict.fromkeys(name for graph in graphs for name in graph.parameters):
        trained = name in trainable
        is_updated = trained and lowest[name] in held
        place, kept = (masters_at, torch.float32) if is_updated or name in followed else (device, dtype)
        place = HOST if name in streamed else place
        value = states[lowest[name]].tensors[f"parameters/{name}"]
        if dtype is torch.float32:
            kept = dtypes.get(name, kept)
        value = value.to(place, kept if value.is_floating_point() else value.dtype)
        parameters[name] = nn.Parameter(value, requires_grad=trained)
    return parameters


def put_parameters(state: SectionState, parameters: Mapping[str, nn.Parameter]) -> None:
    """Write a state's parameters, as far as it has any, in place."""
    for path, value in state.tensors.items():
        if path.startswith("parameters/"):
            parameters[path.removeprefix("parameters/")].detach().copy_(value)


def buffers_of(
    graphs: Sequence[SectionGraph], states: States, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Return the buffers that steps update; each belongs to one section."""
    return {
        name: cast(states[graph.index].tensors[f"buffers/{name}"].to(device), dtype)
        for graph in graphs
        for name in graph.updated
    }


def optimizer_state_of(states: States, sections: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Return optimizer state by parameter: ``optimizer/<name>/<key>`` entries of ``sections``."""
    found: dict[str, dict[str, Any]] = {}
    # The lowest comes last, so a tied parameter has the state of the section that owns it.
    for section in reversed(sections):
        for path, value in (*states[section].tensors.items(), *states[section].scalars.items()):
            if path.startswith("optimizer/"):
                name, key = path.removeprefix("optimizer/").rsplit("/", 1)
                found.setdefault(name, {})[key] = value
    return found


SUMS = "sums"
"""Entry of a section's state between two generations, if the step was broken off: its sums of gradients among the
tensors, and what is in them among the scalars."""


COPIED_SUMS = "copied sums"
"""The same of another rank, which may have the same section, as it was copied. Nothing else need be there."""


STATISTICS = "statistics"
"""Entry beside it, of a section that updates buffers: statistics of the micro-batches in the sums, as bytes."""


def is_needed_to_compute(name: str) -> bool:
    """Return whether an entry of a section's state is wanted where its optimizer state is not."""
    return not name.startswith("optimizer/")


def first_of(state: SectionState, dtype: torch.dtype) -> SectionState:
    """Return the state that a section computes with: no optimizer state, and parameters in the dtype of computation."""
    first = state.only(is_needed_to_compute)
    return replace(first, tensors={name: cast(value, dtype) for name, value in first.tensors.items()})


def rest_of(state: SectionState, dtype: torch.dtype) -> SectionState:
    """Return the state that only updates need: optimizer state, and fp32 parameters that are rounded to compute."""
    rounded = {name for name, value in state.tensors.items() if is_needed_to_compute(name) and is_cast(value, dtype)}
    return state.only(lambda name: name in rounded or not is_needed_to_compute(name))


def state_in(
    section: int,
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    optimizer: Callable[[str], tuple[dict[str, Tensor], dict[str, JSON]]] | None,
    loss_scale: LossScale | None,
) -> SectionState:
    """Make a section's state of references, the inverse of the above; ``optimizer`` says what a parameter has."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, JSON] = {}
    for name, value in parameters.items():
        tensors[f"parameters/{name}"] = value.detach()
        state, rest = ({}, {}) if optimizer is None else optimizer(name)
        tensors.update({f"optimizer/{name}/{key}": each for key, each in state.items()})
        scalars.update({f"optimizer/{name}/{key}": each for key, each in rest.items()})
    if loss_scale is not None:
        scalars[LOSS_SCALE] = list(loss_scale)
    tensors.update({f"buffers/{name}": value for name, value in buffers.items()})
    return SectionState(section, tensors, scalars)


def loss_scale_of(states: States) -> LossScale:
    """Return the loss scale after the newest step, which the state of every section carries."""
    for state in states.values():
        match state.scalars.get(LOSS_SCALE):
            case [float(value), int(good_steps)]:
                return LossScale(value, good_steps)
    return LossScale()
