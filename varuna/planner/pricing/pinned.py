"""Host memory that a stage on a GPU keeps pinned, whatever is in flight."""

from varuna.core.devices import STAGING_BYTES
from varuna.planner.pricing.profile import Profile


def pinned_bytes(profile: Profile, span: range, replicas: int) -> int:
    """Bytes for a checkpoint, for the largest section's sums, and for parts that are on their way to other ranks.

    Of a checkpoint, each of ``replicas`` copies what it writes, and what it writes if another one is lost.
    """
    saved_bytes = profile.state_bytes.over(span) * min(1.0, 2 / replicas)
    summed_bytes = profile.most_gradient_bytes.over(span.start, span.stop) if replicas > 1 else 0
    return int(saved_bytes + summed_bytes) + STAGING_BYTES
