"""However slow or frozen a neighbour is, no more messages wait on a stage than its plan has places for."""

import threading
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch

from tests.depth import nightly
from tests.unit.engine.ranks import Setup, connected
from varuna.core.errors import LinkError
from varuna.core.plan import Plan
from varuna.engine.base.inbox import GenerationEnded, Inbox
from varuna.engine.base.transport import Group, Work
from varuna.engine.base.wait_bounds import Awaited, Patience, doing_of
from varuna.engine.device.host_copies import DONE
from varuna.engine.links.links import Receiver, Sender
from varuna.engine.links.message import Packed
from varuna.engine.stage.stage import Stage
from varuna.schedule.buffers import GRADIENTS_COMING, MESSAGES_LEAVING

_MICRO_BATCHES = 10
_ACTIVATIONS, _GRADIENTS = 1, 2
"""tags"""


def deep(policy: str = "adaptive") -> Setup:
    """Two stages with room for the whole step in flight."""

    def adjusted(plan: Plan) -> Plan:
        return plan.with_each_pipeline(stash_limits=(_MICRO_BATCHES,) * 2, split_last=0)

    return Setup(global_batch=2 * _MICRO_BATCHES, policy=policy, adjusted=adjusted)


class Frozen:
    """Stage 1 takes no activation before ``thaw``; the most that stage 0 had sent until it waited for that."""

    def __init__(self, patch: pytest.MonkeyPatch, then: Callable[["Frozen", Inbox], object]) -> None:
        self.thawed, self.most = threading.Event(), 0
        receive, send, wait = Group.receive, Sender.send, Inbox.wait
        sent = Counter[Sender]()

        def receive_late(group: Group, buffer: torch.Tensor, peer: int, tag: int) -> Work:
            assert tag != _ACTIVATIONS or self.thawed.wait(30)
            return receive(group, buffer, peer, tag)

        def send_and_count(sender: Sender, message: Packed) -> None:
            send(sender, message)
            sent[sender] += 1
            if not self.thawed.is_set():
                self.most = max(self.most, sender.waiting)
                if sent[sender] == _MICRO_BATCHES:  # nothing held it back
                    self.thawed.set()

        def wait_and_tell(inbox: Inbox, ready: Callable[[], bool], awaited: Callable[[], Awaited]) -> None:
            def told() -> bool:
                if not self.thawed.is_set() and "places for the activation" in _awaited(inbox):
                    then(self, inbox)
                return ready()

            wait(inbox, told, awaited)

        patch.setattr(Group, "receive", receive_late)
        patch.setattr(Sender, "send", send_and_count)
        patch.setattr(Inbox, "wait", wait_and_tell)


def _awaited(inbox: Inbox) -> str:
    return doing_of("", inbox.waiting).text


@pytest.mark.parametrize("policy", ["adaptive", *nightly("gpipe")])
def test_forwards_wait_for_a_stage_that_takes_nothing_and_change_no_number(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    undisturbed = deep(policy).losses(2, 1, steps=2)
    frozen = Frozen(monkeypatch, lambda frozen, _: frozen.thawed.set())
    assert deep(policy).losses(2, 1, steps=2) == undisturbed
    assert frozen.most == MESSAGES_LEAVING


def test_a_stage_that_stays_frozen_is_named_and_its_lease_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    said = []

    def end(_: Frozen, inbox: Inbox) -> None:
        said.append(_awaited(inbox))
        threading.Timer(0.0, inbox.abort, [LinkError("the lease of rank 1 has ended")]).start()

    frozen = Frozen(monkeypatch, end)
    with pytest.raises(LinkError, match="the lease of rank 1 has ended"):
        deep().run(2, 1, steps=2)
    frozen.thawed.set()
    assert frozen.most == MESSAGES_LEAVING
    assert said[0] == ": waits for places for the activation of 0F3 (step 0) from rank 1"


@pytest.mark.nightly
def test_gradients_that_a_slow_stage_has_no_place_for_stay_where_they_were_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    undisturbed = deep("gpipe").losses(2, 1, steps=2)
    given, most, made = Counter[int](), Counter[Inbox](), threading.Event()
    send, put, backward = Sender.send, Inbox.put, Stage.backward

    def send_and_count(sender: Sender, message: Packed) -> None:
        send(sender, message)
        given[sender._tag] += 1
        if given[_GRADIENTS] == _MICRO_BATCHES:
            made.set()

    def put_and_count(inbox: Inbox, key: Hashable, value: Any) -> None:
        put(inbox, key, value)
        waiting = [other for other in inbox._arrived if isinstance(other, tuple) and other[0] == "gradient"]
        most[inbox] = max(most[inbox], len(waiting))

    def backward_late(stage: Stage, *given: Any) -> Any:
        assert stage.index or made.wait(30)  # the first one of stage 0 waits until stage 1 is through
        return backward(stage, *given)

    monkeypatch.setattr(Sender, "send", send_and_count)
    monkeypatch.setattr(Inbox, "put", put_and_count)
    monkeypatch.setattr(Stage, "backward", backward_late)
    assert deep("gpipe").losses(2, 1, steps=2) == undisturbed
    assert max(most.values()) == GRADIENTS_COMING


def test_a_receiver_with_places_takes_what_it_has_room_for_and_goes_on_when_something_is_used() -> None:
    groups = connected(2)
    outgoing, inbox = Inbox(Patience(last_s=10)), Inbox(Patience(last_s=10))
    Receiver(groups[1], 0, 1, inbox, "in", ((number, 4) for number in range(6)), places=2)
    sender = Sender(groups[0], 1, 1, outgoing, "out")
    for number in range(6):
        sender.send(Packed(torch.full((4,), number, dtype=torch.uint8), DONE))
    for number in range(6):
        outgoing.wait(lambda: sender.waiting == max(0, 4 - number), lambda: Awaited("places"))  # noqa: B023 - runs at once
        assert not inbox.has(number + 2)
        assert inbox.take(number, lambda: Awaited("a message")).tolist() == [number] * 4
    sender.close()


def test_a_receiver_that_waits_for_a_place_ends_with_its_generation() -> None:
    groups = connected(2)
    inbox = Inbox(Patience(last_s=10))
    Receiver(groups[1], 0, 1, inbox, "crowded", ((number, 4) for number in range(2)), places=1)
    [thread] = [each for each in threading.enumerate() if each.name == "varuna-receive-crowded"]
    groups[0].send(torch.zeros(4, dtype=torch.uint8), 1, 1).wait()
    inbox.wait(lambda: inbox.has(0), lambda: Awaited("the message"))
    inbox.abort(GenerationEnded())
    thread.join(5)
    assert not thread.is_alive()
