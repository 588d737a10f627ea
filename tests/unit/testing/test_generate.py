"""trainer.generate: texts as transformers' own generate continues them, in any plan."""

import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.depth import by_depth
from tests.unit.engine.models import SmallLanguage, Tokens, adamw, tiny_gpt2, tiny_llama
from tests.unit.engine.ranks import Setup
from varuna.core.devices import WorkerGroups
from varuna.core.errors import DivergedError, ModelError, UsageError
from varuna.core.model import JobFacts
from varuna.core.plan import Plan
from varuna.engine.base.inbox import GenerationEnded
from varuna.engine.base.transport import local_store
from varuna.engine.inference.generate import Choice, Continuation, LastLogits, generate
from varuna.engine.worker.session import Session
from varuna.membership.static import StaticMembership, World
from varuna.partition.evaluation import for_generation
from varuna.partition.initial.constructor import needed_buffers
from varuna.partition.model import PartitionedModel
from varuna.planner.choose import plan_run
from varuna.testing.threads import run_all
from varuna.trainer import Trainer

pytestmark = pytest.mark.usefixtures("shared_captures")

PROMPTS = [[5, 9, 2], [7], [11, 3, 40, 41, 1, 8], [60, 2]]
NEW = 6
GREEDY = Choice()
DRAWN, OTHERWISE = (Choice(temperature=1.5, top_k=20, seed=seed) for seed in (3, 4))


