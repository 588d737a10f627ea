"""A watch on the script's own module while copies of it train: whatever touches its tensors is told so at once.

Its parameters and buffers become instances of a class whose ``__torch_function__`` hears of every operation on them,
also of ``.data`` and ``.grad``. That costs nothing in a step. Attributes, modes, and a few values of each tensor are
compared instead: plain Python values cannot tell, nor can memory that has another name.
"""

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from varuna.job.handed_over.code_reads import MISSING, is_library
from varuna.job.handed_over.marks import SomeValues, mark_of
from varuna.partition.watching.own_code import VARUNA

_SAID = """shape dtype device ndim layout requires_grad is_leaf is_sparse is_quantized is_meta is_cuda is_cpu
    is_mps is_xla is_nested is_vulkan is_mkldnn is_ipu is_xpu is_maia itemsize nbytes names grad_fn retains_grad
    _version _is_view _backward_hooks size dim numel nelement element_size stride is_floating_point is_complex
    is_contiguous storage_offset get_device data_ptr untyped_storage __len__ is_pinned is_shared type"""
_METADATA = frozenset(_SAID.split())
"""Names of a tensor's attributes and methods that do not read its values."""
_IN_PLACE = frozenset(
    f"__i{name}__" for name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and")
)
_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Changed(NamedTuple):
    """Something that differs from before."""

    name: str
    before: Any
    """MISSING: it is not known, or not told in few words"""
    now: Any
    last: str
    """the name that the statement that changed it has for it"""
    kind: str = ""
    """as the watch says it of what is touched"""


