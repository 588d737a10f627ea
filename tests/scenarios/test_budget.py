"""A budget ends a run in time, with a checkpoint and a model; the same command with a larger one continues it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.scenarios.launch import Alone, varuna
from varuna.fleet.page.costs import Meter
from varuna.fleet.run_folder.past_events import PastStep, events_and_steps, used_before
from varuna.fleet.state.run_events import RunEnded

pytestmark = pytest.mark.timeout(300)
SHORT_H, PRICE = 0.009, 100.0
"""32 seconds, in which a worker costs 90 cents."""


def test_a_run_ends_within_its_budget_and_goes_on_with_a_larger_one(tmp_path: Path, alone: Alone) -> None:
    place, run_dir = tmp_path / "checkpoints", tmp_path / "run"
    money = ["--price", str(PRICE), "--run-dir", str(run_dir)]
    job = ("--slow", "0.2", "--checkpoint-dir", str(place))
    first = varuna(2, ["--max-hours", str(SHORT_H), "--max-cost", "5", *money], "--steps", "100000", *job)
    assert first.code == 0, first.err
    assert "the budget of 0.009 hours (--max-hours) is used up but for what saving takes" in first.err
    done = len(first.losses)
    assert 0 < done < 100000
    exported = load_file(run_dir / f"exported-{done}" / "model.safetensors")
    assert exported["embed.weight"].dtype is torch.float32
    (ended,) = (event for _, event in events_and_steps(run_dir) if isinstance(event, RunEnded))
    assert ended.text.endswith("give the same command a larger --max-hours")
    spent = _spent(run_dir)
    assert 0 < spent < 2 * PRICE * SHORT_H  # two workers, to the end

    again = varuna(2, ["--max-hours", str(SHORT_H / 2), *money], "--steps", "100000", *job)
    assert again.code == 2
    assert "this run has already taken" in again.err

    more = varuna(2, ["--max-hours", "1", *money], "--steps", str(done + 3), *job)
    assert more.code == 0, more.err
    assert sorted(more.losses) == [done, done + 1, done + 2]
    assert not (run_dir / f"exported-{done + 3}").exists()  # it was not cut short
    assert _spent(run_dir) > spent
    undisturbed = alone(done + 3)
    for step, loss in {**first.losses, **more.losses}.items():
        assert loss == pytest.approx(undisturbed[step], rel=1e-5), step


def _spent(run_dir: Path) -> float:
    """Dollars, by all starts in a folder."""
    meter = Meter(used_before(run_dir))
    for time_s, event in events_and_steps(run_dir):
        if not isinstance(event, PastStep):
            meter.add_event(event, time_s)
    cost = meter.cost(0.0)
    assert cost is not None
    return cost.spent
