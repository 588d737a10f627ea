"""One worker of a run captures the model, whoever dies meanwhile and whoever comes later."""

from pathlib import Path

import pytest

from tests.depth import of_depth
from tests.scenarios.cluster import Cluster, ended
from tests.scenarios.launch import Alone, run, varuna_command
from tests.waiting import wait_for

ARGS = ("--steps", "12", "--dropout", "0.1")
SCRIPT = str(Path(__file__).with_name("noting_job.py"))

pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def undisturbed(alone: Alone) -> dict[int, float]:
    return alone(12, "--dropout", "0.1")


def captures(folder: Path) -> list[str]:
    return (folder / "captures").read_text().split()


@pytest.mark.parametrize(("fault", "count"), of_depth((("none", 1), ("dies", 2), ("hidden", 3)), {("dies", 2)}))
def test_workers_that_start_together_capture_once(
    tmp_path: Path, undisturbed: dict[int, float], fault: str, count: int
) -> None:
    done = run(varuna_command(3, ["--run-dir", str(tmp_path / "run")], str(tmp_path), fault, *ARGS, script=SCRIPT))
    assert done.code == 0, done.err
    assert done.losses == pytest.approx(undisturbed, rel=1e-6)
    noted = captures(tmp_path)
    assert len(noted) == count, "of three workers, and perhaps one that took a dead one's place"
    assert len(set(noted)) == count


@pytest.mark.nightly
def test_a_worker_with_another_model_captures_it_and_is_refused(tmp_path: Path) -> None:
    done = run(varuna_command(2, [], str(tmp_path), "other", *ARGS, script=SCRIPT))
    assert "was refused: its job.model.digest is" in done.err
    assert sorted(captures(tmp_path)) == ["w0", "w1"]


@pytest.mark.nightly
def test_machines_that_come_later_capture_nothing(tmp_path: Path, undisturbed: dict[int, float]) -> None:
    args = (str(tmp_path), "none", *ARGS, "--slow", "0.3")
    cluster = Cluster(tmp_path, "--workers", "2", "--stages", "2")
    try:
        first = cluster.agent("a", *args, workers=2, script=SCRIPT)
        cluster.until_step(1)
        second = cluster.agent("b", *args, workers=2, script=SCRIPT)
        wait_for(lambda: len(cluster.events("worker_joined")) == 4)
        assert ended(first) == ended(second) == ended(cluster.manager) == 0
        cluster.check(undisturbed)
    finally:
        cluster.close()
    assert len(captures(tmp_path)) == 1
