import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.unit.fleet.support import make_job
from varuna.calibration.file import write_calibration
from varuna.calibration.format import Calibrations
from varuna.calibration.nominal import nominal_calibration
from varuna.cli import main as cli
from varuna.cli.shared.run_options import RunOptions
from varuna.core.errors import UsageError
from varuna.fleet.state.run_events import Budgeted, Priced

NOTHING = "import varuna\n"
PARSES = "import argparse\nargparse.ArgumentParser().parse_args()\n"
NAMES = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--workers')\n"


def said(capsys: pytest.CaptureFixture[str], script: Path, *arguments: str) -> str:
    """Standard error of ``varuna run``, which fails after looking at the arguments: --overwrite needs --new."""
    with pytest.raises(UsageError, match="--overwrite requires --new"):
        CliRunner().invoke(cli.app, ["run", "--overwrite", str(script), *arguments], catch_exceptions=False)
    return capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("--workers", "4"), ("--workers=4",), ("-n", "4")])
def test_an_option_that_would_be_lost_is_an_error(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (script := tmp_path / "train.py").write_text(NOTHING)
    with pytest.raises(UsageError, match=r"reads no arguments.*varuna run (--workers|-n) \.\.\. .*train\.py"):
        CliRunner().invoke(cli.app, ["run", str(script), *arguments], catch_exceptions=False)


def test_an_option_that_the_script_may_take_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (script := tmp_path / "train.py").write_text(PARSES)
    found = CliRunner().invoke(cli.app, ["run", "--overwrite", str(script), "--workers", "4"])
    assert "warning: --workers stands after" in found.output
    (script := tmp_path / "main.py").write_text("from options import parse\n")
    (tmp_path / "options.py").touch()
    found = CliRunner().invoke(cli.app, ["run", "--overwrite", str(script), "--stages", "2"])
    assert "warning: --stages stands after" in found.output


@pytest.mark.parametrize(
    ("text", "arguments"), [(NAMES, ("--workers", "4")), (NOTHING, ("--", "--workers", "4")), (NOTHING, ("--lr", "1"))]
)
def test_what_is_the_scripts_for_certain_is_not_mentioned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, arguments: tuple[str, ...]
) -> None:
    (script := tmp_path / "train.py").write_text(text)
    assert "stands after" not in said(capsys, script, *arguments)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_options(shell: str) -> None:
    assert "_VARUNA_COMPLETE" in CliRunner().invoke(cli.app, ["completion", shell]).output


def test_the_command_answers_a_shell_that_completes() -> None:
    asked = {"_VARUNA_COMPLETE": "complete_bash", "COMP_WORDS": "varuna run --wor", "COMP_CWORD": "2"}
    command = [sys.executable, "-c", "from varuna.cli.main import main; import sys; sys.argv = ['varuna']; main()"]
    done = subprocess.run(command, env=asked, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["--workers"]


def test_a_price_is_the_users_or_else_the_calibrations(tmp_path: Path) -> None:
    def price_of(price: float | None, on_demand_price: float | None, calibration: Path | None) -> Priced | None:
        return RunOptions(price=price, on_demand_price=on_demand_price, calibration=calibration).priced

    assert price_of(None, None, None) is None
    assert price_of(0.5, 2.0, None) == Priced(per_hour=0.5, on_demand_per_hour=2.0)
    known = Calibrations.of_one(nominal_calibration(make_job().model))
    hardware = known.first.hardware.model_copy(update={"price_per_hour": 0.25})
    write_calibration(known, given := tmp_path / "given.json")
    write_calibration(
        known.each(lambda each: each.model_copy(update={"hardware": hardware})), priced := tmp_path / "priced.json"
    )
    assert price_of(None, None, given) is None
    assert price_of(None, None, priced) == Priced(per_hour=0.25)
    assert price_of(0.0, None, priced) == Priced(per_hour=0.0)
    with pytest.raises(UsageError, match="give --price"):
        price_of(None, 2.0, None)
    with pytest.raises(UsageError, match="--price nan is not a price"):
        price_of(float("nan"), None, None)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_budget_is_a_number_above_zero(value: float) -> None:
    with pytest.raises(UsageError, match=r"--max-cost .* is no budget. Give dollars above 0"):
        RunOptions(max_cost=value).check()
    with pytest.raises(UsageError, match=r"--max-hours .* is no budget. Give hours above 0"):
        RunOptions(max_hours=value).check()


def test_a_budget_may_have_one_limit_or_both() -> None:
    assert RunOptions().budget is None
    assert RunOptions(max_cost=20.0).budget == Budgeted(max_dollars=20.0)
    assert RunOptions(max_cost=20.0, max_hours=0.5).budget == Budgeted(max_dollars=20.0, max_hours=0.5)
