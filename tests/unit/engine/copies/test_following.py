"""State that follows arrives bit for bit; whoever waits for it learns its sender, and when nobody sends it any more."""

import threading
from functools import partial

import pytest
import torch

from tests.unit.engine.ranks import connected
from tests.waiting import wait_for
from varuna.checkpoint.io.section_state import SectionState, to_bytes
from varuna.core.errors import LinkError
from varuna.core.messages import Transfer
from varuna.engine.base.inbox import GenerationEnded, Inbox
from varuna.engine.base.transport import Group
from varuna.engine.copies.following import StateReceiver, StateSender
from varuna.engine.stage.load_state import first_of, rest_of


def state_of(section: int, size: int) -> SectionState:
    generator = torch.Generator().manual_seed(section)
    tensors = {
        "parameters/w": torch.randn(size, 3, generator=generator),
        "parameters/frozen": torch.randn(5, generator=generator).to(torch.bfloat16),
        "buffers/mean": torch.randn(2, generator=generator).to(torch.bfloat16),
        "optimizer/w/exp_avg": torch.randn(3, size, generator=generator).t(),
        "optimizer/w/step": torch.tensor(float(section)),
        "optimizer/w/none": torch.empty(0),
    }
    return SectionState(section, tensors, {"optimizer/w/eta": 0.5, "run/loss_scale": [8.0, 1]})


STATES = {section: state_of(section, size) for section, size in enumerate((10, 500_000, 0))}
MOVES = [
    Transfer(section=0, source_rank=0, target_rank=2, follows=True),
    Transfer(section=1, source_rank=1, target_rank=2, follows=True),
    Transfer(section=2, source_rank=0, target_rank=2, follows=True),
]


def sender(groups: list[Group], rank: int, done: threading.Event, dtype: torch.dtype = torch.float32) -> None:
    parts = {section: rest_of(state, dtype) for section, state in STATES.items()}
    moves = [each for each in MOVES if each.source_rank == rank]
    StateSender(groups[rank], moves, parts, then=done.set, step=3, stage=rank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_parts_of_a_state_are_all_of_it(dtype: torch.dtype) -> None:
    """Parameters that are computed with in half precision come twice: rounded, and then as they are."""
    groups, inbox, done = connected(3), Inbox(), [threading.Event(), threading.Event()]
    found: dict[int, SectionState] = {}
    receiver = StateReceiver(
        groups[2], MOVES, lambda rest: found.update({rest.section: rest}), inbox=inbox, step=3, stage=0
    )
    assert not receiver.is_over
    for rank in range(2):
        sender(groups, rank, done[rank], dtype)
    receiver.wait()
    assert receiver.is_over
    assert all(each.wait(10) for each in done), "who sends is told that it has arrived"
    for section, state in STATES.items():
        first, rest = first_of(state, dtype), found[section]
        assert first.tensors["parameters/w"].dtype is dtype
        assert ("parameters/w" in rest.tensors) == (dtype is not torch.float32)
        both = SectionState(
            section,
            {name: {**first.tensors, **rest.tensors}[name] for name in state.tensors},
            {name: {**first.scalars, **rest.scalars}[name] for name in state.scalars},
        )
        assert to_bytes(both) == to_bytes(state)


def test_a_source_that_is_gone_is_named() -> None:
    groups, inbox = connected(3), Inbox()
    receiver = StateReceiver(groups[2], MOVES, lambda rest: None, inbox=inbox, step=3, stage=0)
    done = threading.Event()
    sender(groups, 1, done)
    assert done.wait(10)
    groups[0].abandon()
    for _ in range(2):  # also if nobody waits when it turns out
        with pytest.raises(LinkError, match="sections 0, 2 did not come from rank 0"):
            receiver.wait()


def test_the_end_of_a_generation_ends_the_wait_and_nothing_is_taken_any_more() -> None:
    groups, inbox, found = connected(3), Inbox(), list[int]()
    receiver = StateReceiver(
        groups[2], MOVES[1:2], lambda rest: found.append(rest.section), inbox=inbox, step=3, stage=0
    )
    threading.Timer(0.1, partial(inbox.abort, GenerationEnded(3))).start()
    with pytest.raises(GenerationEnded):
        receiver.wait()
    receiver.close()
    done = threading.Event()
    sender(groups, 1, done)
    assert done.wait(30)
    assert not found


def test_a_wait_says_what_it_is_for() -> None:
    groups, inbox = connected(3), Inbox()
    receiver = StateReceiver(groups[2], MOVES, lambda rest: None, inbox=inbox, step=3, stage=0)
    waits = threading.Thread(target=receiver.wait)
    waits.start()
    wait_for(lambda: inbox.waiting is not None, 10)
    assert inbox.waiting is not None
    awaited = inbox.waiting.awaited()
    assert awaited == ("the optimizer state of sections 0, 1, 2", (0, 1), False, False)
    for rank in range(2):
        sender(groups, rank, threading.Event())
    waits.join(30)
    assert not waits.is_alive()
