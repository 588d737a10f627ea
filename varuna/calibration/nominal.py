"""A calibration for a model that was never measured: FLOPs under a roofline, on 10 Gb/s Ethernet."""

from functools import lru_cache

from varuna.calibration.format import (
    Calibration,
    Hardware,
    Link,
    ModelIdentity,
    NetworkCosts,
    OptimizerCosts,
    Ring,
    SectionKind,
    SectionRun,
)
from varuna.core.model import ModelFacts, SectionFacts

# Megatron-LM's count of FLOPs: B does two products where F does one. Deferring the weight gradients in the
# graph takes 0.6 and 0.4 of B, as measured.
BACKWARD_FACTOR = 2.0
INPUT_SHARE = 0.6

# 10 Gb/s are 1.25 GB/s; framing and TCP leave about 1.1. A round of TCP in a data centre and the hand-over
# between threads take some 0.3 ms. 0.47 GB/s is the all-reduce rate that the paper's own step times imply.
# Python and kernel launches cost about 0.5 ms per action, so that tiny micro-batches are not free.
ETHERNET = NetworkCosts(
    link=Link(latency_s=0.0003, bytes_per_s=1.1e9),
    rings=(Ring(latency_s=0.0003, bytes_per_s=0.47e9),),
)
ACTION_S = 0.0005


@lru_cache(maxsize=16)
def nominal_calibration(facts: ModelFacts) -> Calibration:
    """The calibration that the planner assumes for ``facts`` until one is measured; memory is unlimited."""
    names: dict[SectionKind, str] = {}
    runs: list[SectionRun] = []
    for section in facts.sections:
        kind = _kind(section)
        name = names.setdefault(kind, f"{section.label or 'section'} ({len(names)})")
        if runs and runs[-1].kinds == (name,):
            runs[-1] = SectionRun(kinds=(name,), count=runs[-1].count + 1)
        else:
            runs.append(SectionRun(kinds=(name,)))
    return Calibration(
        hardware=Hardware(name="nominal"),
        model=ModelIdentity(name="captured", digest=facts.digest, batch_dependent=facts.batch_dependent),
        kinds={name: kind for kind, name in names.items()},
        sections=tuple(runs),
        tied=facts.tied,
        across_vms=ETHERNET,
        action_s=ACTION_S,
        optimizer=OptimizerCosts(together=facts.updates_together),
    )


def with_nominal_halves(calibration: Calibration) -> Calibration:
    """A calibration in which B can be split, by the usual share of each half."""
    return calibration.model_copy(update={"kinds": {name: _halved(kind) for name, kind in calibration.kinds.items()}})


def _kind(section: SectionFacts) -> SectionKind:
    backward_s = section.forward_s * BACKWARD_FACTOR
    return _halved(
        SectionKind(micro_batches=(1,), forward_s=(section.forward_s,), backward_s=(backward_s,), **section.untimed())
    )


def _halved(kind: SectionKind) -> SectionKind:
    shares = {"input_s": INPUT_SHARE, "weight_s": 1 - INPUT_SHARE}
    return kind.model_copy(
        update={name: tuple(share * seconds for seconds in kind.backward_s) for name, share in shares.items()}
    )
