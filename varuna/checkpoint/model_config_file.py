"""The model's configuration beside its checkpoints, and who wrote it.

The job says where it goes and what is in it, but the process that writes it may have more rights than the job. So only
a file that an earlier run put there is ever replaced, which a note of its checksum tells.
"""

import hashlib

from varuna.checkpoint.names import CONFIG, CONFIG_NOTE
from varuna.core.errors import ObjectMissing
from varuna.store.base import Store


def keep_configuration(store: Store, config: str) -> str:
    """Write it, unless somebody else's file is there; returns a warning, or None.

    Raises:
        StoreError: the store cannot be used.
    """
    content = config.encode()
    found = _get(store, CONFIG)
    if found is not None and found != content and _get(store, CONFIG_NOTE) != _checksum(found):
        return (
            f"{CONFIG} in {store.url} was not written by Varuna and is left unchanged. Move it away if the "
            "checkpoints there should contain this model's configuration."
        )
    store.put(CONFIG_NOTE, _checksum(content))
    if found != content:
        store.put(CONFIG, content)
    return ""


def _checksum(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _get(store: Store, name: str) -> bytes | None:
    try:
        return store.get(name)
    except ObjectMissing:
        return None
