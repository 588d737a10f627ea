import json
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as some
from typer.testing import CliRunner

from tests.depth import by_depth
from tests.unit.extras.replay.models import make_calibration
from varuna.calibration.file import write_calibration
from varuna.cli.main import app
from varuna.core.errors import NoPlanError, UsageError
from varuna.extras.replay.costs import MorphCosts
from varuna.extras.replay.figure import draw
from varuna.extras.replay.recording import read_trace
from varuna.extras.replay.replay import Replay
from varuna.extras.replay.report import ReplayOutcome
from varuna.extras.replay.trace import Change, Happening, Trace, assembled

FREE = MorphCosts(stop_s=0.0, form_s=0.0, warm_s=0.0, checkpoints=False)


def trace(*changes: tuple[float, Iterable[str], Iterable[str]], end_s: float) -> Trace:
    return Trace(tuple(Change(at_s, tuple(added), tuple(removed)) for at_s, added, removed in changes), end_s)


def replay(changes: Trace, **options: int) -> Replay:
    return Replay(changes, make_calibration(), gpus_per_node=1, global_batch=64, **options)


QUIET = trace((0, "abcdefgh", ()), end_s=1800)
CHURN = trace((0, "abcdefgh", ()), (430, (), "b"), (800, "i", ()), (1270, (), "ac"), (1500, "jk", ()), end_s=1800)


@lru_cache
def churned() -> ReplayOutcome:
    return replay(CHURN).morphing()


def test_without_changes_only_the_start_is_lost() -> None:
    outcome = replay(QUIET).morphing()
    assert outcome.morphs == {"start": 1}
    assert 0.96 < outcome.goodput < 0.98
    assert outcome.steps_redone == 0
    assert outcome.samples == outcome.steps * 64
    assert outcome.gpu_hours == pytest.approx(4)
    assert outcome.dollars == pytest.approx(4)


def test_free_morphs_come_close_to_the_ideal_and_never_pass_it() -> None:
    outcome = replay(QUIET).morphing(FREE)
    assert 0.99 < outcome.goodput <= 1.0


def test_losses_and_gains_are_morphs_and_lose_a_step_at_most_while_sections_have_holders() -> None:
    outcome = churned()
    assert outcome.morphs["start"] == 1
    assert sum(outcome.morphs.values()) >= 4
    assert outcome.steps_redone <= 2 + 60 // 3  # two losses, one of which may take a section's last holder
    assert 0.8 < outcome.goodput < 0.99
    assert outcome.goodput > replay(CHURN).restarting().goodput


def test_a_notice_saves_the_step_in_flight() -> None:
    one = trace((0, "abcdefgh", ()), (601.3, (), "b"), end_s=900)
    silent, warned = replay(one).morphing(), replay(one).morphing(notice_s=120)
    assert silent.steps_redone >= 1
    assert warned.steps_redone == 0
    assert warned.morphs == {"start": 1, "planned loss": 1}
    assert warned.samples >= silent.samples


def test_losing_everybody_goes_back_to_the_checkpoint_and_the_run_goes_on() -> None:
    gone = trace((0, "abcdefgh", ()), (600, (), "abcdefgh"), (700, "ijklmnop", ()), end_s=1300)
    outcome = replay(gone).morphing()
    assert outcome.morphs == {"start": 1, "rollback": 1}
    assert 0 < outcome.steps_redone < 40
    assert outcome.goodput > 0.75


def test_stretches_cover_the_run_once() -> None:
    outcome = churned()
    ends = [(stretch.begin_s, stretch.end_s) for stretch in outcome.stretches]
    assert ends == sorted(ends)
    assert all(a[1] == b[0] for a, b in pairwise(ends))
    assert sum(outcome.plans.values()) == pytest.approx(1.0, abs=0.05)  # but for the time before the first plan


