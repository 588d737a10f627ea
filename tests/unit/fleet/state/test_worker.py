from varuna.core.messages import Beat, WorkerPhase
from varuna.fleet.state.worker import Worker, changed


def test_what_a_worker_has_done_in_a_generation_stays_done() -> None:
    worker = Worker(name="w0", replacement=False)

    def told(phase: WorkerPhase, generation: int = 3, *, whole: bool = True) -> tuple[int | None, int | None]:
        nonlocal worker
        beat = Beat(generation=generation, step=0, activity="", phase=phase, whole=whole)
        worker = changed(worker, **worker.hearing(beat))
        assert worker.beat is beat
        return worker.ran, worker.settled

    assert told(WorkerPhase.FORMS) == (None, None)
    assert told(WorkerPhase.STEPS, whole=False) == (3, None)
    assert told(WorkerPhase.LOOP) == (3, 3)
    assert told(WorkerPhase.OTHER) == (3, 3)
    assert told(WorkerPhase.FORMS, generation=4) == (3, 3)
    assert told(WorkerPhase.STEPS, generation=4) == (4, 4)
