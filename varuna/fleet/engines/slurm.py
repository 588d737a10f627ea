"""Slurm as an engine: each node is a job of its own in an array, which Slurm takes away and starts again as it likes.

Nothing is remembered of what was submitted: jobs of this run are those with its name. So a manager that starts again
has all of them, and one that was killed leaves none that it would not find.
"""

import re
import shlex
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from varuna.core.errors import FleetError
from varuna.fleet.engines import slurm_tools
from varuna.fleet.engines.engine import AgentCommand, EngineKind, EngineOption, EnginePlace
from varuna.fleet.engines.provider import CancelledThere, CapacityError
from varuna.fleet.engines.slurm_queue import SlurmJob, to_cancel, to_hurry, why_waiting
from varuna.fleet.run_folder.join_file import keep_join

_LEAD_S = 60
"""From SIGTERM to a job's time limit; Slurm may send it a minute earlier than that."""
_AT_ONCE = 500  # of an array: below all usual limits
_SOON_S = 60.0  # a job that fails within this time has not worked
_HOPELESS = 3  # so many of them, while none works
_SILENT_S = 90.0  # a running job whose agent has not joined by then is reported
_FAREWELL_S = 6.0  # for agents that were sent away: their jobs end by themselves
_CLOSE_S = 30.0
_TAIL_BYTES = 4096
_STATE = "STATE"  # stands for a variable of the job's script


