"""The interface of a store of checkpoints: few operations, each either done for good or not done at all.

Names are relative, with ``/`` between parts, as in ``step-00000010/manifest.json``.
"""

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from varuna.core.errors import StoreError

Chunks = Callable[[], Iterable[bytes | memoryview]]
"""Yields the content from its beginning each time it is called, since a write may have to start again."""

_NAME = re.compile(r"[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)*")


class Entry(NamedTuple):
    """An object as a listing shows it."""

    name: str
    size_bytes: int


class Store(Protocol):
    """A directory of objects. What returns is durable; what raises left the old object or none.

    Every method raises ``StoreUnavailable`` if the store does not answer, and ``StoreError`` if it refuses.
    """

    @property
    def url(self) -> str:
        """The store's place, as the user would write it."""
        ...

    def get(self, name: str) -> bytes:
        """Read a small object whole.

        Raises:
            ObjectMissing: there is none.
        """
        ...

    def put(self, name: str, data: bytes) -> None:
        """Write or replace a small object."""
        ...

    def create(self, name: str, data: bytes) -> None:
        """Write a small object that no other writer has written: of several writers one succeeds.

        Raises:
            ObjectExists: there is one.
        """
        ...

    def write(self, name: str, chunks: Chunks) -> None:
        """Write or replace an object of any size."""
        ...

    def read_into(self, name: str, start: int, view: memoryview) -> None:
        """Fill ``view`` with the object's bytes from ``start`` on.

        Raises:
            ObjectMissing: there is none, or it is too short.
        """
        ...

    def size_bytes(self, name: str) -> int:
        """Return the bytes of an object that was written before, whatever listings show.

        Raises:
            ObjectMissing: there is none.
        """
        ...

    def folders(self) -> list[str]:
        """List the names of the folders at the top; empty ones may be left out."""
        ...

    def entries(self, folder: str = "") -> list[Entry]:
        """List all objects below a folder, in order of names; nothing if it does not exist."""
        ...

    def remove(self, name: str) -> None:
        """Remove an object; it may be gone already."""
        ...

    def remove_folder(self, folder: str) -> None:
        """Remove a folder and everything in it; it may be gone already."""
        ...

    def rename_folder(self, old: str, new: str) -> None:
        """Move a folder's objects; a crash may leave some in each, none nowhere."""
        ...


def checked(name: str) -> str:
    """Return the name, if it is valid: names come from other machines, and none may lead out of the store.

    Raises:
        StoreError: it is not a valid name of an object.
    """
    if not _NAME.fullmatch(name) or any(part in (".", "..") for part in name.split("/")):
        raise StoreError(f"{name!r} is not a valid name of an object in a store")
    return name
