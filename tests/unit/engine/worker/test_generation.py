"""All that belongs to one generation ends with it."""

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch import distributed

from tests.unit.engine.ranks import Setup, close_sessions
from tests.waiting import wait_for
from varuna.core.messages import Assignment
from varuna.core.plan import Pipeline, Plan
from varuna.engine.base.endpoint import Endpoint
from varuna.engine.base.transport import Group
from varuna.engine.links.groups import Groups
from varuna.engine.worker.forming import GenerationContext, form_generation
from varuna.engine.worker.loop_state import LoopStateOffer


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@pytest.mark.usefixtures("no_collections")
def test_what_a_generation_held_goes_when_it_ends_and_not_once_python_looks_for_circles() -> None:
    setup = Setup()
    setup.run(2, 2, steps=2)
    held: list[weakref.ref[Any]] = []
    for session in setup.finished:
        assert session.current is not None
        held += map(weakref.ref, (session.current.runtime, session.current.groups.world))
    close_sessions()
    wait_for(lambda: all(each() is None for each in held), 5.0)  # threads that have them are ending


@pytest.mark.nightly
def test_groups_of_a_generation_that_ended_while_it_formed_are_abandoned_by_the_thread_that_made_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that waits for it has looked before there were any."""
    abandoned: list[Group] = []
    monkeypatch.setattr(Group, "abandon", lambda group: abandoned.append(group))
    plan = Plan(micro_batch=1, global_batch=8, pipelines=(Pipeline(bounds=(0, 1), stash_limits=(1,)),))
    made = list[Groups]()
    worker: Any = SimpleNamespace(
        job=SimpleNamespace(traffic=SimpleNamespace(compresses=False)), endpoint=Endpoint("127.0.0.1")
    )
    assignment = Assignment(generation=0, plan=plan, rank=0, members=1, next_step=0, fresh=True)
    context = GenerationContext(worker, assignment, {}, LoopStateOffer(-1, None), None, lambda: True, lambda part: None)
    with pytest.raises(RuntimeError, match="the generation ended while it formed"):
        form_generation(context, distributed.HashStore(), made)  # type: ignore[attr-defined]
    [groups] = made
    assert abandoned == [groups.world]
