"""From the samples of all workers to one calibration: means without outliers, and lines through medians. No torch."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median

from varuna.calibration.format import (
    Calibration,
    Hardware,
    Jitter,
    Link,
    ModelIdentity,
    NetworkCosts,
    OptimizerCosts,
    Ring,
    SectionKind,
    SectionRun,
)
from varuna.calibration.nominal import ACTION_S, ETHERNET
from varuna.calibration.samples import Measured, PilotSamples, RingSamples, SectionSamples, Sized
from varuna.calibration.statistics import FittedLine, fit_line, mean_time, quantiles
from varuna.core.devices import reserved_bytes
from varuna.core.errors import WorkerError
from varuna.core.model import ModelFacts, SectionFacts

_DECILES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.98)
"""Quantiles that describe the jitter; the slowest fiftieth of the messages is left out as foreign load."""
_FASTEST_PER_S = 1e12


def assemble(measured: Sequence[Measured], *, name: str, created: str = "") -> Calibration:
    """Put the workers' samples together.

    Args:
        measured: by worker; at least one.
        name: of the model, for people.
        created: when, for people.

    Raises:
        WorkerError: the workers captured different models, or no worker measured some kind of section.
    """
    facts = measured[0].facts
    if any(each.facts != facts for each in measured):
        raise WorkerError(
            "the workers captured different models, so their measurements cannot be combined. model= must build "
            "the same module each time it is called."
        )
    names, kinds, runs = _kinds(facts, measured)
    notes = [f"measured by {len(measured)} worker{'s' * (len(measured) > 1)} at once, in place"]
    network = _network(measured)
    if network is None:
        notes.append("the network is assumed to be 10 Gb/s Ethernet: measuring one takes two workers")
    elif measured[0].device_bytes is not None:
        notes.append("messages and all-reduces begin and end in the memory of the GPU")
    action_s = _action_s(measured)
    if action_s is None:
        notes.append("the cost of an action is assumed: no real steps were run")
    order = [kinds[key] for key in _keys(facts, measured[0].kinds)]
    samples_s = _samples_s(measured, order, action_s or 0.0)
    return Calibration(
        created=created,
        notes=tuple(notes),
        hardware=_hardware(measured[0]),
        model=ModelIdentity(name=name, digest=facts.digest, batch_dependent=facts.batch_dependent),
        sized_for=min(each.sized_for for each in measured),
        kinds={names[key]: kind for key, kind in kinds.items()},
        sections=runs,
        tied=facts.tied,
        across_vms=network or ETHERNET,
        action_s=ACTION_S if action_s is None else action_s,
        hand_over_s=_hand_over_s(measured, order, action_s or 0.0, samples_s),
        samples_s=samples_s,
        optimizer=_optimizer(measured).model_copy(update={"together": facts.updates_together}),
        snapshot_bytes_per_s=_copied_bytes_per_s([sample for each in measured for sample in each.snapshots]),
        to_device_bytes_per_s=_copied_bytes_per_s([sample for each in measured for sample in each.arrivals]),
    )


def _hardware(measured: Measured) -> Hardware:
    own = measured.device_bytes
    return Hardware(
        name=measured.hardware,
        memory_bytes=own,
        reserved_bytes=0 if own is None else reserved_bytes(own),
    )


Key = tuple[int, SectionFacts]
"""A kind of section as it was measured, and the facts that its sections share."""


def _kinds(
    facts: ModelFacts, measured: Sequence[Measured]
) -> tuple[dict[Key, str], dict[Key, SectionKind], tuple[SectionRun, ...]]:
    """Names and figures of the kinds, and the model as runs of them."""
    first = measured[0].kinds
    samples: dict[int, list[SectionSamples]] = {}
    for each in measured:
        for sample in each.sections:
            samples.setdefault(first[sample.section], []).append(sample)
    names: dict[Key, str] = {}
    kinds: dict[Key, SectionKind] = {}
    runs: list[SectionRun] = []
    for key, section in zip(_keys(facts, first), facts.sections, strict=True):
        kind = key[0]
        if key not in names:
            names[key] = f"{section.label or 'section'} ({len(names)})"
            if kind not in samples:
                raise WorkerError(f"section {kind} ({section.label}) was not measured by any worker")
            kinds[key] = _kind(samples[kind], section)
        if runs and runs[-1].kinds == (names[key],):
            runs[-1] = SectionRun(kinds=(names[key],), count=runs[-1].count + 1)
        else:
            runs.append(SectionRun(kinds=(names[key],)))
    return names, kinds, tuple(runs)


def _keys(facts: ModelFacts, kinds: Sequence[int]) -> list[Key]:
    plain = [section.model_copy(update={"label": "", "forward_s": 0.0}) for section in facts.sections]
    return list(zip(kinds, plain, strict=True))


def _kind(samples: Sequence[SectionSamples], section: SectionFacts) -> SectionKind:
    sizes = tuple(sorted({sample.micro_batch for sample in samples}))

    def times(name: str) -> tuple[float, ...]:
        by_size = [
            [value for sample in samples if sample.micro_batch == size for value in getattr(sample, name)]
            for size in sizes
        ]
        return tuple(mean_time(values) for values in by_size) if all(by_size) else ()

    return SectionKind(
        micro_batches=sizes,
        forward_s=times("forward_s"),
        recompute_s=times("recompute_s"),
        backward_s=times("backward_s"),
        input_s=times("input_s"),
        weight_s=times("weight_s"),
        **section.untimed(),
    )


# -- the network -----------------------------------------------------------------------------------------


def _network(measured: Sequence[Measured]) -> NetworkCosts | None:
    messages = [sample for each in measured for sample in each.messages]
    shapes = dict.fromkeys((ring.in_flight, ring.ranks) for each in measured for ring in each.rings)
    if not messages or not shapes:
        return None
    rings = tuple(_ring([r for each in measured for r in each.rings if (r.in_flight, r.ranks) == s]) for s in shapes)
    staged, line = ([s for each in measured for s in getattr(each, name)] for name in ("staged", "line"))
    return NetworkCosts(link=link_of(messages, staged, line), rings=rings)


def link_of(messages: Iterable[Sized], staged: Sequence[Sized] = (), line: Sequence[Sized] = ()) -> Link:
    """Latency and rate of the fastest decile of each size; what the others take beyond theirs is jitter.

    An added delay affects the fastest messages least and all sizes alike, so few messages suffice for both figures.

    Args:
        messages: between host memories.
        staged: the same from one GPU's memory to the other's; the copies are what the fastest take longer.
        line: two messages, of two neighbours at once.
    """
    by_size = _by_size(messages)
    fastest = _fastest(by_size)
    alone = fit_line(fastest.items())
    copied = _fastest(_by_size(staged))
    copies = FittedLine(
        max(0.0, copied[min(copied)] - fastest[min(copied)]) if copied else 0.0,
        fit_line(copied.items()).per_unit - alone.per_unit if copied else 0.0,
    )
    late = [max(0.0, seconds - fastest[size]) for size, times in by_size.items() for seconds in times]
    beyond = quantiles(late, _DECILES)
    mean_s = sum(a + b for a, b in pairwise(beyond)) / 2 / (len(beyond) - 1)
    return Link(
        latency_s=fastest[min(fastest)],
        bytes_per_s=_rate(alone) or _FASTEST_PER_S,
        line_bytes_per_s=_rate(fit_line(_fastest(_by_size(line)).items())) if line else None,
        staged_s=copies.fixed,
        staged_bytes_per_s=_rate(copies),
        jitter=Jitter(mean_s=mean_s, quantiles_s=beyond),
    )


def _by_size(messages: Iterable[Sized]) -> dict[int, list[float]]:
    by_size: dict[int, list[float]] = {}
    for size, seconds in messages:
        by_size.setdefault(size, []).append(seconds)
    return by_size


def _fastest(by_size: Mapping[int, Sequence[float]]) -> dict[int, float]:
    return {size: quantiles(times, (0.1,))[0] for size, times in by_size.items()}


def _ring(rings: Sequence[RingSamples]) -> Ring:
    """A ring's costs, from the line through all sizes: 2 (D - 1) rounds of latency + size / D / rate."""
    ranks = rings[0].ranks
    line = fit_line(sample for ring in rings for sample in ring.samples)
    rounds = 2 * (ranks - 1)
    rate = _rate(line)
    return Ring(
        in_flight=rings[0].in_flight,
        ranks=ranks,
        latency_s=line.fixed / rounds,
        bytes_per_s=rate * rounds / ranks if rate else _FASTEST_PER_S,
    )


