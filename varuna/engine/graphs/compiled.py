"""Sections compiled by a backend of ``torch.compile``: once per process, whatever stage or plan they move to.

The backend is called directly with a section's graph, which is captured already: no dynamo, no guards. One compiled
section serves F, R and B alike. Kernels of an inference graph would be fused differently and give R other bits than F
had, so F runs the forward that B needs and drops what it saved.
"""

import importlib.util
import math
import operator
import os
import shutil
import sys
import sysconfig
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import Argument, map_arg

from varuna.core.errors import ModelError, UsageError
from varuna.engine.graphs.run_once import Run, Seeded, kind_of, outcome
from varuna.partition.cut.split import SectionGraph
from varuna.partition.opaque.calls import holds_opaque

_ARITHMETIC = (operator.add, operator.mul)


@dataclass(frozen=True)
class Specialised:
    """Takes tensors only, each once: what was a number of examples is a constant."""

    module: GraphModule
    positions: tuple[int, ...]
    """of its arguments among those of the section"""
    is_whole: bool
    """its code says everything; False: it refers to sub-graphs"""

    def pick(self, arguments: Sequence[Any]) -> list[Tensor]:
        """Pick its arguments from the section's."""
        return [arguments[position] for position in self.positions]


def specialise(section: GraphModule, arguments: Sequence[Any]) -> Specialised:
    """Specialise ``section`` for ``arguments``: their integers, and which of its tensors are the same one."""
    graph = Graph()
    known: dict[Node, Argument] = {}
    seen: dict[int, Node] = {}
    positions: list[int] = []
    given = iter(enumerate(arguments))
    is_whole = True
    for number, node in enumerate(section.graph.nodes):
        if node.op == "placeholder":
            position, value = next(given)
            if not isinstance(value, Tensor):
                known[node] = value
                continue
            # A compiler takes two arguments for two tensors, so one tensor is one argument.
            if id(value) not in seen:
                seen[id(value)] = graph.placeholder(f"a{len(positions)}")
                positions.append(position)
            known[node] = seen[id(value)]
            continue
        args = map_arg(node.args, lambda source: known[source])
        if node.target in _ARITHMETIC and all(isinstance(value, int) for value in args):
            known[node] = node.target(*args)
        else:
            is_whole &= node.op != "get_attr"
            kwargs = map_arg(node.kwargs, lambda source: known[source])
            known[node] = graph.create_node(node.op, node.target, args, kwargs, name=f"v{number}")
    return Specialised(GraphModule(section, graph, class_name="Compiled"), tuple(positions), is_whole)


Backend = Callable[[GraphModule, list[Tensor]], Callable[..., Sequence[Tensor]]]

_one_at_a_time = threading.RLock()  # compilers keep global state; ranks may be threads of one process
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 5e-2
"""Of the norm of what is expected. Fused kernels round otherwise; other draws or a wrong kernel are far off."""


@dataclass
class Compiler:
    """Compiled sections of one job, kept over generations. Sections of equal code and shapes share one."""

    backend: str | Backend
    """a name that ``torch.compile`` knows, or a backend itself"""
    is_compiling: bool = False
    """whether the backend is running, which may take long"""
    _compiled: dict[Hashable, Run] = field(default_factory=dict)

    def of(self, section: SectionGraph, arguments: Sequence[Any], seeded: Seeded) -> Run:
        """Compile the section for arguments of this kind; the result takes the section's own arguments.

        One in which a module runs eagerly stays as it is.
        The first time takes as long as the backend does, and two runs more: what it computes is compared.

        Args:
            section: to compile.
            arguments: as ``section.module`` takes them, tensors requiring gradients as they will in B.
            seeded: in force while the section runs.

        Raises:
            ModelError: the backend failed, or the section computes something else when compiled.
        """
        if holds_opaque(section.module.graph):
            plain: Run = section.module.forward  # what capture cannot follow, a compiler cannot either
            return plain
        special = specialise(section.module, arguments)
        given = special.pick(arguments)
        identity = special.module.code if special.is_whole else section.module
        key = (identity, *(kind_of(argument) for argument in given))
        with _one_at_a_time:
            if key not in self._compiled:
                self.is_compiling = True
                try:
                    run = self._compile(section, special, given)
                    _check(section, run, special.pick, arguments, seeded)
                finally:
                    self.is_compiling = False
                self._compiled[key] = run
            compiled = self._compiled[key]
        return lambda *arguments: compiled(*special.pick(arguments))

    def _compile(self, section: SectionGraph, special: Specialised, given: list[Tensor]) -> Run:
        try:
            with torch.enable_grad(), _drawing_as_eager():
                run = _backend(self.backend)(special.module, given)
        except Exception as error:  # whatever a compiler raises
            raise ModelError(
                f"section {section.index} ({section.label}) cannot be compiled by {self.backend}: "
                f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0][:300]}. Leave "
                "compile= out, or use another backend."
            ) from error
        return lambda *arguments: tuple(run(*arguments))


