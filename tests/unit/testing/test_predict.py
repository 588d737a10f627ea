"""trainer.predict: what the model says of other data, in the data's order, in any plan."""

import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.engine.models import Tokens, adamw
from tests.unit.engine.ranks import Setup
from varuna.core.devices import WorkerGroups
from varuna.core.errors import ModelError
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.data.samples import SampleSource
from varuna.engine.base.inbox import GenerationEnded
from varuna.engine.base.transport import local_store
from varuna.engine.inference.evaluate import EvaluationWork
from varuna.engine.inference.predict import predict
from varuna.engine.worker.session import Session
from varuna.membership.static import StaticMembership, World
from varuna.partition.capture.outputs import outputs_of
from varuna.partition.evaluation import for_prediction
from varuna.partition.model import PartitionedModel
from varuna.planner.choose import plan_run
from varuna.testing.threads import run_all
from varuna.trainer import Trainer

pytestmark = pytest.mark.usefixtures("shared_captures")

EXAMPLES = 37
"""Not a multiple of any micro-batch."""


class Classifier(nn.Module):
    """Logits, and a loss if there are labels, as Hugging Face's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(4))
        self.head = nn.Linear(8, 5)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten() % 5), "logits": logits}


class Unlabelled(Tokens):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": super().__getitem__(index + 900)["input_ids"]}


OTHER = Unlabelled(size=EXAMPLES)


def plain(parameters: dict[str, Tensor]) -> Tensor:
    model = Classifier().eval()
    model.load_state_dict(parameters)
    with torch.no_grad():
        found: Tensor = model(torch.stack([OTHER[index]["input_ids"] for index in range(EXAMPLES)]))["logits"]
    return found


def predictions(
    setup: Setup, model: PartitionedModel, stages: int, replicas: int, speeds: tuple[float, ...] = ()
) -> dict[str, Tensor]:
    """After one step, on every rank the same."""
    store, size = local_store(), stages * replicas
    found: list[dict[str, Tensor] | None] = [None] * size

    def plan(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
        made = plan_run(job, workers=workers, stages=stages, micro_batch=micro_batch)
        return made.with_each_pipeline(speeds=speeds)

    def loop(rank: int, session: Session) -> None:
        for _ in session.steps():
            source = SampleSource(OTHER, seed=0, shuffles=False)
            found[rank] = session.run_between_steps(
                partial(predict, work=EvaluationWork(1, model, {}, source, EXAMPLES, None)), "predicts"
            )

    setup.finished = [
        setup.session(StaticMembership(World(rank, size, store, "127.0.0.1", 0), plan), store, 1)
        for rank in range(size)
    ]
    run_all([partial(loop, rank, session) for rank, session in enumerate(setup.finished)])
    first = found[0]
    assert first is not None
    assert all(each is not None and each["logits"].equal(first["logits"]) for each in found)
    return first


def test_every_plan_predicts_what_plain_pytorch_does_in_the_order_of_the_dataset() -> None:
    setup = Setup(build=Classifier)
    batch = {"input_ids": torch.stack([OTHER[index]["input_ids"] for index in range(2)])}
    model = for_prediction(setup.model, setup.recipe, batch, outputs_of)
    alone = predictions(setup, model, 1, 1)
    assert list(alone) == ["logits"]
    assert alone["logits"].shape == (EXAMPLES, 16, 5)
    torch.testing.assert_close(alone["logits"], plain(setup.parameters()))
    assert predictions(setup, model, 3, 1)["logits"].equal(alone["logits"])
    torch.testing.assert_close(predictions(setup, model, 2, 2)["logits"], plain(setup.parameters()))
    torch.testing.assert_close(predictions(setup, model, 1, 2, (1.0, 0.2))["logits"], plain(setup.parameters()))


@pytest.mark.nightly
def test_a_script_predicts_what_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def words(output: Any, batch: Any) -> dict[str, Tensor]:
        return {"words": output["logits"].argmax(-1), "first": batch["input_ids"][:, 0]}

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    trainer = Trainer(Classifier, Tokens(), adamw, 4, device="cpu")
    for _ in trainer.steps(1):
        with pytest.raises(ModelError, match=r"a row for each example, but got a tensor of shape \(\)"):
            trainer.predict(OTHER, lambda output, _: output["logits"].sum())
        found = trainer.predict(OTHER, words, examples=3)
        assert found is not None
        assert found["first"].tolist() == [int(OTHER[index]["input_ids"][0]) for index in range(3)]
        assert (found["words"].dtype, found["words"].shape) == (torch.int64, (3, 16))
        whole = trainer.predict(OTHER)
        assert whole is not None
        assert whole["logits"][:3].argmax(-1).equal(found["words"])
    session = trainer._session
    assert session is not None
    assert session.current is not None
    session.current.inbox.abort(GenerationEnded(0))
    assert trainer.predict(OTHER) is None


def test_an_output_that_reads_other_values_is_another_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    bound = {"least": 0.0}
    trainer = Trainer(Classifier, Tokens(), adamw, 4, device="cpu")

    def above(output: Any, _: Any) -> Any:
        return (output["logits"] > bound["least"]).float()

    for _ in trainer.steps(1):
        logits, first = trainer.predict(OTHER, examples=2), trainer.predict(OTHER, above, examples=2)
        bound["least"] = 0.3
        second = trainer.predict(OTHER, above, examples=2)
    assert logits is not None
    assert first is not None
    assert second is not None
    assert [next(iter(each.values())).sum() for each in (first, second)] == [
        (logits["logits"] > least).sum() for least in (0.0, 0.3)
    ]
