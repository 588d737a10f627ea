"""``varuna offers``: which machines to rent, from a file of what can be had at which price."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field, ValidationError
from rich.table import Table

from varuna.calibration.file import read_calibration
from varuna.calibration.format import Calibrations
from varuna.cli.plan import asked
from varuna.cli.shared import options
from varuna.core.devices import MAX_ZONE, REGION, class_in
from varuna.core.errors import NoPlanError, UsageError
from varuna.core.units import format_duration
from varuna.core.value import Value
from varuna.extras.pictures.frontier import DrawnFleet, DrawnJob, draw
from varuna.planner.asking.request import PlanRequest
from varuna.planner.offers import Offer, Rented, frontier
from varuna.process.plain_console import PlainConsole

EXAMPLES = """Examples:

\b
varuna offers offers.toml
varuna offers offers.toml --examples 1e9 --deadline 48
varuna offers offers.toml train.py --examples 1e9 --budget 500 -- --layers 24
"""
_MOST_OFFERS = 6  # fleets are combinations of them
_HOUR_S = 3600


class _Entry(Value):
    """An offer as its file says it."""

    name: str = Field(min_length=1)
    calibration: str = Field(min_length=1, description="file, beside the offers")
    most: int = Field(ge=1)
    price_per_hour: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    losses_per_hour: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    gpus_per_vm: int | None = Field(default=None, ge=1)
    region: str | None = Field(default=None, max_length=MAX_ZONE, pattern=REGION)
    egress_per_gb: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    zone: str | None = Field(default=None, max_length=MAX_ZONE, pattern=REGION)
    zone_egress_per_gb: float | None = Field(default=None, ge=0, allow_inf_nan=False)

    @property
    def zone_of_region(self) -> str:
        """The zone with its region, if it has one; empty without a zone."""
        return "/".join(filter(None, (self.region, self.zone))) if self.zone else ""


def offers(
    file: Annotated[Path, typer.Argument(metavar="OFFERS", help="TOML file of what can be rented at which price.")],
    script: Annotated[
        Path | None, typer.Argument(help="Training script; it runs until it asks its Trainer for steps.")
    ] = None,
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of the script, after --.")] = None,
    examples: Annotated[float | None, typer.Option(min=1, metavar="N", help="Examples of the whole job.")] = None,
    deadline: Annotated[
        float | None, typer.Option(min=0, metavar="HOURS", help="Mark the cheapest fleet that makes it.")
    ] = None,
    budget: Annotated[
        float | None, typer.Option(min=0, metavar="DOLLARS", help="Mark the fastest fleet that it pays for.")
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Examples per step. Default: the script's, or 8192.")
    ] = None,
    micro_batch: options.MicroBatch = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw speed and price to this file.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare the fleets that can be rented: how fast each trains, and what an example costs.

    Losses at the rates of the offers count. Shown are those that no other fleet beats in both. Nothing is started.
    """
    if examples is None and (deadline is not None or budget is not None):
        raise UsageError("--deadline and --budget need the length of the job. Give --examples.")
    known, listed = read_offers(file)
    first = asked(script, args or [], known)
    update = {
        "global_batch": global_batch or first.global_batch,
        "micro_batch": micro_batch or first.micro_batch,
    }
    found = offers_report(
        first.model_copy(update=update), listed, examples=examples, deadline_hours=deadline, budget_dollars=budget
    )
    if svg is not None:
        options.write_picture(svg, _drawn(found, deadline_hours=deadline, budget_dollars=budget))
    if as_json:
        print(found.model_dump_json(indent=2))
    else:
        show_offers(PlainConsole(), found, deadline_hours=deadline, budget_dollars=budget)


def read_offers(path: Path) -> tuple[Calibrations, tuple[Offer, ...]]:
    """Read the offers of machines, and the calibrations of their GPUs in one.

    Raises:
        UsageError: says which offer is wrong, and how.
    """
    entries = _entries(path)
    known: Calibrations | None = None
    offers, egress, zone_egress = [], _egress(path, entries), _zone_egress(path, entries)
    for entry in entries:
        each = read_calibration(path.parent / entry.calibration).named()
        name, hardware = each.names[0], each.first.hardware
        if known is not None and known.classes.get(name, each.first) != each.first:
            raise UsageError(f"{path}: two calibrations are of {name!r}. Give the class in one another name.")
        try:
            known = each if known is None else known.joined(each)
        except ValidationError as error:
            raise UsageError(f"{path}: offer {entry.name!r}: {error.errors()[0]['msg']}") from error
        price = hardware.price_per_hour if entry.price_per_hour is None else entry.price_per_hour
        if price is None:
            raise UsageError(f"{path}: offer {entry.name!r} has no price. Add price_per_hour, in dollars for a GPU.")
        vm_size = entry.gpus_per_vm or hardware.gpus_per_vm
        if vm_size > entry.most:
            raise UsageError(
                f"{path}: offer {entry.name!r}: at most {entry.most} GPUs can be had, but a VM has {vm_size}. "
                "Raise most, or lower gpus_per_vm."
            )
        offers.append(
            Offer(
                name=entry.name,
                device_class=class_in(name, entry.region or ""),
                most=entry.most,
                price_per_hour=price,
                losses_per_hour=entry.losses_per_hour,
                gpus_per_vm=vm_size,
                egress_per_gb=egress.get(entry.region or "", 0.0),
                zone=entry.zone or "",
                zone_egress_per_gb=zone_egress.get(entry.zone_of_region, 0.0),
            )
        )
    assert known is not None
    return known, tuple(offers)


