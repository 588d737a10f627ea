import pytest

from tests.unit.planner.models import GB, MB, model, request, section
from varuna.calibration.format import Calibrations
from varuna.calibration.nominal import nominal_calibration
from varuna.core.devices import WorkerGroup, equal_workers
from varuna.core.errors import NoPlanError, UsageError
from varuna.core.model import JobFacts, ModelFacts
from varuna.planner.choose import NO_FLAGS, Flags, best_plan, plan_run, planner
from varuna.planner.micro_batch import choose_micro_batch

_FLAGS = Flags(memory="--memory")
FACTS = model([section()] * 8)


def job(facts: ModelFacts = FACTS, micro_batch: int | None = None) -> JobFacts:
    return JobFacts(model=facts, global_batch=256, micro_batch=micro_batch, seed=0, steps=1)


def test_the_micro_batch_is_a_thirty_second_of_the_global_batch_unless_asked_for() -> None:
    assert [choose_micro_batch(m, None) for m in (1, 31, 64, 100, 8192)] == [1, 1, 2, 3, 256]
    assert choose_micro_batch(64, 5) == 5


@pytest.mark.parametrize("requested", [0, 65])
def test_a_micro_batch_outside_the_global_batch_is_refused(requested: int) -> None:
    with pytest.raises(UsageError, match=f"micro_batch={requested} was requested, but a step has 64 examples"):
        choose_micro_batch(64, requested)


def test_an_unfixed_micro_batch_is_halved_until_something_fits() -> None:
    assert plan_run(job(), workers=equal_workers(8)).micro_batch == 8
    assert plan_run(job(), workers=equal_workers(8), memory_bytes=770 * MB).micro_batch == 4


def test_a_micro_batch_that_the_user_fixed_stays() -> None:
    with pytest.raises(NoPlanError, match="pass a smaller micro_batch"):
        plan_run(job(micro_batch=8), workers=equal_workers(8), memory_bytes=770 * MB)


def test_the_micro_batch_of_the_run_is_kept_through_a_morph() -> None:
    assert plan_run(job(), workers=equal_workers(3), micro_batch=4, memory_bytes=100 * GB).micro_batch == 4


def test_memory_is_what_the_user_says_else_the_calibration_else_the_devices() -> None:
    asked, told = job(micro_batch=8), equal_workers(8, memory_bytes=100 * GB)
    unknown = plan_run(asked, workers=equal_workers(8), stages=4)
    found = plan_run(asked, workers=told, stages=4)
    assert not any(unknown.first.kept)
    assert any(found.first.kept)
    assert max(found.first.memory_bytes) <= 100 * GB
    measured = nominal_calibration(FACTS)
    measured = measured.model_copy(update={"hardware": measured.hardware.model_copy(update={"memory_bytes": 2 * GB})})
    assert (
        max(plan_run(asked, workers=told, stages=4, calibrations=Calibrations.of_one(measured)).first.memory_bytes)
        <= 2 * GB
    )
    assert max(plan_run(asked, workers=told, stages=4, memory_bytes=2 * GB).first.memory_bytes) <= 2 * GB
    assert max(found.first.memory_bytes) > 2 * GB


def refusal(
    memory_bytes: int | None = None,
    workers: int = 4,
    stages: int | None = None,
    micro_batch: int = 4,
    flags: Flags = _FLAGS,
) -> str:
    asked = request(FACTS, workers, 64, micro_batch=micro_batch, memory_bytes=memory_bytes, stages=stages)
    with pytest.raises(NoPlanError) as caught:
        best_plan(asked, flags)
    return str(caught.value)


def test_a_lack_of_memory_names_the_closest_stage_and_every_way_out() -> None:
    assert refusal(memory_bytes=GB) == (
        "no plan fits: stage 1 of P=4 needs 1.23 GiB but each worker has 954 MiB: 305 MiB too little. "
        "Add workers, raise --memory or pass a smaller micro_batch."
    )


