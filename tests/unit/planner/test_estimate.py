import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.planner.models import GB, MB, calibrated, model, section
from varuna.calibration.format import Calibrations, Hardware
from varuna.core.devices import equal_workers
from varuna.planner.asking.request import PlanRequest
from varuna.planner.estimate import Guesser
from varuna.planner.pricing.profile import profile


def guesser(memory_bytes: int, boundary_bytes: int, activation_bytes: int, **rest: object) -> Guesser:
    facts = model([section(boundary_bytes=boundary_bytes, activation_bytes=activation_bytes)] * 40)
    calibration = calibrated(facts, hardware=Hardware(name="test", memory_bytes=memory_bytes))
    request = PlanRequest(
        calibrations=Calibrations.of_one(calibration),
        workers=equal_workers(64),
        global_batch=256,
        micro_batch=1,
        **rest,
    )
    return Guesser(request, profile(calibration, 1), may_keep=True)


@given(
    memory_bytes=st.integers(GB // 2, 40 * GB),
    boundary_bytes=st.integers(0, 100 * MB),
    activation_bytes=st.integers(0, 200 * MB),
    stages=st.integers(1, 40),
)
def test_the_share_that_is_recomputed_is_that_of_average_stages_one_by_one(
    memory_bytes: int, boundary_bytes: int, activation_bytes: int, stages: int
) -> None:
    guessed = guesser(memory_bytes, boundary_bytes, activation_bytes)
    activations = 40 * activation_bytes / stages
    room = memory_bytes - guessed.profile.resident_bytes.before[-1] / stages - activations
    share = 0.0
    for behind in range(2, stages + 1):
        spare = max(0.0, room - (2 * behind + 2) * boundary_bytes)
        share += max(0.0, 1.0 - spare / ((2 * behind + 1) * activations)) if activations else 0.0
    assert guessed.recomputed(stages) == pytest.approx(share / stages, abs=1e-9)


@pytest.mark.parametrize("objective", ["time", "dollar"])
@pytest.mark.parametrize("gpus_per_vm", [1, 4])
def test_no_guess_at_a_depth_is_below_its_least_score(objective: str, gpus_per_vm: int) -> None:
    guessed = guesser(4 * GB, 2 * MB, 50 * MB, objective=objective, gpus_per_vm=gpus_per_vm)
    for stages in range(1, 41):
        scores = [
            guessed.request.score(guess.shape.stages * guess.shape.replicas, guess.step_s)
            for guess in guessed.guesses(stages)
        ]
        assert guessed.least_score(stages) <= min(scores) * (1 + 1e-12)
