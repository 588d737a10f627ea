"""torch.export, helped over what it cannot follow by itself.

Models ask whether they are being compiled, and then take other paths. Export tries that path first, since it avoids
branches on data; then the path of plain eager. In both it knows what follows from the code alone (``real_values``).
Then it tries both with the first samples at hand, and goes as they do where ``forward`` branches on them; last with
first parameters, too. Such branches are kept, and every batch must go the same way (``guards``).
Where no way leads to a graph, submodules that stand in the way become operations that run them as written (``opaque``).
"""

import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._dynamo.exc import UserError, UserErrorType
from torch.export import _trace as _torch_trace
from torch.fx import proxy as _torch_proxy
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.fx.proxy import TracerBase
from torch.overrides import TorchFunctionMode

from varuna.core.errors import ModelError
from varuna.data.sizes import OpenSizes
from varuna.partition.capture.construction import idle_moves
from varuna.partition.capture.loops import MaskLoopUnroller
from varuna.partition.capture.open_sizes import general_lengths, hashed_sizes
from varuna.partition.capture.parameter_limits import Limits
from varuna.partition.capture.real_values import Given, RealValues, ValueSource
from varuna.partition.opaque.autograd_functions import kept_functions
from varuna.partition.opaque.calls import WritesError
from varuna.partition.opaque.ctc_loss import Alignments
from varuna.partition.opaque.each_sample import LOOPS, LoopsOverSamplesError, counts_of, listed
from varuna.partition.opaque.eager_modules import AgainError, Pieces, check_followed
from varuna.partition.opaque.own_draws import OwnDrawsError
from varuna.partition.watching.explaining import ASKS_FOR_DATA, ForwardFindings, NotExportedError
from varuna.partition.watching.noticing import Noticing
from varuna.partition.watching.own_code import OWN
from varuna.partition.watching.torch_versions import normalised
from varuna.partition.watching.user_caches import without_fakes

_UNBIND = (torch.unbind, Tensor.unbind)
_SPLIT = (torch.split, Tensor.split)


class ListedSamples(TorchFunctionMode):
    """Keeps the number of samples open where a captured model makes a list of them."""

    def __init__(self, value_of: Callable[[Tensor], Tensor | None]) -> None:
        """Prepare.

        Args:
            value_of: a tensor's value for the first samples; None if it is unknown.
        """
        super().__init__()
        self._value_of = value_of
        self.used = False

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one call of torch."""
        if func is Tensor.__len__ and _is_open(args[0]):
            self.used = True
            raise TypeError(LOOPS)  # ``list`` asks how long it will be, and does without an answer
        if func in _UNBIND and not kwargs and args[1:] in ((), (0,)) and _is_open(args[0]):
            self.used = True
            return listed(args[0])
        if (
            func in _SPLIT
            and (counts := counts_of(args[1])) is not None
            and {0} >= {*args[2:], *(kwargs or {}).values()}
        ):
            return self._split(args[0], counts)
        return func(*args, **(kwargs or {}))

    def _split(self, whole: Tensor, counts: Tensor) -> Any:
        """A list with the rows that belong to each sample, if all samples have as many as the first ones have.

        Raises:
            LoopsOverSamplesError: they do not.
        """
        known = self._value_of(counts)
        each = int(known[0]) if known is not None and len(known) else 0
        if known is None or each < 1 or not bool((counts == each).all()):  # a branch, which every batch must take
            raise LoopsOverSamplesError(LOOPS)
        samples = counts.shape[0]
        torch._check(whole.shape[0] == samples * each)  # type: ignore[no-untyped-call]
        return listed(whole.reshape(samples, each, *whole.shape[1:]))


def _is_open(value: object) -> bool:
    """Return whether the number of elements along the first dimension is unknown."""
    size = value.shape[0] if isinstance(value, Tensor) and value.dim() else 0
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


_evaluate = ShapeEnv.evaluate_expr


@contextmanager
def general_sizes() -> Iterator[None]:
    """Take each size that export cannot know for neither 0 nor 1 in branches.

    ``if n == 0: continue`` then always runs the general path, which does the same with nothing to do. Other
    conditions on data stay refused.
    """

    def evaluate(self: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
        try:
            return _evaluate(self, *args, **kwargs)
        except GuardOnDataDependentSymNode:
            expression, hint, node = (*args, *kwargs.values())[:3]
            return _evaluate(self, expression, hint, node, size_oblivious=True)

    ShapeEnv.evaluate_expr = evaluate  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShapeEnv.evaluate_expr = _evaluate  # type: ignore[method-assign]


class Comparing(TorchFunctionMode):
    """``torch.equal`` and ``torch.allclose`` as the tensor operations that they are: their answer can be followed."""

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one call of torch."""
        given = dict(kwargs or {})
        if func in (torch.equal, Tensor.equal) and len(args) == 2 and args[0].dtype is args[1].dtype:
            one, other = args
            return one.shape == other.shape and bool((one == other).all())
        if func in (torch.allclose, Tensor.allclose):
            return bool(torch.isclose(*args, **given).all())
        return func(*args, **given)


