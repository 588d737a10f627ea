"""State of sections that no worker holds: first values, or what a store has of a checkpoint and the step after it."""

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from varuna.checkpoint.io.frozen import FROZEN, restore_frozen
from varuna.checkpoint.io.restore import Wanted, everything, read_states
from varuna.checkpoint.io.section_state import JSON, SectionState
from varuna.checkpoint.io.sums import fingerprint, read_sums
from varuna.checkpoint.manifest import read_manifest
from varuna.checkpoint.names import split_place, step_folder
from varuna.core.errors import DamagedCheckpoint
from varuna.core.messages import Assignment
from varuna.core.sums import SumLocation
from varuna.engine.stage.load_state import SUMS, is_needed_to_compute
from varuna.partition.held_names import shared_buffers
from varuna.partition.model import PartitionedModel
from varuna.store.opening import open_store


def initial_states(
    model: PartitionedModel,
    sections: Sequence[int],
    initial: Callable[[Sequence[str]], Mapping[str, Tensor]],
    buffers: Mapping[str, Tensor],
) -> dict[int, SectionState]:
    """Make the state of ``sections`` at step 0: parameters, and copies of the ``buffers`` that steps update."""
    used = {section: dict.fromkeys(model.sections[section].parameters) for section in sections}
    values = initial(list(dict.fromkeys(name for names in used.values() for name in names)))
    return {
        section: SectionState(
            section,
            {f"parameters/{name}": values[name] for name in names}
            | {f"buffers/{name}": buffers[name].detach().clone() for name in model.sections[section].updated},
        )
        for section, names in used.items()
    }


def stored_states(
    model: PartitionedModel,
    sections: Sequence[int],
    place: str,
    *,
    initial: Callable[[Sequence[str]], Mapping[str, Tensor]],
    lent: Collection[int] = (),
) -> dict[int, SectionState]:
    """Read the state of ``sections`` from a checkpoint; what several sections hold comes from its owner's shards.

    Of ``lent`` ones optimizer state is left out.

    Args:
        model: the partitioned model.
        sections: those of this rank.
        place: folder of the checkpoint: store and step.
        initial: first values of parameters, for frozen ones that the checkpoint leaves out.
        lent: sections that other replicas update.

    Raises:
        CheckpointError: it was trained over other frozen parameters.
        DamagedCheckpoint: bytes are not those that were written; no run will choose this checkpoint again.
        StoreError: the store cannot be read.
    """
    directory, step = split_place(place)
    store = open_store(directory)
    shared: list[tuple[Wanted, Sequence[int]]] = [
        *((_of_parameter(tied.name), tied.sections) for tied in model.facts.tied),
        *(
            (partial(operator.eq, f"buffers/{name}"), holders)
            for name, holders in shared_buffers(model.sections).items()
        ),
    ]
    wanted: dict[int, Wanted] = {
        section: is_needed_to_compute if section in lent else everything for section in sections
    }
    for belongs, (owner, *others) in shared:
        # Only the owner's shards have it, so they are read also where the owner is on another rank.
        if owner in sections or not frozenset(others).isdisjoint(sections):
            wanted[owner] = partial(_either, wanted.get(owner), belongs)
    read = read_states(store, read_manifest(store, step), wanted)
    for belongs, (owner, *others) in shared:
        for section in others:
            if section in sections:
                read[section].tensors.update({k: v for k, v in read[owner].tensors.items() if belongs(k)})
                read[section].scalars.update({k: v for k, v in read[owner].scalars.items() if belongs(k)})
    restore_frozen(read, {section: model.sections[section].parameters for section in sections}, initial, place)
    return {section: read[section] for section in sections}


def _either(one: Wanted | None, other: Wanted, name: str) -> bool:
    return (one is not None and one(name)) or other(name)


def _of_parameter(parameter: str) -> Wanted:
    """Return whether an entry of a section's state belongs to a parameter."""
    exactly, begin = (f"parameters/{parameter}", f"{FROZEN}{parameter}"), f"optimizer/{parameter}/"
    return lambda name: name in exactly or name.startswith(begin)


def stored_sums(
    model: PartitionedModel, states: Mapping[int, SectionState], assignment: Assignment, dtype: torch.dtype
) -> dict[tuple[int, SumLocation], SectionState]:
    """Read the sums of gradients that this rank resumes from, which the store has beside the checkpoint.

    Args:
        model: whose sections.
        states: of this rank's sections, from the checkpoint.
        assignment: says which sums.
        dtype: of computation.

    Raises:
        DamagedCheckpoint: a file is not what was written, or belongs to other parameters; it is removed.
    """
    found: dict[tuple[int, SumLocation], SectionState] = {}
    for each in assignment.rest.taken if assignment.rest is not None and assignment.checkpoint is not None else ():
        directory, step = split_place(assignment.checkpoint or "")
        store = open_store(directory)
        label, tensors = read_sums(store, step, each.file)
        used = (name for name in model.sections[each.section].parameters if name in model.trainable)
        trained = {name: states[each.section].tensors[f"parameters/{name}"] for name in used}
        # Sums of gradients are worth something on top of exactly the parameters that they were made with.
        if label.parameters != fingerprint(trained, dtype) or label.sums.section != each.section:
            store.remove(f"{step_folder(step)}/{each.file}")
            raise DamagedCheckpoint(
                f"{store.url}/{step_folder(step)}/{each.file} belongs to another state; it is removed"
            )
        scalars: dict[str, JSON] = {SUMS: [list(span) for span in label.sums.micro_batches]}
        found[each.section, SumLocation(each.source_rank, file=each.file)] = SectionState(
            each.section, tensors, scalars
        )
    return found
