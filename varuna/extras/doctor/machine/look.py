"""This machine, looked at: everything at once, each part within a bound."""

import os
import platform
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

from varuna.core.version import __version__
from varuna.extras.doctor.judging.facts import MachineFacts, StoreFacts
from varuna.extras.doctor.judging.pauses import SETTING
from varuna.extras.doctor.links.torch_child import TorchChild
from varuna.extras.doctor.machine.cloud import look_at_cloud
from varuna.extras.doctor.machine.folders import look_at_folders
from varuna.extras.doctor.machine.gpus import look_at_gpus, visible_gpus
from varuna.extras.doctor.machine.limits import look_at_limits
from varuna.extras.doctor.machine.store_probe import try_store
from varuna.process.bounded import Bounded
from varuna.store.opening import is_local, location

_PART_S = 20.0
_HERE, _TEMPORARY, _CHECKPOINTS = "this folder", "temporary files", "checkpoints"


@dataclass(frozen=True)
class Wanted:
    """Things to look at beside the machine itself.

    Args:
        checkpoints: a folder or a URL, to try as a store; empty: none.
        mark: names the folder of this check in that store.
        owner: names this machine there, in letters and digits.
        seeks_mark: look for what the first machine wrote there.
        address: at which other machines reach this one; empty: none do.
    """

    checkpoints: str = ""
    mark: str = ""
    owner: str = ""
    seeks_mark: bool = False
    address: str = ""


def look(child: TorchChild, wanted: Wanted) -> MachineFacts:
    """Look at this machine.

    Raises:
        UsageError: ``checkpoints`` is no place for them.
    """
    place = location(wanted.checkpoints) if wanted.checkpoints else ""
    places = {_CHECKPOINTS: Path(place)} if place and is_local(place) else {}
    places |= {_HERE: Path.cwd(), _TEMPORARY: Path(tempfile.gettempdir())}
    folders = Bounded(lambda: look_at_folders(places, needed=(_CHECKPOINTS, _TEMPORARY)))
    gpus = Bounded(look_at_gpus)
    cloud = Bounded(look_at_cloud)
    resolves_to = Bounded(lambda: socket.gethostbyname(socket.gethostname()))
    store: StoreFacts | None = None
    if place:
        store = try_store(place, mark=wanted.mark, owner=wanted.owner, seeks_mark=wanted.seeks_mark)
    found_gpus, gpu_problem = gpus.take(_PART_S)
    return MachineFacts(
        name=socket.gethostname(),
        varuna=__version__,
        python=platform.python_version(),
        address=wanted.address,
        resolves_to=_resolved(resolves_to),
        torch=child.facts(),
        gpus=found_gpus,
        gpu_problem=gpu_problem,
        visible_gpus=visible_gpus(),
        folders=folders.take(_PART_S),
        store=store,
        limits=look_at_limits(),
        starts_slowly=starts_slowly(),
        cloud=cloud.take(_PART_S),
    )


def starts_slowly(root: Path = Path("/")) -> bool:
    """Whether TCP begins anew after a pause, as Linux does by default; ``root`` is where file systems are."""
    try:
        return (root / "proc" / "sys" / SETTING.replace(".", "/")).read_text().strip() == "1"
    except OSError:
        return False


def _resolved(work: Bounded[str]) -> str:
    try:
        return work.take(2.0)
    except (OSError, TimeoutError):
        return ""


def owner_here() -> str:
    """A name for this process in a store, which no other on any machine has."""
    host = "".join(letter for letter in socket.gethostname() if letter.isalnum())
    return f"{host[:40]}{os.getpid()}"
