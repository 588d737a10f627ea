"""What goes wrong ends in one clear message, with no process left behind and nothing lost.

Every case is a process of its own, and most of its time is Python's start: they run a few at a time in the
background, and each test waits for those that it looks at.
"""

import math
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from tests.scenarios.launch import Done, environment, json_log, processes_with, run, varuna_command
from tests.scenarios.warm import COLD, Process
from tests.waiting import wait_for

pytestmark = pytest.mark.timeout(300)

FAULTY = str(Path(__file__).with_name("faulty.py"))
TRACEBACK = "Traceback (most recent call last)"
AT_A_TIME = 3
SAVED_STEPS = (2, 4, 6)
NEWEST = "checkpoints/step-00000006"

Start = Callable[[Path], list[str]]


@dataclass(frozen=True)
class Case:
    """A command, given a folder of its own whose path its processes show."""

    command: Start
    variables: Mapping[str, str] = field(default_factory=dict)
    before: Callable[[Path], None] | None = None
    """Changes a copy of a finished run's checkpoints, at ``folder / "checkpoints"``."""


@dataclass(frozen=True)
class End:
    """How a case ended."""

    done: Done
    folder: Path

    def says(self, code: int, *parts: str) -> None:
        """One message with all of ``parts``, and no traceback: what a person sees of an expected error."""
        assert self.done.code == code, self.done.err
        assert TRACEBACK not in self.done.err
        for part in parts:
            assert self.done.err.count(part) == 1, f"{part!r} in\n{self.done.err}"

    def tells(self, *parts: str) -> None:
        """The same without a manager, with the user's line; torchrun adds a traceback of its own."""
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


def elastic(*args: str, workers: int = 1, flags: tuple[str, ...] = (), script: str = FAULTY) -> Start:
    """``varuna run``; ``{folder}`` in an argument is the folder's path."""

    def command(folder: Path) -> list[str]:
        filled = [text.format(folder=folder) for text in (*flags, script, *args, "--mark", "{folder}")]
        return [*varuna_command(workers, [], script="")[:-1], *filled]

    return command


def alone(*args: str) -> Start:
    """``python faulty.py``."""
    return lambda folder: [sys.executable, FAULTY, *(arg.format(folder=folder) for arg in args), "--mark", str(folder)]


def torchrun(*args: str) -> Start:
    """``torchrun --nproc-per-node 2 faulty.py``."""
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", FAULTY]
    return lambda folder: [*start, *args, "--mark", str(folder)]


def shard_of(folder: Path) -> Path:
    """The file of section 1 in the newest checkpoint; its name carries who wrote it."""
    [shard] = (folder / NEWEST).glob("section-001.*")
    return shard


def flip_a_bit(folder: Path) -> None:
    shard = shard_of(folder)
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)


def flip_a_bit_of_the_only_one(folder: Path) -> None:
    for step in SAVED_STEPS[:-1]:
        shutil.rmtree(folder / f"checkpoints/step-{step:08d}")
    flip_a_bit(folder)


def keep(folder: Path) -> None:
    """Checkpoints as they are."""


