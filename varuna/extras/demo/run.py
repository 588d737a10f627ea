"""The demo from its start to its exit code."""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import pairwise
from pathlib import Path

from rich.table import Table

from varuna.core.devices import WorkerGroups
from varuna.core.errors import UsageError, WorkerError
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.core.units import format_bytes
from varuna.core.value import Value
from varuna.data import sample_index
from varuna.fleet.service.local_workers import LocalLaunch, LocalWorkers
from varuna.fleet.service.service import ManagerService, ServiceConfig
from varuna.fleet.state.config import FleetConfig
from varuna.fleet.state.inputs import SpawnRequested
from varuna.fleet.state.run_events import RunEvent, StepRecorded
from varuna.observe.progress import generation_table
from varuna.observe.report import GenerationRow, largest_relative_difference
from varuna.observe.run_view import RunView
from varuna.observe.terminal import Progress
from varuna.planner.choose import plan_run
from varuna.process.console import say
from varuna.process.plain_console import PlainConsole

TOLERANCE = 1e-5
"""Largest relative difference of a loss that fp32 sums in another order can explain, with room."""


class DemoReport(Value):
    """The content of ``report.json``."""

    generations: tuple[GenerationRow, ...]
    losses: tuple[float, ...]
    reference_losses: tuple[float, ...]
    max_relative_difference: float

    @classmethod
    def of(cls, generations: Sequence[GenerationRow], losses: list[float], reference: list[float]) -> "DemoReport":
        """Compare both curves.

        Raises:
            ValueError: the curves differ in length.
        """
        return cls(
            generations=tuple(generations),
            losses=tuple(losses),
            reference_losses=tuple(reference),
            max_relative_difference=largest_relative_difference(losses, reference),
        )

    def failures(self, morphs: int) -> list[str]:
        """One sentence for each check that failed; ``morphs`` is how many were provoked."""
        plans = [row.plan for row in self.generations]
        found = []
        if len(plans) - 1 != morphs:
            found.append(f"{morphs} morphs were provoked, but {len(plans) - 1} happened")
        if not any(a.stages != b.stages for a, b in pairwise(plans)):
            found.append("no morph changed the number of stages")
        if not any(a.replicas != b.replicas for a, b in pairwise(plans)):
            found.append("no morph changed the number of replicas")
        for row in self.generations[1:]:
            if row.first_step == 0:
                found.append(f"generation {row.generation} started again at step 0")
            if row.recovery_seconds is None:
                found.append(f"generation {row.generation} finished no step")
        if not self.max_relative_difference <= TOLERANCE:
            found.append(f"losses differ by {self.max_relative_difference:.1e}, more than {TOLERANCE:.0e}")
        return found


