"""A run corrects the calibration that it was planned on. Pure."""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple, TypeVar

from varuna.calibration.format import Calibration, Link, NetworkCosts, OptimizerCosts, Ring, SectionKind
from varuna.core.plan import Plan
from varuna.core.times import Carried, RankTimes
from varuna.planner.pricing.costs import Around, around_sections, pipeline_costs
from varuna.planner.pricing.predict import Prediction, predictions
from varuna.planner.pricing.profile import profile
from varuna.simulator.costs import PipelineCosts

_ROUNDS = 25
"""Of spreading the stages' factors over the kinds of sections that they share."""
_LARGEST_FACTOR = 1e6
"""FLOPs under a roofline may be that far off, of tiny sections that wait; anything beyond is a mistake."""
_OVERHEADS = {"action_s": ("FRBIW", 0.5), "hand_over_s": ("FBI", 0.2), "samples_s": ("F", 0.2)}
"""What actions take beyond their sections: in which, and the most that it may be of the shortest of them."""
_CLOSE = 0.01
"""So near to the measured step a prediction may stay."""
_LARGEST_GAP, _HALVINGS = 8.0, 10
"""By so much, at most, the network is corrected for a whole step; and how often the rest is halved."""
_LONG_LATENCY_S = 0.005
"""What a message may take beyond its bytes, unless more was measured: hosts of a region are nearer."""
Wire = TypeVar("Wire", Link, Ring)
_RUN_NOTE = "refined by a run"


def refine(calibration: Calibration, plan: Plan, stages: Sequence[RankTimes], *, is_whole: bool = True) -> Calibration:
    """The calibration under which ``plan`` takes what it took.

    Times of a stage's sections are scaled so that their sum is what its actions took. A kind of section that several
    stages run gets what fits all of them best; relations between sections of a stage stay as they were. What a step
    takes beyond that is put down to the network.

    Args:
        calibration: that the plan was made from, or a nominal one.
        plan: that ran.
        stages: what its stages took.
        is_whole: other pipelines than these do not make the step longer.
    """
    m = plan.micro_batch
    overheads = {
        name: min(getattr(calibration, name), share * _least_s(stages, letters))
        for name, (letters, share) in _OVERHEADS.items()
    }
    calibration = calibration.model_copy(update=overheads)
    known = profile(calibration, m)
    around = [
        around_sections(known, span.start, span.stop, is_one_of_many=plan.stages > 1)
        for span in map(plan.first_cut.sections_of, range(plan.stages))
    ]
    kinds = dict(calibration.kinds)
    order = calibration.kind_names
    for letters, names in _COLUMNS:
        spans = [[order[section] for section in _ran(plan, k, stages[k], letters)] for k in range(plan.stages)]
        wanted = [_inside_s(stage, letters, beyond) for stage, beyond in zip(stages, around, strict=True)]
        kinds = _scaled(kinds, spans, wanted, m, names)
    across = _network(calibration.across_vms, plan, stages)
    notes = tuple(note for note in calibration.notes if not note.startswith(_RUN_NOTE))
    found = calibration.model_copy(
        update={
            "kinds": kinds,
            "optimizer": _optimizer(calibration, plan, stages),
            "across_vms": across,
            "notes": (*notes, f"{_RUN_NOTE}: {plan.shape}, m = {m}, {min(each.steps for each in stages)} steps"),
        }
    )
    return _with_whole_steps(found, plan, max(each.step_s for each in stages)) if is_whole else found


_COLUMNS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    # What an action tells of: F and R of each other where only one is seen, as is B of its halves.
    (("F", "R"), ("forward_s",)),
    (("R", "F"), ("recompute_s",)),
    (("B",), ("backward_s",)),
    (("I",), ("input_s",)),
    (("W",), ("weight_s",)),
)


def _least_s(stages: Sequence[RankTimes], letters: str) -> float:
    found = [seconds for stage in stages for letter, (_, seconds) in stage.actions.items() if letter in letters]
    return min(found, default=0.0)


def _told(stage: RankTimes, letters: Sequence[str]) -> str | None:
    """The first of some actions that was seen."""
    return next((letter for letter in letters if letter in stage.actions), None)


