"""Captured models as bytes: each is captured once per run of tests, and pytest's workers hand it to each other."""

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

if TYPE_CHECKING:  # tests that need no torch import none
    from varuna.partition.model import PartitionedModel


class Captures:
    """A folder of captured models by key; also as much of a manager as ``varuna.job.shared_capture`` asks for."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        """shared by all workers of pytest; the conftest sets it"""

    def seek_work(self, key: str, _what: str) -> bytes:
        """Return what some worker has captured; empty: this one is to do it."""
        try:
            return b"" if self.folder is None else (self.folder / key).read_bytes()
        except FileNotFoundError:
            return b""

    def offer_work(self, key: str, data: bytes) -> None:
        """Keep what this worker has captured; a reader sees all of it or nothing."""
        if self.folder is not None and data:
            self.folder.mkdir(exist_ok=True)
            part = self.folder / f"{key}-{uuid4().hex}"
            part.write_bytes(data)
            os.replace(part, self.folder / key)

    def captured(self, capture: "Callable[[], PartitionedModel]", *given: Any) -> "PartitionedModel":
        """Return what ``capture`` does, or what it has returned to another worker that was given the same."""
        from varuna.partition.written.graphs import CannotShareError
        from varuna.partition.written.model import from_bytes, to_bytes

        names = [_name(each) for each in given]
        if None in names:
            return capture()
        key = hashlib.sha256(repr(names).encode()).hexdigest()
        if data := self.seek_work(key, "a model"):
            return from_bytes(data)
        model = capture()
        with suppress(CannotShareError):  # of modules that run as written
            self.offer_work(key, to_bytes(model))
        return model


def _name(given: Any) -> str | None:
    """Name what every worker of pytest finds under this name; None of what closes over something else."""
    if given is None or isinstance(given, (str, int, tuple)):
        return repr(given)
    name = getattr(given, "__qualname__", "<")
    return None if "<" in name else f"{given.__module__}.{name}"


CAPTURES = Captures()
