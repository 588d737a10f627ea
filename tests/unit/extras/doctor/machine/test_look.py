"""Facts that are seen of a machine: its container's limits, disks, GPUs, its store of checkpoints."""

import os
import stat
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from varuna.extras.doctor.judging.rounds import opponents
from varuna.extras.doctor.links.pairs import MeetingKeys
from varuna.extras.doctor.machine import store_probe
from varuna.extras.doctor.machine.folders import look_at_folders
from varuna.extras.doctor.machine.limits import look_at_limits
from varuna.extras.doctor.machine.look import look_at_gpus, starts_slowly
from varuna.extras.doctor.machine.store_probe import put_mark, remove_mark, try_store
from varuna.extras.doctor.meeting.meeting import MachineMeeting
from varuna.process.bounded import Bounded
from varuna.store.base import Entry
from varuna.store.opening import keep_in_memory, open_store
from varuna.testing.stores import HookedStore

GIB = 1 << 30


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


class LateStore(HookedStore):
    """Its listings do not show what was written."""

    def entries(self, folder: str = "") -> list[Entry]:
        return []


def test_a_store_whose_listings_lag_is_found_out() -> None:
    store = LateStore(open_store("memory://lags"))
    keep_in_memory(store)
    found = try_store(store.url, mark="m", owner="h", seeks_mark=False)
    assert "was written, but is not listed: its listings lag behind" in found.steps[2].problem


def test_whether_tcp_begins_anew_after_pauses_is_a_setting_of_the_kernel(tmp_path: Path) -> None:
    assert not starts_slowly(tmp_path), "no Linux"
    for value, slowly in (("1\n", True), ("0\n", False)):
        write(tmp_path / "proc" / "sys" / "net" / "ipv4" / "tcp_slow_start_after_idle", value)
        assert starts_slowly(tmp_path) is slowly


def test_limits_of_a_container_are_those_of_the_tightest_group(tmp_path: Path) -> None:
    write(tmp_path / "proc" / "meminfo", "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n")
    write(tmp_path / "proc" / "self" / "cgroup", "0::/pod/task\n")
    groups = tmp_path / "sys" / "fs" / "cgroup"
    write(groups / "pod" / "memory.max", f"{8 * GIB}\n")
    write(groups / "pod" / "memory.current", f"{6 * GIB}\n")
    write(groups / "pod" / "memory.stat", f"anon 5\ninactive_file {GIB}\n")
    write(groups / "pod" / "task" / "memory.max", "max\n")
    write(groups / "pod" / "task" / "cpu.max", "150000 100000\n")
    write(groups / "pod" / "cpu.max", "max 100000\n")
    write(groups / "pod" / "pids.max", "256\n")
    found = look_at_limits(tmp_path)
    assert (found.container_bytes, found.available_bytes) == (8 * GIB, 3 * GIB)
    assert (found.container_cpus, found.container_processes) == (1.5, 256)


def test_limits_of_older_control_groups_are_found_too(tmp_path: Path) -> None:
    write(tmp_path / "proc" / "self" / "cgroup", "4:memory:/docker/1\n3:cpu,cpuacct:/docker/1\n")
    groups = tmp_path / "sys" / "fs" / "cgroup"
    write(groups / "memory" / "docker" / "1" / "memory.limit_in_bytes", f"{2 * GIB}\n")
    write(groups / "memory" / "memory.limit_in_bytes", "9223372036854771712\n")
    write(groups / "cpu" / "docker" / "1" / "cpu.cfs_quota_us", "200000\n")
    write(groups / "cpu" / "docker" / "1" / "cpu.cfs_period_us", "100000\n")
    found = look_at_limits(tmp_path)
    assert (found.container_bytes, found.container_cpus) == (2 * GIB, 2.0)


def test_a_folder_is_tried_and_nothing_is_left_in_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    places = {"checkpoints": tmp_path / "to" / "be" / "made", "again": tmp_path}
    (found,) = look_at_folders(places, needed=("checkpoints",))
    assert found.sync_s is not None
    assert (found.problem, found.needed) == ("", True)
    (bad,) = look_at_folders({"here": tmp_path / "file"}, needed=())
    assert (bad.problem.endswith("is a file"), bad.needed) == (True, False)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def smi(folder: Path, script: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)


