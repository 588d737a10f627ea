import pytest

from tests.unit.planner.models import FAST, calibrated, model, section
from varuna.calibration.format import Calibration, Calibrations, Link, NetworkCosts, Ring
from varuna.core.plan import Pipeline, Plan
from varuna.core.times import Carried, Compressed, RankTimes, Typical
from varuna.fleet.feedback.gap import explain_gap
from varuna.fleet.feedback.refine import costs_of, predicted, refine
from varuna.planner.pricing.predict import predict

FACTS = model([section(1.0), *[section(0.5)] * 4, section(0.25, boundary_bytes=0)])


def plan(replicas: int = 1) -> Plan:
    return Plan(
        micro_batch=1,
        global_batch=8 * replicas,
        pipelines=(Pipeline(replicas=replicas, bounds=(0, 3, 6), stash_limits=(8, 8)),),
        policy="varuna",
    )


def known(**changes: object) -> Calibrations:
    return Calibrations.of_one(calibrated(FACTS, **changes))


def as_predicted(calibrations: Calibrations, plan: Plan) -> list[RankTimes]:
    """Return the times that ranks would tell if everything went as predicted."""
    guess = predict(costs_of(calibrations, plan), plan)
    told = []
    for stage, times, row in zip(guess.trace.costs.stages, guess.trace.stage_times, guess.trace.rows, strict=True):
        seconds = {"F": stage.forward_s, "R": stage.recompute_s, "B": stage.backward_s}
        counts = {kind: sum(each.value == kind for each in row.kinds) for kind in seconds}
        reduced_s = guess.trace.exposed_reduce_s
        waited_s = guess.step_s - times.compute_s - reduced_s - guess.trace.costs.optimizer_s
        told.append(
            RankTimes(
                steps=1,
                step_s=guess.step_s,
                waited_s=waited_s,
                reduced_s=reduced_s,
                actions={kind: Typical(count, seconds[kind]) for kind, count in counts.items() if count},
            )
        )
    return told


def changed(times: RankTimes, by_s: float, *kinds: str) -> RankTimes:
    """A rank whose actions took longer, and its steps with them."""
    actions = {k: Typical(n, s + by_s if k in kinds else s) for k, (n, s) in times.actions.items()}
    more_s = sum(n for k, (n, _) in times.actions.items() if k in kinds) * by_s
    return times.model_copy(update={"actions": actions, "step_s": times.step_s + more_s})


def test_a_run_that_goes_as_predicted_changes_nothing() -> None:
    before = known(action_s=0.01, hand_over_s=0.02, samples_s=0.005)
    after = refine(before, plan(), as_predicted(before, plan()))
    for name, kind in before.first.kinds.items():
        assert after.first.kinds[name].forward_s == pytest.approx(kind.forward_s)
        assert after.first.kinds[name].backward_s == pytest.approx(kind.backward_s)
    assert predict(costs_of(after, plan()), plan()).step_s == pytest.approx(
        predict(costs_of(before, plan()), plan()).step_s
    )


def test_a_recompute_of_some_sections_tells_of_these_only() -> None:
    before, some = known(), plan().with_each_pipeline(kept=(1, 1))
    after = refine(before, some, as_predicted(before, some))
    for name, kind in before.first.kinds.items():
        assert after.first.kinds[name].recompute_s == pytest.approx(kind.recompute_s or kind.forward_s)


def test_stages_pull_their_sections_to_what_their_actions_took() -> None:
    before, told = known(), as_predicted(known(), plan())
    slower = [changed(told[0], 1.0, "F", "R", "B"), told[1]]
    after = refine(before, plan(), slower)
    costs = costs_of(after, plan())
    assert costs.stages[0].forward_s == pytest.approx(slower[0].actions["F"].seconds, rel=0.01)
    assert costs.stages[1].forward_s == pytest.approx(slower[1].actions["F"].seconds, rel=0.01)
    assert costs.stages[0].backward_s == pytest.approx(slower[0].actions["B"].seconds, rel=0.01)
    assert after.first.notes[-1].startswith("refined by a run: 2x1, m = 1")
    assert len([note for note in refine(after, plan(), slower).first.notes if "refined" in note]) == 1


def test_what_ends_a_step_is_what_it_was_on_the_stage_that_waited_least() -> None:
    before = known()
    told = [
        each.model_copy(update={"step_s": each.step_s + late_s})
        for each, late_s in zip(as_predicted(before, plan()), (3.0, 5.0), strict=True)
    ]
    after = refine(before, plan(), told)
    assert after.first.optimizer.fixed_s == pytest.approx(3.0)
    assert costs_of(after, plan()).optimizer_s == pytest.approx(told[0].ending_s, rel=0.01)


