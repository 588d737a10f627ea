"""A step whose loss is not finite is not applied, and the run ends with the samples' names."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import varuna
from varuna.core.errors import DivergedError, VarunaError
from varuna.core.plan import Pipeline, Plan
from varuna.core.vote import VoteLayout
from varuna.engine.pipeline.divergence import check_replicas
from varuna.job.options import OnNan
from varuna.testing import FailingStore, run


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x)).square().mean()
        return result


class Rows:
    """Row 21 is damaged: far enough that steps before it are applied."""

    def __init__(self, times: int = 1000) -> None:
        self.times = times
        """it is read with its damage"""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        is_damaged = index == 21 and self.times > 0
        self.times -= is_damaged
        return {"x": torch.full((4,), math.nan if is_damaged else 0.1 * (1 + index % 7))}


def sgd(named: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.1)


def script(store: FailingStore | None = None, on_nan: OnNan = "stop") -> None:
    saved = varuna.Checkpoints(store.url, every=1) if store else None
    trainer = varuna.Trainer(Line, Rows(), sgd, 4, micro_batch=2, on_nan=on_nan, checkpoints=saved)
    for _ in trainer.steps(8):
        pass


def test_the_samples_are_named_and_the_newest_checkpoint_is_a_good_one() -> None:
    store = FailingStore()
    with pytest.raises(DivergedError, match=r"step 5 has loss nan.* dataset indices \[20, 21\]\. The step was not"):
        run(lambda: script(store), workers=4, stages=2)
    folders = sorted({name.split("/")[0] for verb, name in store.seen if verb == "create" and name.startswith("step-")})
    assert "step-00000001" <= folders[-1] <= "step-00000005"


@pytest.mark.parametrize("workers", [1, 4])
def test_a_step_that_was_not_finite_once_runs_again_and_is_the_step_of_a_machine_that_did_not_err(workers: int) -> None:
    def losses(rows: Rows) -> Sequence[float]:
        def train() -> None:
            for _ in varuna.Trainer(Line, rows, sgd, 4, micro_batch=2).steps(8):
                pass

        return run(train, workers=workers, stages=min(workers, 2)).losses

    erring = Rows(times=1)
    assert losses(erring) == pytest.approx(losses(Rows(times=0)), rel=1e-6)
    assert erring.times == 0


@pytest.mark.parametrize(
    ("stages", "odd", "rank", "raised"),
    [
        (1, (2, 3), 1, "DivergedError: step 5 has loss nan again: all 2 losses of rank 1, and no others. Its machine"),
        (1, (2, 3), 0, "LinkError: step 5 has loss nan again: all 2 losses of rank 1, and no others. It is left out"),
        (1, (2,), 1, ""),  # a sample
        (1, (1, 2, 3), 1, ""),  # a learning rate
        (1, (), 1, ""),  # a gradient
        (2, (2, 3), 1, ""),  # nobody knows which stage
    ],
)
def test_the_rank_whose_losses_alone_are_not_finite_is_to_blame(
    stages: int, odd: tuple[int, ...], rank: int, raised: str
) -> None:
    pipeline = Pipeline(replicas=3, bounds=(0, 2) if stages == 1 else (0, 1, 2), stash_limits=(1,) * stages)
    plan = Plan(micro_batch=1, global_batch=6, pipelines=(pipeline,))
    layout = VoteLayout(sections=2, micro_batches=6)
    vector = [1.0] * layout.size
    for micro_batch in odd:
        vector[layout.micro_batch(micro_batch)] = math.nan
    found = ""
    try:
        check_replicas(layout.read(vector), vector, layout=layout, plan=plan, step=5, rank=rank)
    except VarunaError as error:
        found = f"{type(error).__name__}: {error}"
    assert found.startswith(raised)
    assert bool(found) == bool(raised)


@pytest.mark.nightly
def test_a_run_that_goes_on_keeps_its_good_checkpoints() -> None:
    store = FailingStore()
    with pytest.raises(VarunaError, match=r"newest complete checkpoint is that of step [1-5]\."):
        run(lambda: script(store, "continue"), workers=2, stages=2)
    saved = {name.split("/")[0] for verb, name in store.seen if verb == "create" and name.startswith("step-")}
    assert "step-00000001" <= max(saved) <= "step-00000005"


@pytest.mark.nightly
def test_a_run_goes_on_where_that_is_asked_for() -> None:
    losses = run(lambda: script(on_nan="continue")).losses
    assert [math.isfinite(loss) for loss in losses] == [True] * 5 + [False] * 3
