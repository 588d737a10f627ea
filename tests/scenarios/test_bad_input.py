"""A fault ends in one clear message, with no process left behind and nothing lost.

Refusals by a script or a command itself are tried in this process; what a manager makes of them takes real workers.
"""

import math
import re
import shutil
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.depth import of_depth
from tests.scenarios import faulty
from tests.scenarios.launch import Done, environment, json_log, processes_with, run, varuna_command
from tests.scenarios.warm import COLD, Process
from tests.unit.engine.ranks import single_threaded
from tests.waiting import wait_for
from varuna.cli.main import main as command_line
from varuna.core.errors import VarunaError
from varuna.membership.launched import explained

pytestmark = pytest.mark.timeout(300)
nightly = pytest.mark.nightly

FAULTY = str(Path(faulty.__file__))
TRACEBACK = "Traceback (most recent call last)"
SAVED_STEPS = (2, 4, 6)
NEWEST = "checkpoints/step-00000006"
SAVING = ("--checkpoint-dir", "{folder}/checkpoints")
NOWHERE = ("--checkpoint-dir", "{folder}/file/checkpoints")


@dataclass(frozen=True)
class End:
    """The end of a script or a command."""

    done: Done
    folder: Path

    def says(self, code: int, *parts: str) -> None:
        """One message with all of ``parts``, and no traceback: what a person sees of an expected error."""
        assert self.done.code == code, self.done.err
        assert TRACEBACK not in self.done.err
        for part in parts:
            assert self.done.err.count(part) == 1, f"{part!r} in\n{self.done.err}"

    def tells(self, *parts: str) -> None:
        """The same without a manager, with the user's line."""
        assert self.done.code == 1, self.done.err
        assert "varuna.core.errors" not in self.done.err
        assert f"  {FAULTY}:" in self.done.err
        for part in parts:
            assert self.done.err.count(part) == 1, f"{part!r} in\n{self.done.err}"

    def saved(self) -> set[int]:
        return saved_in(self.folder)


def saved_in(folder: Path) -> set[int]:
    """Steps of complete checkpoints."""
    return {int(path.parent.name[5:]) for path in (folder / "checkpoints").glob("step-*/manifest.json")}


Alone = Callable[..., End]


@pytest.fixture
def alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], one_capture: None
) -> Alone:
    """``alone("nan", *options, VARUNA_NEW="1")``: ``python faulty.py nan`` in this process, in this test's folder."""
    (tmp_path / "file").touch()

    def train(*args: str, **variables: str) -> End:
        for name, value in {"VARUNA_CALIBRATION": "none", **variables}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", [FAULTY, *(arg.format(folder=tmp_path) for arg in args)])
        code, last_words = 0, ""
        try:
            with single_threaded():
                faulty.main()
        except VarunaError as error:
            code, last_words = 1, explained(error)
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        except Exception:
            code, last_words = 1, traceback.format_exc()
        out, err = capfd.readouterr()
        return End(Done(code, out, err + last_words), tmp_path)

    return train


def managed(
    folder: Path, *args: str, workers: int = 1, flags: tuple[str, ...] = (), script: str = FAULTY, **variables: str
) -> End:
    """``varuna run`` in processes, which must leave none behind; ``{folder}`` in an argument is the folder's path."""
    filled = [text.format(folder=folder) for text in (*flags, script, *args, "--mark", "{folder}")]
    done = run([*varuna_command(workers, [], script="")[:-1], *filled], **variables)
    assert not processes_with(str(folder))
    return End(done, folder)


def torchrun(folder: Path, *args: str, **variables: str) -> End:
    """``torchrun --nproc-per-node 2 faulty.py``."""
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", FAULTY]
    return End(run([*start, *args, "--mark", str(folder)], **variables), folder)


@pytest.fixture
def finished(alone: Alone, tmp_path: Path) -> Path:
    """The folder, with the checkpoints of a run that is over."""
    alone("none", *SAVING, "--patient").says(0)
    assert saved_in(tmp_path) == set(SAVED_STEPS)
    return tmp_path


# -- before anything starts --------------------------------------------------------------------------------------


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., End]:
    """``refused("run", "train.py")``: the command line in this process."""

    def enter(*words: str, **variables: str) -> End:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["varuna", *words])
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        code = 0
        with suppress(SystemExit):
            code = command_line()
        return End(Done(code, *capfd.readouterr()), tmp_path)

    return enter