def test_operation_counts_give_way_to_what_was_measured() -> None:
    told = as_predicted(known(), plan())
    fast = [
        each.model_copy(update={"actions": {kind: Typical(n, s / 5000) for kind, (n, s) in each.actions.items()}})
        for each in told
    ]
    after = refine(known(), plan(), fast)
    assert after.first.action_s <= 0.5 * min(each.actions["F"].seconds for each in fast)


def test_links_and_rings_take_what_was_seen() -> None:
    before = known()
    link, [ring] = before.first.across_vms.link, before.first.across_vms.rings
    told = [
        each.model_copy(
            update={
                "messages": Carried(5, 10**6, 0.0002 + 2 * 10**6 / link.bytes_per_s),
                "reductions": Carried(5, 10**8, 2 * (0.0002 + 3 * 10**8 / 2 / ring.bytes_per_s)),
                "round_s": 0.0002,
            }
        )
        for each in as_predicted(before, plan(2))
    ]
    after = refine(before, plan(2), told, is_whole=False).first.across_vms
    assert after.link.bytes_per_s == pytest.approx(link.bytes_per_s / 2)
    assert after.rings[0].bytes_per_s == pytest.approx(ring.bytes_per_s / 3)
    assert after.link.latency_s == after.rings[0].latency_s == pytest.approx(0.0002)


def test_a_run_within_a_tenth_of_its_prediction_is_not_worth_a_word() -> None:
    before = known()
    told = as_predicted(before, plan())
    assert explain_gap(before, plan(), told) is None
    assert (
        explain_gap(before, plan(), [each.model_copy(update={"step_s": 1.09 * each.step_s}) for each in told]) is None
    )


def test_a_slow_stage_is_named() -> None:
    before = known()
    told = as_predicted(before, plan())
    late = changed(told[1], 2.0, "F", "B")
    waiting = told[0].model_copy(
        update={"step_s": late.step_s, "waited_s": told[0].waited_s + late.step_s - told[0].step_s}
    )
    text = explain_gap(before, plan(), [waiting, late])
    assert text is not None
    assert "longer), most of all because of stage 1: compute, 32.0 s longer in a step" in text


@pytest.mark.parametrize(
    ("field", "what"), [("reduced_s", "all-reduces and tied gradients"), (None, "vote and optimizer step")]
)
def test_what_follows_the_last_action_is_named(field: str | None, what: str) -> None:
    before = known()
    told = [
        each.model_copy(
            update={"step_s": each.step_s + 20.0, **({field: getattr(each, field) + 20.0} if field else {})}
        )
        for each in as_predicted(before, plan())
    ]
    text = explain_gap(before, plan(), told)
    assert text is not None
    assert f"stage 0: {what}, 20.0 s longer" in text


def test_waits_are_the_cause_only_where_nothing_else_is_off() -> None:
    before = known()
    told = [
        each.model_copy(update={"step_s": each.step_s + 20.0, "waited_s": each.waited_s + 20.0})
        for each in as_predicted(before, plan())
    ]
    text = explain_gap(before, plan(), told)
    assert text is not None
    assert "waits for" in text


def test_a_faster_run_is_explained_as_well() -> None:
    before = known()
    told = [changed(each, -1.0, "F", "B", "R") for each in as_predicted(before, plan())]
    text = explain_gap(before, plan(), told)
    assert text is not None
    assert "shorter), most of all because of stage 0: compute" in text


def test_a_slow_message_is_a_narrow_cable_rather_than_a_long_one() -> None:
    """The vote, which has hardly any bytes, says how long it is; rings have the same cables."""
    before = known()
    told = [
        each.model_copy(update={"messages": Carried(5, 160_000, 0.065), "round_s": 0.005})
        for each in as_predicted(before, plan())
    ]
    after = refine(before, plan(), told, is_whole=False).first.across_vms
    assert after.link.latency_s == pytest.approx(0.005)
    assert after.link.latency_s + 160_000 / after.link.bytes_per_s == pytest.approx(0.065)
    added = 1 / after.link.bytes_per_s - 1 / before.first.across_vms.link.bytes_per_s
    assert 1 / after.rings[0].bytes_per_s - 1 / before.first.across_vms.rings[0].bytes_per_s == pytest.approx(added)


