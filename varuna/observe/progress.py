"""Lines that a run writes to a terminal or a log: its plan, progress, morphs, and how it ended."""

from collections.abc import Sequence

from rich.table import Table

from varuna.core.plan import Copies
from varuna.core.units import counted, format_duration, format_rate, step_number, time_left
from varuna.observe.report import GenerationRow, Morph, RunHistory

_NO_COPIES = {
    Copies.NONE: "",
    Copies.MEMORY: " (no room for another in the memory of workers)",
    Copies.TIME: " (copies in other workers' memory would slow steps down)",
}


def progress_line(
    step: int,
    total: int,
    loss: float,
    examples_per_s: float,
    tokens_per_example: int | None,
    row: GenerationRow,
    left_s: float | None = None,
) -> str:
    """Return one line that says where the run is; steps count from 0, so step 11 of 48 reads ``12/48``."""
    rate = (
        f"{format_rate(examples_per_s * tokens_per_example)} tokens/s"
        if tokens_per_example
        else f"{format_rate(examples_per_s)} examples/s"
    )
    left = "" if left_s is None else time_left(left_s)
    return (
        f"step {step_number(step, total)}  loss {loss:.4f}  {rate}{left}  plan {row.plan}"
        f"  {counted(row.workers, 'worker')}"
    )


def plan_line(row: GenerationRow) -> str:
    """Return one line for the plan that a run starts with."""
    plan = row.plan
    spares = row.workers - plan.ranks
    idle = f", {spares} of them idle" if spares else ""
    parts = f"{counted(plan.micro_batches, 'micro-batch')} of {plan.micro_batch} (m={plan.micro_batch})"
    if row.streams_frozen:
        parts += ", frozen parameters in host memory"
    return f"plan   {plan} (stages x replicas) on {counted(row.workers, 'worker')}{idle}   {parts}"


def risk_line(replicas: int, copies: Copies, *, checkpoint_dir: str | None, rescues: bool) -> str:
    """Say what losing a worker would cost, if it is more than the step in flight; else empty.

    Args:
        replicas: D of the plan.
        copies: of each stage in other workers' memory.
        checkpoint_dir: of the job.
        rescues: it is where ``varuna run`` keeps a copy of its own.
    """
    if replicas > 1:
        return ""
    if rescues and copies is not Copies.STATE:
        back = "a copy of its state that is some seconds old (give the script checkpoints= to keep one)"
    elif checkpoint_dir is not None and not rescues:
        back = f"the newest checkpoint in {checkpoint_dir}"
    else:
        back = "step 0, because the script gives no checkpoints="
    if copies is Copies.STATE:
        return (
            "each worker's state is copied to another one's memory every few seconds: if a worker is lost, the steps "
            f"since then run again; if the one with its copy is lost too, the run goes back to {back}"
        )
    return f"one copy of each section{_NO_COPIES[copies]}: if a worker is lost, the run goes back to {back}"


def closing_line(
    history: RunHistory, exit_code: int, elapsed_s: float, checkpoint: str | None, spent: str = "", *, before: int = 0
) -> str:
    """Return one line for a run that is over: steps, loss, step time, workers lost, checkpoint, cost.

    Args:
        history: all of it.
        exit_code: of the run.
        elapsed_s: since this manager began.
        checkpoint: the newest.
        spent: what it has cost.
        before: steps that were done then.
    """
    steps = sorted(history.losses)
    of = f" of {history.trainings + 1} trainings" if history.trainings else ""
    own = f", {max(0, history.steps - before):,} of them" if before else ""
    words = [f"{counted(history.steps, 'step')}{of}{own} in {format_duration(elapsed_s)}"]
    if steps:
        first, last = history.losses[steps[0]], history.losses[steps[-1]]
        words.append(f"loss {first:.4f} to {last:.4f}" if len(steps) > 1 else f"loss {first:.4f}")
    if (checked := history.prediction) is not None:
        words.append(f"a step took {format_duration(checked.measured_s)}, {checked.deviation}")
    if history.lost:
        redone = sum(row.steps_redone for row in history.generations)
        words.append(f"{counted(history.lost, 'worker')} lost, {counted(redone, 'step')} redone")
    words.append(f"checkpoint {checkpoint}" if checkpoint else "no checkpoint")
    if spent:
        words.append(spent)
    return f"{'ended  ' if exit_code else 'done   '}{'   '.join(words)}"


def morph_line(morph: Morph, arrow: str = "→") -> str:
    """Return one line for a morph: its cause, both plans, the price."""
    before, after = morph
    if after.recovery_seconds is None:
        price = "superseded before a step finished"
    else:
        plural = "" if after.steps_redone == 1 else "s"
        recovery = format_duration(after.recovery_seconds)
        price = f"next step after {recovery}   {after.steps_redone} step{plural} redone"
        if after.kept_micro_batches:
            price += f", but for {after.kept_micro_batches} of {after.plan.micro_batches} micro-batches"
    return f"morph  {after.cause}   {before.plan} {arrow} {after.plan}   {price}"


def generation_table(rows: Sequence[GenerationRow], last_step: int) -> Table:
    """Return a table of all generations of a run; ``last_step`` is the newest committed step."""
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
