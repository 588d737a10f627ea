"""Messages that share the lines of hosts."""

from dataclasses import replace
from statistics import mean

import pytest

from varuna.calibration.format import Jitter
from varuna.simulator.bounds import bottleneck_s, lower_bounds_s
from varuna.simulator.channels import HostLine, SharedLink, busiest_line_s
from varuna.simulator.costs import LinkCosts, PipelineCosts, uniform
from varuna.simulator.step import simulate


def flows(*shares: float) -> list[SharedLink]:
    """Flows of messages of one second that leave one host for others."""
    out = HostLine()
    return [SharedLink(number, 1.0, share, (out, HostLine())) for number, share in enumerate(shares)]


def test_one_message_alone_takes_what_it_takes() -> None:
    [flow] = flows(1.0)
    assert flow.add_message(3.0) == [flow]
    assert flow.done_s == 4.0
    assert flow.finish(4.0) == []


def test_two_that_meet_have_half_of_the_line_each() -> None:
    first, second = flows(1.0, 1.0)
    first.add_message(0.0)
    assert set(second.add_message(0.5)) == {first, second}
    assert (first.done_s, second.done_s) == (1.5, 2.5), "the half second that is left takes one"
    assert first.finish(1.5) == [second]
    assert second.done_s == 2.0


def test_lines_that_are_wide_enough_slow_nobody() -> None:
    first, second = flows(0.5, 0.5)
    first.add_message(0.0)
    assert second.add_message(0.5) == [second]
    assert (first.done_s, second.done_s) == (1.0, 1.5)


def test_a_second_message_of_a_link_waits_for_the_first() -> None:
    [flow] = flows(1.0)
    flow.add_message(0.0)
    assert flow.add_message(0.2) == []
    assert flow.finish(1.0) == [flow]
    assert flow.done_s == 2.0


def test_the_narrower_end_counts() -> None:
    first, second = flows(1.0, 1.0)
    third = SharedLink(2, 1.0, 1.0, (HostLine(), second.lines[1]))
    for flow in (first, second, third):
        flow.add_message(0.0)
    assert second.done_s == 2.0, "half of its sender's line, and of its receiver's"


def between(message_s: float, line_share: float, stages: int = 4) -> PipelineCosts:
    link = LinkCosts(activation_s=message_s, gradient_s=message_s, line_share=line_share)
    return uniform(stages, link=link)


@pytest.mark.parametrize("message_s", [2.5, 3.0, 4.0])
def test_a_line_that_is_full_sets_the_pace(message_s: float) -> None:
    """A stage in the middle sends an activation and a gradient for each micro-batch: 2 messages in its 4 seconds."""
    costs = between(message_s, 1.0)
    times = [simulate(costs, micro_batches=n).step_s for n in (40, 80)]
    assert (times[1] - times[0]) / 40 >= 2 * message_s * 0.99
    assert busiest_line_s(costs.links) == 2 * message_s
    assert bottleneck_s(costs, stash_limits=(40,) * 4) == 2 * message_s
    assert simulate(between(message_s, 0.0), micro_batches=40).step_s < 0.9 * times[0], "links of their own"


@pytest.mark.parametrize("message_s", [0.01, 0.1])
def test_lines_that_are_hardly_used_change_nothing(message_s: float) -> None:
    assert (
        simulate(between(message_s, 1.0), micro_batches=16).step_s
        == simulate(between(message_s, 0.0), micro_batches=16).step_s
    )


def test_two_stages_have_no_line_to_share() -> None:
    """Messages down and messages up pass lines of their own."""
    times = [simulate(between(3.0, share, stages=2), micro_batches=16).step_s for share in (0.0, 1.0)]
    assert times[0] == pytest.approx(times[1])


def test_stages_of_one_host_share_its_line() -> None:
    """Of four stages on two hosts, only the messages in the middle pass lines; one each way."""
    inner, outer = LinkCosts(), LinkCosts(activation_s=3.0, gradient_s=3.0, line_share=1.0)
    costs = PipelineCosts(stages=uniform(4).stages, links=(inner, outer, inner))
    alone = PipelineCosts(stages=costs.stages, links=(inner, LinkCosts(activation_s=3.0, gradient_s=3.0), inner))
    assert busiest_line_s(costs.links) == 3.0
    assert simulate(costs, micro_batches=16).step_s == pytest.approx(simulate(alone, micro_batches=16).step_s)
    three = PipelineCosts(stages=uniform(5).stages, links=(outer, inner, inner, outer))
    assert busiest_line_s(three.links) == 6.0, "a host with a neighbour on each side"
    unshared = LinkCosts(activation_s=3.0, gradient_s=3.0)
    apart = PipelineCosts(stages=three.stages, links=(unshared, inner, inner, unshared))
    assert simulate(three, micro_batches=32).step_s > 1.1 * simulate(apart, micro_batches=32).step_s


@pytest.mark.parametrize(
    ("message_s", "allreduce_s", "share", "message_later_s", "sums_later_s"),
    [
        (3.0, 2.0, 1.0, 2.0, 2.0),  # half of the line each until the shorter one is through
        (3.0, 5.0, 1.0, 3.0, 3.0),
        (3.0, 2.0, 0.5, 1.0, 0.0),  # two stages of a host sum at once: each has half of the line anyway
        (3.0, 2.0, 0.0, 0.0, 0.0),  # sums within a host
        (0.1, 2.0, 1.0, 0.0, 0.0),  # messages that hardly use the line
    ],
)
def test_the_last_gradient_of_a_stage_meets_its_sums(
    message_s: float, allreduce_s: float, share: float, message_later_s: float, sums_later_s: float
) -> None:
    costs = between(message_s, 1.0, stages=2)
    apart, together = (
        simulate(
            replace(
                costs,
                stages=tuple(replace(stage, allreduce_s=allreduce_s, line_share=each) for stage in costs.stages),
            ),
            micro_batches=4,
        )
        for each in (0.0, share)
    )
    assert together.ends_s[1] == apart.ends_s[1]
    assert together.reduced_s[1] - apart.reduced_s[1] == pytest.approx(sums_later_s)
    assert together.ends_s[0] - apart.ends_s[0] == pytest.approx(message_later_s)
    assert together.reduced_s[0] - together.ends_s[0] == pytest.approx(allreduce_s), "nothing is in its way"
    assert together.step_s - apart.step_s == pytest.approx(message_later_s)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("policy", ["varuna", "gpipe", "1f1b", "adaptive"])
def test_nothing_is_faster_than_its_bound(seed: int, policy: str) -> None:
    costs = between(0.5 + seed / 2, 1.0, stages=3 + seed % 3)
    trace = simulate(costs, micro_batches=12, policy=policy, seed=seed)
    limits = [12] * len(costs.stages)
    [bound] = lower_bounds_s(costs, micro_batches=12, stash_limits=[limits], policy=policy)
    assert trace.step_s >= bound - 1e-9


def test_messages_that_leave_early_on_a_crowded_line_wake_their_receiver() -> None:
    """A stage that waits is told of a message, however early that left."""
    link = LinkCosts(early_s=0.9, activation_s=3.0, gradient_s=3.0, line_share=1.0, jitter=Jitter(mean_s=0.5))
    on_time = replace(link, early_s=0.0)
    for stages in (3, 4, 6):
        early_s, late_s = (
            mean(simulate(uniform(stages, link=each), micro_batches=8, seed=seed).step_s for seed in range(20))
            for each in (link, on_time)
        )
        assert early_s < late_s
