"""Bytes that a stage needs at its peak."""

from dataclasses import dataclass

from varuna.core.model import ModelFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Where a stage's bytes go."""

    parameters: int
    gradients: int
    """One accumulator per section, also for tied parameters: a morph may part the sections."""
    optimizer: int
    stash: int
    """Inputs of the n_k micro-batches in flight."""
    live: int
    """One set of activations."""
    messages: int
    """An activation and a gradient on their way at each end."""

    @property
    def total(self) -> int:
        """The sum."""
        return self.parameters + self.gradients + self.optimizer + self.stash + self.live + self.messages


def stage_memory(model: ModelFacts, sections: range, *, micro_batch: int, stash: int) -> StageMemory:
    """Predict the peak of the stage that runs ``sections`` with ``stash`` micro-batches of m in flight."""
    facts = [model.sections[i] for i in sections]
    incoming = stash_bytes(model, sections, micro_batch=micro_batch)
    outgoing = facts[-1].boundary_bytes * micro_batch
    twice_parameters, twice_optimizer = _counted_twice(model, sections)
    return StageMemory(
        parameters=sum(fact.parameter_bytes for fact in facts) - twice_parameters,
        gradients=sum(fact.trainable_bytes for fact in facts),
        optimizer=sum(fact.optimizer_bytes for fact in facts) - twice_optimizer,
        stash=stash * incoming,
        live=sum(fact.activation_bytes for fact in facts) * micro_batch,
        messages=2 * (incoming + outgoing),
    )


def stash_bytes(model: ModelFacts, sections: range, *, micro_batch: int) -> int:
    """Bytes of one stashed input; 0 for stage 0, which reads the dataset."""
    return model.sections[sections.start - 1].boundary_bytes * micro_batch if sections.start else 0


def largest_stash(
    model: ModelFacts, sections: range, *, micro_batch: int, memory_bytes: int, wanted: int, least: int
) -> int:
    """In-flight depth that fits, at most ``wanted``; ``least`` if not even that fits."""
    room = memory_bytes - stage_memory(model, sections, micro_batch=micro_batch, stash=0).total
    each = stash_bytes(model, sections, micro_batch=micro_batch)
    fitting = room // each if each else wanted
    return max(least, min(wanted, fitting))


def _counted_twice(model: ModelFacts, sections: range) -> tuple[int, int]:
    """Parameter and optimizer bytes of tied parameters beyond their first section in the stage."""
    parameters = optimizer = 0
    for tied in model.tied:
        for index in [section for section in tied.sections if section in sections][1:]:
            fact = model.sections[index]
            parameters += tied.size_bytes
            if fact.trainable_bytes:  # its share of the section's optimizer state
                optimizer += fact.optimizer_bytes * tied.size_bytes // fact.trainable_bytes
    return parameters, optimizer
