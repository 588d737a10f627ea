"""Workers die in every phase of a step, and the losses are those of an undisturbed run."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.depth import of_depth
from tests.scenarios.job import LAYERS
from tests.scenarios.launch import (
    BOUND_S,
    JOB,
    Alone,
    Done,
    environment,
    json_log,
    parent_of,
    processes_with,
    python,
    torchrun,
    varuna,
    varuna_command,
)
from tests.scenarios.warm import Process
from tests.waiting import wait_for
from varuna.checkpoint.manifest import find_step
from varuna.checkpoint.saved_sums import labels_in, whole_micro_batches
from varuna.store.folder import FolderStore

pytestmark = pytest.mark.timeout(300)
nightly = pytest.mark.nightly
STEPS, TEXT_EVERY = 60, 5
DROPOUT = ("--dropout", "0.1")


def check(folder: Path, undisturbed: dict[int, float]) -> list[dict[str, Any]]:
    """Every step is logged once for each generation that committed it, and every loss is the undisturbed one."""
    log = json_log(folder / "log.jsonl")
    assert next(line["step"] for line in log if line["generation"] == 0) == 0
    assert sorted({line["step"] for line in log}) == list(undisturbed)
    assert len({(line["step"], line["generation"]) for line in log}) == len(log)
    generations = [line["generation"] for line in log]
    assert generations == sorted(generations)
    for line in log:
        assert line["loss"] == pytest.approx(undisturbed[line["step"]], rel=1e-5), line
    return log


def check_notes(done: Done, log: list[dict[str, Any]]) -> None:
    """The user's own state counts each turn of the loop once, on workers that joined late too."""
    [(turns, losses)] = set(re.findall(r"^notes (\S+) (\S+)", done.out, re.MULTILINE))
    assert int(turns) == STEPS
    assert float(losses) == sum(line["loss"] for line in log)  # bit for bit, in the order of steps


def disturbed(
    folder: Path,
    misbehaviour: str,
    *,
    workers: int = 4,
    flags: tuple[str, ...] = ("--stages", "2"),
    more: tuple[str, ...] = (),
    slow: str = "0.02",
    steps: int = STEPS,
) -> Done:
    log = ["--json-log", str(folder / "log.jsonl")]
    return varuna(
        workers,
        [*flags, *log],
        *("--steps", str(steps), *DROPOUT, "--slow", slow, "--folder", str(folder)),
        *("--misbehave", misbehaviour, *more),
    )


class Deaths(NamedTuple):
    """Deaths in a run whose every section has two holders again before the next worker dies.

    Attributes:
        around: when workers die, in the words of ``job.misbehave``.
        more: options of the job that change no loss.
        model: options of the job that do.
        slow: seconds of a step while a section has one holder only, in which a replacement starts.
    """

    around: str
    more: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    workers: int = 4
    stages: int = 2
    slow: str = "0.8"


SHARED_OUT = Deaths("", ("--share",), workers=3, stages=1)
"""Three replicas of one stage that share optimizer state out: each section is with two of them."""
DEATHS = [
    pytest.param(
        Deaths("F:begin:3:0,B:begin:6:1:SIGSTOP,reduce:begin:9:1,vote:end:12:0,apply:begin:15:1", ("--notes",)),
        id="one in each part of a step",
    ),
    pytest.param(
        Deaths("F:begin:3:0,R:begin:6:0,B:begin:9:1,B:end:12:0", ("--notes",)), id="computation", marks=nightly
    ),
    pytest.param(
        Deaths("reduce:begin:3:1,vote:begin:6:0,vote:end:9:1,apply:begin:12:0,apply:end:15:1"),
        id="commit",
        marks=nightly,
    ),
    pytest.param(
        # With a stand-in for NCCL: transfers never end by themselves when a peer is gone.
        Deaths("F:end:3:0,B:end:9:1,reduce:begin:15:0:SIGSTOP,reduce:end:21:1", ("--links", "wire"), slow="0.4"),
        id="direct links and sums",
        marks=nightly,
    ),
    pytest.param(Deaths("vote:end:3:1,apply:begin:14:0", ("--offload",)), id="offloaded state", marks=nightly),
    pytest.param(
        Deaths("share:begin:6:1,share:end:12:0,vote:end:18:1", model=("--normed",)),
        id="an optimizer that talks to other stages",
        marks=nightly,
    ),
    *(
        pytest.param(SHARED_OUT._replace(around=around), id=f"shared out, {around}", marks=nightly)
        for around in (
            "gather:begin:3:0,vote:end:12:0",
            "gather:end:3:0,vote:begin:12:0",
            "apply:begin:3:0,F:begin:12:0",
        )
    ),
    pytest.param(
        Deaths("gather:begin:5:1,vote:end:14:0", ("--share", "--offload"), workers=6),  # then two replicas: no gather
        id="shared out, over another depth",
        marks=nightly,
    ),
]