_trace: Any = _torch_trace
_proxy: Any = _torch_proxy


class ExportedGraph(NamedTuple):
    """An exported program, and what export relied on."""

    program: torch.export.ExportedProgram
    visits_all: bool
    """loops over the places where a mask is true run for every place"""
    limits: int
    """writes that limit a parameter, each an assertion of the graph"""
    noticed: ForwardFindings
    eager: Mapping[str, str]
    """path of a module that runs as written, as one operation -> why"""


def export(
    module: nn.Module,
    fake: Mapping[str, Tensor],
    given: Callable[[ValueSource], Given | None],
    accept: Callable[[torch.export.ExportedProgram, RealValues, ForwardFindings], bool],
    pieces: Pieces,
    sizes: OpenSizes | None = None,
) -> ExportedGraph:
    """Export for any batch size, or for any open sizes.

    Args:
        module: called with one dict of tensors.
        fake: a batch without data.
        given: values of what the module is given, up to a grade; None if there are none of that grade.
        accept: looks at what a program asserts; whether the branches of one that followed values can be checked.
        pieces: of the model; those found already run as written in any case.
        sizes: of the batch, that its samples tell. Modules cannot run as written then.

    Raises:
        WritesError: what would have to run as written keeps something between calls.
        NotExportedError: no way leads to a graph; its cause is the error of the last way that raised one.
        Exception: of what stands in the way of all else.
    """
    failure: Exception | None = None
    if not pieces.found:
        try:
            return _some_way(module, fake, given, accept, pieces, sizes)
        except OwnDrawsError:
            raise
        except Exception as error:
            failure = error
            if sizes is not None:
                raise
    values = RealValues(ValueSource.SAMPLES, given(ValueSource.SAMPLES) or {})
    helped = (values.watch(), MaskLoopUnroller(), Alignments(), Limits(), Comparing(), idle_moves())
    try:
        with _as_eager(), _all(helped), _silent():
            found = pieces.find(lambda: _with_lists(module, fake, values.real), values.real)
        if found or failure is None:
            return _some_way(module, fake, given, accept, pieces, sizes)
    except (WritesError, OwnDrawsError):
        raise
    except Exception:
        if failure is None or pieces.found:  # what stands in the way of all else
            raise
    raise failure


def _some_way(
    module: nn.Module,
    fake: Mapping[str, Tensor],
    given: Callable[[ValueSource], Given | None],
    accept: Callable[[torch.export.ExportedProgram, RealValues, ForwardFindings], bool],
    pieces: Pieces,
    sizes: OpenSizes | None,
) -> ExportedGraph:
    last: Exception | None = None
    noticed = ForwardFindings()
    asks_for_data = False
    # the least first: what was followed by values must be checked in every batch, what the code says need not
    for most in ValueSource:
        known = given(most) if most is not ValueSource.PARAMETERS or asks_for_data else None
        if known is None:
            continue
        asks_for_data = False
        for compiling in (asked := _Asked(), _as_eager()):
            if compiling is not asked and not asked.at_all:  # eager would take the same path
                continue
            way = _Way(RealValues(most, known), MaskLoopUnroller(), Limits(), Noticing())
            try:
                with compiling, pieces.in_place():
                    program = way.attempt(module, fake, sizes)
            except ModelError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever the model's own code raises
                last, noticed = error, way.noticing.noticed
                asks_for_data |= type(error).__module__.startswith("torch") and not _is_for_some_sizes(error)
                continue
            if accept(program, way.values, way.noticing.noticed) or most is ValueSource.CODE:
                visited, count = way.places.visited, way.limits.count
                return ExportedGraph(program, visited, count, way.noticing.noticed, dict(pieces.found))
            asks_for_data = True
    raise NotExportedError(noticed) from last


class _Way(NamedTuple):
    values: RealValues
    places: MaskLoopUnroller
    limits: Limits
    noticing: Noticing

    def attempt(
        self, module: nn.Module, fake: Mapping[str, Tensor], sizes: OpenSizes | None
    ) -> torch.export.ExportedProgram:
        """Export, with lists of the samples where they are put together again."""
        listed = ListedSamples(self.values.real)
        try:
            return self._attempt(module, fake, listed, sizes)
        except Exception as error:
            if not listed.used or isinstance(error, ASKS_FOR_DATA):  # which it would, too, without what stands for all
                raise
            self.limits.count = 0
            return self._attempt(module, fake, nullcontext(), sizes)  # what stands for all was not enough

    def _attempt(
        self,
        module: nn.Module,
        fake: Mapping[str, Tensor],
        listed: AbstractContextManager[Any],
        sizes: OpenSizes | None,
    ) -> torch.export.ExportedProgram:
        modes = (self.noticing.watch(), self.places, Alignments(), self.limits, listed, Comparing())
        with _all((self.values.watch(), *modes, idle_moves())), _silent():
            program = _attempt(module, fake, sizes)
            self.values.fill(program.constants)
            check_followed(program)
            return program


