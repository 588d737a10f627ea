"""``torchrun --rdzv-backend=varuna``: torchrun finds this by an entry point of the group ``torchrun.handlers``.

Every torchrun of this environment imports it, whatever its rendezvous is, so it imports next to nothing.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def handler() -> "Callable[[RendezvousParameters], RendezvousHandler]":
    """Return the factory that torchrun registers as ``varuna``."""
    return _create


def _create(parameters: "RendezvousParameters") -> "RendezvousHandler":
    from varuna.extras.torchrun.handler import create

    return create(parameters)
