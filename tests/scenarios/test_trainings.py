"""A script of several trainings, under managers, whose workers die in and between them."""

import re
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.scenarios.cluster import Cluster, ended, kill
from tests.scenarios.launch import Done, json_log, run, varuna_command
from tests.waiting import wait_for
from varuna.fleet.run_folder.past_events import read_events
from varuna.fleet.state.run_events import TrainingEnded, WorkerJoined, WorkerLost

pytestmark = pytest.mark.timeout(300)
SCRIPT = str(Path(__file__).with_name("search.py"))


def losses(done: Done) -> dict[tuple[int, int], float]:
    found = re.findall(r"^training (\d+) step (\d+) loss (\S+)", done.out, re.MULTILINE)
    return {(int(training), int(step)): float(loss) for training, step, loss in found}


@pytest.fixture(scope="module")
def plainly(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[tuple[int, int], float], Path]:
    """Losses by training and step in one process, and the folder that the script has written."""
    folder = tmp_path_factory.mktemp("plainly")
    done = run([sys.executable, SCRIPT, str(folder)])
    assert done.code == 0, done.err
    assert len(losses(done)) == 30
    return losses(done), folder


def seen(folder: Path) -> set[str]:
    """Return the lines that workers wrote of trainings that were over."""
    return set((folder / "seen").read_text().splitlines())


def check_files(folder: Path, expected: Path) -> None:
    for number in range(3):
        one, other = load_file(expected / f"{number}.safetensors"), load_file(folder / f"{number}.safetensors")
        assert one.keys() == other.keys()
        assert all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param(["w1@1.4"], id="in the second"),
        pytest.param(["w1@0.3", "w0@1.2", "w2@1.end", "w3@2.5"], id="everywhere", marks=pytest.mark.nightly),
        pytest.param(["w0@0.end", "w1@2.end"], id="between", marks=pytest.mark.nightly),
    ],
)
def test_workers_die_in_any_training_and_all_losses_are_those_of_one_process(
    faults: list[str], tmp_path: Path, plainly: tuple[dict[tuple[int, int], float], Path]
) -> None:
    expected, folder = plainly
    run_dir, log = tmp_path / "run", tmp_path / "log.jsonl"
    flags = ["--stages", "2", "--run-dir", str(run_dir), "--json-log", str(log)]
    done = run(varuna_command(2, flags, str(tmp_path), ",".join(faults), script=SCRIPT))
    assert done.code == 0, done.err
    found = [(line["training"], line["step"], line["loss"]) for line in json_log(log)]
    assert {(training, step): loss for training, step, loss in found} == expected
    assert all(expected[training, step] == loss for training, step, loss in found)
    events = read_events(run_dir)
    assert [(event.training, event.steps) for event in events if isinstance(event, TrainingEnded)] == [(0, 10), (1, 10)]
    lost = [fault.partition("@")[0] for fault in faults if not fault.endswith("end")]  # the others had left by then
    assert [event.worker for event in events if isinstance(event, WorkerLost)] == lost
    replaced = [fault for fault in faults if not fault.endswith("2.end")]
    assert len({event.worker for event in events if isinstance(event, WorkerJoined)}) == 2 + len(replaced)
    assert seen(tmp_path) == seen(folder)
    check_files(tmp_path, folder)


@pytest.mark.nightly
def test_a_manager_that_comes_back_goes_on_with_the_training_that_it_left(
    tmp_path: Path, plainly: tuple[dict[tuple[int, int], float], Path]
) -> None:
    expected, folder = plainly
    cluster = Cluster(tmp_path, "--stages", "2", "--workers", "2")
    cluster.environment |= {"SEARCH_CHECKPOINTS": str(tmp_path / "checkpoints")}
    try:
        agents = []
        for number in range(2):
            agents.append(cluster.agent(f"m{number}", str(tmp_path), script=SCRIPT))
            cluster.until_agents(number + 1)
        wait_for(lambda: any((line["training"], line["step"]) >= (1, 3) for line in cluster.lines()), 100)
        kill(cluster.manager)
        cluster.start_manager()
        assert [ended(agent) for agent in agents] == [0, 0], cluster.said()
        assert ended(cluster.manager) == 0
        assert {(line["training"], line["step"]): line["loss"] for line in cluster.lines()} == expected
        assert seen(tmp_path) == seen(folder)
    finally:
        cluster.close()
