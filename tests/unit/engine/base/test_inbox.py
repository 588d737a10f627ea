"""Every wait of the training thread ends: by arrival, by the end of the generation, or by its bound."""

import threading
from collections.abc import Callable

import pytest

from varuna.core.errors import DataError, LinkError
from varuna.engine.base.inbox import GenerationEnded, Inbox
from varuna.engine.base.wait_bounds import Awaited, Patience


def nothing() -> Awaited:
    return Awaited("nothing")


class Waiting:
    """A thread in ``take``, and how that ended."""

    def __init__(self, inbox: Inbox, key: object) -> None:
        self.value: object = None
        self.error: BaseException | None = None
        self.entered = threading.Event()
        self.thread = threading.Thread(target=self.run, args=(inbox, key), daemon=True)
        self.thread.start()
        assert self.entered.wait(5)

    def run(self, inbox: Inbox, key: object) -> None:
        try:
            inbox.wait(self.ready(inbox, key), nothing)
            self.value = inbox.take(key, nothing)
        except BaseException as error:
            self.error = error

    def ready(self, inbox: Inbox, key: object) -> Callable[[], bool]:
        def look() -> bool:  # runs under the inbox's lock: a put or an abort after it finds us waiting
            self.entered.set()
            return inbox.has(key)

        return look

    def end(self) -> None:
        self.thread.join(5)
        assert not self.thread.is_alive()


def test_a_wait_ends_at_its_bound_and_names_what_it_waited_for() -> None:
    inbox = Inbox(Patience(last_s=0.02), who="rank 4")
    with pytest.raises(LinkError, match=r"rank 4 waited 0 s for the gradient of 2B7 \(step 3\) from rank 5, .*resume"):
        inbox.take("gradient", lambda: Awaited("the gradient of 2B7 (step 3)", (5,)))


def test_the_text_of_a_wait_is_made_only_when_it_is_needed() -> None:
    inbox = Inbox()
    inbox.put("key", 1)
    assert inbox.take("key", lambda: pytest.fail("nobody asked")) == 1


def test_other_arrivals_neither_end_nor_prolong_a_wait() -> None:
    inbox = Inbox(Patience(last_s=0.1))
    stop = threading.Event()

    def chatter() -> None:
        number = 0
        while not stop.wait(0.005):
            number += 1
            inbox.put(("other", number), number)

    thread = threading.Thread(target=chatter, daemon=True)
    thread.start()
    try:
        with pytest.raises(LinkError, match="waited 0 s"):
            inbox.take("mine", nothing)
    finally:
        stop.set()
        thread.join(5)


def test_a_value_arrives_once_and_none_is_a_value() -> None:
    inbox = Inbox(Patience(last_s=0.02))
    waiting = Waiting(inbox, "key")
    inbox.put("key", None)
    waiting.end()
    assert (waiting.value, waiting.error) == (None, None)
    assert not inbox.has("key")
    with pytest.raises(LinkError):
        inbox.take("key", nothing)


def test_an_abort_ends_present_and_future_waits() -> None:
    inbox = Inbox()
    waits = [Waiting(inbox, number) for number in range(3)]
    failure = LinkError("the link broke")
    inbox.abort(failure)
    for waiting in waits:
        waiting.end()
        assert waiting.error is failure
    with pytest.raises(LinkError, match="the link broke"):
        inbox.take("later", nothing)
    with pytest.raises(LinkError, match="the link broke"):
        inbox.check()
    assert inbox.ended


def test_an_abort_wins_over_what_has_arrived() -> None:
    inbox = Inbox()
    inbox.put("key", 1)
    inbox.abort(GenerationEnded(0))
    assert not inbox.has("key")
    with pytest.raises(GenerationEnded):
        inbox.take("key", nothing)


def test_the_end_of_the_generation_replaces_a_links_error_and_not_the_other_way_round() -> None:
    inbox = Inbox()
    inbox.abort(LinkError("first"))
    inbox.abort(LinkError("second"))
    with pytest.raises(LinkError, match="first"):
        inbox.check()
    inbox.abort(GenerationEnded(4))
    inbox.abort(LinkError("third"))
    with pytest.raises(GenerationEnded):
        inbox.check()


def test_an_exception_in_place_of_a_value_is_raised_and_ends_nothing_else() -> None:
    inbox = Inbox()
    inbox.put("batch", DataError("dataset[3] cannot be read"))
    inbox.put("other", 2)
    with pytest.raises(DataError, match=r"dataset\[3\]"):
        inbox.take("batch", nothing)
    assert not inbox.ended
    assert inbox.take("other", nothing) == 2


def test_deliveries_after_the_end_are_dropped() -> None:
    inbox = Inbox()
    inbox.abort(GenerationEnded(0))
    inbox.put("late", 1)
    assert not inbox.has("late")
