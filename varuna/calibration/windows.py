"""Windows: the sections that are measured together, and the workers that measure them. Pure."""

from collections.abc import Sequence

from varuna.core.model import ModelFacts


def choose_windows(model: ModelFacts, kinds: Sequence[int], *, memory_bytes: int | None) -> tuple[range, ...]:
    """The whole model where one example of it fits into ``memory_bytes``, else stretches that show every kind once.

    A stretch grows until memory ends; one that shows nothing new is left out, and so is a stretch's end after its
    last new kind. A section that does not fit alone makes a stretch of its own, for measuring to say so.
    """
    count = len(model.sections)
    if memory_bytes is None or window_bytes(model, range(count), 1) <= memory_bytes:
        return (range(count),)
    found: list[range] = []
    seen: set[int] = set()
    start = 0
    while start < count:
        stop = start + 1
        while stop < count and window_bytes(model, range(start, stop + 1), 1) <= memory_bytes:
            stop += 1
        fresh = [section for section in range(start, stop) if kinds[section] not in seen]
        if fresh:
            # Neighbours on both sides, so that a new kind is not measured with its weights still in the caches.
            first, last = max(start, fresh[0] - 1), min(stop, fresh[-1] + 2)
            found.append(range(first, last))
            seen.update(kinds[section] for section in fresh)
        start = stop
    return tuple(found)


def window_bytes(model: ModelFacts, sections: range, micro_batch: int) -> int:
    """Bytes of parameters, gradient sums, optimizer state and one set of activations."""
    facts = [model.sections[section] for section in sections]
    state = sum(fact.parameter_bytes + fact.trainable_bytes + fact.optimizer_bytes for fact in facts)
    border = facts[0].boundary_bytes if sections.start else 0
    return state + micro_batch * (sum(fact.activation_bytes + fact.boundary_bytes for fact in facts) + 2 * border)


def sizes_to_measure(global_batch: int, micro_batch: int | None) -> tuple[int, ...]:
    """Micro-batch sizes of the sweep: powers of two within the global batch, or the user's own and its half."""
    if micro_batch is not None:
        return tuple(sorted({max(1, micro_batch // 2), micro_batch}))
    return tuple(2**power for power in range(global_batch.bit_length()) if 2**power <= global_batch)