class ModuleWatch:
    """Watches the tensors, modes and attributes of a module."""

    def __init__(
        self, module: nn.Module, refuse: Callable[[str, str], None], reads: Callable[[], Collection[str]]
    ) -> None:
        """Describe the watch; it begins with ``begin``.

        Args:
            module: the script's.
            refuse: raises; told the tensor's name and what is done to it.
            reads: names of attributes that the code of the module reads, asked for if any has changed.
        """
        self._module, self._refuse, self._reads = module, refuse, reads
        self._watched: list[tuple[Tensor, type]] = []
        self._names: dict[int, str] = {}
        self._thread: int | None = None
        """on which the script has control"""
        self._engine: int | None = None
        """on which Varuna works for the script"""
        self.may_read = False
        """the module has the newest values here, so only writing is refused"""
        self._before: list[tuple[nn.Module, str, dict[str, Any], tuple[dict[str, Any], ...]]] = []
        self._tensors: list[tuple[Tensor, int, bool]] = []
        self._versions: list[int] = []
        self._values = SomeValues(())
        self._hooks: list[dict[Any, Any]] = []
        self._hook_counts: list[int] = []
        self._has_hooks = False
        self._live: list[dict[str, Any]] = []
        self._copies: list[dict[str, Any]] = []
        self._trained = module.training
        """else the whole module is put into training mode, whatever the modes of its parts are"""
        self._attributes: dict[str, Any] = {}

    def begin(self) -> None:
        """Watch from now on."""
        named = [*self._module.named_parameters(), *self._module.named_buffers()]
        kinds = {nn.Parameter: self._kind(nn.Parameter), Tensor: self._kind(Tensor)}
        for name, value in named:
            self._names[id(value)] = name
            if type(value) in kinds:  # others have a class of their own, with which their layers compute
                self._watched.append((value, type(value)))
                value.__class__ = kinds[type(value)]
        self.remember()

    def end(self) -> None:
        """Watch no more."""
        while self._watched:
            value, kind = self._watched.pop()
            value.__class__ = kind
        self._before, self._tensors, self._versions, self._live, self._copies = [], [], [], [], []
        self._hooks, self._hook_counts = [], []

    @contextmanager
    def engine(self) -> Iterator[None]:
        """Let Varuna work in this block, though the script has called it; what changes is not the script's doing."""
        before, self._engine = self._engine, get_ident()
        is_changed = next(self.changes(), None) is not None  # before the block, and is still to be told
        try:
            yield
        finally:
            self._engine = before
            if self._tensors:
                (self.look_at_tensors if is_changed else self.remember)()

    @contextmanager
    def script(self) -> Iterator[None]:
        """Give the script control in this block, on this thread."""
        before, self._thread = self._thread, get_ident()
        try:
            yield
        finally:
            self._thread = before

    def remember(self) -> None:
        """Remember how everything is now."""
        self.look_at_tensors()
        self._trained, reads = self._module.training, {"forward", *self._reads()}
        self._before = [
            (each, path, dict(vars(each)), tuple(dict(vars(each)[table]) for table in _TABLES))
            for path, each in self._module.named_modules()
        ]
        self._attributes = {
            f"{path}.{key}" if path else key: mark_of(value, reads)
            for each, path, own, _ in self._before
            for key, value in own.items()
            if _is_attribute(key) and key in reads
        }
        self._hooks = [vars(each)[table] for each, *_ in self._before for table in _HOOKS]
        self._hook_counts = list(map(len, self._hooks))
        self._has_hooks = any(self._hooks)
        self._live = [part for each, *_ in self._before for part in (vars(each), *(vars(each)[t] for t in _TABLES))]
        self._live += [vars(value) for value, _, _ in self._tensors]
        self._copies = [part for _, _, own, tables in self._before for part in (own, *tables)]
        self._copies += [dict(vars(value)) for value, _, _ in self._tensors]

    def look_at_tensors(self) -> None:
        """Remember how the tensors are now: Varuna has written to them."""
        with torch._C.DisableTorchFunctionSubclass():
            values = [*self._module.parameters(), *self._module.buffers()]
            before, self._tensors = self._tensors, [(each, _pointer(each), each.requires_grad) for each in values]
            self._versions = [each._version for each in values]
            if [pointer for _, pointer, _ in before] != [pointer for _, pointer, _ in self._tensors]:
                self._values = SomeValues(values)
            self._values.remember()

    def changes(self) -> Iterator[Changed]:
        """Return what differs from what was seen by ``remember``, of all that the module computes with."""
        with torch._C.DisableTorchFunctionSubclass():
            versions = [each._version for each, _, _ in self._tensors]
            written = {id(each) for each in self._values.written()}  # by NumPy, or what .data returned before the loop
            if versions != self._versions or written or not self._watched:  # else requires_grad and .data were heard
                for (value, pointer, trains), before, now in zip(self._tensors, self._versions, versions, strict=True):
                    is_same = now == before and value.requires_grad is trains and _pointer(value) == pointer
                    if not is_same or id(value) in written:
                        yield from self._of_tensor(value, trains)
        if not _same(self._live, self._copies):
            yield from self._of_modules()
            yield from self._of_marks()
        has_hooks = any(self._hooks) or self._has_hooks  # most modules have none
        if has_hooks and (counts := list(map(len, self._hooks))) != self._hook_counts:
            # each module has one table of each of _HOOKS, in a row
            number = next(at for at, count in enumerate(counts) if count != self._hook_counts[at])
            yield Changed(f"the hooks of {self._before[number // len(_HOOKS)][1] or 'the root'}", MISSING, MISSING, "")

    def _of_modules(self) -> Iterator[Changed]:
        for each, path, own, tables in self._before:
            now = vars(each)
            if not _same(now, own):
                yield from self._of_attributes(each, path, own)
            for table, before in zip(_TABLES, tables, strict=True):
                if not _same(now[table], before):
                    yield from _of_table(path, before, now[table])

    def _of_marks(self) -> Iterator[Changed]:
        """Attributes of parameters and buffers."""
        # remember() puts the tables of tensors behind those of modules
        at = len(self._copies) - len(self._tensors)
        for (value, _, _), now, before in zip(self._tensors, self._live[at:], self._copies[at:], strict=True):
            for key in {**before, **now}:
                if mark_of(before.get(key, MISSING)) != mark_of(now.get(key, MISSING)):
                    name = f"{key} of {self._names.get(id(value), 'a tensor')}"
                    yield Changed(name, before.get(key, "missing"), now.get(key, "missing"), key)

    def _of_tensor(self, value: Tensor, trains: bool) -> Iterator[Changed]:
        name = self._names.get(id(value), "a tensor")
        if value.requires_grad is not trains:
            yield Changed(f"{name}.requires_grad", trains, value.requires_grad, "requires_grad", "requires_grad")
        else:
            kind = "write" if trains else "write to frozen"
            yield Changed(name, MISSING, MISSING, name.rpartition(".")[2], kind)

    def _of_attributes(self, each: nn.Module, path: str, own: dict[str, Any]) -> Iterator[Changed]:
        reads, now = self._reads(), vars(each)
        for key in {**own, **now}:
            name = f"{path}.{key}" if path else key
            if key == "training":
                trained, trains = not self._trained or own[key], not self._module.training or now[key]
                if trained is not trains:
                    yield Changed(name, trained, trains, key)
            elif _is_attribute(key) and (key in reads or key == "forward"):
                before, after = (
                    self._attributes.get(name, "nothing"),
                    mark_of(now[key], reads) if key in now else "nothing",
                )
                if before != after:
                    yield Changed(name, own.get(key, "missing"), now.get(key, "missing"), key)

    def _kind(self, base: type) -> type:
        def heard(_: type, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            here = get_ident()
            if here != self._engine and (here == self._thread or _is_users_doing()):
                self._hear(function, args, kwargs or {})
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))

        return type(base.__name__, (base,), {"__torch_function__": classmethod(heard), "__module__": base.__module__})

    def _hear(self, function: Any, args: Any, kwargs: Any) -> None:
        method = getattr(function, "__name__", str(function))
        getter = getattr(getattr(function, "__self__", None), "__name__", "")
        sets = method == "__set__"
        what = getter if method in ("__get__", "__set__", "__delete__") else method
        if what == "is_leaf" and _is_called_by("add_param_group") and _is_called_by("__init__"):
            self._refuse(self._name(args, kwargs), "optimizer")
        if not sets and what in _METADATA:
            return
        if what == "copy_" and _is_called_by("_load_from_state_dict"):
            return  # it would tell an error once for each tensor; what it writes is seen after the turn
        if what in ("grad", "_grad"):
            if (sets and args[1] is None) or _is_called_by("zero_grad"):  # there are no gradients: it does nothing
                return
            self._refuse(self._name(args, kwargs), "gradient")
        if what in ("requires_grad", "requires_grad_"):
            wanted = bool(args[1]) if len(args) > 1 else bool(kwargs.get("requires_grad", True))
            with torch._C.DisableTorchFunctionSubclass():
                if args[0].requires_grad is wanted:
                    return
            self._refuse(self._name(args, kwargs), "requires_grad")
        # what .data returns can be written without a trace
        writes = sets or what in ("__setitem__", *_IN_PLACE) or "out" in kwargs
        writes = writes or (what == "data" and not _is_called_by("__deepcopy__"))
        writes = writes or (what.endswith("_") and not what.endswith("__"))
        if writes or not self.may_read:
            touched = {id(each) for each in _flat((args, kwargs))}
            trains = any(trains for each, _, trains in self._tensors if id(each) in touched)
            self._refuse(self._name(args, kwargs), ("write" if trains else "write to frozen") if writes else "read")

    def _name(self, args: Any, kwargs: Any) -> str:
        for each in _flat((args, kwargs)):
            if id(each) in self._names:
                return self._names[id(each)]
        return "a parameter"


