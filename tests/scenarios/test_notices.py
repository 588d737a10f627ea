"""A machine that says 25 s before that it goes, in the middle of a longer step: only what is in flight runs again."""

import re
import signal
from pathlib import Path

import pytest

from tests.scenarios.cluster import Cluster, ended
from tests.scenarios.launch import json_log, python
from tests.waiting import wait_for
from varuna.extras.doctor.sample_ledger import audit
from varuna.fleet.run_folder.past_events import read_events

MICRO_BATCHES = 300
JOB = ("--steps", "2", "--layers", "6", "--global-batch", str(MICRO_BATCHES), "--micro-batch", "1", "--dropout", "0.1")


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_one_pipeline_loses_a_machine_in_a_long_step_and_does_not_repeat_it(tmp_path: Path) -> None:
    expected = python(*JOB).losses
    cluster = Cluster(tmp_path, "--workers", "3", "--memory-per-worker", "200KiB")
    try:
        agents = []
        for name in "abc":
            agents.append(cluster.agent(name, *JOB, "--compute", "0.1"))
            cluster.until_agents(len(agents))
        cluster.until_step(0)
        wait_for(lambda: any(worker["activity"].startswith("step 1: ") for worker in cluster.status()["workers"]))
        ranks = {worker["rank"]: worker["node"] for worker in cluster.status()["workers"]}
        middle = next(name for name in "abc" if cluster.node(name) == ranks[1])
        agents["abc".index(middle)].send_signal(signal.SIGTERM)
        assert ended(agents["abc".index(middle)], 60) == 0
        assert max(cluster.steps()) == 0, "it went in the middle of the step"
        assert [ended(agent) for agent in agents] == [0, 0, 0]
        assert ended(cluster.manager) == 0
    finally:
        cluster.close()
    log = json_log(cluster.log)
    assert [line["step"] for line in log] == [0, 1]
    assert [line["loss"] for line in log] == pytest.approx([expected[0], expected[1]], rel=1e-6)
    first, second = (event.record for event in cluster.events("generation_started"))
    assert (first.plan.shape, second.plan.shape, second.rollback) == ("3x1", "2x1", False)
    told = re.search(r"kept (\d+) of (\d+) micro-batches of step 1", cluster.said())
    assert told is not None
    assert int(told[2]) == MICRO_BATCHES
    assert 20 < int(told[1]) < 200
    assert audit(read_events(cluster.run_dir)).faults == ()
