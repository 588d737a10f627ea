"""A folder that servers watch never shows anything half-written, whoever dies, and only the newest turn publishes."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.depth import by_depth
from varuna.checkpoint.published import LATEST, PublishedFolder
from varuna.core.errors import CheckpointError

PROGRAM = """
import os, signal, sys
from pathlib import Path
from varuna.checkpoint.published import PublishedFolder

PARTS = ("a", "b", "c")

def publish(folder, step, turn):
    written = folder.begin(step, turn)
    for part in PARTS:
        (written / part).write_text(str(step) * 100)
    assert folder.publish(written, step, turn)

def dying(call):
    # open comes before every write, fsync has no event of its own
    left = call
    def hear(event, args):
        nonlocal left
        if event.startswith(("os.", "shutil.", "open")) and str(path) in repr(args):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hear)

path = Path(sys.argv[1])
call, killed = 1 - int(sys.argv[2]), True
while killed:
    call += int(sys.argv[2])
    here = path / str(call)
    folder = PublishedFolder(here, keep=1)
    folder.prepare()
    publish(folder, 1, folder.take_turn())
    if not (child := os.fork()):
        path = here
        dying(call)
        turn = folder.take_turn()
        publish(folder, 1, turn)  # once more, as after a rollback
        publish(folder, 2, turn)
        os._exit(0)
    killed = os.waitpid(child, 0)[1] != 0
    for shown in here.glob("step-*"):
        assert sorted(each.name for each in shown.iterdir()) == list(PARTS), (call, shown)
        for part in PARTS:
            assert (shown / part).read_text() == str(int(shown.name[5:])) * 100, (call, shown)
    publish(folder, 3, folder.take_turn())  # whoever comes next cleans up
    assert sorted(os.listdir(here)) == [".lock", ".turn", "latest", "step-00000003"], (call, os.listdir(here))
    assert (here / "latest").resolve().name == "step-00000003"
print(call)
"""


def publish(folder: PublishedFolder, step: int, turn: str, text: str = "") -> bool:
    written = folder.begin(step, turn)
    (written / "a").write_text(text)
    return folder.publish(written, step, turn)


def shown(folder: PublishedFolder) -> list[str]:
    return sorted(entry.name for entry in folder.path.iterdir() if not entry.name.startswith("."))


@pytest.fixture
def folder(tmp_path: Path) -> PublishedFolder:
    folder = PublishedFolder(tmp_path / "published", keep=2)
    folder.prepare()
    return folder


def test_the_newest_ones_are_kept_and_one_name_leads_to_the_newest(folder: PublishedFolder) -> None:
    turn = folder.take_turn()
    for step in (10, 20, 30):
        assert publish(folder, step, turn, str(step))
    assert shown(folder) == [LATEST, "step-00000020", "step-00000030"]
    assert (folder.path / LATEST / "a").read_text() == "30"


def test_who_is_of_an_older_generation_publishes_nothing_any_more(folder: PublishedFolder) -> None:
    old = folder.take_turn()
    late = folder.begin(10, old)
    (late / "a").write_text("old")
    new = folder.take_turn()
    assert publish(folder, 10, new, "new")
    assert not folder.publish(late, 10, old)
    assert not publish(folder, 20, old, "old")
    assert shown(folder) == [LATEST, "step-00000010"]
    assert (folder.path / LATEST / "a").read_text() == "new"


def test_what_a_run_went_back_from_is_replaced_and_what_came_after_it_goes(folder: PublishedFolder) -> None:
    turn = folder.take_turn()
    for step in (10, 20):
        publish(folder, step, turn, "before")
    assert publish(folder, 10, folder.take_turn(), "again")
    assert shown(folder) == [LATEST, "step-00000010"]
    assert (folder.path / LATEST / "a").read_text() == "again"


def test_a_process_may_die_at_any_call_and_the_next_one_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(by_depth(5, 1))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


def test_a_folder_that_cannot_be_written_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot publish in .*file: .* give Publish\(path\) another folder"):
        PublishedFolder(tmp_path / "file", keep=1).prepare()
