"""A fault that only one look sees is no damage."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.checkpoint.saves import save
from varuna.checkpoint import again
from varuna.checkpoint.io.restore import everything, read_states, verify
from varuna.checkpoint.manifest import newest_intact, survey
from varuna.checkpoint.names import MANIFEST
from varuna.core.errors import ObjectMissing
from varuna.store.base import Entry, Store
from varuna.store.opening import open_store
from varuna.testing.stores import HookedStore


class ErringStore(HookedStore):
    """Errs in the first operation of one kind."""

    def __init__(self, inner: Store, kind: str) -> None:
        super().__init__(inner)
        self.kind, self.has_erred = kind, False

    def _errs(self, kind: str) -> bool:
        errs = self.kind == kind and not self.has_erred
        self.has_erred |= errs
        return errs

    def get(self, name: str) -> bytes:
        data = super().get(name)
        if not name.endswith(MANIFEST):
            return data
        if self._errs("manifest missing"):
            raise ObjectMissing(name)
        if self._errs("manifest flipped"):
            return data.replace(b'"seed": 1', b'"seed": 3')
        return data[:100] if self._errs("manifest short") else data

    def read_into(self, name: str, start: int, view: memoryview) -> None:
        if self._errs("shard missing"):
            raise ObjectMissing(name)
        super().read_into(name, start, view)
        view[0] ^= self._errs("header flipped" if start == 0 else "piece flipped")

    def entries(self, folder: str = "") -> list[Entry]:
        found = super().entries(folder)
        if self._errs("listing without manifest"):
            return [entry for entry in found if not entry.name.endswith(MANIFEST)]
        return found[: -1 if self._errs("listing short") else None]


def restored(store: Store) -> None:
    found = newest_intact(store)
    assert found is not None
    manifest, warnings = found
    assert (manifest.step, warnings) == (8, [])
    read_states(store, manifest, dict.fromkeys(range(manifest.sections), everything))


def verified(store: Store) -> None:
    manifest = newest_intact(store)
    assert manifest is not None
    assert len(list(verify(store, manifest[0]))) == len(manifest[0].shards)


@pytest.mark.parametrize("look", [restored, verified])
@pytest.mark.parametrize(
    "kind",
    ["manifest missing", "manifest flipped", "manifest short", "shard missing", "header flipped", "piece flipped",
     "listing short", "listing without manifest"],
)  # fmt: skip
def test_a_store_that_errs_once_has_no_damaged_checkpoint(
    tmp_path: Path, kind: str, look: Callable[[Store], None]
) -> None:
    inner = open_store(tmp_path)
    for step in (4, 8):
        save(inner, step)
    store = ErringStore(inner, kind)
    look(store)
    assert store.has_erred or (look is restored and kind == "header flipped")  # which restoring does not read
    assert not any(folder.is_damaged for folder in survey(inner))


def test_the_second_look_comes_some_seconds_later(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    looks = iter([ObjectMissing("404"), None])
    monkeypatch.setattr("varuna.checkpoint.again.AGAIN_S", 3.0)
    monkeypatch.setattr("time.sleep", slept.append)

    def look() -> str:
        if (error := next(looks)) is not None:
            raise error
        return "well"

    assert again.seen_twice(look) == "well"
    assert slept == [3.0]
