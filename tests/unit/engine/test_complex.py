"""Complex parameters train as in one process."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.unit.engine.optimizers import momentum
from tests.unit.engine.plain import distance, train_plainly
from tests.unit.engine.ranks import Setup
from varuna.checkpoint.io.section_state import from_bytes, to_bytes
from varuna.engine.worker.export import export_model
from varuna.testing.threads import run_all

LENGTH, WIDTH = 16, 8


class Spectral(nn.Module):
    """Filters in frequency space beside real layers; the first block's filter is the last block's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        shape = (LENGTH // 2 + 1, WIDTH)
        filters = [nn.Parameter(torch.randn(shape, dtype=torch.complex64) / 4) for _ in range(3)]
        self.filters = nn.ParameterList([*filters, filters[0]])
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(3)) for _ in range(4))  # an odd number before each filter
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for gain, each in zip(self.gains, self.filters, strict=True):
            mixed = torch.fft.irfft(torch.fft.rfft(x * gain.sum(), dim=1) * each, n=LENGTH, dim=1)
            x = x + torch.tanh(mixed)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.nightly
def test_complex_parameters_end_where_a_plain_loop_ends_and_survive_files(tmp_path: Path) -> None:
    setup = Setup(Spectral, optimizer=momentum, clip=None)
    parameters = train_plainly(setup, 4).parameters
    setup.losses(3, 1, 4)
    assert distance(setup.parameters(), parameters) < 2e-6
    generations = [session.current for session in setup.finished if session.current is not None]
    for generation in generations:
        for section in generation.stage.sections:
            state = generation.stage.state_of(section)
            found = from_bytes(to_bytes(state))
            assert all(torch.equal(found.tensors[name], value) for name, value in state.tensors.items())
    run_all([partial(export_model, each, setup.model, tmp_path / "m.safetensors") for each in generations])
    assert distance(load_file(tmp_path / "m.safetensors"), setup.parameters()) == 0


@pytest.mark.nightly
def test_memory_of_complex_parameters_is_counted_in_pairs() -> None:
    facts = Setup(Spectral).model.facts
    assert [tied.name for tied in facts.tied] == ["filters.0"]
    per_filter = 4 * 2 * (LENGTH // 2 + 1) * WIDTH
    assert facts.tied[0].size_bytes == per_filter
    states = sum(section.optimizer_bytes for section in facts.sections)
    parameters = sum(section.parameter_bytes for section in facts.sections)
    assert states >= 2 * parameters
