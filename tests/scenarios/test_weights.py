"""Every way to begin a run gives the same losses in every way to start it."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scenarios import pretrained
from tests.scenarios.launch import python, run, torchrun, varuna, varuna_command

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]

SCRIPT = str(Path(pretrained.__file__))


def test_a_saved_model_trains_as_in_plain_pytorch(tmp_path: Path) -> None:
    torch.manual_seed(5)
    model: Any = pretrained.build()
    for name, size in (("single", "5GB"), ("sharded", "8KB")):
        model.save_pretrained(tmp_path / name, max_shard_size=size)
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    expected = dict(enumerate(pretrained.plain(tmp_path / "single", 6, 8)))
    one = run([sys.executable, SCRIPT, "--weights", str(tmp_path / "single")])
    four = run(varuna_command(4, ["--stages", "2"], "--weights", str(tmp_path / "sharded"), script=SCRIPT))
    for done in (one, four):
        assert done.code == 0, done.err
        assert done.losses == pytest.approx(expected, rel=1e-5)


def test_parameters_drawn_one_by_one_do_not_depend_on_the_plan() -> None:
    steps = ("--steps", "6", "--init", "per_parameter")
    one, four = python(*steps), torchrun(4, *steps, VARUNA_STAGES="2")
    assert one.code == 0, one.err
    assert four.code == 0, four.err
    assert "2x2" in four.err
    assert four.losses == pytest.approx(one.losses, rel=1e-5)
    assert len(one.losses) == 6


def test_workers_that_begin_differently_stop_before_the_first_step() -> None:
    for done in (torchrun(2, "--differs", VARUNA_STAGES="1"), varuna(2, ["--stages", "1"], "--differs")):
        assert done.code != 0
        assert not done.losses
        assert "starts with different parameters on rank" in done.err
        assert 'init="per_parameter"' in done.err
