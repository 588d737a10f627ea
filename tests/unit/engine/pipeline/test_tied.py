"""Parameters that several stages share."""

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.depth import by_depth
from tests.unit.engine.late import Late
from tests.unit.engine.optimizers import momentum
from tests.unit.engine.plain import distance, reference, train_plainly, worst
from tests.unit.engine.ranks import Setup, close_sessions
from varuna.core.plan import Plan
from varuna.engine.base.transport import Group, Work
from varuna.engine.links import in_parts
from varuna.engine.pipeline.reduce import TIED_TAG


class TwoTied(nn.Module):
    """Two parameters, each tied over stages of its own: of three stages the first has one, the second the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.layers[5].weight = self.layers[2].weight
        self.head = nn.Linear(8, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.nightly
def test_exchanges_of_tied_parameters_have_the_same_numbers_on_all_stages() -> None:
    setup = Setup(TwoTied)
    _, layer = setup.model.facts.tied
    setup.adjusted = lambda plan: (
        plan if plan.stages == 1 else plan.with_each_pipeline(bounds=(0, *layer.sections, plan.sections))
    )
    deep = setup.losses(3, 1, 2)
    own = [{tied.name for tied in session.current.stage.tied} for session in setup.finished if session.current]
    assert own == [{"embed.weight"}, {"layers.2.weight"}, {"embed.weight", "layers.2.weight"}]
    assert deep == setup.losses(1, 1, 2)
    assert worst(deep, reference(setup, 2)) < 1e-5


def test_sums_of_others_are_asked_for_before_ones_own_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question that is asked later waits for all that was sent: on a slow network, as long again as the sums take."""
    asked: defaultdict[int, list[str]] = defaultdict(list)

    def heard(name: str) -> Callable[..., Work]:
        real = getattr(Group, name)

        def call(self: Group, buffer: Tensor, peer: int, tag: int) -> Work:
            if tag >= TIED_TAG:
                asked[threading.get_ident()].append(name)
            return cast(Work, real(self, buffer, peer, tag))

        return call

    for name in ("send", "receive"):
        monkeypatch.setattr(Group, name, heard(name))
    Setup(TwoTied).losses(2, 1, 1)
    assert sum(map(len, asked.values())) >= 4
    assert all(calls == ["receive", "send"] * (len(calls) // 2) for calls in asked.values())


class Wide(TwoTied):
    """Of its first tied parameter, eight parts of the smallest size."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, 8)
        self.head = nn.Linear(8, 1000, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("traffic", [None, Late()])
def test_sums_that_cross_in_many_parts_are_those_of_one_process(
    traffic: Late | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    real = Group.send

    def send(self: Group, buffer: Tensor, peer: int, tag: int) -> Work:
        if tag >= TIED_TAG:
            sizes.append(buffer.nbytes)
        return real(self, buffer, peer, tag)

    monkeypatch.setattr(Group, "send", send)
    monkeypatch.setattr(in_parts, "PART_BYTES", 4096)
    setup = Setup(Wide)
    alone = setup.losses(1, 1, 3)
    own = setup.parameters()
    if traffic is not None:
        setup.traffic = traffic
    assert setup.losses(3, 1, 3) == alone
    assert distance(setup.parameters(), own) == 0
    assert sizes.count(4096) >= 7 * 2 * 3
    assert max(sizes) == 4096


BLOCKS = 6
_WIDTH = 8


@dataclass(frozen=True)
class Pattern:
    """The parts that blocks share: equal numbers are the same thing."""

    modules: tuple[int, ...]
    """by block: its linear module"""
    biases: tuple[int, ...]
    """by linear module: whose bias it has"""
    leaves: tuple[int, ...]
    """by block: the bare parameter that it is scaled with"""
    tied_head: bool
    frozen: int
    """bit n: the n-th parameter is not trained"""


class Sharing(nn.Module):
    """A small language model with shared parts."""

    def __init__(self, pattern: Pattern) -> None:
        super().__init__()
        self.order = pattern.leaves
        self.embed = nn.Embedding(64, _WIDTH)
        linears = [nn.Linear(_WIDTH, _WIDTH) for _ in range(BLOCKS)]
        for linear, other in zip(linears, pattern.biases, strict=True):
            linear.bias = linears[other].bias
        self.blocks = nn.ModuleList(linears[number] for number in pattern.modules)
        used = sorted(set(pattern.leaves))
        self.leaves = nn.ParameterDict({str(number): nn.Parameter(torch.randn(_WIDTH)) for number in used})
        self.head = nn.Linear(_WIDTH, 64, bias=False)
        if pattern.tied_head:
            self.head.weight = self.embed.weight
        for number, parameter in enumerate(self.parameters()):
            parameter.requires_grad_(not pattern.frozen >> number & 1)
        self.leaves[str(used[0])].requires_grad_()  # something is trained

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block, leaf in zip(self.blocks, self.order, strict=True):
            x = x + torch.tanh(block(x)) * self.leaves[str(leaf)]
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


_NUMBERS = st.lists(st.integers(0, BLOCKS - 1), min_size=BLOCKS, max_size=BLOCKS).map(tuple)
PATTERNS = st.builds(
    Pattern,
    modules=_NUMBERS,
    biases=_NUMBERS,
    leaves=_NUMBERS,
    tied_head=st.booleans(),
    frozen=st.just(0) | st.integers(0, (1 << 10) - 1),
)
Grid = tuple[int, int, int, str, bool]
"""P, D, where stages are cut, the policy, and whether replicas share the optimizer's state out"""
POLICIES = st.sampled_from(["varuna", "adaptive"])
GRIDS = st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(0, 1 << 30), POLICIES, st.booleans())
_STEPS = 2


@settings(max_examples=by_depth(1, 5), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(pattern=PATTERNS, grids=st.lists(GRIDS, min_size=2, max_size=2))
def test_whatever_is_shared_any_plan_trains_as_one_process(pattern: Pattern, grids: list[Grid]) -> None:
    check_sharing(pattern, grids)


def check_sharing(pattern: Pattern, grids: list[Grid]) -> None:
    """Losses and parameters of a plain loop; and with one replica, to the bit, those of one process."""
    setup = Setup(partial(Sharing, pattern), optimizer=momentum, clip=None, global_batch=6, micro_batch=1)
    plain = train_plainly(setup, _STEPS)
    alone = setup.losses(1, 1, _STEPS)
    own = setup.parameters()
    for stages, replicas, seed, policy, share in grids:
        run = replace(setup, policy=policy, share=share, adjusted=partial(_cut, seed))
        found = run.losses(stages, replicas, _STEPS)
        assert max(abs(loss / other - 1) for (loss, _), (other, _) in zip(found, plain.curve, strict=True)) < 2e-6
        assert distance(run.parameters(), plain.parameters) < 5e-6
        if replicas == 1:
            assert found == alone
            assert distance(run.parameters(), own) == 0
        close_sessions()


def _cut(seed: int, plan: Plan) -> Plan:
    """The plan with its stages cut anywhere."""
    generator = torch.Generator().manual_seed(seed)
    cuts = 1 + torch.randperm(plan.sections - 1, generator=generator)[: plan.stages - 1]
    return plan.with_each_pipeline(bounds=(0, *sorted(cuts.tolist()), plan.sections), kept=())