# -- what is around the sections ---------------------------------------------------------------------------


def _action_s(measured: Sequence[Measured]) -> float | None:
    """Seconds that an action without messages takes beyond its sections: an R, or a B of a single stage.

    Taken from the deepest pipeline, whose threads share the core with the one that computes.
    """
    pilots = [pilot for each in measured for pilot in each.pilots]
    deepest = max((pilot.stages for pilot in pilots), default=0)
    plain = "B" if deepest == 1 else "R"
    found = [
        pilot.whole_s[plain] - pilot.inside_s[plain]
        for pilot in pilots
        if pilot.stages == deepest and plain in pilot.whole_s and plain in pilot.inside_s
    ]
    return max(0.0, median(found)) if found else None


def _hand_over_s(
    measured: Sequence[Measured], sections: Sequence[SectionKind], action_s: float, samples_s: float
) -> float:
    """Seconds that an F or B which gives a message takes beyond R, which has none, scaled as ``_beyond`` says."""
    found = []
    for pilot in (pilot for each in measured for pilot in each.pilots if pilot.stages > 1):
        own = sections[pilot.first : pilot.stop]
        reads_s = samples_s if any(kind.input_bytes for kind in own) else 0.0
        gives = {"F": "forward_s"} if pilot.stop < len(sections) else {}
        gives |= {"B": "backward_s"} if pilot.first else {}
        found += _beyond(pilot, own, action_s, "R", gives, {"F": reads_s})
    return max(0.0, median(found)) if found else 0.0


