"""A log of samples that many append to, in a folder or a bucket.

::

    <place>/
        version-00000012/1764500000000-5f0cd1a2-16.safetensors   16 samples, made with the model after 12 steps
        order/step-00000014.json                                 which samples step 14 uses: written once

An object appears whole or not at all, whichever process is killed. Of those that write the order of a step one
succeeds, and all read what that one has written.
"""

import os
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from varuna.core.errors import DataError, ObjectExists, ObjectMissing, UsageError
from varuna.extras.rollouts.order import Appended, StepOrder
from varuna.store.base import Store
from varuna.store.opening import location, open_store

_VERSION = re.compile(r"version-(\d{8,})")
_OBJECT = re.compile(r"\d{13,}-[0-9a-f]{8}-([1-9]\d*)\.safetensors")


def append(place: str | os.PathLike[str], samples: Mapping[str, Tensor], *, version: int) -> None:
    """Append samples to a log; when this returns, they stay.

    Args:
        place: a folder, or a URL of S3, Google Cloud Storage or Azure Blob.
        samples: tensors by name, whose first dimension counts the samples.
        version: of the model that made them: the number of steps after which it was published. 0: as training began.

    Raises:
        UsageError: the tensors do not count the same samples, or there are none; or the version is below 0.
        StoreError: the place cannot be written.
    """
    counts = {key: value.shape[0] if value.dim() else 0 for key, value in samples.items()}
    if len(set(counts.values())) != 1 or not next(iter(counts.values())):
        raise UsageError(
            f"append needs tensors whose first dimension counts the samples, at least one; found {counts or 'none'}"
        )
    if version < 0:
        raise UsageError(f"version={version} must be a number of steps, 0 or more")
    rows = next(iter(counts.values()))
    # The time only makes older samples come first; no two writers have the same name.
    name = f"{_folder(version)}/{time.time_ns() // 1_000_000:013d}-{secrets.token_hex(4)}-{rows}.safetensors"
    data = save({key: value.detach().cpu().contiguous() for key, value in samples.items()})
    _opened(location(place), os.getpid()).write(name, lambda: [data])


class Log:
    """A log, as a learner reads it."""

    def __init__(self, place: str | os.PathLike[str]) -> None:
        self.place = location(place)

    def appended(self, versions: Iterable[int]) -> list[Appended]:
        """Return the objects of some versions."""
        wanted = {_folder(version): version for version in versions}
        found = []
        for folder in wanted.keys() & set(self._store.folders()):
            for entry in self._store.entries(folder):
                if match := _OBJECT.fullmatch(entry.name.rpartition("/")[2]):
                    found.append(Appended(wanted[folder], entry.name, int(match[1])))
        return found

    def newest(self) -> int | None:
        """Return the newest version that has samples."""
        return max(
            (int(match[1]) for name in self._store.folders() if (match := _VERSION.fullmatch(name))), default=None
        )

    def samples(self, name: str) -> dict[str, Tensor]:
        """Read an object.

        Raises:
            DataError: it is gone, or damaged.
        """
        try:
            return load(self._store.get(name))
        except ObjectMissing as error:
            raise DataError(
                f"{self.place}/{name} is gone, and a step uses it: {error}. Keep all that is appended for as long as "
                "the run may go back to that step, or be replayed"
            ) from error
        except SafetensorError as error:
            raise DataError(f"{self.place}/{name} is damaged: {error}") from error

    def order(self, step: int) -> StepOrder | None:
        """Return what was decided for a step, if that has happened.

        Raises:
            DataError: it cannot be read.
        """
        try:
            data = self._store.get(_order(step))
        except ObjectMissing:
            return None
        try:
            return StepOrder.model_validate_json(data)
        except ValidationError as error:
            raise DataError(f"{self.place}/{_order(step)} is damaged: {error}") from error

    def decide(self, step: int, order: StepOrder) -> None:
        """Write the order of a step down, unless another worker has."""
        with suppress(ObjectExists):
            self._store.create(_order(step), order.model_dump_json().encode())

    @property
    def _store(self) -> Store:
        return _opened(self.place, os.getpid())


@lru_cache(maxsize=8)
def _opened(place: str, process: int) -> Store:
    """Return a store, opened in this process: a forked one cannot use its parent's."""
    return open_store(place)


def _folder(version: int) -> str:
    return f"version-{version:08d}"


def _order(step: int) -> str:
    return f"order/step-{step:08d}.json"
