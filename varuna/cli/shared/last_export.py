"""The model of a run that ended within its budget: exported from its last checkpoint, into the run's folder."""

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from varuna.core.errors import VarunaError
from varuna.process.console import say, warn

if TYPE_CHECKING:
    from varuna.fleet.service.service import ManagerService
    from varuna.fleet.state.phases import Ended


def export_cut_short(service: "ManagerService[Any]", ended: "Ended") -> None:
    """Say why a run with a budget ended before its last step, and export its model; of others nothing is said.

    The workers are gone, so this costs none of their hours.
    """
    fleet = service.manager.fleet
    if service.budget is None or not service.is_cut_short:
        return
    if not ended.exit_code:
        say(ended.text)
    place = None if fleet.job is None else fleet.job.checkpoint_dir
    if service.checkpoint is None or place is None:
        return
    later = f"`varuna checkpoints export {place} OUT` does it, on a machine that has torch."
    if find_spec("torch") is None:
        warn(f"the model is not exported, because torch is not installed here. {later}")
        return
    try:
        say(f"the model of the last checkpoint is in {export_newest(place, service.run_dir)}")
    except (VarunaError, OSError) as error:
        warn(f"the model is not exported: {error} The checkpoint is complete. {later}")


def export_newest(place: str, run_dir: Path) -> Path:
    """Export the newest checkpoint that can be used into a folder of its step, whole or not at all.

    Raises:
        CheckpointError: there is none, or it cannot be exported.
        StoreError: it cannot be read.
        OSError: the folder cannot be written.
    """
    from varuna.checkpoint.io.export import export_checkpoint
    from varuna.checkpoint.manifest import newest_intact
    from varuna.core.errors import CheckpointError
    from varuna.store.opening import open_store

    store = open_store(place)
    found = newest_intact(store)
    if found is None:
        raise CheckpointError(f"{store.url} has no complete checkpoint.")
    manifest, _ = found
    folder = run_dir / f"exported-{manifest.step}"
    partial = run_dir / f".exported-{manifest.step}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    export_checkpoint(store, manifest, partial)
    shutil.rmtree(folder, ignore_errors=True)
    return partial.rename(folder)
