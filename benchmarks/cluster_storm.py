"""A seeded storm over a cluster: cables, freezes, kills, wrong machines, full and read-only disks, lies, slow lines.

    python -m benchmarks.cluster_storm [--seconds 300] [--seed 0]

`make chaos` runs it after benchmarks/chaos.py. A manager, four machines with a worker each (2 stages x 2 replicas) and
an object store live in network namespaces of their own; real `varuna manager` and `varuna agent` processes train
benchmarks/elastic_job.py. One fault at a time lasts up to 12 s; afterwards 5 new steps must be recorded within a bound.
In the end every loss is compared with that of one undisturbed process, the sample ledger is audited, `varuna doctor`
looks at the run, no process may be left, and no manager or agent may have logged an internal error. Exit code 1
otherwise. Needs root, ip, tc and unshare; without nft no packets are lost at random.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from benchmarks.chaos import JOB, TOLERANCE, undisturbed
from tests.scenarios.launch import json_log, processes_with
from tests.scenarios.network import NAMESPACE, Network, why_not
from varuna.extras.doctor.sample_ledger import audit
from varuna.fleet.run_folder.past_events import read_events

ROOT = Path(__file__).resolve().parents[1]
MACHINES = ("a", "b", "c", "d")
NEWCOMER = "e"
"""A machine that comes and cannot train."""
BUCKET, S3_PORT, MANAGER_PORT = "storm", 5000, 7070
BOUND_S = 150.0
"""From the end of a fault to 5 new steps."""
LONGEST_S = 12.0
_DISK_BYTES = 64 << 20
_FAULT = re.compile(r'internal error(?: \(please|: )|^ *File ".*/varuna/(?:fleet|cli)/')
"""Lines of managers and agents that show an internal error; no traceback of a worker, and no answer of the bucket."""
_VARUNA = (sys.executable, "-m", "varuna.cli.main")


class Storm:
    """The cluster, and a hand on each of its parts."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.choose = folder, random.Random(seed)
        self.run_dir, self.log = folder / "disk" / "run", folder / "steps.jsonl"
        self.network = Network("manager", "store", *MACHINES, NEWCOMER)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.acts: Counter[str] = Counter()
        self.waits_s: list[float] = []
        self.faults: list[str] = []
        self._read = threading.Event()
        self._read.set()
        self.disks = {"manager": folder / "disk", **{name: folder / name for name in MACHINES}}
        for disk in self.disks.values():
            disk.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", disk], check=True)

    # -- processes -------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Everything, up to the first steps."""
        address = self.network.addresses["store"]
        serve = [sys.executable, "-m", "benchmarks.lying_bucket", str(S3_PORT), str(self._faults_of("store"))]
        self._start("store", "store", serve)
        self._environment = {
            "AWS_ENDPOINT_URL": f"http://{address}:{S3_PORT}",
            "AWS_ACCESS_KEY_ID": "storm",
            "AWS_SECRET_ACCESS_KEY": "storm",
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }
        make = f"import boto3; boto3.client('s3', endpoint_url='http://{address}:{S3_PORT}', region_name='us-east-1')"
        self._until(lambda: self._inside("store", [sys.executable, "-c", f"{make}.create_bucket(Bucket='{BUCKET}')"]))
        self.start_manager()
        for name in MACHINES:
            token = self.command("join-token").strip()
            self.start_agent(name, token)
        self._until(lambda: len(self.steps()) > 5)

    def start_manager(self) -> None:
        """Also again, in the same folder."""
        self._begin_manager()
        self._until((self.run_dir / "access.json").exists)
        self._until(lambda: self._inside("manager", [*_VARUNA, "status", "--run", str(self.run_dir), "--json"]))

    def _begin_manager(self) -> None:
        where = ["--host", "0.0.0.0", "--port", str(MANAGER_PORT), "--advertise", self.network.addresses["manager"]]
        shape = ["--workers", "4", "--stages", "2", "--run-dir", str(self.run_dir), "--json-log", str(self.log)]
        process = self._start("manager", "manager", [*_VARUNA, "manager", *where, *shape], reads=True)
        threading.Thread(target=self._drain, args=(process,), daemon=True).start()

    def start_agent(self, name: str, token: str = "varuna://kept") -> None:
        """Also again: its folder knows who it is."""
        kept = self.folder / f"{name}.token"
        if not kept.exists():
            kept.write_text(token)
        job = [str(JOB), "--pause", "0.1", "--checkpoints", f"s3://{BUCKET}/run"]
        state = ["--state-dir", str(self.folder / name), "--workers", "1"]
        self._start(f"agent {name}", name, [*_VARUNA, "agent", kept.read_text(), *state, "--", *job])

    def command(self, *words: str) -> str:
        """A person's command, on the manager's host."""
        full = [*_VARUNA, words[0], "--run", str(self.run_dir), *words[1:]]
        return subprocess.run(
            self._enter("manager", full),
            env=self._env("manager"),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout

    def _start(self, name: str, host: str, command: list[str], *, reads: bool = False) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{name}.err").open("ab") as err:
            out = subprocess.PIPE if reads else subprocess.DEVNULL
            process = subprocess.Popen(
                self._enter(host, command), env=self._env(host), stdout=out, stderr=err, start_new_session=True
            )
        self.processes[name] = process
        return process

    def _enter(self, host: str, command: list[str]) -> list[str]:
        return ["nsenter", f"--net={self.network.environment(host)[NAMESPACE]}", *command]

    def _env(self, host: str) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("VARUNA_")}
        own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(self.folder / "state" / host)}
        own |= {"STORM_FAULTS": str(self._faults_of(host))}
        if host == NEWCOMER:
            own |= {"PYTHONPATH": f"{self._without_torch()}{os.pathsep}{ROOT}"}
        return {**kept, **own, **getattr(self, "_environment", {})}

    def _without_torch(self) -> Path:
        """Make a folder from which ``import torch`` fails, as on an image that lacks it."""
        folder = self.folder / "lacking"
        folder.mkdir(exist_ok=True)
        (folder / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")\n")
        return folder

    def _inside(self, host: str, command: list[str]) -> bool:
        done = subprocess.run(self._enter(host, command), env=self._env(host), capture_output=True, timeout=60)
        return done.returncode == 0

    def _drain(self, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        while self._read.wait() and os.read(process.stdout.fileno(), 4096):
            pass

    def steps(self) -> list[int]:
        """Recorded so far."""
        return [row["step"] for row in json_log(self.log)] if self.log.exists() else []

    def _has_recorded(self, step: int) -> bool:
        return max(self.steps(), default=-1) >= step

    def _until(self, condition: Callable[[], object], bound_s: float = BOUND_S) -> float:
        begin_s = time.monotonic()
        while not condition():
            if time.monotonic() - begin_s > bound_s:
                raise TimeoutError(f"waited {bound_s:.0f} s in vain")
            time.sleep(0.1)
        return time.monotonic() - begin_s

    # -- faults ----------------------------------------------------------------------------------------------

    def play(self, seconds: float) -> None:
        """One fault after the other."""
        acts = [
            self.cable, self.two_cables, self.frozen, self.worker_frozen, self.worker_killed, self.machine_killed,
            self.manager_killed, self.log_cut, self.disk_full, self.unread, self.wrong_machine,
            self.wrong_newcomer, self.silent_pair, self.slow_line, self.flood, self.workers_killed, self.lying_bucket,
            self.disk_read_only,
        ]  # fmt: skip
        acts += [] if why_not("nft") else [self.lossy]
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            act, lasts_s = self.choose.choice(acts), self.choose.uniform(0.5, LONGEST_S)
            self.acts[act.__name__] += 1
            with act() as what:
                print(f"{act.__name__} {what}, {lasts_s:.1f} s", file=sys.stderr, flush=True)
                time.sleep(lasts_s)
            before = max(self.steps(), default=-1)
            try:
                self.waits_s.append(self._until(partial(self._has_recorded, before + 5)))
            except TimeoutError as error:
                self.faults.append(f"after {act.__name__} {what} ({sum(self.acts.values())}th): {error}")
                return
            time.sleep(self.choose.uniform(0.0, 3.0))

    @contextlib.contextmanager
    def cable(self) -> Iterator[str]:
        """Of the manager, the store or a machine."""
        host = self.choose.choice(("manager", "store", *MACHINES))
        self.network.part([host])
        yield host
        self.network.heal()

    @contextlib.contextmanager
    def two_cables(self) -> Iterator[str]:
        """Two that still reach each other."""
        hosts = self.choose.sample(("manager", *MACHINES), 2)
        self.network.part(hosts)
        yield " and ".join(hosts)
        self.network.heal()

    @contextlib.contextmanager
    def lossy(self) -> Iterator[str]:
        """30 % of the packets one way."""
        at, source = self.choose.sample(("manager", *MACHINES), 2)
        self.network.drop(at, source, percent=30)
        yield f"from {source} to {at}"
        self.network.heal()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[str]:
        """A manager, an agent, or the object store (which then is slow)."""
        name = self.choose.choice(("manager", "store", *(f"agent {machine}" for machine in MACHINES)))
        with self._stopped(self.processes[name].pid):
            yield name

    @contextlib.contextmanager
    def worker_frozen(self) -> Iterator[str]:
        """One that may be killed for it."""
        pid = self._worker()
        with self._stopped(pid):
            yield str(pid)

    @contextlib.contextmanager
    def worker_killed(self) -> Iterator[str]:
        """Its agent starts another."""
        pid = self._worker()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        yield str(pid)

    @contextlib.contextmanager
    def workers_killed(self) -> Iterator[str]:
        """Kill all workers at once, so that the run restores from the bucket."""
        pids = self._workers()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        yield " ".join(map(str, pids))

    @contextlib.contextmanager
    def machine_killed(self) -> Iterator[str]:
        """An agent and its worker; the machine comes back."""
        name = self.choose.choice(MACHINES)
        self._kill(f"agent {name}")
        yield name
        self.start_agent(name)

    @contextlib.contextmanager
    def manager_killed(self) -> Iterator[str]:
        """Another takes the run up."""
        self._kill("manager")
        yield ""
        self.start_manager()

    @contextlib.contextmanager
    def log_cut(self) -> Iterator[str]:
        """Somebody empties a log."""
        logs = sorted((self.run_dir / "logs").rglob("*.log"))
        log = self.choose.choice(logs)
        os.truncate(log, 0)
        yield log.name

    @contextlib.contextmanager
    def disk_full(self) -> Iterator[str]:
        """Fill the disk of the manager or of an agent."""
        host = self.choose.choice(sorted(self.disks))
        ballast = self.disks[host] / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
        yield host
        ballast.unlink()

    @contextlib.contextmanager
    def wrong_machine(self) -> Iterator[str]:
        """Let each read of a sample on one machine fail, as by a disk or a driver."""
        host, kind = self.choose.choice(MACHINES), self.choose.choice(("disk", "driver"))
        with self._told(host, kind):
            yield f"{kind} of {host}"

    @contextlib.contextmanager
    def lying_bucket(self) -> Iterator[str]:
        """The bucket drops objects, changes bytes, or answers 503. Half of the time a restart reads from it."""
        kind, is_read = self.choose.choice(("forgets", "changes", "busy")), self.choose.random() < 0.5
        with self._told("store", kind), self.workers_killed() if is_read else contextlib.nullcontext():
            yield f"{kind}, all workers killed" if is_read else kind

    @contextlib.contextmanager
    def disk_read_only(self) -> Iterator[str]:
        """Restart a manager or an agent on a disk that has become read-only."""
        host = self.choose.choice(sorted(self.disks))
        name = "manager" if host == "manager" else f"agent {host}"
        self._kill(name)
        self._until(lambda: self._remount(host, "ro"))
        (self._begin_manager if host == "manager" else partial(self.start_agent, host))()
        yield host
        self._kill(name)
        self._until(lambda: self._remount(host, "rw"))
        (self.start_manager if host == "manager" else partial(self.start_agent, host))()

    def _remount(self, host: str, how: str) -> bool:
        """Remount a disk ``ro`` or ``rw``; false while a dying process still has files open there."""
        done = subprocess.run(["mount", "-o", f"remount,{how}", self.disks[host]], capture_output=True)
        return done.returncode == 0

    @contextlib.contextmanager
    def flood(self) -> Iterator[str]:
        """A worker writes megabytes a second."""
        host = self.choose.choice(MACHINES)
        with self._told(host, "noise"):
            yield host

    @contextlib.contextmanager
    def wrong_newcomer(self) -> Iterator[str]:
        """A machine joins that lacks what the script needs."""
        (self.folder / f"{NEWCOMER}.token").unlink(missing_ok=True)
        shutil.rmtree(self.folder / NEWCOMER, ignore_errors=True)
        try:
            self.start_agent(NEWCOMER, self.command("join-token").strip())
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            yield "not let in: the manager is busy"
            return
        yield ""
        self._kill(f"agent {NEWCOMER}")

    @contextlib.contextmanager
    def silent_pair(self) -> Iterator[str]:
        """Two machines do not reach each other; all else is well."""
        one, other = self.choose.sample(MACHINES, 2)
        self.network.silence(one, other)
        yield f"{one} and {other}"
        self.network.unsilence(one, other)

    @contextlib.contextmanager
    def slow_line(self) -> Iterator[str]:
        """One machine has 1 Mb/s."""
        host = self.choose.choice(MACHINES)
        self.network.narrow(host, 1e6)
        yield host
        self.network.widen(host)

    @contextlib.contextmanager
    def _told(self, host: str, what: str) -> Iterator[None]:
        mark = self._faults_of(host) / what
        mark.touch()
        yield
        mark.unlink()

    def _faults_of(self, host: str) -> Path:
        folder = self.folder / f"{host}.faults"
        folder.mkdir(exist_ok=True)
        return folder

    @contextlib.contextmanager
    def unread(self) -> Iterator[str]:
        """Nobody reads what the manager prints."""
        self._read.clear()
        yield ""
        self._read.set()

    @contextlib.contextmanager
    def _stopped(self, pid: int) -> Iterator[None]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
        yield
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def _worker(self) -> int:
        """Some process of the job."""
        return self.choose.choice(self._workers())

    def _workers(self) -> list[int]:
        found, mark = list[int](), f"STORM_FAULTS={self.folder}/".encode()  # not those of another storm
        for pid in processes_with(str(JOB)):
            with contextlib.suppress(OSError):
                process = Path(f"/proc/{pid}")
                is_agent = b"\0agent\0" in (process / "cmdline").read_bytes()
                if not is_agent and mark in (process / "environ").read_bytes():
                    found.append(pid)
        return sorted(found)

    def _kill(self, name: str) -> None:
        process = self.processes[name]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)

    # -- the end ---------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """A person looks at the run and ends it."""
        full = self._enter("manager", [*_VARUNA, "doctor", "--run", str(self.run_dir), "--json"])
        said = subprocess.run(full, env=self._env("manager"), capture_output=True, text=True, timeout=60).stdout
        doctor = json.loads(said)
        self.faults += [f"doctor: {f['subject']}: {f['text']}" for f in doctor["findings"] if f["level"] == "fault"]
        for path in sorted(self.folder.glob("*.err")):
            lines = path.read_text(errors="replace").splitlines()
            self.faults += [f"{path.stem} said: {line[:300]}" for line in lines if _FAULT.search(line)]
        with contextlib.suppress(subprocess.CalledProcessError):  # it has ended, which the log says
            self.command("stop")
        try:
            code = self.processes["manager"].wait(BOUND_S)
        except subprocess.TimeoutExpired:
            self.faults.append("the run did not end when it was asked to")
        else:
            if code:
                self.faults.append(f"the manager ended with exit code {code}")

    def close(self) -> None:
        """Nothing stays."""
        for name, process in self.processes.items():
            if name != "manager" and process.poll() is None and not self.faults:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0 if name == "store" else 30)  # agents end with the run
            self._kill(name)
        self.network.close()
        for disk in self.disks.values():
            subprocess.run(["umount", "--lazy", disk], check=False)


