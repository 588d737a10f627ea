"""A loss of several counts over real processes that die: as plain PyTorch has it of the whole batch."""

import sys
from pathlib import Path

import pytest

from tests.scenarios.launch import json_log, run, varuna_command

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]
SCRIPT = str(Path(__file__).with_name("several_terms.py"))


def test_terms_of_a_loss_survive_steps_that_are_run_again_and_morphs(tmp_path: Path) -> None:
    """Workers die amid forwards, when counts are added up already, and amid the reduction: both steps are run again."""
    plain = run([sys.executable, SCRIPT, "--plain"])
    assert plain.code == 0, plain.err
    flags = ["--stages", "2", "--json-log", str(tmp_path / "log.jsonl")]
    more = ("--misbehave", "F:end:3:0,reduce:begin:9:1", "--folder", str(tmp_path), "--compile", "aot_eager")
    done = run(varuna_command(4, flags, *more, script=SCRIPT))
    assert done.code == 0, done.err
    log = json_log(tmp_path / "log.jsonl")
    assert len(list(tmp_path.glob("done-*"))) == 2
    assert [line["step"] for line in log] == list(range(24))  # no committed step was redone
    assert log[-1]["generation"] >= 2
    for line in log:
        assert line["loss"] == pytest.approx(plain.losses[line["step"]], rel=1e-5), line
