"""Inputs that wait in host memory: the same numbers, few on the device at once, and each back before its R."""

import weakref
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.depth import nightly_rows
from tests.unit.engine.models import Dropping, SmallLanguage
from tests.unit.engine.ranks import Setup
from varuna.core.plan import Plan
from varuna.engine.device.host_copies import DONE, HostCopies, Ready
from varuna.engine.pipeline.input_stash import InputStash, StashedInput
from varuna.schedule.buffers import STASH_IN_TRANSIT


@pytest.mark.parametrize(
    ("policy", "stay"),
    [
        ("adaptive", 0),
        *nightly_rows(("adaptive", 1), ("varuna", 0), ("gpipe", 1)),
    ],
)
def test_losses_and_parameters_are_those_of_a_stash_on_the_device(policy: str, stay: int) -> None:
    def moved(plan: Plan) -> Plan:
        return plan.with_each_pipeline(stash_on_device=(stay,) * (plan.stages - 1) + (plan.first.stash_limits[-1],))

    setup = Setup(build=Dropping, micro_batch=1, policy=policy)
    expected = setup.losses(3, 1, steps=2)
    parameters = setup.parameters()
    other = replace(setup, adjusted=moved)
    assert other.losses(3, 1, steps=2) == expected
    found = other.parameters()
    assert all(torch.equal(found[name], value) for name, value in parameters.items())


def first_frozen() -> nn.Module:
    model = SmallLanguage()
    model.layers[0].requires_grad_(False)
    return model


@pytest.mark.nightly
def test_what_crosses_into_the_first_trained_section_of_a_stage_waits_there_too() -> None:
    setup = Setup(build=first_frozen, micro_batch=1, policy="adaptive")
    expected = setup.losses(2, 2, steps=2)
    moved = replace(setup, adjusted=lambda plan: plan.with_each_pipeline(stash_on_device=(0, 1)))
    assert moved.losses(2, 2, steps=2) == expected


class Watched(HostCopies):
    """Counts what is on the device."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.crossed = 0

    def made(self, value: Tensor) -> Tensor:
        self.alive.add(value.untyped_storage())
        return value

    def fetch(self, values: Sequence[Tensor], after: Ready = DONE) -> tuple[list[Tensor], Ready]:
        self.crossed += 1
        return [self.made(value.clone()) for value in values], DONE


def waiting(copies: Watched, number: int) -> StashedInput:
    return StashedInput({"x": copies.made(torch.full((3,), float(number)))}, {})


@pytest.mark.parametrize(("depth", "places"), [(6, 0), (6, 2), (6, 6), (2, 0)])
def test_only_what_stays_and_what_is_on_its_way_is_on_the_device(depth: int, places: int) -> None:
    copies, count = Watched(), 20
    stash = InputStash(range(count), places=places, copies=copies)
    most = 0
    for number in range(count + depth):
        if number < count:
            stash.finish_copy()
            entry = waiting(copies, number)
            most = max(most, len(copies.alive))
            stash.put_input(number, entry)
            del entry
        if number >= depth:
            at_work = stash.take_input(number - depth)
            assert at_work.values["x"].tolist() == [float(number - depth)] * 3
            most = max(most, len(copies.alive))
            del at_work
    assert most <= min(places + STASH_IN_TRANSIT, depth + 1)
    assert copies.crossed == (0 if places >= depth + 1 else count - len(stays(count, depth, places)))


def stays(count: int, depth: int, places: int) -> list[int]:
    """Inputs that find a place free when their F is through."""
    here: list[int] = []
    for number in range(count):
        here += [number] * (sum(other >= number - depth for other in here) < places)
    return here


def test_the_next_input_sets_out_with_the_one_before_it() -> None:
    copies = Watched()
    stash = InputStash([2, 1, 0], places=0, copies=copies)
    for number in range(3):
        stash.put_input(number, waiting(copies, number))
    assert not copies.alive
    assert stash.take_input(2).values["x"].tolist() == [2.0] * 3
    assert (copies.crossed, len(copies.alive)) == (2, 1)  # 1 has come with it; 2 is used up
    stash.take_input(1)
    assert copies.crossed == 3
