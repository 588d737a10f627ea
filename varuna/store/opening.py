"""A store by its path or URL."""

import os
import re
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from varuna.core.errors import UsageError
from varuna.store.base import Store
from varuna.store.folder import FolderStore
from varuna.store.retry import PATIENCE_S, RetryingStore
from varuna.store.throttle import Throttle

_MEANT = re.compile(r"[%\\?#\x00-\x1f\x7f]|(?<=/)\.{1,2}(?=/|$)|\s$")
"""Parts of a URL that parsers decode, remove or follow: a place may not lead elsewhere than its text says."""
SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")
_memory: dict[str, Store] = {}


def location(place: str | os.PathLike[str]) -> str:
    """Name a checkpoint directory as all processes of a run should: a URL as it is, a path made absolute.

    Raises:
        UsageError: a URL of a kind that is not known, or one of a bucket that is not read as it is written.
    """
    text = os.fspath(place)
    if "://" not in text:
        return str(Path(text).absolute())
    parts = urlsplit(text)
    if parts.scheme == "file":
        return str(Path(url2pathname(parts.path)).absolute())
    if parts.scheme != "memory" and (parts.scheme not in SCHEMES or not parts.netloc):
        raise UsageError(
            f"{text!r} is not a place for checkpoints: use a folder, s3://bucket/path, gs://bucket/path or "
            "az://container/path"
        )
    where = text.rstrip("/")
    if parts.scheme != "memory" and (found := _MEANT.search(where)) is not None:
        raise UsageError(
            f"{text!r} is not a place: {found[0]!r} has a meaning of its own in a URL, so it might be another place "
            "than the one that is written. Name folders of a bucket without % \\ ? # and control characters, and "
            "without . or .. alone"
        )
    return where


def open_store(place: str | os.PathLike[str], *, upload_bytes_per_s: float | None = None) -> Store:
    """Open a directory or a bucket; nothing is read or written yet.

    Args:
        place: a path, or a URL of S3, Google Cloud Storage or Azure Blob; ``memory://name`` lives in this process.
        upload_bytes_per_s: bound on the bandwidth of uploads. A local directory has none.

    Raises:
        UsageError: see ``location``.
        StoreError: the URL, or what the environment says about it, cannot be used.
    """
    where = location(place)
    if "://" not in where:
        return FolderStore(Path(where))
    from varuna.store.objects import ObjectStore, connect

    if where.startswith("memory://"):
        if where not in _memory:
            from obstore.store import MemoryStore

            memory = MemoryStore()
            _memory[where] = ObjectStore(where, once=memory, quick=memory, patient=memory)
        return _memory[where]
    throttle = Throttle(upload_bytes_per_s) if upload_bytes_per_s is not None else None
    return RetryingStore(connect(where, throttle), patience_s=PATIENCE_S)


def keep_in_memory(store: Store) -> None:
    """Let ``open_store`` give this store for its ``memory://`` URL from now on, in this process."""
    _memory[store.url] = store


def is_local(place: str) -> bool:
    """Return whether ``place``, from ``location``, is a directory of this machine's file system."""
    return "://" not in place
