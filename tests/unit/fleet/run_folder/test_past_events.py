"""Commands read few rows of a journal, however long the run was: rows that they must not read are no JSON here."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.unit.extras.doctor.test_sample_ledger import eventful
from varuna.core.errors import UsageError
from varuna.extras.doctor.sample_ledger import audit
from varuna.fleet.run_folder.database import FILE
from varuna.fleet.run_folder.journal import Journal
from varuna.fleet.run_folder.past_events import ending, newest_events
from varuna.fleet.state.run_events import RunEnded, StepRecorded

OVER = RunEnded(exit_code=3, text="no plan fits")


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    journal = Journal(tmp_path, None)
    for run in ("old", "new"):
        journal.begin_run(run)
        for event in eventful():
            journal.append(event)
    return journal


def spoil_steps(folder: Path, kept: int) -> None:
    """All but the newest."""
    with closing(sqlite3.connect(folder / FILE)) as database:
        database.execute(
            "UPDATE events SET body = 'no JSON' WHERE kind = 'step_recorded' AND id NOT IN "
            "(SELECT id FROM events WHERE kind = 'step_recorded' ORDER BY id DESC LIMIT ?)",
            (kept,),
        )
        database.commit()


def test_the_end_of_a_run_is_read_from_its_last_row(journal: Journal, tmp_path: Path) -> None:
    spoil_steps(tmp_path, kept=0)
    assert ending(tmp_path) is None
    journal.append(OVER)
    assert ending(tmp_path) == OVER
    journal.begin_run("another one")
    assert ending(tmp_path) is None
    journal.close()
    with pytest.raises(UsageError, match="there is no run in"):
        ending(tmp_path / "nowhere")


@pytest.mark.parametrize(("kept", "first", "undone"), [(2, 2, 0), (4, 2, 2), (5, 2, 3)])
def test_the_newest_steps_of_a_run_have_a_ledger_of_their_own(
    journal: Journal, tmp_path: Path, kept: int, first: int, undone: int
) -> None:
    """Steps 0 to 5, a rollback to 2, steps 2 and 3."""
    journal.close()
    spoil_steps(tmp_path, kept)
    found = newest_events(tmp_path, kept)
    assert sum(isinstance(event, StepRecorded) for event in found.events) == kept
    assert found.left_out == 8 - kept
    others = [event for event in eventful() if not isinstance(event, StepRecorded)]
    assert [event for event in found.events if not isinstance(event, StepRecorded)] == others
    ledger = audit(found.events, is_cut=True)
    assert (ledger.faults, ledger.first_step, ledger.steps, ledger.undone) == ((), first, 2, undone)


def test_a_short_run_is_read_whole(journal: Journal, tmp_path: Path) -> None:
    journal.close()
    found = newest_events(tmp_path, 8)
    assert found.left_out == 0
    assert audit(found.events) == audit(eventful())
