"""``torchrun --rdzv-backend=varuna``: real torchrun agents come and go, and so does the manager."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.depth import by_depth
from tests.scenarios.cluster import Cluster, ended, kill
from tests.scenarios.launch import JOB, Alone
from tests.scenarios.torchruns import Torchruns
from tests.waiting import wait_for

pytestmark = pytest.mark.timeout(300)
STEPS = by_depth(40, 60)
PLAIN = """
import os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
inner = torch.nn.Linear(4, 1)
begin = 0
if os.path.exists(sys.argv[1]):
    saved = torch.load(sys.argv[1])
    inner.load_state_dict(saved["model"])
    begin = saved["step"]
model = DistributedDataParallel(inner)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step, is_over = begin, False
while not is_over:
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(step)).chunk(size)[rank]
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if rank == 0:
        torch.save({"model": inner.state_dict(), "step": step + 1}, sys.argv[1] + ".new")
        os.replace(sys.argv[1] + ".new", sys.argv[1])
        print(f"step {step} loss {mean.item() / size} nodes {size}", flush=True)
    over = torch.tensor(float(os.path.exists(sys.argv[2])))
    dist.all_reduce(over)
    step, is_over = step + 1, over.item() > 0
    time.sleep(0.05)
dist.destroy_process_group()
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def test_a_node_of_three_dies_one_comes_and_the_manager_is_away_meanwhile_and_the_losses_are_those_of_one_process(
    cluster: Cluster, alone: Alone
) -> None:
    args = ["--steps", str(STEPS), "--dropout", "0.1", "--slow", "0.1"]
    args += ["--checkpoint-dir", str(cluster.folder / "checkpoints"), "--checkpoint-every", "5"]
    nodes = Torchruns(cluster, "2:3", JOB, *args)
    try:
        first, other, _ = nodes.start("a"), nodes.start("b"), nodes.start("c")
        wait_for(lambda: re.search(r"torchrun: world \d: \S+, \S+, \S+", cluster.said()))
        begun = nodes.newest()
        wait_for(lambda: nodes.newest() >= begun + 8)
        kill(cluster.manager)
        wait_for(lambda: "lost the manager; workers continue" in nodes.said("a"))
        nodes.kill("c")
        last = nodes.start("d")
        cluster.start_manager()
        assert [ended(node, 200) for node in (first, other, last, cluster.manager)] == [0, 0, 0, 0], cluster.said()
        lines = nodes.lines()
        assert {step for step, _ in lines} == set(range(STEPS))
        undisturbed = alone(STEPS, "--dropout", "0.1")
        for step, loss in lines:
            assert loss == pytest.approx(undisturbed[step], rel=1e-5), step
        assert "torchrun: 3 of 3 nodes have finished" in cluster.said()
    finally:
        nodes.close()


@pytest.mark.nightly
def test_a_plain_script_runs_on_whatever_nodes_there_are(cluster: Cluster, tmp_path: Path) -> None:
    script, enough = tmp_path / "plain.py", tmp_path / "enough"
    script.write_text(PLAIN)
    nodes = Torchruns(cluster, "1:2", str(script), str(tmp_path / "state.pt"), str(enough))
    try:
        first = nodes.start("a")
        wait_for(lambda: nodes.sizes()[-1:] == ["1"])
        nodes.start("b")
        wait_for(lambda: nodes.sizes()[-1:] == ["2"])
        spare = nodes.start("c")
        wait_for(lambda: "waits for a place: 2 nodes, the most, are at work" in nodes.said("c"))
        assert nodes.sizes().count("2") > 1
        nodes.kill("b")
        wait_for(lambda: "torchrun: world 2: n0-vm, n2-vm".replace("vm", nodes.host) in cluster.said())
        enough.touch()
        assert (ended(first), ended(spare), ended(cluster.manager)) == (0, 0, 0), cluster.said()
        steps = [step for step, _ in nodes.lines()]
        assert sorted(set(steps)) == list(range(max(steps) + 1))
    finally:
        nodes.close()
