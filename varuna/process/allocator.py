"""Keeps the C allocator from handing memory back that the next micro-batch asks for again. No torch.

B frees what F kept, many MiB at once. glibc gives such memory back to the system, and the next F has every page of it
mapped and zeroed again: on small models a twentieth of a step.
"""

import ctypes
import os
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Options of ``mallopt``."""
_LARGE_BYTES = 32 * 2**20
"""Larger blocks are mapped alone and returned when freed, as usual: kept, they would fragment the heap. This is where
glibc's own, moving threshold ends."""
_NEVER = -1
_USERS_OWN = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "LD_PRELOAD")


def keep_freed_memory() -> bool:
    """Let freed blocks of up to 32 MiB stay with this process, for whatever it allocates next.

    Returns:
        Whether that was done: not without glibc, and not where the environment chooses an allocator or its thresholds.
    """
    if platform.libc_ver()[0] != "glibc" or any(map(os.environ.get, _USERS_OWN)):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_THRESHOLD, _LARGE_BYTES) and mallopt(_TRIM_THRESHOLD, _NEVER))
