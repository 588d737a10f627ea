"""Parts of a model that training leaves: parameters that forward() does not use, saved buffers that no step writes."""

from collections.abc import Collection

from torch import Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from varuna.job.spec import JobSpec
from varuna.partition.capture.building import build_without_data
from varuna.partition.watching.fake_mode import FakeMode


def unused_values(spec: JobSpec, held: Collection[str]) -> dict[str, Tensor]:
    """Entries of the model's state dict that no section holds, as they were before step 0.

    Args:
        spec: the job.
        held: names of those that sections hold.
    """
    model = build_without_data(spec.built, FakeMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())).module
    saved = model.state_dict(keep_vars=True).keys() - held - spec.partitioned.aliases.keys()
    parameters, buffers = (
        [name for name, _ in found if name in saved] for found in (model.named_parameters(), model.named_buffers())
    )
    first = spec.beginning()
    return (first.parameters(parameters) if parameters else {}) | (first.buffers(buffers) if buffers else {})
