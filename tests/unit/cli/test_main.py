import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from varuna.cli import main as cli
from varuna.core.errors import NoPlanError, UsageError

runner = CliRunner()


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code that a shell would see."""
    monkeypatch.setattr(sys, "argv", ["varuna", *arguments])
    with pytest.raises(SystemExit) as leave:
        sys.exit(cli.main())
    assert isinstance(leave.value.code, int)
    return leave.value.code


def test_help_names_the_commands_with_examples() -> None:
    result = runner.invoke(cli.app, ["--help"])
    assert result.exit_code == 0
    assert "varuna run --workers 4 train.py" in result.output
    assert "demo" in result.output


@pytest.mark.parametrize("command", ["run", "demo"])
def test_each_command_explains_itself(command: str) -> None:
    result = runner.invoke(cli.app, [command, "--help"])
    assert result.exit_code == 0
    assert "workers" in result.output


def test_a_demo_that_cannot_write_its_report_says_where(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file/report\.json: Not a directory\. Give --output another folder"):
        runner.invoke(cli.app, ["demo", "--output", str(tmp_path / "file")], catch_exceptions=False)


def test_version_is_printed() -> None:
    result = runner.invoke(cli.app, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith("varuna ")


def test_help_loads_neither_torch_nor_the_server() -> None:
    code = (
        "import sys, varuna.cli.main as cli\n"
        "try: cli.app(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(bool({'torch', 'uvicorn', 'starlette', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=60, check=False)
    assert done.returncode == 0


def test_a_missing_script_ends_in_a_hint(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(monkeypatch, "run", "--workers", "2", "nowhere.py") == 2
    error = capsys.readouterr().err
    assert "nowhere.py" in error
    assert "Name the Python file that you train with" in error
    assert "Traceback" not in error


def test_a_bad_size_names_what_it_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert run_main(monkeypatch, "run", "--memory-per-worker", "lots", str(script)) == 2
    assert "--memory-per-worker=lots" in capsys.readouterr().err


def test_overwrite_alone_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert run_main(monkeypatch, "run", "--overwrite", str(script)) == 2
    assert "--new" in capsys.readouterr().err


def test_a_mistyped_command_gets_a_suggestion(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "rnu") == 2
    assert "run" in capsys.readouterr().err


def test_a_script_in_place_of_a_command_is_shown_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "train.py", "--lr", "1") == 2
    assert "varuna run train.py --lr 1" in capsys.readouterr().err


def test_an_error_keeps_its_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise NoPlanError("no plan fits: deepen the pipeline")

    monkeypatch.setattr(cli, "app", refuse)
    assert run_main(monkeypatch) == 3
    assert capsys.readouterr().err == "varuna: no plan fits: deepen the pipeline\n"


def test_where_nothing_can_be_written_a_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def make_a_folder() -> None:
        tempfile.mkdtemp()

    monkeypatch.setattr(cli, "app", make_a_folder)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    assert run_main(monkeypatch) == 2
    assert capsys.readouterr().err.startswith("varuna: no folder for temporary files can be written. In a container")


def test_a_bug_becomes_one_line_and_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def break_down() -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(cli, "app", break_down)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run_main(monkeypatch) == 70
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "internal error" in error
    [file] = tmp_path.iterdir()
    assert str(file) in error
    assert "break_down" in file.read_text()
