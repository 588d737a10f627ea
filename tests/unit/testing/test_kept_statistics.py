"""Statistics of batch normalisation stay with the sums of gradients of their micro-batches, and move with them."""

import pytest
import torch
from torch import Tensor, nn

import varuna
from tests.depth import by_depth
from tests.unit.engine.models import Tokens
from tests.unit.engine.stage.test_batch_norm import sgd
from tests.unit.testing.work import CAPTURES, OnceOthers
from varuna.testing import RunResult, fail_at, run
from varuna.testing.faults import Fault

STEPS, MICRO_BATCHES = by_depth((3, 8), (4, 12))


class Normalised(nn.Module):
    """Each place of a text is normalised over texts and features, in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(16) for _ in range(4))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.tanh(norm(layer(x)))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def script() -> list[float]:
    """The loss over other data, in which running statistics show, in the middle and at the end."""
    trainer = varuna.Trainer(Normalised, Tokens(), sgd, 3 * MICRO_BATCHES, micro_batch=3, clip_grad_norm=1.0)
    return [trainer.evaluate(Tokens()).loss for step in trainer.steps(STEPS) if step.index in (2, 3)]


@pytest.fixture(scope="module")
def alone() -> RunResult:
    return run(script, captures=CAPTURES)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("stages", "faults"),
    [
        pytest.param({4: 2, 3: 3}, [OnceOthers(2, 2, "B", 3)], id="moved"),
        *(
            pytest.param(stages, faults, id=name, marks=pytest.mark.nightly)
            for name, stages, faults in (
                ("open", {4: 2, 3: 2}, [OnceOthers(3, 2, "B", 2)]),
                ("reduced", {4: 2, 3: 2}, [OnceOthers(3, 2, "reduce")]),
                (
                    "twice",
                    {5: 2, 4: 2, 3: 3},
                    [OnceOthers(1, 2, "B", 3, others=(2,)), fail_at(rank=3, step=2, phase="form")],
                ),
            )
        ),
    ],
)
def test_running_statistics_outlast_a_loss(alone: RunResult, stages: dict[int, int], faults: list[Fault]) -> None:
    outcome = run(script, workers=max(stages), stages=stages, faults=faults, captures=CAPTURES)
    assert outcome.losses == pytest.approx(alone.losses, rel=1e-5)
    [expected] = alone.returned.values()
    whole = [found for found in outcome.returned.values() if len(found) == len(expected)]
    assert len(whole) >= 2  # others wait as spares
    assert all(found == pytest.approx(expected, rel=1e-5) for found in whole)
    assert outcome.kept[1] > 0
