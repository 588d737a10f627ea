"""Frozen parameters that checkpoints and morphs leave out: what is kept of them, and how they come back.

They never change, so they are where the run began: in the files of ``weights=``, or in what ``model=`` builds. What
leaves them out keeps a checksum of each, and a run over another base is refused.
"""

import zlib
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from varuna.checkpoint.io.section_state import DTYPE_NAMES, DTYPES, JSON, SectionState
from varuna.core.errors import CheckpointError

FROZEN = "frozen/"
_NAMED = 3


class FrozenParameters:
    """Leaves frozen parameters out of states that are saved or sent; each is read once, for its checksum."""

    def __init__(self, kept: Collection[str]) -> None:
        """Leave out all parameters but the ``kept`` ones."""
        self._kept = kept
        self._marks: dict[str, JSON] = {}

    def of(self, state: SectionState) -> SectionState:
        """Return the state without them, and with their checksums."""
        frozen = {
            path.removeprefix("parameters/"): value
            for path, value in state.tensors.items()
            if path.startswith("parameters/") and path.removeprefix("parameters/") not in self._kept
        }
        for name, value in frozen.items():
            if name not in self._marks:
                self._marks[name] = [DTYPE_NAMES[value.dtype], _checksum(value)]
        return SectionState(
            state.section,
            {path: value for path, value in state.tensors.items() if path.removeprefix("parameters/") not in frozen},
            {**state.scalars, **{f"{FROZEN}{name}": self._marks[name] for name in frozen}},
        )


def restore_frozen(
    states: Mapping[int, SectionState],
    parameters: Mapping[int, Sequence[str]],
    initial: Callable[[Sequence[str]], Mapping[str, Tensor]],
    place: str,
) -> None:
    """Add the parameters that were left out.

    Args:
        states: what was read or received, by section; changed. Those of other sections may hold checksums.
        parameters: what the sections need.
        initial: first values of named parameters.
        place: the checkpoint, or who sent them, for messages.

    Raises:
        CheckpointError: the run began with other values.
    """
    held = {section: {*states[section].tensors} for section in parameters}
    missing = {s: [n for n in names if f"parameters/{n}" not in held[s]] for s, names in parameters.items()}
    wanted = list(dict.fromkeys(name for names in missing.values() for name in names))
    if not wanted:
        return
    marks = {path: mark for state in states.values() for path, mark in state.scalars.items() if path.startswith(FROZEN)}
    values = initial(wanted)
    other = [name for name in wanted if not _is_marked(values[name], marks.get(f"{FROZEN}{name}"))]
    if other:
        more = f" and {len(other) - _NAMED} more" if len(other) > _NAMED else ""
        raise CheckpointError(
            f"{place} holds trained parameters only, and the frozen ones that weights= or model= give now are others "
            f"than those it was trained over: {', '.join(other[:_NAMED])}{more}. Begin from the same files and "
            "versions as then, or start afresh in another folder."
        )
    for section, names in missing.items():
        states[section].tensors.update({f"parameters/{name}": values[name] for name in names})
    for state in states.values():
        for path in [path for path in state.scalars if path.startswith(FROZEN)]:
            del state.scalars[path]


def _is_marked(value: Tensor, mark: JSON) -> bool:
    match mark:
        case [str(dtype), int(checksum)]:
            return _checksum(value.to(DTYPES[dtype]) if value.is_floating_point() else value) == checksum
    return False


def _checksum(value: Tensor) -> int:
    flat = value.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
    return zlib.crc32(flat.view(torch.uint8).numpy().data)
