"""Values that pass through the device and go home keep their bits, over streams that are as late as they may be."""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.depth import nightly, nightly_rows
from tests.unit.engine.late import Late, LateStream, LateStreams, Rash
from tests.unit.engine.models import Dropping, SmallLanguage, adamw
from tests.unit.engine.optimizers import adagrad, momentum
from tests.unit.engine.plain import same
from tests.unit.engine.ranks import Setup
from varuna.core.plan import Plan
from varuna.core.precision import Precision
from varuna.engine.device.host_copies import DONE, HOST, Ready, StreamCopies
from varuna.engine.links.traffic import traffic_over
from varuna.engine.stage.offload import OffloadedOptimizer
from varuna.engine.stage.optimizer import StageOptimizer


def away(plan: Plan) -> Plan:
    """One input of each stage stays on the device."""
    return plan.with_each_pipeline(stash_on_device=(1,) * (plan.stages - 1) + (plan.first.stash_limits[-1],))


# -- runs over a late device ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "precision", "grid"),
    [
        (momentum, "bf16", (2, 1)),
        *nightly_rows(
            (adamw, "fp32", (1, 1)), (momentum, "fp32", (2, 2)), (adagrad, "fp32", (1, 1)), (adamw, "bf16", (2, 1))
        ),
    ],
)
def test_offloaded_state_passes_a_late_device_bit_for_bit(
    optimizer: Any, precision: Precision, grid: tuple[int, int]
) -> None:
    plain = Setup(build=SmallLanguage, optimizer=optimizer, precision=precision)
    late = Late()
    offloaded = replace(plain, offload=True, traffic=late)
    assert offloaded.losses(*grid) == plain.losses(*grid)
    assert same(offloaded.states(), plain.states())
    assert all(streams.copies and not streams.unkept for streams in late.made)


@pytest.mark.nightly
def test_fp16_steps_that_overflow_leave_what_was_on_its_way() -> None:
    plain = Setup(build=SmallLanguage, precision="fp16")
    offloaded = replace(plain, offload=True, traffic=Late())
    assert repr(offloaded.losses(2, 1, steps=6)) == repr(plain.losses(2, 1, steps=6))
    assert same(offloaded.states(), plain.states())


@pytest.mark.nightly
@pytest.mark.parametrize("policy", ["adaptive", *nightly("gpipe")])
def test_stashed_inputs_pass_a_late_device_bit_for_bit(policy: str) -> None:
    setup = Setup(build=Dropping, micro_batch=1, policy=policy)
    expected, parameters = setup.losses(3, 1, steps=2), setup.parameters()
    late = Late()
    moved = replace(setup, adjusted=away, traffic=late)
    assert moved.losses(3, 1, steps=2) == expected
    assert same(moved.parameters(), parameters)
    assert not any(streams.unkept for streams in late.made)


class Hasty(StreamCopies):
    """Computes with what has not been fetched."""

    def compute_after(self, copied: Ready) -> None:
        pass


@pytest.mark.parametrize("kind", [Hasty, Rash])
def test_a_wait_that_is_left_out_changes_the_run(kind: type[StreamCopies]) -> None:
    """The tests above rest on this."""
    plain = Setup(build=SmallLanguage)
    losses = plain.losses(1, 1, steps=2)
    late = Late(lambda streams: traffic_over(streams)._replace(optimizer=kind(streams)))
    offloaded = replace(plain, offload=True, traffic=late)
    same_losses = repr(offloaded.losses(1, 1, steps=2)) == repr(losses)
    assert not (same_losses and same(offloaded.states(), plain.states()))


# -- one tensor ---------------------------------------------------------------------------------------------------


def test_a_value_goes_home_as_it_is_when_it_sets_out() -> None:
    streams = LateStreams()
    streams.compute = LateStream()
    copies, value = StreamCopies(streams), torch.zeros(2, 3)
    home = copies.room_for(value)
    streams.compute.put(lambda: value.fill_(7.0))
    left = copies.copy_to_host([(value, home)])
    streams.compute.put(lambda: value.fill_(9.0))
    left.wait()
    assert home.eq(7.0).all()
    assert streams.compute.passed == 1


