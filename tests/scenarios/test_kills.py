"""Workers die in every phase of a step, and the losses are those of an undisturbed run."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.scenarios.job import LAYERS
from tests.scenarios.launch import (
    BOUND_S,
    JOB,
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
from varuna.checkpoint.manifest import look
from varuna.checkpoint.saved_sums import labels_in, whole_micro_batches
from varuna.store.folder import FolderStore

pytestmark = pytest.mark.timeout(300)
STEPS, TEXT_EVERY = 80, 5
PATIENT: dict[str, Any] = {"more": ("--spare-state",), "slow": "0.8"}
"""The next kill waits until the last one's replacement has made every section double again."""


@pytest.fixture(scope="module")
def alone() -> Done:
    """One process. That it generates texts as well changes no loss."""
    done = python("--steps", str(STEPS), "--dropout", "0.1", "--generate", str(TEXT_EVERY))
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def undisturbed(alone: Done) -> dict[int, float]:
    return alone.losses


def texts(done: Done) -> dict[int, str]:
    """By step; None where a worker was lost meanwhile."""
    return {int(step): text for step, text in re.findall(r"^text (\d+) (.+)$", done.out, re.MULTILINE)}


def check(folder: Path, undisturbed: dict[int, float], *, steps: int = STEPS) -> list[dict[str, Any]]:
    """Every step is logged once for each generation that committed it, and every loss is the undisturbed one."""
    log = json_log(folder / "log.jsonl")
    assert next(line["step"] for line in log if line["generation"] == 0) == 0
    assert sorted({line["step"] for line in log}) == list(range(steps))
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
        *("--steps", str(steps), "--dropout", "0.1", "--slow", slow, "--folder", str(folder)),
        *("--misbehave", misbehaviour, *more),
    )


