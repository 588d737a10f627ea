"""Checkpoints in real servers of object stores, through a network that fails."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.depth import of_depth
from tests.scenarios.gcs import fake_gcs, why_no_gcs
from tests.scenarios.launch import JOB, environment, run, varuna_command
from tests.scenarios.servers import Server, azurite, moto, why_no_azurite
from tests.unit.checkpoint.saves import make_states, same_states, save
from tests.waiting import wait_for
from varuna.checkpoint.io.restore import everything, read_states
from varuna.checkpoint.lease import claim
from varuna.checkpoint.manifest import newest_intact, survey
from varuna.checkpoint.retention import Kept, prepare, retain
from varuna.core.errors import ObjectExists, StoreError
from varuna.store.base import Store
from varuna.store.objects import PART_BYTES, PARTS_AT_ONCE, ObjectStore
from varuna.store.opening import open_store

LARGE_BYTES = 6 * PART_BYTES + 12345


@pytest.fixture(scope="module")
def s3() -> Iterator[Server]:
    with moto() as server:
        yield server


@pytest.fixture(scope="module")
def gcs() -> Iterator[Server]:
    if why := why_no_gcs():
        pytest.skip(why)
    with fake_gcs() as server:
        yield server


@pytest.fixture(scope="module", params=of_depth(("s3", "azure", "gcs"), {"s3"}))
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    if request.param in ("s3", "gcs"):
        yield request.getfixturevalue(request.param)
        return
    if why := why_no_azurite():
        pytest.skip(why)
    with azurite() as started:
        yield started


@pytest.fixture
def store(server: Server, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    for key in [key for key in os.environ if key.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(key)
    for key, value in server.environment.items():
        monkeypatch.setenv(key, value)
    server.proxy.set("pass")
    name = "".join(letter for letter in request.node.name if letter.isalnum())
    yield open_store(f"{server.place}/{name}")
    server.proxy.set("pass")


def large() -> list[bytes]:
    block = bytes(range(256)) * 4096  # 1 MiB
    return [(block * (LARGE_BYTES // len(block) + 1))[:LARGE_BYTES]]


def in_background(work: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    return thread, errors


def test_a_checkpoint_is_saved_found_read_retained_and_moved(store: Store) -> None:
    lease = claim(store, "w", say=pytest.fail)
    lease.beat()
    assert lease.is_held()
    for step in (4, 6, 8):
        save(store, step, 2, 2)
    assert retain(store, 8, Kept(last=2)) == [4]
    found = newest_intact(store)
    assert found is not None
    assert (found[0].step, found[1]) == (8, [])
    assert same_states(read_states(store, found[0], dict.fromkeys(range(5), everything)), make_states(8))
    with pytest.raises(ObjectExists):
        store.create("step-00000008/manifest.json", b"")
    with pytest.raises(StoreError):
        store.read_into("step-00000008/manifest.json", 10**6, memoryview(bytearray(8)))
    prepare(store, new=True, overwrite=True)
    assert survey(store) == []
    assert "replaced-1" in store.folders()
    lease.release()
    store.remove("never/was")


def test_a_cut_network_costs_the_parts_under_way_and_not_those_before(server: Server, store: Store) -> None:
    before = server.proxy.sent_bytes
    store.write("warm", lambda: [b"up"])
    upload, errors = in_background(lambda: store.write("large", large))
    wait_for(lambda: server.proxy.sent_bytes - before > LARGE_BYTES // 2)
    server.proxy.disturb("refuse", times=2)
    server.proxy.set("pass")
    upload.join(60)
    assert not upload.is_alive()
    assert errors == []
    assert server.proxy.sent_bytes - before < LARGE_BYTES + (PARTS_AT_ONCE + 1) * PART_BYTES
    found = bytearray(LARGE_BYTES)
    store.read_into("large", 0, memoryview(found))
    assert bytes(found) == large()[0]


def test_a_frozen_network_delays_an_upload(server: Server, store: Store) -> None:
    upload, errors = in_background(lambda: store.write("x/large", large))
    server.proxy.disturb("freeze")
    assert upload.is_alive()
    server.proxy.set("pass")
    upload.join(60)
    assert not upload.is_alive()
    assert errors == []
    assert store.entries("x") == [("x/large", LARGE_BYTES)]


@pytest.mark.parametrize("mode", ["deaf", "deaf once"])
def test_a_create_whose_answer_is_lost_is_found_to_be_ours(server: Server, store: Store, mode: str) -> None:
    before = server.proxy.disturbed
    server.proxy.set(mode)
    writing, errors = in_background(lambda: store.create("manifest", b"mine"))
    wait_for(lambda: server.proxy.disturbed > before)
    server.proxy.set("pass")
    writing.join(60)
    assert not writing.is_alive()
    assert errors == []
    assert store.get("manifest") == b"mine"
    with pytest.raises(ObjectExists):
        store.create("manifest", b"theirs")


def test_an_upload_whose_completion_gets_no_answer_is_whole(server: Server, store: Store) -> None:
    # The server has put the parts together and forgotten them, so asking again to do so cannot succeed.
    server.proxy.lose_answer_to(b"comp=blocklist" if server.name == "azure" else b"<CompleteMultipartUpload")
    upload, errors = in_background(lambda: store.write("x/large", large))
    upload.join(60)
    assert not upload.is_alive()
    assert errors == []
    assert server.proxy.mode == "pass"  # an answer was lost
    assert store.entries("x") == [("x/large", LARGE_BYTES)]


@pytest.mark.nightly
def test_a_slow_upload_keeps_to_its_pace(store: Store, request: pytest.FixtureRequest) -> None:
    paced = open_store(store.url, upload_bytes_per_s=LARGE_BYTES / 1.5)
    begin_s = time.monotonic()
    paced.write("large", large)
    assert time.monotonic() - begin_s > 1.0  # the last part is let through after 6/7 of the time


def test_an_upload_that_fails_here_leaves_nothing_behind(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3

    for key, value in s3.environment.items():
        monkeypatch.setenv(key, value)
    s3.proxy.set("pass")
    inner = open_store(f"{s3.place}/failing")

    def fails() -> Iterator[bytes]:
        yield bytes(3 * PART_BYTES)
        raise ZeroDivisionError("in the middle")

    with pytest.raises(Exception, match="in the middle"):
        inner.write("large", fails)
    assert isinstance(getattr(inner, "inner", None), ObjectStore)
    client: Any = boto3.client("s3", endpoint_url=s3.environment["AWS_ENDPOINT_URL"])
    assert client.list_multipart_uploads(Bucket="runs").get("Uploads", []) == []
    assert inner.entries() == []
    client.close()


def test_wrong_credentials_and_buckets_are_named_at_once(store: Store, server: Server) -> None:
    with pytest.raises(StoreError, match=r"nowhere/a/x: there is no such bucket"):
        open_store(server.place.replace("runs", "nowhere") + "/a").create("x", b"")
    if not server.place.startswith("gs:"):  # the server that stands for it answers 500
        with pytest.raises(StoreError, match="there is no such bucket"):
            open_store(server.place.replace("runs", "nowhere") + "/a").folders()


@pytest.mark.parametrize("name", of_depth(("s3", "gcs"), {"s3"}))
def test_a_run_saves_to_a_bucket_through_an_outage_and_resumes_in_another_plan(
    request: pytest.FixtureRequest, tmp_path: Path, name: str
) -> None:
    bucket: Server = request.getfixturevalue(name)
    bucket.proxy.set("pass")
    place = f"{bucket.place}/run"
    args = ["--checkpoint-dir", place, "--checkpoint-every", "4", "--folder", str(tmp_path), "--slow", "0.05"]
    command = varuna_command(2, [], *args, "--steps", "12")

    before = bucket.proxy.sent_bytes

    def outage() -> None:
        wait_for(lambda: bucket.proxy.sent_bytes > before + 50_000, 60)  # the first shards are under way
        bucket.proxy.disturb("refuse", times=2)
        bucket.proxy.set("pass")

    threading.Thread(target=outage, daemon=True).start()
    first = run(command, **bucket.environment)
    assert first.code == 0, first.err
    assert sorted(first.losses) == list(range(12))
    done = run([sys.executable, JOB, *args, "--steps", "14"], **bucket.environment)
    assert done.code == 0, done.err
    assert f"resuming from the checkpoint of step 12 in {place}" in done.err
    whole = run([sys.executable, JOB, "--steps", "14"], **environment())
    assert {step: loss for step, loss in whole.losses.items() if step >= 12} == pytest.approx(done.losses, rel=1e-5)
