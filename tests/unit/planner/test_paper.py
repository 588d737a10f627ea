"""One calibration, fitted to the paper's simulator table, must still say this of it (figures: benchmarks/paper)."""

import pytest

from benchmarks.paper.calibrations import GPT2, ON_HOST, Transformer
from benchmarks.paper.configurations import configured, tflops_per_gpu
from benchmarks.paper.machines import V100

MEASURED_S = {
    ("8.3b", 36, 3): 140.3,
    ("8.3b", 36, 1): 390,
    ("8.3b", 24, 4): 149.9,
    ("8.3b", 18, 6): 139.1,
    ("8.3b", 18, 3): 263.8,
    ("2.5b", 27, 2): 116.8,
    ("2.5b", 9, 7): 70.1,
    ("2.5b", 6, 10): 75.2,
}


def test_steps_that_the_paper_measured_are_predicted_as_well_as_one_fit_can() -> None:
    errors = [
        configured(GPT2[size], V100, stages, replicas).plan.step_s / seconds - 1
        for (size, stages, replicas), seconds in MEASURED_S.items()
    ]
    assert sum(map(abs, errors)) / len(errors) < 0.06
    assert max(map(abs, errors)) < 0.11


def test_the_best_depth_moves_with_the_number_of_gpus_as_in_the_paper() -> None:
    model = GPT2["2.5b"]
    assert configured(model, V100, 9, 11).examples_per_s > configured(model, V100, 6, 16).examples_per_s
    near = configured(model, V100, 6, 6).examples_per_s / configured(model, V100, 9, 4).examples_per_s
    assert near == pytest.approx(1, abs=0.02)


@pytest.mark.nightly
def test_the_efficiency_stays_about_the_same_from_2_5_to_200_billion_parameters() -> None:
    rates = [
        tflops_per_gpu(GPT2["2.5b"], configured(GPT2["2.5b"], V100, 9, 7).per_gpu),
        tflops_per_gpu(GPT2["20b"], configured(GPT2["20b"], V100, 49, 6).per_gpu),
        tflops_per_gpu(
            GPT2["200b"],
            configured(GPT2["200b"], V100, 102, 1, micro_batch=1, global_batch=512, optimizer=ON_HOST).per_gpu,
        ),
    ]
    assert all(22 < rate < 34 for rate in rates)


@pytest.mark.parametrize("model", GPT2.values(), ids=lambda model: model.name)
def test_useful_flops_follow_the_published_formula(model: Transformer) -> None:
    layers, hidden, sequence = model.layers, model.hidden, model.sequence
    published = 72 * layers * sequence * hidden**2 * (1 + sequence / (6 * hidden))
    published += 6 * sequence * hidden * model.vocabulary
    assert model.useful_flops == pytest.approx(published, rel=0.005)