def compiler_of(choice: bool | str, device: torch.device) -> Compiler | None:
    """Return the compiler that ``Trainer(compile=choice)`` asks for, or None for no compilation.

    Raises:
        UsageError: torch has no such backend, or inductor lacks what it needs on this machine.
    """
    if choice is False:
        return None
    name = "inductor" if choice is True else choice
    known = torch.compiler.list_backends(exclude_tags=())
    if name not in known:
        raise UsageError(f"compile={choice!r}: torch has no such backend. Pass True or one of {', '.join(known)}.")
    if name == "inductor" and (missing := _missing(device)):
        raise UsageError(
            f"compile={choice!r} needs {missing} on every worker, but this one has none. Install it, "
            "or leave compile= out."
        )
    return Compiler(name)


def _missing(device: torch.device) -> str | None:
    """Return what inductor needs and does not find; None if nothing is missing."""
    if device.type == "cuda":
        return None if importlib.util.find_spec("triton") else "the package triton"
    cxx = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(cxx) is None:
        return f"a C++ compiler ({cxx}; install it, or name one in CXX)"
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return None if headers.is_file() else f"Python's headers ({headers}; install python3-dev or the like)"


def _backend(name: str | Backend) -> Backend:
    if not isinstance(name, str):
        return name
    from torch._dynamo import lookup_backend

    found: Backend = lookup_backend(name)
    return found


def _drawing_as_eager() -> AbstractContextManager[object]:
    """Let inductor draw as eager code does in this block, and not from a generator of its own."""
    import torch._inductor.config as inductor

    patched: AbstractContextManager[object] = inductor.patch(fallback_random=True)
    return patched


def _check(
    section: SectionGraph, run: Run, pick: Callable[..., list[Tensor]], arguments: Sequence[Any], seeded: Seeded
) -> None:
    """Refuse a compiled section whose results or gradients are not those of the captured one."""
    expected = outcome(section.module.forward, arguments, seeded)
    found = outcome(lambda *given: run(*pick(given)), arguments, seeded)
    for what in ("results", "gradients"):
        one, other = getattr(expected, what), getattr(found, what)
        share = _difference(one, other)
        dtypes = {value.dtype for value in one if value is not None}
        limit = _HALF_TOLERANCE if dtypes & {torch.float16, torch.bfloat16} else _TOLERANCE
        if share > limit:
            raise ModelError(
                f"section {section.index} ({section.label}) gives different results when compiled: its {what} "
                f"differ by {share:.1e} of their norm, more than {limit:.0e}. Leave compile= out, or use another "
                "backend."
            )


def _difference(expected: Sequence[Tensor | None], found: Sequence[Tensor | None]) -> float:
    """Return the norm of the difference over that of what is expected: of all together, since some may be noise.

    Compilers give zeros where autograd gives nothing.
    """
    squares = norm = 0.0
    for one, other in zip(expected, found, strict=True):
        a, b = (torch.zeros((), dtype=torch.float64) if x is None else x.to("cpu", torch.float64) for x in (one, other))
        squares += float((a - b).square().sum())
        norm += float(a.square().sum())
    if not squares or not math.isfinite(norm):
        return 0.0
    return math.sqrt(squares / norm) if norm else math.inf