def test_a_link_whose_messages_are_compressed_does_not_make_rings_faster_that_nobody_saw() -> None:
    """Messages pass at once and a half the line's own pace; sums in fp32 would not."""
    before = known()
    rate = before.first.across_vms.link.bytes_per_s
    seen = {"messages": Carried(5, 10**9, 10**9 / rate / 1.5), "round_s": 1e-6}
    told = [each.model_copy(update=seen) for each in as_predicted(before, plan())]
    plain = refine(before, plan(), told, is_whole=False).first.across_vms
    done = Compressed(1_500_000, 1_000_000)
    packed = [each.model_copy(update={"compressed": done}) for each in told]
    after = refine(before, plan(), packed, is_whole=False).first.across_vms
    assert after.link == plain.link
    assert after.link.bytes_per_s == pytest.approx(1.5 * rate, rel=0.01)
    assert plain.rings[0].bytes_per_s == pytest.approx(1.5 * before.first.across_vms.rings[0].bytes_per_s, rel=0.01)
    assert after.rings[0].bytes_per_s == pytest.approx(before.first.across_vms.rings[0].bytes_per_s, rel=0.01)


def test_a_long_cable_is_not_taken_for_a_narrow_one() -> None:
    before = known()
    told = [
        each.model_copy(update={"messages": Carried(5, 160_000, 0.065), "round_s": 0.08})
        for each in as_predicted(before, plan())
    ]
    after = refine(before, plan(), told, is_whole=False).first.across_vms
    assert after.link.latency_s > 0.9 * 0.065 - 1e-9
    assert after.link.latency_s + 160_000 / after.link.bytes_per_s == pytest.approx(0.065)


def test_a_faster_cable_is_believed_too() -> None:
    before = known()
    rate = before.first.across_vms.link.bytes_per_s
    told = [
        each.model_copy(update={"messages": Carried(5, 10**7, 10**7 / (4 * rate)), "round_s": 0.0002})
        for each in as_predicted(before, plan())
    ]
    after = refine(before, plan(), told, is_whole=False).first.across_vms
    assert after.link.bytes_per_s == pytest.approx(4 * rate, rel=0.15)
    assert after.rings[0].bytes_per_s == pytest.approx(4 * before.first.across_vms.rings[0].bytes_per_s, rel=0.15)


@pytest.mark.parametrize("round_s", [None, 0.0, 1e-4])
def test_transfers_that_took_no_time_by_the_clock_are_survived(round_s: float | None) -> None:
    before = known()
    seen = {"messages": Carried(1, 100, 0.0), "reductions": Carried(1, 0, 0.0), "round_s": round_s}
    told = [each.model_copy(update=seen) for each in as_predicted(before, plan(2))]
    after = refine(before, plan(2), told, is_whole=False).first.across_vms
    assert 0 < after.link.bytes_per_s <= 1e13
    assert after.link.latency_s >= 0


def test_a_ring_tells_of_links_where_no_message_was_sent() -> None:
    before = known()
    alone = plan(2).with_each_pipeline(bounds=(0, plan(2).sections), stash_limits=(8,), replicas=2)
    told = [each.model_copy(update={"reductions": Carried(5, 10**8, 100.0)}) for each in as_predicted(before, alone)]
    after = refine(before, alone, told, is_whole=False).first.across_vms
    assert after.rings[0].bytes_per_s == pytest.approx(10**8 / 2 / (100.0 / 2 - after.rings[0].latency_s))
    assert after.link.bytes_per_s < before.first.across_vms.link.bytes_per_s / 100


def test_messages_within_a_vm_tell_nothing_of_cables_between_vms() -> None:
    near = NetworkCosts(link=Link(latency_s=0.00001, bytes_per_s=1e10), rings=FAST.rings)
    before = known(within_vm=near)
    hardware = before.first.hardware.model_copy(update={"gpus_per_vm": 2})
    before = known(within_vm=near, hardware=hardware)
    told = [
        each.model_copy(update={"messages": Carried(5, 10**6, 0.001), "round_s": 0.00002})
        for each in as_predicted(before, plan())
    ]
    after = refine(before, plan(), told, is_whole=False)
    assert after.first.across_vms == before.first.across_vms
    assert after.first.within_vm is not None
    assert after.first.within_vm.link.bytes_per_s == pytest.approx(1e9, rel=0.03)


