"""Processes, their output, and their ends."""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_for
from varuna.fleet.run_folder.log_room import LogRoom
from varuna.fleet.state.inputs import WorkerExited
from varuna.fleet.workers.launcher import Launcher
from varuna.process.tethering import tether

pytestmark = pytest.mark.timeout(20)


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.exits: queue.SimpleQueue[WorkerExited] = queue.SimpleQueue()
        self.lines: list[bytes] = []
        self.write: Callable[[bytes], object] = self.lines.append
        """hears the main worker's lines"""

    def launcher(self, program: str, /, bounds: dict[str, Any] | None = None, **environment: str) -> Launcher:
        return Launcher(
            ["-c", program],
            environment=environment,
            run_dir=self.folder,
            on_exit=self.exits.put,
            write=self._hear,
            **bounds or {},
        )

    def _hear(self, line: bytes) -> None:
        self.write(line)

    def exit(self) -> WorkerExited:
        return self.exits.get(timeout=10)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_names_are_never_used_twice_and_exits_are_reported(bench: Bench) -> None:
    launcher = bench.launcher("import os, sys; print(os.environ['X'], file=sys.stderr); sys.exit(3)", X="y")
    assert (launcher.spawn(), launcher.spawn()) == ("w0", "w1")
    exits = sorted((bench.exit() for _ in range(2)), key=lambda event: event.worker)
    assert exits == [WorkerExited("w0", 3, "y\n"), WorkerExited("w1", 3, "y\n")]
    assert launcher.spawn() == "w2"
    assert [launcher.has_started(name) for name in ("w0", "w2", "w3", "")] == [True, True, False, False]
    launcher.stop_all(5)


def test_what_a_script_prints_is_seen_while_it_runs(bench: Bench) -> None:
    launcher = bench.launcher("import time; print('step 0'); time.sleep(30)")
    launcher.set_main(launcher.spawn())
    wait_for(lambda: b"".join(bench.lines) == b"step 0\n", 10)
    launcher.stop_all(0.0)


def test_a_worker_takes_the_lowest_place_that_nobody_living_has(bench: Bench) -> None:
    launcher = bench.launcher("import os, sys, time; print(os.environ['LOCAL_RANK'], file=sys.stderr); time.sleep(30)")

    def place(name: str) -> str:
        wait_for(lambda: (bench.folder / f"{name}.log").read_text().strip() != "", 5)
        return (bench.folder / f"{name}.log").read_text().strip()

    names = [launcher.spawn() for _ in range(3)]
    assert [place(name) for name in names] == ["0", "1", "2"]
    launcher.kill("w1")
    bench.exit()
    assert place(launcher.spawn(avoided=("w1",))) == "3"
    assert place(launcher.spawn()) == "1"
    assert place(launcher.spawn(environment={"LOCAL_RANK": "7"})) == "7"
    launcher.stop_all(0)


def test_only_complete_lines_of_the_main_worker_are_passed_on_even_early_ones(bench: Bench) -> None:
    launcher = bench.launcher("import os; print('I am', os.environ['VARUNA_WORKER']); print('half', end='')")
    for _ in range(2):
        launcher.spawn()
    for _ in range(2):
        bench.exit()
    assert bench.lines == []
    launcher.set_main("w1")
    assert bench.lines == [b"I am w1\n"]
    assert (bench.folder / "w0.log").read_bytes() == b"I am w0\nhalf"
    launcher.stop_all(0)


def test_notes_of_the_main_worker_are_said_where_it_was_started(
    bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    launcher = bench.launcher(
        "import os; from varuna.process.console import note, say; say('hello'); note(os.environ['VARUNA_WORKER'])"
    )
    for _ in range(2):
        launcher.spawn()
    for _ in range(2):
        bench.exit()
    launcher.set_main("w1")
    assert capfd.readouterr().err == "varuna: note: w1\n"
    assert bench.lines == []
    launcher.stop_all(0)


def test_a_signal_is_reported_as_a_negative_code(bench: Bench) -> None:
    launcher = bench.launcher("import time; time.sleep(60)")
    launcher.kill(launcher.spawn())
    assert bench.exit() == WorkerExited("w0", -9, "")
    launcher.kill("w0")  # long gone: nothing happens
    launcher.kill("w9")


def test_no_child_of_a_worker_survives_it(bench: Bench) -> None:
    launcher = bench.launcher(
        "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).pid)"
    )
    launcher.set_main(launcher.spawn())
    bench.exit()
    wait_for(lambda: bool(bench.lines), 5)
    pid = int(bench.lines[0])
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or ") Z" in Path(f"/proc/{pid}/stat").read_text(), 5)


def test_a_full_disk_costs_log_lines_and_not_the_worker(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    (bench.folder / "w0.log").symlink_to("/dev/full")
    launcher = bench.launcher("for number in range(3): print(number, flush=True)")
    launcher.set_main(launcher.spawn())
    assert bench.exit() == WorkerExited("w0", 0, "")
    assert bench.lines == [b"0\n", b"1\n", b"2\n"]
    assert capfd.readouterr().err.count("w0.log is missing output: No space left on device. The worker continues.") == 1


@pytest.mark.nightly
def test_a_grandchild_may_speak_when_the_run_is_over(bench: Bench) -> None:
    said = bench.folder / "said"
    speaker = f"import time, pathlib; time.sleep(0.4); print('late', flush=True); pathlib.Path({str(said)!r}).touch()"
    launcher = bench.launcher(
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {speaker!r}], start_new_session=True)",
        {"drain_s": 0.05},
    )
    launcher.spawn()
    bench.exit()
    assert launcher.stop_all(0.0) == ""
    wait_for(said.exists, 5)
    wait_for(
        lambda: not any(each.name == "w0-stdout" for each in threading.enumerate()), 5
    )  # pytest hears if it failed


