"""A store in a local directory, which several machines may share: files that a crash leaves old or new, never torn.

A file is written under a new name, synchronised, renamed, and its folder synchronised. Rewriting in place was up to
four times slower, and would not be atomic.
"""

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from varuna.core.errors import ObjectExists, ObjectMissing, StoreError
from varuna.store.base import Chunks, Entry, checked

_PARTIAL = ".partial"
_LEFT_BEHIND_S = 3600.0  # a writer that is alive changes its file far more often
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class FolderStore:
    """Objects are files below ``root``, which is created when the first is written."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()

    @property
    def url(self) -> str:
        """The directory's path."""
        return str(self._root)

    def get(self, name: str) -> bytes:
        """Read a file whole."""
        path = self._path(name)
        with _reading(path):
            return path.read_bytes()

    def put(self, name: str, data: bytes) -> None:
        """Write a file atomically."""
        self.write(name, lambda: [data])

    def create(self, name: str, data: bytes) -> None:
        """Write a file that must be new: a hard link gives the name to one writer only, and only when it is whole."""
        path = self._path(name)
        with self._partial(path, [data]) as partial:
            try:
                os.link(partial, path)
            except FileExistsError as error:
                raise ObjectExists(f"{path} already exists") from error
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                _create_in_place(path, data)
        _sweep(path)

    def write(self, name: str, chunks: Chunks) -> None:
        """Write a file atomically."""
        path = self._path(name)
        with self._partial(path, chunks()) as partial:
            os.replace(partial, path)

    def read_into(self, name: str, start: int, view: memoryview) -> None:
        """Read a part of a file."""
        path = self._path(name)
        with _reading(path), path.open("rb", buffering=0) as file:
            file.seek(start)
            read = 0
            while read < len(view):
                count = file.readinto(view[read:])
                if not count:
                    raise ObjectMissing(f"{path} ends after {start + read} bytes; expected {start + len(view)}")
                read += count

    def size_bytes(self, name: str) -> int:
        """Return the bytes of a file."""
        path = self._path(name)
        with _reading(path):
            return path.stat().st_size

    def folders(self) -> list[str]:
        """List the folders at the top."""
        with _reading(self._root):
            try:
                with os.scandir(self._root) as entries:
                    return sorted(entry.name for entry in entries if entry.is_dir())
            except FileNotFoundError:
                return []

    def entries(self, folder: str = "") -> list[Entry]:
        """List the files below a folder; those that are still being written are left out."""
        top = self._path(folder) if folder else self._root
        found: list[Entry] = []
        for where, _, files in os.walk(top, onerror=_raise_unless_missing):
            for file in files:
                path = Path(where, file)
                with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                    if not file.endswith(_PARTIAL):
                        found.append(Entry(path.relative_to(self._root).as_posix(), path.stat().st_size))
        return sorted(found)

    def remove(self, name: str) -> None:
        """Remove a file, unless it lies behind a link: what is there may be in use elsewhere."""
        path = self._path(name)
        for folder in path.relative_to(self._root).parents:
            if (link := self._root / folder) != self._root and link.is_symlink():
                raise StoreError(
                    f"cannot remove {path}: {link} is a link, and nothing is removed through links. Remove the link, "
                    "or what it leads to, yourself."
                )
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise unwritable("remove", path, error) from error

    def remove_folder(self, folder: str) -> None:
        """Remove a folder, and what crashed writers left in it."""
        path = self._path(folder)
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise unwritable("remove", path, error) from error

    def rename_folder(self, old: str, new: str) -> None:
        """Rename a folder."""
        source, target = self._path(old), self._path(new)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            source.rename(target)
            _sync(target.parent)
            _sync(source.parent)
        except OSError as error:
            raise unwritable("move", source, error) from error

    def _path(self, name: str) -> Path:
        return self._root / checked(name)

    @contextmanager
    def _partial(self, path: Path, chunks: Iterable[bytes | memoryview]) -> Iterator[Path]:
        """Make a synchronised file beside ``path``, for the caller to give its name to."""
        # Random, since process ids repeat among machines that share the folder.
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_PARTIAL}")
        try:
            _make_folder(path.parent)
            try:
                with partial.open("wb", buffering=0) as file:
                    for chunk in chunks:
                        _write_all(file.fileno(), memoryview(chunk))
                    os.fsync(file.fileno())
                yield partial
            finally:
                partial.unlink(missing_ok=True)  # still there under this name after a link or a failure
            _sync(path.parent)
        except OSError as error:
            raise unwritable("write", path, error) from error


def _sweep(written: Path) -> None:
    """Remove files of writers that died long before ``written`` was made, by the file server's own clock."""
    with contextlib.suppress(OSError):
        now_s = written.stat().st_mtime
        with os.scandir(written.parent) as entries:
            for entry in entries:
                if entry.name.endswith(_PARTIAL):
                    with contextlib.suppress(FileNotFoundError):  # its writer has just finished with it
                        if entry.stat().st_mtime < now_s - _LEFT_BEHIND_S:
                            Path(entry.path).unlink()


def _write_all(descriptor: int, view: memoryview) -> None:
    while len(view):
        view = view[os.write(descriptor, view) :]


def _create_in_place(path: Path, data: bytes) -> None:
    """Create a file without hard links: exclusively, but a crash may leave half of it, which then is damaged."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError as error:
        raise ObjectExists(f"{path} already exists") from error
    try:
        _write_all(descriptor, memoryview(data))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_folder(folder: Path) -> None:
    """Create a folder, durably."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    _sync(folder.parent)


def _sync(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise ObjectMissing(f"{path} does not exist") from error
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise StoreError(f"cannot list {error.filename}: {error.strerror or error}") from error


def unwritable(verb: str, path: Path, error: OSError) -> StoreError:
    """Say that ``path`` cannot be changed, why, and what to do."""
    return StoreError(
        f"cannot {verb} {path}: {error.strerror or error}. Check the free space and the permissions there, or use "
        "another checkpoint directory. Complete checkpoints are not affected."
    )
