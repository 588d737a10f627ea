from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.unit.calibration.test_fit import measured
from varuna.calibration.fit import assemble
from varuna.calibration.samples import RingSamples, Sized
from varuna.cli import main as cli
from varuna.cli.calibrate import show
from varuna.core.errors import UsageError
from varuna.process.plain_console import PlainConsole


def _calibrate(*arguments: object) -> None:
    CliRunner().invoke(cli.app, ["calibrate", *map(str, arguments)], catch_exceptions=False)


def test_what_cannot_be_written_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    with pytest.raises(UsageError, match="no script at"):
        _calibrate("--output", tmp_path / "out.json", script)
    script.write_text("raise SystemExit('never run')")
    with pytest.raises(UsageError, match=r"cannot write .*Give another file with --output"):
        _calibrate("--output", tmp_path / "no" / "out.json", script)


def test_a_calibration_is_shown_per_example(capsys: pytest.CaptureFixture[str]) -> None:
    ring = RingSamples(ranks=2, in_flight=1, samples=(Sized(0, 0.004), Sized(10**6, 1.004)))
    messages = (Sized(64, 0.001), Sized(10**6, 1.001))
    show(PlainConsole(width=200), assemble([measured(rings=(ring,), messages=messages)], name="tiny"))
    shown = capsys.readouterr().out
    assert "Sections on abacus" in shown
    assert "layer0 (1)" in shown
    assert "1.5e+03" in shown, "R, ms per example"
    assert "an all-reduce over 2 with 1 in flight: 2.000 ms a round, 977 KiB/s" in shown
    assert "note: the cost of an action is assumed" in shown