def test_sigkill_in_each_phase_of_the_computation(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    done = disturbed(
        tmp_path, "F:begin:3:0,R:begin:8:0,B:begin:14:1,B:end:22:0", more=("--spare-state", "--notes"), slow="0.8"
    )
    assert done.code == 0, done.err
    log = check(tmp_path, undisturbed)
    assert [line["step"] for line in log] == list(range(STEPS))  # no committed step was redone
    check_notes(done, log)
    assert log[-1]["generation"] >= 4
    assert len(list(tmp_path.glob("done-*"))) == 4


def test_kills_and_a_freeze_amid_direct_links_and_sums(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    """With a stand-in for NCCL: transfers never end by themselves when a peer is gone."""
    around = "F:end:3:0,B:end:9:1,reduce:begin:15:0:SIGSTOP,reduce:end:21:1"
    done = disturbed(tmp_path, around, more=("--spare-state", "--links", "wire"), slow="0.4")
    assert done.code == 0, done.err
    assert any(int(path.read_text()) for path in tmp_path.glob("wired-*"))
    log = check(tmp_path, undisturbed)
    assert [line["step"] for line in log] == list(range(STEPS))  # no committed step was redone
    assert len(list(tmp_path.glob("done-*"))) == 4


def test_running_statistics_survive_kills(tmp_path: Path) -> None:
    flags = ("--batch-norm", "--export", str(tmp_path / "expected.safetensors"))
    expected = python("--steps", str(STEPS), "--dropout", "0.1", *flags)
    assert expected.code == 0, expected.err
    more = ("--spare-state", "--batch-norm", "--export", str(tmp_path / "found.safetensors"))
    done = disturbed(tmp_path, "B:begin:5:1,vote:end:12:0", more=more, slow="0.8")
    assert done.code == 0, done.err
    log = check(tmp_path, expected.losses)
    assert log[-1]["generation"] >= 2
    found = load_file(tmp_path / "found.safetensors")
    buffers = {name: value for name, value in load_file(tmp_path / "expected.safetensors").items() if "norm.r" in name}
    assert len(buffers) == 2 * 2
    for name, value in buffers.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_sigkill_around_the_commit(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    around = "reduce:begin:3:1,vote:begin:10:0,vote:end:18:1,apply:begin:26:0,apply:end:33:1"
    done = disturbed(tmp_path, around, **PATIENT)
    assert done.code == 0, done.err
    log = check(tmp_path, undisturbed)
    assert [line["step"] for line in log] == list(range(STEPS))
    assert len(list(tmp_path.glob("done-*"))) == 5


def test_offloaded_state_survives_kills(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    around = "vote:end:3:1,apply:begin:14:0"
    done = disturbed(tmp_path, around, more=("--spare-state", "--offload"), slow="0.8")
    assert done.code == 0, done.err
    log = check(tmp_path, undisturbed)
    assert [line["step"] for line in log] == list(range(STEPS))
    assert len(list(tmp_path.glob("done-*"))) == 2


def test_sigkill_while_texts_are_generated(tmp_path: Path, alone: Done) -> None:
    steps, more = STEPS // 2, ("--spare-state", "--generate", str(TEXT_EVERY))
    done = disturbed(tmp_path, "generate:end:4:1,generate:begin:9:0", more=more, slow="0.8", steps=steps)
    assert done.code == 0, done.err
    log = check(tmp_path, alone.losses, steps=steps)
    assert [line["step"] for line in log] == list(range(steps))  # no committed step was redone
    assert len(list(tmp_path.glob("done-*"))) == 2
    found, expected = texts(done), texts(alone)
    assert list(found.values()).count("None") <= 2
    assert len(found) >= steps // TEXT_EVERY - 2
    assert all(text in ("None", expected[step]) for step, text in found.items())


def test_sigkill_while_the_optimizer_talks_to_other_stages(tmp_path: Path) -> None:
    done = python("--steps", str(STEPS), "--dropout", "0.1", "--normed")
    assert done.code == 0, done.err
    around = "share:begin:6:1,share:end:12:0,vote:end:18:1"
    more = ("--spare-state", "--normed")
    disturbed_run = disturbed(tmp_path, around, more=more, slow="0.8")
    assert disturbed_run.code == 0, disturbed_run.err
    log = check(tmp_path, done.losses)
    assert [line["step"] for line in log] == list(range(STEPS))
    assert len(list(tmp_path.glob("done-*"))) == 3


def test_sigkill_while_a_generation_forms_and_while_a_checkpoint_is_saved(
    tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    checkpoints = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "5")
    phases = "save:begin:9:0,form:begin:10:0,save:end:24:1"
    done = disturbed(tmp_path, phases, more=(*checkpoints, "--spare-state"), slow="0.8")
    assert done.code == 0, done.err
    committed = {line["generation"] for line in check(tmp_path, undisturbed)}
    assert len(list(tmp_path.glob("done-*"))) == 3
    _, formed_in_vain = map(int, (tmp_path / "done-1").read_text().split())
    assert min(committed) < formed_in_vain < max(committed)
    assert formed_in_vain not in committed


def test_losing_every_holder_of_a_section_falls_back_to_the_newest_checkpoint(
    tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    checkpoints = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "5")
    # P = 2, D = 1: what stage 1 has just applied is gone, and there is no copy of it yet. Stage 0 has had the time of
    # that to get the vote, too: if nobody had it any more, the step would run again.
    done = disturbed(tmp_path, "apply:end:13:1", workers=2, more=checkpoints)
    assert done.code == 0, done.err
    log = check(tmp_path, undisturbed)
    redone = [line["step"] for line in log if line["generation"] > 0]
    assert redone[0] == 10
    assert "10" in done.err


def test_the_update_of_a_long_step_is_made_again(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    """As above, after a step of over 10 s: the vote has waited until the other worker could make what was lost."""
    steps = 3
    done = disturbed(tmp_path, "apply:end:1:1", workers=2, slow="10.5", steps=steps)
    assert done.code == 0, done.err
    log = check(tmp_path, undisturbed, steps=steps)
    assert [line["step"] for line in log] == list(range(steps))  # no step was redone
    assert "ROLLBACK" not in done.err


def test_without_checkpoints_the_run_goes_back_loudly(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    """To the copy of its state, if that was written in so short a time, or to the beginning."""
    done = disturbed(tmp_path, "apply:begin:4:1", workers=2)
    assert done.code == 0, done.err
    steps = [line["step"] for line in check(tmp_path, undisturbed)]
    assert steps[:5] == [0, 1, 2, 3, 4]
    assert steps[5] <= 5
    where = f"the copy of its state after {steps[5]} steps" if steps[5] else "the beginning"
    assert "ROLLBACK" in done.err
    assert f"going back from step 5 to {where}" in done.err


def test_the_only_holder_of_a_section_leaves_its_state_to_its_neighbour(
    tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    """P = 2, D = 1, no checkpoints: each worker has a copy of the other one's state, and a new one gets it."""
    steps = 24
    done = disturbed(tmp_path, "reduce:begin:5:1,B:end:14:0", workers=2, slow="0.3", steps=steps)
    assert done.code == 0, done.err
    log = check(tmp_path, undisturbed, steps=steps)
    assert [line["step"] for line in log] == list(range(steps))  # no committed step was redone
    assert "ROLLBACK" not in done.err
    assert "each section has a copy in another worker's memory" in done.err
    assert len(list(tmp_path.glob("done-*"))) == 2


def test_a_frozen_worker_is_killed_and_replaced(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    done = disturbed(tmp_path, "B:begin:6:1:SIGSTOP")
    assert done.code == 0, done.err
    log = check(tmp_path, undisturbed)
    assert log[-1]["generation"] >= 1
    assert "froze" in done.err


@pytest.mark.usefixtures("cold_start")
def test_a_lost_parent_takes_its_workers_along_and_the_same_command_resumes(
    tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    log = tmp_path / "log.jsonl"
    args = ["--steps", str(STEPS), "--dropout", "0.1", "--slow", "0.05", "--checkpoint-dir", str(tmp_path / "c")]
    args += ["--checkpoint-every", "4", "--folder", str(tmp_path)]
    command = varuna_command(2, ["--json-log", str(log)], *args)
    parent = Process(
        command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    wait_for(lambda: log.exists() and len(log.read_text().splitlines()) > 10)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(BOUND_S)
    wait_for(lambda: not processes_with(str(tmp_path)))
    done = varuna(4, ["--stages", "4"], *args)  # another plan reads the same checkpoint
    assert done.code == 0, done.err
    assert min(done.losses) in (8, 12, 16)
    assert max(done.losses) == STEPS - 1
    assert all(loss == pytest.approx(undisturbed[step], rel=1e-5) for step, loss in done.losses.items())


def test_a_run_that_is_lost_whole_in_the_middle_of_a_long_step_goes_on_there(tmp_path: Path) -> None:
    """Twice: what three workers have begun one process goes on with, and then torchrun."""
    args = ("--steps", "2", "--dropout", "0.1", "--global-batch", "240", "--notes")
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
    labels = [label for label in labels_in(store, look(store, step)).values() if label is not None]
    return whole_micro_batches(labels)[0] if len({label.sums.section for label in labels}) == LAYERS + 2 else 0


@pytest.mark.usefixtures("cold_start")
def test_each_workers_command_line_shows_the_script(tmp_path: Path) -> None:
    command = varuna_command(2, [], "--steps", "400", "--slow", "0.2", "--folder", str(tmp_path))
    parent = Process(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert parent.stdout is not None
    assert parent.stdout.readline().startswith(b"step 0")
    found = set(processes_with(str(tmp_path))) - {parent.pid}
    forked = {process for process in found if parent_of(process) in found}  # spare readers, until one is known needless
    assert len(found - forked) == 2
    assert sys.executable in " ".join(command)
    assert JOB in " ".join(command)
    parent.send_signal(signal.SIGINT)
    parent.communicate(timeout=BOUND_S)
    wait_for(lambda: not processes_with(str(tmp_path)))


SHARING: dict[str, Any] = {"more": ("--spare-state", "--share"), "slow": "0.8", "flags": ("--stages", "1")}
"""Three replicas of one stage that share optimizer state out: each section is with two of them."""


@pytest.mark.parametrize(
    "around", ["gather:begin:3:0,vote:end:12:0", "gather:end:3:0,vote:begin:12:0", "apply:begin:3:0,F:begin:12:0"]
)
def test_shared_out_state_survives_the_loss_of_any_worker(
    around: str, tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    done = disturbed(tmp_path, around, workers=3, **SHARING)
    assert done.code == 0, done.err
    log = check(tmp_path, undisturbed)
    assert [line["step"] for line in log] == list(range(STEPS))  # no committed step was redone
    assert "ROLLBACK" not in done.err
    assert len(list(tmp_path.glob("done-*"))) == 2


def test_shared_out_state_moves_when_the_depth_changes(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    more = ("--spare-state", "--share", "--offload")
    done = disturbed(tmp_path, "gather:begin:5:1,gather:end:14:0", workers=6, more=more, slow="0.8")
    assert done.code == 0, done.err
    log = check(tmp_path, undisturbed)
    assert [line["step"] for line in log] == list(range(STEPS))
    assert len({line["plan"]["stages"] * 10 + line["plan"]["replicas"] for line in log}) > 1


def test_losing_both_holders_of_shared_out_state_falls_back_to_the_checkpoint(
    tmp_path: Path, undisturbed: dict[int, float]
) -> None:
    checkpoints = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "5")
    both = "F:begin:13:0,F:begin:13:0"  # two of three replicas, in the same step
    done = disturbed(tmp_path, both, workers=3, flags=("--stages", "1"), more=("--share", *checkpoints))
    assert done.code == 0, done.err
    log = check(tmp_path, undisturbed)
    assert "ROLLBACK" in done.err
    assert len([line for line in log if line["step"] == 12]) == 2


def test_without_checkpoints_the_only_holder_of_a_section_takes_few_steps_with_it(tmp_path: Path) -> None:
    """One micro-batch per step, so that the second worker idles; it goes on from a copy that is some seconds old."""
    steps, whole = 40, ("--micro-batch", "12")
    expected = python("--steps", str(steps), "--dropout", "0.1", *whole)
    more = ("--steps", str(steps), *whole)
    done = disturbed(tmp_path, "F:begin:25:0", workers=2, flags=("--stages", "1"), more=more, slow="0.4")
    assert done.code == 0, done.err
    log = check(tmp_path, expected.losses, steps=steps)
    assert "1 of them idle" in done.err
    assert "a copy of its state that is some seconds old" in done.err
    assert next(line["step"] for line in log if line["generation"] == 1) > 0
    assert len(log) < steps + 20
    assert "no checkpoint" in done.err.splitlines()[-1]


def test_a_loss_late_in_a_step_costs_the_micro_batches_that_are_lacking(tmp_path: Path) -> None:
    """64 micro-batches over two pipelines; the last stage of one is lost when it is through with its half."""
    batch = ("--global-batch", "128")
    alone = python("--steps", "8", "--dropout", "0.1", *batch)
    assert alone.code == 0, alone.err
    paced = (*batch, "--compute", "0.02")  # by sleeping, so that both pipelines get on alike on a busy machine, too
    done = disturbed(tmp_path, "reduce:begin:4:1", more=paced, slow="0", steps=8)
    assert done.code == 0, done.err
    for line in json_log(tmp_path / "log.jsonl"):
        assert line["loss"] == pytest.approx(alone.losses[line["step"]], rel=1e-6), line
    [kept] = re.findall(r"kept (\d+) of 64 micro-batches of step 4; the others run again", done.err)
    assert 16 <= int(kept) < 64
