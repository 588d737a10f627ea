"""The seam to NCCL, over a library that only notes what it is given; and the library itself, where there is one."""

import ctypes
import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from varuna.core.errors import UsageError
from varuna.engine.links import nccl
from varuna.engine.links.nccl import Nccl, NcclCommunicator, interface_with, load

STREAM = SimpleNamespace(cuda_stream=99)
HANDLE = 77


class Noting:
    """Functions of NCCL, as ctypes would call them."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.result = self.state = 0

    def ncclCommInitRankConfig(self, handle: Any, size: int, identity: Any, rank: int, config: Any) -> int:
        assert (config.size, config.magic, config.version, config.blocking) == (24, 0xCAFEBEEF, 21400, 0)
        self.calls.append(("init", size, bytes(identity), rank))
        handle.value = HANDLE
        return 7

    def ncclGetUniqueId(self, identity: Any) -> int:
        ctypes.memset(ctypes.addressof(identity), 5, ctypes.sizeof(identity))
        return 0

    def ncclCommGetAsyncError(self, handle: Any, state: Any) -> int:
        assert handle.value == HANDLE
        state.value = self.state
        return 0

    def ncclGetErrorString(self, result: int) -> bytes:
        return {2: b"unhandled system error", 6: b"remote process exited"}[result]

    def ncclGetLastError(self, handle: Any) -> bytes | None:
        return None

    def __getattr__(self, name: str) -> Any:
        def function(*arguments: Any) -> int:
            plain = [argument.value if isinstance(argument, ctypes.c_void_p) else argument for argument in arguments]
            self.calls.append((name, *plain))
            return self.result

        return function


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Noting:
    made = Noting()
    monkeypatch.setattr(nccl, "load", lambda: made)
    monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
    return made


def communicator(library: Noting) -> NcclCommunicator:
    made = Nccl(torch.device("cuda", 0)).connect(bytes(range(128)), 1, 2)
    assert library.calls.pop() == ("init", 2, bytes(range(128)), 1)
    return made


def test_calls_say_where_how_much_to_whom_and_on_which_stream(library: Noting) -> None:
    made, body, sums = communicator(library), torch.zeros(10, dtype=torch.uint8), torch.zeros(6)
    made.send(body, 1, STREAM)
    made.receive(body, 0, STREAM)
    made.all_reduce(sums, STREAM)
    assert library.calls == [
        ("ncclSend", body.data_ptr(), 10, 0, 1, HANDLE, 99),
        ("ncclRecv", body.data_ptr(), 10, 0, 0, HANDLE, 99),
        ("ncclAllReduce", sums.data_ptr(), sums.data_ptr(), 6, 7, 0, HANDLE, 99),
    ]


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
    assert library.calls == [("ncclCommAbort", HANDLE)]


def test_an_identity_is_the_librarys(library: Noting) -> None:
    assert Nccl(torch.device("cuda", 0)).offer() == b"\5" * 128


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


def test_without_the_library_the_error_says_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"needs libnothere\.so, which cannot be loaded .* Leave links= out"):
        load("libnothere.so")


def test_the_library_itself_takes_these_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        load()
    except UsageError:
        pytest.skip("needs libnccl.so.2")
    fabric = Nccl(torch.device("cuda", 0))
    first, second = fabric.offer(), fabric.offer()
    assert len(first) == 128
    assert first != second
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
        with pytest.raises(RuntimeError, match=r"NCCL: unhandled cuda error"):
            fabric.connect(first, 0, 2)
