"""``varuna manager`` and ``varuna agent``: an elastic run on machines that come and go."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from varuna.cli import options
from varuna.core.errors import UsageError

if TYPE_CHECKING:
    from varuna.fleet.clouds.grower import Grower
    from varuna.fleet.net.join_string import JoinString

MANAGER_EXAMPLES = """Examples:

\b
varuna manager --host 0.0.0.0 --port 7070 --run-dir runs/gpt2
varuna agent 'varuna://...' -- train.py --lr 1e-3     on each machine
varuna join-token --uses 100 --hours 72               for machines to come
"""

AGENT_EXAMPLES = """Examples:

\b
varuna agent 'varuna://...' -- train.py
varuna agent --join-file /run/secrets/varuna-join --state-dir /var/lib/varuna -- train.py --lr 1e-3
"""


def manager(
    run_dir: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Folder of journal, keys and logs; the same folder again continues the run."),
    ] = Path("varuna-run"),
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all addresses of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 0,
    advertise: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Address at which agents reach this machine, if it is not --host.")
    ] = "",
    workers: Annotated[
        int,
        typer.Option(
            "--workers", "-n", min=1, help="Number of workers to wait for (at most a minute) before the first step."
        ),
    ] = 1,
    stages: options.Stages = None,
    memory_per_worker: options.MemoryPerWorker = None,
    asg: Annotated[
        str,
        typer.Option(metavar="GROUP", help="AWS Auto Scaling group to ask for machines; its VMs must start agents."),
    ] = "",
    nodes: Annotated[str, typer.Option(metavar="LEAST:MOST", help="With --asg: least and most machines.")] = "",
    checkpoints: Annotated[
        str, typer.Option(metavar="PLACE", help="Only allow checkpoints in this place or below.")
    ] = "",
    json_log: options.JsonLog = None,
    new: options.New = False,
    overwrite: options.Overwrite = False,
) -> None:
    """Manage a run on other machines, each of which runs `varuna agent`.

    Prints a JOIN string that admits one machine; `varuna join-token` prints more.
    SIGTERM stops the manager but not the training, and the same command resumes
    the run. Ctrl-C stops the run after the current step.
    """
    options.check_replacing(new, overwrite)
    memory_bytes = options.memory_bytes_of(memory_per_worker)

    grow = _grower(asg, nodes, run_dir)

    from rich.console import Console

    from varuna.fleet.manager.start import manage_cluster
    from varuna.observe.progress import Progress, RunView
    from varuna.process.output_pump import unread_allowed

    with unread_allowed(), Progress(Console(stderr=True), live_line=False) as progress:
        view = RunView(progress)
        exit_code = manage_cluster(
            run_dir=run_dir,
            host=host,
            port=port,
            advertised=advertise,
            workers=workers,
            stages=stages,
            memory_bytes=memory_bytes,
            json_log=json_log,
            new=new,
            overwrite=overwrite,
            checkpoints=checkpoints,
            on_event=view,
            on_past=view.recall,
            on_join=lambda text: print(f"JOIN {text}", flush=True),
            grow=grow,
        )
    raise typer.Exit(exit_code)


def _grower(asg: str, nodes: str, run_dir: Path) -> "Callable[[Callable[[str], None]], Grower] | None":
    """A function that makes the machines' grower from a listener to refusals; None if no group is given."""
    if not asg and not nodes:
        return None
    found = re.fullmatch(r"(\d{1,6}):(\d{1,6})", nodes)
    if not asg or found is None:
        raise UsageError("--asg GROUP and --nodes LEAST:MOST go together, such as --asg trainers --nodes 4:32")
    from varuna.fleet.clouds.aws import AutoScalingProvider
    from varuna.fleet.clouds.grower import Grower
    from varuna.fleet.clouds.growth import GrowthConfig
    from varuna.fleet.clouds.original_size import OriginalSize

    config = GrowthConfig(least=int(found[1]), most=int(found[2]))
    provider = AutoScalingProvider(asg, before=OriginalSize(run_dir, asg))

    def grow(warn: Callable[[str], None]) -> Grower:
        grower = Grower(provider, config, warn=warn)
        grower.want(config.most)
        return grower

    return grow


def agent(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[JOIN] -- SCRIPT [ARGS]...", help="What `varuna manager` printed, then the script to run."
        ),
    ] = None,
    join_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File with the JOIN string. Arguments are visible to all users of the machine."
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", "-n", min=1, help="Number of workers. Default: one per GPU, or one.")
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep the agent's identity here: a restarted agent is the same machine."),
    ] = None,
    interface: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS",
            help="Private address of this machine for tensors. Default: the one that leads to the manager.",
        ),
    ] = "",
) -> None:
    """Join a run with this machine; start one agent per VM.

    Starts one worker per GPU, restarts workers that are killed, and sends their
    output to the manager. SIGTERM counts as a preemption notice. Tensors travel
    unencrypted, so the interface must be private. Other users of the machine
    can see arguments: give the JOIN string in --join-file or VARUNA_JOIN.
    """
    from varuna.fleet.agent.agent import Agent, AgentConfig, SpotWarning, to_stderr
    from varuna.fleet.agent.agent_folder import AgentFolder, AgentIdentity
    from varuna.fleet.agent.join import serve
    from varuna.fleet.agent.manager_client import ManagerAddress
    from varuna.fleet.clouds.spot_notices import SpotNotices
    from varuna.process.output_pump import unread_allowed

    invitation, (script, *args) = invited(words or [], join_file)
    if not Path(script).is_file():
        raise UsageError(f"no script at {script}. Name a Python file after --: varuna agent JOIN -- train.py")
    folder = state_dir or Path(tempfile.mkdtemp(prefix="varuna-agent-"))
    home = AgentFolder(folder)
    ownership = home.own()
    config = AgentConfig(Path(script), tuple(args), workers or count_gpus() or 1, interface)

    def run(card: AgentIdentity) -> int:
        place = ManagerAddress(invitation.host, invitation.port, card.certificate_pem)
        member = Agent(place, home, card, config, to_stderr)
        SpotNotices(lambda notice: member.notify(SpotWarning(notice.in_s, f"spot notice: {notice.action}"))).start()
        return member.run()

    with unread_allowed():
        exit_code = serve(invitation, home, run, to_stderr)
    ownership.release()
    if exit_code == 0 and state_dir is None:
        shutil.rmtree(folder, ignore_errors=True)
    raise typer.Exit(exit_code)


def invited(words: list[str], join_file: Path | None) -> "tuple[JoinString, list[str]]":
    """Return the JOIN string, from wherever it is, and the words after it.

    Raises:
        UsageError: there is none, or no script.
    """
    from varuna.fleet.net.join_string import JOIN_VARIABLE, SCHEME, parse_invitation

    join = os.environ.get(JOIN_VARIABLE, "")
    if join_file is not None:
        try:
            join = join_file.read_text()
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read --join-file {join_file}: {error}") from error
    if words and (not join or words[0].startswith(SCHEME)):
        join, words = words[0], words[1:]
    if not words:
        raise UsageError("say what to join and what to run: varuna agent JOIN -- train.py")
    return parse_invitation(join), words


def count_gpus() -> int:
    """GPUs that workers may use, without loading torch: CUDA_VISIBLE_DEVICES, else what the driver lists."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([one for one in visible.split(",") if one.strip() not in ("", "-1")])
    if shutil.which("nvidia-smi") is None:
        return 0
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"varuna agent: cannot count GPUs ({error}); give --workers", file=sys.stderr)
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
