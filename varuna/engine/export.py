"""The trained model as one safetensors file under its own names."""

from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from varuna.checkpoint.files import unwritable
from varuna.checkpoint.shards import SectionState
from varuna.core.errors import FleetError
from varuna.core.messages import Transfer
from varuna.engine.inbox import GenerationEnded
from varuna.engine.links import Courier
from varuna.engine.session import Generation
from varuna.engine.transfer import exchange
from varuna.partition.model import PartitionedModel


def export_model(generation: Generation | None, model: PartitionedModel, path: Path) -> None:
    """Gather all sections on the main rank and write them; other ranks send theirs, spares do nothing.

    A tied parameter is written once, under its first name; the file's metadata maps its other names to it, as
    ``safetensors.torch.load_model`` expects.

    Raises:
        CheckpointError: the file cannot be written.
        FleetError: a worker vanished meanwhile.
    """
    if generation is None:
        return
    plan, rank = generation.assignment.plan, generation.assignment.rank
    homes = {section: plan.rank_of(0, plan.stage_of(section)) for section in range(plan.sections)}
    transfers = [Transfer(section=s, source_rank=home, target_rank=0) for s, home in homes.items() if home != 0]
    stage = generation.stage
    states = {section: stage.state_of(section, owned_only=True) for section in stage.sections}
    if plan.stages > 1 and any(rank in (t.source_rank, t.target_rank) for t in transfers):
        courier = Courier(generation.inbox, "export")
        courier.submit("exported", lambda: exchange(generation.groups.world, transfers, rank, states))
        try:
            states.update(generation.inbox.take("exported", lambda: f"the sections of {len(transfers)} other stages"))
        except GenerationEnded as error:
            raise FleetError("a worker vanished during export. Call trainer.export after the loop.") from error
        finally:
            courier.close()
    if rank == 0:
        _write(states.values(), model, path)


def _write(states: Iterable[SectionState], model: PartitionedModel, path: Path) -> None:
    tensors: dict[str, Tensor] = {
        name.removeprefix("parameters/"): value.contiguous()
        for state in states
        for name, value in state.tensors.items()
        if name.startswith("parameters/")
    }
    file = path if path.suffix == ".safetensors" else path / "model.safetensors"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        save_file(tensors, str(partial), metadata={"format": "pt", **model.aliases})
        partial.replace(file)
    except OSError as error:
        raise unwritable("write", file, error) from error