def _egress(path: Path, entries: Sequence[_Entry]) -> dict[str, float]:
    """Return dollars for a GB that leaves a region, where an offer says it.

    Raises:
        UsageError: two offers contradict each other, or only some have a region.
    """
    _all_or_none(path, entries, "region")
    return _prices(path, "egress_per_gb", "region", [(each, each.egress_per_gb, each.region or "") for each in entries])


def _zone_egress(path: Path, entries: Sequence[_Entry]) -> dict[str, float]:
    """Return dollars for a GB that leaves a zone for another one of its region.

    Raises:
        UsageError: as above.
    """
    _all_or_none(path, entries, "zone")
    said = [(each, each.zone_egress_per_gb, each.zone_of_region) for each in entries]
    return _prices(path, "zone_egress_per_gb", "zone", said)


def _all_or_none(path: Path, entries: Sequence[_Entry], what: str) -> None:
    has = {getattr(entry, what) is not None: entry.name for entry in reversed(entries)}
    if len(has) > 1:
        raise UsageError(f"{path}: offer {has[True]!r} has a {what}, and {has[False]!r} has none. Give all or none.")


def _prices(path: Path, name: str, what: str, said: Sequence[tuple[_Entry, float | None, str]]) -> dict[str, float]:
    """Return the one price that offers name, by place.

    Raises:
        UsageError: they name two, or no place.
    """
    found: dict[str, float] = {}
    for entry, price, place in said:
        if price is None:
            continue
        if not place:
            raise UsageError(f"{path}: offer {entry.name!r} has {name}, but no {what}. Add {what}.")
        if found.setdefault(place, price) != price:
            raise UsageError(
                f"{path}: offer {entry.name!r}: a GB that leaves {place} costs {price:g} here and {found[place]:g} in "
                "another offer. Give one price."
            )
    return found


def _entries(path: Path) -> list[_Entry]:
    try:
        content: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read offers from {path}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not TOML: {error}. See docs/mixed-gpus.md for an example.") from error
    listed = content.pop("offers", None)
    if content or not isinstance(listed, list) or not listed:
        raise UsageError(f"{path} must be a list of [[offers]] and nothing else. See docs/mixed-gpus.md.")
    if len(listed) > _MOST_OFFERS:
        raise UsageError(f"{path} has {len(listed)} offers. Give at most {_MOST_OFFERS}: all combinations are tried.")
    found = []
    for number, each in enumerate(listed, 1):
        try:
            found.append(_Entry.model_validate(each))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise UsageError(f"{path}: offer {number}: {where}: {first['msg']}") from error
    names = [entry.name for entry in found]
    if len(set(names)) < len(names):
        raise UsageError(f"{path}: two offers have one name: {', '.join(names)}")
    return found


class RentedReport(Value):
    """A fleet on the frontier."""

    gpus: dict[str, int] = Field(description="by offer")
    shape: str
    micro_batch: int
    examples_per_s: float = Field(description="that are left at the offers' losses")
    losses_per_hour: float
    dollars_per_hour: float = Field(description="of its GPUs, and of what leaves a region or a zone")
    egress_dollars_per_hour: float = Field(default=0.0, description="of that, for what leaves a region or a zone")
    dollars_per_million_examples: float
    hours: float | None
    dollars: float | None


class OffersReport(Value):
    """Everything that ``varuna offers`` prints."""

    model: str
    global_batch: int
    examples: float | None
    frontier: tuple[RentedReport, ...] = Field(
        description="none is both faster and cheaper than another, slowest first"
    )
    cheapest_in_time: int | None = Field(description="its place: the cheapest that meets the deadline")
    fastest_for_budget: int | None = Field(description="its place: the fastest that the budget pays for")


