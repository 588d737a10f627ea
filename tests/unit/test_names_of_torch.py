"""Names of torch that are private, or that a capture replaces: what a new torch breaks is named here.

Each test says which name is meant. All other tests then need not be read to see why a model cannot be captured.
"""

import ast
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from varuna.partition.watching.torch_versions import followed_numbers, known_sizes

ROOT = Path(__file__).parents[2]

REPLACED = {
    "torch.autograd.graph._engine_run_backward": "t_outputs",
    "torch.compiler.is_compiling": "",
    "torch.export._trace": "",
    "torch.fx.experimental.proxy_tensor._AttrProxy": "",
    "torch.fx.experimental.proxy_tensor.get_proxy_mode": "",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv._set_replacement": "self a tgt",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.evaluate_expr": "self orig_expr hint fx_node size_oblivious",
    "torch.fx.experimental.symbolic_shapes.ShapeEnv.guard_or_defer_runtime_assert": "self orig_expr msg",
    "torch.fx.proxy.CapturedTraceback.extract": "",
    "torch.fx.proxy.TracerBase._filter_traceback_frames": "self",
    "torch.nn.Module._apply": "self fn",
    "torch.nn.Module._call_impl": "self",
    "torch.nn.init._no_grad_trunc_normal_": "tensor mean std a b",
    "torch._subclasses.fake_tensor.FakeTensorMode.dispatch": "self func types args kwargs",
    "torch._subclasses.fake_tensor.FakeTensorMode.from_tensor": "self tensor",
}
"""Names that a capture replaces or calls, whose first parameters must be these."""


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


def _node() -> Any:
    doubled: Any = _Doubled.apply
    return doubled(torch.ones(1, requires_grad=True)).grad_fn


def _gloo_options() -> Any:
    gloo: Any = torch.distributed.ProcessGroupGloo
    return gloo._Options()


ATTRIBUTES: dict[str, Callable[[], object]] = {
    "_assert_scalar": lambda: torch.ops.aten,
    "_backward_hooks": nn.Module,
    "_backward_pre_hooks": nn.Module,
    "_cdata": lambda: torch.ones(1).untyped_storage(),
    "_check_input_dim": lambda: nn.BatchNorm1d(1),
    "_ctc_loss": lambda: torch.ops.aten,
    "_ctc_loss_backward": lambda: torch.ops.aten,
    "_engine_run_backward": lambda: torch.autograd,
    "_flat_weights": lambda: nn.LSTM(1, 1),
    "_forward_cls": _node,
    "_forward_hooks": nn.Module,
    "_forward_pre_hooks": nn.Module,
    "_init_flat_weights": lambda: nn.LSTM(1, 1),
    "_is_compiling_flag": lambda: torch.compiler,
    "_is_exporting_flag": lambda: torch.compiler,
    "_load_state_dict_post_hooks": nn.Module,
    "_model_mapping": lambda: pytest.importorskip("transformers").AutoModelForCausalLM,
    "_no_grad_trunc_normal_": lambda: nn.init,
    "_opname": lambda: torch.ops.aten.add.Tensor,
    "_optimizer_step_post_hooks": lambda: torch.optim.SGD([torch.ones(1)]),
    "_optimizer_step_pre_hooks": lambda: torch.optim.SGD([torch.ones(1)]),
    "_parameters": nn.Module,
    "_schema": lambda: torch.ops.aten.add.Tensor,
    "_state_dict_pre_hooks": nn.Module,
    "_timeout": _gloo_options,
    "_version": lambda: torch.ones(1),
}
"""Private attributes of torch's objects that are read, and an object that must have them."""

OF_OTHERS = {
    *("_asdict", "_replace"),  # of named tuples
    *("_current_frames", "_exit", "_getframe", "_lru_cache_wrapper"),  # of Python
    *("_get_num_items_in_batch", "_n_gpu"),  # of transformers
    *("_is_vision_dataset", "_tokenizer"),  # of TRL
    "_private",  # of Ray
}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@cache
def _trees() -> dict[str, ast.Module]:
    files = sorted((ROOT / "varuna").rglob("*.py"))
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in files}


