"""The manager's pod: what its shell script does when training ends, when it fails, and when the pod goes."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "deploy" / "helm" / "varuna" / "files" / "manager.sh"


class Pod:
    """The script in a process, with a stand-in for ``varuna``; as in the chart, but for the folder."""

    def __init__(self, folder: Path, varuna: str) -> None:
        self.run_dir, self.said = folder / "run", folder / "said"
        self.run_dir.mkdir(exist_ok=True)
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin" / "varuna").write_text(f'#!/bin/sh\necho "$@" >> "{self.said}"\n{varuna}\n')
        (folder / "bin" / "varuna").chmod(0o755)
        self.process = subprocess.Popen(
            ["/bin/sh", str(SCRIPT), "gpt2-agent", "1:4", "gpt2-manager.ml.svc", str(self.run_dir), "train.py", "a b"],
            env={**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"},
            stdout=subprocess.PIPE,
            text=True,
        )

    def until(self, path: Path) -> None:
        for _ in range(2000):
            if path.exists():
                return
            time.sleep(0.01)
        raise AssertionError(f"{path} has not come in 20 s")

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(20)
        finally:
            self.process.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def test_a_run_that_is_over_is_not_started_again(tmp_path: Path) -> None:
    first = Pod(tmp_path, "exit 0")
    first.until(first.run_dir / "finished")
    assert first.end() == 0
    second = Pod(tmp_path, "exit 0")
    assert second.process.stdout is not None
    assert "training is over" in second.process.stdout.readline()
    assert second.end() == 0
    assert second.said.read_text() == (
        f"run --on k8s:gpt2-agent --nodes 1:4 --port 7070 --advertise gpt2-manager.ml.svc --run-dir {second.run_dir} "
        "train.py a b\n"
    )


@pytest.mark.parametrize("code", [1, 70])
def test_a_run_that_fails_is_tried_again_a_few_times_and_then_waits_to_be_looked_at(tmp_path: Path, code: int) -> None:
    for _ in range(4):
        pod = Pod(tmp_path, f"exit {code}")
        assert pod.process.wait(20) == code  # for Kubernetes, which pauses ever longer
        pod.end()
    assert not (pod.run_dir / "failed").exists()
    for _ in range(2):  # the fifth failure, and a pod that comes later
        pod = Pod(tmp_path, f"exit {code}")
        pod.until(pod.run_dir / "failed")
        assert pod.process.stdout is not None
        assert f"the run failed with exit code {code}, and is not tried again" in pod.process.stdout.readline()
        assert "remove" in pod.process.stdout.readline()
        assert pod.end() == 0
    assert len(pod.said.read_text().splitlines()) == 5
    (pod.run_dir / "failed").unlink()
    pod = Pod(tmp_path, f"exit {code}")
    assert pod.process.wait(20) == code
    pod.end()


@pytest.mark.parametrize("code", [2, 3])
def test_what_the_next_try_would_say_again_is_not_tried_again(tmp_path: Path, code: int) -> None:
    pod = Pod(tmp_path, f"exit {code}")
    pod.until(pod.run_dir / "failed")
    assert pod.end() == 0
    assert not (pod.run_dir / "finished").exists()


def test_a_manager_that_is_killed_is_no_failure_of_its_run(tmp_path: Path) -> None:
    for _ in range(6):
        pod = Pod(tmp_path, "kill -9 $$")
        assert pod.process.wait(20) == 137
        pod.end()
    assert list(pod.run_dir.iterdir()) == []


def test_a_pod_that_goes_leaves_the_run_to_the_next_one(tmp_path: Path) -> None:
    there = tmp_path / "there"
    pod = Pod(
        tmp_path, f'trap "echo left >> {tmp_path}/left; exit 0" TERM\ntouch {there}\nwhile :; do sleep 0.05; done'
    )
    pod.until(there)
    assert pod.end() == 0
    assert (tmp_path / "left").exists()
    assert not (pod.run_dir / "finished").exists()