@pytest.mark.parametrize("deaths", DEATHS)
def test_workers_die_in_any_part_of_a_step_and_no_loss_changes_and_no_step_runs_twice(
    deaths: Deaths, tmp_path: Path, alone: Alone
) -> None:
    more = ("--spare-state", *deaths.more, *deaths.model)
    flags = ("--stages", str(deaths.stages))
    done = disturbed(tmp_path, deaths.around, workers=deaths.workers, flags=flags, more=more, slow=deaths.slow)
    assert done.code == 0, done.err
    log = check(tmp_path, alone(STEPS, *DROPOUT, *deaths.model))
    assert [line["step"] for line in log] == list(range(STEPS))
    assert "ROLLBACK" not in done.err
    count = len(deaths.around.split(","))
    assert len(list(tmp_path.glob("done-*"))) == count
    assert log[-1]["generation"] >= count
    assert ("froze" in done.err) == ("SIGSTOP" in deaths.around)
    if "--notes" in deaths.more:
        check_notes(done, log)
    if "wire" in deaths.more:
        assert any(int(path.read_text()) for path in tmp_path.glob("wired-*"))
    if deaths.workers > 4:
        assert len({line["plan"]["shape"] for line in log}) > 1


def texts(done: Done) -> dict[int, str]:
    """By step; None where a worker was lost meanwhile."""
    return {int(step): text for step, text in re.findall(r"^text (\d+) (.+)$", done.out, re.MULTILINE)}


@nightly
def test_sigkill_while_texts_are_generated(tmp_path: Path) -> None:
    steps, generate = STEPS // 2, ("--generate", str(TEXT_EVERY))
    alone = python("--steps", str(steps), *DROPOUT, *generate)
    assert alone.code == 0, alone.err
    more = ("--spare-state", *generate)
    done = disturbed(tmp_path, "generate:end:4:1,generate:begin:9:0", more=more, slow="0.8", steps=steps)
    assert done.code == 0, done.err
    log = check(tmp_path, alone.losses)
    assert [line["step"] for line in log] == list(range(steps))  # no committed step was redone
    assert len(list(tmp_path.glob("done-*"))) == 2
    found, expected = texts(done), texts(alone)
    assert list(found.values()).count("None") <= 2
    assert len(found) >= steps // TEXT_EVERY - 2
    assert all(text in ("None", expected[step]) for step, text in found.items())


def test_sigkill_while_a_generation_forms_and_while_a_checkpoint_is_saved(tmp_path: Path, alone: Alone) -> None:
    checkpoints = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "5")
    phases = "save:begin:9:0,form:begin:10:0,save:end:24:1"
    done = disturbed(tmp_path, phases, more=(*checkpoints, "--spare-state"), slow="0.8")
    assert done.code == 0, done.err
    committed = {line["generation"] for line in check(tmp_path, alone(STEPS, *DROPOUT))}
    assert len(list(tmp_path.glob("done-*"))) == 3
    _, formed_in_vain = map(int, (tmp_path / "done-1").read_text().split())
    assert min(committed) < formed_in_vain < max(committed)
    assert formed_in_vain not in committed


def test_losing_every_holder_of_a_section_falls_back_to_the_newest_checkpoint(tmp_path: Path, alone: Alone) -> None:
    checkpoints = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "5")
    # P = 3, D = 1: stage 1 dies, and, before anybody has copied it, stage 2, which keeps its memory checkpoints.
    around = "apply:end:13:1,form:begin:10:2"
    done = disturbed(tmp_path, around, workers=3, flags=("--stages", "3"), more=checkpoints)
    assert done.code == 0, done.err
    log = check(tmp_path, alone(STEPS, *DROPOUT))
    redone = [line["step"] for line in log if line["generation"] > 0]
    assert redone[0] == 10
    assert "10" in done.err


@nightly
def test_without_checkpoints_the_run_goes_back_loudly(tmp_path: Path, alone: Alone) -> None:
    """To the beginning, if a worker and the keeper of its state are lost together."""
    done = disturbed(tmp_path, "apply:begin:4:1,apply:begin:4:2", workers=3, flags=("--stages", "3"))
    assert done.code == 0, done.err
    steps = [line["step"] for line in check(tmp_path, alone(STEPS, *DROPOUT))]
    assert steps in ([*range(5), *range(STEPS)], [*range(4), *range(STEPS)]), "the vote on step 4 may have got lost"
    assert "ROLLBACK: the last holder of some state was lost; going back" in done.err
    assert "to the beginning" in done.err


def test_the_only_holder_of_a_section_leaves_its_state_to_its_neighbour(tmp_path: Path, alone: Alone) -> None:
    """P = 2, D = 1, no checkpoints: each worker has a copy of the other one's state, and a new one gets it."""
    steps = 24
    around = "reduce:begin:5:1,vote:begin:9:0,B:end:14:0,apply:end:18:1"
    done = disturbed(tmp_path, around, workers=2, slow="0.3", steps=steps)
    assert done.code == 0, done.err
    log = check(tmp_path, alone(steps, *DROPOUT))
    losses = len(list(tmp_path.glob("done-*")))
    assert losses == len(around.split(","))
    assert len(log) <= steps + 4 * losses, "few steps were redone"
    assert "ROLLBACK" not in done.err
    assert "each worker's state is copied to another one's memory" in done.err


