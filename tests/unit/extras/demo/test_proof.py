from tests.unit.observe.recorded_events import plan
from varuna.extras.demo.run import DemoReport
from varuna.observe.report import GenerationRow, PlanShape


def generations(*shapes: tuple[int, int]) -> list[GenerationRow]:
    return [
        GenerationRow(
            generation=i + 1,
            plan=PlanShape.of(plan(*shape)),
            cause="test",
            workers=4,
            first_step=10 * i,
            recovery_seconds=1.0 if i else None,
            steps_redone=0,
        )
        for i, shape in enumerate(shapes)
    ]


def test_a_good_run_has_no_failures() -> None:
    report = DemoReport.of(generations((2, 2), (3, 1), (2, 1)), [2.0, 1.0], [2.0, 1.0000001])
    assert report.failures(morphs=2) == []


def test_a_missing_morph_is_a_failure() -> None:
    report = DemoReport.of(generations((2, 2), (3, 1)), [2.0], [2.0])
    assert report.failures(morphs=3) == ["3 morphs were provoked, but 1 happened"]


def test_p_and_d_must_both_have_changed() -> None:
    [failure] = DemoReport.of(generations((2, 2), (2, 1)), [2.0], [2.0]).failures(morphs=1)
    assert "stages" in failure
    [failure] = DemoReport.of(generations((2, 1), (3, 1)), [2.0], [2.0]).failures(morphs=1)
    assert "replicas" in failure


def test_losses_beyond_the_tolerance_are_a_failure() -> None:
    report = DemoReport.of(generations((2, 2), (3, 1)), [2.0, 1.0], [2.0, 1.0001])
    [failure] = report.failures(morphs=1)
    assert "losses differ" in failure


def test_a_nan_is_a_failure() -> None:
    report = DemoReport.of(generations((2, 2), (3, 1)), [float("nan")], [2.0])
    assert len(report.failures(morphs=1)) == 1


def test_a_restart_is_a_failure() -> None:
    records = generations((2, 2), (3, 1))
    records[1] = records[1].model_copy(update={"first_step": 0})
    [failure] = DemoReport.of(records, [2.0], [2.0]).failures(morphs=1)
    assert "step 0" in failure
