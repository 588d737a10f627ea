"""``varuna calibrate``: measure a job on this machine's workers, once."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from varuna.calibration.cache import remember
from varuna.calibration.file import write_calibration
from varuna.calibration.fit import assemble
from varuna.calibration.format import Calibration, Calibrations, NetworkCosts
from varuna.cli.shared import options
from varuna.core.errors import UsageError
from varuna.core.units import format_bytes
from varuna.process.console import say
from varuna.process.gpus import default_workers
from varuna.process.plain_console import PlainConsole
from varuna.process.scripts import check_script


def calibrate(
    context: typer.Context,
    script: options.JobScript,
    args: options.ScriptArguments = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "-n",
            min=1,
            help="Processes that measure at once; with 1, no network is measured. Default: one per GPU, else 2.",
        ),
    ] = None,
    output: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the calibration.")] = Path(
        "calibration.json"
    ),
) -> None:
    """Measure the job of SCRIPT on this hardware, once, for plans of any size.

    Times the model's sections, links, all-reduces and a few real steps. Take as
    many workers as will share this machine. Later runs of the job on this machine
    plan from it; give the file to others with --calibration.
    """
    check_script(script)
    options.check_misplaced(context, script, args or [])
    _check_writable(output)

    from varuna.measure.collect import collect
    from varuna.measure.rendezvous import StoreHost

    store = StoreHost()
    begin_s = time.monotonic()
    count = workers or default_workers(2)
    say(f"starting {count} worker{'s' * (count > 1)}; a large model takes longer to capture")
    measured = collect(
        script,
        args or [],
        workers=count,
        store=store.address(),
        on_phase=lambda phase: say(f"{time.monotonic() - begin_s:.0f} s: {phase}"),
    )
    calibration = assemble(measured, name=script.stem, created=time.strftime("%Y-%m-%d %H:%M:%S%z"))
    known = Calibrations.of_one(calibration, measured[0].device_class)
    write_calibration(known, output)
    remember(known, Path(measured[0].cache))
    show(PlainConsole(), calibration)
    print(f"{output}: written after {time.monotonic() - begin_s:.0f} s; runs of this job on this machine use it")


def _check_writable(output: Path) -> None:
    """Refuse an unwritable output now, not after a minute of measuring."""
    try:
        with output.open("a"):
            pass
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}. Give another file with --output.") from error


def show(console: PlainConsole, calibration: Calibration) -> None:
    """Print a calibration as tables: times at the size where they are best per example."""
    kinds = Table(title=f"Sections on {calibration.hardware.name} (ms per example, at the best m)")
    for title in ("kind", "count", "m", "F", "R", "B", "I", "W", "sent"):
        kinds.add_column(title, overflow="fold")
    for name, kind in calibration.kinds.items():
        sizes, count = kind.micro_batches, calibration.kind_names.count(name)
        best = sizes.index(min(zip(kind.forward_s, sizes, strict=True), key=lambda pair: pair[0] / pair[1])[1])
        columns = (kind.forward_s, kind.recompute_s, kind.backward_s, kind.input_s, kind.weight_s)
        shown = [f"{1000 * column[best] / sizes[best]:.3g}" if column else "" for column in columns]
        kinds.add_row(name, str(count), str(sizes[best]), *shown, format_bytes(kind.boundary_bytes))
    console.print(kinds)
    _show_network(console, calibration.across_vms)
    optimizer = calibration.optimizer
    rate = f" and {format_bytes(optimizer.bytes_per_s)}/s" if optimizer.bytes_per_s else ""
    console.print(f"an action: {1000 * calibration.action_s:.2f} ms; a step: {1000 * optimizer.fixed_s:.2f} ms{rate}")
    for note in calibration.notes:
        console.print(f"note: {note}")


def _show_network(console: PlainConsole, network: NetworkCosts) -> None:
    link = network.link
    together = "" if link.line_bytes_per_s is None else f", {format_bytes(link.line_bytes_per_s)}/s of two neighbours"
    console.print(
        f"a message: {1000 * link.latency_s:.3f} ms, jitter {1000 * link.jitter.mean_s:.3f} ms, "
        f"{format_bytes(link.bytes_per_s)}/s{together}"
    )
    if link.staged_bytes_per_s is not None:
        console.print(
            f"copies of a message from and to GPUs: {1000 * link.staged_s:.3f} ms, "
            f"{format_bytes(link.staged_bytes_per_s)}/s"
        )
    for ring in network.rings:
        console.print(
            f"an all-reduce over {ring.ranks or 'D'} with {ring.in_flight} in flight: {1000 * ring.latency_s:.3f} ms a "
            f"round, {format_bytes(ring.bytes_per_s)}/s"
        )
