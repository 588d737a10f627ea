"""Slurm's queue as squeue shows it, and what follows from it."""

import pytest

from varuna.core.errors import FleetError
from varuna.fleet.engines.slurm_queue import SlurmJob, minutes_of, read_jobs, to_cancel, to_hurry, why_waiting

# Printed by Slurm 22.05: cancelled with its notice, requeued with its notice, preempted, waiting, over.
SHOWN = """
1_0 |COMPLETING|None     |vn1|2026-11-23T19:38:21|2026-11-23T19:38:25|0|N/A|
1_1 |COMPLETING|None     |vn2|2026-11-23T19:38:21|N/A|1|N/A|
1_2 |COMPLETING|None     |vn2|2026-11-23T19:38:21|N/A|2|2026-11-23T19:41:19|
1_3 |PENDING   |BeginTime|   |2026-11-23T19:40:34|NONE|1|N/A|
1_10|PENDING   |Priority |   |N/A|NONE|0|N/A|
1_4 |RUNNING   |None     |vn3|2026-11-23T19:38:21|NONE|0|N/A|
1_5 |FAILED    |NonZeroExitCode|vn3|2026-11-23T19:38:21|2026-11-23T19:38:24|0|N/A|
"""


def test_a_job_that_is_leaving_is_told_apart_by_whether_it_comes_back() -> None:
    jobs = {job.number: job for job in read_jobs(SHOWN)}
    assert [number for number, job in jobs.items() if not job.is_there] == ["1_0", "1_5"]
    assert [number for number, job in jobs.items() if job.is_running] == ["1_4"]
    assert (jobs["1_5"].has_failed, jobs["1_5"].ran_s, jobs["1_5"].node) == (True, 3.0, "vn3")
    felled = "slurmstepd-vn1: error: *** JOB 2 ON vn1 CANCELLED AT 2026-11-23T19:38:25 ***"
    assert jobs["1_0"].is_cancelled(felled)
    assert not jobs["1_0"].is_cancelled(felled.replace(" ***", " DUE TO TIME LIMIT ***"))
    assert not jobs["1_4"].is_cancelled(felled)  # it was, before it was requeued
    with pytest.raises(FleetError, match=r"Slurm 20\.11"):
        read_jobs("slurm_load_jobs: something else\n")


def test_the_newest_of_those_that_wait_are_cancelled_first() -> None:
    jobs = read_jobs(SHOWN)
    assert to_cancel(jobs, 5) == []
    assert to_cancel(jobs, 2) == ["1_10", "1_3", "1_2"]
    assert to_cancel(jobs, 0)[-1] == "1_4"
    assert to_hurry(jobs) == ["1_3"]


def test_waiting_is_told_at_the_second_look() -> None:
    jobs = [
        SlurmJob("7_0", "RUNNING"),
        SlurmJob("7_1", "PENDING", "Resources"),
        SlurmJob("7_2", "PENDING", "Resources"),
    ]
    assert why_waiting(jobs, {"7_0", "7_1"}) == "1 of 3 jobs wait in the queue (Resources)"
    assert why_waiting(jobs, set()) == ""


@pytest.mark.parametrize(
    ("limit", "minutes"),
    [("30", 30), ("5:30", 5.5), ("2:00:00", 120), ("1-0", 1440), ("1-12:30", 2190), ("UNLIMITED", None)],
)
def test_time_limits_are_read_as_slurm_writes_them(limit: str, minutes: float | None) -> None:
    assert minutes_of(limit) == minutes
