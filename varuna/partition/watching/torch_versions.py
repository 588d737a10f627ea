"""All that differs from one version of torch to another, brought to one form: that of 2.13.

A name of torch that is used or replaced here or elsewhere, and is private, is listed with what it must look like in
``tests/unit/test_names_of_torch.py``, which says of a new version of torch which one it has broken.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import ShapeEnv

_CAST: Any = getattr(symbolic_shapes, "cast_symbool_to_symint_guardless", None)
"""Function by which 2.12 and earlier make a truth 1 or 0, where later ones use ``torch.sym_ite(truth, 1, 0)``."""
_BEFORE_2_11 = not hasattr(ShapeEnv, "set_real_tensor_prop_unbacked_vals")
"""Three names were others then."""


def normalised(program: ExportedProgram) -> ExportedProgram:
    """The program with the operations that 2.13 writes, in regions too."""
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                if node.op == "call_function" and node.target is _CAST:
                    node.target, node.args = torch.sym_ite, (node.args[0], 1, 0)
    return program


def known_sizes(environment: Any) -> Mapping[Any, Any]:
    """Return sizes as they are in the example, by symbol."""
    return environment.var_to_val if _BEFORE_2_11 else environment.backed_var_to_val  # type: ignore[no-any-return]


def followed_numbers(environment: Any) -> Mapping[Any, Any]:
    """Return numbers taken out of tensors as they are in the example, by symbol."""
    name = "unbacked_var_to_val" if _BEFORE_2_11 else "real_tensor_prop_unbacked_vals"
    return getattr(environment, name)  # type: ignore[no-any-return]


def follow_number(environment: Any, symbol: Any, value: Any) -> None:
    """Tell export what a number out of a tensor is in the example."""
    name = "set_unbacked_var_to_val" if _BEFORE_2_11 else "set_real_tensor_prop_unbacked_vals"
    getattr(environment, name)(symbol, value)