def test_gpus_are_read_from_the_driver_and_its_complaints_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    smi(tmp_path, 'echo "NVIDIA H200, 143771, 3, 570.1, Default"; echo "NVIDIA H200, [N/A], 3, 570.1, Default"')
    gpus, problem = look_at_gpus(tmp_path)
    assert ([gpu.memory_bytes for gpu in gpus], problem) == ([143771 << 20, 0], "")
    smi(tmp_path, 'echo "NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver."; exit 9')
    assert "could not communicate" in look_at_gpus(tmp_path)[1]


def test_a_gpu_on_the_bus_without_a_driver_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert look_at_gpus(tmp_path) == ((), "")
    device = tmp_path / "sys" / "bus" / "pci" / "devices" / "0000:01:00.0"
    write(device / "vendor", "0x10de\n")
    write(device / "class", "0x030200\n")
    assert "no driver" in look_at_gpus(tmp_path)[1]


def test_every_operation_of_a_store_is_tried_and_its_traces_removed(tmp_path: Path) -> None:
    place = str(tmp_path / "ck")
    put_mark(place, "m1")
    found = try_store(place, mark="m1", owner="host1", seeks_mark=True)
    assert [(step.name, step.problem) for step in found.steps] == [
        *(("write", ""), ("read", ""), ("list", ""), ("conditional write", ""), ("delete", "")),
    ]
    assert found.shared is True
    remove_mark(place, "m1")
    assert os.listdir(place) == []
    assert try_store(place, mark="m2", owner="host1", seeks_mark=True).shared is False


class Refusing(BaseHTTPRequestHandler):
    """A bucket that may be read, and not written."""

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        yield server
        server.shutdown()


@pytest.mark.nightly
def test_a_bucket_without_the_right_to_write_is_named_with_what_it_said(refusing: ThreadingHTTPServer) -> None:
    found = try_store("s3://bucket/runs", mark="m", owner="h", seeks_mark=False)
    assert [step.name for step in found.steps] == ["write"]
    assert "cannot write s3://bucket/runs" in found.steps[0].problem
    assert "credentials" in found.steps[0].problem


def test_a_store_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fifo = tmp_path / "hangs"
    os.mkfifo(fifo)
    monkeypatch.setattr(store_probe, "BOUND_S", 0.05)
    monkeypatch.setattr(store_probe, "open_once", lambda place: fifo.read_bytes())
    found = try_store(str(tmp_path), mark="m", owner="h", seeks_mark=False)
    assert [(step.name, "no answer" in step.problem) for step in found.steps] == [("write", True)]
    fifo.write_text("")  # lets the thread go


def test_work_hands_on_what_it_raised() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        Bounded(lambda: int("x")).result(5.0)


@pytest.mark.parametrize("size", range(1, 12))
def test_in_each_round_of_a_tournament_everybody_plays_once_with_somebody_else(size: int) -> None:
    rows = [opponents(rank, size) for rank in range(size)]
    assert all(sorted(row) == [other for other in range(size) if other != rank] for rank, row in enumerate(rows))
    if size % 2 == 0:
        assert all(rows[rows[rank][turn]][turn] == rank for rank in range(size) for turn in range(size - 1))


@pytest.mark.nightly
def test_keys_of_a_meeting_are_stores_of_their_own(tmp_path: Path) -> None:
    from varuna.fleet.net.client import ManagerRemote

    meeting = MachineMeeting("127.0.0.1", 0, 2)
    try:
        remote = ManagerRemote("127.0.0.1", meeting.port, meeting.certificate_pem, meeting.token)
        keys = MeetingKeys(remote)
        keys.below("a").set("0", b"\x00\xff")
        assert keys.below("a").check(["0"])
        other = MeetingKeys(remote).below("a")
        assert other.check(["0"])
        assert other.get("0") == b"\x00\xff"
        assert not keys.below("b").check(["0"])
    finally:
        meeting.close()
