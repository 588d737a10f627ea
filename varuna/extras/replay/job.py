"""A calibrated model as the manager would see it."""

from varuna.calibration.format import Calibrations
from varuna.core.model import JobFacts, ModelFacts, SectionFacts

_FOREVER = 10**9


def job_of(calibrations: Calibrations, global_batch: int, micro_batch: int | None) -> JobFacts:
    """Return facts of a job that trains the calibrated model without end; morphs move its state bytes by section."""
    known = calibrations.first
    sections = tuple(
        SectionFacts(
            label=name,
            forward_s=kind.at(kind.forward_s, 1),
            parameter_bytes=kind.parameter_bytes,
            trainable_bytes=kind.trainable_bytes,
            optimizer_bytes=kind.optimizer_bytes,
            activation_bytes=kind.activation_bytes,
            boundary_bytes=kind.boundary_bytes,
        )
        for name in known.kind_names
        for kind in [known.kinds[name]]
    )
    model = ModelFacts(
        digest=known.model.digest or known.model.name,
        sections=sections,
        tied=known.tied,
    )
    return JobFacts(
        model=model,
        global_batch=global_batch,
        micro_batch=micro_batch,
        seed=0,
        steps=_FOREVER,
        checkpoint_dir="virtual",
        memory_apart=True,
    )


def state_bytes(job: JobFacts) -> tuple[int, ...]:
    """Return the bytes of each section's state."""
    return tuple(section.parameter_bytes + section.optimizer_bytes for section in job.model.sections)
