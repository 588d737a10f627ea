"""A small calibration: eight equal sections, two gigabytes of state each, on cards that hold three of them."""

from varuna.calibration.format import (
    Calibration,
    Calibrations,
    Hardware,
    Link,
    ModelIdentity,
    NetworkCosts,
    Ring,
    SectionKind,
    SectionRun,
)

GIB = 2**30


def make_calibration() -> Calibrations:
    block = SectionKind(
        micro_batches=(1,),
        forward_s=(0.02,),
        backward_s=(0.04,),
        activation_bytes=10**6,
        boundary_bytes=10**6,
        parameter_bytes=GIB // 4,
        trainable_bytes=GIB // 4,
        optimizer_bytes=7 * GIB // 4,
    )
    last = block.model_copy(update={"boundary_bytes": 0})
    calibration = Calibration(
        hardware=Hardware(name="toy", memory_bytes=10 * GIB, price_per_hour=1.0),
        model=ModelIdentity(name="toy"),
        kinds={"block": block, "last": last},
        sections=(SectionRun(kinds=("block",), count=7), SectionRun(kinds=("last",))),
        across_vms=NetworkCosts(
            link=Link(latency_s=0.0003, bytes_per_s=1e9), rings=(Ring(latency_s=0.0003, bytes_per_s=1e9),)
        ),
    )
    return Calibrations.of_one(calibration)
