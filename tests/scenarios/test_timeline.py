"""Timelines and profiles of real runs: asked for while they train, and found in their folders afterwards."""

import gzip
import json
import signal
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import pytest

from tests.scenarios.launch import Done, environment, run, varuna, varuna_command
from tests.scenarios.warm import Process
from tests.unit.extras.pictures.test_chrome_trace import check_format
from tests.waiting import wait_for
from varuna.core.times import StepTimeline
from varuna.extras.pictures.step_picture import simulation_of
from varuna.fleet.manager.step_desk import split_waits
from varuna.fleet.run_folder.timelines import kept_steps, read_timeline

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]
STEPS, AHEAD = 60, 20
JOB = ["--steps", str(STEPS), "--layers", "4", "--global-batch", "16"]
SLOWLY = ["--compute", "0.01"]


def command(*words: str, **more: str) -> Done:
    return run([sys.executable, "-m", "varuna.cli.main", *words], **more)


class Living:
    """A run of four workers as 2x2 in the background."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder, self.log = folder / "run", folder / "out"
        words = varuna_command(4, ["--run-dir", str(self.folder), *flags], *JOB, *SLOWLY)
        with self.log.open("wb") as out, (folder / "err").open("wb") as err:
            self.process = Process(words, stdout=out, stderr=err, env=environment(VARUNA_STAGES="2"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)

    def steps(self) -> int:
        return self.log.read_text().count("\nstep ")

    def end(self) -> dict[int, float]:
        assert self.process.wait(200) == 0
        return Done(0, self.log.read_text(), "").losses


def check_measured(found: StepTimeline) -> None:
    """Check what must be true of each measured step of a whole run on one machine."""
    plan = found.plan
    assert (plan.shape, len(found.ranks), dict(found.missing)) == ("2x2", 4, {})
    assert len({rank.clock for rank in found.ranks}) == 1
    ranks = {rank.rank: rank for rank in found.ranks}
    for number, rank in ranks.items():
        replica, stage = plan.place_of(number)
        mine = list(range(len(plan.micro_batches_of(replica))))
        assert [did.micro_batch for did in rank.actions if did.kind == "F"] == mine
        assert sorted(did.micro_batch for did in rank.actions if did.kind in "BI") == mine
        assert all(before.end_s <= after.begin_s for before, after in pairwise(rank.actions))
        neighbour, kinds, kind = (number - 1, "F", "activation") if stage else (number + 1, "BI", "gradient")
        sender = ranks[neighbour]
        left_s = {s.micro_batch: sender.zero_s + s.begin_s for s in sender.sent if s.kind == kind}
        assert sorted(left_s) == mine
        came_s = {came.micro_batch: rank.zero_s + came.end_s for came in rank.came if came.kind == kind}
        assert sorted(came_s) == mine
        assert all(left_s[micro_batch] <= came_s[micro_batch] for micro_batch in mine)
        waited_until = {wait.end_s for wait in rank.waits}
        for did in rank.actions:
            if did.kind in kinds:  # its time of choosing counts with it, unless the rank had waited
                needed_s = did.begin_s if did.begin_s in waited_until else did.end_s
                assert left_s[did.micro_batch] <= rank.zero_s + needed_s


def check_split(found: StepTimeline) -> None:
    """All waits are told apart, on one clock; some of them are for messages that are on their way."""
    split = split_waits(found)
    assert split is not None
    assert split.uncertain_s == 0
    for stage in range(found.plan.stages):
        ranks = [rank for rank in found.ranks if found.plan.place_of(rank.rank).stage == stage]
        waited_s = sum(wait.end_s - wait.begin_s for rank in ranks for wait in rank.waits) / len(ranks)
        assert split.transfer_s[stage] + split.idle_s[stage] == pytest.approx(waited_s)
    assert sum(split.transfer_s) > 0


def check_simulated(found: StepTimeline) -> None:
    """The simulator does the same work: forwards in one order and backwards in one, whatever comes between."""
    trace = simulation_of(found)
    for rank in found.ranks:
        simulated = trace.rows[found.plan.place_of(rank.rank).stage]
        row = [(action.kind.value, action.micro_batch) for action, _, _ in simulated]
        done = [(did.kind, did.micro_batch) for did in rank.actions]
        for kinds in ("F", "BI", "BW"):
            assert [each for each in row if each[0] in kinds] == [each for each in done if each[0] in kinds]


def test_a_living_run_shows_steps_and_profiles_and_its_losses_stay_the_same(tmp_path: Path) -> None:
    with Living(tmp_path) as living:
        wait_for(lambda: living.steps() > 2, 120)
        where = ("--run", str(living.folder))
        picture, trace = tmp_path / "step.svg", tmp_path / "step.json"
        first, last = AHEAD + 10, AHEAD + 11
        words = ["profile", *where, "--rank", "1", "--steps", f"{first}:{last}", "-o", str(tmp_path / "profiles")]
        profiling = Process([sys.executable, "-m", "varuna.cli.main", *words], env=environment())
        beyond = command("timeline", *where, "--step", str(STEPS))
        assert f"there is no step {STEPS}: the run has steps 0 to {STEPS - 1}" in beyond.err
        ahead = command("timeline", *where, "--step", str(AHEAD), "--simulated", "-o", str(picture))
        assert ahead.code == 0, ahead.err
        assert f"step {AHEAD} of plan 2x2" in ahead.out
        assert "Replica 1, measured" in picture.read_text()
        again = command("timeline", *where, "--step", str(AHEAD), "--simulated", "-o", str(trace))
        assert again.code == 0, again.err
        check_format(json.loads(trace.read_text()))
        assert profiling.wait(100) == 0
        losses = living.end()

    profile: dict[str, Any] = json.loads(
        gzip.decompress((tmp_path / "profiles" / f"rank-1-steps-{first}-{last}.json.gz").read_bytes())
    )
    assert any("addmm" in str(event.get("name")) for event in profile["traceEvents"])
    assert kept_steps(living.folder) == [4, AHEAD, STEPS - 1]
    for step in kept_steps(living.folder):
        found = read_timeline(living.folder, step)
        assert found is not None
        check_measured(found)
        check_split(found)
        check_simulated(found)
    over = command("timeline", *where, "-o", str(picture))
    assert f"step {STEPS - 1} of plan 2x2" in over.out
    lost = command("timeline", *where, "--step", "12")
    assert f"step 12 was recorded in its folder. Recorded: 4, {AHEAD}, {STEPS - 1}" in lost.err
    undisturbed = varuna(4, [], *JOB[2:], "--steps", str(last + 3), VARUNA_STAGES="2").losses
    assert {step: losses[step] for step in undisturbed} == undisturbed


def test_the_last_step_before_a_kill_is_kept_by_those_who_are_left(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fault = ["--misbehave", "B:begin:20:1", "--folder", str(tmp_path)]
    done = varuna(4, ["--run-dir", str(folder)], *JOB[2:], "--steps", "40", *fault, VARUNA_STAGES="2")
    assert done.code == 0, done.err
    found = read_timeline(folder, 19)
    assert found is not None
    [(_, why)] = found.missing.items()
    assert "killed by SIGKILL" in why
    picture = tmp_path / "step.svg"
    told = command("timeline", "--run", str(folder), "--step", "19", "--simulated", "-o", str(picture))
    assert (told.code, "is missing: worker w" in told.err) == (0, True)
    assert "killed by SIGKILL" in picture.read_text()
