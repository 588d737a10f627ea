import io

import pytest
from rich.console import Console

from tests.unit.observe.recorded_events import generation, morphed, plan, recorded
from varuna.fleet.state.run_events import Notice
from varuna.observe.progress import Progress, RunView, format_rate, generation_table, morph_line, progress_line
from varuna.observe.report import GenerationRow, Morph, PlanShape


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
    assert line == "step 12/48  loss 4.2500  8.19k tokens/s  plan 2x2  generation 2  4 workers"


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


def test_without_a_terminal_progress_lines_are_rare() -> None:
    file, now_s = io.StringIO(), [0.0]
    with Progress(Console(file=file), every_s=5.0, clock=lambda: now_s[0]) as progress:
        for second in range(12):
            now_s[0] = float(second)
            progress.show(f"line {second}")
        progress.show("last", final=True)
    assert file.getvalue().split("\n") == ["line 0", "line 5", "line 10", "last", ""]


def test_permanent_lines_are_never_wrapped() -> None:
    file = io.StringIO()
    Progress(Console(file=file, width=20), live_line=False).tell("x" * 90)
    assert file.getvalue() == "x" * 90 + "\n"


def test_only_permanent_lines_are_written_beside_a_script() -> None:
    file = io.StringIO()
    with Progress(Console(file=file), live_line=False) as progress:
        progress.show("progress", final=True)
        progress.tell("morph")
    assert file.getvalue() == "morph\n"


def test_beside_a_script_a_view_tells_plan_morphs_and_notices_only() -> None:
    file = io.StringIO()
    with Progress(Console(file=file), live_line=False) as progress:
        view = RunView(progress)
        for event in (generation(0, (2, 2)), recorded(0), generation(1, (3, 1)), recorded(1)):
            view(event)
        view(morphed(1, (3, 1), recovery_seconds=0.5))
        view(Notice(text="no checkpoints", warning=True))
    plan_told, morph, warning, end = file.getvalue().split("\n")
    assert plan_told == "plan   2x2 (stages x replicas) on 4 workers   8 micro-batches of 2"
    assert morph.replace("→", "->") == "morph  lost   2x2 -> 3x1   next step after 500 ms   0 steps redone"
    assert warning == "warning  no checkpoints"
    assert end == ""


def test_a_view_shows_the_last_step_even_without_a_terminal() -> None:
    file = io.StringIO()
    with Progress(Console(file=file), clock=lambda: 0.0) as progress:
        view = RunView(progress, total=3, tokens_per_example=128)
        view(generation(0, (2, 2)))
        for step in range(3):
            view(recorded(step))
    lines = file.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["plan", "step 1/3", "step 3/3"]
