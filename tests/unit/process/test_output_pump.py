"""Nobody has to read what a process prints, and who reads gets all of it, or is told what is missing."""

import os
import pty
import sys
import threading
import time

import pytest

from varuna.process.output_pump import Pump, unread_allowed

pytestmark = pytest.mark.timeout(20)


class Reader:
    """A sink that takes nothing until somebody reads."""

    def __init__(self) -> None:
        self.got = bytearray()
        self.reads = threading.Event()

    def write(self, data: bytes) -> int:
        assert self.reads.wait(10)
        self.got += data[:3]  # as a pipe may: a part
        return min(3, len(data))


def test_who_writes_never_waits_and_a_late_reader_is_told_what_is_missing() -> None:
    reader = Reader()
    pump = Pump(reader.write, limit_bytes=20)
    for number in range(100):
        pump.write(b"line %d\n" % number)
    reader.reads.set()
    assert pump.close()
    first, told = bytes(reader.got).split(b"\n[", 1)
    assert first.splitlines() == [b"line 0", b"line 1"]
    assert b"98 lines dropped here" in told


def test_a_process_ends_though_nobody_reads_and_waits_while_somebody_does() -> None:
    reader = Reader()
    stuck = Pump(reader.write)
    stuck.write(b"never read\n")
    assert not stuck.close(0.05)
    reader.reads.set()


def test_a_reader_that_is_gone_costs_nothing() -> None:
    def gone(data: bytes) -> int:
        raise BrokenPipeError

    pump = Pump(gone)
    pump.write(b"x\n")
    assert pump.close()
    pump.write(b"y\n")


def test_ctrl_s_on_a_terminal_holds_no_print_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        monkeypatch.setattr(sys, "stderr", terminal)
        os.write(ours, b"\x13")  # Ctrl-S
        begin_s = time.monotonic()
        with unread_allowed(0.05):
            assert sys.stdout.isatty()
            for _ in range(1000):
                print("x" * 100)
                print("y" * 100, file=sys.stderr, flush=True)
            sys.stdout.buffer.write(b"z\n")
            assert time.monotonic() - begin_s < 5
            os.write(ours, b"\x11")  # Ctrl-Q: what was printed comes after all
            got = b""
            while b"z\r\n" not in got:
                got += os.read(ours, 65536)
        assert got.count(b"x" * 100) == 1000
        assert sys.stdout is terminal
    os.close(ours)
