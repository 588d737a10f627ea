"""Machines to rent: the fleets that offers allow, by how fast they train and what an example costs. Pure.

Fleets are first compared by what each class of devices does alone, and by price. Those that no other one beats in both
are planned for as a run would be, with what losses cost at the offers' rates; of these, again those that none beats.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple, TypeVar

from pydantic import Field

from varuna.core.devices import WorkerGroup, WorkerGroups, region_of
from varuna.core.plan import Plan
from varuna.core.value import Value
from varuna.planner.asking.request import PlanRequest
from varuna.planner.choose import by_goodput
from varuna.planner.pricing.egress import crossing_bytes, seated
from varuna.planner.sweep import rank_plans

_PLANNED = 12
"""Fleets that are planned for exactly."""
_GB = 1e9
_WEIGHED = 3
"""Plans of each that are weighed by what losses cost."""


class Offer(Value):
    """Machines that can be had at a price."""

    name: str = Field(min_length=1)
    device_class: str = Field(description="as the calibration of its GPUs calls it")
    most: int = Field(ge=1, description="GPUs")
    price_per_hour: float = Field(ge=0, description="of a GPU, in dollars")
    losses_per_hour: float = Field(default=0.0, ge=0, description="of a GPU, without notice")
    gpus_per_vm: int = Field(default=1, ge=1)
    egress_per_gb: float = Field(default=0.0, ge=0, description="dollars for what leaves its region, per 10^9 bytes")
    zone: str = Field(default="", description="of its region")
    zone_egress_per_gb: float = Field(default=0.0, ge=0, description="dollars for what leaves its zone for another one")

    @property
    def place(self) -> str:
        """Region and zone."""
        return f"{region_of(self.device_class)}/{self.zone}"

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of GPUs that are looked at: none, whole VMs in steps of a third to a half, all."""
        found, vms = {0, self.most - self.most % self.gpus_per_vm}, 1
        while vms * self.gpus_per_vm <= self.most:
            found.add(vms * self.gpus_per_vm)
            vms += max(1, vms // 2)
        return tuple(sorted(found))


class Rented(NamedTuple):
    """A fleet, and what it does."""

    gpus: tuple[int, ...]
    """by offer"""
    dollars_per_hour: float
    """of its GPUs, and of what leaves a region or a zone"""
    egress_per_hour: float
    """of that, dollars for what leaves a region or a zone"""
    losses_per_hour: float
    plan: Plan
    examples_per_s: float
    """that are left at its rate of losses"""

    @property
    def dollars_per_million(self) -> float:
        """Dollars for a million examples."""
        return self.dollars_per_hour / 3600 / self.examples_per_s * 1e6

    def hours(self, examples: float) -> float:
        """Hours for so many examples."""
        return examples / self.examples_per_s / 3600

    def dollars(self, examples: float) -> float:
        """Dollars for so many examples."""
        return self.dollars_per_million * examples / 1e6


class _Guess(NamedTuple):
    gpus: tuple[int, ...]
    dollars_per_hour: float
    examples_per_s: float


_Either = TypeVar("_Either", _Guess, Rented)


def frontier(request: PlanRequest, offers: Sequence[Offer]) -> tuple[Rented, ...]:
    """Fleets that no other one beats both in speed and in dollars per example, the slowest first; () if none fits.

    Args:
        request: for any workers; its calibration knows every offer's class.
        offers: what can be had.
    """
    guesses = _unbeaten(list(_guesses(request, offers)), lambda each: each.dollars_per_hour / each.examples_per_s)
    found = [rented for guess in _spread(guesses) if (rented := _planned(request, offers, guess)) is not None]
    return tuple(_unbeaten(found, lambda each: each.dollars_per_million))


def _guesses(request: PlanRequest, offers: Sequence[Offer]) -> Iterator[_Guess]:
    """Every fleet, as fast as its classes are together."""
    alone: dict[WorkerGroup, float] = {}
    for gpus in product(*(offer.counts for offer in offers)):
        if not _is_sensible(offers, gpus):
            continue
        rates = 0.0
        for group in _workers(offers, gpus):
            if group not in alone:
                asked = request.model_copy(update={"workers": (group,), "wanted": 1}).of_class(group.name)
                plans = rank_plans(asked).plans
                alone[group] = plans[0].global_batch / plans[0].step_s if plans else 0.0
            rates += alone[group]
        dollars_per_hour = sum(offer.price_per_hour * count for offer, count in zip(offers, gpus, strict=True))
        if rates:
            yield _Guess(gpus, dollars_per_hour, rates)


def _is_sensible(offers: Sequence[Offer], gpus: Sequence[int]) -> bool:
    """Return whether dearer GPUs of a class are only rented once all of a cheaper offer are, or none."""
    rented = [(offer, count) for offer, count in zip(offers, gpus, strict=True)]
    return not any(
        count and cheaper.device_class == offer.device_class and cheaper.price_per_hour < offer.price_per_hour
        for offer, count in rented
        for cheaper, some in rented
        if 0 < some < cheaper.counts[-1]
    )


def _workers(offers: Sequence[Offer], gpus: Sequence[int]) -> WorkerGroups:
    found: dict[str, int] = {}
    for offer, count in zip(offers, gpus, strict=True):
        if count:
            found[offer.device_class] = found.get(offer.device_class, 0) + count
    return tuple(WorkerGroup.of_class(name, count) for name, count in found.items())


def _unbeaten(found: list[_Either], price: Callable[[_Either], float]) -> list[_Either]:
    """Those than which none is as fast and cheaper, the slowest first."""
    kept: list[_Either] = []
    for each in sorted(found, key=lambda one: (-one.examples_per_s, price(one))):
        if not kept or price(each) < price(kept[-1]):
            kept.append(each)
    return kept[::-1]


def _spread(guesses: Sequence[_Guess]) -> list[_Guess]:
    """Some of them, evenly, with the first and the last."""
    if len(guesses) <= _PLANNED:
        return list(guesses)
    return [guesses[round(number * (len(guesses) - 1) / (_PLANNED - 1))] for number in range(_PLANNED)]


def _planned(request: PlanRequest, offers: Sequence[Offer], guess: _Guess) -> Rented | None:
    """The plan that a run on this fleet would begin with; None: there is none."""
    losses = sum(offer.losses_per_hour * count for offer, count in zip(offers, guess.gpus, strict=True))
    update = {
        "workers": _workers(offers, guess.gpus),
        "losses_per_hour": losses,
        "wanted": _WEIGHED,
    }
    asked = request.model_copy(update=update)
    ranking = rank_plans(asked)
    if not ranking.plans:
        return None
    best = by_goodput(ranking, asked, copies=True)[0]
    used = _used(offers, guess.gpus, best.plan)
    if used != guess.gpus:  # nobody rents what idles
        dollars_per_hour = sum(offer.price_per_hour * count for offer, count in zip(offers, used, strict=True))
        return _planned(request, offers, _Guess(used, dollars_per_hour, guess.examples_per_s))
    egress = _egress_per_hour(best.plan, asked, offers, guess.gpus)
    return Rented(guess.gpus, guess.dollars_per_hour + egress, egress, losses, best.plan, best.expected.examples_per_s)


def _egress_per_hour(plan: Plan, request: PlanRequest, offers: Sequence[Offer], gpus: Sequence[int]) -> float:
    """Dollars an hour for what leaves a region, or a zone for another one of its region."""
    workers: dict[str, Counter[str]] = {}
    for offer, count in zip(offers, gpus, strict=True):
        if count:
            workers.setdefault(offer.device_class, Counter())[offer.place] += count
    at = {offer.place: offer for offer in offers}
    dollars = 0.0
    for (here, there), size in crossing_bytes(plan, request.calibration, seated(plan, workers)).items():
        is_near = region_of(at[here].device_class) == region_of(at[there].device_class)
        dollars += (at[here].zone_egress_per_gb if is_near else at[here].egress_per_gb) * size / _GB
    return dollars * 3600 / plan.step_s if dollars else 0.0


def _used(offers: Sequence[Offer], gpus: tuple[int, ...], plan: Plan) -> tuple[int, ...]:
    """Return the GPUs of each offer that a plan uses: in whole VMs, of each class the cheapest."""
    if not plan.is_by_class:
        return gpus
    left, found = dict(plan.classes), list(gpus)
    for at in sorted(range(len(offers)), key=lambda at: offers[at].price_per_hour):
        offer = offers[at]
        vms = -(-left.get(offer.device_class, 0) // offer.gpus_per_vm)
        found[at] = min(gpus[at], vms * offer.gpus_per_vm)
        left[offer.device_class] = max(0, left.get(offer.device_class, 0) - found[at])
    return tuple(found)