def loss_table(losses: Sequence[float], reference: Sequence[float]) -> Table:
    """Both curves side by side at about ten steps, the last one included."""
    table = Table(title="Losses", title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in ("step", "Varuna", "plain PyTorch", "relative difference"):
        table.add_column(name, justify="right", no_wrap=True)
    last = len(losses) - 1
    for step in sorted({round(last * row / 9) for row in range(10)}):
        ours, theirs = losses[step], reference[step]
        table.add_row(str(step), f"{ours:.7f}", f"{theirs:.7f}", f"{abs(ours - theirs) / abs(theirs):.1e}")
    return table


class Act(Enum):
    """Something to do to the run."""

    KILL_LAST = "kill the worker of the last rank"
    KILL_FIRST = "kill the worker of rank 0, which reports the steps"
    RETURN = "start a worker"


ACTS = (Act.KILL_LAST, Act.KILL_FIRST, Act.RETURN)


class Disturbance:
    """Plays the acts in order, each once its step is committed and the morph before it is over."""

    def __init__(self, steps: int) -> None:
        # A worker needs some seconds to warm up, so it is called back early enough to join before the end.
        self._due = (steps // 7, 2 * steps // 7, 2 * steps // 7 + 1)
        self._played = 0

    def after(self, step: int, morphs_done: int) -> Act | None:
        """The act that follows the commit of ``step``, if any; ``morphs_done`` morphs are complete by then."""
        if self._played == len(ACTS) or step < self._due[self._played] or morphs_done < self._played:
            return None
        self._played += 1
        return ACTS[self._played - 1]


def sample_order(steps: int, *, global_batch: int, size: int, seed: int) -> list[list[int]]:
    """Samples of each step: what every P x D of the run trained on.

    Args:
        steps: of the run.
        global_batch: M, examples per step.
        size: of the dataset.
        seed: of the run.

    Returns:
        For each step, the dataset indices of its M samples.
    """
    return [
        [sample_index(step * global_batch + place, size=size, seed=seed) for place in range(global_batch)]
        for step in range(steps)
    ]


def train_reference(
    script: Path, order: Sequence[Sequence[int]], flags: Sequence[str], folder: Path, show: Callable[[str], None]
) -> list[float]:
    """Run ``script`` over ``order`` and return its losses.

    Args:
        script: reference.py of the example.
        order: samples of each step.
        flags: the model's flags, as in the run.
        folder: where its input, output and errors go.
        show: takes a progress line.

    Raises:
        WorkerError: the script failed.
    """
    order_file, losses_file, errors_file = (folder / name for name in ("order.json", "losses.json", "errors.txt"))
    order_file.write_text(json.dumps(order))
    command = [sys.executable, str(script), "--order", str(order_file), "--out", str(losses_file), *flags]
    with (
        errors_file.open("wb") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            for done, line in enumerate(process.stdout, start=1):
                show(f"plain PyTorch  step {done}/{len(order)}  loss {line.split()[-1]}")
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise WorkerError(f"the reference loop ended with exit code {process.returncode}; its errors: {errors_file}")
    losses = json.loads(losses_file.read_text())
    assert isinstance(losses, list)
    return [float(loss) for loss in losses]


_PACKAGE = Path(__file__).parents[2]


def example_folder(name: str) -> Path:
    """Folder of the example ``name``.

    Raises:
        UsageError: this installation has no such example.
    """
    for folder in (_PACKAGE / "_examples" / name, _PACKAGE.parent / "examples" / name):
        if (folder / "train.py").is_file():
            return folder
    raise UsageError(
        f"the example {name} is not part of this installation; run `pip install '.[demo]'` in a clone of the repository"
    )


def dataset_size(folder: Path, length: int) -> int:
    """Samples of the example's dataset: windows of ``length`` bytes of its text."""
    spec = importlib.util.spec_from_file_location("varuna_demo_text", folder / "text.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return len(module.read_standard_library()) // length


WORKERS = 4
MEMORY_BYTES = 40 * 2**20
"""Memory of a worker. The example's model needs 51 MiB as one stage and at most 30 MiB a stage as two."""
GLOBAL_BATCH = 16
LENGTH = 128
SEED = 0
CHECKPOINT_EVERY = 5
MODEL_FLAGS = ("--dropout", "0", "--length", str(LENGTH), "--seed", str(SEED))


def run_demo(output: Path, steps: int) -> int:
    """Train, disturb, compare, report; returns the exit code.

    Raises:
        UsageError: ``output`` cannot be written.
        VarunaError: the run could not start, or the reference loop failed.
    """
    console = PlainConsole()
    example = example_folder("gpt2_text")
    work = output / "run"
    try:
        shutil.rmtree(work, ignore_errors=True)
        (output / "report.json").unlink(missing_ok=True)
        work.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"cannot write {error.filename}: {error.strerror}. Give --output another folder.") from error

    console.print(
        f"GPT-2 on {WORKERS} local workers of {format_bytes(MEMORY_BYTES)} each, {steps} steps of {GLOBAL_BATCH} "
        "samples.\nTwo workers will be killed; one will return."
    )
    with Progress(console) as progress:
        view = RunView(progress, total=steps, tokens_per_example=LENGTH)
        exit_code = _train(example, steps, work, view)
    if exit_code:
        return exit_code
    console.print(generation_table(view.history.generations, last_step=steps - 1))

    console.print("\nFor comparison: a plain PyTorch loop on the same samples.")
    order = sample_order(steps, global_batch=GLOBAL_BATCH, size=dataset_size(example, LENGTH), seed=SEED)
    with Progress(console) as progress:
        reference = train_reference(example / "reference.py", order, MODEL_FLAGS, work, progress.show)
    report = DemoReport.of(view.history.generations, view.history.curve(steps), reference)
    (output / "report.json").write_text(report.model_dump_json(indent=2) + "\n")
    console.print(loss_table(report.losses, report.reference_losses))
    return _conclude(console, report, output / "report.json")


class _Director:
    """Shows the run's events, and disturbs the run."""

    def __init__(self, view: RunView, steps: int) -> None:
        self._view = view
        self._disturbance = Disturbance(steps)
        self.run: ManagerService[LocalWorkers] | None = None

    def __call__(self, event: RunEvent) -> None:
        """Take an event, on the thread of the run."""
        self._view(event)
        if self.run is None or not isinstance(event, StepRecorded):
            return
        match self._disturbance.after(event.step, self._view.history.morphs):
            case Act.KILL_LAST:
                self.run.workers.kill(self.run.manager.fleet.members[-1])
            case Act.KILL_FIRST:
                self.run.workers.kill(self.run.manager.fleet.members[0])
            case Act.RETURN:
                self.run.mailbox.post(SpawnRequested(1))


def _train(example: Path, steps: int, work: Path, view: RunView) -> int:
    """Run the example with the disturbances; returns the run's exit code."""

    def plan(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
        return plan_run(job, workers=workers, memory_bytes=MEMORY_BYTES, micro_batch=micro_batch, copies=True)

    director = _Director(view, steps)
    checkpoints = ("--checkpoint-dir", str(work / "checkpoints"), "--checkpoint-every", str(CHECKPOINT_EVERY))
    args = ("--steps", str(steps), "--global-batch", str(GLOBAL_BATCH), *checkpoints, *MODEL_FLAGS)
    director.run = ManagerService(
        ServiceConfig(run_dir=work),
        LocalLaunch(example / "train.py", args, environment={"VARUNA_CALIBRATION": "none"}),
        config=FleetConfig(workers=WORKERS, replace=False),
        planner=plan,
        on_event=director,
        write=lambda line: None,
    )
    run = director.run
    view.watch(lambda: run.manager.fleet, run.glance)
    try:
        ended = run.manage()
    finally:
        view.close(None, None)
    assert ended is not None  # its manager is never told to leave
    if ended.exit_code:
        say(ended.text)
    return ended.exit_code


def _conclude(console: PlainConsole, report: DemoReport, file: Path) -> int:
    """Print how the demo ended."""
    console.print(
        f"\nLargest relative difference over {len(report.losses)} steps: {report.max_relative_difference:.1e}"
    )
    failures = report.failures(morphs=len(ACTS))
    for failure in failures:
        console.print(f"FAILED: {failure}", style="red")
    if not failures:
        console.print("The run lost workers, changed its plan, and remained the same training run.", style="green")
    console.print(f"Report: {file}", soft_wrap=True)
    return 1 if failures else 0
