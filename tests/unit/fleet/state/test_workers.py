import random
from dataclasses import replace

import pytest

from varuna.fleet.state.worker import Worker, WorkerInventory, WorkerStatus
from varuna.fleet.state.workers import Workers


@pytest.mark.parametrize("seed", range(20))
def test_what_rules_ask_for_is_what_counting_all_workers_says(seed: int) -> None:
    choose = random.Random(seed)
    workers, known = Workers(), dict[str, Worker]()
    for number in range(150):
        name = choose.choice(list(known)) if known and choose.random() < 0.7 else f"w{number}"
        if name in known and choose.random() < 0.2:
            workers = workers.without(name)
            del known[name]
        else:
            worker = known.get(name, Worker(name=name, replacement=False, node=f"n{number % 5}"))
            worker = replace(
                worker,
                standing=choose.choice(list(WorkerStatus)),
                seated=choose.random() < 0.5,
                holding=choose.choice([None, WorkerInventory()]),
            )
            workers, known[name] = workers.with_worker(worker), worker
        fresh = Workers(known.values())
        assert dict(workers) == dict(fresh) == known
        assert list(workers) == list(known)
        for standing in WorkerStatus:
            assert workers.count(standing) == sum(worker.standing is standing for worker in known.values())
        joined = [worker for worker in known.values() if worker.standing is WorkerStatus.JOINED]
        assert workers.awaited == fresh.awaited == sum(worker.holding is None for worker in joined)
        assert workers.newcomers == fresh.newcomers == {worker.name for worker in joined if not worker.seated}
        assert workers.unfinished == fresh.unfinished
        for node in {worker.node for worker in known.values()} | {"n0"}:
            there = [worker.name for worker in known.values() if worker.node == node]
            assert sorted(workers.on(node)) == sorted(there)
