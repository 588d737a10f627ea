"""trainer.evaluate: the loss of other data in any plan, and nothing of it in the training."""

import math
import re
import sys
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.depth import by_depth
from tests.unit.engine.models import Dropping, SmallLanguage, Tokens, adamw
from tests.unit.engine.ranks import Setup
from tests.unit.engine.stage.test_batch_norm import Normalised, Points, sgd
from varuna.core.devices import WorkerGroups
from varuna.core.errors import ModelError, UsageError
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.data import sample_index
from varuna.data.samples import SampleSource
from varuna.engine.base.inbox import GenerationEnded
from varuna.engine.base.transport import local_store
from varuna.engine.inference.evaluate import EvaluationSums, EvaluationWork, evaluate
from varuna.engine.stage.stage import Stage
from varuna.engine.worker.session import Session
from varuna.membership.static import StaticMembership, World
from varuna.partition.evaluation import for_evaluation
from varuna.partition.initial.constructor import needed_buffers
from varuna.partition.model import PartitionedModel
from varuna.planner.choose import plan_run
from varuna.testing.threads import run_all
from varuna.trainer import Trainer

pytestmark = pytest.mark.usefixtures("shared_captures")

STEPS = by_depth(2, 3)
_evaluations: dict[int, tuple[PartitionedModel, PartitionedModel]] = {}
"""By the identity of a model, which is kept: it and its evaluation, captured once."""


def evaluation_of(setup: Setup) -> PartitionedModel:
    if id(setup.model) not in _evaluations:
        made = for_evaluation(setup.model, setup.recipe, setup.source.micro_batch(range(2)).tensors)
        _evaluations[id(setup.model)] = setup.model, made
    return _evaluations[id(setup.model)][1]


