"""The doctor's findings, by the facts that it is shown."""

from dataclasses import replace

import pytest

from varuna.extras.doctor.diagnose import (
    CheckpointSeen,
    ClockReading,
    Disk,
    Facts,
    Listener,
    WorkerSeen,
    diagnose,
    is_exposed,
)
from varuna.extras.doctor.judging.finding import Severity, is_healthy
from varuna.extras.doctor.sample_ledger import SampleLedger
from varuna.fleet.state.run_events import RunEnded
from varuna.observe.predictions import CheckedPrediction
from varuna.planner.line import Line

LEDGER = SampleLedger(first_step=0, steps=10, samples=160, undone=0, weights=(16.0,) * 10, faults=())
PREDICTION = CheckedPrediction(
    generation=0, shape="2x1", first=10, steps=40, predicted_s=1.02, measured_s=1.0, is_nominal=False
)
LINE = Line(found_bits_per_s=1e9, needed_bits_per_s=2.5e8, faster=0.99, at_a_tenth=2.0)
WELL = Facts(
    state="training",
    ledger=LEDGER,
    workers=(WorkerSeen("w0", "local", "joined", 0.3), WorkerSeen("w1", "local", "starting", None)),
    checkpoint=CheckpointSeen("ck", 8, read_bytes=1 << 20),
    steps_since_checkpoint=2,
    line=LINE,
    predictions=(PREDICTION,),
    disks=(Disk("logs", "/run", 50 << 30, 100 << 30),),
    listeners=(
        Listener("the manager", "0.0.0.0", 7070, is_manager_port=True),
        Listener("process 9", "127.0.0.1", 4000),
    ),
    clocks=(ClockReading("the manager", 0.4),),
)


def worst(facts: Facts, subject: str) -> Severity:
    levels = [finding.level for finding in diagnose(facts) if finding.subject == subject]
    return next(level for level in (Severity.FAULT, Severity.WARNING, Severity.OK) if level in levels)


def test_a_run_that_is_well_is_said_to_be_well() -> None:
    findings = diagnose(WELL)
    assert {finding.level for finding in findings} == {Severity.OK}
    assert is_healthy(findings)
    assert [finding.subject for finding in findings] == [
        "manager",
        "ledger",
        "leases",
        "checkpoint",
        "prediction",
        "line",
        "disk",
        "ports",
        "clock",
    ]
    assert findings[4].text == "with plan 2x1, 40 steps took 1.0 s on average, 2.0% less than predicted"


def test_a_run_that_has_ended_needs_no_manager_and_no_workers() -> None:
    over = replace(WELL, unreachable="nobody answers", workers=(), ended=RunEnded(exit_code=0, text="10 steps done"))
    findings = diagnose(over)
    assert is_healthy(findings)
    assert [f.subject for f in findings] == ["run", "ledger", "checkpoint", "prediction", "disk", "clock"]
    assert findings[0].text == "has ended in order: 10 steps done"
    failed = replace(over, ended=RunEnded(exit_code=3, text="worker w1 failed: no such file\nTraceback"))
    assert not is_healthy(diagnose(failed))
    assert diagnose(failed)[0].text == "failed with exit code 3: worker w1 failed: no such file"


@pytest.mark.parametrize(
    ("facts", "subject", "level", "said"),
    [
        (replace(WELL, unreachable="nobody answers at 10.0.0.1:7070"), "manager", Severity.FAULT, "nobody answers"),
        (replace(WELL, ledger=None, unreadable="run.db cannot be read"), "ledger", Severity.FAULT, "cannot be read"),
        (
            replace(WELL, ledger=LEDGER.model_copy(update={"faults": ("step 4 was recorded twice", "and more")})),
            "ledger",
            Severity.FAULT,
            "step 4 was recorded twice (and 1 more)",
        ),
        (replace(WELL, workers=(WorkerSeen("w0", "n1", "joined", 31.0),)), "leases", Severity.WARNING, "w0 on n1"),
        (replace(WELL, workers=()), "workers", Severity.WARNING, "there are none"),
        (replace(WELL, single_holders=12), "copies", Severity.WARNING, "12 sections"),
        (
            replace(WELL, predictions=(PREDICTION.model_copy(update={"predicted_s": 0.9}),)),
            "prediction",
            Severity.WARNING,
            "11.1% more than predicted",
        ),
        (
            replace(WELL, line=LINE.model_copy(update={"needed_bits_per_s": 4e9, "faster": 0.8})),
            "line",
            Severity.WARNING,
            "lines of 1 Gb/s set the pace: faster ones (from 4 Gb/s on) would save 20% of a step",
        ),
        (replace(WELL, checkpoint=None), "checkpoint", Severity.WARNING, "keeps none"),
        (replace(WELL, checkpoint=CheckpointSeen("ck", None)), "checkpoint", Severity.WARNING, "none yet"),
        (replace(WELL, checkpoint=CheckpointSeen("ck", 8, "shard x is cut")), "checkpoint", Severity.FAULT, "shard x"),
        (
            replace(WELL, disks=(Disk("logs", "/run", 100 << 20, 100 << 30),)),
            "disk",
            Severity.WARNING,
            "100 MiB of 100 GiB",
        ),
        (replace(WELL, disks=(Disk("logs", "/run", 0, 24 << 20),)), "disk", Severity.FAULT, "0 B of 24 MiB"),
        (replace(WELL, disks=(Disk("logs", "/run", 2 << 30, 1 << 40),)), "disk", Severity.WARNING, "2 GiB of 1 TiB"),
        (replace(WELL, listeners=(Listener("process 9", "::", 4000),)), "ports", Severity.FAULT, "process 9"),
        (replace(WELL, listeners=None), "ports", Severity.WARNING, "does not report"),
        (replace(WELL, clocks=(ClockReading("n1", -90.0),)), "clock", Severity.WARNING, "behind"),
    ],
)
def test_what_is_not_well_is_said(facts: Facts, subject: str, level: Severity, said: str) -> None:
    assert worst(facts, subject) is level
    found = next(f for f in diagnose(facts) if f.subject == subject and f.level is level)
    assert said in found.text
    assert found.remedy or subject == "ports"
    assert is_healthy(diagnose(facts)) is (level is not Severity.FAULT)


def test_only_the_newest_predictions_are_shown() -> None:
    many = tuple(PREDICTION.model_copy(update={"shape": f"{depth}x1"}) for depth in range(1, 6))
    said = [each.text for each in diagnose(replace(WELL, predictions=many)) if each.subject == "prediction"]
    assert [text[: len("with plan 5x1")] for text in said] == ["with plan 3x1", "with plan 4x1", "with plan 5x1"]


@pytest.mark.parametrize(
    ("address", "exposed"),
    [
        ("127.0.0.1", False),
        ("10.77.0.1", False),
        ("192.168.1.4", False),
        ("::1", False),
        ("0.0.0.0", True),
        ("::", True),
        ("8.8.4.4", True),
        ("::ffff:10.0.0.1", False),
        ("::ffff:0.0.0.0", True),
    ],
)
def test_private_addresses_are_not_exposed(address: str, exposed: bool) -> None:
    assert is_exposed(address) is exposed


def test_a_run_that_stands_still_is_a_fault_though_its_manager_answers() -> None:
    still = replace(WELL, still_s=840.0, waits_for="P=4 was requested, but there is 1 worker")
    assert worst(still, "manager") is Severity.OK
    [found] = [each for each in diagnose(still) if each.subject == "steps"]
    assert (found.level, found.text) == (
        Severity.FAULT,
        "there has been no step for 14m 00s: P=4 was requested, but there is 1 worker",
    )
