"""A folder that two processes could own has one owner, and the other is told who."""

import os
from pathlib import Path

import pytest

from varuna.core.errors import FleetError, UsageError
from varuna.fleet.agent.agent_folder import AgentFolder
from varuna.fleet.run_folder.journal import Journal
from varuna.process.file_lock import LockHolder, own


def test_the_second_owner_waits_a_moment_and_is_told_who_the_first_one_is(tmp_path: Path) -> None:
    now, first = [0.0], own(tmp_path, "manager", remedy="Stop that one.")

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with pytest.raises(FleetError, match=rf"is used by another manager, process {os.getpid()} on .*Stop that one"):
        own(tmp_path, "manager", remedy="Stop that one.", clock=lambda: now[0], sleep=sleep)
    assert 5.0 <= now[0] < 5.2

    def leave(seconds: float) -> None:
        first.release()

    own(tmp_path, "manager", remedy="", sleep=leave).release()  # it was just leaving


def test_an_owner_elsewhere_that_said_no_goodbye_is_named(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text(LockHolder(pid=7, host="elsewhere").model_dump_json())
    owner = own(tmp_path, "manager", remedy="")
    assert "process 7 on elsewhere, which did not shut down cleanly" in owner.warning
    owner.release()
    owner = own(tmp_path, "manager", remedy="")
    assert owner.warning == ""
    owner.release()


def test_two_runs_do_not_write_one_log_of_steps(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = Journal(tmp_path / "a", tmp_path / "steps.jsonl")
    with pytest.raises(UsageError, match="another run writes"):
        Journal(tmp_path / "b", tmp_path / "steps.jsonl")
    first.close()
    Journal(tmp_path / "b", tmp_path / "steps.jsonl").close()


def test_two_agents_do_not_share_a_state_folder(tmp_path: Path) -> None:
    first = AgentFolder(tmp_path).own()
    with pytest.raises(FleetError, match=r"is used by another agent.*--state-dir"):
        AgentFolder(tmp_path).own(goodbye_s=0.0)
    first.release()