def test_what_cannot_be_used_is_refused_before_anything_starts(refused: Callable[..., End], tmp_path: Path) -> None:
    refused("run", f"{tmp_path}/missing.py").says(
        2, f"no script at {tmp_path}/missing.py. Name the Python file that you train with."
    )
    (tmp_path / "file").touch()
    refused("run", "--json-log", f"{tmp_path}/file/log.jsonl", FAULTY, "none").says(
        2, f"cannot write {tmp_path}/file/log.jsonl: Not a directory. Pass another place."
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused("run", "--port", str(port), FAULTY, "none").says(
            1, f"port {port} on 127.0.0.1 cannot be used", "Pass another --port"
        )
    refused("run", FAULTY, "none", VARUNA_MEMORY_PER_WORKER="lots").says(
        2, "--memory-per-worker=lots is not a size. Write a number with a unit"
    )
    assert not processes_with(str(tmp_path))


# -- before the first step ---------------------------------------------------------------------------------------

MICRO_BATCH = "micro_batch=13 must be between 1 and global_batch=12. Lower it, or leave it out."
STAGES = "P=99 was requested, but the model has 4 sections; pass cut=... or lower {}."
NO_PLAN = ("no plan fits: stage 0 of P=1 needs", "but each worker has 1 KiB", "KiB too little", "Add workers")
BRANCH_LINE = 1 + Path(FAULTY).read_text().splitlines().index("        if torch.rand([]) > 0.5:")
BRANCH = (
    f"the model cannot be captured at {FAULTY}:{BRANCH_LINE}: a decision there follows from data.",
    "replace the branch by tensor operations (torch.where)",
)
METRICS_LINE = 1 + next(i for i, text in enumerate(Path(FAULTY).read_text().splitlines()) if "no accuracy" in text)
METRICS = f"metrics() fails at {FAULTY}:{METRICS_LINE}: AttributeError: no accuracy in a"
UNWRITABLE = "/file/checkpoints: Not a directory. Check the free space and the permissions there, or"
OTHERS = "has 3 checkpoints, the newest after 6 steps. Use --new --overwrite"


@pytest.mark.parametrize(
    ("fault", "variables", "parts"),
    [
        (("micro-batch",), {}, (MICRO_BATCH,)),
        (("none",), {"VARUNA_STAGES": "99"}, (STAGES.format("VARUNA_STAGES"),)),
        (("none",), {"VARUNA_STAGES": "abc"}, ("VARUNA_STAGES=abc",)),
        (("none",), {"VARUNA_MEMORY_PER_WORKER": "1KiB"}, NO_PLAN),
        (("branch",), {}, BRANCH),
        (("metrics",), {}, (METRICS,)),
        (("none", *NOWHERE), {}, (UNWRITABLE,)),
        (("nan",), {}, ("step 1 has loss nan", "The step was not applied", 'pass on_nan="continue"')),
    ],
    ids=lambda value: "-".join(value)[:40] if isinstance(value, tuple | dict) else None,
)
def test_a_refusal_names_what_was_needed_and_found_and_the_users_line(
    alone: Alone, fault: tuple[str, ...], variables: dict[str, str], parts: tuple[str, ...]
) -> None:
    ended = alone(*fault, **variables)
    ended.tells(*parts)
    assert set(ended.done.losses) <= {0}


@nightly
@pytest.mark.parametrize(
    ("fault", "flags", "code", "parts"),
    [
        (("micro-batch",), (), 2, (MICRO_BATCH, "worker w0 failed")),
        (("none",), ("--stages", "99"), 3, (STAGES.format("--stages"),)),
        (("none",), ("--memory-per-worker", "1KiB"), 3, NO_PLAN),
        (("branch",), ("--workers", "2"), 1, BRANCH),
        (("metrics",), (), 1, (METRICS,)),
        (("none", *NOWHERE), (), 1, (UNWRITABLE,)),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) and value else None,
)
def test_a_manager_says_it_once_and_no_worker_stays(
    tmp_path: Path, fault: tuple[str, ...], flags: tuple[str, ...], code: int, parts: tuple[str, ...]
) -> None:
    (tmp_path / "file").touch()
    ended = managed(tmp_path, *fault, flags=flags)
    ended.says(code, *parts)
    assert ended.done.out == ""


@nightly
def test_a_dataset_that_is_no_function_of_its_index_is_caught(tmp_path: Path) -> None:
    managed(tmp_path, "unstable", workers=2, flags=("--stages", "2")).says(
        1, "worker w1 (rank 1, generation 0) failed: dataset[", "is not the same here and on"
    )
    torchrun(tmp_path, "unstable", VARUNA_STAGES="2").tells("is not the same here and on")


# -- exceptions of the user's own --------------------------------------------------------------------------------


def test_an_exception_on_one_worker_is_shown_once_with_rank_and_traceback(tmp_path: Path) -> None:
    failed = managed(tmp_path, "raise", *SAVING, workers=2)
    assert failed.done.code == 1
    assert "worker w1 (rank 1, generation 0) failed: ValueError: a bug of the user at step 2" in failed.done.err
    assert failed.done.err.count(TRACEBACK) == 1
    assert failed.done.err.rstrip().endswith("ValueError: a bug of the user at step 2")
    assert 2 in failed.saved()
    [kept] = re.findall("logs are kept in (.*)", failed.done.err)
    assert "a bug of the user" in (Path(kept) / "w1.log").read_text()


@nightly
def test_an_exception_under_torchrun_is_shown_once(tmp_path: Path) -> None:
    failed = torchrun(tmp_path, "raise").done
    assert failed.code == 1
    assert failed.err.count("ValueError: a bug of the user at step 2") == 1


@pytest.mark.parametrize(
    ("fault", "error", "note"),
    [
        ("dataset", "OSError: sentence 7 is on a disk that is gone", "while reading dataset[7], position"),
        ("collate", "KeyError: 'cannot collate three'", "while collating dataset indices ["),
        ("optimizer", "LookupError: no learning rate for embed.weight", ""),
        ("before-step", "ArithmeticError: embed.weight has a bad gradient", ""),
    ],
)
@pytest.mark.parametrize("is_managed", of_depth((False, True), {False}))
def test_an_exception_in_the_users_functions_is_shown_once(
    alone: Alone, tmp_path: Path, is_managed: bool, fault: str, error: str, note: str
) -> None:
    done = (managed(tmp_path, fault) if is_managed else alone(fault)).done
    assert done.code == 1
    if is_managed:
        failed = rf"worker w\d(?: \(rank \d, generation 0\))? failed: {re.escape(error)}"  # or while it is checked
        assert re.search(failed, done.err), done.err
    assert done.err.count(TRACEBACK) == 1
    assert f"\n{error}" in done.err
    assert note in done.err
    assert FAULTY in done.err


@pytest.mark.parametrize(
    ("text", "code", "parts"),
    [
        (
            "print('loading')\nraise RuntimeError('no data here')\n",
            1,
            ("ended with exit code 1 before its training was done", "\nRuntimeError: no data here"),
        ),
        ("print('loading')\n", 2, ("the script ended without calling trainer.steps(n)",)),
        (
            "import os, signal\nprint('loading', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n",
            1,
            ("5 replacements in a row died before a step was committed", "Look at its log", "lost   worker w0"),
        ),
    ],
    ids=["raises", "trains nothing", "dies"],
)
def test_a_script_that_does_not_get_to_train_ends_the_run(
    tmp_path: Path, text: str, code: int, parts: tuple[str, ...]
) -> None:
    (tmp_path / "train.py").write_text(text)
    cold: dict[str, Any] = {COLD: "1"}  # it never gets to torch
    ended = managed(tmp_path, script="{folder}/train.py", workers=2, **cold)
    assert ended.done.code == code, ended.done.err
    for part in parts:
        assert ended.done.err.count(part) == 1, ended.done.err
    assert ended.done.err.count(TRACEBACK) == text.count("raise")
    assert set(ended.done.out.splitlines()) == {"loading"}


@pytest.mark.parametrize("is_managed", of_depth((False, True), {False}))
def test_a_script_that_exits_in_its_loop_gives_its_exit_code(alone: Alone, tmp_path: Path, is_managed: bool) -> None:
    ended = managed(tmp_path, "exit") if is_managed else alone("exit")
    ended.says(3, *["ended with exit code 3 after its last step"] * is_managed)
    assert set(ended.done.losses) >= {0, 1, 2}


@nightly
def test_a_loss_that_is_not_finite_ends_a_run_before_it_is_applied_unless_it_is_to_go_on(tmp_path: Path) -> None:
    flags = ("--json-log", "{folder}/log.jsonl")
    ended = managed(tmp_path, "nan", flags=flags)
    ended.says(1, "failed: step 1 has loss nan", "The step was not applied", 'pass on_nan="continue"')
    assert [line["step"] for line in json_log(tmp_path / "log.jsonl")] == [0]
    (tmp_path / "log.jsonl").unlink()
    managed(tmp_path, "nan-goes-on", flags=flags).says(0)
    log = json_log(tmp_path / "log.jsonl")
    assert [line["step"] for line in log] == list(range(6))
    assert [math.isnan(line["loss"]) for line in log] == [False] + [True] * 5


# -- checkpoints of another run ----------------------------------------------------------------------------------


def shard_of(folder: Path) -> Path:
    """The file of section 1 in the newest checkpoint; its name carries who wrote it."""
    [shard] = (folder / NEWEST).glob("section-001.*")
    return shard


def flip_a_bit(folder: Path) -> None:
    shard = shard_of(folder)
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)


