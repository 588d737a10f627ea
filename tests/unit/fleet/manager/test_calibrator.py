from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.fleet.support import by_class, make_job, make_plan, with_history
from varuna.calibration.cache import cache_file, remember, remembered
from varuna.calibration.file import RUN_FILE, read_calibration
from varuna.calibration.format import Calibrations
from varuna.calibration.nominal import nominal_calibration
from varuna.core.devices import DeviceFacts, WorkerGroup, WorkerGroups, class_in, equal_workers, size_of, worker_bytes
from varuna.core.errors import UsageError
from varuna.core.messages import Beat
from varuna.core.model import JobFacts
from varuna.core.plan import Pipeline, Plan
from varuna.core.times import Carried, RankTimes, Typical
from varuna.fleet.manager.calibrator import LASTS_S, Calibrator, Told
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.inputs import MorphRequested
from varuna.fleet.state.machines import Machines
from varuna.fleet.state.persistent import PersistentMap
from varuna.fleet.state.recorded import RecordedSteps
from varuna.fleet.state.run_events import GenerationRecord, GenerationTimed, Notice
from varuna.fleet.state.script import Script
from varuna.fleet.state.worker import Worker, WorkerStatus
from varuna.fleet.state.workers import Workers

JOB = make_job(steps=100_000, micro_batch=2)
TWO = equal_workers(2)
PLAN = make_plan(JOB, 2, 2).model_copy(update={"step_s": 1e6})  # never better than what runs


def nominal(job: JobFacts = JOB, name: str = "", **changes: object) -> Calibrations:
    return Calibrations.of_one(nominal_calibration(job.model).model_copy(update=changes), name)


def fleet() -> Fleet:
    """Two workers in the middle of generation 0."""
    record = GenerationRecord(generation=0, plan=PLAN, members=("w0", "w1"), cause="start", first_step=0)
    workers = Workers(Worker(name=name, replacement=False, standing=WorkerStatus.JOINED) for name in ("w0", "w1"))
    made = Fleet.empty(FleetConfig(workers=2), 0.0)
    recorded = RecordedSteps(step=10, wall_s=100.0)
    return replace(with_history(made, (record,)), script=Script(job=JOB), workers=workers, recorded=recorded)


def times(steps: int = 5, seconds: float = 2.5) -> RankTimes:
    """As the job's operation counts say: sections take 1 s per example."""
    actions = {"F": Typical(8 * steps, seconds), "B": Typical(8 * steps, 2 * seconds)}
    return RankTimes(steps=steps, step_s=100.0, waited_s=1.0, reduced_s=0.0, actions=actions)


def calibrator(folder: Path, plans: list[Calibrations | None] | None = None, best: Plan = PLAN) -> Calibrator:
    def plan(job: JobFacts, workers: WorkerGroups, micro_batch: int | None, known: Calibrations | None) -> Plan:
        if plans is not None:
            plans.append(known)
        return best

    made = Calibrator(plan, run_dir=folder, cache=cache_file)
    made.plan(JOB, TWO, 2)
    return made


def beat(told: RankTimes | None, generation: int = 0) -> Beat:
    return Beat(generation=generation, step=10, activity="", times=told)


def test_once_every_rank_has_told_enough_the_run_refines_what_it_plans_from(tmp_path: Path) -> None:
    plans: list[Calibrations | None] = []
    heard = calibrator(tmp_path, plans)
    assert heard.learn_from_beat(fleet(), "w0", beat(times()), 0.0) == [], "rank 1 has not told"
    assert heard.learn_from_beat(fleet(), "w1", beat(times(2)), 0.0) == [], "too few steps"
    [told] = heard.learn_from_beat(fleet(), "w1", beat(times(3)), 0.0)
    assert isinstance(told, GenerationTimed)
    assert told.is_nominal, "nothing was measured when it was predicted"
    assert [stage.steps for stage in told.stages] == [5, 5]
    assert plans[0] is None
    heard.plan(JOB, TWO, 2)
    assert plans[-1] == heard.calibrations
    assert read_calibration(tmp_path / RUN_FILE) == heard.calibrations
    assert heard.learn_from_beat(fleet(), "w1", beat(times(1)), 0.0) == [], (
        "the next look comes when there is twice as much"
    )
    told, *_ = heard.learn_from_beat(fleet(), "w1", beat(times(10)), 0.0) or heard.learn_from_beat(
        fleet(), "w0", beat(times(10)), 0.0
    )
    assert isinstance(told, GenerationTimed)
    assert not told.is_nominal


