"""The options that every run has, wherever its workers are; and options of a command as one value."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from varuna.cli.shared import options
from varuna.core.errors import UsageError

if TYPE_CHECKING:
    from varuna.calibration.format import Calibrations
    from varuna.fleet.service.service import ServiceConfig
    from varuna.fleet.state.run_events import Budgeted, Priced


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of planning, of costs and of earlier checkpoints; each field is an option of the command line."""

    stages: Annotated[
        int | None,
        typer.Option(min=1, envvar="VARUNA_STAGES", help="Number of pipeline stages P. Default: the planner's choice."),
    ] = None
    memory_per_worker: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", envvar="VARUNA_MEMORY_PER_WORKER", help="Memory that plans must fit into, such as 2GiB."
        ),
    ] = None
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration",
            metavar="FILE",
            envvar="VARUNA_CALIBRATION",
            help="Plan from this calibration of the job. Default: what this machine remembers of it, else some seconds "
            "of measuring; `none` measures nothing.",
        ),
    ] = None
    price: Annotated[
        float | None,
        typer.Option(
            "--price",
            min=0,
            metavar="DOLLARS",
            help="What a worker costs per hour: the run then says what it has cost. Default: the calibration's, if it "
            "is given and has one.",
        ),
    ] = None
    on_demand_price: Annotated[
        float | None,
        typer.Option(
            "--on-demand-price",
            min=0,
            metavar="DOLLARS",
            help="What an on-demand worker would cost per hour, for comparison.",
        ),
    ] = None
    max_cost: Annotated[
        float | None,
        typer.Option(
            "--max-cost",
            metavar="DOLLARS",
            help="End with a checkpoint and an exported model before the run has cost more, at --price per worker and "
            "hour; all starts in the same --run-dir count.",
        ),
    ] = None
    max_hours: Annotated[
        float | None,
        typer.Option(
            "--max-hours",
            metavar="HOURS",
            help="End with a checkpoint and an exported model before the run has taken longer by the clock; all starts "
            "in the same --run-dir count.",
        ),
    ] = None
    json_log: Annotated[Path | None, typer.Option(metavar="FILE", help="Append one JSON line per committed step.")] = (
        None
    )
    new: Annotated[bool, typer.Option("--new", help="Start afresh instead of resuming from checkpoints.")] = False
    overwrite: Annotated[bool, typer.Option("--overwrite", help="With --new: move existing checkpoints aside.")] = False

    def check(self) -> None:
        """Look at all of them before anything is done.

        Raises:
            UsageError: a value is of no use, or two do not go together.
        """
        if self.overwrite and not self.new:
            raise UsageError("--overwrite requires --new: give both, --new --overwrite, or neither")
        self.memory_bytes, self.given, self.priced, self.budget  # noqa: B018

    @cached_property
    def memory_bytes(self) -> int | None:
        """Bytes of a worker that plans must fit into; None: the calibration's."""
        return options.memory_bytes_of(self.memory_per_worker)

    @cached_property
    def given(self) -> "Calibrations | None":
        """The calibration to plan from; None: a run finds one, or (``none``) does without."""
        from varuna.calibration.file import read_calibration

        return (
            None if self.calibration is None or str(self.calibration) == "none" else read_calibration(self.calibration)
        )

    @cached_property
    def priced(self) -> "Priced | None":
        """The price of a worker, which a calibration may know; None: unknown."""
        from varuna.fleet.state.run_events import Priced

        for flag, value in (("--price", self.price), ("--on-demand-price", self.on_demand_price)):
            if value is not None and not math.isfinite(value):
                raise UsageError(f"{flag} {value} is not a price. Give dollars per worker and hour, such as 0.61")
        price = self.price
        if price is None and self.given is not None:
            price = self.given.first.hardware.price_per_hour
        if price is not None:
            return Priced(per_hour=price, on_demand_per_hour=self.on_demand_price)
        if self.on_demand_price is not None:
            raise UsageError("--on-demand-price is for comparison: give --price, which workers of this run cost, too")
        return None

    @cached_property
    def budget(self) -> "Budgeted | None":
        """The limits on what the run may use up; None: there are none."""
        from varuna.fleet.state.run_events import Budgeted

        for flag, value, unit in (("--max-cost", self.max_cost, "dollars"), ("--max-hours", self.max_hours, "hours")):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UsageError(
                    f"{flag} {value:g} is no budget. Give {unit} above 0, such as {flag} 20, or leave it out"
                )
        if self.max_cost is None and self.max_hours is None:
            return None
        return Budgeted(max_dollars=self.max_cost, max_hours=self.max_hours)

    def settings(self, run_dir: Path, **more: Any) -> "ServiceConfig":
        """Return the settings of a manager with these options.

        Args:
            run_dir: its folder.
            more: other fields of ``ServiceConfig``.
        """
        from varuna.fleet.service.service import ServiceConfig

        return ServiceConfig(
            run_dir=run_dir,
            json_log=self.json_log,
            new=self.new,
            overwrite=self.overwrite,
            price=self.priced,
            budget=self.budget,
            **more,
        )


def takes_options(command: Callable[..., Any]) -> Callable[..., None]:
    """Make a command of a function some of whose parameters are dataclasses: each of their fields is an option."""
    hints: dict[str, Any] = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for each in inspect.signature(command).parameters.values():
        parameters += _of_fields(groups[each.name]) if each.name in groups else [_named(each.name, hints, each.default)]

    def called(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{each.name: given.pop(each.name) for each in fields(group)})
        command(**given)

    called.__name__, called.__doc__ = command.__name__, command.__doc__
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer looks for it
    return called


def _of_fields(group: Any) -> list[inspect.Parameter]:
    hints, own = get_type_hints(group, include_extras=True), inspect.signature(group).parameters
    return [_named(name, hints, each.default) for name, each in own.items()]


def _named(name: str, hints: Mapping[str, Any], default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