SAVING = ("--checkpoint-dir", "{folder}/checkpoints")
NOWHERE = ("--checkpoint-dir", "{folder}/file/checkpoints")
REALLY = {COLD: "1"}  # started: these never get to torch
CASES = {
    "micro-batch": Case(elastic("micro-batch")),
    "micro-batch alone": Case(alone("micro-batch")),
    "stages": Case(elastic("none", flags=("--stages", "99"))),
    "stages alone": Case(alone("none"), {"VARUNA_STAGES": "99"}),
    "memory": Case(elastic("none", flags=("--memory-per-worker", "1KiB"))),
    "branch": Case(elastic("branch", workers=2)),
    "branch alone": Case(alone("branch")),
    "raise": Case(elastic("raise", *SAVING, workers=2)),
    "raise torchrun": Case(torchrun("raise")),
    "exit": Case(elastic("exit")),
    "unstable": Case(elastic("unstable", workers=2, flags=("--stages", "2"))),
    "unstable torchrun": Case(torchrun("unstable"), {"VARUNA_STAGES": "2"}),
    "nan": Case(elastic("nan", flags=("--json-log", "{folder}/log.jsonl"))),
    "nan-goes-on": Case(elastic("nan-goes-on", flags=("--json-log", "{folder}/log.jsonl"))),
    "dataset": Case(elastic("dataset")),
    "collate": Case(elastic("collate")),
    "optimizer": Case(elastic("optimizer")),
    "metrics": Case(elastic("metrics")),
    "before-step": Case(elastic("before-step")),
    "import": Case(elastic(script="{folder}/import.py", workers=2), REALLY),
    "never": Case(elastic(script="{folder}/never.py", workers=2), REALLY),
    "killed": Case(elastic(script="{folder}/killed.py", workers=2), REALLY),
    "missing": Case(elastic(script="{folder}/missing.py"), REALLY),
    "log": Case(elastic("none", flags=("--json-log", "{folder}/file/log.jsonl"))),
    "abc": Case(elastic("none"), {"VARUNA_STAGES": "abc"}),
    "lots": Case(elastic("none"), {"VARUNA_MEMORY_PER_WORKER": "lots"}),
    "unwritable": Case(elastic("none", *NOWHERE)),
    "unwritable alone": Case(alone("none", *NOWHERE)),
    "again": Case(elastic("none", *SAVING), before=keep),
    "again alone": Case(alone("none", *SAVING), before=keep),
    "seed": Case(elastic("none", *SAVING, "--seed", "1"), before=keep),
    "batch alone": Case(alone("none", *SAVING, "--global-batch", "8"), before=keep),
    "model": Case(elastic("none", *SAVING, "--layers", "1"), before=keep),
    "new": Case(elastic("none", *SAVING, flags=("--new",)), before=keep),
    "new alone": Case(alone("none", *SAVING), {"VARUNA_NEW": "1"}, before=keep),
    "overwrite": Case(elastic("none", *SAVING, flags=("--new", "--overwrite")), before=keep),
    "damaged": Case(elastic("none", *SAVING), before=flip_a_bit),
    "only damaged": Case(elastic("none", *SAVING), before=flip_a_bit_of_the_only_one),
}
SCRIPTS = {
    "import.py": "print('loading')\nraise RuntimeError('no data here')\n",
    "never.py": "print('nothing to do')\n",
    "killed.py": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
    "file": "",
}


@pytest.fixture(scope="module")
def end(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], End]]:
    """``end(name)`` waits for a case, which must leave no process behind."""
    finished: Future[Path] = Future()

    def train() -> None:
        folder = tmp_path_factory.mktemp("finished")
        done = run(alone("none", *SAVING, "--patient")(folder))
        assert done.code == 0, done.err
        finished.set_result(folder / "checkpoints")

    def play(case: Case, folder: Path) -> End:
        for name, text in SCRIPTS.items():
            (folder / name).write_text(text)
        if case.before is not None:
            shutil.copytree(finished.result(100), folder / "checkpoints")
            case.before(folder)
        done = run(case.command(folder), **case.variables)
        assert not processes_with(str(folder))
        return End(done, folder)

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        pool.submit(train)
        ends = {name: pool.submit(play, case, tmp_path_factory.mktemp("case")) for name, case in CASES.items()}
        yield lambda name: ends[name].result(250)
        for future in ends.values():
            future.cancel()


Ends = Callable[[str], End]


def test_a_micro_batch_above_the_global_batch_names_both(end: Ends) -> None:
    expected = "micro_batch=13 must be between 1 and global_batch=12. Lower it, or leave it out."
    end("micro-batch").says(2, expected, "worker w0 failed")
    end("micro-batch alone").tells(expected)


def test_more_stages_than_sections_names_the_number_and_the_remedy(end: Ends) -> None:
    expected = "P=99 was requested, but the model has 4 sections; pass cut=... or lower --stages."
    end("stages").says(3, expected)
    end("stages alone").tells(expected.replace("--stages", "VARUNA_STAGES"))


def test_too_little_memory_for_any_plan_names_the_bytes_that_are_missing(end: Ends) -> None:
    expected = ("no plan fits: stage 0 of P=1 needs", "but each worker has 1 KiB", "KiB too little", "Add workers")
    end("memory").says(3, *expected)


def test_a_model_that_cannot_be_captured_names_its_file_and_line(end: Ends) -> None:
    line = 1 + Path(FAULTY).read_text().splitlines().index("        if torch.rand([]) > 0.5:")
    expected = f"the model cannot be captured at {FAULTY}:{line}: a decision there follows from data."
    end("branch").says(1, expected, "replace the branch by tensor operations (torch.where, torch.cond)")
    end("branch alone").tells(expected)


