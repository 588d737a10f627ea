"""A model that fits into no plan is trained from host memory, and a worker is killed on the way."""

import sys
from pathlib import Path

import pytest

from tests.scenarios import frozen_job
from tests.scenarios.launch import run, varuna_command
from varuna.core.units import parse_bytes

pytestmark = pytest.mark.timeout(300)
SCRIPT = str(Path(frozen_job.__file__))
PER_WORKER = "430KiB"


def test_a_model_that_fits_no_other_plan_trains_with_the_losses_of_one_process(tmp_path: Path) -> None:
    base_bytes = sum(each.nbytes for each in frozen_job.Base().parameters() if not each.requires_grad)
    assert base_bytes > 1.5 * parse_bytes(PER_WORKER, "")
    alone = run([sys.executable, SCRIPT])
    assert alone.code == 0, alone.err
    killed = tmp_path / "killed"
    flags = ["--memory-per-worker", PER_WORKER]
    streamed = run(varuna_command(2, flags, "--killed", str(killed), script=SCRIPT))
    assert streamed.code == 0, streamed.err
    assert killed.exists()
    assert "frozen parameters in host memory" in streamed.err
    assert len(alone.losses) == frozen_job.STEPS
    assert streamed.losses == pytest.approx(alone.losses, rel=1e-6)
