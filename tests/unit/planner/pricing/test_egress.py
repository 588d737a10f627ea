"""What leaves a region in a step, counted by hand."""

import pytest

from tests.unit.planner.test_classes import asked, of_class
from tests.unit.planner.test_regions import A, B, known
from varuna.planner.choose import best_plan
from varuna.planner.pricing.egress import leaving_bytes
from varuna.planner.pricing.profile import profile


def test_sums_leave_a_region_once_around_the_ring() -> None:
    plan = best_plan(asked({A: 4, B: 4}, known(), global_batch=480))
    size = sum(profile(known(), plan.micro_batch).reduced_bytes.values)
    each = 2 * (plan.replicas - 1) / plan.replicas * size
    assert leaving_bytes(plan, known()) == pytest.approx({"east": each, "west": each})


def test_nothing_leaves_one_region() -> None:
    assert not leaving_bytes(best_plan(asked({"A": 4}, of_class("A"))), of_class("A"))


def test_messages_of_a_pipeline_over_both_count() -> None:
    plan = best_plan(asked({A: 2}, known(), stages=2)).model_copy(update={"device_class": "", "stage_classes": (A, B)})
    figures, cut = profile(known(), plan.micro_batch), plan.starts[1] - 1
    assert leaving_bytes(plan, known()) == pytest.approx(
        {
            "east": plan.micro_batches * figures.boundary_bytes[cut],
            "west": plan.micro_batches * figures.gradient_boundary_bytes[cut],
        }
    )
