"""This machine, looked at: everything at once, each part within a bound."""

import os
import platform
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from varuna.core.version import __version__
from varuna.extras.doctor.judging.facts import CloudFacts, GpuFacts, MachineFacts, StoreFacts
from varuna.extras.doctor.judging.pauses import SETTING
from varuna.extras.doctor.links.torch_child import TorchChild
from varuna.extras.doctor.machine.folders import look_at_folders
from varuna.extras.doctor.machine.limits import look_at_limits
from varuna.extras.doctor.machine.store_probe import try_store
from varuna.fleet.notices.spot_notices import CloudNotices, clouds
from varuna.process.bounded import Bounded
from varuna.store.opening import is_local, location

_FIELDS = ("name", "memory.total", "memory.used", "driver_version", "compute_mode")
_BOUND_S = 12.0
_NVIDIA, _DISPLAY = "0x10de", "0x03"
_MIB = 1 << 20


def look_at_gpus(root: Path = Path("/")) -> tuple[tuple[GpuFacts, ...], str]:
    """Return GPUs, and why there are none although the machine has one; ``root`` is where /sys is."""
    on_bus = _on_bus(root / "sys" / "bus" / "pci" / "devices")
    there = f"{on_bus} of NVIDIA's GPUs on the bus, but " if on_bus else ""
    if shutil.which("nvidia-smi") is None:
        return (), f"{there}no driver: there is no nvidia-smi" if there else ""
    command = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=_BOUND_S, check=False)
    except subprocess.TimeoutExpired:
        return (), f"nvidia-smi did not answer within {_BOUND_S:.0f} s"
    except OSError as error:
        return (), f"nvidia-smi cannot be started: {error.strerror}"
    if told.returncode != 0:
        said = (told.stdout or told.stderr).strip().splitlines()
        return (), f"nvidia-smi says: {said[0] if said else f'exit code {told.returncode}'}"
    return parse_gpus(told.stdout), ""


def parse_gpus(table: str) -> tuple[GpuFacts, ...]:
    """``NVIDIA H100, 81559, 512, 550.54.15, Default`` and so on, with ``[N/A]`` where there is no figure."""
    found = []
    for line in table.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == len(_FIELDS):
            name, total, used, driver, mode = words
            found.append(
                GpuFacts(
                    name=name,
                    memory_bytes=int(total) * _MIB if total.isdigit() else 0,
                    used_bytes=int(used) * _MIB if used.isdigit() else 0,
                    driver=driver,
                    compute_mode=mode,
                )
            )
    return tuple(found)


def visible_gpus() -> str | None:
    """Return the GPUs that the environment leaves to processes of CUDA; None: all."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def _on_bus(devices: Path) -> int:
    count = 0
    for device in devices.glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        count += vendor == _NVIDIA and kind.startswith(_DISPLAY)
    return count


BOUND_S = 5.0
_VENDORS = {"Amazon EC2": "AWS", "Amazon": "AWS", "Google": "Google Cloud", "Microsoft Corporation": "Azure"}


def look_at_cloud(root: Path = Path("/"), among: Sequence[CloudNotices] | None = None) -> CloudFacts:
    """Ask the services of all clouds at once; ``root`` is where /sys is."""
    asking = [(each.name, Bounded(each.is_here)) for each in (clouds() if among is None else among)]
    deadline_s, answers = time.monotonic() + BOUND_S, ""
    for name, work in asking:
        try:
            answers = answers or (name if work.result(max(0.0, deadline_s - time.monotonic())) else "")
        except TimeoutError:
            continue
    return CloudFacts(vendor=_vendor(root), answers=answers)


def _vendor(root: Path) -> str:
    try:
        vendor = (root / "sys" / "class" / "dmi" / "id" / "sys_vendor").read_text().strip()
    except OSError:
        return ""
    if vendor == "Microsoft Corporation" and not (root / "var" / "lib" / "waagent").exists():
        return ""  # a Hyper-V of one's own, or a laptop
    return _VENDORS.get(vendor, "")


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


def look_at_machine(child: TorchChild, wanted: Wanted) -> MachineFacts:
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
    found_gpus, gpu_problem = gpus.result(_PART_S)
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
        folders=folders.result(_PART_S),
        store=store,
        limits=look_at_limits(),
        starts_slowly=starts_slowly(),
        cloud=cloud.result(_PART_S),
    )


def starts_slowly(root: Path = Path("/")) -> bool:
    """Return whether TCP begins anew after a pause, as Linux does by default; ``root`` is where file systems are."""
    try:
        return (root / "proc" / "sys" / SETTING.replace(".", "/")).read_text().strip() == "1"
    except OSError:
        return False


def _resolved(work: Bounded[str]) -> str:
    try:
        return work.result(2.0)
    except (OSError, TimeoutError):
        return ""


def owner_here() -> str:
    """Return a name for this process in a store, which no other on any machine has."""
    host = "".join(letter for letter in socket.gethostname() if letter.isalnum())
    return f"{host[:40]}{os.getpid()}"
