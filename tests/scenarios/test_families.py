"""Unmodified models of many families: captured, cut by themselves, and equal to the unsplit model."""

import logging
from typing import Any

import pytest
import torch

from tests.depth import of_depth
from tests.unit.engine.ranks import Setup, single_threaded
from tests.unit.partition.families import NAMED, Samples, masked_tokens, tokens
from tests.unit.partition.in_turn import differences
from tests.unit.partition.more_families import MORE
from varuna.data import sample_index

FAMILIES = {**NAMED, **MORE}
FAST = {"llama", "bert", "t5", "mixtral", "vit", "resnet"}
"""A decoder, an encoder, both, experts, pictures, and running statistics; unit tests capture GPT-2."""


@pytest.fixture(autouse=True)
def _no_traces_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Export writes thousands of debug records, which pytest would collect: half of the time."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)


@pytest.mark.filterwarnings("ignore:The tensor attributes")  # caches that forward() assigns, as plain attributes
@pytest.mark.parametrize("name", of_depth(FAMILIES, FAST))
def test_sections_in_turn_equal_the_unsplit_model(name: str) -> None:
    family = FAMILIES[name]
    with single_threaded():
        model, found = differences(family, batch_sizes=(2, 5, 3) if family.buffers else (2, 1, 5))
    assert found == []
    assert len(model.sections) >= family.sections
    tied = {tied.name for tied in model.facts.tied}
    assert set(family.tied) <= tied
    assert any(section.updates for section in model.sections) == family.buffers


def trained_in_one_process(job: Setup, steps: int) -> list[float]:
    """A plain loop that accumulates gradients over micro-batches, weighted by what each loss averages over."""
    torch.manual_seed(job.seed)
    model = job.build().train()
    optimizer = job.optimizer(list(model.named_parameters()))
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        positions = range(step * job.global_batch, (step + 1) * job.global_batch)
        samples = [job.dataset[sample_index(p, size=len(job.dataset), seed=job.seed)] for p in positions]
        total = 0.0
        for start in range(0, job.global_batch, job.micro_batch):
            part = samples[start : start + job.micro_batch]
            loss = model(**{key: torch.stack([sample[key] for sample in part]) for key in part[0]}).loss
            (loss * job.micro_batch / job.global_batch).backward()
            total += float(loss.detach()) * job.micro_batch / job.global_batch
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    return losses


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.05)


@pytest.mark.parametrize(
    "name", of_depth(["bert", "t5", "mixtral", "vit", "resnet", "mamba", "longformer"], {"t5", "resnet"})
)
def test_families_train_in_the_engine_as_in_one_process(name: str) -> None:
    family = {**NAMED, **MORE}[name]
    sample = tokens if family.sample is masked_tokens else family.sample
    with single_threaded():
        job = Setup(build=family.build, dataset=Samples(sample), optimizer=sgd, global_batch=8, micro_batch=2)
        expected = trained_in_one_process(job, 3)
        deep, wide = ([loss for loss, _ in job.losses(*shape, steps=3)] for shape in ((3, 1), (2, 2)))
    assert deep == pytest.approx(expected, rel=1e-5)
    assert wide == pytest.approx(expected, rel=1e-5)
