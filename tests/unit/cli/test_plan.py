import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.depth import by_depth
from tests.unit.engine.late import LateStreams
from varuna.calibration.file import read_calibration
from varuna.cli.main import main
from varuna.cli.plan import show
from varuna.core.devices import DeviceFacts, equal_workers, reserved_bytes
from varuna.engine.device import streams as device
from varuna.planner.asking.request import PlanRequest
from varuna.planner.report import report
from varuna.planner.sweep import rank_plans
from varuna.process.plain_console import PlainConsole

FOLDER = Path(__file__).parents[3] / "examples" / "calibrations"
SMALL = str(FOLDER / "gpt2-2.5b-v100.json")
JOB = str(Path(__file__).parents[2] / "scenarios" / "job.py")


class Ran:
    def __init__(self, exit_code: int, out: str, err: str) -> None:
        self.exit_code, self.out, self.err = exit_code, out, err


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def _run(*args: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["varuna", "plan", *args])
        try:
            exit_code = main()
        except SystemExit as exit:
            exit_code = int(exit.code or 0)
        captured = capsys.readouterr()
        return Ran(exit_code, captured.out, captured.err)

    return _run


def test_json_ranks_plans_that_fit_and_says_why_others_do_not(run: Any) -> None:
    ran = run("--calibration", SMALL, "--gpus", "36", "--global-batch", "8192", "--json")
    assert ran.exit_code == 0
    found = json.loads(ran.out)
    plans = found["plans"]
    assert len(plans) >= 3
    assert len({p["stages"] for p in plans}) == len(plans)
    assert [p["examples_per_s"] for p in plans] == sorted((p["examples_per_s"] for p in plans), reverse=True)
    for plan in plans:
        assert plan["stages"] * plan["replicas"] + plan["gpus_idle"] == 36
        assert len(plan["memory_bytes"]) == plan["stages"]
        assert max(plan["memory_bytes"]) <= found["memory_bytes"]
        assert plan["examples_per_s"] == pytest.approx(8192 / plan["step_time_s"])
        assert sum(plan["breakdown"].values()) == pytest.approx(plan["step_time_s"], rel=1e-6)
        assert plan["micro_batch"] * plan["micro_batches"] * plan["replicas"] >= 8192
        assert 0 <= plan["bubble"] < 1
    assert {r["stages"] for r in found["rejected"]} == {1, 2}
    assert all(r["missing_bytes"] > 0 and "too little" in r["reason"] for r in found["rejected"])


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@pytest.mark.nightly
def test_without_a_calibration_plans_are_for_the_gpu_of_this_machine(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = [JOB, "--gpus", "2", "--stages", "2", "--json", "--", "--layers", "3", "--global-batch", "24"]
    unknown = json.loads(run(*arguments).out)
    streams = LateStreams()
    streams.device = DeviceFacts(name="gpu", memory_bytes=2**34)
    monkeypatch.setattr(device, "streams_of", lambda place: streams)
    found = json.loads(run(*arguments).out)
    assert (unknown["memory_bytes"], found["memory_bytes"]) == (None, 2**34)
    assert all(plan["kept"][0] == 0 for plan in unknown["plans"])
    assert all(plan["kept"][0] > 0 for plan in found["plans"])
    assert all(reserved_bytes(2**34) < min(plan["memory_bytes"]) for plan in found["plans"])


def test_a_script_is_captured_and_planned_with_its_own_batch_and_flags(run: Any) -> None:
    ran = run(JOB, "--gpus", "3", "--json", "--", "--layers", "3", "--global-batch", "24", "--micro-batch", "4")
    assert (ran.exit_code, ran.err) == (0, "")
    found = json.loads(ran.out)
    assert (found["gpus"], found["global_batch"], found["rejected"]) == (3, 24, [])
    assert found["plans"]
    for plan in found["plans"]:
        assert plan["stages"] * plan["replicas"] <= 3
        assert plan["micro_batch"] == 4
        assert plan["starts"][0] == 0
    deeper = json.loads(run(JOB, "--gpus", "3", "--stages", "3", "--global-batch", "48", "--json").out)
    assert [plan["stages"] for plan in deeper["plans"]] == [3]
    assert deeper["global_batch"] == 48


def test_a_script_may_be_planned_with_a_calibration_of_its_own_model_only(run: Any) -> None:
    ran = run(JOB, "--calibration", SMALL, "--gpus", "4")
    assert ran.exit_code == 2
    assert "sections" in ran.err


def test_json_has_the_fields_that_programs_rely_on(run: Any) -> None:
    found = json.loads(run("--calibration", SMALL, "--gpus", "36", "--json").out)
    assert found["plans"]
    for plan in found["plans"]:
        whole = [plan[name] for name in ("stages", "replicas", "micro_batch", "micro_batches")]
        assert all(is_whole(value) and value > 0 for value in whole)
        assert all(isinstance(plan[name], float) for name in ("step_time_s", "examples_per_s", "bubble"))
        assert all(is_whole(value) for value in plan["memory_bytes"])
        assert len(plan["memory_bytes"]) == plan["stages"]
    assert found["rejected"]
    for rejection in found["rejected"]:
        assert is_whole(rejection["stages"])
        assert is_whole(rejection["missing_bytes"])
        assert rejection["reason"]


def test_a_person_sees_the_best_plan_its_runners_up_and_what_does_not_fit(run: Any) -> None:
    ran = run("--calibration", SMALL, "--gpus", "35", "--global-batch", "8190")
    lines = ran.out.splitlines()
    assert lines[0].startswith("gpt2-2.5b   global batch 8190   35 GPUs   V100-16GB")
    assert any(line.startswith(">") for line in lines)
    for words in ("GPUs are used", "replica runs", "35 of 35", "rejected: 1 x 35", "$/M ex", "per hour"):
        assert words in ran.out


@pytest.mark.nightly
def test_slow_gpus_get_fewer_micro_batches(run: Any) -> None:
    ran = run("--calibration", SMALL, "--gpus", "24", "--slower", "8x0.5")
    text = " ".join(ran.out.split())
    assert "24 of 24 GPUs are used; dealt by speed: 2 replicas of 1640, 1 replica of 816 micro-batches of 2" in text


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_the_terminal(width: int) -> None:
    calibration = read_calibration(Path(SMALL))
    request = PlanRequest(calibrations=calibration, workers=equal_workers(36), global_batch=8192, wanted=3)
    console = PlainConsole(width=width, record=True, file=io.StringIO())
    found = report(request, rank_plans(request), price_per_hour=0.5)
    show(console, found)
    text = console.export_text()
    assert len([line for line in text.splitlines() if " x " in line and "GiB" in line and "%" in line]) == 3
    assert ("all-reduce  idle" in text) == (width == 120)


@pytest.mark.parametrize(
    ("args", "exit_code", "words"),
    [
        (["--gpus", "0"], 2, "gpus"),
        (["--gpus", "-3"], 2, "gpus"),
        ([], 2, "gpus"),
        (["--gpus", "8", "--memory-per-worker", "1MB"], 3, "no plan fits: stage"),
        (["--gpus", "8", "--memory-per-worker", "-1GB"], 2, "--memory-per-worker=-1GB is not a size"),
        (["--gpus", "8", "--memory-per-worker", "nan"], 2, "is not a size"),
        (["--gpus", "8", "--stages", "9"], 3, "P=9 was requested, but there are 8 workers"),
        (["--gpus", "800", "--stages", "500"], 3, "the model has 110 sections"),
        (["--gpus", "8", "--global-batch", "0"], 2, "global-batch"),
        (["--gpus", "8", "--global-batch", "4", "--micro-batch", "5"], 2, "micro_batch=5 was requested"),
        (["--gpus", "8", "--price", "nan"], 2, "is not a price"),
        (["--gpus", "8", "--price", "-1"], 2, "is not a price"),
        (["--gpus", "8", "--objective", "joy"], 2, "dollar"),
        (["--gpus", "8", "--gpus-per-node", "0"], 2, "gpus-per-node"),
        (["--gpus", "8", "--slower", "9x0.5"], 2, "how many of the 8 GPUs compute at which share"),
        (["--gpus", "8", "--slower", "4x1.5"], 2, "how many of the 8 GPUs compute at which share"),
        (["--gpus", "8", "--slower", "half"], 2, "Give numbers and shares between 0 and 1, such as 4x0.5"),
        (["--gpus", "8", "--surprise"], 2, "surprise"),
    ],
)
def test_bad_input_is_refused_with_its_reason(run: Any, args: list[str], exit_code: int, words: str) -> None:
    ran = run("--calibration", SMALL, *args)
    assert ran.exit_code == exit_code
    assert words in ran.err
    assert "Traceback" not in ran.err


def test_without_a_plan_json_still_says_what_was_rejected(run: Any) -> None:
    ran = run("--calibration", SMALL, "--gpus", "2", "--json")
    assert ran.exit_code == 3
    found = json.loads(ran.out)
    assert found["plans"] == []
    assert [r["stages"] for r in found["rejected"]] == [1, 2]
    assert "Add workers" in ran.err


@pytest.mark.parametrize("name", ["missing.json", "folder", "."])
def test_a_calibration_that_cannot_be_read_is_a_usage_error(run: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    ran = run("--calibration", str(tmp_path / name), "--gpus", "4")
    assert ran.exit_code == 2
    assert "cannot read a calibration" in ran.err


def test_nothing_to_plan_for_is_a_usage_error(run: Any) -> None:
    ran = run("--gpus", "4")
    assert (ran.exit_code, "say what to plan for" in ran.err) == (2, True)


def test_a_batch_smaller_than_any_pipeline_still_gets_an_exact_plan(run: Any) -> None:
    found = json.loads(run("--calibration", SMALL, "--gpus", "36", "--global-batch", "1", "--json").out)
    assert found["plans"][0]["micro_batch"] == found["plans"][0]["micro_batches"] == found["plans"][0]["replicas"] == 1


@pytest.mark.nightly
def test_per_dollar_fewer_gpus_may_win(run: Any) -> None:
    fast, cheap = (
        json.loads(run("--calibration", SMALL, "--gpus", "100", "--objective", objective, "--json").out)["plans"][0]
        for objective in ("time", "dollar")
    )
    assert cheap["dollars_per_million_examples"] < fast["dollars_per_million_examples"]
    assert cheap["gpus_used"] < fast["gpus_used"]


@given(
    gpus=st.integers(1, 200),
    global_batch=st.integers(1, 10_000),
    micro_batch=st.none() | st.integers(1, 64),
    stages=st.none() | st.integers(1, 120),
    memory_gb=st.none() | st.integers(1, 100),
    per_vm=st.integers(1, 16),
)
@settings(max_examples=by_depth(2, 8), deadline=None, derandomize=True)
def test_whatever_is_asked_there_is_a_plan_that_keeps_its_word_or_a_reason(
    gpus: int, global_batch: int, micro_batch: int | None, stages: int | None, memory_gb: int | None, per_vm: int
) -> None:
    request = PlanRequest(
        calibrations=read_calibration(Path(SMALL)),
        workers=equal_workers(gpus),
        global_batch=global_batch,
        micro_batch=None if micro_batch is None else min(micro_batch, global_batch),
        stages=stages,
        memory_bytes=None if memory_gb is None else memory_gb * 10**9,
        gpus_per_vm=per_vm,
    )
    ranking = rank_plans(request)
    assert ranking.plans or ranking.rejected
    for plan in ranking.plans[:1]:
        assert plan.workers <= gpus
        assert max(plan.first.memory_bytes) <= (request.limit_bytes or 0)
        assert stages is None or plan.stages == stages


def test_a_calibration_is_enough_neither_torch_nor_a_network_is_imported() -> None:
    check = (
        "import sys; from varuna.cli.main import main\n"
        f"sys.argv = ['varuna', 'plan', '--calibration', {SMALL!r}, '--gpus', '36', '--json']\n"
        "try:\n    main()\nexcept SystemExit as exit:\n    assert not exit.code\n"
        "print(sorted({'torch', 'numpy', 'asyncio', 'ssl', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.nightly
def test_at_a_rate_of_losses_plans_are_ranked_by_what_is_left_and_both_figures_are_shown(run: Any) -> None:
    args = ("--calibration", SMALL, "--gpus", "21", "--global-batch", "8192")
    found = json.loads(run(*args, "--losses-per-hour", "30", "--json").out)
    left = [plan["examples_per_s_left"] for plan in found["plans"]]
    assert left == sorted(left, reverse=True)
    assert all(0 < plan["examples_per_s_left"] < plan["examples_per_s"] for plan in found["plans"])
    most = {"sums": 0.2, "state": 0.5}  # of a step: where only state is copied, its checkpoints are some steps old
    assert all(plan["loss_s"] < most[plan["copies"]] * plan["step_time_s"] for plan in found["plans"])
    assert {plan["copies"] for plan in found["plans"]} == {"sums", "state"}
    shown = run(*args, "--losses-per-hour", "30").out
    assert "ex/s left" in shown
    assert "at 30 losses per hour" in shown
    quiet = json.loads(run(*args, "--json").out)
    assert quiet["plans"][0]["loss_s"] is None
    assert quiet["plans"][0]["step_time_s"] <= found["plans"][0]["step_time_s"]
    assert "left" not in run(*args).out


@pytest.mark.nightly
def test_gpus_of_two_kinds_share_a_step(run: Any) -> None:
    fast = str(FOLDER / "gpt2-2.5b-h100.json")
    both = ("--calibration", fast, "--gpus", "8", "--calibration", SMALL, "--gpus", "16")
    ran = run(*both, "--json")
    assert ran.exit_code == 0
    found = json.loads(ran.out)
    first, alone = found["plans"][0], json.loads(run("--calibration", fast, "--gpus", "8", "--json").out)["plans"][0]
    assert first["gpus_used"] == 24
    assert [each["gpus"] for each in first["classes"]] == [8, 16]
    assert first["step_time_s"] < 0.95 * alone["step_time_s"]
    assert first["dollars_per_hour"] > alone["dollars_per_hour"]
    shown = " ".join(run(*both).out.split())
    assert "8 x H100-80GB, 40 Gb/s + 16 x V100-16GB, 10 Gb/s" in shown
    assert re.search(r"on V100-16GB, 10 Gb/s: \d+ x \d+, \d+ micro-batches in all", shown)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--calibration", SMALL, "--gpus", "8", "--gpus", "4"), "--gpus was given 2 times"),
        (
            ("--calibration", SMALL, "--gpus", "8", "--calibration", SMALL, "--gpus", "4"),
            "two calibrations are of one class",
        ),
        (
            ("--calibration", SMALL, "--calibration", str(FOLDER / "gpt2-2.5b-h100.json"), "--gpus", "8"),
            "given 1 times",
        ),
        (
            (
                "--calibration",
                SMALL,
                "--gpus",
                "8",
                "--calibration",
                str(FOLDER / "gpt2-8.3b-h100.json"),
                "--gpus",
                "4",
            ),
            "different models",
        ),
        (
            (*("--calibration", SMALL, "--gpus", "8") * 2, "--slower", "1x0.5"),
            "two calibrations are of one class",
        ),
    ],
)
def test_kinds_of_gpus_that_do_not_add_up_are_refused(run: Any, args: tuple[str, ...], words: str) -> None:
    ran = run(*args)
    assert ran.exit_code == 2
    assert words in " ".join(ran.err.split())