def _is_users_doing() -> bool:
    """Return whether a function of the user's has touched the tensor, itself or by a library: not Varuna's own."""
    frame: Any = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(VARUNA):
        if not is_library(frame.f_code.co_filename) and not frame.f_code.co_filename.startswith("<"):
            return True
        frame = frame.f_back
    return False


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _flat(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _flat(each)


def _is_called_by(name: str) -> bool:
    """Return whether a function of this name has touched the tensor."""
    frame: Any = sys._getframe(2)
    for _ in range(8):
        if frame is None:
            return False
        if frame.f_code.co_name == name:
            return True
        frame = frame.f_back
    return False


def _is_attribute(key: str) -> bool:
    return key not in (*_TABLES, *_HOOKS, "training") and not (key.startswith("_") and "hooks" in key)


def _same(now: Any, before: Any) -> bool:
    try:
        return bool(now == before)  # identity first, so tensors are not compared
    except Exception:  # noqa: BLE001 - a tensor, or the user's own __eq__
        return False


def _of_table(path: str, before: dict[str, Any], now: dict[str, Any]) -> Iterator[Changed]:
    for key in {**before, **now}:
        if before.get(key) is not now.get(key):
            yield Changed(f"{path}.{key}" if path else key, before.get(key), now.get(key), key)


def _pointer(value: Tensor) -> int:
    return value.data_ptr() if value.layout is torch.strided and value.device.type != "meta" else id(value)
