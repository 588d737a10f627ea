"""`varuna doctor` before a run: real commands, each machine a network namespace with a host name of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.network import NAMESPACE, Network, why_not
from tests.scenarios.servers import moto
from tests.waiting import wait_for
from varuna.extras.doctor.machine.store_probe import try_store

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]
in_network = pytest.mark.skipif(bool(why_not()), reason=why_not())
_DOCTOR = (sys.executable, "-m", "varuna", "doctor")
_DONE_S = 150.0
# Debian resolves a machine's name to 127.0.1.1: so does each machine here.
_BECOME = (
    "hostname {name} && echo '127.0.0.1 localhost\n127.0.1.1 {name}' > {hosts} && mount --bind {hosts} /etc/hosts && "
    'exec "$0" "$@"'
)


class Machines:
    """Named machines, and the doctors on them."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.network, self.folder, self.names = Network(*names), folder, names
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *arguments: str) -> None:
        become = _BECOME.format(name=name, hosts=self.folder / f"{name}.hosts")
        inside = f"--net={self.network.environment(name)[NAMESPACE]}"
        command = ["nsenter", inside, "unshare", "--uts", "--mount", "sh", "-c", become, *_DOCTOR, *arguments]
        with (self.folder / f"{name}.out").open("wb") as out, (self.folder / f"{name}.err").open("wb") as err:
            self._running[name] = subprocess.Popen(
                command, stdout=out, stderr=err, cwd=self.folder, start_new_session=True
            )

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.err").read_text()

    def meet(self, *arguments: str) -> None:
        """The first machine invites all others."""
        first, *others = self.names
        self.start(first, "--nodes", str(len(self.names)), "--json", *arguments)
        wait_for(lambda: "varuna://" in self.said(first))
        found = re.search(r"varuna://[^']*", self.said(first))
        assert found is not None
        assert self.network.addresses[first] in found[0]
        for name in others:
            self.start(name, found[0], "--json")

    def kill(self, name: str) -> None:
        os.killpg(self._running[name].pid, signal.SIGKILL)

    def verdict(self, name: str) -> tuple[int, Any]:
        code = self._running[name].wait(_DONE_S)
        return code, json.loads((self.folder / f"{name}.out").read_text())

    def close(self) -> None:
        for process in self._running.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        self.network.close()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path, "a", "b", "c", "d")
    yield made
    made.close()


def texts(verdict: Any, level: str) -> list[str]:
    return [each["text"] for each in verdict["findings"] if each["level"] == level and not each["machine"]]


@in_network
def test_four_machines_that_resolve_to_loopback_are_ready_and_share_a_folder(machines: Machines) -> None:
    place = machines.folder / "checkpoints"
    machines.meet("--checkpoints", str(place))
    code, found = machines.verdict("a")
    assert (code, found["healthy"]) == (0, True), found["findings"]
    assert "12 links" in " ".join(texts(found, "ok"))
    assert any("summed over 4 machines" in text for text in texts(found, "ok"))
    addresses = [each["text"] for each in found["findings"] if each["subject"] == "address"]
    assert len(addresses) == 4
    assert all("127.0.1.1, which Varuna does not use" in text for text in addresses)
    assert {to: sorted(row) for to, row in found["links"].items()}["b"] == ["a", "c", "d"]
    assert machines.verdict("d")[0] == 0
    assert not place.exists()


@in_network
def test_what_one_direction_drops_and_a_slow_link_are_named(machines: Machines) -> None:
    network = machines.network
    network._nft("b", "add table inet faults")
    network._nft("b", "add chain inet faults input { type filter hook input priority 0; }")
    source = network.addresses["c"]
    network._nft("b", f"add rule inet faults input ip saddr {source} tcp flags & (syn | ack) == syn drop")
    network._inside("d", ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "20mbit", "burst", "64k",
                          "latency", "400ms"])  # fmt: skip
    machines.meet()
    code, found = machines.verdict("a")
    assert code == 1
    (blocked,) = texts(found, "fault")
    assert blocked.startswith("c cannot connect to b (10.77.0.2): no answer within 3 s")
    assert blocked.endswith("b can connect to c")
    assert any(text.startswith("all links from d are slow") for text in texts(found, "warning"))
    assert 10e6 < 8 * found["links"]["a"]["d"]["bytes_per_s"] < 22e6
    assert "c" not in found["links"]["b"]
    assert machines.verdict("c")[0] == 1  # the verdict of all


@in_network
def test_a_machine_that_dies_in_the_middle_is_named_within_a_bound(machines: Machines) -> None:
    machines.meet()
    wait_for(lambda: "measuring links" in machines.said("a"))
    begin_s = time.monotonic()
    machines.kill("d")
    code, found = machines.verdict("a")
    assert time.monotonic() - begin_s < 60.0
    assert code == 1
    assert any(text.startswith("d stopped answering while links were measured") for text in texts(found, "fault"))
    assert found["links"]["b"]["a"]["problem"] == ""


@in_network
def test_a_manager_behind_a_closed_port_is_a_fault_with_what_to_open(machines: Machines) -> None:
    machines.start("b", f"varuna://abcdefgh@{machines.network.addresses['a']}:7070/{'ab' * 32}", "--json")
    code, found = machines.verdict("b")
    assert code == 1
    (finding,) = [each for each in found["findings"] if each["subject"] == "manager"]
    assert "10.77.0.1:7070" in finding["text"]
    assert "Open the manager's port" in finding["remedy"]


def test_a_bucket_of_a_real_server_can_do_all_that_checkpoints_need(monkeypatch: pytest.MonkeyPatch) -> None:
    with moto() as server:
        for key, value in server.environment.items():
            monkeypatch.setenv(key, value)
        found = try_store(f"{server.place}/doctor", mark="m", owner="h", seeks_mark=False)
        assert [step.problem for step in found.steps] == [""] * 5
        missing = try_store("s3://no-such-bucket/doctor", mark="m", owner="h", seeks_mark=False)
        assert "no-such-bucket" in missing.steps[0].problem