def _own_names() -> set[str]:
    """Private names that the product itself defines."""
    found = set()
    for node in (node for tree in _trees().values() for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
    return found


def _taken_from_torch(tree: ast.Module) -> dict[str, str]:
    """Names of a file that are modules or names of torch, and what they are."""
    names = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                for each in aliases:
                    if each.name.partition(".")[0] == "torch":
                        names[each.asname or "torch"] = each.name if each.asname else "torch"
            case ast.ImportFrom(module=str(module), names=aliases) if module.partition(".")[0] == "torch":
                names.update({each.asname or each.name: f"{module}.{each.name}" for each in aliases})
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Name(id=of))
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Name(id=of))
            ) if of in names:
                names[name] = names[of]
    return names


@cache
def _uses() -> tuple[tuple[str, str, bool], ...]:
    """Places, the names that they use, and whether it is a whole name of torch or an attribute of something."""
    return tuple(_each_use())


def _each_use() -> Iterator[tuple[str, str, bool]]:
    for file, tree in _trees().items():
        taken = _taken_from_torch(tree)
        yield from ((file, name, True) for name in taken.values() if any(map(_is_private, name.split("."))))
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute):
                continue
            place, attributes, inner = f"{file}:{node.lineno}", [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                attributes.insert(0, inner.attr)
                inner = inner.value
            root = taken.get(inner.id) if isinstance(inner, ast.Name) else None
            if root is not None and any(map(_is_private, attributes)):
                yield place, ".".join((root, *attributes)), True
            elif root is None and _is_private(node.attr):
                yield place, node.attr, False


def _resolve(name: str) -> Any:
    """Return what a dotted name is; modules are imported.

    Raises:
        AttributeError: there is no such thing.
    """
    parts = name.split(".")
    found: Any = import_module(parts[0])
    for number, part in enumerate(parts[1:], 2):
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = import_module(".".join(parts[:number]))
            except ImportError:
                raise AttributeError(name) from None
    return found


def _without(names: dict[str, list[str]], has: Callable[[str], bool]) -> list[str]:
    return [f"torch {torch.__version__} has no {name}: {', '.join(at)}" for name, at in names.items() if not has(name)]


def _has(name: str) -> bool:
    try:
        _resolve(name)
    except AttributeError:
        return False
    return True


def test_torch_has_every_private_name_that_is_used() -> None:
    names = defaultdict[str, list[str]](list)
    for place, name, is_whole in _uses():
        if is_whole:
            names[name].append(place)
    assert len(names) > 20
    assert _without(names, _has) == []


def test_every_private_attribute_is_known_to_be_ours_or_is_looked_for_here() -> None:
    known = _own_names() | ATTRIBUTES.keys() | OF_OTHERS
    assert [(place, name) for place, name, is_whole in _uses() if not is_whole and name not in known] == []


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_object_of_torch_has_the_private_attribute(name: str) -> None:
    assert hasattr(ATTRIBUTES[name](), name), f"torch {torch.__version__} has no {name}"


@pytest.mark.parametrize("name", REPLACED)
def test_what_is_replaced_takes_what_it_took(name: str) -> None:
    expected = REPLACED[name].split()
    found = _resolve(name)
    if expected:
        assert list(inspect.signature(found).parameters)[: len(expected)] == expected, f"torch {torch.__version__}"


def test_export_still_says_why_it_asks_for_a_value() -> None:
    asks = inspect.getsource(import_module("torch.fx.experimental.symbolic_shapes"))
    assert "propagate_real_tensors" in asks


def test_autograd_functions_are_applied_by_a_class_method_that_can_be_replaced() -> None:
    kept = torch.autograd.Function.__dict__["apply"]
    assert kept.__get__(None, _Doubled)(torch.ones(1)).item() == 2


def test_the_sizes_and_numbers_of_an_example_can_be_looked_up() -> None:
    environment = ShapeEnv()
    assert dict(known_sizes(environment)) == {}
    assert dict(followed_numbers(environment)) == {}