def _ran(plan: Plan, stage: int, times: RankTimes, letters: Sequence[str]) -> range:
    """Sections that the action told of runs: R leaves out those that the plan keeps."""
    sections = plan.first_cut.sections_of(stage)
    kept = len(plan.first_cut.kept_sections_of(stage)) if _told(times, letters) == "R" else 0
    return sections[: len(sections) - kept]


def _inside_s(stage: RankTimes, letters: Sequence[str], around: Around) -> float | None:
    """What the sections of an action took; None if no such action was seen."""
    letter = _told(stage, letters)
    if letter is None:
        return None
    beyond_s = {"F": around.forward_s, "B": around.moved_s, "I": around.moved_s}.get(letter, around.plain_s)
    return max(0.0, stage.actions[letter].seconds - beyond_s)


def _scaled(
    kinds: Mapping[str, SectionKind],
    spans: Sequence[Sequence[str]],
    wanted: Sequence[float | None],
    micro_batch: int,
    names: Sequence[str],
) -> dict[str, SectionKind]:
    """Scale the times ``names`` of every kind, so that each stage's sections take what is ``wanted`` of it."""

    def times_of(kind: SectionKind, name: str) -> tuple[float, ...]:
        found: tuple[float, ...] = getattr(kind, name)
        return kind.forward_s if name == "recompute_s" and not found else found

    known = {
        name: kind.at(times_of(kind, names[0]), micro_batch) if times_of(kind, names[0]) else 0.0
        for name, kind in kinds.items()
    }
    factors = _factors(known, spans, wanted)
    return {
        name: kind.model_copy(
            update={
                field: tuple(factors[name] * seconds for seconds in times_of(kind, field))
                for field in names
                if times_of(kind, field)
            }
        )
        for name, kind in kinds.items()
    }


def _factors(
    known: Mapping[str, float], spans: Sequence[Sequence[str]], wanted: Sequence[float | None]
) -> dict[str, float]:
    """Factors by kind: stages pull their kinds in turn, each kind the further the more of the stage's time it is."""
    factors = dict.fromkeys(known, 1.0)
    seen: set[str] = set()
    for _ in range(_ROUNDS):
        pulls: dict[str, list[tuple[float, float]]] = {}
        for span, seconds in zip(spans, wanted, strict=True):
            sum_s = sum(known[name] * factors[name] for name in span)
            if seconds is None or sum_s <= 0:
                continue
            for name in span:
                pulls.setdefault(name, []).append((known[name] * factors[name] / sum_s, seconds / sum_s))
        for name, pulled in pulls.items():
            weight = sum(share for share, _ in pulled)
            if weight > 0:
                seen.add(name)
                factors[name] *= sum(share * factor for share, factor in pulled) / weight
    mean = _mean(factors, known, seen)
    return {
        name: min(max(factor if name in seen else mean, 1 / _LARGEST_FACTOR), _LARGEST_FACTOR)
        for name, factor in factors.items()
    }


def _mean(factors: Mapping[str, float], known: Mapping[str, float], seen: set[str]) -> float:
    """What kinds get that no stage told of."""
    before_s = sum(known[name] for name in seen)
    return sum(known[name] * factors[name] for name in seen) / before_s if before_s > 0 else 1.0


def _optimizer(calibration: Calibration, plan: Plan, stages: Sequence[RankTimes]) -> OptimizerCosts:
    """What is fixed makes up for what is not as predicted; the stage that waited least for the vote tells the truth."""
    known = calibration.optimizer
    varying_s = costs_of(calibration, plan).optimizer_s - known.fixed_s
    return known.model_copy(update={"fixed_s": max(0.0, min(each.ending_s for each in stages) - varying_s)})


