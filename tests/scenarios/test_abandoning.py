"""A generation's groups are left without waiting for a peer that is alive and silent."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tests.waiting import wait_for
from varuna.engine.base.transport import connect_store
from varuna.engine.links.groups import Groups, form

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[2]
SILENT = """
import sys

import pytest
from varuna.engine.links.groups import form
from varuna.engine.base.transport import connect_store
store = connect_store("127.0.0.1", 0, hosts=True)
print(store.port, flush=True)
groups = [
    form(store, generation=g, rank=1, members=2, grid=2, homes={}, interface_host="127.0.0.1")
    for g in range(2)
]
print("formed", flush=True)
sys.stdin.read()
"""


def sockets() -> int:
    return sum(
        os.readlink(entry).startswith("socket:") for entry in Path("/proc/self/fd").iterdir() if os.path.lexists(entry)
    )


def blocked_in_receive(groups: Groups) -> tuple[threading.Thread, list[str]]:
    errors: list[str] = []

    def receive() -> None:
        try:
            groups.world.receive(torch.empty(8, dtype=torch.uint8), 1, 1).wait()
        except RuntimeError as error:
            errors.append(str(error))  # not the error: its traceback would hold the group

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    return thread, errors


def form_with_the_peer(store: object, generation: int) -> Groups:
    return form(
        store,
        generation=generation,
        rank=0,
        members=2,
        grid=2,
        homes={},
        interface_host="127.0.0.1",
    )


def test_abandoned_groups_free_a_blocked_receiver_and_their_sockets_while_the_peer_is_silent() -> None:
    command = [sys.executable, "-c", SILENT]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        try:
            assert peer.stdout is not None
            store = connect_store("127.0.0.1", int(peer.stdout.readline()))
            first = form_with_the_peer(store, 0)
            before = sockets()
            second = form_with_the_peer(store, 1)
            assert sockets() > before
            thread, errors = blocked_in_receive(second)
            thread.join(0.2)
            assert thread.is_alive()
            second.abandon()
            wait_for(lambda: not thread.is_alive())
            assert len(errors) == 1
            assert peer.poll() is None
            wait_for(lambda: sockets() <= before)
            first.abandon()
        finally:
            peer.kill()
