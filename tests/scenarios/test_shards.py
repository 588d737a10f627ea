"""Training from shards in a bucket: the losses of the same shards in a folder, over kills and a store that fails."""

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import varuna.store.objects
import varuna.store.opening
from tests.scenarios.launch import Done, run, varuna_command
from tests.scenarios.servers import Server, moto
from varuna.core.errors import DataError
from varuna.extras.shards import Shards
from varuna.store.opening import open_store

pytestmark = pytest.mark.nightly

WRITTEN = Path(__file__).parents[1] / "unit/data/shards/mds/packed"
SCRIPT = str(Path(__file__).with_name("sharded.py"))


@pytest.fixture(scope="module")
def s3() -> Iterator[Server]:
    with moto() as server:
        yield server


@pytest.fixture
def bucket(s3: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The place of the shards; what is opened next finds it."""
    for key in [key for key in os.environ if key.startswith("AWS_")]:
        monkeypatch.delenv(key)
    for key, value in s3.environment.items():
        monkeypatch.setenv(key, value)
    s3.proxy.set("pass")
    place = f"{s3.place}/words"
    store = open_store(place)
    for file in WRITTEN.iterdir():
        store.put(file.name, file.read_bytes())
    yield place
    s3.proxy.set("pass")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """One process, from the folder."""
    done = run([sys.executable, SCRIPT, str(WRITTEN), "--cache", str(tmp_path_factory.mktemp("alone") / "cache")])
    assert len(done.losses) == 16, done.err
    return done


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_kill_changes_neither_samples_nor_order(processes: str, bucket: str, alone: Done, tmp_path: Path) -> None:
    args = [bucket, "--cache", str(tmp_path / "cache"), "--die-at", "5", "--num-workers", processes]
    done = run(varuna_command(2, ["--stages", "2"], *args, script=SCRIPT))
    assert done.code == 0, done.err
    assert (tmp_path / "died").exists()
    assert done.losses == pytest.approx(alone.losses, rel=1e-6)
    kept = sum(path.stat().st_size for path in (tmp_path / "cache").glob("*.mds"))
    assert 0 < kept <= 3500


def test_a_store_that_hangs_delays_and_one_that_is_gone_is_named(
    bucket: str, s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = Shards(bucket, cache=tmp_path / "hanging")
    s3.proxy.set("freeze")
    timer = threading.Timer(1.0, s3.proxy.set, ["pass"])
    timer.start()
    assert dataset[0]["text"] == "sämple 0"
    timer.join()
    monkeypatch.setattr(varuna.store.opening, "PATIENCE_S", 1.0)
    monkeypatch.setattr(varuna.store.objects, "PATIENT", varuna.store.objects.ONCE)
    dataset = Shards(bucket, cache=tmp_path / "gone")
    s3.proxy.set("refuse")
    with pytest.raises(
        DataError, match=r"cannot read shards: cannot read s3://runs/words/shard\.00000\.mds\.gz: .*tried"
    ):
        dataset[0]


def test_a_shard_that_is_damaged_or_missing_in_the_bucket_is_named(bucket: str, tmp_path: Path) -> None:
    store, dataset = open_store(bucket), Shards(bucket, cache=tmp_path / "cache")
    data = store.get("shard.00000.mds.gz")
    store.put("shard.00000.mds.gz", data[:-9] + b"x" + data[-8:])
    with pytest.raises(DataError, match=r"shard\.00000\.mds\.gz of s3://runs/words is damaged: its sha1"):
        dataset[0]
    store.remove("shard.00000.mds.gz")
    with pytest.raises(DataError, match=r"s3://runs/words/shard\.00000\.mds\.gz is missing, or shorter"):
        dataset[0]
