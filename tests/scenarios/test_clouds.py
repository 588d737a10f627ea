"""``varuna run --on aws|azure|gcp``: instances boot as the cloud's page says, are killed, preempted and replaced."""

import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.scenarios import clouds, launch
from tests.scenarios.clouds import SLOW, Cloud, Machines
from tests.scenarios.cluster import CLI, ended
from tests.scenarios.launch import JOB, Alone, processes_with
from tests.scenarios.on_engine import OnEngine
from tests.waiting import wait_for

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]
STEPS = 160
LIBRARIES = {"aws": ("boto3", "moto.server"), "azure": ("azure.identity",), "gcp": ("google.auth",)}


@pytest.fixture
def undisturbed(alone: Alone) -> dict[int, float]:
    return alone(STEPS, "--dropout", "0.1")


@pytest.mark.parametrize("name", LIBRARIES)
def test_instances_are_killed_and_preempted_and_the_group_replaces_them(
    name: str, undisturbed: dict[int, float], tmp_path: Path
) -> None:
    for library in LIBRARIES[name]:
        pytest.importorskip(library)
    begin: Callable[[], AbstractContextManager[Cloud]] = getattr(clouds, name)
    with begin() as cloud:
        machines = Machines(cloud, tmp_path / "cloud")
        run = OnEngine(tmp_path / "user", "--on", cloud.where, "--nodes", "2:2", variables=cloud.variables, args=SLOW)
        try:
            lose_all_of_the_first_machines(cloud, machines, run)
            assert run.verb("stop").code == 0
            assert ended(run.manager) == 0, run.said()
            assert cloud.desired() == 0
            wait_for(lambda: not machines.living())
            for instance in machines.taken[2:]:  # they end because the run is over, or at the shutdown just after that
                assert instance.agent.wait(30) in (0, -signal.SIGTERM)
                assert "the run is over" in (instance.folder / "agent.err").read_text()
            wait_for(lambda: not processes_with(str(tmp_path)), 10)
        finally:
            run.close()
            machines.close()
    run.check(undisturbed)


def lose_all_of_the_first_machines(cloud: Cloud, machines: Machines, run: OnEngine) -> None:
    """Of two instances one is killed; once it is replaced, the other gets its cloud's notice."""
    run.wait(lambda: (run.run_dir / "join").exists() and len(machines.living()) == 2)
    machines.put_secret(run.run_dir)

    def until_replaced() -> None:
        run.wait(lambda: len(machines.living()) == run.machines() == 2)
        run.until_steps(3)

    until_replaced()
    first, second = machines.living()
    machines.vanish(second)
    until_replaced()
    cloud.notify(first.says)
    assert ended(first.agent) == 0
    if cloud.name == "azure":
        assert first.says.approved == ["A-1"]
    machines.vanish(first)
    until_replaced()
    assert "spot notice" in run.said()
    assert ("may be taken away at any time, says its cloud" in run.said()) == (cloud.name == "gcp")


def test_two_clouds_give_what_they_have_and_the_run_goes_on_when_one_gives_nothing_more(
    undisturbed: dict[int, float], tmp_path: Path
) -> None:
    for library in (*LIBRARIES["azure"], *LIBRARIES["gcp"]):
        pytest.importorskip(library)
    with clouds.azure() as one, clouds.gcp() as two:
        several = [Machines(cloud, tmp_path / cloud.name) for cloud in (one, two)]
        flags = ("--on", one.where, "--nodes", "1:1", "--on", two.where, "--nodes", "0:2")
        variables = {**one.variables, **two.variables}
        run = OnEngine(tmp_path / "user", *flags, variables=variables, args=SLOW)
        try:
            run.wait(lambda: [cloud.desired() for cloud in (one, two)] == [1, 2])
            run.wait(lambda: (run.run_dir / "join").exists())
            for machines in several:
                machines.put_secret(run.run_dir)
            run.wait(lambda: run.machines() == 3)
            run.until_steps(3)
            [lost] = several[0].living()
            several[0].vanish(lost)
            run.wait(lambda: len(several[0].living()) == 1 and run.machines() == 3)
            two.fail()
            run.wait(lambda: f"{two.where}: requested 2 nodes: Google Cloud did not answer" in run.said())
            run.until_steps(3)
            assert run.verb("stop").code == 0
            assert ended(run.manager) == 0, run.said()
            assert one.desired() == 0, "it got back what it gave"
            assert f"what this run requested of {two.where} is not given back" in run.said()
        finally:
            run.close()
            for machines in several:
                machines.close()
    run.check(undisturbed)


def test_a_second_run_on_a_group_is_refused_and_an_api_that_goes_away_is_said_with_what_is_left(tmp_path: Path) -> None:
    pytest.importorskip("google.auth")
    with clouds.gcp() as cloud:
        flags = ("--on", cloud.where, "--nodes", "1:1")
        run = OnEngine(tmp_path / "user", *flags, variables=cloud.variables)
        try:
            run.wait(lambda: cloud.desired() == 1)
            other = [*CLI, "run", *flags, "--run-dir", str(tmp_path / "other"), JOB]
            second = launch.run(other, XDG_STATE_HOME=str(tmp_path / "user" / "state"), **cloud.variables)
            assert second.code == 2
            assert "uses instance group trainers, and a group serves one run" in second.err
            assert f"varuna stop --run {run.run_dir}" in second.err
            cloud.fail()
            run.wait(lambda: "requested 1 nodes: Google Cloud did not answer" in run.said())
            assert run.verb("stop").code == 0
            assert ended(run.manager) == 0, run.said()
            assert (
                f"what this run requested of {cloud.where} is not given back: Google Cloud did not answer" in run.said()
            )
            assert "Set the size back by hand, or machines go on to cost" in run.said()
        finally:
            run.close()