def _samples_s(measured: Sequence[Measured], sections: Sequence[SectionKind], action_s: float) -> float:
    """Seconds that an F of a single stage takes beyond its B, scaled as ``_beyond`` says: it keeps all, and reads."""
    found = []
    for pilot in (pilot for each in measured for pilot in each.pilots if pilot.stages == 1):
        found += _beyond(pilot, sections[pilot.first : pilot.stop], action_s, "B", {"F": "recompute_s"}, {})
    return max(0.0, median(found)) if found else 0.0


_TIMES = {"R": "recompute_s", "B": "backward_s"}


def _beyond(
    pilot: PilotSamples,
    own: Sequence[SectionKind],
    action_s: float,
    plain: str,
    others: Mapping[str, str],
    known: Mapping[str, float],
) -> list[float]:
    """Seconds that ``others`` (an action, and its sections' seconds) take beyond what ``plain`` leads one to expect.

    Only relations count, so that a machine that was busier meanwhile spoils nothing. What any action takes beyond its
    sections is not a matter of relations, and is set aside, as is what is ``known`` of an action.
    """
    m, whole_s = pilot.micro_batch, pilot.whole_s

    def inside_s(times: str) -> float:
        return sum(kind.at(getattr(kind, times), m) for kind in own)

    if not {plain, *others} <= set(whole_s) or inside_s(_TIMES[plain]) <= 0:
        return []
    pace = max(0.0, whole_s[plain] - action_s) / inside_s(_TIMES[plain])
    return [
        whole_s[action] - action_s - known.get(action, 0.0) - pace * inside_s(times) for action, times in others.items()
    ]


def _optimizer(measured: Sequence[Measured]) -> OptimizerCosts:
    """Costs per byte from updates of two sizes; fixed costs from real steps of one worker alone, if there were any."""
    updates = [sample for each in measured for sample in each.updates]
    if not updates:
        return OptimizerCosts()
    line = fit_line(updates)
    alone = [
        seconds - line.per_unit * pilot.state_bytes
        for each in measured
        for pilot in each.pilots
        if pilot.stages == 1
        for seconds in pilot.step_s
    ]
    return OptimizerCosts(fixed_s=max(0.0, median(alone)) if alone else line.fixed, bytes_per_s=_rate(line))


def _copied_bytes_per_s(samples: Sequence[Sized]) -> float | None:
    return _rate(fit_line(samples)) if samples else None


def _rate(line: FittedLine) -> float | None:
    """Bytes per second; None where size made no difference."""
    return min(1 / line.per_unit, _FASTEST_PER_S) if line.per_unit > 0 else None
