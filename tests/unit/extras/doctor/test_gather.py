"""Facts that a doctor sees of real sockets and of a real checkpoint directory."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.unit.checkpoint.saves import save
from tests.unit.fleet.support import make_job, two_stages
from varuna.checkpoint.names import step_folder
from varuna.cli.main import main
from varuna.core.plan import Copies
from varuna.extras.doctor.diagnose import diagnose
from varuna.extras.doctor.gather import gather, look_at_checkpoints
from varuna.fleet.manager.operator_api import OperatorApi
from varuna.fleet.net import listening_sockets
from varuna.fleet.net.host_facts import look_at_host
from varuna.fleet.page.status import shown_plan
from varuna.fleet.run_folder.audit import Audit
from varuna.fleet.run_folder.connection_file import Access
from varuna.fleet.workers.worker_server import WorkerServer
from varuna.planner.line import Line
from varuna.store.opening import keep_in_memory, open_store
from varuna.testing.stores import HookedStore


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.mark.skipif(not listening_sockets.available(), reason="needs Linux's /proc")
def test_a_process_is_found_by_its_port_and_its_ports_by_the_process(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    assert listening_sockets.owner_of(port) == os.getpid()
    mine = listening_sockets.listening(listening_sockets.family_of(os.getpid()))
    assert ("127.0.0.1", port) in [(each.address, each.port) for each in mine]
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as other:
        addresses = {each.port: each.address for each in listening_sockets.listening({os.getpid()})}
        assert addresses[other.getsockname()[1]] == "::1"
    with socket.socket() as unbound:
        unbound.bind(("127.0.0.1", 0))
        assert listening_sockets.owner_of(unbound.getsockname()[1]) is None


def test_a_run_without_a_manager_or_a_journal_is_still_described(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    facts = gather(tmp_path, Access(host="127.0.0.1", port=port, certificate_pem=None, token=""), reads=True)
    assert facts.unreachable
    assert "run.db" in facts.unreadable
    assert [disk.path for disk in facts.disks] == [str(tmp_path)]


def test_a_store_that_says_nothing_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    goes_on = threading.Event()
    store = HookedStore(open_store("memory://hangs"))

    def hang(verb: str, name: str) -> None:
        goes_on.wait(60)

    store.before = hang
    keep_in_memory(store)
    monkeypatch.setattr("varuna.extras.doctor.gather.SHOWN_S", 0.01)
    monkeypatch.setattr("varuna.store.retry.SHOWN_S", 0.01)
    assert "memory://hangs has not answered" in look_at_checkpoints(store.url, reads=True).problem
    monkeypatch.setattr("sys.argv", ["varuna", "checkpoints", "list", store.url])
    assert main() == 1
    assert "memory://hangs has not answered" in capsys.readouterr().err
    goes_on.set()


def test_every_byte_of_the_newest_checkpoint_is_compared(tmp_path: Path) -> None:
    directory = str(tmp_path / "ck")
    assert look_at_checkpoints(directory, reads=True).step is None
    manifest = save(open_store(directory), 10, 2, 2)
    seen = look_at_checkpoints(directory, reads=True)
    assert (seen.step, seen.problem, seen.read_bytes) == (10, "", manifest.size_bytes)
    assert look_at_checkpoints(directory, reads=False).read_bytes is None
    shard = tmp_path / "ck" / step_folder(10) / manifest.shards[0].file
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    assert look_at_checkpoints(directory, reads=False).problem == ""
    assert manifest.shards[0].file in look_at_checkpoints(directory, reads=True).problem


@contextmanager
def a_manager(
    folder: Path, status: dict[str, object], hosts: dict[str, object], plans: dict[str, object] | None = None
) -> Iterator[Access]:
    """Answers as a manager does."""
    people = OperatorApi(
        status=lambda: status,
        logs=folder,
        ask=lambda event: True,
        audit=Audit(lambda event: None),
        hosts=lambda: hosts,
        plans=lambda: plans or {"why": "there is no plan yet"},
        operator_token="operator",
    )
    server = WorkerServer(port=0, token="t", is_ours=lambda name: False, on_event=lambda event: None)
    server.start(people.routes())
    try:
        yield Access(host="127.0.0.1", port=server.port, certificate_pem=None, token="operator")
    finally:
        server.stop()


@pytest.mark.parametrize(("copies", "alone"), [(Copies.STATE, 0), (Copies.TIME, 4), (Copies.NONE, 4)])
def test_a_section_with_a_copy_in_another_memory_is_not_held_by_one_worker_alone(
    tmp_path: Path, copies: Copies, alone: int
) -> None:
    plan = two_stages(make_job(), 2, 1).model_copy(update={"copies": copies})
    assert plan.replicas == 1
    with a_manager(tmp_path, {"state": "training", "plan": shown_plan(plan)}, {}) as access:
        assert gather(tmp_path, access, reads=False).single_holders == alone


@pytest.mark.parametrize("measured", [True, False])
def test_the_line_that_a_plan_needs_is_told_once_lines_were_measured(tmp_path: Path, measured: bool) -> None:
    line = Line(found_bits_per_s=1e9, needed_bits_per_s=4e9, faster=0.8, at_a_tenth=2.0)
    plans: dict[str, object] = {"measured": measured, "running": {"line": line.model_dump(mode="json")}}
    with a_manager(tmp_path, {"state": "training"}, {}, plans) as access:
        assert gather(tmp_path, access, reads=False).line == (line if measured else None)


def test_what_agents_tell_of_their_machines_is_looked_at_too(tmp_path: Path) -> None:
    told: dict[str, object] = {
        "n1-vm": {
            "clock_ahead_s": -90.0,
            "disks": [{"use": "logs", "path": "/state", "free_bytes": 100 << 20, "size_bytes": 1 << 40}],
            "ports": [{"pid": 7, "address": "0.0.0.0", "port": 4000}],
        },
        "n2-vm": {"clock_ahead_s": 0.1},
    }
    with a_manager(tmp_path, {"state": "training"}, told) as access:
        findings = diagnose(gather(tmp_path, access, reads=False))
    said = {(each.level.value, each.subject, each.text) for each in findings}
    assert ("warning", "disk", "100 MiB of 1 TiB are free for logs (/state on n1-vm)") in said
    clock = next(each.text for each in findings if each.subject == "clock")
    assert clock.startswith("the clock of n1-vm is 1m 3")
    if listening_sockets.available():
        ports = [each.text for each in findings if each.subject == "ports"]
        assert any(port.startswith("process 7 on n1-vm accepts connections on 0.0.0.0 port 4000") for port in ports)


def test_a_machine_is_looked_at_without_its_loopback(tmp_path: Path, listener: socket.socket) -> None:
    with socket.create_server(("0.0.0.0", 0)) as public:
        facts = look_at_host(tmp_path)
        assert facts.disks[0].path == str(tmp_path)
        assert 0 < facts.disks[0].free_bytes < facts.disks[0].size_bytes
        if listening_sockets.available():
            assert facts.ports is not None
            open_ports = {each.port: each.address for each in facts.ports if each.pid == os.getpid()}
            assert open_ports[public.getsockname()[1]] == "0.0.0.0"
            assert listener.getsockname()[1] not in open_ports
