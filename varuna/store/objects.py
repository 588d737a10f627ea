"""A store in a bucket or container, over obstore. Credentials come by the platform's own chain.

Only obstore's blocking calls are used: they wait without the interpreter's lock, and leave no event loop that
could close under them. Each request is retried by the library; ``retry`` adds what lasts longer.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import from_url

from varuna.core.errors import ObjectExists, ObjectMissing, StoreError, StoreUnavailable
from varuna.store.base import Chunks, Entry, checked
from varuna.store.throttle import Throttle

PART_BYTES = 8 * 2**20
"""Parts of a multipart upload. 10,000 of them are S3's most, so one shard may have 78 GiB."""
PARTS_AT_ONCE = 4
_BEHIND_THE_END = ("416 Range Not Satisfiable", "but object was only")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")
_METADATA = "169.254.169.254"
_NO_CREDENTIALS = (
    "The environment has no credentials, so this machine's metadata service was asked. Set them (for S3 "
    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, for Google GOOGLE_APPLICATION_CREDENTIALS), or give the machine "
    "a role"
)
_WRITES = ("write", "create")
_MISCONFIGURED = "builder error"  # the client's words for a request that cannot be made at all

QUICK: dict[str, Any] = {"max_retries": 4, "retry_timeout": timedelta(seconds=20)}
"""For small objects: ``retry`` asks again."""
ONCE: dict[str, Any] = {"max_retries": 0, "retry_timeout": timedelta(seconds=20)}
"""For objects that must be new: after a lost answer, the library's own second try would find what the first one wrote
and take it for another writer's object. ``retry`` compares the contents instead."""
PATIENT: dict[str, Any] = {
    "max_retries": 1000,
    "retry_timeout": timedelta(minutes=4),  # credentials are not renewed within one request
    "backoff": {"init_backoff": timedelta(milliseconds=200), "max_backoff": timedelta(seconds=5), "base": 2},
}
"""For parts of a large object: a network cut costs the part under way, not the parts before it."""
_ALLOW_HTTP = ("AWS_ALLOW_HTTP", "AZURE_ALLOW_HTTP", "GOOGLE_ALLOW_HTTP")
_CLIENT: dict[str, Any] = {"connect_timeout": timedelta(seconds=10), "timeout": timedelta(seconds=60)}


