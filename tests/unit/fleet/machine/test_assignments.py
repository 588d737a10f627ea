"""Assignments of a new generation tell members all that each needs, and nothing that grows with the fleet."""

from tests.unit.fleet.support import make_job
from varuna.core.messages import Transfer
from varuna.core.plan import Pipeline, Plan
from varuna.fleet.machine.forming import assignments
from varuna.fleet.state.run_events import GenerationRecord

SECTIONS = len(make_job().model.sections)


def plan_of(replicas: int) -> Plan:
    return Plan(
        micro_batch=1,
        global_batch=10000,
        pipelines=(Pipeline(replicas=replicas, bounds=(0, SECTIONS // 2, SECTIONS), stash_limits=(2, 2)),),
    )


def record(number: int, plan: Plan, members: tuple[str, ...], *, trained: bool) -> GenerationRecord:
    recovery_s = 1.0 if trained else None
    return GenerationRecord(
        generation=number, plan=plan, members=members, cause="c", first_step=number, recovery_seconds=recovery_s
    )


def test_each_rank_gets_its_own_transfers_and_a_message_does_not_grow_with_the_fleet() -> None:
    sizes = []
    for replicas in (4, 1000):
        plan = plan_of(replicas)
        names = tuple(f"n{number}-vm.0" for number in range(plan.workers))
        moves = [
            Transfer(section=s, source_rank=0, target_rank=rank) for rank in (2, 4) for s in plan.first.sections_of(0)
        ]
        told = dict(assignments([record(0, plan, names, trained=False)], moves, {}))
        assert [told[name].rank for name in names] == list(range(plan.workers))
        assert {each.members for each in told.values()} == {plan.workers}
        assert told[names[0]].transfers == tuple(moves)  # everybody's source
        assert {each.target_rank for each in told[names[4]].transfers} == {4}
        assert told[names[1]].transfers == ()
        sizes.append(len(told[names[1]].model_dump_json()))
    assert sizes[1] <= sizes[0] + 20, "only a few numbers have more digits"


def test_who_trained_is_told_which_replicas_of_its_stage_are_gone_since() -> None:
    plan = plan_of(3)  # ranks are replica by replica
    first = record(0, plan, ("a0", "a1", "b0", "b1", "c0", "c1"), trained=True)
    broken = record(1, plan_of(2), ("a0", "a1", "b0", "b1"), trained=False)  # c0 and c1 were lost, and then b1
    newest = record(2, plan_of(1), ("b0", "a1", "a0", "new"), trained=False)
    told = dict(assignments([first, broken, newest], (), {}))
    assert told["a0"].lost_replicas == told["b0"].lost_replicas == (plan.place_of(4).replica,)
    assert told["a1"].lost_replicas == (plan.place_of(3).replica, plan.place_of(5).replica)
    assert told["new"].lost_replicas == ()
