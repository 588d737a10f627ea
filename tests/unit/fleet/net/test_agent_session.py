"""Whatever breaks and whenever, each message comes once and in order."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna.core.value import Value
from varuna.fleet.net.agent_session import AgentSession, ChannelFullError


class Item(Value):
    number: int
    received: int
    body: str


@given(st.lists(st.sampled_from(["send", "deliver", "deliver", "confirm", "break"]), min_size=1, max_size=200))
def test_each_message_comes_once_and_in_order_over_connections_that_break(moves: list[str]) -> None:
    here: AgentSession[int] = AgentSession("s", Item, 1000)
    there: AgentSession[int] = AgentSession("s", Item, 1000)
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
    session: AgentSession[str] = AgentSession("s", Item, 2)
    with pytest.raises(ValueError, match="a message is missing"):
        session.accept(2)
    with pytest.raises(ValueError, match="the newest one is 0"):
        session.confirm(1)


def test_what_may_wait_is_bounded() -> None:
    session: AgentSession[str] = AgentSession("s", Item, 2)
    session.send("a")
    session.send("b")
    with pytest.raises(ChannelFullError, match="2 messages"):
        session.send("c")
    assert session.confirm(1) == ["a"]
    assert session.send("c") == 3


def test_a_connection_takes_what_the_other_side_does_not_have_and_what_is_sent_meanwhile() -> None:
    """It ends when it is told to, whatever is left."""
    session: AgentSession[str] = AgentSession("s", Item, 100)
    for body in "abc":
        session.send(body)
    session.accept(1)
    came: list[tuple[int, int, str]] = []

    async def converse() -> str:
        connection = session.connect(cursor=1)

        async def take(frame: str) -> None:
            item = Item.model_validate_json(frame)
            came.append((item.number, item.received, item.body))
            if item.body == "c":
                session.confirm(3)
                asyncio.get_running_loop().call_soon(session.send, "d")
            if item.body == "d":
                connection.end("enough")
                session.send("e")

        return await asyncio.wait_for(connection.send_all(take), 10)

    assert asyncio.run(converse()) == "enough"
    assert came == [(2, 1, "b"), (3, 1, "c"), (4, 1, "d")]
