"""One TCP connection to another member of a group, and the transfers over it.

A sender waits until the receiver has asked, so a message lands in the memory that it is for, and what is not taken
stays with its sender::

    receiver              sender
    ASK tag, size   ->
                    <-    BODY tag, size, and that many bytes

Asks of a tag are answered in their order. An ask goes out before bodies that wait, so it is never behind more than the
one that is being written.

Where the line is what is waited for, a body may be encoded (``coding``); its frame says so.

Every transfer ends: with its bytes, or with the error that ended the connection. This is why we do not use Gloo, which
forgets the message that was half-way when a connection broke: the thread that waits for it, and its memory, stay for
hours.
"""

import contextlib
import errno
import queue
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from varuna.core.times import Compressed
from varuna.engine.base.codec import HEADER_BYTES, PLAIN, Codec, Damaged, check, read_header
from varuna.engine.base.coding import LARGE_BYTES, Coding
from varuna.process.far_lines import suit_far_line
from varuna.process.threads import start

SILENT_S = 30.0
"""Seconds after which a peer that takes nothing of what was sent to it cannot be reached, or is stopped."""
UNREACHED = frozenset(
    {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ECONNREFUSED, getattr(errno, "EHOSTDOWN", -1)}
)
OPERATION_BOUND_S = 100_000.0
"""Longer than any wait in the inbox (``wait_bounds``), which ends what is blocked here by abandoning the group."""

_WRITES_S = 1.0
"""Longest that a write may take to fail once the connection has ended."""
_HEADER = struct.Struct("<qqB")
"""tag, size in bytes, kind"""
_ASK, _BODY, _ENCODED = 0, 1, 2


class Unreachable(RuntimeError):
    """Error: nothing gets through to another rank, which may well be there: the manager knows."""

    def __init__(self, problem: str, peer: int) -> None:
        super().__init__(problem)
        self.peer = peer


def unreachable_of(error: BaseException | None) -> int | None:
    """Return the rank that could not be reached, if an error comes from that."""
    while error is not None:
        if isinstance(error, Unreachable):
            return error.peer
        error = error.__cause__
    return None


class Work:
    """A transfer in progress; keeps its buffer alive."""

    def __init__(self, buffer: Tensor, give_up: Callable[[str], None]) -> None:
        self.buffer = buffer
        self.view = bytes_of(buffer)
        self._give_up = give_up
        self._pending = threading.Lock()  # wakes faster than an Event
        self._pending.acquire()
        self._problem: Callable[[], RuntimeError] | None = None

    def wait(self, bound_s: float = OPERATION_BOUND_S) -> Tensor:
        """Block until the transfer is done.

        Raises:
            RuntimeError: the peer is gone, the group was abandoned, or the bound has passed.
        """
        if not self._pending.acquire(timeout=bound_s):
            self._give_up(f"timed out after {bound_s:.3g} s")  # it is not known what the memory holds
            self._pending.acquire()
        self._pending.release()
        if self._problem is not None:
            raise self._problem()
        return self.buffer

    def end(self, problem: Callable[[], RuntimeError] | None = None) -> None:
        """Let ``wait`` return, or raise what ``problem`` makes: an error that is kept here would keep the buffer."""
        self._problem = problem
        self._pending.release()


