"""The progress line, the morph lines and the table of generations: a live line on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from varuna.core.units import format_duration
from varuna.fleet.state.run_events import GenerationStarted, Notice, RunEvent, StepRecorded, WorkerLost
from varuna.observe.report import GenerationRow, Morph, RunHistory


def format_rate(per_s: float) -> str:
    """Three digits with k or M: ``"41.2k"``."""
    for factor, unit in ((1e6, "M"), (1e3, "k")):
        if per_s >= factor:
            return f"{per_s / factor:.3g}{unit}"
    return f"{per_s:.3g}"


def progress_line(
    step: int, total: int, loss: float, examples_per_s: float, tokens_per_example: int | None, row: GenerationRow
) -> str:
    """One line that says where the run is; steps count from 0, so step 11 of 48 reads ``12/48``."""
    rate = (
        f"{format_rate(examples_per_s * tokens_per_example)} tokens/s"
        if tokens_per_example
        else f"{format_rate(examples_per_s)} examples/s"
    )
    return (
        f"step {step + 1}/{total}  loss {loss:.4f}  {rate}  plan {row.plan}"
        f"  generation {row.generation}  {row.workers} workers"
    )


def plan_line(row: GenerationRow) -> str:
    """One line for the plan that a run starts with."""
    plan = row.plan
    return (
        f"plan   {plan} (stages x replicas) on {row.workers} worker{'' if row.workers == 1 else 's'}"
        f"   {plan.micro_batches} micro-batches of {plan.micro_batch}"
    )


def morph_line(morph: Morph, arrow: str = "→") -> str:
    """One line for a morph: its cause, both plans, the price."""
    before, after = morph
    if after.recovery_seconds is None:
        price = "superseded before a step finished"
    else:
        plural = "" if after.steps_redone == 1 else "s"
        recovery = format_duration(after.recovery_seconds)
        price = f"next step after {recovery}   {after.steps_redone} step{plural} redone"
    return f"morph  {after.cause}   {before.plan} {arrow} {after.plan}   {price}"


def generation_table(rows: Sequence[GenerationRow], last_step: int) -> Table:
    """All generations of a run; ``last_step`` is the newest committed step."""
    table = Table(title="Generations", title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in ("generation", "plan", "micro-batches", "workers", "steps", "recovery", "redone"):
        table.add_column(name, justify="left" if name == "plan" else "right", no_wrap=True)
    table.add_column("cause")
    ends = [row.first_step - 1 for row in rows[1:]] + [last_step]
    for row, end in zip(rows, ends, strict=True):
        table.add_row(
            str(row.generation),
            str(row.plan),
            f"{row.plan.micro_batches} of {row.plan.micro_batch}",
            str(row.workers),
            f"{row.first_step}-{end}" if end >= row.first_step else "none",
            "" if row.recovery_seconds is None else format_duration(row.recovery_seconds),
            str(row.steps_redone),
            row.cause,
        )
    return table


class Progress:
    """Writes to ``console``: one live line if it is a terminal, else a plain line every ``every_s`` seconds.

    With ``live_line=False`` only permanent lines are written, so that a script's own output stays clean.
    """

    def __init__(
        self,
        console: Console,
        *,
        live_line: bool = True,
        every_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console
        self.arrow = "→" if console.encoding.lower().startswith("utf") else "->"
        self._live_line = live_line
        self._every_s = every_s
        self._clock = clock
        self._written_s = float("-inf")
        self._live: Live | None = None

    def __enter__(self) -> "Progress":
        if self._live_line and self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=8, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show(self, line: str, *, final: bool = False) -> None:
        """Replace the progress line; without a terminal, print it if the last one is old, or it is the final one."""
        if self._live is not None:
            self._live.update(Text(line, style="cyan", overflow="ellipsis", no_wrap=True))
        elif self._live_line and (final or self._clock() - self._written_s >= self._every_s):
            self._written_s = self._clock()
            self.tell(line)

    def tell(self, line: str, style: str = "") -> None:
        """Print a permanent line above the progress line, never wrapped by us."""
        self.console.print(Text(line, style=style), soft_wrap=True, highlight=False)


class RunView:
    """Shows a run's events as they come, and collects its history.

    Args:
        progress: where lines go.
        total: steps of the whole run.
        tokens_per_example: given, the rate is in tokens.
    """

    def __init__(self, progress: Progress, total: int = 0, tokens_per_example: int | None = None) -> None:
        self.history = RunHistory()
        self._progress = progress
        self._total = total
        self._tokens_per_example = tokens_per_example

    def recall(self, event: RunEvent) -> None:
        """Take an event that an earlier manager has already shown."""
        self.history.take(event)

    def __call__(self, event: RunEvent) -> None:
        """Take the next event; called on the run's own thread."""
        morph = self.history.take(event)
        if morph is not None:
            self._progress.tell(morph_line(morph, self._progress.arrow), style="yellow")
        match event:
            case GenerationStarted() if len(self.history.generations) == 1:
                self._progress.tell(plan_line(self.history.generations[0]))
            case StepRecorded(step=step, loss=loss, examples_per_s=rate):
                row = self.history.generations[-1]
                line = progress_line(step, self._total, loss, rate, self._tokens_per_example, row)
                self._progress.show(line, final=step + 1 == self._total)
            case WorkerLost(cause=cause) if not self.history.generations:
                self._progress.tell(f"lost   {cause}", style="yellow")
            case Notice(text=text, warning=warning):
                self._progress.tell(f"warning  {text}" if warning else text, style="red" if warning else "dim")
