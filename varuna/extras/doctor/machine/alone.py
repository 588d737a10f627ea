"""One machine, which meets no other."""

import secrets
from pathlib import Path

from varuna.core.errors import FleetError, UsageError
from varuna.extras.doctor.judging.facts import MachineFacts
from varuna.extras.doctor.links.torch_child import TorchChild
from varuna.extras.doctor.machine.look import Wanted, look_at_machine, owner_here
from varuna.extras.doctor.machine.store_probe import remove_mark
from varuna.fleet.net.serving import bind
from varuna.store.opening import is_local, location


def look_alone(checkpoints: str = "", interface: str = "") -> MachineFacts:
    """Look at this machine.

    Args:
        checkpoints: a folder or a URL, to try as a store; empty: none.
        interface: an address that others are to reach it at; empty: none are.

    Raises:
        UsageError: ``checkpoints`` is no place for them, or ``interface`` is not of this machine.
    """
    place = location(checkpoints) if checkpoints else ""
    check_interface(interface)
    is_new = bool(place) and is_local(place) and not Path(place).exists()
    mark = secrets.token_hex(6)
    child = TorchChild()
    try:
        return look_at_machine(child, Wanted(checkpoints=place, mark=mark, owner=owner_here(), address=interface))
    finally:
        child.close()
        if place:
            remove_mark(place, mark)
        if is_new:
            remove_empty(Path(place))


def check_interface(interface: str) -> None:
    """Refuse an address that is not one of this machine's.

    Raises:
        UsageError: it is not.
    """
    if not interface:
        return
    try:
        bind(interface, 0).close()
    except (FleetError, OSError) as error:
        raise UsageError(
            f"--interface {interface} is not an address of this machine. `ip address` lists them"
        ) from error


def remove_empty(folder: Path) -> None:
    """Remove a folder that this check has made, unless it is in use already."""
    try:
        folder.rmdir()
    except OSError:
        return