def _with_lists(
    module: nn.Module, fake: Mapping[str, Tensor], value_of: Callable[[Tensor], Tensor | None]
) -> torch.export.ExportedProgram:
    """Export, with lists of the samples that modules which run as written may be given."""
    listed = ListedSamples(value_of)
    try:
        with listed:
            return _attempt(module, fake)
    except (AgainError, WritesError):
        raise
    except Exception:
        if not listed.used:
            raise
        return _attempt(module, fake)


def _attempt(
    module: nn.Module, fake: Mapping[str, Tensor], sizes: OpenSizes | None = None
) -> torch.export.ExportedProgram:
    def attempt(*names: Any) -> torch.export.ExportedProgram:
        dynamic = ({key: dict(enumerate(names)) for key in fake} if sizes is None else _open_dims(fake, sizes, names),)
        helped = kept_functions(), general_sizes(), general_lengths(), hashed_sizes(), _lines_of_functions()
        with without_fakes(), _all(helped):
            return normalised(torch.export.export(module, (dict(fake),), strict=False, dynamic_shapes=dynamic))

    count = 1 if sizes is None else len(sizes.places)
    try:
        return attempt(*(torch.export.Dim(f"batch{number or ''}", min=1) for number in range(count)))
    except UserError as error:
        if not _is_for_some_sizes(error):
            raise
        # true for any batch size, but more than export can prove (min(32, 512 * batch) == 32): let it not ask
        return attempt(*[torch.export.Dim.DYNAMIC] * count)


def _open_dims(fake: Mapping[str, Tensor], sizes: OpenSizes, names: Sequence[Any]) -> dict[str, dict[int, Any]]:
    found: dict[str, dict[int, Any]] = {key: {} for key in fake}
    for name, places in zip(names, sizes.places, strict=True):
        for key, dim in places:
            found[key][dim] = name
    return found


def _is_for_some_sizes(error: Exception) -> bool:
    """Return whether the graph holds for some numbers of samples only, which no values would change."""
    return isinstance(error, UserError) and error.error_type is UserErrorType.CONSTRAINT_VIOLATION


@contextmanager
def _all(contexts: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


@contextmanager
def _silent() -> Iterator[None]:
    """Silence export, which prints whole graphs of what it cannot follow; the error itself names the line."""
    loggers = [
        logging.getLogger(f"torch.{name}") for name in ("fx.experimental.symbolic_shapes", "_subclasses.fake_tensor")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    _trace.print = lambda *_, **__: None  # a name of that module only, in front of the built-in one
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"(?s)The tensor attributes? .*_flat_weights")  # every LSTM's own list
            warnings.filterwarnings(
                "ignore", r"(?s)The tensor attributes? .* during export"
            )  # the check sees what matters
            warnings.filterwarnings(
                "ignore", r"The \.grad attribute of a Tensor that is not a leaf"
            )  # export's own look
            yield
    finally:
        del _trace.print
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class _Lines:
    """Stands for torch's record of a stack, which looks up every line, down to the program's first."""

    @staticmethod
    def extract() -> "_Lines":
        return _Lines()

    def summary(self) -> traceback.StackSummary:
        """List the frames from the outermost ``forward`` on, without torch's and Varuna's own; the innermost last."""
        frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))][::-1]
        begin = next((i for i, frame in enumerate(frames) if frame.f_code.co_name == "forward"), len(frames))
        codes = [(frame.f_code, frame.f_lineno) for frame in frames[begin:]]
        return traceback.StackSummary.from_list(
            [
                traceback.FrameSummary(code.co_filename, line, code.co_name)
                for code, line in codes
                if code.co_name == "forward" or not code.co_filename.startswith(OWN)
            ]
        )


@contextmanager
def _lines_of_functions() -> Iterator[None]:
    """Let operations remember lines of all the user's functions, such as ``loss=``; export keeps forward() only."""
    recorder, chosen = _proxy.CapturedTraceback, TracerBase._filter_traceback_frames
    _proxy.CapturedTraceback = _Lines
    TracerBase._filter_traceback_frames = lambda _, stack: stack  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        _proxy.CapturedTraceback = recorder
        TracerBase._filter_traceback_frames = chosen  # type: ignore[method-assign]


@contextmanager
def _as_eager() -> Iterator[None]:
    """Tell models that ask that nothing is being compiled."""
    asked = torch.compiler.is_compiling
    torch.compiler.is_compiling = lambda: False
    try:
        yield
    finally:
        torch.compiler.is_compiling = asked


class _Asked:
    """Notes whether the model's code asks if it is being compiled."""

    def __init__(self) -> None:
        self.at_all = False

    def __enter__(self) -> None:
        self._answer = torch.compiler.is_compiling
        torch.compiler.is_compiling = self._heard

    def __exit__(self, *_: object) -> None:
        torch.compiler.is_compiling = self._answer

    def _heard(self) -> bool:
        self.at_all = True
        return self._answer()
