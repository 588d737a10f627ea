"""Costs of pipelines whose stages run on devices of several classes: each stage as its own class takes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import attrgetter

from varuna.calibration.format import Calibration
from varuna.core.plan import Plan
from varuna.planner.pricing.costs import pipeline_costs
from varuna.planner.pricing.profile import profile
from varuna.simulator.costs import LinkCosts, PipelineCosts


def spanning_costs(plan: Plan, known_of: Callable[[str], Calibration], *, gpus_per_vm: int | None) -> PipelineCosts:
    """Costs of one of a plan's first pipelines.

    Args:
        plan: of equal pipelines, or as if all were.
        known_of: the calibration of a class of devices.
        gpus_per_vm: instead of the calibrations'.
    """

    def alone(name: str, own: Sequence[int]) -> PipelineCosts:
        known = known_of(name)
        figures = profile(known, plan.micro_batch, streams_frozen=plan.streams_frozen)
        vm_size = gpus_per_vm or known.hardware.gpus_per_vm
        return pipeline_costs(figures, plan, gpus_per_vm=vm_size, own=own)

    classes = tuple(map(plan.first.class_of, range(plan.stages)))
    return join_classes({name: alone(name, own) for name, own in stages_of(classes).items()}, classes)


def stages_of(classes: Sequence[str]) -> dict[str, list[int]]:
    """By class: the stages that it runs."""
    return {name: [k for k, each in enumerate(classes) if each == name] for name in dict.fromkeys(classes)}


def join_classes(costs: Mapping[str, PipelineCosts], classes: Sequence[str]) -> PipelineCosts:
    """One pipeline of what each class would take for all of its stages.

    A message is as slow as its slower end makes it, an exchange of a tied parameter as the slowest class, and the
    update ends when all have.

    Args:
        costs: of the same pipeline, by class; the update is that of its own stages.
        classes: by stage.
    """
    some = next(iter(costs.values()))
    if len(costs) == 1:
        return some
    tied = zip(*(each.tied for each in costs.values()), strict=True)
    return replace(
        some,
        stages=tuple(costs[name].stages[stage] for stage, name in enumerate(classes)),
        links=tuple(
            max((costs[one].links[k], costs[two].links[k]), key=_message_s)
            for k, (one, two) in enumerate(pairwise(classes))
        ),
        tied=tuple(max(each, key=attrgetter("exchange_s")) for each in tied),
        optimizer_s=max(each.optimizer_s for each in costs.values()),
    )


def _message_s(link: LinkCosts) -> float:
    return link.latency_s - link.early_s + link.activation_s + link.gradient_s
