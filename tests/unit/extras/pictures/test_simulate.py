import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from tests.depth import by_depth
from tests.unit.planner.models import calibrated, model, section
from varuna.calibration.file import write_calibration
from varuna.calibration.format import Calibrations
from varuna.cli import main as cli
from varuna.core.errors import UsageError, VarunaError
from varuna.schedule.policy import POLICIES

FIGURE = ("--unit", "--stages", "4", "--micro-batches", "5")
runner = CliRunner()


def run(*arguments: str) -> Result:
    return runner.invoke(cli.app, ["simulate", *arguments], env={"COLUMNS": "120"})


def found(*arguments: str) -> dict[str, object]:
    result = run(*arguments, "--json")
    assert result.exception is None, result.exception
    report: dict[str, object] = json.loads(result.output)
    return report


def refusal(*arguments: str) -> str:
    error = run(*arguments).exception
    assert isinstance(error, UsageError)
    return str(error)


@pytest.mark.parametrize(
    ("policy", "units"), [("gpipe", 28), ("varuna-strict", 27), ("varuna", 27), ("1f1b", 27), ("adaptive", 24)]
)
def test_the_papers_figure_in_units_of_a_forward(policy: str, units: int) -> None:
    report = found(*FIGURE, "--policy", policy)
    assert report["length"] == units
    assert 0 < float(str(report["bubble"])) < 0.5


def test_json_says_what_each_stage_holds_and_waits_for() -> None:
    report = found(*FIGURE, "--policy", "gpipe", "--network", "0.5,0.1,0.2", "--seed", "3")
    stages = report["stages"]
    assert isinstance(stages, list)
    assert [(stage["stash"], stage["live"]) for stage in stages] == [(5, 1)] * 4
    assert all(stage["transfer"] > 0 for stage in stages)
    assert sum(stages[0][part] for part in ("compute", "transfer", "idle")) == pytest.approx(report["length"])


def test_a_table_is_for_people() -> None:
    result = run(*FIGURE)
    assert "adaptive, 4 stages, 5 micro-batches: 24 units, bubble 25.0%" in result.output
    assert "transfer: idle while a message was on its way" in result.output


def test_the_step_is_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "step.svg"
    assert run(*FIGURE, "--svg", str(picture)).exit_code == 0
    assert ET.fromstring(picture.read_text()).tag.endswith("svg")


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("calibrations") / "small.json"
    write_calibration(Calibrations.of_one(calibrated(model([section()] * 8))), path)
    return str(path)


def test_a_calibration_gives_seconds_of_the_best_plan_or_of_the_stages_asked_for(calibration: str) -> None:
    shape = ("--calibration", calibration, "--gpus", "8", "--global-batch", "64")
    best, deep = found(*shape), found(*shape, "--stages", "4", "--split-last", "3")
    assert isinstance(deep["stages"], list)
    assert len(deep["stages"]) == 4
    assert deep["split_last"] == 3
    assert float(str(best["step_s"])) <= float(str(deep["step_s"])) * 1.01
    assert all(stage["bytes"] > 0 and stage["compute_s"] > 0 for stage in deep["stages"])
    assert "examples per second" in run(*shape).output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "either --unit --stages P --micro-batches N, or --calibration FILE"),
        ((*FIGURE, "--calibration", "some.json"), "either --unit"),
        (("--unit", "--stages", "4"), "--unit needs a shape"),
        ((*FIGURE, "--gpus", "4"), "--gpus has no effect with --unit"),
        ((*FIGURE, "--policy", "zb"), "no schedule policy 'zb'. Choose one of gpipe"),
        ((*FIGURE, "--policy", "gpipe", "--split-last", "1"), "'gpipe' never splits a backward"),
        (("--unit", "--stages", "100000", "--micro-batches", "1000"), "100,000,000 forwards, more than 1,000,000"),
        ((*FIGURE, "--svg", "/no/such/folder/step.svg"), "cannot write /no/such/folder/step.svg"),
        (("--calibration", "some.json", "--network", "0,0,0"), "--network has no effect with --calibration"),
        (("--calibration", "some.json"), "--calibration needs --gpus N and --global-batch M"),
        (("--calibration", "no.json", "--gpus", "2", "--global-batch", "8"), "cannot read a calibration from no.json"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: tuple[str, ...], message: str) -> None:
    assert message in refusal(*arguments)


@pytest.mark.parametrize("text", ["", "1,2", "1,2,3,4", "a,b,c", "nan,0,0", "0,inf,0", "0,0,-1", "1e9,0,0"])
def test_a_network_is_three_numbers_that_a_network_can_have(text: str) -> None:
    assert f"--network {text!r} is not a network" in refusal(*FIGURE, f"--network={text}")


@given(
    policy=st.sampled_from(POLICIES),
    stages=st.integers(1, 6),
    micro_batches=st.integers(1, 9),
    network=st.one_of(st.just("0,0,0"), st.from_regex(r"\A[-0-9.,enaif]{0,12}\Z")),
    split_last=st.integers(0, 12),
)
@settings(max_examples=by_depth(6, 25), deadline=None)
def test_whatever_is_typed_ends_in_an_answer_or_a_refusal(
    policy: str, stages: int, micro_batches: int, network: str, split_last: int
) -> None:
    arguments = ["--unit", "--stages", str(stages), "--micro-batches", str(micro_batches), "--policy", policy]
    result = run(*arguments, f"--network={network}", "--split-last", str(split_last), "--json")
    if result.exception is None:
        assert json.loads(result.output)["length"] >= 3 * micro_batches
    else:
        assert isinstance(result.exception, VarunaError)
        assert result.exception.exit_code == 2