def test_what_a_job_changes_in_its_costs_is_not_put_down_to_the_network() -> None:
    """Reductions in bf16 have half the bytes; the calibration is of no job."""
    slow = Ring(latency_s=0.0001, bytes_per_s=1e6)
    before = known(across_vms=NetworkCosts(link=Link(latency_s=0.0001, bytes_per_s=1e9), rings=(slow,)))
    told = as_predicted(before.each(Calibration.rounded), plan(2))
    assert told[0].step_s < 0.99 * as_predicted(before, plan(2))[0].step_s
    after = refine(before, plan(2), told, options=lambda known: known.each(Calibration.rounded))
    assert after.first.across_vms == before.first.across_vms
    assert refine(before, plan(2), told).first.across_vms != before.first.across_vms


@pytest.mark.parametrize("factor", [0.93, 1.1, 1.5, 3.0])
def test_no_run_goes_on_with_a_prediction_that_is_off(factor: float) -> None:
    """Refining puts the time of a step beyond its parts down to the network."""
    links = NetworkCosts(link=Link(latency_s=0.1, bytes_per_s=4e5), rings=(Ring(latency_s=0.1, bytes_per_s=1e7),))
    before = known(across_vms=links)
    for shape in (plan(), plan(2)):
        told = [
            each.model_copy(
                update={"step_s": each.step_s * factor, "waited_s": each.waited_s + each.step_s * (factor - 1)}
            )
            for each in as_predicted(before, shape)
        ]
        after = refine(before, shape, told)
        assert predicted(after, shape).step_s == pytest.approx(factor * predicted(before, shape).step_s, rel=0.012)
        assert after.first.kinds == refine(before, shape, as_predicted(before, shape)).first.kinds, (
            "compute is what it was"
        )
        again = refine(after, shape, told)
        assert predicted(again, shape).step_s == pytest.approx(factor * predicted(before, shape).step_s, rel=0.012)


def test_one_rank_alone_has_no_network_to_blame() -> None:
    before = known()
    one = plan().with_each_pipeline(bounds=(0, plan().sections), stash_limits=(8,))
    told = [each.model_copy(update={"step_s": 2 * each.step_s}) for each in as_predicted(before, one)]
    assert refine(before, one, told).first.across_vms == before.first.across_vms


def test_what_no_network_explains_changes_none() -> None:
    before = known(across_vms=FAST)
    told = [each.model_copy(update={"step_s": 2 * each.step_s}) for each in as_predicted(before, plan())]
    after = refine(before, plan(), told).first.across_vms
    assert after.link.bytes_per_s == pytest.approx(FAST.link.bytes_per_s)


def test_stages_on_devices_of_several_classes_tell_of_their_own() -> None:
    def calibration(factor: float) -> Calibration:
        known = calibrated(FACTS, across_vms=FAST)
        names = ("forward_s", "backward_s", "recompute_s", "input_s", "weight_s")
        kinds = {
            key: kind.model_copy(
                update={field: tuple(factor * each for each in getattr(kind, field)) for field in names}
            )
            for key, kind in known.kinds.items()
        }
        return known.model_copy(update={"kinds": kinds})

    over_both = plan().with_each_pipeline(stage_classes=("A", "B"))
    believed = Calibrations(classes={"A": calibration(1.0), "B": calibration(1.0)})
    true = Calibrations(classes={"A": calibration(1.3), "B": calibration(4.0)})
    told = as_predicted(true, over_both)
    found = believed
    for name, own in (("A", [0]), ("B", [1])):
        found = found.joined(refine(believed.only(name), over_both, told, own=own))
    assert predicted(found, over_both).step_s == pytest.approx(predicted(true, over_both).step_s, rel=0.01)
    for name in ("A", "B"):
        assert found.of(name).compute_s(1) == pytest.approx(true.of(name).compute_s(1), rel=0.05)
    assert found.of("B").across_vms == believed.of("B").across_vms


@pytest.mark.parametrize(("relayed", "bytes_per_s"), [((), 1.5e8), ((0,), 1e8), ((1,), 2e8)])
def test_plans_are_priced_with_the_line_through_the_machine_that_relays(
    relayed: tuple[int, ...], bytes_per_s: float
) -> None:
    """Of three stages, the first reaches the second by a line of half the speed."""
    before = known()
    three = plan().with_each_pipeline(bounds=(0, 2, 4, 6), stash_limits=(8, 8, 8))
    slow, fast, last = as_predicted(before, three)
    told = [
        slow.model_copy(update={"messages": Carried(5, 10**7, 0.1), "round_s": 1e-9}),
        fast.model_copy(update={"messages": Carried(5, 10**7, 0.05)}),
        last,
    ]
    after = refine(before, three, told, is_whole=False, relayed=relayed).first.across_vms
    assert after.link.bytes_per_s == pytest.approx(bytes_per_s, rel=0.15)