def test_what_has_just_left_can_be_fetched_again() -> None:
    def there_and_back(*, waits: bool) -> Tensor:
        copies, value = StreamCopies(LateStreams()), torch.full((3,), 5.0)
        home = copies.room_for(value)
        left = copies.copy_to_host([(value, home)])
        [found], arrived = copies.fetch([home], left if waits else DONE)
        copies.compute_after(arrived)
        return found

    assert there_and_back(waits=True).tolist() == [5.0] * 3
    assert there_and_back(waits=False).isnan().all()


@pytest.mark.parametrize("shape", [(), (0, 3), (4,), (2, 1, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_room_has_the_form_of_the_value(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    value = torch.ones(shape, dtype=dtype)
    [before, home, after] = StreamCopies(LateStreams()).at_rest([torch.ones(5), value, torch.ones(3)])
    assert before.eq(1).all()
    assert after.eq(1).all()
    assert home.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
    assert home.data_ptr() % 64 == before.data_ptr() % 64
    assert torch.equal(home, value)
    assert (home.dtype, home.shape, home.is_contiguous()) == (dtype, value.shape, True)


# -- one optimizer -----------------------------------------------------------------------------------------------


class Counting(LateStreams):
    """Knows what lies on the device: what was fetched and is alive, or still to be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[weakref.ref[torch.UntypedStorage]] = []
        self.most = 0

    def fetch(self, stream: LateStream, value: Tensor) -> Tensor:
        fetched = super().fetch(stream, value)
        self.alive = [each for each in self.alive if each() is not None]
        self.alive.append(weakref.ref(fetched.untyped_storage()))
        self.most = max(self.most, len(self.alive))
        return fetched


def offloaded(copies: StreamCopies, masters: Sequence[nn.Parameter], failing: Sequence[bool]) -> OffloadedOptimizer:
    """A section for each of the masters, of which the first is updated last; its update fails if so told."""

    class Told(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if any(failing) and self.param_groups[0]["params"][0].shape == masters[0].shape:
                raise ZeroDivisionError
            super().step()

    named = [[(f"{number}.weight", master)] for number, master in enumerate(masters)]
    gradients = {name: torch.ones(value.shape) for part in named for name, value in part}
    return OffloadedOptimizer(
        lambda part: StageOptimizer(
            lambda n: Told([p for _, p in n], lr=0.5, momentum=0.9), None, part, {}, 0, home=HOST
        ),
        named,
        device=HOST,
        copies=copies,
        gradients=gradients,
    )


def test_no_more_than_two_sections_are_on_the_device_though_it_is_late() -> None:
    streams = Counting()
    masters = [nn.Parameter(torch.zeros(4, number + 1)) for number in range(6)]
    optimizer = offloaded(StreamCopies(streams), masters, [])
    for _ in range(3):
        optimizer.prepare()
        optimizer.update(lambda written: None)
    assert streams.most == 4  # a parameter and its momentum, twice
    assert masters[0].eq(-0.5 * (1 + 1.9 + 2.71)).all()


def test_an_update_that_is_broken_off_is_undone_whatever_was_on_its_way_home() -> None:
    masters, failing = [nn.Parameter(torch.zeros(4, number + 1)) for number in range(3)], list[bool]()
    streams = LateStreams()
    optimizer = offloaded(StreamCopies(streams), masters, failing)
    optimizer.update(lambda written: None)
    before = [master.detach().clone() for master in masters]
    undo = optimizer.copies()
    failing.append(True)
    with pytest.raises(ZeroDivisionError):
        optimizer.update(lambda written: None)
    undo()
    failing.clear()
    for stream in streams.made:
        streams.record_event(stream).wait()  # whatever was still to come has come
    assert all(torch.equal(master, value) for master, value in zip(masters, before, strict=True))
    optimizer.update(lambda written: None)
    assert all(torch.equal(master, value - 0.5 * 1.9) for master, value in zip(masters, before, strict=True))
