import io

import pytest
from rich.console import Console

from tests.unit.observe.recorded_events import generation, plan, recorded
from varuna.core.plan import Copies
from varuna.core.times import RankTimes
from varuna.core.units import format_rate
from varuna.fleet.state.run_events import GenerationTimed, WorkerLost
from varuna.observe.progress import (
    closing_line,
    generation_table,
    morph_line,
    plan_line,
    progress_line,
    risk_line,
)
from varuna.observe.report import GenerationRow, Morph, PlanShape, RunHistory


def row(generation: int, shape: tuple[int, int], **facts: object) -> GenerationRow:
    values = {"cause": "start", "workers": 4, "first_step": 0, "recovery_seconds": None, "steps_redone": 0, **facts}
    return GenerationRow.model_validate(
        {"generation": generation, "plan": PlanShape.of(plan(*shape)), **values},
    )


@pytest.mark.parametrize(("rate", "text"), [(0.52, "0.52"), (41_234, "41.2k"), (2_500_000, "2.5M"), (12, "12")])
def test_rates_have_three_digits(rate: float, text: str) -> None:
    assert format_rate(rate) == text


def test_the_progress_line_counts_steps_from_one() -> None:
    line = progress_line(11, 48, 4.25, 64.0, 128, row(2, (2, 2)))
    assert line == "step 12/48  loss 4.2500  8.19k tokens/s  plan 2x2  4 workers"
    line = progress_line(1199, 0, 4.25, 64.0, None, row(2, (2, 2)), 42.4)
    assert line == "step 1200  loss 4.2500  64 examples/s  42 s left  plan 2x2  4 workers"


def test_without_tokens_examples_are_counted() -> None:
    assert "64 examples/s" in progress_line(0, 48, 4.25, 64.0, None, row(1, (2, 2)))


def test_a_morph_line_names_cause_plans_and_price() -> None:
    after = row(2, (3, 1), cause="worker w3 killed by SIGKILL", recovery_seconds=1.31, steps_redone=1)
    assert morph_line(Morph(row(1, (2, 2)), after)) == (
        "morph  worker w3 killed by SIGKILL   2x2 → 3x1   next step after 1.3 s   1 step redone"
    )


def test_an_overtaken_morph_says_so() -> None:
    assert "superseded" in morph_line(Morph(row(1, (2, 2)), row(2, (3, 1))))


def test_the_table_has_a_row_per_generation() -> None:
    rows = [row(1, (2, 2)), row(2, (3, 1), first_step=8, recovery_seconds=1.0, cause="lost")]
    console = Console(file=io.StringIO(), width=120)
    console.print(generation_table(rows, last_step=20))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "0-7" in text
    assert "8-20" in text
    assert "lost" in text


def test_the_plan_line_counts_spares_and_names_m() -> None:
    assert plan_line(row(0, (1, 2))) == (
        "plan   1x2 (stages x replicas) on 4 workers, 2 of them idle   8 micro-batches of 2 (m=2)"
    )


def test_a_plan_with_one_copy_says_what_a_loss_would_cost() -> None:
    def risk(
        replicas: int = 1, copies: Copies = Copies.NONE, saved: str | None = None, *, rescues: bool = False
    ) -> str:
        return risk_line(replicas, copies, checkpoint_dir=saved, rescues=rescues)

    assert risk(replicas=2) == ""
    assert risk(saved="/saved").endswith("to the newest checkpoint in /saved")
    assert "a copy of its state that is some seconds old" in risk(saved="/tmp/run/rescue", rescues=True)
    assert "step 0, because the script gives no checkpoints=" in risk()
    copied = risk(copies=Copies.STATE)
    assert copied.startswith("each worker's state is copied to another one's memory every few seconds: if a worker is")
    assert "no room for another" in risk(copies=Copies.MEMORY)


def test_the_closing_line_counts_steps_and_losses_survived() -> None:
    history = RunHistory()
    for event in (generation(0, (1, 2)), recorded(0, 4.0), WorkerLost(worker="w1", rank=1, cause="killed")):
        history.add_event(event)
    history.add_event(recorded(1, 3.0))
    assert closing_line(history, 0, 90.0, "/saved/step-2") == (
        "done   2 steps in 1m 30s   loss 4.0000 to 3.0000   1 worker lost, 0 steps redone   checkpoint /saved/step-2"
    )
    times = RankTimes(steps=20, step_s=1.5, waited_s=0.0, reduced_s=0.0, actions={})
    history.add_event(GenerationTimed(generation=0, predicted_s=1.48, stages=(times,)))
    assert "   a step took 1.5 s, 1.4% more than predicted   1 worker lost" in closing_line(history, 0, 90.0, None)
    assert closing_line(RunHistory(), 1, 90.0, None) == "ended  0 steps in 1m 30s   no checkpoint"
    history.add_event(recorded(2600, 2.0))  # as after a manager that read the newest steps of its journal only
    assert closing_line(history, 0, 90.0, None).startswith("done   2,601 steps in 1m 30s   loss 4.0000 to 2.0000")
    assert closing_line(history, 0, 90.0, None, before=2).startswith("done   2,601 steps, 2,599 of them in 1m 30s   ")