def test_an_exception_on_one_worker_is_shown_once_with_rank_and_traceback(end: Ends) -> None:
    failed = end("raise")
    assert failed.done.code == 1
    assert "worker w1 (rank 1, generation 0) failed: ValueError: a bug of the user at step 2" in failed.done.err
    assert failed.done.err.count(TRACEBACK) == 1
    assert failed.done.err.rstrip().endswith("ValueError: a bug of the user at step 2")
    assert 2 in failed.saved()
    [kept] = re.findall("logs are kept in (.*)", failed.done.err)
    assert "a bug of the user" in (Path(kept) / "w1.log").read_text()
    fixed = end("raise torchrun").done
    assert fixed.code == 1
    assert fixed.err.count("ValueError: a bug of the user at step 2") == 1


@pytest.mark.parametrize(
    ("fault", "error", "note"),
    [
        ("dataset", "OSError: sentence 7 is on a disk that is gone", "while reading dataset[7], position"),
        ("collate", "KeyError: 'cannot collate three'", "while collating dataset indices ["),
        ("optimizer", "LookupError: no learning rate for embed.weight", ""),
        ("before-step", "ArithmeticError: embed.weight has a bad gradient", ""),
    ],
)
def test_an_exception_in_the_users_functions_is_shown_once(end: Ends, fault: str, error: str, note: str) -> None:
    done = end(fault).done
    assert done.code == 1
    assert f"worker w0 (rank 0, generation 0) failed: {error}" in done.err
    assert done.err.count(TRACEBACK) == 1
    assert f"\n{error}" in done.err
    assert note in done.err
    assert FAULTY in done.err


def test_an_exception_in_metrics_names_its_file_and_line(end: Ends) -> None:
    line = 1 + next(i for i, text in enumerate(Path(FAULTY).read_text().splitlines()) if "no accuracy" in text)
    end("metrics").says(1, f"metrics() fails at {FAULTY}:{line}: AttributeError: no accuracy in a")


def test_an_exception_at_import_is_shown_once(end: Ends) -> None:
    done = end("import").done
    assert done.code == 1
    assert done.err.count(TRACEBACK) == 1
    assert done.err.count("RuntimeError: no data here") == 1
    assert "ended with exit code 1 before its training was done" in done.err
    assert done.out == "loading\n"


def test_a_script_that_exits_in_its_loop_gives_its_exit_code(end: Ends) -> None:
    ended = end("exit")
    ended.says(3, "ended with exit code 3 after its last step")
    assert set(ended.done.losses) >= {0, 1, 2}


def test_a_script_that_trains_nothing_says_so_and_shows_its_output(end: Ends) -> None:
    ended = end("never")
    ended.says(2, "the script ended without calling trainer.steps(n)")
    assert ended.done.out == "nothing to do\n"


def test_a_worker_that_dies_again_and_again_ends_the_run(end: Ends) -> None:
    end("killed").says(
        1, "5 replacements in a row died before a step was committed", "Look at its log", "lost   worker w0"
    )


def test_a_script_that_does_not_exist_is_named(end: Ends) -> None:
    missing = end("missing")
    missing.says(2, f"no script at {missing.folder}/missing.py. Name the Python file that you train with.")


def test_what_cannot_be_used_is_refused_before_anything_starts(end: Ends) -> None:
    log = end("log")
    log.says(2, f"cannot write {log.folder}/file/log.jsonl: Not a directory. Pass another place.")
    end("abc").says(2, "VARUNA_STAGES")
    end("lots").says(2, "--memory-per-worker=lots is not a size. Write a number with a unit")


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(elastic("none", flags=("--port", str(port)))(tmp_path))
    End(done, tmp_path).says(1, f"port {port} on 127.0.0.1 cannot be used", "Pass another --port")
    assert not processes_with(str(tmp_path))


def test_a_dataset_that_is_no_function_of_its_index_is_caught(end: Ends) -> None:
    end("unstable").says(1, "worker w1 (rank 1, generation 0) failed: dataset[", "is not the same here and on")
    end("unstable torchrun").tells("is not the same here and on")


def test_a_loss_that_is_not_finite_ends_the_run_before_it_is_applied(end: Ends) -> None:
    ended = end("nan")
    ended.says(1, "failed: step 1 has loss nan", "The step was not applied", 'pass on_nan="continue"')
    assert [line["step"] for line in json_log(ended.folder / "log.jsonl")] == [0]