def test_what_is_no_news_is_passed_over(tmp_path: Path) -> None:
    heard = calibrator(tmp_path)
    for worker, message in (("w0", beat(None)), ("w0", beat(times(), generation=7)), ("w9", beat(times()))):
        assert heard.learn_from_beat(fleet(), worker, message, 0.0) == []
    assert heard.calibrations is None


def test_a_later_run_of_the_job_plans_from_what_the_first_has_seen(tmp_path: Path) -> None:
    first = calibrator(tmp_path)
    for worker in ("w0", "w1"):
        first.learn_from_beat(fleet(), worker, beat(times()), 0.0)
    plans: list[Calibrations | None] = []
    calibrator(tmp_path, plans)
    assert plans == [first.calibrations]
    other = JOB.model_copy(update={"model": JOB.model.model_copy(update={"digest": "other"})})
    assert cache_file(other) != cache_file(JOB)
    assert cache_file(JOB.model_copy(update={"threads": 7})) != cache_file(JOB)


def test_a_damaged_or_foreign_file_in_the_cache_is_as_good_as_none(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.json"
    assert remembered(JOB, path) is None
    remember(nominal(), path)
    assert remembered(JOB, path) == nominal()
    assert remembered(make_job(sections=3), path) is None
    path.write_text("{")
    assert remembered(JOB, path) is None


def test_what_a_worker_measured_counts_where_nothing_better_is_known(tmp_path: Path) -> None:
    job = JOB.model_copy(update={"micro_batch": None})
    measured = nominal(sized_for=JOB.global_batch, created="today")
    plans: list[Calibrations | None] = []

    def first_plan(*offers: str, given: Calibrations | None = None) -> Calibrations | None:
        heard = Calibrator(
            lambda job, workers, m, known: plans.append(known) or PLAN,  # type: ignore[func-returns-value]
            run_dir=tmp_path,
            cache=cache_file,
            given=given,
        )
        for offer in offers:
            heard.add_offered(offer)
        heard.plan(job, TWO, None)
        heard.add_offered(nominal().model_dump_json())
        heard.plan(job, TWO, 2)
        assert plans[-1] == plans[-2], "later offers change nothing"
        return plans[-1]

    assert first_plan() is None
    assert first_plan("of another version", measured.model_dump_json(), "{}") == measured
    assert first_plan(nominal(make_job(sections=3)).model_dump_json()) is None, "of another model"
    remember(nominal(), cache_file(job))
    assert first_plan(measured.model_dump_json()) == measured, "the cache knows one size only"
    remember(measured, cache_file(job))
    assert first_plan(nominal().model_dump_json()) == measured
    given = nominal(created="by hand")
    assert first_plan(measured.model_dump_json(), given=given) == given
    with pytest.raises(UsageError, match=r"Calibrate again: varuna calibrate SCRIPT"):
        first_plan(given=nominal(make_job(sections=3)))


def test_micro_batches_are_small_enough_for_the_workers_that_may_come(tmp_path: Path) -> None:
    asked: list[tuple[int, int | None]] = []

    def plan(job: JobFacts, workers: WorkerGroups, micro_batch: int | None, known: Calibrations | None) -> Plan:
        asked.append((size_of(workers), micro_batch))
        return PLAN

    grows = Calibrator(plan, run_dir=tmp_path, cache=None, most_workers=8)
    grows.plan(JOB.model_copy(update={"micro_batch": None}), TWO, None)
    grows.plan(JOB.model_copy(update={"micro_batch": None}), equal_workers(4), 1)
    assert asked == [(8, None), (2, PLAN.micro_batch), (4, 1)]


def test_the_sizes_that_were_tried_are_told_once(tmp_path: Path) -> None:
    job = JOB.model_copy(update={"micro_batch": None})
    known = nominal().first
    kinds = {
        name: kind.model_copy(
            update={
                "micro_batches": (1, 2),
                **dict.fromkeys(("forward_s", "backward_s", "input_s", "weight_s"), (1.0, 1.0)),
            }
        )
        for name, kind in known.kinds.items()
    }
    remember(nominal(kinds=kinds, action_s=0.0), cache_file(job))
    heard = Calibrator(lambda *_: PLAN, run_dir=tmp_path, cache=cache_file)
    heard.plan(job, TWO, None)
    told = [event for event in heard.begin_generation(job, fleet().record) if isinstance(event, Notice)]
    assert [event.text for event in told] == ["micro-batches of 2: 0 examples/s on one worker; 1: 0"]
    assert not [event for event in heard.begin_generation(job, fleet().record) if isinstance(event, Notice)]


def test_a_gap_is_reported_once(tmp_path: Path) -> None:
    remember(nominal(), cache_file(JOB))
    heard = calibrator(tmp_path)
    notices: list[str] = []
    for steps in (5, 10, 40):
        for worker in ("w0", "w1"):
            told = heard.learn_from_beat(fleet(), worker, beat(times(steps, seconds=steps * 2.0)), 0.0)
            notices += [event.text for event in told if isinstance(event, Notice)]
    assert len(notices) == 1
    assert "were predicted" in notices[0]


def test_a_plan_that_measured_times_favour_is_asked_for_if_it_pays(tmp_path: Path) -> None:
    better = make_plan(JOB, 2, 1).model_copy(update={"step_s": 1e-3})
    heard = calibrator(tmp_path, best=better)
    heard.learn_from_beat(fleet(), "w0", beat(times()), 0.0)
    told = heard.learn_from_beat(replace(fleet(), recorded=RecordedSteps(step=99_999)), "w1", beat(times()), 0.0)
    assert not any(isinstance(each, MorphRequested) for each in told), "the last step is done"
    again = calibrator(tmp_path, best=better)
    again.learn_from_beat(fleet(), "w0", beat(times()), 0.0)
    told = again.learn_from_beat(fleet(), "w1", beat(times()), 0.0)
    assert MorphRequested("measured times favour another plan") in told
    notices = [event.text for event in told if isinstance(event, Notice)]
    assert notices[-1].startswith(f"measured times favour {PLAN.shape} (m = 1) over {PLAN.shape} (m = 2): ")


REPLICATED = make_plan(JOB, 1, 2).with_each_pipeline(replicas=2, stash_limits=(4,))
ALONE = make_plan(JOB, 1, 2)


def replicated(plan: Plan = REPLICATED) -> Fleet:
    made = fleet()
    return with_history(made, (made.record.model_copy(update={"plan": plan}),))


def asked(told: list[Told]) -> list[str]:
    return [each.why for each in told if isinstance(each, MorphRequested)]


def test_a_plan_without_second_holders_must_have_been_better_for_a_while(tmp_path: Path) -> None:
    """A network that is slow for a minute is no reason to give the second replica up."""
    heard = calibrator(tmp_path, best=ALONE.model_copy(update={"step_s": 1e-3}))
    steps, found = 5, {}
    for now_s in (0.0, 60.0, 300.0, LASTS_S - 1, LASTS_S + 1):
        told = [
            each
            for worker in ("w0", "w1")
            for each in heard.learn_from_beat(replicated(), worker, beat(times(steps)), now_s)
        ]
        steps, found[now_s] = 2 * steps, asked(told)
    assert list(found.values()) == [[], [], [], [], ["measured times favour another plan"]]


def test_a_plan_that_is_not_better_in_between_begins_to_count_anew(tmp_path: Path) -> None:
    better, best = ALONE.model_copy(update={"step_s": 1e-3}), [ALONE]
    heard = Calibrator(lambda *_: best[-1], run_dir=tmp_path, cache=None)
    heard.plan(JOB, TWO, 2)
    steps = 5
    for now_s, plan in ((0.0, better), (300.0, REPLICATED), (LASTS_S + 1, better), (LASTS_S + 300, better)):
        best.append(plan)
        for worker in ("w0", "w1"):
            assert not asked(heard.learn_from_beat(replicated(), worker, beat(times(steps)), now_s))
        steps *= 2


@pytest.mark.parametrize("device_class", ["", "T4"])
def test_a_network_that_was_slow_is_tried_again_ever_more_rarely(tmp_path: Path, device_class: str) -> None:
    """Nothing crosses it in the plan that runs, so nothing measures that it is well again."""

    def on(plan: Plan) -> Plan:
        return plan.with_each_pipeline(device_class=device_class) if device_class else plan

    def best(job: JobFacts, workers: WorkerGroups, micro_batch: int | None, known: Calibrations | None) -> Plan:
        is_well = known is not None and known.first.across_vms.link.bytes_per_s > 1e6
        return on(REPLICATED.model_copy(update={"step_s": 1e-3}) if is_well else ALONE)

    heard = Calibrator(best, run_dir=tmp_path, cache=None)
    heard.plan(JOB, TWO, 2)
    for worker in ("w0", "w1"):
        heard.learn_from_beat(replicated(on(REPLICATED)), worker, beat(times()), 0.0)
    assert heard.calibrations is not None
    costs = heard.calibrations.first.across_vms
    slow = costs.model_copy(update={"link": costs.link.model_copy(update={"bytes_per_s": 1e5})})
    began_s, tried_s = 100.0, []
    for generation in range(1, 4):
        heard.calibrations = heard.calibrations.each(
            lambda known: known.model_copy(update={"across_vms": slow})
        )  # as it was then
        record = GenerationRecord(
            generation=generation, plan=on(ALONE), members=("w0", "w1"), cause="slow", first_step=0
        )
        alone = with_history(fleet(), (*replicated(on(REPLICATED)).history, *[record] * generation))
        for more_s in range(0, 5000, 100):
            told = heard.learn_from_beat(alone, "w0", beat(times(1), generation), began_s + more_s)
            if asked(told) == ["a network that was slow is tried again"]:
                tried_s.append(more_s)
                break
            assert not asked(told)
            assert heard.calibrations.first.across_vms == slow
        assert heard.calibrations.first.across_vms.link.bytes_per_s > 1e6
        began_s += 10_000
    assert tried_s == [600, 1200, 2400]


def test_a_newer_prediction_of_the_same_work_asks_for_no_morph(tmp_path: Path) -> None:
    heard = calibrator(tmp_path, best=PLAN.with_each_pipeline(memory_bytes=(1, 1)).model_copy(update={"step_s": 1e-3}))
    for worker in ("w0", "w1"):
        told = heard.learn_from_beat(fleet(), worker, beat(times()), 0.0)
    assert not any(isinstance(each, MorphRequested) for each in told)


def test_a_short_run_leaves_what_it_has(tmp_path: Path) -> None:
    heard = calibrator(tmp_path)
    heard.finish_run(PLAN)
    assert not (tmp_path / RUN_FILE).exists()
    for worker in ("w0", "w1"):
        heard.learn_from_beat(fleet(), worker, beat(times(2)), 0.0)
    heard.finish_run(PLAN)
    assert read_calibration(tmp_path / RUN_FILE).first.notes[-1].startswith("refined by a run")
    assert heard.predicted_s(PLAN) == PLAN.step_s, "too little to plan from"


def test_compute_is_compared_with_the_calibration_once_there_is_one(tmp_path: Path) -> None:
    heard = calibrator(tmp_path)
    assert heard.compute_s(PLAN) is None
    for worker in ("w0", "w1"):
        heard.learn_from_beat(fleet(), worker, beat(times()), 0.0)
    found = heard.compute_s(PLAN)
    assert found is not None
    assert found[1] == pytest.approx(2.5 + 5.0, rel=0.01), "F and B; the last stage recomputes nothing"


def test_a_better_plan_is_looked_for_in_the_memory_of_the_workers_devices(tmp_path: Path) -> None:
    asked: list[int | None] = []

    def plan(job: JobFacts, workers: WorkerGroups, micro_batch: int | None, known: Calibrations | None) -> Plan:
        asked.extend(group.memory_bytes for group in workers)
        return PLAN

    gpu = DeviceFacts(name="gpu", memory_bytes=2**36)
    known = fleet()
    known = replace(known, workers=Workers(replace(worker, device=gpu) for worker in known.workers.values()))
    heard = Calibrator(plan, run_dir=tmp_path, cache=None)
    heard.plan(JOB, TWO, 2)
    for name in ("w0", "w1"):
        heard.learn_from_beat(known, name, beat(times()), 0.0)
    assert asked == [None, worker_bytes([gpu, gpu])]


def test_what_a_spare_tells_keeps_nobody_from_learning(tmp_path: Path) -> None:
    made, heard = fleet(), calibrator(tmp_path)
    record = made.record.model_copy(update={"members": ("w0", "w1", "w2")})
    spare = Worker(name="w2", replacement=False, standing=WorkerStatus.JOINED)
    made = replace(with_history(made, (record,)), workers=Workers((*made.workers.values(), spare)))
    assert made.rank_of("w2") == 2
    assert heard.learn_from_beat(made, "w2", beat(times()), 0.0) == []
    assert heard.learn_from_beat(made, "w0", beat(times()), 0.0) == []
    [told] = heard.learn_from_beat(made, "w1", beat(times()), 0.0)
    assert isinstance(told, GenerationTimed)


def test_each_class_of_devices_is_calibrated_by_its_own_pipelines(tmp_path: Path) -> None:
    plans: list[Calibrations | None] = []
    workers = (WorkerGroup.of_class("a", 1), WorkerGroup.of_class("b", 1))
    plan = by_class(JOB, workers, 2).model_copy(update={"step_s": 1e6})

    def make(job: JobFacts, workers: WorkerGroups, micro_batch: int | None, known: Calibrations | None) -> Plan:
        plans.append(known)
        return plan

    heard = Calibrator(make, run_dir=tmp_path, cache=cache_file)
    for name in ("b", "c"):
        heard.add_offered(nominal(name=name, created="today").model_dump_json())
    heard.plan(JOB, workers, 2)
    assert plans[-1] is not None
    assert plans[-1].names == ("b",), "class a was not measured, and no worker is of class c"
    both = fleet()
    record = both.record.model_copy(update={"plan": plan})
    known = [replace(each, device_class=name) for each, name in zip(both.workers.values(), "ab", strict=True)]
    both = replace(with_history(both, (record,)), workers=Workers(known))
    told = [
        each for w, s in (("w0", 5.0), ("w1", 20.0)) for each in heard.learn_from_beat(both, w, beat(times(9, s)), 0.0)
    ]
    assert any(isinstance(each, GenerationTimed) for each in told)
    heard.plan(JOB, workers, 2)
    learned = plans[-1]
    assert learned is not None
    assert set(learned.classes) == {"a", "b"}
    assert learned.of("b").compute_s(1) == pytest.approx(4 * learned.of("a").compute_s(1), rel=0.1)
    assert read_calibration(tmp_path / RUN_FILE) == learned
    expected = heard.compute_s(plan)
    assert expected is not None
    assert expected[1] == pytest.approx(4 * expected[0], rel=0.1)
    again = Calibrator(make, run_dir=tmp_path / "later", cache=cache_file)
    again.plan(JOB, workers, 2)
    assert plans[-1] is not None
    assert plans[-1].of("b").compute_s(1) == learned.of("b").compute_s(1)


def test_what_sums_take_from_region_to_region_is_learnt_apart(tmp_path: Path) -> None:
    """A device is known in all regions, and its network within one stays as it was."""
    east, west = (class_in("a", region) for region in ("east", "west"))
    workers = (WorkerGroup.of_class(east, 1), WorkerGroup.of_class(west, 1))
    plan = by_class(JOB, workers, 2).model_copy(update={"step_s": 1e6})
    heard = Calibrator(lambda *_: plan, run_dir=tmp_path, cache=None)
    offered = nominal(name="a")
    heard.add_offered(offered.model_dump_json())
    heard.plan(JOB, workers, 2)
    assert heard.calibrations is not None
    assert heard.calibrations.names == ("a",)
    both = fleet()
    known = [replace(each, device_class="a", node=name) for each, name in zip(both.workers.values(), "ew", strict=True)]
    record = both.record.model_copy(update={"plan": plan})
    both = replace(
        with_history(both, (record,)),
        machines=Machines(zones=PersistentMap({"e": "east/1", "w": "west/1"})),
        workers=Workers(known),
    )
    slow = times(9, 5.0).model_copy(update={"reductions": Carried(9, 1e6, 4.0), "round_s": 0.5})
    for worker in ("w0", "w1"):
        heard.learn_from_beat(both, worker, beat(slow), 0.0)
    learned = heard.calibrations
    assert {east, west} <= set(learned.classes)
    assert learned.across_regions is not None
    assert learned.across_regions.rings[0].bytes_per_s < 1e6
    assert learned.across_regions.link.bytes_per_s < 1e6, "it has the same cables"
    assert learned.of(east).across_vms == offered.first.across_vms, "of that nothing was seen"
    assert read_calibration(tmp_path / RUN_FILE) == learned


@pytest.mark.parametrize(("relayed", "bytes_per_s"), [(3, 1e8), (1, 1.5e8)])
def test_a_pipeline_is_priced_with_its_own_line_that_is_relayed(
    tmp_path: Path, relayed: int, bytes_per_s: float
) -> None:
    """Rank 2 is the first one of class b: its next stage is rank 3, and rank 1 is of another pipeline."""
    groups = (WorkerGroup.of_class("a", 2), WorkerGroup.of_class("b", 3))
    deep = Pipeline(replicas=1, bounds=(0, 1, 2, 4), stash_limits=(2, 2, 2), device_class="b", pace=0.5)
    plan = by_class(JOB, groups, 2)
    plan = plan.model_copy(update={"pipelines": (plan.first, deep), "step_s": 1e6})
    heard = Calibrator(lambda *_: plan, run_dir=tmp_path, cache=None)
    heard.plan(JOB, groups, 2)
    names = [f"w{rank}" for rank in range(plan.workers)]
    record = GenerationRecord(generation=0, plan=plan, members=tuple(names), cause="start", first_step=0)
    workers = Workers(
        Worker(name=name, replacement=False, standing=WorkerStatus.JOINED, device_class=plan.class_of(rank))
        for rank, name in enumerate(names)
    )
    five = replace(with_history(fleet(), (record,)), workers=workers)
    for rank, name in enumerate(names):
        seconds = {2: 0.1, 3: 0.05}.get(rank)
        sent = {} if seconds is None else {"messages": Carried(9, 10**7, seconds), "round_s": 1e-9}
        through = {"relayed": (relayed,)} if rank == 2 else {}
        heard.learn_from_beat(five, name, beat(times(9).model_copy(update=sent | through)), 0.0)
    assert heard.calibrations is not None
    assert heard.calibrations.of("b").across_vms.link.bytes_per_s == pytest.approx(bytes_per_s, rel=0.15)


def test_operation_counts_may_be_off_by_any_factor(tmp_path: Path) -> None:
    """Both classes are told apart after the first look, however long their actions take against the nominal ones."""
    workers = (WorkerGroup.of_class("a", 1), WorkerGroup.of_class("b", 1))
    plan = by_class(JOB, workers, 2).model_copy(update={"step_s": 1e6})
    heard = Calibrator(lambda *_: plan, run_dir=tmp_path, cache=None)
    heard.plan(JOB, workers, 2)
    both = fleet()
    record = both.record.model_copy(update={"plan": plan})
    known = [replace(each, device_class=name) for each, name in zip(both.workers.values(), "ab", strict=True)]
    both = replace(with_history(both, (record,)), workers=Workers(known))
    for worker, seconds in (("w0", 5e4), ("w1", 2e5)):
        heard.learn_from_beat(both, worker, beat(times(9, seconds)), 0.0)
    assert heard.calibrations is not None
    assert heard.calibrations.of("b").compute_s(1) == pytest.approx(
        4 * heard.calibrations.of("a").compute_s(1), rel=0.1
    )


def test_a_calibration_of_the_user_is_for_all_classes_that_it_does_not_name(tmp_path: Path) -> None:
    plans: list[Calibrations | None] = []
    workers = (WorkerGroup.of_class("a", 1), WorkerGroup.of_class("b", 1))
    given = nominal(created="by hand")

    def make(job: JobFacts, workers: WorkerGroups, micro_batch: int | None, known: Calibrations | None) -> Plan:
        plans.append(known)
        return PLAN

    def first(given: Calibrations) -> Calibrations | None:
        heard = Calibrator(make, run_dir=tmp_path, cache=None, given=given)
        heard.add_offered(nominal(name="b", created="measured").model_dump_json())
        heard.plan(JOB, workers, 2)
        return plans[-1]

    assert first(given) == given
    found = first(nominal(name="a", created="by hand"))
    assert found is not None
    assert found.of("a").created == "by hand"
    assert found.of("b").created == "measured"


def test_figures_for_any_class_make_room_for_what_was_measured(tmp_path: Path) -> None:
    given = nominal(created="by hand")
    workers = (WorkerGroup.of_class("a", 2),)
    heard = Calibrator(
        lambda *_: PLAN.with_each_pipeline(device_class="a"), run_dir=tmp_path, cache=cache_file, given=given
    )
    heard.plan(JOB, workers, 2)
    one = fleet()
    record = one.record.model_copy(update={"plan": PLAN.with_each_pipeline(device_class="a")})
    one = replace(
        with_history(one, (record,)), workers=Workers(replace(w, device_class="a") for w in one.workers.values())
    )
    for worker in ("w0", "w1"):
        heard.learn_from_beat(one, worker, beat(times()), 0.0)
    assert heard.calibrations is not None
    assert heard.calibrations.names == ("a",), "so that `varuna plan --run` asks for one number of GPUs"


def test_a_file_that_names_no_class_is_for_the_workers_that_offer_it(tmp_path: Path) -> None:
    plans: list[Calibrations | None] = []
    offered = nominal(created="by hand")

    def make(job: JobFacts, workers: WorkerGroups, micro_batch: int | None, known: Calibrations | None) -> Plan:
        plans.append(known)
        return PLAN

    heard = Calibrator(make, run_dir=tmp_path, cache=None)
    heard.add_offered(offered.model_dump_json())
    heard.plan(JOB, (WorkerGroup.of_class("a", 2),), 2)
    assert plans == [offered]
