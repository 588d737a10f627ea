"""Links over real groups: order is kept, and whatever breaks ends the inbox with a name."""

import sys
import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from tests.unit.engine.ranks import connected
from varuna.core.errors import CheckpointError, LinkError
from varuna.engine.base.inbox import GenerationEnded, Inbox
from varuna.engine.base.wait_bounds import Awaited, Patience
from varuna.engine.device.host_copies import DONE
from varuna.engine.links.links import Courier, Receiver, Sender
from varuna.engine.links.message import Packed

SIZES = [1, 8, 100_003, 64, 4096, 7] * 5


def nothing() -> Awaited:
    return Awaited("a message")


def numbered() -> Iterator[tuple[tuple[str, int], int]]:
    for number, size in enumerate(SIZES):
        yield ("message", number), size


def test_messages_of_any_size_keep_their_order_in_both_directions_at_once() -> None:
    groups = connected(2)
    inboxes = [Inbox(Patience(last_s=20)) for _ in range(2)]
    senders = []
    for rank in range(2):
        Receiver(groups[rank], 1 - rank, 1 + rank, inboxes[rank], f"into {rank}", numbered())
        senders.append(Sender(groups[rank], 1 - rank, 2 - rank, inboxes[rank], f"out of {rank}"))
    for number, size in enumerate(SIZES):
        for rank in range(2):
            senders[rank].send(Packed(torch.full((size,), (3 * number + rank) % 251, dtype=torch.uint8), DONE))
    for number in reversed(range(len(SIZES))):  # whatever the order of use
        for rank in range(2):
            message = inboxes[rank].take(("message", number), nothing)
            assert message.numel() == SIZES[number]
            assert set(message.tolist()) == {(3 * number + 1 - rank) % 251}
    for sender in senders:
        sender.close()


def test_sending_never_blocks_and_a_peer_that_is_gone_is_named_by_the_sender() -> None:
    groups = connected(2)
    inbox = Inbox(Patience(last_s=10))
    sender = Sender(groups[0], 1, 1, inbox, "of rank 0 with rank 1 (stage 1)")
    for _ in range(20):
        sender.send(Packed(torch.zeros(1_000_000, dtype=torch.uint8), DONE))  # nobody receives
    assert not inbox.ended
    del groups[1]
    with pytest.raises(LinkError, match=r"the link of rank 0 with rank 1 \(stage 1\) broke while sending: \S"):
        inbox.take("never", nothing)


def test_a_peer_that_is_gone_is_named_by_the_receiver() -> None:
    groups = connected(2)
    inbox = Inbox(Patience(last_s=10))
    Receiver(groups[0], 1, 1, inbox, "of rank 0 with rank 1 (stage 1)", numbered())
    del groups[1]
    with pytest.raises(LinkError, match=r"the link of rank 0 with rank 1 \(stage 1\) broke while receiving: [^\n]+$"):
        inbox.take(("message", 0), nothing)


def test_what_came_before_the_break_is_delivered_only_until_the_break() -> None:
    groups = connected(2)
    inbox = Inbox(Patience(last_s=10))
    Receiver(groups[0], 1, 1, inbox, "broken", numbered())
    groups[1].send(torch.full((1,), 9, dtype=torch.uint8), 0, 1).wait()
    assert inbox.take(("message", 0), nothing).tolist() == [9]
    del groups[1]
    with pytest.raises(LinkError):
        inbox.take(("message", 1), nothing)


def test_a_broken_link_does_not_hide_the_managers_word() -> None:
    groups = connected(2)
    inbox = Inbox(Patience(last_s=10))
    inbox.abort(GenerationEnded(3))
    Sender(groups[0], 1, 1, inbox, "x").send(Packed(torch.zeros(8, dtype=torch.uint8), DONE))
    del groups[1]
    with pytest.raises(GenerationEnded):
        inbox.take("never", nothing)


def test_a_courier_works_in_order_and_posts_results() -> None:
    inbox = Inbox(Patience(last_s=10))
    courier = Courier(inbox, "reduction")
    done: list[int] = []

    def work(number: int) -> int:
        done.append(number)
        return -number

    for number in range(50):
        courier.submit(number, partial(work, number))
    courier.close()
    assert [inbox.take(number, nothing) for number in range(50)] == [-number for number in range(50)]
    assert done == list(range(50))


