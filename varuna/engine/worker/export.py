"""The trained model as one safetensors file under its own names."""

import os
from collections.abc import Callable, Collection
from pathlib import Path

from safetensors.torch import load, save, save_file
from torch import Tensor

from varuna.checkpoint.io.export import averaged_names, is_average, is_exported, own_names
from varuna.checkpoint.io.section_state import SectionState
from varuna.checkpoint.names import CONFIG
from varuna.core.errors import FleetError, LinkError
from varuna.core.messages import Transfer
from varuna.engine.base.inbox import Inbox
from varuna.engine.base.wait_bounds import Awaited, Patience
from varuna.engine.links.links import Courier
from varuna.engine.worker.generation import Generation
from varuna.engine.worker.state_transfer import exchange_states
from varuna.engine.worker.tell import tell_all
from varuna.partition.model import PartitionedModel
from varuna.store.folder import unwritable

_BOUND_S, _LEAST_BYTES_PER_S = 600.0, 5e6


def export_model(
    generation: Generation | None,
    model: PartitionedModel,
    path: Path,
    config: str | None = None,
    *,
    average: bool = False,
    left_over: Callable[[Collection[str]], dict[str, Tensor]] = lambda held: {},
) -> None:
    """Gather the model on the main rank and write it; other ranks send their part, spares do nothing.

    A tied parameter is written once, under its first name; the file's metadata maps its other names to it, as
    ``safetensors.torch.load_model`` expects.

    Args:
        generation: the newest one; None on a spare.
        model: for names.
        path: of the file, which is replaced as a whole.
        config: the model's configuration, for a folder's ``config.json``.
        average: write averages of the parameters in their place.
        left_over: makes, on the main rank, the entries that are not among these names, which training has not changed.

    Raises:
        CheckpointError: the file cannot be written.
        FleetError: a worker vanished meanwhile.
    """
    tensors = gather_model(generation, model, wanted=is_exported, average=average)
    if tensors is None:
        return
    tensors |= {name: value.contiguous() for name, value in left_over(tensors.keys()).items()}
    file = path if path.suffix == ".safetensors" else path / "model.safetensors"
    write_tensors(tensors, file, {"format": "pt", **model.aliases})
    if config is not None and file.parent == path:
        try:
            (path / CONFIG).write_text(config)
        except OSError as error:
            raise unwritable("write", path / CONFIG, error) from error


def gather_model(
    generation: Generation | None, model: PartitionedModel, *, wanted: Callable[[str], bool], average: bool = False
) -> dict[str, Tensor] | None:
    """Return tensors of the model by its own names, on the main rank; None on all others.

    Args:
        generation: the newest one; None on a spare.
        model: for names.
        wanted: which entries of the sections' states, such as ``parameters/head.weight``.
        average: averages of the parameters in their place.

    Raises:
        FleetError: a worker vanished meanwhile.
    """
    if generation is None:
        return None
    plan, rank, stage = generation.assignment.plan, generation.assignment.rank, generation.stage
    speakers = enumerate(stage.sharding.holders)
    # The first holder speaks for a section: it has averages, too, where the optimizer's state is sharded.
    homes = {section: plan.home_of(holders[0], section) for section, holders in speakers}
    transfers = [Transfer(section=s, source_rank=home, target_rank=0) for s, home in homes.items() if home != 0]
    named = averaged_names if average else own_names
    states = {
        section: _part(
            stage.state_of(section, owned_only=True), lambda path: wanted(path) or (average and is_average(path))
        )
        for section in stage.sections
    }
    if any(rank in (t.source_rank, t.target_rank) for t in transfers):
        # Not the generation's inbox: ranks that have nothing to export may be gone, and their links broken.
        facts = model.facts.sections
        size_bytes = sum(
            facts[each.section].parameter_bytes + facts[each.section].optimizer_bytes for each in transfers
        )
        inbox = Inbox(Patience(last_s=_BOUND_S + size_bytes / _LEAST_BYTES_PER_S), who=f"rank {rank}", rank=rank)
        peers = tuple(sorted({each.source_rank for each in transfers} if rank == 0 else {0}))
        courier = Courier(inbox, "export")
        copies = generation.stage.job.traffic.state
        courier.submit(
            "exported", lambda: exchange_states(generation.groups.world, transfers, rank, states, copies=copies).states
        )
        try:
            states.update(inbox.take("exported", lambda: Awaited(f"the export of {len(transfers)} sections", peers)))
        except LinkError as error:
            raise FleetError(
                f"a worker was lost during export: {error} If there is a checkpoint, export from it with: varuna "
                "checkpoints export."
            ) from error
        finally:
            courier.close()
    if rank != 0:
        return None
    return {name: value.contiguous() for state in states.values() for name, value in named(state).items()}


def spread_model(
    generation: Generation, model: PartitionedModel, *, wanted: Callable[[str], bool]
) -> dict[str, Tensor]:
    """Return tensors of the model by its own names, on every rank, section by section; at most once in each.

    Args:
        generation: the running one, between two steps.
        model: for names.
        wanted: as for ``gather_model``.

    Raises:
        GenerationEnded: the manager ended the generation.
        LinkError: a link broke.
    """
    plan, rank, stage = generation.assignment.plan, generation.assignment.rank, generation.stage
    found: dict[str, Tensor] = {}
    for section, holders in enumerate(stage.sharding.holders):
        mine: dict[str, Tensor] | None = None
        if rank == plan.home_of(holders[0], section):
            # A tied parameter goes with the section that owns it.
            named = own_names(_part(stage.state_of(section, owned_only=True), wanted))
            mine = {name: value.detach().cpu().contiguous() for name, value in named.items()}
        if plan.workers > 1:
            data = None if mine is None else save(mine)
            mine = load(tell_all(generation, ("model", section), data, f"section {section} of the trained model"))
        found.update(mine or {})
    return found


def _part(state: SectionState, wanted: Callable[[str], bool]) -> SectionState:
    return SectionState(state.section, {name: value for name, value in state.tensors.items() if wanted(name)})


def write_tensors(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file, which is replaced as a whole.

    Raises:
        CheckpointError: it cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        save_file(tensors, str(partial), metadata=metadata)
        _sync(partial)
        partial.replace(file)
        _sync(file.parent)
    except OSError as error:
        raise unwritable("write", file, error) from error


def _sync(path: Path) -> None:
    """Make a file durable: a power cut leaves the old one or the new one, whole."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