class ObjectStore:
    """Objects of a bucket, below the prefix that the URL names."""

    def __init__(self, url: str, *, once: Any, quick: Any, patient: Any, throttle: Throttle | None = None) -> None:
        """Wrap obstore stores of the same place.

        Args:
            url: for messages.
            once: asks once.
            quick: gives up soon.
            patient: for parts of large objects.
            throttle: bounds the bandwidth of ``write``.
        """
        self._url, self._throttle = url.rstrip("/"), throttle
        self._once, self._quick, self._patient = once, quick, patient
        self._process = os.getpid()

    @property
    def url(self) -> str:
        """The store's URL, as the user wrote it."""
        return self._url

    def get(self, name: str) -> bytes:
        """Read a small object whole."""
        with self._doing("read", name):
            return bytes(obstore.get(self._quick, checked(name)).bytes())

    def put(self, name: str, data: bytes) -> None:
        """Write or replace a small object."""
        with self._doing("write", name):
            obstore.put(self._quick, checked(name), data, use_multipart=False)

    def create(self, name: str, data: bytes) -> None:
        """Write a small object that must be new. After ``StoreUnavailable`` it may have been written all the same."""
        with self._doing("create", name):
            obstore.put(self._once, checked(name), data, mode="create", use_multipart=False)

    def write(self, name: str, chunks: Chunks) -> None:
        """Upload in parts of which several are under way at once, no faster than the throttle allows."""

        def throttled() -> Iterator[bytes | memoryview]:
            for chunk in chunks():
                for start in range(0, len(chunk), PART_BYTES):
                    part = memoryview(chunk)[start : start + PART_BYTES]
                    if self._throttle is not None:
                        self._throttle.wait(len(part))
                    yield part

        with self._doing("write", name):
            obstore.put(
                self._patient,
                checked(name),
                throttled(),
                use_multipart=True,
                chunk_size=PART_BYTES,
                max_concurrency=PARTS_AT_ONCE,
            )

    def read_into(self, name: str, start: int, view: memoryview) -> None:
        """Read a byte range of an object into a buffer."""
        with self._doing("read", name):
            found = obstore.get_range(self._patient, checked(name), start=start, length=len(view))
        if len(found) != len(view):
            raise ObjectMissing(
                f"{self._url}/{name} ends after {start + len(found)} bytes; expected {start + len(view)}"
            )
        view[:] = memoryview(found)

    def size_bytes(self, name: str) -> int:
        """Return the bytes of an object, by a HEAD request."""
        with self._doing("read", name):
            return int(obstore.head(self._quick, checked(name))["size"])

    def folders(self) -> list[str]:
        """List the common prefixes at the top."""
        with self._doing("list", ""):
            return sorted(obstore.list_with_delimiter(self._quick)["common_prefixes"])

    def entries(self, folder: str = "") -> list[Entry]:
        """List the objects below a prefix."""
        with self._doing("list", folder):
            pages = obstore.list(self._quick, prefix=checked(folder) if folder else None)
            return sorted(Entry(found["path"], found["size"]) for page in pages for found in page)

    def remove(self, name: str) -> None:
        """Remove an object."""
        with self._doing("remove", name):
            try:
                obstore.delete(self._quick, checked(name))
            except FileNotFoundError:
                return  # S3 is silent about it, the others are not

    def remove_folder(self, folder: str) -> None:
        """Remove the objects below a prefix."""
        for entry in self.entries(folder):
            self.remove(entry.name)

    def rename_folder(self, old: str, new: str) -> None:
        """Copy each object within the store, then remove it at its old name."""
        for entry in self.entries(old):
            target = new + entry.name.removeprefix(old)
            with self._doing("move", entry.name):
                obstore.copy(self._patient, entry.name, checked(target))
                obstore.delete(self._patient, entry.name)

    @contextmanager
    def _doing(self, verb: str, name: str) -> Iterator[None]:
        """Turn obstore's errors into ours."""
        if os.getpid() != self._process:
            raise StoreError(f"{self._url} was opened before a fork: a request of the child would hang")
        what = f"cannot {verb} {self._url}/{name}".rstrip("/")
        try:
            yield
        except AlreadyExistsError as error:
            raise ObjectExists(f"{self._url}/{name} already exists") from error
        except FileNotFoundError as error:
            if verb in _WRITES:
                raise StoreError(f"{what}: there is no such bucket ({_first_line(error)})") from error
            raise ObjectMissing(f"{self._url}/{name} does not exist") from error
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise StoreError(
                f"{what}: {_first_line(error)}. Check the bucket and the credentials of this machine, which come "
                "from its environment, its profile or its role."
            ) from error
        except BaseError as error:
            if any(text in str(error) for text in _BEHIND_THE_END):
                raise ObjectMissing(f"{self._url}/{name} is shorter than expected: {_first_line(error)}") from error
            if any(text in str(error) for text in _NO_BUCKET):  # a listing of one is not answered like a read
                raise StoreError(f"{what}: there is no such bucket ({_first_line(error)})") from error
            if _MISCONFIGURED in str(error):
                hint = f"An endpoint without TLS needs {'=true or '.join(_ALLOW_HTTP)}=true."
                raise StoreError(f"{what}: {_first_line(error)}. {hint}") from error
            hint = f". {_NO_CREDENTIALS}" if _METADATA in str(error) else ""
            raise StoreUnavailable(f"{what}: {_first_line(error)}{hint}") from error


_process: int | None = None
"""The process that runs obstore's threads: one that is forked later has none of them, and a request would hang."""


def hangs_here() -> bool:
    """Return whether this process was forked from one that has used a bucket."""
    return _process is not None and _process != os.getpid()


def connect(url: str, throttle: Throttle | None) -> ObjectStore:
    """Open a bucket by its URL.

    Raises:
        StoreError: the URL, or what the environment says about it, cannot be used.
    """
    global _process
    if hangs_here():
        raise StoreError(
            f"{url} cannot be opened in a process that was forked from one that has used a bucket: a request would "
            "hang. Start a new process instead"
        )
    _process = os.getpid()
    allows_http = any(os.environ.get(name, "").lower() == "true" for name in _ALLOW_HTTP)
    client = {**_CLIENT, "allow_http": allows_http}  # options that are given here replace those of the environment
    try:
        once, quick, patient = (
            from_url(url, client_options=client, retry_config=retries)  # type: ignore[call-overload]  # typed dicts
            for retries in (ONCE, QUICK, PATIENT)
        )
    except (BaseError, ValueError) as error:
        raise StoreError(f"cannot open {url}: {_first_line(error)}") from error
    return ObjectStore(url, once=once, quick=quick, patient=patient, throttle=throttle)


def _first_line(error: Exception) -> str:
    """Return the message without the library's debug output."""
    return str(error).split("\n\nDebug source")[0].strip().replace("\n", " ")