def test_a_finished_job_ends_at_once_and_another_job_is_refused_its_checkpoints(finished: Path, alone: Alone) -> None:
    again = alone("none", *SAVING)
    again.says(0, "resuming from the checkpoint of step 6", "nothing left to do")
    assert again.done.losses == {}
    alone("none", *SAVING, "--seed", "1").tells("belongs to another job: seed was 0, is now 1.")
    alone("none", *SAVING, "--global-batch", "8").tells(
        "belongs to another job: global batch was 12, is now 8.", "VARUNA_NEW=overwrite"
    )
    alone("none", *SAVING, "--layers", "1").tells(
        "belongs to another job: sections was 4, is now 3; hash of parameters ",
        "Use the model and settings that wrote it",
    )
    alone("none", *SAVING, VARUNA_NEW="1").tells(OTHERS)
    assert saved_in(finished) == set(SAVED_STEPS)
    replaced = alone("none", *SAVING, VARUNA_NEW="overwrite")
    replaced.says(0)
    assert sorted(replaced.done.losses) == list(range(6))
    assert 6 in replaced.saved()
    aside = finished / "checkpoints/replaced-1"
    assert len(list(aside.glob("step-*/manifest.json"))) == len(SAVED_STEPS)


@nightly
def test_a_manager_passes_on_what_workers_say_of_checkpoints(finished: Path) -> None:
    managed(finished, "none", *SAVING).says(0, "resuming from the checkpoint of step 6", "nothing left to do")
    managed(finished, "none", *SAVING, "--seed", "1").says(
        1, "belongs to another job: seed was 0, is now 1.", "--new --overwrite"
    )
    managed(finished, "none", *SAVING, flags=("--new",)).says(1, OTHERS)
    assert saved_in(finished) == set(SAVED_STEPS)
    replaced = managed(finished, "none", *SAVING, flags=("--new", "--overwrite"))
    replaced.says(0)
    assert sorted(replaced.done.losses) == list(range(6))


