"""A run corrects the calibration that it was planned on. Pure."""

from collections.abc import Callable, Mapping, Sequence

from varuna.calibration.format import Calibration, NetworkCosts, OptimizerCosts, SectionKind
from varuna.core.plan import Plan
from varuna.core.times import Carried, RankTimes
from varuna.planner.pricing.costs import Around, around_sections, pipeline_costs
from varuna.planner.pricing.profile import profile
from varuna.simulator.costs import PipelineCosts

_ROUNDS = 25
"""Of spreading the stages' factors over the kinds of sections that they share."""
_LARGEST_FACTOR = 1000.0
"""FLOPs under a roofline may be that far off; anything beyond is a mistake."""
_OVERHEADS = {"action_s": ("FRBIW", 0.5), "hand_over_s": ("FBI", 0.2), "samples_s": ("F", 0.2)}
"""What actions take beyond their sections: in which, and the most that it may be of the shortest of them."""
_RUN_NOTE = "refined by a run"


def refine(calibration: Calibration, plan: Plan, stages: Sequence[RankTimes]) -> Calibration:
    """The calibration under which ``plan`` takes what it took.

    Times of a stage's sections are scaled so that their sum is what its actions took. A kind of section that several
    stages run gets what fits all of them best; relations between sections of a stage stay as they were.

    Args:
        calibration: that the plan was made from, or a nominal one.
        plan: that ran.
        stages: what its stages took.
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
        for span in map(plan.sections_of, range(plan.stages))
    ]
    kinds = dict(calibration.kinds)
    order = calibration.kind_names
    for letters, names in _COLUMNS:
        spans = [[order[section] for section in _ran(plan, k, stages[k], letters)] for k in range(plan.stages)]
        wanted = [_inside_s(stage, letters, beyond) for stage, beyond in zip(stages, around, strict=True)]
        kinds = _scaled(kinds, spans, wanted, m, names)
    across = _network(calibration.across_vms, plan, stages)
    notes = tuple(note for note in calibration.notes if not note.startswith(_RUN_NOTE))
    return calibration.model_copy(
        update={
            "kinds": kinds,
            "optimizer": _optimizer(calibration, plan, stages),
            "across_vms": across,
            "notes": (*notes, f"{_RUN_NOTE}: {plan.shape}, m = {m}, {min(each.steps for each in stages)} steps"),
        }
    )


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
    sections = plan.sections_of(stage)
    kept = len(plan.kept_sections_of(stage)) if _told(times, letters) == "R" else 0
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
    """Links and rings scaled to what messages and all-reduces took; a ring's fastest rank waited least for others."""
    link, jitter = network.link, network.link.jitter.mean_s
    sent = [each.messages for each in stages if each.messages is not None]
    if sent:
        factor = _factor(sent, lambda size: link.latency_s + jitter + size / link.bytes_per_s)
        link = link.model_copy(update={"latency_s": link.latency_s * factor, "bytes_per_s": link.bytes_per_s / factor})
    rings = network.rings
    reduced = [each.reductions for each in stages if each.reductions is not None]
    if reduced and plan.replicas > 1:
        ranks = plan.replicas
        ring = next((each for each in rings if each.ranks in (None, ranks)), rings[0])
        rounds = 2 * (ranks - 1)
        factor = _factor(reduced, lambda size: rounds * (ring.latency_s + size / ranks / ring.bytes_per_s))
        rings = tuple(
            each.model_copy(update={"latency_s": each.latency_s * factor, "bytes_per_s": each.bytes_per_s / factor})
            for each in rings
        )
    return network.model_copy(update={"link": link, "rings": rings})


def _factor(measured: Sequence[Carried], predicted_s: Callable[[float], float]) -> float:
    ratios = sorted(each.seconds / max(predicted_s(each.size_bytes), 1e-9) for each in measured)
    return min(max(ratios[len(ratios) // 2], 1 / _LARGEST_FACTOR), _LARGEST_FACTOR)


def costs_of(calibration: Calibration, plan: Plan) -> PipelineCosts:
    """What the simulator is told about a plan."""
    return pipeline_costs(profile(calibration, plan.micro_batch), plan, gpus_per_vm=calibration.hardware.gpus_per_vm)