class SlurmEngine:
    """Agents as jobs of one node each.

    Args:
        run_dir: absolute, and the same on all nodes.
        flags: of sbatch, by the user.
        where: for people, such as ``partition spot``.
        number: of this engine among those of the run; its jobs have a name and a folder of their own.
    """

    def __init__(self, run_dir: Path, flags: Sequence[str], where: str, number: int = 1) -> None:
        self._suffix = "" if number == 1 else f"-{number}"
        self._folder = run_dir / f"slurm{self._suffix}"
        self._run_dir, self._flags, self._where = run_dir, tuple(flags), where
        self.name = ""
        """Of its jobs, once it is started."""
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._jobs: list[SlurmJob] = []
        self._past: set[str] = set()  # ended, and thought about
        self._ours: set[str] = set()  # cancelled by this engine
        self._broken: set[str] = set()  # nodes
        self._failed: list[SlurmJob] = []  # in a row, with none that worked between them
        self._since_s: dict[str, float] = {}  # when a job was first seen running

    # -- as an engine ----------------------------------------------------------------------------------------

    def start(self, command: AgentCommand) -> None:
        """Write down what jobs run, and find those that a manager before this one has left."""
        title = re.sub(r"[^A-Za-z0-9._-]+", "-", self._run_dir.name)[:40]
        self.name = f"{'' if title.startswith('varuna') else 'varuna-'}{title}-{command.run}{self._suffix}"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        join = keep_join(self._run_dir, command.join)
        argv = command.argv(python=sys.executable, join_file=str(join), state_dir=_STATE)
        lines = [
            "#!/bin/sh",
            *(f"export {name}={shlex.quote(value)}" for name, value in sorted(command.environment.items())),
            # by the identity that lies there, a job that is started again is the same machine
            f'state={shlex.quote(str(self._folder))}/"$SLURM_ARRAY_JOB_ID"_"$SLURM_ARRAY_TASK_ID"',
            "exec " + " ".join('"$state"' if word == _STATE else shlex.quote(word) for word in argv),
        ]
        (self._folder / "agent.sh").write_text("\n".join(lines) + "\n")
        # Slurm keeps a copy of this one: jobs that wait must see what a later manager writes into the other.
        (self._folder / "job.sh").write_text(f"#!/bin/sh\nexec /bin/sh {shlex.quote(str(self._folder / 'agent.sh'))}\n")
        self._jobs = slurm_tools.jobs_named(self.name)
        self._past = {job.number for job in self._jobs if job.has_ended}

    def describe(self) -> str:
        """Say where jobs are, and how to look at them."""
        there = sum(job.is_there for job in self._jobs)
        more = f", of which {there} are there already" if there else ""
        return (
            f"agents are jobs of {self._where}{more}: `squeue --name {self.name}` lists them, "
            f"`scancel --name {self.name}` ends the run; their output is in {self._folder}"
        )

    def resize(self, nodes: int) -> None:
        """Submit as many jobs as are missing, or cancel those that are too many.

        Raises:
            CancelledThere: somebody has cancelled all jobs.
            CapacityError: jobs wait, or Slurm does not answer.
            FleetError: Slurm refuses such jobs, or they fail one after the other.
        """
        with self._lock:
            if self._closing.is_set():
                return
            known, self._jobs = {job.number for job in self._jobs}, slurm_tools.jobs_named(self.name)
            news = [job for job in self._jobs if job.has_ended and job.number not in self._past]
            is_quiet = not self._note_cancelled(news)
            trouble = self._note_failed(news)
            self._past |= {job.number for job in news}
            for number in to_hurry(self._jobs):
                slurm_tools.start_now(number)
            missing = nodes - self._there()
            if missing < 0:
                many = to_cancel(self._jobs, nodes)
                self._ours |= set(many)
                slurm_tools.cancel(many)
            elif missing > 0 and is_quiet:  # else others may be cancelled in the same breath
                self._submit(missing)
            if trouble := trouble or self._why_silent() or why_waiting(self._jobs, known):
                raise CapacityError(trouble)

    def rehearse(self, nodes: int) -> list[str]:
        """The command that would submit so many jobs; the run's name is not known yet."""
        flags = [*self._own_flags("varuna-RUN"), f"--array=0-{nodes - 1}"]
        return [shlex.join(["sbatch", *flags, str(self._folder / "job.sh")])]

    def size(self) -> int:
        """Jobs that run or wait, as of the last ``resize``."""
        return self._there()

    def close(self) -> None:
        """Cancel every job of this run; the agents of those that run have been sent away by then.

        Raises:
            FleetError: Slurm does not answer; says what to do by hand.
        """
        self._closing.set()
        with self._lock:
            begin_s, trouble = time.monotonic(), ""
            while True:
                try:
                    there = [job for job in slurm_tools.jobs_named(self.name) if job.is_there]
                    if not there:
                        break
                    is_late = time.monotonic() > begin_s + _FAREWELL_S
                    slurm_tools.cancel([job.number for job in there if is_late or job.is_waiting])
                    trouble = f"{len(there)} jobs are still there"
                except CapacityError as error:
                    trouble = str(error)
                if time.monotonic() > begin_s + _CLOSE_S:
                    raise FleetError(
                        f"jobs {self.name} could not all be cancelled: {trouble}. Run `scancel --name {self.name}` "
                        "later; jobs that find no manager end after ten minutes."
                    )
                time.sleep(0.5)
            (self._run_dir / "join").unlink(missing_ok=True)

    # -- what it thinks about ---------------------------------------------------------------------------------

    def _there(self) -> int:
        return sum(job.is_there for job in self._jobs)

    def _note_cancelled(self, news: Collection[SlurmJob]) -> bool:
        """Return whether somebody else has just cancelled some.

        Raises:
            CancelledThere: and nothing else is there.
        """
        cancelled = [
            job.number for job in news if job.number not in self._ours and job.is_cancelled(self._said(job.number))
        ]
        if cancelled and not self._there():
            raise CancelledThere(f"its Slurm jobs were cancelled ({', '.join(cancelled[:3])})")
        return bool(cancelled)

    def _note_failed(self, news: Collection[SlurmJob]) -> str:
        """Say which of these jobs failed at once, if any did; its node is left out if others work.

        Raises:
            FleetError: several failed so, and none works.
        """
        is_working = any(job.is_running and self._has_joined(job) for job in self._jobs)
        bad = [job for job in news if job.has_failed and (job.ran_s < _SOON_S or not self._has_joined(job))]
        self._failed = [] if is_working else [*self._failed, *bad]
        if is_working:
            bad = [job for job in bad if not self._has_joined(job)]
            self._broken |= {job.node for job in bad if job.node}
        if not bad:
            return ""
        last = bad[-1]
        said = self._last_line(last.number)
        said = said or f"nothing. Is {self._folder} there on the nodes, and Python at {sys.executable}?"
        if len(self._failed) >= _HOPELESS:
            count = len(self._failed)
            raise FleetError(f"{count} jobs failed at once and none works; {last.number} on {last.node} said: {said}")
        left_out = f", and {last.node} is left out from now on" if is_working else ""
        return f"job {last.number} failed at once on {last.node}{left_out}; it said: {said}"

    def _why_silent(self) -> str:
        """A few words on a job that runs, but whose agent has not joined for long."""
        now_s = time.monotonic()
        running = {job.number: job for job in self._jobs if job.is_running and not self._has_joined(job)}
        self._since_s = {number: self._since_s.get(number, now_s) for number in running}
        silent = [number for number, since_s in self._since_s.items() if now_s > since_s + _SILENT_S]
        if not silent:
            return ""
        job = running[silent[0]]
        said = self._last_line(job.number) or "nothing"
        return (
            f"{len(silent)} jobs run, but their agents have not joined; {job.number} on {job.node} says: {said}. "
            "If that node cannot reach this one: --advertise names another address"
        )

    def _submit(self, count: int) -> None:
        """Submit jobs, in smaller arrays if Slurm takes no large one."""
        ask = min(count, _AT_ONCE)
        while count > 0 and not self._closing.is_set():
            ask = min(ask, count)
            try:
                slurm_tools.submit([*self._own_flags(self.name), f"--array=0-{ask - 1}"], self._folder / "job.sh")
            except slurm_tools.TooManyJobsError:
                if ask == 1:
                    raise
                ask //= 2
            else:
                count -= ask

    def _own_flags(self, name: str) -> list[str]:
        broken = [f"--exclude={','.join(sorted(self._broken))}"] if self._broken else []
        return [
            *("--nodes=1", "--ntasks=1", f"--signal=B:TERM@{_LEAD_S}", *broken, *self._flags),
            *("--requeue", f"--job-name={name}", "--open-mode=append", f"--output={self._folder}/%A_%a.out"),
        ]

    def _has_joined(self, job: SlurmJob) -> bool:
        return (self._folder / job.number / "agent.json").exists()

    def _said(self, number: str) -> str:
        """The end of a job's output; empty if it has none."""
        try:
            with (self._folder / f"{number}.out").open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - _TAIL_BYTES))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def _last_line(self, number: str) -> str:
        return next((line.strip() for line in reversed(self._said(number).splitlines()) if line.strip()), "")