def _network(network: NetworkCosts, plan: Plan, stages: Sequence[RankTimes]) -> NetworkCosts:
    """Links and rings that take what messages and all-reduces took; a ring's fastest rank waited least for others.

    Where only one of the two was seen, the other is as much slower or faster: they are of the same cables.
    """
    link, rings = network.link, network.rings
    sent = [each.messages for each in stages if each.messages is not None]
    by_link = _change(link, sent) if sent else None
    reduced = [each.reductions for each in stages if each.reductions is not None]
    by_ring = None
    if reduced and plan.replicas > 1:
        ring = next((each for each in rings if each.ranks in (None, plan.replicas)), rings[0])
        by_ring = _change(ring, reduced, ranks=plan.replicas)
    known = by_link or by_ring
    return network if known is None else _changed(network, by_link or known, by_ring or known)


class _Change(NamedTuple):
    """By how much a cable is slower than was known."""

    latency: float
    seconds_per_byte: float


def _change(known: Link | Ring, seen: Sequence[Carried], *, ranks: int = 0) -> _Change:
    """The change under which transfers take what they took; with ``ranks``, all-reduces of so many.

    Transfers of one size do not tell latency from bandwidth: that latency is long is believed up to a bound, the rest
    is put down to bandwidth.
    """
    rounds, part = (2 * (ranks - 1), 1 / ranks) if ranks else (1, 1.0)
    factor = _factor(seen, lambda size: rounds * (known.latency_s + size * part / known.bytes_per_s))
    sizes = sorted(each.size_bytes for each in seen)
    sent_s = sizes[len(sizes) // 2] * part / known.bytes_per_s
    latency_s = min(known.latency_s * factor, max(known.latency_s, _LONG_LATENCY_S))
    if not known.latency_s or not sent_s or latency_s == known.latency_s * factor:
        return _Change(factor, factor)
    left_s = (known.latency_s + sent_s) * factor - latency_s
    return _Change(latency_s / known.latency_s, max(left_s, sent_s) / sent_s)


def _changed(network: NetworkCosts, by_link: _Change, by_ring: _Change) -> NetworkCosts:
    """The network with its links and rings so changed, none with a latency that is not believed."""

    def scaled(each: Wire, change: _Change) -> Wire:
        latency_s = min(each.latency_s * change.latency, max(each.latency_s, _LONG_LATENCY_S))
        return each.model_copy(
            update={"latency_s": latency_s, "bytes_per_s": each.bytes_per_s / change.seconds_per_byte}
        )

    rings = tuple(scaled(ring, by_ring) for ring in network.rings)
    return network.model_copy(update={"link": scaled(network.link, by_link), "rings": rings})


def _with_whole_steps(calibration: Calibration, plan: Plan, measured_s: float) -> Calibration:
    """The calibration with a network for which a step takes as long as measured, as far as a network can explain it.

    What messages and all-reduces take by themselves says little about how they meet: on one cable, behind each other in
    sockets, while a rank computes.
    """
    if plan.workers == 1:
        return calibration

    def network(factor: float) -> Calibration:
        return calibration.model_copy(
            update={"across_vms": _changed(calibration.across_vms, *[_Change(factor, factor)] * 2)}
        )

    low, high = 1 / _LARGEST_GAP, _LARGEST_GAP
    if abs(predicted(calibration, plan).step_s / measured_s - 1) <= _CLOSE:
        return calibration
    if not predicted(network(low), plan).step_s <= measured_s <= predicted(network(high), plan).step_s:
        return calibration  # no network explains that
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        if predicted(network(middle), plan).step_s < measured_s:
            low = middle
        else:
            high = middle
    return network((low * high) ** 0.5)


def _factor(measured: Sequence[Carried], predicted_s: Callable[[float], float]) -> float:
    ratios = sorted(each.seconds / max(predicted_s(each.size_bytes), 1e-9) for each in measured)
    return min(max(ratios[len(ratios) // 2], 1 / _LARGEST_FACTOR), _LARGEST_FACTOR)


def predicted(calibration: Calibration, plan: Plan) -> Prediction:
    """A step of the pipelines of a plan that end last."""
    return max(predictions(plan, calibration), key=attrgetter("step_s"))


def costs_of(calibration: Calibration, plan: Plan) -> PipelineCosts:
    """What the simulator is told about a plan: about its first pipelines."""
    known = calibration.of(plan.device_class)
    return pipeline_costs(profile(known, plan.micro_batch), plan, gpus_per_vm=known.hardware.gpus_per_vm)
