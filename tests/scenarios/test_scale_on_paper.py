"""The smallest and the largest model on paper: cut in bounded time and memory, in a process of their own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "partition_at_scale.py"
BOUND_S = 280
"""Wall time: other tests may run on the same cores. What is asked for is processor time."""


@pytest.mark.nightly
@pytest.mark.timeout(BOUND_S + 10)
@pytest.mark.parametrize(("name", "parameters", "sections"), [("llama3-405b", 405_853_388_800, 126)])
def test_models_far_beyond_this_machine_are_cut(name: str, parameters: int, sections: int) -> None:
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--json", "--model", name],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=True,
    )
    found = json.loads(done.stdout)["models"][0]
    assert found["parameters"] == parameters
    assert found["sections"] >= sections
    assert found["heaviest_share"] < 0.05
    assert found["resident_gib"] < 3
    assert found["tied"] == (["transformer.wte.weight"] if name.startswith("gpt2") else [])
