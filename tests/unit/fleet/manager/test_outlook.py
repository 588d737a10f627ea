"""The planner's table is for the workers that are there, slow ones too."""

from dataclasses import replace
from pathlib import Path

from tests.unit.fleet.support import Driver
from varuna.fleet.manager.calibrator import Calibrator
from varuna.fleet.manager.outlook import outlook
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.speeds import Speeds
from varuna.fleet.state.stutter import Straggler
from varuna.planner.choose import planner


def test_the_table_deals_by_the_speeds_that_are_known(tmp_path: Path) -> None:
    driver = Driver(FleetConfig(workers=4))
    driver.gather()
    calibrator = Calibrator(planner(memory_bytes=None, stages=None), run_dir=tmp_path, cache=None)
    even = outlook(calibrator, driver.fleet)
    slow = {name: Straggler(ratio=2.0, until_s=float("inf"), speed=0.5) for name in ("w2", "w3")}
    dealt = outlook(calibrator, replace(driver.fleet, speeds=Speeds(slow=slow)))
    assert (even["workers"], dealt["workers"]) == (4, 4)
    assert "dealt by speed" not in str(even["plans"])
    assert "dealt by speed" in str(dealt["plans"])
    running = even["running"]
    assert isinstance(running, dict)
    assert running["line"]["needed_bits_per_s"] > 0  # each worker is a machine of its own