def test_a_courier_whose_collective_fails_ends_the_generation_and_stops() -> None:
    inbox = Inbox(Patience(last_s=10), who="rank 1 (stage 0)")
    courier = Courier(inbox, "the reduction")
    ran = threading.Event()

    def fail() -> None:
        raise RuntimeError("connection closed by the peer (rank 0)\nand a stack that nobody wants")

    courier.submit("one", fail)
    courier.submit("two", ran.set)
    with pytest.raises(
        LinkError, match=r"the reduction failed on rank 1 \(stage 0\): connection closed by the peer \(rank 0\)$"
    ):
        inbox.take("one", nothing)
    assert not ran.wait(0.05)


def test_an_error_that_is_no_links_reaches_whoever_takes_the_result() -> None:
    inbox = Inbox(Patience(last_s=10))
    courier = Courier(inbox, "forming generation 0")

    def damaged() -> None:
        raise CheckpointError("section 3 is damaged")

    courier.submit("formed", damaged)
    courier.submit("next", lambda: 5)
    with pytest.raises(CheckpointError, match="section 3 is damaged"):
        inbox.take("formed", nothing)
    assert inbox.take("next", nothing) == 5


def test_a_courier_hands_on_an_exit_that_its_thread_would_swallow() -> None:
    inbox = Inbox(Patience(last_s=10))
    Courier(inbox, "forming generation 0").submit("formed", lambda: sys.exit("no weights here"))
    with pytest.raises(SystemExit, match="no weights here"):
        inbox.take("formed", nothing)


def test_a_receiver_that_cannot_tell_what_comes_says_why() -> None:
    inbox = Inbox(Patience(last_s=10))

    def unknown() -> Iterator[tuple[str, int]]:
        yield "message", SIZES[len(SIZES)]

    Receiver(connected(2)[0], 1, 1, inbox, "of rank 0 with rank 1 (stage 1)", unknown())
    with pytest.raises(IndexError):
        inbox.take("never", nothing)


def test_a_courier_drops_its_work_when_the_generation_is_over() -> None:
    inbox = Inbox(Patience(last_s=10))
    courier = Courier(inbox, "vote")
    begun, go, ran = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        go.wait(10)

    courier.submit("one", hold)
    courier.submit("two", ran.set)
    assert begun.wait(5)
    inbox.abort(GenerationEnded(0))
    go.set()
    assert not ran.wait(0.05)


class Later:
    """A message that a device is still writing."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def wait(self) -> None:
        if not self.done.wait(10):
            raise RuntimeError("an illegal memory access was encountered")

    def passed(self) -> bool:
        return self.done.is_set()


def test_messages_that_are_not_ready_are_sent_in_order_once_they_are() -> None:
    groups = connected(2)
    inbox = Inbox(Patience(last_s=10))
    Receiver(groups[1], 0, 1, inbox, "in", ((number, 4) for number in range(3)))
    sender = Sender(groups[0], 1, 1, Inbox(Patience(last_s=10)), "out")
    pending = [Later(), Later(), Later()]
    buffers = [torch.zeros(4, dtype=torch.uint8) for _ in pending]
    for buffer, ready in zip(buffers, pending, strict=True):
        sender.send(Packed(buffer, ready))
    for number in (2, 0, 1):
        buffers[number].fill_(number + 1)
        pending[number].done.set()
    assert [inbox.take(number, nothing).tolist() for number in range(3)] == [[1] * 4, [2] * 4, [3] * 4]
    sender.close()


def test_a_device_that_fails_under_a_message_is_not_taken_for_a_broken_link() -> None:
    class Failed(Later):
        def wait(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")

    inbox = Inbox(Patience(last_s=10))
    sender = Sender(connected(2)[0], 1, 1, inbox, "out")
    sender.send(Packed(torch.zeros(4, dtype=torch.uint8), Failed()))
    with pytest.raises(RuntimeError, match=r"^CUDA error: an illegal memory access"):
        inbox.take("never", nothing)
    sender.close()
