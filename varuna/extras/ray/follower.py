"""``varuna run --on ray`` as its user sees it: a manager is started in the cluster, or found there, and followed."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from varuna.core.errors import FleetError, UsageError
from varuna.extras.ray import cluster as ray_cluster
from varuna.extras.ray.manager import (
    KEPT_VARIABLE,
    KeptCommand,
    ManagerActor,
    ManagerOutput,
    actor_name,
    run_name,
)
from varuna.fleet.engines.engine import EnginePlace
from varuna.process.console import say

_LOOK_S, _TURN_S = 0.3, 0.1
_ANSWER_S = 5.0
_SILENT_S = 45.0
"""A cluster whose head is gone ends this process after 60 s, without a word."""
_GONE_S = 15.0
_PASSED_ON = ("VARUNA_", "NCCL_", "OMP_NUM_THREADS", "PYTHONPATH", "XDG_STATE_HOME")


def follow(place: EnginePlace, options: Mapping[str, str], words: Sequence[str]) -> int | None:
    """Have the manager of this command line in the cluster, and show what it says; returns its exit code.

    None: this process is that manager.

    Raises:
        UsageError: Ray is not installed, or another run has this name.
        FleetError: there is no cluster, or it is lost.
    """
    if os.environ.get(KEPT_VARIABLE):
        return None
    name = run_name(place, options)
    ray_cluster.connect()
    command = _command(name, place, words)
    manager, is_new = _manager(command)
    say(f"the manager runs in the Ray cluster as actor {actor_name(name)}" + ("" if is_new else "; following it again"))
    say(
        f"the run goes on if this command ends: the same command follows it again, and varuna status, logs and stop "
        f"--run ray:{name} work on each node of the cluster"
    )
    return _Following(name, manager).run()


def access_of(name: str) -> str:
    """Ask the manager of a run how to reach it (JSON).

    Raises:
        UsageError: Ray is not installed, or there is no such run.
        FleetError: there is no cluster.
    """
    ray_cluster.connect()
    import ray

    try:
        text = ray.get(ray.get_actor(actor_name(name)).access.remote(), timeout=_GONE_S)
    except ValueError as error:
        found = [actor.removesuffix("/manager") for actor in ray.util.list_named_actors() if actor.endswith("/manager")]
        raise UsageError(
            f"no run named {name} is in this Ray cluster, which has {', '.join(found) or 'none'}. "
            "The folder of a run that is over is on the head node."
        ) from error
    except ray.exceptions.RayError as error:
        raise FleetError(f"the manager of {name} does not answer now: it may be starting. Try again.") from error
    if not text:
        raise FleetError(f"the manager of {name} is just starting. Try again in some seconds.")
    return str(text)


def _command(name: str, place: EnginePlace, words: Sequence[str]) -> KeptCommand:
    import ray

    runtime_env = dict(ray.get_runtime_context().runtime_env)
    is_copied = bool(runtime_env.get("working_dir"))
    if is_copied and place.run_dir.is_relative_to(Path.cwd()):
        raise UsageError(
            f"the run's folder {place.run_dir} would be lost with this Ray job, whose working directory is a copy. "
            "Give an absolute --run-dir, best on storage that outlives the cluster."
        )
    return KeptCommand(
        name=name,
        words=tuple(words),
        folder="" if is_copied else os.getcwd(),
        run_dir=str(place.run_dir),
        environment={key: value for key, value in os.environ.items() if key.startswith(_PASSED_ON)},
        runtime_env=json.dumps(runtime_env),
    )


def _manager(command: KeptCommand) -> tuple[Any, bool]:
    """Find or make the actor that runs this command; return it, and whether it is new.

    Raises:
        UsageError: a run of this name runs another command.
        FleetError: the actor does not start.
    """
    import ray

    for _ in range(3):
        try:
            found = ray.get_actor(actor_name(command.name))
        except ValueError:
            try:
                return _created(command), True
            except ValueError:
                continue  # another command was faster
        known, heard = _answers(found)
        if heard.code is not None:  # it is over; a new one begins
            ray_cluster.kill(found)
            _await_gone(command.name)
        elif (known.words, known.run_dir) == (command.words, command.run_dir):
            return found, False
        else:
            raise UsageError(
                f"a run named {command.name} is in this Ray cluster already, with another command: "
                f"varuna {' '.join(known.words)} (in {known.run_dir}). Follow that one with the same command, stop it "
                f"with `varuna stop --run ray:{command.name}`, or give this one another name: --on ray:NAME."
            )
    raise FleetError(f"a run named {command.name} comes and goes in this Ray cluster. Give another one: --on ray:NAME.")


def _answers(manager: Any) -> tuple[KeptCommand, ManagerOutput]:
    import ray

    deadline_s = time.monotonic() + _SILENT_S
    while True:
        try:
            known, heard = ray.get([manager.command.remote(), manager.hear.remote(0, 0, 0)], timeout=_ANSWER_S)
            return known, heard
        except ray.exceptions.RayError as error:
            if time.monotonic() > deadline_s:
                raise FleetError(f"the manager's actor is there, but does not answer: {error}") from error
            time.sleep(_LOOK_S)


def _await_gone(name: str) -> None:
    import ray

    deadline_s = time.monotonic() + _GONE_S
    while actor_name(name) in ray.util.list_named_actors() and time.monotonic() < deadline_s:
        time.sleep(_LOOK_S)


def _created(command: KeptCommand) -> Any:
    """Create a manager, on the head node, which stays for as long as the cluster does, and needs no CPU of it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    heads = [node.id for node in ray_cluster.living_nodes(None) if node.is_head]
    return (
        ray.remote(ManagerActor)
        .options(
            name=actor_name(command.name),
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(heads[0], soft=False) if heads else "DEFAULT",
        )
        .remote(command)
    )


