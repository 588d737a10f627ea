"""Whether a run keeps copies of what stages have: where a loss would cost steps or sums, and copies cost little."""

from typing import Any

from tests.unit.planner.models import GB, MB, model, section
from varuna.calibration.format import Calibrations, Link, NetworkCosts, Ring
from varuna.calibration.nominal import nominal_calibration
from varuna.core.devices import equal_workers
from varuna.core.model import JobFacts
from varuna.core.plan import Copies, Plan
from varuna.planner.choose import plan_run, run_request
from varuna.planner.copies import with_copies
from varuna.planner.sweep import rank_depths

STATE_BYTES = 300 * MB  # of a section: its parameters, and twice as much of the optimizer
SUM_BYTES = 100 * MB


def made(
    stages: int = 4, workers: int = 4, *, copies: bool = True, memory_bytes: int | None = None, **job: Any
) -> Plan:
    facts = JobFacts(
        **{"model": model([section()] * 4), "global_batch": 64, "micro_batch": 1, "seed": 0, "steps": 1, **job}
    )
    return plan_run(facts, workers=equal_workers(workers), stages=stages, memory_bytes=memory_bytes, copies=copies)


def test_each_stage_has_a_copy_where_it_has_one_holder() -> None:
    plan = made()
    assert (plan.shape, plan.copies) == ("4x1", Copies.STATE)
    without = made(copies=False)
    assert without.copies is Copies.NONE
    assert [more - less for more, less in zip(plan.first.memory_bytes, without.first.memory_bytes, strict=True)] == [
        4 * STATE_BYTES  # its own and another's, and those before
    ] * 4
    assert made(stages=1, workers=1).copies is Copies.NONE, "nobody else is there"


def test_with_replicas_sums_alone_have_a_copy() -> None:
    """On a worker of any stage: a second replica has each."""
    long: dict[str, Any] = {"stages": 2, "global_batch": 64_000}
    plan, without = made(**long), made(**long, copies=False)
    assert (plan.shape, plan.copies, without.copies) == ("2x2", Copies.SUMS, Copies.NONE)
    more = [more - less for more, less in zip(plan.first.memory_bytes, without.first.memory_bytes, strict=True)]
    assert more == [2 * SUM_BYTES + 2 * SUM_BYTES] * 2
    assert made(**long, memory_bytes=max(without.first.memory_bytes)).copies is Copies.MEMORY


def test_pipelines_of_other_depths_promise_the_memory_of_copies_too() -> None:
    facts = JobFacts(model=model([section()] * 4), global_batch=64_000, micro_batch=1, seed=0, steps=1)
    request = run_request(facts, workers=equal_workers(3))
    [plan] = rank_depths(request, (2, 1)).plans
    kept = with_copies(plan, request, measured=False)
    assert (kept.shape, kept.copies) == ("2x1+1x1", Copies.SUMS)
    more = [
        after - before
        for (_, cut), (_, old) in zip(kept.kinds, plan.kinds, strict=True)
        for after, before in zip(cut.memory_bytes, old.memory_bytes, strict=True)
    ]
    assert more == [4 * SUM_BYTES + 2 * SUM_BYTES] * 3


def test_an_uneven_plan_promises_memory_for_the_largest_other_stage() -> None:
    plan, without = made(stages=3, workers=3), made(stages=3, workers=3, copies=False)
    own = [len(plan.first.sections_of(stage)) for stage in range(3)]
    assert sorted(own) == [1, 1, 2]
    more = [more - less for more, less in zip(plan.first.memory_bytes, without.first.memory_bytes, strict=True)]
    assert more == [2 * (each + (1 if each == 2 else 2)) * STATE_BYTES for each in own]


def test_in_long_steps_sums_take_memory_too() -> None:
    plan, without = made(global_batch=64_000), made(global_batch=64_000, copies=False)
    more = [more - less for more, less in zip(plan.first.memory_bytes, without.first.memory_bytes, strict=True)]
    assert more == [4 * STATE_BYTES + 3 * SUM_BYTES] * 4  # that leave, are kept, and arrive


def test_there_is_no_copy_where_it_does_not_fit() -> None:
    needed = max(made(copies=False).first.memory_bytes)
    assert made(memory_bytes=needed).copies is Copies.MEMORY
    assert made(memory_bytes=needed + 2 * GB).copies is Copies.STATE


def test_copies_of_what_gpus_have_take_memory_of_hosts() -> None:
    plan, without = made(memory_apart=True), made(memory_apart=True, copies=False)
    assert plan.copies is Copies.STATE
    assert plan.first.memory_bytes == without.first.memory_bytes
    before = without.first.host_bytes or (0,) * 4
    assert [more - less for more, less in zip(plan.first.host_bytes, before, strict=True)] == [4 * STATE_BYTES] * 4
    assert made(memory_apart=True, memory_bytes=max(without.first.memory_bytes)).copies is Copies.STATE


def over(bytes_per_s: float, global_batch: int = 64, *, memory_bytes: int | None = None) -> Plan:
    """The plan of a measured job on a network of that speed."""
    facts = model([section()] * 4)
    job = JobFacts(model=facts, global_batch=global_batch, micro_batch=1, seed=0, steps=1)
    network = NetworkCosts(link=Link(latency_s=0, bytes_per_s=bytes_per_s), rings=(Ring(latency_s=0, bytes_per_s=1e9),))
    known = nominal_calibration(facts).model_copy(update={"across_vms": network})
    return plan_run(
        job,
        workers=equal_workers(4),
        stages=4,
        memory_bytes=memory_bytes,
        calibrations=Calibrations.of_one(known),
        copies=True,
    )


def test_there_is_a_copy_every_few_steps_unless_a_link_is_too_slow_for_it() -> None:
    assert over(1e12).copies is Copies.STATE
    assert over(100 * MB).copies is Copies.STATE
    assert over(4 * MB).copies is Copies.TIME, "300 MB take longer than a minute"
    assert over(4 * MB, 64_000).copies is Copies.STATE, "but not than a step"


def test_sums_have_no_copy_where_a_measured_step_is_over_before_it_could_be_ready() -> None:
    facts = model([section()] * 4)
    network = NetworkCosts(link=Link(latency_s=0, bytes_per_s=1e10), rings=(Ring(latency_s=0, bytes_per_s=1e9),))
    measured = nominal_calibration(facts).model_copy(update={"across_vms": network})

    def over(global_batch: int) -> Plan:
        job = JobFacts(model=facts, global_batch=global_batch, micro_batch=1, seed=0, steps=1)
        return plan_run(
            job, workers=equal_workers(4), stages=2, calibrations=Calibrations.of_one(measured), copies=True
        )

    short, long = over(64), over(16384)
    assert short.step_s < 5 < 60 < long.step_s
    assert (short.copies, long.copies) == (Copies.TIME, Copies.SUMS)