def train(
    setup: Setup, stages: int, replicas: int, validation: Any, examples: int, speeds: tuple[float, ...] = ()
) -> tuple[list[float], list[EvaluationSums]]:
    """Take two steps, with an evaluation after each: losses of the steps, and of the evaluations."""
    evaluated = evaluation_of(setup)
    buffers = setup.beginning.buffers(needed_buffers(evaluated) - needed_buffers(setup.model))
    store = local_store()
    curves: list[list[float]] = [[] for _ in range(stages * replicas)]
    found: list[list[EvaluationSums]] = [[] for _ in curves]

    def plan(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
        made = plan_run(job, workers=workers, stages=stages, micro_batch=micro_batch)
        return made.with_each_pipeline(speeds=speeds)

    def loop(rank: int, session: Session) -> None:
        for committed in session.steps():
            curves[rank].append(committed.totals.loss)
            source = SampleSource(validation, seed=0)
            sums = session.run_between_steps(
                partial(evaluate, work=EvaluationWork(committed.step, evaluated, buffers, source, examples, None)),
                "evaluates",
            )
            assert sums is not None
            found[rank].append(sums)

    sessions = [
        setup.session(StaticMembership(World(rank, len(curves), store, "127.0.0.1", 0), plan), store, STEPS)
        for rank in range(len(curves))
    ]
    run_all([partial(loop, rank, session) for rank, session in enumerate(sessions)])
    setup.finished = sessions
    assert all(curve == curves[0] for curve in curves)
    assert all(sums == found[0] for sums in found)
    return curves[0], found[0]


def eager_loss(setup: Setup, dataset: Any, examples: int) -> float:
    """The last run's model in evaluation mode on all examples at once."""
    model = setup.build().eval()
    model.load_state_dict(setup.parameters(), strict=False)
    samples = [dataset[index] for index in range(examples)]
    with torch.no_grad():
        output = model(**{key: torch.stack([sample[key] for sample in samples]) for key in samples[0]})
    return float(output)


class Validation(Tokens):
    """Other samples than those of the training."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return super().__getitem__(index + 900)


def test_dropout_is_off_every_plan_agrees_and_training_does_not_notice() -> None:
    setup = Setup(build=Dropping, dataset=Tokens(padded=True))
    validation = Validation(padded=True, size=37)
    undisturbed = [loss for loss, _ in setup.losses(1, 1, STEPS)]
    curve, alone = train(setup, 1, 1, validation, 37)
    assert curve == undisturbed
    assert alone[-1].loss == pytest.approx(eager_loss(setup, validation, 37), rel=1e-6)
    assert alone[-1].weight == sum(int((validation[i]["labels"] != -100).sum()) for i in range(37))
    deep_curve, deep = train(setup, 3, 1, validation, 37)
    assert (deep_curve, deep) == (curve, alone)
    _, wide = train(setup, 2, 2, validation, 37)
    assert [sums.loss for sums in wide] == pytest.approx([sums.loss for sums in alone], rel=1e-5)


def test_batch_normalisation_uses_its_running_statistics() -> None:
    setup = Setup(build=Normalised, dataset=Points(), optimizer=sgd, global_batch=11, micro_batch=3)
    _, alone = train(setup, 1, 1, Points(), 20)
    # one of its norms keeps no statistics, and normalises over each micro-batch even here
    model = Normalised().eval()
    model.load_state_dict({**setup.parameters(), **setup.buffers()}, strict=False)
    order = [sample_index(position, size=50, seed=0) for position in range(20)]
    parts = [[Points()[index] for index in order[first : first + 3]] for first in range(0, 20, 3)]
    with torch.no_grad():
        losses = [
            float(model(**{key: torch.stack([sample[key] for sample in part]) for key in part[0]})) * len(part)
            for part in parts
        ]
    assert alone[-1].loss == pytest.approx(sum(losses) / 20, rel=1e-6)
    _, deep = train(setup, 3, 1, Points(), 20)
    assert deep == alone


def bert() -> nn.Module:
    """So small that the dropout of its embeddings is a section: nothing is left of it in evaluation."""
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=64)
    )


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
    sizes["decoder_start_token_id"] = 0
    return T5ForConditionalGeneration(T5Config(**sizes))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=16,
            patch_size=8,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
        )
    )


def resnet() -> nn.Module:
    """With batch normalisation."""
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(
        ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic")
    )


class Sentences(Tokens):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = super().__getitem__(index)["input_ids"]
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens[0] % 2}


class Pictures(Tokens):
    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        pixels = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(index))
        return {"pixel_values": pixels, "labels": torch.tensor(index % 2)}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("build", "data"),
    [(bert, Sentences(size=12)), (t5, Tokens(size=12)), (vit, Pictures(size=12)), (resnet, Pictures(size=12))],
)
def test_public_models_with_dropout_or_batch_normalisation_evaluate_as_in_plain_pytorch(build: Any, data: Any) -> None:
    setup = Setup(build=build, dataset=data)
    _, deep = train(setup, 2, 1, data, data.size)
    model = build().eval()
    model.load_state_dict({**setup.parameters(), **setup.buffers()}, strict=False)
    samples = [data[index] for index in range(data.size)]
    with torch.no_grad():
        output = model(**{key: torch.stack([sample[key] for sample in samples]) for key in samples[0]})
    assert deep[-1].loss == pytest.approx(float(output.loss), rel=1e-5)


def test_replicas_without_a_micro_batch_take_part() -> None:
    setup = Setup(build=SmallLanguage)
    _, alone = train(setup, 1, 1, Tokens(size=1), 1)
    _, wide = train(setup, 1, 3, Tokens(size=1), 1)
    assert [sums.loss for sums in wide] == pytest.approx([sums.loss for sums in alone], rel=1e-5)


@pytest.mark.nightly
def test_a_long_evaluation_meets_in_between() -> None:
    setup = Setup(build=SmallLanguage, micro_batch=1)
    _, alone = train(setup, 1, 1, Tokens(size=40), 40)
    _, deep = train(setup, 2, 1, Tokens(size=40), 40)
    assert deep == alone
    _, unequal = train(setup, 2, 2, Tokens(size=40), 40, speeds=(1.0, 0.2))  # one replica has many more chunks
    assert [sums.loss for sums in unequal] == pytest.approx([sums.loss for sums in alone], rel=1e-5)


def trainer(**changes: Any) -> Trainer:
    given = {"model": SmallLanguage, "dataset": Tokens(), "optimizer": adamw, "global_batch": 4, "device": "cpu"}
    return Trainer(**{**given, **changes})


def test_a_script_evaluates_in_its_loop_and_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    job = trainer()
    with pytest.raises(UsageError, match=r"trainer\.evaluate\(dataset\) works inside the loop"):
        job.evaluate(Tokens())
    found = [job.evaluate(Tokens(size=10)) for step in job.steps(4) if step.index % 2]
    assert found[1].complete
    assert found[1].loss < found[0].loss
    assert job.evaluate(Tokens(size=10)).loss == found[1].loss
    with pytest.raises(UsageError, match="examples=99: the dataset has 10"):
        job.evaluate(Tokens(size=10), examples=99)


class MoreInEvaluation(SmallLanguage):
    """Evaluation uses a parameter that training does not."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = super().forward(input_ids, labels)
        return loss if self.training else loss * self.scale


@pytest.mark.nightly
def test_a_script_that_evaluates_hears_before_step_0_that_it_cannot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    job = trainer(model=MoreInEvaluation)
    for step in job.steps(2):
        if not step.index:  # this file says job.evaluate(...)
            assert re.search(r"no section has all parameters .* scale\.", " ".join(capsys.readouterr().err.split()))
    with pytest.raises(ModelError, match=r"no section has all parameters .* scale\. Evaluate this .* trainer\.export"):
        job.evaluate(Tokens(size=10))


def test_an_evaluation_that_a_morph_interrupts_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    job = trainer()
    for _ in job.steps(2):
        pass
    session = job._session
    assert session is not None
    assert session.current is not None
    session.current.inbox.abort(GenerationEnded(0))
    found = job.evaluate(Tokens(size=10))
    assert not found.complete
    assert math.isnan(found.loss)


def test_an_evaluation_that_never_begins_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*_: object, **__: object) -> None:
        raise GenerationEnded(0)

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    subject = trainer()
    for _ in subject.steps(1):
        monkeypatch.setattr(Stage, "evaluation_runners", ended)
        assert not subject.evaluate(Validation(size=8)).complete
    for thread in [each for each in threading.enumerate() if "evaluation" in each.name]:
        thread.join(5)
        assert not thread.is_alive()