def test_advice_names_only_what_the_user_can_set() -> None:
    """``inspect`` and ``replay`` have no flag for memory; torchrun has environment variables."""
    told = refusal(memory_bytes=GB, stages=2, micro_batch=1, flags=NO_FLAGS)
    assert told.endswith(". Raise or leave out --stages or use workers with more memory.")
    told = refusal(memory_bytes=GB, stages=2, micro_batch=1, flags=Flags("VARUNA_MEMORY", "VARUNA_STAGES"))
    assert told.endswith(". Raise or leave out VARUNA_STAGES or raise VARUNA_MEMORY.")
    with pytest.raises(NoPlanError, match=r"Raise --memory-per-worker\.$"):
        planner(memory_bytes=GB // 4, stages=None)(job(micro_batch=1), equal_workers(8), 1, None)


def test_advice_that_cannot_help_is_left_out() -> None:
    assert refusal(memory_bytes=GB // 4, workers=8, micro_batch=1).endswith(". Raise --memory.")
    assert refusal(memory_bytes=GB, stages=2, micro_batch=1).endswith(
        ". Raise or leave out --stages or raise --memory."
    )


def test_impossible_depths_are_named() -> None:
    assert refusal(stages=9, workers=16) == (
        "P=9 was requested, but the model has 8 sections; pass cut=... or lower --stages."
    )
    assert refusal(stages=5) == "P=5 was requested, but there are 4 workers; add workers or lower --stages."
    assert "Start a worker" in refusal(workers=0)


@pytest.mark.parametrize(
    ("slower", "stages", "shape"), [(6, 1, "1x2"), (12, 1, "1x2"), (16, 1, "1x1"), (6, 2, "2x2"), (12, 2, "2x1")]
)
def test_workers_that_would_idle_are_a_second_replica_if_nobody_else_keeps_copies_and_it_costs_little(
    slower: float, stages: int, shape: str
) -> None:
    """One replica takes 30.7 s; two take 21.1 s, 31.3 s and 38.1 s, because of their ring. Two stages keep copies."""
    calm = nominal_calibration(FACTS)
    [ring] = calm.across_vms.rings
    rings = (ring.model_copy(update={"bytes_per_s": ring.bytes_per_s / slower}),)
    known = calm.model_copy(update={"across_vms": calm.across_vms.model_copy(update={"rings": rings})})
    plan = plan_run(
        job(micro_batch=64),
        workers=equal_workers(2 * stages),
        stages=stages,
        calibrations=Calibrations.of_one(known),
        copies=True,
    )
    assert plan.shape == shape
    fastest = best_plan(
        request(FACTS, 2 * stages, 256, micro_batch=64, stages=stages).model_copy(
            update={"calibrations": Calibrations.of_one(known)}
        )
    )
    assert (fastest.replicas == 2) == (slower == 6)
    assert (
        plan_run(job(micro_batch=64), workers=equal_workers(1), calibrations=Calibrations.of_one(known)).replicas == 1
    )


def test_where_all_are_of_one_class_the_plan_is_the_same_and_says_so() -> None:
    for workers, memory_bytes in ((8, None), (3, None), (8, 3 * GB)):
        for losses in (0.0, 2.0):
            asked = job(micro_batch=8).model_copy(update={"losses_per_hour": losses})
            groups = (WorkerGroup.of_class(name, workers, memory_bytes=memory_bytes) for name in ("", "V100"))
            named = Calibrations.of_one(nominal_calibration(FACTS), "V100")
            found = [plan_run(asked, workers=(group,), calibrations=named, copies=True) for group in groups]
            assert found[1].with_each_pipeline(device_class="") == found[0]
            assert found[1].first.device_class == "V100"


def test_a_class_that_ran_out_of_memory_is_planned_for_less_whoever_says_how_much_it_has() -> None:
    parts = {"A": 0.5, "B": 1.0}
    short = tuple(WorkerGroup.of_class(name, 4, memory_bytes=4 * GB, memory_part=part) for name, part in parts.items())
    asked = request(FACTS, short, 256, micro_batch=8)
    limits = [asked.of_class(name).limit_bytes for name in parts]
    assert limits == [2 * GB, 4 * GB]
    told = asked.model_copy(update={"memory_bytes": 3 * GB})  # --memory-per-worker
    assert [told.of_class(name).limit_bytes for name in parts] == [3 * GB // 2, 3 * GB]


@pytest.mark.nightly
def test_each_class_has_its_own_memory() -> None:
    sizes = (
        WorkerGroup.of_class("A", 2, memory_bytes=100 * GB),
        WorkerGroup.of_class("B", 8, memory_bytes=2 * GB),
    )
    for known in (None, Calibrations.of_one(nominal_calibration(FACTS))):
        plan = plan_run(job(micro_batch=8), workers=sizes, calibrations=known)
        limits = {size.name: size.memory_bytes or 0 for size in sizes}
        assert set(plan.classes) == {"A", "B"}
        assert all(max(cut.memory_bytes) <= limits[cut.device_class] for _, cut in plan.kinds)
        assert any(max(cut.memory_bytes) > 2 * GB for _, cut in plan.kinds)


@pytest.mark.parametrize(("fast", "slow"), [(2, 3), (2, 4), (5, 3)])
def test_classes_of_which_nothing_is_known_are_equal_and_apart_however_long_their_sums_take(
    fast: int, slow: int
) -> None:
    """A run learns what a class can do from pipelines of that class."""
    workers = tuple(WorkerGroup.of_class(name, count) for name, count in (("A", fast), ("B", slow)))
    quick = model([section(parameter_bytes=10 * MB, forward_s=1e-4)] * 4)
    asked = job(quick, micro_batch=1).model_copy(update={"global_batch": 8 * (fast + slow)})
    plan = plan_run(asked, workers=workers, stages=1)
    assert plan.classes == {"A": fast, "B": slow}
    assert set(plan.shares) == {8}


def test_workers_that_stay_get_larger_micro_batches_where_more_sums_cross_during_the_last_backward() -> None:
    facts = model([section(boundary_bytes=500 * MB, parameter_bytes=20 * MB)] * 8)
    nominal = nominal_calibration(facts)
    sizes = (1, 2, 4)
    times = ("forward_s", "backward_s", "input_s", "weight_s")
    kinds = {
        name: kind.model_copy(
            update={"micro_batches": sizes}
            | {field: tuple(getattr(kind, field)[0] * m for m in sizes) for field in times if getattr(kind, field)}
        )
        for name, kind in nominal.kinds.items()
    }
    link = nominal.across_vms.link.model_copy(update={"latency_s": 0.0002})  # measured
    known = nominal.model_copy(
        update={"kinds": kinds, "across_vms": nominal.across_vms.model_copy(update={"link": link})}
    )
    asked = job(facts).model_copy(update={"global_batch": 32})
    staying, lossy = (
        plan_run(asked, workers=equal_workers(2), calibrations=Calibrations.of_one(known), copies=copies)
        for copies in (False, True)
    )
    assert staying.shape == lossy.shape == "1x2"
    assert lossy.micro_batch == 1
    assert staying.micro_batch > 1
    assert staying.step_s < lossy.step_s
    assert (
        plan_run(asked, workers=equal_workers(2), calibrations=Calibrations.of_one(known), micro_batch=1).micro_batch
        == 1
    )