class Causal(SmallLanguage):
    """Logits, and a loss if there are labels; every token sees those before it."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x.cumsum(1)))
        logits = self.head(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Looking(nn.Module):
    """Logits with a loss where there are targets; every token sees all others, unless it is causal."""

    causal = False

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8)])
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


def as_transformers_does(module: Any) -> list[list[int]]:
    options = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": None}
    return [module.generate(torch.tensor([prompt]), **options)[0].tolist() for prompt in PROMPTS]


def as_a_loop_does(logits_of: Callable[[Tensor], Tensor], prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    made = [list(prompt) for prompt in prompts]
    for text in made:
        for _ in range(NEW):
            text.append(int(logits_of(torch.tensor([text]))[0, -1].argmax()))
    return made


def trained(module: nn.Module, parameters: dict[str, Tensor]) -> Any:
    module.load_state_dict(parameters, strict=False)
    return module.eval()


@cache
def in_text(build: Callable[[], nn.Module]) -> PartitionedModel:
    setup = Setup(build=build)
    return for_generation(setup.model, setup.recipe, ["input_ids"], 16)


def texts(setup: Setup, plans: list[tuple[int, int]], *choices: Choice, told: Any = None) -> list[Any]:
    """Of each plan, after one step, the texts of each choice, on every rank the same.

    ``told``: prompts of each rank for a call before these, which is refused.
    """
    model = in_text(setup.build)
    buffers = setup.beginning.buffers(needed_buffers(model) - needed_buffers(setup.model))
    return [_texts(setup, model, buffers, *plan, choices or (GREEDY,), told) for plan in plans]


def _texts(
    setup: Setup,
    model: PartitionedModel,
    buffers: dict[str, Tensor],
    stages: int,
    replicas: int,
    choices: tuple[Choice, ...],
    told: Callable[[int], list[list[int]]] | None,
) -> list[list[list[int]]]:
    store, size = local_store(), stages * replicas
    found: list[list[Any]] = [[] for _ in range(size)]

    def plan(job: JobFacts, workers: WorkerGroups, micro_batch: int | None) -> Plan:
        return plan_run(job, workers=workers, stages=stages, micro_batch=micro_batch)

    def loop(rank: int, session: Session) -> None:
        for _ in session.steps():
            if told is not None:
                work = Continuation(0, model, buffers, ["input_ids"], 16, told(rank), NEW, GREEDY, None)
                with pytest.raises(UsageError, match="different prompts or options on different workers"):
                    session.run_between_steps(partial(generate, work=work), "generates")
            for number, choice in enumerate(choices, 1):
                work = Continuation(number, model, buffers, ["input_ids"], 16, PROMPTS, NEW, choice, None)
                found[rank].append(session.run_between_steps(partial(generate, work=work), "generates"))

    setup.finished = [
        setup.session(StaticMembership(World(rank, size, store, "127.0.0.1", 0), plan), store, 1)
        for rank in range(size)
    ]
    run_all([partial(loop, rank, session) for rank, session in enumerate(setup.finished)])
    assert None not in found[0]
    assert all(each == found[0] for each in found)
    return found[0]


def short_gpt2() -> nn.Module:
    return tiny_gpt2(layers=1)


def short_llama() -> nn.Module:
    return tiny_llama(layers=1)


@pytest.mark.nightly
@pytest.mark.parametrize(("build", "plan"), [(short_gpt2, (2, 2)), (short_llama, (3, 1))])
def test_texts_are_continued_as_transformers_does(build: Callable[[], nn.Module], plan: tuple[int, int]) -> None:
    setup = Setup(build=build)
    [[found]] = texts(setup, [plan])
    assert found == as_transformers_does(trained(build(), setup.parameters()))


def test_greedy_and_drawn_texts_are_the_same_in_every_plan() -> None:
    setup = Setup(build=Causal)
    alone, *others = texts(setup, by_depth([(1, 1), (2, 2)], [(1, 1), (2, 2), (3, 1)]), GREEDY, DRAWN, OTHERWISE)
    assert others == [alone] * len(others)
    model = trained(Causal(), setup.parameters())
    assert alone[0] == as_a_loop_does(lambda tokens: model(tokens)["logits"])
    assert len({str(each) for each in alone}) == len(alone)  # drawn texts depend on the seed


def test_workers_that_ask_for_different_texts_are_told_and_may_ask_again() -> None:
    setup = Setup(build=Causal)
    [[again]] = texts(setup, [(2, 1)], told=lambda rank: PROMPTS[: 1 + rank])
    model = trained(Causal(), setup.parameters())
    assert again == as_a_loop_does(lambda tokens: model(tokens)["logits"])


def test_choices_follow_the_probabilities() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0])
    assert Choice().of(logits, 0) == 1
    few = [Choice(1.0, 2, 0).of(logits, key) for key in range(400)]
    assert set(few) == {1, 3}
    assert few.count(1) / 400 == pytest.approx(1 / (1 + torch.e**-1), abs=0.06)
    assert {Choice(3.0, None, 0).of(logits, key) for key in range(100)} == {0, 1, 2, 3}
    assert Choice(1e-310, None, 0).of(logits, 0) == 1
    excluded = torch.tensor([-torch.inf, 3.0, -torch.inf, 3.0])
    assert {Choice(1.0, 3, 0).of(excluded, key) for key in range(50)} == {1, 3}


def test_words_that_a_model_excludes_hide_no_look_ahead() -> None:
    said = LastLogits(1, torch.tensor([1.0, -torch.inf, 2.0]))
    again = torch.tensor([[0.0, 0.0, 0.0], [1.0, -torch.inf, 2.0]])
    assert not said.differs(again)
    assert said.differs(again + torch.tensor([0.0, 0.0, 0.1]))


@pytest.mark.nightly
def test_a_script_generates_with_a_module_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    trainer = Trainer(HandWritten, Pairs(), adamw, 4, loss=second, device="cpu", checkpoints=None)
    with pytest.raises(UsageError, match="inside the loop"):
        trainer.generate(PROMPTS, NEW)
    for _ in trainer.steps(1):
        pass
    found = trainer.generate(torch.tensor([[5, 9], [7, 7]]), NEW)
    assert found is not None
    session = trainer._session
    assert session is not None
    assert session.current is not None
    model = trained(HandWritten(), dict(session.current.stage.parameters))
    assert found == as_a_loop_does(lambda tokens: model(tokens)[0], [[5, 9], [7, 7]])
    text = found[0]
    [ended, other] = trainer.generate([[5, 9], [7, 7]], NEW, eos_token_id=text[4]) or []
    assert (ended, len(other)) == (text[: text.index(text[4], 2) + 1], 2 + NEW)
    assert trainer.generate([[5, 9]], 1) == [text[:3]]
    for prompts, options, said in [
        (["Once"], {}, "token ids, not text"),
        ([5, 9], {}, "a list of prompts, each a list"),
        ([[]], {}, "at least one token"),
        ([[1] * 12], {}, "make 18 tokens, but the model is trained on 16"),
        ([[1]], {"temperature": -1}, "must be above 0"),
        ([[1]], {"top_k": 5}, "needs temperature="),
        ([[1], [2, 64]], {}, r"prompts\[1\] has the token 64, but token ids of this model are from 0 to 63"),
        ([[-1]], {}, "has the token -1"),
        ([[1 << 70]], {}, "from 0 to 63"),
        ([[1]], {"eos_token_id": [0, 1]}, r"eos_token_id=\[0, 1\] must be a whole number"),
    ]:
        with pytest.raises(UsageError, match=said):
            trainer.generate(prompts, NEW, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        session.current.stage.parameters["head.bias"].fill_(torch.nan)
    with pytest.raises(DivergedError, match="logits that are not finite"):
        trainer.generate([[5, 9]], NEW)
    session.current.inbox.abort(GenerationEnded(0))
    assert trainer.generate([[5, 9]], NEW) is None


@pytest.mark.nightly
def test_what_cannot_generate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    looking = Trainer(Looking, Pairs(), adamw, 4, loss=second, device="cpu")
    for _ in looking.steps(1):
        pass
    for new in (1, NEW):
        with pytest.raises(ModelError, match="no token sees the ones after it"):
            looking.generate(PROMPTS, new)


def test_another_trainers_text_keeps_no_trainer_of_that_name_from_training(capsys: pytest.CaptureFixture[str]) -> None:
    """This file calls ``trainer.generate(...)``, and this trainer's model has no logits: it is refused when it does."""
    trainer = Trainer(SmallLanguage, Tokens(), adamw, 4, device="cpu")
    losses = [step.loss for step in trainer.steps(1)]
    assert len(losses) == 1
    assert "warning: trainer.generate(...) will be refused where the script calls it" in capsys.readouterr().err
    with pytest.raises(ModelError, match=r"returns logits of the shape .* but got a tensor of shape \(\)"):
        trainer.generate(PROMPTS, NEW)
