"""GPUs that fail, over torch's own CUDA code: a fault of one costs its worker, and the run a step at most."""

import re
from pathlib import Path

import pytest

from tests.null_gpu.fault_job import STEPS
from tests.null_gpu.runs import UUIDS, needs_null_gpu, plain, run
from varuna.engine.device.faults import HANGS

pytestmark = needs_null_gpu

ECC, ASSERT = "uncorrectable ECC error encountered", "device-side assert triggered"
nightly = pytest.mark.nightly


@pytest.mark.parametrize(
    ("worker", "launch"),
    [("w1", 0), ("w1", 700), ("w0", 2900), *(pytest.param("w1", at, marks=nightly) for at in range(500, 5500, 700))],
)
def test_a_gpu_that_breaks_at_any_launch_costs_a_step_at_most(tmp_path: Path, worker: str, launch: int) -> None:
    ran = run(tmp_path, "--stages", "1", fault=f"{worker}:{launch}:214")
    assert (ran.code, ran.steps) == (0, STEPS), ran.text
    assert ran.counted("worker lost") == 1, ran.text
    assert ran.counted("steps? redone") <= 1, ran.text
    named = (
        rf"GPU {UUIDS[int(worker[1:])]}(?: \(Null H200\))? gets no worker for"  # its kind is known once it has joined
    )
    assert re.search(named, ran.text), ran.text


@pytest.mark.parametrize("launch", [1500, *(pytest.param(at, marks=nightly) for at in (600, 1501, 2502, 3503, 4504))])
def test_a_gpu_of_a_pipeline_breaks_and_no_peer_is_suspected(tmp_path: Path, launch: int) -> None:
    ran = run(tmp_path, "--stages", "2", fault=f"w1:{launch}:719")
    assert (ran.code, ran.steps) == (0, STEPS), ran.text
    assert re.findall(r"worker (w\d+) (?:lost|froze|is gone|closed|was)", ran.text) == ["w1"], ran.text


def test_an_assertion_of_the_code_on_a_gpu_ends_the_run(tmp_path: Path) -> None:
    ran = run(tmp_path, "--stages", "1", fault="w1:1500:710")
    assert ran.code == 1
    assert ran.steps < STEPS
    assert "varuna: worker w1 (rank 1, generation 0) failed: AcceleratorError: CUDA error: " + ASSERT in ran.text


def test_a_step_that_breaks_one_gpu_after_the_other_ends_the_run(tmp_path: Path) -> None:
    ran = run(tmp_path, "--stages", "2", FAULT_AT="8", FAULT_OF="w1 w2")
    assert (ran.code, ran.steps) == (1, 8), ran.text
    assert "varuna: step 8 broke two GPUs in the same way, one after the other" in ran.text
    assert UUIDS[1] in ran.text


def test_out_of_memory_in_an_action_costs_the_step_and_no_worker(tmp_path: Path) -> None:
    ran = run(tmp_path, "--stages", "1", FAULT_AT="8", FAULT_OF="w0", FAULT_IS="actions", NULL_GPU_OTHERS_GIB="100")
    assert (ran.code, ran.steps) == (0, STEPS), ran.text
    assert ran.counted("workers? lost") == 0, ran.text
    assert ran.counted("steps? redone") <= 1, ran.text  # none, if the others had done so much that it is gone on with
    assert ran.text.count("plans for Null H200 fill 10 % less from now on") == 1
    assert "on a GPU of 139 GiB, of which other processes hold 99.5 GiB" in ran.text


def test_out_of_memory_in_actions_again_and_again_ends_the_run(tmp_path: Path) -> None:
    ran = run(tmp_path, "--stages", "2", FAULT_AT="8", FAULT_OF="w0", FAULT_IS="actions", FAULT_TIMES="3")
    assert (ran.code, ran.steps) == (1, 8), ran.text
    assert "varuna: worker w0 ran out of memory in step 8 in stage 0" in ran.text
    assert ran.counted("workers? lost") == 0


def test_out_of_memory_while_a_step_is_reduced_loses_the_worker(tmp_path: Path) -> None:
    ran = run(tmp_path, "--stages", "2", FAULT_AT="8", FAULT_OF="w1", FAULT_IS="memory")
    assert (ran.code, ran.steps) == (0, STEPS), ran.text
    assert "plans for Null H200 fill 10 % less from now on" in ran.text
    assert "gets no worker for" not in ran.text


def test_out_of_memory_again_and_again_ends_the_run_with_figures(tmp_path: Path) -> None:
    everybody = " ".join(f"w{number}" for number in range(1, 9))
    ran = run(tmp_path, "--stages", "2", FAULT_AT="8", FAULT_OF=everybody, FAULT_IS="memory")
    assert (ran.code, ran.steps) == (1, 8), ran.text
    assert ran.text.count("fill 10 % less from now on") == 2
    assert "on a GPU of 139 GiB: CUDA out of memory. Tried to allocate" in ran.text


@pytest.mark.parametrize("worker", ["w1", pytest.param("w0", marks=nightly)])
def test_a_gpu_that_hangs_is_given_up_by_name(tmp_path: Path, worker: str) -> None:
    ran = run(tmp_path, "--stages", "2", fault=f"{worker}:1500:hang", FAULT_BOUND="4")
    assert (ran.code, ran.steps) == (0, STEPS), ran.text
    assert f"worker {worker} lost its GPU: {HANGS}" in ran.text
    assert f"GPU {UUIDS[int(worker[1:])]} (Null H200) gets no worker" in ran.text


def test_a_process_without_a_manager_ends_with_words() -> None:
    ran = plain("*:1500:214")
    assert ran.code == 1
    assert f"AcceleratorError: CUDA error: {ECC}" in ran.text
    assert f"GPU {UUIDS[0]} has failed, not the script" in ran.text
