"""Members of a generation find each other through the manager: in any order, also when it starts again."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna.core.messages import MAX_VALUE_BYTES, Found, FromWorker, Offered, Sought, from_worker, to_worker
from varuna.fleet.manager.rendezvous import Meeting
from varuna.membership.managed import Rendezvous

MEMBERS = ("w0", "w1", "w2")


class Play:
    """Three members over connections that hold words back for as long as the dice say."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.meeting = Meeting()
        self.meeting.begin_generation(4, MEMBERS)
        self.under_way: list[tuple[str, FromWorker]] = []
        self.stores = {name: self.member(name) for name in MEMBERS}

    def member(self, name: str) -> Rendezvous:
        return Rendezvous(4, lambda message: self.under_way.append((name, message)), clock=lambda: self.now_s)

    def deliver(self, name: str, message: FromWorker) -> None:
        heard = from_worker.validate_json(message.model_dump_json())  # as on the wire
        assert isinstance(heard, Offered | Sought)
        for target, found in self.meeting.answer_worker(name, heard):
            said = to_worker.validate_json(found.model_dump_json())
            assert isinstance(said, Found)
            self.stores[target].take_values(said)


@given(st.randoms(use_true_random=False), st.booleans())
def test_everybody_finds_everybody_in_any_order_also_over_a_restart(dice: random.Random, restart: bool) -> None:
    play = Play()
    todo = [(name, "set") for name in MEMBERS] + [(name, "seek") for name in MEMBERS] * 2
    dice.shuffle(todo)
    for name, what in todo:
        if what == "set":
            play.stores[name].set(f"g4/{name}", bytes([255, 0]) + name.encode())
        else:
            play.stores[name].check([f"g4/{other}" for other in MEMBERS])
        while play.under_way and dice.random() < 0.6:
            play.deliver(*play.under_way.pop(0))
    if restart:
        play.meeting = Meeting()
        play.meeting.begin_generation(4, MEMBERS)
    keys = [f"g4/{name}" for name in MEMBERS]
    for _ in range(3):
        for name in MEMBERS:
            if restart:
                play.stores[name].set(f"g4/{name}", bytes([255, 0]) + name.encode())  # who still forms says it again
            play.stores[name].check(keys)
        while play.under_way:
            play.deliver(*play.under_way.pop(0))
        play.now_s += 4.0
    for name, other in itertools.product(MEMBERS, MEMBERS):
        assert play.stores[name].check(keys)
        assert play.stores[name].get(f"g4/{other}") == bytes([255, 0]) + other.encode()


def test_what_is_sought_in_vain_is_asked_for_again_with_what_one_has_posted() -> None:
    said: list[FromWorker] = []
    now_s = [0.0]
    store = Rendezvous(1, said.append, clock=lambda: now_s[0])
    store.set("mine", "text")
    for _ in range(100):  # polled
        assert not store.check(["mine", "other"])
    assert said == [Offered(generation=1, key="mine", value=b"text"), Sought(generation=1, keys=("other",))]
    now_s[0] = 3.1
    assert not store.check(["other"])
    assert said[2:] == said[:2]
    store.take_values(Found(generation=0, values={"other": b"of an old generation"}))
    assert not store.check(["other"])


def test_strangers_and_members_of_other_generations_are_not_heard() -> None:
    meeting = Meeting()
    assert meeting.answer_worker("w0", Offered(generation=0, key="k", value=b"v")) == []
    meeting.begin_generation(2, MEMBERS)
    meeting.answer_worker("w0", Offered(generation=2, key="k", value=b"v"))
    assert meeting.answer_worker("w9", Sought(generation=2, keys=("k",))) == []
    assert meeting.answer_worker("w1", Sought(generation=1, keys=("k",))) == []
    assert meeting.answer_worker("w1", Sought(generation=2, keys=("k",))) == [
        ("w1", Found(generation=2, values={"k": b"v"}))
    ]
    meeting.begin_generation(3, MEMBERS)
    assert meeting.answer_worker("w1", Sought(generation=3, keys=("k",))) == []  # forgotten


def test_what_a_member_may_offer_and_seek_has_a_bound_and_nobody_changes_anothers() -> None:
    meeting = Meeting()
    meeting.begin_generation(0, MEMBERS)

    def post(count: int) -> None:
        for number in range(count):
            meeting.answer_worker("w0", Offered(generation=0, key=f"k{number}", value=b"x" * MAX_VALUE_BYTES))

    def seek(count: int) -> None:
        for number in range(count):
            meeting.answer_worker("w1", Sought(generation=0, keys=(f"never{number}",)))

    for too_much in (post, seek):
        too_much(3)
        with pytest.raises(ValueError, match="more than any member needs"):
            too_much(100)
    meeting.answer_worker("w2", Offered(generation=0, key="mine", value=b"a"))
    with pytest.raises(ValueError, match="offers 'mine', which is another one's"):
        meeting.answer_worker("w1", Offered(generation=0, key="mine", value=b"b"))


def test_a_value_that_changes_is_seen_within_seconds_and_none_is_trusted_while_the_manager_is_away() -> None:
    """Ranks tell each other what they do, over and over, by the same keys."""
    play = Play()
    writer, reader = play.stores["w0"], play.stores["w1"]

    def deliver_all() -> int:
        count = len(play.under_way)
        while play.under_way:
            play.deliver(*play.under_way.pop(0))
        return count

    writer.set("doing/0", "1")
    assert not reader.check(["doing/0"])
    deliver_all()
    for word in ("2", "3"):
        writer.set("doing/0", word)
        deliver_all()
        for _ in range(3):
            assert reader.check(["doing/0"])  # what is fresh is not asked for
        assert deliver_all() == 0
        play.now_s += 6.0
        assert reader.check(["doing/0"])
        assert deliver_all() == 1
        assert reader.get("doing/0") == word.encode()
    for play.now_s in (18.0, 21.1, 30.0, 37.9):  # the manager is away
        assert reader.check(["doing/0"])
    play.now_s = 38.1
    with pytest.raises(RuntimeError, match="has not answered for 20 s"):
        reader.check(["doing/0"])
    play.meeting.begin_generation(4, MEMBERS)
    writer.set("doing/0", "4")
    deliver_all()
    assert reader.check(["doing/0"])
    assert reader.get("doing/0") == b"4"