def test_stopping_waits_for_the_willing_and_kills_the_rest(bench: Bench) -> None:
    launcher = bench.launcher("import time; time.sleep(60)")
    pids = [launcher.pid(launcher.spawn()) for _ in range(2)]
    assert launcher.stop_all(0.1) == ""
    assert {bench.exit().code for _ in range(2)} == {-9}
    for pid in pids:
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_stopping_has_a_bound_and_names_whom_it_left(bench: Bench) -> None:
    heard = threading.Event()

    def deaf(exited: WorkerExited) -> None:
        heard.wait(10)

    write = bench.lines.append
    launcher = Launcher(["-c", "pass"], environment={}, run_dir=bench.folder, on_exit=deaf, write=write, kill_s=0.05)
    name = launcher.spawn()
    assert launcher.stop_all(0.0).startswith(f"{name} (process {launcher.pid(name)}) did not end within")
    heard.set()
    assert launcher.stop_all(10.0) == ""


def test_workers_use_one_thread_unless_told_otherwise(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    program = "import os, sys; print(os.environ['OMP_NUM_THREADS'], file=sys.stderr)"
    bench.launcher(program).spawn()
    assert bench.exit().stderr_tail == "1\n"
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    bench.launcher(program).spawn()
    assert bench.exit().stderr_tail == "4\n"


def test_workers_go_through_a_set_in_the_same_order(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the classic ``enumerate(set(words))`` would give each worker other samples."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    launcher = bench.launcher("import string, sys; print(list(set(string.printable)), file=sys.stderr)")
    launcher.spawn(), launcher.spawn()
    assert bench.exit().stderr_tail == bench.exit().stderr_tail


def test_workers_end_with_their_launcher_whatever_they_run(tmp_path: Path) -> None:
    """Also before, and without, any code of ours: a script may import for minutes."""
    program = f"""
import pathlib, time
from varuna.fleet.workers.launcher import Launcher
from varuna.process.tethering import tether
worker = "import time, sys; print(1, file=sys.stderr, flush=True); time.sleep(60)"
launcher = Launcher(
    ["-c", worker],
    environment={{}}, run_dir=pathlib.Path({str(tmp_path)!r}), on_exit=print, write=print,
)
print(launcher.pid(launcher.spawn()), flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as launching:
        assert launching.stdout is not None
        worker = int(launching.stdout.readline())
        wait_for(lambda: (tmp_path / "w0.log").exists() and (tmp_path / "w0.log").read_text() == "1\n", 5)
        launching.kill()
    wait_for(lambda: not Path(f"/proc/{worker}").exists() or ") Z" in Path(f"/proc/{worker}/stat").read_text(), 5)


def test_a_worker_whose_launcher_died_before_it_asked_does_not_start() -> None:
    done = subprocess.run(
        [*tether()[:-1], "1", sys.executable, "-c", "print('alive')"], capture_output=True, check=False
    )
    assert (done.stdout, done.returncode) == (b"", 0)


def test_logs_are_for_their_owner_alone(bench: Bench) -> None:
    launcher = bench.launcher("pass")
    launcher.spawn()
    bench.exit()
    assert (bench.folder / "w0.log").stat().st_mode & 0o077 == 0
    launcher.stop_all(0)


@pytest.mark.skipif(sys.platform != "linux", reason="pipes have one size there")
def test_a_launcher_that_is_stopped_does_not_hold_its_worker_up(bench: Bench) -> None:
    goes_on = threading.Event()
    bench.write = lambda line: goes_on.wait(20)
    launcher = bench.launcher("print(('x' * 99 + chr(10)) * 5000, end='')", {"drain_s": 20})
    launcher.set_main("w0")
    process = launcher._processes[launcher.spawn()]
    wait_for(lambda: process.reaped, 10)  # by the launcher: another one who awaits it would take its end away
    goes_on.set()
    assert bench.exit().code == 0
    assert (bench.folder / "w0.log").stat().st_size == 500_000
    launcher.stop_all(5)


def test_a_worker_that_writes_without_end_does_not_fill_its_machines_disk(bench: Bench) -> None:
    launcher = bench.launcher("for n in range(50): print('x' * 9, flush=True)", {"log_bytes": 100})
    launcher.set_main(launcher.spawn())
    assert bench.exit().code == 0
    wait_for(lambda: len(bench.lines) == 50, 5)  # who watches sees all of it
    assert 0 < (bench.folder / "w0.log").stat().st_size <= 100
    launcher.stop_all(5)


def test_logs_that_are_all_the_disk_may_hold_cost_a_worker_nothing_else(bench: Bench) -> None:
    (bench.folder / "old.log").write_bytes(bytes(50))
    room = LogRoom(bench.folder, most_bytes=100)
    launcher = bench.launcher("for n in range(50): print('x' * 9, flush=True)", {"room": room})
    launcher.set_main(launcher.spawn())
    assert bench.exit().code == 0
    wait_for(lambda: len(bench.lines) == 50, 5)
    assert (bench.folder / "w0.log").stat().st_size <= 50  # output comes in pieces of any size
    launcher.stop_all(5)


def test_a_tethered_process_hears_signals_that_its_parent_blocks() -> None:
    program = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        done = subprocess.run([*tether(), sys.executable, "-c", program], capture_output=True, text=True, check=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert done.stdout == "set()\n"
