"""A run corrects the calibration that it was planned on. Pure."""

from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter

from varuna.calibration.format import Calibration, Calibrations, OptimizerCosts, SectionKind
from varuna.core.plan import Plan
from varuna.core.times import RankTimes
from varuna.fleet.feedback.cables import stretched, with_seen_networks
from varuna.planner.pricing.costs import ActionOverhead, around_sections
from varuna.planner.pricing.predict import Prediction, predictions
from varuna.planner.pricing.profile import profile
from varuna.planner.pricing.spanning import spanning_costs
from varuna.simulator.costs import PipelineCosts

_ROUNDS = 25
"""Of spreading the stages' factors over the kinds of sections that they share."""
_LARGEST_FACTOR = 1e6
"""FLOPs under a roofline may be that far off, of tiny sections that wait; anything beyond is a mistake."""
_OVERHEADS = {"action_s": ("FRBIW", 0.5), "hand_over_s": ("FBI", 0.2), "samples_s": ("F", 0.2)}
"""Seconds of actions beyond their sections: the actions that have them, and their largest share of the shortest one."""
_CLOSE = 0.01
"""So near to the measured step a prediction may stay."""
_LARGEST_GAP, _HALVINGS = 8.0, 10
"""By so much, at most, the network is corrected for a whole step; and how often the rest is halved."""
_RUN_NOTE = "refined by a run"


Options = Callable[[Calibrations], Calibrations]
"""The changes that a job's options make to calibrations, which are of no job."""


def _as_they_are(calibrations: Calibrations) -> Calibrations:
    return calibrations


def refine(
    calibrations: Calibrations,
    plan: Plan,
    stages: Sequence[RankTimes],
    *,
    options: Options = _as_they_are,
    is_whole: bool = True,
    is_apart: bool = False,
    own: Sequence[int] | None = None,
    relayed: Collection[int] = (),
) -> Calibrations:
    """The calibrations of one class of devices under which ``plan`` takes what it took.

    Times of a stage's sections are scaled so that their sum is what its actions took. A kind of section that several
    stages run gets what fits all of them best; relations between sections of a stage stay as they were. What a step
    takes beyond that is put down to the network: not where other stages run on other devices, whose network it is, too.

    Args:
        calibrations: of the class alone, that the plan was made from, or a nominal one.
        plan: that ran.
        stages: what its stages took.
        options: of the job that ran.
        is_whole: other pipelines than these do not make the step longer.
        is_apart: others are in another region.
        own: stages that run on the class of devices; None: all.
        relayed: stages whose line to the next one goes through another machine.
    """
    calibration = calibrations.first
    m, here = plan.micro_batch, range(plan.stages) if own is None else own
    overheads = {
        name: min(getattr(calibration, name), share * _least_s([stages[k] for k in here], letters))
        for name, (letters, share) in _OVERHEADS.items()
    }
    calibration = calibration.model_copy(update=overheads)
    known = profile(calibration, m)
    around = [
        around_sections(known, span.start, span.stop, is_one_of_many=plan.stages > 1)
        for span in map(plan.first.sections_of, range(plan.stages))
    ]
    kinds = dict(calibration.kinds)
    order = calibration.kind_names
    for letters, names in _COLUMNS:
        spans = [[order[section] for section in _ran(plan, k, stages[k], letters)] for k in range(plan.stages)]
        wanted = [_inside_s(stages[k], letters, around[k]) if k in here else None for k in range(plan.stages)]
        kinds = _scaled(kinds, spans, wanted, m, names)
    notes = tuple(note for note in calibration.notes if not note.startswith(_RUN_NOTE))
    note = f"{_RUN_NOTE}: {plan.shape}, m = {m}, {min(each.steps for each in stages)} steps"
    update: dict[str, object] = {"kinds": kinds, "notes": (*notes, note)}
    if own is not None:
        return calibrations.each(lambda _: calibration.model_copy(update=update))
    update["optimizer"] = _optimizer(Calibrations.of_one(calibration), options, plan, stages)
    found = calibrations.each(lambda _: calibration.model_copy(update=update))
    found = with_seen_networks(found, plan, stages, is_apart=is_apart, relayed=relayed)
    return _with_whole_steps(found, options, plan, max(each.step_s for each in stages)) if is_whole else found


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
    sections = plan.first.sections_of(stage)
    kept = len(plan.first.kept_sections_of(stage)) if _told(times, letters) == "R" else 0
    return sections[: len(sections) - kept]


def _inside_s(stage: RankTimes, letters: Sequence[str], around: ActionOverhead) -> float | None:
    """Return the seconds that the sections of an action took; None if no such action was seen."""
    letter = _told(stage, letters)
    if letter is None:
        return None
    beyond_s = {"F": around.forward_s, "B": around.backward_s, "I": around.backward_s}.get(letter, around.plain_s)
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
    """Return the factor for kinds of which no stage told."""
    before_s = sum(known[name] for name in seen)
    return sum(known[name] * factors[name] for name in seen) / before_s if before_s > 0 else 1.0


def _optimizer(calibrations: Calibrations, options: Options, plan: Plan, stages: Sequence[RankTimes]) -> OptimizerCosts:
    """Let fixed costs make up for what is not as predicted; the stage that waited least for the vote is believed."""
    known = calibrations.first.optimizer
    varying_s = costs_of(options(calibrations), plan).optimizer_s - known.fixed_s
    return known.model_copy(update={"fixed_s": max(0.0, min(each.ending_s for each in stages) - varying_s)})


def _with_whole_steps(calibrations: Calibrations, options: Options, plan: Plan, measured_s: float) -> Calibrations:
    """The calibrations with a network for which a step takes as long as measured, as far as a network can explain it.

    What messages and all-reduces take by themselves says little about how they meet: on one cable, behind each other in
    sockets, while a rank computes.
    """
    if plan.workers == 1:
        return calibrations

    def stretch(known: Calibration, factor: float) -> Calibration:
        networks = {"across_vms": known.across_vms, "within_vm": known.within_vm}
        return known.model_copy(
            update={name: stretched(each, factor) for name, each in networks.items() if each is not None}
        )

    def network(factor: float) -> Calibrations:
        return calibrations.each(lambda known: stretch(known, factor))

    def step_s(factor: float) -> float:
        return predicted(options(network(factor)), plan).step_s

    low, high = 1 / _LARGEST_GAP, _LARGEST_GAP
    if abs(step_s(1.0) / measured_s - 1) <= _CLOSE or not step_s(low) <= measured_s <= step_s(high):
        return calibrations  # near enough, or no network explains that
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        if step_s(middle) < measured_s:
            low = middle
        else:
            high = middle
    return network((low * high) ** 0.5)


def predicted(calibrations: Calibrations, plan: Plan) -> Prediction:
    """A step of the pipelines of a plan that end last."""
    return max(predictions(plan, calibrations), key=attrgetter("step_s"))


def costs_of(calibrations: Calibrations, plan: Plan) -> PipelineCosts:
    """Return the simulator's input for a plan: the costs of its first pipelines."""
    return spanning_costs(plan, calibrations.of, gpus_per_vm=None)
