"""The seam to NCCL, over a binding that only notes what it is given; and the binding itself, where there is one."""

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from varuna.core.errors import UsageError
from varuna.engine.links import nccl
from varuna.engine.links.nccl import Nccl, NcclCommunicator, interface_with, load

STREAM = SimpleNamespace(cuda_stream=99)
ERRORS = {2: "unhandled system error", 6: "remote process exited"}


class BindingError(Exception):
    """An error as nccl4py raises it."""


class Noting:
    """Functions of ``nccl.core``, and its communicator."""

    SUM = "sum"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.result = self.state = 0
        self.is_valid = True
        self.Communicator = SimpleNamespace(init=self.init)
        self.UniqueId = SimpleNamespace(from_bytes=lambda data: ("identity", data))
        self.NCCLConfig = lambda **options: options
        self.send, self.recv, self.allreduce = map(self.noted, ("send", "recv", "allreduce"))

    def init(self, size: int, rank: int, identity: tuple[str, bytes], config: dict[str, Any]) -> "Noting":
        self.calls.append(("init", size, rank, identity, config))
        return self

    def noted(self, name: str) -> Callable[..., None]:
        def function(*arguments: Any, stream: int) -> None:
            self.calls.append((name, *arguments, stream))
            if self.result:
                raise BindingError(ERRORS[self.result])

        return function

    def get_unique_id(self) -> bytes:
        return b"\5" * 128

    def get_async_error(self) -> int:
        return self.state

    def get_error_string(self, result: int) -> str:
        return ERRORS[result]

    def abort(self) -> None:
        self.calls.append(("abort",))
        self.is_valid = False


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Noting:
    made = Noting()
    monkeypatch.setattr(nccl, "load", lambda: made)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    return made


def communicator(library: Noting) -> NcclCommunicator:
    made = Nccl(torch.device("cuda", 0)).connect(bytes(range(128)), 1, 2)
    assert library.calls.pop() == ("init", 2, 1, ("identity", bytes(range(128))), {"blocking": False})
    return made


def test_calls_say_what_to_whom_and_on_which_stream(library: Noting) -> None:
    made, body, sums = communicator(library), torch.zeros(10, dtype=torch.uint8), torch.zeros(6)
    made.send(body, 1, STREAM)
    made.receive(body, 0, STREAM)
    made.all_reduce(sums, STREAM)
    sent, received, summed = library.calls
    assert (sent[0], *sent[2:]) == ("send", 1, 99)
    assert (received[0], *received[2:]) == ("recv", 0, 99)
    assert (summed[0], *summed[3:]) == ("allreduce", "sum", 99)
    assert sent[1] is received[1] is body
    assert summed[1] is summed[2] is sums


def test_it_is_ready_once_nothing_is_under_way_and_an_error_says_which(library: Noting) -> None:
    made = communicator(library)
    library.state = 7
    assert not made.ready()
    library.state = 0
    assert made.ready()
    library.state = 6
    with pytest.raises(RuntimeError, match=r"NCCL: remote process exited"):
        made.ready()
    library.result = 2
    with pytest.raises(RuntimeError, match=r"NCCL: unhandled system error"):
        made.send(torch.zeros(1), 0, STREAM)


def test_it_is_aborted_once_and_asked_nothing_afterwards(library: Noting) -> None:
    made = communicator(library)
    made.abort()
    made.abort()
    with pytest.raises(RuntimeError, match="was aborted"):
        made.send(torch.zeros(1), 0, STREAM)
    with pytest.raises(RuntimeError, match="was aborted"):
        made.ready()
    assert library.calls == [("abort",)]


def test_an_identity_is_the_librarys(library: Noting) -> None:
    assert Nccl(torch.device("cuda", 0)).new_identity() == b"\5" * 128


def test_nccl_keeps_to_the_private_interface_unless_the_user_says_otherwise(
    library: Noting, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert interface_with("127.0.0.1") == "lo"
    assert interface_with("192.0.2.1") is None  # of nobody
    assert interface_with("::1") is None
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    Nccl(torch.device("cuda", 0)).bind("127.0.0.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    Nccl(torch.device("cuda", 0)).bind("127.0.0.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")  # so that the end of the test takes it away


def test_without_the_binding_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nccl", None)
    with pytest.raises(UsageError, match=r"needs nccl4py .*Install nccl4py .*or leave links= out"):
        load()


def test_the_binding_itself_takes_these_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        load()
    except UsageError:
        pytest.skip("needs nccl4py and libnccl.so.2")
    fabric = Nccl(torch.device("cuda", 0))
    first, second = fabric.new_identity(), fabric.new_identity()
    assert len(first) == 128
    assert first != second
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
        with pytest.raises(RuntimeError, match=r"NCCL: .*unhandled cuda error"):
            fabric.connect(first, 0, 2)
