"""What a doctor sees of real sockets and of a real checkpoint directory."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.checkpoint.saves import save
from varuna.checkpoint.names import step_folder
from varuna.doctor import sockets
from varuna.doctor.gather import gather, look_at_checkpoints
from varuna.fleet.access import Access
from varuna.store.opening import open_store


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.mark.skipif(not sockets.available(), reason="needs Linux's /proc")
def test_a_process_is_found_by_its_port_and_its_ports_by_the_process(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    assert sockets.owner_of(port) == os.getpid()
    mine = sockets.listening(sockets.family_of(os.getpid()))
    assert ("127.0.0.1", port) in [(each.address, each.port) for each in mine]
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as other:
        addresses = {each.port: each.address for each in sockets.listening({os.getpid()})}
        assert addresses[other.getsockname()[1]] == "::1"
    with socket.socket() as unbound:
        unbound.bind(("127.0.0.1", 0))
        assert sockets.owner_of(unbound.getsockname()[1]) is None


def test_a_run_without_a_manager_or_a_journal_is_still_described(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    facts = gather(tmp_path, Access(host="127.0.0.1", port=port, certificate_pem=None, token=""), reads=True)
    assert facts.unreachable
    assert "run.db" in facts.unreadable
    assert [disk.path for disk in facts.disks] == [str(tmp_path)]


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