def main() -> None:
    """Play, compare, and print the figures."""
    parser = argparse.ArgumentParser(description="A seeded storm over a cluster in network namespaces.")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="new folder for everything that was said")
    args = parser.parse_args()
    if reason := why_not("tc"):
        raise SystemExit(f"cluster_storm: {reason}")
    with contextlib.ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(exist_ok=True, parents=True)
        storm = Storm(folder.absolute(), args.seed)
        stack.callback(storm.close)
        storm.start()
        storm.play(args.seconds)
        storm.finish()
        ledger = audit(read_events(storm.run_dir))
        rows = {row["step"]: row["loss"] for row in json_log(storm.log)}
        remaining = [] if storm.faults else _left_over(f"{storm.folder}/", storm.processes["store"].pid)
    expected = undisturbed(len(rows))
    worst = max(
        (abs(rows[step] - expected[step]) / abs(expected[step]) for step in expected if step in rows), default=1.0
    )
    faults = [*storm.faults, *ledger.faults]
    if sorted(rows) != sorted(expected):
        faults.append(f"{len(rows)} steps were logged, undisturbed {len(expected)}")
    if not worst <= TOLERANCE:
        faults.append(f"losses differ by up to {worst:.1e} relative, more than {TOLERANCE}")
    if remaining:
        faults.append(f"processes are left: {remaining}")
    waits = sorted(storm.waits_s) or [0.0]
    figures = {
        "seconds": args.seconds,
        "seed": args.seed,
        "steps": len(rows),
        "undone": ledger.undone,
        "faults_played": dict(storm.acts),
        "seconds_to_5_steps": {"median": waits[len(waits) // 2], "worst": waits[-1]},
        "worst_relative_difference": worst,
        "faults": faults,
    }
    print(json.dumps(figures, indent=2))
    raise SystemExit(1 if faults else 0)


def _left_over(mark: str, store: int) -> list[int]:
    """After agents had time to end."""
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        found = [pid for pid in processes_with(mark) if pid != store]
        if not found:
            return []
        time.sleep(0.5)
    return found


if __name__ == "__main__":
    main()