@pytest.mark.parametrize("start", of_depth(("warm_start", "cold_start"), {"warm_start"}))
def test_a_lost_parent_takes_its_workers_along_and_the_same_command_resumes(
    start: str, request: pytest.FixtureRequest, tmp_path: Path, alone: Alone
) -> None:
    """``test_local_fleet`` kills a parent whose workers began as a user's do; here they train."""
    request.getfixturevalue(start)
    log = tmp_path / "log.jsonl"
    steps = 24
    args = ["--steps", str(steps), *DROPOUT, "--slow", "0.2", "--checkpoint-dir", str(tmp_path / "c")]
    args += ["--checkpoint-every", "4", "--folder", str(tmp_path)]
    command = varuna_command(2, ["--stages", "1", "--json-log", str(log)], *args)
    parent = Process(
        command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    wait_for(lambda: log.exists() and len(log.read_text().splitlines()) > 8)
    shown = set(processes_with(str(tmp_path))) - {parent.pid}
    readers = {process for process in shown if parent_of(process) in shown}  # spare ones, until one is known needless
    assert len(shown - readers) == 2, "each worker's command line shows the script and its arguments"
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(BOUND_S)
    wait_for(lambda: not processes_with(str(tmp_path)))
    done = varuna(2, ["--stages", "2"], *args)  # another plan reads the same checkpoint
    assert done.code == 0, done.err
    assert min(done.losses) in (4, 8, 12, 16)
    assert max(done.losses) == steps - 1
    undisturbed = alone(steps, *DROPOUT)
    assert all(loss == pytest.approx(undisturbed[step], rel=1e-5) for step, loss in done.losses.items())


@nightly
def test_a_run_that_is_lost_whole_in_the_middle_of_a_long_step_goes_on_there(tmp_path: Path) -> None:
    """Twice: what three workers have begun one process goes on with, and then torchrun."""
    args = ("--steps", "2", *DROPOUT, "--global-batch", "240", "--notes")
    alone = python(*args)
    assert alone.code == 0, alone.err
    folder = tmp_path / "c"
    paced = (*args, "--compute", "0.1", "--checkpoint-dir", str(folder), "--checkpoint-seconds", "1")
    said = _lost_in_step(0, varuna_command(3, ["--stages", "3"], *paced), folder)
    said += _lost_in_step(1, [sys.executable, JOB, *paced], folder)
    done = torchrun(2, *paced)
    assert done.code == 0, done.err
    kept = re.findall(r"kept (\d+) of 120 micro-batches of step (\d)", said + done.err)
    assert [step for _, step in kept] == ["0", "1"]
    assert min(int(number) for number, _ in kept) >= 20
    losses = re.findall(r"^step (\d) loss (\S+)", said + done.out, re.MULTILINE)
    assert {int(step): float(loss) for step, loss in losses} == pytest.approx(alone.losses, rel=1e-6)
    assert re.findall(r"^notes 2 ", done.out, re.MULTILINE)


def _lost_in_step(step: int, command: list[str], folder: Path) -> str:
    """All processes of a run are killed once it has saved enough of a step; what they had said."""
    store, said = FolderStore(folder), folder.with_name(f"said-{step}")
    with said.open("wb") as out:
        process = Process(command, env=environment(), stdout=out, stderr=out, start_new_session=True)
    wait_for(lambda: _saved(store, step) >= 20)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(BOUND_S)
    wait_for(lambda: not processes_with(str(folder)))
    return said.read_text()


def _saved(store: FolderStore, step: int) -> int:
    labels = [label for label in labels_in(store, find_step(store, step)).values() if label is not None]
    return whole_micro_batches(labels)[0] if len({label.sums.section for label in labels}) == LAYERS + 2 else 0


@nightly
def test_without_checkpoints_the_only_holder_of_a_section_takes_few_steps_with_it(tmp_path: Path, alone: Alone) -> None:
    """One micro-batch per step, so that the second worker idles; it goes on from a copy that is some seconds old."""
    steps, whole = 40, ("--micro-batch", "12")
    more = ("--steps", str(steps), *whole)
    done = disturbed(tmp_path, "F:begin:25:0", workers=2, flags=("--stages", "1"), more=more, slow="0.4")
    assert done.code == 0, done.err
    log = check(tmp_path, alone(steps, *DROPOUT, *whole))
    assert "1 of them idle" in done.err
    assert "a copy of its state that is some seconds old" in done.err
    assert next(line["step"] for line in log if line["generation"] == 1) > 0
    assert len(log) < steps + 20
    assert "no checkpoint" in done.err.splitlines()[-1]
