"""A run with a budget in the manager's hands: what it asks for, and when."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.fleet.support import make_job, two_stages
from varuna.fleet.manager.budget_keeper import BudgetKeeper
from varuna.fleet.manager.mailbox import Posted
from varuna.fleet.page.chronicle import Chronicle
from varuna.fleet.run_folder.journal import Journal
from varuna.fleet.state.account import Account
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.fleet import Fleet
from varuna.fleet.state.inputs import FinishRequested, StopRequested
from varuna.fleet.state.recorded import RecordedSteps
from varuna.fleet.state.requests import Requests
from varuna.fleet.state.run_events import Budgeted, CheckpointCommitted, Notice, StepRecorded
from varuna.fleet.state.script import Script

HOUR_S = 3600.0
WELL = make_job().model_copy(update={"checkpoint_dir": "runs/a"})


class Watched:
    """A keeper in a run of two hours at most; both clocks begin at 0."""

    def __init__(self, saving_s: float | None = 60.0) -> None:
        self.chronicle, self.now_s = Chronicle(), 0.0
        self.chronicle.add_event(Budgeted(max_hours=2.0), 0.0)
        self.keeper = BudgetKeeper(self.chronicle, saving_s, time_s=lambda: self.now_s)
        self.fleet = replace(Fleet.empty(FleetConfig(workers=1), 0.0), script=Script(job=WELL))

    def look(self, now_s: float) -> list[Posted]:
        self.now_s = now_s
        return self.keeper.wanted_now(self.fleet, now_s)


def test_a_run_is_told_to_end_once_before_its_budget_does() -> None:
    run = Watched()
    assert run.look(HOUR_S) == []
    notice, wish = run.look(2 * HOUR_S - 100)
    assert isinstance(notice, Notice)
    assert isinstance(wish, FinishRequested)
    assert wish.reason in notice.text
    run.fleet = replace(run.fleet, requests=Requests(finish=wish.reason))
    assert run.look(2 * HOUR_S - 50) == []


def test_at_the_limit_what_still_runs_is_cut_off_once_if_all_is_saved() -> None:
    run = Watched()
    run.fleet = replace(run.fleet, requests=Requests(finish="enough"), recorded=RecordedSteps(step=4, saved_step=5))
    assert run.look(2 * HOUR_S - 1) == []
    (cut,) = run.look(2 * HOUR_S)
    assert isinstance(cut, StopRequested)
    assert cut.exit_code == 0
    assert run.look(2 * HOUR_S + 10) == []


def test_a_run_without_checkpoints_is_refused_before_it_costs_anything() -> None:
    for job in (make_job(), WELL.model_copy(update={"rescues": True})):
        run = Watched()
        run.fleet = replace(run.fleet, script=Script(job=job))
        (refused,) = run.look(0.0)
        assert isinstance(refused, StopRequested)
        assert refused.exit_code == 2
        assert "checkpoints=PLACE" in refused.reason


def test_saving_takes_from_the_end_of_a_step_until_its_checkpoint_is_complete_and_the_longest_counts() -> None:
    keeper = Watched(saving_s=None).keeper
    assert keeper.account().saving_s is None
    for steps, recorded_s, complete_s in ((1, 10.0, 15.0), (2, 20.0, 29.0), (3, 30.0, 31.0)):
        step = StepRecorded(step=steps - 1, generation=0, loss=1.0, examples_per_s=1.0, plan=two_stages(WELL, 2, None))
        keeper.add_event(step, recorded_s)
        keeper.add_event(CheckpointCommitted(step=steps), complete_s)
    assert keeper.account().saving_s == 9.0


def test_a_run_without_a_budget_is_left_alone() -> None:
    keeper = BudgetKeeper(Chronicle())
    assert (
        keeper.wanted_now(replace(Fleet.empty(FleetConfig(workers=1), 0.0), script=Script(job=make_job())), 1e9) == []
    )


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path, None)
    yield journal
    journal.close()


def test_the_next_start_finds_what_this_one_has_used_up_also_after_a_kill(journal: Journal) -> None:
    assert journal.account() == Account()
    journal.begin_run("a")
    run = Watched(saving_s=7.0)
    run.now_s = HOUR_S
    journal.keep_account(run.keeper.account())  # and nothing more is written
    found = journal.account()
    assert (found.wall_s, found.saving_s) == (HOUR_S, 7.0)
    journal.begin_run("b", found)
    assert journal.account() == found
    journal.begin_run("c")
    assert journal.account() == Account()
