import subprocess
import sys

import pytest

HEAVY = {"torch", "numpy", "asyncio", "ssl", "httpx2"}


@pytest.mark.parametrize("package", ["schedule.policy", "simulator.step", "planner.choose"])
def test_planning_needs_neither_torch_nor_a_network(package: str) -> None:
    check = f"import sys, varuna.{package}; print(sorted({HEAVY} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
