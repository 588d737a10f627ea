"""Plans and events with as little as a report needs."""

from varuna.core.plan import Pipeline, Plan
from varuna.fleet.state.run_events import GenerationRecord, GenerationStarted, Morphed, StepRecorded


def plan(stages: int, replicas: int) -> Plan:
    return Plan(
        micro_batch=2,
        global_batch=16,
        pipelines=(Pipeline(replicas=replicas, bounds=(*tuple(range(stages)), stages), stash_limits=(2,) * stages),),
    )


def _record(number: int, shape: tuple[int, int], recovery_seconds: float | None, cause: str) -> GenerationRecord:
    return GenerationRecord(
        generation=number,
        plan=plan(*shape),
        members=tuple(f"w{i}" for i in range(shape[0] * shape[1])),
        cause=cause,
        first_step=10 * number,
        recovery_seconds=recovery_seconds,
    )


def generation(number: int, shape: tuple[int, int], cause: str = "start") -> GenerationStarted:
    return GenerationStarted(record=_record(number, shape, None, cause))


def morphed(number: int, shape: tuple[int, int], recovery_seconds: float, cause: str = "lost") -> Morphed:
    return Morphed(record=_record(number, shape, recovery_seconds, cause), old_plan=plan(1, 1))


def recorded(step: int, loss: float = 4.25) -> StepRecorded:
    return StepRecorded(step=step, generation=0, loss=loss, examples_per_s=64.0, plan=plan(1, 1))