class _Following:
    """Shows what a manager says, until its run is over or the user leaves."""

    def __init__(self, name: str, manager: Any) -> None:
        self._name, self._manager = name, manager
        self._signal = 0
        self._trouble: Exception | None = None
        self._heard_s, self._is_told = time.monotonic(), False
        self._heard = ManagerOutput(life=0, out=b"", out_end=0, err=b"", err_end=0, code=None)

    def run(self) -> int:
        """Follow to the end; returns the exit code.

        Signals are heeded at once, on this thread: Ray kills a job 3 s after it is to stop.

        Raises:
            FleetError: the cluster is lost, or the manager.
        """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._note)
        thread = threading.Thread(target=self._follow, name="varuna-follower", daemon=True)
        thread.start()
        while thread.is_alive():
            if self._signal and self._act():
                return 0
            self._check_silence()
            thread.join(_TURN_S)
        if self._trouble is not None:
            raise self._trouble
        ray_cluster.kill(self._manager)
        assert self._heard.code is not None
        return self._heard.code

    def _check_silence(self) -> None:
        """See how long the manager has not answered, on this thread: without a head, a call of Ray's may not return.

        Raises:
            FleetError: for too long.
        """
        silent_s = time.monotonic() - self._heard_s
        if silent_s > _SILENT_S:
            raise FleetError(
                f"the Ray cluster did not answer for {_SILENT_S:.0f} s. If its head node is lost, so is the "
                "cluster: its nodes end within a minute, and the same command in another one continues from "
                "the newest checkpoint, if that and --run-dir are on storage that both have. If it is only "
                "cut off from here, training goes on, and the same command follows it again."
            )
        if silent_s < _GONE_S:
            self._is_told = False
        elif not self._is_told:
            say("the manager does not answer; Ray starts it again where it was lost")
            self._is_told = True

    def _follow(self) -> None:
        """Show what is said, until the run is over or something is wrong."""
        while self._heard.code is None:
            try:
                self._hear()
                self._heard_s = time.monotonic()
            except _gone() as error:
                self._trouble = FleetError(
                    f"the manager of {self._name} is gone from the Ray cluster ({ray_cluster.last_line(error)}). "
                    "With its folder, the same command continues the run."
                )
                return
            except _silent():
                pass  # who waits for this thread knows since when
            except Exception as error:  # noqa: BLE001 a thread that ends in silence would look like the run's end
                self._trouble = error
                return
            time.sleep(_LOOK_S)

    def _hear(self) -> None:
        import ray

        before = self._heard
        self._heard = ray.get(self._manager.hear.remote(before.life, before.out_end, before.err_end), timeout=_ANSWER_S)
        for data, stream in ((self._heard.out, sys.stdout), (self._heard.err, sys.stderr)):
            if data:
                stream.buffer.write(data)
                stream.buffer.flush()

    def _note(self, number: int, frame: object) -> None:
        self._signal = number

    def _act(self) -> bool:
        """Do what a signal asks for; True: this command leaves the run.

        Ray stops a job by SIGTERM, and means what it has started too.
        """
        number, self._signal = self._signal, 0
        if number == signal.SIGINT or (number == signal.SIGTERM and _is_job()):
            self._manager.interrupt.remote()
            return False
        say(f"the run goes on without this command; varuna status --run ray:{self._name} shows it")
        return True


def _is_job() -> bool:
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def _gone() -> tuple[type[BaseException], ...]:
    import ray

    return (ray.exceptions.ActorDiedError,)


def _silent() -> tuple[type[BaseException], ...]:
    import ray

    return (ray.exceptions.RayError, ConnectionError, TimeoutError)