def _make(place: EnginePlace, options: Mapping[str, str]) -> SlurmEngine:
    slurm_tools.check_installed()
    named = ("partition", "account", "time", "gpus-per-node")
    flags = [f"--{name}={options[name]}" for name in named if options[name]] + shlex.split(options["sbatch"])
    slurm_tools.check_request(["--nodes=1", "--ntasks=1", *flags], options["time"], options["partition"])
    where = f"Slurm's partition {options['partition']}" if options["partition"] else "Slurm's default partition"
    return SlurmEngine(place.run_dir, flags, where, place.number)


SLURM = EngineKind(
    name="slurm",
    summary="a Slurm cluster: jobs of one node each, which may be requeued",
    options=(
        EngineOption("partition", "NAME", "Partition for the nodes. Default: the cluster's."),
        EngineOption("account", "NAME", "Account to charge."),
        EngineOption("time", "LIMIT", "Time limit of each job; the run goes on in new ones. Default: the partition's."),
        EngineOption("gpus-per-node", "N", "GPUs of each node, each of which gets a worker."),
        EngineOption("sbatch", "FLAGS", "More flags of sbatch, such as '--qos=spot --cpus-per-task=32'."),
    ),
    make=_make,
    every_s=5.0,
    most_backoff_s=5.0,  # Slurm has the wish: this is only to look
)
