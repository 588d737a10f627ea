"""Lines of 20 Mb/s between machines: what crosses them is compressed, people see it, and no loss changes by a bit."""

import re
import sys
from pathlib import Path

import pytest

from tests.scenarios.cluster import Cluster, kill
from tests.scenarios.launch import json_log, run
from tests.scenarios.network import Network, why_not
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(why_not("tc")), reason=why_not("tc")),
]
JOB = str(Path(__file__).with_name("wide_job.py"))
BITS_PER_S = 20e6
TOLD_S = 120.0


def test_a_slow_line_carries_less_than_is_sent_and_losses_keep_their_bits(tmp_path: Path) -> None:
    """Also after a loss, whose section comes from the machine that kept a copy of it."""
    network = Network("manager", "a", "b", "c")
    network.shape(BITS_PER_S)
    where = ("--host", "0.0.0.0", "--advertise", network.addresses["manager"])
    cluster = Cluster(tmp_path, "--workers", "2", "--stages", "2", *where, whereabouts=network.environment)
    try:
        agents = []
        for number, name in enumerate("ab"):
            cluster.until_agents(number)
            agents.append(cluster.agent(name, script=JOB))

        def ratios() -> list[float]:
            timed = cluster.events("generation_timed")
            return [stage.compressed.ratio for stage in timed[-1].stages] if timed else []

        cluster.until_step(0, TOLD_S)
        wait_for(lambda: min(ratios(), default=0.0) > 1.2, TOLD_S)
        assert re.search(r"compressed +what stages send: 0 \(1\.\d\d times smaller\), 1 \(", cluster.verb("status").out)
        cluster.agent("c", script=JOB)
        cluster.until_agents(3)
        kill(agents[0])
        before = max(cluster.steps())
        wait_for(lambda: cluster.events("generation_started")[-1].record.generation > 0, TOLD_S)
        cluster.until_step(before + 5, TOLD_S)
    finally:
        cluster.close()
        network.close()
    losses = {line["step"]: line["loss"] for line in json_log(cluster.log)}
    alone = run([sys.executable, JOB, "--steps", str(len(losses))]).out
    assert losses == {int(step): float(loss) for step, loss in re.findall(r"^step (\d+) loss (\S+)$", alone, re.M)}
