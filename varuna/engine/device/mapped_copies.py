"""A file without a name, where values rest that a worker without a GPU needs from time to time.

The system writes it to the disk and drops its pages whenever it needs memory, as it does with a mapped checkpoint.
"""

import os
import tempfile
from collections.abc import Sequence

import torch
from torch import Tensor

from varuna.core.errors import UsageError
from varuna.core.units import format_bytes
from varuna.engine.device.host_copies import HostCopies


class MappedCopies(HostCopies):
    """Copies of a CPU, between its memory and such files."""

    def arena(self, size_bytes: int) -> Tensor:
        """Map a file of that size, in the folder for temporary files.

        Raises:
            UsageError: the disk has no room for it.
        """
        if not size_bytes:
            return self.room(0)
        handle, name = tempfile.mkstemp(prefix="varuna-frozen-")
        try:
            os.posix_fallocate(handle, 0, size_bytes)  # a page that the disk has no room for would kill this process
            return torch.from_file(name, shared=True, size=size_bytes, dtype=torch.uint8)
        except OSError as error:
            folder = tempfile.gettempdir()
            raise UsageError(
                f"parameters that are not trained need {format_bytes(size_bytes)} in {folder}, to be read from there "
                f"when their section runs, but it has no room for them: {error}. Set TMPDIR to a folder on a larger "
                "disk, or give workers so much memory that nothing is streamed."
            ) from error
        finally:
            os.close(handle)
            os.unlink(name)

    def at_rest(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Copy those that are in no such file."""
        moved = [value for value in values if value.untyped_storage().filename is None]
        homes = iter(self.homes_for(moved))
        return [value if value.untyped_storage().filename is not None else next(homes).copy_(value) for value in values]
