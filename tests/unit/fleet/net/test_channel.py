"""Whatever breaks and whenever, each message comes once and in order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna.fleet.net.channel import Channel, ChannelFullError


@given(st.lists(st.sampled_from(["send", "deliver", "deliver", "confirm", "break"]), min_size=1, max_size=200))
def test_each_message_comes_once_and_in_order_over_connections_that_break(moves: list[str]) -> None:
    here: Channel[int] = Channel(1000)
    there: Channel[int] = Channel(1000)
    wire: list[tuple[int, int]] = []
    sent, came = 0, []
    for move in [*moves, "break", *["deliver"] * 400]:
        match move:
            case "send":
                sent += 1
                wire.append((here.send(sent), sent))
            case "deliver" if wire:
                number, body = wire.pop(0)
                if there.accept(number):
                    came.append(body)
            case "confirm":
                here.confirm(there.received)
            case "break":
                here.confirm(there.received)
                wire = list(here.waiting)
    assert came == list(range(1, sent + 1))
    here.confirm(there.received)
    assert not here.waiting


def test_a_missing_message_and_a_made_up_confirmation_are_errors() -> None:
    channel: Channel[str] = Channel(2)
    with pytest.raises(ValueError, match="a message is missing"):
        channel.accept(2)
    with pytest.raises(ValueError, match="the newest one is 0"):
        channel.confirm(1)


def test_what_may_wait_is_bounded() -> None:
    channel: Channel[str] = Channel(2)
    channel.send("a")
    channel.send("b")
    with pytest.raises(ChannelFullError, match="2 messages"):
        channel.send("c")
    assert channel.confirm(1) == ["a"]
    assert channel.send("c") == 3