class _Frame:
    """Bytes that are being written."""

    def __init__(self, kind: int, tag: int, size_bytes: int, work: Work | None = None) -> None:
        self.work = work
        body = [] if work is None else [work.view]
        self._left = [memoryview(_HEADER.pack(tag, size_bytes, kind)), *body]

    def write(self, connected: socket.socket, *, may_block: bool) -> bool:
        """Write, all of it if it may block; return whether nothing is left."""
        while self._left:
            try:
                written = connected.sendmsg(self._left, (), 0 if may_block else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return False
            while self._left and written >= self._left[0].nbytes:
                written -= self._left.pop(0).nbytes
            if self._left:
                self._left[0] = self._left[0][written:]
                if not may_block:
                    return False
        return True


class _LargeFrame(_Frame):
    """A body by which the line is measured, and that is encoded where that is faster."""

    def __init__(self, tag: int, work: Work, coding: Coding) -> None:
        super().__init__(_BODY, tag, work.view.nbytes, work)
        self._tag, self._view, self._coding = tag, work.view, coding
        self._is_begun = self._may_encode = False

    def write(self, connected: socket.socket, *, may_block: bool) -> bool:
        """Write, all of it if it may block; the writing thread, which may, encodes."""
        if not self._is_begun:
            self._coding.begin(len(self._view))
            self._is_begun, self._may_encode = True, self._coding.encodes
        form = PLAIN
        if self._may_encode:
            if not may_block:
                return False
            form = self._coding.form_of(self._tag, self._view)
        size_bytes, sent_bytes = len(self._view), len(self._view)
        if form != PLAIN:
            self._left = [memoryview(_HEADER.pack(self._tag, size_bytes, _ENCODED))]
            sent_bytes = 0
            for pieces in self._coding.encoded(self._view, form):
                self._left += map(memoryview, pieces)
                sent_bytes += sum(map(len, pieces))
                super().write(connected, may_block=True)
        elif not super().write(connected, may_block=may_block):
            return False
        self._coding.end(size_bytes, sent_bytes, is_encoded=form != PLAIN)
        return True


class Connection:
    """Transfers between this member and one other.

    A thread that gives something to write while none writes tries to write it at once; the writing thread continues
    where that would block. Another one reads. Both start when they are first needed, and nothing but them closes the
    socket: its number could be another socket's while a thread still uses it.
    """

    def __init__(
        self,
        connected: socket.socket,
        peer: str,
        rank: int = -1,
        silent_s: float | None = None,
        *,
        compresses: bool = False,
    ) -> None:
        """Take over a connected, blocking socket.

        Args:
            connected: the socket.
            peer: names its other end in errors.
            rank: the same in reports.
            silent_s: how long that may take nothing; None: as long as the system finds.
            compresses: where the line is what is waited for; never within a machine.
        """
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if silent_s is not None and hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * silent_s))
        suit_far_line(connected)
        self._socket, self._peer, self._rank = connected, peer, rank
        self._lock = threading.Lock()
        self._under_way: set[Work] = set()
        self._to_receive: defaultdict[int, deque[Work]] = defaultdict(deque)
        self._to_send: defaultdict[int, deque[Work]] = defaultdict(deque)
        self._asked_bytes: defaultdict[int, deque[int]] = defaultdict(deque)
        """by tag, what the peer has asked for before this end has sent it"""
        self._asks: deque[_Frame] = deque()
        self._bodies: deque[_Frame] = deque()
        self._unwritten: queue.SimpleQueue[_Frame | None] | None = None  # the writing thread's
        self._is_writing = self._is_reading = False
        self._is_deaf = False
        """the peer takes nothing any more"""
        self._problem: Callable[[], RuntimeError] | None = None
        self._coding = Coding(connected) if compresses and not _is_within_a_machine(connected) else None
        self._codec: Codec | None = None  # the reading thread's

    @property
    def compressed(self) -> Compressed:
        """Bytes that were sent compressed, before and after compression."""
        return Compressed() if self._coding is None else self._coding.compressed

    def send(self, buffer: Tensor, tag: int) -> Work:
        """Start to send; returns at once."""
        work = Work(buffer, self.end)
        with self._lock:
            self._begin(work)
            self._to_send[tag].append(work)
            problem = self._match(tag)
            has_turn = self._takes_turn()
        self._go_on(problem, has_turn)
        return work

    def receive(self, buffer: Tensor, tag: int) -> Work:
        """Start to receive; returns at once."""
        work = Work(buffer, self.end)
        with self._lock:
            self._begin(work)
            self._to_receive[tag].append(work)
            self._asks.append(_Frame(_ASK, tag, work.view.nbytes))
            has_turn = self._takes_turn()
        self._go_on("", has_turn)
        return work

    def end(self, problem: str = "the group was abandoned", *, is_silent: bool = False) -> None:
        """End all transfers, and refuse others; the first reason counts."""
        with self._lock:
            if self._problem is not None:
                return
            text = f"{problem} ({self._peer})"
            self._problem = partial(Unreachable, text, self._rank) if is_silent else partial(RuntimeError, text)
            ended, self._under_way = self._under_way, set()
            self._to_receive.clear()
            self._to_send.clear()
            self._asks.clear()
            self._bodies.clear()
            self.hang_up()
            if self._unwritten is not None:
                self._unwritten.put(None)
            self._close_if_unused()
        for work in ended:
            work.end(self._problem)

    def hang_up(self) -> None:
        """Let both ends find that the connection has ended, once nothing is given to it any more.

        It takes no lock: a garbage collector may call it on a thread that has it.
        """
        with contextlib.suppress(OSError):  # the peer has ended it
            self._socket.shutdown(socket.SHUT_RDWR)
        if not self._is_writing and not self._is_reading:
            self._socket.close()

    def _broke(self, error: OSError) -> None:
        self.end(f"the connection broke: {error.strerror or error}", is_silent=error.errno in UNREACHED)

    def _begin(self, work: Work) -> None:
        if self._problem is not None:
            raise self._problem()
        if not self._is_reading:
            start(f"read-{self._peer}", self._read)  # it begins with the lock
            self._is_reading = True
        self._under_way.add(work)

    def _done(self, work: Work) -> None:
        with self._lock:
            is_first = work in self._under_way  # not if the connection has ended meanwhile
            self._under_way.discard(work)
        if is_first:
            work.end()

    def _match(self, tag: int) -> str:
        """Let go what is to be sent and has been asked for; return what is wrong with it, or ""."""
        # The n-th send of a tag answers the n-th ask: both ends know the order of messages.
        while self._to_send[tag] and self._asked_bytes[tag]:
            work, size_bytes = self._to_send[tag].popleft(), self._asked_bytes[tag].popleft()
            if work.view.nbytes != size_bytes:
                return f"the peer asked for {size_bytes} bytes of tag {tag}, and {work.view.nbytes} are to be sent"
            if self._coding is not None and size_bytes >= LARGE_BYTES:
                self._bodies.append(_LargeFrame(tag, work, self._coding))
            else:
                self._bodies.append(_Frame(_BODY, tag, size_bytes, work))
        return ""

    def _go_on(self, problem: str, has_turn: bool) -> None:
        if problem:
            self.end(problem)
        if has_turn:
            self._write()

    # -- writing: one thread at a time has the turn ----------------------------------------------------------

    def _takes_turn(self) -> bool:
        """Return whether the caller has to write now."""
        if self._is_writing or self._is_deaf or not (self._asks or self._bodies):
            return False
        self._is_writing = True
        return True

    def _write(self, begun: _Frame | None = None, *, may_block: bool = False) -> None:
        """Write all that is to go, or let the writing thread do so where that would block; give the turn back."""
        frame = begun
        while True:
            with self._lock:
                if frame is None and self._problem is None and not self._is_deaf:
                    # Asks first: they are short, and the peer's next message waits for one.
                    frame = self._asks.popleft() if self._asks else self._bodies.popleft() if self._bodies else None
                if frame is None or self._problem is not None:
                    self._is_writing = False
                    self._close_if_unused()
                    return
            try:
                is_whole = frame.write(self._socket, may_block=may_block)
            except (BrokenPipeError, ConnectionResetError):  # what it sent before it left is still to be read
                with self._lock:
                    self._is_deaf, self._is_writing = True, False
                    self._close_if_unused()
                return  # the reading thread finds the end, and ends all
            except OSError as error:
                self._broke(error)
                continue
            if not is_whole:
                self._leave(frame)
                return
            if frame.work is not None:
                self._done(frame.work)
            frame = None

    def _leave(self, frame: _Frame) -> None:
        """Let the writing thread have the turn."""
        with self._lock:
            if self._problem is None:
                if self._unwritten is None:
                    try:
                        start(f"write-{self._peer}", self._write_left)
                    except RuntimeError:  # there may be no more threads
                        self._is_writing, self._is_deaf = False, True
                        raise
                    self._unwritten = queue.SimpleQueue()
                self._unwritten.put(frame)
                return
            self._is_writing = False
            self._close_if_unused()

    def _write_left(self) -> None:
        with self._lock:  # the thread that started this one has made the queue
            assert self._unwritten is not None
        while (frame := self._unwritten.get()) is not None:
            self._write(frame, may_block=True)
            del frame  # it keeps a message

    # -- reading ---------------------------------------------------------------------------------------------

    def _read(self) -> None:
        header = bytearray(_HEADER.size)
        with self._lock:  # the thread that started this one has noted it
            pass
        try:
            while True:
                self._fill(memoryview(header))
                tag, size_bytes, kind = _HEADER.unpack(header)
                if kind == _ASK:
                    self._was_asked(tag, size_bytes)
                else:
                    self._take(tag, size_bytes, is_encoded=kind == _ENCODED)
        except EOFError:
            self._let_writing_end()
            self.end("connection closed by the peer")
        except OSError as error:
            self._let_writing_end()
            self._broke(error)
        except (_Unasked, Damaged) as error:
            self.end(str(error))
        except Exception as error:  # noqa: BLE001 - a thread that ends in silence would leave all waiting
            self.end(f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._is_reading = False
                self._close_if_unused()

    def _let_writing_end(self) -> None:
        """Let a thread that writes find out whether its message is through: a peer may leave as soon as it has it."""
        deadline_s = time.monotonic() + _WRITES_S
        while time.monotonic() < deadline_s:
            with self._lock:
                self._is_deaf = True
                if not self._is_writing:
                    return
            time.sleep(0.001)  # it ends at once: nothing can be written any more

    def _was_asked(self, tag: int, size_bytes: int) -> None:
        with self._lock:
            self._asked_bytes[tag].append(size_bytes)
            problem = self._match(tag)
            has_turn = self._takes_turn()
        self._go_on(problem, has_turn)

    def _take(self, tag: int, size_bytes: int, *, is_encoded: bool) -> None:
        with self._lock:
            waiting = self._to_receive[tag]
            work = waiting.popleft() if waiting else None
        if work is None or work.view.nbytes != size_bytes:
            raise _Unasked(f"the peer sent {size_bytes} bytes of tag {tag} that nobody asked for")
        if is_encoded:
            self._decode(work.view)
        else:
            self._fill(work.view)
        self._done(work)

    def _decode(self, view: memoryview) -> None:
        """Fill memory with what comes encoded, in parts."""
        self._codec = self._codec or Codec()
        begin = bytearray(HEADER_BYTES)
        while view.nbytes:
            self._fill(memoryview(begin))
            header = read_header(begin, view.nbytes)
            part, view = view[: header.size_bytes], view[header.size_bytes :]
            if header.form == PLAIN:
                self._fill(part)
                check(header, part)
            else:
                body = memoryview(bytearray(header.body_bytes))
                self._fill(body)
                self._codec.decode(header, body, part)

    def _fill(self, view: memoryview) -> None:
        while view.nbytes:
            read = self._socket.recv_into(view, 0, socket.MSG_WAITALL)
            if not read:
                raise EOFError
            view = view[read:]

    def _close_if_unused(self) -> None:
        if self._problem is not None and not self._is_writing and not self._is_reading:
            self._socket.close()


def _is_within_a_machine(connected: socket.socket) -> bool:
    here, there = connected.getsockname(), connected.getpeername()
    return not isinstance(here, tuple) or here[0] == there[0]


class _Unasked(Exception):
    """Error: the peer sends what this end has no place for."""


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host."""
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor that crosses must be contiguous; this one has strides {tensor.stride()}")
    return tensor.detach().view(-1).view(torch.uint8).numpy().data