@pytest.mark.parametrize("is_managed", of_depth((False, True), {False}))
def test_a_damaged_shard_costs_only_the_steps_since_the_checkpoint_before(
    finished: Path, alone: Alone, is_managed: bool
) -> None:
    flip_a_bit(finished)
    ended = managed(finished, "none", *SAVING) if is_managed else alone("none", *SAVING)
    ended.says(0, "the checkpoint of step 6 cannot be used: ")
    assert "is damaged: parameters/" in ended.done.err
    assert sorted(ended.done.losses) == [4, 5]
    assert ended.saved() == set(SAVED_STEPS)
    assert not (finished / NEWEST / "damaged.txt").exists()  # superseded
    if is_managed:
        ended.says(0, "going back from step 6 to the checkpoint of step 4")


@pytest.mark.parametrize("is_managed", of_depth((False, True), {False}))
def test_a_damaged_only_checkpoint_is_refused_and_left_as_it_is(finished: Path, alone: Alone, is_managed: bool) -> None:
    for step in SAVED_STEPS[:-1]:
        shutil.rmtree(finished / f"checkpoints/step-{step:08d}")
    flip_a_bit(finished)
    damaged = shard_of(finished).read_bytes()
    ended = managed(finished, "none", *SAVING) if is_managed else alone("none", *SAVING)
    assert ended.done.code == 1
    assert "Restore the named files from a copy, or start afresh with" in ended.done.err
    assert f"{shard_of(finished)} is damaged" in ended.done.err
    assert shard_of(finished).read_bytes() == damaged
    assert ended.saved() == {6}


# -- signals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=nightly)])
def test_signals_end_a_run_and_its_workers(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """SIGTERM at once; SIGINT after the step in flight, with a checkpoint of it."""
    args = ("none", "--steps", "100000", "--checkpoint-dir", f"{tmp_path}/checkpoints", "--mark", str(tmp_path))
    command = varuna_command(2, [], *args, script=FAULTY)
    parent = Process(
        command,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for(partial(saved_in, tmp_path), 60)
        parent.send_signal(number)
        _, err = parent.communicate(timeout=60)
    finally:
        parent.kill()
    assert not processes_with(str(tmp_path))
    ended = End(Done(parent.returncode, "", err), tmp_path)
    ended.says(code, f"stopped by {number.name}")
    assert ended.saved()
    if number == signal.SIGINT:
        done = re.search(r"stopped by SIGINT, (\d+) steps done", err)
        assert done is not None, err
        assert max(ended.saved()) == int(done[1])
        ended.says(130, "Press again to stop now")