def offers_report(
    request: PlanRequest,
    offers: Sequence[Offer],
    *,
    examples: float | None,
    deadline_hours: float | None,
    budget_dollars: float | None,
) -> OffersReport:
    """Return the frontier, and what of it answers the question.

    Args:
        request: see ``frontier``.
        offers: likewise.
        examples: of the whole job.
        deadline_hours: by which it has to be done.
        budget_dollars: that it may cost.

    Raises:
        NoPlanError: the model fits on no fleet of these offers.
    """
    found = frontier(request, offers)
    if not found:
        raise NoPlanError(
            f"{request.calibration.model.name} fits on no fleet of these offers. Offer more GPUs, or ones with more "
            "memory."
        )
    in_time = [at for at, each in enumerate(found) if _is_within(each.hours, examples, deadline_hours)]
    paid = [at for at, each in enumerate(found) if _is_within(each.dollars, examples, budget_dollars)]
    return OffersReport(
        model=request.calibration.model.name,
        global_batch=request.global_batch,
        examples=examples,
        frontier=tuple(_rented(each, offers, examples) for each in found),
        cheapest_in_time=min(in_time, default=None),
        fastest_for_budget=max(paid, default=None),
    )


def _is_within(figure: Any, examples: float | None, limit: float | None) -> bool:
    return examples is not None and limit is not None and figure(examples) <= limit


def _rented(found: Rented, offers: Sequence[Offer], examples: float | None) -> RentedReport:
    return RentedReport(
        gpus={offer.name: count for offer, count in zip(offers, found.gpus, strict=True) if count},
        shape=found.plan.shape,
        micro_batch=found.plan.micro_batch,
        examples_per_s=found.examples_per_s,
        losses_per_hour=found.losses_per_hour,
        dollars_per_hour=found.dollars_per_hour,
        egress_dollars_per_hour=found.egress_per_hour,
        dollars_per_million_examples=found.dollars_per_million,
        hours=None if examples is None else found.hours(examples),
        dollars=None if examples is None else found.dollars(examples),
    )


def show_offers(
    console: PlainConsole, found: OffersReport, *, deadline_hours: float | None, budget_dollars: float | None
) -> None:
    """Show the frontier as a table, and the answer in a sentence."""
    whole = "" if found.examples is None else f"   {found.examples:,.0f} examples"
    console.print(f"{found.model}   global batch {found.global_batch}{whole}")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    has_egress = any(each.egress_dollars_per_hour for each in found.frontier)
    titles = ["", "GPUs", "P x D", "ex/s left", "$/h", *(["egress"] if has_egress else []), "$/M ex"]
    titles += ["time", "$"] if found.examples is not None else []
    for title in titles:
        table.add_column(title, justify="left" if title in ("", "GPUs") else "right", overflow="fold")
    for place, each in enumerate(found.frontier):
        marks = "d" * (place == found.cheapest_in_time) + "b" * (place == found.fastest_for_budget)
        cells = [
            marks,
            _fleet(each),
            each.shape,
            f"{each.examples_per_s:.4g}",
            f"{each.dollars_per_hour:.4g}",
            *([f"{each.egress_dollars_per_hour:.4g}"] if has_egress else []),
            f"{each.dollars_per_million_examples:.4g}",
        ]
        if each.hours is not None and each.dollars is not None:
            cells += [format_duration(each.hours * _HOUR_S), f"{each.dollars:,.0f}"]
        table.add_row(*cells)
    console.print(table)
    for line in _answers(found, deadline_hours, budget_dollars):
        console.print(line)


def _drawn(found: OffersReport, *, deadline_hours: float | None, budget_dollars: float | None) -> str:
    answers = (
        ("the cheapest in time", found.cheapest_in_time),
        ("the fastest for the budget", found.fastest_for_budget),
    )
    fleets = [
        DrawnFleet(
            _fleet(each),
            each.shape,
            each.examples_per_s,
            each.dollars_per_million_examples,
            answers=", ".join(words for words, answer in answers if answer == place),
        )
        for place, each in enumerate(found.frontier)
    ]
    job = None if found.examples is None else DrawnJob(found.examples, deadline_hours, budget_dollars)
    whole = "" if job is None else f", {job.examples:,.0f} examples"
    return draw(f"{found.model}, global batch {found.global_batch}{whole}", fleets, job)


def _fleet(rented: RentedReport) -> str:
    return " + ".join(f"{count} {name}" for name, count in rented.gpus.items())


def _answers(found: OffersReport, deadline_hours: float | None, budget_dollars: float | None) -> list[str]:
    lines, fastest, cheapest = [], found.frontier[-1], found.frontier[0]
    if deadline_hours is not None and fastest.hours is not None:
        if found.cheapest_in_time is None:
            lines.append(f"none is done within {deadline_hours:g} hours: the fastest takes {fastest.hours:.1f}")
        else:
            lines.append(f"d: the cheapest that is done within {deadline_hours:g} hours")
    if budget_dollars is not None and cheapest.dollars is not None:
        if found.fastest_for_budget is None:
            lines.append(f"none costs at most $ {budget_dollars:g}: the cheapest takes $ {cheapest.dollars:,.0f}")
        else:
            lines.append(f"b: the fastest that costs at most $ {budget_dollars:g}")
    return lines


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(epilog=EXAMPLES)(offers)
