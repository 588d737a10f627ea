"""A direct call reaches the same kernels as the operator in whose place it stands, with the same arguments."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tests.unit.engine.models import SmallLanguage, Tokens, tiny_llama
from tests.unit.engine.ranks import Setup
from varuna.engine.graphs.direct_calls import DIRECT, direct
from varuna.engine.graphs.run_once import kind_of
from varuna.engine.graphs.user_place import note_place

aten: Any = torch.ops.aten
CPU = torch.device("cpu")


class Reached(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every kernel with what it is given: of tensors their kinds."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_map(lambda value: kind_of(value) if isinstance(value, Tensor) else value, (args, kwargs or {}))
        self.calls.append((str(func), repr(given)))
        return func(*args, **(kwargs or {}))


x, y, square, wide = torch.rand(2, 4, 8), torch.rand(2, 4, 8), torch.rand(8, 8), torch.rand(2, 2, 4, 8)
ARGUMENTS: dict[Any, list[tuple[Any, ...]]] = {
    aten.add.Tensor: [(x, y), (x, 2), (x, 0.5), (x, torch.tensor(2.0))],
    aten.sub.Tensor: [(x, y), (x, 2)],
    aten.mul.Tensor: [(x, y), (x, 2), (torch.arange(4), 0.5)],
    aten.div.Tensor: [(x, y), (torch.arange(4), 2)],
    aten.pow.Tensor_Scalar: [(x, 2), (x, 0.5), (torch.arange(4), 2)],
    aten.gelu.default: [(x,)],
    aten.mean.dim: [(x, [-1], True), (x, [0, 1])],
    aten.matmul.default: [(x, square), (wide, wide.mT)],
    aten.bmm.default: [(x, y.mT)],
    aten.addmm.default: [(torch.ones(8), square, square)],
    aten.linear.default: [(x, square), (x, square, torch.ones(8))],
    aten.embedding.default: [(square, torch.tensor([1, 2])), (square, torch.tensor([1, 2]), 0, False, False)],
    aten.layer_norm.default: [(x, [8]), (x, [8], torch.ones(8), torch.zeros(8), 1e-6, False)],
    aten.scaled_dot_product_attention.default: [(wide, wide, wide), (wide, wide, wide, None, 0.0, True)],
    aten.dropout.default: [(x, 0.5, True), (x, 0.5, False)],
    aten.cat.default: [([x, y],), ([x, y], -1)],
    aten.transpose.int: [(x, 1, 2)],
    aten.permute.default: [(x, [2, 0, 1])],
    aten.unsqueeze.default: [(x, 1)],
    aten.select.int: [(x, 1, 3)],
    aten.reshape.default: [(x, [2, -1]), (x.mT, [2, 32])],
    aten.view.default: [(x, [2, 4, 2, 4])],
    aten.expand.default: [(x, [3, 2, 4, 8])],
    aten.contiguous.default: [(x,), (x.mT,)],
    aten.to.dtype: [(x, torch.float64), (x, torch.float32)],
}
NAMED: dict[Any, dict[str, Any]] = {
    aten.add.Tensor: {"alpha": 2},
    aten.gelu.default: {"approximate": "tanh"},
    aten.mean.dim: {"dtype": torch.float64},
    aten.div.Tensor: {},
    aten.scaled_dot_product_attention.default: {"scale": 0.25, "is_causal": True},
}


def reached(call: Callable[[], Any]) -> tuple[list[tuple[str, str]], Any]:
    torch.manual_seed(0)
    with Reached() as mode:
        made = call()
    return mode.calls, made


@pytest.mark.parametrize("operator", DIRECT, ids=str)
def test_a_direct_call_reaches_the_kernels_of_its_operator(operator: Any) -> None:
    found = DIRECT[operator]
    for named in ({}, NAMED.get(operator, {})):
        for arguments in ARGUMENTS.get(operator, [(x,)]):
            if len(arguments) > found.most or (named and len(arguments) > 3):
                continue

            def replaced(arguments: Any = arguments, named: Any = named) -> Any:
                if isinstance(found.call, str):
                    return getattr(arguments[0], found.call)(*arguments[1:], **named)
                return found.call(*arguments, **named)

            one, expected = reached(lambda arguments=arguments, named=named: operator(*arguments, **named))  # type: ignore[misc]
            other, made = reached(replaced)
            assert one == other
            assert made.dtype is expected.dtype
            assert made.stride() == expected.stride()
            assert torch.equal(made, expected)


@pytest.mark.parametrize("build", [SmallLanguage, tiny_llama])
def test_most_calls_of_a_section_are_direct(build: Callable[[], nn.Module]) -> None:
    model = Setup(build=build, dataset=Tokens(padded=True)).model
    before = sum(node.op == "call_function" for section in model.sections for node in section.module.graph.nodes)
    left = [
        node.target
        for section in model.sections
        for node in direct(section.module).graph.nodes
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload)
    ]
    assert len(left) < before / 3
    assert not DIRECT.keys() & set(left)
    assert all(direct(section.module) is direct(section.module) for section in model.sections)


class Breaking(nn.Module):
    """Its matrices do not fit batches of another width."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        doubled = x + x
        return self.layer(doubled).mean()  # type: ignore[no-any-return]  # this line is named


def test_an_error_in_a_direct_call_names_the_users_line() -> None:
    class Rows:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            return {"x": torch.ones(8)}

    [section] = Setup(build=Breaking, dataset=Rows()).model.sections
    module = direct(section.module)
    _, *parameters = [node for node in module.graph.nodes if node.op == "placeholder"]
    with pytest.raises(RuntimeError) as raised:
        module.forward(torch.ones(2, 5), *(torch.ones(8, 8) for _ in parameters))
    note_place(raised.value, section, module)
    line = Breaking.forward.__code__.co_firstlineno + 2
    assert f"{__file__}:{line}" in raised.value.__notes__[0]
