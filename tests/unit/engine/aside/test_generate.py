"""trainer.generate: texts as transformers' own generate continues them, in any plan."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.engine.ranks import (
    Setup,
    SmallLanguage,
    Tokens,
    adamw,
    run_all,
    single_threaded,
    tiny_gpt2,
    tiny_llama,
)
from varuna.core.errors import ModelError, UsageError
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.engine.aside.generate import Choice, Continuation, generate
from varuna.engine.base.inbox import GenerationEnded
from varuna.engine.base.transport import local_store
from varuna.engine.worker.session import Session
from varuna.membership.static import StaticMembership, World
from varuna.partition.evaluation import for_generation
from varuna.partition.initial.constructor import needed_buffers
from varuna.partition.model import PartitionedModel
from varuna.planner.choose import plan_run
from varuna.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [[5, 9, 2], [7], [11, 3, 40, 41, 1, 8], [60, 2]]
NEW = 8
GREEDY = Choice()


@pytest.fixture
def one_thread() -> Iterator[None]:
    with single_threaded():
        yield


class Looking(nn.Module):
    """Logits with a loss where there are targets; every token sees all others, unless it is causal."""

    causal = False

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 64)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.embed(idx)
        for layer in self.layers:
            x = x + torch.tanh(layer(x.cumsum(1) if self.causal else x.mean(1, keepdim=True)))
        if targets is None:  # as nanoGPT does
            return self.head(x[:, [-1]]), None
        logits = self.head(x)
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class HandWritten(Looking):
    causal = True


def second(output: Any, _: Any) -> Tensor:
    """The loss in what the module returns."""
    loss: Tensor = output[1]
    return loss


class Pairs(Tokens):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        return {"idx": sample["input_ids"], "targets": sample["labels"]}


def as_transformers_does(module: Any, parameters: dict[str, Tensor], **options: Any) -> list[list[int]]:
    module = module.eval()
    module.load_state_dict(parameters, strict=False)
    made = []
    for prompt in PROMPTS:
        made.append(module.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW, **options)[0].tolist())
    return made


_in_text: dict[int, tuple[PartitionedModel, PartitionedModel]] = {}
"""By the identity of a model, which is kept: it, and what generates."""


def in_text(setup: Setup) -> PartitionedModel:
    if id(setup.model) not in _in_text:
        made = for_generation(setup.model, setup.recipe, ["input_ids"], 16)
        _in_text[id(setup.model)] = setup.model, made
    return _in_text[id(setup.model)][1]


def texts(setup: Setup, stages: int, replicas: int, choice: Choice = GREEDY, prompts: Any = None) -> list[list[int]]:
    """After one step, on every rank the same."""
    model = in_text(setup)
    buffers = setup.beginning.buffers(needed_buffers(model) - needed_buffers(setup.model))
    store, size = local_store(), stages * replicas
    found: list[Any] = [None] * size

    def plan(job: JobFacts, workers: int, micro_batch: int | None) -> Plan:
        return plan_run(job, workers=workers, stages=stages, micro_batch=micro_batch)

    def loop(rank: int, session: Session) -> None:
        given = PROMPTS if prompts is None else prompts(rank)
        for _ in session.steps():
            work = Continuation(1, model, buffers, ["input_ids"], 16, given, NEW, choice, None)
            found[rank] = session.aside(partial(generate, work=work), "generates")

    setup.finished = [
        setup.session(StaticMembership(World(rank, size, store, "127.0.0.1", 0), plan), store, 1)
        for rank in range(size)
    ]
    run_all([partial(loop, rank, session) for rank, session in enumerate(setup.finished)])
    first = found[0]
    assert first is not None
    assert all(each == first for each in found)
    return list(first)


@pytest.mark.parametrize(("build", "plan"), [(tiny_gpt2, (2, 2)), (tiny_llama, (3, 1))])
def test_every_plan_continues_texts_as_transformers_does(build: Callable[[], nn.Module], plan: tuple[int, int]) -> None:
    setup = Setup(build=build)
    alone = texts(setup, 1, 1)
    assert [len(text) for text in alone] == [len(prompt) + NEW for prompt in PROMPTS]
    assert alone == as_transformers_does(build(), setup.parameters(), pad_token_id=0, eos_token_id=None)
    assert texts(setup, *plan) == alone


def test_drawn_texts_depend_on_the_seed_not_on_the_plan() -> None:
    setup = Setup(build=tiny_gpt2)
    drawn = texts(setup, 1, 1, Choice(temperature=1.5, top_k=20, seed=3))
    assert drawn != texts(setup, 1, 1)
    assert texts(setup, 2, 2, Choice(temperature=1.5, top_k=20, seed=3)) == drawn
    assert texts(setup, 1, 1, Choice(temperature=1.5, top_k=20, seed=4)) != drawn


def test_workers_that_ask_for_different_texts_are_told() -> None:
    with pytest.raises(UsageError, match="different prompts or options on different workers"):
        texts(Setup(build=tiny_gpt2), 2, 1, prompts=lambda rank: [[1, 2, rank]])


def test_choices_follow_the_probabilities() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0])
    assert Choice().of(logits, 0) == 1
    few = [Choice(1.0, 2, 0).of(logits, key) for key in range(400)]
    assert set(few) == {1, 3}
    assert few.count(1) / 400 == pytest.approx(1 / (1 + torch.e**-1), abs=0.06)
    assert {Choice(3.0, None, 0).of(logits, key) for key in range(100)} == {0, 1, 2, 3}


def test_a_script_generates_with_a_module_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    trainer = Trainer(HandWritten, Pairs(), adamw, 4, loss=second, device="cpu", checkpoints=None)
    with pytest.raises(UsageError, match="inside the loop"):
        trainer.generate(PROMPTS, NEW)
    for _ in trainer.steps(1):
        pass
    found = trainer.generate(torch.tensor([[5, 9], [7, 7]]), NEW)
    assert found is not None
    model, session = HandWritten().eval(), trainer._session
    assert session is not None
    assert session.current is not None
    model.load_state_dict({name: value.detach() for name, value in session.current.stage.parameters.items()})
    text = [5, 9]
    for _ in range(NEW):
        text.append(int(model(torch.tensor([text]))[0][0, -1].argmax()))
    assert found[0] == text
    [ended, other] = trainer.generate([[5, 9], [7, 7]], NEW, eos_token_id=text[4]) or []
    assert (ended, len(other)) == (text[: text.index(text[4], 2) + 1], 2 + NEW)
    assert trainer.generate([[5, 9]], 1) == [text[:3]]
    for prompts, options, said in [
        (["Once"], {}, "token ids, not text"),
        ([5, 9], {}, "a list of prompts, each a list"),
        ([[]], {}, "at least one token"),
        ([[1] * 10], {}, "make 18 tokens, but the model is trained on 16"),
        ([[1]], {"temperature": -1}, "must be above 0"),
        ([[1]], {"top_k": 5}, "needs temperature="),
    ]:
        with pytest.raises(UsageError, match=said):
            trainer.generate(prompts, NEW, **options)  # type: ignore[arg-type]
    session.current.inbox.abort(GenerationEnded(0))
    assert trainer.generate([[5, 9]], NEW) is None


def test_what_cannot_generate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    looking = Trainer(Looking, Pairs(), adamw, 4, loss=second, device="cpu")
    for _ in looking.steps(1):
        pass
    for new in (1, NEW):
        with pytest.raises(ModelError, match="no token sees the ones after it"):
            looking.generate(PROMPTS, new)
    silent = Trainer(SmallLanguage, Tokens(), adamw, 4, device="cpu")
    steps = silent.steps(1)
    with pytest.raises(ModelError, match=r"returns logits of the shape .* but got a tensor of shape \(\)"):
        next(steps)  # before step 0, since this file calls silent.generate(...)
