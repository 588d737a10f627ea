from pathlib import Path

import pytest

from tests.unit.fleet.support import Driver, two_stages
from varuna.core.errors import UsageError
from varuna.extras.doctor.sample_ledger import audit
from varuna.fleet.run_folder.database import FILE
from varuna.fleet.run_folder.journal import Journal
from varuna.fleet.run_folder.past_events import read_events
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.outputs import Publish
from varuna.fleet.state.questions import Checkpoint
from varuna.fleet.state.run_events import GenerationStarted, RunEnded, RunEvent, StepRecorded


def eventful() -> list[RunEvent]:
    """Steps 0 to 3, a loss, steps 4 and 5, a rollback to 2, steps 2 and 3."""
    driver = Driver(FleetConfig(workers=4, replace=False), plan=two_stages)
    driver.begin(0, 1, 2, 3)
    driver.kill("w3")
    driver.all_held(4)
    driver.voted(4, 5)
    driver.checkpoint = Checkpoint("ck/step-2", 2, 2)
    driver.plan = lambda job, workers, m: two_stages(job, 2, m)
    driver.kill("w0")  # with w2 as its spare, both stages are still held
    driver.held("w1", 6)
    driver.held("w2", None)
    driver.voted(2, 3)
    return [item.event for item in driver.done if isinstance(item, Publish)]


def test_a_run_with_losses_and_a_rollback_balances() -> None:
    ledger = audit(eventful())
    assert ledger.faults == ()
    assert (ledger.first_step, ledger.steps, ledger.samples, ledger.undone) == (0, 4, 4 * 16, 4)


def test_the_log_on_disk_says_the_same(tmp_path: Path) -> None:
    journal = Journal(tmp_path, None)
    for event in eventful():
        journal.append(event)
    journal.close()
    assert audit(read_events(tmp_path)) == audit(eventful())


def test_a_run_that_follows_another_one_in_its_folder_has_a_ledger_of_its_own() -> None:
    over = RunEnded(exit_code=0, text="6 steps done")
    assert audit([*eventful(), over]) == audit(eventful())
    assert audit([*eventful()[:-2], over, *eventful(), over]) == audit(eventful())


def is_step(event: RunEvent, step: int) -> bool:
    return isinstance(event, StepRecorded) and event.step == step


def test_a_step_that_is_missing_or_doubled_is_a_fault() -> None:
    events = eventful()
    missing = [event for event in events if not is_step(event, 1)]
    assert any("step 2 was recorded where 1 was the next one" in fault for fault in audit(missing).faults)
    doubled = [copy for event in events for copy in ([event, event] if is_step(event, 4) else [event])]
    assert any("step 4 was recorded where 5 was" in fault for fault in audit(doubled).faults)


def test_a_generation_that_skips_a_step_or_comes_twice_is_a_fault() -> None:
    events = eventful()
    starts = [i for i, event in enumerate(events) if isinstance(event, GenerationStarted)]
    late = events[starts[1]]
    assert isinstance(late, GenerationStarted)
    skipping = GenerationStarted(record=late.record.model_copy(update={"first_step": 5}))
    faults = audit([*events[: starts[1]], skipping]).faults
    assert faults == ("generation 1 begins with step 5, but 4 is the next one",)
    assert any("numbers are used once" in fault for fault in audit([*events[: starts[1]], late, late]).faults)


def test_samples_that_a_plan_leaves_out_are_a_fault() -> None:
    started = next(event for event in eventful() if isinstance(event, GenerationStarted))

    class Careless(type(started.record.plan)):  # type: ignore[misc]
        def micro_batches_of(self, replica: int) -> range:
            return range(1)

    careless = Careless.model_validate(started.record.plan.model_dump())
    [fault] = audit([GenerationStarted(record=started.record.model_copy(update={"plan": careless}))]).faults
    assert "do not share 16 samples exactly once" in fault


def test_a_doubled_micro_batch_shows_against_an_undisturbed_run() -> None:
    events = eventful()
    again = [
        event.model_copy(update={"weight": 2 * event.weight}) if is_step(event, 0) else event  # type: ignore[union-attr]
        for event in events
    ]
    assert audit(events).weights[0] == 1.0
    assert audit(again).weights == (2.0, *audit(events).weights[1:])


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run"):
        read_events(tmp_path)
    (tmp_path / FILE).write_bytes(b"no database at all, but long enough to look like a page of one" * 100)
    with pytest.raises(UsageError, match="cannot be read"):
        read_events(tmp_path)