def test_a_restart_loses_what_the_checkpoint_does_not_have() -> None:
    outcome = replay(CHURN).restarting()
    assert outcome.morphs == {"gain": 3, "loss": 2}
    assert outcome.steps_redone > 0
    assert outcome.training_share < 1 - 5 * 110 / 1800


@pytest.mark.nightly
def test_the_same_trace_gives_the_same_figures() -> None:
    assert replay(CHURN).morphing() == churned()


def test_the_picture_is_svg_with_every_plan_and_the_totals() -> None:
    outcome = churned()
    root = ET.fromstring(draw(outcome, 1, "a <trace> & more"))
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "a <trace> & more" in texts
    assert outcome.stretches[-1].plan is not None
    assert outcome.stretches[-1].plan.shape in texts
    assert any(f"goodput {100 * outcome.goodput:.1f} %" in text for text in texts)


def test_what_cannot_run_says_why() -> None:
    with pytest.raises(NoPlanError, match="no plan fits"):
        replay(trace((0, "ab", ()), end_s=10))
    with pytest.raises(UsageError, match="no node"):
        replay(trace((0, "", ()), end_s=10))


def test_the_command_prints_json_and_draws(tmp_path: Path) -> None:
    calibration, csv, svg = tmp_path / "c.json", tmp_path / "trace.csv", tmp_path / "picture.svg"
    write_calibration(make_calibration(), calibration)
    csv.write_text("".join(f"0,add,{node}\n" for node in "abcdefgh") + "300000,remove,b\n500000,add,i\n")
    command = ["replay", str(csv), "--calibration", str(calibration), "--global-batch", "64", "--recovery", "restart"]
    done = CliRunner().invoke(app, [*command, "--json", "--svg", str(svg)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["policy"] == "restart"
    assert found["goodput"] < found["beside"]["goodput"] <= 1
    ET.parse(svg)
    printed = CliRunner().invoke(app, command)
    assert "policy restart: goodput" in printed.stdout
    assert "policy morph: goodput" in printed.stdout


@some.composite
def recordings(draw: some.DrawFn) -> Trace:
    """Nodes that come and go in any pattern, several at one instant, named or counted."""
    at_s, alive = 0.0, set[str]()
    told: list[Happening] = []
    for _ in range(draw(some.integers(1, 12))):
        for _ in range(draw(some.integers(1, 4))):
            if draw(some.booleans()) and not any(each.at_s == at_s and each.node is None for each in told):
                node = draw(some.sampled_from("abcdef"))
                told.append(Happening(at_s, node, comes=node not in alive))
                alive ^= {node}
            elif all(each.node is None for each in told):
                told.append(Happening(at_s, count=draw(some.integers(0, 6))))
        at_s += draw(some.sampled_from([0.0, 0.4, 7.0, 44.0, 300.0]))
    return assembled(told, at_s + draw(some.sampled_from([0.0, 1.0, 400.0])), "seconds")


def test_an_instant_that_counts_fewer_nodes_than_it_names_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("0,0\n0,add,a\n")
    with pytest.raises(UsageError, match="counts 0 nodes 0 s after its start, but names 1 that come"):
        read_trace(path)


LATE = Trace(changes=(Change(0.0, ("a",), ()), Change(0.4, ("b", "c", "d"), ())), end_s=0.4)
"""Its nodes come as it ends."""


@pytest.mark.nightly
@settings(max_examples=by_depth(3, 20), deadline=None)
@given(recordings(), some.sampled_from([0.0, 30.0, 600.0]))
@example(LATE, 0.0)
def test_any_recording_can_be_replayed(recorded: Trace, notice_s: float) -> None:
    try:
        cluster = replay(recorded)
    except (UsageError, NoPlanError):
        assert recorded.most_nodes < 4 or recorded.end_s == 0  # fewer nodes than hold the model
        return
    for outcome in (cluster.morphing(notice_s=notice_s), cluster.restarting()):
        assert 0 <= outcome.goodput <= 1
        assert ET.fromstring(draw(outcome, 1, "any")) is not None
        assert json.dumps(outcome.describe())