def test_a_loss_that_is_not_finite_does_not_end_a_run_that_is_to_go_on(end: Ends) -> None:
    ended = end("nan-goes-on")
    ended.says(0)
    log = json_log(ended.folder / "log.jsonl")
    assert [line["step"] for line in log] == list(range(6))
    assert [math.isnan(line["loss"]) for line in log] == [False] + [True] * 5


def test_an_unwritable_checkpoint_directory_is_found_before_the_first_step(end: Ends) -> None:
    managed, plain = end("unwritable"), end("unwritable alone")
    expected = "cannot write {}/file/checkpoints: Not a directory. Check the free space and the permissions there, or"
    managed.says(1, expected.format(managed.folder))
    plain.tells(expected.format(plain.folder))
    assert managed.done.out == plain.done.out == ""


def test_a_finished_job_ends_at_once_and_says_so(end: Ends) -> None:
    for name in ("again", "again alone"):
        ended = end(name)
        ended.says(0, "resuming from the checkpoint of step 6", "nothing left to do")
        assert ended.done.losses == {}
        assert ended.saved() == set(SAVED_STEPS)


def test_a_checkpoint_of_another_job_is_refused(end: Ends) -> None:
    end("seed").says(1, "belongs to another job: seed was 0, is now 1.", "--new --overwrite")
    end("batch alone").tells("belongs to another job: global batch was 12, is now 8.", "VARUNA_NEW=overwrite")
    end("model").says(
        1,
        "belongs to another job: sections was 4, is now 3; hash of parameters ",
        "Use the model and settings that wrote it",
    )
    for name in ("seed", "batch alone", "model"):
        assert end(name).saved() == set(SAVED_STEPS)


def test_a_new_run_touches_old_checkpoints_only_when_told(end: Ends) -> None:
    expected = "has 3 checkpoints, the newest after 6 steps. Use --new --overwrite"
    end("new").says(1, expected)
    end("new alone").tells(expected)
    assert end("new").saved() == end("new alone").saved() == set(SAVED_STEPS)
    replaced = end("overwrite")
    replaced.says(0)
    assert sorted(replaced.done.losses) == list(range(6))
    assert 6 in replaced.saved()
    aside = replaced.folder / "checkpoints/replaced-1"
    assert len(list(aside.glob("step-*/manifest.json"))) == len(SAVED_STEPS)


def test_a_damaged_shard_costs_only_the_steps_since_the_checkpoint_before(end: Ends) -> None:
    ended = end("damaged")
    ended.says(0, "the checkpoint of step 6 cannot be used: ", "going back from step 6 to the checkpoint of step 4")
    assert "is damaged: parameters/" in ended.done.err
    assert sorted(ended.done.losses) == [4, 5]
    assert ended.saved() == set(SAVED_STEPS)
    assert not (ended.folder / NEWEST / "damaged.txt").exists()  # superseded


def test_a_damaged_only_checkpoint_is_refused_and_left_as_it_is(end: Ends) -> None:
    ended = end("only damaged")
    ended.says(1, "Restore the named files from a copy, or start afresh with --new --overwrite")
    assert f"{shard_of(ended.folder)} is damaged" in ended.done.err
    intact = bytearray(shard_of(ended.folder).read_bytes())
    intact[-1] ^= 1
    assert bytes(intact) == shard_of(end("again").folder).read_bytes()
    assert ended.saved() == {6}


def test_signals_end_a_run_and_its_workers(tmp_path: Path) -> None:
    """SIGTERM at once; SIGINT after the step in flight, with a checkpoint of it."""
    args = ("none", "--steps", "100000", "--checkpoint-dir", "{folder}/checkpoints")
    expected = {signal.SIGINT: 130, signal.SIGTERM: 143}
    parents = {}
    for workers, number in enumerate(expected, 1):
        folder = tmp_path / number.name
        parents[number] = Process(
            elastic(*args, workers=workers)(folder),
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    try:
        for number, parent in parents.items():
            folder = tmp_path / number.name
            wait_for(partial(saved_in, folder), 60)
            parent.send_signal(number)
            _, err = parent.communicate(timeout=20)
            assert not processes_with(str(folder))
            ended = End(Done(parent.returncode, "", err), folder)
            ended.says(expected[number], f"stopped by {number.name}")
            assert ended.saved()
            if number == signal.SIGINT:
                done = re.search(r"stopped by SIGINT, (\d+) steps done", err)
                assert done is not None, err
                assert max(ended.saved()) == int(done[1])
                ended.says(130, "Press again to stop now")
    finally:
        for parent in parents.values():
            parent.kill()
